// swiglu against its formula in float64.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkGradient, checkOp, checkSame, own, read, sizes, tensor } from '../harness.ts'
import { type Given, matrix } from '../values.ts'

const sigmoid = (x: number) => 1 / (1 + Math.exp(-x))
const tiny = 1e-30 // below it e^x overflows or flushes in FP32

function forward({ x, M, F }: Given) {
  const y = matrix(M, F, (m, f) => x(m, f) * sigmoid(x(m, f)) * x(m, F + f))
  return { y, '|y|': matrix(M, F, (m, f) => Math.abs(y(m, f)) * (1 + Math.abs(x(m, f))) + tiny) }
}

function backward({ dy, x, M, F }: Given) {
  // columns of the gate, then of up
  const halves = (gate: (a: number, up: number, d: number) => number, up: (a: number, d: number) => number) =>
    matrix(M, 2 * F, (m, i) => (i < F ? gate(x(m, i), x(m, F + i), dy(m, i)) : up(x(m, i - F), dy(m, i - F))))
  const dx = halves(
    (a, up, d) => d * up * sigmoid(a) * (1 + a * (1 - sigmoid(a))),
    (a, d) => d * a * sigmoid(a),
  )
  const size = halves(
    (a, up, d) => Math.abs(d * up) * (sigmoid(a) * (1 + Math.abs(a)) ** 2 + tiny),
    (a, d) => Math.abs(d * a) * (sigmoid(a) * (1 + Math.abs(a)) + tiny),
  )
  const turned = (of: typeof dx) => matrix(2 * F, M, (i, m) => of(m, i))
  return { dx, '|dx|': size, twin: turned(dx), '|twin|': turned(size) }
}

describe('swiglu', () => {
  const halved = sizes.map(({ M, N }) => ({ M, F: N }))
  checkOp('swiglu_forward', { sizes: halved, reference: forward })
  checkOp('swiglu_backward', { sizes: halved, reference: backward })
  checkGradient('swiglu', {
    numbers: { M: 2, F: 5 },
    inputs: { x: [2, 10] },
    forward: (given) => forward(given).y,
    backward,
    gradients: { dx: 'x' },
  })

  // gates beyond -86 among them, where the fast unit of the device does not hold
  for (const std of [0.01, 1, 30])
    checkSame(`swiglu of a million elements, deviation ${std}`, (device) => {
      const x = own(native.random_normal('f32', 600, 2048, 0, std, 1, device))
      const dy = own(native.random_normal('bf16', 600, 1024, 0, 1e-3, 2, device))
      const saved = own(native.convert(x, null, 'e4m3/g16'))
      return [
        ...(['bf16', 'e4m3/t'] as const).map((y) => native.swiglu_forward(saved, null, y)),
        native.swiglu_forward(own(native.convert(x, null, 'bf16')), null, 'e4m3/t'),
        ...native.swiglu_backward(dy, saved, 'e5m2/t', 'e5m2/t'),
      ]
    })

  it('NaN reaches its own row and no other', async () => {
    const values = Array.from({ length: 5 * 16 }, (_, i) => Math.sin(i))
    const run = async (x: number[]) =>
      await read(own(native.swiglu_forward(tensor('f32', [5, 16], x), null, 'e4m3/g16')))
    const clean = await run(values)
    const dirty = await run(values.map((x, i) => (i === 2 * 16 + 3 ? Number.NaN : x)))
    expect(dirty.slice(2 * 8, 3 * 8).some(Number.isNaN)).toBe(true)
    expect(dirty.toSpliced(2 * 8, 8)).toEqual(clean.toSpliced(2 * 8, 8))
  })
})
