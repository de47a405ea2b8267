// rope against rotations in float64.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkOp, read, tensor } from '../harness.ts'
import { rotate } from '../rotate.ts'
import { matrix, Random } from '../values.ts'

describe('rope', () => {
  const sizes = [
    { B: 0, T: 3, H: 1, J: 1, D: 2 },
    { B: 1, T: 1, H: 1, J: 1, D: 2 },
    { B: 2, T: 7, H: 3, J: 1, D: 6 },
    { B: 3, T: 31, H: 4, J: 2, D: 34 },
    { B: 2, T: 129, H: 8, J: 8, D: 64 },
  ].flatMap((size) => [1, -1].map((direction) => ({ ...size, direction })))
  // documents of 5 rows
  const data = { starts: (_: Random, { T }: { T: number }, m: number) => (m % T) - ((m % T) % 5) }
  checkOp('rope', { sizes, data, reference: (given) => ({ qkv: rotate(given), '|qkv|': rotate(given, true) }) })

  const [T, H, J, D] = [5, 2, 1, 8]
  const angles = (t: number, i: number) => t * 10000 ** (-i / (D / 2))
  const table = () =>
    tensor(
      'f32',
      [T, D],
      matrix(T, D, (t, i) => (i < D / 2 ? Math.cos(angles(t, i)) : Math.sin(angles(t, i - D / 2)))).data,
    )
  const random = new Random(3)
  const numbers = Float32Array.from({ length: 2 * T * (H + 2 * J) * D }, () => random.normal())

  it('direction -1 undoes direction 1, position 0 stays, v stays', async () => {
    const qkv = tensor('f32', [2 * T, (H + 2 * J) * D], numbers)
    const cosines = table()
    native.rope(cosines, qkv, null, H, J, D, 1)
    const turned = await read(qkv)
    const width = (H + 2 * J) * D
    expect(turned.slice(0, width)).toEqual([...numbers.slice(0, width)])
    expect(turned.slice(5 * width, 6 * width)).toEqual([...numbers.slice(5 * width, 6 * width)])
    expect(turned.slice(2 * width - D, 2 * width)).toEqual([...numbers.slice(2 * width - D, 2 * width)])
    expect(turned[width]).not.toBe(numbers[width])
    native.rope(cosines, qkv, null, H, J, D, -1)
    for (const [i, x] of (await read(qkv)).entries()) expect(Math.abs(x - (numbers[i] as number))).toBeLessThan(1e-6)
  })

  it('refuses odd D and other directions', () => {
    const odd = tensor('f32', [1, 9], new Float32Array(9))
    expect(() => native.rope(tensor('f32', [1, 3], [1, 1, 1]), odd, null, 1, 1, 3, 1)).toThrow(
      'rope: D is 3 and must be even, because rope turns pairs',
    )
    const even = tensor('f32', [1, 6], new Float32Array(6))
    expect(() => native.rope(tensor('f32', [1, 2], [1, 1]), even, null, 1, 1, 2, 0)).toThrow(
      'rope: direction is 0 and must be 1 or -1',
    )
  })
})
