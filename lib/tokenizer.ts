// Tokenizers: text to token ids and back.
import { readFile, stat } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { CoatError } from './native.ts'

/** Ids with a meaning of their own; absent where a tokenizer has none. */
export interface SpecialIds {
  /** Starts a document. */
  bos?: number
  /** Ends a document. */
  eos?: number
  pad?: number
  /** Stands for what the vocabulary cannot say. */
  unk?: number
}

export interface EncodeOptions {
  /** Whether to add what the tokenizer puts around a text, such as `<s>` (default true). */
  special?: boolean
}

export interface Tokenizer {
  /** Number of ids: every id lies in [0, size). */
  readonly size: number
  readonly special: SpecialIds
  /** Ids of a text, [n]. */
  encode(text: string, options?: EncodeOptions): Uint8Array | Int32Array
  /** Text of ids; special ids give no text. */
  decode(ids: ArrayLike<number>): string
}

/** One id a byte of UTF-8; what is not UTF-8 decodes to U+FFFD. No special ids. */
export class ByteTokenizer implements Tokenizer {
  readonly size = 256
  readonly special: SpecialIds = {}
  encode(text: string): Uint8Array {
    return new TextEncoder().encode(text)
  }
  decode(ids: ArrayLike<number>): string {
    return new TextDecoder().decode(Uint8Array.from(ids))
  }
}

interface Json {
  [key: string]: unknown
}

/** What this file asks of `@huggingface/tokenizers`. */
interface Engine {
  encode(text: string, options: { add_special_tokens: boolean }): { ids: number[] }
  decode(ids: number[], options: { skip_special_tokens: boolean; clean_up_tokenization_spaces: boolean }): string
  token_to_id(token: string): number | undefined
  get_vocab(withAdded: boolean): Map<string, number>
}

/**
 * A tokenizer of Hugging Face's tokenizer.json, run by `@huggingface/tokenizers`. Special ids come from the
 * tokenizer_config.json beside it, where there is one.
 */
export class HuggingFaceTokenizer implements Tokenizer {
  readonly size: number
  readonly special: SpecialIds
  readonly #engine: Engine
  readonly #cleanUp: boolean

  private constructor(engine: Engine, config: Json) {
    this.#engine = engine
    this.#cleanUp = config.clean_up_tokenization_spaces === true
    let last = -1
    for (const id of engine.get_vocab(true).values()) last = Math.max(last, id)
    this.size = last + 1
    const special: SpecialIds = {}
    for (const name of ['bos', 'eos', 'pad', 'unk'] as const) {
      const token = config[`${name}_token`]
      const content = typeof token === 'object' ? (token as Json | null)?.content : token
      const id = typeof content === 'string' ? engine.token_to_id(content) : undefined
      if (id !== undefined) special[name] = id
    }
    this.special = special
  }

  /** Reads a tokenizer.json, given as the file or as the folder that holds it. */
  static async open(path: string): Promise<HuggingFaceTokenizer> {
    const folder = await stat(path).then(
      (found) => found.isDirectory(),
      () => false,
    )
    const file = folder ? join(path, 'tokenizer.json') : path
    const description = await readJson(file)
    const { vocab } = (description.model ?? {}) as Json
    if (typeof vocab !== 'object' || vocab === null)
      refuse(`${file} has no model.vocab and must be a tokenizer.json of Hugging Face`)
    const config = await readJson(join(dirname(file), 'tokenizer_config.json'), {})
    const { Tokenizer: Engine } = await import('@huggingface/tokenizers')
    try {
      return new HuggingFaceTokenizer(new Engine(description, config) as Engine, config)
    } catch (error) {
      refuse(`${file} cannot be used: ${(error as Error).message}`, error)
    }
  }

  encode(text: string, { special = true }: EncodeOptions = {}): Int32Array {
    return Int32Array.from(this.#engine.encode(text, { add_special_tokens: special }).ids)
  }

  decode(ids: ArrayLike<number>): string {
    const list = Array.from(ids)
    const wrong = list.findIndex((id) => !Number.isInteger(id) || id < 0 || id >= this.size)
    if (wrong >= 0) refuse(`ids[${wrong}] is ${list[wrong]} and must be an integer in [0, ${this.size})`)
    return this.#engine.decode(list, { skip_special_tokens: true, clean_up_tokenization_spaces: this.#cleanUp })
  }
}

function refuse(text: string, cause?: unknown): never {
  throw new CoatError(`HuggingFaceTokenizer: ${text}`, 'value', 'HuggingFaceTokenizer', '', { cause })
}

async function readJson(file: string, absent?: Json): Promise<Json> {
  let value: unknown
  try {
    value = JSON.parse(await readFile(file, 'utf8'))
  } catch (error) {
    if (absent && (error as NodeJS.ErrnoException).code === 'ENOENT') return absent
    refuse(`${file} cannot be read as JSON: ${(error as Error).message}`, error)
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) refuse(`${file} must hold a JSON object`)
  return value as Json
}
