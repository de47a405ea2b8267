// Learning-rate schedules: the factor by which step number `step` (from 0) of `steps` multiplies the rate.
import { CoatError } from './native.ts'

export type Schedule = (step: number, steps: number) => number

export interface WarmUp {
  /** Steps that rise linearly to the peak, which the last of them has (default 0). */
  warmup?: number
}

export interface Decay extends WarmUp {
  /** The factor of the last step (default 0.1 for `cosine`, else 0). */
  floor?: number
}

export interface StableDecay extends Decay {
  /** Steps that fall, at the end (default: a tenth of all). */
  decay?: number
}

/** Warm-up, then a cosine from 1 down to `floor` at the last step. */
export function cosine(options: Decay = {}): Schedule {
  return warmed('cosine', { floor: 0.1, ...options }, (done, of) => 0.5 * (1 + Math.cos(Math.PI * (done / of))))
}

/** Warm-up, then a line from 1 down to `floor` at the last step. */
export function linear(options: Decay = {}): Schedule {
  return warmed('linear', options, (done, of) => 1 - done / of)
}

/** Warm-up, then 1, then over the last `decay` steps a line down to `floor` at the last step (warm-up, stable, decay). */
export function wsd(options: StableDecay = {}): Schedule {
  const { decay, ...rest } = options
  if (decay !== undefined) expect('wsd', 'decay', decay)
  return warmed('wsd', rest, (done, of, steps) => {
    const part = Math.min(of, decay ?? Math.ceil(steps / 10))
    return of - done < part ? (of - done) / part : 1
  })
}

/** Warm-up, then 1. */
export function constant(options: WarmUp = {}): Schedule {
  return warmed('constant', options, () => 1)
}

// `fall` goes from 1, where 0 steps after the warm-up are done, to 0, where all `of` them are: the last step has the floor.
function warmed(
  name: string,
  { warmup = 0, floor = 0, ...others }: Decay,
  fall: (done: number, of: number, steps: number) => number,
): Schedule {
  for (const key of Object.keys(others)) throw new CoatError(`${name}: option '${key}' is unknown`, 'option', name, key)
  expect(name, 'warmup', warmup)
  if (!(floor >= 0 && floor <= 1))
    throw new CoatError(`${name}: floor is ${floor} and must be between 0 and 1`, 'value', name, 'floor')
  return (step, steps) => {
    if (step < warmup) return (step + 1) / warmup
    const of = steps - 1 - warmup
    const height = of > 0 ? fall(Math.min(step - warmup, of), of, steps) : 1
    return height === 1 ? 1 : floor + (1 - floor) * height
  }
}

function expect(name: string, argument: string, value: number): void {
  if (!Number.isSafeInteger(value) || value < 0)
    throw new CoatError(
      `${name}: ${argument} is ${value} and must be an integer of at least 0`,
      'value',
      name,
      argument,
    )
}
