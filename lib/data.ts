// Batches of token ids: what a trainer asks of data, the order of sequences, and data sets of text.
import { CoatError } from './native.ts'
import { ByteTokenizer, type Tokenizer } from './tokenizer.ts'

/** One micro-batch: B sequences of T ids and the ids that follow them, row-major [B·T]. */
export interface Batch {
  ids: Int32Array
  /** −100 where a position takes no part in the loss. */
  targets: Int32Array
  sequence: number
  /** Of packed documents: where in its sequence the document of each position begins. */
  starts?: Int32Array
}

/** Where a dataset is, and all that its order depends on: plain JSON, to save beside a model. */
export interface DataState {
  /** Training sequences handed out so far, over all epochs and ranks. */
  position: number
  seed: number
  shuffle: boolean
  /** Tokens of one sequence. */
  sequence: number
  /** Training sequences of one epoch. */
  sequences: number
}

export interface Dataset {
  readonly sequence: number
  /** For which of how many ranks its batches are, where it knows. */
  readonly rank?: number
  readonly world?: number
  /** Batch number `index` of `size` sequences: the same for the same index, whatever was asked before. */
  batch(index: number, size: number): Batch
  /** The first `count` held-out sequences, in batches of at most `size`. */
  validation(count: number, size: number): Batch[]
  /** What `restore` needs to go on with exactly the sequences that would have followed. */
  state?(): DataState
  restore?(state: DataState): void
}

export interface OrderOptions {
  /** Tokens of one sequence, T. */
  sequence: number
  /** Seed of the order of sequences (default 0). */
  seed?: number
  /** Whether every epoch has its own order (default true); else the order of the file. */
  shuffle?: boolean
  /**
   * Which of `world` processes this one is (default 0 of 1). Ranks take turns, a batch each, along one order: no two have
   * the same sequence of an epoch and none is dropped. A state is the same on every rank, and fits any other `world`.
   */
  rank?: number
  world?: number
}

/**
 * Numbered sequences, every one of them once an epoch. The order is a function of seed and epoch that is computed number
 * by number, so that it takes no memory and any position can be had at once. Batches run on across the end of an epoch:
 * none is short and no sequence is dropped.
 */
export abstract class OrderedDataset implements Dataset {
  readonly sequence: number
  /** Training sequences of one epoch. */
  readonly sequences: number
  /** Sequences that training never sees. */
  readonly heldOutSequences: number
  readonly #name: string
  readonly #seed: number
  readonly #shuffle: boolean
  readonly rank: number
  readonly world: number
  #position = 0

  protected constructor(name: string, options: Required<OrderOptions>, sequences: number, heldOutSequences: number) {
    this.#name = name
    this.sequence = options.sequence
    this.#seed = options.seed
    this.#shuffle = options.shuffle
    this.rank = options.rank
    this.world = options.world
    this.sequences = sequences
    this.heldOutSequences = heldOutSequences
  }

  /** Sequences by number, of the training or of the held-out part: ids and targets [numbers.length · T]. */
  protected abstract read(heldOut: boolean, numbers: readonly number[]): Batch

  /** Training sequences handed out up to the end of the last batch, over all epochs and ranks. */
  get position(): number {
    return this.#position
  }

  batch(index: number, size: number): Batch {
    this.#expect('size', size, 1)
    this.#expect('index', index, 0)
    return this.#take(index * size * this.world, size)
  }

  /** This rank's `size` sequences from `position` on. */
  next(size: number): Batch {
    this.#expect('size', size, 1)
    return this.#take(this.#position, size)
  }

  validation(count: number, size: number): Batch[] {
    this.#expect('size', size, 1)
    this.#expect('count', count, 0)
    if (this.heldOutSequences === 0)
      refusal(this.#name)('heldOut', 'nothing is held out to validate with; heldOut must be above 0')
    const numbers = Array.from({ length: Math.min(count, this.heldOutSequences) }, (_, i) => i)
    const batches: Batch[] = []
    for (let i = 0; i < numbers.length; i += size) batches.push(this.read(true, numbers.slice(i, i + size)))
    return batches
  }

  /** A trainer counts batches itself: `trainer.batches = data.position / (batch · world)` takes it to a restored position. */
  state(): DataState {
    return {
      position: this.#position,
      seed: this.#seed,
      shuffle: this.#shuffle,
      sequence: this.sequence,
      sequences: this.sequences,
    }
  }

  restore(state: DataState): void {
    expectOrder(this.#name, state, this.state())
    this.#expect('state.position', state.position, 0)
    this.#position = state.position
  }

  #take(from: number, size: number): Batch {
    const numbers = Array.from({ length: size }, (_, row) => {
      const at = from + this.rank * size + row
      const epoch = Math.floor(at / this.sequences)
      const place = at % this.sequences
      return this.#shuffle ? permuted(place, this.sequences, [...halves(this.#seed), ...halves(epoch)]) : place
    })
    const batch = this.read(false, numbers)
    this.#position = from + size * this.world
    return batch
  }

  #expect(argument: string, value: number, least: number): void {
    expectInteger(this.#name, argument, value, least)
  }
}

/** `starts` of `rows` sequences of T positions: a document begins with each sequence, and where `begins` says so. */
export function startsOf(rows: number, sequence: number, begins: (row: number, t: number) => boolean): Int32Array {
  const starts = new Int32Array(rows * sequence)
  for (let row = 0; row < rows; row++)
    for (let t = 1; t < sequence; t++) {
      const at = row * sequence + t
      starts[at] = begins(row, t) ? t : (starts[at - 1] as number)
    }
  return starts
}

/** Throws for one function or class, naming an argument. */
export function refusal(name: string): (argument: string, text: string) => never {
  return (argument, text) => {
    throw new CoatError(`${name}: ${text}`, 'value', name, argument)
  }
}

function expectOrder(name: string, state: DataState, now: DataState): void {
  for (const key of ['seed', 'shuffle', 'sequence', 'sequences'] as const)
    if (state[key] !== now[key])
      refusal(name)(
        'state',
        `${key} is ${state[key]} in the state and ${now[key]} here, and must be equal for the same order`,
      )
}

export function expectInteger(name: string, argument: string, value: number, least: number): void {
  if (!Number.isSafeInteger(value) || value < least)
    refusal(name)(argument, `${argument} is ${value} and must be an integer of at least ${least}`)
}

/** Options of an order with their defaults, checked. */
export function orderOf(name: string, options: OrderOptions): Required<OrderOptions> {
  const { sequence, seed = 0, shuffle = true, rank = 0, world = 1 } = options
  expectInteger(name, 'sequence', sequence, 1)
  expectInteger(name, 'seed', seed, 0)
  expectRank(name, rank, world)
  return { sequence, seed, shuffle, rank, world }
}

function expectRank(name: string, rank: number, world: number): void {
  expectInteger(name, 'world', world, 1)
  expectInteger(name, 'rank', rank, 0)
  if (rank >= world) refusal(name)('rank', `rank is ${rank} and must be below world, ${world}`)
}

export interface TextOptions {
  /** Tokens of one sequence. */
  sequence: number
  tokenizer?: Tokenizer
  /** Seed of the order of batches (default 0). */
  seed?: number
  /** Fraction held out for validation (default 0.05): whole documents where there are enough, else the end of the text. */
  heldOut?: number
  /** Which of `world` processes this one is (default 0 of 1): they take turns, a batch each. */
  rank?: number
  world?: number
}

/** Documents of text, joined by blank lines; batches are windows at random places of the training part. */
export class TextDataset implements Dataset {
  readonly sequence: number
  readonly tokenizer: Tokenizer
  readonly train: Uint8Array | Int32Array
  readonly heldOut: Uint8Array | Int32Array
  readonly rank: number
  readonly world: number
  readonly #seed: number
  #position = 0

  constructor(documents: string | readonly string[], options: TextOptions) {
    const { sequence, tokenizer = new ByteTokenizer(), seed = 0, heldOut = 0.05, rank = 0, world = 1 } = options
    const fail = refusal('TextDataset')
    expectInteger('TextDataset', 'sequence', sequence, 1)
    expectInteger('TextDataset', 'seed', seed, 0)
    expectRank('TextDataset', rank, world)
    if (!(heldOut > 0 && heldOut < 1)) fail('heldOut', `heldOut is ${heldOut} and must lie between 0 and 1`)
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
    this.rank = rank
    this.world = world
    this.#seed = seed
  }

  batch(index: number, size: number): Batch {
    const places = this.train.length - this.sequence
    const turn = index * this.world + this.rank
    const starts = Array.from({ length: size }, (_, row) => place(this.#seed, turn, row, places))
    this.#position = (index + 1) * size * this.world
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

  /** `sequences` are the places where one can start. */
  state(): DataState {
    const { sequence } = this
    const sequences = this.train.length - sequence
    return { position: this.#position, seed: this.#seed, shuffle: true, sequence, sequences }
  }

  restore(state: DataState): void {
    expectOrder('TextDataset', state, this.state())
    expectInteger('TextDataset', 'state.position', state.position, 0)
    this.#position = state.position
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
  for (const part of [...halves(seed), index, row]) {
    low = mix(low ^ (part >>> 0) ^ 0x9e3779b9)
    high = mix(high ^ low ^ 0x7f4a7c15)
  }
  return Math.floor(((high >>> 0) / 2 ** 32 + (low >>> 0) / 2 ** 64) * places)
}

// The place of `value` in a permutation of [0, count) that `keys` choose: a Feistel network over the next power of four,
// walked until it lands inside. Every round can be undone, so no two values meet.
function permuted(value: number, count: number, keys: readonly number[]): number {
  let bits = 1
  while (4 ** bits < count) bits += 1
  const side = 2 ** bits
  const round = [0, 1, 2, 3, 4, 5].map((number) => keys.reduce((hash, key) => mix(hash ^ key ^ 0x9e3779b9), number))
  let at = value
  do {
    let left = Math.floor(at / side)
    let right = at % side
    for (const key of round) {
      const mixed = mix(mix(right ^ key) ^ 0x7f4a7c15) >>> 0
      ;[left, right] = [right, (left ^ (mixed % side)) >>> 0]
    }
    at = left * side + right
  } while (at >= count)
  return at
}

function halves(value: number): [number, number] {
  return [value >>> 0, Math.floor(value / 2 ** 32)]
}

function mix(x: number): number {
  let h = x
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b)
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35)
  return h ^ (h >>> 16)
}
