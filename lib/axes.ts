// What each axis of a recipe may be, which values go together, and recipes made from others: of a row, and of a layer.
import { LossScale } from './lossscale.ts'
import { CoatError, native } from './native.ts'
import {
  type Arithmetic,
  communications,
  type DelayedScaling,
  type Emulation,
  type LayerRecipe,
  partitions,
  type Recipe,
  type RecipeName,
  recipes,
  whole,
} from './recipes.ts'
import { type Format, isScaled } from './tensor.ts'

/** A recipe as what it changes of another one: `{ base: 'coat', v: 'e5m2/x128' }`. */
export type RecipeChange = Partial<Recipe> & { base: RecipeName }

// The formats and the pairs of formats that AdamW has for its moments.
const adamw = native.table().find(({ name }) => name === 'adamw')
function momentFormats(moment: 'm' | 'v'): readonly Format[] {
  return adamw?.arguments.find(({ name }) => name === moment)?.formats ?? []
}

type Axis = Exclude<keyof Recipe, keyof typeof free>
// Axes that may be left out, and by themselves have more rules than a list of words; `layers` is no axis.
const free = {
  layers: [],
  emulated: [],
  lossScale: [],
  mu: ['none', 'fixed', 'absolute', 'relative'],
  communicate: communications,
  partition: partitions,
  qkvGrad: ['fused', 'split'],
} as const
const picks = ['max', 'most_recent']

const axes: { readonly [Name in Axis]: readonly Recipe[Name][] } = {
  x: ['f32', 'bf16', 'e4m3/t', 'e4m3/r', 'e4m3/g128', 'e4m3/g128p2'],
  w: ['f32', 'bf16', 'e4m3/t', 'e4m3/r', 'e4m3/b128', 'e4m3/b128p2'],
  dy: ['f32', 'bf16', 'e5m2/t', 'e4m3/r', 'e4m3/g128', 'e4m3/g128p2'],
  dwFrom: ['operands', 'stream'],
  accumulate: ['split', 'fast', 'fast-forward'],
  scale: ['current', 'pow2'],
  saved: ['f32', 'bf16', 'e4m3/g16'],
  flow: ['fp8', 'save'],
  stream: ['f32', 'bf16'],
  attention: ['stream', 'e4m3/g16', 'i8/g16'],
  param: ['f32', 'bf16', 'bf16x2', 'f16/t', 'e4m3/t'],
  master: ['f32', 'f16/t', null],
  rounding: ['nearest', 'stochastic', 'kahan'],
  dw: ['f32', 'bf16', 'e4m3/t'],
  m: momentFormats('m') as Recipe['m'][],
  v: momentFormats('v') as Recipe['v'][],
}

// x, w and dy that ops multiply
const operands = [
  ['f32', 'f32', 'f32'],
  ['bf16', 'bf16', 'bf16'],
  ['e4m3/t', 'e4m3/t', 'e5m2/t'],
  ['e4m3/r', 'e4m3/r', 'e4m3/r'],
  ['e4m3/g128', 'e4m3/b128', 'e4m3/g128'],
  ['e4m3/g128p2', 'e4m3/b128p2', 'e4m3/g128p2'],
]

// Each of these may also be plain, as stream is.
const mixable = ['e4m3/t', 'e4m3/t', 'e5m2/t']
const allScaled = ({ x, w, dy }: Recipe) => [x, w, dy].join() === mixable.join()

const rules: readonly { text: string; holds: (recipe: Recipe) => boolean }[] = [
  {
    text: `x, w and dy must be ${operands.map((row) => row.join(', ')).join('; or ')}; or each plain or as in ${mixable.join(', ')}`,
    holds: ({ x, w, dy }) =>
      operands.some((legal) => legal.join() === [x, w, dy].join()) ||
      [x, w, dy].every((format, i) => !isScaled(format) || format === mixable[i]),
  },
  {
    text: 'a plain x, w or dy must have the format of stream',
    holds: ({ x, w, dy, stream }) => [x, w, dy].every((format) => isScaled(format) || format === stream),
  },
  {
    text: 'a plain saved must have the format of stream',
    holds: ({ saved, stream }) => isScaled(saved) || saved === stream,
  },
  {
    text: "accumulate other than 'split' needs x 'e4m3/t', w 'e4m3/t', dy 'e5m2/t' and qkvGrad 'fused', as only sums of operands with one scale stay in the tensor cores",
    holds: (recipe) => recipe.accumulate === 'split' || (allScaled(recipe) && recipe.qkvGrad !== 'split'),
  },
  {
    text: "scale 'pow2' needs x 'e4m3/t', w 'e4m3/t' and dy 'e5m2/t'",
    holds: (recipe) => recipe.scale !== 'pow2' || allScaled(recipe),
  },
  {
    text: "saved 'e4m3/g16' needs x 'e4m3/t' or plain",
    holds: ({ x, saved }) => !isScaled(saved) || !isScaled(x) || x === 'e4m3/t',
  },
  {
    text: "a delayed scale needs x 'e4m3/t', w 'e4m3/t', dy 'e5m2/t' and param 'f32' or 'bf16'",
    holds: (recipe) =>
      typeof recipe.scale === 'string' || (allScaled(recipe) && (recipe.param === 'f32' || recipe.param === 'bf16')),
  },
  {
    text: "dwFrom 'stream' needs x 'e4m3/r' or plain x, w and dy, and param 'f32' or 'bf16'",
    holds: ({ dwFrom, x, w, dy, param }) =>
      dwFrom === 'operands' || ![x, w, dy].some(isScaled) || (x === 'e4m3/r' && (param === 'f32' || param === 'bf16')),
  },
  {
    text: "qkvGrad 'split' needs dy 'e5m2/t', whose one scale it replaces, and scale 'current'",
    holds: ({ qkvGrad, dy, scale }) => qkvGrad !== 'split' || (dy === 'e5m2/t' && scale === 'current'),
  },
  {
    text: "attention other than 'stream' needs stream 'bf16'",
    holds: ({ attention, stream }) => attention === 'stream' || stream === 'bf16',
  },
  {
    text: 'm and v must be a pair of formats that adamw has',
    holds: ({ m, v }) =>
      adamw?.only.some(
        ({ names, combinations }) => names[0] === 'm' && combinations.some((row) => row[0] === m && row[1] === v),
      ) ?? false,
  },
  {
    text: "param 'f32' or 'bf16x2' takes no master, 'bf16' or 'f16/t' null or 'f32', and 'e4m3/t' needs 'f16/t'",
    holds: ({ param, master }) =>
      param === 'e4m3/t'
        ? master === 'f16/t'
        : master === null || (master === 'f32' && (param === 'bf16' || param === 'f16/t')),
  },
  {
    text: "mu needs dw 'e4m3/t'",
    holds: ({ mu = 'none', dw }) => mu === 'none' || dw === 'e4m3/t',
  },
  {
    text: "communicate other than 'f32' cannot be had with emulated, whose gradients are f32",
    holds: ({ communicate = 'f32', emulated }) => communicate === 'f32' || !emulated,
  },
  {
    text: "rounding other than 'nearest' needs param 'bf16' and no master",
    holds: ({ rounding, param, master }) => rounding === 'nearest' || (param === 'bf16' && master === null),
  },
  {
    text: 'emulated needs x, w, dy, saved, stream, param, dw, m and v f32',
    holds: ({ emulated, x, w, dy, saved, stream, param, dw, m, v }) =>
      !emulated || [x, w, dy, saved, stream, param, dw, m, v].every((format) => format === 'f32'),
  },
]

function refuse(message: string, argument: string): never {
  throw new CoatError(`recipe: ${message}`, 'recipe', 'recipe', argument)
}

/**
 * A recipe by name, one of the caller's, or one that changes axes of a row: unknown names, axes, formats and illegal
 * combinations are refused, of its layers too.
 */
export function recipe(which: RecipeName | Recipe | RecipeChange): Recipe {
  if (typeof which === 'string') return checked(rowOf(which, 'name'))
  if (!isObject(which)) refuse(`it is ${shown(which)} and must be the name of a row, or an object of axes`, 'name')
  if (!('base' in which)) return checked(which)
  const { base, ...changes } = which
  return checked({ ...rowOf(base, 'base'), ...changes })
}

function isObject(value: unknown): value is object {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

// Words in quotes, objects and lists as JSON.
function shown(value: unknown): string {
  if (typeof value === 'string') return `'${value}'`
  return typeof value === 'object' ? JSON.stringify(value) : String(value)
}

function rowOf(name: RecipeName, argument: string): Recipe {
  const known = Object.hasOwn(recipes, name) ? recipes[name] : undefined
  return known ?? refuse(`'${name}' is unknown; the recipes are ${Object.keys(recipes).join(', ')}`, argument)
}

function checked(which: Recipe, where = ''): Recipe {
  for (const axis of Object.keys(which))
    if (!Object.hasOwn(free, axis) && !Object.hasOwn(axes, axis))
      refuse(
        `axis '${where}${axis}' is unknown; the axes are ${Object.keys({ ...axes, ...free }).join(', ')}`,
        `${where}${axis}`,
      )
  const { lossScale = 'none', layers = {} } = which
  if (lossScale !== 'none') new LossScale(lossScale)
  for (const axis of ['mu', 'communicate', 'partition', 'qkvGrad'] as const) {
    const value = which[axis]
    if (value !== undefined && !(free[axis] as readonly string[]).includes(value))
      refuse(`${where}${axis} is ${shown(value)} and must be one of ${free[axis].join(', ')}`, `${where}${axis}`)
  }
  const delayed = typeof which.scale === 'object' && which.scale !== null ? which.scale : null
  if (delayed) checkDelayed(delayed, `${where}scale.`)
  if ((which.emulated ?? null) !== null) checkEmulation(which.emulated as Emulation, `${where}emulated.`)
  for (const [axis, legal] of Object.entries(axes)) {
    const value = which[axis as Axis]
    if (!(axis === 'scale' && delayed) && !(legal as readonly unknown[]).includes(value))
      refuse(
        `${where}${axis} is ${shown(value)} and must be one of ${legal.map((word) => `'${word}'`).join(', ')}`,
        `${where}${axis}`,
      )
  }
  for (const { text, holds } of rules)
    if (!holds(which)) {
      const received = Object.keys(axes).map((axis) => `${axis} ${shown(which[axis as Axis])}`)
      refuse(`${where}${text}; received ${received.join(', ')}`, text.split(' ')[0] ?? '')
    }
  if (!isObject(layers))
    refuse(`layers is ${shown(layers)} and must be an object, of changes by patterns of names`, 'layers')
  for (const [pattern, change] of Object.entries(layers)) {
    if (!isObject(change))
      refuse(
        `layers['${pattern}'] is ${shown(change)} and must be an object, of axes that change`,
        `layers['${pattern}']`,
      )
    for (const axis of whole)
      if (Object.hasOwn(change, axis)) refuse(`${axis} is the whole model's, and layers['${pattern}'] has it`, axis)
    checked({ ...alone(which), ...change }, `layers['${pattern}'].`)
  }
  return which
}

function checkDelayed(scaling: DelayedScaling, where: string): void {
  const demand = (name: keyof DelayedScaling, holds: boolean, rule: string) => {
    if (!holds) refuse(`${where}${name} is ${JSON.stringify(scaling[name])} and must be ${rule}`, `${where}${name}`)
  }
  for (const name of Object.keys(scaling))
    if (!['history', 'pick', 'margin'].includes(name))
      refuse(`axis '${where}${name}' is unknown; a delayed scale has history, pick, margin`, `${where}${name}`)
  const { history, pick, margin } = scaling
  demand('history', Number.isSafeInteger(history) && history >= 1, 'an integer of at least 1')
  demand('pick', picks.includes(pick), `one of ${picks.join(', ')}`)
  demand('margin', Number.isSafeInteger(margin) && Math.abs(margin) <= 64, 'an integer from -64 to 64')
}

function checkEmulation(emulation: Emulation, where: string): void {
  if (!isObject(emulation))
    refuse(`${where.slice(0, -1)} is ${shown(emulation)} and must be an object or null`, where.slice(0, -1))
  const names = ['operand', 'sum', 'chunk', 'result', 'lossScale', 'update']
  for (const name of Object.keys(emulation))
    if (!names.includes(name))
      refuse(`axis '${where}${name}' is unknown; an emulation has ${names.join(', ')}`, `${where}${name}`)
  const { lossScale } = emulation
  for (const [name, rule, holds] of [chunkRule(emulation), lossScaleRule(lossScale)])
    if (!holds) refuse(`${where}${name} is ${shown(emulation[name])} and must be ${rule}`, `${where}${name}`)
  const one = native.make('f32', [1], 'cpu', 'temp')
  try {
    for (const [name, word] of wordsOf(emulation, where))
      try {
        native.free(native.round_to(one, ...arithmeticOf(word, lossScale), 0))
      } catch (error) {
        refuse(`${where}${name} is ${shown(word)}: ${(error as Error).message}`, `${where}${name}`)
      }
  } finally {
    native.free(one)
  }
}

type Rule<Name> = readonly [name: Name, rule: string, holds: boolean]

function chunkRule({ sum, chunk }: Pick<Emulation, 'sum' | 'chunk'>): Rule<'chunk'> {
  const holds = Number.isSafeInteger(chunk) && chunk >= 0 && (sum !== 'f32' || chunk === 0)
  return ['chunk', "an integer of at least 0, and 0 with sum 'f32'", holds]
}

function lossScaleRule(scale: number): Rule<'lossScale'> {
  const shift = typeof scale === 'number' ? Math.log2(scale) : Number.NaN
  return [
    'lossScale',
    'a power of two of at least 1, and at most 2^64',
    Number.isSafeInteger(shift) && shift >= 0 && shift <= 64,
  ]
}

function expectRule(op: string, [name, rule, holds]: Rule<string>, value: unknown): void {
  if (!holds) throw new CoatError(`${op}: ${name} is ${shown(value)} and must be ${rule}`, 'value', op, name)
}

/** Refuses sums by chunks that there are not. */
export function expectChunk(sums: Pick<Emulation, 'sum' | 'chunk'>): void {
  expectRule('matmul_emulated', chunkRule(sums), sums.chunk)
}

// The arithmetic words of an emulation by their names, those of its parts too.
function wordsOf({ operand, sum, result, update }: Emulation, where: string): [name: string, word: Arithmetic][] {
  const parts = (name: string, of: Emulation['operand' | 'result'], known: readonly string[]) => {
    // of results alone there may be none
    if (!isObject(of)) return of === undefined && name === 'result' ? [] : [[name, of] as [string, Arithmetic]]
    const odd = [...Object.keys(of), ...(name === 'operand' ? known : [])].find(
      (part) => !known.includes(part) || !Object.hasOwn(of, part),
    )
    if (odd)
      refuse(
        `${where}${name} has ${Object.keys(of).join(', ')} and must be a word or have ${known.join(', ')}`,
        `${where}${name}`,
      )
    return Object.entries(of).map(([part, word]) => [`${name}.${part}`, word] as [string, Arithmetic])
  }
  return [
    ...parts('operand', operand, ['x', 'w', 'dy']),
    ...(sum === 'f32' ? [] : [['sum', sum] as [string, Arithmetic]]),
    ...parts('result', result, ['y', 'dx', 'dw']),
    ...(update === null ? [] : [['update', update] as [string, Arithmetic]]),
  ]
}

/** What native ops take of a word such as `e5m2` or `q4.12/sr`, for what is multiplied by a power of two. */
export function arithmeticOf(word: Arithmetic, lossScale = 1) {
  const [, exponent, mantissa, infinite, before, behind, stochastic] =
    /^(?:e(\d+)m(\d+)(\/inf)?|q(\d+)\.(\d+))(\/sr)?$/.exec(typeof word === 'string' ? word : '') ?? []
  const [range, precision] = [exponent ?? before, mantissa ?? behind].map(Number)
  if (range === undefined || precision === undefined || Number.isNaN(range))
    throw new CoatError(
      `arithmetic is ${shown(word)} and must be eEmM, eEmM/inf or qI.F with numbers of bits, and /sr for stochastic rounding`,
      'value',
      'round_to',
      'arithmetic',
    )
  expectRule('round_to', lossScaleRule(lossScale), lossScale)
  const kind = exponent === undefined ? 'fixed' : infinite === undefined ? 'float' : 'ieee'
  return [kind, range, precision, Math.log2(lossScale), stochastic === undefined ? 'nearest' : 'stochastic'] as const
}

function alone<Whole extends { layers?: unknown }>({ layers: _, ...rest }: Whole): Omit<Whole, 'layers'> {
  return rest
}

/** Names like the pattern, in which `*` stands for anything. */
export function matcherOf(pattern: string): RegExp {
  return new RegExp(`^${pattern.replace(/[\\^$.|?+()[\]{}]/g, '\\$&').replaceAll('*', '.*')}$`)
}

// `model.layers.0` and `model.layers.0.*` name the same block.
function names(pattern: string, block: string): boolean {
  const matcher = matcherOf(pattern)
  return matcher.test(block) || matcher.test(`${block}.`)
}

/** The axes that hold for a block: of several patterns that name it the last one that has an axis gives it. */
export function axesOf<Axes extends { layers?: Recipe['layers'] }>(
  whole: Axes,
  block: string | null,
): Omit<Axes, 'layers'> {
  if (block === null || !whole.layers) return alone(whole)
  const changes = Object.entries(whole.layers).filter(([pattern]) => names(pattern, block))
  return Object.assign({}, alone(whole), ...changes.map(([, change]) => change))
}

/** The recipe of a block, which is refused where patterns that are legal each make it illegal together. */
export function layerRecipe(whole: Recipe, block: string): Recipe {
  return whole.layers ? checked(axesOf(whole, block) as Recipe, `${block}: `) : whole
}

/** Refuses patterns that name none of a model's blocks. */
export function checkLayers({ layers = {} }: { layers?: Readonly<Record<string, LayerRecipe>> }, blocks: string[]) {
  for (const pattern of Object.keys(layers))
    if (!blocks.some((block) => names(pattern, block)))
      refuse(
        `layers['${pattern}'] names no layer of the model; they are ${blocks[0]} to ${blocks.at(-1)}`,
        `layers['${pattern}']`,
      )
}

/** Whether gradients of the model, or of one of its blocks, are quantized somewhere. */
export function quantizesGradients({ dy, dw, layers = {} }: Recipe): boolean {
  const formats = [dy, dw, ...Object.values(layers).flatMap((layer) => [layer.dy ?? dy, layer.dw ?? dw])]
  return formats.some(isScaled)
}

/** The emulated arithmetic of the model, and of its blocks. */
export function emulationsOf({ emulated = null, layers = {} }: Recipe): Emulation[] {
  return [emulated, ...Object.values(layers).map((layer) => layer.emulated ?? null)].filter((one) => one !== null)
}

/** Whether products are rounded at random somewhere, by bits that come from the model's seed. */
export function roundsAtRandom(recipe: Recipe): boolean {
  const words = emulationsOf(recipe).flatMap((emulation) => wordsOf(emulation, ''))
  // those of updates come from the optimizer's seed
  return words.some(([name, word]) => name !== 'update' && word.endsWith('/sr'))
}

/** What a parameter of a matrix costs from one step to the next, in bytes. */
export interface ParameterBytes {
  param: number
  /** Moments, master, and what rounding has lost. */
  state: number
  /** Its gradient, when it is whole. */
  grad: number
  total: number
}

/** Bytes of a parameter by the formats of a recipe, as a large matrix has them: copies for products come and go. */
export function parameterBytes({ param, master, rounding, dw, m, v }: Recipe): ParameterBytes {
  const sum = (formats: readonly (Format | null)[]) => formats.reduce((bytes, format) => bytes + bytesOf(format), 0)
  const state = sum([m, v, master, rounding === 'kahan' ? 'bf16' : null])
  return { param: bytesOf(param), state, grad: bytesOf(dw), total: bytesOf(param) + state + bytesOf(dw) }
}

// An element's part of a tensor, its scales included; the one of `/t` is shared by so many that it is none.
function bytesOf(format: Format | null): number {
  if (format === null) return 0
  const made = native.make(format, [256, 256], 'cpu', 'temp')
  const { bytes } = native.info(made)
  native.free(made)
  return (bytes - (format.endsWith('/t') ? 4 : 0)) / 256 ** 2
}
