// Scales that follow from the maxima that the optimizer leaves of weights and attention of its result: the same bits as
// measured ones.
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterEach, describe, expect, it, vi } from 'vitest'
import {
  adamw,
  type Device,
  device,
  LlamaForCausalLM,
  lion,
  type Param,
  type RecipeName,
  saveCheckpoint,
  type Tensor,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import type { AnyFormat, Handle } from '../lib/native.gen.ts'
import { type DeviceKind, native } from '../lib/native.ts'
import { Tensor as TensorClass } from '../lib/tensor.ts'
import { bytesOf, devices, moved, own, present, read, tensor } from './harness.ts'
import { Random, sentence, smallLlama, vector } from './values.ts'

afterEach(() => vi.restoreAllMocks())

/** No weight counts as one that FP8 products read: all scales are measured. */
function measureAll(): void {
  vi.spyOn(TensorClass.prototype, 'isOperand', 'get').mockReturnValue(false)
}

interface Given {
  recipe: RecipeName
  device: Device
  optimizerInBackward?: boolean
  seed?: number
}

class Run implements Disposable {
  readonly model: LlamaForCausalLM
  readonly trainer: Trainer
  constructor({ recipe, device, optimizerInBackward = false, seed = 3 }: Given) {
    this.model = new LlamaForCausalLM(smallLlama, { recipe, seed, device })
    const data = new TextDataset(sentence.repeat(20), { sequence: 32, seed: 7 })
    this.trainer = new Trainer(this.model, {
      data,
      batch: 2,
      steps: 20,
      optimizer: adamw({ lr: 0.02 }),
      optimizerInBackward,
    })
  }
  get weights(): Param[] {
    return this.model.parameters('model.layers.*proj.weight')
  }
  async steps(count: number): Promise<(number | boolean)[]> {
    const seen: (number | boolean)[] = []
    for (let i = 0; i < count; i++) {
      const { loss, skipped } = await this.trainer.step()
      seen.push(loss, skipped)
    }
    return seen
  }
  /** Bytes of parameters and moments. */
  async bytes(): Promise<Uint8Array[]> {
    const { optimizer } = this.trainer
    const tensors = optimizer.params.flatMap((param) => [param.tensor, ...Object.values(optimizer.stateOf(param))])
    return await Promise.all(tensors.filter((tensor) => tensor !== null).map((tensor: Tensor) => tensor.readBytes()))
  }
  /** Makes the next step skip: a gradient of one weight is not a number. */
  poison(): void {
    const [param] = this.weights as [Param]
    const accumulate = param.accumulate
    param.accumulate = (gradient) => {
      accumulate.call(param, gradient)
      native.write((param.grad as Tensor).handle, new Uint8Array((param.grad as Tensor).bytes).fill(0xff))
      param.accumulate = accumulate
    }
  }
  /** Changes a weight from outside: the largest of its values is another one then. */
  async edit(): Promise<void> {
    const param = this.weights[2] as Param
    param.write(((await param.tensor.read()) as Float32Array).map((x) => 3 * x))
  }
  [Symbol.dispose](): void {
    this.trainer.dispose()
    this.model.dispose()
  }
}

describe.each(devices)('on %s', (name) => {
  const on = it.skipIf(!present(name))

  /** Steps, one of them skipped, and a change from outside: what was seen, and all bytes at the end. */
  const history = async (given: Omit<Given, 'device'>) => {
    using where = device(name)
    using run = new Run({ ...given, device: where })
    const seen = await run.steps(2)
    run.poison()
    seen.push(...(await run.steps(2)))
    await run.edit()
    seen.push(...(await run.steps(2)))
    return { seen, bytes: await run.bytes() }
  }

  on.each([
    ['coat', false],
    ['coat', true],
    ['coat-bf16', false],
    ['coat-bf16', true],
    ['te-current', false],
    ['te-delayed', false],
  ] as const)(
    '%s, in backward %s: losses and states are those of measured scales',
    async (recipe, optimizerInBackward) => {
      const given = { recipe, optimizerInBackward }
      const { seen, bytes } = await history(given)
      expect(seen.filter((value) => typeof value === 'boolean')).toEqual([false, false, true, false, false, false])
      measureAll()
      expect(await history(given)).toEqual({ seen, bytes })
    },
  )

  on.each(['coat', 'coat-bf16'] as const)(
    '%s: maxima are measured once, and are right after every step',
    async (recipe) => {
      using where = device(name)
      using run = new Run({ recipe, device: where })
      const measures = vi.spyOn(native, 'amax')
      const converts = vi.spyOn(native, 'convert')
      const handles = new Set(run.weights.map(({ tensor }) => tensor.handle))
      /** A step: how many weights op amax read, and how many convert measured. */
      const step = async () => {
        for (const spy of [measures, converts]) spy.mockClear()
        await run.steps(1)
        const read = measures.mock.calls.filter(([x]) => handles.has(x)).length
        const quantized = converts.mock.calls.filter(([x, , y]) => handles.has(x) && y === 'e4m3/t')
        expect(quantized.length).toBeGreaterThanOrEqual(handles.size)
        const measured = quantized.filter(([, scale]) => scale === null).length
        for (const { tensor, name } of run.weights) {
          const known = tensor.knownAmax as Tensor
          expect(await known.readBytes(), name).toEqual(await bytesOf(own(native.amax(tensor.handle))))
        }
        return { read, measured }
      }
      const none = { read: 0, measured: 0 }
      expect(await step()).toEqual({ read: handles.size, measured: handles.size })
      for (let i = 0; i < 2; i++) expect(await step()).toEqual(none)
      run.poison()
      for (let i = 0; i < 2; i++) expect(await step()).toEqual(none)
      await run.edit()
      expect(await step()).toEqual({ read: 1, measured: 1 })
      expect(await step()).toEqual(none)
    },
  )

  on.each(['coat', 'te-current'] as const)(
    '%s: what attention makes is measured by it, with the same bits',
    async (recipe) => {
      const { attention_forward: forward } = native
      const forwards = vi.spyOn(native, 'attention_forward')
      const converts = vi.spyOn(native, 'convert')
      /** A history, and how many results of attention convert measured, of how many that it quantized. */
      const run = async () => {
        for (const spy of [forwards, converts]) spy.mockClear()
        const seen = await history({ recipe })
        const outs = new Set(forwards.mock.results.map(({ value }) => value[0]))
        const quantized = converts.mock.calls.filter(([x, , y]) => outs.has(x) && y === 'e4m3/t')
        expect(quantized.length).toBeGreaterThanOrEqual(outs.size)
        return { seen, measured: quantized.filter(([, scale]) => scale === null).length / outs.size }
      }
      const { seen, measured } = await run()
      expect(measured).toBe(0)
      forwards.mockImplementation((qkv, starts, out, _, ...rest) => forward(qkv, starts, out, null, ...rest))
      expect(await run()).toEqual({ seen, measured: 1 })
    },
  )

  on('a resumed run goes on with the same bits', async () => {
    const dir = mkdtempSync(join(tmpdir(), 'coat-scales-'))
    try {
      for (const recipe of ['coat', 'coat-bf16'] as const) {
        using where = device(name)
        using whole = new Run({ recipe, device: where })
        await whole.steps(2)
        await saveCheckpoint(whole.trainer, join(dir, recipe))
        const goal = { seen: await whole.steps(3), bytes: await whole.bytes() }
        using second = new Run({ recipe, device: where, seed: 4 })
        await second.steps(1) // its maxima are of other weights
        await second.trainer.resume(join(dir, recipe))
        expect({ seen: await second.steps(3), bytes: await second.bytes() }).toEqual(goal)
      }
    } finally {
      rmSync(dir, { recursive: true })
    }
  })

  on('nothing is measured where no product reads weights by one scale, or the rule leaves no maxima', async () => {
    using where = device(name)
    const data = new TextDataset(sentence.repeat(20), { sequence: 32, seed: 7 })
    for (const [recipe, optimizer] of [
      ['bf16', adamw()],
      ['deepseek-v3', adamw()],
      [{ base: 'fp8-lm-o2', scale: 'current' }, adamw()],
      ['coat', lion()],
    ] as const) {
      using model = new LlamaForCausalLM(smallLlama, { recipe, device: where })
      using trainer = new Trainer(model, { data, batch: 2, steps: 20, optimizer })
      const handles = new Set(model.parameters().map(({ tensor }) => tensor.handle))
      const measures = vi.spyOn(native, 'amax')
      for (let i = 0; i < 2; i++) await trainer.step()
      expect(measures.mock.calls.filter(([x]) => handles.has(x))).toEqual([])
      measures.mockRestore()
    }
  })
})

describe('the largest magnitudes that adamw leaves', () => {
  interface Extra {
    lr?: number
    clip?: Handle | undefined
    master?: Handle[]
    lost?: Handle[]
    rounding?: 'nearest' | 'stochastic' | 'kahan'
    amax: Handle[] | null
  }
  /** A first step of lists p, g, m, v. */
  function step(
    [p, g, m, v]: readonly [Handle[], Handle[], Handle[], Handle[]],
    { lr = 0.1, clip, master, lost, rounding = 'nearest', amax }: Extra,
  ): void {
    const numbers = [lr, 0.9, 0.1, 0.999, 0.001, 1e-8, 0, 0.1, Math.sqrt(0.001), 0] as const
    native.adamw(p, master ?? null, lost ?? null, g, m, v, amax, clip ?? null, ...numbers, rounding, 5)
  }

  const lengths = [0, 1, 3, 127, 128, 129, 2047, 2048, 2051, 70_001]
  const roundings = [
    ['f32', 'nearest', null],
    ['bf16', 'nearest', null],
    ['bf16', 'nearest', 'f32'],
    ['bf16', 'stochastic', null],
    ['bf16', 'kahan', null],
  ] as const
  const measured = [
    ['e4m3/x128', 'e4m3/x128'],
    ['f32', 'f32'],
    ['e4m3/g128', 'e4m3/g128'],
    ['e4m3/t', 'f16/t'],
    ['d8/g256', 'u8/g256'],
  ] as const
  interface Measured {
    /** An element of the last member. */
    special?: number
    lr?: number
    clip?: Handle
    wanted?: boolean
  }
  /** A step of members of `lengths` on a device, from numbers that are the same each time. */
  const measuredStep = async (
    device: DeviceKind,
    [first, second]: readonly [AnyFormat, AnyFormat],
    [format, rounding, doubled]: (typeof roundings)[number],
    { special, lr = 0.1, clip, wanted = true }: Measured = {},
  ) => {
    const random = new Random(13)
    const made = async (format: AnyFormat, n: number, value: (i: number) => number) =>
      await moved(tensor(format, [1, n], vector(n, value).data), device)
    const members: Record<'p' | 'g' | 'm' | 'v' | 'amax', Handle>[] = []
    for (const n of lengths) {
      const isSpecial = (i: number) => special !== undefined && n > 70_000 && i === 69_999
      const p = await made(format, n, (i) => (isSpecial(i) ? (special as number) : random.normal()))
      const g = await made('bf16', n, (i) => (isSpecial(i) ? 1 : random.normal()))
      const [m, v] = [await made(first, n, () => 0), await made(second, n, () => 0)]
      // what was there before counts for nothing
      members.push({ p, g, m, v, amax: await moved(tensor('f32', [1], [1000]), device) })
    }
    const pick = (key: 'p' | 'g' | 'm' | 'v' | 'amax') => members.map((member) => member[key])
    const copies = (format: 'f32' | 'bf16') => own(pick('p').map((p) => native.convert(p, null, format)))
    const lost = rounding === 'kahan' ? copies('bf16') : undefined
    for (const handle of lost ?? []) native.multiply_into(handle, await moved(tensor('f32', [1], [2 ** -9]), device))
    const extra = { rounding, clip, ...(doubled && { master: copies(doubled) }), ...(lost && { lost }) }
    const lists = [pick('p'), pick('g'), pick('m'), pick('v')] as const
    step(lists, { ...extra, lr, amax: wanted ? pick('amax') : null })
    return members
  }

  for (const device of devices)
    describe.skipIf(!present(device))(`amax on ${device}`, () => {
      it.each(measured)('m %s, v %s: is that of p as stored, and changes nothing else', async (...pair) => {
        for (const kind of roundings) {
          const [members, others] = [
            await measuredStep(device, pair, kind),
            await measuredStep(device, pair, kind, { wanted: false }),
          ]
          for (const [i, { p, m, v, amax }] of members.entries()) {
            const other = others[i] as (typeof members)[number]
            expect(await bytesOf(amax), `${kind}, ${lengths[i]}`).toEqual(await bytesOf(own(native.amax(p))))
            for (const [one, two] of [
              [p, other.p],
              [m, other.m],
              [v, other.v],
            ] as const)
              expect(await bytesOf(one)).toEqual(await bytesOf(two))
            expect(await read(other.amax)).toEqual([1000])
          }
        }
      })

      it.each(measured)('m %s, v %s: NaN if any is NaN, else Inf if any is infinite', async (...pair) => {
        for (const [special, lr, expected] of [
          [Number.NaN, 0.1, Number.NaN],
          [-3.3e38, 1e38, Number.POSITIVE_INFINITY], // by the step
        ] as const)
          for (const kind of roundings) {
            const amaxes = (await measuredStep(device, pair, kind, { special, lr })).map(({ amax }) => amax)
            expect(await read(amaxes.at(-1) as Handle), `${kind}`).toEqual([expected])
            expect((await read(amaxes.at(-2) as Handle))[0]).toBeLessThan(2e38)
          }
      })

      it.each(measured)('m %s, v %s: a skipped step leaves it', async (...pair) => {
        const clip = await moved(tensor('f32', [2], [0.5, 1]), device)
        for (const kind of roundings)
          for (const { amax } of await measuredStep(device, pair, kind, { clip }))
            expect(await read(amax)).toEqual([1000])
      })
    })

  it('amax is refused of parameters in other formats, and in other shapes', () => {
    const states = () => [tensor('f32', [1, 2], [0, 0])]
    const given = (format: AnyFormat, amax: Handle) => () =>
      step([[tensor(format, [1, 2], [0, 0])], states(), states(), states()], { amax: [amax] })
    expect(given('f32', tensor('f32', [2], [0, 0]))).toThrow('adamw: amax[0] f32[2] must have 1 = 1 in dimension 0')
    expect(given('bf16x2', tensor('f32', [1], [0]))).toThrow(
      /^adamw: p bf16x2, amax f32 is not a combination of this op/,
    )
  })
})
