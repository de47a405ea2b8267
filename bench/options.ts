// Arguments of command-line programs: how they are read, and how a program ends that cannot go on.
import { realpathSync } from 'node:fs'
import { CommanderError, InvalidArgumentError } from 'commander'
import { CoatError, type RecipeName, recipe } from '../lib/index.ts'

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
