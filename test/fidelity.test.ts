// coat-bench fidelity, on a model of a size that trains in a moment: runs that are cut off and go on, branches, refusals.
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { expect, test } from 'vitest'
import { bench } from '../bench/cli.ts'
import { type FidelityOptions, fidelityBench, fidelityDefaults } from '../bench/fidelity.ts'
import { namedRecipes } from '../bench/options.ts'
import { fillSections, lossTable, parseRows } from '../bench/row.ts'
import { device, memory } from '../lib/index.ts'
import { eachInFolder } from './folders.ts'

let dir = ''
eachInFolder((next) => {
  dir = join(next, 'runs')
})

const small = { hidden: 32, inner: 48, layers: 1, heads: 2, batch: 2, sequence: 32, steps: 12, tail: 3, every: 4 }
const options = (more: Partial<FidelityOptions> = {}): FidelityOptions => ({
  ...fidelityDefaults,
  ...small,
  device: device('cpu'),
  recipes: namedRecipes('bf16,coat'),
  dir,
  ...more,
})

test('a run that is cut off goes on to the row that it would have had', async () => {
  const before = memory().live.total
  const { rows, complete } = await fidelityBench(options())
  expect(complete).toBe(true)
  expect(rows.map(({ name, recipe, n }) => [name, recipe, n])).toEqual([
    ['fidelity/loss', 'bf16', 3],
    ['fidelity/loss', 'coat', 3],
  ])
  expect(rows[1]?.baseline).toEqual({ name: 'bf16', median: rows[0]?.median })
  const last = readFileSync(join(dir, 'coat-seed1.losses'), 'utf8').trimEnd().split('\n').map(Number)
  expect(last).toHaveLength(12)
  expect(rows[1]?.median).toBeCloseTo(
    last.slice(-3).reduce((sum, loss) => sum + loss / 3, 0),
    12,
  )

  const again = options({ dir: `${dir}-again` })
  let calls = 0
  for (let done = false; !done; calls++) {
    let steps = 6
    done = (await fidelityBench({ ...again, spent: () => steps-- <= 0 })).complete
  }
  expect(calls).toBe(5) // 12 steps and a look ahead a run, 5 steps or 6 a call
  const medians = (of: string) => parseRows(readFileSync(join(of, 'rows.jsonl'), 'utf8')).map(({ median }) => median)
  expect(medians(again.dir)).toEqual(medians(dir))
  expect(memory().live.total).toBe(before)
})

test('a run that was killed after its checkpoint loses nothing and counts nothing twice', async () => {
  // what a killed process leaves: a checkpoint, and losses of steps after it
  const cut = options({ recipes: namedRecipes('bf16') })
  await fidelityBench({ ...cut, branchFrom: 8, orders: 1, branchSteps: 2 })
  const base = join(dir, 'base-seed1-step8.losses')
  const losses = readFileSync(base, 'utf8')
  writeFileSync(base, `${losses}99\n98\n`)
  await fidelityBench({ ...cut, branchFrom: 8, orders: 2, branchSteps: 2 })
  expect(readFileSync(base, 'utf8')).toBe(losses)
})

test('branches start from the bf16 weights and moments, a moved twin beside them', async () => {
  const branch = options({
    branchFrom: 8,
    branchSteps: 4,
    orders: 2,
    recipes: namedRecipes('bf16,fp32,coat+m=f32+v=f32'),
  })
  const { rows, complete } = await fidelityBench(branch)
  expect(complete).toBe(true)
  expect(rows).toHaveLength(8)
  const loss = (recipe: string, order: number, twin = 0) =>
    rows.find(({ recipe: of, shape }) => of === recipe && shape.order === order && shape.twin === twin)?.median ?? 0
  for (const order of [1, 2]) {
    // the base has f32 masters and moments, so an fp32 branch differs by the rounding of bf16 arithmetic alone
    expect(loss('fp32', order) / loss('bf16', order)).toBeCloseTo(1, 3)
    expect(loss('coat+m=f32+v=f32', order) / loss('bf16', order)).toBeCloseTo(1, 2)
    expect(loss('bf16', order, 1)).not.toBe(loss('bf16', order))
    expect(loss('bf16', order, 1) / loss('bf16', order)).toBeCloseTo(1, 3)
  }
  expect(loss('bf16', 1)).not.toBe(loss('bf16', 2))
  const table = lossTable(rows).rows
  expect(table.map(([name, of, runs]) => [name, of, runs])).toEqual([
    ['bf16', 'fidelity/branch from step 8', '2'],
    ['fp32', 'fidelity/branch from step 8', '2'],
    ['coat+m=f32+v=f32', 'fidelity/branch from step 8', '2'],
    ['bf16, moved', 'fidelity/branch from step 8', '2'],
  ])
  expect(table[1]?.[4]).toMatch(/^[+-]0\.\d{3} %$/)
  const text = '<!-- losses rows.jsonl -->\n<!-- end -->'
  const filled = fillSections(text, (file) => readFileSync(join(dir, file), 'utf8'))
  expect(filled).toContain('| recipe | what | runs | loss | against bf16 | least | most |')
  expect(filled).toContain(`| bf16, moved | fidelity/branch from step 8 | 2 | ${table[3]?.[3]} |`)
})

test('the command line says what is left, and refuses another set-up in the same folder', async () => {
  const said: string[] = []
  const flags = Object.entries(small).flatMap(([name, value]) => [`--${name}`, String(value)])
  const run = (...more: string[]) =>
    bench(['fidelity', '--device', 'cpu', '--dir', dir, ...flags, ...more], (text) => said.push(text))
  await run('--recipes', 'bf16', '--budget', '1e-9')
  expect(said.at(-1)).toMatch(/the same command goes on/)
  expect(readdirSync(dir)).toEqual(['setup.json'])
  await run('--recipes', 'bf16', '--json', join(dir, 'all.json'))
  expect(parseRows(readFileSync(join(dir, 'all.json'), 'utf8'))).toHaveLength(1)
  expect(existsSync(join(dir, 'bf16-seed1'))).toBe(false)
  await expect(run('--lr', '0.1')).rejects.toThrow(
    /^fidelity: lr is 0.1, and 0.0006 in .*setup.json; take another folder$/,
  )
  await expect(run('--branch-from', '11')).rejects.toThrow(
    /branches of 100 steps from step 11 end after the last of 12/,
  )
  await expect(run('--recipes', 'coat', '--branch-from', '4', '--branch-steps', '2')).rejects.toThrow(
    /must hold 'bf16'/,
  )
})
