// Parameters of three bytes (Golovin and others, 2013): 16-bit numbers on a grid, rounded at random, and 8-bit counters that
// guess how often each was changed, from which its learning rate follows.
import { refusal } from './data.ts'
import { uniforms } from './generate.ts'
import type { Module, Param } from './modules.ts'

/** What a counter that went up with probability base^-count stands for: Morris's estimate of the events. */
export function morrisEstimate(count: number, base: number): number {
  return (base ** count - 1) / (base - 1)
}

export interface GridOptions {
  /** Learning rate of a coordinate that has not been changed yet: it falls with the root of 1 + the estimate. */
  lr: number
  /** Of the counters (default 1.1). */
  base?: number
  /** Binary digits behind the point (default 13: q2.13, from -4 to 4). */
  digits?: number
  seed?: number
}

interface Slot {
  param: Param
  /** Values times 2^digits. */
  codes: Int16Array
  counters: Uint8Array
}

/**
 * Gradient descent whose whole state is a code and a counter a coordinate, on the host: the parameters on the device are the values
 * of the codes, rounded to their formats. Call `step` with whole gradients and drop them afterwards.
 */
export class GridDescent {
  readonly options: Required<GridOptions>
  steps = 0
  readonly #slots: Slot[]

  private constructor(slots: Slot[], options: Required<GridOptions>) {
    this.#slots = slots
    this.options = options
  }

  /** Rounds the parameters of a module that are not frozen to the grid, at random. */
  static async of(module: Module, options: GridOptions): Promise<GridDescent> {
    const full = { base: 1.1, digits: 13, seed: 0, ...options }
    const { lr, base, digits, seed } = full
    const fail = refusal('GridDescent')
    if (!(lr > 0 && Number.isFinite(lr))) fail('lr', `lr is ${lr} and must be a finite number above 0`)
    if (!(base > 1 && Number.isFinite(base))) fail('base', `base is ${base} and must be a finite number above 1`)
    if (!Number.isSafeInteger(digits) || digits < 0 || digits > 15)
      fail('digits', `digits is ${digits} and must be an integer from 0 to 15`)
    if (!Number.isSafeInteger(seed) || seed < 0 || seed >= 2 ** 20)
      fail('seed', `seed is ${seed} and must be an integer from 0 to ${2 ** 20 - 1}`)
    const slots: Slot[] = []
    const grid = new GridDescent(slots, full)
    for (const param of module.parameters().filter(({ frozen }) => !frozen)) {
      const values = (await param.tensor.read()) as Float32Array
      const slot = { param, codes: new Int16Array(values.length), counters: new Uint8Array(values.length) }
      const chances = await grid.#chances(slots.length, values.length)
      for (let i = 0; i < values.length; i++) slot.codes[i] = grid.#code(values[i] as number, chances[i] as number)
      grid.#write(slot)
      slots.push(slot)
    }
    return grid
  }

  /** Bytes of codes and counters. */
  get bytes(): number {
    return this.#slots.reduce((sum, { codes, counters }) => sum + codes.byteLength + counters.byteLength, 0)
  }

  /** Copies of a parameter's codes and counters. */
  stateOf(param: Param): { codes: Int16Array; counters: Uint8Array } {
    const slot =
      this.#slots.find((one) => one.param === param) ??
      refusal('GridDescent')('param', `parameter '${param.name}' is not trained`)
    return { codes: slot.codes.slice(), counters: slot.counters.slice() }
  }

  /** One step down the gradients that the parameters hold; those that hold none stay. */
  async step(): Promise<void> {
    this.steps += 1
    const { lr, base, digits } = this.options
    for (const [place, slot] of this.#slots.entries()) {
      const { param, codes, counters } = slot
      if (!param.grad) continue
      const gradient = (await param.grad.read()) as Float32Array
      const chances = await this.#chances(place, 2 * codes.length)
      for (let i = 0; i < codes.length; i++) {
        const g = gradient[i] as number
        if (g === 0 || !Number.isFinite(g)) continue
        const count = counters[i] as number
        const rate = lr / Math.sqrt(1 + morrisEstimate(count, base))
        codes[i] = this.#code((codes[i] as number) / 2 ** digits - rate * g, chances[2 * i] as number)
        if (count < 255 && (chances[2 * i + 1] as number) < base ** -count) counters[i] = count + 1
      }
      this.#write(slot)
    }
  }

  /** The code below or above a value, above with the probability of what is left over; values beyond the grid saturate. */
  #code(value: number, chance: number): number {
    const scaled = Math.floor(value * 2 ** this.options.digits + chance)
    return Math.min(32767, Math.max(-32768, scaled))
  }

  #write({ param, codes }: Slot): void {
    param.write(Float32Array.from(codes, (code) => code / 2 ** this.options.digits))
  }

  /** Numbers in (0, 1) of a step and a parameter. */
  #chances(place: number, count: number): Promise<Float32Array> {
    return uniforms(this.options.seed * 2 ** 32 + this.steps * 2 ** 12 + place, count)
  }
}
