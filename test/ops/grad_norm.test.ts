// grad_norm: norms of lists in float64, the clip factor, and the skip flag.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkOp, own, read, tensor } from '../harness.ts'
import { sum, vector } from '../values.ts'

describe('grad_norm', () => {
  // one gradient of many chunks, some of several sizes, more of them than one launch takes
  for (const lists of [[600_000], [1, 0, 127, 128, 129, 50_000, 1], Array.from({ length: 203 }, (_, i) => i % 40)])
    checkOp('grad_norm', {
      sizes: [0, 1, 1e6].map((max_norm) => ({ max_norm })),
      lists,
      reference: ({ g, max_norm }) => {
        const squares = g.map(({ data }) => sum(data.length, (i) => (data[i] as number) ** 2))
        const norm = Math.sqrt(squares.reduce((a, b) => a + b))
        return {
          norm: vector(1, () => norm),
          norms: vector(g.length, (i) => Math.sqrt(squares[i] as number)),
          clip: vector(2, (i) => (i === 0 && max_norm > 0 && norm > max_norm ? max_norm / norm : 1 - i)),
        }
      },
    })

  it('numbers whose squares FP32 does not hold count', async () => {
    for (const x of [1e-30, 1e-38, 1e-45, 1e25, 3e38]) {
      const [norm, norms] = await run([new Array(40).fill(x)], 0)
      const expected = Math.sqrt(40) * Math.fround(x)
      expect((norms as number[])[0]).toBe((norm as number[])[0])
      expect((norm as number[])[0]).toBe(Math.fround(expected))
    }
  })

  const run = async (values: number[][], max: number) => {
    const outputs = own(
      native.grad_norm(
        values.map((list) => tensor('f32', [list.length], list)),
        max,
      ),
    )
    return await Promise.all(outputs.map(read))
  }

  it('a hundred gradients of 1e20 have norm 1e21, and each becomes 0.1', async () => {
    const [norm, norms, clip] = await run(new Array(100).fill([1e20]), 1)
    expect((norm as number[])[0]).toBe(Math.fround(1e21))
    expect(new Set(norms)).toEqual(new Set([Math.fround(1e20)]))
    expect((clip as number[])[1]).toBe(0)
    expect(((clip as number[])[0] as number) * 1e20).toBeCloseTo(0.1, 6)
  })

  it.each([Number.NaN, Number.POSITIVE_INFINITY])('one %s asks to skip', async (bad) => {
    const [norm, norms, clip] = await run([[1, 2], [3, bad], [4]], 1)
    expect(Number.isFinite((norm as number[])[0])).toBe(false)
    expect((norms as number[]).map(Number.isFinite)).toEqual([true, false, true])
    expect((clip as number[])[1]).toBe(1)
  })

  it('zeros and an empty list have norm 0 and factor 1', async () => {
    expect(await run([[0, 0]], 1)).toEqual([[0], [0], [1, 0]])
    expect(await run([], 1)).toEqual([[0], [], [1, 0]])
  })
})
