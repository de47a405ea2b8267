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
import { native } from '../lib/native.ts'
import { Tensor as TensorClass } from '../lib/tensor.ts'
import { bytesOf, devices, own, present } from './harness.ts'
import { sentence, smallLlama } from './values.ts'

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
      ['fp8-lm-o2', adamw()],
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
