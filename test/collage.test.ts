// AdamW in bf16 arithmetic with numbers in two parts (Collage, arXiv 2405.03637), bit for bit, and the limits of its averages.
import { describe, expect, it } from 'vitest'
import type { Handle } from '../lib/native.gen.ts'
import { native } from '../lib/native.ts'
import type { FloatFormat } from '../lib/tensor.ts'
import { bytesOf, checkSame, own, read, tensor } from './harness.ts'
import { type Rule, step, usual } from './steps.ts'
import { Random } from './values.ts'

const bits = new DataView(new ArrayBuffer(4))
/** x as a bf16, to nearest even. */
function bf16(x: number): number {
  bits.setFloat32(0, x)
  const u = bits.getUint32(0)
  if ((u & 0x7f800000) === 0x7f800000) return bits.getFloat32(0)
  bits.setUint32(0, ((u + 0x7fff + ((u >>> 16) & 1)) & 0xffff0000) >>> 0)
  return bits.getFloat32(0)
}

type Parts = readonly [high: number, low: number]
function twoSum(a: number, b: number): Parts {
  const sum = bf16(a + b)
  const ofB = bf16(sum - a)
  const ofA = bf16(sum - ofB)
  return [sum, bf16(bf16(b - ofB) + bf16(a - ofA))]
}
function grow([high, low]: Parts, x: number): Parts {
  const [sum, rest] = twoSum(high, x)
  return twoSum(sum, bf16(low + rest))
}
function multiply([a, aLow]: Parts, [b, bLow]: Parts): Parts {
  const high = bf16(a * b)
  return twoSum(high, bf16(a * b - high + bf16(bf16(a * bLow) + bf16(aLow * b))))
}

const { fround } = Math
/** The algorithm of the paper for one element, with a rounding to bf16 wherever it has one; its numbers are f32. */
function collage(
  { p, m, v }: { p: Parts; m: number; v: Parts },
  g: number,
  t: number,
  { lr, beta1, beta2, eps, decay }: Rule,
  plus: boolean,
): { p: Parts; m: number; v: Parts } {
  const beta: Parts = [bf16(beta2), bf16(beta2 - bf16(beta2))]
  const first = bf16(bf16(fround(beta1) * m) + fround(fround(1 - beta1) * g))
  const square = fround(fround(fround(1 - beta2) * g) * g)
  const second: Parts = plus ? grow(multiply(v, beta), bf16(square)) : [bf16(bf16(fround(beta2) * v[0]) + square), 0]
  const under = Math.sqrt(second[0]) / Math.sqrt(1 - beta2 ** t) + eps
  const step = bf16(-lr * (first / (1 - beta1 ** t) / under + decay * p[0]))
  return { p: grow(p, step), m: first, v: second }
}

/** Both parts of a tensor in bf16x2, [1, n]. */
async function partsOf(handle: Handle): Promise<Parts[]> {
  const words = new Uint16Array((await bytesOf(handle)).buffer)
  const n = native.info(handle).shape[1] as number
  const value = (word = 0) => {
    bits.setUint32(0, word * 2 ** 16)
    return bits.getFloat32(0)
  }
  const second = Math.ceil(n / 8) * 8
  return Array.from({ length: n }, (_, i) => [value(words[i]), value(words[second + i])])
}

describe('Collage', () => {
  const one = (format: FloatFormat, value: number) => tensor(format, [1, 1], [value])
  const formats = { light: 'bf16', plus: 'bf16x2' } as const

  it.each([
    [0.999, 1, -0.00099945068359375],
    [0.99, 0.98828125, 0.00171661376953125],
    [0.98, 0.98046875, -0.000469207763671875],
    [0.95, 0.94921875, 0.000782012939453125],
  ])('plus has beta2 %f in two parts, and multiplies by both', async (beta2, high, low) => {
    const v = one('bf16x2', 1)
    step(1, [one('bf16x2', 1)], [one('bf16', 0)], [one('bf16', 0)], [v], { ...usual, beta2 })
    expect(await partsOf(v)).toEqual([[high, low]])
  })

  it.each([
    [0.999, [0.9921875, -0.001953125], 0.5, 0.25],
    [0.99, [1, 0.000244140625], 0.98046875, 0.8046875],
    [0.98, [1, 0.000881195068359375], 0.87890625, 0.90625],
    [0.95, [1, 0.0008697509765625], 0.98046875, 0.9609375],
  ])(
    'beta2 %f: where v ends under gradients of 1, in two parts, in bf16, and rounded once a step',
    async (beta2, plus, light, once) => {
      const [parts, plain, rounded] = [one('bf16x2', 0), one('bf16', 0), one('bf16', 0)]
      const [g, m] = [one('bf16', 1), one('bf16', 0)]
      const rule = { ...usual, lr: 0, beta2 }
      for (let t = 1; t <= 20_000; t++) {
        step(t, [one('bf16x2', 0)], [g], [m], [parts], rule)
        step(t, [one('bf16x2', 0)], [g], [m], [plain], rule)
        step(t, [one('bf16', 0)], [g], [m], [rounded], rule)
      }
      expect(await partsOf(parts)).toEqual([plus])
      expect([await read(plain), await read(rounded)]).toEqual([[light], [once]])
    },
  )

  it('four updates of 2^-9 make 1 + 2^-7, part by part', async () => {
    const [p, g] = [one('bf16x2', 1), one('bf16', -1)]
    const seen: (Parts | undefined)[] = []
    for (let t = 1; t <= 4; t++) {
      const rule = { lr: 2 ** -9, beta1: 0, beta2: 0, eps: 1e-12, decay: 0 }
      step(t, [p], [g], [one('bf16', 0)], [one('bf16', 0)], rule)
      seen.push(...(await partsOf(p)))
    }
    expect(seen).toEqual([
      [1, 2 ** -9],
      [1, 2 ** -8],
      [1.0078125, -(2 ** -9)],
      [1.0078125, 0],
    ])
  })

  it('an update larger than the parameter loses nothing of it', async () => {
    const p = one('bf16x2', 2 ** -10)
    step(1, [p], [one('bf16', -1)], [one('bf16', 0)], [one('bf16', 0)], { ...usual, lr: 1, eps: 1e-12 })
    expect(await partsOf(p)).toEqual([[1, 2 ** -10]])
  })

  const rule = { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-6, decay: 0.1 }
  const numbers = (seed: number, n: number) => {
    const random = new Random(seed)
    return Float64Array.from({ length: n }, () => bf16(random.typical()))
  }
  const lengths = [1, 127, 300, 4099]
  const members = (variant: keyof typeof formats) =>
    lengths.map((n, i) => ({
      p: tensor('bf16x2', [1, n], numbers(i, n)),
      m: tensor('bf16', [1, n], new Float64Array(n)),
      v: tensor(formats[variant], [1, n], new Float64Array(n)),
    }))

  it.each(['light', 'plus'] as const)(
    '%s: bit for bit the algorithm of the paper, step after step',
    async (variant) => {
      const list = members(variant)
      const states = lengths.map((n, i) =>
        [...numbers(i, n)].map((x): Parameters<typeof collage>[0] => ({ p: [x, 0], m: 0, v: [0, 0] })),
      )
      const pick = (key: 'p' | 'm' | 'v') => list.map((member) => member[key])
      for (let t = 1; t <= 5; t++) {
        const gradients = lengths.map((n, i) => numbers(10 * t + i, n))
        const g = gradients.map((values) => tensor('bf16', [1, values.length], values))
        step(t, pick('p'), g, pick('m'), pick('v'), rule)
        for (const [i, { p, m, v }] of list.entries()) {
          const now = states[i] as Parameters<typeof collage>[0][]
          now.forEach((state, e) => {
            now[e] = collage(state, gradients[i]?.[e] as number, t, rule, variant === 'plus')
          })
          expect(await read(m)).toEqual(now.map((state) => state.m))
          const second = variant === 'plus' ? await partsOf(v) : (await read(v)).map((x) => [x, 0])
          expect(second).toEqual(now.map((state) => state.v))
          expect(await partsOf(p)).toEqual(now.map((state) => state.p))
        }
      }
    },
  )

  for (const variant of ['light', 'plus'] as const)
    checkSame(`${variant}, with parameters in f32 and bf16 beside`, (device) => {
      const list = lengths.flatMap((n, i) => {
        const made = (format: FloatFormat, values: Float64Array) => {
          const from = native.make('f32', [1, n], device, 'temp')
          native.write(from, Float32Array.from(values))
          const handle = own(native.convert(from, null, format))
          native.free(from)
          return handle
        }
        const none = new Float64Array(n)
        return (['bf16x2', 'f32', 'bf16'] as const).map((format) => ({
          p: made(format, numbers(i, n)),
          g: made('bf16', numbers(10 + i, n)),
          m: made('bf16', none),
          v: made(formats[variant], none),
        }))
      })
      const pick = (key: 'p' | 'g' | 'm' | 'v') => list.map((member) => member[key])
      for (let t = 1; t <= 4; t++) step(t, pick('p'), pick('g'), pick('m'), pick('v'), rule)
      return [...pick('p'), ...pick('m'), ...pick('v')]
    })

  it('what overflows leaves the largest number, which later steps forget', async () => {
    const [p, m, v] = [one('bf16x2', 1), one('bf16', 0), one('bf16x2', 0)]
    step(1, [p], [one('bf16', 1e21)], [m], [v], usual)
    expect(await partsOf(v)).toEqual([[3.3895313892515355e38, 0]])
    for (let t = 2; t <= 3; t++) step(t, [p], [one('bf16', 1)], [m], [v], usual)
    expect((await read(v))[0]).toBeLessThan(3.39e38)
    expect((await read(p))[0]).toBeCloseTo(1, 2)
  })
})
