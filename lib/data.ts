// Text as batches of token ids, with a held-out part that training never sees.
import { CoatError } from './native.ts'
import { ByteTokenizer, type Tokenizer } from './tokenizer.ts'

/** One micro-batch: B sequences of T ids and the ids that follow them, row-major [B·T]. */
export interface Batch {
  ids: Int32Array
  /** −100 where a position takes no part in the loss. */
  targets: Int32Array
  sequence: number
}

export interface Dataset {
  readonly sequence: number
  /** Batch number `index` of `size` sequences: the same for the same index, whatever was asked before. */
  batch(index: number, size: number): Batch
  /** The first `count` held-out sequences, in batches of at most `size`. */
  validation(count: number, size: number): Batch[]
}

export interface TextOptions {
  /** Tokens of one sequence. */
  sequence: number
  tokenizer?: Tokenizer
  /** Seed of the order of batches (default 0). */
  seed?: number
  /** Fraction held out for validation (default 0.05): whole documents where there are enough, else the end of the text. */
  heldOut?: number
}

/** Documents of text, joined by blank lines; batches are windows at random places of the training part. */
export class TextDataset implements Dataset {
  readonly sequence: number
  readonly tokenizer: Tokenizer
  readonly train: Uint8Array | Int32Array
  readonly heldOut: Uint8Array | Int32Array
  readonly #seed: number

  constructor(documents: string | readonly string[], options: TextOptions) {
    const { sequence, tokenizer = new ByteTokenizer(), seed = 0, heldOut = 0.05 } = options
    const fail = (argument: string, text: string): never => {
      throw new CoatError(`TextDataset: ${text}`, 'value', 'TextDataset', argument)
    }
    if (!Number.isSafeInteger(sequence) || sequence < 1)
      fail('sequence', `sequence is ${sequence} and must be an integer of at least 1`)
    if (!(heldOut > 0 && heldOut < 1)) fail('heldOut', `heldOut is ${heldOut} and must lie between 0 and 1`)
    if (!Number.isSafeInteger(seed) || seed < 0) fail('seed', `seed is ${seed} and must be an integer of at least 0`)
    const list = (typeof documents === 'string' ? [documents] : documents).filter((text) => text.trim() !== '')
    if (list.length === 0) fail('documents', 'documents hold no text')
    const every = Math.round(1 / heldOut)
    let train: Uint8Array | Int32Array
    let held: Uint8Array | Int32Array
    if (list.length >= 2 * every) {
      train = tokenizer.encode(list.filter((_, i) => i % every !== every - 1).join('\n\n'))
      held = tokenizer.encode(list.filter((_, i) => i % every === every - 1).join('\n\n'))
    } else {
      const all = tokenizer.encode(list.join('\n\n'))
      const cut = Math.floor(all.length * (1 - heldOut))
      train = all.subarray(0, cut)
      held = all.subarray(cut)
    }
    for (const [part, tokens] of [
      ['training', train],
      ['held-out', held],
    ] as const)
      if (tokens.length < sequence + 1)
        fail(
          'documents',
          `the ${part} part has ${tokens.length} tokens and must have at least sequence + 1 = ${sequence + 1}`,
        )
    this.sequence = sequence
    this.tokenizer = tokenizer
    this.train = train
    this.heldOut = held
    this.#seed = seed
  }

  batch(index: number, size: number): Batch {
    const places = this.train.length - this.sequence
    const starts = Array.from({ length: size }, (_, row) => place(this.#seed, index, row, places))
    return windows(this.train, starts, this.sequence)
  }

  validation(count: number, size: number): Batch[] {
    const there = Math.floor((this.heldOut.length - 1) / this.sequence)
    const starts = Array.from({ length: Math.min(count, there) }, (_, i) => i * this.sequence)
    const batches: Batch[] = []
    for (let i = 0; i < starts.length; i += size)
      batches.push(windows(this.heldOut, starts.slice(i, i + size), this.sequence))
    return batches
  }
}

function windows(tokens: Uint8Array | Int32Array, starts: readonly number[], sequence: number): Batch {
  const ids = new Int32Array(starts.length * sequence)
  const targets = new Int32Array(ids.length)
  starts.forEach((start, row) => {
    ids.set(tokens.subarray(start, start + sequence), row * sequence)
    targets.set(tokens.subarray(start + 1, start + sequence + 1), row * sequence)
  })
  return { ids, targets, sequence }
}

// A place in [0, places) that depends on seed, batch and row alone: two rounds of an integer hash.
function place(seed: number, index: number, row: number, places: number): number {
  let high = 0
  let low = 0
  for (const part of [seed, Math.floor(seed / 2 ** 32), index, row]) {
    low = mix(low ^ (part >>> 0) ^ 0x9e3779b9)
    high = mix(high ^ low ^ 0x7f4a7c15)
  }
  return Math.floor(((high >>> 0) / 2 ** 32 + (low >>> 0) / 2 ** 64) * places)
}

function mix(x: number): number {
  let h = x
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b)
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35)
  return h ^ (h >>> 16)
}
