// Graphs: ops that are recorded give the bits of ops that run, in memory that nothing else uses; steps of a trainer likewise.
import { createHash } from 'node:crypto'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it, vi } from 'vitest'
import {
  type Batch,
  cosine,
  type Dataset,
  type DeviceName,
  LlamaForCausalLM,
  lion,
  memory,
  type Recipe,
  type RecipeChange,
  recipe as recipeOf,
  recipes,
  type StepMetrics,
  Tensor,
  TextDataset,
  Trainer,
  type TrainerOptions,
} from '../lib/index.ts'
import { CoatError, type DeviceKind, native } from '../lib/native.ts'
import { bytesOf, devices, moved, own, present, read, tensor } from './harness.ts'
import { sentence, smallLlama } from './values.ts'

const before = process.env.COAT_GRAPH
beforeAll(() => {
  process.env.COAT_GRAPH = 'cpu'
})
afterAll(() => {
  if (before === undefined) delete process.env.COAT_GRAPH
  else process.env.COAT_GRAPH = before
})

/** COAT_SYNC waits after every op of a GPU, which cannot be recorded. */
const recordable = (device: DeviceKind) =>
  present(device) && (device === 'cpu' || ['', '0'].includes(process.env.COAT_SYNC ?? ''))

/** What f does as a graph, and what it returns. */
function recorded<T>(device: DeviceKind, f: () => T): { graph: number; result: T } {
  native.beginGraph(device, 0)
  let graph = 0
  let result: T
  let done = false
  try {
    result = f()
    done = true
  } finally {
    graph = native.endGraph(done)
  }
  return { graph, result }
}

describe.each(devices)('ops on %s', (device) => {
  const test = it.skipIf(!recordable(device))
  const given = (values: number[]) => moved(tensor('f32', [values.length], values), device)

  test('are not run when they are recorded, and read what is there when the graph runs', async () => {
    const [x, sum] = [await given([1, 2, 3]), await given([0, 0, 0])]
    const { graph } = recorded(device, () => native.add_into(sum, x))
    expect(await read(sum)).toEqual([0, 0, 0])
    native.runGraph(graph)
    native.write(x, Float32Array.of(10, 20, 30))
    native.runGraph(graph)
    native.runGraph(graph)
    expect(await read(sum)).toEqual([21, 42, 63])
    native.freeGraph(graph)
    expect(() => native.runGraph(graph)).toThrow(`graph: graph ${graph} is none of the 0 there are`)
  })

  test('a run counts as a change of what it changes', async () => {
    const [x, y] = [await given([1]), await given([0])]
    const { graph } = recorded(device, () => native.add_into(y, x))
    const version = native.version(y)
    native.runGraph(graph)
    expect([native.version(y), native.version(x)]).toEqual([version + 1, native.version(x)])
    native.freeGraph(graph)
  })

  test('fill is recorded like an op', async () => {
    const { graph, result } = recorded(device, () => {
      const y = native.make('f32', [5], device, 'temp')
      native.fill(y, 0.5)
      return own(y)
    })
    native.runGraph(graph)
    expect(await read(result)).toEqual(new Array(5).fill(0.5))
    native.freeGraph(graph)
  })

  test('work in memory that others neither get nor write, and share it among themselves', async () => {
    const N = 3000
    const x = await moved(
      tensor(
        'f32',
        [N],
        Array.from({ length: N }, (_, i) => Math.sin(i)),
      ),
      device,
    )
    // chains of tensors that die at once, and results that stay; run like this and recorded
    const chain = (scale: number) => {
      const factor = native.make('f32', [1], device, 'temp')
      native.fill(factor, scale)
      let y = native.convert(x, null, 'f32')
      for (let i = 0; i < 20; i++) {
        const [sum] = native.add(y, x, 'f32', null)
        native.multiply_into(sum, factor)
        native.free(y)
        y = sum
      }
      native.free(factor)
      const z = native.convert(y, null, 'e4m3/g16')
      native.free(y)
      return own(z)
    }
    const expected = await Promise.all([0.5, 0.75].map((scale) => bytesOf(chain(scale))))
    const graphs = [0.5, 0.75].map((scale) => recorded(device, () => chain(scale)))
    for (let round = 0; round < 3; round++) {
      for (const { graph } of graphs) native.runGraph(graph)
      // what is made meanwhile has other memory
      const others = Array.from({ length: 30 }, () => native.make('f32', [N], device, 'temp'))
      for (const other of others) native.fill(other, Number.MAX_VALUE)
      expect(await Promise.all(graphs.map(({ result }) => bytesOf(result)))).toEqual(expected)
      for (const other of others) native.free(other)
    }
    for (const { graph } of graphs) native.freeGraph(graph)
    native.checkGuards()
  })

  test('what a graph uses stays in memory though its handle is freed', async () => {
    const x = native.make('f32', [1000], device, 'temp')
    native.fill(x, 3)
    const sum = own(native.make('f32', [1000], device, 'temp'))
    native.fill(sum, 0)
    const { graph } = recorded(device, () => {
      native.add_into(sum, x)
      const y = native.convert(x, null, 'f32')
      native.free(x) // of before, while it is recorded
      native.add_into(sum, y)
      native.free(y)
    })
    const others = Array.from({ length: 30 }, () => own(native.make('f32', [1000], device, 'temp')))
    for (const other of others) native.fill(other, 7)
    native.runGraph(graph)
    expect(await read(sum)).toEqual(new Array(1000).fill(6))
    native.freeGraph(graph)
  })

  test('what cannot be recorded is refused, and then nothing is left', async () => {
    const x = await given([1, 2])
    const tensors = memory().tensors
    const refused = (f: () => unknown) => expect(() => recorded(device, f))
    const rule = `a graph of device "${device}" is being recorded, and`
    refused(() => native.write(x, Float32Array.of(1, 2))).toThrow(
      `write: ${rule} values that come from the host cannot be part of it`,
    )
    refused(() => native.read(x)).toThrow(`read: ${rule} a read cannot be part of it`)
    refused(() => native.sync(device)).toThrow(`sync: ${rule} a wait cannot be part of it`)
    refused(() => native.beginGraph(device, 0)).toThrow(
      'graph: a graph is being recorded; it must end before another begins',
    )
    refused(() => {
      native.free(native.convert(x, null, 'bf16'))
      throw new Error('of the caller')
    }).toThrow('of the caller')
    expect(() => native.endGraph(true)).toThrow('graph: no graph is being recorded')
    expect(await read(x)).toEqual([1, 2])
    expect(memory().tensors).toBe(tensors)
  })
})

const data = new TextDataset(sentence.repeat(40), { sequence: 32, seed: 7 })
const steps = 7

class Run implements Disposable {
  readonly model: LlamaForCausalLM
  readonly trainer: Trainer
  constructor(recipe: Recipe | RecipeChange, device: DeviceName, options: Partial<TrainerOptions>) {
    this.model = new LlamaForCausalLM(smallLlama, { recipe, seed: 1, device })
    this.trainer = new Trainer(this.model, { data, batch: 2, steps, optimizer: { lr: 0.01 }, ...options })
  }
  /** Metrics that do not depend on time or memory. */
  async rest(): Promise<object[]> {
    const list: object[] = []
    for await (const metrics of this.trainer.run()) list.push(lasting(metrics))
    return list
  }
  async bits(): Promise<string> {
    const hash = createHash('sha256')
    for (const param of this.model.parameters()) {
      const { master, lost, m, v } = this.trainer.optimizer.stateOf(param)
      for (const one of [param.tensor, master, lost, m, v]) if (one) hash.update(await one.readBytes())
    }
    for (const { history, scale } of this.model.delayedScales())
      for (const one of [history, scale]) hash.update(await one.readBytes())
    return hash.digest('hex')
  }
  [Symbol.dispose](): void {
    this.trainer.dispose()
    this.model.dispose()
  }
}

function lasting({ time: _, tokensPerSecond: __, memory: ___, ...metrics }: StepMetrics) {
  return metrics
}

describe.each(devices)('steps on %s', (device) => {
  const test = it.skipIf(!recordable(device))
  // each run of a graph is seen, so that no test passes without any
  const runs = vi.spyOn(native, 'runGraph')
  const warnings = vi.spyOn(process, 'emitWarning')
  beforeEach(() => {
    for (const spy of [runs, warnings]) spy.mockClear()
  })
  afterEach(() => {
    expect(warnings.mock.calls.filter(([text]) => `${text}`.startsWith('training:'))).toEqual([])
    native.checkGuards()
  })

  /** The same run without and with graphs; how many steps are graphs. */
  async function same(
    recipe: Recipe | RecipeChange,
    options: Partial<TrainerOptions>,
    use: (run: Run) => Promise<unknown> = (run) => run.rest(),
  ): Promise<number> {
    runs.mockClear()
    const tensors = memory().tensors
    const results: unknown[] = []
    for (const graph of [false, true]) {
      using run = new Run(recipe, device, { ...options, graph })
      results.push({ rest: await use(run), bits: await run.bits() })
      if (!graph) expect(runs).not.toHaveBeenCalled()
    }
    expect(results[1]).toEqual(results[0])
    expect(memory().tensors).toBe(tensors)
    return runs.mock.calls.length
  }

  const schedule = cosine({ warmup: 3 })
  test.each(Object.entries(recipes))('%s: the bits of steps that run op by op', async (_, recipe) => {
    // mu is of sums that no graph makes
    const options = { schedule, accumulate: 2, mu: 'none', validate: { every: 2, sequences: 4 } } as const
    expect(await same(recipe, options)).toBe(steps - 2)
  })

  const delayed = { base: 'coat', scale: { history: 4, pick: 'max', margin: 0 } } as const
  test.each<[string, Recipe | RecipeChange, Partial<TrainerOptions>]>([
    ['nothing that is made again', recipes.coat, { recompute: 'none' }],
    ['layers that run again', recipes.coat, { recompute: 'layer' }],
    ['weights that stay quantized', recipes.coat, { cacheWeights: true, accumulate: 3 }],
    ['random rounding', recipes['coat-bf16'], { accumulate: 2 }],
    ['lion', recipes.coat, { optimizer: lion({ lr: 0.001 }) }],
    ['measured updates', recipes['coat-bf16'], { measureUpdates: 2 }],
    ['operands of two kinds', { base: 'coat', w: 'bf16', qkvGrad: 'split' }, { accumulate: 2 }],
    ['scales of steps before', recipeOf(delayed), { schedule, accumulate: 2 }],
    ['no clipping', recipes.bf16, { clip: 0 }],
  ])('%s', async (_, recipe, options) => {
    expect(await same(recipe, options)).toBe(steps - 2)
  })

  test('tokens that count differ from step to step, and documents begin elsewhere', async () => {
    const [T, B] = [32, 2]
    const varying: Dataset = {
      sequence: T,
      batch: (index, size): Batch => {
        const batch = data.batch(index, size)
        batch.targets.fill(-100, 0, 1 + ((index * 13) % 40))
        const cut = 1 + ((index * 7) % (T - 1))
        const starts = Int32Array.from({ length: B * T }, (_, m) => (m % T < cut ? 0 : cut))
        return { ...batch, starts }
      },
      validation: () => [],
    }
    expect(await same(recipes.coat, { data: varying, accumulate: 2 })).toBe(steps - 2)
  })

  test('steps of another shape run op by op, and a new shape that stays has a graph of its own', async () => {
    const shapes = [2, 2, 2, 1, 2, 1, 1, 1, 1, 2]
    const varying: Dataset = {
      sequence: 32,
      batch: (index) => data.batch(index, shapes[index] as number),
      validation: () => [],
    }
    // graphs in steps 3, 5, 8 and 9
    expect(await same(recipes.coat, { data: varying, steps: shapes.length })).toBe(4)
  })

  test('spikes are skipped', async () => {
    const use = async (run: Run) => {
      const metrics: StepMetrics[] = []
      for (let i = 0; i < 8; i++) {
        // weights that grow make a spike, and weights that are as before end it
        const [embedding] = run.model.parameters()
        if (i === 5 || i === 6) {
          const values = (await embedding?.tensor.read()) as Float32Array
          embedding?.write(values.map((x) => (i === 5 ? 8 * x : x / 8)))
        }
        metrics.push(await run.trainer.step())
      }
      expect(metrics.map(({ skipped }) => skipped)).toEqual([0, 0, 0, 0, 0, 1, 0, 0].map(Boolean))
      return metrics.map(lasting)
    }
    for (const recipe of [recipes.coat, recipeOf(delayed)])
      expect(await same(recipe, { spike: { sigma: 6, window: 3 }, steps: 20, optimizer: { lr: 0.001 } }, use)).toBe(6)
  })

  test('steps that are not finite are skipped', async () => {
    const use = async (run: Run) => {
      const metrics: StepMetrics[] = []
      const [embedding] = run.model.parameters()
      const values = (await embedding?.tensor.read()) as Float32Array
      for (let i = 0; i < 6; i++) {
        if (i === 3) embedding?.write(values.map(() => Number.NaN))
        if (i === 4) embedding?.write(values)
        metrics.push(await run.trainer.step())
      }
      expect(metrics.map(({ skipped }) => skipped)).toEqual([0, 0, 0, 1, 0, 0].map(Boolean))
      return metrics.map(lasting)
    }
    expect(await same(recipes.coat, {}, use)).toBe(4)
  })

  test('a resumed run goes on with the same bits', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'graph-'))
    try {
      const all: object[][] = []
      for (const graph of [false, true]) {
        const options = { graph, schedule, accumulate: 2, steps: 8 }
        const checkpoint = { dir: join(folder, `${graph}`), every: 4 }
        // the last checkpoint makes way for the one in the middle
        const saved = (saved: string, step: number) => void (step > 4 && rmSync(saved, { recursive: true }))
        using whole = new Run(delayed, device, { ...options, checkpoint, callbacks: { saved } })
        const expected = { rest: await whole.rest(), bits: await whole.bits() }
        using second = new Run(delayed, device, options)
        // with a graph of its own, which is of no use after it
        for (let i = 0; i < 3; i++) await second.trainer.step()
        await second.trainer.resume(checkpoint.dir)
        expect(second.trainer.optimizer.steps).toBe(4)
        expect({ rest: await second.rest(), bits: await second.bits() }).toEqual({
          rest: expected.rest.slice(4),
          bits: expected.bits,
        })
        all.push([expected])
      }
      expect(all[1]).toEqual(all[0])
      expect(runs).toHaveBeenCalledTimes(6 + 1 + 2)
    } finally {
      rmSync(folder, { recursive: true, force: true })
    }
  })

  test('two models take turns, and one ends before the other', async () => {
    const use = async (run: Run) => {
      const seen: object[] = []
      const options = run.trainer.options.graph ? { graph: true } : {}
      const other = new Run(recipes.bf16, device, options)
      for (let i = 0; i < 4; i++) {
        seen.push(lasting(await run.trainer.step()), lasting(await other.trainer.step()))
      }
      other[Symbol.dispose]()
      for (let i = 0; i < 2; i++) seen.push(lasting(await run.trainer.step()))
      return seen
    }
    expect(await same(recipes.coat, {}, use)).toBe(4 + 2)
  })

  test('memory: gradients stay, peaks are those of a step that runs op by op', async () => {
    const use = async (graph: boolean) => {
      using run = new Run(recipes.coat, device, { graph, steps: 5 })
      const seen: StepMetrics[] = []
      for await (const metrics of run.trainer.run()) seen.push(metrics)
      return { ledger: run.trainer.ledger, memory: seen.at(-1)?.memory, parts: seen.length }
    }
    const [plain, graph] = [await use(false), await use(true)]
    expect(graph.ledger).toEqual(plain.ledger)
    expect(plain.memory?.live.grad).toBe(0)
    expect(graph.memory?.live.grad).toBe(plain.memory?.peak.grad)
    for (const purpose of ['saved', 'grad', 'param', 'state'] as const)
      expect(graph.memory?.peak[purpose]).toBe(plain.memory?.peak[purpose])
  })

  test('the parts of a step are named as it is queued', async () => {
    const parts: string[] = []
    using run = new Run(recipes.coat, device, { graph: true, phase: (part) => parts.push(part) })
    for (let i = 0; i < 3; i++) {
      parts.length = 0
      await run.trainer.step()
    }
    expect(parts).toEqual(['forward', 'update', 'end'])
  })
})

describe.each(devices)('without graphs on %s', (device) => {
  it.skipIf(!recordable(device))('a step that cannot be recorded goes on op by op, after a warning', async () => {
    const warnings = vi.spyOn(process, 'emitWarning').mockImplementation(() => {})
    try {
      const run = async (graph: boolean) => {
        using one = new Run(recipes.coat, device, { graph })
        const { loss } = one.model
        // values of the host, which might be other ones in every step; what was made before them is of no use
        one.model.loss = (...given) => {
          const made = loss.apply(one.model, given)
          using _ = Tensor.from([1, 2], [2], { device })
          return made
        }
        return { rest: await one.rest(), bits: await one.bits() }
      }
      const tensors = memory().tensors
      const expected = await run(false)
      expect(warnings).not.toHaveBeenCalled()
      expect(await run(true)).toEqual(expected)
      expect(warnings.mock.calls).toEqual([
        [
          `training: steps run without a graph: write: a graph of device "${device}" is being recorded, and values that come from the host cannot be part of it`,
          { code: 'COAT_GRAPH' },
        ],
      ])
      expect(memory().tensors).toBe(tensors)
    } finally {
      warnings.mockRestore()
    }
  })
})

it('is refused where there are none, and with what differs within a step', () => {
  using model = new LlamaForCausalLM(smallLlama, { recipe: 'fp32' })
  const make = (options: object) => () => new Trainer(model, { data, batch: 2, steps, graph: true, ...options })
  expect(make({ optimizerInBackward: true })).toThrow(
    'Trainer: graph cannot be had with optimizerInBackward, whose learning rate differs from step to step within what is recorded',
  )
  delete process.env.COAT_GRAPH
  try {
    expect(make({})).toThrow(
      "Trainer: graph is true and must be false on device 'cpu', which has no graphs; those of 'cuda' do",
    )
    expect(make({})).toThrow(CoatError)
  } finally {
    process.env.COAT_GRAPH = 'cpu'
  }
})
