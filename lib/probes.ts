// Questions about numbers: what a narrow accumulator makes of a sum, how sharply a loss answers to its logits, what FP8 saturates
// and loses, how much gradients agree. Of a training they read, and change nothing.
import { matcherOf } from './axes.ts'
import type { Batch } from './data.ts'
import type { Module, Param } from './modules.ts'
import { CoatError, native } from './native.ts'
import { type Operand, watchOperands } from './operands.ts'
import * as ops from './ops.ts'
import { noGrad } from './tape.ts'
import { type Device, type Format, scope, Tensor } from './tensor.ts'

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

/** A model whose logits can be had. */
export interface LogitModel {
  readonly device: Device
  /** Logits [B·T, V]. */
  forward(ids: Tensor, sequence: number, starts?: Tensor | null): Tensor
}

/**
 * The mean sharpness at the last position of each sequence that takes part in the loss: one forward, of which one row of logits a
 * sequence is read.
 */
export async function modelSharpness(model: LogitModel, batch: Batch, epsilon: number): Promise<number> {
  const { ids, targets, sequence, starts } = batch
  const { device } = model
  const last: number[] = []
  for (let from = 0; from < ids.length; from += sequence) {
    const row = targets.subarray(from, from + sequence).findLastIndex((target) => target !== ops.ignoreIndex)
    if (row >= 0) last.push(from + row)
  }
  demand('modelSharpness', 'batch', 'without targets', last.length > 0, 'one that takes part in the loss')
  using rows = noGrad(() =>
    scope(() => {
      const documents = starts ? ops.documentStarts(starts, sequence, device) : null
      const logits = model.forward(Tensor.from(ids, [ids.length], { device }), sequence, documents)
      const wanted = Tensor.from(Int32Array.from(last), [last.length], { device })
      return ops.embedding(wanted, logits, { y: 'f32', dw: 'f32' })
    }),
  ).keep()
  const values = (await rows.read()) as Float32Array
  const width = values.length / last.length
  const all = last.map((at, i) =>
    sharpness(values.subarray(i * width, (i + 1) * width), targets[at] as number, epsilon),
  )
  return all.reduce((sum, one) => sum + one, 0) / all.length
}

/** The code of the largest finite value, without its sign. */
const largestCodes: Readonly<Record<string, number>> = { e4m3: 0x7e, e5m2: 0x7b }

function largestCode(format: Format): number | undefined {
  return largestCodes[format.split('/')[0] as string]
}

interface Counts {
  codes: number
  largest: number
  zeros: number
  /** Values that are not 0, and those of them whose codes are; null where the values are not at hand. */
  inputs: { present: number; lost: number } | null
}

function countsOf(codes: Uint8Array, format: Format, values: Float32Array | null): Counts {
  const most = largestCode(format)
  const counts: Counts = { codes: codes.length, largest: 0, zeros: 0, inputs: values && { present: 0, lost: 0 } }
  for (let i = 0; i < codes.length; i++) {
    const magnitude = (codes[i] as number) & 0x7f
    if (magnitude === most) counts.largest += 1
    if (magnitude === 0) counts.zeros += 1
    if (!values || !counts.inputs || values[i] === 0) continue
    counts.inputs.present += 1
    if (magnitude === 0) counts.inputs.lost += 1
  }
  return counts
}

const share = (part: number, whole: number) => (whole === 0 ? 0 : part / whole)

/** What FP8 codes have lost, in parts of 1. */
export interface CodeShares {
  /** Codes that are the largest: what may have saturated. Where a scale is measured the largest value has that code anyway. */
  largest: number
  zeros: number
  /** Values that are not 0 whose codes are; null where the values were never there, as where a norm writes FP8 itself. */
  underflow: number | null
}

function sharesOf({ codes, largest, zeros, inputs }: Counts): CodeShares {
  return {
    largest: share(largest, codes),
    zeros: share(zeros, codes),
    underflow: inputs && share(inputs.lost, inputs.present),
  }
}

/** Shares of the codes of an FP8 tensor, against the values that it was rounded from where they are given. Reads them back. */
export async function codeShares(tensor: Tensor, values: Tensor | null = null): Promise<CodeShares> {
  const { format, shape, numel } = tensor
  if (largestCode(format) === undefined || (values && values.numel !== numel))
    throw new CoatError(
      `codeShares: tensor ${format}[${shape.join(', ')}] must be of e4m3 or e5m2, with as many values`,
      'format',
      'codeShares',
      'tensor',
    )
  const plain = values && ((await values.read()) as Float32Array)
  return sharesOf(countsOf((await tensor.readBytes()).subarray(0, numel), format, plain))
}

/** An operand of a model's products over the steps that were measured. */
export interface OperandShares extends CodeShares {
  /** Of the weight. */
  name: string
  operand: Operand['operand']
  format: Format
}

/**
 * Counts what FP8 makes of the operands of a model's products as it trains: inputs, weights, gradients of outputs. While it is
 * `active` all of them are copied to the host, so that it is meant for some steps, and some weights: `match` is a pattern of
 * their names. There is one at a time. It sees what runs op by op.
 */
export class OperandProbe implements Disposable {
  active = true
  #counts = new Map<string, Omit<OperandShares, keyof CodeShares> & { counts: Promise<Counts> }>()

  constructor(match = '*') {
    const names = matcherOf(match)
    watchOperands(({ name, operand, tensor }) => {
      if (!this.active || !names.test(name) || largestCode(tensor.format) === undefined) return
      const key = `${name} ${operand} ${tensor.format}`
      const before = this.#counts.get(key)?.counts
      const counts = before ? added(before, snapshot(tensor)) : snapshot(tensor)
      this.#counts.set(key, { name, operand, format: tensor.format, counts })
    })
  }

  /** What was counted since the last call. */
  async take(): Promise<OperandShares[]> {
    const taken = [...this.#counts.values()]
    this.#counts.clear()
    return Promise.all(taken.map(async ({ counts, ...rest }) => ({ ...rest, ...sharesOf(await counts) })))
  }

  [Symbol.dispose](): void {
    watchOperands(null)
  }
}

// Reads are queued behind what made the tensor, which may be freed at once. What cannot be read throws here and now.
function snapshot({ handle, source, format, numel }: Tensor): Promise<Counts> {
  const codes = native.read(handle)
  return counted(codes, numel, format, source && source.numel === numel ? source.read() : null)
}

async function counted(
  bytes: Promise<ArrayBuffer>,
  numel: number,
  format: Format,
  values: ReturnType<Tensor['read']> | null,
): Promise<Counts> {
  const codes = new Uint8Array(await bytes, 0, numel)
  return countsOf(codes, format, values && ((await values) as Float32Array))
}

async function added(first: Promise<Counts>, second: Promise<Counts>): Promise<Counts> {
  const [a, b] = [await first, await second]
  return {
    codes: a.codes + b.codes,
    largest: a.largest + b.largest,
    zeros: a.zeros + b.zeros,
    inputs: a.inputs &&
      b.inputs && { present: a.inputs.present + b.inputs.present, lost: a.inputs.lost + b.inputs.lost },
  }
}

/**
 * How much the gradients of several steps agree (MuPPET, arXiv 2006.09049): of a matrix the sum of their squared norms by the
 * squared norm of their sum, and the mean of that over the matrices. 1 where they are orthogonal, 1 / n where n are equal.
 */
export class GradientDiversity implements Disposable {
  readonly #params: readonly Param[]
  /** Sums of the gradients, f32, a matrix each, and of their squared norms. */
  #sums: Tensor[] = []
  #squares: number[] = []
  #sample: Tensor[] = []
  /** Gradients that are in the sums. */
  count = 0

  constructor(module: Module) {
    this.#params = module.parameters().filter(({ frozen, decay }) => decay && !frozen)
  }

  /** Copies the gradients that there are now: before an update, whole and not clipped. `settle` says what becomes of them. */
  sample(): void {
    this.#drop()
    this.#sample = this.#params.map(({ name, grad }) => {
      if (!grad)
        throw new CoatError(
          `GradientDiversity: '${name}' has no gradient; it is wanted before the update, without optimizerInBackward`,
          'state',
          'GradientDiversity',
          name,
        )
      return Tensor.own(native.convert(grad.handle, null, 'f32')).keep()
    })
  }

  /** Adds the sample, divided by the loss scale that it has, to the others; or drops it: of a step that was skipped. */
  async settle(counts: boolean, lossScale = 1): Promise<void> {
    if (!counts || this.#sample.length === 0) return this.#drop()
    if (lossScale !== 1)
      for (const { handle, device } of this.#sample)
        scope(() => native.multiply_into(handle, Tensor.from([1 / lossScale], [1], { device }).handle))
    const squares = await squaredNorms(this.#sample)
    this.#squares = squares.map((square, i) => square + (this.#squares[i] ?? 0))
    this.count += 1
    if (this.#sums.length === 0) {
      this.#sums = this.#sample
      this.#sample = []
      return
    }
    this.#sums.forEach((sum, i) => {
      native.add_into(sum.handle, (this.#sample[i] as Tensor).handle)
    })
    this.#drop()
  }

  /** The diversity of the gradients so far, with which a new window begins; matrices whose gradients are 0 do not count. */
  async take(): Promise<number> {
    const squares = this.#squares
    const sums = this.#sums.length > 0 ? await squaredNorms(this.#sums) : []
    this.dispose()
    const ratios = squares.flatMap((square, i) => (square > 0 ? [square / (sums[i] as number)] : []))
    return ratios.reduce((sum, ratio) => sum + ratio, 0) / ratios.length
  }

  #drop(): void {
    for (const tensor of this.#sample.splice(0)) tensor.dispose()
  }

  dispose(): void {
    this.#drop()
    for (const tensor of this.#sums.splice(0)) tensor.dispose()
    this.#squares = []
    this.count = 0
  }
  [Symbol.dispose](): void {
    this.dispose()
  }
}

async function squaredNorms(tensors: readonly Tensor[]): Promise<number[]> {
  const handles = native.grad_norm(
    tensors.map(({ handle }) => handle),
    0,
  )
  const [norm, norms, clip] = handles.map((handle) => Tensor.own(handle)) as [Tensor, Tensor, Tensor]
  try {
    return Array.from((await norms.read()) as Float32Array, (x) => x * x)
  } finally {
    for (const tensor of [norm, norms, clip]) tensor.dispose()
  }
}
