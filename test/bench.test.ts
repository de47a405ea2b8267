// The bench: rows, a case for every op, steps, and what the command lines refuse.
import { spawnSync } from 'node:child_process'
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, describe, expect, test } from 'vitest'
import { bench } from '../bench/cli.ts'
import { type OpCase, opBench, opTable } from '../bench/measure.ts'
import { casesLike, opCases } from '../bench/ops.ts'
import { stateErrors, stateFormats } from '../bench/optimizer.ts'
import { namedRecipes } from '../bench/options.ts'
import { recipesBench, recipesDefaults, recipesHtml, recipesRows } from '../bench/recipes.ts'
import {
  appendRows,
  fillSections,
  makeRow,
  markdownRows,
  parseRows,
  percentile,
  recipeRows,
  recipeTable,
  rowProblem,
  writeRows,
} from '../bench/row.ts'
import { timingNotes } from '../bench/step.ts'
import { quickstart } from '../examples/quickstart.ts'
import { device, memory, recipe, recipes, Tensor } from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { present } from './harness.ts'
import { Random } from './values.ts'

const folder = mkdtempSync(join(tmpdir(), 'coat-bench-'))
afterAll(() => rmSync(folder, { recursive: true }))
const path = (name: string) => join(folder, name)

describe('rows', () => {
  const row = makeRow({ kind: 'op', name: 'add', metric: 'time', unit: 'ms', shape: { M: 2, threads: 1 } }, [3, 1, 2])

  test('hold percentiles and say where they come from', () => {
    expect(row).toMatchObject({
      schema: 1,
      median: 2,
      p20: 1.4,
      p80: 2.6,
      n: 3,
      device: 'cpu',
      gpu: null,
      baseline: null,
    })
    expect(row.build).toEqual({ node: process.versions.node, cuda: null })
    expect(rowProblem(row)).toBeNull()
    expect(percentile([1, 2], 50)).toBe(1.5)
    expect(() => percentile([], 50)).toThrow('at least one')
  })

  test.each([
    ['schema', { ...row, schema: 2 }],
    ['kind', { ...row, kind: 'other' }],
    ['median', { ...row, median: Number.NaN }],
    ['p20', { ...row, p20: 9 }],
    ['shape', { ...row, shape: { M: '2' } }],
    ['commit', { ...row, commit: 'HEAD' }],
    ['date', { ...row, date: 'yesterday' }],
    ['baseline', { ...row, baseline: {} }],
    ["field 'extra'", { ...row, extra: 1 }],
  ])('with a wrong %s are refused', (field, wrong) => {
    expect(rowProblem(wrong)).toContain(field)
    expect(() => parseRows(JSON.stringify(wrong))).toThrow('rows: row 1: ')
  })

  test('come back from a JSON array and from JSON lines', () => {
    writeRows(path('rows.json'), [row, row])
    expect(JSON.parse(readFileSync(path('rows.json'), 'utf8'))).toEqual([row, row])
    expect(parseRows(readFileSync(path('rows.json'), 'utf8'))).toEqual([row, row])
    appendRows(path('rows.jsonl'), [row])
    appendRows(path('rows.jsonl'), [row])
    expect(parseRows(readFileSync(path('rows.jsonl'), 'utf8'))).toEqual([row, row])
  })

  test('make a Markdown table', () => {
    const other = { ...row, formats: { x: 'bf16' }, baseline: { name: 'copy', median: 4 } }
    expect(markdownRows([other]).split('\n')[2]).toBe(
      '| add | x bf16 | threads 1, M 2 | 2 ms | 1.4 ms to 2.6 ms | 50 % |',
    )
    const recipes = [
      { ...row, recipe: 'bf16', median: 4 },
      { ...row, recipe: 'coat', median: 3, baseline: { name: 'bf16', median: 4 } },
    ]
    expect(markdownRows(recipes)).toBe(
      '|  | bf16 | coat | coat / bf16 |\n| --- | ---: | ---: | ---: |\n| add | 4 ms | 3 ms | 0.750 |',
    )
  })
  test('fill the marked sections of a text', () => {
    const text = 'a\n<!-- rows f.jsonl add time -->\nold\n<!-- end -->\nb'
    const filled = fillSections(text, (file) => (file === 'f.jsonl' ? JSON.stringify(row) : expect.fail(file)))
    expect(filled).toContain('-->\n| name |')
    expect(filled).not.toContain('old')
    expect(fillSections(filled, () => JSON.stringify(row))).toBe(filled)
  })
})

/** The same case with sizes that take no time. */
function small(one: OpCase): OpCase {
  const sizes = { M: 8, N: 256, K: 64, F: 32, V: 16, B: 2, T: 8, H: 2, J: 1, D: 8, L: 4, R: 4 }
  const kept = Object.entries(sizes).filter(([letter]) => letter in one.sizes)
  return { ...one, sizes: Object.fromEntries(kept) }
}

describe('ops', () => {
  test('every op of the table has a case', () => {
    const names = native.table().map(({ name }) => name)
    expect([...new Set(opCases.map(({ op }) => op))].sort()).toEqual(names.sort())
  })

  test('all cases hold and give rows', async () => {
    const before = memory().tensors
    const rows = await opBench(opCases.map(small), { device: device(), budget: 0 })
    expect(rows.map(rowProblem).filter(Boolean)).toEqual([])
    const cuda = device().kind === 'cuda'
    const reads = cuda ? 3 : 0
    const timed = opCases.reduce((total, { large }) => total + (cuda ? (large?.length ?? 1) : 1), 0)
    expect(rows).toHaveLength(1 + reads + 2 * timed)
    expect(rows.filter(({ name }) => name === 'adamw')[1]).toMatchObject({
      metric: 'bandwidth',
      baseline: { name: 'copy' },
    })
    expect(opTable(rows).rows).toHaveLength(1 + reads + timed)
    expect(memory().tensors).toBe(before)
  })

  test('a wrong result is not timed', async () => {
    const wrong: OpCase = {
      op: 'add_into',
      sizes: { M: 4, N: 4 },
      formats: { y: 'f32', x: 'f32' },
      expect: { result: 'y', value: () => 99 },
    }
    await expect(opBench([wrong], { device: device(), budget: 0 })).rejects.toMatchObject({
      code: 'verify',
      op: 'add_into',
    })
  })

  test('a filter picks by name', () => {
    expect(new Set(casesLike('attention').map(({ op }) => op))).toEqual(
      new Set(['attention_forward', 'attention_backward', 'attention_cached', 'attention_center']),
    )
    expect(() => casesLike('nothing')).toThrow(/no op has 'nothing' in its name; the ops are convert, /)
  })
})

test('step measures recipes and writes rows', async () => {
  const said: string[] = []
  const sizes = ['--steps', '2', '--hidden', '32', '--layers', '1', '--batch', '2', '--sequence', '16']
  const files = ['--json', path('step.json'), '--append', path('step.jsonl')]
  await bench([...sizes, ...files], (text) => said.push(text))
  const rows = parseRows(readFileSync(path('step.json'), 'utf8'))
  expect(parseRows(readFileSync(path('step.jsonl'), 'utf8'))).toEqual(rows)
  const of = (name: string, recipe: string) => rows.find((row) => row.name === name && row.recipe === recipe)
  expect(of('step/tokens', 'coat')).toMatchObject({ kind: 'step', n: 2, baseline: { name: 'bf16' } })
  expect(of('step/peak/saved', 'coat')?.median).toBeLessThan(of('step/peak/saved', 'bf16')?.median ?? 0)
  expect(of('step/state_per_parameter', 'bf16')?.median).toBeGreaterThan(8)
  expect(of('step/saved_per_token_and_layer', 'bf16')).toMatchObject({
    kind: 'memory',
    metric: 'bytes',
    baseline: null,
  })
  for (const text of ['coat / bf16', 'kept for backward', 'e4m3/g16']) expect(said.join('\n')).toContain(text)
  await bench(['table', path('step.jsonl')], (text) => said.push(text))
  expect(said.at(-1)).toBe(markdownRows(rows))
})

describe('T8: what a reader needs to believe a step', () => {
  const sizes = ['--steps', '3', '--hidden', '64', '--layers', '2', '--batch', '2', '--sequence', '32']
  const say = async (...args: string[]) => {
    const said: string[] = []
    await bench(['step', ...sizes, '--json', path('believed.json'), ...args], (text) => said.push(text))
    return { said: said.join('\n'), rows: parseRows(readFileSync(path('believed.json'), 'utf8')) }
  }

  test('device, driver, sizes, warm-up, n, spread, baseline; where the bytes of the peak are, by parts that add up', async () => {
    const { said, rows } = await say('--device', 'cpu')
    expect(said).toContain(
      `${device('cpu').description}; threads ${native.threads()}, hidden 64, layers 2, batch 2, sequence 32`,
    )
    expect(said).toMatch(
      /^1 to warm up, then medians of n = 3; ms from p20 to p80: bf16 [\d.]+ to [\d.]+, coat [\d.]+ to/m,
    )
    expect(said).toMatch(/^coat takes [\d.]+ × the time of bf16: (slower|faster|the same)(, within their spreads)?$/m)
    const of = (name: string, recipe: string) =>
      rows.find((row) => row.name === `step/${name}` && row.recipe === recipe)?.median ?? Number.NaN
    for (const recipe of ['bf16', 'coat']) {
      const parts = ['param', 'grad', 'state', 'saved', 'temp', 'scratch'].map((part) => of(`at_peak/${part}`, recipe))
      expect(parts.reduce((sum, part) => sum + part)).toBe(of('peak/total', recipe))
      expect(said).toMatch(new RegExp(`^${recipe}, at its peak: .* [KM]iB = .* param \\+ .* state`, 'm'))
    }
    const layer = await say('--device', 'cpu', '--model', 'layer', '--recipe', 'coat')
    expect(layer.said).toContain('3 to warm up, then medians of n = 3')
    expect(layer.said).toContain('bf16 is not among the recipes: there is no baseline')
  })

  test.each([
    [[3, 4, 5], 'coat takes 2.000 × the time of bf16: slower'],
    [[1.1, 2.1, 3.1], 'coat takes 1.050 × the time of bf16: slower, within their spreads'],
    [[0.5, 1, 1.1], 'coat takes 0.500 × the time of bf16: faster'],
    [[1, 2, 3], 'coat takes 1.000 × the time of bf16: the same, within their spreads'],
  ])('%j ms against 1.4, 2 and 2.6: %s', (times, verdict) => {
    const fields = { kind: 'step', name: 'step/time', metric: 'time', unit: 'ms' } as const
    const rows = recipeRows(
      [
        { recipe: 'bf16', times: [1.4, 2, 2.6] },
        { recipe: 'coat', times },
      ],
      fields,
      (of) => of.times,
    )
    expect(timingNotes(rows, 'step/time', device('cpu'), 1).at(-1)).toBe(verdict)
  })

  test.skipIf(!present('cuda'))('on cuda the parts are within 5 % of what the driver counts', async () => {
    const large = ['--hidden', '1024', '--layers', '4', '--batch', '8', '--sequence', '512']
    const { rows, said } = await say('--device', 'cuda', ...large)
    for (const recipe of ['bf16', 'coat']) {
      const of = (name: string) => rows.find((row) => row.name === name && row.recipe === recipe)?.median ?? Number.NaN
      expect(Math.abs(of('step/peak/total') / of('step/used') - 1)).toBeLessThan(0.05)
    }
    expect(said).toMatch(/CUDA \d+\.\d+ driver/)
  })
})

describe('optimizer', () => {
  test('errors of known moments are the known ones', async () => {
    const random = new Random(5)
    const normals = (n: number) => Float32Array.from({ length: n }, () => random.normal())
    const n = 128 * 600
    const chiSquared = Float32Array.from({ length: n }, () => normals(20).reduce((sum, x) => sum + x * x, 0))
    using m = Tensor.from(normals(n), [1, n])
    using v = Tensor.from(chiSquared, [1, n])
    const { mse, rms, lost, k, groups } = await stateErrors([{ m, v }])
    expect(rms.m[0]).toBeCloseTo(0.0256, 3)
    expect(rms.m[1]).toBeCloseTo(0.0141, 3)
    expect(rms.v[0]).toBeCloseTo(0.0263, 3)
    expect(rms.v[1]).toBeCloseTo(0.004, 3)
    expect((mse[0]?.[0] as number) / (mse[1]?.[1] as number)).toBeCloseTo(3.8, 0)
    expect(lost).toEqual([0, 0, 0, 0, 0])
    expect([groups, [...k.m.values()].reduce((a, b) => a + b)]).toEqual([600, 600])
    const middle = (of: Map<number, number>) =>
      [...of].reduce((sum, [bin, count]) => sum + (bin + 0.5) * count, 0) / groups
    expect(middle(k.m)).toBeCloseTo(1.9, 0)
    expect(middle(k.v)).toBeCloseTo(6.9, 0)
  })

  test('moments too small for their group are lost without expansion, and only there', async () => {
    const values = Float32Array.from({ length: 256 }, (_, i) => (i % 2 ? 1 : 1e-11))
    using m = Tensor.from(new Float32Array(256).fill(1e-3), [1, 256])
    using v = Tensor.from(values, [1, 256])
    const { lost, floored, mse } = await stateErrors([{ m, v }])
    expect(lost).toEqual([0.5, 0, 0.5, 0, 0.5])
    expect(floored.lost).toEqual([0, 0, 0])
    for (const [f, second] of [0, 2, 4].entries())
      expect(floored.mse[f]).toBeLessThan((mse[0]?.[second] as number) / 10)
  })

  test('trains, and writes rows that can be read', async () => {
    const said: string[] = []
    const files = ['--json', path('optimizer.json'), '--html', path('optimizer.html')]
    await bench(['optimizer', '--steps', '2', ...files], (text) => said.push(text))
    const rows = parseRows(readFileSync(path('optimizer.json'), 'utf8'))
    expect(rows.filter(({ name }) => name === 'optimizer/mse').map(({ formats }) => formats)).toEqual(
      stateFormats.m.flatMap((m) => stateFormats.v.map((v) => ({ m, v }))),
    )
    const shares = (moment: string) =>
      rows.filter(({ name, formats }) => name === 'optimizer/k' && formats[moment]).map(({ median }) => median)
    for (const moment of ['m', 'v']) expect(shares(moment).reduce((a, b) => a + b)).toBeCloseTo(100, 6)
    const html = readFileSync(path('optimizer.html'), 'utf8')
    for (const text of [said.join('\n'), html]) expect(text).toContain('(paper 0.61 ×)')
    expect(html).toContain('<svg')
  })
})

describe('recipes', () => {
  const small = ['--hidden', '32', '--inner', '48', '--layers', '1', '--heads', '2', '--batch', '2', '--sequence', '32']
  const run = (args: string[], said: string[] = []) =>
    bench(['recipes', '--device', 'cpu', ...small, ...args], (text) => said.push(text))

  test('trains each of them and leaves one table, rows and a page', async () => {
    const said: string[] = []
    const files = ['--json', path('recipes.json'), '--html', path('recipes.html')]
    await run(['--recipe', 'te-delayed,bf16,coat+dw=f32', '--steps', '3', ...files], said)
    const rows = parseRows(readFileSync(path('recipes.json'), 'utf8'))
    const of = (name: string, recipe: string) => rows.find((row) => row.name === name && row.recipe === recipe)
    const base = of('recipes/validation', 'bf16')
    expect(base?.shape).toMatchObject({ hidden: 32, inner: 48, layers: 1, heads: 2, batch: 2, sequence: 32, steps: 3 })
    expect(of('recipes/validation', 'te-delayed')?.baseline).toEqual({ name: 'bf16', median: base?.median })
    for (const [recipe, bytes] of [
      ['bf16', 16],
      ['te-delayed', 16],
      ['coat+dw=f32', 10.1875],
    ] as const)
      expect(of('recipes/bytes/predicted', recipe)?.median).toBe(bytes)
    expect(of('recipes/saved', 'coat+dw=f32')?.median).toBeLessThan(of('recipes/saved', 'bf16')?.median as number)
    const html = readFileSync(path('recipes.html'), 'utf8')
    for (const text of [said.join('\n'), html])
      for (const name of ['te-delayed', 'less bf16', 'kept for backward']) expect(text).toContain(name)
    const filled = fillSections('<!-- recipes recipes.json -->\n<!-- end -->', (file) =>
      readFileSync(path(file), 'utf8'),
    )
    expect(filled).toMatch(
      /\n\| coat\+dw=f32 \| 3 \| \d\.\d{4} \| [+-]0\.\d{4} \| 10\.188 \| 10\.\d{3} \| [\d.]+ KiB \|/,
    )
    expect(html).toContain('<svg')
  })

  test('every recipe has the bytes a parameter that its formats say, to 1 %', async () => {
    const model = { ...recipesDefaults, layers: 1, batch: 16, sequence: 16, steps: 1 }
    const { results } = await recipesBench({ ...model, device: device('cpu'), recipes: namedRecipes('all') })
    expect(results.map(({ recipe }) => recipe).sort()).toEqual(Object.keys(recipes).sort())
    for (const { recipe, measured, predicted, saved } of results) {
      expect(Math.abs(measured / predicted - 1), recipe).toBeLessThan(0.01)
      expect(saved, recipe).toBeGreaterThan(0)
    }
  })

  test('a row that is added at run time is among them all', async () => {
    const mine = recipe({ base: 'te-current', dw: 'bf16', m: 'bf16', v: 'bf16' })
    Object.assign(recipes, { mine })
    try {
      const added = namedRecipes('all').filter(({ name }) => name === 'mine')
      const model = { ...recipesDefaults, layers: 1, batch: 16, sequence: 16, steps: 1 }
      const { results } = await recipesBench({ ...model, device: device('cpu'), recipes: added })
      expect(results.map(({ recipe, predicted }) => [recipe, predicted])).toEqual([['mine', 4 + 2 + 4]])
      expect(results[0]?.measured).toBeCloseTo(10, 1)
    } finally {
      Reflect.deleteProperty(recipes, 'mine')
    }
  })

  test('what is emulated is trained shorter, marked, and compared with a bf16 run as long', async () => {
    const options = {
      ...recipesDefaults,
      ...{ hidden: 32, inner: 48, layers: 1, heads: 2, batch: 2, sequence: 32, steps: 5, emulatedSteps: 2 },
      device: device('cpu'),
      recipes: namedRecipes('gupta-fixed,coat,bf16'),
    }
    const { results } = await recipesBench(options)
    expect(results.map(({ recipe, steps, losses }) => [recipe, steps, losses.length])).toEqual([
      ['bf16', 5, 5],
      ['coat', 5, 5],
      ['bf16', 2, 2],
      ['gupta-fixed', 2, 2],
    ])
    const base = results[2]?.validation as number
    const table = recipeTable(recipesRows(results, options)).rows
    expect(table[3]?.[0]).toBe('gupta-fixed (emulated)')
    expect(Number(table[3]?.[3])).toBeCloseTo((results[3]?.validation as number) - base, 3)
    const row = recipesRows(results, options).find(
      ({ name, recipe }) => name === 'recipes/tokens' && recipe === 'gupta-fixed',
    )
    expect(row?.shape).toMatchObject({ steps: 2, emulated: 1 })
    expect(await recipesHtml(results, options)).toContain('gupta-fixed (emulated)')
  })

  test('goes on from what is done, and refuses another set-up in the same folder', async () => {
    const dir = path('kept')
    const said: string[] = []
    const three = ['--recipe', 'bf16,coat,fp32', '--steps', '2', '--dir', dir]
    const options = {
      ...recipesDefaults,
      ...{ hidden: 32, inner: 48, layers: 1, heads: 2, batch: 2, sequence: 32, steps: 2 },
      device: device('cpu'),
      recipes: namedRecipes('bf16,coat,fp32'),
      dir,
    }
    let left = 2
    const cut = await recipesBench({ ...options, spent: () => left-- <= 0 })
    expect([cut.complete, cut.results.map(({ recipe }) => recipe)]).toEqual([false, ['bf16', 'coat']])
    await run([...three, '--budget', '1e-9'], said)
    expect(said.at(-1)).toMatch(/the same command goes on/)
    expect(said.join('\n')).not.toContain('fp32')
    const first = readFileSync(join(dir, 'coat-2.json'), 'utf8')
    const whole = await recipesBench(options)
    expect([whole.complete, whole.results.length]).toEqual([true, 3])
    expect(whole.results.slice(0, 2)).toEqual(cut.results)
    expect(readFileSync(join(dir, 'coat-2.json'), 'utf8')).toBe(first)
    const fresh = await recipesBench({ ...options, dir: path('others') })
    expect(fresh.results.map(({ validation }) => validation)).toEqual(whole.results.map(({ validation }) => validation))
    await expect(run([...three, '--lr', '0.1'])).rejects.toThrow(
      /^recipes: lr is 0.1, and 0.002 in .*setup.json; take another folder$/,
    )
  })
})

test('quickstart trains, compares and leaves its files', async () => {
  const said: string[] = []
  const out = path('quickstart')
  await quickstart(['--steps', '2', '--out', out, '--json', path('quickstart.json')], (text) => said.push(text))
  const lines = readFileSync(join(out, 'metrics.jsonl'), 'utf8').trimEnd().split('\n')
  expect(lines.map((line) => JSON.parse(line)).map(({ recipe, step }) => [recipe, step])).toEqual([
    ['bf16', 1],
    ['bf16', 2],
    ['coat', 1],
    ['coat', 2],
  ])
  expect(readFileSync(join(out, 'report.html'), 'utf8')).toContain('<svg')
  const results = parseRows(readFileSync(path('quickstart.json'), 'utf8')).filter(({ metric }) => metric === 'loss')
  expect(results.map(({ name, recipe }) => [name, recipe])).toEqual([
    ['quickstart/validation', 'bf16'],
    ['quickstart/validation', 'coat'],
  ])
  for (const text of ['validation loss', 'peak saved', 'The people of the United States ', 'report.html'])
    expect(said.join('\n')).toContain(text)
})

describe('command lines refuse', () => {
  writeFileSync(path('plain'), '')
  const bad: [string, string[], RegExp][] = [
    [
      'bench/cli.js',
      ['step', '--steps', '0'],
      /^error: option '--steps <n>' argument '0' is invalid. It must be an integer/,
    ],
    [
      'bench/cli.js',
      ['step', '--recipe', 'bf16,best'],
      /^error: .*'best' is unknown; the recipes are fp32, bf16, coat/,
    ],
    ['bench/cli.js', ['step', '--hidden', '20'], /^error: hidden is 20 and must be a multiple of 16/],
    ['bench/cli.js', ['optimizer', '--steps', 'many'], /^error: option '--steps <n>' argument 'many' is invalid/],
    ['bench/cli.js', ['ops', '--filter', 'nothing'], /^error: no op has 'nothing' in its name/],
    ['bench/cli.js', ['ops', '--device', 'tpu'], /^error: device is 'tpu' and must be/],
    ['bench/cli.js', ['table', join(import.meta.dirname, '../biome.json')], /^error: rows: not JSON/],
    ['bench/cli.js', ['table', path('absent')], /^error: ENOENT: no such file/],
    ['bench/cli.js', ['--fast'], /^error: unknown option '--fast'/],
    ['bench/cli.js', ['ops', '--json', path('plain/rows.json')], /^error: .*plain\/rows.json cannot be written/],
    ['examples/quickstart.js', ['--steps', '1.5'], /^error: option '--steps <n>' argument '1.5' is invalid/],
    ['examples/quickstart.js', ['--recipe', ''], /^error: option '--recipe <names>' argument '' is invalid/],
    ['examples/quickstart.js', ['more'], /^error: too many arguments/],
  ]
  test.concurrent.each(bad)('%s %j', (file, args, message) => {
    const out = file.includes('quickstart') ? ['--out', path('refused')] : []
    const program = join(import.meta.dirname, '../dist', file)
    const { status, stderr } = spawnSync(process.execPath, [program, ...args, ...out], { encoding: 'utf8' })
    expect(stderr).toMatch(message)
    expect(stderr).not.toMatch(/^ {4}at /m)
    expect(status).toBe(1)
    expect(existsSync(path('refused'))).toBe(false)
  })
})
