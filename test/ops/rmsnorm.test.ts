// rmsnorm against its formula in float64.
import { describe, expect, it } from 'vitest'
import type { Handle } from '../../lib/native.gen.ts'
import { native } from '../../lib/native.ts'
import { stepOf } from '../decode.ts'
import {
  bytesOf,
  checkGradient,
  checkOp,
  devices,
  moved,
  own,
  present,
  read,
  sizes,
  tallSize,
  tensor,
  wideSizes,
} from '../harness.ts'
import { type Given, largest, matrix, Random, sum, type Values, vector } from '../values.ts'

function forward({ x, w, eps, M, N }: Given) {
  const rstd = vector(M, (m) => 1 / Math.sqrt(sum(N, (n) => x(m, n) ** 2) / N + eps))
  return { rstd, y: matrix(M, N, (m, n) => x(m, n) * rstd(m) * w(n)) }
}

function transposed({ x, w, rstd, M, N }: Given) {
  return { y: matrix(N, M, (n, m) => x(m, n) * rstd(m) * w(n)) }
}

function backward({ dy, x, w, rstd, residual, M, N }: Given) {
  const xhat = matrix(M, N, (m, n) => x(m, n) * rstd(m))
  const g = matrix(M, N, (m, n) => dy(m, n) * w(n))
  const mean = vector(M, (m) => sum(N, (n) => g(m, n) * xhat(m, n)) / N)
  const size = vector(M, (m) => sum(N, (n) => Math.abs(g(m, n) * xhat(m, n))) / N)
  const more = (m: number, n: number) => (residual ? residual(m, n) : 0)
  const dx = matrix(M, N, (m, n) => rstd(m) * (g(m, n) - xhat(m, n) * mean(m)) + more(m, n))
  const most = largest(M * N, (i) => Math.abs(dx(i)))
  return {
    dx,
    '|dx|': matrix(
      M,
      N,
      (m, n) => rstd(m) * (Math.abs(g(m, n)) + Math.abs(xhat(m, n)) * size(m)) + Math.abs(more(m, n)),
    ),
    amax: vector(1, () => Math.max(0, most)),
    '|amax|': vector(1, () => 1e6 * most), // held exactly against op amax below
    dw: vector(N, (n) => sum(M, (m) => dy(m, n) * xhat(m, n))),
    '|dw|': vector(N, (n) => sum(M, (m) => Math.abs(dy(m, n) * xhat(m, n)))),
  }
}

/** x as e4m3/g16 keeps it. */
function quantized(x: Values, M: number, N: number): Values {
  const bits = new DataView(new ArrayBuffer(4))
  const scaleOf = (m: number, start: number) => {
    const amax = largest(Math.min(16, N - start), (k) => Math.abs(x(m, start + k))) || 1
    bits.setFloat32(0, amax / 448)
    bits.setUint32(0, ((bits.getUint32(0) + 0xffff) >>> 16) << 16) // the next bf16
    return bits.getFloat32(0)
  }
  return matrix(M, N, (m, n) => {
    const scale = scaleOf(m, n - (n % 16))
    const code = Math.fround(Math.fround(x(m, n)) * Math.fround(1 / scale))
    const step = stepOf('e4m3', Math.abs(code))
    const steps = Math.abs(code) / step
    const up = steps - Math.floor(steps) > 0.5 || (steps - Math.floor(steps) === 0.5 && Math.floor(steps) % 2 === 1)
    return Math.sign(code) * (Math.floor(steps) + (up ? 1 : 0)) * step * scale
  })
}

function addForward({ a, b, w, eps, M, N }: Given) {
  const y = matrix(M, N, (m, n) => Math.fround(a(m, n) + b(m, n)))
  const norm = forward({ x: quantized(y, M, N), w, eps, M, N } as Given)
  const amax = Math.max(
    0,
    largest(M * N, (i) => Math.abs(norm.y(i))),
  )
  return { y, twin: y, rstd: norm.rstd, scale: vector(1, () => (amax || 1) / 448) }
}

describe('rmsnorm', () => {
  checkOp('rmsnorm_forward', { sizes: [...sizes, ...wideSizes], numbers: { eps: 1e-5 }, reference: forward })
  checkOp('rmsnorm_transposed', {
    sizes: [...sizes, ...wideSizes],
    data: { rstd: (random) => 0.1 + random.uniform() },
    reference: transposed,
  })
  for (const device of devices)
    it.skipIf(!present(device)).each([
      [0, 16],
      [1, 1],
      [2, 17],
      [127, 129],
      [128, 128],
      [129, 127],
      [40, 4112], // more columns than a stripe of tiles
      [144, 200],
      [131, 1009],
    ])(`rmsnorm_transposed is rmsnorm_forward, then the transpose, on ${device}: [%i, %i]`, async (M, N) => {
      const random = new Random(N)
      const largest = 3e38
      for (const special of [undefined, Number.NaN, Number.POSITIVE_INFINITY, largest])
        for (const format of ['f32', 'bf16'] as const) {
          const values = Float32Array.from({ length: M * N }, () => random.typical())
          const weights = Float32Array.from({ length: N }, () => random.typical())
          if (special !== undefined) weights[N >> 1] = special
          if (Number.isNaN(special)) values[(M * N) >> 1] = special as number
          const x = await moved(tensor('e4m3/g16', [M, N], values), device)
          const w = await moved(tensor(format, [N], weights), device)
          const scale = await moved(tensor('f32', [1], [special === largest ? 1e36 : 0.0123]), device)
          const infs = () => native.memory().infs
          const before = infs()
          const [straight, rstd] = own(native.rmsnorm_forward(x, w, scale, 'e4m3/t', 1e-5))
          const twice = own(native.convert_transposed(straight, null, 'e4m3/t'))
          const expected = await bytesOf(twice)
          const between = infs()
          const once = own(native.rmsnorm_transposed(x, w, rstd, scale))
          expect(Buffer.compare(await bytesOf(once), expected)).toBe(0)
          expect(infs() - between).toBe(between - before)
          if (special === Number.POSITIVE_INFINITY && M > 0) expect(between).toBeGreaterThan(before)
        }
    })

  checkOp('rmsnorm_backward', {
    sizes: [...sizes, ...wideSizes, tallSize],
    data: { rstd: (random) => 0.1 + random.uniform() },
    reference: backward,
  })
  for (const device of devices)
    it.skipIf(!present(device)).each([
      [5, 33],
      [130, 576],
      [67, 4640],
      [0, 16],
    ])(`rmsnorm_backward leaves the amax of dx on ${device}: [%i, %i]`, async (M, N) => {
      for (const format of ['f32', 'bf16'] as const) {
        const [dy, x, residual] = own(
          [1, 2, 3].map((seed) => native.random_normal(format, M, N, 0, 1, seed, device)),
        ) as [Handle, Handle, Handle]
        const w = await moved(tensor(format, [N], new Float32Array(N).fill(0.5)), device)
        const [, rstd] = own(native.rmsnorm_forward(x, w, null, format, 1e-5))
        const [dx, , amax] = own(native.rmsnorm_backward(dy, x, w, rstd, residual, format, 'f32', 'f32'))
        expect(await bytesOf(amax as Handle)).toEqual(await bytesOf(own(native.amax(dx))))
      }
    })
  checkOp('add_rmsnorm_forward', { sizes: [...sizes, ...wideSizes], numbers: { eps: 1e-5 }, reference: addForward })
  checkGradient('rmsnorm', {
    numbers: { M: 3, N: 5, eps: 1e-5 },
    inputs: { x: [3, 5], w: [5, 1] },
    forward: (given) => forward(given).y,
    backward: (given) => backward({ ...given, ...forward(given) }),
    gradients: { dx: 'x', dw: 'w' },
  })

  for (const device of devices)
    it.skipIf(!present(device)).each([
      [5, 33],
      [7, 16],
      [130, 576],
      [3, 4640],
    ])(`add_rmsnorm_forward is add, then rmsnorm_forward of the twin, on ${device}: [%i, %i]`, async (M, N) => {
      const random = new Random(M)
      const make = (shape: number[], format: 'f32' | 'bf16', special?: number) => {
        const count = shape.reduce((product, size) => product * size, 1)
        const values = Float32Array.from({ length: count }, () => random.typical())
        if (special !== undefined) values[count >> 1] = special
        const plain = own(native.make('f32', shape, device, 'temp'))
        native.write(plain, values)
        return own(native.convert(plain, null, format))
      }
      for (const special of [undefined, Number.NaN, Number.POSITIVE_INFINITY])
        for (const format of ['f32', 'bf16'] as const) {
          const [a, b, w] = [make([M, N], format, special), make([M, N], format), make([N], 'f32')]
          const [y, twin, rstd, scale] = own(native.add_rmsnorm_forward(a, b, w, format, 1e-5))
          const [sum, quantized] = own(native.add(a, b, format, 'e4m3/g16'))
          const [measured, itsRstd] = own(native.rmsnorm_forward(twin, w, null, 'e4m3/t', 1e-5))
          const [given] = own(native.rmsnorm_forward(twin, w, scale, 'e4m3/t', 1e-5))
          const pairs = [
            [y, sum],
            [twin, quantized as number],
            [rstd, itsRstd],
            [given, measured],
            [scale, own(native.scale_of(measured))],
          ] as const
          for (const [ours, theirs] of pairs) expect(await bytesOf(ours)).toEqual(await bytesOf(theirs))
        }
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
    const [a, v, one] = [tensor('f32', [2, 0], []), tensor('f32', [0], []), tensor('f32', [1], [1])]
    expect(() => native.rmsnorm_transposed(tensor('e4m3/g16', [2, 0], []), v, tensor('f32', [2], [1, 1]), one)).toThrow(
      'rmsnorm_transposed: x e4m3/g16[2, 0] must have at least one column',
    )
    expect(() => native.add_rmsnorm_forward(a, a, v, 'f32', 1e-5)).toThrow(
      'add_rmsnorm_forward: a f32[2, 0] must have at least one column',
    )
  })
})
