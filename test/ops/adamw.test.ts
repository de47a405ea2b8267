// adamw against float64: every format of moments, masters, clipping, skipping, and the cases where FP8 moments go wrong.
import { describe, expect, it } from 'vitest'
import type { AnyFormat, Handle } from '../../lib/native.gen.ts'
import { native } from '../../lib/native.ts'
import { bytesOf, checkOp, entryOf, read, tensor } from '../harness.ts'
import { Random, vector } from '../values.ts'

interface Rule {
  lr: number
  beta1: number
  beta2: number
  eps: number
  decay: number
}
const usual: Rule = { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0 }

/** What one native call takes besides p, g, m, v and its numbers. */
interface Extra {
  clip?: Handle | undefined
  master?: Handle[]
  lost?: Handle[]
  rounding?: 'nearest' | 'stochastic' | 'kahan'
  seed?: number
  floor?: boolean
}

/** One native call at step t on lists. */
function step(
  t: number,
  p: Handle[],
  g: Handle[],
  m: Handle[],
  v: Handle[],
  rule: Rule,
  { clip, master, lost, rounding = 'nearest', seed = 0, floor = false }: Extra = {},
): void {
  const { lr, beta1, beta2, eps, decay } = rule
  const numbers = [lr, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay] as const
  const corrections = [1 - beta1 ** t, Math.sqrt(1 - beta2 ** t)] as const
  const rest = [clip ?? null, ...numbers, ...corrections, Number(floor), rounding, seed] as const
  native.adamw(p, master ?? null, lost ?? null, g, m, v, ...rest)
}

const pairs = entryOf('adamw').only.find(({ names }) => names.includes('m'))?.combinations as [AnyFormat, AnyFormat][]
const states = pairs.filter(([m, v]) => m === v).map(([m]) => m)
const zeros = (format: AnyFormat, n: number) => tensor(format, [1, n], new Float64Array(n))

type Lists = Record<string, ReturnType<typeof vector>[]>
/** The reference's lists with those of the master, and of what is lost: any half step of bf16, which ties decide. */
function withCopies(lists: Lists, master: unknown, lost: unknown): Lists {
  const { p = [], '|p|': size = [] } = lists
  const none = p.map(({ data }) => vector(data.length, () => 0))
  const step = p.map((x) => vector(x.data.length, (i) => (Math.abs(x(i)) * 2 ** -7) / 3e-5))
  return {
    ...lists,
    ...(master ? { master: p, '|master|': size } : {}),
    ...(lost ? { lost: none, '|lost|': step } : {}),
  }
}

describe('adamw', () => {
  checkOp('adamw', {
    sizes: [{ decay: 0 }],
    lists: [1, 0, 127, 128, 129, 300, 20_011],
    numbers: {
      lr: 1e-2,
      beta1: 0.9,
      gain1: 0.1,
      beta2: 0.99,
      gain2: 0.01,
      eps: 1e-6,
      weight_decay: 0.1,
      correct1: 0.271,
      correct2: 0.17,
      v_floor: 0,
      seed: 0,
    },
    words: ({ lost }) => ({ rounding: lost ? 'kahan' : 'nearest' }),
    data: {
      v: (random) => random.typical() ** 2,
      lost: (random) => random.normal() * 2 ** -10,
      clip: (_random, _sizes, i) => (i === 0 ? 0.375 : 0),
    },
    slack: 3e-5, // the polynomials of e4m3/x128
    reference: ({
      p,
      master,
      lost,
      g,
      m,
      v,
      clip,
      lr,
      beta1,
      gain1,
      beta2,
      gain2,
      eps,
      weight_decay,
      correct1,
      correct2,
    }) => {
      const lists: Record<string, ReturnType<typeof vector>[]> = { p: [], m: [], v: [], '|p|': [], '|m|': [] }
      const factor = clip?.(0) ?? 1
      ;(master ?? p).forEach((stored, t) => {
        const n = stored.data.length
        const old = vector(n, (i) => stored(i) + (lost?.[t]?.(i) ?? 0))
        const [gt, mt, vt] = [g[t], m[t], v[t]] as [typeof old, typeof old, typeof old]
        const next = vector(n, (i) => mt(i) * beta1 + gain1 * factor * gt(i))
        const size = vector(n, (i) => Math.abs(mt(i) * beta1) + Math.abs(gain1 * factor * gt(i)))
        const square = vector(n, (i) => vt(i) * beta2 + gain2 * (factor * gt(i)) ** 2)
        const under = (i: number) => (Math.sqrt(square(i)) / correct2 + eps) * correct1
        lists.m?.push(next)
        lists['|m|']?.push(size)
        lists.v?.push(square)
        lists.p?.push(vector(n, (i) => old(i) - lr * (old(i) * weight_decay + next(i) / under(i))))
        lists['|p|']?.push(vector(n, (i) => Math.abs(old(i)) / 100 + (lr * size(i)) / under(i)))
      })
      return withCopies(lists, master, lost)
    },
  })

  it.each(states)('%s: moments are stored as convert stores them', async (format) => {
    const random = new Random(3)
    const g = Float32Array.from({ length: 20_011 }, () => random.typical())
    const [m, v] = [zeros(format, g.length), zeros(format, g.length)]
    step(1, [zeros('f32', g.length)], [tensor('f32', [g.length], g)], [m], [v], { ...usual, beta1: 0, beta2: 0 })
    expect(await bytesOf(m)).toEqual(await bytesOf(tensor(format, [1, g.length], g)))
    expect(await bytesOf(v)).toEqual(
      await bytesOf(
        tensor(
          format,
          [1, g.length],
          g.map((x) => x * x),
        ),
      ),
    )
  })

  it.each(states)('%s: eps is added after bias correction', async (format) => {
    const [p, g] = [tensor('f32', [1, 1], [0]), tensor('f32', [1, 1], [1e-10])]
    step(1, [p], [g], [zeros(format, 1)], [zeros(format, 1)], usual)
    expect(((await read(p))[0] as number) / -9.90099e-6).toBeCloseTo(1, 5)
  })

  it.each(states)('%s: decay acts on the old parameter', async (format) => {
    const [p, g] = [tensor('f32', [1, 1], [1]), tensor('f32', [1, 1], [1])]
    step(1, [p], [g], [zeros(format, 1)], [zeros(format, 1)], { ...usual, lr: 0.1, decay: 0.1 })
    expect((await read(p))[0]).toBeCloseTo(0.89, 6)
  })

  it.each(states)('%s: without gradient and decay nothing moves, step after step', async (format) => {
    const p = tensor(
      'f32',
      [1, 129],
      Array.from({ length: 129 }, (_, i) => i / 7),
    )
    const [g, m, v] = [zeros('f32', 129), zeros(format, 129), zeros(format, 129)]
    const before = await bytesOf(p)
    for (let t = 1; t <= 6; t++) step(t, [p], [g], [m], [v], usual)
    expect(await bytesOf(p)).toEqual(before)
    expect([...(await read(m)), ...(await read(v))].every((x) => x === 0)).toBe(true)
    step(7, [p], [g], [m], [v], { ...usual, decay: 0.1 })
    expect((await read(p))[128]).toBeCloseTo((128 / 7) * (1 - 1e-4), 5)
  })

  const largestMove = async (
    format: AnyFormat,
    steps: number,
    rule: Rule,
    gradient: (t: number, i: number) => number,
  ) => {
    const [p, m, v] = [zeros('f32', 128), zeros(format, 128), zeros(format, 128)]
    const moves: number[] = []
    let old = await read(p)
    for (let t = 1; t <= steps; t++) {
      step(
        t,
        [p],
        [
          tensor(
            'f32',
            [1, 128],
            Array.from({ length: 128 }, (_, i) => gradient(t, i)),
          ),
        ],
        [m],
        [v],
        rule,
      )
      const now = await read(p)
      moves.push(Math.max(...now.map((x, i) => Math.abs(x - (old[i] as number)))) / rule.lr)
      old = now
    }
    return moves
  }

  it.each([
    ['e4m3/x128', 0.999, 1.05],
    ['e4m3/x128', 0.95, 1.05],
    ['f32', 0.999, 1.05],
  ] as const)(
    '%s, beta2 %f: one large element does not flush the small second moments',
    async (format, beta2, limit) => {
      const moves = await largestMove(format, 12, { ...usual, beta2 }, (t, i) => (t > 1 ? 0 : i === 0 ? 1 : 1e-4))
      for (const move of moves) expect(move).toBeLessThan(limit)
      expect(moves[1]).toBeCloseTo(beta2 === 0.999 ? 0.67 : 0.679, 1)
    },
  )

  it('plain e4m3/g128 does flush them: why moments are expanded', async () => {
    const moves = await largestMove('e4m3/g128', 2, usual, (t, i) => (t > 1 ? 0 : i === 0 ? 1 : 1e-4))
    expect(moves[1]).toBeGreaterThan(4000)
  })

  it('e4m3/x128: no gradient moves a parameter by more than ten learning rates', async () => {
    const random = new Random(11)
    const scales = Array.from({ length: 128 }, () => 10 ** (-8 * random.uniform()))
    const moves = await largestMove('e4m3/x128', 60, usual, (_, i) =>
      random.uniform() < 0.3 ? random.normal() * (scales[i] as number) : 0,
    )
    for (const move of moves) expect(move).toBeLessThan(10)
  })

  it.each(states)('%s: constant groups and one-element tails follow f32', async (format) => {
    const run = async (format: AnyFormat) => {
      const [p, m, v] = [zeros('f32', 257), zeros(format, 257), zeros(format, 257)]
      const g = tensor(
        'f32',
        [1, 257],
        Array.from({ length: 257 }, (_, i) => (i < 128 ? 0.5 : -0.25)),
      )
      for (let t = 1; t <= 6; t++) step(t, [p], [g], [m], [v], usual)
      return await read(p)
    }
    const exact = await run('f32')
    for (const [i, x] of (await run(format)).entries()) expect(Math.abs(x - (exact[i] as number))).toBeLessThan(3e-5)
  })

  it.each([
    [0.5, 1],
    [Number.NaN, 1],
  ])('clip [%f, %f] changes nothing, bit for bit', async (...clip) => {
    const random = new Random(5)
    for (const format of states)
      for (const p of ['f32', 'bf16'] as const) {
        const all = [p, 'f32', format, format].map((word) =>
          tensor(
            word as AnyFormat,
            [1, 200],
            Array.from({ length: 200 }, () => Math.abs(random.normal())),
          ),
        )
        const [param, master, m, v] = all as [Handle, Handle, Handle, Handle]
        const before = await Promise.all(all.map(bytesOf))
        const g = tensor(
          'f32',
          [1, 200],
          Array.from({ length: 200 }, () => (clip[0] ? random.normal() : Number.NaN)),
        )
        step(3, [param], [g], [m], [v], usual, { clip: tensor('f32', [2], clip), master: [master] })
        expect(await Promise.all(all.map(bytesOf))).toEqual(before)
      }
  })

  it('clip [factor, 0] equals gradients times the factor', async () => {
    const random = new Random(6)
    const values = Array.from({ length: 300 }, () => random.normal())
    const run = async (g: Handle, clip?: Handle) => {
      const all = [zeros('f32', 300), zeros('e4m3/x128', 300), zeros('e4m3/x128', 300)] as const
      step(1, [all[0]], [g], [all[1]], [all[2]], usual, { clip })
      return await Promise.all(all.map(bytesOf))
    }
    const halved = await run(
      tensor(
        'f32',
        [300],
        values.map((x) => Math.fround(x) / 2),
      ),
    )
    expect(await run(tensor('f32', [300], values), tensor('f32', [2], [0.5, 0]))).toEqual(halved)
  })

  it('one call on many tensors of mixed shapes and formats equals a call on each', async () => {
    const shapes = [[1], [3, 43], [128], [5, 7, 11], [1, 129], [2]]
    const run = async (together: boolean) => {
      const lists = shapes.map((shape, i) => {
        const n = shape.reduce((a, b) => a * b)
        const values = (seed: number) => vector(n, (j) => Math.sin(seed + 0.37 * j + i)).data
        const [first, second] = pairs[(i * 7) % pairs.length] as [AnyFormat, AnyFormat]
        const p = tensor(i % 2 ? 'bf16' : 'f32', shape, values(1))
        return { p, g: tensor(i % 3 ? 'bf16' : 'f32', shape, values(2)), m: zeros(first, n), v: zeros(second, n) }
      })
      for (let t = 1; t <= 3; t++)
        for (const part of together ? [lists] : lists.map((list) => [list])) {
          const pick = (key: 'p' | 'g' | 'm' | 'v') => part.map((list) => list[key])
          step(t, pick('p'), pick('g'), pick('m'), pick('v'), usual)
        }
      return await Promise.all(lists.flatMap(({ p, m, v }) => [p, m, v]).map(bytesOf))
    }
    expect(await run(true)).toEqual(await run(false))
  })

  it('master collects what bf16 alone would lose', async () => {
    const [p, master, alone] = [tensor('bf16', [1, 1], [1]), tensor('f32', [1, 1], [1]), tensor('bf16', [1, 1], [1])]
    const g = tensor('bf16', [1, 1], [1])
    const moments = Array.from({ length: 4 }, () => zeros('e4m3/x128', 1))
    for (let t = 1; t <= 20; t++) {
      step(t, [p], [g], [moments[0] as Handle], [moments[1] as Handle], usual, { master: [master] })
      step(t, [alone], [g], [moments[2] as Handle], [moments[3] as Handle], usual)
    }
    expect((await read(master))[0]).toBeCloseTo(0.98, 3)
    expect((await read(p))[0]).toBe(0.98046875)
    expect((await read(alone))[0]).toBe(1)
  })

  it('states of rows are refused by name', () => {
    const [p, m] = [tensor('f32', [5, 7], new Float64Array(35)), tensor('e4m3/g128', [5, 7], new Float64Array(35))]
    expect(() => step(1, [p], [p], [m], [m], usual)).toThrow('adamw: m e4m3/g128[5, 7] must have the shape [1, 35]')
  })

  it('a refused list changes none of its members', async () => {
    const list = [tensor('f32', [1, 35], new Float64Array(35).fill(1)), tensor('f32', [5, 7], new Float64Array(35))]
    const good = [zeros('e4m3/g128', 35), zeros('e4m3/g128', 35)]
    const bad = tensor('e4m3/g128', [5, 7], new Float64Array(35))
    const before = await Promise.all([...list, ...good].map(bytesOf))
    const [first, second] = good as [Handle, Handle]
    expect(() => step(1, list, list, [first, bad], [second, bad], usual)).toThrow(/m e4m3\/g128\[5, 7\] must have/)
    expect(await Promise.all([...list, ...good].map(bytesOf))).toEqual(before)
  })
})
