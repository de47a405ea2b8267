// Optimizers: which parameters with which formats, one native call for many tensors; clipping stays on the device.
import type { Module, Param } from './modules.ts'
import type { Handle } from './native.gen.ts'
import { CoatError, native, type OpEntry } from './native.ts'
import type { Recipe } from './recipes.ts'
import { type Format, scope, Tensor } from './tensor.ts'

/** How a bf16 parameter that has no master is rounded. */
export type Rounding = Recipe['rounding']

interface Shared<Override> {
  /** Learning rate, times the schedule's factor (default 1e-3; of `lion` 1e-4). */
  lr?: number
  /**
   * Decay of matrices and embeddings (default 0.1; of `sgd` 0); norms, biases and all 1-D tensors have none. Decoupled,
   * p -= lr weightDecay p, but with `sgd`, where it is a part of the gradient.
   */
  weightDecay?: number
  /** Rounding of bf16 parameters, instead of the recipe's; parameters in other formats are rounded to nearest. */
  rounding?: Rounding
  /** Seed of stochastic rounding (default 0): the bits come from it, the step, and the place of the element. */
  seed?: number
  /** Parameters with values of their own; where several match, the last that has a value gives it. */
  parameters?: readonly Override[]
}

/** What the parameters that `match` names do differently. */
interface SharedOverride {
  /** A name as checkpoints have it; `*` stands for anything: `model.embed_tokens.*`. */
  match: string
  /** Learning rate, times the schedule's factor. */
  lr?: number
  /** Decay, also of what has none by default. */
  weightDecay?: number
  /** Format of the first moment; it, or the pair m, v, must be one that the optimizer has. */
  m?: Recipe['m']
}

/**
 * AdamW (Loshchilov and Hutter, arXiv 1711.05101) at step t, element by element:
 * m = β1 m + (1 - β1) g, v = β2 v + (1 - β2) g², p -= lr (weightDecay p + m̂ / (√v̂ + eps)) with m̂ = m / (1 - β1^t),
 * v̂ = v / (1 - β2^t). m and v [1, n] in the recipe's formats. t counts the optimizer's steps, also for a parameter that
 * gets its first gradient later.
 */
export interface AdamWOptions extends Shared<AdamWOverride> {
  /** Decay of the first and the second moment (default 0.9, 0.95). */
  betas?: readonly [number, number]
  /** Added to sqrt(v) after its bias correction (default 1e-8). */
  eps?: number
  /** Store no positive v as 0 in formats without range expansion, which could (default yes). */
  vFloor?: boolean
  /**
   * Take formats of v after which one step can be more than ten learning rates (default no): those without range expansion
   * if there is no vFloor, or a second beta above 0.99, with which they round what is added to small values away.
   */
  allowUnsafe?: boolean
}

export interface AdamWOverride extends SharedOverride {
  betas?: readonly [number, number]
  eps?: number
  /** Format of the second moment. */
  v?: Recipe['v']
}

/**
 * Lion (Chen et al., arXiv 2302.06675), element by element: p -= lr (weightDecay p + sign(β1 m + (1 - β1) g)) with
 * sign(0) = 0, then m = β2 m + (1 - β2) g. m [1, n] in the recipe's format of the first moment.
 */
export interface LionOptions extends Shared<LionOverride> {
  /** Weights of m in the update and in the next m (default 0.9, 0.99). */
  betas?: readonly [number, number]
}

export interface LionOverride extends SharedOverride {
  betas?: readonly [number, number]
}

/**
 * SGD with momentum as PyTorch's, element by element: d = g + weightDecay p, m = momentum m + (1 - dampening) d (at the
 * optimizer's first step m = d), p -= lr m, or p -= lr (d + momentum m) with nesterov. m [1, n] in the recipe's format of the first
 * moment.
 */
export interface SgdOptions extends Shared<SgdOverride> {
  /** Part of m that stays (default 0.9). */
  momentum?: number
  /** Part of the gradient that m does not take, after the first step (default 0). */
  dampening?: number
  /** Look ahead by one momentum (default no); needs a momentum and no dampening. */
  nesterov?: boolean
}

export interface SgdOverride extends SharedOverride {
  momentum?: number
}

type Full<Options extends { rounding?: Rounding }, Name extends string> = Required<Omit<Options, 'rounding'>> & {
  rule: Name
  rounding?: Rounding
}
export type FullAdamWOptions = Full<AdamWOptions, 'adamw'>
export type FullLionOptions = Full<LionOptions, 'lion'>
export type FullSgdOptions = Full<SgdOptions, 'sgd'>
/** What `adamw`, `lion` and `sgd` return: checked options with defaults filled in, and which rule they are for. */
export type FullOptions = FullAdamWOptions | FullLionOptions | FullSgdOptions

/** Numbers of all rules; each uses its own. */
interface Numbers {
  lr: number
  weightDecay: number
  betas: readonly [number, number]
  eps: number
  vFloor: boolean
  momentum: number
  dampening: number
  nesterov: boolean
}

/** What one native call takes of a list of slots; handles of tensors of any shape, states [1, n]. */
interface Call {
  p: Handle[]
  master: Handle[] | null
  lost: Handle[] | null
  g: Handle[]
  m: Handle[]
  v: Handle[]
  clip: Handle | null
  rounding: Rounding
  seed: number
  /** The number of this step, from 1. */
  t: number
}

/** A rule: defaults, what a parameter may have of its own besides `match`, and its native call. */
interface Rule<Options extends FullOptions> {
  defaults: Options
  own: readonly string[]
  /** States besides the master: the arguments of the native op. */
  moments: readonly ('m' | 'v')[]
  run(call: Call, numbers: Numbers): void
}

const shared = { weightDecay: 0.1, seed: 0, parameters: [] }
const sharedOwn = ['lr', 'weightDecay', 'm']

// 1 - beta and 1 - beta^t are computed in float64: in f32 they lose most digits for beta near 1.
const rules: { [Options in FullOptions as Options['rule']]: Rule<Options> } = {
  adamw: {
    defaults: { ...shared, rule: 'adamw', lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8, vFloor: true, allowUnsafe: false },
    own: [...sharedOwn, 'betas', 'eps', 'v'],
    moments: ['m', 'v'],
    run(
      { p, master, lost, g, m, v, clip, rounding, seed, t },
      { lr, betas: [beta1, beta2], eps, weightDecay, vFloor },
    ) {
      const corrections = [1 - beta1 ** t, Math.sqrt(1 - beta2 ** t)] as const
      const averages = [beta1, 1 - beta1, beta2, 1 - beta2] as const
      const end = [Number(vFloor), rounding, seed] as const
      native.adamw(p, master, lost, g, m, v, clip, lr, ...averages, eps, weightDecay, ...corrections, ...end)
    },
  },
  lion: {
    defaults: { ...shared, rule: 'lion', lr: 1e-4, betas: [0.9, 0.99] },
    own: [...sharedOwn, 'betas'],
    moments: ['m'],
    run({ p, master, lost, g, m, clip, rounding, seed }, { lr, betas: [beta1, beta2], weightDecay }) {
      const averages = [beta1, 1 - beta1, beta2, 1 - beta2] as const
      native.lion(p, master, lost, g, m, clip, lr, ...averages, weightDecay, rounding, seed)
    },
  },
  sgd: {
    defaults: { ...shared, weightDecay: 0, rule: 'sgd', lr: 1e-3, momentum: 0.9, dampening: 0, nesterov: false },
    own: [...sharedOwn, 'momentum'],
    moments: ['m'],
    run({ p, master, lost, g, m, clip, rounding, seed, t }, { lr, momentum, dampening, nesterov, weightDecay }) {
      const gain = t === 1 || momentum === 0 ? 1 : 1 - dampening
      native.sgd(p, master, lost, g, m, clip, lr, momentum, gain, weightDecay, Number(nesterov), rounding, seed)
    },
  },
}

/** Checked options with defaults filled in; for `new Trainer(model, { optimizer: adamw({ … }) })`. */
export function adamw(options: AdamWOptions = {}): FullAdamWOptions {
  return filled(options, rules.adamw)
}

/** The same for Lion. */
export function lion(options: LionOptions = {}): FullLionOptions {
  return filled(options, rules.lion)
}

/** The same for SGD with momentum. */
export function sgd(options: SgdOptions = {}): FullSgdOptions {
  const full = filled(options, rules.sgd)
  if (full.nesterov && (full.momentum === 0 || full.dampening !== 0))
    throw new CoatError(
      `sgd: nesterov needs momentum greater than 0 and dampening 0, which are ${full.momentum} and ${full.dampening}`,
      'value',
      'sgd',
      'nesterov',
    )
  return full
}

function filled<Options extends FullOptions>(options: Partial<Options>, rule: Rule<Options>): Options {
  const { rule: name } = rule.defaults
  checkObject(name, options, 'options')
  if (options.rule !== undefined && options.rule !== name)
    throw new CoatError(
      `${name}: rule is ${options.rule} and must be ${name}; the rules are ${Object.keys(rules).join(', ')}`,
      'option',
      name,
      'rule',
    )
  const { rule: _, ...names } = rule.defaults
  checkNames(name, options, [...Object.keys(names), 'rounding'], '')
  const given = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined))
  const full: Options = { ...rule.defaults, ...given }
  checkValues(name, full, '')
  if (!Array.isArray(full.parameters))
    throw new CoatError(
      `${name}: parameters is ${JSON.stringify(full.parameters)} and must be an array`,
      'type',
      name,
      'parameters',
    )
  full.parameters.forEach((override: SharedOverride, i: number) => {
    const where = `parameters[${i}].`
    checkObject(name, override, `parameters[${i}]`)
    checkNames(name, override, ['match', ...rule.own], where)
    if (typeof override.match !== 'string')
      throw new CoatError(
        `${name}: ${where}match is ${override.match} and must be the name of parameters`,
        'type',
        name,
        `${where}match`,
      )
    checkValues(name, override, where)
    if (override.lr !== undefined && full.lr === 0)
      throw new CoatError(
        `${name}: ${where}lr is ${override.lr} and lr is 0, which must be greater: the schedule scales both alike`,
        'value',
        name,
        `${where}lr`,
      )
  })
  return full
}

function checkObject(rule: string, value: unknown, name: string): void {
  if (typeof value !== 'object' || value === null || Array.isArray(value))
    throw new CoatError(`${rule}: ${name} is ${JSON.stringify(value)} and must be an object`, 'type', rule, name)
}

function checkNames(rule: string, options: object, names: readonly string[], where: string): void {
  for (const key of Object.keys(options))
    if (key !== 'rule' && !names.includes(key))
      throw new CoatError(
        `${rule}: option '${where}${key}' is unknown; ${where ? `what ${where.slice(0, -1)} may have is` : 'the options are'} ${names.join(', ')}`,
        'option',
        rule,
        `${where}${key}`,
      )
}

// Numbers as the device has them, in f32.
const isFinite32 = (value: unknown) => typeof value === 'number' && Number.isFinite(Math.fround(value))

function checkValues(rule: string, values: object, where: string): void {
  const given = values as Record<string, unknown>
  const demand = (name: string, holds: (value: number) => boolean, rules: string, value = given[name]) => {
    if (value !== undefined && !holds(value as number))
      throw new CoatError(
        `${rule}: ${where}${name} is ${typeof value === 'number' ? value : JSON.stringify(value)} and must be ${rules}`,
        'value',
        rule,
        `${where}${name}`,
      )
  }
  const atLeast0 = (value: number) => isFinite32(value) && value >= 0
  const part = (value: number) => isFinite32(value) && value >= 0 && value < 1
  const yesOrNo = (value: unknown) => typeof value === 'boolean'
  demand('lr', (value) => atLeast0(value) && (value === 0 || Math.fround(value) > 0), 'a finite number of at least 0')
  demand('eps', (value) => isFinite32(value) && Math.fround(value) > 0, 'a finite number greater than 0 (in f32)')
  demand('weightDecay', atLeast0, 'a finite number of at least 0')
  demand('momentum', part, 'at least 0 and less than 1')
  demand('dampening', (value) => isFinite32(value) && value >= 0 && value <= 1, 'from 0 to 1')
  demand('seed', (value) => Number.isSafeInteger(value) && value >= 0, 'an integer from 0 to 2^53 - 1')
  for (const name of ['vFloor', 'allowUnsafe', 'nesterov']) demand(name, yesOrNo, 'true or false')
  const { betas } = given
  demand('betas', () => Array.isArray(betas) && betas.length === 2, 'two numbers')
  if (Array.isArray(betas))
    for (const i of [0, 1]) demand(`betas[${i}]`, part, 'at least 0 and less than 1', betas[i] ?? Number.NaN)
  const words = entryOf(rule).arguments.find(({ name }) => name === 'rounding')?.words ?? []
  demand('rounding', () => words.includes(given.rounding as string), `one of ${words.join(', ')}`)
}

function entryOf(rule: string): OpEntry {
  return native.table().find(({ name }) => name === rule) as OpEntry
}

interface Slot {
  param: Param
  numbers: Numbers
  /** Learning rate as a part of the optimizer's. */
  share: number
  rounding: Rounding
  /** Equal for slots that one native call takes together: the place of the first of them. */
  call: number
  master: Tensor | null
  lost: Tensor | null
  m: Tensor
  v: Tensor | null
}

/** The tensors of one parameter's state: moments, seen as [1, n], what a master keeps, what Kahan's rounding has lost. */
export interface ParamState {
  /** f32, in the parameter's shape. */
  master: Tensor | null
  /** bf16, in the parameter's shape. */
  lost: Tensor | null
  /** [1, n] in the recipe's format. */
  m: Tensor
  /** [1, n] in the recipe's format; null where the rule has one moment. */
  v: Tensor | null
}

/** Norm of all gradients and what the next step does with it; device tensors, read when wanted. */
export interface GradientNorm {
  /** f32 [1] */
  norm: Tensor
  /** f32 [L], one a trained parameter. */
  norms: Tensor
  /** f32 [2]: factor for the gradients, and 1 when the step must be skipped. */
  clip: Tensor
}

/** What an optimizer reads of a recipe. */
export type OptimizerRecipe = Pick<Recipe, 'master' | 'm' | 'v'> & { rounding?: Rounding }

/** A rule over the parameters of a module that are not frozen, with the state formats of a recipe. */
export class Optimizer<Options extends FullOptions = FullOptions> implements Disposable {
  readonly options: Options
  readonly params: readonly Param[]
  /** Steps done: t of the bias correction. Skipped steps do not count. */
  steps = 0
  #slots: Slot[]

  constructor(module: Module, recipe: OptimizerRecipe, options: Options) {
    this.options = options
    const { rule, lr, parameters } = options
    const { moments } = rules[rule]
    this.params = module.parameters().filter((param) => !param.frozen)
    if (this.params.length === 0)
      throw new CoatError(`${rule}: the module has no parameter to train`, 'value', rule, 'module')
    const matched = parameters.map(({ match }, i) => {
      const named = new Set(module.parameters(match))
      for (const param of named)
        if (param.named(match) === 'partly')
          throw new CoatError(
            `${rule}: parameters[${i}].match is '${match}', which names a part of '${param.name}' alone; ${param.parts.map(({ name }) => name).join(', ')} are one parameter`,
            'value',
            rule,
            `parameters[${i}].match`,
          )
      if (named.size === 0)
        throw new CoatError(
          `${rule}: parameters[${i}].match is '${match}', which no parameter of the module is named like`,
          'value',
          rule,
          `parameters[${i}].match`,
        )
      return named
    })
    const { master = null } = recipe
    if (master !== null && master !== 'f32')
      throw new CoatError(`${rule}: the recipe's master is ${master} and must be f32 or null`, 'format', rule, 'master')
    const rounding = options.rounding ?? recipe.rounding ?? 'nearest'
    checkRounding(rule, rounding, master, this.params)
    const entry = entryOf(rule)
    const calls = new Map<string, number>()
    const plans = this.params.map((param) => {
      const given = parameters.filter((_, i) => matched[i]?.has(param)).flatMap((override) => Object.entries(override))
      const own: Partial<AdamWOverride> = Object.fromEntries(given.filter(([, value]) => value !== undefined))
      const all = { ...rules.sgd.defaults, ...rules.adamw.defaults, ...options, m: recipe.m, v: recipe.v, ...own }
      checkMoments(param, all, entry)
      if (rule === 'adamw' && !all.allowUnsafe) checkSafe(param, all)
      const { betas, eps, vFloor, momentum, dampening, nesterov } = all
      const weightDecay = param.decay || own.weightDecay !== undefined ? all.weightDecay : 0
      const numbers = { lr: all.lr, betas, eps, vFloor, momentum, dampening, nesterov, weightDecay }
      const narrow = param.tensor.format === 'bf16'
      const doubled = narrow && master !== null
      const mode = narrow ? rounding : 'nearest'
      const key = JSON.stringify([numbers, doubled, mode])
      const call = calls.get(key) ?? calls.size
      calls.set(key, call)
      const share = lr > 0 ? all.lr / lr : 1
      return { param, numbers, share, rounding: mode, call, doubled, m: all.m, v: all.v }
    })
    this.#slots = plans.map(({ doubled, m, v, ...plan }) =>
      scope(() => {
        const { tensor } = plan.param
        return {
          ...plan,
          master: doubled ? held(native.convert(tensor.handle, null, 'f32')) : null,
          lost: plan.rounding === 'kahan' ? zeroState(tensor.shape, tensor, 'bf16') : null,
          // states are flat, so that their groups go on over the ends of rows
          m: zeroState([1, tensor.numel], tensor, m),
          v: moments.includes('v') ? zeroState([1, tensor.numel], tensor, v) : null,
        }
      }),
    )
  }

  /** Bytes of moments, masters and what roundings lost. */
  get stateBytes(): number {
    const tensors = this.#slots.flatMap(({ master, lost, m, v }) => [master, lost, m, v])
    return tensors.reduce((sum, tensor) => sum + (tensor?.bytes ?? 0), 0)
  }

  stateOf(param: Param): ParamState {
    const slot = this.#slots.find((entry) => entry.param === param)
    if (!slot) {
      const { rule } = this.options
      throw new CoatError(`${rule}: parameter '${param.name}' is not trained`, 'value', rule, 'param')
    }
    const { master, lost, m, v } = slot
    return { master, lost, m, v }
  }

  /** Norm of the gradients, and the clip factor for `maxNorm` (0: none) that `step` applies. */
  gradNorm(maxNorm = 0): GradientNorm {
    const gradients = this.#trained().map(({ param }) => (param.grad as Tensor).handle)
    const [norm, norms, clip] = native.grad_norm(gradients, maxNorm)
    return { norm: Tensor.own(norm), norms: Tensor.own(norms), clip: Tensor.own(clip) }
  }

  /** Parameters in the order of `gradNorm().norms`. */
  get clipped(): Param[] {
    return this.#trained().map(({ param }) => param)
  }

  /**
   * One update with learning rate `lr`; nothing changes when clip says to skip. Count it with `advance()` once it is known
   * not to be skipped.
   */
  step(lr: number, clip: Tensor | null = null): void {
    const { rule, seed } = this.options
    const refuse = (name: string, value: unknown, rules: string) => {
      throw new CoatError(`${rule}: ${name} is ${value} and must be ${rules}`, 'value', rule, name)
    }
    if (this.#slots.length === 0) throw new CoatError(`${rule}: the optimizer was disposed`, 'disposed', rule)
    if (!isFinite32(lr) || lr < 0) refuse('lr', lr, 'a finite number of at least 0')
    if (!Number.isSafeInteger(this.steps) || this.steps < 0) refuse('steps', this.steps, 'an integer of at least 0')
    const calls = new Map<number, Slot[]>()
    for (const slot of this.#trained()) {
      const together = calls.get(slot.call)
      if (together) together.push(slot)
      else calls.set(slot.call, [slot])
    }
    const t = this.steps + 1
    for (const [call, slots] of calls) {
      const [{ numbers, share, rounding }] = slots as [Slot]
      const all = (of: (slot: Slot) => Tensor | null) => slots.map((slot) => (of(slot) as Tensor).handle)
      const some = (of: (slot: Slot) => Tensor | null) => (of(slots[0] as Slot) ? all(of) : null)
      rules[rule].run(
        {
          p: all(({ param }) => param.tensor),
          master: some(({ master }) => master),
          lost: some(({ lost }) => lost),
          g: all(({ param }) => param.grad),
          m: all(({ m }) => m),
          v: some(({ v }) => v) ?? [],
          clip: clip?.handle ?? null,
          rounding,
          seed: seedOf(seed, t, call),
          t,
        },
        { ...numbers, lr: lr * share },
      )
    }
  }

  advance(): void {
    this.steps += 1
  }

  dropGrads(): void {
    for (const { param } of this.#slots) param.dropGrad()
  }

  dispose(): void {
    for (const { master, lost, m, v } of this.#slots) for (const tensor of [master, lost, m, v]) tensor?.dispose()
    this.#slots = []
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  #trained(): Slot[] {
    return this.#slots.filter(({ param }) => param.grad !== null)
  }
}

/** AdamW over the parameters of a module. */
export class AdamW extends Optimizer<FullAdamWOptions> {
  constructor(module: Module, recipe: OptimizerRecipe, options: AdamWOptions = {}) {
    super(module, recipe, adamw(options))
  }
}

/** Lion over the parameters of a module. */
export class Lion extends Optimizer<FullLionOptions> {
  constructor(module: Module, recipe: OptimizerRecipe, options: LionOptions = {}) {
    super(module, recipe, lion(options))
  }
}

/** SGD with momentum over the parameters of a module. */
export class Sgd extends Optimizer<FullSgdOptions> {
  constructor(module: Module, recipe: OptimizerRecipe, options: SgdOptions = {}) {
    super(module, recipe, sgd(options))
  }
}

/** The optimizer that options are for; options without a rule are AdamW's. */
export function optimizerOf(
  module: Module,
  recipe: OptimizerRecipe,
  options: FullOptions | AdamWOptions = {},
): Optimizer {
  if (!('rule' in options) || options.rule === 'adamw') return new AdamW(module, recipe, options)
  return options.rule === 'lion' ? new Lion(module, recipe, options) : new Sgd(module, recipe, options)
}

// 53 bits of (seed, step, call): three rounds of the finalizer of splitmix64.
function seedOf(...parts: number[]): number {
  const bits = (x: bigint) => BigInt.asUintN(64, x)
  const mixed = parts.reduce((state, part) => {
    let x = bits((state ^ BigInt(part)) + 0x9e3779b97f4a7c15n)
    x = bits((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n)
    x = bits((x ^ (x >> 27n)) * 0x94d049bb133111ebn)
    return x ^ (x >> 31n)
  }, 0n)
  return Number(mixed >> 11n)
}

// What the native op takes, said before there are states.
function checkRounding(rule: string, rounding: Rounding, master: Recipe['master'], params: readonly Param[]): void {
  if (rounding === 'nearest') return
  const fail = (why: string) => {
    throw new CoatError(`${rule}: rounding is ${rounding} and must be nearest ${why}`, 'value', rule, 'rounding')
  }
  if (!params.some(({ tensor }) => tensor.format === 'bf16')) fail('where no parameter is bf16')
  if (master !== null) fail(`with the recipe's master ${master}, which loses nothing`)
}

// The format, or the pair of formats, that the native op has.
function checkMoments({ name }: Param, { rule, m, v }: { rule: string; m: Format; v: Format }, entry: OpEntry): void {
  const pairs = entry.only.find(({ names }) => names.includes('m'))?.combinations
  const single = entry.arguments.find((argument) => argument.name === 'm')?.formats.map((format) => [format]) ?? []
  const known = pairs ?? single
  const wanted: Format[] = pairs ? [m, v] : [m]
  if (known.some((formats) => formats.every((format, i) => format === wanted[i]))) return
  const shown = (formats: readonly (Format | null)[]) => formats.join(' with ')
  throw new CoatError(
    `${rule}: m ${m}${pairs ? ` with v ${v}` : ''}, of parameter '${name}', is not a ${pairs ? 'pair' : 'format'} of the optimizer, which has ${known.map(shown).join(', ')}`,
    'format',
    rule,
    'm',
  )
}

// Without range expansion one large value of a run makes the small ones 0, and the next step divides by eps. With vFloor they
// are at least the smallest code, but as long as (1 - beta2) g² is less than half a code, rounding drops it: the step is
// then up to sqrt(1 / (2 (1 - beta2))) learning rates, 7.1 for 0.99 and 22 for 0.999.
function checkSafe(
  { name }: Param,
  { v, vFloor, betas: [, beta2] }: { v: Format } & Pick<Numbers, 'vFloor' | 'betas'>,
): void {
  // u4 has no code of 0
  const floored = vFloor || v.startsWith('u4')
  if (!/^(e\dm\d|u\d|f16)\/[gt]/.test(v) || (floored && beta2 <= 0.99)) return
  const why = floored
    ? `rounds what small second moments gain away with betas[1] ${beta2}`
    : 'stores small second moments as 0'
  const way = floored ? 'betas[1] of at most 0.99' : 'vFloor'
  const expanded = /^e\dm\d/.test(v) ? `v ${v.replace(/\/.*/, '/x128')}, ` : ''
  throw new CoatError(
    `adamw: v ${v}, of parameter '${name}', ${why}, and the next steps divide by them; take ${expanded}${way}, or set allowUnsafe`,
    'value',
    'adamw',
    'v',
  )
}

function held(handle: number): Tensor {
  native.retag(handle, 'state')
  const tensor = Tensor.own(handle).keep()
  tensor.persistent = true
  return tensor
}

function zeroState(shape: readonly number[], { device }: Tensor, format: Format): Tensor {
  const zeros = Tensor.zeros(shape, { device })
  const state = held(native.convert(zeros.handle, null, format as 'f32'))
  zeros.dispose()
  return state
}
