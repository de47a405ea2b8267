// Checkpoints: all that a run needs to go on bit for bit, in folders that are there whole or not at all.
import { mkdir, readdir, readFile, rename, rm, writeFile } from 'node:fs/promises'
import { basename, join } from 'node:path'
import { roundsAtRandom } from './axes.ts'
import type { DataState, Dataset } from './data.ts'
import type { Exchange } from './exchange.ts'
import type { SpikeGuard, SpikeState } from './guard.ts'
import type { LossScale, LossScaleState } from './lossscale.ts'
import type { Module } from './modules.ts'
import { CoatError, native } from './native.ts'
import type { Optimizer } from './optimizer.ts'
import type { Ranks } from './ranks.ts'
import type { Recipe } from './recipes.ts'
import { Replacement } from './replace.ts'
import { type Dtype, readSafetensors, type Stored, type TensorSource, writeSafetensors } from './safetensors.ts'
import type { Schedule } from './schedule.ts'
import type { Recompute } from './tape.ts'
import type { Format, Tensor } from './tensor.ts'

/** Of what a folder holds; another one is refused. */
const version = 1

const mostRanks = 2 ** 16

/** When a trainer saves, and where. */
export interface CheckpointOptions {
  /** The folder that gets `step-00000100` and so on; made if needed, for one run at a time. */
  dir: string
  /** Steps from one checkpoint to the next; the last step is saved too. */
  every: number
  /** Checkpoints that stay, the newest ones (default 3). */
  keep?: number
}

/** What a checkpoint is of: a `Trainer`. */
export interface Checkpointed {
  readonly model: Module & { readonly recipe: Recipe; readonly config?: object; readonly seed?: number }
  readonly optimizer: Optimizer
  readonly options: {
    readonly data: Dataset
    readonly batch: number
    readonly accumulate: number
    readonly clip: number
    readonly steps: number
    readonly schedule: Schedule
    readonly recompute: Recompute
    readonly optimizerInBackward: boolean
  }
  readonly guard: SpikeGuard | null
  readonly ranks: Ranks
  /** Whether a step is running: parameters, states and counters are not of one moment then. */
  readonly busy: boolean
  readonly lossScale: LossScale | null
  readonly exchange: Exchange | null
  batches: number
  skippedSteps: number
  skipsInARow: number
  lastNorm: number | null
}

/** What was loaded. */
export interface Resumed {
  folder: string
  /** Steps done. */
  step: number
  /** Newer checkpoints that were not complete, and settings that differ and may. */
  warnings: string[]
}

/** trainer.json */
interface Facts {
  version: number
  step: number
  batches: number
  skippedSteps: number
  skipsInARow: number
  /** Clips the next step where that is done within backward. */
  lastNorm?: number | null
  data: DataState | null
  spike?: SpikeState
  lossScale?: LossScaleState
  mu?: Record<string, number>
  settings: Record<string, unknown>
}

interface Saved {
  facts: Facts
  files: Record<FileName, Stored>
}

type FileName = 'model' | 'optimizer'

/** A tensor, or rows of one, as it is stored. */
interface Entry {
  name: string
  tensor: Tensor
  /** Byte range in the tensor. */
  from: number
  bytes: number
  /** Format word and shape: what must be equal, so that bytes are never read as something else. */
  word: string
  source: TensorSource
}

const folderName = /^step-(\d{8,})(?:-(\d+))?$/
const leftover = /^\.step-.*\.(new|old)$/
const plain: { readonly [Name in Format]?: Dtype } = { f32: 'F32', bf16: 'BF16' }

/**
 * Saves parameters, optimizer states, counters and the place in the data to `dir/step-…`, then removes all but the `keep`
 * newest checkpoints (default: none). The folder is renamed into place when all is on the disk: a process that is killed
 * leaves the checkpoints before, and hidden leftovers that the next save removes. Resolves to the folder.
 *
 * model.safetensors has the parameters under the names of Hugging Face, optimizer.safetensors the states and scales of steps
 * before: f32 and bf16 as such, other formats as bytes (codes, then scales); the metadata give each tensor's format and shape.
 * Of several ranks, which all call this, each writes the states that it has, whole tensors: `optimizer-00001-of-00002.safetensors`.
 */
export async function saveCheckpoint(
  trainer: Checkpointed,
  dir: string,
  options: { keep?: number } = {},
): Promise<string> {
  const { keep = Number.POSITIVE_INFINITY } = options
  expectIdle(trainer, 'saveCheckpoint')
  if (!(keep >= 1))
    throw new CoatError(`saveCheckpoint: keep is ${keep} and must be at least 1`, 'value', 'saveCheckpoint', 'keep')
  const { ranks } = trainer
  const replacement = new Replacement()
  try {
    const target = ranks.rank === 0 ? await targetOf(dir, trainer.optimizer.steps) : ''
    const folder = await ranks.tell(target && replacement.write(target))
    const { model, optimizer } = entriesOf(trainer)
    if (ranks.rank === 0) {
      await mkdir(folder)
      const text = JSON.stringify(factsOf(trainer), null, 2)
      await writeFile(join(folder, 'trainer.json'), `${text}\n`, { flush: true })
      await writeEntries(join(folder, 'model.safetensors'), model)
    }
    await ranks.sum(0) // the folder is there
    await writeEntries(join(folder, optimizerFile(ranks)), optimizer)
    await ranks.sum(0) // all files are
    if (ranks.rank === 0) {
      await replacement.commit()
      await rotate(dir, target, keep)
    }
    return await ranks.tell(target)
  } catch (error) {
    ranks.leave(error)
    await replacement.abort()
    // that a file cannot be written matters more than which: its folder has a name for the time of writing
    const { cause } = error as Error
    if (error instanceof CoatError && !(cause instanceof Error)) throw error
    const reason = cause instanceof Error ? cause : (error as Error)
    throw new CoatError(
      `saveCheckpoint: ${dir} cannot be written: ${reason.message}`,
      'checkpoint',
      'saveCheckpoint',
      'dir',
      { cause: reason },
    )
  }
}

/** The folder that this step gets; leftovers of saves that were killed go. */
async function targetOf(dir: string, step: number): Promise<string> {
  await mkdir(dir, { recursive: true })
  for (const name of await readdir(dir)) if (leftover.test(name)) await rm(join(dir, name), { recursive: true })
  const there = await foldersOf(dir)
  for (const { folder, step: later } of there)
    if (later > step && (await isComplete(folder)))
      throw new CoatError(
        `saveCheckpoint: ${folder} is later than step ${step}: resume from it, or save to another folder`,
        'checkpoint',
        'saveCheckpoint',
        'dir',
      )
  // the same step again lies beside the old folder until it is complete
  const repeats = there.filter((folder) => folder.step === step).map(({ repeat }) => repeat)
  const suffix = repeats.length > 0 ? `-${Math.max(...repeats) + 1}` : ''
  return join(dir, `step-${String(step).padStart(8, '0')}${suffix}`)
}

// This syncs the folder when its file is in it, so its names are on the disk before it gets its own.
async function writeEntries(file: string, entries: readonly Entry[]): Promise<void> {
  const metadata = { format: 'pt', ...Object.fromEntries(entries.map(({ name, word }) => [name, word])) }
  const sources = entries.map(({ name, source }) => [name, source] as const)
  await writeSafetensors(file, sources, { metadata, shardBytes: Number.POSITIVE_INFINITY })
}

/** The states that one rank of several has are a file of their own. */
function optimizerFile({ rank, count }: Pick<Ranks, 'rank' | 'count'>): string {
  const number = (value: number) => String(value).padStart(5, '0')
  return count === 1 ? 'optimizer.safetensors' : `optimizer-${number(rank + 1)}-of-${number(count)}.safetensors`
}

/**
 * Takes a trainer to the newest complete checkpoint of `dir` (or to `dir`, where that is one of them); what is newer and not
 * complete is passed over with a warning. Everything is compared before anything changes: other formats and shapes are
 * refused by name, and so are settings that change the result (recipe, model, optimizer, batches, data, schedule), but those
 * in `allow` (`'optimizer.lr'`, or `'optimizer'` for all of it), which become warnings, as does another number of steps.
 * If reading fails half-way, the trainer is of no more use. The number of ranks is such a setting: the states of another
 * number are found by their names, and stay as they are to the bit.
 */
export async function loadCheckpoint(
  trainer: Checkpointed,
  dir: string,
  options: { allow?: readonly string[] } = {},
): Promise<Resumed> {
  expectIdle(trainer, 'resume')
  try {
    return await newestOf(trainer, dir, options.allow ?? [])
  } catch (error) {
    trainer.ranks.leave(error)
    throw error
  }
}

async function newestOf(trainer: Checkpointed, dir: string, allow: readonly string[]): Promise<Resumed> {
  const warnings: string[] = []
  for (const { folder } of await foldersOf(dir)) {
    let saved: Saved
    try {
      saved = await opened(folder)
    } catch (error) {
      if (error instanceof CoatError && error.code === 'version') throw error
      warnings.push(`${folder} is not complete and was passed over: ${(error as Error).message}`)
      continue
    }
    const { facts, files } = saved
    warnings.push(...compared(trainer, facts, ['steps', ...allow]))
    const entries = entriesOf(trainer)
    matched(folder, entries.model, files.model)
    const others = trainer.optimizer.pieces.filter(({ rank }) => rank !== trainer.ranks.rank).map(({ name }) => name)
    matched(folder, entries.optimizer, files.optimizer, others)
    const batches = batchesOf(trainer, facts)
    if (facts.data) trainer.options.data.restore?.(facts.data)
    await filled(entries.model, files.model)
    await filled(entries.optimizer, files.optimizer)
    for (const scale of trainer.model.delayedScales()) scale.ready = facts.batches > 0
    trainer.optimizer.steps = facts.step
    trainer.batches = batches
    if (facts.spike) trainer.guard?.restore(facts.spike)
    if (facts.lossScale) trainer.lossScale?.restore(facts.lossScale)
    if (facts.mu) trainer.exchange?.restore(facts.mu)
    trainer.skippedSteps = facts.skippedSteps
    trainer.skipsInARow = facts.skipsInARow
    trainer.lastNorm = facts.lastNorm ?? null
    return { folder, step: facts.step, warnings }
  }
  throw new CoatError(
    [`resume: ${dir} has no complete checkpoint`, ...warnings].join('\n'),
    'checkpoint',
    'resume',
    'dir',
  )
}

function expectIdle({ busy }: Checkpointed, op: string): void {
  if (busy) throw new CoatError(`${op}: a step is running; wait for it`, 'busy', op, 'trainer')
}

/** Checkpoint folders, complete or not, the newest first. */
export async function foldersOf(dir: string): Promise<{ folder: string; step: number; repeat: number }[]> {
  const own = folderName.test(basename(dir))
  const names = own ? [''] : await readdir(dir).catch(() => [])
  return names
    .flatMap((name) => {
      const [, step, repeat = '1'] = folderName.exec(own ? basename(dir) : name) ?? []
      return step ? [{ folder: join(dir, name), step: Number(step), repeat: Number(repeat) }] : []
    })
    .sort((a, b) => b.step - a.step || b.repeat - a.repeat)
}

async function isComplete(folder: string): Promise<boolean> {
  return opened(folder).then(
    () => true,
    (error) => error.code === 'version',
  )
}

/** Headers only; throws when a file is missing, cut or not what it should be. */
async function opened(folder: string): Promise<Saved> {
  const path = join(folder, 'trainer.json')
  const facts = factsIn(path, await readFile(path, 'utf8'))
  if (typeof facts?.version === 'number' && facts.version !== version)
    throw new CoatError(
      `resume: ${path} has version ${facts.version} and must have ${version}`,
      'version',
      'resume',
      'version',
    )
  const counts = [facts?.version, facts?.step, facts?.batches, facts?.skippedSteps, facts?.skipsInARow]
  if (!facts?.settings || !counts.every((count) => Number.isSafeInteger(count) && (count as number) >= 0))
    throw new CoatError(`resume: ${path} has no version, counters and settings`, 'checkpoint', 'resume', 'dir')
  const count = (facts.settings.ranks ?? 1) as number
  if (!Number.isSafeInteger(count) || count < 1 || count > mostRanks)
    throw new CoatError(
      `resume: ${path} is of ${JSON.stringify(count)} ranks, which must be an integer from 1 to ${mostRanks}`,
      'checkpoint',
      'resume',
      'ranks',
    )
  const [model, ...parts] = await Promise.all(
    ['model.safetensors', ...Array.from({ length: count }, (_, rank) => optimizerFile({ rank, count }))].map((file) =>
      readSafetensors(join(folder, file)),
    ),
  )
  const optimizer: Stored = { tensors: new Map(), metadata: Object.assign({}, ...parts.map((part) => part.metadata)) }
  for (const [name, tensor] of parts.flatMap(({ tensors }) => [...tensors])) {
    const other = optimizer.tensors.get(name)
    if (other)
      throw new CoatError(
        `resume: tensor '${name}' lies in ${other.path} and also in ${tensor.path}`,
        'checkpoint',
        'resume',
        name,
      )
    optimizer.tensors.set(name, tensor)
  }
  return { facts, files: { model: model as Stored, optimizer } }
}

function factsIn(path: string, text: string): Facts | null {
  try {
    return JSON.parse(text)
  } catch (error) {
    throw new CoatError(`resume: ${path} is no JSON: ${(error as Error).message}`, 'checkpoint', 'resume', 'dir')
  }
}

/** Removes what is older than the `keep` newest complete ones, and other folders of the step just saved. */
async function rotate(dir: string, newest: string, keep: number): Promise<void> {
  const saved = (await foldersOf(newest))[0]
  let complete = 0
  for (const { folder, step } of await foldersOf(dir)) {
    const replaced = step === saved?.step && folder !== newest
    if (!replaced && complete < keep) {
      // what cannot be read just now may be whole: it goes when there are enough newer ones
      if (await isComplete(folder)) complete += 1
      continue
    }
    // out of sight at once: a folder that is half removed has no name that counts
    const hidden = join(dir, `.${basename(folder)}.${process.pid}.old`)
    await rename(folder, hidden)
    await rm(hidden, { recursive: true })
  }
}

/** Batches taken, in batches of the size and of as many ranks as the trainer has now. */
function batchesOf({ options, ranks }: Checkpointed, { batches, settings }: Facts): number {
  const { batch = options.batch, ranks: count = 1 } = settings as { batch?: number; ranks?: number }
  const sequences = batches * batch * count
  const now = options.batch * ranks.count
  if (sequences % now === 0) return sequences / now
  const shown = (size: number, many: number) => (many === 1 ? `${size}` : `${size} on each of ${many} ranks`)
  throw new CoatError(
    `resume: batch is ${shown(options.batch, ranks.count)} and must divide the ${sequences} sequences that were taken in batches of ${shown(batch, count)}`,
    'settings',
    'resume',
    'batch',
  )
}

function factsOf(trainer: Checkpointed): Facts {
  const { optimizer, options, batches, skippedSteps, skipsInARow, lastNorm, guard, lossScale, exchange } = trainer
  // 0, 1, 3, 7, … and the last step tell schedules apart that differ anywhere
  const places = Array.from({ length: 53 }, (_, i) => 2 ** i - 1).filter((place) => place < options.steps)
  return {
    version,
    step: optimizer.steps,
    batches,
    skippedSteps,
    skipsInARow,
    lastNorm,
    data: options.data.state?.() ?? null,
    ...(guard ? { spike: guard.state() } : {}),
    ...(lossScale ? { lossScale: lossScale.state() } : {}),
    ...(exchange ? { mu: exchange.state() } : {}),
    settings: settingsOf(trainer, [...places, options.steps - 1]),
  }
}

/** What changes the result, by name; of the schedule its factors at `places`. */
function settingsOf(
  { model, optimizer, options, guard, ranks, lossScale, exchange }: Checkpointed,
  places: readonly number[],
): Record<string, unknown> {
  // what a trainer has of its own may differ from the recipe's
  const { lossScale: _scaling, mu: _mu, communicate: _travel, partition: _part, ...recipe } = model.recipe
  const seed = roundsAtRandom(model.recipe) ? { seed: model.seed } : {}
  const { allowUnsafe: _, ...rest } = { allowUnsafe: false, ...optimizer.options }
  const { batch, accumulate, clip, steps, data, schedule, recompute, optimizerInBackward } = options
  const { position: __, ...order } = { position: 0, sequence: data.sequence, ...data.state?.() }
  const factors = Object.fromEntries(places.map((place) => [place, schedule(place, steps)]))
  const rounding = optimizer.options.rounding ?? recipe.rounding
  const all = {
    recipe,
    model: { ...model.config, ...seed },
    optimizer: { ...rest, rounding },
    batch,
    accumulate,
    clip,
    steps,
  }
  // what is made again from a copy differs from what was there by the copy's rounding
  const kept = recipe.flow === 'save' && recipe.saved !== recipe.stream ? { remade: recompute !== 'none' } : {}
  const update = optimizerInBackward ? { optimizerInBackward } : {}
  const spike = guard ? { spike: guard.options } : {}
  const several = ranks.count > 1 ? { ranks: ranks.count } : {}
  const scale = lossScale ? { lossScale: lossScale.options } : {}
  return Object.fromEntries(
    flat({
      ...{ ...all, ...kept, ...update, ...spike, ...several, ...scale, ...exchange?.settings },
      ...{ data: order, schedule: factors },
    }),
  )
}

function flat(value: object, before = ''): [string, unknown][] {
  return Object.entries(value).flatMap(([key, item]) =>
    typeof item === 'object' && item !== null && !Array.isArray(item)
      ? flat(item, `${before}${key}.`)
      : [[`${before}${key}`, item] as [string, unknown]],
  )
}

/** Warnings of differences that are allowed; throws for the others, all in one message. */
function compared(trainer: Checkpointed, { settings }: Facts, allow: readonly string[]): string[] {
  const places = Object.keys(settings).flatMap((name) => (name.startsWith('schedule.') ? [Number(name.slice(9))] : []))
  const now = settingsOf(trainer, places)
  const shown = (value: unknown) => (value === undefined ? 'absent' : JSON.stringify(value))
  const changed = [...new Set([...Object.keys(settings), ...Object.keys(now)])].filter(
    (name) => shown(settings[name]) !== shown(now[name]),
  )
  const text = (name: string) => `${name} is ${shown(settings[name])} in the checkpoint and ${shown(now[name])} here`
  const allowed = (name: string) => allow.some((word) => name === word || name.startsWith(`${word}.`))
  const refused = changed.filter((name) => !allowed(name))
  if (refused.length > 0)
    throw new CoatError(
      `resume: ${refused.map(text).join('; ')}; settings must be equal, or be named in allow`,
      'settings',
      'resume',
      refused[0],
    )
  return changed.map(text)
}

function entriesOf({ model, optimizer, ranks }: Checkpointed): Record<FileName, Entry[]> {
  const parameters = model.parameters().flatMap(({ name, tensor, parts }) => {
    // scales and remainders lie behind all rows
    if (!plain[tensor.format]) return [entryOf(name, tensor, tensor.shape, 0, tensor.bytes)]
    const rowBytes = tensor.bytes / (tensor.shape[0] as number)
    return parts.map(({ name, rows: [from, to] }) =>
      entryOf(name, tensor, [to - from, ...tensor.shape.slice(1)], from * rowBytes, (to - from) * rowBytes),
    )
  })
  const states = optimizer.pieces.flatMap(({ param, name, rank }) =>
    rank !== ranks.rank
      ? []
      : Object.entries(optimizer.stateOf(param)).flatMap(([what, tensor]: [string, Tensor | null]) =>
          tensor ? [entryOf(`${name}.${what}`, tensor, tensor.shape, 0, tensor.bytes)] : [],
        ),
  )
  const scales = model
    .delayedScales()
    .flatMap(({ name, history, scale }) =>
      Object.entries({ history, scale }).map(([what, tensor]) =>
        entryOf(`${name}.${what}`, tensor, tensor.shape, 0, tensor.bytes),
      ),
    )
  return { model: parameters, optimizer: [...states, ...scales] }
}

function entryOf(name: string, tensor: Tensor, shape: readonly number[], from: number, bytes: number): Entry {
  const dtype = plain[tensor.format]
  return {
    name,
    tensor,
    from,
    bytes,
    word: `${tensor.format} [${shape.join(', ')}]`,
    source: {
      dtype: dtype ?? 'U8',
      shape: dtype ? shape : [bytes],
      async *pieces() {
        yield new Uint8Array(await native.read(tensor.handle), from, bytes)
      },
    },
  }
}

/** Both must have the same tensors, in the same formats and shapes; the file also those of `others`, which other ranks have. */
function matched(
  folder: string,
  entries: readonly Entry[],
  { tensors, metadata }: Stored,
  others: readonly string[] = [],
): void {
  const refuse = (name: string, saved: string, here: string): never => {
    throw new CoatError(
      `resume: tensor '${name}' is ${saved} in ${folder} and ${here} here, and must be equal`,
      'format',
      'resume',
      name,
    )
  }
  const words = new Map(entries.map(({ name, word }) => [name, word]))
  const elsewhere = new Set(others)
  for (const name of tensors.keys())
    if (!words.has(name) && !elsewhere.has(name.replace(/\.[^.]*$/, '')))
      refuse(name, metadata[name] ?? 'there', 'absent')
  for (const { name, word, bytes } of entries) {
    const stored = tensors.get(name)
    const saved = stored ? (metadata[name] ?? 'without a format') : 'absent'
    if (!stored || saved !== word) refuse(name, saved, word)
    else if (stored.range[1] - stored.range[0] !== bytes)
      refuse(name, `${stored.range[1] - stored.range[0]} bytes`, `${bytes} bytes`)
  }
}

async function filled(entries: readonly Entry[], { tensors }: Stored): Promise<void> {
  for (const tensor of new Set(entries.map((entry) => entry.tensor))) {
    const all = new Uint8Array(tensor.bytes)
    for (const { name, from, ...entry } of entries)
      if (entry.tensor === tensor) all.set((await tensors.get(name)?.bytes()) ?? [], from)
    native.write(tensor.handle, all)
  }
}
