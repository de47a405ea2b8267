// COAT_PROFILE: what a program of its own leaves in the file, and what becomes of a file that cannot be written.
import { spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { describe, expect, test } from 'vitest'
import { traceOf } from '../bench/profile.ts'
import { eachInFolder } from './folders.ts'
import { present } from './harness.ts'

let folder = ''
eachInFolder((next) => {
  folder = next
})

const root = fileURLToPath(new URL('..', import.meta.url))

/** Runs a program with `native`, the addon, in a process of its own. */
function run(body: string, profile: string): string {
  const program = `const native = require('node-gyp-build')(${JSON.stringify(root)}); ${body}`
  const env = { ...process.env, COAT_PROFILE: profile }
  const { stderr } = spawnSync(process.execPath, ['-e', program], { cwd: root, encoding: 'utf8', env })
  return stderr
}

const absent = (kind: 'cpu' | 'cuda') => kind === 'cuda' && !present('cuda')

describe.each(['cpu', 'cuda'] as const)('%s', (kind) => {
  test.skipIf(absent(kind))('every op is an event, in order, with its sizes, formats and bytes', () => {
    const file = join(folder, 'trace.json')
    const body = `
    const x = native.random_normal('bf16', 8, 64, 0, 1, 1, '${kind}')
    native.note('middle "here"', '${kind}')
    const [y] = native.matmul_nt(x, x, null, 'f32', null)
    try { native.matmul_nt(x, y, null, 'f32', null) } catch {}
    native.add_into(y, y)`
    expect(run(body, file)).toBe('')
    const trace = traceOf(readFileSync(file, 'utf8'))
    expect(trace.map(({ name, cat, ph }) => [name, cat, ph])).toEqual([
      ['random_normal', 'random', 'X'],
      ['middle "here"', 'note', 'i'],
      ['matmul_nt', 'matmul', 'X'],
      ['add_into', 'add', 'X'],
    ])
    expect(trace[2]?.args).toEqual({
      device: kind,
      bytes: 2 * 8 * 64 * 2 + 8 * 8 * 4,
      sizes: { K: 64, M: 8, N: 8 },
      formats: { a: 'bf16', b: 'bf16', y: 'f32' },
    })
    expect(trace[3]?.args?.bytes).toBe(3 * 8 * 8 * 4) // read, written, and read as the other operand
    for (const [i, { ts, dur = 0 }] of trace.entries()) {
      expect(dur).toBeGreaterThanOrEqual(0)
      expect(ts + dur).toBeLessThanOrEqual(trace[i + 1]?.ts ?? Number.POSITIVE_INFINITY)
    }
  })
})

test('graphs are refused, which have no times of ops', () => {
  expect(run(`native.beginGraph('cpu', 0)`, join(folder, 'trace.json'))).toContain(
    'graph: COAT_PROFILE takes the time of every op, which cannot be recorded; unset it',
  )
})

test('the file is whole after every sync, and has what came later when the program ends', () => {
  const file = join(folder, 'trace.json')
  const body = `
    const fs = require('node:fs')
    const counts = []
    const make = () => native.free(native.random_normal('f32', 4, 4, 0, 1, 1, 'cpu'))
    const count = () => counts.push(JSON.parse(fs.readFileSync(${JSON.stringify(file)}, 'utf8')).length)
    make(); count()
    native.sync('cpu').then(count).then(() => { make(); make() }).then(() => native.sync('cpu')).then(count)
      .then(make).then(() => fs.writeFileSync(${JSON.stringify(join(folder, 'counts'))}, counts.join(' ')))`
  expect(run(body, file)).toBe('')
  expect(readFileSync(join(folder, 'counts'), 'utf8')).toBe('0 1 3')
  expect(traceOf(readFileSync(file, 'utf8'))).toHaveLength(4)
})

test('a long run writes as it goes', () => {
  const file = join(folder, 'trace.json')
  const body = `
    const fs = require('node:fs')
    const x = native.random_normal('f32', 1, 1, 0, 1, 1, 'cpu')
    for (let i = 0; i < 2 ** 16; i++) native.add_into(x, x)
    fs.writeFileSync(${JSON.stringify(join(folder, 'count'))}, String(JSON.parse(fs.readFileSync(${JSON.stringify(file)}, 'utf8')).length))`
  expect(run(body, file)).toBe('')
  expect(readFileSync(join(folder, 'count'), 'utf8')).toBe(String(2 ** 16))
  expect(traceOf(readFileSync(file, 'utf8'))).toHaveLength(2 ** 16 + 1)
})

test('a file that cannot be written is refused by the first op', () => {
  const stderr = run("native.random_normal('f32', 4, 4, 0, 1, 1, 'cpu')", join(folder, 'absent', 'trace.json'))
  expect(stderr).toMatch(/random_normal: COAT_PROFILE is ".*absent\/trace.json", which cannot be written: No such file/)
})

test('events that are left when nothing can be written are not lost in silence', () => {
  const file = join(folder, 'trace.json')
  const body = `
    const fs = require('node:fs')
    native.random_normal('f32', 4, 4, 0, 1, 1, 'cpu')
    for (const fd of fs.readdirSync('/proc/self/fd'))
      try { if (fs.readlinkSync('/proc/self/fd/' + fd) === ${JSON.stringify(file)}) fs.closeSync(Number(fd)) } catch {}`
  expect(run(body, file)).toMatch(/^coat-fp8: 1 events of the profile are lost: COAT_PROFILE is ".*trace.json", which/)
})
