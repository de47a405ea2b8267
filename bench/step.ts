// Trainer steps on random tokens: time and its parts, tokens and operations a second, bytes by purpose, and what backward
// keeps by op and format.
import { stepsBeforeGraph } from '../lib/graph.ts'
import {
  type Batch,
  type Dataset,
  type Device,
  type LedgerRow,
  LlamaForCausalLM,
  limitMemory,
  type Phase,
  type StepMetrics,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { type Bytes, native, type PoolUsage } from '../lib/native.ts'
import {
  comparison,
  peakOf,
  peakQuantities,
  purposes,
  showBytes,
  showNumber,
  showSplit,
  type Table,
} from '../lib/report.ts'
import { ceilingsOf } from './ceilings.ts'
import { Clock } from './clock.ts'
import { configOf, flopsPerToken, type SizeOptions } from './models.ts'
import type { NamedRecipe } from './options.ts'
import { makeRow, peakRows, type Row, recipeRows } from './row.ts'

export interface StepOptions extends SizeOptions {
  device: Device
  recipes: readonly NamedRecipe[]
  /** Steps that count, after one that does not, or with graphs those that run without and the one that is recorded. */
  steps: number
  batch: number
  /** Bytes that tensors may hold together. */
  memoryLimit?: number
  /** More options of the trainer, by name. */
  trainer?: Record<string, unknown>
}

export const stepDefaults = { steps: 5, batch: 8, sequence: 256 }

/** Milliseconds of one step's parts; `host` is what queueing them took. With graphs forward stands for backward, too. */
export interface Parts {
  forward: number
  backward: number
  update: number
  host: number
}
const partNames = ['forward', 'backward', 'update', 'host'] as const

/** What one recipe took. */
export interface StepResult {
  recipe: string
  steps: StepMetrics[]
  parts: Parts[]
  ledger: readonly LedgerRow[]
  parameters: number
  stateBytes: number
  /** What the device's pool held at most, and the driver counts as in use; null on the CPU. */
  pool: PoolUsage | null
  /** Bytes that one more layer keeps for backward, by token. */
  savedPerTokenAndLayer: number
}

export async function stepBench(options: StepOptions): Promise<StepResult[]> {
  const results: StepResult[] = []
  for (const recipe of options.recipes) {
    const savedBy = async (layers: number) => peakOf((await train(recipe, { ...options, layers }, 1)).steps).saved
    const more = (await savedBy(2)) - (await savedBy(1))
    const before = options.trainer?.graph === true ? stepsBeforeGraph + 1 : 1
    const result = await train(recipe, options, options.steps + before)
    results.push({
      ...result,
      recipe: recipe.name,
      steps: result.steps.slice(before),
      parts: result.parts.slice(before),
      savedPerTokenAndLayer: more / (options.batch * options.sequence),
    })
  }
  return results
}

export async function train({ recipe }: NamedRecipe, options: StepOptions, steps: number) {
  const { device, batch, sequence } = options
  const config = configOf(options)
  const clock = new Clock(device)
  let marks: { phase: Phase; mark: number; host: number }[] = []
  const phase = (part: Phase) => marks.push({ phase: part, mark: clock.mark(), host: performance.now() })
  limitMemory(options.memoryLimit ?? null)
  try {
    using model = new LlamaForCausalLM(config, { recipe, device })
    const data = randomTokens(sequence, config.vocab_size)
    using trainer = new Trainer(model, { data, batch, steps, phase, ...options.trainer } as TrainerOptions)
    const done: StepMetrics[] = []
    const parts: Parts[] = []
    for await (const step of trainer.run()) {
      if (done.length === 0 && steps > 1) native.note('measured', device.kind)
      done.push(step)
      parts.push(partsOf(marks, clock))
      marks = []
      clock.restart()
    }
    if (steps > 1) native.note('done', device.kind)
    await device.sync()
    return {
      steps: done,
      parts,
      ledger: trainer.ledger,
      parameters: model.parameters().reduce((sum, { tensor }) => sum + tensor.numel, 0),
      stateBytes: trainer.optimizer.stateBytes,
      pool: native.pool(),
    }
  } finally {
    limitMemory(null)
  }
}

function partsOf(marks: readonly { phase: Phase; mark: number; host: number }[], clock: Clock): Parts {
  const parts = { forward: 0, backward: 0, update: 0, host: 0 }
  marks.forEach(({ phase, mark, host }, i) => {
    const next = marks[i + 1]
    if (phase === 'end' || !next) return
    parts[phase] += clock.between(mark, next.mark)
    parts.host += next.host - host
  })
  return parts
}

function randomTokens(sequence: number, vocabulary: number): Dataset {
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

/** What rows about a model's steps share: the small model's names have none of their own. */
export function stepFields(options: Omit<StepOptions, 'recipes' | 'steps'>): { program: string; fields: Partial<Row> } {
  const { device, model, batch, sequence, trainer = {} } = options
  const { hidden_size: hidden, num_hidden_layers: layers } = configOf(options)
  const flags = Object.entries(trainer).filter(([, value]) => value === true)
  const ways = Object.fromEntries(flags.map(([name]) => [name, 1])) // graph, optimizerInBackward, …
  return {
    program: model === 'small' ? 'step' : `step/${model}`,
    fields: { device: device.kind, shape: { hidden, layers, batch, sequence, ...ways } },
  }
}

export function stepRows(results: readonly StepResult[], options: StepOptions): Row[] {
  const { program, fields } = stepFields(options)
  const step = { ...fields, kind: 'step' } as const
  const bytes = { ...fields, kind: 'memory', metric: 'bytes', unit: 'B' } as const
  const accumulate = Number(options.trainer?.accumulate ?? 1)
  const teraflop =
    (flopsPerToken(configOf(options), options.sequence) * options.batch * options.sequence * accumulate) / 1e12
  const rates = ({ steps }: StepResult) => steps.map(({ time }) => (teraflop / time) * 1000)
  const rows = [
    ...recipeRows(results, { ...step, name: `${program}/time`, metric: 'time', unit: 'ms' }, ({ steps }) =>
      steps.map(({ time }) => time),
    ),
    ...partNames.flatMap((part) =>
      recipeRows(results, { ...step, name: `${program}/${part}`, metric: 'time', unit: 'ms' }, ({ parts }) =>
        parts.map((of) => of[part]),
      ),
    ),
    ...recipeRows(results, { ...step, name: `${program}/tokens`, metric: 'tokens', unit: 'tokens/s' }, ({ steps }) =>
      steps.map(({ tokensPerSecond }) => tokensPerSecond),
    ),
    ...recipeRows(results, { ...step, name: `${program}/flops`, metric: 'flops', unit: 'TFLOP/s' }, rates),
    ...peakRows(results, program, fields),
    ...purposes.flatMap((purpose) =>
      recipeRows(results, { ...bytes, name: `${program}/at_peak/${purpose}` }, ({ steps }) => [
        atPeakOf(steps)[purpose],
      ]),
    ),
    ...recipeRows(results, { ...bytes, name: `${program}/saved_per_token_and_layer` }, (of) => [
      of.savedPerTokenAndLayer,
    ]),
    ...recipeRows(results, { ...bytes, name: `${program}/state_per_parameter` }, (of) => [
      of.stateBytes / of.parameters,
    ]),
  ]
  for (const result of results) {
    const { recipe, pool, ledger } = result
    for (const [name, value] of Object.entries(
      pool ? { used: pool.usedPeak, reserved: pool.reservedPeak, driver: pool.total - pool.free } : {},
    ))
      rows.push(makeRow({ ...bytes, recipe, name: `${program}/${name}` }, [value]))
    for (const { op, format, bytes: kept } of ledger)
      rows.push(makeRow({ ...bytes, recipe, name: `${program}/saved/${op}`, formats: { saved: format } }, [kept]))
    for (const { name, peak } of peaksOf(options.device))
      rows.push(
        makeRow(
          { ...step, recipe, name: `${program}/utilisation/${name}`, metric: 'share', unit: '%' },
          rates(result).map((rate) => (100 * rate) / peak),
        ),
      )
  }
  return rows
}

/** Rates of the device's tensor cores, TFLOP/s. */
function peaksOf({ description }: Device): { name: string; peak: number }[] {
  const ceilings = ceilingsOf(description)
  return ceilings ? (['bf16', 'fp8'] as const).map((name) => ({ name, peak: ceilings[name] })) : []
}

/** What the numbers are of, how each recipe does against bf16, and where the bytes of the peak are. */
export function stepNotes(results: readonly StepResult[], options: StepOptions): string[] {
  const { program } = stepFields(options)
  const rows = stepRows(results, options)
  return [
    ...timingNotes(rows, `${program}/time`, options.device, 1),
    ...results.map(({ recipe, steps, pool }) => {
      const split = `${recipe}, at its peak: ${showSplit(atPeakOf(steps))}`
      return pool ? `${split}; in use by the driver's count: ${showBytes(pool.usedPeak)}` : split
    }),
  ]
}

/** Of the times of a name: device, sizes, warm-up, how many and how they spread, and which is slower than bf16. */
export function timingNotes(rows: readonly Row[], name: string, { description }: Device, warmUp: number): string[] {
  const times = rows.filter((row) => row.name === name)
  const [{ shape, n } = { shape: {}, n: 0 }] = times
  const sizes = Object.entries(shape).map(([letter, size]) => `${letter} ${size}`)
  const spread = ({ recipe, p20, p80 }: Row) => `${recipe} ${showNumber(p20)} to ${showNumber(p80)}`
  const bf16 = times.find(({ recipe }) => recipe === 'bf16')
  const verdict = (row: Row, base: Row) => {
    const ratio = row.median / base.median
    const overlap = row.p20 <= base.p80 && base.p20 <= row.p80 ? ', within their spreads' : ''
    const word = ratio > 1 ? 'slower' : ratio < 1 ? 'faster' : 'the same'
    return `${row.recipe} takes ${ratio.toFixed(3)} × the time of bf16: ${word}${overlap}`
  }
  return [
    `${description}; ${sizes.join(', ')}`,
    `${warmUp} to warm up, then medians of n = ${n}; ms from p20 to p80: ${times.map(spread).join(', ')}`,
    ...(bf16
      ? times.filter((row) => row !== bf16).map((row) => verdict(row, bf16))
      : ['bf16 is not among the recipes: there is no baseline']),
  ]
}

/** What was held at the peak of the steps. */
function atPeakOf(steps: readonly StepMetrics[]): Bytes {
  const all = steps.map(({ memory }) => memory.atPeak)
  return all.reduce((most, one) => (one.total > most.total ? one : most))
}

export function stepTable(results: readonly StepResult[], options: StepOptions): Table {
  const rows = stepRows(results, options)
  const { program } = stepFields(options)
  const row = (recipe: string, name: string) =>
    rows.find((one) => one.recipe === recipe && one.name === `${program}/${name}`)
  const quantity = (text: string, name: string, show = showNumber) =>
    rows.some((one) => one.name === `${program}/${name}`)
      ? [{ name: text, values: results.map(({ recipe }) => row(recipe, name)?.median ?? 0), show }]
      : []
  return comparison(
    results.map(({ recipe }) => recipe),
    [
      ...quantity('ms a step', 'time'),
      ...partNames.flatMap((part) => quantity(part === 'host' ? 'ms to queue it' : `ms of ${part}`, part)),
      ...quantity('tokens/s', 'tokens'),
      ...quantity('TFLOP/s of the model', 'flops'),
      ...peaksOf(options.device).flatMap(({ name, peak }) =>
        quantity(`% of ${peak} TFLOP/s (${name})`, `utilisation/${name}`),
      ),
      ...peakQuantities(results.map(({ steps }) => peakOf(steps))),
      ...quantity('in use of the pool at its peak', 'used', showBytes),
      ...quantity('reserved by the pool', 'reserved', showBytes),
      ...quantity('in use on the device', 'driver', showBytes),
      ...quantity('saved bytes per token and layer', 'saved_per_token_and_layer'),
      ...quantity('state bytes per parameter', 'state_per_parameter'),
    ],
  )
}

/** What backward keeps, by op and format. */
export function ledgerTable(ledger: readonly LedgerRow[]): Table {
  return {
    head: ['kept by', 'format', 'tensors', 'bytes'],
    rows: ledger.map(({ op, format, tensors, bytes }) => [op, format, String(tensors), showBytes(bytes)]),
  }
}
