// scaler: largest magnitudes, with NaN above Inf, and scales read back.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkOp, own, read, sizes, stored, tensor } from '../harness.ts'
import { largest, vector } from '../values.ts'

describe('scaler', () => {
  checkOp('amax', {
    sizes: sizes.filter(({ M }) => M > 0),
    reference: ({ x, M, N }) => ({ y: vector(1, () => largest(M * N, (i) => Math.abs(x(i)))) }),
  })

  it('amax of nothing is 0; NaN wins over Inf, Inf over numbers', async () => {
    const amax = async (values: number[]) => (await read(own(native.amax(tensor('f32', [values.length], values)))))[0]
    expect(await amax([])).toBe(0)
    expect(await amax([1, -3, 2])).toBe(3)
    expect(await amax([1, Number.NEGATIVE_INFINITY, 2])).toBe(Number.POSITIVE_INFINITY)
    expect(await amax([1, Number.NaN, Number.POSITIVE_INFINITY])).toBeNaN()
    // one NaN in many chunks of work
    expect(await amax(Array.from({ length: 100_000 }, (_, i) => (i === 77_777 ? Number.NaN : i)))).toBeNaN()
  })

  it.each(['e4m3/t', 'e5m2/t'] as const)('scale_of returns the scale stored in %s', async (format) => {
    const x = tensor(
      format,
      [3, 5],
      Array.from({ length: 15 }, (_, i) => i - 4),
    )
    expect(await read(own(native.scale_of(x)))).toEqual([(await stored(x)).blocks[0]?.scale])
  })
})
