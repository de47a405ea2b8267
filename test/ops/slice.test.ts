// slice: rows and elements copied out of a tensor and into one, byte for byte.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { bytesOf, devices, moved, own, present, read, tensor } from '../harness.ts'
import { Random } from '../values.ts'

describe.each(devices)('on %s', (device) => {
  const test = it.skipIf(!present(device))
  const random = new Random(3)
  const made = async (format: 'f32' | 'bf16' | 'i32', shape: readonly number[]) => {
    const count = shape.reduce((product, size) => product * size, 1)
    const values = Float64Array.from({ length: count }, () =>
      format === 'i32' ? Math.round(1e6 * random.normal()) : random.normal(),
    )
    return moved(tensor(format, shape, values), device)
  }
  // bytes of rows, where a row is one element or N of them
  const bytes = async (handle: number, row: number, from: number, rows: number) =>
    Buffer.from(await bytesOf(handle)).subarray(from * row, (from + rows) * row)

  test.each([
    [1, 0, 1],
    [7, 2, 3],
    [300, 128, 128],
    [300, 256, 44],
    [5, 5, 0],
  ])('of %i: %i and the next, %i in all', async (M, from, R) => {
    for (const format of ['f32', 'bf16', 'i32'] as const) {
      const size = format === 'bf16' ? 2 : 4
      const flat = await made(format, [M])
      const part = own(native.slice(flat, format, from, R))
      expect(native.info(part).shape).toEqual([R])
      expect(Buffer.compare(await bytesOf(part), await bytes(flat, size, from, R))).toBe(0)
      if (format === 'i32') continue
      for (const N of [1, 5, 64]) {
        const x = await made(format, [M, N])
        const rows = own(native.slice_rows(x, format, from, R))
        expect(native.info(rows).shape).toEqual([R, N])
        expect(Buffer.compare(await bytesOf(rows), await bytes(x, size * N, from, R))).toBe(0)

        const y = await made(format, [M, N])
        const expected = Buffer.from(await bytesOf(y))
        const to = Math.max(M - R - from, 0)
        expected.set(await bytesOf(rows), to * size * N)
        const version = native.version(y)
        native.place_rows(y, rows, to)
        expect(native.version(y)).toBe(version + 1)
        expect(Buffer.compare(await bytesOf(y), expected)).toBe(0)
      }
    }
    native.checkGuards()
  })

  test('rows of codes have the scale of all', async () => {
    const x = own(native.convert(await made('f32', [33, 5]), null, 'e4m3/t'))
    const rows = own(native.slice_rows(x, 'e4m3/t', 7, 3))
    expect(await read(rows)).toEqual((await read(x)).slice(7 * 5, 10 * 5))
    expect(await read(own(native.scale_of(rows)))).toEqual(await read(own(native.scale_of(x))))
  })

  test('refuses rows that are not there', async () => {
    const x = await made('f32', [4, 3])
    const ids = await made('i32', [4])
    expect(() => native.slice_rows(x, 'f32', 3, 2)).toThrow(
      'slice_rows: from is 3 and must be from 0 to 2, since 2 of 4 are meant',
    )
    expect(() => native.slice(ids, 'i32', -1, 2)).toThrow('slice: from is -1 and must be from 0 to 2')
    expect(() => native.place_rows(x, x, 1)).toThrow('place_rows: to is 1 and must be from 0 to 0')
    expect(() => native.slice_rows(x, 'bf16', 0, 2)).toThrow(
      'slice_rows: x f32, y bf16 is not a combination of this op',
    )
    expect(await read(ids)).toHaveLength(4)
  })
})
