// embedding: rows by id, gradients summed id by id.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkOp, own, read, tensor } from '../harness.ts'
import { type Given, matrix, sum } from '../values.ts'

describe('embedding', () => {
  const sizes = [
    { M: 0, V: 3, N: 16 },
    { M: 1, V: 1, N: 1 },
    { M: 17, V: 5, N: 33 },
    { M: 129, V: 127, N: 15 },
    { M: 300, V: 257, N: 129 },
    { M: 40, V: 19, N: 512 },
    { M: 4200, V: 270, N: 8 },
  ]
  const data = { ids: (random: { integer(below: number): number }, { V }: { V: number }) => random.integer(V) }
  checkOp('embedding_forward', {
    sizes,
    data,
    reference: ({ ids, w, M, N }) => ({ y: matrix(M, N, (m, n) => w(ids(m), n)) }),
  })
  const backward = ({ ids, dy, M, N, V }: Given) => ({
    dw: matrix(V, N, (v, n) => sum(M, (m) => (ids(m) === v ? dy(m, n) : 0))),
    '|dw|': matrix(V, N, (v, n) => sum(M, (m) => (ids(m) === v ? Math.abs(dy(m, n)) : 0))),
  })
  checkOp('embedding_backward', { sizes, data, reference: backward })
  // one id nearly everywhere, as of padding
  checkOp('embedding_backward', {
    sizes: [{ M: 4200, V: 259, N: 3 }],
    data: { ids: (random, { V }, i) => (i % 8 ? 257 : random.integer(V)), dy: (random) => random.uniform() },
    reference: backward,
    slack: 1e-4,
  })

  it('sums duplicates and leaves unseen rows exactly zero', async () => {
    const dw = native.embedding_backward(
      tensor('i32', [4], [2, 0, 2, 2]),
      tensor('f32', [4, 1], [1, 10, 100, 1000]),
      'f32',
      4,
    )
    expect(await read(own(dw))).toEqual([10, 0, 1101, 0])
  })

  it.each([-1, 3])('id %s of 3 is refused with its place', (id) => {
    const ids = tensor('i32', [3], [0, 2, id])
    const w = tensor('f32', [3, 2], [1, 2, 3, 4, 5, 6])
    const text = (op: string) => `${op}: ids[2] is ${id} and must be at least 0 and less than V = 3`
    expect(() => native.embedding_forward(ids, w, 'f32')).toThrow(text('embedding_forward'))
    expect(() => native.embedding_backward(ids, w, 'f32', 3)).toThrow(text('embedding_backward'))
  })
})
