// An empty folder for every test of a file.
import { mkdir, mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, beforeEach } from 'vitest'

/** Calls `use` with a new folder, and the one it is in, before every test; all of them go at the end. */
export function eachInFolder(use: (folder: string, root: string) => void): void {
  let root = ''
  let next = 0
  beforeAll(async () => {
    root = await mkdtemp(join(tmpdir(), 'coat-'))
  })
  beforeEach(async () => {
    const folder = join(root, String(next++))
    await mkdir(folder)
    use(folder, root)
  })
  afterAll(() => rm(root, { recursive: true }))
}
