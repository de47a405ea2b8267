// Native memory: purposes and peaks, handles and their generations, versions, threads with memories of their own.
import { once } from 'node:events'
import { createRequire } from 'node:module'
import { fileURLToPath } from 'node:url'
import { Worker } from 'node:worker_threads'
import { describe, expect, it } from 'vitest'
import { LlamaForCausalLM, limitMemory, TextDataset, Trainer } from '../lib/index.ts'
import type { AnyFormat } from '../lib/native.gen.ts'
import { CoatError, native, type Purpose } from '../lib/native.ts'
import { bytesOf, devices, moved, own, present, read, tensor } from './harness.ts'
import { sentence, smallLlama } from './values.ts'

describe('accounts', () => {
  it('bytes are those of codes, padding and scales', () => {
    const bytes = {
      f32: 4 * 399,
      bf16: 2 * 399,
      i32: 4 * 399,
      'e4m3/t': 400 + 4,
      'e5m2/t': 400 + 4,
      f16: 2 * 399,
      bf16x2: 800 + 2 * 399,
      'f16/t': 800 + 4,
      'e4m3/g16': 400 + 2 * 3 * 9,
      'i8/g16': 400 + 2 * 3 * 9,
      'e4m3/g64': 400 + 4 * 3 * 3,
      'e4m3/g128': 400 + 4 * 3 * 2,
      'e4m3/g256': 400 + 4 * 3,
      'e4m3/b128': 400 + 4 * 2,
      'e4m3/r': 400 + 4 * 3,
      'e4m3/g128p2': 400 + 4 * 3 * 2,
      'e4m3/b128p2': 400 + 4 * 2,
      'e4m3/x64': 400 + 12 * 7,
      'e4m3/x128': 400 + 12 * 4,
      'e4m3/x256': 400 + 12 * 2,
      'e5m2/g128': 400 + 4 * 3 * 2,
      'e5m2/x128': 400 + 12 * 4,
      'd8/g256': 400 + 4 * 2,
      'u8/g256': 400 + 4 * 2,
      'd4/g128': 208 + 4 * 4,
      'u4/g128': 208 + 4 * 4,
    } as const satisfies Record<AnyFormat, number>
    for (const [format, size] of Object.entries(bytes) as [keyof typeof bytes, number][]) {
      const x = own(native.make(format, [3, 133], 'cpu', 'temp'))
      expect(native.info(x)).toEqual({ format, shape: [3, 133], device: 'cpu', bytes: size })
    }
  })

  it('purposes are kept apart, peaks stay until they are reset', () => {
    native.resetPeak()
    const purposes: Purpose[] = ['param', 'grad', 'state', 'saved', 'temp', 'scratch']
    const handles = purposes.map((purpose, i) => native.make('f32', [i + 1], 'cpu', purpose))
    const live = Object.fromEntries(purposes.map((purpose, i) => [purpose, 4 * (i + 1)]))
    const all = { ...live, total: 84 }
    expect(native.memory()).toMatchObject({ live: all, peak: all, atPeak: all, tensors: 6 })
    native.retag(handles[4] as number, 'saved')
    expect(native.memory().live).toMatchObject({ saved: 16 + 20, temp: 0, total: 84 })
    expect(native.memory().peak).toMatchObject({ saved: 36, temp: 20, total: 84 })
    expect(native.memory().atPeak).toEqual({ ...all, saved: 36, temp: 0 })
    for (const handle of handles.slice(1)) native.free(handle)
    expect(native.memory().live).toMatchObject({ param: 4, saved: 0, total: 4 })
    // most of one purpose, but not of all
    const late = native.make('f32', [7], 'cpu', 'grad')
    expect(native.memory().peak).toMatchObject({ grad: 28, total: 84 })
    expect(native.memory().atPeak).toEqual({ ...all, saved: 36, temp: 0 })
    native.free(late)
    native.resetPeak()
    expect(native.memory().peak).toEqual(native.memory().live)
    expect(native.memory().atPeak).toEqual(native.memory().live)
    native.free(handles[0] as number)
  })

  it('the peak of a call holds its outputs', () => {
    const x = tensor('f32', [10, 10], new Float32Array(100))
    native.resetPeak()
    native.free(native.convert(x, null, 'bf16'))
    expect(native.memory().peak.total - native.memory().live.total).toBe(200)
  })

  it('a tensor that does not fit is refused in words, and work goes on', () => {
    const before = native.memory()
    expect(() => native.make('f32', [1e7, 1e7], 'cpu', 'temp')).toThrow(
      /^make: out of memory on cpu: requested 400000000000000 bytes, 0 bytes held by 0 tensors$/,
    )
    expect(native.memory()).toEqual(before)
    expect(native.info(tensor('f32', [3], [1, 2, 3])).bytes).toBe(12)
  })

  it('a limit on live bytes refuses what goes beyond it, and says who holds them', () => {
    const x = own(native.make('f32', [10, 10], 'cpu', 'param'))
    const live = native.memory().live.total
    expect(native.memoryLimit()).toBe(0)
    try {
      native.memoryLimit(live + 300)
      native.free(native.convert(x, null, 'bf16'))
      const before = native.memory()
      const refused = () => native.convert(x, null, 'f32')
      expect(refused).toThrow(
        new RegExp(
          `^convert: out of memory: f32\\[10, 10\\] \\(temp\\) needs 400 bytes; ${live} bytes are live, \\d+ param.* and the limit is ${live + 300}$`,
        ),
      )
      expect(refused).toThrow(expect.objectContaining({ code: 'out_of_memory', argument: 'limit' }))
      expect(native.memory()).toEqual(before)
      expect(() => native.memoryLimit(-1)).toThrow('memoryLimit: bytes is -1 and must not be negative')
    } finally {
      native.memoryLimit(0)
    }
    native.free(native.convert(x, null, 'f32'))
  })

  it('a step that does not fit leaves no bytes behind', async () => {
    const data = new TextDataset(sentence.repeat(40), { sequence: 32 })
    const before = native.memory().live
    const model = new LlamaForCausalLM(smallLlama, { recipe: 'coat' })
    const trainer = new Trainer(model, { data, batch: 4, steps: 1 })
    const held = native.memory().live
    try {
      limitMemory(held.total + 50_000)
      await expect(trainer.step()).rejects.toMatchObject({ code: 'out_of_memory' })
      expect(native.memory().live.total - held.total).toBeLessThan(10_000) // scales of weights, tables of rotations
      limitMemory(null)
      expect((await trainer.step()).step).toBe(1)
    } finally {
      limitMemory(null)
    }
    trainer.dispose()
    model.dispose()
    expect(native.memory().live).toEqual(before)
  })

  it.skipIf(!present('cuda'))('the pool of the device holds at least the tensors', () => {
    const x = native.make('f32', [2 ** 20], 'cuda', 'temp')
    native.resetPeak()
    const y = native.make('f32', [2 ** 20], 'cuda', 'temp')
    native.free(y)
    const pool = native.pool() ?? expect.fail('no pool')
    expect(pool.usedPeak).toBeGreaterThanOrEqual(2 ** 23)
    expect(pool.reservedPeak).toBeGreaterThanOrEqual(pool.usedPeak)
    expect(pool.reserved).toBeLessThanOrEqual(pool.total - pool.free)
    native.free(x)
  })

  describe.each(devices)('on %s', (device) => {
    it.skipIf(!present(device))('filled tensors have one value', async () => {
      const x = await moved(tensor('f32', [3], [1, 2, 3]), device)
      const version = native.version(x)
      native.fill(x, 0)
      expect(await read(x)).toEqual([0, 0, 0])
      native.fill(x, 0.1)
      expect(await read(x)).toEqual(new Array(3).fill(Math.fround(0.1)))
      expect(native.version(x)).toBe(version + 2)
      const whole = await moved(tensor('i32', [2], [1, 2]), device)
      native.fill(whole, -7)
      expect(await read(whole)).toEqual([-7, -7])
      expect(() => native.fill(tensor('bf16', [3], [1, 2, 3]), 1)).toThrow('fill: tensor bf16[3] must be f32 or i32')
    })
  })

  it('a thousand rounds of ops leave live bytes and tensors as they were', () => {
    const x = tensor(
      'f32',
      [33, 64],
      Float32Array.from({ length: 33 * 64 }, (_, i) => Math.sin(i)),
    )
    const w = tensor('f32', [64], new Float32Array(64).fill(1))
    const before = native.memory()
    for (let i = 0; i < 1000; i++) {
      const [y, rstd] = native.rmsnorm_forward(x, w, null, 'e4m3/t', 1e-5)
      const [dx, dw] = native.rmsnorm_backward(x, x, w, rstd, null, 'bf16', 'f32', null)
      const [product] = native.matmul_nt(y, y, null, 'e4m3/g16', null)
      for (const handle of [y, rstd, dx, dw, product]) native.free(handle)
      expect(() => native.matmul_nt(x, w, null, 'f32', null)).toThrow(CoatError)
    }
    const after = native.memory()
    expect([after.live, after.tensors]).toEqual([before.live, before.tensors])
  })
})

describe('handles', () => {
  it('a slot used again does not answer to its old handle', () => {
    const stale: number[] = []
    for (let i = 0; i < 100; i++) {
      const x = native.make('f32', [1], 'cpu', 'temp')
      native.free(x)
      stale.push(x)
    }
    const fresh = own(native.make('f32', [1], 'cpu', 'temp'))
    expect(new Set(stale).size).toBe(100)
    expect(stale).not.toContain(fresh)
    for (const x of stale) expect(() => native.info(x)).toThrow(/was freed/)
  })

  it('versions go up with what changes a tensor, and with nothing else', () => {
    const [y, x] = [tensor('f32', [4], [1, 2, 3, 4]), tensor('f32', [4], [1, 1, 1, 1])]
    const version = native.version(y)
    native.add_into(y, x)
    own(native.amax(own(native.convert(y, null, 'bf16'))))
    expect(native.version(y)).toBe(version + 1)
    native.write(y, new Float32Array(4))
    expect(native.version(y)).toBe(version + 2)
    const before = native.version(x)
    native.adamw(
      [y],
      null,
      null,
      [x],
      [tensor('f32', [4], [0, 0, 0, 0])],
      [tensor('f32', [4], [0, 0, 0, 0])],
      null,
      null,
      0,
      0,
      1,
      0,
      1,
      1,
      0,
      1,
      1,
      0,
      'nearest',
      0,
    )
    expect([native.version(y), native.version(x)]).toEqual([version + 3, before])
  })

  it('views are written exactly, bytes come back as they are', async () => {
    const bytes = Uint8Array.from({ length: 64 }, (_, i) => i)
    const x = own(native.make('f32', [2], 'cpu', 'temp'))
    native.write(x, bytes.subarray(3, 11))
    expect([...(await bytesOf(x))]).toEqual([3, 4, 5, 6, 7, 8, 9, 10])
    native.write(x, new Float32Array(bytes.buffer, 16, 2))
    expect([...(await bytesOf(x))]).toEqual([16, 17, 18, 19, 20, 21, 22, 23])
  })

  it('padding between codes and scales is zero, whatever lay there before', async () => {
    const used = native.make('f32', [4], 'cpu', 'temp')
    native.write(used, new Uint8Array(16).fill(0x5a))
    native.free(used)
    const x = own(native.convert(tensor('f32', [5], [1, 2, 3, 4, 5]), null, 'e4m3/t'))
    expect([...(await bytesOf(x)).subarray(5, 16)]).toEqual(new Array(11).fill(0))
  })

  it('bytes in shared memory are refused', () => {
    const x = tensor('f32', [2], [1, 2])
    const shared = new Float32Array(new SharedArrayBuffer(8))
    expect(() => native.write(x, shared)).toThrow('write: bytes must not lie in shared memory')
  })

  it('a handle is a whole number', () => {
    const x = tensor('f32', [2], [1, 2])
    expect(() => native.info(x + 0.5)).toThrow(/which is no tensor handle/)
  })

  it('a read holds the values of its moment', async () => {
    const x = tensor('f32', [2], [1, 2])
    const reading = native.read(x)
    native.write(x, Float32Array.of(5, 6))
    expect([...new Float32Array(await reading)]).toEqual([1, 2])
    expect(await read(x)).toEqual([5, 6])
  })
})

describe('worker threads', () => {
  // workers load the addon alone: they know no TypeScript
  const addon = createRequire(import.meta.url)('node-gyp-build').path(fileURLToPath(new URL('..', import.meta.url)))
  const start = (body: string) =>
    new Worker(
      `const native = require(${JSON.stringify(addon)}); const { parentPort } = require('node:worker_threads'); ${body}`,
      { eval: true },
    )

  it('have handles and accounts of their own, and end with tensors alive', async () => {
    const mine = tensor('f32', [3], [1, 2, 3])
    const before = native.memory()
    const results = await Promise.all(
      [0, 1, 2, 3].map(async (i) => {
        const worker = start(`
          const x = native.random_normal('f32', 300, 301, 0, 1, ${i % 2}, 'cpu')
          let foreign = ''
          try { native.info(${mine} + 2 ** 30) } catch (error) { foreign = error.message }
          let sum = 0
          for (let i = 0; i < 20; i++) { const [y] = native.matmul_nt(x, x, null, 'f32', null); native.amax(y); native.free(y) }
          native.read(native.amax(x)).then((bytes) => parentPort.postMessage({ amax: new Float32Array(bytes)[0], foreign, memory: native.memory() }))`)
        // a worker that ends at once may emit both before the first await returns
        const [[message]] = await Promise.all([once(worker, 'message'), once(worker, 'exit')])
        return message
      }),
    )
    for (const { memory, foreign } of results) {
      expect(memory.tensors).toBe(22)
      expect(memory.live.total).toBe(300 * 301 * 4 + 21 * 4)
      expect(foreign).toMatch(/is no tensor handle of this thread/)
    }
    expect(results[0].amax).toBe(results[2].amax)
    expect(results[0].amax).not.toBe(results[1].amax)
    expect([native.memory().live, native.memory().tensors]).toEqual([before.live, before.tensors])
    expect(await read(mine)).toEqual([1, 2, 3])
  })

  it('may be terminated in the middle of their work', async () => {
    const mine = tensor('f32', [3], [1, 2, 3])
    for (let round = 0; round < 5; round++) {
      const worker = start(`
        const x = native.random_normal('bf16', 400, 400, 0, 1, 1, 'cpu')
        parentPort.postMessage('ready')
        for (;;) native.free(native.matmul_nt(x, x, null, 'bf16', null)[0])`)
      await once(worker, 'message')
      await worker.terminate()
      const y = own(native.random_normal('f32', 200, 200, 0, 1, 1, 'cpu'))
      expect(native.info(own(native.matmul_nt(y, y, null, 'f32', null))[0]).shape).toEqual([200, 200])
    }
    expect(await read(mine)).toEqual([1, 2, 3])
  })
})
