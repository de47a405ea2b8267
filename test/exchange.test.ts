// Gradients of several ranks in FP8: sums with one scale, the factor mu by both readings, whole tensors to ranks.
import { afterEach, describe, expect, it } from 'vitest'
import { AutomaticMu, partitionWhole, saturatedShare, sumGradients, Tensor } from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { devices, present } from './harness.ts'
import { Random } from './values.ts'

describe.each(devices)('sums on %s', (device) => {
  const test = it.skipIf(!present(device))
  afterEach(() => native.checkGuards())

  const mean = async (ranks: number[][], mu?: number) => {
    const given = ranks.map((values) => Tensor.from(values, [1, values.length], { device }))
    const { sum, count } = sumGradients(given, mu)
    const values = [...((await sum.read()) as Float32Array)].map((value) => value / count)
    const share = await saturatedShare(sum)
    for (const tensor of [sum, ...given]) tensor.dispose()
    return { values, share }
  }

  test('3 and 7 with one scale of 64: 192 + 448 saturates, and the mean is 3.5', async () => {
    expect(await mean([[3], [7]])).toEqual({ values: [3.5], share: 1 })
  })
  test('with mu 1/2 it is 5; with 1 / sqrt 2 it is 4.9497, of the largest code', async () => {
    expect(await mean([[3], [7]], 0.5)).toEqual({ values: [5], share: 0 })
    const { values, share } = await mean([[3], [7]], Math.SQRT1_2)
    expect(values[0]).toBeCloseTo(4.9497, 4)
    expect(share).toBe(1)
  })
  test('a rank with an infinity leaves the scale of the others', async () => {
    expect(
      (
        await mean(
          [
            [3, Number.POSITIVE_INFINITY],
            [3, 1],
          ],
          0.5,
        )
      ).values,
    ).toEqual([3, 3.5])
  })
  test('four ranks: within a step of the format of the mean', async () => {
    const random = new Random(3)
    const ranks = Array.from({ length: 4 }, () => Array.from({ length: 999 }, () => random.normal()))
    const { values } = await mean(ranks, 0.25)
    const largest = Math.max(...ranks.flat().map(Math.abs))
    values.forEach((value, i) => {
      const exact = ranks.reduce((sum, rank) => sum + (rank[i] as number), 0) / 4
      const parts = ranks.reduce((sum, rank) => sum + Math.abs(rank[i] as number), 0) / 4
      expect(Math.abs(value - exact)).toBeLessThan((Math.abs(exact) + parts) / 16 + largest * 2 ** -15)
    })
  })
})

describe('mu', () => {
  it('relative: doubles in 1000 clean steps, is halved by more than 1 in 100 000', () => {
    const mu = new AutomaticMu({ ranks: 16, bounds: [2 ** -16, 4] })
    expect(mu.value).toBe(0.25)
    for (let i = 0; i < 1000; i++) mu.update(i % 2 === 0 ? 0 : 1e-5)
    expect(mu.value).toBeCloseTo(0.5, 12)
    mu.update(2e-5)
    expect(mu.value).toBeCloseTo(0.25, 12)
  })
  it('relative: stays within its bounds', () => {
    const mu = new AutomaticMu({ ranks: 1 })
    mu.update(0)
    expect(mu.value).toBe(1)
    for (let i = 0; i < 99; i++) mu.update(1)
    expect(mu.value).toBe(2 ** -16)
  })
  it('absolute: 1/2 on saturation, then 2 after 1000 steps and no more', () => {
    const mu = new AutomaticMu({ ranks: 16, reading: 'absolute' })
    mu.update(1)
    mu.update(1)
    expect(mu.value).toBe(0.5)
    for (let i = 0; i < 500; i++) mu.update(0)
    expect(mu.value).toBeCloseTo(1, 12)
    for (let i = 0; i < 600; i++) mu.update(0)
    expect(mu.value).toBeCloseTo(2, 12)
    expect(mu.value).toBeLessThanOrEqual(2)
  })
  it('refuses nonsense', () => {
    expect(() => new AutomaticMu({ ranks: 0 })).toThrow(/AutomaticMu: ranks is 0 and must be an integer of at least 1/)
    expect(() => new AutomaticMu({ ranks: 1, reading: 'paper' as never })).toThrow(/reading is paper and must be/)
    expect(() => sumGradients([])).toThrow(/ranks are 0/)
  })
})

it.each([
  [
    [7, 5, 4, 3, 1],
    2,
    [
      [0, 3],
      [1, 2, 4],
    ],
  ],
  [
    [8, 7, 6, 5, 4],
    2,
    [
      [0, 3, 4],
      [1, 2],
    ],
  ],
  [
    [1, 7, 3, 5, 4],
    2,
    [
      [1, 2],
      [3, 4, 0],
    ],
  ],
  [[2, 2], 3, [[0], [1], []]],
])('whole tensors of %j on %i ranks', (sizes, ranks, expected) => {
  expect(partitionWhole(sizes, ranks)).toEqual(expected)
})
