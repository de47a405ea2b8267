// Tensors in TypeScript: conversion, twins, scopes, who holds what.
import { afterEach, beforeEach, expect, it } from 'vitest'
import { CoatError, device, memory, scope, Tensor } from '../lib/index.ts'
import { native } from '../lib/native.ts'

let tensors = 0
beforeEach(() => {
  tensors = memory().tensors
})
afterEach(() => {
  expect(memory().tensors).toBe(tensors)
  native.checkGuards()
})

const values = Float32Array.from({ length: 48 }, (_, i) => Math.sin(i) * (i % 7))

it('reads back what was written, in every format', async () => {
  for (const format of [
    'f32',
    'bf16',
    'f16',
    'bf16x2',
    'f16/t',
    'e4m3/t',
    'e5m2/t',
    'e4m3/g16',
    'i8/g16',
    'e4m3/g128',
    'e4m3/b128',
    'e4m3/r',
    'e4m3/g128p2',
    'e4m3/b128p2',
    'e4m3/x128',
    'e5m2/g128',
    'e5m2/x128',
    'd8/g256',
  ] as const) {
    using x = Tensor.from(values, [3, 16], { format })
    const back = await x.read()
    const worst = Math.max(...values.map((value, i) => Math.abs(value - (back[i] as number))))
    expect(worst, format).toBeLessThanOrEqual(format === 'f32' ? 0 : 0.5)
    expect(x.format).toBe(format)
    expect(x.shape).toEqual([3, 16])
  }
})

it('makes a twin once, shares it, and drops it with its source', async () => {
  const x = Tensor.from(values, [3, 16])
  const twin = x.as('e4m3/t')
  expect(x.as('e4m3/t')).toBe(twin)
  expect(x.as('f32')).toBe(x)
  expect(memory().tensors).toBe(tensors + 2)
  x.dispose()
  expect(twin.disposed).toBe(true)
})

it('transposes a quantized twin with the codes of the straight one', async () => {
  using x = Tensor.from(values, [3, 16])
  const straight = await x.as('e4m3/t').readBytes()
  const turned = await x.as('e4m3/t', { transposed: true }).readBytes()
  for (let m = 0; m < 3; m++) for (let n = 0; n < 16; n++) expect(turned[n * 3 + m]).toBe(straight[m * 16 + n])
  expect(turned.slice(48)).toEqual(straight.slice(48))
})

it('takes scales from an amax that it carries, until it changes', async () => {
  const plain = Tensor.from(values, [3, 16])
  using x = Tensor.from(values, [3, 16])
  x.adoptAmax(native.amax(x.handle))
  for (const format of ['e5m2/t', 'e4m3/t'] as const)
    for (const transposed of [true, false])
      expect(await x.as(format, { transposed }).readBytes()).toEqual(await plain.as(format, { transposed }).readBytes())
  // one that is too large leaves its mark
  using four = Tensor.from([4 * 448], [1])
  x.adoptAmax(native.amax(four.handle))
  x.dropTwins()
  native.add_into(x.handle, x.handle)
  native.add_into(plain.handle, plain.handle)
  expect(await x.as('e4m3/t').readBytes()).toEqual(await plain.as('e4m3/t').readBytes())
  x.adoptAmax(native.amax(four.handle))
  x.dropTwins()
  const twin = x.as('e5m2/t', { transposed: true })
  expect(new Float32Array((await twin.readBytes()).slice(-4).buffer)).toEqual(Float32Array.of((4 * 448) / 57344))
  plain.dispose()
})

it('makes twins again after the tensor changed in place', async () => {
  using x = Tensor.from(values, [3, 16])
  using y = Tensor.from(values, [3, 16])
  x.keepsScale = true
  const before = x.as('e4m3/t')
  native.add_into(x.handle, y.handle)
  const after = x.as('e4m3/t')
  expect(after).not.toBe(before)
  expect(before.disposed).toBe(true)
  expect((await after.read())[1]).toBeCloseTo(2 * (values[1] as number), 1)
})

it('keeps the scale of a parameter until it changes', async () => {
  using x = Tensor.from(values, [3, 16])
  x.keepsScale = true
  const first = await x.as('e4m3/t').readBytes()
  x.dropTwins()
  expect(await x.as('e4m3/t').readBytes()).toEqual(first)
})

it('frees what a scope made, except what it returns', async () => {
  const x = Tensor.from(values, [3, 16])
  const { y, list } = scope(() => {
    Tensor.zeros([100])
    return { y: x.as('e4m3/g16').as('f32'), list: [Tensor.zeros([2])] }
  })
  x.dispose()
  expect((await y.read())[1]).toBeCloseTo(values[1] as number, 1)
  y.dispose()
  for (const tensor of list) tensor.dispose()
})

it('frees what a scope made when it throws, and refuses promises', () => {
  expect(() =>
    scope(() => {
      Tensor.zeros([100])
      throw new Error('stop')
    }),
  ).toThrow('stop')
  expect(() => scope(async () => Tensor.zeros([3]))).toThrow(/must be synchronous/)
})

it('hands tensors on through nested scopes', () => {
  const kept = scope(() => scope(() => scope(() => Tensor.zeros([4]))))
  expect(kept.disposed).toBe(false)
  scope(() => {
    const early = Tensor.zeros([4])
    early.dispose()
    expect(early.disposed).toBe(true)
    kept.dispose()
  })
  expect(kept.disposed).toBe(true)
  kept.dispose() // once more does nothing
})

it('says what is wrong', async () => {
  const error = (f: () => unknown): CoatError => {
    try {
      f()
    } catch (caught) {
      if (caught instanceof CoatError) return caught
    }
    return expect.fail('no CoatError')
  }
  expect(error(() => Tensor.from([1, 2, 3], [2, 2])).message).toBe('values has 3 elements and shape [2, 2] has 4')
  expect(error(() => Tensor.from([1], [1], { format: 'fp8' as 'f32' })).message).toMatch(
    /"fp8", which is no format; the formats are f32/,
  )
  expect(error(() => Tensor.from(Int32Array.of(1), [1], { format: 'f32' })).argument).toBe('format')
  if (device().kind === 'cpu') expect(error(() => device('cuda')).code).toBe('no_cuda')
  expect(error(() => device('cuda:1')).message).toMatch(/device is 'cuda:1' and must be 'cpu', 'cuda' or 'cuda:0'/)
  expect(error(() => device('tpu')).message).toMatch(/'tpu' and must be/)
  using x = Tensor.zeros([2, 2])
  await expect(x.item()).rejects.toThrow(/needs a tensor of one element, received f32\[2, 2\]/)
  const gone = Tensor.zeros([2])
  gone.dispose()
  expect(error(() => gone.as('bf16')).code).toBe('freed')
})
