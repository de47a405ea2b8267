// Llama and its relatives (Llama 2 and 3, Mistral's windows, Qwen2's biases, OLMo's norms): config.json → modules, names as in its checkpoints.
import { readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { checkLayers, type RecipeChange } from '../axes.ts'
import { KeyValues } from '../cache.ts'
import { type GenerateOptions, generateOptions, sampled, uniforms } from '../generate.ts'
import {
  Block,
  build,
  gradientOf,
  type LayerNorm,
  Linear,
  linearFormats,
  Module,
  matrixParam,
  normOf,
  Param,
  type RMSNorm,
} from '../modules.ts'
import { CoatError } from '../native.ts'
import * as ops from '../ops.ts'
import type { Recipe, RecipeName } from '../recipes.ts'
import { Replacement } from '../replace.ts'
import { readSafetensors, type StoredTensor, sourceOf, stage } from '../safetensors.ts'
import { load, partsOf } from '../state.ts'
import { noGrad } from '../tape.ts'
import { type Device, type DeviceName, scope, Tensor } from '../tensor.ts'
import { expectKnown, type RopeFields, refuse, ropeScaling } from './fields.ts'

/** The fields of a Hugging Face config.json that matter here. */
export interface LlamaConfig {
  model_type?: 'llama' | 'mistral' | 'qwen2' | 'olmo'
  hidden_size: number
  intermediate_size: number
  num_hidden_layers: number
  num_attention_heads: number
  num_key_value_heads?: number
  head_dim?: number | null
  vocab_size: number
  max_position_embeddings?: number
  rms_norm_eps?: number
  rope_theta?: number
  /** How positions are stretched: `llama3` or `linear`. */
  rope_scaling?: RopeFields | null
  /** Where newer configs keep the rotation, its scaling too. */
  rope_parameters?: RopeFields | null
  tie_word_embeddings?: boolean
  attention_bias?: boolean
  mlp_bias?: boolean
  hidden_act?: 'silu' | 'gelu'
  /** Keys that a token sees, itself included: in all layers of Mistral; of Qwen2 with `use_sliding_window` in those from `max_window_layers` on. */
  sliding_window?: number | null
  use_sliding_window?: boolean
  max_window_layers?: number
  /** `full_attention` or `sliding_attention` layer by layer, where newer configs say it. */
  layer_types?: string[]
  initializer_range?: number
}

export interface ModelOptions {
  recipe: RecipeName | Recipe | RecipeChange
  /** Default: the CPU. */
  device?: Device | DeviceName
  /** Seed of the initial values (default 0). */
  seed?: number
}

// What config.json may leave out, and the biases that a type has or has not whatever it says.
const families = {
  llama: { architecture: 'LlamaForCausalLM', positions: 2048, eps: 1e-6, biases: null },
  mistral: { architecture: 'MistralForCausalLM', positions: 131072, eps: 1e-6, biases: false },
  qwen2: { architecture: 'Qwen2ForCausalLM', positions: 32768, eps: 1e-6, biases: true },
  olmo: { architecture: 'OlmoForCausalLM', positions: 2048, eps: 1e-5, biases: null },
} as const

type Unchecked = 'rope_parameters' | 'sliding_window' | 'use_sliding_window' | 'max_window_layers' | 'layer_types'

type Checked = Required<Omit<LlamaConfig, Unchecked | 'head_dim'>> & { head_dim: number; sliding_window?: number }

function checked(config: LlamaConfig): Checked {
  const fail = (name: keyof LlamaConfig, rule: string): never => refuse(name, config[name], rule)
  const { model_type = 'llama', rope_parameters } = config
  const names = Object.keys(families)
  const family = names.includes(model_type)
    ? families[model_type]
    : fail('model_type', `must be one of ${names.join(', ')}`)
  for (const name of [
    'hidden_size',
    'intermediate_size',
    'num_hidden_layers',
    'num_attention_heads',
    'vocab_size',
  ] as const)
    if (!Number.isSafeInteger(config[name]) || config[name] < 1) fail(name, 'must be an integer of at least 1')
  const stretched = ropeScaling('rope_parameters', rope_parameters)
  const scaling = ropeScaling('rope_scaling', config.rope_scaling)
  if (rope_parameters && scaling && JSON.stringify(scaling) !== JSON.stringify(stretched))
    fail('rope_scaling', `must be as in rope_parameters, ${JSON.stringify(rope_parameters)}, or be left out`)
  const window = slidingWindow(config)
  const full = {
    model_type,
    hidden_size: config.hidden_size,
    intermediate_size: config.intermediate_size,
    num_hidden_layers: config.num_hidden_layers,
    num_attention_heads: config.num_attention_heads,
    num_key_value_heads: config.num_key_value_heads ?? config.num_attention_heads,
    head_dim: config.head_dim ?? config.hidden_size / config.num_attention_heads,
    vocab_size: config.vocab_size,
    max_position_embeddings: config.max_position_embeddings ?? family.positions,
    rms_norm_eps: config.rms_norm_eps ?? family.eps,
    rope_theta: rope_parameters?.rope_theta ?? config.rope_theta ?? 10000,
    rope_scaling: config.rope_scaling ?? (stretched ? (rope_parameters as RopeFields) : null),
    tie_word_embeddings: config.tie_word_embeddings ?? false,
    attention_bias: config.attention_bias ?? family.biases ?? false,
    mlp_bias: config.mlp_bias ?? false,
    hidden_act: config.hidden_act ?? 'silu',
    ...(window === null ? {} : { sliding_window: window }),
    initializer_range: config.initializer_range ?? 0.02,
  } as const
  expectKnown(config, [...Object.keys(full), 'rope_parameters'])
  if (window !== null && !(Number.isSafeInteger(window) && window >= 1))
    fail('sliding_window', 'must be an integer of at least 1, or null')
  const types = config.layer_types
  if (types && types.length !== full.num_hidden_layers)
    fail('layer_types', `must have an entry for each of ${full.num_hidden_layers} layers`)
  if (types?.some((type) => type !== 'full_attention' && type !== 'sliding_attention'))
    fail('layer_types', 'must hold full_attention and sliding_attention only')
  if (!['silu', 'gelu'].includes(full.hidden_act)) fail('hidden_act', 'must be silu (SwiGLU) or gelu')
  if (family.biases !== null && full.attention_bias !== family.biases)
    fail('attention_bias', `must be ${family.biases} for model_type ${model_type}`)
  if (full.mlp_bias && model_type !== 'llama') fail('mlp_bias', `must be false for model_type ${model_type}`)
  if (config.rope_theta !== undefined && config.rope_theta !== full.rope_theta)
    fail('rope_theta', `must equal that of rope_parameters, ${full.rope_theta}`)
  if (!Number.isInteger(full.head_dim) || full.head_dim % 2 !== 0)
    fail(
      'hidden_size',
      `must give an even head size, which hidden_size / num_attention_heads = ${full.head_dim} is not`,
    )
  if (full.num_attention_heads % full.num_key_value_heads !== 0)
    fail('num_key_value_heads', `must divide num_attention_heads = ${full.num_attention_heads}`)
  return full
}

// The window where a model has one, with what transformers takes when the file does not say.
function slidingWindow({ model_type, sliding_window, use_sliding_window }: LlamaConfig): number | null {
  const used = model_type === 'mistral' || (model_type === 'qwen2' && use_sliding_window)
  return used ? (sliding_window === undefined ? 4096 : sliding_window) : null
}

/** The window of layer `i`, 0 for none. */
function windowOf(config: LlamaConfig, i: number): number {
  const first = config.model_type === 'qwen2' ? (config.max_window_layers ?? 28) : 0
  const slides = config.layer_types ? config.layer_types[i] === 'sliding_attention' : i >= first
  return slides ? (slidingWindow(config) ?? 0) : 0
}

/** A decoder with a language-model head, tied to the embedding or not. */
export class LlamaForCausalLM extends Module {
  readonly config: ReturnType<typeof checked>
  readonly recipe: Recipe
  readonly seed: number
  readonly device: Device
  readonly embedding: Param
  readonly layers: Block[]
  readonly norm: RMSNorm | LayerNorm
  readonly head: Linear | null
  /** The configuration as it was given: what it says beyond `config` is written again. */
  readonly #given: LlamaConfig

  constructor(config: LlamaConfig, options: ModelOptions) {
    super()
    const full = checked(config)
    const built = build(options)
    const blocks = Array.from({ length: full.num_hidden_layers }, (_, i) => `model.layers.${i}`)
    checkLayers(built.recipe, blocks)
    this.config = full
    this.#given = structuredClone(config)
    this.recipe = built.recipe
    this.seed = built.seed
    this.device = built.device
    const { hidden_size: hidden, initializer_range: std, rms_norm_eps: eps } = full
    const olmo = full.model_type === 'olmo'
    const norm = { hidden, norm: olmo ? 'layernorm' : 'rmsnorm', affine: !olmo, eps } as const
    const table = matrixParam(built.recipe, full.vocab_size, hidden, std)
    this.embedding = new Param(built, 'model.embed_tokens.weight', table)
    this.layers = blocks.map(
      (name, i) =>
        new Block(built, name, {
          ...norm,
          heads: full.num_attention_heads,
          kvHeads: full.num_key_value_heads,
          headDim: full.head_dim,
          qkvBias: full.attention_bias,
          outputBias: full.attention_bias && full.model_type !== 'qwen2',
          ropeTheta: full.rope_theta,
          ropeScaling: ropeScaling('rope_scaling', full.rope_scaling),
          window: windowOf(config, i),
          inner: full.intermediate_size,
          activation: full.hidden_act === 'silu' ? 'swiglu' : 'gelu',
          bias: full.mlp_bias,
          normNames: ['input_layernorm', 'post_attention_layernorm'],
          outputStd: std / Math.sqrt(2 * full.num_hidden_layers),
        }),
    )
    this.norm = normOf(built, 'model.norm', { ...norm, plain: true })
    this.head = full.tie_word_embeddings
      ? null
      : new Linear(built, 'lm_head', { inputs: hidden, outputs: full.vocab_size, std, plain: true })
  }

  /**
   * Logits [B·T, V] in the stream's format for ids i32 [B·T] of sequences of T tokens. With `starts` i32 [B·T]
   * (`ops.documentStarts`) a sequence holds several documents, each as if it were alone.
   */
  forward(ids: Tensor, sequence: number, starts: Tensor | null = null): Tensor {
    return scope(() => this.#logits(this.#hidden(ids, sequence, starts)))
  }

  /** weight · (sum of the cross-entropies of the targets that are not ignored), f32 [1]. Logits are there in chunks only. */
  loss(ids: Tensor, targets: Tensor, sequence: number, weight: ops.Weight, starts: Tensor | null = null): Tensor {
    const { stream: format } = this.recipe
    const dw = gradientOf(this.recipe)
    return scope(() =>
      ops.linearCrossEntropy(this.#hidden(ids, sequence, starts), this.#headWeight, targets, weight, { format, dw }),
    )
  }

  get #headWeight(): Tensor {
    return (this.head?.weight ?? this.embedding).tensor
  }

  #logits(hidden: Tensor): Tensor {
    return ops.linear(hidden, this.#headWeight, null, linearFormats(this.recipe, { plain: true }))
  }

  /** What the head reads: [B·T, hidden] in the stream's format; `past`: of the sequence before ids. */
  #hidden(ids: Tensor, sequence: number, starts: Tensor | null, past: KeyValues | null = null): Tensor {
    const { stream } = this.recipe
    const dw = gradientOf(this.recipe)
    if (sequence > this.config.max_position_embeddings)
      throw new CoatError(
        `forward: sequence is ${sequence} and must be at most max_position_embeddings = ${this.config.max_position_embeddings}`,
        'value',
        'forward',
        'sequence',
      )
    return scope(() => {
      let x = ops.embedding(ids, this.embedding.tensor, { y: stream, dw })
      for (const [i, layer] of this.layers.entries()) {
        const next = this.layers[i + 1]?.attentionNorm ?? this.norm
        const y = layer.forward(x, sequence, starts, next, past)
        x.dispose()
        x = y
      }
      return this.norm.forward(x)
    })
  }

  /** All tokens of `stream`. */
  async generate(prompt: readonly number[], options: GenerateOptions = {}): Promise<number[]> {
    const tokens: number[] = []
    for await (const token of this.stream(prompt, options)) tokens.push(token)
    return tokens
  }

  /**
   * Continues a prompt token by token, with keys and values of earlier ones kept. What outgrows max_position_embeddings goes
   * on from its second half.
   */
  async *stream(prompt: readonly number[], options: GenerateOptions = {}): AsyncGenerator<number, void, void> {
    const { maxTokens, stop, ...choice } = generateOptions(prompt, options)
    const { max_position_embeddings: positions } = this.config
    const chances = await uniforms(choice.seed, maxTokens)
    const tokens = [...prompt]
    const capacity = Math.min(positions, prompt.length + maxTokens)
    let past: KeyValues | null = null
    let fresh = tokens
    try {
      for (const chance of chances) {
        if (!past || past.rows + fresh.length > capacity) {
          past?.dispose()
          past = new KeyValues(capacity, this.device)
          fresh = tokens.length <= capacity ? tokens.slice() : tokens.slice(-Math.ceil(capacity / 2))
        }
        const token = sampled(await this.#following(fresh, past), choice, chance)
        if (stop.includes(token)) return
        tokens.push(token)
        fresh = [token]
        yield token
      }
    } finally {
      past?.dispose()
    }
  }

  /** Logits [V] of what follows `tokens`, which follow those in `past`. */
  async #following(tokens: readonly number[], past: KeyValues): Promise<Float32Array> {
    const { device } = this
    using logits = noGrad(() =>
      scope(() => {
        const x = Tensor.from(Int32Array.from(tokens), [tokens.length], { device })
        const hidden = this.#hidden(x, tokens.length, null, past)
        // the last row alone has what is asked for
        const last = Tensor.from(Int32Array.of(tokens.length - 1), [1], { device })
        return this.#logits(ops.embedding(last, hidden, { y: this.recipe.stream, dw: 'f32' }))
      }),
    )
    past.advance(tokens.length)
    return (await logits.read()) as Float32Array
  }

  /** The parameter part of a checkpoint's name, or null. */
  find(name: string): { param: Param; rows: readonly [number, number] } | null {
    for (const param of this.parameters())
      for (const part of param.parts) if (part.name === name) return { param, rows: part.rows }
    return null
  }

  /**
   * A folder with config.json and model.safetensors, or its shards with model.safetensors.index.json. A model with tied
   * embeddings takes its one matrix from `model.embed_tokens.weight` or else from `lm_head.weight`. Throws a CoatError that
   * names the folder and the tensors that are missing, have no place, or have another shape, integers or FP8 codes.
   */
  static async fromPretrained(folder: string, options: ModelOptions): Promise<LlamaForCausalLM> {
    const config = await configIn(folder)
    const { tensors, metadata } = await readSafetensors(folder)
    const model = new LlamaForCausalLM(config, options)
    const refused = (text: string, argument: string): never => {
      throw new CoatError(`fromPretrained: ${folder} ${text}`, 'checkpoint', 'fromPretrained', argument)
    }
    const find = (name: string): StoredTensor | undefined =>
      tensors.get(name) ??
      tensors.get(metadata[name] ?? '') ??
      (name === tied.kept && !model.head ? tensors.get(tied.left) : undefined)
    try {
      const parts = partsOf(model)
      const state = new Map(parts.flatMap(({ name }) => [[name, find(name)] as const]))
      const missing = parts.filter(({ name }) => !state.get(name)).map(({ name }) => name)
      if (missing.length > 0) refused(`has no tensor '${missing.join("', '")}'`, missing[0] as string)
      const extra = [...tensors.keys()].filter((name) => !state.has(name) && !unneeded(name, model))
      if (extra.length > 0)
        refused(`has tensors that its config.json gives no place: '${extra.join("', '")}'`, extra[0] as string)
      for (const { name, shape } of parts) {
        const stored = state.get(name) as StoredTensor
        if (`${stored.shape}` !== `${shape}`)
          refused(`has '${name}' [${stored.shape.join(', ')}], which must be [${shape.join(', ')}]`, name)
        if (stored.dtype.startsWith('F8'))
          refused(`has '${name}' ${stored.dtype}, whose scales are unknown: it must be F32, BF16 or F16`, name)
      }
      await load(model, state as ReadonlyMap<string, StoredTensor>)
      return model
    } catch (error) {
      model.dispose()
      throw error
    }
  }

  /**
   * Writes config.json and safetensors with the names of Hugging Face, which `fromPretrained` and transformers read: fused
   * weights in their parts; of tied embeddings one copy, and the other name in the metadata. Parameters are bf16 where they are
   * bf16 here, else f32, or all are rounded to `dtype`; shards are as in `writeSafetensors`. All files are replaced together, or none.
   */
  async savePretrained(folder: string, options: { dtype?: 'f32' | 'bf16'; shardBytes?: number } = {}): Promise<void> {
    const { dtype, shardBytes = 5e9 } = options
    if (dtype !== undefined && dtype !== 'f32' && dtype !== 'bf16')
      throw new CoatError(
        `savePretrained: dtype is '${dtype}' and must be 'f32' or 'bf16'`,
        'value',
        'savePretrained',
        'dtype',
      )
    const sources = this.parameters().flatMap(({ tensor, parts }) =>
      parts.map(({ name, rows }) => {
        const own = tensor.format === 'bf16' ? 'bf16' : 'f32'
        return [name, sourceOf(folder, name, tensor, dtype ?? own, rows)] as const
      }),
    )
    const replacement = new Replacement()
    try {
      const alias = this.head ? {} : { [tied.left]: tied.kept }
      await stage(replacement, folder, sources, { metadata: { format: 'pt', ...alias }, shardBytes })
      const stored = (dtype ?? this.recipe.param) === 'bf16' ? 'bfloat16' : 'float32'
      const config = {
        ...this.#given,
        ...this.config,
        architectures: [families[this.config.model_type].architecture],
        torch_dtype: stored,
        ...('dtype' in this.#given ? { dtype: stored } : {}), // the name that newer files use
      }
      const file = replacement.write(join(folder, 'config.json'))
      await writeFile(file, `${JSON.stringify(config, null, 2)}\n`, { flush: true })
      await replacement.commit()
    } catch (error) {
      await replacement.abort()
      if (error instanceof CoatError) throw error
      throw new CoatError(`savePretrained: ${folder} cannot be written`, 'checkpoint', 'savePretrained', 'folder', {
        cause: error,
      })
    }
  }
}

// Tied embeddings are one matrix: the name that files have, and the one that is left out.
const tied = { kept: 'model.embed_tokens.weight', left: 'lm_head.weight' }
/** What a checkpoint may have besides: the other name of a tied matrix, and a table that old ones keep. */
function unneeded(name: string, model: LlamaForCausalLM): boolean {
  return (name === tied.left && !model.head) || name.endsWith('.rotary_emb.inv_freq')
}

async function configIn(folder: string): Promise<LlamaConfig> {
  const path = join(folder, 'config.json')
  const refused = (text: string, cause: unknown): never => {
    const reason = (cause as Error).message
    throw new CoatError(`fromPretrained: ${path} ${text}: ${reason}`, 'checkpoint', 'fromPretrained', 'folder', {
      cause,
    })
  }
  const text = await readFile(path, 'utf8').catch((error) => refused('cannot be read', error))
  try {
    return JSON.parse(text)
  } catch (error) {
    return refused('is no JSON', error)
  }
}
