// Formats held against their definitions: codes, rounding, saturation, scales, range expansion.
import { describe, expect, it } from 'vitest'
import type { AnyFormat } from '../lib/native.gen.ts'
import { native } from '../lib/native.ts'
import { type Block, expansionOf, interval, kinds, valueOfCode } from './decode.ts'
import { bytesOf, own, read, stored, tensor } from './harness.ts'
import { Random } from './values.ts'

const scaled = [
  ...([
    'e4m3/t',
    'e4m3/g16',
    'i8/g16',
    'e4m3/g64',
    'e4m3/g128',
    'e4m3/g256',
    'e4m3/b128',
    'e4m3/r',
    'e4m3/g128p2',
    'e4m3/b128p2',
    'e4m3/x64',
    'e4m3/x128',
    'e4m3/x256',
  ] as const),
  ...(['e5m2/t', 'e5m2/g128', 'e5m2/x128', 'f16/t'] as const),
]
const codes = Array.from({ length: 256 }, (_, code) => code)
const one = () => tensor('f32', [1], [1])
/** The f32 `steps` after x, away from 0. */
function beside(x: number, steps: number): number {
  const float = Float32Array.of(x)
  const bits = new Int32Array(float.buffer)
  bits[0] = (bits[0] as number) + steps
  return float[0] as number
}

/** The codes of values under a scale of exactly 1. */
async function encode(format: 'e4m3/t' | 'e5m2/t', values: readonly number[]): Promise<number[]> {
  return [...(await stored(tensor(format, [values.length], values, one()))).codes]
}
/** What the native code makes of stored bytes, in f32. */
async function decoded(handle: number): Promise<number[]> {
  return await read(own(native.convert(handle, null, 'f32')))
}

describe('e4m3/b128', () => {
  it('has a scale a block of 128 x 128, short ones at the ends, and no block changes another', async () => {
    const [M, N] = [300, 150]
    const value = (m: number, n: number) => Math.sin(m * N + n) * 10 ** ((m >> 7) - (n >> 7))
    const make = (change: (i: number) => number) =>
      stored(
        tensor(
          'e4m3/b128',
          [M, N],
          Float32Array.from({ length: M * N }, (_, i) => value(Math.floor(i / N), i % N) * change(i)),
        ),
      )
    const { blocks, codes } = await make(() => 1)
    expect(blocks.length).toBe(6)
    for (const [b, { scale }] of blocks.entries()) {
      let most = 0
      for (let m = (b >> 1) * 128; m < Math.min(M, (b >> 1) * 128 + 128); m++)
        for (let n = (b % 2) * 128; n < Math.min(N, (b % 2) * 128 + 128); n++)
          most = Math.max(most, Math.abs(Math.fround(value(m, n))))
      expect(scale).toBe(Math.fround(most / 448))
    }
    const other = await make((i) => (i === 130 * N + 3 ? 1e6 : 1)) // in block 2
    expect(other.blocks.map(({ scale }, b) => scale === blocks[b]?.scale)).toEqual([
      true,
      true,
      false,
      true,
      true,
      true,
    ])
    other.codes.forEach((code, i) => {
      if (other.blockOf(i) !== 2) expect(code).toBe(codes[i])
    })
  })
})

describe.each([
  ['e4m3', 0x7e, 254, [0x7f, 0xff]],
  ['e5m2', 0x7b, 248, [0x7d, 0x7e, 0x7f, 0xfd, 0xfe, 0xff]],
] as const)('%s codes', (kind, top, count, nans) => {
  const format = `${kind}/t` as const
  const finite = codes.filter((code) => Number.isFinite(valueOfCode(kind, code)))

  it('all 256 decode by their bits', async () => {
    const x = own(native.make(format, [256], 'cpu', 'temp'))
    native.write(x, Uint8Array.from([...codes, 0, 0, 0x80, 0x3f]))
    expect(await decoded(x)).toEqual(codes.map((code) => valueOfCode(kind, code)))
    expect(codes.filter((code) => Number.isNaN(valueOfCode(kind, code)))).toEqual(nans)
  })

  it(`the ${count} finite ones encode to themselves and increase`, async () => {
    expect(finite.length).toBe(count)
    expect(
      await encode(
        format,
        finite.map((code) => valueOfCode(kind, code)),
      ),
    ).toEqual(finite)
    for (let code = 1; code <= top; code++) expect(valueOfCode(kind, code)).toBeGreaterThan(valueOfCode(kind, code - 1))
  })

  it('ties go to even codes, everything else to the nearest', async () => {
    const middles = codes.slice(0, top).map((code) => (valueOfCode(kind, code) + valueOfCode(kind, code + 1)) / 2)
    const even = middles.map((_, code) => code + (code % 2))
    expect(await encode(format, middles)).toEqual(even)
    expect(
      await encode(
        format,
        middles.map((x) => -x),
      ),
    ).toEqual(even.map((code) => code | 0x80))
    expect(
      await encode(
        format,
        middles.map((x) => beside(x, 1)),
      ),
    ).toEqual(middles.map((_, code) => code + 1))
    expect(
      await encode(
        format,
        middles.map((x) => beside(x, -1)),
      ),
    ).toEqual(middles.map((_, code) => code))
  })
})

describe('casts with a scale of 1', () => {
  it.each([
    [448, 0x7e],
    [464, 0x7e],
    [465, 0x7e],
    [1000, 0x7e],
    [-1000, 0xfe],
    [-0, 0x80],
    [0, 0x00],
    [2 ** -9, 0x01],
    [2 ** -10, 0x00],
    [beside(2 ** -10, 1), 0x01],
    [1.5 * 2 ** -9, 0x02],
    [2.5 * 2 ** -9, 0x02],
    [17, 0x58],
    [19, 0x5a],
    [1e-40, 0x00],
    [-1e-40, 0x80],
  ])('e4m3 of %f is %i', async (x, code) => {
    expect(await encode('e4m3/t', [x])).toEqual([code])
  })
  it.each([
    [57344, 0x7b],
    [61440, 0x7b],
    [3e38, 0x7b],
    [2 ** -16, 0x01],
    [2 ** -17, 0x00],
    [-0, 0x80],
  ])('e5m2 of %f is %i', async (x, code) => {
    expect(await encode('e5m2/t', [x])).toEqual([code])
  })
})

describe('bf16', () => {
  const round = async (values: number[]) => await read(tensor('bf16', [values.length], values))
  it('rounds to nearest, ties to even, overflow to Inf', async () => {
    expect(await round([1 + 2 ** -8, 1 + 3 * 2 ** -8, 1 + 2 ** -8 + 2 ** -20, -0, 3.3895e38, 3.4e38, -3.4e38])).toEqual(
      [1, 1 + 2 ** -6, 1 + 2 ** -7, -0, 3.3895313892515355e38, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY],
    )
  })
  it('keeps every bf16, and every NaN a NaN', async () => {
    const x = own(native.make('bf16', [65536], 'cpu', 'temp'))
    native.write(
      x,
      Uint16Array.from({ length: 65536 }, (_, i) => i),
    )
    const back = own(native.convert(own(native.convert(x, null, 'f32')), null, 'bf16'))
    const [before, after] = [await read(x), await read(back)]
    expect(after).toEqual(before)
    const f = own(native.make('f32', [3], 'cpu', 'temp'))
    native.write(f, Uint32Array.of(0x7f800001, 0xff800001, 0x7fffffff))
    expect(await read(own(native.convert(f, null, 'bf16')))).toEqual([Number.NaN, Number.NaN, Number.NaN])
  })
})

describe.each(scaled)('%s', (format) => {
  it('zeros: codes 0, a finite positive scale, exact zeros, signs of floating-point codes kept', async () => {
    const { codes, blocks, values } = await stored(
      tensor(
        format,
        [2, 128],
        Array.from({ length: 256 }, (_, i) => (i === 3 ? -0 : 0)),
      ),
    )
    expect([...codes]).toEqual(
      Array.from({ length: 256 }, (_, i) =>
        i === 3 ? ({ 'f16/t': 0x8000, 'i8/g16': 0 }[format as string] ?? 0x80) : 0,
      ),
    )
    for (const { scale } of blocks) expect(scale > 0 && Number.isFinite(scale)).toBe(true)
    expect(values.every((x) => x === 0)).toBe(true)
  })

  it('NaN stays NaN and Inf saturates, is counted, and neither sets a scale', async () => {
    const values = Array.from({ length: 160 }, (_, i) => (i >= 20 && i < 23 ? 0 : Math.sin(i + 1)))
    const clean = await read(tensor(format, [160], values))
    const before = native.memory().infs
    const dirty = values.map((x, i) => [Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY][i - 20] ?? x)
    const x = tensor(format, [160], dirty)
    expect(native.memory().infs - before).toBe(2)
    const after = await stored(x)
    expect(after.values[20]).toBeNaN()
    const largest = { e4m3: [0x7e, 0xfe], e5m2: [0x7b, 0xfb], f16: [0x7bff, 0xfbff], i8: [0x7f, 0x81] }
    expect([...after.codes.slice(21, 23)]).toEqual(largest[format.split('/')[0] as 'f16'])
    expect([...after.values].toSpliced(20, 3)).toEqual(clean.toSpliced(20, 3))
    expect((await decoded(x)).flatMap((value, i) => (Number.isNaN(value) ? [i] : []))).toEqual([20])
  })

  it('magnitudes of 1e-40, 1e-30, 1e-10 and 1e30 survive', async () => {
    for (const size of [1e-40, 1e-30, 1e-10, 1e30]) {
      const x = tensor(
        format,
        [3, 130],
        Array.from({ length: 390 }, (_, i) => (i % 2 ? size : -size)),
      )
      for (const [i, value] of (await decoded(x)).entries()) {
        expect(Number.isFinite(value)).toBe(true)
        if (size > 1e-40) expect(Math.abs(value / (i % 2 ? size : -size) - 1)).toBeLessThan(0.0625)
      }
    }
  })

  it('a row of zeros leaves the others as they were', async () => {
    const random = new Random(17)
    const values = Array.from({ length: 256 * 256 }, () => random.normal())
    values[0] = 9 // the largest is not in row 17
    const before = await decoded(tensor(format, [256, 256], values))
    const after = await decoded(
      tensor(
        format,
        [256, 256],
        values.map((x, i) => (i >> 8 === 17 ? 0 : x)),
      ),
    )
    expect(after).toEqual(before.map((x, i) => (i >> 8 === 17 ? 0 : x)))
  })

  it('constant and single elements come back, signs kept', async () => {
    for (const n of [1, 127, 128, 129]) {
      const values = Array.from({ length: n }, (_, i) => (i % 3 ? 0.5 : -0.5))
      for (const [i, x] of (await decoded(tensor(format, [n], values))).entries())
        expect(Math.abs(x / (values[i] as number) - 1)).toBeLessThan(format.endsWith('/g16') ? 1 / 128 : 1e-5)
    }
  })
})

describe('i8/g16', () => {
  /** Values each beside one that makes the scale 1, in rows of two. */
  const under1 = (values: readonly number[]) =>
    stored(
      tensor(
        'i8/g16',
        [values.length, 2],
        values.flatMap((x) => [127, x]),
      ),
    )

  it('all 256 codes decode to whole numbers, and -128 to NaN; the others come back', async () => {
    const x = own(native.make('i8/g16', [16, 16], 'cpu', 'temp'))
    const ones = Uint8Array.from({ length: 32 }, (_, i) => (i % 2 ? 0x3f : 0x80)) // scales of 1
    native.write(x, Uint8Array.from([...codes, ...ones]))
    const whole = codes.map((code) => (code === 128 ? Number.NaN : code < 128 ? code : code - 256))
    expect(await decoded(x)).toEqual(whole)
    const { codes: back } = await under1(whole)
    expect([...back].filter((_, i) => i % 2)).toEqual(codes)
  })

  it('ties go to even, everything else to the nearest', async () => {
    const middles = Array.from({ length: 254 }, (_, i) => i - 126.5)
    const near = async (steps: number) =>
      [...(await under1(middles.map((x) => beside(x, steps * Math.sign(x))))).values].filter((_, i) => i % 2)
    expect(await near(0)).toEqual(middles.map((x) => 2 * Math.round(x / 2) + 0))
    expect(await near(1)).toEqual(middles.map((x) => x + 0.5))
    expect(await near(-1)).toEqual(middles.map((x) => x - 0.5))
  })

  it('of normal numbers it loses less than a quarter of what e4m3/g16 loses', async () => {
    const random = new Random(5)
    const values = Float64Array.from({ length: 2 ** 16 }, () => Math.fround(random.normal()))
    const lost = async (format: 'e4m3/g16' | 'i8/g16') => {
      const back = await decoded(tensor(format, [2 ** 8, 2 ** 8], values))
      return Math.sqrt(back.reduce((sum, x, i) => sum + (x - (values[i] as number)) ** 2, 0) / values.length)
    }
    const [whole, floating] = [await lost('i8/g16'), await lost('e4m3/g16')]
    expect(whole).toBeLessThan(0.005)
    expect(floating / whole).toBeGreaterThan(4)
  })
})

describe.each([
  ['e4m3/g16', 448],
  ['i8/g16', 127],
] as const)('%s', (format, largest) => {
  it('the scale is bf16, rounded up: nothing exceeds the largest code, and no scale is larger than needed', async () => {
    const random = new Random(2)
    const values = Float32Array.from({ length: 997 * 33 }, () => random.typical() * 10 ** (8 * random.uniform() - 4))
    const { blocks, blockOf } = await stored(tensor(format, [997, 33], values))
    const max = new Float64Array(blocks.length)
    values.forEach((x, i) => {
      max[blockOf(i)] = Math.max(max[blockOf(i)] as number, Math.abs(x))
    })
    blocks.forEach(({ scale }, b) => {
      if (max[b] === 0) return
      const exact = (max[b] as number) / largest
      expect(scale * (1 + 1e-7)).toBeGreaterThanOrEqual(exact)
      expect(scale).toBeLessThanOrEqual(exact * (1 + 2 ** -7))
    })
  })
})

describe.each([64, 128, 256] as const)('e4m3/x%i', (run) => {
  const format = `e4m3/x${run}` as const
  const half = run / 2
  const expand = async (values: readonly number[]) => await stored(tensor(format, [values.length], values))
  const halves = (a: number, b: number) => Array.from({ length: run }, (_, i) => (i < half ? a : b))

  it.each([
    [1e-2, 1e-3, 5, 0x02, 9.7296e-4],
    [1, 0.5, 16.5625, undefined, 0.4949],
  ])('half of %f and half of %f have k = %f', async (a, b, k, code, low) => {
    const { codes, blocks, values } = await expand(halves(a, b))
    expect(blocks[0]?.k).toBe(k)
    expect(codes[0]).toBe(0x7e)
    if (code !== undefined) expect(codes[half]).toBe(code)
    expect((values[0] as number) / a).toBeCloseTo(1, 5)
    expect((values[half] as number) / low).toBeCloseTo(1, 4)
  })

  it('k is the multiple of 1/16 below the quotient, from 1/16 to 64', async () => {
    const cases: [number, number, number][] = [
      [1, 1e-9, 0.5],
      [1e30, 1e-35, 1 / 16],
      [1, 1 - 2 ** -12, 64],
      [1, beside(1, 1), 64],
      [3e38, 1e-38, 1 / 16],
    ]
    for (const [a, b, k] of cases) {
      const { blocks, values } = await expand(halves(a, b))
      expect(blocks[0]?.k).toBe(k)
      const size = [Math.abs(values[0] as number), Math.abs(values[half] as number)]
      expect((size[0] as number) / a).toBeCloseTo(1, 3)
      expect(Math.abs(Math.log2((size[1] as number) / b)) * k).toBeLessThan(0.3)
    }
  })

  it('the smallest non-zero magnitude counts, wherever zeros sit', async () => {
    const base = Array.from({ length: run }, (_, i) => (i === 5 ? 1e-5 : 1e-3))
    const block = (await expand(base)).blocks[0]
    for (let at = 0; at < run; at++)
      if (at !== 5) expect((await expand(base.map((x, i) => (i === at ? 0 : x)))).blocks[0]).toEqual(block)
  })

  it('runs go on over the ends of rows, tails of 1 and one less and more than a run', async () => {
    const random = new Random(21)
    const values = Array.from({ length: (run + 1) * 3 }, () => random.normal())
    const flat = await bytesOf(tensor(format, [values.length], values))
    expect(await bytesOf(tensor(format, [3, run + 1], values))).toEqual(flat)
    for (const n of [1, run - 1, run + 1])
      expect((await expand(values.slice(0, n))).blocks.length).toBe(Math.ceil(n / run))
  })
})

describe('range expansion', () => {
  it.each(['e4m3', 'e5m2'] as const)('%s/x128: blocks, codes and decoded values agree with float64', async (kind) => {
    const top = kinds[kind].max
    const random = new Random(22)
    const spread = (i: number) => 10 ** (Math.floor(i / 128) % 12)
    const values = Array.from({ length: 128 * 240 }, (_, i) =>
      Math.fround(random.normal() * spread(i) ** (2 * random.uniform() - 1)),
    )
    const x = tensor(`${kind}/x128`, [values.length], values)
    const { blocks, values: exact } = await stored(x)
    let misses = 0
    blocks.forEach((block, b) => {
      const wanted = expansionOf(values.slice(b * 128, b * 128 + 128), top)
      if (block.k !== wanted.k) misses += 1
      expect(block.centre / wanted.centre).toBeCloseTo(1, 5)
      expect(
        block.scale /
          ((Math.max(...values.slice(b * 128, b * 128 + 128).map(Math.abs)) / wanted.centre) ** block.k / top),
      ).toBeCloseTo(1, 4)
    })
    expect(misses).toBeLessThanOrEqual(1) // a quotient within an FP32 error of a multiple of 1/16
    for (const [i, value] of values.entries()) {
      const [low, high] = interval(kind, blocks[i >> 7] as Block, value, Math.abs(value) * 1e-5, false)
      if (!((exact[i] as number) >= low && (exact[i] as number) <= high)) throw new Error(`${value} became ${exact[i]}`)
    }
    for (const [i, value] of (await decoded(x)).entries())
      if (exact[i] !== 0) expect(Math.abs(value / (exact[i] as number) - 1)).toBeLessThan(1e-5)
  })

  it('Gaussian runs lose half as much as in plain e4m3/g128', async () => {
    const random = new Random(23)
    const values = Float32Array.from({ length: 128 * 3000 }, () => random.normal())
    const error = async (format: AnyFormat) => {
      const { values: back } = await stored(tensor(format, [1, values.length], values))
      let [lost, all] = [0, 0]
      values.forEach((x, i) => {
        lost += (x - (back[i] as number)) ** 2
        all += x * x
      })
      return Math.sqrt(lost / all)
    }
    expect(await error('e4m3/x128')).toBeCloseTo(0.0141, 3)
    expect(await error('e4m3/g128')).toBeCloseTo(0.0256, 3)
  })
})
