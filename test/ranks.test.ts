// Ranks of one process: losses and gradients by the tokens of all, states in parts, checkpoints that fit another number.
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { beforeEach, describe, expect, it } from 'vitest'
import {
  ByteTokenizer,
  type CoatError,
  constant,
  type Dataset,
  type DeviceName,
  LlamaForCausalLM,
  localRanks,
  memory,
  type Ranks,
  type Recipe,
  recipes,
  type StepMetrics,
  saveCheckpoint,
  sgd,
  Tensor,
  TextDataset,
  TokenDataset,
  type TrainableModel,
  Trainer,
  type TrainerOptions,
  writeTokens,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { Bigram, listed, logitOf } from './bigram.ts'
import { eachInFolder } from './folders.ts'
import { devices, present } from './harness.ts'
import { sentence, smallLlama } from './values.ts'

let dir = ''
let tokens = ''
eachInFolder((folder) => {
  dir = join(folder, 'checkpoints')
  tokens = join(folder, 'tokens.bin')
})
beforeEach(async () => {
  mkdirSync(dir)
  await writeTokens(tokens, new ByteTokenizer().encode(sentence.repeat(40)), { vocabulary: 256 })
})

/** One trainer with a model of its own a rank. */
async function group(
  count: number,
  make: (ranks: Ranks) => Promise<{ model: TrainableModel } & Partial<TrainerOptions> & { data: Dataset }>,
): Promise<Trainer[]> {
  const trainers: Trainer[] = []
  for (const ranks of localRanks(count)) {
    const { model, ...options } = await make(ranks)
    trainers.push(new Trainer(model, { batch: 1, steps: 8, schedule: constant(), ...options, ranks }))
  }
  return trainers
}
/** Llamas that take four sequences a step together. */
const llamas = (
  count: number,
  recipe: Recipe = recipes.coat,
  options: Partial<TrainerOptions> & { seed?: number; device?: DeviceName } = {},
) => {
  const { seed = 1, device = 'cpu', ...rest } = options
  return group(count, async ({ rank }) => ({
    model: new LlamaForCausalLM(smallLlama, { recipe, seed, device }),
    data: await TokenDataset.open(tokens, { sequence: 16, seed: 3, rank, world: count }),
    batch: 4 / count,
    optimizer: { lr: 0.01 },
    ...rest,
  }))
}
function drop(...trainers: Trainer[]): void {
  for (const { model, options, ...rest } of trainers) {
    ;(options.data as TokenDataset).dispose?.()
    rest.optimizer.dispose()
    ;(model as LlamaForCausalLM).dispose()
  }
}
const steps = (trainers: Trainer[]) => Promise.all(trainers.map((trainer) => trainer.step()))
const text = (bytes: Uint8Array) => Buffer.from(bytes).toString('base64')
const parametersOf = ({ model }: Trainer) =>
  Promise.all(model.parameters().map(async ({ tensor }) => text(await tensor.readBytes())))

/** Bytes and values of all states, wherever they are, by the names that checkpoints have. */
async function statesOf(trainers: Trainer[]): Promise<Map<string, { bytes: string; values: number[] }>> {
  const found: [string, { bytes: string; values: number[] }][] = []
  for (const { optimizer } of trainers)
    for (const param of optimizer.owned)
      for (const [what, tensor] of Object.entries(optimizer.stateOf(param)) as [string, Tensor | null][])
        if (tensor)
          found.push([
            `${param.name}.${what}`,
            { bytes: text(await tensor.readBytes()), values: [...((await tensor.read()) as Float32Array)] },
          ])
  return new Map(found.sort(([a], [b]) => (a < b ? -1 : 1)))
}

describe.each(devices)('on %s', (device) => {
  const test = it.skipIf(!present(device))

  test('T2: 1 token of loss 4 on rank 0 and 3 of mean 1 on rank 1 have 1.75, and the gradient of one batch', async () => {
    const rows = [
      [0, logitOf(4)],
      [0, logitOf(1)],
    ]
    const one = { ids: [0, 0, 0], targets: [0, -100, -100] }
    const three = { ids: [1, 1, 1], targets: [0, 0, 0] }
    const options = { clip: 0, optimizer: sgd({ lr: 1, momentum: 0 }) }
    const trainers = await group(2, async ({ rank }) => ({
      model: new Bigram(rows, { device }),
      data: listed(rank === 0 ? one : three),
      ...options,
    }))
    const alone = new Trainer(new Bigram(rows, { device }), {
      ...options,
      data: listed(one, three),
      ...{ batch: 1, accumulate: 2, steps: 1 },
    })
    const goal = await alone.step()
    for (const { loss, tokens: counted, gradNorm } of await steps(trainers)) {
      expect(counted).toBe(4)
      expect(loss).toBeCloseTo(1.75, 6)
      expect(Math.abs(gradNorm - goal.gradNorm)).toBeLessThan(1e-6)
    }
    const moved = await Promise.all(
      [...trainers, alone].map(async ({ model }) => (await (model as Bigram).table.tensor.read()) as Float32Array),
    )
    const [p, q] = [Math.exp(-4), Math.exp(-1)]
    const gradient = [(p - 1) / 4, (1 - p) / 4, (3 * (q - 1)) / 4, (3 * (1 - q)) / 4]
    for (const table of moved)
      for (const [i, before] of rows.flat().entries())
        expect(Math.abs(before - (table[i] as number) - (gradient[i] as number))).toBeLessThan(1e-6)
    for (const trainer of [...trainers, alone]) {
      trainer.dispose()
      ;(trainer.model as Bigram).dispose()
    }
  })

  test('a rank without any token counts for nothing', async () => {
    const rows = [[0, logitOf(4)]]
    const trainers = await group(3, async ({ rank }) => ({
      model: new Bigram(rows, { device }),
      data: listed({ ids: [0], targets: [rank === 1 ? 0 : -100] }),
    }))
    for (const { loss, tokens: counted } of await steps(trainers)) {
      expect(counted).toBe(1)
      expect(loss).toBeCloseTo(4, 6)
    }
    for (const trainer of trainers) {
      trainer.dispose()
      ;(trainer.model as Bigram).dispose()
    }
  })

  test.each(['fp32', 'bf16', 'coat', 'fp8-lm-o3'] as const)(
    '%s: ranks have the same parameters after every step, and lose as one does',
    async (recipe) => {
      const before = memory().tensors
      const [one, two, three] = [
        await llamas(1, recipes[recipe], { device }),
        await llamas(2, recipes[recipe], { device }),
        await llamas(4, recipes[recipe], { device }),
      ]
      for (let i = 0; i < 4; i++) {
        const [[goal], ...others] = [await steps(one), await steps(two), await steps(three)]
        for (const list of others) {
          expect(new Set(list.map(({ loss, gradNorm }) => `${loss} ${gradNorm}`)).size).toBe(1)
          const [{ loss }] = list as [StepMetrics]
          expect(Math.abs(loss / (goal as StepMetrics).loss - 1)).toBeLessThan(recipe === 'fp32' ? 1e-5 : 0.02)
        }
      }
      for (const trainers of [two, three])
        expect(new Set((await Promise.all(trainers.map(parametersOf))).map(String)).size).toBe(1)
      // whole tensors, each on one rank
      const names = [...(await statesOf(one)).keys()]
      for (const trainers of [two, three]) expect([...(await statesOf(trainers)).keys()]).toEqual(names)
      const bytes = two.map(({ optimizer }) => optimizer.stateBytes)
      const [all] = one.map(({ optimizer }) => optimizer.stateBytes)
      expect((bytes[0] as number) + (bytes[1] as number)).toBe(all)
      expect(Math.max(...bytes)).toBeLessThan(0.6 * (all as number))
      drop(...one, ...two, ...three)
      expect(memory().tensors).toBe(before)
    },
  )

  describe.each(['f32', 'bf16', 'e4m3/t'] as const)('gradients that travel in %s', (communicate) => {
    test('are the sums of those that ranks had, within what the format rounds', async () => {
      const had: Tensor[][] = [[], []]
      const got: Tensor[][] = [[], []]
      const copies = (tensors: readonly (Tensor | null)[]) =>
        tensors.map((x) => Tensor.own(native.convert((x as Tensor).handle, null, 'f32')).keep())
      const trainers = await llamas(2, recipes.fp32, { device, communicate })
      for (const [rank, trainer] of trainers.entries()) {
        const { add } = trainer.ranks
        trainer.options.phase = (part) => {
          if (part === 'update') had[rank] = copies(trainer.optimizer.params.map(({ grad }) => grad))
        }
        trainer.ranks.add = async (tensors, scales) => {
          await add.call(trainer.ranks, tensors, scales)
          got[rank] = copies(tensors)
        }
      }
      await steps(trainers)
      const values = async (tensors: Tensor[] = []) =>
        Promise.all(tensors.map(async (tensor) => (await tensor.read()) as Float32Array))
      const [[a, b], [sums, same]] = [
        [await values(had[0]), await values(had[1])],
        [await values(got[0]), await values(got[1])],
      ]
      expect(sums).toEqual(same)
      expect(sums).toHaveLength(trainers[0]?.optimizer.params.length as number)
      for (const [i, { name, tensor }] of (trainers[0] as Trainer).optimizer.params.entries()) {
        const [left, right, sum] = [a[i], b[i], sums[i]] as [Float32Array, Float32Array, Float32Array]
        const largest = [...left, ...right].reduce((most, x) => Math.max(most, Math.abs(x)), 0)
        expect(largest, name).toBeGreaterThan(0)
        const relative = { f32: 0, bf16: 2 ** -8, 'e4m3/t': tensor.shape.length === 2 ? 2 ** -4 : 0 }[communicate]
        // half of the smallest code, three times, where 448 is no less than half of the largest
        const least = communicate === 'e4m3/t' && relative > 0 ? (1.5 * 2 ** -9 * largest) / 224 : 0
        let off = 0
        for (const [k, x] of left.entries()) {
          const y = right[k] as number
          const exact = x + y
          if (relative === 0) off += Number(sum[k] !== Math.fround(exact))
          else if (communicate === 'bf16' || Math.abs(exact) * 1.07 < largest)
            off += Number(
              Math.abs((sum[k] as number) - exact) >
                relative * (Math.abs(x) + Math.abs(y) + 1.1 * Math.abs(exact)) + least,
            )
        }
        expect(off, name).toBe(0)
      }
      for (const tensor of [...had, ...got].flat()) tensor.dispose()
      drop(...trainers)
    })

    test.each(['fp32', 'bf16', 'collage-plus', 'adamw8bit', 'coat', 'fp8-lm-o3'] as const)(
      '%s: ranks have the same parameters, and lose as one does',
      async (recipe) => {
        const [one, two] = [
          await llamas(1, recipes[recipe], { device }),
          await llamas(2, recipes[recipe], { device, communicate }),
        ]
        for (let i = 0; i < 4; i++) {
          const [[goal], list] = [await steps(one), await steps(two)]
          expect(new Set(list.map(({ loss, gradNorm, infs }) => `${loss} ${gradNorm} ${infs}`)).size).toBe(1)
          expect(Math.abs((list[0] as StepMetrics).loss / (goal as StepMetrics).loss - 1)).toBeLessThan(0.02)
        }
        const [first, second] = await Promise.all(two.map(parametersOf))
        expect(first).toEqual(second)
        expect(memory().live.grad).toBe(0)
        drop(...one, ...two)
      },
    )

    test.each([Number.NaN, Number.POSITIVE_INFINITY])('%d on one rank skips the step of all', async (value) => {
      const trainers = await llamas(2, recipes.fp32, { device, communicate, lossScale: { initial: 4 } })
      await steps(trainers)
      const before = [await parametersOf(trainers[0] as Trainer), await statesOf(trainers)]
      const param = trainers[1]?.model.parameters('*down_proj*').at(-1) ?? expect.fail('no parameter')
      const accumulate = param.accumulate.bind(param)
      param.accumulate = (gradient: Tensor) => {
        accumulate(gradient)
        native.write((param.grad as Tensor).handle, new Float32Array(param.tensor.numel).fill(value))
      }
      for (const { skipped, step } of await steps(trainers)) expect([skipped, step]).toEqual([true, 1])
      for (const trainer of trainers) expect(await parametersOf(trainer)).toEqual(before[0])
      expect(await statesOf(trainers)).toEqual(before[1])
      param.accumulate = accumulate
      for (const { skipped, step, lossScale } of await steps(trainers))
        expect([skipped, step, lossScale]).toEqual([false, 2, 2])
      drop(...trainers)
    })
  })

  test('f32 is what is without a word for it, to the bit', async () => {
    for (const recipe of ['fp32', 'coat', 'fp8-lm-o3'] as const) {
      const [plain, named] = [
        await llamas(2, recipes[recipe], { device }),
        await llamas(2, recipes[recipe], { device, communicate: 'f32' }),
      ]
      for (let i = 0; i < 3; i++) await Promise.all([steps(plain), steps(named)])
      expect(await parametersOf(named[0] as Trainer)).toEqual(await parametersOf(plain[0] as Trainer))
      expect(await statesOf(named)).toEqual(await statesOf(plain))
      drop(...plain, ...named)
    }
  })

  test.each([
    'fp32',
    'bf16',
    'bf16-kahan',
    'collage-plus',
    'coat',
    'bnb-adam8bit',
    'deepseek-v3',
    'fp8-lm-o3',
  ] as const)('%s: states in equal parts of all tensors train to the same bits as whole tensors', async (recipe) => {
    const before = memory().tensors
    const [whole, flat] = [
      await llamas(3, recipes[recipe], { device, batch: 1 }),
      await llamas(3, recipes[recipe], { device, batch: 1, partition: 'flat' }),
    ]
    for (let i = 0; i < 3; i++) {
      const of = async (trainers: Trainer[]) => (await steps(trainers)).map(({ loss, gradNorm }) => [loss, gradNorm])
      expect(await of(flat)).toEqual(await of(whole))
    }
    for (const trainer of flat) expect(await parametersOf(trainer)).toEqual(await parametersOf(whole[0] as Trainer))
    const bytes = (trainers: Trainer[]) => trainers.map(({ optimizer }) => optimizer.stateBytes)
    const sum = (list: number[]) => list.reduce((a, b) => a + b, 0)
    // norms and short ends of runs have a few bytes more where they are cut otherwise
    expect(Math.abs(sum(bytes(flat)) / sum(bytes(whole)) - 1)).toBeLessThan(0.01)
    const cut = flat[0]?.optimizer.pieces.filter(({ rows }) => rows) ?? []
    if (recipe === 'fp8-lm-o3' || recipe === 'collage-plus') expect(cut).toEqual([])
    else {
      expect(cut.length).toBeGreaterThanOrEqual(3)
      expect(Math.max(...bytes(flat)) / Math.min(...bytes(flat))).toBeLessThan(1.1)
      for (const { optimizer } of flat)
        expect(optimizer.owned).toEqual(optimizer.params.filter((param) => optimizer.owned.includes(param)))
    }
    drop(...whole, ...flat)
    expect(memory().tensors).toBe(before)
  })

  test('states in equal parts are saved by their rows, and refused by other parts', async () => {
    const flat = () => llamas(2, recipes.coat, { device, partition: 'flat' })
    const two = await flat()
    await steps(two)
    await Promise.all(two.map((trainer) => saveCheckpoint(trainer, dir)))
    const names = two[0]?.optimizer.pieces.filter(({ rows }) => rows).map(({ name }) => name) ?? []
    expect(names.length).toBeGreaterThan(0)
    for (const name of names) expect(name).toMatch(/\.weight\[\d+:\d+\]$/)
    const goal = [await steps(two), await steps(two)].map(([one]) => one?.loss)
    const again = await flat()
    await Promise.all(again.map((trainer) => trainer.resume(dir)))
    expect([await steps(again), await steps(again)].map(([one]) => one?.loss)).toEqual(goal)
    expect(await statesOf(again)).toEqual(await statesOf(two))
    const whole = await llamas(2, recipes.coat, { device })
    await expect(whole[0]?.resume(dir)).rejects.toThrow(/tensor '.*' is .* here, and must be equal/)
    const four = await llamas(4, recipes.coat, { device, partition: 'flat' })
    await expect(four[0]?.resume(dir, { allow: ['ranks', 'batch'] })).rejects.toThrow(
      /tensor '.*' is .* here, and must/,
    )
    drop(...two, ...again, ...whole, ...four)
  })

  test('mu of fp8-lm-auto-mu is that of ranks: the same on each, and a checkpoint has it', async () => {
    const recipe = recipes['fp8-lm-auto-mu']
    const whole = await llamas(2, recipe, { device, accumulate: 2 })
    const muOf = ({ exchange }: Trainer) => exchange?.state() ?? expect.fail()
    const first = muOf(whole[0] as Trainer)
    expect(new Set(Object.values(first))).toEqual(new Set([1 / Math.sqrt(2)]))
    const losses: number[] = []
    for (let i = 0; i < 4; i++) {
      if (i === 2) await Promise.all(whole.map((trainer) => saveCheckpoint(trainer, dir)))
      losses.push((await steps(whole))[0]?.loss as number)
    }
    const [a, b] = whole.map(muOf)
    expect(a).toEqual(b)
    for (const [name, value] of Object.entries(a ?? {})) expect(value, name).not.toBe(first[name])
    const again = await llamas(2, recipe, { device, accumulate: 2, seed: 9 })
    await Promise.all(again.map((trainer) => trainer.resume(dir)))
    expect([(await steps(again))[0]?.loss, (await steps(again))[0]?.loss]).toEqual(losses.slice(2))
    expect(again.map(muOf)).toEqual([a, a])
    const other = await llamas(2, recipe, { device, accumulate: 2, mu: 'none' })
    await expect(other[0]?.resume(dir)).rejects.toThrow(/mu.reading is "relative" in the checkpoint and absent here/)
    const plain = await llamas(2, recipe, { device, accumulate: 2, mu: 'none', communicate: 'bf16' })
    await expect(plain[0]?.resume(dir)).rejects.toThrow(/communicate is "e4m3\/t" in the checkpoint and "bf16" here/)
    drop(...whole, ...again, ...other, ...plain)
  })

  test('N6: a NaN in the gradient of one rank is skipped by all', async () => {
    const trainers = await llamas(2, recipes.coat, { device })
    await steps(trainers)
    const before = [await parametersOf(trainers[0] as Trainer), await statesOf(trainers)]
    const param = trainers[1]?.model.parameters().at(-1) ?? expect.fail('no parameter')
    const accumulate = param.accumulate.bind(param)
    param.accumulate = (gradient: Tensor) => {
      accumulate(gradient)
      native.write((param.grad as Tensor).handle, new Uint8Array(param.grad?.bytes ?? 0).fill(0xff))
    }
    for (const { skipped, step } of await steps(trainers)) expect([skipped, step]).toEqual([true, 1])
    for (const trainer of trainers) expect(await parametersOf(trainer)).toEqual(before[0])
    expect(await statesOf(trainers)).toEqual(before[1])
    param.accumulate = accumulate
    for (const { skipped, step } of await steps(trainers)) expect([skipped, step]).toEqual([false, 2])
    drop(...trainers)
  })

  const moments: Record<string, Partial<Recipe>> = {
    'f32 with a master': recipes.bf16,
    'with range expansion': {},
    'without, in runs of 64': { m: 'e4m3/g64', v: 'e4m3/g64' },
    'in runs of 256': { m: 'd8/g256', v: 'u8/g256' },
    '4 bits': { m: 'd4/g128', v: 'u4/g128' },
    'a scale a tensor': { m: 'e4m3/t', v: 'f16/t' },
    'two values': { m: 'bf16', v: 'bf16x2' },
  }
  test.each(Object.entries(moments))(
    'C13: %s: saved by 2 ranks, the states of 1 and of 4 are the same to the bit',
    async (_, axes) => {
      const recipe = { ...recipes.coat, ...axes } as Recipe
      const optimizer = { lr: 0.01, betas: [0.9, 0.95] as [number, number], allowUnsafe: true }
      const two = await llamas(2, recipe, { optimizer, device })
      await steps(two)
      await steps(two)
      const goal = await statesOf(two)
      const folders = await Promise.all(two.map((trainer) => saveCheckpoint(trainer, dir)))
      expect(new Set(folders).size).toBe(1)
      expect(readdirSync(dir)).toEqual(['step-00000002'])
      expect(readdirSync(folders[0] as string).sort()).toEqual([
        ...['model.safetensors', 'optimizer-00001-of-00002.safetensors', 'optimizer-00002-of-00002.safetensors'],
        'trainer.json',
      ])
      const next = await steps(two)
      for (const count of [1, 2, 4]) {
        const others = await llamas(count, recipe, { optimizer, device, seed: 9 })
        const allow = count === 2 ? [] : ['ranks', 'batch']
        for (const { step, warnings } of await Promise.all(others.map((trainer) => trainer.resume(dir, { allow }))))
          expect([step, warnings.length]).toEqual([2, allow.length])
        expect(await statesOf(others)).toEqual(goal)
        for (const [i, { loss, gradNorm }] of (await steps(others)).entries())
          if (count === 2) expect([loss, gradNorm]).toEqual([next[i]?.loss, next[i]?.gradNorm])
          else expect(Math.abs(loss / (next[0]?.loss as number) - 1)).toBeLessThan(0.01)
        drop(...others)
      }
      drop(...two)
    },
  )
})

describe('checkpoints', () => {
  it('C12: another number of ranks is refused by name, with both values, and a warning where it is allowed', async () => {
    const two = await llamas(2)
    await steps(two)
    await Promise.all(two.map((trainer) => saveCheckpoint(trainer, dir)))
    const [one] = (await llamas(1)) as [Trainer]
    await expect(one.resume(dir)).rejects.toThrow(
      'resume: batch is 2 in the checkpoint and 4 here; ranks is 2 in the checkpoint and absent here',
    )
    const four = await llamas(4)
    const warned = await Promise.all(four.map((trainer) => trainer.resume(dir, { allow: ['ranks', 'batch'] })))
    for (const { warnings } of warned)
      expect(warnings).toEqual(['batch is 2 in the checkpoint and 1 here', 'ranks is 2 in the checkpoint and 4 here'])
    expect(four.map(({ batches }) => batches)).toEqual([1, 1, 1, 1])
    // places in the data are those of sequences
    const odd = await llamas(4, recipes.coat, { batch: 3 })
    await expect(odd[0]?.resume(dir, { allow: ['ranks', 'batch'] })).rejects.toThrow(
      'resume: batch is 3 on each of 4 ranks and must divide the 4 sequences that were taken in batches of 2 on each of 2 ranks',
    )
    drop(...two, one, ...four, ...odd)
  })

  it('without the states of one rank, or with a tensor in two of them, they are passed over', async () => {
    const two = await llamas(2)
    await Promise.all(two.map((trainer) => saveCheckpoint(trainer, dir)))
    await steps(two)
    const [newest = ''] = await Promise.all(two.map((trainer) => saveCheckpoint(trainer, dir)))
    const [first, second] = [1, 2].map((n) => join(newest, `optimizer-0000${n}-of-00002.safetensors`)) as [
      string,
      string,
    ]
    const whole = readFileSync(second)
    cpSync(first, second)
    const resumed = async () => {
      const others = await llamas(2)
      const all = await Promise.all(others.map((trainer) => trainer.resume(dir)))
      drop(...others)
      return all.map(({ step, warnings }) => [step, warnings[0]])
    }
    for (const [step, warning] of await resumed()) {
      expect(step).toBe(0)
      expect(warning).toMatch(/passed over: resume: tensor '.*' lies in .*00001-of.* and also in .*00002-of/)
    }
    rmSync(second)
    for (const [step, warning] of await resumed()) {
      expect(step).toBe(0)
      expect(warning).toMatch(/is not complete and was passed over: .*optimizer-00002-of-00002.safetensors.*ENOENT/)
    }
    writeFileSync(second, whole)
    expect((await resumed()).map(([step]) => step)).toEqual([1, 1])
    const facts = join(newest, 'trainer.json')
    writeFileSync(facts, readFileSync(facts, 'utf8').replace('"ranks": 2', '"ranks": 1e9'))
    for (const [, warning] of await resumed())
      expect(warning).toMatch(/is of 1000000000 ranks, which must be an integer/)
    drop(...two)
  })

  it('that one rank cannot write are written by none, and all are told', async () => {
    const two = await llamas(2)
    writeFileSync(join(dir, 'taken'), '')
    const errors = await Promise.all(
      two.map((trainer) => saveCheckpoint(trainer, join(dir, 'taken')).catch((caught: CoatError) => caught.message)),
    )
    for (const message of errors)
      expect(message).toMatch(/saveCheckpoint: .*taken cannot be written: .*E(NOTDIR|EXIST)/)
    expect(readdirSync(dir)).toEqual(['taken'])
    drop(...two)
  })

  it('G3: a stop asked of one rank ends all at the same step, with one checkpoint', async () => {
    const goal = await llamas(2, recipes.coat, { accumulate: 2, steps: 6 })
    const losses = []
    for (let i = 0; i < 6; i++) losses.push((await steps(goal))[0]?.loss)
    const trainers = await llamas(2, recipes.coat, { accumulate: 2, steps: 6, checkpoint: { dir, every: 100 } })
    const run = async (trainer: Trainer) => {
      const list: number[] = []
      for await (const { step, loss } of trainer.run()) {
        list.push(loss)
        if (step === 3 && trainer === trainers[1]) trainer.stop()
      }
      return list
    }
    expect(await Promise.all(trainers.map(run))).toEqual([losses.slice(0, 3), losses.slice(0, 3)])
    expect(trainers.map(({ stopped }) => stopped)).toEqual(['stop', 'stop'])
    expect(readdirSync(dir)).toEqual(['step-00000003'])
    // and they go on from there
    expect(await Promise.all(trainers.map(run))).toEqual([losses.slice(3), losses.slice(3)])
    drop(...goal, ...trainers)
  })
})

describe('ranks', () => {
  it('add tensors in f32 and round once', async () => {
    const ranks = localRanks(3)
    // bf16 has 1 and 1 + 2^-7: one half of a step rounds to 1, and a quarter more does so again, but not both together
    const given = [1, 2 ** -8, 2 ** -9].map((value) => Tensor.from([value, -value], [2], { format: 'bf16' }))
    await Promise.all(ranks.map((one, i) => one.add([given[i] as Tensor])))
    for (const tensor of given) {
      expect([...(await tensor.read())]).toEqual([1 + 2 ** -7, -1 - 2 ** -7])
      tensor.dispose()
    }
    expect(await Promise.all(ranks.map((one) => one.sum(one.rank + 0.5)))).toEqual([4.5, 4.5, 4.5])
    expect(await Promise.all(ranks.map((one) => one.tell(`rank ${one.rank}`)))).toEqual(new Array(3).fill('rank 0'))
  })

  it('are told when calls differ, lists differ, or one leaves', async () => {
    const [a, b] = localRanks(2) as [Ranks, Ranks]
    const reasons = async (...promises: Promise<unknown>[]) =>
      (await Promise.allSettled(promises)).map((one) => (one as PromiseRejectedResult).reason.message)
    for (const message of await reasons(a.sum(1), b.tell(1)))
      expect(message).toBe('ranks: all must make the same call; rank 0 calls sum, rank 1 calls tell')
    for (const message of await reasons(a.sum(1), a.sum(1)))
      expect(message).toContain('rank 0 calls sum, rank 0 calls sum')
    using tensor = Tensor.from([1], [1])
    for (const message of await reasons(a.add([tensor]), b.add([])))
      expect(message).toBe('ranks: add: rank 1 has 0 tensors and must have 1, as rank 0')
    const waiting = a.sum(1)
    b.leave(new Error('gone'))
    expect(await reasons(waiting, a.sum(1), b.sum(1))).toEqual(new Array(3).fill('ranks: rank 1 left: gone'))
    expect(() => localRanks(0)).toThrow('localRanks: count is 0 and must be an integer of at least 1')
  })

  it('an error in the step of one ends the steps of all', async () => {
    const trainers = await group(2, async ({ rank }) => ({
      model: new LlamaForCausalLM(smallLlama, { recipe: 'fp32', seed: 1 }),
      data: listed({ ids: [rank === 1 ? 256 : 1], targets: [1] }),
    }))
    const reasons = (await Promise.allSettled(trainers.map((trainer) => trainer.step()))).map(
      (one) => (one as PromiseRejectedResult).reason.message,
    )
    expect(reasons[1]).toContain('ids[0] is 256')
    expect(reasons[0]).toMatch(/ranks: rank 1 left: training: .*ids\[0\] is 256/)
    drop(...trainers)
  })

  it('take turns in a text, and a state fits another number', () => {
    const open = (rank: number, world: number) => new TextDataset(sentence.repeat(40), { sequence: 8, rank, world })
    const [alone, one, two] = [open(0, 1), open(0, 2), open(1, 2)]
    for (let i = 0; i < 4; i++) {
      expect(one.batch(i, 3)).toEqual(alone.batch(2 * i, 3))
      expect(two.batch(i, 3)).toEqual(alone.batch(2 * i + 1, 3))
    }
    expect(two.state()).toEqual(alone.state())
    expect(() => open(2, 2)).toThrow('TextDataset: rank is 2 and must be below world, 2')
  })

  it('refuse what cannot be had of several, and data of others', async () => {
    const make = async (options: object, recipe: keyof typeof recipes = 'fp32') => {
      using model = new LlamaForCausalLM(smallLlama, { recipe, seed: 1 })
      return await group(2, async ({ rank }) => ({
        model,
        data: new TextDataset(sentence.repeat(40), { sequence: 8, rank, world: 2 }),
        ...options,
      }))
    }
    await expect(make({ data: new TextDataset(sentence.repeat(40), { sequence: 8 }) })).rejects.toThrow(
      'Trainer: data is for rank 0 of 1 and must be for rank 0 of 2, as ranks says',
    )
    await expect(make({ optimizerInBackward: true })).rejects.toThrow('optimizerInBackward updates before')
    await expect(make({ measureUpdates: 2 })).rejects.toThrow('measureUpdates is 2 and must be 0 with several ranks')
    await expect(make({ mu: 'fixed' })).rejects.toThrow(
      'mu is "fixed" and must be none where several ranks communicate in f32',
    )
    await expect(make({ communicate: 'e5m2/t' })).rejects.toThrow(
      'communicate is "e5m2/t" and must be one of f32, bf16, e4m3/t',
    )
    for (const communicate of ['bf16', 'e4m3/t'])
      await expect(make({ communicate }, 'e8m3')).rejects.toThrow(
        `communicate is "${communicate}" and must be f32 with emulated arithmetic`,
      )
    await expect(make({ partition: 'rows' })).rejects.toThrow('partition is "rows" and must be whole or flat')
    await expect(make({}, 'te-delayed')).rejects.toThrow('model has scales of steps before, which would differ')
  })

  it('the state of a parameter is asked of its owner', async () => {
    const trainers = await llamas(2)
    const [theirs] = trainers[1]?.optimizer.owned ?? []
    const same = trainers[0]?.model.parameters(theirs?.name)[0] ?? expect.fail('no such parameter')
    expect(() => trainers[0]?.optimizer.stateOf(same)).toThrow(
      `adamw: parameter '${same.name}' is updated by rank 1, which has its state`,
    )
    drop(...trainers)
  })
})
