// The factor of the loss in backward, which keeps small gradients within their format: fixed, or by what overflows.
import { CoatError } from './native.ts'
import type { DynamicLossScale, LossScaling } from './recipes.ts'

/** What a run goes on with: plain JSON. */
export interface LossScaleState {
  scale: number
  clean: number
}

// A loss of any size times more than that may be no f32, and one by it subnormal.
const most = 2 ** 100

const usual = { initial: 2 ** 16, growth: 2, interval: 2000, backoff: 0.5, minimum: [] } as const

/**
 * The loss scale of Micikevicius et al. (arXiv 1710.03740): a step with a gradient that is not finite is skipped, and the scale
 * falls; after so many steps in a row without one it grows. With a minimum that rises by steps it is that of Mellempudi et al.
 * (arXiv 1905.12334). A number stays.
 */
export class LossScale {
  readonly options: Required<DynamicLossScale>
  /** Of the next step. */
  value: number
  /** Steps in a row without an overflow. */
  #clean = 0

  constructor(scaling: Exclude<LossScaling, 'none'>) {
    const given = typeof scaling === 'number' ? { initial: scaling, growth: 1, backoff: 1 } : scaling
    if (given !== 'dynamic' && (typeof given !== 'object' || given === null || Array.isArray(given)))
      refuse('lossScale', given, "'none', 'dynamic', a number, or an object")
    this.options = { ...usual, ...(given === 'dynamic' ? {} : given) }
    const { initial, growth, interval, backoff, minimum } = this.options
    for (const name of Object.keys(this.options))
      if (!Object.hasOwn(usual, name)) refuse(name, 'unknown', `one of ${Object.keys(usual).join(', ')}`)
    const demand = (name: keyof DynamicLossScale, holds: boolean, rule: string) => {
      if (!holds) refuse(name, this.options[name], rule)
    }
    const fits = (value: unknown) => typeof value === 'number' && value >= 1 / most && value <= most
    demand('initial', fits(initial), 'from 2^-100 to 2^100')
    demand('growth', fits(growth) && growth >= 1, 'a number of at least 1')
    demand('interval', Number.isSafeInteger(interval) && interval >= 1, 'an integer of at least 1')
    demand('backoff', fits(backoff) && backoff <= 1, 'above 0 and at most 1')
    const rises = (step: number, i: number) => Number.isSafeInteger(step) && step > (minimum[i - 1]?.[0] ?? -1)
    demand(
      'minimum',
      Array.isArray(minimum) && minimum.every((row, i) => row?.length === 2 && rises(row[0], i) && fits(row[1])),
      'a list of [steps, least], by ascending steps',
    )
    this.value = Math.max(initial, this.#least(0))
  }

  /** Whether an overflow may end by a smaller scale, when so many steps are done: it is no sign of a run that goes wrong. */
  falls(steps: number): boolean {
    return this.options.backoff < 1 && this.value > Math.max(1, this.#least(steps))
  }

  /** After a step with or without an overflow; `steps` are done by now. */
  update(overflow: boolean, steps: number): void {
    const { growth, interval, backoff } = this.options
    this.#clean = overflow ? 0 : this.#clean + 1
    if (overflow) this.value *= backoff
    if (this.#clean === interval) {
      this.value *= growth
      this.#clean = 0
    }
    this.value = Math.min(most, Math.max(this.value, this.#least(steps)))
  }

  state(): LossScaleState {
    return { scale: this.value, clean: this.#clean }
  }
  restore({ scale, clean }: LossScaleState): void {
    this.value = scale
    this.#clean = clean
  }

  #least(steps: number): number {
    return this.options.minimum.findLast(([from]) => steps >= from)?.[1] ?? 1 / most
  }
}

function refuse(name: string, value: unknown, rule: string): never {
  const shown = typeof value === 'number' ? value : JSON.stringify(value)
  throw new CoatError(`lossScale: ${name} is ${shown} and must be ${rule}`, 'value', 'lossScale', name)
}
