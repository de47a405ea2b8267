// Controllers: which recipe a training has — switched when gradients stop to agree, picked under a budget of bytes, searched
// layer by layer — and how one training goes on from what another has come to.
import { type RecipeChange, recipe } from './axes.ts'
import type { Param } from './modules.ts'
import { CoatError, native } from './native.ts'
import { GradientDiversity } from './probes.ts'
import type { Recipe, RecipeName } from './recipes.ts'
import { scope, Tensor } from './tensor.ts'
import type { Phase, StepMetrics, Trainer } from './trainer.ts'

function demand(name: string, argument: string, value: unknown, holds: boolean, rule: string): void {
  if (!holds) throw new CoatError(`${name}: ${argument} is ${value} and must be ${rule}`, 'value', name, argument)
}

/** Changes the values of a parameter, the i-th of those that are trained. */
export type ChangeValues = (values: Float32Array, param: Param, i: number) => Promise<void>

/**
 * Gives a trainer what another has come to: parameters, what they have lost to rounding, moments, steps and place in the data, each
 * rounded to its own formats; where these are the same, bit for bit. Both train models of the same sizes. `change` is applied to
 * the values of trained parameters on the way.
 */
export async function handOver(from: Trainer, to: Trainer, change: ChangeValues | null = null): Promise<void> {
  const sources = new Map(from.model.parameters().map((param) => [param.name, param]))
  const trained = (trainer: Trainer) => trainer.optimizer.params
  for (const param of to.model.parameters()) {
    const source = sources.get(param.name)
    if (!source || `${source.tensor.shape}` !== `${param.tensor.shape}` || source.frozen !== param.frozen)
      throw new CoatError(
        `handOver: '${param.name}' [${param.tensor.shape.join(', ')}] must be in both models, trained or frozen in both`,
        'state',
        'handOver',
        param.name,
      )
    if (param.frozen) {
      param.write((await source.tensor.read()) as Float32Array)
      continue
    }
    const i = trained(to).indexOf(param)
    const [old, own] = [from.optimizer.stateOf(source), to.optimizer.stateOf(param)]
    const pairs: Pair[] = [
      [source.tensor, param.tensor],
      [old.master, own.master],
      [old.lost, own.lost],
    ]
    if (!change && pairs.every(([a, b]) => a?.format === b?.format))
      for (const [a, b] of pairs) {
        if (a && b) await copyBytes(a, b)
      }
    else {
      const values = (await (old.master ?? source.tensor).read()) as Float32Array
      if (old.lost) addTo(values, (await old.lost.read()) as Float32Array)
      await change?.(values, param, i)
      param.write(values)
      if (own.master) assign(own.master, values)
      if (own.lost) {
        const rounded = (await param.tensor.read()) as Float32Array
        assign(
          own.lost,
          values.map((value, k) => value - (rounded[k] as number)),
        )
      }
    }
    for (const moment of ['m', 'v'] as const) {
      const [source, target] = [old[moment], own[moment]]
      if (source && target) await copyMoment(source, target, moment)
    }
  }
  to.optimizer.steps = from.optimizer.steps
  to.batches = from.batches
  to.skippedSteps = from.skippedSteps
  to.lastNorm = from.lastNorm
  if (from.guard) to.guard?.restore(from.guard.state())
  if (from.lossScale) to.lossScale?.restore(from.lossScale.state())
  if (from.exchange) to.exchange?.restore(from.exchange.state())
}

type Pair = readonly [Tensor | null, Tensor | null]

function addTo(values: Float32Array, more: Float32Array): void {
  for (let i = 0; i < values.length; i++) values[i] = (values[i] as number) + (more[i] as number)
}

function assign(to: Tensor, values: Float32Array): void {
  const { shape, format, device } = to
  scope(() => native.assign(to.handle, Tensor.from(values, shape, { format, device }).handle))
}

async function copyBytes(from: Tensor, to: Tensor): Promise<void> {
  native.write(to.handle, await from.readBytes())
}

// Second moments are divided by: formats that would store the small ones as 0 have a conversion that does not.
const floored: readonly string[] =
  native
    .table()
    .find(({ name }) => name === 'convert_floored')
    ?.arguments.at(-1)?.formats ?? []

async function copyMoment(from: Tensor, to: Tensor, moment: 'm' | 'v'): Promise<void> {
  if (from.format === to.format) return await copyBytes(from, to)
  const convert = moment === 'v' && floored.includes(to.format) ? native.convert_floored : native.convert
  const plain = native.convert(from.handle, null, 'f32')
  const made = (convert as (x: number, scale: null, y: string) => number)(plain, null, to.format)
  try {
    native.write(to.handle, new Uint8Array(await native.read(made)))
  } finally {
    for (const handle of [plain, made]) native.free(handle)
  }
}

export interface SwitchOptions {
  /** The threshold alpha + beta e^(-lambda epoch) that the quotient of diversities must pass (defaults 1, 1.5 and 0.1). */
  alpha?: number
  beta?: number
  lambda?: number
  /** Windows that pass it before the precision changes (default 2); they need not follow each other. */
  patience?: number
}

/** MuPPET's rule (arXiv 2006.09049): when the precision is to go up, from the diversity of the gradients of each window. */
export class PrecisionSwitch {
  readonly options: Required<SwitchOptions>
  /** Windows since the last switch that passed the threshold. */
  violations = 0
  /** The largest diversity since the last switch. */
  largest = 0

  constructor(options: SwitchOptions = {}) {
    this.options = { alpha: 1, beta: 1.5, lambda: 0.1, patience: 2, ...options }
    const { patience } = this.options
    demand(
      'PrecisionSwitch',
      'patience',
      patience,
      Number.isSafeInteger(patience) && patience >= 1,
      'an integer of at least 1',
    )
  }

  threshold(epoch: number): number {
    const { alpha, beta, lambda } = this.options
    return alpha + beta * Math.exp(-lambda * epoch)
  }

  /** Takes a window that ended with this epoch, counted from 0; whether to switch now. */
  observe(epoch: number, diversity: number): boolean {
    this.largest = Math.max(this.largest, diversity)
    if (this.largest / diversity > this.threshold(epoch)) this.violations += 1
    if (this.violations < this.options.patience) return false
    this.violations = 0
    this.largest = 0
    return true
  }
}

export interface MuppetOptions extends SwitchOptions {
  /** From the first to the last, in which training then stays. */
  recipes: readonly (RecipeName | Recipe | RecipeChange)[]
  /** Steps of an epoch; the gradient of the last one is taken. */
  epoch: number
  /** Epochs of a window (default 3). */
  window?: number
  /**
   * Makes a model and its trainer for a recipe, with the given `phase` among its options: the same sizes, data and steps each
   * time. Both are disposed of when the next recipe takes over.
   */
  build(recipe: Recipe, phase: (part: Phase) => void): Trainer
}

/** A training that begins in one precision and goes up through others as its gradients stop to agree. Owns its trainer. */
export class Muppet implements Disposable {
  readonly options: Required<Pick<MuppetOptions, 'epoch' | 'window' | 'build'>> & { recipes: readonly Recipe[] }
  readonly rule: PrecisionSwitch
  /** Place of the recipe in the list. */
  level = 0
  /** Diversities of the windows so far, with the epochs that they ended with. */
  readonly windows: { epoch: number; diversity: number; level: number }[] = []
  #trainer: Trainer
  #gradients: GradientDiversity

  constructor({ recipes, epoch, window = 3, build, ...rule }: MuppetOptions) {
    demand('Muppet', 'recipes', recipes.length, recipes.length >= 1, 'at least 1')
    for (const [name, value] of Object.entries({ epoch, window }))
      demand('Muppet', name, value, Number.isSafeInteger(value) && value >= 1, 'an integer of at least 1')
    this.options = { recipes: recipes.map(recipe), epoch, window, build }
    this.rule = new PrecisionSwitch(rule)
    this.#trainer = this.#build()
    this.#gradients = new GradientDiversity(this.#trainer.model)
  }

  get trainer(): Trainer {
    return this.#trainer
  }

  /** The steps of all trainers, one after the other. */
  async *run(): AsyncGenerator<StepMetrics, void, void> {
    for (let ended = false; !ended; ) {
      ended = true
      for await (const metrics of this.#trainer.run()) {
        const rises = await this.#after(metrics)
        if (rises) await this.#rise()
        yield metrics
        if (!rises) continue
        ended = false
        break
      }
    }
  }

  /** Whether the next recipe takes over. */
  async #after({ step, skipped, lossScale }: StepMetrics): Promise<boolean> {
    const { epoch, window, recipes } = this.options
    await this.#gradients.settle(!skipped, lossScale)
    if (skipped || step % (epoch * window) !== 0 || this.level + 1 === recipes.length) return false
    const { count } = this.#gradients
    demand('Muppet', 'phase', 'not called', count > 0, 'among the options of the trainer')
    const last = step / epoch - 1
    const diversity = await this.#gradients.take()
    if (count < window) return false // a training that was resumed within it
    this.windows.push({ epoch: last, diversity, level: this.level })
    return this.rule.observe(last, diversity)
  }

  async #rise(): Promise<void> {
    const before = this.#trainer
    this.level += 1
    const next = this.#build()
    await handOver(before, next)
    this.#release()
    this.#trainer = next
    this.#gradients = new GradientDiversity(next.model)
  }

  #build(): Trainer {
    const { recipes, build } = this.options
    return build(recipes[this.level] as Recipe, (part) => {
      if (part === 'update' && this.#samples()) this.#gradients.sample()
    })
  }

  /** Whether the step that goes on ends an epoch whose gradient is wanted. */
  #samples(): boolean {
    const { epoch, recipes } = this.options
    return (this.#trainer.optimizer.steps + 1) % epoch === 0 && this.level + 1 < recipes.length
  }

  #release(): void {
    this.#gradients.dispose()
    this.#trainer.dispose()
    this.#trainer.model.dispose()
  }
  [Symbol.dispose](): void {
    this.#release()
  }
}

export interface PickOptions {
  /** Errors of the configurations in other tasks, a row a task; NaN where one is not known. */
  errors: readonly (readonly number[])[]
  /** Bytes of each configuration. */
  bytes: readonly number[]
  /** The most that the picked one may take. */
  budget: number
  /** The most that a configuration may take to be measured (default: the budget). */
  cheap?: number
  /** Terms of the sums that errors are taken for (default 1). */
  rank?: number
  /** Configurations that are measured (default: as many as terms). */
  measured?: number
  /** The error of a configuration in the new task. */
  measure(configuration: number): Promise<number>
}

/** A configuration under a budget, and what was found on the way. */
export interface Picked {
  configuration: number
  /** Errors in the new task: measured, or predicted. */
  errors: readonly number[]
  /** Configurations that were measured, in their order. */
  measured: readonly number[]
  /** Configurations than which none is better in both error and bytes, the smallest first. */
  front: readonly number[]
}

/**
 * The best configuration under a budget in a new task, of which a few cheap ones are measured (PEPPP, arXiv 2106.09686): errors
 * are taken for sums of products of what a task and what a configuration has. Those are measured that tell the most of a task.
 */
export async function pickConfiguration(options: PickOptions): Promise<Picked> {
  const { errors, bytes, budget, cheap = budget, rank = 1, measured = rank, measure } = options
  const say = (argument: string, value: unknown, holds: boolean, rule: string) =>
    demand('pickConfiguration', argument, value, holds, rule)
  const count = bytes.length
  say(
    'errors',
    `rows of ${errors.map((row) => row.length)}`,
    errors.length > 0 && errors.every((row) => row.length === count),
    `rows of ${count}, as many as bytes`,
  )
  say('rank', rank, Number.isSafeInteger(rank) && rank >= 1 && rank <= measured, 'an integer from 1 to measured')
  const affordable = bytes.flatMap((size, i) => (size <= budget ? [i] : []))
  const candidates = bytes.flatMap((size, i) => (size <= cheap ? [i] : []))
  say('budget', budget, affordable.length > 0, `at least the bytes of a configuration, ${Math.min(...bytes)}`)
  say('measured', measured, candidates.length >= measured, `at most ${candidates.length}, those within cheap`)
  const traits = traitsOf(errors, rank)
  const chosen = telling(traits, candidates, measured)
  const found = new Map<number, number>()
  for (const i of chosen) found.set(i, await measure(i))
  const task = leastSquares(
    chosen.map((i) => traits[i] as number[]),
    [...found.values()],
  )
  const predicted = traits.map((trait, i) => found.get(i) ?? inner(trait, task))
  const at = (i: number) => predicted[i] as number
  const best = affordable.reduce((least, i) => (at(i) < at(least) ? i : least))
  const order = bytes.map((_, i) => i).sort((a, b) => (bytes[a] as number) - (bytes[b] as number) || at(a) - at(b))
  let least = Number.POSITIVE_INFINITY
  const front = order.filter((i) => {
    if (!(at(i) < least)) return false
    least = at(i)
    return true
  })
  return { configuration: best, errors: predicted, measured: chosen, front }
}

/** Sweeps of alternating least squares: known tasks are few, and one sweep is exact where errors are of one term. */
const sweeps = 200

/** What each configuration has, [configurations][rank], so that errors are inner products with what each task has. */
function traitsOf(errors: readonly (readonly number[])[], rank: number): number[][] {
  const across = (errors[0] as readonly number[]).map((_, i) => errors.map((row) => row[i] as number))
  // any start will do that is not orthogonal to the answer
  let traits = across.map((_, i) => Array.from({ length: rank }, (_, k) => Math.cos((i + 1) * k)))
  for (let sweep = 0; sweep < sweeps; sweep++) {
    const tasks = errors.map((row) => fitted(traits, row))
    traits = across.map((column) => fitted(tasks, column))
  }
  return traits
}

function fitted(rows: readonly number[][], values: readonly number[]): number[] {
  const known = values.flatMap((value, i) => (Number.isNaN(value) ? [] : [i]))
  return leastSquares(
    known.map((i) => rows[i] as number[]),
    known.map((i) => values[i] as number),
    rows[0]?.length,
  )
}

/** Of the candidates those whose errors together say most of a task, the first of equals: each adds most to the determinant. */
function telling(traits: readonly number[][], candidates: readonly number[], count: number): number[] {
  const chosen: number[] = []
  while (chosen.length < count) {
    const rows = chosen.map((i) => traits[i] as number[])
    const gain = (i: number) => {
      const trait = traits[i] as number[]
      return inner(trait, solved(normal(rows, trait.length), trait))
    }
    const open = candidates.filter((i) => !chosen.includes(i))
    chosen.push(open.reduce((best, i) => (gain(i) > gain(best) * (1 + 1e-9) ? i : best)))
  }
  return chosen
}

function inner(a: readonly number[], b: readonly number[]): number {
  return a.reduce((sum, x, i) => sum + x * (b[i] as number), 0)
}

/** Keeps what too few rows leave open from being anything. */
const ridge = 1e-12

/** The sum of the rows' outer products, a little above singular. */
function normal(rows: readonly number[][], size: number): number[][] {
  const most = Math.max(1e-30, ...rows.map((row) => inner(row, row)))
  return Array.from({ length: size }, (_, i) =>
    Array.from({ length: size }, (_, j) =>
      rows.reduce((sum, row) => sum + (row[i] as number) * (row[j] as number), i === j ? ridge * most : 0),
    ),
  )
}

/** The x for which the rows' inner products with it come closest to the values. */
function leastSquares(rows: readonly number[][], values: readonly number[], size = rows[0]?.length ?? 0): number[] {
  const right = Array.from({ length: size }, (_, i) =>
    rows.reduce((sum, row, k) => sum + (row[i] as number) * (values[k] as number), 0),
  )
  return solved(normal(rows, size), right)
}

/** x of a x = b for a symmetric positive a: Gauss's elimination. */
function solved(a: readonly number[][], b: readonly number[]): number[] {
  const rows = a.map((row, i) => [...row, b[i] as number])
  const size = rows.length
  for (let i = 0; i < size; i++) {
    const pivot = rows[i] as number[]
    for (const row of rows.slice(i + 1)) {
      const factor = (row[i] as number) / (pivot[i] as number)
      for (let j = i; j <= size; j++) row[j] = (row[j] as number) - factor * (pivot[j] as number)
    }
  }
  const x: number[] = []
  for (let i = size - 1; i >= 0; i--) {
    const row = rows[i] as number[]
    x.unshift(((row[size] as number) - inner(row.slice(i + 1, size), x)) / (row[i] as number))
  }
  return x
}

/** How each layer is done. */
export type Choice<Level> = ReadonlyMap<string, Level>

export interface LayerSearchOptions<Level> {
  /** Names of the layers, such as patterns of a recipe's `layers`. */
  layers: readonly string[]
  /** From the widest, in which all layers begin, to the narrowest. */
  levels: readonly Level[]
  /** What a choice comes to: an accuracy, or a loss below 0; more is better. */
  evaluate(choice: Choice<Level>): Promise<number>
  /** Bytes that move for a layer, which the search lowers. */
  traffic(layer: string, level: Level): number
  /** The largest drop, as a part of what the widest choice comes to (default 0.01). */
  tolerance?: number
}

export interface LayerSearch<Level> {
  choice: Choice<Level>
  /** The narrowest level of each layer when it alone is not at the widest. */
  alone: Choice<Level>
  /** What the widest choice comes to, and the one that was found. */
  widest: number
  found: number
  evaluations: number
}

/**
 * A level for every layer (Judd and others, 2015): each layer alone goes down until the drop is too large, then all together,
 * one step at a time: the one that saves the most traffic of those that keep the drop small.
 */
export async function searchLayers<Level>(options: LayerSearchOptions<Level>): Promise<LayerSearch<Level>> {
  const { layers, levels, evaluate, traffic, tolerance = 0.01 } = options
  demand('searchLayers', 'layers', layers.length, layers.length > 0, 'at least one')
  demand('searchLayers', 'levels', levels.length, levels.length > 0, 'at least one')
  demand('searchLayers', 'tolerance', tolerance, tolerance >= 0, 'at least 0')
  const level = (depth: number) => levels[depth] as Level
  const named = (depths: readonly number[]) => new Map(layers.map((layer, i) => [layer, level(depths[i] as number)]))
  let evaluations = 0
  const score = (depths: readonly number[]) => {
    evaluations += 1
    return evaluate(named(depths))
  }
  const top = layers.map(() => 0)
  const widest = await score(top)
  const holds = (value: number) => widest - value <= tolerance * Math.abs(widest)
  const deepest = [...top]
  for (const i of layers.keys())
    while ((deepest[i] as number) + 1 < levels.length) {
      const next = (deepest[i] as number) + 1
      if (!holds(await score(top.with(i, next)))) break
      deepest[i] = next
    }
  let now = top
  let found = widest
  const limits = [...deepest]
  const saving = (i: number) => {
    const layer = layers[i] as string
    const depth = now[i] as number
    return traffic(layer, level(depth)) - traffic(layer, level(depth + 1))
  }
  for (;;) {
    const open = [...layers.keys()].filter((i) => (now[i] as number) < (limits[i] as number))
    const [i] = open.sort((a, b) => saving(b) - saving(a) || a - b)
    if (i === undefined) break
    const next = now.with(i, (now[i] as number) + 1)
    const value = await score(next)
    // the others go down only, so that what fails now would fail later
    if (holds(value)) [now, found] = [next, value]
    else limits[i] = now[i] as number
  }
  return { choice: named(now), alone: named(deepest), widest, found, evaluations }
}
