// Formats of optimizer states held against their definitions: half floats, value and remainder, maps of 8 and 4 bits, floors.
import { describe, expect, it } from 'vitest'
import type { AnyFormat, Handle } from '../lib/native.gen.ts'
import { type DeviceKind, native } from '../lib/native.ts'
import { isMap, type Kind, type MapKind, maps, nearest, valueOfCode } from './decode.ts'
import { bytesOf, devices, own, present, read, stored, tensor } from './harness.ts'
import { Random } from './values.ts'

/** The same tensor on a device. */
async function on(device: DeviceKind, x: Handle): Promise<Handle> {
  const { format, shape } = native.info(x)
  const there = own(native.make(format, shape, device, 'temp'))
  native.write(there, await bytesOf(x))
  return there
}
const f32 = (values: readonly number[], device: DeviceKind = 'cpu') =>
  on(device, tensor('f32', [1, values.length], values))
const as = async (x: Handle, format: AnyFormat) => own(native.convert(x, null, format as 'f32'))
/** What the native code stores values as in a format, and reads back. */
async function through(format: AnyFormat, values: readonly number[], device: DeviceKind = 'cpu'): Promise<number[]> {
  return await read(await as(await as(await f32(values, device), format), 'f32'))
}
const lengths = [1, 2, 63, 65, 127, 129, 255, 257, 1009]

for (const device of devices)
  describe.skipIf(!present(device))(`on ${device}`, () => {
    describe('f16', () => {
      it('every code comes back, NaN as NaN; infinities saturate and are counted', async () => {
        const x = own(native.make('f16', [65536], device, 'temp'))
        native.write(
          x,
          Uint16Array.from({ length: 65536 }, (_, i) => i),
        )
        const plain = await as(x, 'f32')
        const exact = Array.from({ length: 65536 }, (_, code) => valueOfCode('f16', code))
        expect(await read(plain)).toEqual(exact)
        const before = native.memory().infs
        const kept = exact.map((value) =>
          Math.abs(value) === Number.POSITIVE_INFINITY ? Math.sign(value) * 65504 : value,
        )
        expect(await read(await as(plain, 'f16'))).toEqual(kept)
        expect(native.memory().infs - before).toBe(2)
      })

      it('rounds to nearest, ties to even, and saturates at 65504', async () => {
        const cases = [
          [1 + 2 ** -11, 1],
          [1 + 3 * 2 ** -11, 1 + 2 ** -9],
          [1 + 2 ** -11 + 2 ** -20, 1 + 2 ** -10],
          [65504, 65504],
          [65520, 65504],
          [1e30, 65504],
          [-1e30, -65504],
          [2 ** -24, 2 ** -24],
          [2 ** -25, 0],
          [1.5 * 2 ** -24, 2 ** -23],
          [1e-40, 0],
          [-0, -0],
        ] as const
        const values = await through(
          'f16',
          cases.map(([x]) => x),
          device,
        )
        expect(values).toEqual(cases.map(([, y]) => y))
      })

      it.each([
        [3, 2 ** -14],
        [0.0125, 2 ** -22],
        [65504, 1],
        [65505, 2],
        [1e-38, 2 ** -126],
        [0, 2 ** -15],
      ])('f16/t: the scale of the largest magnitude %f is %f, a power of two', async (largest, scale) => {
        const x = await as(await f32([0, -largest, largest / 3], device), 'f16/t')
        expect((await stored(x)).blocks[0]?.scale).toBe(scale)
        expect(await read(own(native.scale_of(x)))).toEqual([scale])
      })

      it('f16/t: a second moment of 0.0125 is stored as FP8-LM stores it', async () => {
        expect(await through('f16/t', [0.0125], device)).toEqual([52416 * 2 ** -22])
      })
    })

    describe('bf16x2', () => {
      const parts = async (values: readonly number[]) => {
        const bytes = await bytesOf(await as(await f32(values, device), 'bf16x2'))
        const n = values.length
        const from = Math.ceil(n / 8) * 16
        expect(bytes.length).toBe(from + 2 * n)
        const plane = (at: number) => {
          const words = new Uint16Array(bytes.slice(at, at + 2 * n).buffer)
          return [...new Float32Array(Uint32Array.from(words, (word) => word << 16).buffer)]
        }
        return { high: plane(0), low: plane(from) }
      }

      it('holds the value and what it leaves, in two planes', async () => {
        const values = [1 + 2 ** -9, -3 - 2 ** -12, 2 ** -100, 0, 1 - 2 ** -17, 7, -(2 ** -130), 1e30, 65537]
        const { high, low } = await parts(values)
        for (const [i, x] of values.entries()) {
          const exact = Math.fround(x)
          expect(high[i]).toBe((await through('bf16', [exact]))[0])
          expect(low[i]).toBe((await through('bf16', [exact - (high[i] as number)]))[0])
        }
        expect([high[0], low[0], high[4], low[4]]).toEqual([1, 2 ** -9, 1, -(2 ** -17)])
      })

      it('keeps a remainder far below its value: no compiler deletes it', async () => {
        const x = own(native.make('bf16x2', [1, 1], device, 'temp'))
        const bytes = new Uint8Array(18)
        new DataView(bytes.buffer).setUint16(0, 0x3f80, true) // 1
        new DataView(bytes.buffer).setUint16(16, 0x3400, true) // 2^-23
        native.write(x, bytes)
        expect(await read(await as(x, 'f32'))).toEqual([1 + 2 ** -23])
        expect(await parts([1 + 2 ** -23])).toEqual({ high: [1], low: [2 ** -23] })
      })

      it('splits at ties as everywhere: a value that it holds comes back bit for bit', async () => {
        const random = new Random(22)
        const highs = Array.from(
          { length: 4096 },
          () => (random.integer(2) << 15) | ((27 + random.integer(226)) << 7) | random.integer(128),
        )
        for (const low of [0x0000, 0x7fff, 0x8000, 0x8001, 0xffff]) {
          const bits = Uint32Array.from(highs, (high) => ((high << 16) | low) >>> 0)
          const values = [...new Float32Array(bits.buffer)]
          const kept = await through('bf16x2', values, device)
          const halves = await through('bf16', values, device)
          const { high, low: rest } = await parts(values)
          for (const [i, x] of values.entries()) {
            const left = x - (high[i] as number) // exact: the two are within a factor of two
            const error = Math.abs(x - (kept[i] as number))
            expect(high[i]).toBe(halves[i])
            expect(error).toBeLessThanOrEqual(low === 0x7fff || low === 0x8001 ? Math.abs(left) * 2 ** -8 : 0)
            expect((high[i] as number) + (rest[i] as number)).toBe(kept[i])
          }
          expect(await through('bf16x2', kept, device)).toEqual(kept)
        }
      })

      it('a weight of 1 after 1000 additions of 2^-12 is 1.24414', async () => {
        let x = await as(await f32([1], device), 'bf16x2')
        for (let i = 0; i < 1000; i++)
          x = await as(await f32([((await read(await as(x, 'f32')))[0] as number) + 2 ** -12], device), 'bf16x2')
        expect(Math.abs(((await read(x))[0] as number) - 1.24414)).toBeLessThan(2 ** -12)
        let plain = 1
        for (let i = 0; i < 1000; i++) plain = (await through('bf16', [plain + 2 ** -12]))[0] as number
        expect(plain).toBe(1)
      })

      it('NaN and what is too large keep no remainder', async () => {
        const { high, low } = await parts([Number.NaN, Number.POSITIVE_INFINITY, -3.4e38])
        expect(high).toEqual([Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY])
        expect(low).toEqual([0, 0, 0])
      })

      it('comes back within 2^-17 from every length', async () => {
        const random = new Random(31)
        for (const n of lengths) {
          const values = Array.from({ length: n }, () => Math.fround(random.typical()))
          for (const [i, x] of (await through('bf16x2', values, device)).entries())
            expect(Math.abs(x - (values[i] as number))).toBeLessThanOrEqual(Math.abs(values[i] as number) * 2 ** -17)
        }
      })
    })

    describe.each([
      ['d8', 256, 127],
      ['u8', 256, 0],
      ['d4', 128, 7],
      ['u4', 128, undefined],
    ] as const)('%s/g%i', (kind, run, zero) => {
      const format = `${kind}/g${run}` as AnyFormat
      const { levels, bits } = maps[kind as MapKind]
      const store = async (values: readonly number[]) => await as(await f32(values, device), format)

      it('every code decodes to its level and encodes to itself; levels increase', async () => {
        expect(levels.length).toBe(2 ** bits)
        expect(new Set(levels).size).toBe(2 ** bits)
        const codes = levels.map((_, code) => code)
        const x = await store(levels)
        expect([...(await stored(x)).codes]).toEqual(codes)
        expect(await read(await as(x, 'f32'))).toEqual(levels)
        expect([...(await stored(await as(await as(x, 'f32'), format))).codes]).toEqual(codes)
      })

      it('stores the nearest level', async () => {
        const random = new Random(32)
        const sign = () => (kind.startsWith('d') && random.uniform() < 0.5 ? -1 : 1)
        const values = Array.from({ length: 64 * run }, (_, i) =>
          i % run === 0 ? 1 : Math.fround(sign() * 10 ** (-(bits === 8 ? 8 : 3.5) * random.uniform())),
        )
        const wrong = (await through(format, values, device)).filter((y, i) => y !== nearest(kind, values[i] as number))
        expect(wrong).toEqual([])
      })

      it('beside the middle of two levels, the nearer one', async () => {
        const middles = levels.slice(1).map((level, i) => (level + (levels[i] as number)) / 2)
        for (const way of [1, -1]) {
          const beside = middles.map((x) => Math.fround(x + way * Math.abs(x) * 1e-6))
          const back = (await through(format, [1, ...beside.slice(0, run - 1)], device)).slice(1)
          expect(back).toEqual(levels.slice(way === 1 ? 1 : 0, way === 1 ? run : run - 1).slice(0, back.length))
        }
      })

      it('zeros decode to zeros, with a finite scale', async () => {
        for (const n of lengths) {
          const x = await store(Array.from({ length: n }, (_, i) => (i === 3 ? -0 : 0)))
          const { codes, blocks } = await stored(x)
          expect(codes.every((code) => code === (zero ?? 0))).toBe(true)
          for (const { scale } of blocks) expect(scale).toBe(zero === undefined ? 0 : 1)
          expect((await read(await as(x, 'f32'))).every((value) => value === 0)).toBe(true)
        }
      })

      it('a run of zeros leaves the others as they were', async () => {
        const random = new Random(33)
        const values = Array.from({ length: 5 * run + 17 }, () => Math.abs(random.normal()))
        const gap = (i: number) => Math.floor(i / run) === 2
        const before = await through(format, values, device)
        const after = await through(
          format,
          values.map((x, i) => (gap(i) ? 0 : x)),
          device,
        )
        expect(after).toEqual(before.map((x, i) => (gap(i) ? 0 : x)))
      })

      it('constant and single elements come back', async () => {
        for (const n of lengths)
          for (const x of [0.5, ...(kind.startsWith('d') ? [-0.5] : [])])
            for (const y of await through(format, Array(n).fill(x), device))
              expect(y / x).toBeCloseTo(x > 0 ? 1 : -(levels[0] as number), 6)
      })

      it('NaN becomes the level of 0 and Inf the outermost; both are counted, neither sets a scale', async () => {
        const values = Array.from({ length: run + 30 }, (_, i) => (i >= 20 && i < 23 ? 0 : (i % 7) / 8))
        const clean = await through(format, values, device)
        const special = [Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY]
        const dirty = await f32(
          values.map((x, i) => special[i - 20] ?? x),
          device,
        )
        const before = native.memory().infs
        const after = await read(await as(await as(dirty, format), 'f32'))
        expect(native.memory().infs - before).toBe(3)
        expect(after.toSpliced(20, 3)).toEqual(clean.toSpliced(20, 3))
        const ends = [
          zero === undefined ? (levels[0] as number) : 0,
          1,
          kind.startsWith('d') ? (levels[0] as number) : (levels[0] as number),
        ]
        after.slice(20, 23).forEach((value, i) => {
          expect(value).toBeCloseTo(0.75 * (ends[i] as number), 6)
        })
      })

      it('magnitudes of 1e-40, 1e-30, 1e-10 and 1e38 survive', async () => {
        for (const size of [1e-40, 1e-30, 1e-10, 1e38])
          for (const value of await through(format, Array(run + 3).fill(size), device)) {
            expect(Number.isFinite(value)).toBe(true)
            if (size > 1e-40) expect(value / size).toBeCloseTo(1, 5)
          }
      })

      it('runs go on over the ends of rows; a last half byte is empty', async () => {
        const random = new Random(34)
        const values = Array.from({ length: 3 * (run + 1) }, () => random.typical())
        const flat = await bytesOf(await store(values))
        const matrix = await on(device, tensor('f32', [3, run + 1], values))
        expect(await bytesOf(await as(matrix, format))).toEqual(flat)
        const length = Math.ceil((values.length * bits) / 8)
        expect(flat.length).toBe(Math.ceil(length / 16) * 16 + 4 * Math.ceil(values.length / run))
        if (bits === 4) expect((flat[length - 1] as number) >> 4).toBe(0)
      })
    })

    it.each([
      ['d8/g256', [2, 1], [2, 1.0015625]],
      ['d8/g256', [2, -2], [2, -1.9859375]],
      ['u8/g256', [2, 1], [2, 0.99453125]],
      ['d8/g256', [1, 5.5e-7, 2.7e-7], [1, 5.5e-7, 0]],
      ['u8/g256', [1, 3.25e-7, 1.6e-7], [1, 3.25e-7, 0]],
      ['d4/g128', [2, 1], [2, 0.875]],
      ['u4/g128', [2, 1], [2, 1]],
      ['u4/g128', [2, 0], [2, 0.125]],
      ['e4m3/g256', [3, 1], [3, 0.9642857]],
    ] as const)('%s stores %j as %j', async (format, values, expected) => {
      const back = await through(format, values, device)
      expected.forEach((x, i) => {
        expect(Math.abs((back[i] as number) - x)).toBeLessThanOrEqual(Math.abs(x) * 1e-6)
      })
    })

    it('4-bit codes lie two a byte, the first in the low half', async () => {
      const x = await as(await f32([1, 0, -0.8875], device), 'd4/g128')
      expect([...(await bytesOf(x))].slice(0, 3)).toEqual([0x7f, 0x00, 0])
    })

    describe.each(['f16/t', 'e4m3/t', 'e5m2/t', 'e4m3/g64', 'e4m3/g128', 'e4m3/g256', 'e5m2/g128', 'u8/g256'] as const)(
      'convert_floored to %s',
      (format) => {
        const kind = format.split('/')[0] as Kind
        const both = async (values: readonly number[], given?: number) => {
          const x = await f32(values, device)
          const scale = given === undefined ? null : await on(device, tensor('f32', [1], [given]))
          const floored = await stored(own(native.convert_floored(x, scale, format)))
          return { plain: await stored(own(native.convert(x, scale, format))), floored }
        }

        it('gives what is positive and stored as 0 the smallest code, and changes nothing else', async () => {
          const random = new Random(35)
          for (const n of lengths) {
            const values = Array.from({ length: n }, (_, i) => {
              const size = Math.fround(10 ** (-20 * random.uniform()))
              return i === 0
                ? 1
                : i % 11 === 0
                  ? 0
                  : i % 13 === 0 && !isMap(kind)
                    ? -size
                    : i % 257 === 5
                      ? Number.NaN
                      : size
            })
            const { plain, floored } = await both(values)
            expect(floored.blocks).toEqual(plain.blocks)
            const expected = [...plain.codes].map((code, i) => ((values[i] as number) > 0 && code === 0 ? 1 : code))
            expect([...floored.codes]).toEqual(expected)
            if (n > 200) expect([...plain.codes]).not.toEqual(expected)
          }
        })

        if (format.endsWith('/t'))
          it('under a given scale too', async () => {
            const { plain, floored } = await both([1e-30, 0, 1, -1e-30, 1e-45], 0.5)
            expect(
              [...plain.codes].map((code) => code & 0x7fff & (format === 'f16/t' ? 0x7fff : 0x7f)).filter(Boolean)
                .length,
            ).toBe(1)
            expect(floored.values[0]).toBe(floored.values[4])
            expect(floored.values[0]).toBeGreaterThan(0)
            expect([...floored.codes.slice(1, 4)]).toEqual([...plain.codes.slice(1, 4)])
          })
      },
    )
  })
