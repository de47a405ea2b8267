// coat-bench recipes: every recipe trained on the same text from the same seed, in one table.
import {
  adamw,
  CoatError,
  cosine,
  type Device,
  LlamaForCausalLM,
  memory,
  parameterBytes,
  type StepMetrics,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { htmlTable, Progress, pageHtml, peakOf, type Run, showBytes, showNumber, type Table } from '../lib/report.ts'
import { corpus } from './corpus.ts'
import { configOf, quickstart } from './models.ts'
import type { NamedRecipe } from './options.ts'
import { percentile, type Row, recipeRows } from './row.ts'

export interface RecipesOptions {
  recipes: readonly NamedRecipe[]
  device: Device
  steps: number
  batch: number
  sequence: number
  /** Width of the model, where not that of the quick start. */
  hidden?: number
  layers?: number
  lr: number
}

export const recipesDefaults = {
  steps: 100,
  batch: quickstart.batch,
  sequence: quickstart.sequence,
  lr: quickstart.lr,
}

/** What one recipe came to. */
export interface RecipeResult extends Run {
  steps: readonly StepMetrics[]
  /** Nats a byte of held-out text; NaN where training had to stop. */
  validation: number
  /** Why it had to. */
  stopped: string | null
  /** Whether its arithmetic is imitated, so that rates say nothing and bytes are those of f32. */
  emulated: boolean
  /** Bytes of a parameter, its state and its gradient: by the recipe's formats, and as the update began. */
  predicted: number
  measured: number
}

export async function recipesBench(options: RecipesOptions): Promise<RecipeResult[]> {
  const data = new TextDataset(corpus(), { sequence: options.sequence, seed: quickstart.seed })
  const results: RecipeResult[] = []
  for (const recipe of options.recipes) results.push(await trained(recipe, data, options))
  return results
}

function configFor({ hidden, layers, sequence }: RecipesOptions) {
  const { config } = quickstart
  if (hidden !== undefined) return configOf({ model: 'small', hidden, sequence, ...(layers ? { layers } : {}) })
  return {
    ...config,
    num_hidden_layers: layers ?? config.num_hidden_layers,
    max_position_embeddings: Math.max(sequence, config.max_position_embeddings),
  }
}

async function trained(
  { name, recipe }: NamedRecipe,
  data: TextDataset,
  options: RecipesOptions,
): Promise<RecipeResult> {
  const { device, steps, batch, lr } = options
  const held = () => {
    const { param, state, grad } = memory().live
    return param + state + grad
  }
  const before = held()
  let bytes = 0
  using model = new LlamaForCausalLM(configFor(options), { recipe, device, seed: quickstart.seed })
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
  const parameters = model.parameters().reduce((sum, { tensor }) => sum + tensor.numel, 0)
  return {
    recipe: name,
    steps: done,
    validation: stopped === null ? await trainer.validate(128) : Number.NaN,
    stopped,
    emulated: Boolean(recipe.emulated),
    predicted: parameterBytes(recipe).total,
    measured: bytes / parameters,
  }
}

// The first steps also compile and allocate.
const ratesOf = ({ steps }: RecipeResult) => {
  const rates = steps.map(({ tokensPerSecond }) => tokensPerSecond)
  return rates.length > 4 ? rates.slice(2) : rates
}

export function recipesTable(results: readonly RecipeResult[]): Table {
  const base = results.find(({ recipe }) => recipe === 'bf16')?.validation
  const loss = (x: number) => (Number.isFinite(x) ? x.toFixed(4) : 'stopped')
  const difference = (x: number) => (base === undefined || !Number.isFinite(x) ? '-' : signed(x - base))
  return {
    head: ['recipe', 'held-out loss', 'less bf16', 'B/param by formats', 'measured', 'kept for backward', 'tokens/s'],
    rows: results.map((result) => [
      result.emulated ? `${result.recipe} (emulated)` : result.recipe,
      loss(result.validation),
      difference(result.validation),
      result.predicted.toFixed(3),
      result.measured.toFixed(3),
      showBytes(peakOf(result.steps).saved),
      result.steps.length === 0 ? '-' : showNumber(percentile(ratesOf(result), 50)),
    ]),
  }
}

function signed(x: number): string {
  return `${x < 0 ? '' : '+'}${x.toFixed(4)}`
}

export function recipesRows(results: readonly RecipeResult[], options: RecipesOptions): Row[] {
  const { device, steps, batch, sequence } = options
  const { hidden_size: hidden, num_hidden_layers: layers } = configFor(options)
  const fields = { device: device.kind, shape: { hidden, layers, batch, sequence, steps } }
  const train = { ...fields, kind: 'train' } as const
  const state = { ...fields, kind: 'state', metric: 'bytes', unit: 'B/parameter' } as const
  const bytes = { ...fields, kind: 'memory', metric: 'bytes', unit: 'B' } as const
  const ended = results.filter(({ stopped }) => stopped === null)
  return [
    ...recipeRows(ended, { ...train, name: 'recipes/validation', metric: 'loss', unit: 'nats' }, (result) => [
      result.validation,
    ]),
    ...recipeRows(ended, { ...train, name: 'recipes/tokens', metric: 'tokens', unit: 'tokens/s' }, ratesOf),
    ...recipeRows(results, { ...state, name: 'recipes/bytes/predicted' }, (result) => [result.predicted]),
    ...recipeRows(results, { ...state, name: 'recipes/bytes/measured' }, (result) => [result.measured]),
    ...recipeRows(results, { ...bytes, name: 'recipes/saved' }, ({ steps }) => [peakOf(steps).saved]),
  ]
}

export async function recipesHtml(results: readonly RecipeResult[], options: RecipesOptions): Promise<string> {
  const { steps, batch, sequence, device } = options
  const { lossChart } = await import('../lib/charts.ts')
  const chart = lossChart(
    results.map(({ recipe, steps, validation }) => ({
      name: recipe,
      values: steps.map(({ loss }) => loss),
      final: Number.isFinite(validation) ? validation : null,
    })),
  )
  const note = `${steps} steps of ${batch} × ${sequence} bytes of the State of the Union addresses on ${device.kind.toUpperCase()}, the same seed and batches for every recipe. Losses are nats a byte; bytes a parameter are those of parameter, optimizer state and gradient.`
  const stops = results.flatMap(({ recipe, stopped }) => (stopped === null ? [] : [`${recipe}: ${stopped}`]))
  return pageHtml(
    'coat-fp8 recipes',
    [note, ...stops],
    [
      { heading: 'Numbers', body: htmlTable(recipesTable(results)) },
      { heading: 'Loss', body: chart },
    ],
  )
}
