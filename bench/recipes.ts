// coat-bench recipes: every recipe trained on the same text from the same seed, in one table.
import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import {
  adamw,
  CoatError,
  cosine,
  type Device,
  type LlamaConfig,
  LlamaForCausalLM,
  memory,
  parameterBytes,
  type StepMetrics,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { claim, htmlTable, Progress, pageHtml, peakOf, writeWhole } from '../lib/report.ts'
import { corpus } from './corpus.ts'
import { checkSetup, fileNameOf } from './kept.ts'
import { quickstart } from './models.ts'
import type { NamedRecipe } from './options.ts'
import { makeRow, type Origin, originOf, percentile, type Row, recipeTable } from './row.ts'

export interface RecipesOptions {
  recipes: readonly NamedRecipe[]
  device: Device
  steps: number
  /** Of recipes whose arithmetic is emulated, which takes longer. */
  emulatedSteps: number
  hidden: number
  inner: number
  layers: number
  heads: number
  batch: number
  sequence: number
  lr: number
  /** Where finished runs are kept: a call that finds them there trains the others alone. */
  dir?: string
  /** Asked before every run: whether to stop here and go on at the next call. */
  spent?: () => boolean
}

const { config: usual } = quickstart

export const recipesDefaults = {
  steps: 100,
  emulatedSteps: 20,
  hidden: usual.hidden_size as number,
  inner: usual.intermediate_size as number,
  layers: usual.num_hidden_layers as number,
  heads: usual.num_attention_heads as number,
  batch: quickstart.batch as number,
  sequence: quickstart.sequence as number,
  lr: quickstart.lr as number,
}

interface PlannedRun extends NamedRecipe {
  emulated: boolean
  steps: number
}

/** What one recipe came to: plain JSON. */
export interface RecipeResult {
  recipe: string
  /** Whether its arithmetic is emulated: the losses are its own, bytes and rate are those of the emulation. */
  emulated: boolean
  /** Steps that it was to do. */
  steps: number
  losses: readonly number[]
  /** Tokens a second, step by step. */
  rates: readonly number[]
  /** Most bytes kept for backward. */
  saved: number
  /** Nats a byte of held-out text; null where training had to stop. */
  validation: number | null
  /** Why it had to. */
  stopped: string | null
  /** Bytes of a parameter, its state and its gradient: by the recipe's formats, and as the update began. */
  predicted: number
  measured: number
  origin: Origin
}

/** Runs what is not done yet; `complete` says whether everything is. */
export async function recipesBench(options: RecipesOptions): Promise<{ results: RecipeResult[]; complete: boolean }> {
  const { dir, sequence, spent } = options
  if (dir) {
    claim(join(dir, 'setup.json'))
    checkSetup('recipes', dir, setupOf(options))
  }
  const data = new TextDataset(corpus(), { sequence, seed: quickstart.seed })
  const results: RecipeResult[] = []
  for (const run of plannedRuns(options)) {
    const file = dir && join(dir, `${fileNameOf(run.name)}-${run.steps}.json`)
    if (file && existsSync(file)) {
      results.push(JSON.parse(readFileSync(file, 'utf8')))
      continue
    }
    if (spent?.()) return { results, complete: false }
    const result = await trained(run, data, options)
    if (file) writeWhole(file, `${JSON.stringify(result)}\n`)
    results.push(result)
  }
  return { results, complete: true }
}

/** The runs by length, in each of which bf16 is the first: the others are compared with the one that is as long. */
function plannedRuns({ recipes, steps, emulatedSteps }: RecipesOptions): PlannedRun[] {
  const runs = recipes.map((named) => {
    const emulated = Boolean(named.recipe.emulated)
    return { ...named, emulated, steps: emulated ? Math.min(steps, emulatedSteps) : steps }
  })
  const base = runs.find(({ name }) => name === 'bf16')
  return [...new Set(runs.map((run) => run.steps))]
    .sort((a, b) => b - a)
    .flatMap((length) => [
      ...(base ? [{ ...base, steps: length }] : []),
      ...runs.filter((run) => run !== base && run.steps === length),
    ])
}

function setupOf({ device, ...options }: RecipesOptions) {
  const { hidden, inner, layers, heads, batch, sequence, lr } = options
  return { hidden, inner, layers, heads, batch, sequence, lr, device: device.kind }
}

function configOf({ hidden, inner, layers, heads, sequence }: RecipesOptions): LlamaConfig {
  return {
    ...usual,
    hidden_size: hidden,
    intermediate_size: inner,
    num_hidden_layers: layers,
    num_attention_heads: heads,
    max_position_embeddings: Math.max(sequence, usual.max_position_embeddings),
    // as the quick start has it at its width
    initializer_range: usual.initializer_range * Math.sqrt(usual.hidden_size / hidden),
  }
}

async function trained(
  { name, recipe, emulated, steps }: PlannedRun,
  data: TextDataset,
  options: RecipesOptions,
): Promise<RecipeResult> {
  const { device, batch, lr } = options
  const held = () => {
    const { param, state, grad } = memory().live
    return param + state + grad
  }
  const before = held()
  let bytes = 0
  using model = new LlamaForCausalLM(configOf(options), { recipe, device, seed: quickstart.seed })
  using trainer = new Trainer(model, {
    data,
    batch,
    steps,
    optimizer: adamw({ lr, betas: [0.9, 0.95], weightDecay: 0.1 }),
    schedule: cosine({ warmup: Math.min(quickstart.warmup, steps) }),
    clip: 1,
    phase: (part) => {
      if (part === 'update') bytes = held() - before
    },
  })
  const done: StepMetrics[] = []
  let stopped: string | null = null
  {
    using progress = new Progress(name, steps)
    try {
      for await (const step of trainer.run()) {
        done.push(step)
        progress.update(step)
      }
    } catch (error) {
      if (!(error instanceof CoatError && error.code === 'diverged')) throw error
      stopped = error.message
    }
  }
  const validation = stopped === null ? await trainer.validate(128) : null
  return {
    recipe: name,
    emulated,
    steps,
    losses: done.map(({ loss }) => loss),
    rates: done.map(({ tokensPerSecond }) => tokensPerSecond),
    saved: peakOf(done).saved,
    validation: Number.isFinite(validation) ? validation : null,
    stopped: stopped ?? (Number.isFinite(validation) ? null : `the held-out loss is ${validation}`),
    predicted: parameterBytes(recipe).total,
    measured: bytes / model.parameters().reduce((sum, { tensor }) => sum + tensor.numel, 0),
    origin: originOf(device.kind),
  }
}

// The first steps also compile and allocate.
const settledRates = ({ rates }: RecipeResult) => (rates.length > 4 ? rates.slice(2) : rates)

/** bf16 over as many steps. */
function baseOf(result: RecipeResult, results: readonly RecipeResult[]): RecipeResult | undefined {
  return results.find((other) => other.recipe === 'bf16' && other.steps === result.steps && other !== result)
}

const labelOf = ({ recipe, emulated }: RecipeResult) => (emulated ? `${recipe} (emulated)` : recipe)

export function recipesRows(results: readonly RecipeResult[], options: RecipesOptions): Row[] {
  const { device, hidden, inner, layers, heads, batch, sequence } = options
  const sizes = { hidden, inner, layers, heads, batch, sequence }
  const rows = (
    quantity: Pick<Row, 'kind' | 'name' | 'metric' | 'unit'>,
    of: readonly RecipeResult[],
    values: (result: RecipeResult) => readonly number[],
  ) =>
    of.map((result) => {
      const base = baseOf(result, of)
      const shape = { ...sizes, steps: result.steps, ...(result.emulated ? { emulated: 1 } : {}) }
      const baseline = base ? { name: 'bf16', median: percentile(values(base), 50) } : null
      const fields = { ...quantity, ...result.origin, recipe: result.recipe, device: device.kind, shape, baseline }
      return makeRow(fields, values(result))
    })
  const bytes = { metric: 'bytes', unit: 'B/parameter' } as const
  const ended = results.filter(({ stopped }) => stopped === null)
  return [
    ...rows({ kind: 'state', name: 'recipes/bytes/predicted', ...bytes }, results, ({ predicted }) => [predicted]),
    ...rows({ kind: 'state', name: 'recipes/bytes/measured', ...bytes }, results, ({ measured }) => [measured]),
    ...rows({ kind: 'memory', name: 'recipes/saved', metric: 'bytes', unit: 'B' }, results, ({ saved }) => [saved]),
    ...rows({ kind: 'train', name: 'recipes/validation', metric: 'loss', unit: 'nats' }, ended, ({ validation }) => [
      validation as number,
    ]),
    ...rows({ kind: 'train', name: 'recipes/tokens', metric: 'tokens', unit: 'tokens/s' }, ended, settledRates),
  ]
}

/** As many beside bf16 as a chart has colours. */
const curvesPerChart = 5

export async function recipesHtml(results: readonly RecipeResult[], options: RecipesOptions): Promise<string> {
  const { batch, sequence, device, hidden, layers } = options
  const { lossChart } = await import('../lib/charts.ts')
  const charts: string[] = []
  for (const steps of new Set(results.map((result) => result.steps))) {
    const long = results.filter((result) => result.steps === steps)
    const base = long.filter(({ recipe }) => recipe === 'bf16')
    const others = long.filter((result) => !base.includes(result))
    for (let i = 0; i === 0 || i < others.length; i += curvesPerChart)
      charts.push(
        lossChart(
          [...base, ...others.slice(i, i + curvesPerChart)].map((result) => ({
            name: labelOf(result),
            values: result.losses,
            final: result.validation,
          })),
        ),
      )
  }
  const note = `A Llama of ${layers} layers and width ${hidden} on the State of the Union addresses, ${batch} × ${sequence} bytes a step, on ${device.kind.toUpperCase()}: the same seed and batches for every recipe. Losses are nats a byte, and compared with bf16 over as many steps; bytes a parameter are those of parameter, optimizer state and gradient.`
  const emulated = results.some((result) => result.emulated)
    ? ['Of emulated recipes the losses count; bytes and tokens a second are those of the emulation.']
    : []
  const stops = results.flatMap((result) => (result.stopped === null ? [] : [`${result.recipe}: ${result.stopped}`]))
  return pageHtml(
    'coat-fp8 recipes',
    [note, ...emulated, ...stops],
    [
      { heading: 'Numbers', body: htmlTable(recipeTable(recipesRows(results, options))) },
      { heading: 'Loss', body: charts.join('\n') },
    ],
  )
}
