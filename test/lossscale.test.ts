// The factor of the loss in backward: how it follows from overflows, and that training is what it would be without it.
import { describe, expect, it, vi } from 'vitest'
import {
  type DynamicLossScale,
  LlamaForCausalLM,
  LossScale,
  type LossScaling,
  type Param,
  type RecipeChange,
  type RecipeName,
  recipe,
  recipes,
  Tensor,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { eachInFolder } from './folders.ts'
import { devices, present } from './harness.ts'
import { Training } from './training.ts'
import { sentence, smallLlama } from './values.ts'

const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })
let folder = ''
eachInFolder((path) => {
  folder = path
})

class Run extends Training {
  constructor(which: RecipeName | RecipeChange, options: Partial<TrainerOptions> = {}, device: 'cpu' | 'cuda' = 'cpu') {
    const model = new LlamaForCausalLM(smallLlama, { recipe: which, seed: 1, device })
    super(model, new Trainer(model, { data, batch: 4, steps: 4, optimizer: { lr: 0.01 }, ...options }))
  }
  /** Losses, norms and scales of all steps, and a digest of what they made. */
  async all() {
    const [losses, norms, scales]: number[][] = [[], [], []]
    for await (const { loss, gradNorm, lossScale } of this.trainer.run()) {
      losses?.push(loss)
      norms?.push(gradNorm)
      scales?.push(lossScale ?? 1)
    }
    return { losses, norms, scales, bits: await this.bits() }
  }
  /** Has one parameter's gradient overflow while `when()` says so. */
  spoil(when: () => boolean): void {
    const [param] = this.model.parameters('*layers.0.*qkv*') as [Param]
    const { complete } = param
    param.complete = () => {
      if (when() && param.grad) {
        const values = new Float32Array(param.grad.numel).fill(Number.POSITIVE_INFINITY)
        const spoilt = Tensor.from(values, param.grad.shape, { format: 'bf16', device: param.grad.device })
        native.add_into(param.grad.handle, spoilt.handle)
        spoilt.dispose()
      }
      complete.call(param)
    }
  }
}

describe('the scale', () => {
  it('is halved by an overflow and doubled by 2000 steps without one, as Micikevicius et al. have it', () => {
    const scale = new LossScale('dynamic')
    expect(scale.value).toBe(65_536)
    scale.update(true, 0)
    expect(scale.value).toBe(32_768)
    for (let step = 1; step < 2000; step++) scale.update(false, step)
    expect(scale.value).toBe(32_768)
    scale.update(false, 2000)
    expect(scale.value).toBe(65_536)
    for (let step = 2001; step < 4000; step++) scale.update(false, step)
    scale.update(true, 3999)
    expect(scale.value).toBe(32_768)
    for (let step = 4000; step < 5999; step++) scale.update(false, step)
    expect(scale.value).toBe(32_768)
  })

  it.each([
    [8192, 8192],
    [4096, 4096],
  ])('of 8192 with a minimum of %d falls to %d', (least, expected) => {
    const scale = new LossScale({ initial: 8192, minimum: [[0, least]] })
    expect(scale.falls(0)).toBe(least < 8192)
    scale.update(true, 0)
    expect(scale.value).toBe(expected)
  })

  it('rises with its minimum, as Mellempudi et al. have it', () => {
    const scale = new LossScale(recipes['mellempudi-e5m2'].lossScale)
    for (let i = 0; i < 6; i++) scale.update(true, 39_999)
    expect(scale.value).toBe(1024)
    scale.update(true, 40_000)
    expect(scale.value).toBe(8192)
    scale.update(true, 149_999)
    expect(scale.value).toBe(8192)
    scale.update(false, 150_000)
    expect(scale.value).toBe(32_768)
    expect([scale.falls(150_000), scale.falls(149_999)]).toEqual([false, true])
  })

  it('stays where it is a number, and ends at 2^100', () => {
    const fixed = new LossScale(10_000)
    for (const overflow of [true, false, true]) fixed.update(overflow, 1)
    expect([fixed.value, fixed.falls(1)]).toEqual([10_000, false])
    const growing = new LossScale({ initial: 2 ** 99, interval: 1 })
    for (let step = 1; step < 5; step++) growing.update(false, step)
    expect(growing.value).toBe(2 ** 100)
  })

  it.each<[unknown, RegExp]>([
    ['Dynamic', /lossScale: lossScale is "Dynamic" and must be 'none', 'dynamic', a number, or an object/],
    [0, /initial is 0 and must be from 2\^-100 to 2\^100/],
    [{ growth: 0.5 }, /growth is 0.5 and must be a number of at least 1/],
    [{ interval: 0 }, /interval is 0 and must be an integer of at least 1/],
    [{ backoff: 0 }, /backoff is 0 and must be above 0 and at most 1/],
    [
      {
        minimum: [
          [5, 2],
          [5, 4],
        ],
      },
      /minimum is \[\[5,2\],\[5,4\]\] and must be a list of \[steps, least\]/,
    ],
    [[], /lossScale is \[\] and must be 'none', 'dynamic', a number, or an object/],
    [Number.NaN, /initial is NaN and must be from/],
    [{ backoff: '0.5' }, /backoff is "0.5" and must be above 0 and at most 1/],
    [{ minimum: [null] }, /minimum is \[null\] and must be a list of \[steps, least\]/],
    [{ least: 3 }, /least is "unknown" and must be one of initial, growth/],
  ])('refuses %j', (scaling, message) => {
    expect(() => new LossScale(scaling as DynamicLossScale)).toThrow(message)
    expect(() => recipe({ base: 'bf16', lossScale: scaling as LossScaling })).toThrow(message)
  })

  it('is the whole model’s', () => {
    const layers = { 'model.layers.0': { lossScale: 'dynamic' } as object }
    expect(() => recipe({ base: 'bf16', layers })).toThrow(/lossScale is the whole model's/)
  })
})

describe('why there is a master', () => {
  const one = (format: 'f16' | 'f16/t' | 'f32', value: number) => Tensor.from([value], [1, 1], { format })
  it('f16 rounds 1 + 2^-11 to 1; 8 steps of 2^-12 make 1.001953125 with a master in f32, and nothing without', async () => {
    using rounded = one('f16', 1 + 2 ** -11)
    expect((await rounded.read())[0]).toBe(1)
    using p = one('f16/t', 1)
    using alone = one('f16/t', 1)
    using master = one('f32', 1)
    using g = one('f32', -1)
    using m = one('f32', 0)
    const numbers = [null, 2 ** -12, 0, 1, 0, 0, 'nearest', 0] as const
    for (let i = 0; i < 8; i++) {
      native.sgd([p.handle], [master.handle], null, [g.handle], [m.handle], ...numbers)
      native.sgd([alone.handle], null, null, [g.handle], [m.handle], ...numbers)
    }
    expect((await master.read())[0]).toBe(1.001953125)
    expect((await p.read())[0]).toBe(1.001953125)
    expect((await alone.read())[0]).toBe(1)
  })
})

describe.each(devices)('training on %s', (device) => {
  const test = it.skipIf(!present(device))

  test.each<[RecipeName, Partial<TrainerOptions>]>([
    ['fp32', {}],
    ['bf16', { accumulate: 3 }],
    ['bf16', { optimizerInBackward: true }],
    ['coat', { accumulate: 2 }],
    ['fp8-lm-o2', { recompute: 'layer' }],
  ])('%s with %j: a power of two changes no bit, clipped or not', async (which, more) => {
    for (const clip of [0, 0.5]) {
      using plain = new Run(which, { ...more, clip, lossScale: 'none' }, device)
      using scaled = new Run(which, { ...more, clip, lossScale: 2 ** 16 }, device)
      const [expected, found] = [await plain.all(), await scaled.all()]
      expect(found).toEqual({ ...expected, scales: [65_536, 65_536, 65_536, 65_536] })
    }
  })

  test('the rows that have one take it', async () => {
    for (const which of ['micikevicius-bf16', 'micikevicius-f16', 'mellempudi-e5m2'] as const) {
      using scaled = new Run(which, {}, device)
      using plain = new Run(which, { lossScale: 'none' }, device)
      expect([scaled.trainer.lossScale?.value, plain.trainer.lossScale]).toEqual([65_536, null])
      const same = (await scaled.all()).bits === (await plain.all()).bits
      // what half precision and e5m2 flush without it is there with it
      expect(same, which).toBe(which === 'micikevicius-bf16')
    }
  })

  test.each(['micikevicius-f16', 'mellempudi-e5m2'] as const)(
    '%s: gradients beyond the range of their format skip steps until the scale fits, and again when it has grown',
    async (which) => {
      const fits = async (scale: number) => {
        using run = new Run(which, { lossScale: scale }, device)
        return !(await run.trainer.step()).skipped
      }
      let most = 2 ** 16
      while (await fits(2 * most)) most *= 2
      expect(most).toBeLessThan(2 ** 24)
      using run = new Run(which, { steps: 5, lossScale: { initial: 8 * most, interval: 1 } }, device)
      const before = await run.bits()
      const seen: [skipped: boolean, scale: number][] = []
      for await (const { skipped, lossScale = 0 } of run.trainer.run()) {
        seen.push([skipped, lossScale / most])
        if (seen.length === 3) expect(await run.bits()).toBe(before)
      }
      expect(seen.slice(0, 4)).toEqual([
        [true, 8],
        [true, 4],
        [true, 2],
        [false, 1],
      ])
      expect(seen.slice(4).some(([skipped, scale]) => skipped && scale >= 2)).toBe(true)
      expect(seen.filter(([skipped]) => !skipped)).toHaveLength(5)
      expect(run.trainer.skipsInARow).toBe(0)
    },
  )

  test('one that is no power of two changes roundings alone', async () => {
    using plain = new Run('fp32', {}, device)
    using scaled = new Run('fp32', { lossScale: 10_000 }, device)
    const [expected, found] = [await plain.all(), await scaled.all()]
    found.losses?.forEach((loss, i) => {
      expect(loss / (expected.losses?.[i] as number)).toBeCloseTo(1, 4)
      expect((found.norms?.[i] as number) / (expected.norms?.[i] as number)).toBeCloseTo(1, 3)
    })
    expect(found.bits).not.toBe(expected.bits)
  })

  test.each<RecipeName>(['bf16', 'fp8-lm-o2'])(
    '%s: a step that overflows is skipped and halves the scale',
    async (which) => {
      using run = new Run(which, { lossScale: { initial: 1024, interval: 2 } }, device)
      let overflows = false
      run.spoil(() => overflows)
      const step = async () => {
        const { skipped, lossScale } = await run.trainer.step()
        return [skipped, lossScale]
      }
      expect(await step()).toEqual([false, 1024])
      overflows = true
      const before = await run.bits()
      expect([await step(), await step()]).toEqual([
        [true, 1024],
        [true, 512],
      ])
      expect(await run.bits()).toBe(before)
      overflows = false
      expect([await step(), await step(), await step()]).toEqual([
        [false, 256],
        [false, 256],
        [false, 512],
      ])
      expect(run.trainer.skippedSteps).toBe(2)
    },
  )

  test('without a scale, what quantizing saturates skips nothing, unless its scale is a power of two', async () => {
    // the largest code of the power of two for the largest number is infinite
    for (const scale of ['current', 'pow2'] as const) {
      using run = new Run({ base: 'fp8-lm-o2', scale }, {}, device)
      run.spoil(() => true)
      const { skipped, infs, lossScale } = await run.trainer.step()
      expect([skipped, infs > 0, lossScale]).toEqual([scale === 'pow2', true, undefined])
    }
  })

  test('steps as a graph have it, too, and are recorded again when it changes', async () => {
    vi.stubEnv('COAT_GRAPH', 'cpu')
    try {
      const options = { steps: 12, clip: 0.5, lossScale: { initial: 4096, interval: 5 } }
      using plain = new Run('coat', options, device)
      using graph = new Run('coat', { ...options, graph: true }, device)
      const [expected, found] = [await plain.all(), await graph.all()]
      expect(found).toEqual(expected)
      expect(found.scales?.at(-1)).toBe(16_384)
    } finally {
      vi.unstubAllEnvs()
    }
  })

  test('skips count towards maxSkips once the scale is 1', async () => {
    using run = new Run('bf16', { lossScale: { initial: 8 }, maxSkips: 2 }, device)
    run.spoil(() => true)
    for (let i = 0; i < 4; i++) expect((await run.trainer.step()).skipped).toBe(true)
    expect(run.trainer.skipsInARow).toBe(1)
    await expect(run.trainer.step()).rejects.toThrow(/not finite in 2 steps in a row/)
  })

  test('goes on from a checkpoint bit for bit', async () => {
    const lossScale = { initial: 64, interval: 3 }
    const options = { steps: 8, lossScale }
    const spoilt = (run: Run) => run.spoil(() => run.trainer.batches === 1)
    using whole = new Run('bf16', options, device)
    spoilt(whole)
    const expected = await whole.all()
    expect(expected.scales).toEqual([64, 64, 32, 32, 32, 64, 64, 64, 128])
    using first = new Run('bf16', { ...options, checkpoint: { dir: folder, every: 2 } }, device)
    spoilt(first)
    for await (const { step } of first.trainer.run()) if (step === 2) break
    using second = new Run('bf16', options, device)
    await second.trainer.resume(folder)
    expect(second.trainer.lossScale?.state()).toEqual({ scale: 32, clean: 1 })
    const rest = await second.all()
    expect(rest.scales).toEqual(expected.scales?.slice(3))
    expect(rest.bits).toBe(expected.bits)
    using other = new Run('bf16', { steps: 8, lossScale: { ...lossScale, interval: 4 } }, device)
    await expect(other.trainer.resume(folder)).rejects.toThrow(/lossScale.interval is 3 in the checkpoint and 4 here/)
  })
})
