// The laws of the house that a machine can check: directions, pairs of files, fresh generated code, sizes, words.
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { basename, dirname, join, relative, resolve } from 'node:path'
import { describe, expect, it } from 'vitest'
import { fillSections } from '../bench/row.ts'
import { native } from '../lib/native.ts'

const root = resolve(import.meta.dirname, '..')

function files(folder: string, pattern: RegExp): string[] {
  if (!existsSync(join(root, folder))) return []
  return readdirSync(join(root, folder), { recursive: true, encoding: 'utf8' })
    .map((name) => join(folder, name))
    .filter((name) => pattern.test(name))
    .sort()
}
function text(file: string): string {
  return readFileSync(join(root, file), 'utf8')
}
function importsOf(file: string): string[] {
  return [...text(file).matchAll(/(?:from|import)\s*\(?\s*'(\.[^']+)'/g)].map((match) =>
    relative(root, resolve(root, dirname(file), match[1] as string)),
  )
}
function includesOf(file: string): string[] {
  return [...text(file).matchAll(/#include\s+[<"]([^>"]+)[>"]/g)].map((match) => match[1] as string)
}

const table = native.table()
const families = [...new Set(table.map(({ family }) => family))]

describe('directions', () => {
  // a file may import files of lower rows only
  const rows = [
    ['native.gen'],
    ['native'],
    ['tensor', 'schedule', 'guard', 'tokenizer', 'replace', 'recipes', 'updates', 'settings'],
    ['lossscale'],
    ['tape', 'data', 'safetensors', 'axes', 'scaler', 'rotation', 'operands', 'ranks', 'partition'],
    ['emulate', 'losses', 'exchange'],
    ['ops', 'generate'],
    ['cache'],
    ['modules', 'tokens', 'jsonl', 'models/fields'],
    ['state', 'evaluate'],
    ['models/llama', 'rules', 'probes', 'grid'],
    ['optimizer'],
    ['checkpoint', 'graph'],
    ['trainer'],
    ['controllers'],
    ['charts'],
    ['report', 'tensorboard'],
    ['index'],
  ]
  const rank = (file: string) => rows.findIndex((row) => row.includes(file.replace(/^lib\//, '').replace(/\.ts$/, '')))

  it.each(files('lib', /\.ts$/))('%s', (file) => {
    expect(rank(file), `${file} has no row in this test`).toBeGreaterThanOrEqual(0)
    for (const target of importsOf(file)) {
      expect(target, `${file} imports ${target}`).toMatch(/^lib\//)
      expect(rank(target), `${file} imports ${target}`).toBeLessThan(rank(file))
    }
  })

  it('only lib/native.ts loads the addon', () => {
    for (const file of files('lib', /\.ts$/))
      if (file !== 'lib/native.ts') expect(text(file), file).not.toMatch(/node-gyp-build|\.node['"]/)
  })

  it('lib/recipes.ts is data', () => {
    expect(text('lib/recipes.ts')).not.toMatch(/function|=>/)
  })

  const below: Record<string, string[]> = {
    'csrc/tensor.h': [],
    'csrc/code.h': ['cuda_bf16.h', 'cuda_fp16.h', 'cuda_fp8.h'], // the conversion instructions, where nvcc compiles
    'csrc/format.h': ['tensor.h', 'code.h'],
    'csrc/formula.h': ['format.h'],
    'csrc/emulate.h': ['formula.h'],
    'csrc/contract.h': ['tensor.h', 'ops.def'],
    'csrc/arena.h': [],
    'csrc/graph.h': ['cuda/device.h'],
    'csrc/memory.h': ['arena.h', 'graph.h'],
    'csrc/profile.h': ['contract.h', 'cuda/device.h'],
    'csrc/ops.h': ['tensor.h', 'ops.def'],
    'csrc/ops.cc': ['ops.h', 'ops.def', 'graph.h'],
  }
  it.each(Object.entries(below))('%s', (file, allowed) => {
    for (const name of includesOf(file))
      if (/\.(h|def)$/.test(name)) expect(allowed, `${file}: ${name}`).toContain(name)
  })

  it('backends do not know each other, Node or the wrong toolkit', () => {
    for (const file of files('csrc', /\.(h|cc|cu|cuh)$/)) {
      const includes = includesOf(file)
      if (!/^csrc\/(binding\.cc|(arguments|reader)\.h)$/.test(file)) expect(includes, file).not.toContain('napi.h')
      if (!file.startsWith('csrc/cuda/'))
        for (const name of includes) expect(name, file).not.toMatch(/^cuda(?!_(fp8|fp16|bf16)\.h$|\/device\.h$)|^cub\//)
      if (file.startsWith('csrc/cpu/')) for (const name of includes) expect(name, file).not.toMatch(/cuda/)
      if (file.startsWith('csrc/cuda/')) for (const name of includes) expect(name, file).not.toMatch(/cpu\//)
    }
  })
})

describe('pairs', () => {
  const present = (path: string, extension: string) =>
    existsSync(join(root, `${path}${extension}`)) || existsSync(join(root, path))
  const cuda = files('csrc/cuda', /\.cu$/).length > 0
  it.each(families)('%s has its files', (family) => {
    expect(present(`csrc/cpu/${family}`, '.cc'), `csrc/cpu/${family}.cc`).toBe(true)
    if (cuda) expect(present(`csrc/cuda/${family}`, '.cu'), `csrc/cuda/${family}.cu`).toBe(true)
    expect(existsSync(join(root, `test/ops/${family}.test.ts`)), `test/ops/${family}.test.ts`).toBe(true)
  })
  it('every op is tested and benchmarked by name', () => {
    const bench = text('bench/ops.ts')
    for (const { family, name } of table) {
      expect(bench, `bench/ops.ts has no case for ${name}`).toMatch(new RegExp(`\\b${name}\\b`))
      expect(text(`test/ops/${family}.test.ts`), `no test of ${name}`).toMatch(new RegExp(`\\b${name}\\b`))
    }
  })
  it('what users of such software met has tests: checkpoints (C), data (D), the loop (T), signals (K)', () => {
    const titles = files('test', /\.test\.ts$/).flatMap((file) => [...text(file).matchAll(/['`]([A-Z]\d+): /g)])
    const named = new Set(titles.map(([, name]) => name))
    const cases = Object.entries({ C: 13, D: 7, T: 8, K: 2 }).flatMap(([group, count]) =>
      Array.from({ length: count }, (_, i) => `${group}${i + 1}`),
    )
    expect(cases.filter((name) => !named.has(name))).toEqual([])
  })
  it('the measured tables of README.md are those of the rows', () => {
    const read = (file: string) => (existsSync(join(root, file)) ? text(file) : '')
    expect(text('README.md')).toBe(fillSections(text('README.md'), read))
    expect(text('README.md')).toMatch(/<!-- rows bench\/results\/quickstart\.jsonl/)
  })
  it('native.gen.ts is what ops.def says', () => {
    expect(text('lib/native.gen.ts')).toBe(native.describe())
  })
})

describe('files', () => {
  const sources = [
    ...files('csrc', /\.(h|cc|cu|cuh|def)$/),
    ...['lib', 'test', 'bench', 'train', 'examples'].flatMap((folder) => files(folder, /\.ts$/)),
  ]
  it.each(sources)('%s says what it holds and stays small', (file) => {
    const lines = text(file).split('\n')
    const first = lines[0]?.startsWith('#!') ? lines[1] : lines[0]
    expect(first).toMatch(/^\/\/ \S/)
    expect(lines.length, `${file} has ${lines.length} lines`).toBeLessThanOrEqual(file.startsWith('csrc/c') ? 401 : 620)
    expect(basename(file)).not.toMatch(/util|common|helper|misc|manager|legacy|[a-z]v?2\./)
  })
  it.each(sources)('%s has no leftovers', (file) => {
    if (file === 'test/architecture.test.ts') return
    expect(text(file)).not.toMatch(/\bTO[D]O\b|\bFIX[M]E\b|console\.[d]ebug|\b(it|test|describe)\.only\(/)
  })
  it('nothing in csrc exits, aborts or calls libm where bits must agree', () => {
    for (const file of files('csrc', /\.(h|cc|cu|cuh)$/))
      expect(text(file), file).not.toMatch(/\b(abort|exit|assert)\s*\(/)
    for (const file of ['csrc/code.h', 'csrc/format.h', 'csrc/formula.h'])
      expect(text(file)).not.toMatch(/<cmath>|std::(exp|log|pow|sqrt|erf)|__expf|__logf/)
  })
  it('no build file asks for fast mathematics', () => {
    expect(text('CMakeLists.txt')).not.toMatch(/fast-math|use_fast_math|-Ofast/)
    expect(text('CMakeLists.txt')).toMatch(/-ffp-contract=off/)
  })
})
