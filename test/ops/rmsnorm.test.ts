// rmsnorm against its formula in float64.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkGradient, checkOp, own, read, sizes, tensor } from '../harness.ts'
import { type Given, matrix, sum, vector } from '../values.ts'

function forward({ x, w, eps, M, N }: Given) {
  const rstd = vector(M, (m) => 1 / Math.sqrt(sum(N, (n) => x(m, n) ** 2) / N + eps))
  return { rstd, y: matrix(M, N, (m, n) => x(m, n) * rstd(m) * w(n)) }
}

function backward({ dy, x, w, rstd, M, N }: Given) {
  const xhat = matrix(M, N, (m, n) => x(m, n) * rstd(m))
  const g = matrix(M, N, (m, n) => dy(m, n) * w(n))
  const mean = vector(M, (m) => sum(N, (n) => g(m, n) * xhat(m, n)) / N)
  const size = vector(M, (m) => sum(N, (n) => Math.abs(g(m, n) * xhat(m, n))) / N)
  return {
    dx: matrix(M, N, (m, n) => rstd(m) * (g(m, n) - xhat(m, n) * mean(m))),
    '|dx|': matrix(M, N, (m, n) => rstd(m) * (Math.abs(g(m, n)) + Math.abs(xhat(m, n)) * size(m))),
    dw: vector(N, (n) => sum(M, (m) => dy(m, n) * xhat(m, n))),
    '|dw|': vector(N, (n) => sum(M, (m) => Math.abs(dy(m, n) * xhat(m, n)))),
  }
}

describe('rmsnorm', () => {
  checkOp('rmsnorm_forward', { sizes, numbers: { eps: 1e-5 }, reference: forward })
  checkOp('rmsnorm_backward', { sizes, data: { rstd: (random) => 0.1 + random.uniform() }, reference: backward })
  checkGradient('rmsnorm', {
    numbers: { M: 3, N: 5, eps: 1e-5 },
    inputs: { x: [3, 5], w: [5, 1] },
    forward: (given) => forward(given).y,
    backward: (given) => backward({ ...given, ...forward(given) }),
    gradients: { dx: 'x', dw: 'w' },
  })

  it('NaN reaches its own row and no other', async () => {
    const values = Array.from({ length: 5 * 8 }, (_, i) => Math.sin(i))
    const run = async (x: number[]) =>
      await read(
        own(
          native.rmsnorm_forward(
            tensor('f32', [5, 8], x),
            tensor('f32', [8], new Float32Array(8).fill(1)),
            null,
            'e4m3/g16',
            1e-5,
          ),
        )[0],
      )
    const clean = await run(values)
    const dirty = await run(values.map((x, i) => (i === 2 * 8 + 3 ? Number.NaN : x)))
    expect(dirty.slice(2 * 8, 3 * 8).every(Number.isNaN)).toBe(true)
    expect(dirty.toSpliced(2 * 8, 8)).toEqual(clean.toSpliced(2 * 8, 8))
  })

  it('rows of huge values and rows of none', async () => {
    const w = tensor('f32', [4], [1, 1, 1, 1])
    const x = tensor('f32', [1, 4], [3e30, -3e30, 3e30, -3e30])
    const y = await read(own(native.rmsnorm_forward(x, w, null, 'f32', 1e-5))[0])
    for (const [i, value] of y.entries()) expect(Math.abs(value - (i % 2 ? -1 : 1))).toBeLessThan(1e-6)
    const none = native.rmsnorm_forward.bind(native, tensor('f32', [2, 0], []), tensor('f32', [0], []), null)
    expect(() => none('f32', 1e-5)).toThrow('rmsnorm_forward: x f32[2, 0] must have at least one column')
  })
})
