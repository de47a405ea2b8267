// Trainer steps on random tokens: time, tokens per second, bytes by purpose, and what backward keeps by op and format.
import {
  type Batch,
  CoatError,
  type Dataset,
  type Device,
  type LedgerRow,
  LlamaForCausalLM,
  type RecipeName,
  type StepMetrics,
  Trainer,
} from '../lib/index.ts'
import { comparison, peakOf, peakQuantities, showBytes, showNumber, type Table } from '../lib/report.ts'
import { peakRows, percentile, type Row, recipeRows } from './row.ts'

export interface StepOptions {
  device: Device
  recipes: readonly RecipeName[]
  /** Steps that count, after one that does not. */
  steps: number
  hidden: number
  layers: number
  batch: number
  sequence: number
}

export const stepDefaults: Omit<StepOptions, 'device'> = {
  recipes: ['bf16', 'coat'],
  steps: 5,
  hidden: 256,
  layers: 4,
  batch: 8,
  sequence: 256,
}

const vocabulary = 256

/** What one recipe took. */
export interface StepResult {
  recipe: RecipeName
  steps: StepMetrics[]
  ledger: readonly LedgerRow[]
  parameters: number
  stateBytes: number
  /** Bytes that one more layer keeps for backward, by token. */
  savedPerTokenAndLayer: number
}

export async function stepBench(options: StepOptions): Promise<StepResult[]> {
  const results: StepResult[] = []
  for (const recipe of options.recipes) {
    const result = await train(recipe, options, options.steps + 1)
    const deeper = await train(recipe, { ...options, layers: options.layers + 1 }, 1)
    const more = peakOf(deeper.steps).saved - peakOf(result.steps).saved
    const savedPerTokenAndLayer = more / (options.batch * options.sequence)
    results.push({ ...result, recipe, steps: result.steps.slice(1), savedPerTokenAndLayer })
  }
  return results
}

async function train(recipe: RecipeName, { device, hidden, layers, batch, sequence }: StepOptions, steps: number) {
  const config = {
    vocab_size: vocabulary,
    hidden_size: hidden,
    intermediate_size: 16 * Math.round(hidden / 6),
    num_hidden_layers: layers,
    num_attention_heads: headsOf(hidden),
    max_position_embeddings: sequence,
    tie_word_embeddings: true,
  }
  using model = new LlamaForCausalLM(config, { recipe, device })
  using trainer = new Trainer(model, { data: randomTokens(sequence), batch, steps })
  const done: StepMetrics[] = []
  for await (const step of trainer.run()) done.push(step)
  return {
    steps: done,
    ledger: trainer.ledger,
    parameters: model.parameters().reduce((sum, { tensor }) => sum + tensor.numel, 0),
    stateBytes: trainer.optimizer.stateBytes,
  }
}

// Heads of 64, or of 16 or 32 in small models.
function headsOf(hidden: number): number {
  const size = [64, 32, 16].find((head) => hidden % head === 0 && hidden / head >= 2)
  if (size === undefined)
    throw new CoatError(`hidden is ${hidden} and must be a multiple of 16, at least 32`, 'value', 'step', 'hidden')
  return hidden / size
}

function randomTokens(sequence: number): Dataset {
  const batch = (index: number, size: number): Batch => {
    let state = index + 1
    const tokens = Int32Array.from({ length: size * sequence + 1 }, () => {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0
      return Math.floor((state / 2 ** 32) * vocabulary)
    })
    return { ids: tokens.slice(0, -1), targets: tokens.slice(1), sequence }
  }
  return { sequence, batch, validation: () => [] }
}

export function stepRows(results: readonly StepResult[], options: StepOptions): Row[] {
  const { device, hidden, layers, batch, sequence } = options
  const fields = { device: device.kind, shape: { hidden, layers, batch, sequence } }
  const step = { ...fields, kind: 'step' } as const
  const bytes = { ...fields, kind: 'memory', metric: 'bytes', unit: 'B' } as const
  return [
    ...recipeRows(results, { ...step, name: 'step/time', metric: 'time', unit: 'ms' }, ({ steps }) =>
      steps.map(({ time }) => time),
    ),
    ...recipeRows(results, { ...step, name: 'step/tokens', metric: 'tokens', unit: 'tokens/s' }, ({ steps }) =>
      steps.map(({ tokensPerSecond }) => tokensPerSecond),
    ),
    ...peakRows(results, 'step', fields),
    ...recipeRows(results, { ...bytes, name: 'step/saved_per_token_and_layer' }, (of) => [of.savedPerTokenAndLayer]),
    ...recipeRows(results, { ...bytes, name: 'step/state_per_parameter' }, (of) => [of.stateBytes / of.parameters]),
  ]
}

export function stepTable(results: readonly StepResult[]): Table {
  const quantity = (name: string, of: (result: StepResult) => number, show = showNumber) => ({
    name,
    values: results.map(of),
    show,
  })
  const median = (pick: (step: StepMetrics) => number) => (result: StepResult) => percentile(result.steps.map(pick), 50)
  return comparison(
    results.map(({ recipe }) => recipe),
    [
      quantity(
        'ms a step',
        median(({ time }) => time),
      ),
      quantity(
        'tokens/s',
        median((step) => step.tokensPerSecond),
      ),
      ...peakQuantities(results.map(({ steps }) => peakOf(steps))),
      quantity('saved bytes per token and layer', (result) => result.savedPerTokenAndLayer),
      quantity('state bytes per parameter', ({ stateBytes, parameters }) => stateBytes / parameters),
    ],
  )
}

/** What backward keeps, by op and format. */
export function ledgerTable({ ledger }: StepResult): Table {
  return {
    head: ['kept by', 'format', 'tensors', 'bytes'],
    rows: ledger.map(({ op, format, tensors, bytes }) => [op, format, String(tensors), showBytes(bytes)]),
  }
}
