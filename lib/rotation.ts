// Positions: where documents begin, and the rotation of queries and keys, its angles and the table of their cosines and sines.
import { CoatError } from './native.ts'
import { Tensor, type TensorOptions } from './tensor.ts'

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

/**
 * `starts` of packed documents as a tensor i32 [B·T]: the position in its sequence of `sequence` rows where the document of
 * each row begins. Throws where a document begins after its row, or after the one before it has ended.
 */
export function documentStarts(starts: Int32Array, sequence: number, device: TensorOptions['device'] = 'cpu'): Tensor {
  expectStarts(starts, sequence)
  return Tensor.from(starts, [starts.length], { device })
}

/** Throws where a document begins after its row, or after the one before it has ended. */
export function expectStarts(starts: Int32Array, sequence: number): void {
  const wrong = starts.findIndex((start, m) => {
    const t = m % sequence
    return start !== t && (t === 0 || start !== starts[m - 1])
  })
  if (wrong >= 0)
    throw new CoatError(
      `documentStarts: starts[${wrong}] is ${starts[wrong]} and must be its position ${wrong % sequence}, where a document begins, or that of the row before`,
      'value',
      'documentStarts',
      'starts',
    )
}
