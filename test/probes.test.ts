// Probes against hand calculations, and against searches that do not know their formulas; and that a training is the same to the
// bit with and without them.
import { describe, expect, it, vi } from 'vitest'
import {
  accumulated,
  build,
  codeShares,
  type DeviceName,
  GradientDiversity,
  Linear,
  LlamaForCausalLM,
  modelSharpness,
  OperandProbe,
  type OperandShares,
  ops,
  type RecipeName,
  recipes,
  saturatedShare,
  sharpness,
  Tensor,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { devices, moved, own, present, read, tensor } from './harness.ts'
import { Training } from './training.ts'
import { smallLlama as config, Random, sentence } from './values.ts'

const ones = (count: number) => new Array<number>(count).fill(1)

describe('sums in narrow accumulators', () => {
  it.each([
    // what the tensor cores keep of FP8 sums
    [32768, { bits: 14, rounding: 'truncate' }, 16384],
    [32768, { bits: 14, rounding: 'truncate', chunk: 128 }, 32768],
    // FP16 of 6 and 9 bits
    [4096, { bits: 10 }, 1024],
    [4096, { bits: 10, chunk: 64 }, 4096],
    [5, { bits: 2 }, 4],
    [7, { bits: 3 }, 7],
  ] as const)('%d ones with %j are %d', (count, accumulator, expected) => {
    expect(accumulated(ones(count), accumulator)).toBe(expected)
  })

  it.each([
    [[1.25, 0], { bits: 2 }, 1],
    [[1.75, 0], { bits: 2 }, 2],
    [[-1.75, 0], { bits: 2 }, -2],
    [[-1.75, 0], { bits: 2, rounding: 'truncate' }, -1.5],
    [[0, -0], { bits: 2 }, 0],
    [[1, Number.POSITIVE_INFINITY], { bits: 9 }, Number.POSITIVE_INFINITY],
  ] as const)('%j with %j is %d', (terms, accumulator, expected) => {
    expect(accumulated(terms, accumulator)).toBe(expected)
  })

  it('of 24 bits is FP32', () => {
    const random = new Random(3)
    const terms = Array.from({ length: 999 }, () => Math.fround(random.typical()))
    expect(accumulated(terms, { bits: 24 })).toBe(terms.reduce((sum, x) => Math.fround(sum + x), 0))
  })

  // arXiv 2412.19437, section 3.3: sums leave the tensor cores every 128 of K
  for (const device of devices)
    it.skipIf(!present(device))(`products on ${device} go on beyond the 16384 where 14 bits end`, async () => {
      const scale = tensor('f32', [1], [1])
      for (const [left, right] of [
        ['e4m3/t', 'e4m3/t'],
        ['e4m3/r', 'e4m3/r'],
        ['e4m3/g128', 'e4m3/b128'],
        ['e4m3/g128p2', 'e4m3/b128p2'],
      ] as const) {
        const a = await moved(tensor(left, [1, 32768], ones(32768), left === 'e4m3/t' ? scale : undefined), device)
        const b = await moved(tensor(right, [1, 32768], ones(32768), left === 'e4m3/t' ? scale : undefined), device)
        const [y] = own(native.matmul_nt(a, b, null, 'f32', null))
        expect(((await read(y))[0] as number) / 32768, left).toBeCloseTo(1, 5)
      }
    })
})

describe('sharpness', () => {
  it('of two equal logits that move by a tenth is 6.2010 %', () => {
    expect(sharpness([0, 0], 0, 0.1)).toBeCloseTo(6.201, 4)
    expect(sharpness([0, 0], 1, 0.1)).toBeCloseTo(6.201, 4)
    expect(sharpness([3, -2, 700], 1, 0)).toBe(0)
  })

  it('is the largest of all corners of the box', () => {
    const random = new Random(5)
    const loss = (logits: number[], target: number) =>
      Math.log(logits.reduce((sum, y) => sum + Math.exp(y), 0)) - (logits[target] as number)
    for (let trial = 0; trial < 20; trial++) {
      const logits = Array.from({ length: 6 }, () => 3 * random.normal())
      const [target, epsilon] = [random.integer(6), 0.2 * random.uniform()]
      let most = 0
      for (let corner = 0; corner < 2 ** 6; corner++) {
        const moved = logits.map((y, i) => y + (corner & (1 << i) ? epsilon : -epsilon) * (Math.abs(y) + 1))
        most = Math.max(most, loss(moved, target))
      }
      const before = loss(logits, target)
      expect(sharpness(logits, target, epsilon)).toBeCloseTo((100 * (most - before)) / (1 + before), 9)
    }
  })

  it('refuses what is not there', () => {
    expect(() => sharpness([0, 0], 2, 0.1)).toThrow('sharpness: target is 2 and must be below 2')
    expect(() => sharpness([0, 0], 0, Number.NaN)).toThrow(
      'sharpness: epsilon is NaN and must be a number of at least 0',
    )
    expect(() => accumulated([1], { bits: 25 })).toThrow('accumulated: bits is 25 and must be an integer from 2 to 24')
    expect(() => accumulated([1], { bits: 9, chunk: 0 })).toThrow('accumulated: chunk is 0 and must be at least 1')
  })
})

const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })

class Run extends Training {
  constructor(device: DeviceName, recipe: RecipeName, options: Partial<TrainerOptions> = {}) {
    const model = new LlamaForCausalLM(config, { recipe, device, seed: 1 })
    super(model, new Trainer(model, { data, batch: 4, steps: 6, optimizer: { lr: 0.01 }, ...options }))
  }
}

async function plainLosses(device: DeviceName, recipe: RecipeName): Promise<number[]> {
  using run = new Run(device, recipe)
  return await run.losses()
}

describe.each(devices)('sharpness of a model on %s', (device) => {
  const test = it.skipIf(!present(device))
  test('of a model reads the last position that counts of each sequence, packed documents too', async () => {
    using model = new LlamaForCausalLM(config, { recipe: 'fp32', device, seed: 1 })
    const { ids, targets } = data.batch(0, 2)
    const late = targets.slice()
    late.fill(-100, 60) // of the second sequence the last four
    const starts = new Int32Array(64)
    starts.fill(10, 10, 32)
    for (const batch of [
      { ids, targets, sequence: 32 },
      { ids, targets: late, sequence: 32, starts },
    ]) {
      const last = [31, batch.targets === late ? 59 : 63]
      using logits = await rowsOf(model, batch)
      const values = (await logits.read()) as Float32Array
      const predictions = last.map((at) => ({
        logits: values.subarray(256 * at, 256 * (at + 1)),
        target: targets[at] as number,
      }))
      const each = predictions.map(({ logits, target }) => sharpness(logits, target, 0.01))
      expect(await modelSharpness(model, batch, 0.01)).toBe(((each[0] as number) + (each[1] as number)) / 2)
    }
    await expect(modelSharpness(model, { ids, targets: targets.map(() => -100), sequence: 32 }, 0.01)).rejects.toThrow(
      /^modelSharpness: batch is without targets and must be one that takes part in the loss$/,
    )
    await expect(modelSharpness(model, { ids, targets, sequence: 32 }, -1)).rejects.toThrow(
      /^sharpness: epsilon is -1 and/,
    )
  })

  test.each<RecipeName>(['fp32', 'coat', 'te-delayed'])('%s trains the same with it', async (recipe) => {
    const values: number[] = []
    let run: Run | null = null
    const callbacks = {
      step: async () => {
        values.push(await modelSharpness((run as Run).model, data.validation(2, 2)[0] ?? expect.fail(), 0.01))
      },
    }
    using probed = new Run(device, recipe, { callbacks })
    run = probed
    expect(await probed.losses()).toEqual(await plainLosses(device, recipe))
    expect(values).toHaveLength(6)
    for (const value of values) expect(value).toBeGreaterThan(0)
  })
})

async function rowsOf(model: LlamaForCausalLM, batch: { ids: Int32Array; sequence: number; starts?: Int32Array }) {
  const { device } = model
  using ids = Tensor.from(batch.ids, [batch.ids.length], { device })
  const starts = batch.starts ? ops.documentStarts(batch.starts, batch.sequence, device) : null
  const logits = model.forward(ids, batch.sequence, starts)
  starts?.dispose()
  return logits
}

describe.each(devices)('shares of codes on %s', (device) => {
  const test = it.skipIf(!present(device))
  test.each([
    ['e4m3/t', 448, 2 ** -10],
    ['e5m2/t', 57344, 2 ** -17],
  ] as const)('%s: the largest and what becomes 0', async (format, most, half) => {
    // with a largest value of the format's own the scale is 1; ties to even go to 0
    const values = [most, -most, 0.96 * most, 1, 0, half, -half, 1.1 * half]
    using tensor = Tensor.from(values, [1, 8], { device })
    const quantized = tensor.as(format)
    const shares = await codeShares(quantized, tensor)
    expect(shares).toEqual({ largest: format === 'e4m3/t' ? 2 / 8 : 3 / 8, zeros: 3 / 8, underflow: 2 / 7 })
    expect(await codeShares(quantized)).toEqual({ ...shares, underflow: null })
    if (format === 'e4m3/t') expect(await saturatedShare(quantized)).toBe(shares.largest)
  })

  test.each(['e4m3/g16', 'e4m3/g128', 'e4m3/b128', 'e4m3/x128', 'e5m2/x128'] as const)(
    '%s: its scales are no codes',
    async (format) => {
      const random = new Random(1)
      using tensor = Tensor.from(
        Float32Array.from({ length: 300 }, () => random.typical()),
        [3, 100],
      )
      using decoded = Tensor.from((await tensor.as(format).read()) as Float32Array, [3, 100], { device })
      const values = (await tensor.read()) as Float32Array
      const after = (await decoded.read()) as Float32Array
      const zeros = after.filter((x) => x === 0).length
      const lost = values.filter((x, i) => x !== 0 && after[i] === 0).length
      const shares = await codeShares(tensor.as(format), tensor)
      expect(shares.zeros).toBe(zeros / 300)
      expect(shares.underflow).toBe(lost / values.filter((x) => x !== 0).length)
      expect(shares.largest).toBeGreaterThan(0)
    },
  )

  test('refuses what has no FP8 codes, and values of another size', async () => {
    using tensor = Tensor.from([1, 2, 3, 4], [1, 4], { device })
    using other = Tensor.from([1, 2], [1, 2], { device })
    await expect(codeShares(tensor)).rejects.toThrow(/^codeShares: tensor f32\[1, 4\] must be of e4m3 or e5m2/)
    await expect(codeShares(tensor.as('e4m3/t'), other)).rejects.toThrow(/with as many values$/)
  })
})

describe.each(devices)('operands of a training on %s', (device) => {
  const test = it.skipIf(!present(device))
  async function probed(recipe: RecipeName, match?: string, options: Partial<TrainerOptions> = {}) {
    using probe = new OperandProbe(match)
    const taken: OperandShares[][] = []
    const callbacks = {
      step: async ({ step }: { step: number }) => {
        taken.push(await probe.take())
        probe.active = step % 2 === 0
      },
    }
    using run = new Run(device, recipe, { callbacks, ...options })
    return { losses: await run.losses(), taken }
  }

  test.each<RecipeName>(['coat', 'te-current', 'te-delayed', 'te-block', 'fp8-lm-o3'])(
    '%s trains the same with them counted',
    async (recipe) => {
      const { losses, taken } = await probed(recipe)
      expect(losses).toEqual(await plainLosses(device, recipe))
      // four weights a layer; steps 1, 3 and 5
      expect(taken.map(({ length }) => length)).toEqual([24, 0, 24, 0, 24, 0])
      for (const { name, operand, largest, underflow, zeros } of taken[0] ?? []) {
        expect(name).toMatch(/^model\.layers\.[01]\..*(qkv|o|gate_up|down)_proj\.weight$/)
        // elsewhere scales are powers of two, or bounds
        if (/^te-(current|delayed)$/.test(recipe)) expect(largest, `${name} ${operand}`).toBeGreaterThan(0)
        expect(largest).toBeLessThan(0.5)
        expect(zeros).toBeLessThan(1)
        // values of weights are there, unless the parameter is FP8 itself; coat's norms write FP8 alone
        if (operand === 'w' && recipe !== 'fp8-lm-o3') expect(underflow).toBeLessThan(0.2)
        if (operand === 'w' && recipe === 'fp8-lm-o3') expect(underflow).toBeNull()
        if (operand === 'x' && name.includes('qkv')) expect(underflow === null).toBe(/coat|te-current/.test(recipe))
      }
      const operands = new Set((taken[0] ?? []).map(({ operand, format }) => `${operand} ${format}`))
      const { x, w, dy } = recipes[recipe]
      expect(operands).toEqual(new Set([`x ${x}`, `w ${w}`, `dy ${dy}`]))
    },
  )

  test('picks weights by name, counts all micro-batches, and nothing of recipes without FP8 or after its end', async () => {
    const { taken } = await probed('coat', '*.0.*.qkv_proj.*', { steps: 1, batch: 2, accumulate: 2 })
    expect(taken[0]?.map(({ name, operand }) => [name, operand])).toEqual(
      ['x', 'w', 'dy'].map((operand) => ['model.layers.0.self_attn.qkv_proj.weight', operand]),
    )
    expect((await probed('bf16', '*', { steps: 1 })).taken).toEqual([[]])
    const probe = new OperandProbe()
    probe[Symbol.dispose]()
    using run = new Run(device, 'coat', { steps: 1 })
    await run.losses()
    expect(await probe.take()).toEqual([])
  })

  test('has a step that would be a graph run op by op', async () => {
    const warnings = vi.spyOn(process, 'emitWarning').mockImplementation(() => {})
    vi.stubEnv('COAT_GRAPH', 'cpu')
    try {
      const { losses, taken } = await probed('coat', '*', { graph: true })
      expect(losses).toEqual(await plainLosses(device, 'coat'))
      expect(taken.map(({ length }) => length)).toEqual([24, 0, 24, 0, 24, 0])
      expect(String(warnings.mock.calls[0]?.[0])).toMatch(
        /^training: steps run without a graph: read: a graph of device/,
      )
    } finally {
      vi.unstubAllEnvs()
      warnings.mockRestore()
    }
  })

  test('shows what a delayed scale saturates', async () => {
    using probe = new OperandProbe('*.0.*.qkv_proj.*')
    using run = new Run(device, 'te-delayed', { optimizer: { lr: 0.3 }, clip: 0 })
    const largest: number[] = []
    for (let step = 0; step < 3; step++) {
      await run.trainer.step()
      largest.push((await probe.take()).find(({ operand }) => operand === 'w')?.largest ?? expect.fail())
    }
    // the first scale is measured; weights then outgrow those of the step before
    expect(largest[0]).toBeLessThan(0.01)
    expect(largest[1]).toBeGreaterThan(0.2)
  })
})

describe.each(devices)('gradient diversity on %s', (device) => {
  const test = it.skipIf(!present(device))
  /** Diversity of gradients that are given to the model's one matrix. */
  async function diversity(gradients: number[][], scales: number[] = []): Promise<number> {
    using layer = new Linear(build({ recipe: 'fp32', device }), 'layer', { inputs: 3, outputs: 1, bias: true })
    using probe = new GradientDiversity(layer)
    for (const [i, values] of gradients.entries()) {
      const scale = scales[i] ?? 1
      using gradient = Tensor.from(
        values.map((x) => x * scale),
        [1, 3],
        { device },
      )
      layer.weight.accumulate(gradient)
      probe.sample()
      layer.weight.dropGrad()
      await probe.settle(true, scale)
    }
    expect(probe.count).toBe(gradients.length)
    return await probe.take()
  }

  test('two or three orthogonal gradients: 1; three equal ones: 1/3', async () => {
    const [a, b, c] = [
      [2, 0, 0],
      [0, 2, 0],
      [0, 0, 2],
    ]
    expect(await diversity([a, b])).toBeCloseTo(1, 6)
    expect(await diversity([a, b, c])).toBeCloseTo(1, 6)
    expect(await diversity([a, a, a])).toBeCloseTo(1 / 3, 6)
    expect(await diversity([a, [-1, 0, 0]])).toBeCloseTo(5, 5)
    // as a loss scale has them that falls in between
    expect(await diversity([a, [-1, 0, 0]], [65536, 32768])).toBeCloseTo(5, 5)
  })

  test('copies whole gradients before the update, of steps that count, and a training is the same with it', async () => {
    vi.stubEnv('COAT_GRAPH', 'cpu')
    for (const [recipe, graph] of [
      ['fp32', false],
      ['coat', false],
      ['fp8-lm-o2', false],
      ['coat', true],
    ] as const) {
      let probe: GradientDiversity | null = null
      using run = new Run(device, recipe, {
        graph,
        phase: (part) => {
          if (part === 'update') probe?.sample()
        },
        callbacks: {
          // the third step is taken for one that was skipped
          step: ({ step }) => probe?.settle(step !== 3),
        },
      })
      probe = new GradientDiversity(run.model)
      expect(await run.losses()).toEqual(await plainLosses(device, recipe))
      expect(probe.count).toBe(5)
      const value = await probe.take()
      expect(value).toBeGreaterThan(1 / 5)
      expect(value).toBeLessThan(5)
      probe.dispose()
    }
    vi.unstubAllEnvs()
  })

  test('says when gradients are gone', async () => {
    let probe: GradientDiversity | null = null
    using run = new Run(device, 'fp32', {
      optimizerInBackward: true,
      phase: (part) => {
        if (part === 'update') probe?.sample()
      },
    })
    using made = new GradientDiversity(run.model)
    probe = made
    await expect(run.losses()).rejects.toThrow(/has no gradient; it is wanted before the update, without optimizerInB/)
  })
})
