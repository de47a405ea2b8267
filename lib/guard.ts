// What a step is measured by: whether its loss or its gradient norm jumps out of what the steps before it had.
import { CoatError } from './native.ts'

export interface SpikeOptions {
  /** Standard deviations above the mean from which a loss or a norm is a spike, and its step is skipped. */
  sigma: number
  /** Done steps that mean and deviation are taken over; before there are as many, none is a spike (default 64). */
  window?: number
}

/** Losses and norms of the last done steps: plain JSON, to save with a run. */
export interface SpikeState {
  losses: number[]
  norms: number[]
}

export class SpikeGuard {
  readonly options: Required<SpikeOptions>
  #state: SpikeState = { losses: [], norms: [] }

  constructor(options: SpikeOptions) {
    this.options = { window: 64, ...options }
    const { sigma, window } = this.options
    if (!(sigma > 0)) throw new CoatError(`spike: sigma is ${sigma} and must be above 0`, 'value', 'spike', 'sigma')
    if (!Number.isSafeInteger(window) || window < 2)
      throw new CoatError(`spike: window is ${window} and must be an integer of at least 2`, 'value', 'spike', 'window')
  }

  isSpike(loss: number, norm: number): boolean {
    const { losses, norms } = this.#state
    return this.#jumps(losses, loss) || this.#jumps(norms, norm)
  }

  /** Takes a step that was done into account. */
  add(loss: number, norm: number): void {
    const { losses, norms } = this.#state
    losses.push(loss)
    norms.push(norm)
    if (losses.length <= this.options.window) return
    losses.shift()
    norms.shift()
  }

  state(): SpikeState {
    return structuredClone(this.#state)
  }
  restore(state: SpikeState): void {
    this.#state = structuredClone(state)
  }

  #jumps(before: readonly number[], value: number): boolean {
    const { sigma, window } = this.options
    if (before.length < window) return false
    const mean = before.reduce((sum, x) => sum + x, 0) / window
    const variance = before.reduce((sum, x) => sum + (x - mean) ** 2, 0) / window
    return value - mean > sigma * Math.sqrt(variance)
  }
}
