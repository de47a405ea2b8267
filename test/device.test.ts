// The CUDA device: asynchronous reads, late faults, memory, threads, and the same training as on the CPU. Skipped, and
// counted, where there is none.

import { once } from 'node:events'
import { createRequire } from 'node:module'
import { fileURLToPath } from 'node:url'
import { Worker } from 'node:worker_threads'
import { afterEach, describe, expect, it } from 'vitest'
import {
  CoatError,
  device,
  LlamaForCausalLM,
  memory,
  type RecipeName,
  recipes,
  scope,
  Tensor,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { present } from './harness.ts'

const config = {
  hidden_size: 64,
  intermediate_size: 176,
  num_hidden_layers: 2,
  num_attention_heads: 4,
  num_key_value_heads: 2,
  vocab_size: 256,
  tie_word_embeddings: true,
}
const data = new TextDataset('Now is the time for all good men to come to the aid of the party. '.repeat(60), {
  sequence: 48,
  seed: 3,
})

describe.skipIf(!present('cuda'))('cuda', () => {
  afterEach(async () => {
    native.checkGuards()
    await device('cuda').sync()
  })

  it('says what it is', () => expect(device('cuda').description).toMatch(/GiB, CUDA \d+\.\d+ driver/))

  // with COAT_SYNC=1 the ops themselves wait
  it.skipIf(process.env.COAT_SYNC === '1')('K2: leaves the event loop free while a read waits', async () => {
    const x = native.random_normal('f32', 2048, 2048, 0, 1, 1, 'cuda')
    for (let i = 0; i < 200; i++) native.free(native.matmul_nt(x, x, null, 'f32', null)[0])
    let turns = 0
    let waiting = true
    const count = (): void => {
      turns += 1
      if (waiting) setImmediate(count)
    }
    setImmediate(count)
    const bytes = await native.read(x)
    waiting = false
    native.free(x)
    expect(bytes.byteLength).toBe(4 * 2048 * 2048)
    expect(turns).toBeGreaterThanOrEqual(10)
  })

  it('a read holds the values of its moment, whatever is queued after it', async () => {
    const x = Tensor.from([1, 2], [2], { device: 'cuda' })
    const reading = native.read(x.handle)
    native.write(x.handle, Float32Array.of(5, 6))
    x.dispose()
    expect([...new Float32Array(await reading)]).toEqual([1, 2])
  })

  it('reports a bad id at the next wait, and goes on', async () => {
    const ids = Tensor.from(Int32Array.of(1, 7, 2), [3], { device: 'cuda' })
    const w = Tensor.zeros([5, 8], { device: 'cuda' })
    const attempt = async () => {
      using y = Tensor.own(native.embedding_forward(ids.handle, w.handle, 'f32'))
      return await y.read()
    }
    const error = await attempt().catch((caught) => caught)
    expect(error).toBeInstanceOf(CoatError)
    expect(error.message).toMatch(
      /ids\[1\] is 7 and must be at least 0 and less than V = 5; ops launched .*embedding_forward/,
    )
    expect([...(await w.read())]).toEqual(new Array(40).fill(0))
    for (const tensor of [ids, w]) tensor.dispose()
  })

  it('out of memory is an error after which work goes on', async () => {
    const before = memory().tensors
    expect(() => native.make('f32', [2 ** 20, 2 ** 20], 'cuda', 'temp')).toThrow(
      /out of memory on cuda: requested 4398046511104 bytes, \d+ bytes free on the device, \d+ bytes held by the pool/,
    )
    expect(memory().tensors).toBe(before)
    using x = Tensor.from([1, 2, 3], [3], { device: 'cuda' })
    expect([...(await x.read())]).toEqual([1, 2, 3])
  })

  it('refuses tensors of two devices', () => {
    using a = Tensor.zeros([4], { device: 'cuda' })
    using b = Tensor.zeros([4])
    expect(() => native.add(a.handle, b.handle, 'f32', null)).toThrow(/add: b f32\[4\] is on cpu and must be on cuda/)
  })

  it.each(Object.keys(recipes) as RecipeName[])(
    '%s: trains as the CPU does, and in the same bits again',
    async (recipe) => {
      const run = async (where: 'cpu' | 'cuda') => {
        using model = new LlamaForCausalLM(config, { recipe, seed: 1, device: where })
        using trainer = new Trainer(model, { data, batch: 4, steps: 12, optimizer: { lr: 0.001 } })
        const losses: number[] = []
        for await (const { loss } of trainer.run()) losses.push(loss)
        const last = await Promise.all(model.parameters().map(({ tensor }) => tensor.readBytes()))
        return { losses, last: Buffer.concat(last).toString('base64') }
      }
      const [cpu, first, second] = [await run('cpu'), await run('cuda'), await run('cuda')]
      expect(second.losses).toEqual(first.losses)
      expect(second.last === first.last).toBe(true)
      first.losses.forEach((loss, i) => {
        expect(Math.abs(loss / (cpu.losses[i] as number) - 1)).toBeLessThan(recipe === 'fp32' ? 1e-3 : 0.03)
      })
    },
  )

  it('four workers train at once and end, one of them by terminate()', async () => {
    const addon = createRequire(import.meta.url).resolve('node-gyp-build')
    const root = fileURLToPath(new URL('..', import.meta.url))
    const text = `
      const { parentPort, workerData } = require('node:worker_threads')
      const native = require(${JSON.stringify(addon)})(${JSON.stringify(root)})
      const x = native.random_normal('bf16', 256, 256, 0, 1, workerData, 'cuda')
      const step = () => native.free(native.matmul_nt(x, x, null, 'bf16', null)[0])
      for (let i = 0; i < 50; i++) step()
      native.read(x).then((bytes) => {
        parentPort.postMessage(bytes.byteLength)
        if (workerData === 3) for (;;) step()
      })`
    const workers = [0, 1, 2, 3].map((workerData) => new Worker(text, { eval: true, workerData }))
    const sizes = await Promise.all(workers.map(async (worker) => (await once(worker, 'message'))[0]))
    expect(sizes).toEqual(new Array(4).fill(2 * 256 * 256))
    await workers[3]?.terminate()
    await Promise.all(workers.slice(0, 3).map(async (worker) => worker.threadId > 0 && once(worker, 'exit')))
    using x = Tensor.from([1], [1], { device: 'cuda' })
    expect(await x.item()).toBe(1)
  })

  it('tensors of more than 2^31 elements', async () => {
    const n = 2 ** 31 + 129
    const x = native.random_normal('bf16', 1, n, 0, 1, 5, 'cuda')
    const q = native.convert(x, null, 'e4m3/g128')
    const back = native.convert(q, null, 'bf16')
    const ratio = scope(() => {
      const [, norms] = native.grad_norm([x, back], 0).map((handle) => Tensor.own(handle))
      return norms as Tensor
    })
    const [a, b] = await ratio.read()
    expect((b as number) / (a as number)).toBeCloseTo(1, 3)
    expect(Math.abs((a as number) / Math.sqrt(n) - 1)).toBeLessThan(1e-3)
    for (const handle of [x, q, back]) native.free(handle)
    ratio.dispose()
  })

  it('an optimizer step on more than 2^31 elements', async () => {
    const n = 2 ** 31 + 129
    const constant = (format: 'f32' | 'bf16', value: number) =>
      native.random_uniform(format, 1, n, value, value, 1, 'cuda')
    const [p, g, zeros] = [constant('f32', 0), constant('bf16', 1), constant('bf16', 0)]
    const [m, v] = [native.convert(zeros, null, 'e4m3/x128'), native.convert(zeros, null, 'e4m3/x128')]
    const numbers = [0.1, 0.9, 0.1, 0.95, 0.05, 1e-8, 0, 0.1, Math.sqrt(0.05), 0] as const
    native.adamw([p], null, null, [g], [m], [v], null, null, ...numbers, 'nearest', 0)
    const norms = native.grad_norm([p], 0).map((handle) => Tensor.own(handle))
    // every element moved by lr, whatever its place
    expect((await (norms[0] as Tensor).item()) / (0.1 * Math.sqrt(n))).toBeCloseTo(1, 5)
    for (const handle of [p, g, zeros, m, v]) native.free(handle)
    for (const tensor of norms) tensor.dispose()
  })
})
