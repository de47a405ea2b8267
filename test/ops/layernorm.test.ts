// layernorm against its formula in float64, with and without weight and bias.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkGradient, checkOp, own, read, sizes, tallSize, tensor, wideSizes } from '../harness.ts'
import { type Given, matrix, sum, vector } from '../values.ts'

function forward({ x, w, b, eps, M, N }: Given) {
  const mean = vector(M, (m) => sum(N, (n) => x(m, n)) / N)
  const size = vector(M, (m) => sum(N, (n) => Math.abs(x(m, n))) / N) // that errors of the mean are relative to
  const rstd = vector(M, (m) => 1 / Math.sqrt(sum(N, (n) => (x(m, n) - mean(m)) ** 2) / N + eps))
  return {
    mean,
    '|mean|': size,
    rstd,
    y: matrix(M, N, (m, n) => (x(m, n) - mean(m)) * rstd(m) * (w?.(n) ?? 1) + (b?.(n) ?? 0)),
    '|y|': matrix(
      M,
      N,
      (m, n) => (Math.abs(x(m, n)) + size(m)) * rstd(m) * Math.abs(w?.(n) ?? 1) + Math.abs(b?.(n) ?? 0),
    ),
  }
}

function backward({ dy, x, w, mean, rstd, M, N }: Given) {
  const xhat = matrix(M, N, (m, n) => (x(m, n) - mean(m)) * rstd(m))
  const g = matrix(M, N, (m, n) => dy(m, n) * (w?.(n) ?? 1))
  const a = vector(M, (m) => sum(N, (n) => g(m, n)) / N)
  const b = vector(M, (m) => sum(N, (n) => g(m, n) * xhat(m, n)) / N)
  const sizeA = vector(M, (m) => sum(N, (n) => Math.abs(g(m, n))) / N)
  const sizeB = vector(M, (m) => sum(N, (n) => Math.abs(g(m, n) * xhat(m, n))) / N)
  return {
    dx: matrix(M, N, (m, n) => rstd(m) * (g(m, n) - a(m) - xhat(m, n) * b(m))),
    '|dx|': matrix(M, N, (m, n) => rstd(m) * (Math.abs(g(m, n)) + sizeA(m) + Math.abs(xhat(m, n)) * sizeB(m))),
    dw: vector(N, (n) => sum(M, (m) => dy(m, n) * xhat(m, n))),
    '|dw|': vector(N, (n) => sum(M, (m) => Math.abs(dy(m, n) * xhat(m, n)))),
    db: vector(N, (n) => sum(M, (m) => dy(m, n))),
    '|db|': vector(N, (n) => sum(M, (m) => Math.abs(dy(m, n)))),
  }
}

describe('layernorm', () => {
  checkOp('layernorm_forward', { sizes: [...sizes, ...wideSizes], numbers: { eps: 1e-5 }, reference: forward })
  checkOp('layernorm_backward', {
    sizes: [...sizes, ...wideSizes, tallSize],
    data: { rstd: (random) => 0.1 + random.uniform() },
    reference: backward,
  })
  checkGradient('layernorm', {
    numbers: { M: 3, N: 5, eps: 1e-5 },
    inputs: { x: [3, 5], w: [5, 1], b: [5, 1] },
    forward: (given) => forward(given).y,
    backward: (given) => backward({ ...given, ...forward(given) }),
    gradients: { dx: 'x', dw: 'w', db: 'b' },
  })

  it('NaN reaches its own row and no other', async () => {
    const values = Array.from({ length: 5 * 8 }, (_, i) => Math.sin(i))
    const run = async (x: number[]) =>
      await read(own(native.layernorm_forward(tensor('f32', [5, 8], x), null, null, null, 'e4m3/g16', 1e-5))[0])
    const clean = await run(values)
    const dirty = await run(values.map((x, i) => (i === 2 * 8 + 3 ? Number.NaN : x)))
    expect(dirty.slice(2 * 8, 3 * 8).every(Number.isNaN)).toBe(true)
    expect(dirty.toSpliced(2 * 8, 8)).toEqual(clean.toSpliced(2 * 8, 8))
  })

  it('rows of huge values and rows of none', async () => {
    const w = tensor('f32', [4], [1, 1, 1, 1])
    const x = tensor('f32', [1, 4], [3e30, -3e30, 3e30, -3e30])
    const y = await read(own(native.layernorm_forward(x, w, null, null, 'f32', 1e-5))[0])
    for (const [i, value] of y.entries()) expect(Math.abs(value - (i % 2 ? -1 : 1))).toBeLessThan(1e-6)
    const none = native.layernorm_forward.bind(native, tensor('f32', [2, 0], []), tensor('f32', [0], []), null)
    expect(() => none(null, 'f32', 1e-5)).toThrow('layernorm_forward: x f32[2, 0] must have at least one column')
  })
})
