// Token files: ids on disk, written once and read in place.
import { closeSync, fstatSync, openSync, readSync } from 'node:fs'
import { type FileHandle, open } from 'node:fs/promises'
import { type Batch, expectInteger, OrderedDataset, type OrderOptions, orderOf, refusal, startsOf } from './data.ts'
import { CoatError } from './native.ts'
import { Replacement } from './replace.ts'
import type { Tokenizer } from './tokenizer.ts'

const magic = 'coattok\n'
const version = 1
const headerBytes = 32
// Ids become int32 tensors.
const largestVocabulary = 2 ** 31
const chunkIds = 65536

type Ids = Uint16Array | Uint32Array

// Typed arrays over file bytes rely on this: the package runs on x64, which is little-endian as the file is.
function idsOver(bytes: Buffer, width: number): Ids {
  return width === 2
    ? new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2)
    : new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4)
}

/**
 * Writes ids as a token file; ids may come in chunks, so that a corpus need not fit in memory. The file appears under its
 * name when it is whole. Returns the number of ids.
 *
 * All little-endian: bytes 0 to 7 `coattok` and a line feed; 8 to 11 u32 version, 1; 12 to 15 u32 width, the bytes of an
 * id: 2 for vocabularies up to 65536, else 4; 16 to 23 u64 vocabulary size; 24 to 31 u64 count; then count ids of width
 * bytes, and nothing behind them.
 */
export async function writeTokens(
  file: string,
  ids: ArrayLike<number> | Iterable<ArrayLike<number>> | AsyncIterable<ArrayLike<number>>,
  { vocabulary }: { vocabulary: number },
): Promise<number> {
  expectInteger('writeTokens', 'vocabulary', vocabulary, 1)
  const fail = refusal('writeTokens')
  if (vocabulary > largestVocabulary)
    fail('vocabulary', `vocabulary is ${vocabulary} and must be at most 2^31 = ${largestVocabulary}`)
  const width = vocabulary <= 65536 ? 2 : 4
  const bytes = Buffer.alloc(chunkIds * width)
  const buffer = idsOver(bytes, width)
  const header = Buffer.alloc(headerBytes)
  const replacement = new Replacement()
  const handle = await open(replacement.write(file), 'w')
  let count = 0
  try {
    await writeAt(handle, header, 0)
    for await (const chunk of chunksOf(ids))
      for (let start = 0; start < chunk.length; start += chunkIds) {
        const size = Math.min(chunkIds, chunk.length - start)
        for (let i = 0; i < size; i++) {
          const id = chunk[start + i] as number
          if (!Number.isInteger(id) || id < 0 || id >= vocabulary)
            fail('ids', `ids[${count + i}] is ${id} and must be an integer in [0, ${vocabulary}), the vocabulary`)
          buffer[i] = id
        }
        await writeAt(handle, bytes.subarray(0, size * width), headerBytes + count * width)
        count += size
      }
    if (count === 0) fail('ids', 'ids hold no token')
    header.write(magic, 'latin1')
    header.writeUInt32LE(version, 8)
    header.writeUInt32LE(width, 12)
    header.writeBigUInt64LE(BigInt(vocabulary), 16)
    header.writeBigUInt64LE(BigInt(count), 24)
    await writeAt(handle, header, 0)
    await handle.sync()
    await handle.close()
    await replacement.commit()
  } catch (error) {
    await handle.close()
    await replacement.abort()
    throw error
  }
  return count
}

async function writeAt(handle: FileHandle, bytes: Buffer, position: number): Promise<void> {
  for (let done = 0; done < bytes.length; )
    done += (await handle.write(bytes, done, bytes.length - done, position + done)).bytesWritten
}

async function* chunksOf(
  ids: ArrayLike<number> | Iterable<ArrayLike<number>> | AsyncIterable<ArrayLike<number>>,
): AsyncGenerator<ArrayLike<number>> {
  if ('length' in ids && typeof (ids as ArrayLike<unknown>)[0] !== 'object') yield ids
  else yield* ids as Iterable<ArrayLike<number>>
}

/** Whether a file starts as token files do. */
export async function isTokenFile(file: string): Promise<boolean> {
  const handle = await open(file)
  try {
    const { buffer, bytesRead } = await handle.read(Buffer.alloc(magic.length), 0, magic.length, 0)
    return buffer.toString('latin1', 0, bytesRead) === magic
  } finally {
    await handle.close()
  }
}

/**
 * Ids of documents, one array a document, for `writeTokens`. `separator` (default: the tokenizer's `eos`) follows every
 * document once; an empty document gives nothing, so `['', 'a', '']` has one separator.
 */
export function* encodeDocuments(
  documents: Iterable<string>,
  tokenizer: Tokenizer,
  separator: number | undefined = tokenizer.special.eos,
): Generator<Int32Array> {
  for (const text of documents) {
    if (text === '') continue
    const ids = tokenizer.encode(text)
    const document = new Int32Array(ids.length + (separator === undefined ? 0 : 1))
    document.set(ids)
    if (separator !== undefined) document[ids.length] = separator
    yield document
  }
}

export interface TokenOptions extends OrderOptions {
  /** Fraction at the end of every file held out for validation (default 0.05; 0 holds nothing out). */
  heldOut?: number
  /** The id that ends a document: with it batches say where documents begin, so that attention does not look across. */
  separator?: number
}

/** A file's ids from `start` on, cut into sequences. */
interface Part {
  shard: Shard
  start: number
  sequences: number
}

interface Shard {
  file: string
  descriptor: number
  width: number
  vocabulary: number
  count: number
}

/**
 * Sequences of token files. Sequence n of a part has the ids [n·T, n·T + T] of that part: T + 1 of them, T as input and T
 * as targets, so that neighbours share one id and every id but the first is predicted once. Up to T ids at the end of a
 * part are left over. Sequences do not cross from one file into the next, and training and held-out parts share no id.
 *
 * Reads in place: memory holds one batch whatever the size of the files.
 */
export class TokenDataset extends OrderedDataset implements Disposable {
  /** Ids lie in [0, vocabulary). */
  readonly vocabulary: number
  /** Ids of all files. */
  readonly tokens: number
  readonly #shards: readonly Shard[]
  readonly #train: readonly Part[]
  readonly #heldOut: readonly Part[]
  readonly #separator: number | undefined

  private constructor(
    shards: readonly Shard[],
    options: Required<Omit<TokenOptions, 'separator'>>,
    separator?: number,
  ) {
    const { sequence, heldOut } = options
    const cut = ({ count }: Shard) => count - Math.floor(count * heldOut)
    const part = (shard: Shard, start: number, end: number): Part => ({
      shard,
      start,
      sequences: Math.max(0, Math.floor((end - start - 1) / sequence)),
    })
    const train = shards.map((shard) => part(shard, 0, cut(shard)))
    const held = shards.map((shard) => part(shard, cut(shard), shard.count))
    const total = (parts: readonly Part[]) => parts.reduce((sum, { sequences }) => sum + sequences, 0)
    super('TokenDataset', options, total(train), total(held))
    this.#shards = shards
    this.#train = train
    this.#heldOut = held
    this.tokens = shards.reduce((sum, { count }) => sum + count, 0)
    this.vocabulary = (shards[0] as Shard).vocabulary
    this.#separator = separator
    const fail = refusal('TokenDataset')
    if (separator !== undefined && !(Number.isInteger(separator) && separator >= 0 && separator < this.vocabulary))
      fail('separator', `separator is ${separator} and must be an integer in [0, ${this.vocabulary}), the vocabulary`)
    for (const { file, vocabulary } of shards)
      if (vocabulary !== this.vocabulary)
        fail('file', `${file} has vocabulary ${vocabulary} and must have ${this.vocabulary} as the first file`)
    for (const [name, count, needed] of [
      ['training', this.sequences, true],
      ['held-out', this.heldOutSequences, heldOut > 0],
    ] as const)
      if (needed && count === 0)
        fail(
          'sequence',
          `the ${name} part of ${this.tokens} tokens has no sequence and must have at least sequence + 1 = ${sequence + 1} tokens in one file`,
        )
  }

  /** Opens one token file or several in order, as `writeTokens` made them. */
  static async open(file: string | readonly string[], options: TokenOptions): Promise<TokenDataset> {
    const { heldOut = 0.05 } = options
    const order = orderOf('TokenDataset', options)
    const fail = refusal('TokenDataset')
    if (!(heldOut >= 0 && heldOut < 1)) fail('heldOut', `heldOut is ${heldOut} and must be at least 0 and below 1`)
    const files = typeof file === 'string' ? [file] : file
    if (files.length === 0) fail('file', 'file is an empty list and must name at least one')
    const shards: Shard[] = []
    try {
      for (const name of files) shards.push(shardOf(name))
      return new TokenDataset(shards, { ...order, heldOut }, options.separator)
    } catch (error) {
      for (const { descriptor } of shards) closeSync(descriptor)
      throw error
    }
  }

  protected read(heldOut: boolean, numbers: readonly number[]): Batch {
    const T = this.sequence
    const ids = new Int32Array(numbers.length * T)
    const targets = new Int32Array(ids.length)
    numbers.forEach((number, row) => {
      const parts = heldOut ? this.#heldOut : this.#train
      let within = number
      let at = 0
      while (within >= (parts[at] as Part).sequences) within -= (parts[at++] as Part).sequences
      const { shard, start } = parts[at] as Part
      const tokens = tokensAt(shard, start + within * T, T + 1)
      ids.set(tokens.subarray(0, T), row * T)
      targets.set(tokens.subarray(1), row * T)
    })
    if (this.#separator === undefined) return { ids, targets, sequence: T }
    const begins = (row: number, t: number) => ids[row * T + t - 1] === this.#separator
    return { ids, targets, sequence: T, starts: startsOf(numbers.length, T, begins) }
  }

  /** Closes the files. */
  dispose(): void {
    for (const shard of this.#shards) {
      if (shard.descriptor >= 0) closeSync(shard.descriptor)
      shard.descriptor = -1
    }
  }
  [Symbol.dispose](): void {
    this.dispose()
  }
}

function fileError(text: string): never {
  throw new CoatError(`TokenDataset: ${text}`, 'file', 'TokenDataset', 'file')
}

function shardOf(file: string): Shard {
  let descriptor: number
  try {
    descriptor = openSync(file, 'r')
  } catch (error) {
    fileError(`${file} cannot be opened: ${(error as Error).message}`)
  }
  try {
    const status = fstatSync(descriptor)
    if (status.isDirectory()) fileError(`${file} is a folder and must be a file`)
    const { size } = status
    const header = Buffer.alloc(headerBytes)
    if (size < headerBytes)
      fileError(`${file} has ${size} bytes and must have at least the ${headerBytes} of its header`)
    readWhole(descriptor, header, 0, file)
    const found = header.toString('latin1', 0, 8)
    if (found !== magic)
      fileError(`${file} starts with ${JSON.stringify(found)} and must start with ${JSON.stringify(magic)}`)
    const shard: Shard = {
      file,
      descriptor,
      width: header.readUInt32LE(12),
      vocabulary: Number(header.readBigUInt64LE(16)),
      count: Number(header.readBigUInt64LE(24)),
    }
    const { width, vocabulary, count } = shard
    if (header.readUInt32LE(8) !== version)
      fileError(`${file} has version ${header.readUInt32LE(8)} and must have ${version}`)
    if (width !== 2 && width !== 4) fileError(`${file} has width ${width} and must have 2 or 4`)
    const most = width === 2 ? 65536 : largestVocabulary
    if (vocabulary < 1 || vocabulary > most)
      fileError(`${file} has vocabulary ${vocabulary} and must have one in [1, ${most}] for width ${width}`)
    if (size !== headerBytes + count * width)
      fileError(
        `${file} has ${size} bytes and must have ${headerBytes + count * width}: ${headerBytes} and ${count} ids of ${width}`,
      )
    return shard
  } catch (error) {
    closeSync(descriptor)
    throw error
  }
}

function tokensAt({ file, descriptor, width, vocabulary }: Shard, start: number, count: number): Ids {
  if (descriptor < 0) fileError(`${file} is closed`)
  // Memory of its own: a slice of the shared pool may start at an odd byte.
  const bytes = Buffer.from(new ArrayBuffer(count * width))
  readWhole(descriptor, bytes, headerBytes + start * width, file)
  const ids = idsOver(bytes, width)
  const wrong = ids.findIndex((id) => id >= vocabulary)
  if (wrong >= 0)
    fileError(`${file}: token ${start + wrong} is ${ids[wrong]} and must be below its vocabulary ${vocabulary}`)
  return ids
}

function readWhole(descriptor: number, bytes: Buffer, position: number, file: string): void {
  for (let done = 0; done < bytes.length; ) {
    const read = readSync(descriptor, bytes, done, bytes.length - done, position + done)
    if (read === 0) fileError(`${file} ends at byte ${position + done}: it became shorter after it was opened`)
    done += read
  }
}
