// scaler: largest magnitudes, with NaN above Inf, scales that follow from them, and scales read back.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { bytesOf, checkOp, devices, moved, own, present, read, sizes, stored, tensor } from '../harness.ts'
import { largest, vector } from '../values.ts'

describe('scaler', () => {
  checkOp('amax', {
    sizes: sizes.filter(({ M }) => M > 0),
    reference: ({ x, M, N }) => ({ y: vector(1, () => largest(M * N, (i) => Math.abs(x(i)))) }),
  })

  for (const device of devices)
    it.skipIf(!present(device)).each(['f32', 'bf16', 'e5m2/t'] as const)(
      `amax of %s on ${device}: 0 of nothing; NaN wins over Inf, Inf over numbers`,
      async (format) => {
        const one = tensor('f32', [1], [1])
        const amax = async (values: number[]) => {
          const x = own(native.make(format, [values.length], device, 'temp'))
          const given = format.endsWith('/t') ? one : undefined
          native.write(x, await bytesOf(tensor(format, [values.length], values, given)))
          return (await read(own(native.amax(x))))[0]
        }
        const infinite = format === 'e5m2/t' ? 57344 : Number.POSITIVE_INFINITY // saturated
        expect(await amax([])).toBe(0)
        expect(await amax([1, -3, 2])).toBe(3)
        expect(await amax([1, Number.NEGATIVE_INFINITY, 2])).toBe(infinite)
        expect(await amax([1, Number.NaN, Number.POSITIVE_INFINITY])).toBeNaN()
        // one large number, or one NaN, in many chunks of work
        const at = (i: number, x: number) => Array.from({ length: 100_000 }, (_, k) => (k === i ? x : k % 7))
        for (const i of [0, 77_777, 99_999]) {
          expect(await amax(at(i, -1024))).toBe(1024)
          expect(await amax(at(i, Number.NaN))).toBeNaN()
        }
      },
    )

  for (const device of devices)
    it.skipIf(!present(device)).each(['e4m3/t', 'e5m2/t'] as const)(
      `scale_from_amax on ${device} is the scale that convert measures for %s, and so are its codes`,
      async (format) => {
        for (const size of [0, 1e-45, 1e-38, 1e-3, 1, 0.7 * 448, 3.4e38]) {
          const x = own(native.make('f32', [999], device, 'temp'))
          const values = Float32Array.from({ length: 999 }, (_, i) => Math.sin(i) * size)
          native.write(x, values)
          const scale = own(native.scale_from_amax(own(native.amax(x)), format, 'exact'))
          const measured = own(native.convert(x, null, format))
          expect(await bytesOf(scale)).toEqual(await bytesOf(own(native.scale_of(measured))))
          expect(await bytesOf(own(native.convert(x, scale, format)))).toEqual(await bytesOf(measured))
        }
        for (const value of [Number.NaN, Number.POSITIVE_INFINITY]) {
          const x = own(native.make('f32', [1], device, 'temp'))
          native.write(x, Float32Array.of(value))
          const top = Math.fround(3.4028234663852886e38) / (format === 'e4m3/t' ? 448 : 57344)
          expect(await read(own(native.scale_from_amax(x, format, 'exact')))).toEqual([Math.fround(top)])
        }
      },
    )

  for (const device of devices)
    it.skipIf(!present(device)).each([
      [3, 'e4m3/t', 128],
      [3, 'e5m2/t', 16384],
      [500, 'e4m3/t', 0.5],
      [448, 'e4m3/t', 1],
      [Math.fround(448.0001), 'e4m3/t', 0.5],
      [0, 'e4m3/t', 256],
    ] as const)(`powers of two on ${device}: %d in %s is multiplied by %d`, async (value, format, expected) => {
      const amax = await moved(tensor('f32', [1], [value]), device)
      expect(await read(own(native.scale_from_amax(amax, format, 'pow2')))).toEqual([1 / expected])
    })

  it.each(['e4m3/t', 'e5m2/t'] as const)('scale_of returns the scale stored in %s', async (format) => {
    const x = tensor(
      format,
      [3, 5],
      Array.from({ length: 15 }, (_, i) => i - 4),
    )
    expect(await read(own(native.scale_of(x)))).toEqual([(await stored(x)).blocks[0]?.scale])
  })

  checkOp('observe_amax', {
    sizes: [1, 2, 17].map((H) => ({ H })),
    data: { history: (random) => random.uniform(), amax: (random) => 2 * random.uniform() },
    reference: ({ history, amax, H }) => ({
      history: vector(H, (i) => (i === 0 ? Math.max(history(0), amax(0)) : history(i))),
    }),
  })
  checkOp('scale_from_history', {
    sizes: [1, 2, 31, 32, 33, 64, 1024, 1025].map((H) => ({ H, headroom: 0.5 })),
    data: { history: (random) => random.uniform() + 0.1 },
    reference: ({ history, H, headroom }) => ({
      scale: vector(1, () => (headroom * largest(H, (i) => history(i))) / 448),
      history: vector(H, (i) => (i === 0 ? 0 : history(i - 1))),
    }),
  })

  for (const device of devices) {
    const test = it.skipIf(!present(device))
    const made = async (values: number[]) => moved(tensor('f32', [values.length], values), device)
    // scales of Transformer Engine multiply values: they are 1 / ours
    test.each([
      ['max', 0, 89.6],
      ['max', 1, 44.8],
      ['most_recent', 0, 112],
      ['most_recent', 1, 56],
    ] as const)(
      `delayed scaling on ${device}: history 2, 5, 3, now 4, %s, margin %i: %d`,
      async (pick, margin, expected) => {
        const history = await made([0, 2, 5, 3])
        const scale = await made([7])
        native.observe_amax(history, await made([1.5]))
        native.observe_amax(history, await made([4]))
        native.observe_amax(history, await made([3]))
        native.scale_from_history(history, scale, 'e4m3/t', pick, 2 ** margin)
        expect(1 / ((await read(scale))[0] as number)).toBeCloseTo(expected, 4)
        expect(await read(history)).toEqual([0, 4, 2, 5])
      },
    )
    test(`delayed scaling on ${device}: nothing seen, or nothing finite, changes nothing`, async () => {
      const history = await made([0, 0, 0])
      const scale = await made([7])
      for (const amax of [0, Number.NaN, Number.POSITIVE_INFINITY]) native.observe_amax(history, await made([amax]))
      native.scale_from_history(history, scale, 'e5m2/t', 'max', 1)
      expect([await read(history), await read(scale)]).toEqual([[0, 0, 0], [7]])
      // what was seen before holds on when a module does not run
      native.observe_amax(history, await made([57344]))
      for (let i = 0; i < 9; i++) native.scale_from_history(history, scale, 'e5m2/t', 'max', 1)
      expect([await read(history), await read(scale)]).toEqual([[0, 57344, 0], [1]])
    })
    test(`delayed scaling on ${device}: scales stay normal numbers`, async () => {
      for (const [amax, factor, expected] of [
        [1e-38, 0.5, 2 ** -126],
        [3e38, 2 ** 60, 3.4028234663852886e38],
      ] as const) {
        const [history, scale] = [await made([amax]), await made([1])]
        native.scale_from_history(history, scale, 'e4m3/t', 'most_recent', factor)
        expect(await read(scale)).toEqual([expected])
      }
    })
  }
})
