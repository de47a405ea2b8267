// Folders in which a command keeps what is done, so that the same command goes on: they are for one set-up.
import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { CoatError } from '../lib/index.ts'
import { writeWhole } from '../lib/report.ts'

/** A folder is for one set-up: its runs are compared with each other. */
export function checkSetup(command: string, dir: string, setup: Readonly<Record<string, number | string>>): void {
  const file = join(dir, 'setup.json')
  if (!existsSync(file)) writeWhole(file, `${JSON.stringify(setup)}\n`)
  const known = JSON.parse(readFileSync(file, 'utf8')) as Record<string, unknown>
  for (const [name, value] of Object.entries(setup))
    if (known[name] !== value)
      throw new CoatError(
        `${command}: ${name} is ${value}, and ${known[name]} in ${file}; take another folder`,
        'value',
        command,
        name,
      )
}

/** The name of a recipe as one of files. */
export function fileNameOf(recipe: string): string {
  return recipe.replace(/[^\w.=+-]/g, '_')
}
