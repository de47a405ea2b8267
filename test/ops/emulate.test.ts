// emulate: numbers of few bits against their definitions in float64, sums in every order of rounding, and chance that is fair.
import { describe, expect, it } from 'vitest'
import { arithmeticOf } from '../../lib/axes.ts'
import type { Handle } from '../../lib/native.gen.ts'
import { type DeviceKind, native } from '../../lib/native.ts'
import type { Arithmetic } from '../../lib/recipes.ts'
import { bytesOf, checkOp, checkSame, devices, moved, own, present, read, sizes, tensor } from '../harness.ts'
import { matrix, type Shape, valuesOf } from '../values.ts'

/** The rounding to nearest of a word, from the definitions of its numbers. */
function nearest(word: Arithmetic, lossScale = 1): (x: number) => number {
  const [kind, range, precision] = arithmeticOf(word)
  const fixed = kind === 'fixed'
  const least = fixed ? 0 : 2 - 2 ** (range - 1) // exponent of the smallest normal number
  const high = fixed ? 2 ** (range - 1) - 2 ** -precision : (2 - 2 ** -precision) * 2 ** (1 - least)
  const low = fixed ? -(2 ** (range - 1)) : -high
  return (x) => {
    if (Number.isNaN(x)) return x
    // half a step more than the largest is a tie, of which the even number is the power of two above
    const beyond = 2 ** (2 - least) - 2 ** (-least - precision)
    if (kind === 'ieee' && Math.abs(x * lossScale) >= beyond) return Math.sign(x) * Number.POSITIVE_INFINITY
    const c = Math.min(Math.max(x * lossScale, low), high)
    const step = 2 ** ((fixed ? 0 : Math.max(exponentOf(c), least)) - precision)
    return (toInteger(c / step) * step) / lossScale
  }
}

function exponentOf(x: number): number {
  const e = Math.floor(Math.log2(Math.abs(x)))
  return 2 ** e > Math.abs(x) ? e - 1 : 2 ** (e + 1) <= Math.abs(x) ? e + 1 : e
}
function toInteger(x: number): number {
  const below = Math.floor(x)
  const rest = x - below
  return rest < 0.5 ? below : rest > 0.5 ? below + 1 : below + Math.abs(below % 2)
}

const numbersOf = (word: Arithmetic, lossScale = 1) => {
  const [arithmetic, range, precision, shift, rounding] = arithmeticOf(word, lossScale)
  return { numbers: { range, precision, shift, seed: 1 }, words: () => ({ arithmetic, rounding }) }
}

async function made(values: readonly number[], device: DeviceKind, shape: Shape = [values.length]): Promise<Handle> {
  return await moved(tensor('f32', shape, values), device)
}
const full = (n: number, x: number, device: DeviceKind) => made(new Array(n).fill(x), device, [1, n])
const round = (x: Handle, word: Arithmetic, seed = 1, lossScale = 1) =>
  own(native.round_to(x, ...arithmeticOf(word, lossScale), seed))
const product = (a: Handle, b: Handle, chunk: number, word: Arithmetic, bias: Handle | null = null, seed = 1) =>
  own(native.matmul_emulated(a, b, bias, chunk, ...arithmeticOf(word), seed))
const mean = (values: readonly number[]) => values.reduce((sum, x) => sum + x, 0) / values.length

const words = ['e5m2', 'e6m9', 'e8m3', 'e8m7', 'e8m23', 'e2m0', 'q4.12', 'q8.8', 'q1.24', 'q24.1'] as const
const infinite = ['e5m10/inf', 'e5m2/inf', 'e4m3/inf', 'e2m0/inf', 'e8m23/inf'] as const

describe('round_to', () => {
  for (const [word, lossScale] of [
    ...[...words, ...infinite].map((word) => [word, 1] as const),
    ...([
      ['e5m2', 1024],
      ['q4.12', 64],
      ['e4m3/inf', 64],
    ] as const),
  ])
    describe(`${word}, times ${lossScale}`, () =>
      checkOp('round_to', {
        sizes,
        ...numbersOf(word, lossScale),
        reference: ({ x }) => ({ y: valuesOf(x.data.map(nearest(word, lossScale))) }),
        slack: 0,
      }))

  for (const device of devices) {
    const test = it.skipIf(!present(device))
    const rounded = async (word: Arithmetic, values: number[]) => read(round(await made(values, device), word))

    test(`on ${device}: ends, ties, what is no number`, async () => {
      expect(await rounded('e5m2', [1e9, -1e9, 2 ** -17, 3 * 2 ** -17, 1.125, 1.375, -1e-9])).toEqual([
        57344,
        -57344,
        0,
        2 ** -15,
        1,
        1.5,
        -0,
      ])
      const most = (2 - 2 ** -9) * 2 ** 31
      const ends = await rounded('e6m9', [1e38, 2 ** -39, 2 ** -40, 1.5 * 2 ** -39, 1025, 1027])
      expect(ends).toEqual([most, 2 ** -39, 0, 2 ** -38, 1024, 1028])
      expect(await rounded('q8.8', [127.999, 300, -300, 2 ** -9, 3 * 2 ** -9])).toEqual([
        128 - 2 ** -8,
        128 - 2 ** -8,
        -128,
        0,
        2 ** -7,
      ])
      for (const word of [...words, 'q4.12/sr', 'e6m9/sr'] as const) {
        const [nan, above, below] = await rounded(word, [
          Number.NaN,
          Number.POSITIVE_INFINITY,
          Number.NEGATIVE_INFINITY,
        ])
        expect(nan).toBeNaN()
        expect([above, below]).toEqual([Number.MAX_VALUE, -Number.MAX_VALUE].map(nearest(word)))
      }
    })

    test(`on ${device}: what half precision cannot hold is infinite, from half a step above 65504 on`, async () => {
      const { POSITIVE_INFINITY: infinity, NaN: nan } = Number
      const found = await rounded('e5m10/inf', [65519.9, -65519.9, 65520, -65520, infinity, -infinity, nan])
      expect(found).toEqual([65504, -65504, infinity, -infinity, infinity, -infinity, nan])
      expect(await rounded('e5m10/inf', [2 ** -25, 1.5 * 2 ** -25, 3 * 2 ** -25, -(2 ** -26)])).toEqual([
        0,
        2 ** -24,
        2 ** -23,
        -0,
      ])
      // e5m2 has room up to 61440; a loss scale of 4 leaves a quarter
      expect(await rounded('e5m2/inf', [61439, 61440])).toEqual([57344, infinity])
      const scaled = round(await made([15359, 15360], device), 'e5m2/inf', 1, 4)
      expect(await read(scaled)).toEqual([14336, infinity])
      const x = own(native.random_normal('f32', 64, 100, 0, 1e-4, 5, device))
      expect(await read(round(x, 'e5m10/inf'))).toEqual(await read(own(native.convert(x, null, 'f16'))))
    })

    test(`on ${device}: at random it is infinite with the probability of what is left over`, async () => {
      // three quarters from 57344 to what would be the next number, 65536
      const values = await read(round(await full(100_000, 57344 + 6144, device), 'e5m2/inf/sr'))
      const over = values.filter((x) => x === Number.POSITIVE_INFINITY).length
      expect(values.every((x) => x === 57344 || x === Number.POSITIVE_INFINITY)).toBe(true)
      expect(Math.abs(over / 100_000 - 0.75)).toBeLessThan(0.0042) // 3 sigma
    })

    test(`on ${device}: e8m7 is bf16, e5m2 what convert makes`, async () => {
      const x = own(native.random_normal('f32', 64, 100, 0, 30, 5, device))
      expect(await read(round(x, 'e8m7'))).toEqual(await read(own(native.convert(x, null, 'bf16'))))
      const one = await made([1], device)
      expect(await read(round(x, 'e5m2'))).toEqual(await read(own(native.convert(x, one, 'e5m2/t'))))
    })

    test(`on ${device}: 0.3 becomes 77/256 four times of five, and 0.3 in the mean`, async () => {
      const values = await read(round(await full(100_000, 0.3, device), 'q8.8/sr'))
      const up = values.filter((x) => x === 77 / 256).length
      expect(values.every((x) => x === 77 / 256 || x === 76 / 256)).toBe(true)
      expect(Math.abs(up / 100_000 - 0.8)).toBeLessThan(0.004) // 3 sigma
      expect(Math.abs(mean(values) - 0.3)).toBeLessThan(0.004 / 256)
    })

    test.each([
      ['e5m2/sr', 1],
      ['e5m2/inf/sr', 1],
      ['e6m9/sr', 1],
      ['q4.12/sr', 1],
      ['e5m2/sr', 1024],
    ] as const)(`on ${device}: %s times %d is fair, one step at most, the same for a seed`, async (word, lossScale) => {
      const plain = word.slice(0, -3) as Arithmetic
      const n = 400
      for (const x of [0.7311, -1.0001, 2 ** -17 * 0.3, -3.9999, 1e-5].map(Math.fround)) {
        const tensors = await full(n, x, device)
        const seeds = Array.from({ length: 25 }, (_, seed) => seed)
        const all = (await Promise.all(seeds.map((seed) => read(round(tensors, word, seed, lossScale))))).flat()
        const kinds = [...new Set(all)].sort((a, b) => a - b)
        expect(kinds.length).toBeLessThanOrEqual(2)
        const [low, high] = [kinds[0] as number, kinds.at(-1) as number]
        const [from, to] = [nearest(plain, lossScale)(low), nearest(plain, lossScale)(high)]
        expect([low, high]).toEqual([from, to])
        expect(low <= x && x <= high).toBe(true)
        const p = high === low ? 0 : (x - low) / (high - low)
        const sigma = Math.sqrt((p * (1 - p)) / all.length) * (high - low)
        expect(Math.abs(mean(all) - x), `${x}`).toBeLessThanOrEqual(3.5 * sigma)
      }
      const x = own(native.random_normal('f32', 100, 100, 0, 1, 3, device))
      const [first, again, other] = [round(x, word, 7), round(x, word, 7), round(x, word, 8)]
      expect(await bytesOf(again)).toEqual(await bytesOf(first))
      expect(await bytesOf(other)).not.toEqual(await bytesOf(first))
      // what can be held stays
      expect(await bytesOf(round(first, word, 9))).toEqual(await bytesOf(first))
      // neighbours and values alike do not hang together
      const even = await read(round(await full(10_000, 0.3, device), 'q8.8/sr'))
      const ups = even.map((value) => (value > 0.3 ? 0.2 : -0.8))
      expect(Math.abs(mean(ups.slice(1).map((up, i) => up * (ups[i] as number))))).toBeLessThan(0.006)
    })
  }
  checkSame('round_to at random', (device) => {
    const x = own(native.random_normal('f32', 500, 1000, 0, 2, 3, device))
    return (['e5m2/sr', 'e6m9/sr', 'q4.12/sr', 'e8m3', 'e2m0/inf/sr', 'e3m2/inf'] as const).map((word) =>
      round(x, word, 12345),
    )
  })

  it('refuses what is no arithmetic', async () => {
    const x = tensor('f32', [1], [1])
    expect(() => round(x, 'e9m2')).toThrow('round_to: range is 9 and must be from 2 to 8')
    expect(() => round(x, 'e1m2')).toThrow('round_to: range is 1 and must be from 2 to 8')
    expect(() => round(x, 'e5m24')).toThrow('round_to: precision is 24 and must be from 0 to 23')
    expect(() => round(x, 'q0.8')).toThrow('round_to: range is 0 and must be from 1 to 25')
    expect(() => round(x, 'q8.18')).toThrow('round_to: precision is 18 and must be from 0 to 17')
    expect(() => native.round_to(x, 'float', 5, 2, 65, 'nearest', 0)).toThrow(
      'round_to: shift is 65 and must be from 0 to 64',
    )
    expect(() => round(x, 'e5' as Arithmetic)).toThrow("arithmetic is 'e5' and must be eEmM, eEmM/inf or qI.F")
    expect(() => round(x, 'q4.4/inf' as Arithmetic)).toThrow("arithmetic is 'q4.4/inf' and must be eEmM")
    const a = tensor('f32', [1, 1], [1])
    expect(() => product(a, a, -1, 'e5m2')).toThrow('matmul_emulated: chunk is -1 and must be at least 0')
  })
})

describe('matmul_emulated', () => {
  const shapes = [
    { M: 0, N: 16, K: 3 },
    { M: 2, N: 3, K: 0 },
    { M: 1, N: 1, K: 1 },
    { M: 5, N: 15, K: 33 },
    { M: 1, N: 129, K: 16 },
    { M: 33, N: 31, K: 130 },
  ]
  for (const [word, lossScale] of [
    ['e6m9', 1],
    ['e8m3', 1],
    ['q4.12', 1],
    ['e6m9', 1024],
    ['e4m3/inf', 1],
  ] as const)
    for (const chunk of [0, 1, 7, 64])
      describe(`${word}, times ${lossScale}, chunk ${chunk}`, () => {
        const { numbers, words } = numbersOf(word, lossScale)
        const near = nearest(word, lossScale)
        checkOp('matmul_emulated', {
          sizes: shapes,
          numbers: { ...numbers, chunk },
          words,
          reference: ({ a, b, bias, M, N, K }) => {
            const sum = (m: number, n: number) => {
              const each = chunk === 0 ? (x: number) => x : near
              let total = 0
              for (let from = 0; from < K; from += chunk || K) {
                let part = 0
                for (let k = from; k < Math.min(K, from + (chunk || K)); k++) part = each(part + a(m, k) * b(n, k))
                total = each(total + part)
              }
              return near(total + (bias ? bias(n) : 0))
            }
            return { y: matrix(M, N, sum) }
          },
          slack: 0,
        })
      })

  for (const device of devices) {
    const test = it.skipIf(!present(device))
    test(`on ${device}: 4096 ones stall at 1024 in e6m9, and arrive by chunks of 64`, async () => {
      const ones = await full(4096, 1, device)
      const sums = [4096, 64, 0].map((chunk) => product(ones, ones, chunk, 'e6m9'))
      expect((await Promise.all(sums.map(read))).flat()).toEqual([1024, 4096, 4096])
    })

    test(`on ${device}: no compiler deletes 2^-30 between 1 and -1`, async () => {
      const [a, ones] = [await made([1, 2 ** -30, -1], device, [1, 3]), await full(3, 1, device)]
      expect(await read(product(a, ones, 0, 'e8m23'))).toEqual([2 ** -30])
      expect(await read(product(a, ones, 1, 'e8m23'))).toEqual([0])
    })

    test(`on ${device}: at random it is fair, whether sums are rounded or results`, async () => {
      const [a, b] = [await full(50, 0.31, device), await full(50, 0.7, device)]
      const spread = { 0: 2 ** -8, 1: 50 ** 0.5 * 2 ** -8, 16: 54 ** 0.5 * 2 ** -8 } // of one result, at most twice sigma
      for (const [chunk, size] of Object.entries(spread)) {
        const results = Array.from({ length: 500 }, (_, seed) => product(a, b, Number(chunk), 'q8.8/sr', null, seed))
        const values = (await Promise.all(results.map(read))).flat()
        const exact = 50 * Math.fround(0.31) * Math.fround(0.7)
        expect(Math.abs(mean(values) - exact), `chunk ${chunk}`).toBeLessThan((3 * (size / 2)) / Math.sqrt(500))
        expect(new Set(values).size).toBeGreaterThan(1)
        if (chunk === '0') for (const y of values) expect(Math.abs(y - exact)).toBeLessThan(2 ** -8)
      }
    })
  }

  checkSame('matmul_emulated', (device) => {
    const a = own(native.random_normal('f32', 70, 200, 0, 0.3, 3, device))
    const b = own(native.random_normal('f32', 50, 200, 0, 0.3, 4, device))
    return (['e6m9', 'e6m9/sr', 'q4.12/sr'] as const).flatMap((word) =>
      [0, 64].map((chunk) => product(a, b, chunk, word, null, 99)),
    )
  })
})

describe('sgd_emulated', () => {
  for (const word of ['e6m9', 'q4.12'] as const)
    for (const nesterov of [0, 1])
      describe(`${word}, nesterov ${nesterov}`, () => {
        const { numbers, words } = numbersOf(word)
        checkOp('sgd_emulated', {
          sizes: [{}],
          lists: [0, 1, 17, 129, 16_385],
          numbers: { ...numbers, lr: 0.1, momentum: 0.9, gain: 0.8, weight_decay: 0.01, nesterov },
          words,
          data: { clip: (_, __, i) => (i === 0 ? 0.5 : 0) },
          reference: ({ p, g, m, clip, lr, momentum, gain, weight_decay }) => {
            const near = nearest(word)
            const factor = clip ? clip(0) : 1
            const d = p.map((x, i) => x.data.map((_, k) => near((g[i]?.(k) ?? 0) * factor + weight_decay * x(k))))
            const moments = m.map((x, i) => x.data.map((v, k) => near(momentum * v + gain * (d[i]?.[k] ?? 0))))
            const moved = p.map((x, i) =>
              x.data.map((v, k) => {
                const moment = moments[i]?.[k] ?? 0
                return near(v - lr * (nesterov ? (d[i]?.[k] ?? 0) + momentum * moment : moment))
              }),
            )
            return { p: moved.map((x) => valuesOf(x)), m: moments.map((x) => valuesOf(x)) }
          },
          slack: 0,
        })
      })

  const step = (p: Handle, g: Handle, m: Handle, lr: number, word: Arithmetic, seed = 0, clip: Handle | null = null) =>
    native.sgd_emulated([p], [g], [m], clip, lr, 0, 1, 0, 0, ...arithmeticOf(word), seed)

  for (const device of devices) {
    const test = it.skipIf(!present(device))
    test.each(['e6m9', 'q4.8'] as const)(
      `on ${device}: in %s 1000 updates of 2^-12 arrive in the mean, and to nearest none does`,
      async (word) => {
        const n = 4096
        const [p, near, g, m] = [
          await full(n, 1, device),
          await full(n, 1, device),
          await full(n, -1, device),
          await full(n, 0, device),
        ]
        for (let seed = 0; seed < 1000; seed++) step(p, g, m, 2 ** -12, `${word}/sr`, seed)
        for (let t = 0; t < 10; t++) step(near, g, m, 2 ** -12, word)
        // sqrt(1000 · 2^-12 · 2^-8 / 4096) is a sigma
        expect(Math.abs(mean(await read(p)) - 1 - 1000 * 2 ** -12)).toBeLessThan(0.0015)
        expect((await read(near)).every((x) => x === 1)).toBe(true)
      },
    )

    test(`on ${device}: a step that clip skips changes nothing, not even what is between numbers`, async () => {
      const [p, g, m] = [await full(3, 0.3, device), await full(3, 1, device), await full(3, 0.7, device)]
      const before = [await bytesOf(p), await bytesOf(m)]
      step(p, g, m, 1, 'e5m2', 0, await made([1, 1], device))
      expect([await bytesOf(p), await bytesOf(m)]).toEqual(before)
      step(p, g, m, 1, 'e5m2', 0, await made([1, 0], device))
      expect([await bytesOf(p), await bytesOf(m)]).not.toEqual(before)
    })
  }

  checkSame('sgd_emulated', (device) => {
    const random = (seed: number) => native.random_normal('f32', 1, 3001, 0, 1, seed, device)
    const [p, g, m] = [
      [1, 2],
      [3, 4],
      [5, 6],
    ].map((seeds) => seeds.map(random)) as [Handle[], Handle[], Handle[]]
    native.sgd_emulated(p, g, m, null, 0.1, 0.9, 1, 0.01, 0, ...arithmeticOf('e6m9/sr'), 77)
    for (const handle of g) native.free(handle)
    return [...p, ...m]
  })
})
