// What fits a memory limit: the largest batch of a model, the largest of some models.
import { execFile } from 'node:child_process'
import { join } from 'node:path'
import { promisify } from 'node:util'
import { CoatError } from '../lib/index.ts'
import { peakOf, showBytes, type Table } from '../lib/report.ts'
import { configOf, type ModelName, modelNames, parametersOf } from './models.ts'
import { makeRow, type Row } from './row.ts'
import { type StepOptions, stepFields, train } from './step.ts'

/** One step under a limit: the most bytes that tensors held together, or what did not fit. */
export type Trial = { fits: true; peak: number } | { fits: false; reason: string }

export type FitOptions = Omit<StepOptions, 'recipes' | 'steps'>

/** Runs one step in this process, whose memory stays as a failed model left it. */
export async function trial(options: FitOptions, recipe: StepOptions['recipes'][number]): Promise<Trial> {
  try {
    const { steps } = await train(recipe, { ...options, recipes: [recipe], steps: 1 }, 1)
    return { fits: true, peak: peakOf(steps).total }
  } catch (error) {
    if (!(error instanceof CoatError && error.code === 'out_of_memory')) throw error
    return { fits: false, reason: error.message }
  }
}

/** The same in a process of its own: `coat-bench fit`. */
export async function trialApart(options: FitOptions, recipe: string): Promise<Trial> {
  const { model, hidden, layers, sequence, batch, memoryLimit, trainer = {}, device } = options
  const flags = { model, hidden, layers, sequence, batch, 'memory-limit': memoryLimit, recipe, device: device.kind }
  const given = Object.entries(flags).flatMap(([name, value]) => (value === undefined ? [] : [`--${name}`, `${value}`]))
  const more = Object.entries(trainer).flatMap(([name, value]) => ['--trainer', `${name}=${value}`])
  const { COAT_PROFILE: _, ...env } = process.env // the file is this process's own
  const program = join(import.meta.dirname, 'cli.js')
  try {
    const { stdout } = await promisify(execFile)(process.execPath, [program, 'fit', ...given, ...more], { env })
    return JSON.parse(stdout) as Trial
  } catch (error) {
    const { stderr, message } = error as Error & { stderr?: string }
    throw new CoatError(`fit: ${stderr?.replace(/^error: /, '').trim() || message}`, 'fit', 'fit')
  }
}

/** The largest integer from 1 on that fits, 0 for none; what fits n fits all below n. */
export async function largest(fits: (n: number) => Promise<boolean>, most = 1 << 16): Promise<number> {
  let good = 0
  let bad = 1
  while (bad <= most && (await fits(bad))) {
    good = bad
    bad *= 2
  }
  while (bad - good > 1) {
    const middle = Math.floor((good + bad) / 2)
    if (await fits(middle)) good = middle
    else bad = middle
  }
  return good
}

/** What was found for one recipe: a batch of `model`, or none of any. */
export interface Fit {
  recipe: string
  model: ModelName
  batch: number
  /** Bytes at that batch. */
  peak: number
}

export async function findBatch(
  recipe: string,
  options: FitOptions,
  attempt: (options: FitOptions, recipe: string) => Promise<Trial> = trialApart,
): Promise<Fit> {
  let peak = 0
  const fits = async (batch: number) => {
    const result = await attempt({ ...options, batch }, recipe)
    if (result.fits) peak = Math.max(peak, result.peak)
    return result.fits
  }
  const batch = await largest(fits)
  return { recipe, model: options.model, batch, peak }
}

/** The largest model of which one step of `options.batch` fits; batch 0: none. `hidden` is that of the small one. */
export async function findModel(
  recipe: string,
  names: readonly ModelName[],
  options: FitOptions,
  attempt: (options: FitOptions, recipe: string) => Promise<Trial> = trialApart,
): Promise<Fit> {
  const ordered = modelNames.filter((name) => names.includes(name) && name !== 'layer')
  let found: Fit = { recipe, model: ordered[0] ?? options.model, batch: 0, peak: 0 }
  for (const model of ordered) {
    const result = await attempt(sizedFor({ ...options, model }), recipe)
    if (!result.fits) break
    found = { recipe, model, batch: options.batch, peak: result.peak }
  }
  return found
}

// Flags of width and depth are for the model that a search is about, where it is a small one or the only one.
function sizedFor({ hidden, layers, ...rest }: FitOptions): FitOptions {
  return {
    ...rest,
    ...(rest.model === 'small' && hidden !== undefined ? { hidden } : {}),
    ...(layers === undefined ? {} : { layers }),
  }
}

export function fitTable(fits: readonly Fit[], limit: number | undefined): Table {
  return {
    head: ['recipe', 'model', 'largest batch', 'peak', 'limit'],
    rows: fits.map(({ recipe, model, batch, peak }) => [
      recipe,
      batch > 0 ? model : `none, not even ${model}`,
      String(batch),
      batch > 0 ? showBytes(peak) : '',
      limit === undefined ? 'the device' : showBytes(limit),
    ]),
  }
}

/** The batch that fits and the bytes that it takes, recipe by recipe; 0 where none does. */
export function batchRows(fits: readonly Fit[], options: FitOptions): Row[] {
  return fits.flatMap(({ recipe, model, batch, peak }) => {
    const row = { ...limitedFields({ ...options, model }), kind: 'memory', recipe } as const
    return [
      makeRow({ ...row, name: `step/${model}/largest_batch`, metric: 'batch', unit: 'sequences' }, [batch]),
      makeRow({ ...row, name: `step/${model}/largest_batch/peak`, metric: 'bytes', unit: 'B' }, [peak]),
    ]
  })
}

/** The parameters of the largest model that fits, recipe by recipe; 0 where none does. */
export function modelRows(fits: readonly Fit[], options: FitOptions): Row[] {
  return fits.map(({ recipe, model, batch }) => {
    const { shape, ...fields } = limitedFields({ ...options, model })
    const { hidden: _hidden, layers: _layers, ...ways } = shape ?? {}
    const sizes = { batch: options.batch, ...ways }
    const row = { ...fields, shape: sizes, formats: { model }, kind: 'memory', recipe } as const
    const parameters = batch > 0 ? parametersOf(configOf(sizedFor({ ...options, model }))) : 0
    return makeRow({ ...row, name: 'step/largest_model', metric: 'parameters', unit: 'parameters' }, [parameters])
  })
}

function limitedFields(options: FitOptions): Partial<Row> {
  const { fields } = stepFields(sizedFor(options))
  const { batch: _, ...shape } = fields.shape ?? {}
  const { memoryLimit: limit } = options
  return { ...fields, shape: { ...shape, ...(limit === undefined ? {} : { limit }) } }
}
