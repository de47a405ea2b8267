// Learning-rate schedules: the factor by which step number `step` (from 0) of `steps` multiplies the rate.
import { CoatError } from './native.ts'

export type Schedule = (step: number, steps: number) => number

/** Linear warm-up over `warmup` steps, then a cosine from 1 down to `floor` (default 0.1) at the last step. */
export function cosine(options: { warmup?: number; floor?: number } = {}): Schedule {
  const { warmup = 0, floor = 0.1 } = options
  if (!Number.isSafeInteger(warmup) || warmup < 0)
    throw new CoatError(`cosine: warmup is ${warmup} and must be an integer of at least 0`, 'value', 'cosine', 'warmup')
  if (!(floor >= 0 && floor <= 1))
    throw new CoatError(`cosine: floor is ${floor} and must be between 0 and 1`, 'value', 'cosine', 'floor')
  return (step, steps) => {
    if (step < warmup) return (step + 1) / warmup
    const progress = Math.min(1, (step - warmup) / Math.max(1, steps - 1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + Math.cos(Math.PI * progress))
  }
}

/** Linear warm-up, then 1. */
export function constant(options: { warmup?: number } = {}): Schedule {
  const { warmup = 0 } = options
  if (!Number.isSafeInteger(warmup) || warmup < 0)
    throw new CoatError(
      `constant: warmup is ${warmup} and must be an integer of at least 0`,
      'value',
      'constant',
      'warmup',
    )
  return (step) => (step < warmup ? (step + 1) / warmup : 1)
}
