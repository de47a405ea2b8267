// Recipes with operands of two kinds, and with gradients of q, k and v that are rounded apart, held against float64.
import { afterEach, describe, expect, it } from 'vitest'
import {
  Attention,
  build,
  type DeviceName,
  type Format,
  Linear,
  LlamaForCausalLM,
  memory,
  OperandProbe,
  ops,
  type Param,
  parameterBytes,
  type RecipeChange,
  recipe,
  scope,
  Tape,
  Tensor,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { devices, present } from './harness.ts'
import { Training } from './training.ts'
import { matrix, Random, sentence, smallLlama, sum, type Values, valuesOf } from './values.ts'

const M = 37
const K = 41
const N = 23

/** All of x, w and dy, each plain or scaled, but those of one kind. */
function mixturesOf<Stream extends 'f32' | 'bf16'>(stream: Stream) {
  return Array.from({ length: 6 }, (_, i) => {
    const scaled = [4, 2, 1].map((bit) => ((i + 1) & bit) !== 0)
    const [x, w, dy] = [
      scaled[0] ? 'e4m3/t' : stream,
      scaled[1] ? 'e4m3/t' : stream,
      scaled[2] ? 'e5m2/t' : stream,
    ] as const
    return { x, w, dy }
  })
}

/** Values that no scale makes exact in few bits. */
function normal(rows: number, cols: number, seed: number, format: Format, device: DeviceName, factor = 1): Tensor {
  const random = new Random(seed)
  const values = Float32Array.from({ length: rows * cols }, () => random.normal() * factor)
  return Tensor.from(values, [rows, cols], { format, device }).keep()
}

async function valuesIn(tensor: Tensor): Promise<Values> {
  const { shape } = tensor
  return valuesOf(Float64Array.from(await tensor.read()), shape[1])
}

/** Runs f backward from the gradient dy of its result; gives the result and the gradient of x. */
async function unwound(x: Tensor, dy: Tensor, f: () => Tensor): Promise<{ y: Values; dx: Values }> {
  const dx: Promise<Values>[] = []
  x.requiresGrad = true
  x.sink = { accumulate: (gradient) => dx.push(valuesIn(gradient)) }
  using tape = new Tape()
  using loss = Tensor.full([1], 0, { device: dy.device as DeviceName }).keep()
  using y = tape.record(() => scope(f))
  tape.push('given', [y], loss, [], () => [dy])
  const made = valuesIn(y)
  tape.backward(loss)
  return { y: await made, dx: await (dx[0] as Promise<Values>) }
}

// Of FP8 alone the tensor cores keep 14 bits.
const termsOf = (device: DeviceName, ...kinds: Format[]) =>
  device !== 'cpu' && kinds.every((kind) => kind.endsWith('/t')) ? 2 ** -12 : 2 ** -19

/** What a sum of products is, and how far a result may be from it: by so much of itself, and of its terms without signs. */
function expectProduct(
  got: Values,
  [rows, cols, depth]: readonly [number, number, number],
  term: (i: number, j: number, k: number) => number,
  { rounding, terms, times = 1 }: { rounding: number; terms: number; times?: number },
): void {
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < cols; j++) {
      const exact = times * sum(depth, (k) => term(i, j, k))
      const room = rounding * Math.abs(exact) + terms * sum(depth, (k) => Math.abs(term(i, j, k)))
      expect(Math.abs(got(i, j) - exact), `${i}, ${j}: ${got(i, j)} of ${exact}`).toBeLessThanOrEqual(room)
    }
}

const gradientOf = ({ grad }: Param) => valuesIn(grad as Tensor)

describe.each(devices)('on %s', (device) => {
  const test = it.skipIf(!present(device))
  afterEach(() => native.checkGuards())

  test.each((['bf16', 'f32'] as const).flatMap((stream) => mixturesOf(stream).map((mix) => ({ stream, ...mix }))))(
    'stream $stream: x $x, w $w, dy $dy multiply as the values of the operands do',
    async ({ stream, x, w, dy }) => {
      const before = memory().tensors
      {
        const made = build({ recipe: { base: 'coat', stream, dw: stream, x, w, dy }, device, seed: 2 })
        using linear = new Linear(made, 'l', { inputs: K, outputs: N, bias: true })
        const bias = Float32Array.from({ length: N }, (_, n) => n / 8)
        linear.bias?.write(bias)
        using input = normal(M, K, 1, stream, device)
        using gradient = normal(M, N, 2, stream, device, 1e-3)
        const { tensor } = linear.weight
        const run = () => unwound(input, gradient, () => linear.forward(input))
        const { y, dx } = await run()
        const once = await gradientOf(linear.weight)
        await run()
        const twice = await gradientOf(linear.weight)
        const operands = [input.as(x), tensor.as(w), gradient.as(dy)].map(valuesIn)
        const [a, b, g] = (await Promise.all(operands)) as [Values, Values, Values]
        const rounding = stream === 'bf16' ? 2 ** -8 : 2 ** -24
        const within = (...kinds: Format[]) => ({ rounding, terms: termsOf(device, ...kinds) })
        const added = (n: number) => bias[n] as number
        expectProduct(y, [M, N, K + 1], (m, n, k) => (k < K ? a(m, k) * b(n, k) : added(n)), within(x, w))
        expectProduct(dx, [M, K, N], (m, k, n) => g(m, n) * b(n, k), within(dy, w))
        expectProduct(once, [N, K, M], (n, k, m) => g(m, n) * a(m, k), within(dy, x))
        const sums = within(dy, x)
        const both = { terms: 2 * sums.terms, rounding: 1.5 * rounding, times: 2 }
        expectProduct(twice, [N, K, M], (n, k, m) => g(m, n) * a(m, k), both)
      }
      expect(memory().tensors).toBe(before)
    },
  )

  test('a mixed product that turns q and k is rounded once', async () => {
    const [heads, kvHeads, headDim] = [2, 1, 8]
    using x = normal(M, K, 3, 'bf16', device)
    // codes times 2^-10, the largest too, so that bf16 has the values of the scaled weight
    using codes = normal((heads + 2 * kvHeads) * headDim, K, 4, 'e4m3/t', device)
    const values = (await codes.read()) as Float32Array
    const top = Math.max(...values.map(Math.abs))
    using w = Tensor.from(
      Float32Array.from(values, (value) => Math.round((value / top) * 28) / 64),
      codes.shape,
      { device },
    ).keep()
    using rope = ops.ropeTable(M, headDim, { theta: 100 }, device).keep()
    const formats = { x: 'bf16', w: 'bf16', dy: 'bf16', y: 'bf16', dx: 'bf16', dw: 'bf16' } as const
    const turned = async (w8: 'bf16' | 'e4m3/t') => {
      const turn = { rope, heads, kvHeads, headDim }
      using y = scope(() => ops.linear(x, w, null, { ...formats, w: w8 }, null, turn))
      return await y.read()
    }
    const [mixed, plain] = [await turned('e4m3/t'), await turned('bf16')]
    expect(await w.as('e4m3/t').read()).toEqual(await w.read())
    expect(mixed).toEqual(plain)
  })

  test('finer scales multiply by bf16 as the values of both do', async () => {
    using x = normal(M, K, 8, 'bf16', device)
    using w = normal(N, K, 9, 'bf16', device)
    for (const finer of ['e4m3/r', 'e4m3/g128', 'e4m3/g16'] as const) {
      const formats = { x: 'bf16', w: finer, dy: 'bf16', y: 'bf16', dx: 'bf16', dw: 'bf16' } as const
      using y = scope(() => ops.linear(x, w, null, formats))
      const [a, b] = [await valuesIn(x), await valuesIn(w.as(finer))]
      const within = { rounding: 2 ** -8, terms: 2 ** -19 }
      expectProduct(await valuesIn(y), [M, N, K], (m, n, k) => a(m, k) * b(n, k), within)
    }
  })

  test('gradients of q, k and v that are rounded apart keep small ones', async () => {
    const sizes = { hidden: K, heads: 2, kvHeads: 1, headDim: 8, ropeTheta: null }
    const parts = [
      { from: 0, to: 16, factor: 2 ** -40 },
      { from: 16, to: 24, factor: 3 },
      { from: 24, to: 32, factor: 1000 },
    ]
    const width = 32
    using x = normal(M, K, 5, 'bf16', device)
    const plain = parts.map(({ from, to, factor }) => normal(M, to - from, 6 + from, 'bf16', device, factor))
    const pieces = await Promise.all(plain.map(valuesIn))
    const rounded = await Promise.all(plain.map((tensor) => valuesIn(tensor.as('e5m2/t'))))
    const partOf = (n: number) => parts.findIndex(({ to }) => n < to)
    const joined = (of: readonly Values[]) =>
      matrix(M, width, (m, n) => (of[partOf(n)] as Values)(m, n - (parts[partOf(n)]?.from ?? 0)))
    using dy = Tensor.from(Float32Array.from(joined(pieces).data), [M, width], { format: 'bf16', device }).keep()
    const run = async (qkvGrad: 'fused' | 'split', w: 'e4m3/t' | 'bf16') => {
      using attention = new Attention(build({ recipe: { base: 'coat', w, qkvGrad }, device, seed: 1 }), 'a', sizes)
      const { qkv } = attention
      using probe = new OperandProbe()
      const once = () => unwound(x, dy, () => qkv.forward(x))
      const { dx } = await once()
      const [shares] = (await probe.take()).filter(({ operand }) => operand === 'dy')
      expect(shares).toMatchObject({ name: 'a.qkv_proj.weight', format: 'e5m2/t' })
      const dw = await gradientOf(qkv.weight)
      await once()
      const twice = await gradientOf(qkv.weight)
      qkv.weight.frozen = true
      expect((await once()).dx.data).toEqual(dx.data)
      expect((await gradientOf(qkv.weight)).data).toEqual(twice.data)
      return { dx, dw, twice, lost: shares?.underflow, weight: await valuesIn(qkv.weight.tensor.as(w)) }
    }
    const input = await valuesIn(x.as('e4m3/t'))
    const g = joined(rounded)
    for (const w of ['e4m3/t', 'bf16'] as const) {
      const [fused, split] = [await run('fused', w), await run('split', w)]
      const rounding = 2 ** -8
      const ofX = { rounding, terms: termsOf(device, 'e5m2/t', w) }
      const ofW = { rounding, terms: termsOf(device, 'e5m2/t', 'e4m3/t') }
      const both = { rounding: 1.5 * rounding, terms: 2 * ofW.terms, times: 2 }
      expectProduct(split.dx, [M, K, width], (m, k, n) => g(m, n) * split.weight(n, k), ofX)
      expectProduct(split.dw, [width, K, M], (n, k, m) => g(m, n) * input(m, k), ofW)
      expectProduct(split.twice, [width, K, M], (n, k, m) => g(m, n) * input(m, k), both)
      expect([fused.lost, split.lost]).toEqual([0.5, 0])
      expect(fused.dw.data.subarray(0, 16 * K).every((value) => value === 0)).toBe(true)
    }
    for (const tensor of plain) tensor.dispose()
  })

  const others = [
    ...mixturesOf('bf16'),
    { qkvGrad: 'split' },
    { qkvGrad: 'split', x: 'bf16', flow: 'save' },
    { stream: 'f32', x: 'f32', w: 'f32', saved: 'f32' },
    { layers: { '*.0': { w: 'bf16', qkvGrad: 'split' }, '*.1': { dy: 'bf16' } } },
  ] as const satisfies readonly Partial<RecipeChange>[]

  test.each(others)('a small Llama trains with coat and %j', async (change) => {
    const made = recipe({ base: 'coat', ...change })
    const trained = (which: RecipeChange) => {
      const model = new LlamaForCausalLM(smallLlama, { recipe: which, seed: 1, device })
      const data = new TextDataset(sentence.repeat(9), { sequence: 32, seed: 7 })
      return new Training(model, new Trainer(model, { data, batch: 2, accumulate: 2, steps: 6 }))
    }
    using mixed = trained({ base: 'coat', ...change })
    using coat = trained({ base: 'coat' })
    const losses = await mixed.losses()
    expect(losses.at(-1)).toBeLessThan(losses[0] as number)
    expect(await coat.losses()).not.toEqual(losses)
    // what a parameter costs is not the operands' affair
    expect(parameterBytes(made)).toEqual(parameterBytes(coat.model.recipe))
    expect(mixed.trainer.optimizer.stateBytes).toBe(coat.trainer.optimizer.stateBytes)
  })

  test('layers have mixtures of their own', () => {
    const layers = { '*.0': { w: 'bf16' }, '*.1': { dy: 'bf16', saved: 'bf16' } } as const
    using model = new LlamaForCausalLM(smallLlama, { recipe: { base: 'coat', qkvGrad: 'fused', layers }, device })
    const formats = model.layers.map(({ attention }) => attention.qkv.formats)
    expect(formats).toMatchObject([
      { x: 'e4m3/t', w: 'bf16', dy: 'e5m2/t' },
      { x: 'e4m3/t', w: 'e4m3/t', dy: 'bf16' },
    ])
    const split = { base: 'coat', layers: { '*.1': { qkvGrad: 'split' } } } as const
    using parts = new LlamaForCausalLM(smallLlama, { recipe: split, device })
    const rows = [16 * 2, 8 * 6, 8 * 8]
    expect(parts.layers.map(({ attention }) => attention.qkv.formats.dyParts)).toEqual([
      undefined,
      [
        [0, rows[0]],
        [rows[0], rows[1]],
        [rows[1], rows[2]],
      ],
    ])
  })

  /** Gradients of a model's matrices. */
  async function gradients(which: Partial<RecipeChange>, config = smallLlama) {
    using model = new LlamaForCausalLM(config, { recipe: { base: 'coat', ...which }, seed: 1, device })
    using tape = new Tape()
    const ids = Int32Array.from({ length: 128 }, (_, i) => (i * 37 + ((i * i) % 11)) % 256)
    const targets = ids.map((_, i) => ids[(i + 1) % ids.length] as number)
    return await Promise.all(
      scope(() => {
        const [x, y] = [ids, targets].map((rows) => Tensor.from(rows, [rows.length], { device })) as [Tensor, Tensor]
        tape.backward(tape.record(() => model.loss(x, y, 64, 1 / ids.length)))
        return model
          .parameters('*.layers.*_proj.*')
          .map(({ name, grad }) => (grad as Tensor).read().then((values) => ({ name, values })))
      }),
    )
  }

  test('gradients are nearer to those of bf16 the fewer operands are scaled, weight by weight', async () => {
    const plain = { x: 'bf16', w: 'bf16', dy: 'bf16' } as const
    const exact = await gradients({ ...plain, saved: 'bf16', flow: 'save' })
    const errors = async (which: Partial<RecipeChange>) => {
      const kinds = new Map<string, [number, number]>()
      for (const [i, { name, values }] of (await gradients(which)).entries()) {
        const kind = name.split('.').at(-2) as string
        const other = exact[i]?.values as Float32Array
        const [error, size] = kinds.get(kind) ?? [0, 0]
        const square = (f: (k: number) => number) => sum(values.length, (k) => f(k) ** 2)
        kinds.set(kind, [
          error + square((k) => (values[k] as number) - (other[k] as number)),
          size + square((k) => other[k] as number),
        ])
      }
      return [...kinds.values()].map(([error, size]) => Math.sqrt(error / size))
    }
    const coat = await errors({})
    const kept = await errors(plain) // copies in FP8 alone
    expect(coat).toHaveLength(4)
    for (const mix of mixturesOf('bf16'))
      for (const [i, error] of (await errors(mix)).entries()) {
        expect(error, `${JSON.stringify(mix)} ${i}`).toBeLessThan(coat[i] as number)
        expect(error, `${JSON.stringify(mix)} ${i}`).toBeGreaterThan(kept[i] as number)
      }
  })

  test('apart or not changes the gradient of q, k and v and what comes after it alone', async () => {
    const one = { ...smallLlama, num_hidden_layers: 1 }
    const [fused, split] = [await gradients({}, one), await gradients({ qkvGrad: 'split' }, one)]
    const changed = fused.filter(({ values }, i) => values.some((value, k) => value !== split[i]?.values[k]))
    expect(changed.map(({ name }) => name)).toEqual(['model.layers.0.self_attn.qkv_proj.weight'])
  })

  test('a plain input is kept as it is, and other mixtures keep what coat keeps', () => {
    const bytes = (which: Partial<RecipeChange>) => {
      using model = new LlamaForCausalLM(smallLlama, { recipe: { base: 'coat', ...which }, device })
      using tape = new Tape()
      using ids = Tensor.from(new Int32Array(64), [64], { device }).keep()
      using _ = tape.record(() => scope(() => model.loss(ids, ids, 64, 1)))
      const kept = tape.ledger().reduce((total, row) => total + row.bytes, 0)
      expect(kept).toBe(memory().live.saved)
      return kept
    }
    const { hidden_size: hidden, intermediate_size: inner, num_hidden_layers: layers } = smallLlama
    const coat = bytes({})
    for (const mix of mixturesOf('bf16')) {
      // two norms and the product of the activation in bf16, where coat has scales of these and of attention's output
      const more = mix.x === 'bf16' ? layers * (64 * (2 * hidden + inner) * 2 - 4 * 4) : 0
      expect(bytes(mix), JSON.stringify(mix)).toBe(coat + more)
    }
    expect(bytes({ qkvGrad: 'split' })).toBe(coat)
  })
})
