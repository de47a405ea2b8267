// Emulated arithmetic: f32 tensors that hold numbers of fewer bits, rounded after each operation. A reference, and slow.
import { arithmeticOf, expectChunk } from './axes.ts'
import type { Handle } from './native.gen.ts'
import { native } from './native.ts'
import type { Arithmetic, Emulation } from './recipes.ts'
import { recordedBy } from './tape.ts'
import { Tensor, transposed } from './tensor.ts'

/** Of stochastic rounding, whose bits come from it, the place and the value; and a power of two that stands for a loss scale. */
export interface RoundOptions {
  seed?: number
  /** What values are multiplied by before they are rounded, and divided by afterwards (default 1). */
  lossScale?: number
}

/** x f32 in any shape, rounded. */
export function roundTo(x: Tensor, arithmetic: Arithmetic, { seed = 0, lossScale = 1 }: RoundOptions = {}): Tensor {
  return Tensor.own(native.round_to(x.handle, ...arithmeticOf(arithmetic, lossScale), seed))
}

/** The same for a tensor that is held in place. */
export function roundInto(x: Handle, arithmetic: Arithmetic, seed: number): void {
  const rounded = native.round_to(x, ...arithmeticOf(arithmetic), seed)
  native.assign(x, rounded)
  native.free(rounded)
}

/** a bᵀ + bias: a [M, K], b [N, K], bias [N] → [M, N], f32; sums as the emulation says. */
export function matmulEmulated(
  a: Tensor,
  b: Tensor,
  bias: Tensor | null,
  { sum, chunk }: Pick<Emulation, 'sum' | 'chunk'>,
  { seed = 0, lossScale = 1 }: RoundOptions = {},
): Tensor {
  expectChunk({ sum, chunk })
  const added = bias?.handle ?? null
  if (sum === 'f32') return Tensor.own(native.matmul_nt(a.handle, b.handle, added, 'f32', null)[0])
  const arithmetic = arithmeticOf(sum, lossScale)
  return Tensor.own(native.matmul_emulated(a.handle, b.handle, added, chunk, ...arithmetic, seed))
}

/** An emulation at one place of a model, whose seed is its own. */
export interface PlacedEmulation extends Emulation {
  seed: number
}

/** y = x wᵀ + b of rounded operands: x [M, K], w [N, K], b [N] → [M, N]; the products of its gradients are like it. */
export function emulatedLinear(x: Tensor, w: Tensor, b: Tensor | null, emulation: PlacedEmulation): Tensor {
  const { operand, sum, result, lossScale } = emulation
  const operands = typeof operand === 'string' ? { x: operand, w: operand, dy: operand } : operand
  const results = typeof result === 'string' ? { y: result, dx: result, dw: result } : (result ?? {})
  const inputs = [x, w, ...(b ? [b] : [])]
  const tape = recordedBy(...inputs)
  const at = (place: number) => ({ seed: emulation.seed + place })
  const scaled = (place: number) => ({ ...at(place), lossScale })
  const whole = (sums: Tensor, arithmetic: Arithmetic | undefined, options: RoundOptions) => {
    if (arithmetic === undefined) return sums
    const rounded = roundTo(sums, arithmetic, options)
    sums.dispose()
    return rounded
  }
  const weight = (w: Tensor) => roundTo(w, operands.w, at(1))
  const kept = roundTo(x, operands.x, at(0))
  const wq = weight(w)
  const y = whole(matmulEmulated(kept, wq, b, emulation, at(2)), results.y, at(7))
  wq.dispose()
  tape?.push('linear', inputs, y, [kept, w], (dy, [kept, w]) => {
    if (!kept || !w) return []
    const d = roundTo(dy, operands.dy, scaled(3))
    const product = (a: Tensor, b: Tensor, place: number) => matmulEmulated(a, b, null, emulation, scaled(place))
    const dx = x.requiresGrad ? whole(product(d, transposed(weight(w)), 4), results.dx, scaled(8)) : null
    const dw = w.requiresGrad ? whole(product(transposed(d), transposed(kept), 5), results.dw, scaled(9)) : null
    const column = () => Tensor.own(native.column_sum(d.handle, 'f32'))
    const db = b?.requiresGrad
      ? whole(whole(column(), sum === 'f32' ? undefined : sum, scaled(6)), results.dw, scaled(10))
      : null
    return [dx, dw, db]
  })
  return y
}
