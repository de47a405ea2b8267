// Differentiable operations: native forward, what the tape keeps, native backward. Formats are asked for, never chosen here.
import { emulatedLinear, type PlacedEmulation } from './emulate.ts'
import type { Handle } from './native.gen.ts'
import { native } from './native.ts'
import { showOperands } from './operands.ts'
import type { PlacedScale } from './scaler.ts'
import { type Backward, type Make, recordedBy, remakeOf, retained, Tape } from './tape.ts'
import { type FloatFormat, type Format, isScaled, scope, Tensor, transposed } from './tensor.ts'

export { matmulEmulated, roundTo } from './emulate.ts'
export * from './losses.ts'
export * from './rotation.ts'

type Plain = 'f32' | 'bf16'

/** Formats of one matrix product y = x wᵀ and of its two gradients. */
export interface LinearFormats {
  /** Operand x [M, K]. */
  x: FloatFormat
  /** Operand w [N, K]. */
  w: FloatFormat
  /** Operand dy [M, N]. */
  dy: FloatFormat
  /** Rows [from, to) of w, one after the other, whose columns of dy have a scale each. */
  dyParts?: readonly (readonly [from: number, to: number])[]
  /** Operand w of dx where it is not in the format of w: one scale, a power of two. */
  wAcross?: 'e4m3/t'
  /** Operands x and dy of dw where they are not in the formats of x and dy. */
  dwFrom?: Plain
  /** Where operands `/t` are summed with 14 bits: in all three products, or in y alone (default: nowhere). */
  accumulate?: 'fast' | 'fast-forward'
  /** Result y [M, N]. */
  y: Plain | 'e4m3/g16'
  /** Result dx [M, K]. */
  dx: Plain
  /** Result dw [N, K]. */
  dw: Plain
  /** Arithmetic that is imitated; all formats are then f32. */
  emulated?: PlacedEmulation
}

/** Scales of the operands of one product, where they are not those that the operands measure. */
export interface LinearScales {
  x: PlacedScale
  w: PlacedScale
  dy: PlacedScale
}

// Scales of runs and rows lie along the sum of a product, so that the gradient of the weight needs others than y does.
function hasRuns(format: FloatFormat): boolean {
  return isScaled(format) && !format.endsWith('/t')
}

// How the native product y is summed, and those of its gradients.
const ofForward = ({ accumulate }: LinearFormats) => (accumulate ? 'fast' : 'split')
const ofBackward = ({ accumulate }: LinearFormats) => (accumulate === 'fast' ? 'fast' : 'split')

/** y = x wᵀ + b: x [M, K], w [N, K], b [N] → [M, N]. FP8 operands where the formats say so. */
export function linear(
  x: Tensor,
  w: Tensor,
  b: Tensor | null,
  formats: LinearFormats,
  scales: LinearScales | null = null,
  turn: HeadTurn | null = null,
): Tensor {
  if (formats.emulated) return emulatedLinear(x, w, b, formats.emulated)
  const tape = recordedBy(x, w, b)
  scales?.x.give(x, tape !== null)
  scales?.w.give(w, tape !== null)
  const xq = x.as(formats.x)
  const y = product(xq, w, b, formats, turn)
  if (!tape) return y
  const own = formats.dwFrom ?? formats.x
  const runs = hasRuns(own)
  const kept = w.requiresGrad ? x.as(own, { transposed: runs }) : xq
  const turned = isScaled(own) && isScaled(formats.dy) && !runs
  const backward: Backward = (dy, [w, kept], _, across) => {
    if (!w) return []
    scales?.dy.give(dy, true)
    const operand = () => kept ?? across()
    const db = () => biasGradient(dy, b, formats)
    if (formats.dyParts) return [...gradientsByParts(dy, x.requiresGrad, operand, w, formats, formats.dyParts), db()]
    if (turned && x.requiresGrad && w.requiresGrad && !formats.dwFrom) dy.makeBoth(formats.dy)
    const dx = x.requiresGrad ? inputGradient(dy, w, formats, x.gradientFormat !== null) : null
    const dw = w.requiresGrad ? weightGradient(dy, operand(), w, formats) : null
    return [dx, dw, db()]
  }
  const saved = turned ? [w] : [w, kept]
  tape.push('linear', inputsOf(x, w, b), y, saved, backward, { across: turned ? kept : null })
  return y
}

/**
 * dx [M, K] and dw [N, K], as far as they are needed, where the columns of dy [M, N] have a scale for each part: every part has
 * products of its own in f32, of which dx is the sum and dw has the rows; each is rounded once.
 */
function gradientsByParts(
  dy: Tensor,
  needsX: boolean,
  x: () => Tensor,
  w: Tensor,
  formats: LinearFormats,
  parts: readonly (readonly [from: number, to: number])[],
): (Tensor | null)[] {
  return scope(() => {
    const zeros = (rows: Tensor) => Tensor.zeros([rows.shape[0] as number, w.shape[1] as number], { device: dy.device })
    const [dx, dw] = [needsX ? zeros(dy) : null, w.requiresGrad ? zeros(w) : null]
    const turned = transposed(dy)
    for (const [from, to] of parts)
      scope(() => {
        const rowsOf = (x: Tensor) => Tensor.own(native.slice_rows(x.handle, x.format as Plain, from, to - from))
        const part = transposed(rowsOf(turned))
        const rows = rowsOf(w.as(formats.w))
        if (dx) {
          const product = inputGradient(part, rows, { ...formats, dx: 'f32' }, false, w)
          native.add_into(dx.handle, product.handle)
        }
        const product = dw && weightGradient(part, x(), rows, { ...formats, dw: 'f32' })
        if (dw && product) native.place_rows(dw.handle, product.handle, from)
      })
    w.dropTwins()
    const held = w.sink?.held
    if (dw && held) native.add_into(held.handle, dw.handle)
    return [dx?.as(formats.dx) ?? null, held ? null : (dw?.as(formats.dw) ?? null)]
  })
}

// Ops multiply each by bf16: codes are exact in it, and one scale multiplies sums.
const narrow: ReadonlySet<Format> = new Set(['bf16', 'e4m3/t', 'e5m2/t'])

/**
 * f of two operands of a product: as they are where ops multiply their formats, else, where one is f32 or scaled in finer parts
 * beside a plain one, both as f32, which has the values of a plain one, and of a scaled one to within 2^-24 of each. The latter
 * is a reference, as slow as products of f32 are.
 */
function alike<Result>(a: Tensor, b: Tensor, f: (a: Tensor, b: Tensor) => Result): Result {
  const bothScaled = isScaled(a.format) && isScaled(b.format)
  if (a.format === b.format || bothScaled || (narrow.has(a.format) && narrow.has(b.format))) return f(a, b)
  const exact = (x: Tensor) => (x.format === 'f32' ? x : Tensor.own(native.convert(x.handle, null, 'f32')))
  return scope(() => f(exact(a), exact(b)))
}

const inputsOf = (x: Tensor, w: Tensor, b: Tensor | null) => [x, w, ...(b ? [b] : [])]

/** How q and k of the rows of a product are turned by position (`ropeTable`); the gradient of attention turns back. */
export type HeadTurn = Pick<AttentionOptions, 'starts' | 'heads' | 'kvHeads' | 'headDim'> & { rope: Tensor }

/** Whether `linear` can turn what it makes, before its one rounding. */
export function turnsHeads({ x, y }: LinearFormats): boolean {
  return y === 'bf16' && (x === 'bf16' || x === 'e4m3/t')
}

/** x wᵀ + b of an operand x [M, K], turned if asked. */
function product(
  xq: Tensor,
  w: Tensor,
  b: Tensor | null,
  formats: LinearFormats,
  turn: HeadTurn | null = null,
): Tensor {
  const wq = w.as(formats.w)
  if (Tape.current) showOperands(w, { x: xq, w: wq })
  const bias = b?.handle ?? null
  const handle = alike(xq, wq, (xq, wq) =>
    turn
      ? turnedProduct(xq, wq, bias, turn, ofForward(formats))
      : native.matmul_nt(xq.handle, wq.handle, bias, formats.y, null, ofForward(formats))[0],
  )
  const y = Tensor.own(handle, formats.y)
  if (formats.dy.endsWith('/t')) y.gradientFormat = formats.dy
  w.dropTwins()
  return y
}

// Of operands that are f32 because they were not of one kind, too, the result is rounded after it was turned.
function turnedProduct(
  xq: Tensor,
  wq: Tensor,
  bias: Handle | null,
  turn: HeadTurn,
  accumulate: 'split' | 'fast',
): Handle {
  const { rope, starts, heads, kvHeads, headDim } = turn
  const sizes = [heads, kvHeads, headDim] as const
  const documents = starts?.handle ?? null
  if (xq.format !== 'f32')
    return native.matmul_nt_rope(rope.handle, xq.handle, wq.handle, bias, documents, ...sizes, accumulate)
  const y = Tensor.own(native.matmul_nt(xq.handle, wq.handle, bias, 'f32', null)[0])
  native.rope(rope.handle, y.handle, documents, ...sizes, 1)
  return native.convert(y.handle, null, 'bf16')
}

/** dy w [M, K], with its largest magnitude where that is wanted. `whole`: the weight of which w may be some rows. */
function inputGradient(dy: Tensor, w: Tensor, formats: LinearFormats, withAmax: boolean, whole = w): Tensor {
  const dyq = dy.as(formats.dy)
  showOperands(whole, { dy: dyq })
  const wanted = withAmax ? 'f32' : null
  if (formats.wAcross) w.adoptPowerOfTwo(formats.wAcross)
  const across = formats.wAcross ?? formats.w
  const [handle, amax] =
    isScaled(formats.dy) && isScaled(across)
      ? native.matmul_nt(
          dyq.handle,
          w.as(across, { transposed: true }).handle,
          null,
          formats.dx,
          wanted,
          ofBackward(formats),
        )
      : alike(dyq, w.as(formats.w), (dyq, wq) => native.matmul_nn(dyq.handle, wq.handle, formats.dx, wanted))
  const dx = Tensor.own(handle, formats.dx)
  if (amax !== null) dx.adoptAmax(amax)
  w.dropTwins()
  return dx
}

/**
 * dyᵀ x [N, K], with the operand x transposed [K, M] where both are scaled; null where it was added to the gradient that w
 * holds already.
 */
function weightGradient(dy: Tensor, x: Tensor, w: Tensor, formats: LinearFormats): Tensor | null {
  const operand = formats.dwFrom ?? formats.dy
  const scaled = isScaled(operand) && isScaled(x.format)
  const held = w.sink?.held
  const dw = alike(dy.as(operand, { transposed: scaled }), x, (left, x) => {
    if (held) {
      if (scaled) native.matmul_nt_into(held.handle, left.handle, x.handle, ofBackward(formats))
      else native.matmul_tn_into(held.handle, left.handle, x.handle)
      return null
    }
    return scaled
      ? native.matmul_nt(left.handle, x.handle, null, formats.dw, null, ofBackward(formats))[0]
      : native.matmul_tn(left.handle, x.handle, formats.dw, null)[0]
  })
  return dw === null ? null : Tensor.own(dw, formats.dw)
}

function biasGradient(dy: Tensor, b: Tensor | null, formats: LinearFormats): Tensor | null {
  return b?.requiresGrad ? Tensor.own(native.column_sum(dy.as(formats.dx).handle, formats.dw)) : null
}

/**
 * Formats of what a nonlinear op reads in forward, of what backward reads instead, and of the result. Where they differ, the
 * kept tensor is a copy for backward alone, and what backward makes of it again differs from forward's by its rounding. A
 * value above the largest of forward's then saturates, which brings it back towards the value that forward had.
 */
interface NonlinearFormats {
  x: Plain | 'e4m3/g16'
  saved: Plain | 'e4m3/g16'
  y: Plain | 'e4m3/t' | 'e4m3/g16'
}

// A recorded `/t` result is made again from the kept g16 tensor and what else is given, in one pass with the scale that it had.
function remakeFrom(
  kept: readonly Tensor[] | null,
  y: Tensor,
  ...how: [Make, across?: Make | null, known?: Tensor | null]
) {
  if (kept?.[0] && isScaled(kept[0].format) && y.format === 'e4m3/t' && Tape.current?.recompute !== 'none')
    y.remake = remakeOf(y, kept, ...how)
}

/** The first of the outputs of a call; the others are freed. */
function only([first, ...rest]: readonly [Handle, ...Handle[]]): Handle {
  for (const handle of rest) native.free(handle)
  return first
}

/** Formats of a norm, and of its gradients. */
export interface NormFormats extends NonlinearFormats {
  dx: Plain
  dw: Plain
}

/** y = x / sqrt(mean(x²) + eps) · w over rows: x [M, N], w [N] → [M, N]. */
export function rmsnorm(x: Tensor, w: Tensor, eps: number, formats: NormFormats): Tensor {
  const xs = x.as(formats.x)
  const scale = formats.y === 'e4m3/t' ? foretoldOf(xs, w, eps) : null
  const [yHandle, rstdHandle] = native.rmsnorm_forward(xs.handle, w.handle, scale?.handle ?? null, formats.y, eps)
  const y = Tensor.own(yHandle, formats.y)
  const rstd = Tensor.own(rstdHandle)
  const tape = recordedBy(x, w)
  const kept = tape && x.as(formats.saved)
  if (kept)
    tape.push('rmsnorm', [x, w], y, [kept, rstd, w], (dy, [kept, rstd, w], take) => {
      if (!kept || !rstd || !w) return []
      const read = [dy.handle, kept.handle, w.handle, rstd.handle, take(0, formats.dx)?.handle ?? null] as const
      const [dx, dw, amax] = native.rmsnorm_backward(
        ...read,
        formats.dx,
        formats.dw,
        isScaled(formats.y) ? 'f32' : null,
      )
      const gradient = Tensor.own(dx, formats.dx)
      if (amax !== null) gradient.adoptAmax(amax)
      return [gradient, Tensor.own(dw, formats.dw)]
    })
  const again: Make = (scale, x) => only(native.rmsnorm_forward(x, w.handle, scale, 'e4m3/t', eps))
  const across: Make = (scale, x, rstd) => native.rmsnorm_transposed(x, w.handle, rstd, scale)
  remakeFrom(kept && [kept, rstd], y, again, kept === xs ? across : null, scale) // the rstd of a copy is another
  return y
}

function foretoldOf({ foretold }: Tensor, w: Tensor, eps: number): Tensor | null {
  const holds = foretold?.w === w && foretold.eps === eps && foretold.version === native.version(w.handle)
  return holds ? foretold.scale : null
}

/** y = (x − mean) / sqrt(var + eps) · w + b over rows; w and b [N] may be null (OLMo). */
export function layernorm(x: Tensor, w: Tensor | null, b: Tensor | null, eps: number, formats: NormFormats): Tensor {
  const xs = x.as(formats.x)
  const wh = w?.handle ?? null
  const bh = b?.handle ?? null
  const [yHandle, meanHandle, rstdHandle] = native.layernorm_forward(xs.handle, wh, bh, null, formats.y, eps)
  const y = Tensor.own(yHandle, formats.y)
  const mean = Tensor.own(meanHandle)
  const rstd = Tensor.own(rstdHandle)
  const tape = recordedBy(x, w, b)
  const kept = tape && x.as(formats.saved)
  const inputs = [x, ...(w ? [w] : []), ...(b ? [b] : [])]
  if (kept)
    tape.push('layernorm', inputs, y, [kept, mean, rstd], (dy, [kept, mean, rstd]) => {
      if (!kept || !mean || !rstd) return []
      const [dx, dw, db] = native.layernorm_backward(
        dy.handle,
        kept.handle,
        wh,
        mean.handle,
        rstd.handle,
        formats.dx,
        w ? formats.dw : null,
        b ? formats.dw : null,
      )
      return [dx, dw, db].filter((handle) => handle !== null).map((handle) => Tensor.own(handle))
    })
  remakeFrom(kept && [kept], y, (scale, x) => only(native.layernorm_forward(x, wh, bh, scale, 'e4m3/t', eps)))
  return y
}

/** Formats of an activation, and of its gradient. */
export interface ActivationFormats extends NonlinearFormats {
  dx: Plain | 'e5m2/t'
}

/** silu(gate) · up: x = [gate | up] [M, 2F] → [M, F]. A quantized gradient comes with the transpose that its GEMM reads. */
export function swiglu(x: Tensor, formats: ActivationFormats): Tensor {
  const y = activation('swiglu', native.swiglu_forward, x, formats, (dy, x) => swigluGradient(dy, x, formats)[0])
  if (formats.dx === 'e5m2/t') y.gradientFormat = formats.dx
  return y
}

/** dx [M, 2F] and, given the scale of the result, its transpose [F, M], made again from x on the way. */
function swigluGradient(
  dy: Tensor,
  x: Tensor,
  { dx: format }: ActivationFormats,
  scale: Tensor | null = null,
): [dx: Tensor, product: Tensor | null] {
  const turned = format === 'e5m2/t' ? format : null
  const [handle, twin, product] = native.swiglu_backward(
    dy.handle,
    x.handle,
    turned && (dy.knownAmax?.handle ?? null),
    scale?.handle ?? null,
    format,
    turned,
    scale && 'e4m3/t',
  )
  const dx = Tensor.own(handle, format)
  if (twin !== null) dx.adoptTwin(twin, 'e5m2/t', 'e5m2/t transposed')
  return [dx, product === null ? null : Tensor.own(product, 'e4m3/t')]
}

/**
 * linear(swiglu(x), w, b): x [M, 2F], w [N, F] → [M, N]; consumes x. Where the operands are FP8 by the scales that they measure
 * and the tape makes things again, it keeps the FP8 copy of x and one scale, and backward makes the transposed operand of the weight gradient in the same pass
 * as the gradient of x.
 */
export function swigluLinear(
  x: Tensor,
  w: Tensor,
  b: Tensor | null,
  activation: ActivationFormats,
  formats: LinearFormats,
  scales: LinearScales | null = null,
): Tensor {
  const tape = recordedBy(x, w, b)
  const { x: read, saved, y: operand, dx } = activation
  const fp8 = saved === 'e4m3/g16' && operand === 'e4m3/t' && formats.x === operand && dx === 'e5m2/t'
  const remade = tape && tape.recompute !== 'none' && fp8 && scales === null
  if (!remade || !isScaled(formats.dy) || !x.requiresGrad || !w.requiresGrad) {
    const gated = swiglu(x, activation)
    x.dispose()
    const y = linear(gated, w, b, formats, scales)
    gated.dispose()
    return y
  }
  const gated = Tensor.own(native.swiglu_forward(x.as(read).handle, null, operand), operand)
  const kept = x.as(saved).retain()
  try {
    x.dispose() // before the product is there
    const scale = Tensor.own(native.scale_of(gated.handle), 'f32')
    const y = product(gated, w, b, formats)
    gated.dispose()
    tape.push('swiglu', inputsOf(x, w, b), y, [kept, scale, w], (dy, [kept, scale, w]) => {
      if (!kept || !scale || !w) return []
      dy.makeBoth(formats.dy)
      const dgated = inputGradient(dy, w, formats, true)
      dy.dropTwins(formats.dy) // the next pass needs the most memory
      const [dx, again] = swigluGradient(dgated, kept, activation, scale)
      dgated.dispose()
      const dw = weightGradient(dy, again as Tensor, w, formats)
      dy.dropTwins()
      return [dx, dw, biasGradient(dy, b, formats)]
    })
    return y
  } finally {
    kept.release()
  }
}

/** x Φ(x), the exact GELU: [M, N] → [M, N]. */
export function gelu(x: Tensor, formats: ActivationFormats): Tensor {
  return activation('gelu', native.gelu_forward, x, formats, (dy, x) =>
    Tensor.own(native.gelu_backward(dy.handle, x.handle, formats.dx), formats.dx),
  )
}

function activation(
  name: string,
  forward: (x: Handle, scale: Handle | null, y: ActivationFormats['y']) => Handle,
  x: Tensor,
  formats: ActivationFormats,
  backward: (dy: Tensor, x: Tensor) => Tensor,
): Tensor {
  const y = Tensor.own(forward(x.as(formats.x).handle, null, formats.y), formats.y)
  const tape = recordedBy(x)
  const kept = tape && x.as(formats.saved)
  if (kept) tape.push(name, [x], y, [kept], (dy, [kept]) => [backward(dy, kept as Tensor)])
  remakeFrom(kept && [kept], y, (scale, x) => forward(x, scale, 'e4m3/t'))
  return y
}

/** The norm that will read a tensor: its formats and, where it is an RMSNorm, its weight and eps. */
export interface Reader {
  formats: NormFormats
  rms?: { w: Tensor; eps: number }
}

/** a + b in the format of the residual stream, with what its reader asks for: the quantized twin, the scale of the norm. */
export function add(a: Tensor, b: Tensor, format: Plain, reader: Reader | null = null): Tensor {
  const tape = recordedBy(a, b)
  const sum = reader
    ? sumFor(a, b, format, reader, tape !== null)
    : Tensor.own(native.add(a.handle, b.handle, format, null)[0], format)
  tape?.push('add', [a, b], sum, [], (dy) => [dy, dy])
  return sum
}

function sumFor(a: Tensor, b: Tensor, format: Plain, { formats, rms }: Reader, recorded: boolean): Tensor {
  const { x, saved, y } = formats
  if (rms && x === 'e4m3/g16' && y === 'e4m3/t') {
    const { w, eps } = rms
    const [sumHandle, twin, rstd, scale] = native.add_rmsnorm_forward(a.handle, b.handle, w.handle, format, eps)
    native.free(rstd)
    const sum = Tensor.own(sumHandle, format)
    const version = native.version(w.handle)
    sum.adoptTwin(twin, 'e4m3/g16').foretold = { w, version, eps, scale: retained(Tensor.own(scale)) }
    return sum
  }
  const wanted = [x, recorded ? saved : x].includes('e4m3/g16') ? 'e4m3/g16' : null
  const [sumHandle, twin] = native.add(a.handle, b.handle, format, wanted)
  const sum = Tensor.own(sumHandle, format)
  if (twin !== null) sum.adoptTwin(twin, 'e4m3/g16')
  return sum
}

/** Rows of w [V, N] by ids i32 [M] → [M, N]. */
export function embedding(ids: Tensor, w: Tensor, formats: { y: Plain; dw: Plain }): Tensor {
  const table = w.format === 'f32' || w.format === 'bf16' ? w : w.as(formats.y)
  const y = Tensor.own(native.embedding_forward(ids.handle, table.handle, formats.y), formats.y)
  w.dropTwins()
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
  /** Whether q and k come turned (`linear` with a turn), so that only their gradients are left to be. */
  turned?: boolean
  /** Where the document of each row begins, i32 [B·T] (`documentStarts`): rows see, and count positions from, their own. */
  starts?: Tensor | null
  /** A row sees those less than `window` rows away (default 0: all). */
  window?: number
  /** What is kept for backward: qkv, the output and one f32 a head, or an 8-bit copy of qkv alone. */
  saved?: Plain | 'e4m3/g16' | 'i8/g16'
  /** Whether an FP8 product by one scale reads the result, which then comes with its largest magnitude. */
  measured?: boolean
  /** Format of gradients. */
  dx: Plain
}

/**
 * Softmax attention on packed rows: qkv [B·T, (H + 2J)·D] → [B·T, H·D], J key/value heads shared by H query heads.
 * Consumes qkv: RoPE turns it in place, unless it comes turned.
 */
export function attention(qkv: Tensor, options: AttentionOptions): Tensor {
  const { sequence: T, heads: H, kvHeads: J, headDim: D, rope, starts = null, window = 0, saved } = options
  const scale = 1 / Math.sqrt(D)
  const causal = options.causal ? 1 : 0
  const documents = starts?.handle ?? null
  if (rope && !options.turned) native.rope(rope.handle, qkv.handle, documents, H, J, D, 1)
  const format = qkv.format as Plain
  const [outHandle, lseHandle, largest] = native.attention_forward(
    qkv.handle,
    documents,
    format,
    options.measured ? 'f32' : null,
    T,
    H,
    J,
    D,
    causal,
    window,
    scale,
  )
  const out = Tensor.own(outHandle, format)
  if (largest !== null) out.adoptAmax(largest)
  const lse = Tensor.own(lseHandle)
  const tape = recordedBy(qkv)
  if (!tape) return out
  // out and lse are those of qkv: of a copy backward makes its own
  const copies = saved !== undefined && isScaled(saved)
  if (copies) native.attention_center(qkv.handle, T, H, J, D)
  const kept = copies ? [qkv.as(saved)] : [qkv, out, lse]
  const amaxWanted = qkv.gradientFormat ? 'f32' : null
  tape.push('attention', [qkv], out, starts ? [...kept, starts] : kept, (dout, [qkv, out, lse]) => {
    if (!qkv) return []
    const [handle, amax] = native.attention_backward(
      dout.handle,
      qkv.handle,
      documents,
      copies ? null : (out as Tensor).handle,
      copies ? null : (lse as Tensor).handle,
      rope?.handle ?? null,
      options.dx,
      amaxWanted,
      T,
      H,
      J,
      D,
      causal,
      window,
      scale,
    )
    const dqkv = Tensor.own(handle, options.dx)
    if (amax !== null) dqkv.adoptAmax(amax)
    return [dqkv]
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
  if (rope) native.rope(rope.handle, qkv.handle, null, H, J, D, 1)
  const format = qkv.format as Plain
  return Tensor.own(native.attention_cached(qkv.handle, cache.handle, format, H, J, D, first, window, 1 / Math.sqrt(D)))
}
