// Files that take the place of others all together: written beside them, renamed at the end, undone if that fails.
import { link, lstat, open, rename, rm } from 'node:fs/promises'
import { basename, dirname, join } from 'node:path'
import { CoatError } from './native.ts'

let nextTag = 1

/** A set of files to put in place, and of files to take away, that happens as a whole or not at all. */
export class Replacement {
  readonly #tag = `${process.pid}-${nextTag++}`
  readonly #files = new Map<string, string>()
  readonly #removed = new Set<string>()

  /**
   * The name under which the next content of `target` is written: in the same folder, so that a rename moves it. It may
   * become a folder where `target` is not there yet.
   */
  write(target: string): string {
    const temporary = this.#beside(target, 'new')
    this.#files.set(target, temporary)
    return temporary
  }

  /** `target` goes away with `commit()`, unless it is written. */
  remove(target: string): void {
    this.#removed.add(target)
  }

  /**
   * Renames what was written. A name in use stays readable throughout, with old or new content; if a rename fails, all old
   * files are put back, and `abort()` is left to do.
   */
  async commit(): Promise<void> {
    const kept = new Map<string, string>()
    const placed: string[] = []
    try {
      for (const target of new Set([...this.#files.keys(), ...this.#removed])) {
        const found = await lstat(target).catch(() => null)
        if (found?.isDirectory())
          throw new CoatError(`${target} is a folder and must be a file, or absent`, 'file', 'replace', 'path')
        if (!found) continue
        const old = this.#beside(target, 'old')
        // file systems without hard links have a moment without the name instead
        await link(target, old).catch(() => rename(target, old))
        kept.set(target, old)
      }
      for (const [target, temporary] of this.#files) {
        await rename(temporary, target)
        placed.push(target)
      }
      for (const target of this.#removed) if (!this.#files.has(target)) await rm(target, { force: true })
      for (const folder of new Set([...this.#files.keys()].map(dirname))) await synced(folder)
    } catch (error) {
      for (const target of placed) if (!kept.has(target)) await rm(target, { force: true, recursive: true })
      for (const [target, old] of kept) await restored(target, old)
      throw error
    }
    for (const old of kept.values()) await rm(old, { force: true })
  }

  /** Deletes what was written under temporary names. */
  async abort(): Promise<void> {
    for (const temporary of this.#files.values()) await rm(temporary, { force: true, recursive: true })
  }

  #beside(target: string, what: 'new' | 'old'): string {
    return join(dirname(target), `.${basename(target)}.${this.#tag}.${what}`)
  }
}

async function restored(target: string, old: string): Promise<void> {
  await rename(old, target)
  await rm(old, { force: true }) // a rename onto another link of the same file leaves both names
}

async function synced(folder: string): Promise<void> {
  const handle = await open(folder, 'r')
  try {
    await handle.sync()
  } finally {
    await handle.close()
  }
}
