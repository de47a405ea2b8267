// gelu, the exact form, against its formula in float64.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkGradient, checkOp, checkSame, own, read, sizes, tensor } from '../harness.ts'
import { type Given, matrix } from '../values.ts'

const density = (x: number) => Math.exp((-x * x) / 2) / Math.sqrt(2 * Math.PI)

/** Phi(x): a series of terms of one sign near 0, a continued fraction in the tails. */
function phi(x: number): number {
  const a = Math.abs(x)
  let tail = 0
  if (a < 3) {
    let term = a
    let total = a
    for (let n = 3; n < 120; n += 2) {
      term *= (a * a) / n
      total += term
    }
    tail = 0.5 - density(a) * total
  } else {
    for (let n = 100; n >= 1; n--) tail = n / (a + tail)
    tail = density(a) / (a + tail)
  }
  return x < 0 ? tail : 1 - tail
}

function forward({ x, M, N }: Given) {
  const y = matrix(M, N, (m, n) => x(m, n) * phi(x(m, n)))
  return { y, '|y|': matrix(M, N, (m, n) => Math.abs(y(m, n)) * (1 + x(m, n) ** 2) + 1e-30) }
}

function backward({ dy, x, M, N }: Given) {
  const size = (x: number) => phi(x) + Math.abs(x) * density(x) * (1 + x * x) + 1e-30
  return {
    dx: matrix(M, N, (m, n) => dy(m, n) * (phi(x(m, n)) + x(m, n) * density(x(m, n)))),
    '|dx|': matrix(M, N, (m, n) => Math.abs(dy(m, n)) * size(x(m, n))),
  }
}

describe('gelu', () => {
  // on the device powers of two come from the special function unit, for codes of 8 bits in half precision
  const approximate = { bf16: 2 ** -12, e4m3: 2 ** -8, e5m2: 2 ** -12 }
  checkOp('gelu_forward', { sizes, reference: forward, approximate })
  checkOp('gelu_backward', { sizes, reference: backward, approximate })
  checkGradient('gelu', {
    numbers: { M: 3, N: 7 },
    inputs: { x: [3, 7] },
    forward: (given) => forward(given).y,
    backward,
    gradients: { dx: 'x' },
  })

  // x beyond -13 among them, where the powers are 0
  for (const std of [0.01, 1, 5])
    checkSame(
      `gelu of a million elements, deviation ${std}`,
      (device) => {
        const x = own(native.random_normal('f32', 600, 2048, 0, std, 1, device))
        const dy = own(native.random_normal('bf16', 600, 2048, 0, 1e-3, 2, device))
        const saved = own(native.convert(x, null, 'e4m3/g16'))
        return [
          ...(['bf16', 'e4m3/t'] as const).map((y) => native.gelu_forward(saved, null, y)),
          ...(['bf16', 'e5m2/t'] as const).map((dx) => native.gelu_backward(dy, saved, dx)),
        ]
      },
      approximate,
    )

  it('gelu_forward has the known values', async () => {
    const y = await read(own(native.gelu_forward(tensor('f32', [1, 4], [1, -1, 3, -6]), null, 'f32')))
    const known = [0.8413447460685429, -0.15865525393145707, 2.99595030591, -5.91952587e-9]
    for (const [i, value] of known.entries()) expect((y[i] as number) / value).toBeCloseTo(1, 5)
  })

  it('NaN reaches its own row and no other', async () => {
    const values = Array.from({ length: 5 * 8 }, (_, i) => Math.sin(i))
    const run = async (x: number[]) => await read(own(native.gelu_forward(tensor('f32', [5, 8], x), null, 'e4m3/g16')))
    const clean = await run(values)
    const dirty = await run(values.map((x, i) => (i === 2 * 8 + 3 ? Number.NaN : x)))
    expect(dirty.slice(2 * 8, 3 * 8).some(Number.isNaN)).toBe(true)
    expect(dirty.toSpliced(2 * 8, 8)).toEqual(clean.toSpliced(2 * 8, 8))
  })
})
