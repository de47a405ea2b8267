// add, accumulation in place and sums over rows, against float64.
import { describe } from 'vitest'
import { checkOp, sizes } from '../harness.ts'
import { matrix, sum, vector } from '../values.ts'

describe('add', () => {
  checkOp('add', {
    sizes,
    reference: ({ a, b, M, N }) => {
      const y = matrix(M, N, (m, n) => a(m, n) + b(m, n))
      return { y, twin: y }
    },
  })
  checkOp('add_into', { sizes, reference: ({ x, y, M, N }) => ({ y: matrix(M, N, (m, n) => y(m, n) + x(m, n)) }) })
  checkOp('multiply_into', {
    sizes,
    reference: ({ y, factor, M, N }) => ({ y: matrix(M, N, (m, n) => y(m, n) * factor(0)) }),
  })
  checkOp('column_sum', {
    sizes: [...sizes, { M: 16_700, N: 3 }], // and many chunks
    reference: ({ x, M, N }) => ({
      y: vector(N, (n) => sum(M, (m) => x(m, n))),
      '|y|': vector(N, (n) => sum(M, (m) => Math.abs(x(m, n)))),
    }),
  })
})
