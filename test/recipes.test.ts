// Recipes: which are accepted, which are refused and how; what they cost in state.
import { describe, expect, it } from 'vitest'
import {
  AdamW,
  CoatError,
  LlamaForCausalLM,
  type Recipe,
  type RecipeChange,
  type RecipeName,
  recipe,
  recipes,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { sentence } from './values.ts'

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
  [{ ...recipes.coat, dy: 'e4m3/r' }, /x, w and dy must be .*; received x 'e4m3\/t'/],
  [{ ...recipes.coat, w: 'f32' }, /x, w or dy must have the format of stream; received x 'e4m3\/t', w 'f32'/],
  [{ ...recipes.coat, dy: 'f32' }, /x, w or dy must have the format of stream/],
  [{ ...recipes.coat, stream: 'f32', saved: 'f32', x: 'bf16' }, /x, w or dy must have the format of stream/],
  [{ ...recipes['ao-rowwise'], dy: 'bf16' }, /or each plain or as in e4m3\/t, e4m3\/t, e5m2\/t; received x 'e4m3\/r'/],
  [{ ...recipes['deepseek-v3'], x: 'bf16' }, /or each plain or as in e4m3\/t, e4m3\/t, e5m2\/t; received/],
  [{ ...recipes.coat, scale: 'delayed' }, /scale is 'delayed' and must be one of 'current'/],
  [
    { ...recipes.coat, scale: { history: 0, pick: 'max', margin: 0 } },
    /scale.history is 0 and must be an integer of at/,
  ],
  [
    { ...recipes.coat, scale: { history: 1, pick: 'min', margin: 0 } },
    /scale.pick is "min" and must be one of max, most/,
  ],
  [{ ...recipes.coat, scale: { history: 1, pick: 'max', margin: 0.5 } }, /scale.margin is 0.5 and must be an integer/],
  [
    { ...recipes.coat, scale: { history: 1, length: 2 } },
    /axis 'scale.length' is unknown; a delayed scale has history/,
  ],
  [
    { ...recipes['te-block'], scale: recipes['te-delayed'].scale },
    /a delayed scale needs x 'e4m3\/t', .* scale \{"hist/,
  ],
  [{ ...recipes['te-delayed'], w: 'bf16' }, /a delayed scale needs x 'e4m3\/t', w 'e4m3\/t', dy 'e5m2\/t' and param/],
  [{ ...recipes.coat, dwFrom: 'stream' }, /dwFrom 'stream' needs x 'e4m3\/r' or plain x, w and dy, and param/],
  [
    { ...recipes.coat, x: 'bf16', dwFrom: 'stream' },
    /dwFrom 'stream' needs x 'e4m3\/r' or plain x, w and dy, and param/,
  ],
  [{ ...recipes.coat, qkvGrad: 'both' }, /qkvGrad is 'both' and must be one of fused, split/],
  [
    { ...recipes.coat, dy: 'bf16', qkvGrad: 'split' },
    /qkvGrad 'split' needs dy 'e5m2\/t', whose one scale it replaces/,
  ],
  [{ ...recipes['deepseek-v3'], qkvGrad: 'split' }, /qkvGrad 'split' needs dy 'e5m2\/t'/],
  [{ ...recipes['te-delayed'], qkvGrad: 'split' }, /qkvGrad 'split' needs .* and scale 'current'; received/],
  [
    { ...recipes.coat, w: 'bf16', accumulate: 'fast' },
    /accumulate other than 'split' needs x 'e4m3\/t', w 'e4m3\/t', dy/,
  ],
  [{ ...recipes.coat, qkvGrad: 'split', accumulate: 'fast' }, /accumulate other than .* and qkvGrad 'fused'/],
  [{ ...recipes['ao-rowwise-gw-hp'], param: 'f16/t' }, /dwFrom 'stream' needs .* param 'f32' or 'bf16'/],
  [{ ...recipes['te-block'], saved: 'e4m3/g16' }, /saved 'e4m3\/g16' needs x 'e4m3\/t' or plain; rec/],
  [
    { ...recipes['te-block'], dy: 'e5m2/t' },
    /x, w and dy must be .*; received x 'e4m3\/g128p2', w 'e4m3\/b128p2', dy 'e5m2\/t'/,
  ],
  [{ ...recipes['fp8-lm-o3'], master: null }, /and 'e4m3\/t' needs 'f16\/t'; received/],
  [{ ...recipes.bf16, master: 'f16/t' }, /'bf16' or 'f16\/t' null or 'f32'/],
  [{ ...recipes['collage-plus'], master: 'f32' }, /param 'f32' or 'bf16x2' takes no master/],
  [{ ...recipes['collage-plus'], rounding: 'stochastic' }, /rounding other than 'nearest' needs param 'bf16'/],
  [{ ...recipes.fp32, stream: 'bf16' }, /must have the format of stream/],
  [{ ...recipes.fp32, attention: 'e4m3/g16' }, /attention other than 'stream' needs stream 'bf16'/],
  [{ ...recipes.fp32, attention: 'i8/g16' }, /attention other than 'stream' needs stream 'bf16'/],
  [{ ...recipes.coat, v: 'f32' }, /m and v must be a pair of formats that adamw has; received/],
  [{ ...recipes.fp32, master: 'f32' }, /param 'f32' or 'bf16x2' takes no master/],
  [{ ...recipes.fp32, rounding: 'stochastic' }, /rounding other than 'nearest' needs param 'bf16' and no master/],
  [
    { ...recipes.bf16, emulated: recipes['wang-152'].emulated },
    /emulated needs x, w, dy, saved, stream, param, dw, m and v f32; rec/,
  ],
  [{ ...recipes.e8m5, w: 'e4m3/t' }, /emulated needs x, w, dy, saved/],
  [{ ...recipes.e8m5, saved: 'e4m3/g16' }, /emulated needs x, w, dy, saved/],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, bits: 8 } },
    /axis 'emulated.bits' is unknown; an emulation/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, chunk: -1 } },
    /emulated.chunk is -1 and must be an integer/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, lossScale: 3 } },
    /emulated.lossScale is 3 and must be a po/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, sum: 'f16' } },
    /emulated.sum is 'f16': .* must be eEmM, eEm/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, operand: { x: 'e5m2', w: 'e5m2' } } },
    /emulated.operand has x, w and must be a word or have x, w, dy/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, result: { db: 'e5m2' } } },
    /emulated.result has db and must be a word or have y, dx, dw/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, result: { dw: 'f16' } } },
    /emulated.result.dw is 'f16': .* must be eEmM, eEmM\/inf or q/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes['micikevicius-f16'].emulated, chunk: 64 } },
    /emulated.chunk is 64 and must be an integer of at least 0, and 0 with sum 'f32'/,
  ],
  [
    { ...recipes.fp32, emulated: { ...recipes.e8m5.emulated, update: 'e9m2' } },
    /emulated.update is 'e9m2': round_to: range is 9 and must be from 2 to 8/,
  ],
  [{ ...recipes.bf16, communicate: 'e5m2/t' }, /communicate is 'e5m2\/t' and must be one of f32, bf16, e4m3\/t/],
  [{ ...recipes.bf16, scale: 'pow2' }, /scale 'pow2' needs x 'e4m3\/t'/],
  [{ ...recipes.bf16, partition: 'rows' }, /partition is 'rows' and must be one of whole, flat/],
  [{ ...recipes.e8m3, communicate: 'bf16' }, /communicate other than 'f32' cannot be had with emulated/],
  [{ ...recipes.bf16, rounding: 'kahan' }, /rounding other than 'nearest' needs param 'bf16' and no master/],
])('refuses %j', (which, text) => {
  const attempt = () => recipe(which as Recipe)
  expect(attempt).toThrow(CoatError)
  expect(attempt).toThrow(text)
})

describe('what is no value at all is refused by the name of its place', () => {
  const odd = [null, 0, true, false, '', 'word', '2', ['f32'], ['e5m2'], [2], {}]
  const told = (which: unknown, place: string) => {
    try {
      recipe(which as Recipe)
    } catch (error) {
      expect(error).toBeInstanceOf(CoatError)
      const { argument, message } = error as CoatError
      expect(argument).toContain(place)
      expect(message).not.toContain('[object')
      return
    }
    expect.fail(`${place}: ${JSON.stringify(which)} was taken`)
  }

  it('of a recipe', () => {
    for (const value of [undefined, null, 0, true, '', ['coat']]) told(value, 'name')
  })
  it('of every axis', () => {
    const axes = [...Object.keys(recipes.coat), 'mu', 'communicate', 'partition', 'qkvGrad', 'layers', 'emulated']
    const legal: Record<string, unknown[]> = { master: [null], emulated: [null], layers: [{}] }
    for (const axis of axes)
      for (const value of odd)
        if (!legal[axis]?.some((one) => JSON.stringify(one) === JSON.stringify(value)))
          told({ ...recipes.coat, [axis]: value }, axis)
  })
  it('of the axes of a layer', () => {
    for (const value of [null, 0, true, '', 'word', ['f32']])
      told({ ...recipes.coat, layers: { '*': value } }, "layers['*']")
  })
  it('of every part of an emulation', () => {
    const { emulated } = recipes.e8m5
    for (const part of ['operand', 'sum', 'chunk', 'result', 'lossScale', 'update'])
      for (const value of [undefined, ...odd]) {
        const absent = part === 'result' && (value === undefined || JSON.stringify(value) === '{}')
        const legal = absent || (part === 'update' && value === null) || (part === 'chunk' && value === 0)
        if (!legal) told({ ...recipes.fp32, emulated: { ...emulated, [part]: value } }, `emulated.${part}`)
      }
  })
})

it('a recipe is a product of axes over a row, which stays as it is', () => {
  const made = recipe({ base: 'coat', v: 'e5m2/x128', dw: 'f32', accumulate: 'split' })
  expect(made).toEqual({ ...recipes.coat, v: 'e5m2/x128', dw: 'f32' })
  expect(recipes.coat.v).toBe('e4m3/x128')
  const attempt = (change: object) => () => recipe({ base: 'coat', ...change } as RecipeChange)
  expect(attempt({ base: 'cote' })).toThrow(/'cote' is unknown; the recipes are fp32, bf16, coat/)
  expect(attempt({ v: 'f32' })).toThrow(/m and v must be a pair of formats that adamw has; received .*v 'f32'/)
  expect(attempt({ layers: { '*': { mm: 'f32' } } })).toThrow(/axis 'layers\['\*'\].mm' is unknown/)
  expect(attempt({ layers: { '*': { x: 'e4m3/r' } } })).toThrow(/layers\['\*'\].x, w and dy must be/)
  expect(attempt({ layers: { '*': { stream: 'f32' } } })).toThrow(
    /stream is the whole model's, and layers\['\*'\] has it/,
  )
})

describe('layers of their own', () => {
  const plain = { x: 'bf16', w: 'bf16', dy: 'bf16', saved: 'bf16' } as const
  const make = (layers: NonNullable<Recipe['layers']>, name: RecipeName = 'coat') =>
    new LlamaForCausalLM(config, { recipe: { base: name, layers }, seed: 1 })

  it.each(['model.layers.0', 'model.layers.0.*', '*.0'])('%s is the first block alone', (pattern) => {
    using model = make({ [pattern]: { ...plain, param: 'bf16', m: 'bf16', v: 'bf16' } })
    const [first, second] = model.layers
    expect(first?.mlp.input.formats).toMatchObject({ x: 'bf16', w: 'bf16', dy: 'bf16', y: 'bf16' })
    expect(second?.mlp.input.formats).toMatchObject({ x: 'e4m3/t', w: 'e4m3/t', dy: 'e5m2/t', y: 'e4m3/g16' })
    using optimizer = new AdamW(model, model.recipe)
    for (const param of model.parameters()) {
      const own = param.layer === 'model.layers.0'
      expect(param.layer, param.name).toBe(/model\.layers\.\d/.exec(param.name)?.[0] ?? null)
      const { m, v } = optimizer.stateOf(param)
      expect([m.format, v?.format], param.name).toEqual(own ? ['bf16', 'bf16'] : ['e4m3/x128', 'e4m3/x128'])
      expect(param.tensor.format).toBe(own && param.tensor.shape.length === 2 ? 'bf16' : 'f32')
    }
  })

  it('all blocks changed to bf16 give the bits of a bf16 model', async () => {
    const last = async (which: RecipeName | RecipeChange) => {
      using model = new LlamaForCausalLM(config, { recipe: which, seed: 1 })
      const data = new TextDataset(sentence.repeat(9), { sequence: 32, seed: 7 })
      using trainer = new Trainer(model, { data, batch: 2, steps: 3 })
      const losses: number[] = []
      for await (const { loss } of trainer.run()) losses.push(loss)
      return losses
    }
    const { x, w, dy, saved, flow, param, master, m, v } = recipes.bf16
    const layers = { 'model.layers.*': { x, w, dy, saved, flow } }
    expect(await last({ base: 'coat', param, master, m, v, layers })).toEqual(await last('bf16'))
    expect(await last({ base: 'coat', param, master, m, v })).not.toEqual(await last('bf16'))
  })

  it('refuses patterns without a layer, and those that are illegal together', () => {
    expect(() => make({ 'model.layers.2': {} })).toThrow(
      /layers\['model.layers.2'\] names no layer of the model; they are model.layers.0 to model.layers.1/,
    )
    expect(() =>
      make({ '*.0': { param: 'bf16', master: 'f32' }, 'model.*': { param: 'bf16', rounding: 'kahan' } }),
    ).toThrow(/recipe: model.layers.0: rounding other than 'nearest' needs/)
  })
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
