// matmul against float64: exact FP8 products, every tail, depth, NaN and Inf.
import { describe, expect, it } from 'vitest'
import type { AnyFormat, Handle } from '../../lib/native.gen.ts'
import { type DeviceKind, native } from '../../lib/native.ts'
import { bytesOf, checkOp, devices, moved, own, present, read, stored, tensor } from '../harness.ts'
import { rotate } from '../rotate.ts'
import { type Given, matrix, Random, type Shape, sum, vector } from '../values.ts'

type At = (i: number, j: number) => number

/** y(m, n) = sum over k of a b, with what is added, and the sum of the magnitudes. */
function product(M: number, N: number, K: number, a: At, b: At, added: At = () => 0) {
  const one = (f: (x: number) => number) => matrix(M, N, (m, n) => sum(K, (k) => f(a(m, k) * b(k, n))) + f(added(m, n)))
  return { y: one((x) => x), '|y|': one(Math.abs) }
}
/** The same with the largest |y|, to which the rounding of y adds; errorOf below holds it against op amax exactly. */
function productWithAmax(M: number, N: number, K: number, a: At, b: At, added?: At) {
  const exact = product(M, N, K, a, b, added)
  const amax = exact.y.data.reduce((most, y) => Math.max(most, Math.abs(y)), 0)
  return { ...exact, amax: vector(1, () => amax), '|amax|': vector(1, () => 1000 * amax) }
}

/** A product whose largest magnitude is not asked for. */
function nt(a: Handle, b: Handle, bias: Handle | null, y: 'f32' | 'bf16' | 'e4m3/g16'): Handle {
  return native.matmul_nt(a, b, bias, y, null)[0]
}

/** The norm of the difference, relative to that of what is exact. */
function distance(found: ArrayLike<number>, exact: ArrayLike<number>): number {
  const difference = sum(exact.length, (i) => ((found[i] as number) - (exact[i] as number)) ** 2)
  return Math.sqrt(difference / sum(exact.length, (i) => (exact[i] as number) ** 2))
}

// FP32 sums of up to 385 products. Tensor cores cut bits off where they add: for bf16 below the last of FP32, for FP8
// below the 14th of the largest of 32 products and the sum so far, 128 products long.
const slack = ({ a, b }: Record<string, string | null>, device: DeviceKind) =>
  device === 'cpu' || a === 'f32' ? 4e-6 : [a, b].includes('bf16') ? 2e-5 : 2 ** -8

/** Formats of a and b by a short name; those of the tensor cores. */
const pairs = {
  f32: ['f32', 'f32'],
  bf16: ['bf16', 'bf16'],
  'bf16 by e4m3/t': ['bf16', 'e4m3/t'],
  'e4m3/t by bf16': ['e4m3/t', 'bf16'],
  'e5m2/t by bf16': ['e5m2/t', 'bf16'],
  'e4m3/t': ['e4m3/t', 'e4m3/t'],
  'e5m2/t': ['e5m2/t', 'e4m3/t'],
  'runs by blocks': ['e4m3/g128', 'e4m3/b128'],
  'runs by runs': ['e4m3/g128', 'e4m3/g128'],
  'rows by rows': ['e4m3/r', 'e4m3/r'],
  'rows by a tensor': ['e4m3/r', 'e4m3/t'],
} as const
const ofBf16 = ['bf16', 'bf16 by e4m3/t', 'e4m3/t by bf16', 'e5m2/t by bf16'] as const
const narrow = Object.keys(pairs).filter((name) => name !== 'f32') as Exclude<keyof typeof pairs, 'f32'>[]

describe('matmul', () => {
  const sizes = [
    { M: 0, N: 16, K: 3 },
    { M: 2, N: 3, K: 0 },
    { M: 1, N: 1, K: 1 },
    { M: 7, N: 17, K: 1 },
    { M: 1, N: 129, K: 16 },
    { M: 17, N: 1, K: 7 },
    { M: 5, N: 15, K: 33 },
    { M: 33, N: 31, K: 129 },
    { M: 129, N: 127, K: 17 },
    { M: 65, N: 257, K: 385 },
    { M: 257, N: 144, K: 47 },
    { M: 127, N: 272, K: 127 },
    { M: 63, N: 255, K: 255 },
  ]
  checkOp('matmul_nt', {
    exact: false,
    sizes,
    slack,
    reference: ({ a, b, bias, M, N, K }) =>
      productWithAmax(M, N, K, a, (k, n) => b(n, k), bias ? (_, n) => bias(n) : undefined),
  })
  const turned = [
    { B: 0, T: 3, H: 1, J: 1, D: 2, K: 5 },
    { B: 1, T: 1, H: 1, J: 1, D: 64, K: 0 },
    { B: 3, T: 31, H: 4, J: 2, D: 34, K: 17 },
    { B: 2, T: 67, H: 3, J: 1, D: 64, K: 144 },
    { B: 2, T: 65, H: 2, J: 1, D: 128, K: 1 },
    { B: 2, T: 129, H: 1, J: 1, D: 128, K: 144 },
  ]
  checkOp('matmul_nt_rope', {
    exact: false,
    sizes: turned,
    data: { starts: (_: Random, { T }: { T: number }, m: number) => (m % T) - ((m % T) % 5) },
    slack,
    reference: (given) => {
      const { a, b, bias, K, B, T, H, J, D } = given
      const [M, N] = [B * T, (H + 2 * J) * D]
      const of = (size: (x: number) => number) => ({
        ...given,
        qkv: matrix(M, N, (m, n) => sum(K, (k) => size(a(m, k) * b(n, k))) + size(bias ? bias(n) : 0)),
        direction: 1,
      })
      return { y: rotate(of((x) => x) as Given), '|y|': rotate(of(Math.abs) as Given, true) }
    },
  })
  checkOp('matmul_nn', { exact: false, sizes, slack, reference: ({ a, b, M, N, K }) => productWithAmax(M, N, K, a, b) })
  checkOp('matmul_tn', {
    exact: false,
    sizes,
    slack,
    reference: ({ a, b, M, N, K }) => productWithAmax(M, N, K, (m, k) => a(k, m), b),
  })
  const small = sizes.filter(({ M, N, K }) => M * N * K < 2e6)
  checkOp('matmul_nt_into', {
    exact: false,
    sizes: small,
    slack,
    reference: ({ y, a, b, M, N, K }) => product(M, N, K, a, (k, n) => b(n, k), y),
  })
  checkOp('matmul_nn_into', {
    exact: false,
    sizes: small,
    slack,
    reference: ({ y, a, b, M, N, K }) => product(M, N, K, a, b, y),
  })
  checkOp('matmul_tn_into', {
    exact: false,
    sizes: small,
    slack,
    reference: ({ y, a, b, M, N, K }) => product(M, N, K, (m, k) => a(k, m), b, y),
  })

  it('what is changed must not be read at the same time', () => {
    const [x, y] = [tensor('f32', [3, 3], Array(9).fill(1)), tensor('f32', [3, 3], Array(9).fill(1))]
    expect(() => native.matmul_nt_into(y, y, x)).toThrow(
      'matmul_nt_into: a f32[3, 3] must be another tensor than the one that is changed',
    )
    expect(() => native.matmul_tn_into(y, x, y)).toThrow(
      'matmul_tn_into: b f32[3, 3] must be another tensor than the one that is changed',
    )
  })

  const random = new Random(4)
  const normal = (n: number) => Array.from({ length: n }, () => random.normal())

  describe.each(devices)('on %s', (device) => {
    const on = it.skipIf(!present(device))
    const there = async (format: AnyFormat, shape: Shape, values: ArrayLike<number>, given?: Handle) =>
      await moved(tensor(format, shape, values, given), device)

    // user-pain.md N20
    on('a depth of 8192 loses nothing: relative error below 1e-5, of sums of 14 bits below 1e-3', async () => {
      const [M, N, K] = [5, 19, 8192]
      for (const [left, right] of Object.values(pairs)) {
        const [a, b] = [await there(left, [M, K], normal(M * K)), await there(right, [N, K], normal(N * K))]
        const [x, w, y] = [await read(a), await read(b), await read(own(nt(a, b, null, 'f32')))]
        const exact = matrix(M, N, (m, n) => sum(K, (k) => (x[m * K + k] as number) * (w[n * K + k] as number)))
        expect(distance(y, exact.data)).toBeLessThan(device === 'cuda' && left !== 'f32' ? 1e-3 : 1e-5)
      }
    })

    on('FP8 codes multiply exactly and the scales enter as their product', async () => {
      // integers below 2^11 in units of the smallest product: no rounding anywhere
      const codes = Array.from({ length: 64 }, () => random.integer(15) - 7)
      const a = await there('e4m3/t', [4, 16], codes, tensor('f32', [1], [0.25]))
      const b = await there('e4m3/t', [4, 16], [...codes].reverse(), tensor('f32', [1], [2]))
      const [x, w] = [await read(a), await read(b)]
      const exact = matrix(4, 4, (m, n) => sum(16, (k) => (x[m * 16 + k] as number) * (w[n * 16 + k] as number)))
      expect(await read(own(nt(a, b, null, 'f32')))).toEqual([...exact.data])
    })

    on.each(['f32', 'bf16', 'e4m3/t'] as const)(
      'NaN in %s reaches its row and column and nothing else',
      async (format) => {
        const [M, N, K] = [13, 37, 50]
        const [x, w] = [normal(M * K), normal(N * K)]
        const make = async () =>
          await read(own(nt(await there(format, [M, K], x), await there(format, [N, K], w), null, 'f32')))
        const clean = await make()
        x[5 * K + 49] = Number.NaN
        w[20 * K + 3] = Number.NaN
        for (const [i, value] of (await make()).entries()) {
          const [m, n] = [Math.floor(i / N), i % N]
          if (m === 5 || n === 20) expect(value).toBeNaN()
          else expect(value).toBe(clean[i])
        }
      },
    )

    on.each([Number.NaN, 3e38])('rows of %s change no other row', async (padding) => {
      const [M, used, N, K] = [136, 133, 48, 80]
      const [x, w] = [normal(M * K), normal(N * K)]
      for (const name of narrow)
        for (const y of ['f32', 'bf16', 'e4m3/g16'] as const) {
          const [left, right] = pairs[name]
          const rows = async (value: number) => {
            const scale = left.endsWith('/t') ? tensor('f32', [1], [0.01]) : undefined
            const a = await there(left, [M, K], x.fill(value, used * K), scale)
            const b = await there(right, [N, K], w)
            return (await stored(own(nt(a, b, null, y)))).values.slice(0, used * N)
          }
          expect(await rows(padding)).toEqual(await rows(0))
        }
    })

    on.each(['f32', 'bf16'] as const)(
      'Inf in %s times a number is Inf, times 0 NaN; in e4m3/g16 it saturates and is counted',
      async (format) => {
        const a = await there(format, [1, 2], [Number.POSITIVE_INFINITY, 1])
        const b = await there(format, [16, 2], [1, 0, -2, 0, ...Array.from({ length: 28 }, (_, i) => i % 2)])
        const nan = Array.from({ length: 14 }, () => Number.NaN)
        expect(await read(own(nt(a, b, null, 'f32')))).toEqual([
          Number.POSITIVE_INFINITY,
          Number.NEGATIVE_INFINITY,
          ...nan,
        ])
        const before = native.memory().infs
        const { codes } = await stored(own(nt(a, b, null, 'e4m3/g16')))
        expect([...codes.slice(0, 2)]).toEqual([0x7e, 0xfe])
        expect([...codes.slice(2)].every((code) => (code & 0x7f) === 0x7f)).toBe(true)
        expect(native.memory().infs - before).toBe(2)
      },
    )

    on('scales of runs, blocks and rows multiply what they stand for, tails and last rows too', async () => {
      // powers of two: no rounding anywhere, so that a wrong scale cannot hide
      const [M, N, K] = [67, 130, 300]
      const [rows, blocks] = [Math.ceil(K / 128), Math.ceil(N / 128)]
      const power = (i: number) => 2 ** (((i * 7) % 9) - 4)
      const code = (i: number) => (((i * 5) % 7) - 3) * 32
      const make = async (
        format: 'e4m3/g128' | 'e4m3/b128' | 'e4m3/g128p2' | 'e4m3/b128p2' | 'e4m3/r' | 'e4m3/t',
        lines: number,
        scaleOf: (i: number, k: number) => number,
      ) => {
        const value = (i: number, k: number) => (k % 128 === 0 ? 448 : code(i * 3 + k)) * scaleOf(i, k >> 7)
        const values = matrix(lines, K, value)
        const handle = await there(format, [lines, K], values.data)
        expect(await read(handle)).toEqual([...values.data])
        return { handle, value }
      }
      for (const [left, right] of [
        ['e4m3/g128', 'e4m3/b128'],
        ['e4m3/g128', 'e4m3/g128'],
        ['e4m3/g128p2', 'e4m3/b128p2'],
        ['e4m3/g128p2', 'e4m3/g128p2'],
        ['e4m3/r', 'e4m3/r'],
        ['e4m3/r', 'e4m3/t'],
      ] as const) {
        const ofRuns = left !== 'e4m3/r'
        const a = await make(left, M, (m, run) => power(ofRuns ? m * rows + run : m))
        const b = await make(right, N, (n, run) => {
          if (right.includes('/b')) return power((n >> 7) * blocks + run + 5)
          return right === 'e4m3/t' ? 4 : power(ofRuns ? n * rows + run + 2 : n + 2)
        })
        const exact = matrix(M, N, (m, n) => sum(K, (k) => a.value(m, k) * b.value(n, k)))
        const size = matrix(M, N, (m, n) => sum(K, (k) => Math.abs(a.value(m, k) * b.value(n, k))))
        const y = await read(own(nt(a.handle, b.handle, null, 'f32')))
        y.forEach((found, i) => {
          expect(Math.abs(found - exact(i))).toBeLessThanOrEqual((device === 'cuda' ? 2 ** -12 : 1e-6) * size(i))
        })
      }
    })

    on('amax of an infinite product is Inf, of one with NaN NaN, of one without elements 0', async () => {
      const amax = async (values: number[], rows: number) => {
        const a = await there('bf16', [rows, 2], values)
        const [y, most] = native.matmul_nt(a, await there('bf16', [3, 2], [1, 1, 1, 1, 1, 1]), null, 'bf16', 'f32')
        own([y, most])
        return (await read(most as Handle))[0]
      }
      expect(await amax([1, 2, -5, 1], 2)).toBe(4)
      expect(await amax([1, 2, Number.NEGATIVE_INFINITY, 1], 2)).toBe(Number.POSITIVE_INFINITY)
      expect(await amax([3e38, 3e38, 0, 0], 2)).toBe(Number.POSITIVE_INFINITY)
      expect(await amax([Number.NaN, 2, Number.NEGATIVE_INFINITY, 1], 2)).toBeNaN()
      expect(await amax([], 0)).toBe(0)
    })

    on('a product with no depth, and one with no elements, add nothing', async () => {
      const y = await there('bf16', [2, 3], [1, -2, 3, Number.NaN, 5, Number.POSITIVE_INFINITY])
      const before = await bytesOf(y)
      native.matmul_nt_into(y, await there('bf16', [2, 0], []), await there('bf16', [3, 0], []))
      native.matmul_tn_into(y, await there('f32', [0, 2], []), await there('f32', [0, 3], []))
      expect(await bytesOf(y)).toEqual(before)
      const none = await there('f32', [0, 3], [])
      native.matmul_nt_into(none, await there('e5m2/t', [0, 4], []), await there('e4m3/t', [3, 4], normal(12)))
      expect(native.info(none).shape).toEqual([0, 3])
    })

    on('no rows give no rows, no depth gives zeros or the bias', async () => {
      for (const [one, other] of Object.values(pairs)) {
        const [none, b] = [await there(one, [0, 8], []), await there(other, [3, 8], normal(24))]
        expect(native.info(own(nt(none, b, null, 'bf16'))).shape).toEqual([0, 3])
        const [left, right] = [await there(one, [2, 0], []), await there(other, [3, 0], [])]
        const bias = await there('f32', [3], [1, 2, 3])
        expect(await read(own(nt(left, right, null, 'f32')))).toEqual([0, 0, 0, 0, 0, 0])
        for (const y of ['bf16', 'e4m3/g16'] as const)
          expect(await read(own(nt(left, right, null, y)))).toEqual([0, 0, 0, 0, 0, 0])
        expect(await read(own(nt(left, right, bias, 'bf16')))).toEqual([1, 2, 3, 1, 2, 3])
      }
    })

    // ---- larger ones, made on the device and checked at some places ----

    type Op = 'matmul_nt' | 'matmul_nn' | 'matmul_tn'
    interface Product {
      op?: Op
      a?: keyof typeof pairs
      y: 'f32' | 'bf16' | 'e4m3/g16'
      sizes: readonly [number, number, number]
      positive?: boolean
      bias?: boolean
      into?: boolean
    }
    /** Relative error of y at some 500 places, the corners among them; y is finite, the same twice, and its amax is right. */
    async function errorOf({
      op = 'matmul_nt',
      a = 'e4m3/t',
      y,
      sizes,
      positive = false,
      bias = false,
      into,
    }: Product) {
      const [M, N, K] = sizes
      const handles: Handle[] = []
      const keep = (handle: Handle) => {
        handles.push(handle)
        return handle
      }
      try {
        const make = (format: AnyFormat, shape: readonly [number, number], seed: number) => {
          const plain = positive
            ? native.random_uniform('f32', ...shape, 0, 1, seed, device)
            : native.random_normal('f32', ...shape, 0, 1, seed, device)
          keep(plain)
          return format === 'f32' ? plain : keep(native.convert(plain, null, format as 'bf16'))
        }
        const left = make(pairs[a][0], op === 'matmul_tn' ? [K, M] : [M, K], 1)
        const right = make(pairs[a][1], op === 'matmul_nt' ? [N, K] : [K, N], 2)
        const added = bias ? keep(native.make('f32', [N], device, 'temp')) : null
        const numbers = Float32Array.from({ length: N }, (_, n) => Math.sqrt(K) * Math.sin(n))
        if (added !== null) native.write(added, numbers)
        const held = into ? keep(native.random_normal(y as 'f32', M, N, 0, Math.sqrt(K), 3, device)) : null
        let most: Handle | null = null
        const run = (): Handle => {
          if (held !== null) {
            const sums = keep(native.convert(held, null, y))
            native[`${op}_into`](sums, left, right)
            return sums
          }
          const wanted = y === 'e4m3/g16' ? null : 'f32'
          const [made, amax] =
            op === 'matmul_nt' ? native[op](left, right, added, y, wanted) : native[op](left, right, y as 'f32', wanted)
          if (amax !== null) most = keep(amax)
          return keep(made)
        }
        const result = run()
        if (most !== null) expect(await bytesOf(most)).toEqual(await bytesOf(keep(native.amax(result))))
        if (device === 'cuda') expect(Buffer.compare(await bytesOf(result), await bytesOf(run()))).toBe(0)
        native.checkGuards()
        // by the native conversion, which has its own tests: decoding here would take minutes
        const floats = async (handle: Handle) =>
          new Float32Array((await bytesOf(keep(native.convert(handle, null, 'f32')))).buffer)
        const [x, w, values] = [await floats(left), await floats(right), await floats(result)]
        const start = held === null ? null : await floats(held)
        expect(values.every(Number.isFinite)).toBe(true)
        const places = new Random(M * 31 + N * 7 + K)
        const pick = (size: number, i: number, last: boolean) => (i < 4 ? (last ? size - 1 : 0) : places.integer(size))
        const [found, exact]: [number[], number[]] = [[], []]
        for (let i = 0; i < 500; i++) {
          const [m, n] = [pick(M, i, i % 2 === 1), pick(N, i, i % 4 > 1)]
          let total = (bias ? (numbers[n] as number) : 0) + (start?.[m * N + n] ?? 0)
          for (let k = 0; k < K; k++)
            total +=
              (x[op === 'matmul_tn' ? k * M + m : m * K + k] as number) *
              (w[op === 'matmul_nt' ? n * K + k : k * N + n] as number)
          found.push(values[m * N + n] as number)
          exact.push(total)
        }
        return distance(found, exact)
      } finally {
        for (const handle of handles) native.free(handle)
      }
    }

    on('sums of up to 32768 products, positive or not: within 0.25 % in bf16', async () => {
      for (const a of narrow)
        for (const K of [4096, 8192, 32768])
          for (const positive of [true, false])
            expect(
              await errorOf({ a, y: 'bf16', sizes: [17, 40, K], positive }),
              `${a}, K = ${K}, positive: ${positive}`,
            ).toBeLessThan(0.0025)
    })

    // rounding to e4m3 in runs with a scale of their own leaves up to 3 %
    const limits = { f32: 1e-3, bf16: 2.5e-3, 'e4m3/g16': 0.03 }

    const shapes = [
      [1, 200, 8192],
      [17, 320, 8192],
      [64, 257, 8192],
      [128, 130, 8192],
      [512, 144, 4096],
      [520, 1040, 4096],
      [300, 400, 4112],
      [17, 2047, 8192],
      [200, 1000, 8192],
      [1025, 2064, 272],
      [1025, 2047, 273],
      [1300, 1296, 272],
    ] as const
    on.each(device === 'cpu' ? shapes.slice(0, 2) : shapes)(
      'every shape of tiles, with and without parts of K: [%i, %i] of %i',
      async (...sizes) => {
        for (const a of narrow)
          for (const y of ['f32', 'bf16', 'e4m3/g16'] as const)
            for (const bias of [false, true])
              expect(await errorOf({ a, y, sizes, bias }), `${a}, ${y}, bias ${bias}`).toBeLessThan(limits[y])
        for (const op of ['matmul_nn', 'matmul_tn'] as const)
          for (const a of ofBf16)
            for (const y of ['f32', 'bf16'] as const)
              for (const into of [false, true])
                expect(await errorOf({ op, a, y, sizes, into }), `${op}, ${a}, ${y}, ${into}`).toBeLessThan(limits[y])
        for (const a of narrow)
          for (const y of ['f32', 'bf16'] as const)
            expect(await errorOf({ a, y, sizes, into: true }), `${a} into ${y}`).toBeLessThan(limits[y])
      },
    )

    // user-pain.md S5, S2 and S3: sizes at which kernels of others fail
    on.each(device === 'cpu' ? [16, 48] : [16, 48, 768, 1536, 7168])('no wrong answer for N = %i', async (N) => {
      for (const K of [16, 48, 50, 112, 133, 192, 528, 1040, 1152])
        for (const M of [1, 8, 15, 22, 29, 36, 43, 50, 57, 64, 128, 200])
          for (const a of M % 3 === 2 ? narrow.slice(1) : (['e4m3/t', 'runs by blocks'] as const))
            expect(await errorOf({ a, y: 'f32', sizes: [M, N, K] }), `${a}, M = ${M}, K = ${K}`).toBeLessThan(1e-3)
    })
    // S6: memory that the allocator hands back full of NaN
    on('weights of no tokens have a gradient of zeros, whatever the memory held', async () => {
      const [M, N] = [40, 72]
      for (const y of ['f32', 'bf16'] as const) {
        const before = native.make(y, [M, N], device, 'temp')
        native.write(before, await bytesOf(tensor(y, [M, N], new Array(M * N).fill(Number.NaN))))
        native.free(before)
        const made = [
          native.matmul_tn(await there('bf16', [0, M], []), await there('bf16', [0, N], []), y, null)[0],
          native.matmul_nn(await there('f32', [M, 0], []), await there('f32', [0, N], []), y, null)[0],
          nt(await there('e5m2/t', [M, 0], []), await there('e4m3/t', [N, 0], []), null, y),
        ]
        for (const handle of made) expect(await read(own(handle))).toEqual(new Array(M * N).fill(0))
      }
    })
    on('any number of tokens: gradients of weights', async () => {
      for (const K of [1, 50, 133])
        for (const [M, N] of [
          [16, 24],
          [129, 65],
        ] as const) {
          expect(await errorOf({ op: 'matmul_tn', a: 'bf16', y: 'f32', sizes: [M, N, K] })).toBeLessThan(1e-5)
          for (const a of ['e5m2/t', 'runs by runs'] as const)
            expect(await errorOf({ a, y: 'f32', sizes: [M, N, K] })).toBeLessThan(1e-3)
        }
    })
  })

  const compared = present('cuda') && native.baseline(0)
  native.baseline(-1)
  it.skipIf(!compared)('cuBLASLt, asked to compare, makes the same products', async () => {
    const [M, N, K] = [48, 80, 272]
    const make = (format: AnyFormat, rows: number, cols: number, seed: number) => {
      const plain = own(native.random_normal('f32', rows, cols, 0, 1, seed, 'cuda'))
      return format === 'f32' ? plain : own(native.convert(plain, null, format as 'bf16'))
    }
    for (const format of ['f32', 'bf16', 'e4m3/t'] as const) {
      const y = format === 'f32' ? 'f32' : 'bf16' // it has no bf16 products of f32
      const runs = [() => nt(make(format, M, K, 1), make(format, N, K, 2), null, y)]
      if (format !== 'e4m3/t') {
        runs.push(() => native.matmul_nn(make(format, M, K, 1), make(format, K, N, 2), y, null)[0])
        runs.push(() => native.matmul_tn(make(format, K, M, 1), make(format, K, N, 2), y, null)[0])
      }
      for (const run of runs) {
        const ours = await read(own(run()))
        native.baseline(0)
        try {
          expect(distance(await read(own(run())), ours)).toBeLessThan(5e-3)
        } finally {
          native.baseline(-1)
        }
      }
    }
  })

  it('the three forms agree bit for bit on the same numbers', async () => {
    const [M, N, K] = [19, 35, 130]
    const [x, w] = [normal(M * K), normal(K * N)]
    const turned = (values: number[], rows: number, cols: number) =>
      matrix(cols, rows, (i, j) => values[j * cols + i] as number).data
    const [nn] = native.matmul_nn(tensor('f32', [M, K], x), tensor('f32', [K, N], w), 'f32', null)
    const straight = nt(tensor('f32', [M, K], x), tensor('f32', [N, K], turned(w, K, N)), null, 'f32')
    const [tn] = native.matmul_tn(tensor('f32', [K, M], turned(x, M, K)), tensor('f32', [K, N], w), 'f32', null)
    expect(await bytesOf(own(straight))).toEqual(await bytesOf(own(nn)))
    expect(await bytesOf(own(tn))).toEqual(await bytesOf(nn))
  })
})
