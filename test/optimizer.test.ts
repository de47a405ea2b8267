// Optimizers: parameters with a learning rate, decay or state formats of their own, rules, and roundings.
import { describe, expect, it } from 'vitest'
import {
  AdamW,
  type AdamWOptions,
  type AdamWOverride,
  adamw,
  CoatError,
  device,
  type FullOptions,
  LlamaForCausalLM,
  lion,
  optimizerOf,
  type Param,
  type Recipe,
  type RecipeName,
  recipes,
  Sgd,
  scope,
  sgd,
  Tape,
  Tensor,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { devices, present } from './harness.ts'

const config = {
  hidden_size: 32,
  intermediate_size: 48,
  num_hidden_layers: 2,
  num_attention_heads: 2,
  vocab_size: 64,
  tie_word_embeddings: true,
}
const usual = { lr: 0.01, betas: [0.9, 0.95], eps: 1e-12, weightDecay: 0 } as const

function failure(make: () => unknown): CoatError {
  try {
    make()
  } catch (error) {
    if (error instanceof CoatError) return error
    throw error
  }
  throw new Error('nothing was refused')
}

describe.each(devices)('on %s', (name) => {
  const skip = !present(name)

  /** By parameter: values before and after `steps` steps of `rate` on the same gradients, after `done` others. */
  async function trained(
    options: AdamWOptions | FullOptions,
    recipe: RecipeName | Recipe = 'fp32',
    steps = 1,
    done = 0,
    rate = 0.01,
  ) {
    using where = device(name)
    using model = new LlamaForCausalLM(config, { recipe, seed: 1, device: where })
    using optimizer = optimizerOf(model, model.recipe, 'rule' in options ? options : { ...usual, ...options })
    optimizer.steps = done
    const read = async (of: (param: Param) => Tensor) =>
      Object.fromEntries(
        await Promise.all(optimizer.params.map(async (param) => [param.name, [...(await of(param).read())]])),
      ) as Record<string, number[]>
    const before = await read(({ tensor }) => tensor)
    const ids = Int32Array.from({ length: 16 }, (_, i) => (i * 7) % 64)
    for (let step = 0; step < steps; step++) {
      scope(() => {
        using tape = new Tape()
        const tokens = [0, 1].map(() => Tensor.from(ids, [16], { device: where })) as [Tensor, Tensor]
        tape.backward(tape.record(() => model.loss(...tokens, 16, 1 / 16)))
      })
      optimizer.step(rate)
      optimizer.advance()
      optimizer.dropGrads()
    }
    const formats = Object.fromEntries(optimizer.params.map((p) => [p.name, optimizer.stateOf(p).m.format]))
    return { before, after: await read(({ tensor }) => tensor), formats, bytes: optimizer.stateBytes }
  }
  const override = (...parameters: AdamWOverride[]) => ({ parameters })
  const embedding = 'model.embed_tokens.weight'
  const norm = 'model.norm.weight'

  it.skipIf(skip)('lr of a parameter scales its change and no other', async () => {
    const plain = await trained({})
    const half = await trained(override({ match: 'model.layers.*', lr: 0.005 }))
    for (const [name, before] of Object.entries(plain.before)) {
      const share = name.startsWith('model.layers.') ? 0.5 : 1
      before.forEach((x, i) => {
        const change = ((plain.after[name] as number[])[i] as number) - x
        expect(((half.after[name] as number[])[i] as number) - x).toBeCloseTo(share * change, 6)
      })
    }
    const frozen = await trained(override({ match: embedding, lr: 0 }))
    expect(frozen.after[embedding]).toEqual(frozen.before[embedding])
    expect(frozen.after[norm]).toEqual(plain.after[norm])
  })

  it.skipIf(skip)('weightDecay of a parameter decays it, also where nothing decays by itself', async () => {
    const plain = await trained({})
    const decayed = await trained(override({ match: norm, weightDecay: 0.5 }))
    for (const [i, x] of (plain.after[norm] as number[]).entries())
      expect(x - ((decayed.after[norm] as number[])[i] as number)).toBeCloseTo(0.01 * 0.5 * 1, 6)
    expect(decayed.after[embedding]).toEqual(plain.after[embedding])
  })

  it.skipIf(skip)('betas and eps of a parameter are its own; the last override that has a value gives it', async () => {
    const betas = [0.5, 0.6] as const
    expect(await trained(override({ match: '*', betas }), 'fp32', 3)).toEqual(await trained({ betas }, 'fp32', 3))
    const plain = await trained({})
    const last = override({ match: '*', eps: 1 }, { match: '*', eps: 1e-12 }, { match: embedding, eps: 1 })
    const { after } = await trained(last)
    expect({ ...after, [embedding]: plain.after[embedding] }).toEqual(plain.after)
    expect(after[embedding]).not.toEqual(plain.after[embedding])
  })

  it.skipIf(skip)('m and v of a parameter have the formats asked for, in one step with the others', async () => {
    const given = override({ match: 'model.embed_tokens.*', m: 'f32', v: 'f32' })
    const { formats, bytes, after, before } = await trained(given, 'coat', 2)
    expect(formats[embedding]).toBe('f32')
    expect(Object.entries(formats).filter(([, format]) => format !== 'e4m3/x128')).toEqual([[embedding, 'f32']])
    const saved = bytes - (await trained({}, 'coat')).bytes
    expect(saved).toBe(64 * 32 * 6 - 2 * 12 * 16) // 8 bytes an element for 2, and 16 runs of three f32 a moment
    for (const [name, values] of Object.entries(before)) expect(after[name]).not.toEqual(values)
  })

  it.skipIf(skip)('lion moves every element by the learning rate, or not at all', async () => {
    const { before, after } = await trained(lion({ weightDecay: 0 }))
    for (const [name, values] of Object.entries(before)) {
      const moves = values.map((x, i) => Math.abs(((after[name] as number[])[i] as number) - x))
      for (const move of moves) expect(Math.min(move, Math.abs(move - 0.01))).toBeLessThan(1e-6)
      expect(Math.max(...moves)).toBeGreaterThan(0.009)
    }
  })

  it.skipIf(skip)('sgd takes the whole first gradient, then less by dampening', async () => {
    const change = async (options: FullOptions, steps: number) => {
      const { before, after } = await trained(options, 'fp32', steps)
      return (before[norm] as number[]).map((x, i) => ((after[norm] as number[])[i] as number) - x)
    }
    const plain = await change(sgd({ momentum: 0 }), 1)
    expect(Math.max(...plain.map(Math.abs))).toBeGreaterThan(1e-6)
    expect(await change(sgd({ momentum: 0, dampening: 0.5 }), 1)).toEqual(plain)
    expect(await change(sgd({ dampening: 1 }), 1)).toEqual(plain)
    const twice = await change(sgd({ dampening: 1 }), 2) // m2 = 0.9 m1: nothing of the second gradient
    for (const [i, x] of twice.entries()) expect(x).toBeCloseTo(1.9 * (plain[i] as number), 6)
  })

  it.skipIf(skip)('bias correction counts steps beyond 256 and 10 000 exactly, also for bf16 parameters', async () => {
    for (const done of [256, 9999]) {
      const { before, after } = await trained({ betas: [0.9, 0.9999] }, 'fp32', 1, done)
      const t = done + 1
      const size = (0.1 / (1 - 0.9 ** t) / Math.sqrt(1e-4 / (1 - 0.9999 ** t))) * 0.01
      const moves = (before[norm] as number[]).map((x, i) => Math.abs(((after[norm] as number[])[i] as number) - x))
      for (const move of moves) expect(Math.abs(move / size - 1)).toBeLessThan(1e-5) // 9984 steps would differ by 5e-4
      const narrow = await trained({ betas: [0.9, 0.9999] }, { ...recipes.bf16, master: null }, 1, done)
      expect(narrow.after[embedding]).not.toEqual(narrow.before[embedding])
    }
  })

  const withoutMaster: Recipe = { ...recipes.bf16, master: null }

  it.skipIf(skip)('stochastic rounding repeats itself by seed, step and place', async () => {
    const run = (seed: number, steps = 2, done = 0) =>
      trained({ seed }, { ...withoutMaster, rounding: 'stochastic' }, steps, done, 1e-5)
    const first = await run(1)
    expect(await run(1)).toEqual(first)
    expect((await run(2)).after[embedding]).not.toEqual(first.after[embedding])
    const [one, later] = [await run(1, 1), await run(1, 1, 5)]
    expect(later.after[embedding]).not.toEqual(one.after[embedding])
    // norms are f32
    expect((await run(2)).after[norm]?.length).toBe(32)
  })

  it.skipIf(skip)(
    'kahan keeps two bytes an element of a bf16 parameter, and what small updates add up to',
    async () => {
      const near = await trained({}, withoutMaster, 20, 0, 1e-5)
      const kahan = await trained({ rounding: 'kahan' }, withoutMaster, 20, 0, 1e-5)
      const doubled = await trained({}, 'bf16', 20, 0, 1e-5)
      const matrices = Object.values(near.before).reduce((sum, { length }) => sum + (length > 32 ? length : 0), 0)
      expect(kahan.bytes - near.bytes).toBe(2 * matrices)
      const off = (run: { after: Record<string, number[]> }) =>
        (run.after[embedding] as number[]).filter((x, i) => x !== (doubled.after[embedding] as number[])[i]).length
      expect(off(kahan)).toBeLessThan(off(near) / 4)
    },
  )

  it.skipIf(skip)('without gradients norms stay and matrices decay, by every rule', async () => {
    using where = device(name)
    for (const options of [adamw(), lion(), sgd({ weightDecay: 0.1 })]) {
      using model = new LlamaForCausalLM(config, { recipe: 'fp32', device: where })
      using optimizer = optimizerOf(model, model.recipe, options)
      for (const param of optimizer.params) {
        const { tensor } = param
        const before = await tensor.read()
        scope(() => param.accumulate(Tensor.zeros(tensor.shape, { device: where })))
        optimizer.step(0.5)
        param.dropGrad()
        const share = tensor.shape.length === 2 ? 0.95 : 1
        for (const [i, x] of (await tensor.read()).entries()) expect(x).toBeCloseTo(share * (before[i] as number), 6)
      }
    }
  })

  it.skipIf(skip).each([adamw({ lr: 0.01 }), lion({ lr: 0.003 }), sgd({ lr: 0.1, nesterov: true })])(
    'the trainer learns with $rule',
    async (optimizer) => {
      using where = device(name)
      using model = new LlamaForCausalLM({ ...config, vocab_size: 256 }, { recipe: 'coat', seed: 1, device: where })
      const data = new TextDataset('all work and no play makes a dull day. '.repeat(40), { sequence: 32, seed: 7 })
      using trainer = new Trainer(model, { data, batch: 4, steps: 12, optimizer })
      const losses: number[] = []
      for await (const { loss } of trainer.run()) losses.push(loss)
      expect(losses.at(-1)).toBeLessThan((losses[0] as number) - 0.3)
    },
  )
})

it('takes unsafe formats of v where it is told to', () => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  const parameters = [{ match: '*', m: 'e4m3/g128', v: 'e4m3/g128' }] as const
  using optimizer = new AdamW(model, model.recipe, { parameters, allowUnsafe: true })
  for (const param of optimizer.params) expect(optimizer.stateOf(param).v?.format).toBe('e4m3/g128')
})

it('takes v in runs with a floor, where the second beta is small enough', () => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  const parameters = [{ match: '*', m: 'e4m3/g128', v: 'e4m3/g128' }] as const
  using optimizer = new AdamW(model, model.recipe, { parameters })
  expect(optimizer.options.vFloor).toBe(true)
  const refused = (options: AdamWOptions) =>
    failure(() => new AdamW(model, model.recipe, { parameters, ...options })).message
  expect(refused({ vFloor: false })).toMatch(
    /stores small second moments as 0, .* take v e4m3\/x128, vFloor, or set allow/,
  )
  expect(refused({ betas: [0.9, 0.999] })).toMatch(/gain away with betas\[1\] 0\.999, .* betas\[1\] of at most 0\.99,/)
})

it('refuses roundings that there is nothing to round for, and rules of SGD', () => {
  const refused = (recipe: RecipeName | Recipe, options: FullOptions) => {
    using model = new LlamaForCausalLM(config, { recipe })
    return failure(() => optimizerOf(model, model.recipe, options)).message
  }
  expect(refused('fp32', adamw({ rounding: 'stochastic' }))).toBe(
    'adamw: rounding is stochastic and must be nearest where no parameter is bf16',
  )
  expect(refused('bf16', lion({ rounding: 'kahan' }))).toBe(
    "lion: rounding is kahan and must be nearest with the recipe's master f32, which loses nothing",
  )
  expect(failure(() => sgd({ nesterov: true, dampening: 0.1 })).message).toMatch(
    /nesterov needs momentum greater than 0/,
  )
  expect(failure(() => sgd({ momentum: 1 })).message).toMatch(/momentum is 1 and must be at least 0 and less than 1/)
  expect(failure(() => lion({ eps: 1 } as never)).message).toMatch(/lion: option 'eps' is unknown; the options are/)
  expect(failure(() => adamw({ seed: -1 })).message).toMatch(/seed is -1 and must be an integer from 0 to 2\^53 - 1/)
  expect(failure(() => adamw({ rounding: 'up' as never })).message).toMatch(/must be one of nearest, stochastic, kahan/)
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  const parameters = [{ match: '*', m: 'bf16x2' as never }]
  expect(failure(() => new Sgd(model, model.recipe, { parameters })).message).toMatch(/m bf16x2, of .* not a format of/)
})

it('refuses what a step cannot take', () => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  const optimizer = new AdamW(model, model.recipe)
  expect(failure(() => optimizer.step(-1)).message).toBe('adamw: lr is -1 and must be a finite number of at least 0')
  optimizer.steps = -1
  expect(failure(() => optimizer.step(1)).message).toBe('adamw: steps is -1 and must be an integer of at least 0')
  optimizer.dispose()
  expect(failure(() => optimizer.step(1)).message).toBe('adamw: the optimizer was disposed')
  const master = { ...model.recipe, master: 'bf16' as never }
  expect(failure(() => new AdamW(model, master)).message).toMatch(
    /the recipe's master is bf16 and must be f32, f16\/t or null/,
  )
})

it.each(['e4m3/g128', 'u8/g256', 'u4/g128', 'f16/t'] as const)('refuses v %s with a slow second beta', (v) => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  const m = ({ 'u8/g256': 'd8/g256', 'u4/g128': 'd4/g128', 'f16/t': 'e4m3/t' } as const)[v as 'f16/t'] ?? v
  const make = (beta2: number) => () =>
    new AdamW(model, { master: null, m: m as 'f32', v: v as 'f32' }, { betas: [0.9, beta2] }).dispose()
  expect(failure(make(0.999)).message).toMatch(/rounds what small second moments gain away with betas\[1\] 0\.999/)
  expect(make(0.99)).not.toThrow()
})

it.each<[AdamWOptions, RegExp]>([
  [
    { parameters: [{ match: 'model.nothing.*' }] },
    /parameters\[0\]\.match is 'model\.nothing\.\*', which no parameter/,
  ],
  [
    { parameters: [{ match: '*', rate: 1 } as never] },
    /option 'parameters\[0\]\.rate' is unknown; what parameters\[0\] may have is match,/,
  ],
  [{ parameters: [{} as never] }, /parameters\[0\]\.match is undefined and must be the name of parameters/],
  [{ parameters: [{ match: '*', lr: -1 }] }, /parameters\[0\]\.lr is -1 and must be a finite number of at least 0/],
  [
    { parameters: [{ match: '*', betas: [0.9, 1] }] },
    /parameters\[0\]\.betas\[1\] is 1 and must be at least 0 and less/,
  ],
  [
    { parameters: [{ match: '*q_proj.weight', lr: 1 }] },
    /'\*q_proj\.weight', which names a part of .* are one parameter/,
  ],
  [{ parameters: ['x'] as never }, /parameters\[0\] is "x" and must be an object/],
  [{ parameters: {} as never }, /parameters is \{\} and must be an array/],
  [5 as never, /options is 5 and must be an object/],
  [{ rule: 'adam' } as never, /rule is adam and must be adamw; the rules are adamw, lion, sgd/],
  [{ betas: [0.9] as never }, /betas is \[0\.9\] and must be two numbers/],
  [{ betas: null as never }, /betas is null and must be two numbers/],
  [{ betas: ['0.9', 0.95] as never }, /betas\[0\] is "0\.9" and must be at least 0 and less than 1/],
  [{ eps: 1e-60 }, /eps is 1e-60 and must be a finite number greater than 0 \(in f32\)/],
  [{ eps: Number.POSITIVE_INFINITY }, /eps is Infinity and must be a finite number/],
  [{ lr: 1e39 }, /lr is 1e\+39 and must be a finite number/],
  [{ lr: 5e-324 }, /lr is 5e-324 and must be a finite number/],
  [{ weightDecay: Number.POSITIVE_INFINITY }, /weightDecay is Infinity and must be a finite number of at least 0/],
  [{ weightDecay: null as never }, /weightDecay is null and must be a finite number of at least 0/],
  [{ vFloor: 'no' as never }, /vFloor is "no" and must be true or false/],
  [{ allowUnsafe: 'false' as never }, /allowUnsafe is "false" and must be true or false/],
  [{ lr: 0, parameters: [{ match: '*', lr: 1 }] }, /parameters\[0\]\.lr is 1 and lr is 0, which must be greater/],
  [
    { parameters: [{ match: '*norm*', m: 'bf16' }] },
    /m bf16 with v f32, of parameter '.*norm.*', is not a pair .* f32 with f32/,
  ],
])('refuses %j', (options, text) => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  expect(failure(() => new AdamW(model, model.recipe, options)).message).toMatch(text)
})
