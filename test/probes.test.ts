// Probes against hand calculations, and against searches that do not know their formulas.
import { describe, expect, it } from 'vitest'
import { accumulated, sharpness } from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { devices, moved, own, present, read, tensor } from './harness.ts'
import { Random } from './values.ts'

const ones = (count: number) => new Array<number>(count).fill(1)

describe('sums in narrow accumulators', () => {
  it.each([
    // what the tensor cores keep of FP8 sums
    [32768, { bits: 14, rounding: 'truncate' }, 16384],
    [32768, { bits: 14, rounding: 'truncate', chunk: 128 }, 32768],
    // FP16 of 6 and 9 bits
    [4096, { bits: 10 }, 1024],
    [4096, { bits: 10, chunk: 64 }, 4096],
    [5, { bits: 2 }, 4],
    [7, { bits: 3 }, 7],
  ] as const)('%d ones with %j are %d', (count, accumulator, expected) => {
    expect(accumulated(ones(count), accumulator)).toBe(expected)
  })

  it.each([
    [[1.25, 0], { bits: 2 }, 1],
    [[1.75, 0], { bits: 2 }, 2],
    [[-1.75, 0], { bits: 2 }, -2],
    [[-1.75, 0], { bits: 2, rounding: 'truncate' }, -1.5],
    [[0, -0], { bits: 2 }, 0],
    [[1, Number.POSITIVE_INFINITY], { bits: 9 }, Number.POSITIVE_INFINITY],
  ] as const)('%j with %j is %d', (terms, accumulator, expected) => {
    expect(accumulated(terms, accumulator)).toBe(expected)
  })

  it('of 24 bits is FP32', () => {
    const random = new Random(3)
    const terms = Array.from({ length: 999 }, () => Math.fround(random.typical()))
    expect(accumulated(terms, { bits: 24 })).toBe(terms.reduce((sum, x) => Math.fround(sum + x), 0))
  })

  // arXiv 2412.19437, section 3.3: sums leave the tensor cores every 128 of K
  for (const device of devices)
    it.skipIf(!present(device))(`products on ${device} go on beyond the 16384 where 14 bits end`, async () => {
      const scale = tensor('f32', [1], [1])
      for (const [left, right] of [
        ['e4m3/t', 'e4m3/t'],
        ['e4m3/r', 'e4m3/r'],
        ['e4m3/g128', 'e4m3/b128'],
        ['e4m3/g128p2', 'e4m3/b128p2'],
      ] as const) {
        const a = await moved(tensor(left, [1, 32768], ones(32768), left === 'e4m3/t' ? scale : undefined), device)
        const b = await moved(tensor(right, [1, 32768], ones(32768), left === 'e4m3/t' ? scale : undefined), device)
        const [y] = own(native.matmul_nt(a, b, null, 'f32', null))
        expect(((await read(y))[0] as number) / 32768, left).toBeCloseTo(1, 5)
      }
    })
})

describe('sharpness', () => {
  it('of two equal logits that move by a tenth is 6.2010 %', () => {
    expect(sharpness([0, 0], 0, 0.1)).toBeCloseTo(6.201, 4)
    expect(sharpness([0, 0], 1, 0.1)).toBeCloseTo(6.201, 4)
    expect(sharpness([3, -2, 700], 1, 0)).toBe(0)
  })

  it('is the largest of all corners of the box', () => {
    const random = new Random(5)
    const loss = (logits: number[], target: number) =>
      Math.log(logits.reduce((sum, y) => sum + Math.exp(y), 0)) - (logits[target] as number)
    for (let trial = 0; trial < 20; trial++) {
      const logits = Array.from({ length: 6 }, () => 3 * random.normal())
      const [target, epsilon] = [random.integer(6), 0.2 * random.uniform()]
      let most = 0
      for (let corner = 0; corner < 2 ** 6; corner++) {
        const moved = logits.map((y, i) => y + (corner & (1 << i) ? epsilon : -epsilon) * (Math.abs(y) + 1))
        most = Math.max(most, loss(moved, target))
      }
      const before = loss(logits, target)
      expect(sharpness(logits, target, epsilon)).toBeCloseTo((100 * (most - before)) / (1 + before), 9)
    }
  })

  it('refuses what is not there', () => {
    expect(() => sharpness([0, 0], 2, 0.1)).toThrow('sharpness: target is 2 and must be below 2')
    expect(() => sharpness([0, 0], 0, Number.NaN)).toThrow(
      'sharpness: epsilon is NaN and must be a number of at least 0',
    )
    expect(() => accumulated([1], { bits: 25 })).toThrow('accumulated: bits is 25 and must be an integer from 2 to 24')
    expect(() => accumulated([1], { bits: 9, chunk: 0 })).toThrow('accumulated: chunk is 0 and must be at least 1')
  })
})
