// Recipes: which are accepted, which are refused and how; what they cost in state.
import { expect, it } from 'vitest'
import { AdamW, CoatError, LlamaForCausalLM, type Recipe, type RecipeName, recipe, recipes } from '../lib/index.ts'

const config = {
  hidden_size: 64,
  intermediate_size: 172,
  num_hidden_layers: 2,
  num_attention_heads: 4,
  vocab_size: 256,
  tie_word_embeddings: true,
}

it('accepts its own rows', () => {
  for (const [name, row] of Object.entries(recipes)) {
    expect(recipe(name as RecipeName)).toBe(row)
    expect(recipe({ ...row })).toEqual(row)
  }
})

it.each<[unknown, RegExp]>([
  ['cote', /recipe: 'cote' is unknown; the recipes are fp32, bf16, coat/],
  ['toString', /'toString' is unknown/],
  [{ ...recipes.coat, mm: 'f32' }, /axis 'mm' is unknown; the axes are x, w, dy/],
  [{ ...recipes.coat, m: 'e4m3' }, /m is 'e4m3' and must be one of 'f32', 'bf16', 'e4m3\/t', 'e4m3\/g64'/],
  [{ ...recipes.coat, flow: 'paper' }, /flow is 'paper' and must be one of 'fp8', 'save'/],
  [{ ...recipes.coat, dy: 'bf16' }, /x, w and dy must be .*; received x 'e4m3\/t'/],
  [{ ...recipes.bf16, saved: 'e4m3/g16' }, /saved 'e4m3\/g16' needs x 'e4m3\/t'/],
  [{ ...recipes.coat, saved: 'bf16' }, /x 'e4m3\/t' needs saved/],
  [{ ...recipes.fp32, stream: 'bf16' }, /must have the format of stream/],
  [{ ...recipes.fp32, attention: 'e4m3/g16' }, /attention 'e4m3\/g16' needs stream 'bf16'/],
  [{ ...recipes.coat, v: 'f32' }, /m and v must be a pair of formats that adamw has; received/],
  [{ ...recipes.fp32, master: 'f32' }, /param 'f32' takes no master/],
  [{ ...recipes.fp32, rounding: 'stochastic' }, /rounding other than 'nearest' needs param 'bf16' and no master/],
  [{ ...recipes.bf16, rounding: 'kahan' }, /rounding other than 'nearest' needs param 'bf16' and no master/],
])('refuses %j', (which, text) => {
  const attempt = () => recipe(which as Recipe)
  expect(attempt).toThrow(CoatError)
  expect(attempt).toThrow(text)
})

it("coat-paper is the paper's flow; coat-bf16 differs from coat in parameters alone", () => {
  expect(recipes['coat-paper']).toEqual({ ...recipes.coat, flow: 'fp8' })
  expect(recipes['coat-bf16']).toEqual({ ...recipes.coat, param: 'bf16', rounding: 'stochastic' })
})

it('state: 8 bytes a parameter in fp32, at most 2.2 in coat, 12 with the master of bf16', () => {
  const perParameter = (name: RecipeName): number => {
    using model = new LlamaForCausalLM(config, { recipe: name })
    using optimizer = new AdamW(model, recipes[name])
    const count = optimizer.params.reduce((sum, { tensor }) => sum + tensor.numel, 0)
    return optimizer.stateBytes / count
  }
  expect(perParameter('fp32')).toBe(8)
  expect(perParameter('coat')).toBeLessThanOrEqual(2.2)
  expect(perParameter('bf16')).toBeGreaterThan(11.9)
})

it('refuses a model that cannot be', () => {
  const make = (change: object) => () => new LlamaForCausalLM({ ...config, ...change }, { recipe: 'fp32' })
  expect(make({ num_key_value_heads: 3 })).toThrow(/num_key_value_heads is 3 and must divide num_attention_heads = 4/)
  expect(make({ hidden_size: 66 })).toThrow(/hidden_size is 66 and must give an even head size/)
  expect(make({ vocab_size: 0 })).toThrow(/vocab_size is 0 and must be an integer of at least 1/)
  expect(make({ rope_theta: 1e4, rope_parameters: { rope_theta: 5e5 } })).toThrow(
    'rope_theta is 10000 and must equal that of rope_parameters, 500000',
  )
})

it('reads the rotation of newer configs', () => {
  using model = new LlamaForCausalLM({ ...config, rope_parameters: { rope_theta: 5e5 } }, { recipe: 'fp32' })
  expect(model.config.rope_theta).toBe(5e5)
})

it('reads the windows of Mistral and Qwen2', () => {
  const windows = (change: object) => {
    using model = new LlamaForCausalLM({ ...config, ...change }, { recipe: 'fp32' })
    return model.layers.map(({ attention }) => attention.sizes.window)
  }
  expect(windows({ sliding_window: 7 })).toEqual([0, 0])
  expect(windows({ model_type: 'mistral', sliding_window: 7 })).toEqual([7, 7])
  expect(windows({ model_type: 'mistral', sliding_window: null })).toEqual([0, 0])
  const qwen = { model_type: 'qwen2', sliding_window: 7, max_window_layers: 1 }
  expect(windows(qwen)).toEqual([0, 0])
  expect(windows({ ...qwen, use_sliding_window: true })).toEqual([0, 7])
  const layer_types = ['sliding_attention', 'full_attention']
  expect(windows({ ...qwen, use_sliding_window: true, layer_types })).toEqual([7, 0])
  expect(() => windows({ model_type: 'mistral', sliding_window: 0 })).toThrow(/sliding_window is 0 and must be/)
  expect(() => windows({ layer_types: ['full_attention'] })).toThrow(/layer_types is .* for each of 2 layers/)
  expect(() => windows({ layer_types: ['full_attention', 'none'] })).toThrow(
    /layer_types is .* must hold full_attention/,
  )
})

it('starts every recipe from the same values', async () => {
  using a = new LlamaForCausalLM(config, { recipe: 'fp32', seed: 5 })
  using b = new LlamaForCausalLM(config, { recipe: 'coat', seed: 5 })
  using c = new LlamaForCausalLM(config, { recipe: 'fp32', seed: 6 })
  for (const [i, param] of a.parameters().entries()) {
    const values = await param.tensor.read()
    expect(await b.parameters()[i]?.tensor.read()).toEqual(values)
    if (values.length > 64) expect(await c.parameters()[i]?.tensor.read()).not.toEqual(values)
  }
})

it('gives weight decay to matrices and the embedding alone', () => {
  using model = new LlamaForCausalLM({ ...config, model_type: 'qwen2', tie_word_embeddings: false }, { recipe: 'fp32' })
  for (const { name, tensor, decay } of model.parameters()) {
    expect(decay, name).toBe(tensor.shape.length === 2)
    expect(/norm|bias/.test(name), name).toBe(!decay)
  }
})
