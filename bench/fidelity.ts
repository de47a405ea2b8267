// Whether a recipe trains as bf16 does: whole runs from the same weights on the same batches, and paired branches from one
// bf16 checkpoint, which tell smaller differences apart. Every run is resumed where the last call left it.
import { appendFileSync, existsSync, readFileSync, rmSync, truncateSync } from 'node:fs'
import { join } from 'node:path'
import {
  adamw,
  CoatError,
  cosine,
  type Device,
  handOver,
  LlamaForCausalLM,
  type Param,
  saveCheckpoint,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { claim, Progress } from '../lib/report.ts'
import { corpus } from './corpus.ts'
import { checkSetup, fileNameOf } from './kept.ts'
import type { NamedRecipe } from './options.ts'
import { appendRows, makeRow, parseRows, type Row } from './row.ts'

export interface FidelityOptions {
  device: Device
  recipes: readonly NamedRecipe[]
  seeds: readonly number[]
  /** Holds what is done, as rows.jsonl, and what is under way. */
  dir: string
  hidden: number
  inner: number
  layers: number
  heads: number
  batch: number
  sequence: number
  steps: number
  warmup: number
  lr: number
  /** Last steps whose loss is averaged. */
  tail: number
  /** Steps from one checkpoint of a run to the next. */
  every: number
  /** Branches from the bf16 run of the first seed at this step; without it whole runs. */
  branchFrom?: number
  branchSteps: number
  /** Data orders of the branches. */
  orders: number
  /** Asked before every step: whether to stop here and go on at the next call. */
  spent?: () => boolean
}

export const fidelityDefaults = {
  hidden: 1024,
  inner: 2816,
  layers: 8,
  heads: 8,
  batch: 64,
  sequence: 512,
  steps: 1000,
  warmup: 0,
  lr: 6e-4,
  tail: 100,
  every: 250,
  branchSteps: 100,
  orders: 3,
  seeds: [1],
}

/** Size of what tells a perturbed twin apart: a part of a weight matrix's initial deviation. */
const perturbation = 1e-3

/** What a run is told apart by in rows.jsonl: its recipe and these. */
type Identity = Record<string, number>

/** Runs what is not done yet; `complete` says whether everything is. */
export async function fidelityBench(options: FidelityOptions): Promise<{ rows: Row[]; complete: boolean }> {
  const { seeds, dir, branchFrom, orders } = options
  // the others' rows are compared with its own
  const recipes = [...options.recipes].sort((a, b) => Number(b.name === 'bf16') - Number(a.name === 'bf16'))
  claim(join(dir, 'rows.jsonl'))
  checkSetup('fidelity', dir, setupOf(options))
  const texts = corpus()
  let complete = true
  if (branchFrom === undefined) {
    for (const seed of seeds)
      for (const recipe of recipes) complete = (await wholeRun(recipe, seed, texts, options)) && complete
  } else {
    const twins = recipes.filter(({ name }) => name === 'bf16')
    const branches = [
      ...recipes.map((recipe) => ({ recipe, twin: 0 })),
      ...twins.map((recipe) => ({ recipe, twin: 1 })),
    ]
    const open = Array.from({ length: orders }, (_, i) => branches.map((branch) => ({ ...branch, order: i + 1 })))
      .flat()
      .filter(({ recipe, order, twin }) => !rowOf(options, recipe.name, branchIdentity(options, order, twin)))
    complete = open.length === 0 || (await branchRuns(open, texts, branchFrom, options))
  }
  return { rows: doneRows(dir), complete }
}

function setupOf({ device, ...options }: FidelityOptions) {
  const { hidden, inner, layers, heads, batch, sequence, steps, warmup, lr, tail } = options
  return { hidden, inner, layers, heads, batch, sequence, steps, warmup, lr, tail, device: device.kind }
}

function doneRows(dir: string): Row[] {
  const file = join(dir, 'rows.jsonl')
  return existsSync(file) ? parseRows(readFileSync(file, 'utf8')) : []
}

function sizesOf({ hidden, layers, batch, sequence, steps }: FidelityOptions): Identity {
  return { hidden, layers, batch, sequence, steps }
}
function wholeIdentity(options: FidelityOptions, seed: number): Identity {
  return { ...sizesOf(options), seed }
}
function branchIdentity(options: FidelityOptions, order: number, twin: number): Identity {
  const { branchFrom = 0, branchSteps } = options
  return { ...sizesOf(options), seed: options.seeds[0] as number, from: branchFrom, branch: branchSteps, order, twin }
}

function rowOf({ dir }: FidelityOptions, recipe: string, identity: Identity): Row | undefined {
  return doneRows(dir).find(({ recipe: other, shape }) => {
    const { threads: _, ...own } = shape
    return other === recipe && JSON.stringify(own) === JSON.stringify(identity)
  })
}

/** The mean of losses as a row, against bf16 on the same batches where that is done. */
function record(options: FidelityOptions, recipe: string, identity: Identity, losses: readonly number[]): void {
  const { dir, device } = options
  const whole = identity.order === undefined
  const base = rowOf(options, 'bf16', whole ? identity : { ...identity, twin: 0 })
  const mean = losses.reduce((sum, loss) => sum + loss, 0) / losses.length
  if (!Number.isFinite(mean))
    throw new CoatError(`fidelity: the loss of ${recipe} is ${mean}`, 'diverged', 'fidelity', 'loss')
  const row = makeRow(
    {
      kind: 'train',
      name: whole ? 'fidelity/loss' : 'fidelity/branch',
      recipe,
      device: device.kind,
      shape: identity,
      metric: 'loss',
      unit: 'nats',
      baseline: base ? { name: 'bf16', median: base.median } : null,
    },
    [mean],
  )
  appendRows(join(dir, 'rows.jsonl'), [{ ...row, n: losses.length }])
}

function modelOf({ recipe }: NamedRecipe, seed: number, options: FidelityOptions): LlamaForCausalLM {
  const { hidden, inner, layers, heads, sequence, device } = options
  return new LlamaForCausalLM(
    {
      vocab_size: 256,
      hidden_size: hidden,
      intermediate_size: inner,
      num_hidden_layers: layers,
      num_attention_heads: heads,
      max_position_embeddings: sequence,
    },
    { recipe, device, seed },
  )
}

function trainerOf(model: LlamaForCausalLM, texts: readonly string[], seed: number, options: FidelityOptions): Trainer {
  const { batch, sequence, steps, warmup, lr } = options
  return new Trainer(model, {
    data: new TextDataset(texts, { sequence, seed }),
    batch,
    steps,
    clip: 1,
    optimizer: adamw({ lr, betas: [0.9, 0.95], weightDecay: 0.1 }),
    schedule: cosine({ warmup }),
  })
}

/** Goes on with a run up to step `until`; false: the budget ended before. Losses are in `losses`, a line a step. */
async function advance(name: string, trainer: Trainer, until: number, options: FidelityOptions): Promise<boolean> {
  const folder = join(options.dir, name)
  const losses = `${folder}.losses`
  claim(losses)
  if (existsSync(folder)) await trainer.resume(folder)
  keepLines(losses, trainer.optimizer.steps)
  const save = () => saveCheckpoint(trainer, folder, { keep: 1 })
  using progress = new Progress(name, until)
  let saved = trainer.optimizer.steps
  while (trainer.optimizer.steps < until) {
    if (options.spent?.()) {
      if (trainer.optimizer.steps > saved) await save()
      return false
    }
    const metrics = await trainer.step()
    if (metrics.skipped) continue
    appendFileSync(losses, `${metrics.loss}\n`)
    progress.update(metrics)
    if (metrics.step % options.every === 0 || metrics.step === until) {
      await save()
      saved = metrics.step
    }
  }
  return true
}

// A run that was killed has lines of steps after its checkpoint.
function keepLines(file: string, count: number): void {
  if (!existsSync(file)) return
  const lines = readFileSync(file, 'utf8').trimEnd().split('\n')
  if (lines.length > count)
    truncateSync(
      file,
      lines.slice(0, count).reduce((sum, line) => sum + line.length + 1, 0),
    )
}

function lossesOf(dir: string, name: string): number[] {
  return readFileSync(join(dir, `${name}.losses`), 'utf8')
    .trimEnd()
    .split('\n')
    .map(Number)
}

async function wholeRun(
  recipe: NamedRecipe,
  seed: number,
  texts: readonly string[],
  options: FidelityOptions,
): Promise<boolean> {
  const identity = wholeIdentity(options, seed)
  if (rowOf(options, recipe.name, identity)) return true
  if (options.spent?.()) return false
  const name = `${fileNameOf(recipe.name)}-seed${seed}`
  {
    using model = modelOf(recipe, seed, options)
    using trainer = trainerOf(model, texts, seed, options)
    if (!(await advance(name, trainer, options.steps, options))) return false
  }
  record(options, recipe.name, identity, lossesOf(options.dir, name).slice(-options.tail))
  rmSync(join(options.dir, name), { recursive: true })
  return true
}

interface BranchRun {
  recipe: NamedRecipe
  order: number
  /** 1: from weights that are moved a little. */
  twin: number
}

async function branchRuns(
  open: readonly BranchRun[],
  texts: readonly string[],
  from: number,
  options: FidelityOptions,
): Promise<boolean> {
  const { seeds, steps, branchSteps } = options
  if (from + branchSteps > steps)
    throw new CoatError(
      `branches of ${branchSteps} steps from step ${from} end after the last of ${steps} steps`,
      'value',
      'fidelity',
      'branchFrom',
    )
  const bf16 = options.recipes.find(({ name }) => name === 'bf16')
  if (!bf16) throw new CoatError("recipes must hold 'bf16', from which branches start", 'value', 'fidelity', 'recipes')
  const seed = seeds[0] as number
  using baseModel = modelOf(bf16, seed, options)
  using base = trainerOf(baseModel, texts, seed, options)
  if (!(await advance(`base-seed${seed}-step${from}`, base, from, options))) return false
  for (const { recipe, order, twin } of open) {
    if (options.spent?.()) return false
    using model = modelOf(recipe, seed, options)
    using trainer = trainerOf(model, texts, 1000 * seed + order, options)
    await handOver(base, trainer, twin ? move : null)
    const losses: number[] = []
    using progress = new Progress(`${recipe.name} order ${order}${twin ? ' twin' : ''}`, from + branchSteps)
    while (trainer.optimizer.steps < from + branchSteps) {
      if (options.spent?.()) return false
      const metrics = await trainer.step()
      if (!metrics.skipped) losses.push(metrics.loss)
      progress.update(metrics)
    }
    record(options, recipe.name, branchIdentity(options, order, twin), losses)
  }
  return true
}

/** Adds normal numbers to the values of a matrix. */
async function move(values: Float32Array, { tensor }: Param, seed: number): Promise<void> {
  const [rows, columns] = tensor.shape
  if (rows === undefined || columns === undefined) return
  const noise = native.random_normal('f32', rows, columns, 0, 0.02 * perturbation, seed + 1, tensor.device)
  const added = new Float32Array(await native.read(noise))
  native.free(noise)
  for (let i = 0; i < values.length; i++) values[i] = (values[i] as number) + (added[i] as number)
}
