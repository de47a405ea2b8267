// What options of a trainer may be: their names and their counts.
import { CoatError } from './native.ts'

/** Refuses what is no number of steps or sequences. */
export function expectCount(name: string, value: number): void {
  if (!Number.isSafeInteger(value) || value < 1)
    throw new CoatError(`Trainer: ${name} is ${value} and must be an integer of at least 1`, 'value', 'Trainer', name)
}

/** Options of something that happens `every` so many steps: another count, and paths. */
export function checked<Options extends { every: number }>(
  options: Options,
  where: string,
  count: keyof Options & string,
  paths: readonly (keyof Options & string)[] = [],
): Options {
  checkNames(options, [...paths, 'every', count], `${where}.`)
  for (const name of paths) {
    const value = options[name]
    if (typeof value !== 'string' || value === '')
      throw new CoatError(
        `Trainer: ${where}.${name} is ${value} and must be the path of a folder`,
        'value',
        'Trainer',
        `${where}.${name}`,
      )
  }
  for (const name of ['every', count] as const) expectCount(`${where}.${name}`, options[name] as number)
  return options
}

/** Refuses options by other names. */
export function checkNames(options: object, names: readonly string[], where = ''): void {
  for (const key of Object.keys(options))
    if (!names.includes(key))
      throw new CoatError(
        `Trainer: option '${where}${key}' is unknown; the options are ${names.join(', ')}`,
        'option',
        'Trainer',
        `${where}${key}`,
      )
}
