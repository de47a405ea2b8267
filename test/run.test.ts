// What surrounds the steps: spikes, validation, callbacks, checkpoints that stay healthy, and ends by a signal or by hand.
import { readdirSync } from 'node:fs'
import { describe, expect, it } from 'vitest'
import {
  type Batch,
  type CoatError,
  constant,
  type Dataset,
  LlamaForCausalLM,
  memory,
  type Phase,
  type StepMetrics,
  saveCheckpoint,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { eachInFolder } from './folders.ts'
import { smallLlama as config, Random, sentence } from './values.ts'

let dir = ''
eachInFolder((folder) => {
  dir = folder
})

const data = () => new TextDataset(sentence.repeat(40), { sequence: 16, seed: 7 })

function trainerOf(options: Partial<TrainerOptions> = {}, seed = 1): Trainer {
  const model = new LlamaForCausalLM(config, { recipe: 'coat', seed })
  const usual = { data: data(), batch: 2, steps: 6, optimizer: { lr: 0.01 }, schedule: constant() }
  return new Trainer(model, { ...usual, ...options })
}
function drop(...trainers: Trainer[]): void {
  for (const trainer of trainers) {
    trainer.dispose()
    ;(trainer.model as LlamaForCausalLM).dispose()
  }
}
async function all(steps: AsyncGenerator<StepMetrics>): Promise<StepMetrics[]> {
  const list: StepMetrics[] = []
  for await (const metrics of steps) list.push(metrics)
  return list
}
const numbers = (list: StepMetrics[]) => list.map(({ step, loss, gradNorm, lr }) => ({ step, loss, gradNorm, lr }))

async function bytesOf({ model, optimizer }: Trainer): Promise<string[]> {
  const list: string[] = []
  for (const param of model.parameters())
    for (const tensor of [param.tensor, ...Object.values(optimizer.stateOf(param))])
      if (tensor) list.push(Buffer.from(await tensor.readBytes()).toString('base64'))
  return list
}

/** Calls `then` before the forward pass of every micro-batch, with its number from 1. */
function beforeEachMicro({ model }: Trainer, then: (count: number) => void): void {
  const loss = model.loss.bind(model)
  let count = 0
  model.loss = (...args) => {
    then(++count)
    return loss(...args)
  }
}

describe('N18: a spike', () => {
  const noise: Dataset = {
    sequence: 16,
    // step 13 has text that no other step has
    batch: (index, size) => {
      const batch = data().batch(index, size)
      if (index === 12) batch.targets.fill(255)
      return batch
    },
    validation: () => [],
  }
  const spike = { sigma: 6, window: 8 }

  it('is skipped: nothing changes, and the steps after it are those of a run without it', async () => {
    const it = trainerOf({ data: noise, steps: 14, spike })
    const list: StepMetrics[] = []
    for (let i = 0; i < 12; i++) list.push(await it.step())
    const before = await bytesOf(it)
    list.push(await it.step())
    expect(await bytesOf(it)).toEqual(before)
    list.push(...(await all(it.run())))
    expect(list.map(({ skipped }) => skipped)).toEqual(Array.from({ length: 15 }, (_, i) => i === 12))
    expect(list.map(({ step }) => step)).toEqual([...Array.from({ length: 12 }, (_, i) => i + 1), 12, 13, 14])
    expect(list[12]?.loss as number).toBeGreaterThan(list[11]?.loss as number)
    expect(it.skippedSteps).toBe(1)
    const without = trainerOf({
      data: { ...noise, batch: (index, size) => data().batch(index + (index > 11 ? 1 : 0), size) },
      steps: 14,
    })
    expect(numbers(await all(without.run()))).toEqual(numbers(list.filter(({ skipped }) => !skipped)))
    drop(it, without)
  })

  it('is none without a guard, or before the window is full', async () => {
    for (const options of [{}, { spike: { sigma: 6, window: 13 } }]) {
      const it = trainerOf({ data: noise, steps: 14, ...options })
      expect((await all(it.run())).some(({ skipped }) => skipped)).toBe(false)
      drop(it)
    }
  })

  it('in a row stops the run, and what was seen goes on after a resume', async () => {
    const bad: Dataset = { ...noise, batch: (index, size) => noise.batch(index < 10 ? index : 12, size) }
    const first = trainerOf({ data: bad, steps: 20, spike, maxSkips: 3, checkpoint: { dir, every: 10 } })
    await expect(all(first.run())).rejects.toThrow(
      'training: loss or gradient norm was a spike in 3 steps in a row (maxSkips)',
    )
    expect(readdirSync(dir)).toEqual(['step-00000010'])
    const second = trainerOf({ data: bad, steps: 20, spike, maxSkips: 3 }, 2)
    await second.resume(dir)
    expect(second.guard?.state()).toEqual(first.guard?.state())
    expect((await second.step()).skipped).toBe(true)
    const other = trainerOf({ data: bad, steps: 20, spike: { sigma: 5, window: 8 } })
    await expect(other.resume(dir)).rejects.toThrow('spike.sigma is 6 in the checkpoint and 5 here')
    drop(first, second, other)
  })

  it('options are checked', () => {
    expect(() => trainerOf({ spike: { sigma: 0 } })).toThrow('spike: sigma is 0 and must be above 0')
    expect(() => trainerOf({ spike: { sigma: 3, window: 1 } })).toThrow('spike: window is 1 and must be an integer')
    expect(() => trainerOf({ spike: { sigma: 3, size: 1 } as never })).toThrow(/option 'spike.size' is unknown/)
    expect(() => trainerOf({ spike: { sigma: 3 }, optimizerInBackward: true })).toThrow(
      'Trainer: spike cannot be had with optimizerInBackward, which updates before the norm is known',
    )
  })
})

it('N18: parameters that are not finite never take the place of a healthy checkpoint', async () => {
  const before = memory().tensors
  const it = trainerOf({ checkpoint: { dir, every: 2, keep: 1 } })
  const param = it.model.parameters().at(-1) ?? expect.fail('no parameter')
  const steps = async () => {
    for await (const { step } of it.run())
      if (step === 3) native.write(param.tensor.handle, new Uint8Array(param.tensor.bytes).fill(0xff))
  }
  // step 4 has gradients that are not finite and is skipped until maxSkips
  await expect(steps()).rejects.toThrow(/the gradient was not finite in 10 steps in a row/)
  expect(readdirSync(dir)).toEqual(['step-00000002'])
  // the same where the parameters break by the update itself
  it.optimizer.steps = 4
  it.skipsInARow = 0
  const loss = it.model.loss.bind(it.model)
  it.model.loss = (...args) => {
    it.stop()
    return loss(...args)
  }
  const error = await all(it.run()).catch((caught: CoatError) => caught)
  expect(error).toMatchObject({ code: 'diverged', argument: param.name })
  expect((error as CoatError).message).toContain('parameters are not finite after step 4, which is not saved')
  expect(readdirSync(dir)).toEqual(['step-00000002'])
  drop(it)
  expect(memory().tensors).toBe(before)
})

it('validates after every so many steps and the last, and tells callbacks in order', async () => {
  const told: string[] = []
  const it = trainerOf({
    steps: 5,
    validate: { every: 2, sequences: 4 },
    checkpoint: { dir, every: 3 },
    callbacks: {
      step: ({ step, validation }) => void told.push(`step ${step}${validation === undefined ? '' : ' validated'}`),
      saved: async (folder, step) => void told.push(`saved ${step} ${folder.slice(dir.length + 1)}`),
    },
  })
  const list = await all(it.run())
  expect(list.map(({ validation }) => validation !== undefined)).toEqual([false, true, false, true, true])
  expect(list[4]?.validation).toBe(await it.validate(4))
  expect(told).toEqual([
    'step 1',
    'step 2 validated',
    'step 3',
    'saved 3 step-00000003',
    'step 4 validated',
    'step 5 validated',
    'saved 5 step-00000005',
  ])
  expect(() => trainerOf({ validate: { every: 0 } })).toThrow(
    'validate.every is 0 and must be an integer of at least 1',
  )
  expect(() => trainerOf({ validate: { every: 1, sequence: 3 } as never })).toThrow(/option 'validate.sequence' is unk/)
  expect(() => trainerOf({ callbacks: { steps: () => {} } as never })).toThrow(/option 'callbacks.steps' is unknown/)
  drop(it)
})

describe('K1: an end by hand or by a signal', () => {
  const options = { accumulate: 3, steps: 8 }

  it.each([
    ['SIGINT', 1],
    ['SIGTERM', 2],
  ] as const)('%s at 10 random micro-batches: saved at the next one, and resumed exactly', async (signal, seed) => {
    const whole = trainerOf(options)
    const goal = numbers(await all(whole.run()))
    const random = new Random(seed)
    const listeners = process.listenerCount(signal)
    for (let round = 0; round < 10; round++) {
      const here = `${dir}/${round}`
      const at = 1 + Math.floor(random.uniform() * 23)
      const saved: number[] = []
      const first = trainerOf({
        ...options,
        checkpoint: { dir: here, every: 2 },
        callbacks: { saved: (_, step) => void saved.push(step) },
      })
      beforeEachMicro(first, (count) => {
        expect(count).toBeLessThanOrEqual(at + (at % 3 === 0 ? 0 : 1))
        if (count === at) process.kill(process.pid, signal)
      })
      const seen = numbers(await all(first.run({ signals: ['SIGINT', 'SIGTERM'] })))
      // a step whose last micro-batch was under way is done, others are dropped
      const done = Math.floor(at / 3)
      expect(seen).toEqual(goal.slice(0, done))
      expect(first.stopped).toBe(done === 8 ? null : signal)
      expect(new Set(saved).size).toBe(saved.length)
      expect(saved.at(-1)).toBe(done)
      expect(process.listenerCount(signal)).toBe(listeners)
      const second = trainerOf(options, 2)
      expect((await second.resume(here)).step).toBe(done)
      expect(second.options.data.state?.()).toEqual(first.options.data.state?.())
      expect(numbers(await all(second.run()))).toEqual(goal.slice(done))
      drop(first, second)
    }
    drop(whole)
  })

  it('stop() ends a run, and the next run() goes on', async () => {
    const whole = trainerOf(options)
    const goal = numbers(await all(whole.run()))
    const it = trainerOf(options)
    let before = 0
    beforeEachMicro(it, (count) => {
      if (count === 4) before = memory().tensors
      if (count === 8) it.stop()
    })
    const first = numbers(await all(it.run()))
    expect(first).toEqual(goal.slice(0, 2))
    expect(it.stopped).toBe('stop')
    // but ids and targets of the fourth
    expect(memory().tensors).toBe(before - 2)
    expect([...first, ...numbers(await all(it.run()))]).toEqual(goal)
    expect(it.stopped).toBe(null)
    drop(whole, it)
  })
})

describe('K2: the event loop and a step', () => {
  it('of two steps at once one is refused, and so are checkpoints of a step half done', async () => {
    const it = trainerOf({ checkpoint: { dir, every: 1 } })
    const alone = trainerOf()
    const goal = [await alone.step(), await alone.step()]
    const first = it.step()
    const refused = [it.step(), all(it.run()), saveCheckpoint(it, dir), it.resume(dir)]
    const reasons = (await Promise.allSettled(refused)).map((one) => String((one as PromiseRejectedResult).reason))
    for (const [i, op] of ['training', 'training', 'saveCheckpoint', 'resume'].entries())
      expect(reasons[i]).toContain(`${op}: a step is running; wait for it`)
    expect(readdirSync(dir)).toEqual([])
    expect(numbers([await first, await it.step()])).toEqual(numbers(goal))
    expect(await bytesOf(it)).toEqual(await bytesOf(alone))
    drop(it, alone)
  })

  it('a timer of 10 ms fires between any two micro-batches that take longer', async () => {
    const it = trainerOf({ accumulate: 60, batch: 1 })
    let fired = 0
    let seen = 0
    const timer = setInterval(() => {
      fired += 1
    }, 10)
    beforeEachMicro(it, (count) => {
      // timers come after immediates in a turn of the loop: the second micro-batch may come before the first turn
      if (count > 2) expect(fired).toBeGreaterThan(seen)
      seen = fired
      // work that is long enough for the timer to be due, however fast the machine
      const end = performance.now() + 12
      while (performance.now() < end);
    })
    await it.step()
    clearInterval(timer)
    expect(seen).toBeGreaterThanOrEqual(50)
    drop(it)
  })
})

describe('accumulation', () => {
  const micros = data()
  /** Four micro-batches of one sequence each; `without` has no targets. */
  const dataOf = (without?: number): Dataset => ({
    sequence: 16,
    batch: (index): Batch => {
      const batch = micros.batch(index % 4, 1)
      if (index % 4 === without) batch.targets.fill(-100)
      return batch
    },
    validation: () => [],
  })
  /** Sums of gradients of a step, by parameter. */
  async function gradients(dataset: Dataset, accumulate: number): Promise<number[][]> {
    const model = new LlamaForCausalLM(config, { recipe: 'fp32', seed: 1 })
    const it = new Trainer(model, { data: dataset, batch: 1, accumulate, steps: 1 })
    const { optimizer } = it
    const step = optimizer.step.bind(optimizer)
    const reads: Promise<ArrayLike<number>>[] = []
    optimizer.step = (...args) => {
      for (const { grad } of optimizer.params) reads.push((grad as NonNullable<typeof grad>).read())
      step(...args)
    }
    await it.step()
    const list = (await Promise.all(reads)).map((values) => Array.from(values))
    drop(it)
    return list
  }

  it('T5: every micro-batch counts, and the sum is that of all', async () => {
    const whole = await gradients(dataOf(), 4)
    const counts = 64
    const sums = whole.map((values) => values.map(() => 0))
    for (const only of [0, 1, 2, 3]) {
      const without = await gradients(dataOf(only), 4)
      expect(without).not.toEqual(whole)
      const one: Dataset = { ...dataOf(), batch: () => micros.batch(only, 1) }
      const alone = await gradients(one, 1)
      alone.forEach((values, p) => {
        values.forEach((x, i) => {
          ;(sums[p] as number[])[i] = (sums[p]?.[i] as number) + (x * 16) / counts
        })
      })
    }
    for (const [p, values] of whole.entries()) {
      const largest = Math.max(...values.map(Math.abs))
      for (const [i, x] of values.entries())
        expect(Math.abs(x - (sums[p]?.[i] as number))).toBeLessThan(1e-6 * largest + 1e-9)
    }
  })
})

it.each([false, true])(
  'T6: weights that changed in any way are quantized anew; kept for a step: %s',
  async (cacheWeights) => {
    // also between the micro-batches of a step, whose weights are those before it
    const between: Promise<number>[] = []
    let forwards = 0
    const phase = (part: Phase) => {
      if (part === 'forward' && ++forwards % 2 === 0) between.push(it.validate(2))
    }
    const it = trainerOf({ steps: 3, validate: { every: 1, sequences: 2 }, accumulate: 2, cacheWeights, phase })
    const { model } = it
    const fresh = async (): Promise<number> => {
      const other = trainerOf({}, 2)
      for (const [i, param] of model.parameters().entries())
        other.model.parameters()[i]?.write((await param.tensor.read()) as Float32Array)
      const loss = await other.validate(2)
      drop(other)
      return loss
    }
    const goals = [await fresh()]
    for await (const { validation } of it.run()) {
      goals.push(await fresh())
      expect([validation, await it.validate(2)]).toEqual([goals.at(-1), goals.at(-1)])
    }
    expect(new Set(goals).size).toBe(4)
    expect(await Promise.all(between)).toEqual(goals.slice(0, 3))
    const [first] = model.parameters('*o_proj*')
    first?.write(new Float32Array(first.tensor.numel).fill(0.01))
    expect(await it.validate(2)).toBe(await fresh())
    const loaded = trainerOf({ cacheWeights }, 3)
    const before = await loaded.validate(2)
    await loaded.resume(await saveCheckpoint(it, dir), { allow: ['accumulate'] })
    expect(await loaded.validate(2)).not.toBe(before)
    expect(await loaded.validate(2)).toBe(await fresh())
    drop(it, loaded)
  },
)

describe('another batch size after a resume', () => {
  it('goes on at the same place in the data, or is refused', async () => {
    const first = trainerOf({ batch: 2, accumulate: 2, checkpoint: { dir, every: 3 } })
    for await (const { step } of first.run()) if (step === 3) break
    expect(first.batches).toBe(6)
    const wide = trainerOf({ batch: 4 }, 2)
    const { warnings } = await wide.resume(dir, { allow: ['batch', 'accumulate'] })
    expect(warnings).toContain('batch is 2 in the checkpoint and 4 here')
    expect(wide.batches).toBe(3)
    const odd = trainerOf({ batch: 5 }, 2)
    await expect(odd.resume(dir, { allow: ['batch', 'accumulate'] })).rejects.toThrow(
      'resume: batch is 5 and must divide the 12 sequences that were taken in batches of 2',
    )
    drop(first, wide, odd)
  })
})
