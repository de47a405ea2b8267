// AdamW's groups: parameters with a learning rate, decay or state formats of their own.
import { describe, expect, it } from 'vitest'
import {
  AdamW,
  type AdamWOptions,
  type AdamWOverride,
  CoatError,
  device,
  LlamaForCausalLM,
  type Param,
  scope,
  Tape,
  Tensor,
} from '../lib/index.ts'
import { devices, present } from './harness.ts'

const config = {
  hidden_size: 32,
  intermediate_size: 48,
  num_hidden_layers: 2,
  num_attention_heads: 2,
  vocab_size: 64,
  tie_word_embeddings: true,
}
const usual = { lr: 0.01, betas: [0.9, 0.95], eps: 1e-12, weightDecay: 0 } as const

function failure(make: () => unknown): CoatError {
  try {
    make()
  } catch (error) {
    if (error instanceof CoatError) return error
    throw error
  }
  throw new Error('nothing was refused')
}

describe.each(devices)('on %s', (name) => {
  const skip = !present(name)

  /** By parameter: values before and after `steps` steps of lr 0.01 on the same gradients. */
  async function trained(options: AdamWOptions, recipe: 'fp32' | 'bf16' | 'coat' = 'fp32', steps = 1) {
    using where = device(name)
    using model = new LlamaForCausalLM(config, { recipe, seed: 1, device: where })
    using optimizer = new AdamW(model, model.recipe, { ...usual, ...options })
    const read = async (of: (param: Param) => Tensor) =>
      Object.fromEntries(
        await Promise.all(optimizer.params.map(async (param) => [param.name, [...(await of(param).read())]])),
      ) as Record<string, number[]>
    const before = await read(({ tensor }) => tensor)
    const ids = Int32Array.from({ length: 16 }, (_, i) => (i * 7) % 64)
    for (let step = 0; step < steps; step++) {
      scope(() => {
        using tape = new Tape()
        const tokens = [0, 1].map(() => Tensor.from(ids, [16], { device: where })) as [Tensor, Tensor]
        tape.backward(tape.record(() => model.loss(...tokens, 16, 1 / 16)))
      })
      optimizer.step(0.01)
      optimizer.advance()
      optimizer.dropGrads()
    }
    const formats = Object.fromEntries(optimizer.params.map((p) => [p.name, optimizer.stateOf(p).m.format]))
    return { before, after: await read(({ tensor }) => tensor), formats, bytes: optimizer.stateBytes }
  }
  const override = (...parameters: AdamWOverride[]) => ({ parameters })
  const embedding = 'model.embed_tokens.weight'
  const norm = 'model.norm.weight'

  it.skipIf(skip)('lr of a parameter scales its change and no other', async () => {
    const plain = await trained({})
    const half = await trained(override({ match: 'model.layers.*', lr: 0.005 }))
    for (const [name, before] of Object.entries(plain.before)) {
      const share = name.startsWith('model.layers.') ? 0.5 : 1
      before.forEach((x, i) => {
        const change = ((plain.after[name] as number[])[i] as number) - x
        expect(((half.after[name] as number[])[i] as number) - x).toBeCloseTo(share * change, 6)
      })
    }
    const frozen = await trained(override({ match: embedding, lr: 0 }))
    expect(frozen.after[embedding]).toEqual(frozen.before[embedding])
    expect(frozen.after[norm]).toEqual(plain.after[norm])
  })

  it.skipIf(skip)('weightDecay of a parameter decays it, also where nothing decays by itself', async () => {
    const plain = await trained({})
    const decayed = await trained(override({ match: norm, weightDecay: 0.5 }))
    for (const [i, x] of (plain.after[norm] as number[]).entries())
      expect(x - ((decayed.after[norm] as number[])[i] as number)).toBeCloseTo(0.01 * 0.5 * 1, 6)
    expect(decayed.after[embedding]).toEqual(plain.after[embedding])
  })

  it.skipIf(skip)('betas and eps of a parameter are its own; the last override that has a value gives it', async () => {
    const betas = [0.5, 0.6] as const
    expect(await trained(override({ match: '*', betas }), 'fp32', 3)).toEqual(await trained({ betas }, 'fp32', 3))
    const plain = await trained({})
    const last = override({ match: '*', eps: 1 }, { match: '*', eps: 1e-12 }, { match: embedding, eps: 1 })
    const { after } = await trained(last)
    expect({ ...after, [embedding]: plain.after[embedding] }).toEqual(plain.after)
    expect(after[embedding]).not.toEqual(plain.after[embedding])
  })

  it.skipIf(skip)('m and v of a parameter have the formats asked for, in one step with the others', async () => {
    const given = override({ match: 'model.embed_tokens.*', m: 'f32', v: 'f32' })
    const { formats, bytes, after, before } = await trained(given, 'coat', 2)
    expect(formats[embedding]).toBe('f32')
    expect(Object.entries(formats).filter(([, format]) => format !== 'e4m3/x128')).toEqual([[embedding, 'f32']])
    const saved = bytes - (await trained({}, 'coat')).bytes
    expect(saved).toBe(64 * 32 * 6 - 2 * 12 * 16) // 8 bytes an element for 2, and 16 runs of three f32 a moment
    for (const [name, values] of Object.entries(before)) expect(after[name]).not.toEqual(values)
  })
})

it('takes unsafe formats of v where it is told to', () => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  const parameters = [{ match: '*', m: 'e4m3/g128', v: 'e4m3/g128' }] as const
  using optimizer = new AdamW(model, model.recipe, { parameters, allowUnsafe: true })
  for (const param of optimizer.params) expect(optimizer.stateOf(param).v?.format).toBe('e4m3/g128')
})

it.each<[AdamWOptions, RegExp]>([
  [
    { parameters: [{ match: 'model.nothing.*' }] },
    /parameters\[0\]\.match is 'model\.nothing\.\*', which no parameter/,
  ],
  [
    { parameters: [{ match: '*', rate: 1 } as never] },
    /option 'parameters\[0\]\.rate' is unknown; the options are match,/,
  ],
  [{ parameters: [{} as never] }, /parameters\[0\]\.match is undefined and must be the name of parameters/],
  [{ parameters: [{ match: '*', lr: -1 }] }, /parameters\[0\]\.lr is -1 and must be a finite number of at least 0/],
  [
    { parameters: [{ match: '*', betas: [0.9, 1] }] },
    /parameters\[0\]\.betas\[1\] is 1 and must be at least 0 and less/,
  ],
  [{ lr: 0, parameters: [{ match: '*', lr: 1 }] }, /parameters\[0\]\.lr is 1 and lr is 0, which must be greater/],
  [
    { parameters: [{ match: '*norm*', m: 'bf16' }] },
    /m bf16 with v f32, of parameter '.*norm.*', is not a pair .* f32 with f32/,
  ],
])('refuses %j', (options, text) => {
  using model = new LlamaForCausalLM(config, { recipe: 'fp32' })
  expect(failure(() => new AdamW(model, model.recipe, options)).message).toMatch(text)
})
