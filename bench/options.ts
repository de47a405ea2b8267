// Arguments of command-line programs: how they are read, and how a program ends that cannot go on.
import { realpathSync } from 'node:fs'
import { CommanderError, InvalidArgumentError } from 'commander'
import { CoatError, type Recipe, type RecipeName, recipe, recipes } from '../lib/index.ts'

/** An integer of at least 1. */
export function count(text: string): number {
  const value = Number(text)
  if (text.trim() === '' || !Number.isSafeInteger(value) || value < 1)
    throw new InvalidArgumentError('It must be an integer of at least 1.')
  return value
}

/** Names of recipes with commas between them. */
export function recipeNames(text: string): RecipeName[] {
  const names = text.split(',').map((name) => name.trim())
  for (const name of names)
    try {
      recipe(name as RecipeName)
    } catch (error) {
      throw new InvalidArgumentError((error as Error).message)
    }
  return [...new Set(names)] as RecipeName[]
}

/** A recipe and the words that asked for it. */
export interface NamedRecipe {
  name: string
  recipe: Recipe
}

/** Recipes with commas between them, axes of which may be changed: `bf16,coat,coat+dw=f32+master=null`; `all` rows. */
export function namedRecipes(text: string): NamedRecipe[] {
  const words = text.split(',').flatMap((word) => (word.trim() === 'all' ? Object.keys(recipes) : [word]))
  const found = words.map((word) => {
    const name = word.trim()
    const [base = '', ...changes] = name.split('+')
    const [known] = recipeNames(base) as [RecipeName]
    const axes = changes.map(setting)
    const odd = axes.find(([axis], i) => axis === 'base' || axes.some((other, j) => j < i && other[0] === axis))
    if (odd) throw new InvalidArgumentError(`'${name}' gives ${odd[0]} twice.`)
    try {
      return { name, recipe: recipe({ base: known, ...Object.fromEntries(axes) }) }
    } catch (error) {
      throw new InvalidArgumentError((error as Error).message)
    }
  })
  return found.filter(({ name }, i) => found.findIndex((other) => other.name === name) === i)
}

/** `name=value`: a number, true, false, null or else a word. */
export function setting(text: string): [string, unknown] {
  const [, name, value] = /^([^=]+)=(.+)$/.exec(text) ?? []
  if (name === undefined || value === undefined) throw new InvalidArgumentError(`'${text}' is not name=value.`)
  const plain = /^(true|false|null|-?\d+(\.\d+)?(e-?\d+)?)$/.test(value)
  return [name, plain ? JSON.parse(value) : value]
}

/** Adds one `name=value` to those before: an option that may be given many times. */
export function settings(text: string, before: Record<string, unknown> = {}): Record<string, unknown> {
  return { ...before, ...Object.fromEntries([setting(text)]) }
}

/** One of a few words. */
export function oneOf<Word extends string>(known: readonly Word[]): (text: string) => Word {
  return (text) => {
    const word = known.find((name) => name === text)
    if (word === undefined) throw new InvalidArgumentError(`It must be one of ${known.join(', ')}.`)
    return word
  }
}

/** Words of a list with commas between them. */
export function someOf<Word extends string>(known: readonly Word[]): (text: string) => Word[] {
  return (text) => text.split(',').map((word) => oneOf(known)(word.trim()))
}

/** Integers of at least 0 with commas between them. */
export function integers(text: string): number[] {
  return text.split(',').map((word) => {
    if (!/^\d+$/.test(word.trim())) throw new InvalidArgumentError('It must be integers with commas between them.')
    return Number(word)
  })
}

/** A number above 0. */
export function rate(text: string): number {
  const value = Number(text)
  if (!(value > 0 && Number.isFinite(value))) throw new InvalidArgumentError('It must be a number above 0.')
  return value
}

/** Bytes: `80GiB`, `512MiB`, `1e9`. */
export function byteCount(text: string): number {
  const [, digits, unit = 'B'] = /^([\d.]+(?:e\d+)?)\s*(B|KiB|MiB|GiB)?$/.exec(text.trim()) ?? []
  const value = Math.round(Number(digits) * 1024 ** ['B', 'KiB', 'MiB', 'GiB'].indexOf(unit))
  if (!Number.isSafeInteger(value) || value < 1)
    throw new InvalidArgumentError('It must be a number of bytes, such as 80GiB or 512MiB.')
  return value
}

/**
 * Runs the program of `file` where that is what Node was started with. A problem of the user's is one line on stderr and
 * exit code 1; anything else keeps its stack.
 */
export async function start(file: string, main: (args: readonly string[]) => Promise<void>): Promise<void> {
  const started = process.argv[1]
  if (started === undefined || realpathSync(started) !== file) return
  try {
    await main(process.argv.slice(2))
  } catch (error) {
    process.exitCode = error instanceof CommanderError ? error.exitCode : 1
    if (error instanceof CommanderError) return // commander has said it
    const known = error instanceof CoatError || (error instanceof Error && 'syscall' in error)
    console.error(known ? `error: ${(error as Error).message}` : error)
  }
}
