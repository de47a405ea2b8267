// Models of config.json against a decoder in float64: stretched rotations, biases, shared heads, norms; what is refused.
import { describe, expect, it } from 'vitest'
import { type LlamaConfig, LlamaForCausalLM, noGrad, ops, scope, Tensor } from '../lib/index.ts'
import { Random } from './values.ts'

const sizes = {
  hidden_size: 24,
  intermediate_size: 20,
  num_hidden_layers: 2,
  num_attention_heads: 4,
  num_key_value_heads: 2,
  vocab_size: 40,
  max_position_embeddings: 64,
}
const llama3 = {
  rope_type: 'llama3',
  factor: 8,
  low_freq_factor: 1,
  high_freq_factor: 4,
  original_max_position_embeddings: 32,
}

/** Radians a position of the pair i, after the definition of Llama 3.1. */
function frequency(config: LlamaConfig, D: number, i: number): number {
  const fields = config.rope_scaling ?? config.rope_parameters
  const plain = (fields?.rope_theta ?? config.rope_theta ?? 10000) ** ((-2 * i) / D)
  const { rope_type: kind, factor = 1, low_freq_factor: low = 1, high_freq_factor: high = 1 } = fields ?? {}
  if (kind === 'linear' || fields?.type === 'linear') return plain / factor
  if (kind !== 'llama3') return plain
  const old = fields?.original_max_position_embeddings as number
  const length = (2 * Math.PI) / plain
  if (length < old / high) return plain
  if (length > old / low) return plain / factor
  const smooth = (old / length - low) / (high - low)
  return ((1 - smooth) * plain) / factor + smooth * plain
}

/** Logits [T, V] of one sequence in float64. */
async function reference(model: LlamaForCausalLM, config: LlamaConfig, ids: readonly number[]): Promise<number[][]> {
  const values = async (name: string): Promise<number[][] | null> => {
    const found = model.find(name)
    if (!found) return null
    const all = await found.param.tensor.read()
    const width = all.length / (found.param.tensor.shape[0] as number)
    const [from, to] = found.rows
    return Array.from({ length: to - from }, (_, r) => [...all.subarray((from + r) * width, (from + r + 1) * width)])
  }
  const linear = async (rows: number[][], name: string): Promise<number[][]> => {
    const w = (await values(`${name}.weight`)) as number[][]
    const b = await values(`${name}.bias`)
    return rows.map((x) => w.map((row, n) => row.reduce((sum, v, k) => sum + v * (x[k] as number), b?.[n]?.[0] ?? 0)))
  }
  const mean = (x: number[]) => x.reduce((a, b) => a + b, 0) / x.length
  const norm = async (rows: number[][], name: string): Promise<number[][]> => {
    const w = await values(`${name}.weight`)
    const { rms_norm_eps: eps } = model.config
    return rows.map((x) => {
      const centre = w ? 0 : mean(x)
      const scale = 1 / Math.sqrt(mean(x.map((v) => (v - centre) ** 2)) + eps)
      return x.map((v, i) => (v - centre) * scale * (w?.[i]?.[0] ?? 1))
    })
  }
  const D = config.head_dim ?? config.hidden_size / config.num_attention_heads
  const turned = (row: number[], t: number): number[] => {
    const out = [...row]
    for (let head = 0; head < row.length; head += D)
      for (let i = 0; i < D / 2; i++) {
        const [a, b] = [row[head + i] as number, row[head + i + D / 2] as number]
        const angle = t * frequency(config, D, i)
        out[head + i] = a * Math.cos(angle) - b * Math.sin(angle)
        out[head + i + D / 2] = b * Math.cos(angle) + a * Math.sin(angle)
      }
    return out
  }
  const add = (a: number[][], b: number[][]) => a.map((row, t) => row.map((x, i) => x + (b[t]?.[i] as number)))
  const embedding = (await values('model.embed_tokens.weight')) as number[][]
  let x = ids.map((id) => embedding[id] as number[])
  const group = config.num_attention_heads / (config.num_key_value_heads ?? config.num_attention_heads)
  for (let layer = 0; layer < config.num_hidden_layers; layer++) {
    const at = `model.layers.${layer}`
    const h = await norm(x, `${at}.input_layernorm`)
    const q = (await linear(h, `${at}.self_attn.q_proj`)).map(turned)
    const k = (await linear(h, `${at}.self_attn.k_proj`)).map(turned)
    const v = await linear(h, `${at}.self_attn.v_proj`)
    const mixed = q.map((row, t) =>
      Array.from({ length: config.num_attention_heads }, (_, head) => {
        const shared = Math.floor(head / group) * D
        const scores = k.slice(0, t + 1).map((key) => {
          let sum = 0
          for (let i = 0; i < D; i++) sum += (row[head * D + i] as number) * (key[shared + i] as number)
          return sum / Math.sqrt(D)
        })
        const top = Math.max(...scores)
        const p = scores.map((score) => Math.exp(score - top))
        const total = p.reduce((a, b) => a + b, 0)
        return Array.from({ length: D }, (_, i) =>
          p.reduce((sum, weight, s) => sum + (weight / total) * (v[s]?.[shared + i] as number), 0),
        )
      }).flat(),
    )
    x = add(x, await linear(mixed, `${at}.self_attn.o_proj`))
    const m = await norm(x, `${at}.post_attention_layernorm`)
    const gate = await linear(m, `${at}.mlp.gate_proj`)
    const up = await linear(m, `${at}.mlp.up_proj`)
    const product = gate.map((row, t) => row.map((g, i) => (g / (1 + Math.exp(-g))) * (up[t]?.[i] as number)))
    x = add(x, await linear(product, `${at}.mlp.down_proj`))
  }
  return linear(await norm(x, 'model.norm'), 'lm_head')
}

describe('logits in fp32', () => {
  const cases: [string, Partial<LlamaConfig>][] = [
    ['Llama 2', {}],
    ['Llama 3, rope_scaling', { rope_theta: 500, rope_scaling: llama3 }],
    ['Llama 3, rope_parameters', { rope_parameters: { ...llama3, rope_theta: 500 } }],
    ['linear scaling', { rope_scaling: { type: 'linear', factor: 4 } }],
    ['biases everywhere', { attention_bias: true, mlp_bias: true }],
    ['Mistral', { model_type: 'mistral', num_key_value_heads: 1, head_dim: 10 }],
    ['Qwen2', { model_type: 'qwen2', rope_theta: 1e6 }],
    ['OLMo', { model_type: 'olmo' }],
  ]
  it.each(cases)('%s', async (_, change) => {
    const config = { ...sizes, ...change }
    using model = new LlamaForCausalLM(config, { recipe: 'fp32', seed: 3 })
    const random = new Random(5)
    for (const param of model.parameters())
      param.write(Float32Array.from({ length: param.tensor.numel }, () => 0.3 * random.normal()))
    const ids = Array.from({ length: 48 }, (_, i) => (i * 17 + 3) % sizes.vocab_size)
    using y = noGrad(() => scope(() => model.forward(Tensor.from(Int32Array.from(ids), [48]), 48)))
    const logits = await y.read()
    const goal = (await reference(model, config, ids)).flat()
    const largest = Math.max(...goal.map(Math.abs))
    for (const [i, x] of goal.entries()) expect(Math.abs((logits[i] as number) - x) / largest).toBeLessThan(2e-5)
  })
})

it('a stretched rotation is the one of Llama 3.1', () => {
  const scaling = { factor: 8, low: 1, high: 4, positions: 8192 }
  const frequencies = ops.ropeFrequencies(128, { theta: 5e5, scaling })
  const fields = { ...llama3, original_max_position_embeddings: 8192 }
  const config = { ...sizes, rope_theta: 5e5, rope_scaling: fields }
  const plain = ops.ropeFrequencies(128, { theta: 5e5 })
  for (const [i, x] of frequencies.entries()) expect(x).toBeCloseTo(frequency(config, 128, i), 14)
  const ratios = [...frequencies].map((x, i) => x / (plain[i] as number))
  expect(ratios[0]).toBe(1)
  expect(ratios[63]).toBe(1 / 8)
  expect(ratios.filter((ratio) => ratio > 0.126 && ratio < 0.999).length).toBeGreaterThan(3)
})

describe('config.json', () => {
  const make = (change: object) => () => new LlamaForCausalLM({ ...sizes, ...change }, { recipe: 'fp32' }).dispose()
  it.each([
    [{ model_type: 'gpt2' }, 'model_type is gpt2 and must be one of llama, mistral, qwen2, olmo'],
    [{ rope_scaling: { type: 'dynamic', factor: 2 } }, 'rope_scaling is {"type":"dynamic","factor":2} and is not supp'],
    [{ rope_parameters: { rope_type: 'yarn' } }, 'its rope_type must be one of default, linear, llama3'],
    [{ rope_scaling: { type: 'linear' } }, 'rope_scaling.factor is undefined and must be a number above 0'],
    [{ rope_scaling: { ...llama3, high_freq_factor: 1 } }, 'rope_scaling.low_freq_factor is 1 and must be below'],
    [{ rope_scaling: { ...llama3, beta_fast: 2 } }, 'rope_scaling.beta_fast is 2 and is not known for rope_type'],
    [{ rope_scaling: llama3, rope_parameters: { rope_theta: 5e5 } }, 'must be as in rope_parameters'],
    [{ model_type: 'qwen2', attention_bias: false }, 'attention_bias is false and must be true for model_type qwen2'],
    [
      { model_type: 'mistral', attention_bias: true },
      'attention_bias is true and must be false for model_type mistral',
    ],
    [{ model_type: 'mistral', mlp_bias: true }, 'mlp_bias is true and must be false for model_type mistral'],
    [{ attention_dropout: 0.1 }, 'attention_dropout is 0.1 and is not known: it may change the result'],
    [{ clip_qkv: 8 }, 'clip_qkv is 8 and is not known'],
    [{ quantization_config: { bits: 4 } }, 'quantization_config is {"bits":4} and is not known'],
    [{ final_logit_softcapping: 30 }, 'final_logit_softcapping is 30 and is not known'],
    [{ hiden_size: 8 }, 'hiden_size is 8 and is not known'],
    [{ num_attention_heads: 33, num_key_value_heads: 2, hidden_size: 66 }, 'num_key_value_heads is 2 and must divide'],
  ])('%j is refused by name', (change, text) => {
    expect(make(change)).toThrow(text)
  })
  it('takes what is of no matter, and what is off', () => {
    const off = { attention_dropout: 0.0, clip_qkv: null, use_sliding_window: false, partial_rotary_factor: 1.0 }
    expect(make({ ...off, head_dim: null, bos_token_id: [1, 2], pretraining_tp: 1, use_cache: true })).not.toThrow()
  })
})
