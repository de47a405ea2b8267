// Parameters on a grid: rounding at random, counters, and a model that learns with three bytes a parameter.
import { describe, expect, it } from 'vitest'
import {
  build,
  evaluate,
  GridDescent,
  Linear,
  LlamaForCausalLM,
  morrisEstimate,
  scope,
  Tape,
  Tensor,
  TextDataset,
} from '../lib/index.ts'
import { smallLlama as config, sentence } from './values.ts'

it("Morris's estimate: 0 at 0, and 7 for base 2 at 3", () => {
  expect(morrisEstimate(0, 1.1)).toBe(0)
  expect(morrisEstimate(3, 2)).toBe(7)
})

describe('one matrix', () => {
  const make = async (values: number[], options: Partial<Parameters<typeof GridDescent.of>[1]> = {}) => {
    const layer = new Linear(build({ recipe: 'fp32' }), 'layer', { inputs: values.length, outputs: 1 })
    layer.weight.write(Float32Array.from(values))
    return { layer, grid: await GridDescent.of(layer, { lr: 0.5, ...options }) }
  }
  const step = async ({ layer, grid }: Awaited<ReturnType<typeof make>>, gradient: Float32Array) => {
    using tensor = Tensor.from(gradient, [1, gradient.length])
    layer.weight.accumulate(tensor)
    await grid.step()
    layer.weight.dropGrad()
  }
  const n = 20000

  it('is rounded up with the probability of what is left over, and saturates at the ends of q2.13', async () => {
    const { layer, grid } = await make([...new Array(n).fill(0.3), 4, -9])
    const { codes } = grid.stateOf(layer.weight)
    // 0.3 is 2457.6 steps of the grid
    expect(new Set(codes.subarray(0, n))).toEqual(new Set([2457, 2458]))
    const up = codes.subarray(0, n).filter((code) => code === 2458).length / n
    expect(Math.abs(up - 0.6)).toBeLessThan(4 * Math.sqrt(0.24 / n))
    expect([...codes.subarray(n)]).toEqual([32767, -32768])
    expect(await layer.weight.tensor.read()).toEqual(Float32Array.from(codes, (code) => code / 8192))
    expect(grid.bytes).toBe(3 * (n + 2))
    layer.dispose()
  })

  it('counts changes without bias, and gradients of 0 not at all', async () => {
    const made = await make(new Array(n).fill(0), { lr: 2 ** -13 })
    const gradient = new Float32Array(n).fill(1)
    gradient.fill(0, n / 2)
    const events = 40
    for (let i = 0; i < events; i++) await step(made, gradient)
    const { counters } = made.grid.stateOf(made.layer.weight)
    const estimates = Array.from(counters.subarray(0, n / 2), (count) => morrisEstimate(count, 1.1))
    const mean = estimates.reduce((sum, x) => sum + x, 0) / estimates.length
    // a counter's variance is about (base - 1) / 2 events squared
    expect(Math.abs(mean - events)).toBeLessThan((4 * events * Math.sqrt(0.05)) / Math.sqrt(n / 2))
    expect(Math.max(...counters.subarray(n / 2))).toBe(0)
    made.layer.dispose()
  })

  it('takes the rate by the root of 1 + the estimate, and draws the same again from the same seed', async () => {
    const run = async (seed: number) => {
      const made = await make([0], { lr: 0.25, base: 2, seed })
      const values: number[] = []
      for (let i = 0; i < 3; i++) {
        const before = made.grid.stateOf(made.layer.weight)
        await step(made, Float32Array.of(1))
        const after = made.grid.stateOf(made.layer.weight)
        const rate = 0.25 / Math.sqrt(1 + morrisEstimate(before.counters[0] as number, 2))
        const moved = ((before.codes[0] as number) - (after.codes[0] as number)) / 8192
        expect(Math.abs(moved - rate)).toBeLessThan(2 ** -13)
        // base 2: up always from 0
        if (i === 0) expect(after.counters[0]).toBe(1)
        values.push(after.codes[0] as number, after.counters[0] as number)
      }
      made.layer.dispose()
      return values
    }
    expect(await run(3)).toEqual(await run(3))
  })

  it('refuses numbers that make no grid', async () => {
    await expect(make([0], { lr: 0 })).rejects.toThrow(/^GridDescent: lr is 0 and must be a finite number above 0$/)
    await expect(make([0], { base: 1 })).rejects.toThrow(/^GridDescent: base is 1 and must be/)
    await expect(make([0], { digits: 16 })).rejects.toThrow(/^GridDescent: digits is 16 and must be an integer from 0/)
    await expect(make([0], { seed: -1 })).rejects.toThrow(/^GridDescent: seed is -1 and must be an integer from 0/)
  })
})

it('a small Llama learns with three bytes a parameter', async () => {
  const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })
  using model = new LlamaForCausalLM(config, { recipe: 'fp32', seed: 1 })
  const grid = await GridDescent.of(model, { lr: 0.3 })
  const parameters = model.parameters()
  const count = parameters.reduce((sum, { tensor }) => sum + tensor.numel, 0)
  expect(grid.bytes).toBe(3 * count)
  const of = (values: Int32Array) => Tensor.from(values, [values.length])
  const held = () => evaluate(model, data.validation(4, 4))
  const { loss: first } = await held()
  for (let i = 0; i < 60; i++) {
    const { ids, targets } = data.batch(i, 4)
    using tape = new Tape()
    using loss = scope(() => tape.record(() => model.loss(of(ids), of(targets), 32, 1 / ids.length))).keep()
    tape.backward(loss)
    await grid.step()
    for (const param of parameters) param.dropGrad()
  }
  expect((await held()).loss).toBeLessThan(0.6 * first)
  for (const { tensor, name } of parameters)
    expect(
      ((await tensor.read()) as Float32Array).every((value) => Number.isInteger(value * 8192)),
      name,
    ).toBe(true)
})
