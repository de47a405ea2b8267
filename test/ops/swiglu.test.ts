// swiglu against its formula in float64.
import { describe, expect, it } from 'vitest'
import type { Handle } from '../../lib/native.gen.ts'
import { native } from '../../lib/native.ts'
import {
  bytesOf,
  checkGradient,
  checkOp,
  checkSame,
  devices,
  moved,
  own,
  present,
  read,
  sizes,
  stored,
  tensor,
} from '../harness.ts'
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
  const made = forward({ x, M, F } as Given)
  const across = (of: typeof dx) => matrix(F, M, (f, m) => of(m, f))
  return {
    dx,
    '|dx|': size,
    twin: turned(dx),
    '|twin|': turned(size),
    product: across(made.y),
    '|product|': across(made['|y|']),
  }
}

/** The scale with which forward would quantize its result. */
const scaleLike = (x: Handle) => own(native.scale_of(own(native.swiglu_forward(x, null, 'e4m3/t'))))

// around a tile of the kernel that transposes, 128 x 64
const tiles = [
  { M: 128, F: 64 },
  { M: 132, F: 80 },
  { M: 124, F: 48 },
]

describe('swiglu', () => {
  const halved = sizes.map(({ M, N }) => ({ M, F: N }))
  checkOp('swiglu_forward', { sizes: halved, reference: forward })
  checkOp('swiglu_backward', {
    sizes: [...halved, ...tiles],
    data: { amax: () => 512 },
    reference: backward,
    scaleOf: (output, { amax, x }) =>
      output === 'product' ? 'given' : amax && x === 'e4m3/g16' ? 'bounded' : 'measured',
  })
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
        ...native.swiglu_backward(dy, saved, null, null, 'e5m2/t', 'e5m2/t', null).slice(0, 2),
        ...native.swiglu_backward(dy, saved, own(native.amax(dy)), scaleLike(saved), 'e5m2/t', 'e5m2/t', 'e4m3/t'),
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

describe.each(devices)('the measured scale of swiglu_forward on %s', (device) => {
  // two groups of eight runs a row, and more rows than a first look sees
  const [M, F] = [264, 256]
  const odd = (m: number, f: number) => m === 133 && f === 200
  const test = it.skipIf(!present(device))
  test.each<[string, (m: number, f: number, half: number) => number]>([
    ['zeros', () => 0],
    ['one number among zeros', (m, f, half) => (odd(m, f) ? [3, -5][half]! : 0)],
    ['gates below zero', (m, f, half) => (half === 0 ? -1.3 - Math.sin(m * f) / 8 : 4 * Math.cos(m + 7 * f))],
    ['numbers of all sizes', (m, f, half) => Math.sin(m + f) * Math.exp(8 * Math.sin(m * 31 + f * 7 + half))],
    ['small numbers', (m, f, half) => 1e-15 * Math.sin(m + 3 * f + half)],
    ['an infinity among numbers', (m, f) => (odd(m, f) ? Number.POSITIVE_INFINITY : Math.sin(m + f))],
    ['a NaN among numbers', (m, f) => (odd(m, f) ? Number.NaN : Math.sin(m + f))],
  ])('%s: that of the largest finite value of coded x', async (_, number) => {
    const data = Array.from({ length: M * 2 * F }, (_, i) =>
      number(Math.floor(i / (2 * F)), i % F, Math.floor(i / F) % 2),
    )
    const x = own(native.convert(await moved(tensor('f32', [M, 2 * F], data), device), null, 'e4m3/g16'))
    const exact = await read(own(native.swiglu_forward(x, null, 'f32')))
    const most = exact.reduce((most, y) => (Number.isFinite(y) ? Math.max(most, Math.abs(y)) : most), 0)
    const { blocks } = await stored(own(native.swiglu_forward(x, null, 'e4m3/t')))
    expect(blocks[0]?.scale).toBe(Math.fround((most || 1) / 448))
  })
})

describe.each(devices)('swiglu_backward from a bound of |dy| on %s', (device) => {
  const test = it.skipIf(!present(device))
  const normal = (M: number, N: number, std: number, seed: number) =>
    own(native.random_normal('bf16', M, N, 0, std, seed, device))
  const saved = (M: number, F: number) => own(native.convert(normal(M, 2 * F, 3, 1), null, 'e4m3/g16'))
  const number = async (x: number) => await moved(tensor('f32', [1], [x]), device)
  const bounded = (dy: Handle, x: Handle, amax: Handle) => {
    const [dx, twin, product] = native.swiglu_backward(dy, x, amax, scaleLike(x), 'e5m2/t', 'e5m2/t', 'e4m3/t')
    return own([dx, twin as Handle, product as Handle] as const)
  }
  /** The largest |gate| and |up| that the scales of x [M, 2F] allow. */
  const reachOf = async (x: Handle, F: number) => {
    const runs = Math.ceil((2 * F) / 16)
    let [gate, up] = [0, 0]
    for (const [b, { scale }] of (await stored(x)).blocks.entries()) {
      const first = (b % runs) * 16
      if (first < F) gate = Math.max(gate, 448 * scale)
      if (first + 16 > F) up = Math.max(up, 448 * scale)
    }
    return { gate, up }
  }
  const notBelow = (x: number) => 2 ** Math.ceil(Math.log2(x))

  const shapes: [number, number][] = [
    [1, 1],
    [3, 7],
    [4, 16],
    [5, 17],
    [31, 127],
    [124, 48],
    [127, 64],
    [128, 64],
    [132, 1040],
    [260, 384],
  ]
  test.each(shapes)('%i x %i: the scale is the power of two above the bound', async (M, F) => {
    const [dy, x] = [normal(M, F, 1e-3, 2), saved(M, F)]
    const amax = own(native.amax(dy))
    const { gate, up } = await reachOf(x, F)
    const [most = 0] = await read(amax)
    const [dx] = bounded(dy, x, amax)
    const { blocks, values } = await stored(dx)
    expect(blocks[0]?.scale).toBe(notBelow((most * Math.max(1.1 * up, gate)) / 57344))
    const measured = await stored(own(native.swiglu_backward(dy, x, null, null, 'e5m2/t', null, null)[0]))
    const largest = (of: typeof values) => of.reduce((most, x) => Math.max(most, Math.abs(x)), 0)
    // within half a step at the top of either scale: nothing saturated
    expect(Math.abs(largest(values) / largest(measured.values) - 1)).toBeLessThanOrEqual(1 / 4)
  })

  test.each(shapes)('%i x %i: twin and product are the transposes', async (M, F) => {
    const [dy, x] = [normal(M, F, 1e-3, 2), saved(M, F)]
    const [dx, twin, product] = bounded(dy, x, own(native.amax(dy)))
    expect(await bytesOf(twin)).toEqual(await bytesOf(own(native.convert_transposed(dx, null, 'e5m2/t'))))
    const y = own(native.swiglu_forward(x, scaleLike(x), 'e4m3/t'))
    expect(await bytesOf(product)).toEqual(await bytesOf(own(native.convert_transposed(y, null, 'e4m3/t'))))
  })

  test('a scale that does not fit saturates, as in swiglu_forward', async () => {
    const [dy, x] = [normal(132, 80, 1, 2), saved(132, 80)]
    for (const scale of [2 ** -120, 2 ** -12, 1e4, 2 ** 100]) {
      const given = await number(scale)
      const [dx, twin, product] = native.swiglu_backward(dy, x, null, given, 'e5m2/t', 'e5m2/t', 'e4m3/t')
      own([dx, twin, product])
      const y = own(native.swiglu_forward(x, given, 'e4m3/t'))
      expect(await bytesOf(product as Handle)).toEqual(await bytesOf(own(native.convert_transposed(y, null, 'e4m3/t'))))
    }
  })

  const top = 2 ** 113 // for the largest finite number
  test.each([
    ['zeros', 0, 0, 2 ** -15],
    ['numbers too small for a scale', 1e-38, 1e-38, 2 ** -126],
    ['huge numbers', 3e38, 3e38, top],
    ['an infinity', Number.POSITIVE_INFINITY, 1, top],
    ['a NaN', Number.NaN, 1, top],
  ])('%s give a scale all the same', async (_, odd, others, scale) => {
    const [M, F] = [8, 32]
    const x = saved(M, F)
    const data = Array.from({ length: M * F }, (_, i) => (i === 37 ? odd : i % 2 === 0 ? others : -others))
    const dy = await moved(tensor('bf16', [M, F], data), device)
    const [dx, twin, product] = bounded(dy, x, own(native.amax(dy)))
    const { blocks, codes } = await stored(dx)
    expect(blocks[0]?.scale).toBe(scale)
    // element 37 in the columns of gate and of up: row 1, column 5
    const seen = [codes[2 * F + 5], codes[3 * F + 5]].map((code) => (code as number) & 0x7f)
    if (Number.isNaN(odd)) for (const code of seen) expect(code).toBeGreaterThan(0x7c)
    else if (odd === Number.POSITIVE_INFINITY) expect(seen).toEqual([0x7b, 0x7b])
    else for (const code of codes) expect(code & 0x7f).toBeLessThanOrEqual(0x7b)
    if (odd === 0) for (const code of codes) expect(code & 0x7f).toBe(0)
    expect((await stored(twin)).blocks[0]?.scale).toBe(scale)
    expect((await stored(product)).values.every(Number.isFinite)).toBe(true)
  })
})
