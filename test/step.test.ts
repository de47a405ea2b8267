// coat-bench step: true shapes, one layer, parts of a step, limits and what fits them, profiles, peers and tables of them.
import { spawnSync } from 'node:child_process'
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { describe, expect, test } from 'vitest'
import { bench } from '../bench/cli.ts'
import {
  batchRows,
  type FitOptions,
  findBatch,
  findModel,
  largest,
  modelRows,
  type Trial,
  trial,
} from '../bench/fit.ts'
import { configOf, flopsPerToken, models, parametersOf } from '../bench/models.ts'
import { byteCount, namedRecipes } from '../bench/options.ts'
import { profileOf, profileRows, profileTables, type TraceEvent } from '../bench/profile.ts'
import { compareRows, fillSections, makeRow, parseRows, type Row, rowProblem } from '../bench/row.ts'
import { device, LlamaForCausalLM, memory } from '../lib/index.ts'
import { eachInFolder } from './folders.ts'

let folder = ''
eachInFolder((next) => {
  folder = next
})

const cpu = device('cpu')
// what runs apart runs what is built
const program = fileURLToPath(new URL('../dist/bench/cli.js', import.meta.url))
const flags = ['--device', 'cpu', '--hidden', '64', '--batch', '2', '--sequence', '32', '--steps', '2']

async function rowsOf(...args: string[]): Promise<{ rows: Row[]; said: string }> {
  const said: string[] = []
  const file = join(folder, 'rows.json')
  await bench(['step', ...flags, '--json', file, ...args], (text) => said.push(text))
  return { rows: parseRows(readFileSync(file, 'utf8')), said: said.join('\n') }
}

describe('models', () => {
  test.each([
    ['tinyllama', 1.1e9],
    ['olmo-1b', 1.18e9],
    ['1b', 1.2e9],
    ['llama-2-7b', 6.74e9],
    ['llama-3-8b', 8.03e9],
    ['llama-2-13b', 13.02e9],
    ['llama-30b', 32.5e9],
  ] as const)('%s has about %d parameters', (name, expected) => {
    expect(parametersOf(configOf({ model: name, sequence: 2048 })) / expected).toBeCloseTo(1, 1)
    expect(Object.keys(models)).toContain(name)
  })

  test('operations of a token are six a weight that is multiplied, and attention', () => {
    const config = configOf({ model: 'small', hidden: 64, layers: 3, sequence: 32 })
    using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
    const multiplied = model.parameters().filter(({ tensor }) => tensor.shape.length === 2) // the tied head among them
    const weights = multiplied.reduce((sum, { tensor }) => sum + tensor.numel, 0)
    expect(flopsPerToken(config, 32)).toBe(6 * weights + 3 * 6 * 32 * 64)
  })
})

test('parts of a step add up to less than the step, and every row is a row', async () => {
  const { rows, said } = await rowsOf('--recipe', 'bf16,coat+dw=f32', '--trainer', 'accumulate=2')
  expect(rows.map(rowProblem).filter(Boolean)).toEqual([])
  const of = (name: string, recipe = 'coat+dw=f32') =>
    rows.find((row) => row.name === `step/${name}` && row.recipe === recipe)?.median ?? Number.NaN
  for (const part of ['forward', 'backward', 'update']) expect(of(part)).toBeGreaterThan(0)
  expect(of('forward') + of('backward') + of('update')).toBeLessThan(of('time'))
  expect(rows.find(({ name }) => name === 'step/tokens')?.unit).toBe('tokens/s')
  const ledger = rows.filter(({ name, recipe }) => name.startsWith('step/saved/') && recipe === 'bf16')
  expect(ledger.map(({ formats }) => formats.saved)).toContain('bf16')
  expect(ledger.reduce((sum, { median }) => sum + median, 0)).toBe(of('peak/saved', 'bf16'))
  for (const text of ['ms of backward', 'TFLOP/s of the model', 'coat+dw=f32 / bf16']) expect(said).toContain(text)
})

test('one layer is timed without an optimizer', async () => {
  const before = memory().live.total
  const { rows, said } = await rowsOf('--model', 'layer')
  const of = (name: string, recipe: string) => rows.find((row) => row.name === name && row.recipe === recipe)
  for (const recipe of ['bf16', 'coat']) {
    const [forward, backward, both] = ['forward', 'backward', 'both'].map((name) => of(`layer/${name}`, recipe)?.median)
    expect(forward).toBeGreaterThan(0)
    expect(both).toBeGreaterThan(Math.max(forward ?? 0, backward ?? 0))
    expect(of('layer/peak/state', recipe)?.median).toBe(0)
    expect(of('layer/saved', recipe)?.median).toBe(of('layer/peak/saved', recipe)?.median)
  }
  const unit = 2 * 32 * 64 * 2
  expect(of('layer/saved_in_u', 'coat')?.median).toBeCloseTo((of('layer/saved', 'coat')?.median ?? 0) / unit, 10)
  expect(of('layer/both', 'coat')?.shape).toMatchObject({ hidden: 64, layers: 1, batch: 2, sequence: 32 })
  expect(said).toContain('kept for backward')
  expect(memory().live.total).toBe(before)
})

describe('limits', () => {
  const options: FitOptions = { device: cpu, model: 'small', hidden: 64, sequence: 32, batch: 2 }

  test('a trial says whether a step fits', async () => {
    const [coat] = namedRecipes('coat')
    const free = await trial(options, coat as never)
    if (!free.fits) throw new Error(free.reason)
    expect(await trial({ ...options, memoryLimit: free.peak }, coat as never)).toEqual(free)
    expect(await trial({ ...options, memoryLimit: free.peak - 1 }, coat as never)).toMatchObject({
      fits: false,
      reason: expect.stringMatching(/out of memory: .* and the limit is /),
    })
  })

  test.each([0, 1, 2, 3, 7, 8, 100])('the largest that fits is found: %d', async (most) => {
    const asked: number[] = []
    const fits = async (n: number) => asked.push(n) > 0 && n <= most
    expect(await largest(fits)).toBe(most)
    expect(new Set(asked).size).toBe(asked.length)
  })

  test('the largest batch, the largest model', async () => {
    const attempt = async ({ model, batch }: FitOptions): Promise<Trial> => {
      const needs = batch * (model === 'small' ? 1 : model === 'tinyllama' ? 10 : 1000)
      return needs <= 50 ? { fits: true, peak: needs } : { fits: false, reason: '' }
    }
    const found = await findBatch('coat', { ...options, model: 'tinyllama' }, attempt)
    expect(found).toEqual({ recipe: 'coat', model: 'tinyllama', batch: 5, peak: 50 })
    expect(await findModel('coat', ['1b', 'small', 'tinyllama'], options, attempt)).toMatchObject({
      model: 'tinyllama',
    })
    expect(await findModel('coat', ['1b'], options, attempt)).toMatchObject({ model: '1b', batch: 0 })
    const limited = { ...options, memoryLimit: 60 }
    const { hidden: _, ...plain } = limited
    const rows = [...batchRows([{ ...found, model: 'small' }], limited), ...modelRows([found], plain)]
    expect(rows.map(rowProblem).filter(Boolean)).toEqual([])
    expect(rows[0]).toMatchObject({ median: 5, unit: 'sequences', shape: { limit: 60, hidden: 64, sequence: 32 } })
    expect(rows[2]).toMatchObject({ name: 'step/largest_model', shape: { limit: 60, batch: 2, sequence: 32 } })
    expect(rows[2]?.median).toBeCloseTo(1.1e9, -8)
  })

  test('the command tries steps in processes of their own', async () => {
    const file = join(folder, 'rows.json')
    const find = ['--find-batch', '--recipe', 'coat', '--memory-limit', '3MiB', '--layers', '1', '--json', file]
    const { stdout, stderr } = spawnSync(process.execPath, [program, 'step', ...flags, ...find], { encoding: 'utf8' })
    expect(stderr).toBe('')
    const rows = parseRows(readFileSync(file, 'utf8'))
    const batch = rows.find(({ name }) => name === 'step/small/largest_batch')?.median ?? 0
    expect(batch).toBeGreaterThan(1)
    const [coat] = namedRecipes('coat')
    const own = { ...options, layers: 1, memoryLimit: 3 * 2 ** 20 }
    expect(await trial({ ...own, batch }, coat as never)).toMatchObject({ fits: true })
    expect(await trial({ ...own, batch: batch + 1 }, coat as never)).toMatchObject({ fits: false })
    expect(stdout).toContain('3.0 MiB')
  })

  test('bytes are read from words', () => {
    expect(['80GiB', '512 MiB', '1.5KiB', '7', '1e9'].map(byteCount)).toEqual([80 * 2 ** 30, 2 ** 29, 1536, 7, 1e9])
    for (const wrong of ['', '0', '80 GB', '-1', 'x']) expect(() => byteCount(wrong)).toThrow('number of bytes')
  })

  test('axes of recipes are changed by words', () => {
    const [plain, changed] = namedRecipes('bf16, bf16+master=null+rounding=stochastic,bf16')
    expect(plain?.recipe).toMatchObject({ master: 'f32' })
    expect(changed?.recipe).toMatchObject({ master: null, rounding: 'stochastic' })
    expect(() => namedRecipes('bf16+best=1')).toThrow(/axis 'best' is unknown/)
    expect(() => namedRecipes('coat+base=bf16')).toThrow("'coat+base=bf16' gives base twice")
    expect(() => namedRecipes('coat+dw=f32+dw=bf16')).toThrow("'coat+dw=f32+dw=bf16' gives dw twice")
    expect(() => namedRecipes('coat+layers=null')).toThrow('layers is null and must be an object')
    expect(() => namedRecipes('bf16+dw')).toThrow("'dw' is not name=value")
  })
})

describe('profiles', () => {
  const op = (name: string, cat: string, ts: number, dur: number, sizes = {}, bytes = 0): TraceEvent => ({
    name,
    cat,
    ph: 'X',
    ts,
    dur,
    args: { device: 'cpu', bytes, sizes, formats: { a: 'e4m3/t' } },
  })
  const note = (name: string, ts: number): TraceEvent => ({ name, cat: 'note', ph: 'i', ts })
  const trace = [
    op('add', 'add', 0, 900),
    note('measured', 1000),
    note('forward', 1000),
    op('matmul_nt', 'matmul', 1000, 400, { M: 1000, N: 1000, K: 1000 }),
    note('backward', 1400),
    op('add', 'add', 1500, 100, {}, 1e6),
    note('end', 1600),
    note('forward', 1600),
    op('matmul_nt', 'matmul', 1600, 400, { M: 1000, N: 1000, K: 1000 }),
    note('end', 2000),
    note('done', 2000),
    op('add', 'add', 2000, 900),
  ]

  test('count the steps between their notes', () => {
    const profile = profileOf(trace, { copy: 20, bf16: 5, fp8: 10 })
    expect(profile).toMatchObject({ steps: 2, span: 1 })
    expect(profile.families).toEqual([
      { name: 'matmul', calls: 2, time: 0.8, bytes: 0, flops: 4e9, ideal: 0.4 },
      { name: 'add', calls: 1, time: 0.1, bytes: 1e6, flops: 0, ideal: 0.05 },
    ])
    expect(profile.parts).toEqual([
      { name: 'forward', time: 0.8 },
      { name: 'backward', time: 0.1 },
    ])
    const [families] = profileTables(profile, 10)
    expect(families?.rows).toEqual([
      ['matmul', '1', '0.4', '80.0 %', '', '5', '50.0 %'],
      ['add', '0.5', '0.05', '10.0 %', '10', '', '50.0 %'],
      ['between ops', '', '0.05', '10.0 %', '', '', ''],
      ['all', '', '0.5', '100.0 %', '', '', ''],
    ])
    const rows = profileRows(profile, 'coat', 1)
    expect(rows.map(rowProblem).filter(Boolean)).toEqual([])
    expect(compareRows(rows, '', ['profile/coat/time', 'profile/coat/of_ceiling']).split('\n').slice(2)).toEqual([
      '| family matmul | 0.4 ms | 50 % |',
      '| family add | 0.05 ms | 50 % |',
      '| family all | 0.5 ms |  |',
    ])
    expect(rows.at(-1)).toMatchObject({ name: 'profile/coat/ops/of_ceiling', unit: '%', median: 50 })
  })

  test('of a step have its families, and every op between the notes', () => {
    const file = join(folder, 'trace.json')
    const run = (...args: string[]) => {
      const env = { ...process.env, COAT_PROFILE: file }
      const { status, stdout, stderr } = spawnSync(process.execPath, [program, ...args], { encoding: 'utf8', env })
      expect([status, stderr]).toEqual([0, ''])
      return stdout
    }
    run('step', '--recipe', 'coat', ...flags)
    const { COAT_PROFILE: _, ...plain } = { COAT_PROFILE: '', ...process.env }
    const { stdout } = spawnSync(process.execPath, [program, 'profile', file], { encoding: 'utf8', env: plain })
    for (const word of ['matmul ', 'adamw ', 'attention ', 'between ops', 'update ']) expect(stdout).toContain(word)
    expect(stdout).toMatch(/^grad_norm +1 /m)
    expect(stdout).not.toMatch(/^random/m)
  })
})

describe('peers', () => {
  const row = (recipe: string | null, name: string, median: number, shape = {}): Row => ({
    ...makeRow({ kind: 'step', name, metric: 'time', unit: 'ms' }, [median]),
    recipe,
    shape,
  })

  test('lie beside ours in a table, with ratios at the same shape', () => {
    const rows = [
      row('torch', 'a', 4, { M: 1, N: 2 }),
      row('torch', 'b', 8, { M: 1, N: 2 }),
      row('coat', 'a', 3, { M: 1, N: 2 }),
      row('coat', 'a', 2, { N: 2, M: 1, threads: 2 }),
      row('coat', 'c', 2, { M: 1, N: 2 }),
    ]
    expect(compareRows(rows, 'torch', ['a', 'b'])).toBe(
      '|  | a | b |\n| --- | ---: | ---: |\n| torch | 4 ms | 8 ms |\n| coat | 2 ms (0.500 ×) |  |',
    )
    expect(compareRows([...rows, row('coat', 'b', 9, { M: 2 })], 'torch', ['a', 'b'])).toContain(
      '| coat |  | 9 ms | M 2 |',
    )
    expect(compareRows(rows, 'torch', ['d'])).toBe('Not measured yet.')
  })

  test('sections of a text are filled from rows that are there, and say so where none are', () => {
    const text = '<!-- compare f.jsonl torch a,b -->\n<!-- end -->\n<!-- rows g.jsonl x time -->\nold\n<!-- end -->'
    const none =
      '<!-- compare f.jsonl torch a,b -->\nNot measured yet.\n<!-- end -->\n<!-- rows g.jsonl x time -->\nNot measured yet.\n<!-- end -->'
    expect(fillSections(text, () => '')).toBe(none)
    const filled = fillSections(none, (file) => (file === 'f.jsonl' ? JSON.stringify(row('torch', 'a', 4)) : ''))
    expect(filled).toContain('| torch | 4 ms |  |')
    expect(filled).not.toContain('old')
  })

  test('fill leaves a file whole where the rows are not there', async () => {
    const file = join(folder, 'README.md')
    writeFileSync(file, '# a\n<!-- compare none.jsonl torch a -->\n<!-- end -->\n')
    await bench(['fill', file])
    expect(readFileSync(file, 'utf8')).toBe(
      '# a\n<!-- compare none.jsonl torch a -->\nNot measured yet.\n<!-- end -->\n',
    )
  })

  const python = spawnSync('python3', ['--version']).status === 0
  test.skipIf(!python)('of PyTorch write rows that can be read', () => {
    const script = fileURLToPath(new URL('../bench/peers/torch_baseline.py', import.meta.url))
    // torch as far as a row needs it
    const torch = join(folder, 'torch')
    mkdirSync(join(torch, 'nn'), { recursive: true })
    const init = "from types import SimpleNamespace as N\n__version__ = '2.11'\nversion = N(cuda='13.0')\n"
    writeFileSync(join(torch, '__init__.py'), `${init}cuda = N(get_device_name=lambda: 'NVIDIA H200')\n`)
    writeFileSync(join(torch, 'nn', '__init__.py'), '')
    writeFileSync(join(torch, 'nn', 'functional.py'), '')
    const file = join(folder, 'rows.jsonl')
    const body = `import torch_baseline as b; b.OPTIONS.append = ${JSON.stringify(file)}; b.row('layer/both', 'pytorch-bf16-eager', 'time', 'ms', [3, 1, 2, 4], {'batch': 8}, kind='step')`
    const env = { ...process.env, PYTHONPATH: `${folder}:${dirname(script)}`, PYTHONDONTWRITEBYTECODE: '1' }
    expect(spawnSync('python3', ['-c', body], { encoding: 'utf8', env }).stderr).toBe('')
    const { gpu, median, p20, p80, n, build } = parseRows(readFileSync(file, 'utf8'))[0] as Row
    expect([gpu, median, n]).toEqual(['NVIDIA H200', 2.5, 4])
    expect(p20).toBeCloseTo(1.6, 12)
    expect(p80).toBeCloseTo(3.4, 12)
    expect(build.cuda).toBe('13.0')
  })
})
