// Which of several ranks keeps the states of which parameters: whole tensors, or equal parts of all of them end to end.
import { CoatError, native } from './native.ts'
import { isScaled, Tensor } from './tensor.ts'

/** Rows [from, to) of a matrix. */
export type Rows = readonly [from: number, to: number]

/** What one rank updates of one of several tensors: the tensor at this place, or rows of it. */
export interface Piece {
  readonly place: number
  readonly rank: number
  readonly rows: Rows | null
}

function expectRanks(op: string, ranks: number): void {
  if (!Number.isSafeInteger(ranks) || ranks < 1)
    throw new CoatError(`${op}: ranks is ${ranks} and must be an integer of at least 1`, 'value', op, 'ranks')
}

/**
 * Whole tensors to ranks (FP8-LM, arXiv 2310.18313, algorithm 1): the largest first, each to the rank that has least so far, the
 * lower one of equals. Returns the places of the tensors in `sizes`, by rank: tensors with one scale each are not cut.
 */
export function partitionWhole(sizes: readonly number[], ranks: number): number[][] {
  expectRanks('partitionWhole', ranks)
  const parts = Array.from({ length: ranks }, () => ({ load: 0, places: [] as number[] }))
  const order = sizes.map((size, place) => ({ size, place })).sort((a, b) => b.size - a.size || a.place - b.place)
  for (const { size, place } of order) {
    const least = parts.reduce((best, part) => (part.load < best.load ? part : best))
    least.load += size
    least.places.push(place)
  }
  return parts.map(({ places }) => places)
}

// No format of states has longer runs: those of a piece that begins at a multiple of them are those of the whole tensor.
const longestRun = 256

/**
 * Equal parts of all tensors, laid end to end, to ranks in their order (ZeRO, arXiv 1910.02054): a tensor that lies in several
 * parts is cut between rows, where runs of its states begin. `cuttable` false: it is a vector, or has one scale. Cuts are as near
 * to equal parts as that allows.
 */
export function partitionFlat(
  tensors: readonly { rows: number; columns: number; cuttable: boolean }[],
  ranks: number,
): Piece[] {
  expectRanks('partitionFlat', ranks)
  const total = tensors.reduce((sum, { rows, columns }) => sum + rows * columns, 0)
  const pieces: Piece[] = []
  let before = 0
  for (const [place, { rows, columns, cuttable }] of tensors.entries()) {
    const step = cuttable ? longestRun / commonDivisor(longestRun, columns) : rows
    // of the legal rows the nearest to each cut, or an end
    const cuts = Array.from({ length: ranks - 1 }, (_, i) => {
      const row = ((total / ranks) * (i + 1) - before) / columns
      const below = Math.floor(row / step) * step
      const near = row - below <= Math.min(below + step, rows) - row ? below : below + step
      return Math.min(rows, Math.max(0, near))
    })
    const ends = [0, ...cuts, rows]
    for (let rank = 0; rank < ranks; rank++) {
      const [from, to] = [ends[rank] as number, ends[rank + 1] as number]
      if (from < to) pieces.push({ place, rank, rows: to - from === rows ? null : [from, to] })
    }
    before += rows * columns
  }
  return pieces
}

function commonDivisor(a: number, b: number): number {
  return b === 0 ? a : commonDivisor(b, a % b)
}

/** A copy of rows of a plain or scaled matrix, in f32 where it is scaled. */
export function rowsOf(tensor: Tensor, [from, to]: Rows): Tensor {
  const plain = isScaled(tensor.format) ? Tensor.own(native.convert(tensor.handle, null, 'f32')) : tensor
  return Tensor.own(native.slice_rows(plain.handle, plain.format as 'f32' | 'bf16', from, to - from))
}

/** Puts a copy of rows back. */
export function placeRows(tensor: Tensor, rows: Tensor, [from]: Rows): void {
  native.place_rows(tensor.handle, rows.handle, from)
}
