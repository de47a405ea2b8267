// The rules of optimizers: their options and what they refuse, their numbers, their native calls.
import { arithmeticOf } from './axes.ts'
import type { Param } from './modules.ts'
import type { Handle } from './native.gen.ts'
import { CoatError, native, type OpEntry } from './native.ts'
import type { Arithmetic, Recipe } from './recipes.ts'
import type { Format } from './tensor.ts'

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
export interface Numbers {
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
  /** f32 [1] of each, which becomes the largest |p|; null: not wanted. */
  amax: Handle[] | null
  clip: Handle | null
  rounding: Rounding
  /** What parameters are rounded to where that is emulated. */
  arithmetic: Arithmetic | null
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
  /** Formats of parameters of which the native op leaves the largest magnitude. */
  measured: readonly Format[]
  run(call: Call, numbers: Numbers): void
}

const shared = { weightDecay: 0.1, seed: 0, parameters: [] }
const sharedOwn = ['lr', 'weightDecay', 'm']

// 1 - beta and 1 - beta^t are computed in float64: in f32 they lose most digits for beta near 1.
export const rules: { [Options in FullOptions as Options['rule']]: Rule<Options> } = {
  adamw: {
    defaults: { ...shared, rule: 'adamw', lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8, vFloor: true, allowUnsafe: false },
    own: [...sharedOwn, 'betas', 'eps', 'v'],
    moments: ['m', 'v'],
    measured: ['f32', 'bf16'],
    run(
      { p, master, lost, g, m, v, amax, clip, rounding, seed, t },
      { lr, betas: [beta1, beta2], eps, weightDecay, vFloor },
    ) {
      const corrections = [1 - beta1 ** t, Math.sqrt(1 - beta2 ** t)] as const
      const averages = [beta1, 1 - beta1, beta2, 1 - beta2] as const
      const end = [Number(vFloor), rounding, seed] as const
      native.adamw(p, master, lost, g, m, v, amax, clip, lr, ...averages, eps, weightDecay, ...corrections, ...end)
    },
  },
  lion: {
    defaults: { ...shared, rule: 'lion', lr: 1e-4, betas: [0.9, 0.99] },
    own: [...sharedOwn, 'betas'],
    moments: ['m'],
    measured: [],
    run({ p, master, lost, g, m, clip, rounding, seed }, { lr, betas: [beta1, beta2], weightDecay }) {
      const averages = [beta1, 1 - beta1, beta2, 1 - beta2] as const
      native.lion(p, master, lost, g, m, clip, lr, ...averages, weightDecay, rounding, seed)
    },
  },
  sgd: {
    defaults: { ...shared, weightDecay: 0, rule: 'sgd', lr: 1e-3, momentum: 0.9, dampening: 0, nesterov: false },
    own: [...sharedOwn, 'momentum'],
    moments: ['m'],
    measured: [],
    run(
      { p, master, lost, g, m, clip, rounding, arithmetic, seed, t },
      { lr, momentum, dampening, nesterov, weightDecay },
    ) {
      const gain = t === 1 || momentum === 0 ? 1 : 1 - dampening
      const numbers = [lr, momentum, gain, weightDecay, Number(nesterov)] as const
      if (arithmetic) native.sgd_emulated(p, g, m, clip, ...numbers, ...arithmeticOf(arithmetic), seed)
      else native.sgd(p, master, lost, g, m, clip, ...numbers, rounding, seed)
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
export const isFinite32 = (value: unknown) => typeof value === 'number' && Number.isFinite(Math.fround(value))

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

export function entryOf(rule: string): OpEntry {
  return native.table().find(({ name }) => name === rule) as OpEntry
}

// What the native op takes, said before there are states.
export function checkRounding(
  rule: string,
  rounding: Rounding,
  master: Recipe['master'],
  params: readonly Param[],
): void {
  if (rounding === 'nearest') return
  const fail = (why: string) => {
    throw new CoatError(`${rule}: rounding is ${rounding} and must be nearest ${why}`, 'value', rule, 'rounding')
  }
  if (!params.some(({ tensor }) => tensor.format === 'bf16')) fail('where no parameter is bf16')
  if (master !== null) fail(`with the recipe's master ${master}, which loses nothing`)
}

// The format, or the pair of formats, that the native op has.
export function checkMoments(
  { name }: Param,
  { rule, m, v }: { rule: string; m: Format; v: Format },
  entry: OpEntry,
): void {
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
export function checkSafe(
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
