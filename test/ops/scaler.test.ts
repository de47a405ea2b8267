// scaler: largest magnitudes, with NaN above Inf, scales that follow from them, and scales read back.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { bytesOf, checkOp, devices, own, present, read, sizes, stored, tensor } from '../harness.ts'
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
          const scale = own(native.scale_from_amax(own(native.amax(x)), format))
          const measured = own(native.convert(x, null, format))
          expect(await bytesOf(scale)).toEqual(await bytesOf(own(native.scale_of(measured))))
          expect(await bytesOf(own(native.convert(x, scale, format)))).toEqual(await bytesOf(measured))
        }
        for (const value of [Number.NaN, Number.POSITIVE_INFINITY]) {
          const x = own(native.make('f32', [1], device, 'temp'))
          native.write(x, Float32Array.of(value))
          const top = Math.fround(3.4028234663852886e38) / (format === 'e4m3/t' ? 448 : 57344)
          expect(await read(own(native.scale_from_amax(x, format)))).toEqual([Math.fround(top)])
        }
      },
    )

  it.each(['e4m3/t', 'e5m2/t'] as const)('scale_of returns the scale stored in %s', async (format) => {
    const x = tensor(
      format,
      [3, 5],
      Array.from({ length: 15 }, (_, i) => i - 4),
    )
    expect(await read(own(native.scale_of(x)))).toEqual([(await stored(x)).blocks[0]?.scale])
  })
})
