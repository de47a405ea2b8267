// Differentiable operations: native forward, what the tape keeps, native backward. Formats are asked for, never chosen here.
import type { Handle } from './native.gen.ts'
import { CoatError, native } from './native.ts'
import { remakeOf, Tape } from './tape.ts'
import { type FloatFormat, type Format, isScaled, Tensor, type TensorOptions } from './tensor.ts'

type Plain = 'f32' | 'bf16'

/** Formats of one matrix product y = x wᵀ and of its two gradients. */
export interface LinearFormats {
  /** Operand x [M, K]. */
  x: FloatFormat
  /** Operand w [N, K]. */
  w: FloatFormat
  /** Operand dy [M, N]. */
  dy: FloatFormat
  /** Result y [M, N]. */
  y: Plain | 'e4m3/g16'
  /** Result dx [M, K]. */
  dx: Plain
  /** Result dw [N, K]. */
  dw: Plain
}

function recordedBy(...inputs: (Tensor | null)[]): Tape | null {
  return inputs.some((input) => input?.requiresGrad) ? Tape.current : null
}

/** y = x wᵀ + b: x [M, K], w [N, K], b [N] → [M, N]. FP8 operands where the formats say so; scales are per tensor. */
export function linear(x: Tensor, w: Tensor, b: Tensor | null, formats: LinearFormats): Tensor {
  const xq = x.as(formats.x)
  const wq = w.as(formats.w)
  const y = Tensor.own(native.matmul_nt(xq.handle, wq.handle, b?.handle ?? null, formats.y))
  w.dropTwins()
  recordedBy(x, w, b)?.push('linear', [x, w, ...(b ? [b] : [])], y, [xq, w], (dy, [xq, w]) => {
    if (!xq || !w) return []
    const dyq = dy.as(formats.dy)
    const scaled = isScaled(formats.dy)
    let dx: Tensor | null = null
    if (x.requiresGrad) {
      const product = scaled
        ? native.matmul_nt(dyq.handle, w.as(formats.w, { transposed: true }).handle, null, formats.dx)
        : native.matmul_nn(dyq.handle, w.as(formats.w).handle, formats.dx)
      dx = Tensor.own(product)
      w.dropTwins()
    }
    let dw: Tensor | null = null
    if (w.requiresGrad) {
      const product = scaled
        ? native.matmul_nt(
            dyq.as(formats.dy, { transposed: true }).handle,
            xq.as(formats.x, { transposed: true }).handle,
            null,
            formats.dw,
          )
        : native.matmul_tn(dyq.handle, xq.handle, formats.dw)
      dw = Tensor.own(product)
    }
    const db = b?.requiresGrad ? Tensor.own(native.column_sum(dy.as(formats.dx).handle, formats.dw)) : null
    return [dx, dw, db]
  })
  return y
}

/** Formats of a norm: of its input as forward and backward read it, of its result, and of its gradients. */
export interface NormFormats {
  x: Plain | 'e4m3/g16'
  y: Plain | 'e4m3/t' | 'e4m3/g16'
  dx: Plain
  dw: Plain
}

/** y = x / sqrt(mean(x²) + eps) · w over rows: x [M, N], w [N] → [M, N]. */
export function rmsnorm(x: Tensor, w: Tensor, eps: number, formats: NormFormats): Tensor {
  const xs = x.as(formats.x)
  const [yHandle, rstdHandle] = native.rmsnorm_forward(xs.handle, w.handle, null, formats.y, eps)
  const y = Tensor.own(yHandle)
  const rstd = Tensor.own(rstdHandle)
  const tape = recordedBy(x, w)
  tape?.push('rmsnorm', [x, w], y, [xs, rstd, w], (dy, [xs, rstd, w]) => {
    if (!xs || !rstd || !w) return []
    const [dx, dw] = native.rmsnorm_backward(dy.handle, xs.handle, w.handle, rstd.handle, formats.dx, formats.dw)
    return [Tensor.own(dx), Tensor.own(dw)]
  })
  if (tape && isScaled(xs.format) && formats.y === 'e4m3/t')
    y.remake = remakeOf(y, [xs], ([from], scale) => {
      const [again, unused] = native.rmsnorm_forward((from as Tensor).handle, w.handle, scale, 'e4m3/t', eps)
      native.free(unused)
      return again
    })
  return y
}

/** y = (x − mean) / sqrt(var + eps) · w + b over rows; w and b [N] may be null (OLMo). */
export function layernorm(x: Tensor, w: Tensor | null, b: Tensor | null, eps: number, formats: NormFormats): Tensor {
  const xs = x.as(formats.x)
  const wh = w?.handle ?? null
  const bh = b?.handle ?? null
  const [yHandle, meanHandle, rstdHandle] = native.layernorm_forward(xs.handle, wh, bh, null, formats.y, eps)
  const y = Tensor.own(yHandle)
  const mean = Tensor.own(meanHandle)
  const rstd = Tensor.own(rstdHandle)
  const tape = recordedBy(x, w, b)
  const inputs = [x, ...(w ? [w] : []), ...(b ? [b] : [])]
  tape?.push('layernorm', inputs, y, [xs, mean, rstd], (dy, [xs, mean, rstd]) => {
    if (!xs || !mean || !rstd) return []
    const [dx, dw, db] = native.layernorm_backward(
      dy.handle,
      xs.handle,
      wh,
      mean.handle,
      rstd.handle,
      formats.dx,
      w ? formats.dw : null,
      b ? formats.dw : null,
    )
    return [dx, dw, db].filter((handle) => handle !== null).map((handle) => Tensor.own(handle))
  })
  if (tape && isScaled(xs.format) && formats.y === 'e4m3/t')
    y.remake = remakeOf(y, [xs], ([from], scale) => {
      const [again, ...unused] = native.layernorm_forward((from as Tensor).handle, wh, bh, scale, 'e4m3/t', eps)
      for (const handle of unused) native.free(handle)
      return again
    })
  return y
}

/** Formats of an activation: of its input, its result and its gradient. */
export interface ActivationFormats {
  x: Plain | 'e4m3/g16'
  y: Plain | 'e4m3/t' | 'e4m3/g16'
  dx: Plain | 'e5m2/t'
}

/** silu(gate) · up: x = [gate | up] [M, 2F] → [M, F]. A quantized gradient comes with the transpose that its GEMM reads. */
export function swiglu(x: Tensor, formats: ActivationFormats): Tensor {
  const twin = formats.dx === 'e5m2/t' ? formats.dx : null
  return activation('swiglu', native.swiglu_forward, x, formats, (dy, x) => {
    const [handle, turned] = native.swiglu_backward(dy, x, formats.dx, twin)
    const dx = Tensor.own(handle)
    if (turned !== null) dx.adoptTwin(turned, 'e5m2/t transposed')
    return dx
  })
}

/** x Φ(x), the exact GELU: [M, N] → [M, N]. */
export function gelu(x: Tensor, formats: ActivationFormats): Tensor {
  return activation('gelu', native.gelu_forward, x, formats, (dy, x) =>
    Tensor.own(native.gelu_backward(dy, x, formats.dx)),
  )
}

function activation(
  name: string,
  forward: (x: Handle, scale: Handle | null, y: ActivationFormats['y']) => Handle,
  x: Tensor,
  formats: ActivationFormats,
  backward: (dy: Handle, x: Handle) => Tensor,
): Tensor {
  const xs = x.as(formats.x)
  const y = Tensor.own(forward(xs.handle, null, formats.y))
  const tape = recordedBy(x)
  tape?.push(name, [x], y, [xs], (dy, [xs]) => [backward(dy.handle, (xs as Tensor).handle)])
  if (tape && isScaled(xs.format) && formats.y === 'e4m3/t')
    y.remake = remakeOf(y, [xs], ([from], scale) => forward((from as Tensor).handle, scale, 'e4m3/t'))
  return y
}

/** a + b in the format of the residual stream, with the quantized twin that the next nonlinear op reads. */
export function add(a: Tensor, b: Tensor, format: Plain, twin: Format): Tensor {
  const wanted = twin === 'e4m3/g16' ? twin : null
  const [y, quantized] = native.add(a.handle, b.handle, format, wanted)
  const sum = Tensor.own(y)
  if (quantized !== null) sum.adoptTwin(quantized)
  recordedBy(a, b)?.push('add', [a, b], sum, [], (dy) => [dy, dy])
  return sum
}

/** Rows of w [V, N] by ids i32 [M] → [M, N]. */
export function embedding(ids: Tensor, w: Tensor, formats: { y: Plain; dw: Plain }): Tensor {
  const y = Tensor.own(native.embedding_forward(ids.handle, w.handle, formats.y))
  const rows = w.shape[0] as number
  recordedBy(w)?.push('embedding', [w], y, [ids], (dy, [ids]) => [
    Tensor.own(native.embedding_backward((ids as Tensor).handle, dy.handle, formats.dw, rows)),
  ])
  return y
}

export interface AttentionOptions {
  /** Rows of one sequence. */
  sequence: number
  heads: number
  kvHeads: number
  headDim: number
  causal: boolean
  /** Cosines and sines f32 [T, D] (`ropeTable`), or null for no rotation. */
  rope: Tensor | null
  /** Format of gradients. */
  dx: Plain
}

/**
 * Softmax attention on packed rows: qkv [B·T, (H + 2J)·D] → [B·T, H·D], J key/value heads shared by H query heads.
 * Consumes qkv: RoPE turns it in place. Keeps qkv, the output and one f32 a head.
 */
export function attention(qkv: Tensor, options: AttentionOptions): Tensor {
  const { sequence: T, heads: H, kvHeads: J, headDim: D, rope } = options
  const scale = 1 / Math.sqrt(D)
  const causal = options.causal ? 1 : 0
  if (rope) native.rope(rope.handle, qkv.handle, H, J, D, 1)
  const format = qkv.format as Plain
  const [outHandle, lseHandle] = native.attention_forward(qkv.handle, format, T, H, J, D, causal, scale)
  const out = Tensor.own(outHandle)
  const lse = Tensor.own(lseHandle)
  recordedBy(qkv)?.push('attention', [qkv], out, [qkv, out, lse], (dout, [qkv, out, lse]) => {
    if (!qkv || !out || !lse) return []
    const dqkv = native.attention_backward(
      dout.handle,
      qkv.handle,
      out.handle,
      lse.handle,
      options.dx,
      T,
      H,
      J,
      D,
      causal,
      scale,
    )
    if (rope) native.rope(rope.handle, dqkv, H, J, D, -1)
    return [Tensor.own(dqkv)]
  })
  return out
}

export interface CachedOptions {
  heads: number
  kvHeads: number
  headDim: number
  /** Cosines and sines of the new rows, f32 [M, D], or null for no rotation. */
  rope: Tensor | null
  /** Rows that are in the cache. */
  first: number
  /** A row sees those less than `window` rows away (0: all). */
  window: number
}

/**
 * Causal attention of M new rows of one sequence against those in `cache` [T, 2J·D], which takes their keys and values up:
 * qkv [M, (H + 2J)·D] → [M, H·D]. RoPE turns qkv in place. Has no gradient.
 */
export function attentionCached(qkv: Tensor, cache: Tensor, options: CachedOptions): Tensor {
  const { heads: H, kvHeads: J, headDim: D, rope, first, window } = options
  if (rope) native.rope(rope.handle, qkv.handle, H, J, D, 1)
  const format = qkv.format as Plain
  return Tensor.own(native.attention_cached(qkv.handle, cache.handle, format, H, J, D, first, window, 1 / Math.sqrt(D)))
}

/**
 * Stretched rotations: all angles divided by `factor` (linear), or, with the other three, only those of waves longer than
 * `positions` / `low`, none of waves shorter than `positions` / `high`, and a mixture in between (Llama 3.1).
 */
export type RopeScaling = { factor: number } | { factor: number; low: number; high: number; positions: number }

export interface Rotation {
  /** Base of the angles. */
  theta: number
  scaling?: RopeScaling | null
}

/** Radians a position of the pairs (i, i + D/2), float64 [D/2]. */
export function ropeFrequencies(headDim: number, { theta, scaling }: Rotation): Float64Array {
  const half = headDim / 2
  return Float64Array.from({ length: half }, (_, i) => {
    const frequency = theta ** (-i / half)
    if (!scaling) return frequency
    const stretched = frequency / scaling.factor
    if (!('low' in scaling)) return stretched
    const { low, high, positions } = scaling
    const turns = (positions * frequency) / (2 * Math.PI)
    const kept = Math.min(1, Math.max(0, (turns - low) / (high - low)))
    return (1 - kept) * stretched + kept * frequency
  })
}

/** Cosines and sines of the positions from `first` on, f32 [T, D]: D/2 cosines, then D/2 sines; angles in float64. */
export function ropeTable(
  positions: number,
  headDim: number,
  rotation: Rotation,
  device: TensorOptions['device'] = 'cpu',
  first = 0,
): Tensor {
  const half = headDim / 2
  const frequencies = ropeFrequencies(headDim, rotation)
  const values = new Float32Array(positions * headDim)
  for (let t = 0; t < positions; t++)
    for (let i = 0; i < half; i++) {
      const angle = (first + t) * (frequencies[i] as number)
      values[t * headDim + i] = Math.cos(angle)
      values[t * headDim + half + i] = Math.sin(angle)
    }
  return Tensor.from(values, [positions, headDim], { device })
}

/** The label of a position that takes no part in the loss. */
export const ignoreIndex = -100

/**
 * weight · Σ (log-sum-exp(logits[m]) − logits[m, targets[m]]) over the rows that are not ignored → f32 [1]. With weight
 * 1 / (number of such rows in all micro-batches of a step) the sum over micro-batches is the mean by tokens.
 */
export function crossEntropy(logits: Tensor, targets: Tensor, weight: number): Tensor {
  if (!Number.isFinite(weight))
    throw new CoatError(`crossEntropy: weight is ${weight} and must be finite`, 'value', 'crossEntropy', 'weight')
  const [lossHandle, lseHandle] = native.cross_entropy_forward(logits.handle, targets.handle, ignoreIndex, weight)
  const loss = Tensor.own(lossHandle)
  const lse = Tensor.own(lseHandle)
  const format = logits.format as Plain
  recordedBy(logits)?.push('cross_entropy', [logits], loss, [logits, targets, lse], (dloss, [logits, targets, lse]) => {
    if (!logits || !targets || !lse) return []
    return [
      Tensor.own(
        native.cross_entropy_backward(
          dloss.handle,
          logits.handle,
          targets.handle,
          lse.handle,
          format,
          ignoreIndex,
          weight,
        ),
      ),
    ]
  })
  return loss
}
