// The configuration of a run: JSON with comments, its rules, and every key or value that breaks one.
import { readFileSync } from 'node:fs'
import {
  CoatError,
  type LlamaConfig,
  type Recipe,
  type RecipeChange,
  type RecipeName,
  type Recompute,
  recipe,
} from '../lib/index.ts'
import { recomputes } from '../lib/tape.ts'

export interface RunConfig {
  model:
    | { from: string; config?: never }
    | { from?: never; config: Omit<LlamaConfig, 'vocab_size'> & { vocab_size?: number } }
  recipe: RecipeName | Recipe | RecipeChange
  device?: 'cpu' | 'cuda'
  freeze: string[]
  seed: number
  data: {
    tokens?: string | string[]
    text?: string | string[]
    jsonl?: string | string[]
    tokenizer?: string
    sequence: number
    seed: number
    heldOut: number
  }
  batch: number
  accumulate: number
  steps: number
  clip: number
  maxSkips: number
  recompute?: Recompute
  optimizerInBackward?: boolean
  cacheWeights?: boolean
  graph?: boolean
  optimizer: { rule: 'adamw' | 'lion' | 'sgd'; [name: string]: unknown }
  schedule: { name: 'constant' | 'linear' | 'cosine' | 'wsd'; warmup?: number; floor?: number; decay?: number }
  spike?: { sigma: number; window?: number }
  validate?: { every: number; sequences?: number }
  checkpoint?: { every: number; keep?: number }
  out: string
  save?: { dtype?: 'f32' | 'bf16' }
  sample?: { prompt: string; maxTokens?: number; temperature?: number; topP?: number; seed?: number }
}

/** What a value must be, or null where it is that. */
type Check = (value: unknown) => string | null
interface Shape {
  [name: string]: Check | Shape
}

const integer =
  (least: number): Check =>
  (value) =>
    Number.isSafeInteger(value) && (value as number) >= least ? null : `an integer of at least ${least}`
const number =
  (least: number, most = Number.POSITIVE_INFINITY): Check =>
  (value) =>
    typeof value === 'number' && value >= least && value <= most
      ? null
      : `a number ${most < Number.POSITIVE_INFINITY ? `from ${least} to ${most}` : `of at least ${least}`}`
const text: Check = (value) => (typeof value === 'string' && value !== '' ? null : 'a text')
const flag: Check = (value) => (typeof value === 'boolean' ? null : 'true or false')
const object: Check = (value) => (isObject(value) ? null : 'an object')
const oneOf =
  (...words: readonly string[]): Check =>
  (value) =>
    words.includes(value as string) ? null : `one of ${words.join(', ')}`
const paths: Check = (value) =>
  [value].flat().every((path) => text(path) === null) && [value].flat().length > 0 ? null : 'a path or a list of paths'
const listOf =
  (count: number, one: Check): Check =>
  (value) =>
    Array.isArray(value) && value.length === count && value.every((item) => one(item) === null)
      ? null
      : `a list of ${count} numbers`
const texts: Check = (value) =>
  Array.isArray(value) && value.every((item) => text(item) === null) ? null : 'a list of texts'
const objects: Check = (value) => (Array.isArray(value) && value.every(isObject) ? null : 'a list of objects')
const anyRecipe: Check = (value) => {
  try {
    recipe(value as RunConfig['recipe'])
    return null
  } catch (error) {
    const reason = (error as Error).message.replace(/^recipe: /, '')
    const partial = isObject(value) && value.base === undefined
    return `a recipe, or { "base": a recipe, and axes that differ }${partial ? ', or all axes' : ''}: ${reason}`
  }
}

const betas = { betas: listOf(2, number(0, 1)) }
const rules: Record<RunConfig['optimizer']['rule'], Shape> = {
  adamw: { ...betas, eps: number(0), vFloor: flag, allowUnsafe: flag },
  lion: betas,
  sgd: { momentum: number(0, 1), dampening: number(0, 1), nesterov: flag },
}
const schedules: Record<RunConfig['schedule']['name'], Shape> = {
  constant: {},
  linear: { floor: number(0, 1) },
  cosine: { floor: number(0, 1) },
  wsd: { floor: number(0, 1), decay: integer(0) },
}

function shapeOf(config: Record<string, unknown>): Shape {
  const pick = <Table extends Record<string, Shape>>(
    table: Table,
    section: unknown,
    key: string,
    usual: string,
  ): Shape => {
    const name = isObject(section) ? String(section[key] ?? usual) : usual
    return (Object.hasOwn(table, name) ? table[name] : table[usual]) as Shape
  }
  return {
    model: { from: text, config: object },
    recipe: anyRecipe,
    device: oneOf('cpu', 'cuda'),
    freeze: texts,
    seed: integer(0),
    data: {
      tokens: paths,
      text: paths,
      jsonl: paths,
      tokenizer: text,
      sequence: integer(1),
      seed: integer(0),
      heldOut: number(0, 1),
    },
    batch: integer(1),
    accumulate: integer(1),
    steps: integer(1),
    clip: number(0),
    maxSkips: integer(1),
    recompute: oneOf(...recomputes),
    optimizerInBackward: flag,
    cacheWeights: flag,
    graph: flag,
    optimizer: {
      rule: oneOf(...Object.keys(rules)),
      lr: number(0),
      weightDecay: number(0),
      rounding: oneOf('nearest', 'stochastic', 'kahan'),
      seed: integer(0),
      parameters: objects,
      ...pick(rules, config.optimizer, 'rule', 'adamw'),
    },
    schedule: {
      name: oneOf(...Object.keys(schedules)),
      warmup: integer(0),
      ...pick(schedules, config.schedule, 'name', 'cosine'),
    },
    spike: { sigma: number(0), window: integer(2) },
    validate: { every: integer(1), sequences: integer(1) },
    checkpoint: { every: integer(1), keep: integer(1) },
    out: text,
    save: { dtype: oneOf('f32', 'bf16') },
    sample: { prompt: text, maxTokens: integer(1), temperature: number(0), topP: number(0, 1), seed: integer(0) },
  }
}

const needed = [
  'model',
  'data',
  'data.sequence',
  'batch',
  'steps',
  'out',
  'spike.sigma',
  'validate.every',
  'checkpoint.every',
  'sample.prompt',
]
/** Sections of which exactly one key must be there. */
const choices = { model: ['from', 'config'], data: ['tokens', 'text', 'jsonl'] }

/** Every problem of a configuration, one line each. */
export function problemsOf(config: unknown): string[] {
  if (!isObject(config)) return ['the configuration must be a JSON object']
  const problems: string[] = []
  const walk = (value: Record<string, unknown>, shape: Shape, at: string) => {
    for (const [name, item] of Object.entries(value)) {
      const rule = Object.hasOwn(shape, name) ? shape[name] : undefined
      const path = `${at}${name}`
      if (!rule) problems.push(`${path} is unknown${suggestion(name, Object.keys(shape), at)}`)
      else if (typeof rule !== 'function') {
        if (isObject(item)) walk(item, rule, `${path}.`)
        else problems.push(`${path} is ${shown(item)} and must be an object with ${Object.keys(rule).join(', ')}`)
      } else {
        const must = rule(item)
        if (must !== null) problems.push(`${path} is ${shown(item)} and must be ${must}`)
      }
    }
  }
  walk(config, shapeOf(config), '')
  for (const path of needed) {
    const [section = '', key] = path.split('.')
    const within = key === undefined ? config : config[section]
    if (isObject(within) && within[key ?? section] === undefined) problems.push(`${path} is missing`)
  }
  for (const [section, keys] of Object.entries(choices)) {
    const value = config[section]
    if (!isObject(value)) continue
    const there = keys.filter((key) => value[key] !== undefined)
    if (there.length !== 1)
      problems.push(`${section} has ${there.join(' and ') || 'none of them'} and must have one of ${keys.join(', ')}`)
  }
  return problems
}

const defaults = { recipe: 'coat', seed: 0, freeze: [], accumulate: 1, clip: 1, maxSkips: 10 }

/** A configuration with its defaults; all its problems are in one error. */
export function checkedConfig(config: unknown, file: string): RunConfig {
  const problems = problemsOf(config)
  if (problems.length > 0)
    throw new CoatError(
      `${file} has ${problems.length === 1 ? 'a problem' : `${problems.length} problems`}:\n${problems.map((line) => `  ${line}`).join('\n')}`,
      'config',
      'coat-train',
      problems[0]?.split(' ')[0] ?? '',
    )
  const { data, optimizer, schedule, ...rest } = config as RunConfig
  return {
    ...defaults,
    ...rest,
    data: { ...{ seed: 0, heldOut: 0.05 }, ...data },
    optimizer: { ...{ rule: 'adamw' }, ...optimizer },
    schedule: { ...{ name: 'cosine' }, ...schedule },
  } as RunConfig
}

/** JSON with comments and commas before closing brackets. */
export function parseJsonc(source: string): unknown {
  const strings = /"(?:\\.|[^"\\])*"/.source
  const keep = (match: string) => (match.startsWith('"') ? match : match.replace(/[^\n]/g, ' '))
  const bare = source.replace(new RegExp(`${strings}|//[^\\n]*|/\\*[\\s\\S]*?\\*/`, 'g'), keep)
  return JSON.parse(bare.replace(new RegExp(`${strings}|,(?=\\s*[}\\]])`, 'g'), keep))
}

/** Reads a configuration and applies `key=value` changes, whose values are JSON or else text. */
export function readConfig(file: string, changes: readonly string[] = []): RunConfig {
  const fail = (message: string, argument = 'config'): never => {
    throw new CoatError(message, 'config', 'coat-train', argument)
  }
  let source = ''
  let config: unknown
  try {
    source = readFileSync(file, 'utf8')
  } catch (error) {
    fail(`${file} cannot be read: ${(error as Error).message}`)
  }
  try {
    config = parseJsonc(source)
  } catch (error) {
    const { message } = error as Error
    // Node says where by characters, if at all; comments were replaced one by one
    const place = /at position (\d+)/.exec(message)?.[1]
    const line = place === undefined ? '' : `, line ${source.slice(0, Number(place)).split('\n').length}`
    fail(`${file}${line}: is no JSON: ${message}`)
  }
  if (!isObject(config)) return checkedConfig(config, file)
  for (const change of changes) {
    const [, path = '', value = ''] = /^([\w.]+)=(.*)$/s.exec(change) ?? fail(`'${change}' must be key=value`, '--set')
    const keys = path.split('.')
    let at = config as Record<string, unknown>
    for (const key of keys.slice(0, -1)) {
      if (!isObject(at[key])) at[key] = {}
      at = at[key] as Record<string, unknown>
    }
    at[keys.at(-1) as string] = jsonOrText(value)
  }
  return checkedConfig(config, file)
}

function jsonOrText(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return text
  }
}

/** The nearest right name, where one is near, else all of them. */
function suggestion(name: string, names: readonly string[], at: string): string {
  const near = names.map((other) => ({ other, steps: distance(name.toLowerCase(), other.toLowerCase()) }))
  near.sort((a, b) => a.steps - b.steps)
  const best = near[0]
  if (best && best.steps <= Math.max(2, best.other.length / 3)) return `; did you mean ${at}${best.other}?`
  return `; the keys are ${names.join(', ')}`
}

/** Insertions, deletions and changes of one character from a to b (Levenshtein). */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j)
  for (let i = 1; i <= a.length; i++) {
    const next = [i]
    for (let j = 1; j <= b.length; j++)
      next.push(
        Math.min(
          (next[j - 1] as number) + 1,
          (row[j] as number) + 1,
          (row[j - 1] as number) + (a[i - 1] === b[j - 1] ? 0 : 1),
        ),
      )
    row = next
  }
  return row[b.length] as number
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function shown(value: unknown): string {
  return (JSON.stringify(value) ?? 'absent').slice(0, 80)
}
