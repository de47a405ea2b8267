// The shapes of the models that steps are measured on, as their config.json has them, and what the quick start trains.
import { CoatError, type LlamaConfig } from '../lib/index.ts'

const llama2 = { vocab_size: 32000, max_position_embeddings: 4096, rms_norm_eps: 1e-5 }

// biome-ignore format: rows that can be compared by eye
export const models = {
  tinyllama:     { ...llama2, hidden_size: 2048, intermediate_size: 5632,  num_hidden_layers: 22, num_attention_heads: 32, num_key_value_heads: 4 },
  'olmo-1b':     { model_type: 'olmo', vocab_size: 50304, max_position_embeddings: 2048, tie_word_embeddings: true, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 16 },
  '1b':          { ...llama2, hidden_size: 2048, intermediate_size: 8192,  num_hidden_layers: 16, num_attention_heads: 16 },
  'llama-2-7b':  { ...llama2, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32 },
  'llama-3-8b':  { vocab_size: 128256, max_position_embeddings: 8192, rms_norm_eps: 1e-5, rope_theta: 500000, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8 },
  'llama-2-13b': { ...llama2, hidden_size: 5120, intermediate_size: 13824, num_hidden_layers: 40, num_attention_heads: 40 },
  'llama-30b':   { ...llama2, hidden_size: 6656, intermediate_size: 17920, num_hidden_layers: 60, num_attention_heads: 52 },
} as const satisfies Record<string, LlamaConfig>

/** What `npm start` trains: a byte-level Llama, its batches, its optimizer. */
export const quickstart = {
  config: {
    vocab_size: 256,
    hidden_size: 128,
    intermediate_size: 344,
    num_hidden_layers: 2,
    num_attention_heads: 4,
    max_position_embeddings: 256,
    tie_word_embeddings: true,
    initializer_range: 0.08,
  },
  batch: 16,
  sequence: 256,
  seed: 1,
  lr: 2e-3,
  warmup: 20,
} as const

/** `small` is the size that flags choose; `layer` is one block of a model. */
export type ModelName = keyof typeof models | 'small' | 'layer'
/** From the smallest to the largest. */
export const modelNames: readonly ModelName[] = ['small', 'layer', ...(Object.keys(models) as (keyof typeof models)[])]

export interface SizeOptions {
  model: ModelName
  /** Width of a small model, or of the layer. */
  hidden?: number
  /** Other than the model has. */
  layers?: number
  /** Tokens of a sequence. */
  sequence: number
}

/** The configuration that a model's name and flags ask for. */
export function configOf({ model, hidden, layers, sequence }: SizeOptions): LlamaConfig {
  const own =
    model === 'layer' && hidden === undefined ? models['llama-2-7b'] : (models as Record<string, LlamaConfig>)[model]
  if (own && hidden !== undefined)
    throw new CoatError(`hidden is ${hidden}, and ${model} has a width of its own`, 'value', 'step', 'hidden')
  const config = own ?? smallConfig(hidden ?? 256)
  return {
    ...config,
    num_hidden_layers: model === 'layer' ? 1 : (layers ?? config.num_hidden_layers),
    max_position_embeddings: Math.max(sequence, config.max_position_embeddings ?? 0),
  }
}

function smallConfig(hidden: number): LlamaConfig {
  return {
    vocab_size: 256,
    hidden_size: hidden,
    intermediate_size: 16 * Math.round(hidden / 6),
    num_hidden_layers: 4,
    num_attention_heads: headsOf(hidden),
    tie_word_embeddings: true,
  }
}

// Heads of 64, or of 16 or 32 in small models.
function headsOf(hidden: number): number {
  const size = [64, 32, 16].find((head) => hidden % head === 0 && hidden / head >= 2)
  if (size === undefined)
    throw new CoatError(`hidden is ${hidden} and must be a multiple of 16, at least 32`, 'value', 'step', 'hidden')
  return hidden / size
}

/** Weights of matrices and embeddings; those of norms are a thousandth of them. */
export function parametersOf(config: LlamaConfig): number {
  const { hidden_size, vocab_size, num_hidden_layers, tie_word_embeddings } = config
  return num_hidden_layers * weightsOfLayer(config) + hidden_size * vocab_size * (tie_word_embeddings ? 1 : 2)
}

function weightsOfLayer(config: LlamaConfig): number {
  const { hidden_size: hidden, intermediate_size: inner, num_attention_heads: heads } = config
  const { num_key_value_heads: kvHeads = heads } = config
  const size = config.head_dim ?? hidden / heads
  return hidden * (2 * heads + 2 * kvHeads) * size + 3 * hidden * inner
}

/**
 * Floating-point operations that one token of a training step needs, whoever does them: six a weight that is multiplied (not
 * the embedding, but the head), and causal attention, whose two products of forward are half of a [T, T] matrix, thrice.
 */
export function flopsPerToken(config: LlamaConfig, sequence: number): number {
  const { hidden_size, vocab_size } = config
  return config.num_hidden_layers * flopsOfLayer(config, sequence) + 6 * hidden_size * vocab_size
}

/** One layer's part of it. */
export function flopsOfLayer(config: LlamaConfig, sequence: number): number {
  const { hidden_size, num_attention_heads: heads } = config
  const size = config.head_dim ?? hidden_size / heads
  return 6 * weightsOfLayer(config) + 6 * sequence * heads * size
}
