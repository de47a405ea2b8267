// random: Philox 4x32-10 and Box-Muller written again in float64, moments, and independence of the shape.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { bytesOf, checkOp, own, read } from '../harness.ts'
import { matrix } from '../values.ts'

function philox(seed: number, counter: number): number[] {
  let [a, b, c, d] = [BigInt(counter) & 0xffffffffn, BigInt(counter) >> 32n, 0n, 0n]
  let [k0, k1] = [BigInt(seed) & 0xffffffffn, BigInt(seed) >> 32n]
  for (let round = 0; round < 10; round++) {
    const [p, q] = [0xd2511f53n * a, 0xcd9e8d57n * c]
    ;[a, b, c, d] = [(q >> 32n) ^ b ^ k0, q & 0xffffffffn, (p >> 32n) ^ d ^ k1, p & 0xffffffffn]
    ;[k0, k1] = [(k0 + 0x9e3779b9n) & 0xffffffffn, (k1 + 0xbb67ae85n) & 0xffffffffn]
  }
  return [a, b, c, d].map(Number)
}
const uniform = (word: number) => ((word >>> 9) + 0.5) / 2 ** 23

describe('random', () => {
  const sizes = [
    { M: 0, N: 5, seed: 1 },
    { M: 1, N: 1, seed: 0 },
    { M: 3, N: 17, seed: 2 ** 40 + 3 },
    { M: 129, N: 257, seed: 42 },
  ]
  checkOp('random_normal', {
    sizes,
    numbers: { mean: 0.5, std: 2 },
    // the cosine of a quarter turn is 0: errors are relative to the radius
    reference: ({ M, N, seed }) => {
      const words = Array.from({ length: M * N }, (_, i) => philox(seed, i).map(uniform) as [number, number])
      const radius = (i: number) => Math.sqrt(-2 * Math.log((words[i] as [number, number])[0]))
      return {
        y: matrix(
          M,
          N,
          (m, n) => 0.5 + 2 * radius(m * N + n) * Math.cos(2 * Math.PI * (words[m * N + n] as [number, number])[1]),
        ),
        '|y|': matrix(M, N, (m, n) => 0.5 + 2 * radius(m * N + n)),
      }
    },
    slack: 2e-6,
  })
  checkOp('random_uniform', {
    sizes,
    numbers: { low: -1, high: 3 },
    reference: ({ M, N, seed }) => ({
      y: matrix(M, N, (m, n) => -1 + 4 * uniform(philox(seed, m * N + n)[0] as number)),
      '|y|': matrix(M, N, () => 4),
    }),
  })

  it('philox here has its published values', () => {
    expect(philox(0, 0)).toEqual([0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8])
  })

  it('random_normal has the moments of a normal distribution', async () => {
    const x = await read(own(native.random_normal('f32', 1000, 1000, 0, 1, 7, 'cpu')))
    const moment = (power: number) => x.reduce((total, value) => total + value ** power, 0) / x.length
    expect(Math.abs(moment(1))).toBeLessThan(0.004)
    expect(Math.abs(moment(2) - 1)).toBeLessThan(0.006)
    expect(Math.abs(moment(3))).toBeLessThan(0.02)
    expect(Math.abs(moment(4) - 3)).toBeLessThan(0.05)
    const lag = x.slice(1).reduce((total, value, i) => total + value * (x[i] as number), 0) / x.length
    expect(Math.abs(lag)).toBeLessThan(0.004)
  })

  it('random_uniform stays strictly inside (0, 1) and fills it evenly', async () => {
    const x = await read(own(native.random_uniform('f32', 1000, 1000, 0, 1, 8, 'cpu')))
    const counts = new Array(10).fill(0)
    for (const value of x) {
      if (!(value > 0 && value < 1)) throw new Error(`${value}`)
      counts[Math.floor(value * 10)] += 1
    }
    for (const count of counts) expect(Math.abs(count - 1e5)).toBeLessThan(1200)
  })

  it('bits depend on seed and position alone', async () => {
    const draw = async (M: number, N: number, seed: number) =>
      await bytesOf(own(native.random_normal('f32', M, N, 0, 1, seed, 'cpu')))
    const base = await draw(60, 70, 5)
    expect(await draw(60, 70, 5)).toEqual(base)
    expect(await draw(1, 4200, 5)).toEqual(base)
    expect((await draw(70, 70, 5)).subarray(0, base.length)).toEqual(base)
    expect(await draw(60, 70, 6)).not.toEqual(base)
    expect(await draw(60, 70, 5 + 2 ** 32)).not.toEqual(base)
  })
})
