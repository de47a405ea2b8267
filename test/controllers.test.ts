// Controllers: their rules by hand, and real trainings that they lead.
import { createHash } from 'node:crypto'
import { describe, expect, it } from 'vitest'
import {
  type DeviceName,
  evaluate,
  handOver,
  type LayerRecipe,
  LlamaForCausalLM,
  load,
  Muppet,
  type MuppetOptions,
  PrecisionSwitch,
  parameterBytes,
  pickConfiguration,
  type Recipe,
  type RecipeChange,
  type RecipeName,
  recipe,
  recipes,
  searchLayers,
  stateDict,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { devices, present } from './harness.ts'
import { smallLlama as config, sentence } from './values.ts'

const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })

function trainerOf(
  which: RecipeName | Recipe | RecipeChange,
  options: Partial<TrainerOptions> = {},
  device: DeviceName = 'cpu',
): Trainer {
  const model = new LlamaForCausalLM(config, { recipe: which, device, seed: 1 })
  return new Trainer(model, { data, batch: 4, steps: 12, optimizer: { lr: 0.01 }, ...options })
}
function dispose(trainer: Trainer): void {
  trainer.dispose()
  trainer.model.dispose()
}

async function losses(run: AsyncIterable<{ loss: number }>): Promise<number[]> {
  const list: number[] = []
  for await (const { loss } of run) list.push(loss)
  return list
}

async function stateOf({ model, optimizer }: Trainer): Promise<string> {
  const hash = createHash('sha256')
  for (const param of model.parameters()) {
    const { master, lost, m, v } = optimizer.stateOf(param)
    for (const tensor of [param.tensor, master, lost, m, v]) if (tensor) hash.update(await tensor.readBytes())
  }
  return hash.digest('hex')
}

describe('MuPPET', () => {
  it('the threshold falls from 2.5 over 1.5518 and 1.2030', () => {
    const rule = new PrecisionSwitch()
    expect(rule.threshold(0)).toBe(2.5)
    expect(rule.threshold(10)).toBeCloseTo(1.5518, 4)
    expect(rule.threshold(20)).toBeCloseTo(1.203, 4)
  })

  it('1.0, 0.6, 0.6, 0.6 at epochs 2, 5, 8, 11: the first violation is at 11', () => {
    const rule = new PrecisionSwitch()
    const violations = [1, 0.6, 0.6, 0.6].map((diversity, i) => {
      expect(rule.observe(2 + 3 * i, diversity)).toBe(false)
      return rule.violations
    })
    expect(violations).toEqual([0, 0, 0, 1])
    expect([5, 8, 11].map((epoch) => Number(rule.threshold(epoch).toFixed(3)))).toEqual([1.91, 1.674, 1.499])
    // a clean window takes no violation back; after the second all begins again
    expect(rule.observe(14, 1)).toBe(false)
    expect(rule.violations).toBe(1)
    expect(rule.observe(17, 0.6)).toBe(true)
    expect([rule.violations, rule.largest]).toEqual([0, 0])
    expect(rule.observe(20, 0.6)).toBe(false)
    expect(rule.violations).toBe(0)
    expect(() => new PrecisionSwitch({ patience: 0 })).toThrow(/^PrecisionSwitch: patience is 0 and must be an integer/)
  })

  const muppet = (which: MuppetOptions['recipes'], more: Partial<MuppetOptions> = {}) =>
    new Muppet({
      recipes: which,
      epoch: 1,
      window: 2,
      patience: 1,
      build: (made, phase) => trainerOf(made, { phase }),
      ...more,
    })

  describe.each(devices)('on %s', (device) => {
    it
      .skipIf(!present(device))
      .each<RecipeName>(['fp32', 'coat', 'collage-plus', 'bf16-kahan', 'adamw8bit', 'fp8-lm-o3', 'mellempudi-e5m2'])(
      '%s: changing to the same recipe, and watching, leaves every loss as it was',
      async (name) => {
        // a threshold below 1 is always passed
        using led = muppet([name, name, name], {
          ...{ alpha: 0, beta: 0 },
          build: (made, phase) => trainerOf(made, { phase }, device),
        })
        const got = await losses(led.run())
        expect(led.level).toBe(2)
        expect(led.windows.map(({ epoch, level }) => [epoch, level])).toEqual([
          [1, 0],
          [3, 1],
        ])
        for (const { diversity } of led.windows) expect(diversity).toBeGreaterThan(0.5)
        const plain = trainerOf(name, {}, device)
        expect(got).toEqual(await losses(plain.run()))
        expect(await stateOf(led.trainer)).toBe(await stateOf(plain))
        expect(led.trainer.lossScale?.state()).toEqual(plain.lossScale?.state())
        dispose(plain)
      },
    )
  })

  it('goes up from FP8 to bf16 to fp32 and learns', async () => {
    const products = (x: RecipeName): Recipe => {
      const { x: input, w, dy } = recipes[x]
      return recipe({ ...recipes['te-current'], x: input, w, dy })
    }
    const rising = [products('te-current'), products('bf16'), recipe('fp32')]
    using led = muppet(rising, { alpha: 0, beta: 0, epoch: 2 })
    const seen: string[] = []
    const got: number[] = []
    for await (const { step, loss } of led.run()) {
      seen.push(`${step} ${led.trainer.model.recipe.x}`)
      got.push(loss)
    }
    expect(seen[2]).toBe('3 e4m3/t')
    expect(seen[3]).toBe('4 bf16')
    expect(seen[7]).toBe('8 f32')
    expect(got).toHaveLength(12)
    const plain = trainerOf(rising[0] as Recipe)
    const first = await losses(plain.run())
    expect(got.slice(0, 4)).toEqual(first.slice(0, 4))
    expect(got.slice(4)).not.toEqual(first.slice(4))
    for (const [i, loss] of got.entries()) expect(loss / (first[i] as number)).toBeCloseTo(1, 1)
    dispose(plain)
  })

  it('stays where gradients agree, and where it is said to', async () => {
    using led = muppet(['te-current', 'fp32'], { alpha: 1e9 })
    await losses(led.run())
    expect([led.level, led.windows.length]).toEqual([0, 6])
    using never = muppet(['te-current'], { alpha: 0, beta: 0 })
    await losses(never.run())
    expect(never.windows).toEqual([])
    using deaf = muppet(['te-current', 'fp32'], { build: (made) => trainerOf(made) })
    await expect(losses(deaf.run())).rejects.toThrow(/^Muppet: phase is not called and must be among the options/)
    expect(() => muppet([])).toThrow(/^Muppet: recipes is 0 and must be at least 1$/)
    expect(() => muppet(['fp32'], { epoch: 0 })).toThrow(/^Muppet: epoch is 0 and must be an integer of at least 1$/)
  })
})

describe('handing over', () => {
  it.each<[RecipeName, RecipeName]>([
    ['bf16', 'fp32'],
    ['fp32', 'coat'],
    ['coat', 'bf16'],
    ['bf16', 'bf16-kahan'],
    ['bf16-kahan', 'fp32'],
    ['collage-plus', 'fp8-lm-o3'],
  ])('%s to %s: what training goes on from stays, but for the rounding', async (one, other) => {
    const [from, to] = [trainerOf(one), trainerOf(other)]
    for (let i = 0; i < 5; i++) await from.step()
    await handOver(from, to)
    expect([to.optimizer.steps, to.batches, to.lastNorm]).toEqual([5, 5, from.lastNorm])
    const relative: Partial<Record<RecipeName, number>> = { 'fp8-lm-o3': 2 ** -10, 'bf16-kahan': 2 ** -15 }
    for (const param of to.model.parameters()) {
      const { master, lost, m } = to.optimizer.stateOf(param)
      const source = from.model.parameters().find(({ name }) => name === param.name) ?? expect.fail(param.name)
      const old = from.optimizer.stateOf(source)
      const forgotten = (await old.lost?.read()) as Float32Array | undefined
      const wanted = ((await (old.master ?? source.tensor).read()) as Float32Array).map(
        (x, i) => x + (forgotten?.[i] ?? 0),
      )
      const kept = (await (master ?? param.tensor).read()) as Float32Array
      const rest = (await lost?.read()) as Float32Array | undefined
      const most = Math.max(...wanted.map(Math.abs))
      const norm = Math.sqrt(((await old.m.read()) as Float32Array).reduce((sum, x) => sum + x * x, 0))
      const moments = (await m.read()) as Float32Array
      expect(Math.sqrt(moments.reduce((sum, x) => sum + x * x, 0)) / norm).toBeCloseTo(1, 1)
      const off = wanted.map((value, i) => Math.abs((kept[i] as number) + (rest?.[i] ?? 0) - value))
      expect(Math.max(...off), param.name).toBeLessThanOrEqual((relative[other] ?? 0) * most)
    }
    const { loss } = await to.step()
    const { loss: next } = await from.step()
    expect(loss / next).toBeCloseTo(1, 1)
    for (const trainer of [from, to]) dispose(trainer)
  })

  it('refuses models of other sizes', async () => {
    const [from, to] = [
      trainerOf('fp32'),
      new Trainer(new LlamaForCausalLM({ ...config, num_hidden_layers: 3 }, { recipe: 'fp32' }), {
        data,
        batch: 4,
        steps: 1,
      }),
    ]
    await expect(handOver(from, to)).rejects.toThrow(
      /^handOver: 'model.layers.2.input_layernorm.weight' \[32\] must be in both models/,
    )
    for (const trainer of [from, to]) dispose(trainer)
  })
})

describe('PEPPP', () => {
  it('of one term: one cheap column tells the others', async () => {
    const asked: number[] = []
    const picked = await pickConfiguration({
      errors: [
        [0.1, 0.2, 0.4],
        [0.2, 0.4, 0.8],
      ],
      bytes: [3, 2, 1],
      budget: 3,
      cheap: 2,
      measure: async (i) => {
        asked.push(i)
        return [0.2, 0.4, 0.8][i] as number
      },
    })
    // of the two that are cheap the one that varies most
    expect(asked).toEqual([2])
    for (const [i, error] of [0.2, 0.4, 0.8].entries()) expect(picked.errors[i]).toBeCloseTo(error, 9)
    expect([picked.configuration, picked.front]).toEqual([0, [2, 1, 0]])
  })

  it('of two terms, with errors that are not known, under a budget', async () => {
    const traits = [
      [1, 0],
      [1, 1],
      [2, 1],
      [1, 3],
      [4, 1],
    ]
    const error = (task: readonly number[], i: number) =>
      (task[0] as number) * ((traits[i] as number[])[0] as number) +
      (task[1] as number) * ((traits[i] as number[])[1] as number)
    const tasks = [
      [1, 0.5],
      [0.3, 1],
      [2, 1],
      [0.5, 0.1],
    ]
    const errors = tasks.map((task) => traits.map((_, i) => error(task, i)))
    ;(errors[1] as number[])[3] = Number.NaN
    ;(errors[2] as number[])[0] = Number.NaN
    const mine = [0.7, 0.2]
    const picked = await pickConfiguration({
      errors,
      bytes: [16, 8, 6, 4, 2],
      budget: 8,
      cheap: 4,
      rank: 2,
      measure: async (i) => error(mine, i),
    })
    expect(picked.measured.toSorted()).toEqual([3, 4])
    for (const i of traits.keys()) expect(picked.errors[i]).toBeCloseTo(error(mine, i), 4)
    expect(picked.configuration).toBe(1)
    expect(picked.front).toEqual([4, 3, 1, 0])
  })

  it('refuses what cannot be picked from', async () => {
    const measure = async () => 1
    const pick = (more: object) => pickConfiguration({ errors: [[1, 2]], bytes: [5, 7], budget: 6, measure, ...more })
    await expect(pick({ budget: 4 })).rejects.toThrow(/budget is 4 and must be at least the bytes .*, 5$/)
    await expect(pick({ errors: [[1]] })).rejects.toThrow(/errors is rows of 1 and must be rows of 2, as many as bytes/)
    await expect(pick({ measured: 2 })).rejects.toThrow(/measured is 2 and must be at most 1, those within cheap/)
    await expect(pick({ rank: 2, measured: 1 })).rejects.toThrow(/rank is 2 and must be an integer from 1 to measured/)
  })

  it('picks the recipe of a real training from those of other texts', async () => {
    const names = ['fp32', 'bf16', 'coat', 'fp8-lm-o2', 'adamw4bit'] as const
    const texts = [sentence, 'It was the best of times, it was the worst of times. ', 'We hold these truths. ']
    const train = async (text: string, name: RecipeName) => {
      const own = new TextDataset(text.repeat(60), { sequence: 32, seed: 7 })
      const trainer = trainerOf(name, { data: own, steps: 12 })
      await losses(trainer.run())
      const held = await trainer.validate(4)
      dispose(trainer)
      return held
    }
    const errors: number[][] = []
    for (const text of texts.slice(1)) {
      const row: number[] = []
      for (const name of names) row.push(await train(text, name))
      errors.push(row)
    }
    const trained: string[] = []
    const picked = await pickConfiguration({
      errors,
      bytes: names.map((name) => parameterBytes(recipes[name]).total),
      budget: 9,
      cheap: 7,
      measure: (i) => {
        trained.push(names[i] as string)
        return train(texts[0] as string, names[i] as RecipeName)
      },
    })
    expect(trained).toHaveLength(1)
    expect(['fp8-lm-o2', 'adamw4bit']).toContain(trained[0])
    expect(names[picked.configuration]).not.toMatch(/^(fp32|bf16)$/)
    // the others were not trained, and are foretold well
    const mine = await train(texts[0] as string, 'coat')
    expect(Math.abs((picked.errors[2] as number) / mine - 1)).toBeLessThan(0.1)
  })
})

describe('layer by layer', () => {
  const bits = [16, 8, 7, 6, 5, 4, 3, 2, 1]
  const traffic = (size: Record<string, number>) => (layer: string, level: number) => (size[layer] ?? 0) * level

  it('each layer keeps the last level before the drop is more than 1 %, then all go down together', async () => {
    // each layer loses 0.0039 a bit below its own need, and they add up
    const needs: Record<string, number> = { a: 6, b: 3, c: 8 }
    const asked: string[] = []
    const found = await searchLayers({
      layers: ['a', 'b', 'c'],
      levels: bits,
      traffic: traffic({ a: 1, b: 10, c: 5 }),
      evaluate: async (choice) => {
        asked.push([...choice.values()].join(' '))
        return (
          0.8 - [...choice].reduce((sum, [name, own]) => sum + 0.0039 * Math.max(0, (needs[name] as number) - own), 0)
        )
      },
    })
    // alone 2 bits below the need lose 0.0078, and 0.008 is 1 %
    expect([...found.alone.values()]).toEqual([4, 1, 6])
    // together 2 bits in all may be lost: b goes first, since it moves the most
    expect([...found.choice.values()]).toEqual([6, 1, 8])
    expect(found.widest).toBe(0.8)
    expect(found.found).toBeCloseTo(0.7922, 9)
    expect(found.evaluations).toBe(asked.length)
    expect(asked[0]).toBe('16 16 16')
  })

  it('works with losses below 0, and with nothing to lower', async () => {
    const search = (tolerance: number) =>
      searchLayers({
        layers: ['a'],
        levels: [2, 1],
        tolerance,
        traffic: (_, level) => level,
        evaluate: async (choice) => (choice.get('a') === 2 ? -2 : -2.1),
      })
    expect((await search(0.06)).choice.get('a')).toBe(1)
    expect((await search(0.04)).choice.get('a')).toBe(2)
    await expect(search(-1)).rejects.toThrow(/^searchLayers: tolerance is -1 and must be at least 0$/)
  })

  it('finds which blocks of a trained model may run in FP8', async () => {
    const trainer = trainerOf('fp32', { steps: 30 })
    await losses(trainer.run())
    const state = await stateDict(trainer.model)
    dispose(trainer)
    const { x, w, dy } = recipes['te-current']
    const plain = { x: 'bf16', w: 'bf16', dy: 'bf16' } as const
    const levels: LayerRecipe[] = [plain, { x, w, dy }]
    const base = recipe({ base: 'te-current', ...plain })
    const lossWith = async (layers: Readonly<Record<string, LayerRecipe>>) => {
      using model = new LlamaForCausalLM(config, { recipe: recipe({ ...base, layers }), seed: 1 })
      await load(model, state)
      return (await evaluate(model, data.validation(8, 4))).loss
    }
    const search = (tolerance: number) =>
      searchLayers({
        layers: ['model.layers.0', 'model.layers.1'],
        levels,
        tolerance,
        traffic: (_, level) => (level === plain ? 2 : 1),
        evaluate: async (choice) => -(await lossWith(Object.fromEntries(choice))),
      })
    const loose = await search(0.5)
    expect([...loose.choice.values()]).toEqual([levels[1], levels[1]])
    expect(-loose.found).toBe(await lossWith({ 'model.layers.*': { x, w, dy } }))
    const strict = await search(0)
    expect(strict.found).toBeGreaterThanOrEqual(strict.widest)
    expect(-strict.widest).toBe(await lossWith({}))
  })
})
