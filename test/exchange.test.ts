// Gradients of several ranks in FP8: sums with one scale, the factor mu by both readings, whole tensors to ranks.
import { afterEach, describe, expect, it } from 'vitest'
import {
  AutomaticMu,
  LlamaForCausalLM,
  localRanks,
  type MuOptions,
  memory,
  type Param,
  partitionFlat,
  partitionWhole,
  RankedGradients,
  type RecipeName,
  recipe,
  SentGradients,
  saturatedShare,
  sumGradients,
  Tensor,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { eachInFolder } from './folders.ts'
import { devices, present } from './harness.ts'
import { Training } from './training.ts'
import { Random, sentence, smallLlama } from './values.ts'

let folder = ''
eachInFolder((path) => {
  folder = path
})

describe.each(devices)('sums on %s', (device) => {
  const test = it.skipIf(!present(device))
  afterEach(() => native.checkGuards())

  const mean = async (ranks: number[][], mu?: number) => {
    const given = ranks.map((values) => Tensor.from(values, [1, values.length], { device }))
    const { sum, count } = sumGradients(given, mu)
    const values = [...((await sum.read()) as Float32Array)].map((value) => value / count)
    const share = await saturatedShare(sum)
    for (const tensor of [sum, ...given]) tensor.dispose()
    return { values, share }
  }

  test('3 and 7 with one scale of 64: 192 + 448 saturates, and the mean is 3.5', async () => {
    expect(await mean([[3], [7]])).toEqual({ values: [3.5], share: 1 })
  })
  test('with mu 1/2 it is 5; with 1 / sqrt 2 it is 4.9497, of the largest code', async () => {
    expect(await mean([[3], [7]], 0.5)).toEqual({ values: [5], share: 0 })
    const { values, share } = await mean([[3], [7]], Math.SQRT1_2)
    expect(values[0]).toBeCloseTo(4.9497, 4)
    expect(share).toBe(1)
  })
  test('a rank with an infinity leaves the scale of the others', async () => {
    expect(
      (
        await mean(
          [
            [3, Number.POSITIVE_INFINITY],
            [3, 1],
          ],
          0.5,
        )
      ).values,
    ).toEqual([3, 3.5])
  })
  test('shares are those of the largest code, of either sign', async () => {
    const random = new Random(4)
    for (const scale of [1, 2 ** -20, 3e5]) {
      const values = Array.from({ length: 5003 }, () => (Math.floor(random.uniform() * 9) + 24) * 14 * scale)
      using tensor = Tensor.from(
        values.map((value, i) => (i % 2 ? value : -value)),
        [1, 5003],
        { device, format: 'e4m3/t' },
      )
      const codes = (await tensor.readBytes()).subarray(0, 5003)
      const count = codes.filter((code) => (code & 0x7f) === 0x7e).length
      expect(count).toBeGreaterThan(400)
      expect(await saturatedShare(tensor)).toBe(count / 5003)
    }
  })
  test('four ranks: within a step of the format of the mean', async () => {
    const random = new Random(3)
    const ranks = Array.from({ length: 4 }, () => Array.from({ length: 999 }, () => random.normal()))
    const { values } = await mean(ranks, 0.25)
    const largest = Math.max(...ranks.flat().map(Math.abs))
    values.forEach((value, i) => {
      const exact = ranks.reduce((sum, rank) => sum + (rank[i] as number), 0) / 4
      const parts = ranks.reduce((sum, rank) => sum + Math.abs(rank[i] as number), 0) / 4
      expect(Math.abs(value - exact)).toBeLessThan((Math.abs(exact) + parts) / 16 + largest * 2 ** -15)
    })
  })
})

describe.each(devices)('between ranks on %s', (device) => {
  const test = it.skipIf(!present(device))
  afterEach(() => native.checkGuards())

  /** What ranks with these gradients, a matrix each, have afterwards, code by code, and the shares of saturated values. */
  const sent = async (format: 'bf16' | 'e4m3/t', ranks: Tensor[], mu: MuOptions | null = null) => {
    const all = await Promise.all(
      localRanks(ranks.length).map(async (each) => {
        const grad = ranks[each.rank] as Tensor
        const holder = { name: 'w', tensor: grad, gradFormat: null, grad: grad.retain(), gradScale: 'exact' as const }
        using gradients = new SentGradients([holder], format, mu)
        await gradients.add(each)
        const sum: Tensor = holder.grad
        const found = { format: sum.format, bytes: await sum.readBytes(), values: (await sum.read()) as Float32Array }
        sum.release()
        return found
      }),
    )
    for (const one of all) expect(one).toEqual(all[0])
    return all[0] ?? expect.fail()
  }
  const matrix = (values: number[], format: 'f32' | 'bf16' | 'e4m3/t' = 'f32') =>
    Tensor.from(values, [1, values.length], { device, format })
  const meanOf = async (ranks: number[][], mu: MuOptions | null) => {
    const given = ranks.map((values) => matrix(values))
    const { values } = await sent('e4m3/t', given, mu)
    for (const tensor of given) tensor.dispose()
    return [...values].map((value) => value / ranks.length)
  }

  test('3 and 7 have the mean 3.5, with mu 1/2 it is 5, with 1 / sqrt 2 it is 4.9497', async () => {
    expect(await meanOf([[3], [7]], null)).toEqual([3.5])
    // 1 / sqrt(4)
    expect(await meanOf([[3], [7]], { reading: 'fixed', ranks: 4 })).toEqual([5])
    expect((await meanOf([[3], [7]], { reading: 'fixed', ranks: 2 }))[0]).toBeCloseTo(4.9497, 4)
  })

  test.each(['f32', 'bf16', 'e4m3/t'] as const)('of %s: those of sumGradients, code by code', async (format) => {
    const random = new Random(6)
    const given = [1, 40, 0.01].map((scale) =>
      matrix(
        Array.from({ length: 777 }, () => random.normal() * scale),
        format,
      ),
    )
    for (const mu of [null, { reading: 'fixed', ranks: 3 }] as const) {
      const found = await sent('e4m3/t', given, mu)
      using sum = sumGradients(given, mu ? 1 / Math.sqrt(3) : 1).sum
      expect([found.format, found.bytes]).toEqual(['e4m3/t', await sum.readBytes()])
    }
    for (const tensor of given) tensor.dispose()
  })

  test('in bf16 each is rounded, and the sum in FP32 once more', async () => {
    // 1 + 2^-8 is a tie that rounds to 1, and 1 + 3 * 2^-8 one that rounds to 1 + 2^-6
    const given = [
      [1 + 2 ** -8, 1],
      [1 + 3 * 2 ** -8, 2 ** -9],
      [2 ** -9, 2 ** -9 + 2 ** -12],
    ].map((values) => matrix(values))
    const { format, values } = await sent('bf16', given)
    expect([format, ...values]).toEqual(['bf16', 2 + 2 ** -6, 1 + 2 ** -7])
    for (const tensor of given) tensor.dispose()
  })
})

describe('mu', () => {
  it('relative: doubles in 1000 clean steps, is halved by more than 1 in 100 000', () => {
    const mu = new AutomaticMu({ ranks: 16, bounds: [2 ** -16, 4] })
    expect(mu.value).toBe(0.25)
    for (let i = 0; i < 1000; i++) mu.update(i % 2 === 0 ? 0 : 1e-5)
    expect(mu.value).toBeCloseTo(0.5, 12)
    mu.update(2e-5)
    expect(mu.value).toBeCloseTo(0.25, 12)
  })
  it('relative: stays within its bounds', () => {
    const mu = new AutomaticMu({ ranks: 1 })
    mu.update(0)
    expect(mu.value).toBe(1)
    for (let i = 0; i < 99; i++) mu.update(1)
    expect(mu.value).toBe(2 ** -16)
  })
  it('absolute: 1/2 on saturation, then 2 after 1000 steps and no more', () => {
    const mu = new AutomaticMu({ ranks: 16, reading: 'absolute' })
    mu.update(1)
    mu.update(1)
    expect(mu.value).toBe(0.5)
    for (let i = 0; i < 500; i++) mu.update(0)
    expect(mu.value).toBeCloseTo(1, 12)
    for (let i = 0; i < 600; i++) mu.update(0)
    expect(mu.value).toBeCloseTo(2, 12)
    expect(mu.value).toBeLessThanOrEqual(2)
  })
  it('refuses nonsense', () => {
    expect(() => new AutomaticMu({ ranks: 0 })).toThrow(/AutomaticMu: ranks is 0 and must be an integer of at least 1/)
    expect(() => new AutomaticMu({ ranks: 1, reading: 'paper' as never })).toThrow(/reading is paper and must be/)
    expect(() => sumGradients([])).toThrow(/ranks are 0/)
  })
})

describe.each(devices)('micro-batches as ranks on %s', (device) => {
  const test = it.skipIf(!present(device))
  afterEach(() => native.checkGuards())
  const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })

  class Run extends Training {
    constructor(which: RecipeName, options: Partial<TrainerOptions> = {}) {
      const model = new LlamaForCausalLM(smallLlama, { recipe: which, seed: 1, device })
      const usual = { data, batch: 2, accumulate: 2, steps: 6, optimizer: { lr: 0.01 } }
      super(model, new Trainer(model, { ...usual, ...options }))
    }
    get mu(): Record<string, number> {
      return this.trainer.exchange?.state() ?? expect.fail()
    }
  }

  /** The sums of micro-batches with gradients of one value, step by step, and mu after each. */
  const sums = async (options: Omit<MuOptions, 'ranks'>, steps: readonly (readonly number[])[]) => {
    using run = new Run('fp8-lm-o2', { mu: 'none' })
    const [param] = run.model.parameters('model.layers.0.*qkv*') as [Param]
    using ranks = new RankedGradients([param], { ...options, ranks: 2 })
    const seen: number[][] = []
    for (const values of steps) {
      for (const value of values) {
        using gradient = Tensor.from(new Float32Array(param.tensor.numel).fill(value), param.tensor.shape, { device })
        param.accumulate(gradient)
        param.complete()
        expect(param.grad?.format).toBe('e4m3/t')
        ranks.take()
        expect(param.grad).toBe(null)
      }
      ranks.sum()
      const grad: Tensor = param.grad ?? expect.fail()
      const sum = ((await grad.read()) as Float32Array)[0] as number
      await ranks.update()
      param.dropGrad()
      seen.push([sum, ranks.state()[param.name] as number])
    }
    return seen
  }

  test('mu is halved where the sum saturates, and grows where it does not', async () => {
    const near = (rows: number[][]) => rows.map((row) => row.map((value) => expect.closeTo(value, 5)))
    const [a, b] = [
      [3, 7],
      [3, 7],
    ] as const
    // 448 by a scale of 64 / sqrt 2
    const full = 7 * Math.SQRT2
    expect(await sums({ window: 1 }, [a, b, [1], [1, 2]])).toEqual(
      near([
        [full, Math.SQRT1_2 / 2],
        [full, Math.SQRT1_2],
        [(176 / 256) * Math.SQRT2, 1],
        [3, 1],
      ]),
    )
    const growth = 4 ** 0.001
    expect(await sums({ reading: 'absolute' }, [a, b])).toEqual(
      near([
        [7, 0.5],
        [10, 0.5 * growth],
      ]),
    )
    expect(await sums({ reading: 'fixed' }, [a, b])).toEqual(
      near([
        [full, Math.SQRT1_2],
        [full, Math.SQRT1_2],
      ]),
    )
  })

  test('a model trains with it: nearly the losses of gradients that are added one by one', async () => {
    using added = new Run('fp8-lm-o2', { accumulate: 4 })
    const expected = await added.losses()
    for (const mu of ['relative', 'absolute', 'fixed'] as const) {
      using run = new Run('fp8-lm-auto-mu', { accumulate: 4, mu })
      const first = run.mu
      const losses = await run.losses()
      expect(losses[0]).toBe(expected[0])
      for (const [i, loss] of losses.entries()) expect(Math.abs(loss / (expected[i] as number) - 1)).toBeLessThan(0.02)
      expect(new Set(Object.values(first))).toEqual(new Set([mu === 'absolute' ? 1 : 0.5]))
      const matrices = run.model.parameters().filter(({ tensor }) => tensor.shape.length === 2)
      expect(Object.keys(run.mu)).toEqual(matrices.map(({ name }) => name))
      if (mu === 'fixed') expect(run.mu).toEqual(first)
      else for (const [name, value] of Object.entries(run.mu)) expect(value, name).not.toBe(first[name])
      expect(memory().live.grad).toBe(0)
    }
  })

  test('a byte an element and micro-batch waits for the sum', async () => {
    let bytes = 0
    let updates = 0
    using run = new Run('fp8-lm-auto-mu', {
      accumulate: 3,
      phase: (part) => {
        if (part === 'forward') bytes = memory().live.grad
        if (part === 'update') updates = memory().live.grad
      },
    })
    await run.trainer.step()
    const matrices = run.model.parameters().filter(({ tensor }) => tensor.shape.length === 2)
    const elements = matrices.reduce((sum, { tensor }) => sum + tensor.numel, 0)
    expect(bytes / (2 * elements)).toBeCloseTo(1, 1)
    expect(updates / elements).toBeCloseTo(1, 1)
  })

  test('a step with an infinity is skipped, and mu stays', async () => {
    using run = new Run('fp8-lm-auto-mu')
    await run.trainer.step()
    const [param] = run.model.parameters('model.layers.0.*qkv*') as [Param]
    const { complete } = param
    param.complete = () => {
      const { grad } = param
      if (grad) {
        const values = new Float32Array(grad.numel)
        values[3] = Number.POSITIVE_INFINITY
        using spoilt = Tensor.from(values, grad.shape, { format: 'bf16', device })
        native.add_into(grad.handle, spoilt.handle)
      }
      complete.call(param)
    }
    const { mu } = run
    const before = await param.tensor.readBytes()
    expect((await run.trainer.step()).skipped).toBe(true)
    expect(run.mu).toEqual(mu)
    expect(await param.tensor.readBytes()).toEqual(before)
  })

  test('goes on from a checkpoint bit for bit', async () => {
    using whole = new Run('fp8-lm-auto-mu')
    const losses = await whole.losses()
    using first = new Run('fp8-lm-auto-mu', { checkpoint: { dir: folder, every: 3 } })
    for await (const { step } of first.trainer.run()) if (step === 3) break
    using second = new Run('fp8-lm-auto-mu')
    await second.trainer.resume(folder)
    expect(second.mu).toEqual(first.mu)
    expect(await second.losses()).toEqual(losses.slice(3))
    expect(second.mu).toEqual(whole.mu)
    using other = new Run('fp8-lm-o2')
    await expect(other.trainer.resume(folder)).rejects.toThrow(
      /mu.reading is "relative" in the checkpoint and absent here/,
    )
  })

  test('is refused where there is nothing to sum', () => {
    expect(() => recipe({ base: 'bf16', mu: 'relative' })).toThrow(/mu needs dw 'e4m3\/t'/)
    expect(() => recipe({ base: 'fp8-lm-o2', mu: 'auto' as never })).toThrow(
      /mu is 'auto' and must be one of none, fixed/,
    )
    const refused = (which: RecipeName, options: object) => {
      using model = new LlamaForCausalLM(smallLlama, { recipe: which, device })
      try {
        return new Trainer(model, { data, batch: 2, steps: 6, ...options }) && ''
      } catch (error) {
        return (error as Error).message
      }
    }
    expect(refused('bf16', { mu: 'fixed' })).toMatch(/mu: no parameter has a gradient in e4m3\/t/)
    expect(refused('fp8-lm-auto-mu', { optimizerInBackward: true })).toMatch(/mu is "relative" and must be none with/)
    expect(refused('fp8-lm-o2', { mu: { reading: 'paper' } })).toMatch(/reading is paper and must be/)
    expect(refused('fp8-lm-o2', { mu: { ranks: 3 } })).toMatch(/option 'mu.ranks' is unknown/)
  })
})

it.each([
  [
    [7, 5, 4, 3, 1],
    2,
    [
      [0, 3],
      [1, 2, 4],
    ],
  ],
  [
    [8, 7, 6, 5, 4],
    2,
    [
      [0, 3, 4],
      [1, 2],
    ],
  ],
  [
    [1, 7, 3, 5, 4],
    2,
    [
      [1, 2],
      [3, 4, 0],
    ],
  ],
  [[2, 2], 3, [[0], [1], []]],
])('whole tensors of %j on %i ranks', (sizes, ranks, expected) => {
  expect(partitionWhole(sizes, ranks)).toEqual(expected)
})

describe('equal parts of tensors end to end', () => {
  const matrix = (rows: number, columns: number) => ({ rows, columns, cuttable: true })
  it.each([
    // the middle lies in the second, which may be cut at every 4th row
    [[matrix(16, 64), matrix(48, 64)], 2, ['0 on 0', '1 on 0: 0 to 16', '1 on 1: 16 to 48']],
    // rows of 100 begin a run of 256 at every 64th
    [[matrix(256, 100)], 3, ['0 on 0: 0 to 64', '0 on 1: 64 to 192', '0 on 2: 192 to 256']],
    [
      [matrix(256, 256), matrix(1, 64)],
      4,
      [0, 1, 2, 3].map((i) => `0 on ${i}: ${64 * i} to ${64 * i + 64}`).concat('1 on 3'),
    ],
    // the nearer end of what is not cut
    [
      [{ ...matrix(30, 64), cuttable: false }, matrix(30, 64), { ...matrix(1, 64), cuttable: false }],
      2,
      ['0 on 0', '1 on 1', '2 on 1'],
    ],
    [[{ ...matrix(6, 64), cuttable: false }], 3, ['0 on 1']],
    [[matrix(8, 256)], 1, ['0 on 0']],
  ])('%j on %i ranks', (tensors, ranks, expected) => {
    const shown = partitionFlat(tensors, ranks).map(
      ({ place, rank, rows }) => `${place} on ${rank}${rows ? `: ${rows.join(' to ')}` : ''}`,
    )
    expect(shown).toEqual(expected)
  })

  it('have all rows once, and differ by a run of rows at most', () => {
    const random = new Random(11)
    for (let i = 0; i < 100; i++) {
      const tensors = Array.from({ length: 5 }, () =>
        matrix(64 * (1 + random.integer(9)), 32 * (1 + random.integer(9))),
      )
      const ranks = 1 + random.integer(6)
      const pieces = partitionFlat(tensors, ranks)
      const loads = new Array(ranks).fill(0)
      for (const [place, { rows, columns }] of tensors.entries()) {
        let next = 0
        for (const piece of pieces.filter((each) => each.place === place)) {
          const [from, to] = piece.rows ?? [0, rows]
          expect([from, (from * columns) % 256]).toEqual([next, 0])
          loads[piece.rank] += (to - from) * columns
          next = to
        }
        expect(next).toBe(rows)
      }
      const total = tensors.reduce((sum, { rows, columns }) => sum + rows * columns, 0)
      for (const load of loads) expect(Math.abs(load - total / ranks)).toBeLessThanOrEqual(9 * 32 * 256)
      expect(pieces.map(({ rank }) => rank)).toEqual(pieces.map(({ rank }) => rank).sort((a, b) => a - b))
    }
    expect(() => partitionFlat([matrix(1, 1)], 0)).toThrow(
      'partitionFlat: ranks is 0 and must be an integer of at least 1',
    )
  })
})
