// Models in emulated arithmetic: gradients, what stays between steps, chance that a resumed run has again.
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import {
  type Arithmetic,
  type Emulation,
  LlamaForCausalLM,
  ops,
  type Param,
  type RecipeChange,
  recipes,
  sgd,
  Tape,
  Tensor,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { sentence, smallLlama } from './values.ts'

const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })
const config = { ...smallLlama, model_type: 'qwen2' as const } // with biases
const exact: Emulation = { operand: 'e8m23', sum: 'e8m23', chunk: 0, lossScale: 1, update: null }
const emulating = (change: Partial<Emulation>, from: Emulation = exact): RecipeChange => ({
  base: 'fp32',
  emulated: { ...from, ...change },
})

async function losses(recipe: RecipeChange, options: Partial<TrainerOptions> = {}): Promise<number[]> {
  using model = new LlamaForCausalLM(config, { recipe, seed: 1 })
  using trainer = new Trainer(model, { data, batch: 2, steps: 8, optimizer: { lr: 0.003 }, ...options })
  const list: number[] = []
  for await (const { loss } of trainer.run()) list.push(loss)
  return list
}

/** Gradients of all matrices and biases of blocks after one backward of the loss times a factor. */
async function gradients(recipe: RecipeChange, factor = 1): Promise<Map<string, Float32Array>> {
  using model = new LlamaForCausalLM(config, { recipe, seed: 1 })
  const { ids, targets } = data.batch(0, 4)
  using tape = new Tape()
  using loss = tape.record(() => model.loss(Tensor.from(ids, [128]), Tensor.from(targets, [128]), 32, factor / 128))
  tape.backward(loss)
  const read = async ({ name, grad }: Param) => [name, (await (grad as Tensor).read()) as Float32Array] as const
  return new Map(await Promise.all(model.parameters('*layers*proj*').map(read)))
}

const multiples = (values: Float32Array, step: number) => values.every((x) => Number.isInteger(x / step))

describe('linear layers', () => {
  it('with all bits of f32 they are those of fp32, biases too', async () => {
    const [emulated, plain] = [await gradients(emulating({})), await gradients({ base: 'fp32' })]
    expect([...plain.keys()].filter((name) => name.endsWith('bias')).length).toBeGreaterThan(0)
    for (const [name, values] of plain) {
      const size = Math.hypot(...values)
      expect(size, name).toBeGreaterThan(0)
      const difference = Math.hypot(...values.map((x, i) => x - (emulated.get(name)?.[i] as number)))
      expect(difference / size, name).toBeLessThan(1e-5)
    }
    const [ours, theirs] = [await losses(emulating({})), await losses({ base: 'fp32' })]
    for (const [i, loss] of ours.entries()) expect(Math.abs(loss / (theirs[i] as number) - 1)).toBeLessThan(1e-4)
  })

  it('a loss scale in products is one of the loss', async () => {
    const [inside, outside] = [
      await gradients(emulating({ lossScale: 1024 }, recipes['wang-152'].emulated)),
      await gradients(emulating({ lossScale: 1 }, recipes['wang-152'].emulated), 1024),
    ]
    for (const [name, values] of outside) expect(inside.get(name), name).toEqual(values.map((x) => x / 1024))
    const without = await gradients(emulating({ lossScale: 1 }, recipes['wang-152'].emulated))
    const zeros = (of: Map<string, Float32Array>) =>
      [...of.values()].flatMap((x) => [...x]).filter((x) => x === 0).length
    expect(zeros(without)).toBeGreaterThan(2 * zeros(inside))
  })

  it('operands and results are numbers of the arithmetic', async () => {
    const grads = await gradients(emulating({ operand: 'q4.6', sum: 'q8.8' }))
    for (const [name, values] of grads) expect(multiples(values, 2 ** -8), name).toBe(true)
    using x = Tensor.from([0.3, 1.7, -2.2, 9], [2, 2])
    using w = Tensor.from([1, 0, 0, 1], [2, 2])
    using y = ops.linear(x, w, null, {
      ...{ x: 'f32', w: 'f32', dy: 'f32', y: 'f32', dx: 'f32', dw: 'f32' },
      emulated: { ...exact, operand: 'q4.2', seed: 0 },
    })
    expect([...(await y.read())]).toEqual([0.25, 1.75, -2.25, 7.75])
  })

  it('operands and results have words of their own', async () => {
    const number = (word: Arithmetic, scale = 1) => {
      const grid = async (values: Float32Array) => {
        using x = Tensor.from(
          values.map((value) => value * scale),
          [values.length],
        )
        using rounded = ops.roundTo(x, word)
        return [...((await rounded.read()) as Float32Array)].every((y, i) => y === (values[i] as number) * scale)
      }
      return grid
    }
    // of Mellempudi et al. gradients of weights are e5m2, and not multiples of a power of two that is not tiny
    for (const [name, values] of await gradients({ base: 'mellempudi-e5m2' }, 1024)) {
      expect(await number('e5m2')(values), name).toBe(true)
      expect(new Set(values).size, name).toBeGreaterThan(8)
    }
    for (const [name, values] of await gradients({ base: 'micikevicius-f16' }, 1024)) {
      expect(await number('e5m10')(values), name).toBe(true)
      expect(await number('e5m9')(values), name).toBe(false)
    }
    using x = Tensor.from([0.3, 1.7, -2.2, 9], [2, 2])
    using w = Tensor.from([0.3, 0, 0, 1], [2, 2])
    using y = ops.linear(x, w, null, {
      ...{ x: 'f32', w: 'f32', dy: 'f32', y: 'f32', dx: 'f32', dw: 'f32' },
      emulated: {
        ...exact,
        operand: { x: 'q5.1', w: 'q4.2', dy: 'q4.4' },
        sum: 'f32',
        result: { y: 'q5.1', dx: 'q4.4' },
        seed: 0,
      },
    })
    // 0.5 and -2 times 0.25, to even ones
    expect([...(await y.read())]).toEqual([0, 1.5, -0.5, 9])
  })

  it('in half precision what is too small for it vanishes without a loss scale, and comes back with one', async () => {
    const share = async (recipe: RecipeChange, factor: number) => {
      const all = [...(await gradients(recipe, factor)).values()].flatMap((values) => [...values])
      return all.filter((x) => x === 0).length / all.length
    }
    const base = 'micikevicius-f16'
    const plain = await share({ base: 'fp32' }, 1)
    expect(await share({ base }, 2 ** -14)).toBeGreaterThan(plain + 0.5)
    expect(await share({ base }, 2 ** 16)).toBeLessThan(plain + 0.01)
    const [half, exactly] = [await gradients({ base }, 2 ** 16), await gradients({ base: 'fp32' }, 1)]
    for (const [name, values] of exactly) {
      const off = values.map((x, i) => x - (half.get(name)?.[i] as number) / 2 ** 16)
      expect(Math.hypot(...off) / Math.hypot(...values), name).toBeLessThan(2 ** -9)
    }
  })

  it('a block may have no emulation, or its own', () => {
    const layers = { 'model.layers.0': { emulated: null }, 'model.layers.1': { emulated: recipes.e8m3.emulated } }
    using model = new LlamaForCausalLM(config, { recipe: { base: 'wang-152', layers }, seed: 1 })
    const [first, second] = model.layers
    expect(first?.mlp.input.formats.emulated).toBeUndefined()
    expect(second?.mlp.input.formats.emulated).toMatchObject({ operand: 'e8m3' })
    expect(first?.mlp.input.weight.arithmetic).toBeNull()
    expect(model.embedding.arithmetic).toBe('e6m9/sr')
  })
})

describe('updates', () => {
  it.each([
    ['sgd', sgd({ lr: 0.1, weightDecay: 0.01 })],
    ['adamw', { lr: 0.01 }],
  ] as const)('%s leaves matrices, and the momentum of sgd, on the grid; norms are f32', async (rule, optimizer) => {
    using model = new LlamaForCausalLM(config, { recipe: emulating({ update: 'q4.8/sr' }), seed: 1 })
    using trainer = new Trainer(model, { data, batch: 2, steps: 4, optimizer })
    const values = ({ tensor }: Param) => tensor.read() as Promise<Float32Array>
    for (const param of model.parameters('*proj.weight'))
      expect(multiples(await values(param), 2 ** -8), param.name).toBe(true)
    const before = await Promise.all(model.parameters().map(values))
    await trainer.step()
    await trainer.step()
    for (const [i, param] of model.parameters().entries()) {
      expect(await values(param)).not.toEqual(before[i])
      const matrix = param.tensor.shape.length === 2
      expect(multiples(await values(param), 2 ** -8), param.name).toBe(matrix)
      const moment = (await trainer.optimizer.stateOf(param).m.read()) as Float32Array
      expect(multiples(moment, 2 ** -8), param.name).toBe(matrix && rule === 'sgd')
    }
    const param = model.parameters('*proj.weight')[0] as Param
    param.write(new Float32Array(param.tensor.numel).fill(0.3))
    for (const x of await values(param)) expect([76 / 256, 77 / 256]).toContain(x)
  })

  it('rounded to nearest small ones vanish, at random they arrive in the mean (Gupta et al.)', async () => {
    const run = (update: Arithmetic) => losses(emulating({ update }), { steps: 60, optimizer: { lr: 0.0015 } })
    const fall = (list: number[]) => (list[0] as number) - (list.at(-1) as number)
    const [plain, near, random] = [
      await losses({ base: 'fp32' }, { steps: 60, optimizer: { lr: 0.0015 } }),
      await run('q4.8'),
      await run('q4.8/sr'),
    ]
    expect(fall(plain)).toBeGreaterThan(2)
    expect(fall(random)).toBeGreaterThan(0.8 * fall(plain))
    expect(fall(near)).toBeLessThan(0.2 * fall(plain))
  })

  it('master weights of Mellempudi et al. are half precision, those of Micikevicius et al. are f32', async () => {
    for (const base of ['mellempudi-e5m2', 'micikevicius-f16'] as const) {
      using model = new LlamaForCausalLM(config, { recipe: base, seed: 1 })
      using trainer = new Trainer(model, { data, batch: 2, steps: 2, optimizer: { lr: 0.01 } })
      await trainer.step()
      for (const { tensor, name } of model.parameters('*proj.weight')) {
        using halves = ops.roundTo(tensor, 'e5m10/inf')
        const same = `${await halves.read()}` === `${await tensor.read()}`
        expect(same, name).toBe(base === 'mellempudi-e5m2')
      }
    }
  })

  it('what is no loss scale, and chunks of sums in f32, are refused by name', () => {
    using a = Tensor.from([1, 2], [1, 2])
    for (const lossScale of [0, 3, 0.5, -2, 2 ** 65, Number.NaN, '2', null] as number[]) {
      const rule = /: lossScale is .* and must be a power of two of at least 1, and at most 2\^64/
      expect(() => ops.roundTo(a, 'e5m2', { lossScale })).toThrow(rule)
      expect(() => ops.matmulEmulated(a, a, null, { sum: 'e5m2', chunk: 0 }, { lossScale })).toThrow(rule)
    }
    for (const chunk of [1, 64, -1, 0.5, '0'] as number[])
      expect(() => ops.matmulEmulated(a, a, null, { sum: 'f32', chunk })).toThrow(
        /matmul_emulated: chunk is .* and must be an integer of at least 0, and 0 with sum 'f32'/,
      )
  })

  it.each(['micikevicius-f16', 'mellempudi-e5m2'] as const)('%s learns what fp32 does', async (base) => {
    const [ours, plain] = [await losses({ base }, { steps: 40 }), await losses({ base: 'fp32' }, { steps: 40 })]
    expect(plain.at(-1)).toBeLessThan(3.5)
    for (const [i, loss] of ours.entries()) expect(Math.abs(loss - (plain[i] as number))).toBeLessThan(0.05)
  })

  it.each(['wang-152', 'gupta-fixed'] as const)('%s learns with sgd nearly what fp32 does', async (base) => {
    const options = { steps: 40, optimizer: sgd({ lr: 0.3 }) }
    const [ours, plain] = [await losses({ base }, options), await losses({ base: 'fp32' }, options)]
    expect(plain[0] as number).toBeGreaterThan(5)
    expect(plain.at(-1)).toBeLessThan(3)
    expect(Math.abs((ours.at(-1) as number) - (plain.at(-1) as number))).toBeLessThan(0.1)
  })

  it.each(['wang-152', 'gupta-fixed', 'mellempudi-e5m2'] as const)('%s resumed goes on bit for bit', async (base) => {
    const dir = mkdtempSync(join(tmpdir(), 'coat-emulate-'))
    const options = { steps: 6, optimizer: sgd({ lr: 0.1 }) }
    try {
      const whole = await losses({ base }, options)
      await losses({ base }, { ...options, steps: 3, checkpoint: { dir, every: 3 } })
      using model = new LlamaForCausalLM(config, { recipe: base, seed: 1 })
      using trainer = new Trainer(model, { data, batch: 2, ...options })
      expect(await trainer.resume(dir)).toMatchObject({ step: 3 })
      const rest: number[] = []
      for await (const { loss } of trainer.run()) rest.push(loss)
      expect(rest).toEqual(whole.slice(3))
    } finally {
      rmSync(dir, { recursive: true })
    }
  })
})
