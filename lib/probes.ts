// Questions about numbers: what a narrow accumulator makes of a sum, and how sharply a loss answers to its logits.
import { CoatError } from './native.ts'

export interface Accumulator {
  /** Significant bits that it keeps: 14 in the tensor cores of Hopper for FP8 (arXiv 2412.19437), 10 in FP16 of (1, 6, 9). */
  bits: number
  /** What becomes of the bits below (default `nearest`, ties to even). */
  rounding?: 'nearest' | 'truncate'
  /** Terms after which its sum is added, in FP32, to those of the terms before (default: all go into one). */
  chunk?: number
}

/** The sum of `terms`, in their order, as an accumulator makes it that keeps few bits. */
export function accumulated(terms: ArrayLike<number>, { bits, rounding = 'nearest', chunk }: Accumulator): number {
  demand('accumulated', 'bits', bits, Number.isSafeInteger(bits) && bits >= 2 && bits <= 24, 'an integer from 2 to 24')
  demand(
    'accumulated',
    'chunk',
    chunk,
    chunk === undefined || (Number.isSafeInteger(chunk) && chunk >= 1),
    'at least 1',
  )
  let [total, sum] = [0, 0]
  for (let i = 0; i < terms.length; i++) {
    if (chunk !== undefined && i % chunk === 0) {
      total = Math.fround(total + sum)
      sum = 0
    }
    sum = rounded(sum + (terms[i] as number), bits, rounding)
  }
  return Math.fround(total + sum)
}

function rounded(x: number, bits: number, rounding: 'nearest' | 'truncate'): number {
  if (x === 0 || !Number.isFinite(x)) return x
  const unit = 2 ** (Math.floor(Math.log2(Math.abs(x))) + 1 - bits)
  const whole = Math.trunc(x / unit)
  const rest = Math.abs(x / unit - whole)
  const up = rounding === 'nearest' && (rest > 0.5 || (rest === 0.5 && whole % 2 !== 0))
  return (whole + (up ? Math.sign(x) : 0)) * unit
}

/**
 * Sharpness of the cross-entropy of logits [V] in percent (arXiv 2405.18710): by how much, relative to 1 + loss, it can grow when
 * each logit y moves by up to epsilon (|y| + 1). It rises before a loss diverges that low precision makes unstable.
 */
export function sharpness(logits: ArrayLike<number>, target: number, epsilon: number): number {
  const { length } = logits
  demand('sharpness', 'target', target, Number.isInteger(target) && target >= 0 && target < length, `below ${length}`)
  demand('sharpness', 'epsilon', epsilon, epsilon >= 0 && epsilon < Number.POSITIVE_INFINITY, 'a number of at least 0')
  // the loss falls with the logit of the target and grows with every other one
  const moved = Float64Array.from(logits, (y, i) => y + (i === target ? -epsilon : epsilon) * (Math.abs(y) + 1))
  const loss = crossEntropy(logits, target)
  return (100 * (crossEntropy(moved, target) - loss)) / (1 + loss)
}

function crossEntropy(logits: ArrayLike<number>, target: number): number {
  const values = Array.from(logits)
  const most = values.reduce((a, b) => Math.max(a, b), Number.NEGATIVE_INFINITY)
  const sum = values.reduce((total, y) => total + Math.exp(y - most), 0)
  return Math.log(sum) + most - (logits[target] as number)
}

function demand(op: string, name: string, value: unknown, holds: boolean, rule: string): void {
  if (!holds) throw new CoatError(`${op}: ${name} is ${value} and must be ${rule}`, 'value', op, name)
}
