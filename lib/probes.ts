// Probes: what a training shows of its numbers — how sharp the loss is in the logits, what FP8 saturates and loses, how much
// gradients agree. They read, and change nothing.
import { matcherOf } from './axes.ts'
import type { Batch } from './data.ts'
import type { Module, Param } from './modules.ts'
import { CoatError, native } from './native.ts'
import { type Operand, watchOperands } from './operands.ts'
import * as ops from './ops.ts'
import { noGrad } from './tape.ts'
import { type Device, type Format, scope, Tensor } from './tensor.ts'

/** Logits of one position and the token that follows. */
export interface Prediction {
  logits: ArrayLike<number>
  target: number
}

/**
 * Logit sharpness in percent (arXiv 2405.18710): by how much the mean cross-entropy f can rise, as a part of 1 + f, where each
 * logit y moves by no more than epsilon (|y| + 1). The worst such move lowers the target's logit and raises all others.
 */
export function sharpnessOf(predictions: readonly Prediction[], epsilon: number): number {
  const mean = (move: number) => predictions.reduce((sum, one) => sum + crossEntropy(one, move), 0) / predictions.length
  const loss = mean(0)
  return (100 * (mean(epsilon) - loss)) / (1 + loss)
}

function crossEntropy({ logits, target }: Prediction, move: number): number {
  const moved = Float64Array.from(logits, (y, i) => y + (i === target ? -move : move) * (Math.abs(y) + 1))
  const top = moved.reduce((most, y) => Math.max(most, y), Number.NEGATIVE_INFINITY)
  return top + Math.log(moved.reduce((sum, y) => sum + Math.exp(y - top), 0)) - (moved[target] as number)
}

/** A model whose logits can be had. */
export interface LogitModel {
  readonly device: Device
  /** Logits [B·T, V]. */
  forward(ids: Tensor, sequence: number, starts?: Tensor | null): Tensor
}

/** `sharpnessOf` the last position of each sequence that takes part in the loss: one forward, of which one row a sequence is read. */
export async function sharpness(model: LogitModel, batch: Batch, epsilon: number): Promise<number> {
  if (!(epsilon >= 0 && Number.isFinite(epsilon)))
    throw new CoatError(
      `sharpness: epsilon is ${epsilon} and must be a finite number of at least 0`,
      'value',
      'sharpness',
      'epsilon',
    )
  const { ids, targets, sequence, starts } = batch
  const { device } = model
  const last: number[] = []
  for (let from = 0; from < ids.length; from += sequence) {
    const row = targets.subarray(from, from + sequence).findLastIndex((target) => target !== ops.ignoreIndex)
    if (row >= 0) last.push(from + row)
  }
  if (last.length === 0)
    throw new CoatError('sharpness: the batch has no target that takes part in the loss', 'value', 'sharpness', 'batch')
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
  return sharpnessOf(
    last.map((at, i) => ({
      logits: values.subarray(i * width, (i + 1) * width),
      target: targets[at] as number,
    })),
    epsilon,
  )
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
 * their names. There is one at a time.
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

// Reads are queued behind what made the tensor, which may be freed at once.
async function snapshot(tensor: Tensor): Promise<Counts> {
  const { source, format, numel } = tensor
  const values = source && source.numel === numel ? source.read() : null
  const codes = tensor.readBytes()
  return countsOf((await codes).subarray(0, numel), format, values && ((await values) as Float32Array))
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

  /** Adds the sample to the others, or drops it: of a step that was skipped. */
  async settle(counts: boolean): Promise<void> {
    if (!counts || this.#sample.length === 0) return this.#drop()
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
