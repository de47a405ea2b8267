// Every op of the table as cases to check and time, by the names of the table.
import { CoatError } from '../lib/index.ts'
import type { AnyFormat } from '../lib/native.gen.ts'
import { documentRows, type OpCase, type Sizes, sum, type Values } from './measure.ts'

const rows = { M: 4096, N: 1024 }
const attention = { B: 8, T: 256, H: 6, J: 6, D: 64 }
const adamwNumbers = {
  lr: 1e-3,
  beta1: 0.9,
  gain1: 0.1,
  beta2: 0.95,
  gain2: 0.05,
  eps: 1e-8,
  weight_decay: 0.1,
  correct1: 0.1,
  correct2: 0.22,
  v_floor: 1,
  seed: 1,
}

const at = (values: Values, name: string, i: number) => values[name]?.[i] as number
const silu = (x: number) => x / (1 + Math.exp(-x))

const convert = (x: AnyFormat, y: AnyFormat): OpCase => ({
  op: 'convert',
  sizes: rows,
  formats: { x, y },
  expect: { result: 'y', value: (i, values) => at(values, 'x', i) },
})

const convertFloored = (x: AnyFormat, y: AnyFormat): OpCase => ({
  op: 'convert_floored',
  sizes: rows,
  formats: { x, y },
})

const convertTransposed = (x: AnyFormat, y: AnyFormat, given: OpCase['formats'] = {}): OpCase => ({
  op: 'convert_transposed',
  sizes: rows,
  formats: { x, ...given, y },
  expect: { result: 'y', value: (i, values, { M = 1, N = 1 }) => at(values, 'x', (i % M) * N + Math.floor(i / M)) },
})

const convertBoth = (x: AnyFormat, y: AnyFormat, given: OpCase['formats'] = {}): OpCase => ({
  op: 'convert_both',
  sizes: rows,
  formats: { x, ...given, y, across: y },
  expect: { result: 'y', value: (i, values) => at(values, 'x', i) },
})

// Products of a layer of Llama-2-7B with 16384 tokens: D 4096, F 11008; and of one of Llama-3.2-1B with few tokens: D 2048,
// F 8192.
const forward = [4096, 12288, 11008, 22016].map((N) => ({ M: 16384, N, K: 4096 }))
const down = { M: 16384, N: 4096, K: 11008 }
const ofWeights = [
  { M: 4096, N: 4096, K: 16384 },
  { M: 11008, N: 4096, K: 16384 },
  { M: 4096, N: 11008, K: 16384 },
]
const fewTokens = [1, 17, 64, 128, 512].flatMap((M) => [
  { M, N: 8192, K: 2048 },
  { M, N: 2048, K: 8192 },
])
const square = { M: 1024, N: 1024, K: 1024 }
type Product = 'matmul_nt' | 'matmul_nn' | 'matmul_tn'
const matmul = (
  op: Product | `${Product}_into`,
  sizes: Sizes,
  a: AnyFormat,
  b: AnyFormat,
  y: AnyFormat,
  large?: readonly Sizes[],
  others: OpCase['formats'] = {},
): OpCase => ({
  op,
  sizes,
  ...(large && { large }),
  formats: { a, b, y, ...others },
  flops: ({ M = 1, N = 1, K = 1 }) => 2 * M * N * K,
  expect: {
    result: 'y',
    ...(a.startsWith('e') && { tolerance: 2 ** -8 }), // tensor cores add FP8 products with 14 bits
    value: (i, values, { M = 1, N = 1, K = 1 }) => {
      const m = Math.floor(i / N)
      const n = i % N
      const product = sum(
        K,
        (k) =>
          at(values, 'a', op.startsWith('matmul_tn') ? k * M + m : m * K + k) *
          at(values, 'b', op.startsWith('matmul_nt') ? n * K + k : k * N + n),
      )
      return product + (values.y?.[i] ?? 0)
    },
  },
})

/** The same with sums that stay in the tensor cores. */
const unpromoted = (one: OpCase): OpCase => ({ ...one, words: { accumulate: 'fast' } })

const rmsnorm = (x: AnyFormat, y: AnyFormat, given: OpCase['formats'] = {}): OpCase => ({
  op: 'rmsnorm_forward',
  sizes: rows,
  formats: { x, w: 'f32', ...given, y, rstd: 'f32' },
  numbers: { eps: 1e-6 },
  expect: {
    result: 'y',
    value: (i, values, { N = 1 }) => {
      const start = i - (i % N)
      const mean = sum(N, (k) => at(values, 'x', start + k) ** 2) / N
      return (at(values, 'x', i) / Math.sqrt(mean + 1e-6)) * at(values, 'w', i % N)
    },
  },
})

const swiglu = (x: AnyFormat, y: AnyFormat): OpCase => ({
  op: 'swiglu_forward',
  sizes: { M: 4096, F: 512 },
  formats: { x, y },
  expect: {
    result: 'y',
    value: (i, values, { F = 1 }) => {
      const gate = Math.floor(i / F) * 2 * F + (i % F)
      return silu(at(values, 'x', gate)) * at(values, 'x', gate + F)
    },
  },
})

// As many tokens as the other cases have, in short and in long sequences
const long = { B: 2, T: 8192, H: 32, J: 8, D: 128 }
const attentionCase = (
  op: 'attention_forward' | 'attention_backward',
  formats: OpCase['formats'],
  changes: readonly Readonly<Record<string, number>>[],
): OpCase => ({
  op,
  sizes: attention,
  large: changes.map((change) => ({ ...long, ...change })),
  formats,
  numbers: { causal: 1, window: 0, scale: 0.125 },
  flops: ({ B = 1, T = 1, H = 1, D = 1, causal = 1, window = 0 }) => {
    const rows = formats.starts ? documentRows(T) : T
    const seen = Math.min(window || rows, rows)
    const pairs = causal ? seen * rows - seen ** 2 / 2 : rows ** 2
    return 2 * (op === 'attention_forward' ? 2 : 5) * D * pairs * B * H * (T / rows)
  },
})
const attentionChanges = [
  { B: 8, T: 2048, J: 32 },
  { B: 8, T: 2048 },
  { J: 32 },
  { B: 8, T: 2048, J: 32, D: 64 },
  { causal: 0 },
  { window: 1024 },
]
const attentionForward = { qkv: 'bf16', out: 'bf16', lse: 'f32' } as const
const attentionBackward = { dout: 'bf16', ...attentionForward, dqkv: 'bf16' } as const

const adamw = (state: AnyFormat, formats: OpCase['formats'], rounding = 'nearest'): OpCase => ({
  op: 'adamw',
  sizes: { L: 4, ...rows },
  large: [{ L: 1, M: 16384, N: 12928 }], // 202 Mi parameters: a layer's
  formats: { ...formats, m: state, v: state, clip: 'f32' },
  numbers: adamwNumbers,
  ...(rounding !== 'nearest' && { words: { rounding } }),
})
// The 291 parameters of Llama-2-7B, by their elements.
const llama = [
  32_000 * 4096,
  ...Array.from({ length: 32 }, () =>
    [4, 3, 2].flatMap((count, i) => new Array<number>(count).fill([4096, 11008, 1][i] as number)),
  )
    .flat()
    .map((rows) => 4096 * rows),
  4096,
  32_000 * 4096,
]
const lion = (m: AnyFormat, formats: OpCase['formats']): OpCase => ({
  op: 'lion',
  sizes: { L: 4, ...rows },
  formats: { ...formats, m, clip: 'f32' },
  numbers: { lr: 1e-4, beta1: 0.9, gain1: 0.1, beta2: 0.99, gain2: 0.01, weight_decay: 0.1, seed: 1 },
})
const sgd = (m: AnyFormat, formats: OpCase['formats']): OpCase => ({
  op: 'sgd',
  sizes: { L: 4, ...rows },
  formats: { ...formats, m, clip: 'f32' },
  numbers: { lr: 1e-2, momentum: 0.9, gain: 1, weight_decay: 1e-4, nesterov: 0, seed: 1 },
})
// numbers of 16 bits as Wang et al. (2018) sum up
const e6m9 = { range: 6, precision: 9, shift: 0, seed: 1 }
const emulatedProduct = matmul('matmul_nt', { M: 128, N: 128, K: 256 }, 'f32', 'f32', 'f32', [square])
const plainSgd = sgd('f32', { p: 'f32', g: 'f32' })
const emulatedSgd: OpCase = {
  ...plainSgd,
  op: 'sgd_emulated',
  numbers: { ...plainSgd.numbers, ...e6m9 },
  words: { rounding: 'stochastic' },
}

export const opCases: readonly OpCase[] = [
  convert('bf16', 'e4m3/t'),
  convert('bf16', 'e5m2/t'),
  convert('bf16', 'e4m3/g16'),
  convert('e4m3/g16', 'bf16'),
  convert('bf16', 'i8/g16'),
  convert('i8/g16', 'bf16'),
  convert('f32', 'bf16'),
  convert('bf16', 'e4m3/g128'),
  convert('f32', 'e4m3/b128'),
  convert('bf16', 'e4m3/r'),
  convert('e4m3/b128', 'bf16'),
  convert('f32', 'e4m3/x128'),
  convert('f32', 'd8/g256'),
  convert('d8/g256', 'f32'),
  convert('f32', 'd4/g128'),
  convert('f32', 'bf16x2'),
  convertFloored('f32', 'u8/g256'),
  convertTransposed('bf16', 'bf16'),
  convertTransposed('f32', 'e4m3/t'),
  convertTransposed('bf16', 'e4m3/t', { scale: 'f32' }),
  convertBoth('bf16', 'e5m2/t'),
  convertBoth('bf16', 'e5m2/t', { scale: 'f32' }),
  convertTransposed('e5m2/t', 'e5m2/t'),
  convertTransposed('bf16', 'e4m3/g128'),
  convertTransposed('bf16', 'e4m3/r'),
  convertTransposed('e4m3/b128', 'e4m3/b128'),
  {
    op: 'amax',
    sizes: rows,
    formats: { x: 'bf16', y: 'f32' },
    expect: {
      result: 'y',
      value: (_, { x = [] }) => Array.from(x).reduce((most, v) => Math.max(most, Math.abs(v)), 0),
    },
  },
  {
    op: 'scale_from_amax',
    sizes: {},
    large: [],
    formats: { amax: 'f32', scale: 'f32' },
    expect: { result: 'scale', value: (_, values) => Math.abs(at(values, 'amax', 0)) / 448 },
  },
  { op: 'observe_amax', sizes: { H: 1024 }, large: [], formats: { history: 'f32', amax: 'f32' } },
  {
    op: 'scale_from_history',
    sizes: { H: 1024 },
    large: [],
    formats: { history: 'f32', scale: 'f32' },
    numbers: { headroom: 1 },
  },
  { op: 'assign', sizes: rows, formats: { y: 'f16/t', x: 'f16/t' } },
  { op: 'scale_of', sizes: rows, formats: { x: 'e4m3/t', y: 'f32' } },
  {
    op: 'add',
    sizes: rows,
    formats: { a: 'bf16', b: 'bf16', y: 'bf16', twin: 'e4m3/g16' },
    expect: { result: 'twin', value: (i, values) => at(values, 'a', i) + at(values, 'b', i) },
  },
  {
    op: 'add_into',
    sizes: rows,
    formats: { y: 'bf16', x: 'bf16' },
    expect: { result: 'y', value: (i, values) => at(values, 'y', i) + at(values, 'x', i) },
  },
  {
    op: 'multiply_into',
    sizes: rows,
    formats: { y: 'bf16', factor: 'f32' },
    expect: { result: 'y', value: (i, values) => at(values, 'y', i) * at(values, 'factor', 0) },
  },
  {
    op: 'slice',
    sizes: { N: 4096, R: 2048 },
    formats: { x: 'f32', y: 'f32' },
    numbers: { from: 1 },
    expect: { result: 'y', value: (i, values) => at(values, 'x', i + 1) },
  },
  {
    op: 'slice_rows',
    sizes: { ...rows, R: 2048 },
    formats: { x: 'bf16', y: 'bf16' },
    numbers: { from: 1 },
    expect: { result: 'y', value: (i, values, { N = 1 }) => at(values, 'x', i + N) },
  },
  {
    op: 'place_rows',
    sizes: { ...rows, R: 2048 },
    formats: { y: 'bf16', x: 'bf16' },
    numbers: { to: 0 },
    expect: { result: 'y', value: (i, values, { R = 1, N = 1 }) => at(values, i < R * N ? 'x' : 'y', i) },
  },
  {
    op: 'column_sum',
    sizes: rows,
    formats: { x: 'bf16', y: 'f32' },
    expect: { result: 'y', value: (i, values, { M = 1, N = 1 }) => sum(M, (m) => at(values, 'x', m * N + i)) },
  },
  rmsnorm('bf16', 'bf16'),
  rmsnorm('e4m3/g16', 'e4m3/t'),
  rmsnorm('e4m3/g16', 'e4m3/t', { scale: 'f32' }),
  {
    op: 'rmsnorm_transposed',
    sizes: rows,
    formats: { x: 'e4m3/g16', w: 'f32', rstd: 'f32', scale: 'f32', y: 'e4m3/t' },
    expect: {
      result: 'y',
      value: (i, values, { M = 1, N = 1 }) => {
        const [m, n] = [i % M, Math.floor(i / M)]
        return at(values, 'x', m * N + n) * at(values, 'rstd', m) * at(values, 'w', n)
      },
    },
  },
  {
    op: 'add_rmsnorm_forward',
    sizes: rows,
    formats: { a: 'bf16', b: 'bf16', w: 'f32', y: 'bf16', twin: 'e4m3/g16', rstd: 'f32', scale: 'f32' },
    numbers: { eps: 1e-6 },
    expect: { result: 'y', value: (i, values) => at(values, 'a', i) + at(values, 'b', i) },
  },
  {
    op: 'rmsnorm_backward',
    sizes: rows,
    formats: { dy: 'bf16', x: 'bf16', w: 'f32', rstd: 'f32', dx: 'bf16', dw: 'bf16' },
  },
  {
    op: 'rmsnorm_backward',
    sizes: rows,
    formats: { dy: 'bf16', x: 'e4m3/g16', w: 'f32', rstd: 'f32', dx: 'bf16', dw: 'bf16' },
  },
  {
    op: 'rmsnorm_backward',
    sizes: rows,
    formats: {
      ...{ dy: 'bf16', x: 'e4m3/g16', w: 'f32', rstd: 'f32', residual: 'bf16' },
      ...{ dx: 'bf16', dw: 'bf16', amax: 'f32' },
    },
  },
  {
    op: 'layernorm_forward',
    sizes: rows,
    formats: { x: 'e4m3/g16', w: 'f32', b: 'f32', y: 'e4m3/t', mean: 'f32', rstd: 'f32' },
    numbers: { eps: 1e-5 },
  },
  {
    op: 'layernorm_backward',
    sizes: rows,
    formats: { dy: 'bf16', x: 'e4m3/g16', w: 'f32', mean: 'f32', rstd: 'f32', dx: 'bf16', dw: 'bf16', db: 'bf16' },
  },
  swiglu('bf16', 'bf16'),
  swiglu('e4m3/g16', 'e4m3/t'),
  { op: 'swiglu_backward', sizes: { M: 4096, F: 512 }, formats: { dy: 'bf16', x: 'bf16', dx: 'bf16' } },
  { op: 'swiglu_backward', sizes: { M: 4096, F: 512 }, formats: { dy: 'bf16', x: 'e4m3/g16', dx: 'e5m2/t' } },
  {
    op: 'swiglu_backward',
    sizes: { M: 4096, F: 512 },
    formats: { dy: 'bf16', x: 'e4m3/g16', dx: 'e5m2/t', twin: 'e5m2/t' },
  },
  {
    op: 'swiglu_backward',
    sizes: { M: 4096, F: 512 },
    formats: {
      dy: 'bf16',
      x: 'e4m3/g16',
      amax: 'f32',
      scale: 'f32',
      dx: 'e5m2/t',
      twin: 'e5m2/t',
      product: 'e4m3/t',
    },
  },
  { op: 'gelu_forward', sizes: rows, formats: { x: 'e4m3/g16', y: 'e4m3/t' } },
  { op: 'gelu_backward', sizes: rows, formats: { dy: 'bf16', x: 'e4m3/g16', dx: 'bf16' } },
  { op: 'rope', sizes: attention, formats: { qkv: 'bf16', table: 'f32' }, numbers: { direction: 1 } },
  {
    op: 'matmul_nt_rope',
    sizes: { ...attention, B: 1, K: 128 },
    large: [{ B: 8, T: 2048, H: 32, J: 32, D: 128, K: 4096 }],
    formats: { a: 'e4m3/t', b: 'e4m3/t', table: 'f32', y: 'bf16' },
    flops: ({ B = 1, T = 1, H = 1, J = 1, D = 1, K = 1 }) => 2 * B * T * (H + 2 * J) * D * K,
  },
  attentionCase('attention_forward', attentionForward, attentionChanges),
  attentionCase('attention_forward', { ...attentionForward, starts: 'i32' }, [{}]),
  attentionCase('attention_backward', attentionBackward, attentionChanges),
  attentionCase('attention_backward', { ...attentionBackward, starts: 'i32' }, [{}]),
  attentionCase('attention_backward', { dout: 'bf16', qkv: 'e4m3/g16', dqkv: 'bf16' }, [{}]),
  attentionCase('attention_backward', { dout: 'bf16', qkv: 'i8/g16', dqkv: 'bf16' }, [{}]),
  { op: 'attention_center', sizes: attention, formats: { qkv: 'bf16' } },
  {
    op: 'attention_cached',
    sizes: { M: 256, T: 256, H: 8, J: 2, D: 64 },
    large: [{ M: 2048, T: 2048, H: 32, J: 8, D: 128 }],
    formats: { qkv: 'bf16', cache: 'bf16', out: 'bf16' },
    numbers: { first: 0, window: 0, scale: 0.125 },
    flops: ({ M = 1, H = 1, D = 1 }) => 2 * H * M * M * D,
  },
  {
    op: 'embedding_forward',
    sizes: { ...rows, V: 4096 },
    formats: { ids: 'i32', w: 'bf16', y: 'bf16' },
    expect: {
      result: 'y',
      value: (i, values, { N = 1 }) => at(values, 'w', at(values, 'ids', Math.floor(i / N)) * N + (i % N)),
    },
  },
  { op: 'embedding_backward', sizes: { ...rows, V: 4096 }, formats: { ids: 'i32', dy: 'bf16', dw: 'bf16' } },
  {
    op: 'cross_entropy_forward',
    sizes: { M: 4096, V: 1024 },
    formats: { logits: 'bf16', targets: 'i32', weight: 'f32', loss: 'f32', lse: 'f32' },
    numbers: { ignore: -100 },
    expect: {
      result: 'lse',
      value: (i, values, { V = 1 }) => Math.log(sum(V, (k) => Math.exp(at(values, 'logits', i * V + k)))),
    },
  },
  {
    op: 'cross_entropy_backward',
    sizes: { M: 4096, V: 1024 },
    formats: { dloss: 'f32', logits: 'bf16', targets: 'i32', lse: 'f32', weight: 'f32', dx: 'bf16' },
    numbers: { ignore: -100 },
  },
  matmul('matmul_nt', { M: 2048, N: 384, K: 128 }, 'f32', 'f32', 'f32', []),
  matmul('matmul_nt', { M: 2048, N: 384, K: 128 }, 'bf16', 'bf16', 'bf16', fewTokens),
  matmul('matmul_nt', { M: 2048, N: 384, K: 128 }, 'e4m3/t', 'e4m3/t', 'bf16', fewTokens),
  matmul('matmul_nt', square, 'f32', 'f32', 'f32'),
  matmul('matmul_nt', square, 'bf16', 'bf16', 'bf16', [...forward, down]),
  matmul('matmul_nt', square, 'e4m3/t', 'e4m3/t', 'bf16', [...forward, down]),
  matmul('matmul_nt', square, 'e4m3/t', 'e4m3/t', 'e4m3/g16', forward.slice(-2)),
  matmul('matmul_nt', square, 'e5m2/t', 'e4m3/t', 'bf16', [...forward.slice(0, 1), down]),
  matmul('matmul_nt', square, 'e5m2/t', 'e4m3/t', 'f32', ofWeights),
  matmul('matmul_nn', { M: 2048, N: 128, K: 384 }, 'bf16', 'bf16', 'bf16', [...forward, down]),
  matmul('matmul_nn', square, 'f32', 'f32', 'f32'),
  matmul('matmul_tn', { M: 384, N: 128, K: 2048 }, 'bf16', 'bf16', 'bf16', ofWeights),
  matmul('matmul_tn', square, 'f32', 'f32', 'f32'),
  // operands of two kinds
  matmul('matmul_nt', square, 'bf16', 'e4m3/t', 'bf16', forward.slice(0, 1)),
  matmul('matmul_nn', square, 'e5m2/t', 'bf16', 'bf16', forward.slice(0, 1)),
  matmul('matmul_tn', square, 'bf16', 'e4m3/t', 'bf16', ofWeights.slice(0, 1)),
  // a gradient that leaves one linear layer for the next, and gradients of weights after the first micro-batch
  matmul('matmul_nt', square, 'e5m2/t', 'e4m3/t', 'bf16', [...forward.slice(0, 1), down], { amax: 'f32' }),
  matmul('matmul_nn', square, 'bf16', 'bf16', 'bf16', [...forward.slice(0, 1), down], { amax: 'f32' }),
  matmul('matmul_nt', square, 'e4m3/t', 'e4m3/t', 'bf16', fewTokens.slice(-2), { amax: 'f32' }),
  // a scale a run of 128 along K, and a block of weights
  matmul('matmul_nt', square, 'e4m3/g128', 'e4m3/b128', 'bf16', [...forward, down, ...fewTokens.slice(-2)]),
  matmul('matmul_nt', square, 'e4m3/g128', 'e4m3/b128', 'e4m3/g16', forward.slice(-1)),
  matmul('matmul_nt', square, 'e4m3/g128', 'e4m3/g128', 'f32', ofWeights),
  // and a scale a row
  matmul('matmul_nt', square, 'e4m3/r', 'e4m3/r', 'bf16', [...forward, down]),
  matmul('matmul_nt', square, 'e4m3/r', 'e4m3/r', 'f32', ofWeights),
  matmul('matmul_nt_into', square, 'e4m3/g128', 'e4m3/g128', 'f32', ofWeights),
  matmul('matmul_nt_into', square, 'e5m2/t', 'e4m3/t', 'bf16', ofWeights),
  matmul('matmul_nt_into', square, 'e5m2/t', 'e4m3/t', 'f32', ofWeights),
  unpromoted(matmul('matmul_nt', square, 'e4m3/t', 'e4m3/t', 'bf16', [...forward.slice(0, 1), down])),
  unpromoted(matmul('matmul_nt', square, 'e4m3/t', 'e4m3/t', 'e4m3/g16', forward.slice(-1))),
  unpromoted(matmul('matmul_nt', square, 'e5m2/t', 'e4m3/t', 'f32', ofWeights)),
  matmul('matmul_nn_into', square, 'bf16', 'bf16', 'f32', [...forward.slice(0, 1), down]),
  matmul('matmul_tn_into', square, 'bf16', 'bf16', 'bf16', ofWeights),
  matmul('matmul_tn_into', square, 'f32', 'f32', 'f32'),
  adamw('f32', { p: 'bf16', master: 'f32', g: 'bf16' }),
  adamw('e4m3/g128', { p: 'f32', g: 'bf16' }),
  adamw('e4m3/x128', { p: 'f32', g: 'bf16' }),
  adamw('e4m3/x128', { p: 'bf16', g: 'bf16' }),
  {
    ...adamw('e4m3/x128', { p: 'bf16', g: 'bf16' }),
    sizes: { L: 3, ...rows },
    members: llama,
    large: [{ L: llama.length, n: sum(llama.length, (i) => llama[i] as number) }],
  },
  adamw('e4m3/x128', { p: 'bf16', g: 'bf16' }, 'stochastic'),
  adamw('e4m3/x128', { p: 'bf16', g: 'bf16', amax: 'f32' }, 'stochastic'),
  adamw('e4m3/x128', { p: 'bf16', lost: 'bf16', g: 'bf16' }, 'kahan'),
  lion('f32', { p: 'f32', g: 'bf16' }),
  lion('e4m3/x128', { p: 'f32', g: 'bf16' }),
  sgd('f32', { p: 'f32', g: 'bf16' }),
  sgd('e4m3/x128', { p: 'f32', g: 'bf16' }),
  {
    op: 'round_to',
    sizes: rows,
    formats: { x: 'f32', y: 'f32' },
    numbers: e6m9,
    expect: { result: 'y', value: (i, values) => at(values, 'x', i), tolerance: 2 ** -10 },
  },
  {
    ...emulatedProduct,
    op: 'matmul_emulated',
    numbers: { ...e6m9, chunk: 64 },
    expect: { ...(emulatedProduct.expect as NonNullable<OpCase['expect']>), tolerance: 2 ** -7 },
  },
  emulatedSgd,
  {
    op: 'grad_norm',
    sizes: { L: 4, ...rows },
    formats: { g: 'bf16', norm: 'f32', norms: 'f32', clip: 'f32' },
    numbers: { max_norm: 1 },
    expect: { result: 'norm', value: (_, { g = [] }) => Math.sqrt(sum(g.length, (k) => (g[k] as number) ** 2)) },
  },
  { op: 'random_normal', sizes: rows, formats: { y: 'f32' }, numbers: { mean: 0, std: 1, seed: 1 } },
  { op: 'random_uniform', sizes: rows, formats: { y: 'f32' }, numbers: { low: -1, high: 1, seed: 1 } },
]

/** Cases whose op has `filter` in its name. */
export function casesLike(filter: string): OpCase[] {
  const picked = opCases.filter(({ op }) => op.includes(filter))
  if (picked.length === 0)
    throw new CoatError(
      `no op has '${filter}' in its name; the ops are ${[...new Set(opCases.map(({ op }) => op))].join(', ')}`,
      'value',
      'ops',
      'filter',
    )
  return picked
}
