// FP8 sums that stay in the tensor cores: what the CPU makes of them against a model of their 14 bits in float64, what both
// devices lose against exact sums, and who of a model's products is summed how.
import { afterEach, describe, expect, it, vi } from 'vitest'
import {
  LlamaForCausalLM,
  type Recipe,
  type RecipeChange,
  type RecipeName,
  recipe,
  recipes,
  scope,
  Tape,
  Tensor,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import type { AnyFormat, Handle } from '../lib/native.gen.ts'
import { native } from '../lib/native.ts'
import { bytesOf, devices, moved, own, present, read, tensor } from './harness.ts'
import { Training } from './training.ts'
import { Random, sentence, smallLlama, sum } from './values.ts'

type Accumulate = 'split' | 'fast'
const kinds = ['e4m3/t', 'e5m2/t'] as const
const random = new Random(11)
const normal = (n: number) => Array.from({ length: n }, () => random.normal())
const positive = (n: number) => Array.from({ length: n }, () => random.uniform())

/** x without what lies below a unit, and the unit of the 14th bit of x. */
const cut = (x: number, unit: number) => Math.trunc(x / unit) * unit
const unitOf = (x: number) => 2 ** (Math.floor(Math.log2(Math.abs(x))) - 13)

/** Of every 32 terms, all and the sum so far lose what lies below the 14th bit of the largest, and the sum below its own. */
function shortSum(terms: readonly number[]): number {
  let total = 0
  for (let from = 0; from < terms.length; from += 32) {
    const all = [total, ...terms.slice(from, from + 32)]
    const most = all.reduce((a, b) => Math.max(a, Math.abs(b)), 0)
    if (most === 0) continue
    total = all.reduce((sum, x) => sum + cut(x, unitOf(most)), 0)
    if (total !== 0) total = cut(total, unitOf(total))
  }
  return total
}

/** The norm of the difference, relative to that of what is exact. */
function distance(found: ArrayLike<number>, exact: ArrayLike<number>): number {
  const difference = sum(exact.length, (i) => ((found[i] as number) - (exact[i] as number)) ** 2)
  return Math.sqrt(difference / sum(exact.length, (i) => (exact[i] as number) ** 2))
}

afterEach(() => {
  vi.restoreAllMocks()
})

const nt = (a: Handle, b: Handle, accumulate: Accumulate, y: 'f32' | 'bf16' | 'e4m3/g16' = 'f32', bias?: Handle) =>
  own(native.matmul_nt(a, b, bias ?? null, y, null, accumulate))[0]

describe.each(devices)('sums on %s', (device) => {
  const on = it.skipIf(!present(device))
  const there = async (format: AnyFormat, shape: number[], values: ArrayLike<number>, given?: Handle) =>
    await moved(tensor(format, shape, values, given), device)
  const one = () => tensor('f32', [1], [1])
  /** Operands with a scale of 1, the terms of every sum, and the sums. */
  const made = async (kind: (typeof kinds)[number], [M, N, K]: [number, number, number], values = normal) => {
    const a = await there(kind, [M, K], values(M * K), one())
    const b = await there('e4m3/t', [N, K], values(N * K), one())
    const [x, w] = [await read(a), await read(b)]
    const terms = (i: number) => {
      const [m, n] = [Math.floor(i / N), i % N]
      return Array.from({ length: K }, (_, k) => (x[m * K + k] as number) * (w[n * K + k] as number))
    }
    const exact = () => Array.from({ length: M * N }, (_, i) => terms(i).reduce((total, x) => total + x, 0))
    return { a, b, terms, exact }
  }
  /** The product with D = 64 and nothing to turn: its K is one part on CUDA, too. */
  const inOnePart = (a: Handle, b: Handle, table: Handle, accumulate: Accumulate) =>
    own(native.matmul_nt_rope(table, a, b, null, null, 1, 1, 64, accumulate))
  const still = async (M: number) =>
    await there(
      'f32',
      [M, 64],
      Array.from({ length: M * 64 }, (_, i) => Number(i % 64 < 32)),
    )

  // deep sums of 14 bits: arXiv 2412.19437, section 3.5.2
  on('32768 ones are 32768 where sums leave the tensor cores, and no more than that where they stay', async () => {
    const K = 32768
    const ones = Array<number>(K * 192).fill(1)
    const [a, b] = [
      await there('e4m3/t', [1, K], ones.slice(0, K), one()),
      await there('e4m3/t', [192, K], ones, one()),
    ]
    const table = await still(1)
    expect(new Set(await read(inOnePart(a, b, table, 'split')))).toEqual(new Set([32768]))
    expect(new Set(await read(nt(a, b, 'split')))).toEqual(new Set([32768]))
    const [stuck] = await read(inOnePart(a, b, table, 'fast'))
    if (device === 'cpu') expect(stuck).toBe(16384)
    expect(stuck).toBeGreaterThanOrEqual(16384)
    expect(stuck).toBeLessThanOrEqual(32768)
    if (device === 'cpu') expect(await read(nt(a, b, 'fast'))).toEqual(Array(192).fill(16384))
  })

  on('positive sums lose more with depth where they stay; sums around zero lose little', async () => {
    const sizes: [number, number, number] = [8, 24, 32768]
    const [up, around] = [await made('e4m3/t', sizes, positive), await made('e5m2/t', [8, 24, 4096])]
    const lost = async ({ a, b, exact }: typeof up, accumulate: Accumulate) =>
      distance(await read(nt(a, b, accumulate)), exact())
    expect(await lost(up, 'split')).toBeLessThan(device === 'cuda' ? 3e-3 : 1e-5)
    expect(await lost(up, 'fast')).toBeGreaterThan(await lost(up, 'split'))
    // the parts of K of a small y on CUDA are added in FP32
    expect(await lost(up, 'fast')).toBeLessThan(device === 'cuda' ? 0.25 : 0.45)
    if (device === 'cpu') expect(await lost(up, 'fast')).toBeGreaterThan(0.3)
    expect(await lost(around, 'fast')).toBeLessThan(1e-2)
  })

  on('in one part of K, the loss of positive sums is that of the model, within a factor of 4', async () => {
    const [M, K] = [4, 4096]
    const { a, b, terms, exact } = await made('e4m3/t', [M, 192, K], positive)
    const model = Array.from({ length: M * 192 }, (_, i) => shortSum(terms(i)))
    const found = await read(inOnePart(a, b, await still(M), 'fast'))
    const ratio = distance(found, exact()) / distance(model, exact())
    expect(ratio).toBeGreaterThan(1 / 4)
    expect(ratio).toBeLessThan(4)
    // a unit of bf16 is 2^-8 of a value
    if (device === 'cpu') expect(distance(found, model)).toBeLessThan(2 ** -9)
  })

  on('NaN and Inf reach their row and column and nothing else', async () => {
    const [M, N, K] = [13, 37, 150]
    const [x, w] = [normal(M * K), normal(N * K)]
    const clean = await read(
      nt(await there('e5m2/t', [M, K], x, one()), await there('e4m3/t', [N, K], w, one()), 'fast'),
    )
    x[5 * K + 149] = Number.NaN
    w[20 * K + 3] = Number.NaN
    const found = await read(
      nt(await there('e5m2/t', [M, K], x, one()), await there('e4m3/t', [N, K], w, one()), 'fast'),
    )
    for (const [i, value] of found.entries())
      if (Math.floor(i / N) === 5 || i % N === 20) expect(value).toBeNaN()
      else expect(value).toBe(clean[i])
  })

  on.each<[number, number, number]>([
    [0, 16, 33],
    [3, 5, 0],
    [1, 1, 1],
    [70, 144, 400],
    [70, 141, 400],
    [33, 160, 4096],
  ])('every result is that in f32, rounded once: %i x %i of %i', async (M, N, K) => {
    for (const kind of kinds) {
      const { a, b } = await made(kind, [M, N, K])
      const [bias, held] = [normal(N), normal(M * N)]
      const y = await read(nt(a, b, 'fast'))
      expect(await bytesOf(nt(a, b, 'fast', 'bf16'))).toEqual(await bytesOf(tensor('bf16', [M, N], y)))
      expect(await bytesOf(nt(a, b, 'fast', 'e4m3/g16'))).toEqual(await bytesOf(tensor('e4m3/g16', [M, N], y)))
      const added = await read(nt(a, b, 'fast', 'f32', await there('f32', [N], bias)))
      const sums = y.map((value, i) => Math.fround(value + Math.fround(bias[i % N] as number)))
      expect(added).toEqual(sums)
      const into = await there('f32', [M, N], held)
      native.matmul_nt_into(into, a, b, 'fast')
      expect(await read(into)).toEqual(y.map((value, i) => Math.fround(Math.fround(held[i] as number) + value)))
      const [, amax] = own(native.matmul_nt(a, b, null, 'f32', 'f32', 'fast'))
      expect(await read(amax as Handle)).toEqual([y.reduce((most, value) => Math.max(most, Math.abs(value)), 0)])
    }
  })

  on('heads are turned from sums of 14 bits, too', async () => {
    const [M, K] = [70, 400]
    for (const D of [64, 34]) {
      const N = 4 * D
      const { a, b } = await made('e4m3/t', [M, N, K])
      const angles = Array.from({ length: M * D }, (_, i) => ((i % D) - D / 2) * Math.floor(i / D))
      const table = await there(
        'f32',
        [M, D],
        angles.map((x, i) => (i % D < D / 2 ? Math.cos(x) : Math.sin(x))),
      )
      const y = await there('f32', [M, N], await read(nt(a, b, 'fast')))
      native.rope(table, y, null, 2, 1, D, 1)
      const found = own(native.matmul_nt_rope(table, a, b, null, null, 2, 1, D, 'fast'))
      expect(await bytesOf(found)).toEqual(await bytesOf(tensor('bf16', [M, N], await read(y))))
    }
  })

  on('a y of many tiles, which end outside of it, is near that of exact sums', async () => {
    const [M, N, K] = [1100, 2056, 200]
    for (const kind of kinds) {
      const a = await there(kind, [M, K], normal(M * K))
      const b = await there('e4m3/t', [N, K], normal(N * K))
      const y = await read(nt(a, b, 'fast'))
      expect(distance(y, await read(nt(a, b, 'split')))).toBeLessThan(2 ** -8)
      for (const format of ['bf16', 'e4m3/g16'] as const)
        expect(Buffer.compare(await bytesOf(nt(a, b, 'fast', format)), await bytesOf(tensor(format, [M, N], y)))).toBe(
          0,
        )
    }
  })

  on('refuses operands without one scale, and words that it does not know', async () => {
    for (const [left, right] of [
      ['f32', 'f32'],
      ['bf16', 'bf16'],
      ['e4m3/r', 'e4m3/t'],
      ['e4m3/g128', 'e4m3/b128'],
      ['bf16', 'e4m3/t'],
      ['e4m3/t', 'bf16'],
    ] as const) {
      const odd = left === 'e4m3/t' ? `b is ${right}` : `a is ${left}`
      const [a, b] = [await there(left, [2, 3], normal(6)), await there(right, [2, 3], normal(6))]
      expect(() => nt(a, b, 'fast')).toThrow(
        `matmul_nt: accumulate is fast and must be split where ${odd}[2, 3]: only sums of operands with one scale`,
      )
      const into = await there('f32', [2, 2], normal(4))
      expect(() => native.matmul_nt_into(into, a, b, 'fast')).toThrow('matmul_nt_into: accumulate is fast and must be')
      expect(() => nt(a, b, 'slow' as 'fast')).toThrow('accumulate is "slow" and must be one of split, fast')
    }
  })

  if (device === 'cpu')
    it.each<[number, number, number]>([
      [1, 1, 1],
      [7, 17, 33],
      [13, 35, 320],
      [6, 16, 321],
      [5, 19, 1000],
    ])('have the bits of the model: %i x %i of %i', async (M, N, K) => {
      for (const values of [normal, positive])
        for (const kind of kinds) {
          const sizes: [number, number, number] = [M, N, K]
          const { a, b, terms } = await made(kind, sizes, (n) => values(n).map((x) => x * 4 ** (random.integer(7) - 3)))
          const model = Array.from({ length: M * N }, (_, i) => shortSum(terms(i)))
          const found = await read(nt(a, b, 'fast'))
          expect(found).toEqual(model)
          if (K > 32) expect(found).not.toEqual(await read(nt(a, b, 'split')))
        }
    })
})

describe.each(devices)('a model on %s', (device) => {
  const on = it.skipIf(!present(device))
  // more than 128 of K in each product: up to there nothing leaves the tensor cores in between
  const config = { ...smallLlama, hidden_size: 256, intermediate_size: 400, tie_word_embeddings: false }
  const modelOf = (which: RecipeChange) => new LlamaForCausalLM(config, { recipe: which, seed: 2, device })
  const training = (which: RecipeChange, steps = 1) => {
    const model = modelOf(which)
    const data = new TextDataset(sentence.repeat(20), { sequence: 32, seed: 3 })
    return new Training(model, new Trainer(model, { data, batch: 6, accumulate: 2, steps }))
  }
  /** The products of FP8 operands, how each is summed and whether it is one of backward. */
  const watched = () => {
    const seen: { op: string; backward: boolean; accumulate: Accumulate }[] = []
    const note = (op: string, a: Handle, accumulate: Accumulate = 'split') => {
      const { format } = native.info(a)
      if (format.endsWith('/t')) seen.push({ op, backward: format === 'e5m2/t', accumulate })
    }
    const { matmul_nt, matmul_nt_rope, matmul_nt_into } = native
    vi.spyOn(native, 'matmul_nt').mockImplementation((...given) => {
      note('matmul_nt', given[0], given[5])
      return matmul_nt(...given)
    })
    vi.spyOn(native, 'matmul_nt_rope').mockImplementation((...given) => {
      note('matmul_nt_rope', given[1], given[8])
      return matmul_nt_rope(...given)
    })
    vi.spyOn(native, 'matmul_nt_into').mockImplementation((...given) => {
      note('matmul_nt_into', given[1], given[3])
      return matmul_nt_into(...given)
    })
    return seen
  }

  on.each(['coat', 'te-current', 'te-delayed'] as const)('%s: every product is as asked', async (base) => {
    const losses: number[] = []
    for (const accumulate of ['split', 'fast', 'fast-forward'] as const) {
      const seen = watched()
      using run = training({ base, accumulate })
      losses.push(...(await run.losses()))
      vi.restoreAllMocks()
      const wanted = { split: [], fast: [false, true], 'fast-forward': [false] }[accumulate] as boolean[]
      for (const { op, backward, accumulate: found } of seen)
        expect(found, `${op}, backward ${backward}`).toBe(wanted.includes(backward) ? 'fast' : 'split')
      expect(new Set(seen.map(({ op }) => op))).toEqual(new Set(['matmul_nt', 'matmul_nt_rope', 'matmul_nt_into']))
      expect(new Set(seen.map(({ backward }) => backward))).toEqual(new Set([false, true]))
    }
    const [split, fast, forward] = losses as [number, number, number]
    expect(forward).toBe(fast) // of a first step
    expect(fast).not.toBe(split)
    expect(Math.abs(fast - split)).toBeLessThan(1e-2 * split)
  })

  on('gradients are near those of exact sums; those of fast-forward differ from those of fast', async () => {
    const ids = Int32Array.from({ length: 192 }, (_, i) => (i * i) % 251)
    const gradients = async (accumulate: Recipe['accumulate']) => {
      using model = modelOf({ base: 'te-current', accumulate })
      using tape = new Tape()
      const all = scope(() => {
        const rows = () => Tensor.from(ids, [ids.length], { device: model.device })
        tape.backward(tape.record(() => model.loss(rows(), rows(), 32, 1 / ids.length)))
        return model.parameters('model.layers.*proj.weight').map(({ grad }) => (grad as Tensor).read())
      })
      return await Promise.all(all)
    }
    const [split, fast, forward] = [await gradients('split'), await gradients('fast'), await gradients('fast-forward')]
    for (const [i, exact] of split.entries()) {
      const apart = [fast, forward].map((one) => distance(one[i] as Float32Array, exact as Float32Array))
      for (const error of apart) expect(error).toBeLessThan(0.2)
      for (const error of apart) expect(error).toBeGreaterThan(0)
      expect(fast[i]).not.toEqual(forward[i])
    }
  })

  on('some layers alone', async () => {
    const seen = watched()
    using run = training({ base: 'coat', layers: { 'model.layers.1': { accumulate: 'fast' } } })
    await run.steps()
    const fast = seen.filter(({ accumulate }) => accumulate === 'fast').length
    expect(fast).toBeGreaterThan(0)
    expect(fast).toBe(seen.length / 2)
    const [first, second] = run.model.layers
    expect(first?.mlp.input.formats).not.toHaveProperty('accumulate')
    expect(second?.mlp.input.formats).toMatchObject({ accumulate: 'fast' })
    expect(run.model.head?.formats).not.toHaveProperty('accumulate')
  })
})

it.each<[RecipeChange, string]>([
  [{ base: 'bf16', accumulate: 'fast' }, "accumulate other than 'split' needs x 'e4m3/t', w 'e4m3/t'"],
  [{ base: 'ao-rowwise', accumulate: 'fast-forward' }, "accumulate other than 'split' needs x 'e4m3/t'"],
  [{ base: 'deepseek-v3', accumulate: 'fast' }, "accumulate other than 'split' needs x 'e4m3/t'"],
  [
    { base: 'coat', accumulate: 'exact' as 'fast' },
    "accumulate is 'exact' and must be one of 'split', 'fast', 'fast-forward'",
  ],
])('refuses %j', (change, text) => {
  expect(() => recipe(change)).toThrow(text)
})

it('all rows sum in FP32; those with one scale a tensor may be changed', () => {
  for (const [name, row] of Object.entries(recipes)) {
    expect(row.accumulate).toBe('split')
    if (row.x === 'e4m3/t') expect(recipe({ base: name as RecipeName, accumulate: 'fast' }).accumulate).toBe('fast')
  }
})
