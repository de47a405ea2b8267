// Updates within backward, and gradients that add up over micro-batches.
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterEach, describe, expect, it, vi } from 'vitest'
import {
  adamw,
  type DeviceName,
  LlamaForCausalLM,
  memory,
  type Recipe,
  type Recompute,
  recipes,
  type StepMetrics,
  scope,
  sgd,
  Tape,
  Tensor,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { devices, present } from './harness.ts'
import { Training } from './training.ts'
import { sentence, smallLlama } from './values.ts'

const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })
const untied = { ...smallLlama, tie_word_embeddings: false }
const within = { optimizerInBackward: true }

class Run extends Training {
  constructor(recipe: Recipe, device: DeviceName, options: Partial<TrainerOptions>, config = smallLlama) {
    const model = new LlamaForCausalLM(config, { recipe, seed: 1, device })
    super(model, new Trainer(model, { data, batch: 4, steps: 4, optimizer: { lr: 0.01 }, ...options }))
  }
  async values(): Promise<Float32Array[]> {
    return Promise.all(this.model.parameters().map(async ({ tensor }) => (await tensor.read()) as Float32Array))
  }
}

const length = (values: Iterable<number>) => Math.sqrt([...values].reduce((sum, value) => sum + value * value, 0))
const moved = (before: Float32Array[], after: Float32Array[]) =>
  before.map((values, p) => values.map((value, i) => (after[p]?.[i] as number) - value))

describe.each(devices)('on %s', (device) => {
  const test = it.skipIf(!present(device))
  afterEach(() => native.checkGuards())

  test.each([
    ['fp32', recipes.fp32, smallLlama, {}],
    ['bf16', recipes.bf16, untied, {}],
    ['coat', recipes.coat, smallLlama, {}],
    ['coat, layers run again', recipes.coat, untied, { recompute: 'layer' }],
  ] as const)(
    '%s without clipping: the bits of an update after backward, with fewer gradients at once',
    async (_, recipe, config, more) => {
      using after = new Run(recipe, device, { clip: 0 }, config)
      using during = new Run(recipe, device, { clip: 0, ...within, ...more }, config)
      const [expected, found] = [await after.steps(), await during.steps()]
      expect(found.map(({ loss }) => loss)).toEqual(expected.map(({ loss }) => loss))
      found.forEach(({ gradNorm }, i) => {
        expect(gradNorm / (expected[i]?.gradNorm as number)).toBeCloseTo(1, 6)
      })
      expect(await during.bits()).toBe(await after.bits())
      const grads = (metrics: StepMetrics[]) => metrics.at(-1)?.memory.peak.grad as number
      expect(grads(found)).toBeLessThan(0.7 * grads(expected))
      expect(memory().live.grad).toBe(0)
    },
  )

  test('random rounding repeats itself, and differs from parameter to parameter', async () => {
    const run = async () => {
      using during = new Run(recipes['coat-bf16'], device, within)
      const losses = (await during.steps()).map(({ loss }) => loss)
      return { losses, bits: await during.bits() }
    }
    expect(await run()).toEqual(await run())
  })

  test('the norm of the step before gives the clip factor', async () => {
    const optimizer = (lr: number) => sgd({ lr, momentum: 0 })
    using half = new Run(recipes.fp32, device, { ...within, clip: 3, optimizer: optimizer(0.5) })
    using plain = new Run(recipes.fp32, device, { clip: 0, optimizer: optimizer(0.25) })
    half.trainer.lastNorm = 6
    const { gradNorm } = await half.trainer.step()
    await plain.trainer.step()
    expect(await half.values()).toEqual(await plain.values())
    expect(half.trainer.lastNorm).toBe(gradNorm)
    // a small norm changes nothing
    using same = new Run(recipes.fp32, device, { ...within, clip: 3, optimizer: optimizer(0.25) })
    same.trainer.lastNorm = 2
    await same.trainer.step()
    expect(await same.bits()).toBe(await plain.bits())
  })

  test('the first step clips each gradient by its own norm', async () => {
    using run = new Run(recipes.fp32, device, { ...within, clip: 0.125, optimizer: sgd({ lr: 1, momentum: 0 }) })
    using plain = new Run(recipes.fp32, device, { clip: 0, optimizer: sgd({ lr: 1, momentum: 0 }) })
    const before = await run.values()
    const metrics = await run.trainer.step()
    const expected = await plain.trainer.step()
    expect(metrics.gradNorm).toBeCloseTo(expected.gradNorm, 4)
    const [steps, whole] = [moved(before, await run.values()), moved(before, await plain.values())]
    let clipped = 0
    steps.forEach((step, p) => {
      const norm = length(whole[p] as Float32Array)
      if (norm > 0.125) clipped += 1
      expect(length(step)).toBeCloseTo(Math.min(norm, 0.125), 4)
    })
    expect(clipped).toBeGreaterThan(0)
  })

  test('where a gradient is not finite its parameter stays, and the step counts as skipped', async () => {
    using run = new Run(recipes.coat, device, { ...within, maxSkips: 2 })
    await run.trainer.step()
    const [param] = run.model.parameters('*layers.0.*qkv*')
    const bad = param ?? expect.fail('no such parameter')
    const accumulate = bad.accumulate.bind(bad)
    bad.accumulate = (gradient: Tensor) => {
      accumulate(gradient)
      native.write((bad.grad as Tensor).handle, new Uint8Array(bad.grad?.bytes ?? 0).fill(0xff))
    }
    const { lastNorm } = run.trainer
    const before = await run.values()
    const metrics = await run.trainer.step()
    expect(metrics).toMatchObject({ skipped: true, step: 1, skippedSteps: 1 })
    expect(run.trainer.lastNorm).toBe(lastNorm)
    const steps = moved(before, await run.values())
    run.model.parameters().forEach((one, p) => {
      expect(length(steps[p] as Float32Array) === 0, one.name).toBe(one === bad)
    })
    await expect(run.trainer.step()).rejects.toThrow(
      new RegExp(`not finite in 2 steps in a row \\(maxSkips\\), in: ${bad.name}$`),
    )
  })

  test('an error in backward leaves no update behind', async () => {
    using run = new Run(recipes.coat, device, within)
    const [param] = run.model.parameters('*layers.0.*qkv*')
    const broken = param ?? expect.fail('no such parameter')
    const { accumulate } = broken
    broken.accumulate = () => {
      throw new Error('broken')
    }
    await expect(run.trainer.step()).rejects.toThrow('broken')
    for (const { onComplete, grad } of run.model.parameters()) expect([onComplete, grad]).toEqual([null, null])
    broken.accumulate = accumulate
    expect((await run.trainer.step()).skipped).toBe(false)
  })

  test('goes on from a checkpoint bit for bit', async () => {
    const dir = mkdtempSync(join(tmpdir(), 'coat-update-'))
    try {
      const optimizer = adamw({ lr: 0.01 })
      using whole = new Run(recipes['coat-bf16'], device, { ...within, optimizer })
      const losses = (await whole.steps()).map(({ loss }) => loss)
      using first = new Run(recipes['coat-bf16'], device, { ...within, optimizer, checkpoint: { dir, every: 2 } })
      for await (const { step } of first.trainer.run()) if (step === 2) break
      using second = new Run(recipes['coat-bf16'], device, { ...within, optimizer })
      expect((await second.trainer.resume(dir)).step).toBe(2)
      expect(second.trainer.lastNorm).toBeGreaterThan(0)
      expect((await second.steps()).map(({ loss }) => loss)).toEqual(losses.slice(2))
      expect(await second.bits()).toBe(await whole.bits())
      using after = new Run(recipes['coat-bf16'], device, { optimizer })
      await expect(after.trainer.resume(dir)).rejects.toThrow(
        'optimizerInBackward is true in the checkpoint and absent here',
      )
    } finally {
      rmSync(dir, { recursive: true })
    }
  })

  test('needs one micro-batch a step', () => {
    using model = new LlamaForCausalLM(smallLlama, { recipe: 'fp32', device })
    expect(() => new Trainer(model, { data, batch: 1, steps: 1, ...within, accumulate: 4 })).toThrow(
      'accumulate is 4 and must be 1 with optimizerInBackward',
    )
  })

  test('weights that are kept quantized for the micro-batches of a step: fewer passes, the same bits, nothing left', async () => {
    const run = async (cacheWeights: boolean, recompute: Recompute) => {
      const [straight, turned] = [vi.spyOn(native, 'convert'), vi.spyOn(native, 'convert_transposed')]
      using it = new Run(recipes.coat, device, { accumulate: 3, cacheWeights, recompute })
      const weights = new Set(it.model.parameters().map(({ tensor }) => tensor.handle))
      const of = ({ mock }: { mock: { calls: unknown[][] } }) =>
        mock.calls.filter(([handle, , format]) => weights.has(handle as number) && format === 'e4m3/t').length
      await it.trainer.step()
      const live = memory().live.temp
      const passes = [of(straight), of(turned)]
      vi.restoreAllMocks()
      await it.steps()
      return { passes, live, bits: await it.bits() }
    }
    const [layers, linears] = [2, 4]
    const remade = await run(false, 'flow')
    const kept = await run(true, 'flow')
    const again = await run(true, 'layer')
    expect(remade.passes).toEqual([3 * layers * linears, 3 * layers * linears])
    // transposes are made of the kept twin
    expect(kept.passes).toEqual([layers * linears, 0])
    expect(again.passes).toEqual([layers * linears, 0])
    for (const { bits, live } of [kept, again]) expect([bits, live]).toEqual([remade.bits, remade.live])
  })

  test.each(['f32', 'bf16'] as const)('gradients of micro-batches add up in %s', async (dw) => {
    using model = new LlamaForCausalLM(smallLlama, { recipe: { ...recipes.coat, dw }, seed: 1, device })
    const back = (index: number) => {
      using tape = new Tape()
      scope(() => {
        const { ids, targets, sequence } = data.batch(index, 2)
        const given = [ids, targets].map((values) => Tensor.from(values, [values.length], { device }))
        tape.backward(tape.record(() => model.loss(...(given as [Tensor, Tensor]), sequence, 1 / 64)))
      })
    }
    const gradients = () =>
      Promise.all(model.parameters().map(async ({ grad }) => (await (grad as Tensor).read()) as Float32Array))
    const apart: Float32Array[][] = []
    for (const i of [0, 1, 2]) {
      back(i)
      apart.push(await gradients())
      for (const param of model.parameters()) param.dropGrad()
    }
    for (const i of [0, 1, 2]) back(i)
    const together = await gradients()
    model.parameters().forEach(({ name, grad }, p) => {
      expect(grad?.format, name).toBe(dw)
      const expected = (together[p] as Float32Array).map((_, i) =>
        apart.reduce((sum, one) => sum + (one[p]?.[i] as number), 0),
      )
      const error = length((together[p] as Float32Array).map((value, i) => value - (expected[i] as number)))
      expect(error / length(expected), name).toBeLessThan(dw === 'f32' ? 1e-6 : 2 ** -8)
    })
  })
})
