// convert: every format to every other, given and measured scales, transposes with equal codes.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { bytesOf, checkOp, devices, entryOf, moved, own, present, read, sizes, stored, tensor } from '../harness.ts'
import { matrix, Random } from '../values.ts'

// expansion takes two logarithms near 2^±20, each off by a few units of FP32
const slack = 1e-5

// formats that go through f32 to all but f32 and bf16: each other, and one of every other kind
const operands = ['e4m3/r', 'e4m3/g128p2', 'e4m3/b128p2']
const met = [...operands, 'f32', 'bf16', 'e4m3/t', 'e4m3/g128', 'd8/g256']
const holds = ({ x, y }: Record<string, string | null>) =>
  [x, y].every((format) => met.includes(format as string)) ||
  ![x, y].some((format) => operands.includes(format as string))

describe('convert', () => {
  checkOp('convert', { sizes, slack, holds, reference: ({ x, M, N }) => ({ y: matrix(M, N, (m, n) => x(m, n)) }) })
  checkOp('convert_floored', {
    sizes,
    slack,
    data: { x: (random) => random.uniform() + 0.25 }, // nothing so small that the floor lifts it: states.test.ts does
    reference: ({ x, M, N }) => ({ y: matrix(M, N, (m, n) => x(m, n)) }),
  })
  checkOp('convert_transposed', {
    sizes: [...sizes, { M: 256, N: 384 }], // and whole tiles
    slack,
    reference: ({ x, M, N }) => ({ y: matrix(N, M, (n, m) => x(m, n)) }),
  })

  checkOp('convert_both', {
    sizes: [...sizes, { M: 256, N: 384 }],
    slack,
    reference: ({ x, M, N }) => ({ y: matrix(M, N, (m, n) => x(m, n)), across: matrix(N, M, (n, m) => x(m, n)) }),
  })

  checkOp('assign', { sizes, slack, reference: ({ x, M, N }) => ({ y: matrix(M, N, (m, n) => x(m, n)) }) })

  const random = new Random(1)
  const numbers = Array.from({ length: 65 * 70 }, () => random.typical())

  it.each(['f32', 'bf16', 'e4m3/t', 'e5m2/t'] as const)(
    'convert_transposed to %s gives the codes of convert',
    async (y) => {
      for (const x of ['f32', 'bf16', 'e4m3/t', 'e5m2/t'] as const) {
        const source = tensor(x, [65, 70], numbers)
        const straight = await bytesOf(own(native.convert(source, null, y)))
        const across = await bytesOf(own(native.convert_transposed(source, null, y)))
        const width = (straight.length - (y.includes('/') ? 4 : 0)) / numbers.length
        const size = Math.floor(width)
        for (let m = 0; m < 65; m++)
          for (let n = 0; n < 70; n++)
            for (let byte = 0; byte < size; byte++)
              if (straight[(m * 70 + n) * size + byte] !== across[(n * 65 + m) * size + byte])
                throw new Error(`${x} ${m} ${n}`)
        expect(across.subarray(numbers.length * size)).toEqual(straight.subarray(numbers.length * size))
      }
    },
  )

  for (const device of devices)
    it.skipIf(!present(device)).each([
      [1, 1],
      [127, 129],
      [128, 128],
      [131, 67],
      [256, 200],
      [1040, 48],
      [0, 5],
    ])(`convert_both of [%i, %i] makes what two passes make on ${device}`, async (M, N) => {
      const values = Array.from({ length: M * N }, () => random.typical())
      if (M * N > 100) values[77] = Number.NaN
      const [f32, bf16, scale] = await Promise.all([
        moved(tensor('f32', [M, N], values), device),
        moved(tensor('bf16', [M, N], values), device),
        moved(tensor('f32', [1], [0.375]), device),
      ])
      for (const x of [f32, bf16])
        for (const given of [null, scale])
          for (const format of ['e4m3/t', 'e5m2/t'] as const) {
            const both = native.convert_both(x, given, format, format)
            const apart = [native.convert(x, given, format), native.convert_transposed(x, given, format)]
            for (const [i, handle] of both.entries())
              expect(await bytesOf(own(handle))).toEqual(await bytesOf(own(apart[i] as number)))
          }
    })

  for (const device of devices)
    it.skipIf(!present(device)).each([
      [129, 2 ** 13],
      [144, 4500],
      [3, 9008],
      [2050, 48],
    ])(`convert_transposed of [%i, %i] moves every code on ${device}`, async (M, N) => {
      for (const [format, size] of [
        ['f32', 4],
        ['bf16', 2],
        ['e5m2/t', 1],
      ] as const) {
        const codes = new Uint8Array(await native.read(own(native.random_uniform('f32', M, N, -1, 1, 3, 'cpu'))))
        const straight = codes.subarray(0, M * N * size)
        const scale = size === 1 ? new Uint8Array(Float32Array.of(0.5).buffer) : new Uint8Array()
        const x = own(native.make(format, [M, N], device, 'temp'))
        native.write(x, Buffer.concat([straight, scale]))
        const across = await bytesOf(own(native.convert_transposed(x, null, format)))
        for (let i = 0; i < straight.length; i++) {
          const element = Math.floor(i / size)
          const to = ((element % N) * M + Math.floor(element / N)) * size + (i % size)
          if (across[to] !== straight[i]) throw new Error(`${format}: byte ${i}`)
        }
        expect(across.subarray(straight.length)).toEqual(scale)
      }
    })

  for (const device of devices)
    it.skipIf(!present(device)).each(['bf16', 'f32'] as const)(
      `on ${device}, neither NaN nor Inf of %s sets a scale`,
      async (format) => {
        const plain = Array.from({ length: 256 * 384 }, (_, i) => (i % 97) - 48)
        plain[70_000] = Number.NaN
        plain[50_001] = Number.NEGATIVE_INFINITY
        const x = own(native.make(format, [256, 384], device, 'temp'))
        native.write(x, await bytesOf(tensor(format, [256, 384], plain)))
        for (const y of [native.convert(x, null, 'e4m3/t'), native.convert_transposed(x, null, 'e4m3/t')]) {
          const { values, blocks } = await stored(own(y))
          expect(blocks[0]?.scale).toBe(Math.fround(48 / 448))
          expect(values.filter(Number.isNaN).length).toBe(1)
        }
      },
    )

  for (const device of devices)
    it.skipIf(!present(device))(`convert_transposed of blocks moves codes and scales on ${device}`, async () => {
      const [M, N] = [300, 150]
      const made = tensor(
        'e4m3/b128',
        [M, N],
        Array.from({ length: M * N }, (_, i) => numbers[i % 4000] as number),
      )
      const x = await moved(made, device)
      const [from, to] = [await stored(x), await stored(own(native.convert_transposed(x, null, 'e4m3/b128')))]
      expect(to.blocks.map(({ scale }) => scale)).toEqual([0, 2, 4, 1, 3, 5].map((b) => from.blocks[b]?.scale))
      for (let m = 0; m < M; m++) for (let n = 0; n < N; n++) expect(to.codes[n * M + m]).toBe(from.codes[m * N + n])
      const plain = own(native.convert_transposed(own(native.convert(x, null, 'f32')), null, 'e4m3/b128'))
      expect((await stored(plain)).values).toEqual(to.values)
    })

  it('convert to the own format keeps every byte', async () => {
    const [argument] = entryOf('convert').arguments
    for (const format of (argument?.formats ?? []) as 'f32'[]) {
      const x = tensor(format, [65, 70], numbers)
      expect(await bytesOf(own(native.convert(x, null, format)))).toEqual(await bytesOf(x))
    }
  })

  it('what was decoded converts back to the same codes under its scale', async () => {
    for (const format of ['e4m3/t', 'e5m2/t'] as const) {
      const x = tensor(format, [65, 70], numbers)
      const plain = own(native.convert(x, null, 'f32'))
      expect(await bytesOf(own(native.convert(plain, own(native.scale_of(x)), format)))).toEqual(await bytesOf(x))
    }
  })

  it('a given scale is kept and values beyond it saturate', async () => {
    const y = own(native.convert(tensor('f32', [3], [1, 1000, -1000]), tensor('f32', [1], [0.5]), 'e4m3/t'))
    expect((await stored(y)).blocks[0]?.scale).toBe(0.5)
    expect(await read(y)).toEqual([1, 224, -224])
  })

  it.each([0, -1, Number.NaN, Number.POSITIVE_INFINITY])('scale %s is refused', (scale) => {
    expect(() => native.convert(tensor('f32', [1], [1]), tensor('f32', [1], [scale]), 'e4m3/t')).toThrow(
      /^convert: scale is \S+ and must be a positive finite number$/,
    )
  })
})
