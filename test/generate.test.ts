// Generation: rows against a cache equal the whole sequence at once; streams, choices, and what is refused.
import { afterAll, describe, expect, it } from 'vitest'
import { sampled } from '../lib/generate.ts'
import { KeyValues, LlamaForCausalLM, memory, noGrad, scope, Tensor } from '../lib/index.ts'
import { smallLlama as config, Random } from './values.ts'

const before = memory().tensors
afterAll(() => expect(memory().tensors).toBe(before))

const ids = (count: number) => Array.from({ length: count }, (_, i) => (i * 31 + 7) % config.vocab_size)

/** The likeliest next token by the whole sequence at once. */
async function greedy(model: LlamaForCausalLM, tokens: readonly number[]): Promise<number> {
  using y = noGrad(() =>
    scope(() => model.forward(Tensor.from(Int32Array.from(tokens), [tokens.length]), tokens.length)),
  )
  const last = Array.from(await y.read()).slice((tokens.length - 1) * config.vocab_size)
  return last.indexOf(Math.max(...last))
}

/** A model whose logits are far enough apart to tell. */
function modelOf(change: object = {}, recipe: 'fp32' | 'bf16' | 'coat' = 'fp32'): LlamaForCausalLM {
  const model = new LlamaForCausalLM({ ...config, ...change }, { recipe })
  const random = new Random(11)
  for (const param of model.parameters())
    param.write(Float32Array.from({ length: param.tensor.numel }, () => 0.4 * random.normal()))
  return model
}

describe('greedy', () => {
  const scaling = { rope_type: 'linear', factor: 2 }
  it.each([
    ['llama', {}],
    ['qwen2', { model_type: 'qwen2' }],
    ['olmo, stretched', { model_type: 'olmo', rope_scaling: scaling }],
    ['mistral, one key/value head, a window', { model_type: 'mistral', num_key_value_heads: 1, sliding_window: 7 }],
  ])('%s: tokens are those of the whole sequence', async (_, change) => {
    using model = modelOf(change)
    for (const prompt of [ids(1), ids(19)]) {
      const tokens = [...prompt]
      while (tokens.length < prompt.length + 12) tokens.push(await greedy(model, tokens))
      expect(await model.generate(prompt, { maxTokens: 12 })).toEqual(tokens.slice(prompt.length))
    }
  })

  it('goes on from the second half of what outgrows the positions', async () => {
    using model = modelOf({ max_position_embeddings: 16 })
    const prompt = ids(12)
    const tokens = await model.generate(prompt, { maxTokens: 30 })
    const all = [...prompt, ...tokens]
    // the cache is full with 16 rows; of the 17 tokens then the last 8 begin the next
    expect(all[17]).toBe(await greedy(model, all.slice(9, 17)))
    expect(all[20]).toBe(await greedy(model, all.slice(9, 20)))
    expect(await model.generate(ids(40), { maxTokens: 1 })).toEqual([await greedy(model, ids(40).slice(-8))])
  })

  it.each(['bf16', 'coat'] as const)('%s: runs, and repeats itself', async (recipe) => {
    using model = modelOf({}, recipe)
    const tokens = await model.generate(ids(9), { maxTokens: 8 })
    expect(tokens).toHaveLength(8)
    expect(await model.generate(ids(9), { maxTokens: 8 })).toEqual(tokens)
  })
})

it('rows in one pass, or one by one, have the same attention', async () => {
  using model = modelOf()
  const run = async (pieces: readonly number[]): Promise<number[]> => {
    using past = new KeyValues(24, model.device)
    const rows: number[] = []
    let at = 0
    for (const count of pieces) {
      using x = noGrad(() =>
        scope(() => {
          const first = Tensor.from(
            Float32Array.from({ length: count * 32 }, (_, i) => Math.sin(at * 32 + i)),
            [count, 32],
          )
          return (model.layers[0] as (typeof model.layers)[0]).forward(first, count, null, null, past)
        }),
      )
      rows.push(...(await x.read()))
      past.advance(count)
      at += count
    }
    return rows
  }
  const whole = await run([24])
  for (const pieces of [[1, 22, 1], Array(24).fill(1)])
    for (const [i, x] of (await run(pieces)).entries()) expect(Math.abs(x - (whole[i] as number))).toBeLessThan(1e-4)
})

describe('choices', () => {
  it('stream as they are made, end where they should, and depend on the seed', async () => {
    using model = modelOf()
    const options = { maxTokens: 20, temperature: 1.5, seed: 3 }
    const all = await model.generate(ids(4), options)
    expect(await model.generate(ids(4), options)).toEqual(all)
    expect(await model.generate(ids(4), { ...options, seed: 4 })).not.toEqual(all)
    expect(await model.generate(ids(4), { ...options, maxTokens: 7 })).toEqual(all.slice(0, 7))
    const held = memory().tensors
    const seen: number[] = []
    for await (const token of model.stream(ids(4), options)) if (seen.push(token) === 5) break
    expect(seen).toEqual(all.slice(0, 5))
    expect(memory().tensors).toBe(held)
    const stop = all[9] as number
    expect(await model.generate(ids(4), { ...options, stop: [stop] })).toEqual(all.slice(0, all.indexOf(stop)))
  })
  it('topP leaves the likeliest that reach it, temperature sharpens', () => {
    const logits = [1, 3, 2, 0].map((x) => x * Math.LN2) // chances 2/15, 8/15, 4/15, 1/15
    const counts = (temperature: number, topP: number) => {
      const seen = [0, 0, 0, 0]
      for (let i = 0; i < 1500; i++) {
        const token = sampled(logits, { temperature, topP, seed: 0 }, (i + 0.5) / 1500)
        seen[token] = (seen[token] as number) + 1
      }
      return seen
    }
    expect(counts(1, 1)).toEqual([200, 800, 400, 100])
    expect(counts(1, 0.8)).toEqual([0, 1000, 500, 0])
    expect(counts(1, 0.53)).toEqual([0, 1500, 0, 0])
    expect(counts(0.5, 0.9)).toEqual([0, 1200, 300, 0])
    expect(counts(0, 1)).toEqual([0, 1500, 0, 0])
  })
  it('are refused by name', async () => {
    using model = modelOf()
    const refused = (options: object, prompt = [1]) => expect(model.generate(prompt, options)).rejects
    await refused({}, []).toThrow('generate: prompt is empty')
    await refused({ maxTokens: 0 }).toThrow('maxTokens is 0 and must be an integer of at least 1')
    await refused({ temperature: -1 }).toThrow('temperature is -1 and must be a finite number of at least 0')
    await refused({ topP: 0 }).toThrow('topP is 0 and must be above 0 and at most 1')
    await refused({ seed: 0.5 }).toThrow('seed is 0.5 and must be an integer of at least 0')
    await refused({ topK: 3 }).toThrow("option 'topK' is unknown; the options are maxTokens, temperature")
    await refused({}, [256]).toThrow('embedding_forward: ids[0] is 256 and must be at least 0 and less than V = 256')
    expect(() => sampled([1, Number.NaN], { temperature: 1, topP: 1, seed: 0 }, 0.5)).toThrow('logits[1] is NaN')
  })
})
