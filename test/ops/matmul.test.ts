// matmul against float64: exact FP8 products, every tail, depth, NaN and Inf.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { bytesOf, checkOp, own, read, stored, tensor } from '../harness.ts'
import { matrix, Random, sum, type Values } from '../values.ts'

type At = (i: number, j: number) => number

/** y(m, n) = sum over k of a b, and the sum of the magnitudes. */
function product(M: number, N: number, K: number, a: At, b: At, bias?: Values) {
  const one = (f: (x: number) => number) =>
    matrix(M, N, (m, n) => sum(K, (k) => f(a(m, k) * b(k, n))) + f(bias?.(n) ?? 0))
  return { y: one((x) => x), '|y|': one(Math.abs) }
}

// FP32 sums of up to 385 products
const slack = 4e-6

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
  ]
  checkOp('matmul_nt', {
    exact: false,
    sizes,
    slack,
    reference: ({ a, b, bias, M, N, K }) => product(M, N, K, a, (k, n) => b(n, k), bias),
  })
  checkOp('matmul_nn', { exact: false, sizes, slack, reference: ({ a, b, M, N, K }) => product(M, N, K, a, b) })
  checkOp('matmul_tn', {
    exact: false,
    sizes,
    slack,
    reference: ({ a, b, M, N, K }) => product(M, N, K, (m, k) => a(k, m), b),
  })

  const random = new Random(4)
  const normal = (n: number) => Array.from({ length: n }, () => random.normal())

  it('a depth of 8192 loses nothing: relative error below 1e-5', async () => {
    const [M, N, K] = [5, 19, 8192]
    for (const format of ['f32', 'e4m3/t', 'e5m2/t'] as const) {
      const a = tensor(format, [M, K], normal(M * K))
      const b = tensor(format === 'f32' ? 'f32' : 'e4m3/t', [N, K], normal(N * K))
      const [x, w, y] = [await read(a), await read(b), await read(own(native.matmul_nt(a, b, null, 'f32')))]
      const exact = matrix(M, N, (m, n) => sum(K, (k) => (x[m * K + k] as number) * (w[n * K + k] as number)))
      const error = Math.sqrt(sum(M * N, (i) => ((y[i] as number) - exact(i)) ** 2) / sum(M * N, (i) => exact(i) ** 2))
      expect(error).toBeLessThan(1e-5)
    }
  })

  it('FP8 codes multiply exactly and the scales enter as their product', async () => {
    // integers below 2^24 in units of the smallest product: no rounding anywhere
    const codes = Array.from({ length: 64 }, () => random.integer(15) - 7)
    const a = tensor('e4m3/t', [4, 16], codes, tensor('f32', [1], [0.25]))
    const b = tensor('e4m3/t', [4, 16], [...codes].reverse(), tensor('f32', [1], [2]))
    const [x, w] = [await read(a), await read(b)]
    const exact = matrix(4, 4, (m, n) => sum(16, (k) => (x[m * 16 + k] as number) * (w[n * 16 + k] as number)))
    expect(await read(own(native.matmul_nt(a, b, null, 'f32')))).toEqual([...exact.data])
  })

  it.each(['f32', 'bf16', 'e4m3/t'] as const)(
    'NaN in %s reaches its row and column and nothing else',
    async (format) => {
      const [M, N, K] = [13, 37, 50]
      const [x, w] = [normal(M * K), normal(N * K)]
      const clean = await read(own(native.matmul_nt(tensor(format, [M, K], x), tensor(format, [N, K], w), null, 'f32')))
      x[5 * K + 49] = Number.NaN
      w[20 * K + 3] = Number.NaN
      const y = await read(own(native.matmul_nt(tensor(format, [M, K], x), tensor(format, [N, K], w), null, 'f32')))
      y.forEach((value, i) => {
        const [m, n] = [Math.floor(i / N), i % N]
        if (m === 5 || n === 20) expect(value).toBeNaN()
        else expect(value).toBe(clean[i])
      })
    },
  )

  it('Inf times a number is Inf, times 0 NaN; in e4m3/g16 it saturates and is counted', async () => {
    const a = tensor('f32', [1, 2], [Number.POSITIVE_INFINITY, 1])
    const b = tensor('f32', [3, 2], [1, 0, -2, 0, 0, 1])
    expect(await read(own(native.matmul_nt(a, b, null, 'f32')))).toEqual([
      Number.POSITIVE_INFINITY,
      Number.NEGATIVE_INFINITY,
      Number.NaN,
    ])
    const before = native.memory().infs
    const quantized = await stored(own(native.matmul_nt(a, b, null, 'e4m3/g16')))
    expect([...quantized.codes]).toEqual([0x7e, 0xfe, expect.toSatisfy((code: number) => (code & 0x7f) === 0x7f)])
    expect(native.memory().infs - before).toBe(2)
  })

  it('the three forms agree bit for bit on the same numbers', async () => {
    const [M, N, K] = [19, 35, 130]
    const [x, w] = [normal(M * K), normal(K * N)]
    const turned = (values: number[], rows: number, cols: number) =>
      matrix(cols, rows, (i, j) => values[j * cols + i] as number).data
    const nn = native.matmul_nn(tensor('f32', [M, K], x), tensor('f32', [K, N], w), 'f32')
    const nt = native.matmul_nt(tensor('f32', [M, K], x), tensor('f32', [N, K], turned(w, K, N)), null, 'f32')
    const tn = native.matmul_tn(tensor('f32', [K, M], turned(x, M, K)), tensor('f32', [K, N], w), 'f32')
    expect(await bytesOf(own(nt))).toEqual(await bytesOf(own(nn)))
    expect(await bytesOf(own(tn))).toEqual(await bytesOf(nn))
  })

  it('no rows give no rows, no depth gives zeros or the bias', async () => {
    expect(
      native.info(own(native.matmul_nt(tensor('bf16', [0, 8], []), tensor('bf16', [3, 8], normal(24)), null, 'bf16')))
        .shape,
    ).toEqual([0, 3])
    const [a, b] = [tensor('f32', [2, 0], []), tensor('f32', [3, 0], [])]
    expect(await read(own(native.matmul_nt(a, b, null, 'f32')))).toEqual([0, 0, 0, 0, 0, 0])
    expect(await read(own(native.matmul_nt(a, b, tensor('f32', [3], [1, 2, 3]), 'bf16')))).toEqual([1, 2, 3, 1, 2, 3])
  })
})
