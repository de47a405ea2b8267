// The tape and the modules on it: gradients against differences, what is kept, what is made again, no leaks.
import { describe, expect, it, vi } from 'vitest'
import {
  Block,
  build,
  memory,
  noGrad,
  ops,
  Param,
  type Recipe,
  type RecipeName,
  recipes,
  resetPeak,
  scope,
  Tape,
  Tensor,
} from '../lib/index.ts'
import type { BlockSizes } from '../lib/modules.ts'
import { native } from '../lib/native.ts'
import { addGradient } from '../lib/tape.ts'

function noise(count: number, seed: number, scale = 1): Float32Array {
  let state = seed >>> 0
  return Float32Array.from({ length: count }, () => {
    let sum = 0
    for (let i = 0; i < 4; i++) {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0
      sum += state / 2 ** 32 - 0.5
    }
    return sum * 1.7 * scale
  })
}

const llama: BlockSizes = {
  hidden: 24,
  heads: 4,
  kvHeads: 2,
  headDim: 6,
  ropeTheta: 10000,
  inner: 40,
  activation: 'swiglu',
  norm: 'rmsnorm',
  eps: 1e-5,
  normNames: ['input_layernorm', 'post_attention_layernorm'],
  outputStd: 0.3,
}

const variants: Record<string, BlockSizes> = {
  'Llama: RMSNorm, RoPE, GQA, SwiGLU': llama,
  'OLMo: LayerNorm without affine': { ...llama, norm: 'layernorm', affine: false, kvHeads: 4 },
  'GPT: LayerNorm, biases, GELU, no rotation': {
    ...llama,
    norm: 'layernorm',
    qkvBias: true,
    outputBias: true,
    bias: true,
    activation: 'gelu',
    ropeTheta: null,
    kvHeads: 4,
  },
}

/** An input [M, N] whose gradient can be read: as a parameter has it. */
class Leaf {
  readonly tensor: Tensor
  gradient: Tensor | null = null
  constructor(values: Float32Array, shape: readonly number[], format: 'f32' | 'bf16') {
    this.tensor = Tensor.from(values, shape, { format }).keep()
    this.tensor.sink = this
    this.tensor.requiresGrad = true
  }
  accumulate(gradient: Tensor): void {
    this.gradient = addGradient(this.gradient, gradient)
  }
  [Symbol.dispose](): void {
    this.gradient?.release()
    this.tensor.dispose()
  }
}

const T = 5
const M = 2 * T

function lossOf(block: Block, x: Tensor, targets: Tensor): Tensor {
  return scope(() => ops.crossEntropy(block.forward(x, T), targets, 1 / M))
}
function targetsOf(hidden: number): Tensor {
  return Tensor.from(
    Int32Array.from({ length: M }, (_, i) => (i * 7) % hidden),
    [M],
  )
}

describe('linear', () => {
  const fp8 = { x: 'e4m3/t', w: 'e4m3/t', dy: 'e5m2/t', y: 'bf16', dx: 'bf16', dw: 'bf16' } as const
  const plain = { x: 'bf16', w: 'bf16', dy: 'bf16', y: 'bf16', dx: 'bf16', dw: 'bf16' } as const
  const K = 24

  it('multiplies runs by blocks and runs by runs: gradients near those of f32', async () => {
    const blocks = { ...fp8, x: 'e4m3/g128', w: 'e4m3/b128', dy: 'e4m3/g128', y: 'f32', dx: 'f32', dw: 'f32' } as const
    const exact = { x: 'f32', w: 'f32', dy: 'f32', y: 'f32', dx: 'f32', dw: 'f32' } as const
    const [rows, inputs, outputs] = [140, 150, 135]
    using targets = Tensor.from(
      Int32Array.from({ length: rows }, (_, i) => (i * 7) % outputs),
      [rows],
    )
    const results: Float32Array[][] = []
    for (const formats of [blocks, exact]) {
      using x = new Leaf(noise(rows * inputs, 1), [rows, inputs], 'f32')
      using w = new Leaf(noise(outputs * inputs, 2, 0.1), [outputs, inputs], 'f32')
      using tape = new Tape()
      using loss = tape.record(() =>
        scope(() => ops.crossEntropy(ops.linear(x.tensor, w.tensor, null, formats), targets, 1)),
      )
      tape.backward(loss)
      const read = [x.gradient, w.gradient].map((gradient) => gradient?.read())
      results.push((await Promise.all(read)) as Float32Array[])
    }
    const [found = [], wanted = []] = results
    found.forEach((gradient, i) => {
      const other = wanted[i] as Float32Array
      const norm = (f: (j: number) => number) => Math.hypot(...gradient.map((_, j) => f(j)))
      const error = norm((j) => (gradient[j] as number) - (other[j] as number)) / norm((j) => other[j] as number)
      expect(error).toBeGreaterThan(0)
      expect(error).toBeLessThan(0.06)
    })
  })

  it('quantizes the gradient of the next one by the amax that its product left, to the same bits', async () => {
    using x = new Leaf(noise(M * K, 1), [M, K], 'bf16')
    using first = new Leaf(noise(K * K, 2, 0.3), [K, K], 'bf16')
    using second = new Leaf(noise(K * K, 3, 0.3), [K, K], 'bf16')
    using targets = targetsOf(K)
    const scales = vi.spyOn(native, 'scale_from_amax')
    const gradients = []
    for (const measured of [false, true]) {
      using tape = new Tape()
      using loss = tape.record(() =>
        scope(() => {
          const middle = ops.linear(x.tensor, first.tensor, null, fp8)
          if (measured) middle.gradientFormat = null
          return ops.crossEntropy(ops.linear(middle, second.tensor, null, fp8), targets, 1 / M)
        }),
      )
      tape.backward(loss)
      expect(scales).toHaveBeenCalledTimes(1)
      gradients.push(await Promise.all([x, first, second].map(({ gradient }) => gradient?.readBytes())))
      for (const leaf of [x, first, second]) {
        leaf.gradient?.release()
        leaf.gradient = null
      }
    }
    scales.mockRestore()
    expect(gradients[0]).toEqual(gradients[1])
  })

  it.each([
    ['fp8', fp8],
    ['bf16', plain],
  ] as const)('adds to the gradient that a parameter holds in place: %s', async (_, formats) => {
    using w = new Param(build({ recipe: 'bf16' }), 'w', {
      shape: [K, K],
      format: 'f32',
      init: { std: 0.3 },
      decay: true,
    })
    using targets = targetsOf(K)
    const made = async (seeds: readonly number[]) => {
      w.dropGrad()
      const held = new Set<unknown>()
      for (const seed of seeds) {
        using tape = new Tape()
        using x = Tensor.from(noise(M * K, seed), [M, K], { format: 'bf16' })
        using loss = tape.record(() =>
          scope(() => ops.crossEntropy(ops.linear(x, w.tensor, null, formats), targets, 1 / M)),
        )
        tape.backward(loss)
        held.add(w.grad)
      }
      expect(held.size).toBe(1)
      return [...((await (w.grad as Tensor).read()) as Float32Array)]
    }
    const [one, two, both] = [await made([1]), await made([2]), await made([1, 2])]
    both.forEach((sum, i) => {
      const parts = (one[i] as number) + (two[i] as number)
      // one rounding of the sum, and that of the second part, which was not rounded
      expect(Math.abs(sum - parts)).toBeLessThanOrEqual(2 ** -8 * (Math.abs(parts) + Math.abs(two[i] as number)))
    })
    expect(both).not.toEqual(one)
  })
})

describe('gradients of a block are those of central differences', () => {
  it.each(Object.entries(variants))('%s', async (_, sizes) => {
    const before = memory().tensors
    {
      using block = new Block(build({ recipe: 'fp32', seed: 3 }), 'b', sizes)
      using targets = targetsOf(sizes.hidden)
      const start = noise(M * sizes.hidden, 5)
      for (const param of block.parameters()) param.write(noise(param.tensor.numel, 11 + param.name.length, 0.3))
      using x = new Leaf(start, [M, sizes.hidden], 'f32')
      {
        using tape = new Tape()
        using loss = tape.record(() => lossOf(block, x.tensor, targets))
        tape.backward(loss)
      }
      const leaves = [
        { name: 'x', tensor: x.tensor, gradient: x.gradient },
        ...block.parameters().map(({ name, tensor, grad }) => ({ name, tensor, gradient: grad })),
      ]
      for (const { name, tensor, gradient } of leaves) {
        const values = (await tensor.read()) as Float32Array
        const direction = noise(values.length, 99)
        const slope = ((await gradient?.read()) ?? expect.fail(`no gradient of ${name}`)) as Float32Array
        const expected = direction.reduce((sum, d, i) => sum + d * (slope[i] as number), 0)
        const at = async (step: number): Promise<number> => {
          native.write(
            tensor.handle,
            values.map((value, i) => value + step * (direction[i] as number)),
          )
          using loss = noGrad(() => lossOf(block, x.tensor, targets))
          return loss.item()
        }
        // Richardson: the error of the difference is of fourth order
        const [far, near] = [0.02, 0.01]
        const slopeFar = ((await at(far)) - (await at(-far))) / (2 * far)
        const slopeNear = ((await at(near)) - (await at(-near))) / (2 * near)
        native.write(tensor.handle, values)
        const size =
          Math.sqrt(slope.reduce((sum, g) => sum + g * g, 0) * direction.length) / Math.sqrt(direction.length)
        expect(Math.abs((4 * slopeNear - slopeFar) / 3 - expected), name).toBeLessThan(2e-3 * size + 1e-4)
      }
    }
    expect(memory().tensors).toBe(before)
  })
})

describe('a tied weight and a residual get the sum of their gradients', () => {
  it('x + x', async () => {
    using x = new Leaf(noise(12, 1), [3, 4], 'f32')
    using targets = Tensor.from(Int32Array.of(0, 1, 2), [3])
    {
      using tape = new Tape()
      using loss = tape.record(() => scope(() => ops.crossEntropy(ops.add(x.tensor, x.tensor, 'f32'), targets, 1)))
      tape.backward(loss)
    }
    using doubled = Tensor.from(
      (await x.tensor.read()).map((value) => 2 * value),
      [3, 4],
    )
    using once = new Leaf((await doubled.read()) as Float32Array, [3, 4], 'f32')
    {
      using tape = new Tape()
      using loss = tape.record(() => ops.crossEntropy(once.tensor, targets, 1))
      tape.backward(loss)
    }
    const sum = await (x.gradient as Tensor).read()
    const single = await (once.gradient as Tensor).read()
    sum.forEach((value, i) => {
      expect(value).toBeCloseTo(2 * (single[i] as number), 6)
    })
  })
})

describe('what is kept for backward', () => {
  // F = 8 D / 3, no GQA
  const D = 96
  const H = 6
  const sizes: BlockSizes = { ...llama, hidden: D, heads: H, kvHeads: H, headDim: D / H, inner: (8 * D) / 3 }
  const rows = 2 * 32

  function kept(recipe: RecipeName | Recipe): { perToken: number; ledger: ReturnType<Tape['ledger']>; peak: number } {
    using block = new Block(build({ recipe, seed: 1 }), 'b', sizes)
    using x = new Leaf(noise(rows * D, 2), [rows, D], (typeof recipe === 'string' ? recipes[recipe] : recipe).stream)
    using tape = new Tape()
    const saved = memory().live.saved
    resetPeak()
    using y = tape.record(() => block.forward(x.tensor, 32))
    const ledger = tape.ledger()
    const bytes = ledger.reduce((sum, row) => sum + row.bytes, 0)
    expect(memory().live.saved - saved).toBe(bytes)
    expect(y.requiresGrad).toBe(true)
    return { perToken: bytes / rows, ledger, peak: memory().peak.saved - saved }
  }

  it('coat: at most 8.3 · 2D + 4H + 16 bytes a token and block; the ledger adds up to the peak', () => {
    const { perToken, ledger, peak } = kept('coat')
    expect(perToken).toBeLessThanOrEqual(8.3 * 2 * D + 4 * H + 16)
    expect(ledger.reduce((sum, row) => sum + row.bytes, 0)).toBe(peak)
    const formats = new Set(ledger.map(({ op, format }) => `${op} ${format}`))
    expect(formats).toContain('rmsnorm e4m3/g16')
    expect(formats).toContain('swiglu e4m3/g16')
    expect(formats).not.toContain('linear e4m3/t')
  })

  it.each(['e4m3/g16', 'i8/g16'] as const)(
    'of attention %s copies of q, k, v and the operand of its projection are kept: 4.375 D bytes a token, not 8 D',
    (attention) => {
      const plain = kept('coat')
      const copies = kept({ ...recipes.coat, attention })
      const bytes = ({ ledger }: typeof plain, name: string) =>
        ledger.reduce((sum, row) => sum + (`${row.op} ${row.format}` === name ? row.bytes : 0), 0) / rows
      expect(bytes(plain, 'attention bf16')).toBe(8 * D)
      expect(copies.ledger.filter(({ op }) => op === 'attention').map(({ format }) => format)).toEqual([attention])
      expect(bytes(copies, `attention ${attention}`)).toBe(3.375 * D)
      expect(bytes(copies, 'linear e4m3/t')).toBe(D + 4 / rows)
      expect(plain.perToken - copies.perToken).toBe(3.625 * D + 4 * H)
    },
  )

  it('is about twice that in bf16 and four times in fp32', () => {
    const coat = kept('coat').perToken
    expect(kept('bf16').perToken / coat).toBeGreaterThan(1.9)
    expect(kept('fp32').perToken / coat).toBeGreaterThan(3.8)
  })

  it('is made again in the same bits', async () => {
    using block = new Block(build({ recipe: 'coat', seed: 1 }), 'b', sizes)
    using x = new Leaf(noise(rows * D, 2), [rows, D], 'bf16')
    using tape = new Tape()
    const made: [Tensor, Tensor][] = []
    using y = tape.record(() =>
      scope(() => {
        const h = block.attentionNorm.forward(x.tensor)
        const gated = block.mlp.input.forward(h)
        const product = ops.swiglu(gated, block.mlp.formats)
        for (const tensor of [h, product]) {
          const { sources, make } = tensor.remake ?? expect.fail('not to be made again')
          made.push([Tensor.own(make(sources)).keep(), tensor.keep()])
        }
        return block.mlp.output.forward(product)
      }),
    )
    for (const [again, first] of made) expect(await again.readBytes()).toEqual(await first.readBytes())
    const [h] = made.map(([, first]) => first) as [Tensor, Tensor]
    const { sources, across } = h.remake ?? expect.fail('not to be made again')
    using turned = Tensor.own(across?.(sources) ?? expect.fail('not to be made transposed'))
    expect(await turned.readBytes()).toEqual(await h.as('e4m3/t', { transposed: true }).readBytes())
    for (const tensor of made.flat()) tensor.dispose()
    expect(y.disposed).toBe(false)
  })
})

describe('memory', () => {
  it.each(Object.keys(recipes) as RecipeName[])('%s: a thousand steps leave nothing behind', (recipe) => {
    const before = memory()
    const step = (block: Block, x: Tensor, targets: Tensor) => {
      using tape = new Tape()
      using loss = tape.record(() => lossOf(block, x, targets))
      tape.backward(loss)
      for (const param of block.parameters()) param.dropGrad()
    }
    {
      using block = new Block(build({ recipe }), 'b', llama)
      using x = Tensor.from(noise(M * 24, 1), [M, 24], { format: recipes[recipe].stream })
      using targets = targetsOf(24)
      step(block, x, targets)
      const first = memory()
      for (let i = 0; i < 1000; i++) step(block, x, targets)
      expect(memory().live).toEqual(first.live)
      expect(memory().tensors).toBe(first.tensors)
    }
    expect(memory().live).toEqual(before.live)
    native.checkGuards()
  })

  it('an error in forward or backward frees what was made', () => {
    const before = memory().tensors
    {
      using block = new Block(build({ recipe: 'coat' }), 'b', llama)
      using x = Tensor.from(noise(M * 24, 1), [M, 24], { format: 'bf16' })
      using wrong = Tensor.from(
        Int32Array.from({ length: M }, () => 24),
        [M],
      )
      expect(() => {
        using tape = new Tape()
        tape.record(() => lossOf(block, x, wrong))
      }).toThrow(
        'cross_entropy_forward: targets[0] is 24 and must be -100 (ignored) or at least 0 and less than V = 24',
      )
      using tape = new Tape()
      using y = tape.record(() => block.forward(x, T))
      expect(() => tape.backward(y)).toThrow(/loss bf16\[10, 24\] must be f32\[1\]/)
    }
    expect(memory().tensors).toBe(before)
  })

  it('a frozen parameter gets no gradient', () => {
    using block = new Block(build({ recipe: 'coat' }), 'b', llama)
    for (const param of block.parameters('*norm*')) param.frozen = true
    using x = Tensor.from(noise(M * 24, 1), [M, 24], { format: 'bf16' })
    using targets = targetsOf(24)
    using tape = new Tape()
    using loss = tape.record(() => lossOf(block, x, targets))
    tape.backward(loss)
    for (const { name, grad, frozen } of block.parameters()) expect(grad === null, name).toBe(frozen)
  })
})
