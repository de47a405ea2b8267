// The trainer: it learns, repeats itself bit for bit, skips what is not finite, and says what is wrong.
import { createHash } from 'node:crypto'
import { afterAll, describe, expect, it } from 'vitest'
import {
  type Batch,
  CoatError,
  cosine,
  type Dataset,
  LlamaForCausalLM,
  memory,
  type RecipeName,
  recipes,
  type StepMetrics,
  scope,
  sgd,
  Tensor,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { Bigram, listed, logitOf } from './bigram.ts'
import { smallLlama as config, sentence } from './values.ts'

const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })

function trainer(
  recipe: RecipeName,
  options: Partial<TrainerOptions> = {},
): { model: LlamaForCausalLM; trainer: Trainer } {
  const model = new LlamaForCausalLM(config, { recipe, seed: 1 })
  return { model, trainer: new Trainer(model, { data, batch: 4, steps: 6, optimizer: { lr: 0.01 }, ...options }) }
}

async function all(steps: AsyncGenerator<StepMetrics>): Promise<StepMetrics[]> {
  const list: StepMetrics[] = []
  for await (const metrics of steps) list.push(metrics)
  return list
}

/** A digest of every byte of parameters, moments and masters. */
async function stateOf(model: LlamaForCausalLM, trainer: Trainer): Promise<string> {
  const hash = createHash('sha256')
  for (const param of model.parameters()) {
    const { m, v, master } = trainer.optimizer.stateOf(param)
    for (const tensor of [param.tensor, m, v, master]) if (tensor) hash.update(await tensor.readBytes())
  }
  return hash.digest('hex')
}

/** Makes the gradient of one parameter NaN when `when()` holds. */
function poison(model: LlamaForCausalLM, when: () => boolean): string {
  const param = model.parameters().at(-1) ?? expect.fail('no parameter')
  const accumulate = param.accumulate.bind(param)
  param.accumulate = (gradient: Tensor) => {
    accumulate(gradient)
    const bytes = new Uint8Array(param.grad?.bytes ?? 0).fill(0xff) // NaN in f32 and bf16
    if (when()) native.write((param.grad as Tensor).handle, bytes)
  }
  return param.name
}

describe.each(Object.keys(recipes) as RecipeName[])('%s', (recipe) => {
  it('learns a sentence', async () => {
    const before = memory().tensors
    const { model, trainer: it } = trainer(recipe, {
      steps: 150,
      optimizer: { lr: 0.02 },
      schedule: cosine({ warmup: 10 }),
    })
    const first = await it.validate(8)
    const every = await all(it.run())
    const metrics = every.filter(({ skipped }) => !skipped)
    // in half precision some gradients are too large for the loss scale
    expect(every.length - metrics.length).toBeLessThanOrEqual('lossScale' in recipes[recipe] ? 3 : 0)
    expect(metrics.map(({ step }) => step)).toEqual(Array.from({ length: 150 }, (_, i) => i + 1))
    const last = await it.validate(8)
    expect(first).toBeGreaterThan(5)
    expect(last).toBeLessThan(2) // the entropy of its single bytes is 2.7
    expect(metrics.at(-1)?.tokens).toBe(4 * 32)
    it.dispose()
    model.dispose()
    expect(memory().tensors).toBe(before)
  })

  it('gives the same bits again, with any number of threads', async () => {
    const run = async (threads: number) => {
      native.threads(threads)
      const { model, trainer: it } = trainer(recipe)
      const losses = (await all(it.run())).map(({ loss }) => loss)
      const state = await stateOf(model, it)
      it.dispose()
      model.dispose()
      return { losses, state }
    }
    const before = native.threads()
    try {
      const first = await run(1)
      expect(await run(2)).toEqual(first)
      expect(await run(7)).toEqual(first)
    } finally {
      native.threads(before)
    }
  })

  it('names the parts of a step as it queues them', async () => {
    const parts: string[] = []
    const { model, trainer: one } = trainer(recipe, { accumulate: 2, phase: (part) => parts.push(part) })
    await one.step()
    expect(parts).toEqual(['forward', 'backward', 'forward', 'backward', 'update', 'end'])
    one.dispose()
    model.dispose()
  })

  it('skips a step whose gradient is NaN: nothing changes, the schedule waits, the next step is normal', async () => {
    const { model, trainer: it } = trainer(recipe, { steps: 5, schedule: cosine({ warmup: 3 }) })
    let step = 0
    poison(model, () => step === 3)
    const seen: StepMetrics[] = []
    let state = ''
    for (step = 1; it.optimizer.steps < 5; step++) {
      const metrics = await it.step()
      seen.push(metrics)
      if (step === 2) state = await stateOf(model, it)
      if (step === 3) expect(await stateOf(model, it)).toEqual(state)
    }
    expect(seen.map(({ skipped }) => skipped)).toEqual([false, false, true, false, false, false])
    expect(seen.map(({ step: number }) => number)).toEqual([1, 2, 2, 3, 4, 5])
    expect(seen[2]?.skippedSteps).toBe(1)
    expect(seen[3]?.lr).toBe(seen[2]?.lr)
    expect(seen[3]?.gradNorm).toBeGreaterThan(0)
    expect(Number.isFinite(seen[5]?.loss)).toBe(true)
    it.dispose()
    model.dispose()
  })
})

it.each([
  [25, 2],
  [133, 1],
  [1, 3],
])('%d tokens × %d: no size needs padding', async (sequence, batch) => {
  const odd = new TextDataset(sentence.repeat(40), { sequence, seed: 7 })
  const first: number[] = []
  for (const recipe of Object.keys(recipes) as RecipeName[]) {
    using model = new LlamaForCausalLM({ ...config, max_position_embeddings: 133 }, { recipe, seed: 1 })
    using it = new Trainer(model, { data: odd, batch, steps: 2 })
    const [metrics] = await all(it.run())
    first.push(metrics?.loss as number)
    expect(metrics?.gradNorm).toBeGreaterThan(0)
  }
  for (const loss of first) expect(Math.abs(loss / (first[0] as number) - 1)).toBeLessThan(0.01)
})

it('a weight of zeros is no trouble for FP8', async () => {
  const { model, trainer: it } = trainer('coat')
  for (const param of model.parameters('*o_proj*')) param.write(new Float32Array(param.tensor.numel))
  const metrics = await all(it.run())
  expect(metrics.every(({ skipped, loss }) => !skipped && Number.isFinite(loss))).toBe(true)
  it.dispose()
  model.dispose()
})

it('the micro-batches of a step see the same quantized weights', async () => {
  const same: Dataset = { sequence: 32, batch: (_, size) => data.batch(0, size), validation: () => [] }
  const { model, trainer: it } = trainer('coat', { data: same })
  const { ids, targets } = data.batch(0, 4)
  const losses: number[] = []
  for (let i = 0; i < 5; i++) {
    using loss = scope(() => model.loss(Tensor.from(ids, [128]), Tensor.from(targets, [128]), 32, 1 / 128))
    losses.push(await loss.item())
  }
  expect(new Set(losses).size).toBe(1)
  it.dispose()
  model.dispose()
})

it('stops after too many skips in a row and names the parameter', async () => {
  const { model, trainer: it } = trainer('coat', { maxSkips: 3 })
  const name = poison(model, () => true)
  const error = await all(it.run()).catch((caught: CoatError) => caught)
  expect(error).toBeInstanceOf(CoatError)
  expect(error).toMatchObject({ code: 'diverged', argument: name })
  expect((error as CoatError).message).toContain('3 steps in a row')
  expect(it.skippedSteps).toBe(3)
  it.dispose()
  model.dispose()
})

describe('T1: micro-batches with 1 token of loss 4 and 3 tokens of mean loss 1', () => {
  const rows = [
    [0, logitOf(4)],
    [0, logitOf(1)],
  ]
  const one = { ids: [0, 0, 0], targets: [0, -100, -100] }
  const three = { ids: [1, 1, 1], targets: [0, 0, 0] }
  /** Metrics of a step, and what the table got as its gradient. */
  async function stepOf(batches: (typeof one)[]): Promise<{ metrics: StepMetrics; gradient: number[] }> {
    using model = new Bigram(rows)
    const options = { data: listed(...batches), batch: 1, accumulate: batches.length, steps: 1, clip: 0 }
    using it = new Trainer(model, { ...options, optimizer: sgd({ lr: 1, momentum: 0 }) })
    const metrics = await it.step()
    const moved = [...((await model.table.tensor.read()) as Float32Array)]
    return { metrics, gradient: rows.flat().map((before, i) => Math.fround(before) - (moved[i] as number)) }
  }

  it('have 1.75, where the mean of means has 2.5, and the gradient of one batch', async () => {
    const { metrics, gradient } = await stepOf([one, three])
    expect(metrics.tokens).toBe(4)
    expect(metrics.loss).toBeCloseTo(1.75, 6)
    const whole = await stepOf([{ ids: [...one.ids, ...three.ids], targets: [...one.targets, ...three.targets] }])
    expect(whole.metrics.loss).toBeCloseTo(1.75, 6)
    // softmax less target, by tokens: the probability of the first is e to minus the loss
    const [p, q] = [Math.exp(-4), Math.exp(-1)]
    const expected = [(p - 1) / 4, (1 - p) / 4, (3 * (q - 1)) / 4, (3 * (1 - q)) / 4]
    for (const [i, value] of expected.entries()) {
      expect(Math.abs((gradient[i] as number) - value)).toBeLessThan(1e-6)
      expect(Math.abs((gradient[i] as number) - (whole.gradient[i] as number))).toBeLessThan(1e-6)
    }
  })

  it('and the loss that is told does not grow with how many there are', async () => {
    const pairs = Array.from({ length: 8 }, (_, i) => (i % 2 ? three : one))
    expect((await stepOf(pairs)).metrics.loss).toBeCloseTo(1.75, 6)
  })
})

it('T1: takes the mean by tokens over micro-batches of a model', async () => {
  // two micro-batches with 1 and 63 counted tokens against one batch with all of them
  const rows = (batch: Batch, from: number, to: number): Batch => ({
    sequence: 32,
    ids: batch.ids.slice(from * 32, to * 32),
    targets: batch.targets.slice(from * 32, to * 32),
  })
  const whole = data.batch(0, 2)
  whole.targets.fill(-100, 1, 32)
  const parts: Dataset = {
    sequence: 32,
    batch: (index) => rows(whole, index % 2, (index % 2) + 1),
    validation: () => [],
  }
  const together: Dataset = { sequence: 32, batch: () => whole, validation: () => [] }
  const a = trainer('fp32', { data: parts, batch: 1, accumulate: 2, steps: 3 })
  const b = trainer('fp32', { data: together, batch: 2, steps: 3 })
  for (let i = 0; i < 3; i++) {
    const [left, right] = [await a.trainer.step(), await b.trainer.step()]
    expect(left.tokens).toBe(33)
    expect(left.loss).toBeCloseTo(right.loss, 5)
    expect(left.gradNorm).toBeCloseTo(right.gradNorm, 4)
  }
  for (const { model, trainer: it } of [a, b]) {
    it.dispose()
    model.dispose()
  }
})

describe('T3: a batch without any counted token', () => {
  const empty: Dataset = {
    sequence: 32,
    batch: (index, size) => ({ ...data.batch(index, size), targets: new Int32Array(32 * size).fill(-100) }),
    validation: () => [],
  }
  const values = (model: LlamaForCausalLM) =>
    Promise.all(model.parameters().map(async ({ tensor }) => (await tensor.read()) as Float32Array))

  it.each(['fp32', 'bf16', 'coat'] as const)('%s: counts as a step of loss 0 whose gradient is 0', async (recipe) => {
    const { model, trainer: it } = trainer(recipe, { data: empty, optimizer: { lr: 0.01, weightDecay: 0 } })
    const before = await values(model)
    const metrics = await it.step()
    expect(metrics).toMatchObject({ step: 1, loss: 0, gradNorm: 0, tokens: 0, skipped: false, skippedSteps: 0 })
    expect(await values(model)).toEqual(before)
    it.dispose()
    model.dispose()
  })

  it('decays weights all the same, as every step, and nothing else', async () => {
    const { model, trainer: it } = trainer('fp32', { data: empty, optimizer: { lr: 0.01, weightDecay: 0.1 } })
    const before = await values(model)
    await it.step()
    const after = await values(model)
    for (const [p, { decay, name }] of model.parameters().entries())
      for (const [i, value] of (before[p] as Float32Array).entries())
        expect(Math.abs((after[p]?.[i] as number) - value * (decay ? 0.999 : 1)), name).toBeLessThan(1e-7)
    it.dispose()
    model.dispose()
  })

  it('costs nothing beside a batch that has some', async () => {
    const half: Dataset = { ...empty, batch: (index, size) => (index % 2 ? empty : data).batch(index >> 1, size) }
    const a = trainer('fp32', { data: half, accumulate: 2 })
    const b = trainer('fp32', { data })
    const [with_, without] = [await a.trainer.step(), await b.trainer.step()]
    expect(with_).toMatchObject({ loss: without.loss, tokens: without.tokens, gradNorm: without.gradNorm })
    for (const { model, trainer: it } of [a, b]) {
      it.dispose()
      model.dispose()
    }
  })
})

it('what is made again in backward changes memory, not the result', async () => {
  const run = async (recompute: 'none' | 'flow' | 'layer') => {
    const { model, trainer: it } = trainer('coat', { recompute, steps: 3 })
    const metrics = await all(it.run())
    const state = await stateOf(model, it)
    it.dispose()
    model.dispose()
    return { state, losses: metrics.map(({ loss }) => loss), saved: metrics.at(-1)?.memory.peak.saved as number }
  }
  const [none, flow, layer] = [await run('none'), await run('flow'), await run('layer')]
  for (const other of [none, layer]) {
    expect(other.losses).toEqual(flow.losses)
    expect(other.state).toBe(flow.state)
  }
  expect(flow.saved).toBeLessThan(none.saved)
  expect(layer.saved).toBeLessThan(flow.saved)
})

it('documents of a batch are as if each were alone', async () => {
  const [T, second] = [32, 11]
  const ids = Int32Array.from({ length: T }, (_, i) => (i * 37) % 256)
  const targets = ids.map((id) => (id + 1) % 256)
  const starts = ids.map((_, t) => (t < second ? 0 : second))
  const step = async (batches: readonly Batch[]) => {
    using model = new LlamaForCausalLM(config, { recipe: 'fp32', seed: 1 })
    const data = { sequence: T, batch: (i: number) => batches[i] as Batch, validation: () => [] }
    using trainer = new Trainer(model, {
      data,
      batch: 1,
      accumulate: batches.length,
      steps: 1,
      optimizer: { lr: 0.01 },
    })
    return await trainer.step()
  }
  const part = (from: number, to: number): Batch => ({
    ids: ids.slice(from, to),
    targets: targets.slice(from, to),
    sequence: to - from,
  })
  const packed = await step([{ ...part(0, T), starts }])
  const alone = await step([part(0, second), part(second, T)])
  const joined = await step([part(0, T)])
  expect(packed.loss).toBeCloseTo(alone.loss, 5)
  expect(packed.gradNorm).toBeCloseTo(alone.gradNorm, 5)
  expect(Math.abs(packed.gradNorm - joined.gradNorm)).toBeGreaterThan(1e-4)
  await expect(step([{ ...part(0, T), starts: starts.map((start) => start + 1) }])).rejects.toThrow(
    'documentStarts: starts[0] is 1 and must be its position 0, where a document begins, or that of the row before',
  )
})

it('refuses what it does not know', () => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  const make = (options: object) => () => new Trainer(model, { data, batch: 4, steps: 1, ...options })
  expect(make({ step: 3 })).toThrow(/Trainer: option 'step' is unknown; the options are data, batch/)
  expect(make({ batch: 0 })).toThrow(/batch is 0 and must be an integer of at least 1/)
  expect(make({ recompute: 'all' })).toThrow(/recompute is all and must be one of none, flow, layer/)
  expect(make({ clip: -1 })).toThrow(/clip is -1 and must be at least 0/)
  expect(make({ optimizer: { learningRate: 1 } })).toThrow(/adamw: option 'learningRate' is unknown/)
  expect(make({ optimizer: { betas: [0.9, 1] } })).toThrow(/betas\[1\] is 1 and must be at least 0 and less than 1/)
})

it.each([
  ['ids', 256],
  ['ids', -1],
  ['targets', 256],
  ['targets', -1],
] as const)('D6: %s of %d in batch 3 are named with their place, and other batches go on', async (name, id) => {
  const wrong: Dataset = {
    sequence: 32,
    batch: (index, size) => {
      const batch = data.batch(index, size)
      batch.targets[0] = -100
      if (index === 3) batch[name][5] = id
      return batch
    },
    validation: () => [],
  }
  const { model, trainer: it } = trainer('coat', { data: wrong })
  for (let i = 0; i < 3; i++) await it.step()
  const state = await stateOf(model, it)
  const before = memory().tensors
  await expect(it.step()).rejects.toThrow(
    `training: batch 3 of the data: ${name}[5] is ${id} and must be at least 0 and less than 256, the model's vocabulary`,
  )
  expect(memory().tensors).toBe(before)
  expect(await stateOf(model, it)).toBe(state)
  it.batches += 1
  expect((await it.step()).step).toBe(4)
  it.dispose()
  model.dispose()
})

describe('what is no value of an option is refused by its name', () => {
  const model = new LlamaForCausalLM(config, { recipe: 'fp32', seed: 1 })
  afterAll(() => model.dispose())
  const attempt = (options: object) => () => new Trainer(model, { data, batch: 1, steps: 1, ...options })

  it.each(['communicate', 'partition', 'mu', 'lossScale'])('%s', (name) => {
    for (const value of [null, 0, true, '', 'word', ['bf16'], []]) {
      expect(attempt({ [name]: value }), JSON.stringify(value)).toThrow(CoatError)
      expect(attempt({ [name]: value })).not.toThrow('[object')
    }
  })
  it('ranks', () => {
    for (const ranks of [null, {}, 0, [], { rank: 2, count: 2 }, { rank: 0.5, count: 2 }])
      expect(attempt({ ranks })).toThrow(/Trainer: ranks has rank .* and count .*, which must be integers/)
  })
})
