// Losses: cross-entropy of logits, and of logits that are never whole in memory, with its gradients.
import type { Handle } from './native.gen.ts'
import { CoatError, native } from './native.ts'
import { recordedBy } from './tape.ts'
import { scope, Tensor } from './tensor.ts'

type Plain = 'f32' | 'bf16'

function refuse(op: string, argument: string, value: number, rule: string): never {
  throw new CoatError(`${op}: ${argument} is ${value} and must be ${rule}`, 'value', op, argument)
}

/** The label of a position that takes no part in the loss. */
export const ignoreIndex = -100

/**
 * weight · Σ (log-sum-exp(logits[m]) − logits[m, targets[m]]) over the rows that are not ignored → f32 [1]. With weight
 * 1 / (number of such rows in all micro-batches of a step) the sum over micro-batches is the mean by tokens.
 */
export function crossEntropy(logits: Tensor, targets: Tensor, weight: Weight): Tensor {
  const factor = weightOf('crossEntropy', weight, logits)
  const given = [logits, targets, factor].map(({ handle }) => handle) as [Handle, Handle, Handle]
  const [lossHandle, lseHandle] = native.cross_entropy_forward(...given, ignoreIndex)
  const loss = Tensor.own(lossHandle)
  const lse = Tensor.own(lseHandle)
  const format = logits.format as Plain
  const saved = [logits, targets, lse, factor]
  recordedBy(logits)?.push('cross_entropy', [logits], loss, saved, (dloss, saved) => {
    const read = [dloss, ...saved].map(({ handle }) => handle) as [Handle, Handle, Handle, Handle, Handle]
    return [Tensor.own(native.cross_entropy_backward(...read, format, ignoreIndex))]
  })
  return loss
}

/** A finite number, or f32 [1] where it is read when the loss is made: in a graph it may differ every time. */
export type Weight = number | Tensor

function weightOf(op: string, weight: Weight, { device }: Tensor): Tensor {
  if (weight instanceof Tensor) return weight
  if (!Number.isFinite(weight)) refuse(op, 'weight', weight, 'finite')
  return Tensor.full([1], weight, { device })
}

export interface LossOptions {
  /** Format of x, of the weight as the product reads it, of logits and of the gradient of x. */
  format: Plain
  /** Format of the gradient of the weight. */
  dw: Plain
  /** Rows whose logits are there at once; by default as many as take about 256 MiB, a multiple of 128. */
  chunk?: number
}

const logitBytes = 2 ** 28

/**
 * crossEntropy(x wᵀ, targets, weight): x [M, N], w [V, N], targets i32 [M] → f32 [1], by chunks of rows, so that the logits
 * [M, V] are never whole in memory. Where it is recorded, both gradients are made with the loss, chunk by chunk, and kept
 * instead of logits; a gradient of the loss other than backward's own 1 multiplies them afterwards.
 */
export function linearCrossEntropy(
  x: Tensor,
  w: Tensor,
  targets: Tensor,
  weight: Weight,
  { format, dw: dwFormat, chunk }: LossOptions,
): Tensor {
  if (chunk !== undefined && (!Number.isSafeInteger(chunk) || chunk < 1))
    refuse('linearCrossEntropy', 'chunk', chunk, 'an integer of at least 1')
  const [M, N] = x.shape as [number, number]
  const rowBytes = (w.shape[0] as number) * (format === 'f32' ? 4 : 2)
  const rows = chunk ?? Math.max(1, Math.floor(logitBytes / rowBytes / 128)) * 128
  const tape = recordedBy(x, w)
  const [loss, dx, dw] = scope(() => {
    const factor = weightOf('linearCrossEntropy', weight, x)
    const one = tape ? Tensor.full([1], 1, { device: x.device }) : null
    const part = (from: number, R: number, held: Tensor | null = null) =>
      lossOfRows(x, w, targets, factor, { format, dw: dwFormat }, one, from, R, held)
    if (M <= rows) return part(0, M)
    const dx = tape && x.requiresGrad ? Tensor.own(native.make(format, [M, N], x.device, 'temp')) : null
    let loss: Tensor | null = null
    let dw: Tensor | null = null
    for (let from = 0; from < M; from += rows) {
      const [lossPart, dxPart, dwPart] = scope(() => part(from, Math.min(rows, M - from), dw))
      if (dx && dxPart) native.place_rows(dx.handle, dxPart.handle, from)
      dxPart?.dispose()
      dw ??= dwPart
      if (loss) native.add_into(loss.handle, lossPart.handle)
      loss ??= lossPart
    }
    return [loss as unknown as Tensor, dx, dw]
  })
  w.dropTwins()
  const made = [dx, dw].filter((gradient) => gradient !== null)
  tape?.push(
    'linear_cross_entropy',
    [x, w],
    loss,
    made,
    (dloss) => {
      if (!tape.isSeed(dloss)) for (const gradient of made) native.multiply_into(gradient.handle, dloss.handle)
      return [dx, dw]
    },
    { counts: false },
  )
  if (tape && dw) native.retag(dw.handle, 'grad')
  for (const gradient of made) gradient.dispose() // the tape alone holds them
  return loss
}

/**
 * Loss of R rows, the first of them row `from`, and with `one` the gradients of x and w that are wanted; that of w is added to
 * `held`, if it is given.
 */
function lossOfRows(
  x: Tensor,
  w: Tensor,
  targets: Tensor,
  weight: Tensor,
  { format, dw }: LossOptions,
  one: Tensor | null,
  from: number,
  R: number,
  held: Tensor | null,
): [loss: Tensor, dx: Tensor | null, dw: Tensor | null] {
  const whole = R === x.shape[0]
  const xs = x.as(format)
  const ws = w.as(format)
  const xr = whole ? xs : Tensor.own(native.slice_rows(xs.handle, format, from, R))
  const ids = whole ? targets : Tensor.own(native.slice(targets.handle, 'i32', from, R))
  const logits = Tensor.own(native.matmul_nt(xr.handle, ws.handle, null, format, null)[0])
  const [lossHandle, lseHandle] = native.cross_entropy_forward(logits.handle, ids.handle, weight.handle, ignoreIndex)
  const loss = Tensor.own(lossHandle)
  const lse = Tensor.own(lseHandle)
  if (!one) return [loss, null, null]
  const given = [one, logits, ids, lse, weight].map(({ handle }) => handle) as [Handle, Handle, Handle, Handle, Handle]
  const d = native.cross_entropy_backward(...given, format, ignoreIndex)
  logits.dispose()
  Tensor.own(d)
  const dx = x.requiresGrad ? Tensor.own(native.matmul_nn(d, ws.handle, format, null)[0]) : null
  if (held) native.matmul_tn_into(held.handle, d, xr.handle)
  return [loss, dx, w.requiresGrad && !held ? Tensor.own(native.matmul_tn(d, xr.handle, dw, null)[0]) : null]
}
