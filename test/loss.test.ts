// The head with its loss, chunk by chunk: against logits that are whole, and against itself in other chunks.
import { afterEach, describe, expect, it } from 'vitest'
import {
  type DeviceName,
  LlamaForCausalLM,
  memory,
  noGrad,
  ops,
  recipes,
  resetPeak,
  scope,
  Tape,
  Tensor,
} from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { addGradient } from '../lib/tape.ts'
import { devices, present } from './harness.ts'
import { smallLlama } from './values.ts'

type Plain = 'f32' | 'bf16'
type Loss = (x: Tensor, w: Tensor, targets: Tensor) => Tensor

interface Sizes {
  M: number
  N: number
  V: number
}

function whole(format: Plain, dw: Plain, weight: number): Loss {
  return (x, w, targets) =>
    ops.crossEntropy(
      ops.linear(x, w, null, { x: format, w: format, dy: format, y: format, dx: format, dw }),
      targets,
      weight,
    )
}
function chunked(format: Plain, dw: Plain, weight: number, chunk?: number): Loss {
  return (x, w, targets) =>
    ops.linearCrossEntropy(x, w, targets, weight, { format, dw, ...(chunk === undefined ? {} : { chunk }) })
}

/** The loss and both gradients; `repeats` times the loss is what backward starts from. */
async function gradients(loss: Loss, format: Plain, { M, N, V }: Sizes, device: DeviceName, repeats = 1) {
  const leaf = (rows: number, cols: number, std: number, seed: number) => {
    const tensor = Tensor.own(native.random_normal(format, rows, cols, 0, std, seed, device as 'cpu')).keep()
    let sum: Tensor | null = null
    tensor.requiresGrad = true
    tensor.sink = {
      accumulate: (part) => {
        sum = addGradient(sum, part)
      },
    }
    return {
      tensor,
      read: async () => (await sum?.read()) as Float32Array,
      free: () => {
        sum?.release()
        tensor.dispose()
      },
    }
  }
  const [x, w] = [leaf(M, N, 1, 1), leaf(V, N, 0.3, 2)]
  const ids = Int32Array.from({ length: M }, (_, i) => (i % 5 === 3 ? ops.ignoreIndex : (i * 7919) % V))
  using targets = Tensor.from(ids, [M], { device })
  using tape = new Tape()
  using result = tape.record(() =>
    scope(() => {
      const one = loss(x.tensor, w.tensor, targets)
      let sum = one
      for (let i = 1; i < repeats; i++) sum = ops.add(sum, one, 'f32')
      return sum
    }),
  )
  const kept = tape.ledger()
  tape.backward(result)
  const found = { loss: await result.item(), dx: await x.read(), dw: await w.read(), kept }
  for (const { free } of [x, w]) free()
  return found
}

function near(a: ArrayLike<number>, b: ArrayLike<number>, relative: number): void {
  expect(a.length).toBe(b.length)
  let [error, size] = [0, 0]
  for (let i = 0; i < a.length; i++) {
    error += ((a[i] as number) - (b[i] as number)) ** 2
    size += (b[i] as number) ** 2
  }
  expect(Math.sqrt(error / size)).toBeLessThan(relative)
}

describe.each(devices)('on %s', (device) => {
  const test = it.skipIf(!present(device))
  afterEach(() => native.checkGuards())
  const sizes = { M: 67, N: 24, V: 130 }

  test.each(['f32', 'bf16'] as const)('%s: one chunk has the bits of logits that are whole', async (format) => {
    const expected = await gradients(whole(format, format, 0.01), format, sizes, device)
    for (const chunk of [undefined, 67, 1000]) {
      const found = await gradients(chunked(format, format, 0.01, chunk), format, sizes, device)
      expect(found).toEqual({ ...expected, kept: [] })
    }
  })

  test.each([
    ['f32', 'f32', 1e-6],
    ['bf16', 'f32', 4e-3],
    ['bf16', 'bf16', 1e-2],
  ] as const)('%s, gradient %s: chunks of any size', async (format, dw, close) => {
    const expected = await gradients(whole(format, dw, 0.01), format, sizes, device)
    for (const chunk of [1, 13, 32, 66]) {
      const found = await gradients(chunked(format, dw, 0.01, chunk), format, sizes, device)
      expect(Math.abs(found.loss / expected.loss - 1)).toBeLessThan(1e-6)
      near(found.dx, expected.dx, 1e-6)
      near(found.dw, expected.dw, close)
      expect(found.kept).toEqual([])
    }
  })

  test('a loss whose own gradient is not 1 multiplies both', async () => {
    const once = await gradients(chunked('f32', 'f32', 0.01, 32), 'f32', sizes, device)
    const thrice = await gradients(chunked('f32', 'f32', 0.01, 32), 'f32', sizes, device, 3)
    expect(thrice.loss).toBeCloseTo(3 * once.loss, 5)
    near(
      thrice.dx,
      once.dx.map((value) => 3 * value),
      1e-6,
    )
    near(
      thrice.dw,
      once.dw.map((value) => 3 * value),
      1e-6,
    )
  })

  test.each([32_000, 256_000])('a vocabulary of %i: the logits are never whole', async (V) => {
    const large = { M: 200, N: 16, V }
    resetPeak()
    const before = memory().peak.temp
    const found = await gradients(chunked('bf16', 'bf16', 1 / 160, 32), 'bf16', large, device)
    const peak = memory().peak.temp - before
    expect(peak).toBeLessThan(0.5 * 2 * large.M * V)
    const expected = await gradients(whole('bf16', 'bf16', 1 / 160), 'bf16', large, device)
    expect(Math.abs(found.loss / expected.loss - 1)).toBeLessThan(1e-6)
    // on cuda another number of rows may have K in other parts, which rounding to bf16 shows
    near(found.dx, expected.dx, device === 'cuda' ? 1e-3 : 1e-6)
    near(found.dw, expected.dw, 1e-2)
  })

  test('without a tape there is the loss alone; a frozen weight has no gradient', async () => {
    using x = Tensor.from(new Float32Array(64).fill(0.5), [8, 8], { device })
    using w = Tensor.from(
      Float32Array.from({ length: 80 }, (_, i) => i / 80),
      [10, 8],
      { device },
    )
    using targets = Tensor.from(
      Int32Array.from({ length: 8 }, (_, i) => i),
      [8],
      { device },
    )
    const run = () => scope(() => ops.linearCrossEntropy(x, w, targets, 1, { format: 'f32', dw: 'f32', chunk: 3 }))
    x.requiresGrad = true
    const before = memory().tensors
    using loss = noGrad(run)
    expect(loss.requiresGrad).toBe(false)
    expect(memory().tensors).toBe(before + 1)
    using tape = new Tape()
    using recorded = tape.record(run)
    expect(memory().tensors).toBe(before + 3) // the losses and dx
    expect([memory().live.saved, tape.ledger()]).toEqual([0, []])
    expect(await recorded.item()).toBe(await loss.item())
    expect(() => ops.linearCrossEntropy(x, w, targets, 1, { format: 'f32', dw: 'f32', chunk: 0 })).toThrow(
      'linearCrossEntropy: chunk is 0 and must be an integer of at least 1',
    )
  })

  test.each([true, false])('a model (tied head: %s) has the loss of its logits', async (tied) => {
    const config = { ...smallLlama, tie_word_embeddings: tied }
    using model = new LlamaForCausalLM(config, { recipe: recipes.coat, seed: 1, device })
    const tokens = Int32Array.from({ length: 65 }, (_, i) => (i * 31) % 256)
    using ids = Tensor.from(tokens.slice(0, 64), [64], { device })
    using targets = Tensor.from(tokens.slice(1), [64], { device })
    using loss = scope(() => model.loss(ids, targets, 32, 1 / 64))
    using logits = scope(() => model.forward(ids, 32))
    using expected = scope(() => ops.crossEntropy(logits, targets, 1 / 64))
    expect(logits.shape).toEqual([64, 256])
    expect(await loss.item()).toBe(await expected.item())
  })
})
