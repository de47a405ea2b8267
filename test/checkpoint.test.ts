// Checkpoints: resume goes on bit for bit, a kill at any instant leaves one to load, and other settings are refused by name.
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { basename, join } from 'node:path'
import { afterAll, beforeEach, describe, expect, it, vi } from 'vitest'
import {
  adamw,
  CoatError,
  constant,
  cosine,
  device,
  LlamaForCausalLM,
  lion,
  loadCheckpoint,
  type ModelOptions,
  memory,
  readSafetensors,
  recipes,
  type StepMetrics,
  saveCheckpoint,
  sgd,
  TextDataset,
  Trainer,
  type TrainerOptions,
  writeSafetensors,
} from '../lib/index.ts'
import { smallLlama as config, sentence } from './values.ts'

// A process that is killed at its n-th file operation: that one, writes half-way, and all later ones do not happen. With
// `last` the later ones happen again from there on. What is written, synced and renamed is told to `log`, under its last
// name; the file `full` is opened on a device that has no space. The disk is not waited for: what a process has written
// outlives it.
const kill = vi.hoisted(() => ({
  ...{ at: Number.POSITIVE_INFINITY, last: Number.POSITIVE_INFINITY, count: 0 },
  ...{ full: '', log: [] as string[] },
}))
vi.mock('node:fs/promises', async (original) => {
  const real = await original<typeof import('node:fs/promises')>()
  const named = (path: string) => basename(path).replace(/^\.(.*)\.\d+-\d+\.(new|old)$/, '$1')
  const told = (what: string, path: string) => {
    const line = `${what} ${named(path)}`
    if (kill.log.at(-1) !== line) kill.log.push(line)
  }
  const mortal =
    <Args extends unknown[], Result>(does: (...args: Args) => Promise<Result>, half?: (...args: Args) => unknown) =>
    async (...args: Args): Promise<Result> => {
      kill.count += 1
      if (kill.count === kill.at) await half?.(...args)
      if (kill.count >= kill.at && kill.count <= kill.last) throw new Error('killed')
      return does(...args)
    }
  const open = async (path: string, flags?: string) => {
    const file = named(path) === kill.full ? await real.open('/dev/full', 'w') : await real.open(path, flags)
    const own = file.write.bind(file)
    const write = (bytes: Uint8Array, from: number, length: number) => {
      told('write', path)
      return own(bytes, from, length)
    }
    Object.assign(file, {
      write: mortal(write, (bytes, from, length) => write(bytes, from, length >> 1)),
      sync: mortal(async () => told('sync', path)),
    })
    return file
  }
  const { mkdir, rm, link } = real
  const rename: typeof real.rename = (from, to) => {
    told('rename', String(to))
    return real.rename(from, to)
  }
  const writeFile: typeof real.writeFile = (path, text, options) => {
    const { flush = false } = options as { flush?: boolean }
    told(flush ? 'write and sync' : 'write', String(path))
    return real.writeFile(path, text)
  }
  return {
    ...real,
    open: mortal(open as typeof real.open),
    mkdir: mortal(mkdir),
    rename: mortal(rename),
    rm: mortal(rm),
    link: mortal(link),
    writeFile: mortal(writeFile, (path, text) => real.writeFile(path, String(text).slice(0, 40))),
  }
})

const cuda = (() => {
  try {
    return device('cuda').kind === 'cuda'
  } catch (error) {
    if (error instanceof CoatError && error.code === 'no_cuda') return false
    throw error
  }
})()

interface Setup {
  device?: 'cpu' | 'cuda'
  recipe?: ModelOptions['recipe']
  sizes?: Partial<typeof config>
  data?: { sequence?: number; seed?: number; copies?: number }
  options?: Partial<TrainerOptions>
}

/** A trainer with a model and a data set of its own; `seed` is that of the first weights. */
function trainerOf(
  { device: where = 'cpu', recipe = 'coat', sizes, data = {}, options }: Setup = {},
  seed = 1,
): Trainer {
  const { copies = 40, ...order } = data
  const model = new LlamaForCausalLM({ ...config, ...sizes }, { recipe, seed, device: where })
  return new Trainer(model, {
    data: new TextDataset(sentence.repeat(copies), { sequence: 16, seed: 7, ...order }),
    batch: 2,
    steps: 16,
    optimizer: { lr: 0.01 },
    schedule: cosine({ warmup: 4 }),
    ...options,
  })
}

function drop(trainer: Trainer): void {
  trainer.dispose()
  ;(trainer.model as LlamaForCausalLM).dispose()
}

async function run(trainer: Trainer, until = Number.POSITIVE_INFINITY): Promise<StepMetrics[]> {
  const list: StepMetrics[] = []
  while (trainer.optimizer.steps < Math.min(until, trainer.options.steps)) list.push(await trainer.step())
  return list
}

/** Every byte of parameters and states, by name. */
async function bytesOf({ model, optimizer }: Trainer): Promise<Record<string, string>> {
  const all: Record<string, string> = {}
  for (const param of model.parameters())
    for (const [name, tensor] of Object.entries({ p: param.tensor, ...optimizer.stateOf(param) }))
      if (tensor) all[`${param.name}.${name}`] = Buffer.from(await tensor.readBytes()).toString('base64')
  return all
}

const numbers = (list: StepMetrics[]) => list.map(({ step, loss, gradNorm, lr }) => ({ step, loss, gradNorm, lr }))

const root = mkdtempSync(join(tmpdir(), 'coat-checkpoint-'))
let dir = ''
beforeEach(() => {
  Object.assign(kill, { at: Number.POSITIVE_INFINITY, last: Number.POSITIVE_INFINITY, full: '' })
  dir = mkdtempSync(join(root, 'run-'))
})
afterAll(() => rmSync(root, { recursive: true }))

describe('C1: 16 steps are 8 and 8', () => {
  const narrow = { ...recipes.bf16, master: null }
  const setups: Record<string, Setup> = {
    fp32: { recipe: 'fp32' },
    bf16: { recipe: 'bf16' },
    coat: { recipe: 'coat' },
    stochastic: { recipe: { ...narrow, rounding: 'stochastic' }, options: { optimizer: adamw({ lr: 0.01, seed: 5 }) } },
    kahan: { recipe: { ...narrow, rounding: 'kahan' } },
    'two values': { recipe: { ...recipes.coat, m: 'bf16', v: 'bf16x2' } },
    'a scale a tensor': { recipe: { ...recipes.coat, m: 'e4m3/t', v: 'f16/t' } },
    'parameters in two values': { recipe: 'collage-plus' },
    'parameters and gradients with a scale': { recipe: 'fp8-lm-o2' },
    'parameters and masters with a scale': { recipe: 'fp8-lm-o3' },
    'scales of steps before': { recipe: 'te-delayed' },
    '4 bits': { recipe: { ...recipes.coat, m: 'd4/g128', v: 'u4/g128' } },
    lion: { options: { optimizer: lion({ lr: 0.001 }), accumulate: 2 } },
    sgd: { options: { optimizer: sgd({ lr: 0.01, dampening: 0.5 }) }, sizes: { tie_word_embeddings: false } },
  }
  const all = Object.entries(setups)
  it.each(all)('%s', (_, setup) => halves(setup))
  it.skipIf(!cuda).each(all)('%s on cuda', (_, setup) => halves({ ...setup, device: 'cuda' }))

  async function halves(setup: Setup): Promise<void> {
    const before = memory().tensors
    const whole = trainerOf(setup)
    const all = numbers(await run(whole))
    const first = trainerOf(setup)
    await run(first, 8)
    await saveCheckpoint(first, dir)
    const second = trainerOf(setup, 2)
    expect(await bytesOf(second)).not.toEqual(await bytesOf(first))
    const { step, warnings } = await second.resume(dir)
    expect({ step, warnings }).toEqual({ step: 8, warnings: [] })
    expect(await bytesOf(second)).toEqual(await bytesOf(first))
    expect(second.options.data.state?.()).toEqual(first.options.data.state?.())
    expect(numbers(await run(second))).toEqual(all.slice(8))
    expect(await bytesOf(second)).toEqual(await bytesOf(whole))
    for (const trainer of [whole, first, second]) drop(trainer)
    expect(memory().tensors).toBe(before)
  }

  it('counts skipped steps, and batches that they took', async () => {
    const first = trainerOf()
    await run(first, 3)
    first.batches += 2
    first.skippedSteps = 2
    first.skipsInARow = 1
    await saveCheckpoint(first, dir)
    const second = trainerOf({}, 2)
    await second.resume(dir)
    expect([second.batches, second.skippedSteps, second.skipsInARow]).toEqual([5, 2, 1])
    expect(numbers(await run(second))).toEqual(numbers(await run(first)))
    drop(first)
    drop(second)
  })

  it('states in runs are bytes with a format; parameters have the names of Hugging Face', async () => {
    const trainer = trainerOf()
    const folder = await saveCheckpoint(trainer, dir)
    const { tensors, metadata } = await readSafetensors(join(folder, 'optimizer.safetensors'))
    const name = 'model.embed_tokens.weight.m'
    expect(metadata[name]).toBe('e4m3/x128 [1, 8192]')
    expect(tensors.get(name)?.dtype).toBe('U8')
    const weights = await readSafetensors(join(folder, 'model.safetensors'))
    expect(weights.tensors.get('model.layers.1.self_attn.k_proj.weight')?.shape).toEqual([16, 32])
    drop(trainer)
  })
})

it.each([1, 2, 4, 9])('C2: the learning rate goes on after step %d', async (at) => {
  const whole = trainerOf({ recipe: 'fp32' })
  const rates = (await run(whole)).map(({ lr }) => lr)
  const first = trainerOf({ recipe: 'fp32', options: { checkpoint: { dir, every: at } } })
  for await (const { step } of first.run()) if (step === at) break
  const second = trainerOf({ recipe: 'fp32' })
  await second.resume(dir)
  expect((await run(second)).map(({ lr }) => lr)).toEqual(rates.slice(at))
  for (const trainer of [whole, first, second]) drop(trainer)
})

describe('C3: a kill during save', () => {
  /** Saves step 1, then step `again`, killed at every file operation in turn; what is there then must load. */
  async function everywhere(again: number): Promise<Set<number>> {
    const one = trainerOf({ recipe: 'coat' })
    await run(one, 1)
    const two = trainerOf({ recipe: 'coat' })
    await run(two, again)
    const fresh = trainerOf({ recipe: 'coat' }, 2)
    const loaded = new Set<number>()
    for (let at = 1, alive = false; !alive; at++) {
      const here = join(dir, String(at))
      await saveCheckpoint(one, here, { keep: 1 })
      Object.assign(kill, { at, count: 0 })
      await saveCheckpoint(two, here, { keep: 1 }).catch(() => null)
      alive = kill.count < at
      kill.at = Number.POSITIVE_INFINITY
      const { step, warnings } = await loadCheckpoint(fresh, here)
      expect(warnings).toEqual([])
      expect(await bytesOf(fresh)).toEqual(await bytesOf(step === 1 ? one : two))
      loaded.add(step)
      // what is left over goes with the next save
      await saveCheckpoint(two, here, { keep: 1 })
      expect(readdirSync(here)).toHaveLength(1)
      expect(readdirSync(here)[0]).toMatch(/^step-/)
    }
    for (const trainer of [one, two, fresh]) drop(trainer)
    expect(kill.count).toBeGreaterThan(50)
    return loaded
  }
  it('leaves the one before, or has the new one', async () => {
    expect(await everywhere(2)).toEqual(new Set([1, 2]))
  })
  it('of the step that is there already', async () => {
    expect(await everywhere(1)).toEqual(new Set([1]))
  })

  it('an operation that fails leaves the one before, or has the new one, and nothing else', async () => {
    const trainer = trainerOf()
    const fresh = trainerOf({}, 2)
    for (let at = 1, failed = true; failed; at++) {
      const here = join(dir, String(at))
      trainer.optimizer.steps = 4
      await saveCheckpoint(trainer, here)
      trainer.optimizer.steps = 5
      Object.assign(kill, { at, last: at, count: 0 })
      const error = await saveCheckpoint(trainer, here).catch((caught: CoatError) => caught)
      failed = kill.count >= at
      kill.at = Number.POSITIVE_INFINITY
      if (typeof error !== 'string') expect(error).toBeInstanceOf(CoatError)
      const saved = typeof error === 'string' ? ['step-00000004', 'step-00000005'] : ['step-00000004']
      expect(readdirSync(here).sort()).toEqual(saved)
      expect(await fresh.resume(here)).toMatchObject({ step: typeof error === 'string' ? 5 : 4, warnings: [] })
    }
    drop(trainer)
    drop(fresh)
  })

  it('files, then their folder, are on the disk before the folder gets the name that counts', async () => {
    const trainer = trainerOf()
    kill.log.splice(0)
    const folder = basename(await saveCheckpoint(trainer, dir))
    const file = (name: string) => [`write ${name}`, `sync ${name}`, `rename ${name}`, `sync ${folder}`]
    expect(kill.log).toEqual([
      ...['write and sync trainer.json', ...file('model.safetensors'), ...file('optimizer.safetensors')],
      ...[`rename ${folder}`, `sync ${basename(dir)}`],
    ])
    drop(trainer)
  })

  it.each(['model.safetensors', 'optimizer.safetensors'])(
    'no space left for %s: said so, and all is as before',
    async (full) => {
      const trainer = trainerOf()
      await saveCheckpoint(trainer, dir)
      trainer.optimizer.steps = 5
      kill.full = full
      const error = await saveCheckpoint(trainer, dir).catch((caught: CoatError) => caught)
      expect(error).toBeInstanceOf(CoatError)
      expect((error as CoatError).message).toMatch(new RegExp(`^saveCheckpoint: ${dir} cannot be written: ENOSPC`))
      expect(readdirSync(dir)).toEqual(['step-00000000'])
      kill.full = ''
      await saveCheckpoint(trainer, dir)
      expect(await trainer.resume(dir)).toMatchObject({ step: 5, warnings: [] })
      drop(trainer)
    },
  )

  it('passes over what is cut or missing, and says so', async () => {
    const trainer = trainerOf()
    const fresh = trainerOf({}, 2)
    for (const file of ['trainer.json', 'model.safetensors', 'optimizer.safetensors'])
      for (const cut of [true, false]) {
        const here = join(dir, `${file}-${cut}`)
        trainer.optimizer.steps = 4
        await saveCheckpoint(trainer, here)
        trainer.optimizer.steps = 5
        const newest = join(await saveCheckpoint(trainer, here), file)
        if (cut) truncateSync(newest, readFileSync(newest).length - 3)
        else rmSync(newest)
        const { step, warnings } = await fresh.resume(here)
        expect(step).toBe(4)
        expect(warnings).toHaveLength(1)
        expect(warnings[0]).toMatch(/step-00000005 is not complete and was passed over: .*/)
      }
    drop(trainer)
    drop(fresh)
  })

  it('says so when none is left', async () => {
    const trainer = trainerOf()
    await expect(trainer.resume(dir)).rejects.toThrow(`resume: ${dir} has no complete checkpoint`)
    await expect(trainer.resume(join(dir, 'nowhere'))).rejects.toThrow('has no complete checkpoint')
    rmSync(join(await saveCheckpoint(trainer, dir), 'trainer.json'))
    await expect(trainer.resume(dir)).rejects.toThrow(/step-00000000 is not complete/)
    drop(trainer)
  })
})

describe('rotation', () => {
  it('run() saves every so many steps and the last, and keeps the newest', async () => {
    const trainer = trainerOf({ recipe: 'fp32', options: { steps: 7, checkpoint: { dir, every: 2, keep: 2 } } })
    for await (const { step } of trainer.run())
      if (step % 2 === 0) expect(existsSync(join(dir, `step-0000000${step}`))).toBe(true)
    expect(readdirSync(dir).sort()).toEqual(['step-00000006', 'step-00000007'])
    drop(trainer)
  })
  it('takes one checkpoint by its own name', async () => {
    const trainer = trainerOf({ recipe: 'fp32' })
    const first = await saveCheckpoint(trainer, dir)
    trainer.optimizer.steps = 3
    await saveCheckpoint(trainer, dir)
    expect(await trainer.resume(first)).toMatchObject({ folder: first, step: 0 })
    // a run that goes on from there must not be mistaken for the later one
    await expect(saveCheckpoint(trainer, dir)).rejects.toThrow(/step-00000003 is later than step 0/)
    drop(trainer)
  })
  it('refuses options that are none', () => {
    using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
    const data = new TextDataset(sentence.repeat(40), { sequence: 16 })
    const make = (checkpoint: object) => () =>
      new Trainer(model, { data, batch: 1, steps: 1, checkpoint: checkpoint as { dir: string; every: number } })
    expect(make({ dir, every: 0 })).toThrow('checkpoint.every is 0 and must be an integer of at least 1')
    expect(make({ dir, every: 1, keep: 0 })).toThrow('checkpoint.keep is 0 and must be an integer of at least 1')
    expect(make({ every: 1 })).toThrow('checkpoint.dir is undefined and must be the path of a folder')
    expect(make({ dir, every: 1, last: 2 })).toThrow(/option 'checkpoint.last' is unknown; the options are dir/)
  })
})

/** Saves with the usual settings and resumes with others; nothing may have changed when that is refused. */
async function refused(setup: Setup, base: Setup = {}): Promise<string> {
  const saved = trainerOf(base)
  await run(saved, 1)
  await saveCheckpoint(saved, dir)
  const other = trainerOf(setup, 2)
  const before = await bytesOf(other)
  const error = await other.resume(dir).catch((caught: CoatError) => caught)
  expect(error).toBeInstanceOf(CoatError)
  expect(await bytesOf(other)).toEqual(before)
  expect(other.optimizer.steps).toBe(0)
  drop(saved)
  drop(other)
  return (error as CoatError).message
}

describe('C11: other formats are refused by name', () => {
  it.each([
    [
      'group size',
      { ...recipes.coat, m: 'e4m3/x64', v: 'e4m3/x64' },
      'recipe.m is "e4m3/x128" in the checkpoint and "e4m3/x64" here',
    ],
    [
      'expansion',
      { ...recipes.coat, v: 'e4m3/g128' },
      'recipe.v is "e4m3/x128" in the checkpoint and "e4m3/g128" here',
    ],
    [
      'FP8 format',
      { ...recipes.coat, m: 'e5m2/x128' },
      'recipe.m is "e4m3/x128" in the checkpoint and "e5m2/x128" here',
    ],
  ] as const)('%s', async (_, recipe, text) => {
    expect(await refused({ recipe })).toContain(text)
  })
  it('and never read as each other, whatever is allowed', async () => {
    const saved = trainerOf()
    await saveCheckpoint(saved, dir)
    const other = trainerOf({ recipe: { ...recipes.coat, m: 'e4m3/x64', v: 'e4m3/x64' } })
    await expect(other.resume(dir, { allow: ['recipe'] })).rejects.toThrow(
      /tensor 'model.embed_tokens.weight.m' is e4m3\/x128 \[1, 8192\] in .* and e4m3\/x64 \[1, 8192\] here/,
    )
    drop(saved)
    drop(other)
  })
  it('tensors that one side has alone', async () => {
    const saved = trainerOf()
    const folder = await saveCheckpoint(saved, dir)
    const file = join(folder, 'optimizer.safetensors')
    const { tensors, metadata } = await readSafetensors(file)
    const [[name] = ['']] = tensors
    const loaded = await Promise.all(
      [...tensors].map(async ([key, { dtype, shape, ...source }]) => {
        const bytes = await (tensors.get(key) ?? expect.fail()).bytes()
        return [key === name ? 'extra' : key, { ...source, dtype, shape, pieces: () => [bytes] }] as const
      }),
    )
    await writeSafetensors(file, loaded, { metadata })
    await expect(saved.resume(dir)).rejects.toThrow(/tensor 'extra' is there in .* and absent here/)
    await writeSafetensors(file, loaded.slice(1), { metadata })
    await expect(saved.resume(dir)).rejects.toThrow(/is absent in .* and .* here, and must be equal/)
    drop(saved)
  })
  it('what is made again, where that changes the result', async () => {
    const recipe = { ...recipes.coat, flow: 'save' } as const
    const saved = trainerOf({ recipe })
    await saveCheckpoint(saved, dir)
    const [layer, none] = (['layer', 'none'] as const).map((recompute) =>
      trainerOf({ recipe, options: { recompute } }),
    ) as [ReturnType<typeof trainerOf>, ReturnType<typeof trainerOf>]
    expect((await layer.resume(dir)).warnings).toEqual([])
    await expect(none.resume(dir)).rejects.toThrow('remade is true in the checkpoint and false here')
    for (const trainer of [saved, layer, none]) drop(trainer)
  })
  it('the version', async () => {
    const trainer = trainerOf()
    const file = join(await saveCheckpoint(trainer, dir), 'trainer.json')
    writeFileSync(file, readFileSync(file, 'utf8').replace('"version": 1', '"version": 9'))
    await expect(trainer.resume(dir)).rejects.toThrow(/trainer.json has version 9 and must have 1/)
    drop(trainer)
  })
})

describe('C12: other settings are refused by name with both values', () => {
  const cases: [string, Setup][] = [
    ['recipe.dw is "bf16" in the checkpoint and "f32" here', { recipe: { ...recipes.coat, dw: 'f32' } }],
    ['model.intermediate_size is 80 in the checkpoint and 96 here', { sizes: { intermediate_size: 96 } }],
    ['model.num_attention_heads is 4 in the checkpoint and 2 here', { sizes: { num_attention_heads: 2 } }],
    ['optimizer.lr is 0.01 in the checkpoint and 0.02 here', { options: { optimizer: { lr: 0.02 } } }],
    ['optimizer.betas is [0.9,0.95] in', { options: { optimizer: { lr: 0.01, betas: [0.8, 0.95] } } }],
    ['optimizer.seed is 0 in the checkpoint and 3 here', { options: { optimizer: { lr: 0.01, seed: 3 } } }],
    ['optimizer.rule is "adamw" in the checkpoint and "lion" here', { options: { optimizer: lion({ lr: 0.01 }) } }],
    [
      'optimizer.parameters is [] in the checkpoint and [{"match":"*","eps":1}] here',
      { options: { optimizer: { lr: 0.01, parameters: [{ match: '*', eps: 1 }] } } },
    ],
    ['batch is 2 in the checkpoint and 3 here', { options: { batch: 3 } }],
    ['accumulate is 1 in the checkpoint and 2 here', { options: { accumulate: 2 } }],
    ['clip is 1 in the checkpoint and 0.5 here', { options: { clip: 0.5 } }],
    ['schedule.0 is 0.25 in the checkpoint and 0.2 here', { options: { schedule: cosine({ warmup: 5 }) } }],
    ['schedule.7 is ', { options: { steps: 17 } }],
    ['data.seed is 7 in the checkpoint and 8 here', { data: { seed: 8 } }],
    ['data.sequence is 16 in the checkpoint and 8 here', { data: { sequence: 8 } }],
    ['data.sequences is ', { data: { copies: 41 } }],
  ]
  it.each(cases)('%s', async (text, setup) => {
    expect(await refused(setup)).toContain(text)
  })
  it.each([
    ['gupta-fixed', true],
    ['mellempudi-e5m2', true],
    ['wang-152', false],
    ['micikevicius-f16', false],
  ] as const)('the seed of a model where products are rounded at random: %s', async (recipe, random) => {
    const saved = trainerOf({ recipe })
    await saveCheckpoint(saved, dir)
    const other = trainerOf({ recipe }, 2)
    const resumed = other.resume(dir)
    if (random) await expect(resumed).rejects.toThrow('model.seed is 1 in the checkpoint and 2 here')
    else expect((await resumed).warnings).toEqual([])
    drop(saved)
    drop(other)
  })
  it('a text refuses the place of another order', () => {
    const text = (seed: number) => new TextDataset(sentence.repeat(40), { sequence: 16, seed })
    const state = text(7).state()
    expect(() => text(8).restore(state)).toThrow('TextDataset: seed is 7 in the state and 8 here')
    expect(() => text(7).restore({ ...state, position: -1 })).toThrow('state.position is -1 and must be an integer')
  })
  it('names all at once', async () => {
    const message = await refused({ options: { batch: 3, clip: 0 } })
    expect(message).toContain('batch is 2 in the checkpoint and 3 here; clip is 1 in the checkpoint and 0 here')
  })
  it('more steps of the same schedule, and what is allowed, are warnings', async () => {
    const saved = trainerOf({ options: { schedule: constant(), steps: 2 } })
    await run(saved)
    await saveCheckpoint(saved, dir)
    const more = trainerOf({ options: { schedule: constant(), steps: 4, optimizer: { lr: 0.001 } } }, 2)
    const { warnings } = await more.resume(dir, { allow: ['optimizer.lr'] })
    expect(warnings).toEqual([
      'optimizer.lr is 0.01 in the checkpoint and 0.001 here',
      'steps is 2 in the checkpoint and 4 here',
    ])
    expect((await run(more)).map(({ step, lr }) => [step, lr])).toEqual([
      [3, 0.001],
      [4, 0.001],
    ])
    drop(saved)
    drop(more)
  })
})
