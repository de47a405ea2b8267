// Files with text: which they are, and what they hold.
import { readdirSync, statSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { CoatError } from '../lib/index.ts'
import { isTokenFile } from '../lib/tokens.ts'

function refuse(message: string): never {
  throw new CoatError(message, 'path', 'coat-train', 'data')
}

/** The files themselves, and of folders all that end in one of `endings`, by name. */
export function textFiles(paths: readonly string[], endings: readonly string[] = ['.txt']): string[] {
  return paths.flatMap((path) => {
    let folder: boolean
    try {
      folder = statSync(path).isDirectory()
    } catch (error) {
      refuse(`${path} cannot be read: ${(error as Error).message}`)
    }
    if (!folder) return [path]
    const names = readdirSync(path, { recursive: true, encoding: 'utf8' }).sort()
    const files = names
      .filter((name) => endings.some((ending) => name.endsWith(ending)))
      .map((name) => join(path, name))
    if (files.length === 0) refuse(`${path} has no file that ends in ${endings.join(' or ')}`)
    return files
  })
}

/** The text of a file; what is no UTF-8, or has a NUL, is none. */
export async function readText(file: string): Promise<string> {
  if (await isTokenFile(file))
    refuse(`${file} holds tokens, as coat-train prepare wrote them, and must be text; it is for data.tokens`)
  const bytes = await readFile(file)
  const nul = bytes.indexOf(0)
  if (nul >= 0) refuse(`${file} has a NUL at byte ${nul} and must be text`)
  try {
    return new TextDecoder('utf-8', { fatal: true }).decode(bytes)
  } catch {
    refuse(`${file} is no UTF-8 and must be text`)
  }
}

/** A few names of many. */
export function shownFiles(files: readonly string[]): string {
  const more = files.length > 3 ? ` and ${files.length - 3} more` : ''
  return `${files.slice(0, 3).join(', ')}${more}`
}
