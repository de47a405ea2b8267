// The fields of a config.json beyond sizes: how positions are scaled, what is of no matter here, and what is refused.
import { CoatError } from '../native.ts'
import type { RopeScaling } from '../rotation.ts'

/** How config.json stretches the rotation: `rope_scaling`, or within `rope_parameters`; older files say `type`. */
export interface RopeFields {
  rope_type?: string
  type?: string
  rope_theta?: number
  factor?: number
  low_freq_factor?: number
  high_freq_factor?: number
  original_max_position_embeddings?: number
  partial_rotary_factor?: number
}

export function refuse(name: string, value: unknown, rule: string): never {
  const shown = typeof value === 'object' ? JSON.stringify(value) : value
  throw new CoatError(`config: ${name} is ${shown} and ${rule}`, 'config', 'LlamaForCausalLM', name)
}

// What each type needs besides its name.
const kinds: Record<string, readonly (keyof RopeFields)[]> = {
  default: [],
  linear: ['factor'],
  llama3: ['factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'],
}

/** The scaling that the field `name` describes, or null for none; types, numbers and fields that are not known are refused. */
export function ropeScaling(name: string, fields: RopeFields | null | undefined): RopeScaling | null {
  if (!fields) return null
  const kind = fields.rope_type ?? fields.type ?? 'default'
  const needed = Object.hasOwn(kinds, kind) ? kinds[kind] : undefined
  if (!needed)
    return refuse(name, fields, `is not supported: its rope_type must be one of ${Object.keys(kinds).join(', ')}`)
  for (const key of needed)
    if (!(Number.isFinite(fields[key]) && (fields[key] as number) > 0))
      refuse(`${name}.${key}`, fields[key], `must be a number above 0, as rope_type '${kind}' needs it`)
  const others = ['rope_type', 'type', 'rope_theta', ...needed]
  for (const [key, value] of Object.entries(fields))
    if (!others.includes(key) && value !== null && !(key === 'partial_rotary_factor' && value === 1))
      refuse(`${name}.${key}`, value, `is not known for rope_type '${kind}': it may change the result`)
  const { factor = 1, low_freq_factor: low = 1, high_freq_factor: high = 1 } = fields
  if (kind === 'default') return null
  if (kind === 'linear') return { factor }
  if (!(low < high)) refuse(`${name}.low_freq_factor`, low, `must be below high_freq_factor, ${high}`)
  return { factor, low, high, positions: fields.original_max_position_embeddings as number }
}

// Sliding windows are the affair of attention.
const windows = ['sliding_window', 'use_sliding_window', 'max_window_layers', 'layer_types']

// Names, ids, and what only generation, file formats or other tools read.
const harmless =
  /^(_.*|architectures|auto_map|transformers_version|torch_dtype|dtype|use_cache|pretraining_tp|max_length|tokenizer_class|(bos|eos|pad|sep|unk|decoder_start)_token_id|id2label|label2id|return_dict|output_attentions|output_hidden_states|problem_type|finetuning_task|task_specific_params|prefix|is_decoder|is_encoder_decoder|tie_encoder_decoder|torchscript|chunk_size_feed_forward|use_bfloat16|gradient_checkpointing|rotary_embedding_base|weight_tying)$/

/** Refuses by name the fields that nobody reads and that may change the result: all but those that are off. */
export function expectKnown(config: object, known: readonly string[]): void {
  for (const [name, value] of Object.entries(config)) {
    if (known.includes(name) || windows.includes(name) || harmless.test(name)) continue
    const off = value === undefined || value === null || value === false
    const plain =
      name.endsWith('dropout') || name.endsWith('_pdrop') ? value === 0 : name.endsWith('_factor') && value === 1
    if (!off && !plain) refuse(name, value, 'is not known: it may change the result; leave it out if it does not')
  }
}
