// JSON lines of texts and chats: which tokens they are, and which of them a model learns to say.
import { open } from 'node:fs/promises'
import { type Batch, OrderedDataset, type OrderOptions, orderOf, refusal, startsOf } from './data.ts'
import { CoatError } from './native.ts'
import { ignoreIndex } from './ops.ts'
import { ByteTokenizer, type Tokenizer } from './tokenizer.ts'

const roles = ['system', 'developer', 'user', 'assistant', 'tool'] as const
export type Role = (typeof roles)[number]

/** What stands before and after the content of a message. */
export interface TurnMarks {
  open: string
  close: string
}

/** ChatML: `<|im_start|>role`, a line feed, the content, `<|im_end|>`, a line feed. */
export function turnMarks(role: Role): TurnMarks {
  return { open: `<|im_start|>${role}\n`, close: '<|im_end|>\n' }
}

/** The tokens of one line. */
export interface Document {
  /** [n] */
  ids: Int32Array
  /** 1 for a token that a model learns to say, else 0: all of a text; content and closing mark of assistant messages. [n] */
  learned: Uint8Array
}

interface ReadOptions {
  /** Default: bytes. */
  tokenizer?: Tokenizer
  /** Marks around messages (default ChatML). */
  marks?: (role: Role) => TurnMarks
}

export interface JsonlOptions extends OrderOptions, ReadOptions {
  /** Fraction of the documents held out for validation, spread evenly (default 0.05; 0 holds nothing out). */
  heldOut?: number
  /** Whether batches say where documents begin, so that attention does not look across (default false). */
  documents?: boolean
}

/**
 * Documents of JSON lines, one object a line: `{"text": "…"}` or `{"messages": [{"role": "user", "content": "…"}, …]}`
 * with at least one message of the assistant; other keys are ignored. A text is encoded with what the tokenizer puts
 * around it; a chat starts with `bos` where there is one, and its marks and contents are encoded each by itself, so that
 * no token lies across the border of what is learned. A tokenizer that puts a space before a text puts one before each of
 * them. `eos`, where there is one, ends every document; it is learned after a text and after the assistant. Blank lines
 * and empty texts give nothing. A bad line is refused by file and number.
 */
export async function* readJsonl(file: string, options: ReadOptions = {}): AsyncGenerator<Document> {
  const { tokenizer = new ByteTokenizer(), marks = turnMarks } = options
  for await (const [number, line] of linesOf(file)) {
    const fail = (text: string): never => lineError(file, number, text)
    if (line.trim() === '') continue
    let value: unknown
    try {
      value = JSON.parse(line)
    } catch (error) {
      fail(`is no JSON: ${(error as Error).message}`)
    }
    if (!isObject(value)) return fail('must be a JSON object')
    const { text, messages } = value
    if ((text === undefined) === (messages === undefined)) fail("must have either 'text' or 'messages'")
    const parts =
      messages === undefined ? partsOfText(text, tokenizer, fail) : partsOf(messages, tokenizer, marks, fail)
    if (parts.length > 0) yield joined(parts, tokenizer)
  }
}

interface Piece {
  ids: ArrayLike<number>
  learned: boolean
}

function partsOfText(text: unknown, tokenizer: Tokenizer, fail: (text: string) => never): Piece[] {
  if (typeof text !== 'string') fail(`text is ${shown(text)} and must be a string`)
  return text === '' ? [] : [{ ids: tokenizer.encode(text as string), learned: true }]
}

function partsOf(
  messages: unknown,
  tokenizer: Tokenizer,
  marks: (role: Role) => TurnMarks,
  fail: (text: string) => never,
): Piece[] {
  if (!Array.isArray(messages) || messages.length === 0)
    return fail(`messages is ${shown(messages)} and must be a list of at least one message`)
  const { bos } = tokenizer.special
  const parts: Piece[] = bos === undefined ? [] : [{ ids: [bos], learned: false }]
  for (const [i, message] of messages.entries()) {
    if (!isObject(message)) return fail(`messages[${i}] is ${shown(message)} and must be an object`)
    const { role, content } = message
    if (!roles.includes(role as Role))
      fail(`messages[${i}].role is ${shown(role)} and must be one of ${roles.join(', ')}`)
    if (typeof content !== 'string') fail(`messages[${i}].content is ${shown(content)} and must be a string`)
    const { open, close } = marks(role as Role)
    const learned = role === 'assistant'
    for (const [text, counts] of [
      [open, false],
      [content as string, learned],
      [close, learned],
    ] as const)
      if (text !== '') parts.push({ ids: tokenizer.encode(text, { special: false }), learned: counts })
  }
  if (!messages.some(({ role }) => role === 'assistant'))
    fail("messages hold none of role 'assistant' and must hold at least one to learn from")
  return parts
}

function joined(parts: Piece[], tokenizer: Tokenizer): Document {
  const { eos } = tokenizer.special
  if (eos !== undefined) parts.push({ ids: [eos], learned: parts.at(-1)?.learned ?? false })
  const length = parts.reduce((sum, { ids }) => sum + ids.length, 0)
  const document = { ids: new Int32Array(length), learned: new Uint8Array(length) }
  let at = 0
  for (const { ids, learned } of parts) {
    document.ids.set(ids, at)
    document.learned.fill(learned ? 1 : 0, at, at + ids.length)
    at += ids.length
  }
  return document
}

/**
 * Documents of JSON lines, packed one after another into sequences of T tokens; a long document runs on in the next
 * sequence, and the last sequence of each part is filled up with id 0 and targets −100, so that no token is lost.
 *
 * The target of a token is the next token of its document where that is learned, else −100: the loss of a chat counts the
 * assistant's tokens only, and the last token of a document has target −100, so the start of the next document is never
 * predicted. Attention looks back across documents of one sequence unless `documents` is set. Whole documents are held out.
 * Memory holds all tokens and targets, 9 bytes a token; for more than that, `writeTokens` takes the ids that `readJsonl` reads.
 */
export class JsonlDataset extends OrderedDataset {
  readonly tokenizer: Tokenizer
  /** Documents of the training and of the held-out part. */
  readonly documents: { train: number; heldOut: number }
  readonly #train: Packed
  readonly #heldOut: Packed
  readonly #apart: boolean

  private constructor(
    options: Required<OrderOptions>,
    tokenizer: Tokenizer,
    train: Document[],
    heldOut: Document[],
    apart: boolean,
  ) {
    const packed = [pack(train, options.sequence), pack(heldOut, options.sequence)] as const
    const count = ({ ids }: Packed) => ids.length / options.sequence
    super('JsonlDataset', options, count(packed[0]), count(packed[1]))
    this.tokenizer = tokenizer
    this.documents = { train: train.length, heldOut: heldOut.length }
    this.#train = packed[0]
    this.#heldOut = packed[1]
    this.#apart = apart
  }

  /** Reads one file or several. */
  static async open(file: string | readonly string[], options: JsonlOptions): Promise<JsonlDataset> {
    const { heldOut = 0.05, tokenizer = new ByteTokenizer(), documents: apart = false } = options
    const order = orderOf('JsonlDataset', options)
    const fail = refusal('JsonlDataset')
    if (!(heldOut >= 0 && heldOut < 1)) fail('heldOut', `heldOut is ${heldOut} and must be at least 0 and below 1`)
    const documents: Document[] = []
    for (const name of typeof file === 'string' ? [file] : file)
      for await (const document of readJsonl(name, options)) documents.push(document)
    const isHeld = (i: number) => Math.floor((i + 1) * heldOut) > Math.floor(i * heldOut)
    const train = documents.filter((_, i) => !isHeld(i))
    const held = documents.filter((_, i) => isHeld(i))
    if (documents.length === 0) fail('file', `${[file].flat().join(', ')} hold no document`)
    if (heldOut > 0 && held.length === 0)
      fail(
        'heldOut',
        `heldOut is ${heldOut} and must give at least one of the ${documents.length} documents; 0 holds nothing out`,
      )
    return new JsonlDataset(order, tokenizer, train, held, apart)
  }

  protected read(heldOut: boolean, numbers: readonly number[]): Batch {
    const T = this.sequence
    const from = heldOut ? this.#heldOut : this.#train
    const ids = new Int32Array(numbers.length * T)
    const targets = new Int32Array(ids.length)
    numbers.forEach((number, row) => {
      ids.set(from.ids.subarray(number * T, (number + 1) * T), row * T)
      targets.set(from.targets.subarray(number * T, (number + 1) * T), row * T)
    })
    if (!this.#apart) return { ids, targets, sequence: T }
    const begins = (row: number, t: number) => from.begins[(numbers[row] as number) * T + t] === 1
    return { ids, targets, sequence: T, starts: startsOf(numbers.length, T, begins) }
  }
}

interface Packed {
  ids: Int32Array
  targets: Int32Array
  /** 1 where a document begins, or what fills the last sequence. */
  begins: Uint8Array
}

function pack(documents: readonly Document[], sequence: number): Packed {
  const tokens = documents.reduce((sum, { ids }) => sum + ids.length, 0)
  const length = Math.ceil(tokens / sequence) * sequence
  const packed = {
    ids: new Int32Array(length),
    targets: new Int32Array(length).fill(ignoreIndex),
    begins: new Uint8Array(length),
  }
  let at = 0
  for (const { ids, learned } of documents) {
    packed.ids.set(ids, at)
    packed.begins[at] = 1
    for (let i = 1; i < ids.length; i++) if (learned[i]) packed.targets[at + i - 1] = ids[i] as number
    at += ids.length
  }
  packed.begins.fill(1, at, at + 1)
  return packed
}

function lineError(file: string, line: number, text: string): never {
  throw new CoatError(`JSON lines: ${file}, line ${line}: ${text}`, 'file', 'readJsonl', 'file')
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function shown(value: unknown): string {
  return (JSON.stringify(value) ?? 'missing').slice(0, 60)
}

/** Numbered lines. They end at line feeds alone: U+2028, which other readers split at, may stand in a JSON string. */
export async function* linesOf(file: string): AsyncGenerator<[number, string]> {
  const decoder = new TextDecoder('utf-8', { fatal: true })
  let number = 0
  const decode = (bytes: Buffer): [number, string] => {
    number += 1
    try {
      return [number, decoder.decode(bytes)]
    } catch {
      return lineError(file, number, 'is no UTF-8')
    }
  }
  let rest: Buffer[] = []
  const handle = await open(file).catch((error: Error) => {
    throw new CoatError(`JSON lines: ${file} cannot be opened: ${error.message}`, 'file', 'readJsonl', 'file')
  })
  if ((await handle.stat()).isDirectory()) {
    await handle.close()
    throw new CoatError(`JSON lines: ${file} is a folder and must be a file`, 'file', 'readJsonl', 'file')
  }
  for await (const chunk of handle.createReadStream() as AsyncIterable<Buffer>) {
    let start = 0
    for (let end = chunk.indexOf(10); end >= 0; end = chunk.indexOf(10, start)) {
      yield decode(Buffer.concat([...rest, chunk.subarray(start, end)]))
      rest = []
      start = end + 1
    }
    rest.push(chunk.subarray(start))
  }
  yield decode(Buffer.concat(rest))
}
