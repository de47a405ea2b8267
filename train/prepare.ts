// `coat-train prepare`: text files and JSON lines to one token file, tokenized by all cores.
import { statSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import { extname } from 'node:path'
import { Worker } from 'node:worker_threads'
import { SingleBar } from 'cli-progress'
import { ByteTokenizer, CoatError, HuggingFaceTokenizer, writeTokens } from '../lib/index.ts'
import { linesOf } from '../lib/jsonl.ts'
import { claim, showBytes, showNumber } from '../lib/report.ts'
import { readText, shownFiles, textFiles } from './texts.ts'

export interface PrepareOptions {
  /** The token file. */
  out: string
  /** A tokenizer.json or its folder; else bytes. */
  tokenizer?: string
  /** Threads that tokenize (default: all cores). */
  threads?: number
}

export interface Prepared {
  tokens: number
  documents: number
}

// Texts go to a thread together until they have so many characters.
const enough = 256 * 1024
// A text longer than V8's longest string cannot be read as one.
const longestFile = 2 ** 28

interface Texts {
  texts: string[]
  /** Bytes of the files that were read so far. */
  read: number
}

/**
 * Tokenizes files, and of folders all .txt and .jsonl, in the order of their names: a text file is one document, and so is
 * each line `{"text": "…"}` of JSON lines. Every document has what the tokenizer puts around it, and its `eos` at the end.
 */
export async function prepare(
  inputs: readonly string[],
  { out, tokenizer, threads = availableParallelism() }: PrepareOptions,
): Promise<Prepared> {
  const files = textFiles(inputs, ['.txt', '.jsonl'])
  claim(out)
  const total = files.reduce((sum, file) => sum + statSync(file).size, 0)
  const { size: vocabulary } =
    tokenizer === undefined ? new ByteTokenizer() : await HuggingFaceTokenizer.open(tokenizer)
  const workers = Array.from({ length: threads }, () => new Encoder(tokenizer ?? null))
  using progress = new ByteProgress(total)
  let documents = 0
  const ids = async function* () {
    const pending: { ids: Promise<Int32Array>; read: number }[] = []
    let next = 0
    const first = async () => {
      const { ids, read } = pending.shift() as (typeof pending)[number]
      const done = await ids
      progress.update(read)
      return done
    }
    for await (const { texts, read } of textsOf(files)) {
      if (texts.length === 0 && documents === 0) fail(`${shownFiles(files)} hold no text`)
      documents += texts.length
      const ids = (workers[next++ % threads] as Encoder).encode(texts)
      ids.catch(() => {}) // it is heard of when its turn comes
      pending.push({ ids, read })
      if (pending.length >= 2 * threads) yield await first()
    }
    while (pending.length > 0) yield await first()
  }
  try {
    return { tokens: await writeTokens(out, ids(), { vocabulary }), documents }
  } finally {
    await Promise.all(workers.map((worker) => worker.end()))
  }
}

async function* textsOf(files: readonly string[]): AsyncGenerator<Texts> {
  let texts: string[] = []
  let characters = 0
  let read = 0
  for (const file of files) {
    const { size } = statSync(file)
    const one = file.endsWith('.jsonl') ? lines(file) : whole(file, size)
    for await (const text of one) {
      if (text === '') continue
      texts.push(text)
      characters += text.length
      if (characters < enough) continue
      yield { texts, read }
      texts = []
      characters = 0
    }
    read += size
  }
  yield { texts, read }
}

async function* whole(file: string, size: number): AsyncGenerator<string> {
  if (size > longestFile)
    fail(
      `${file} has ${showBytes(size)} and must have at most ${showBytes(longestFile)}: split it, or make it JSON lines`,
    )
  yield await readText(file)
}

async function* lines(file: string): AsyncGenerator<string> {
  for await (const [number, line] of linesOf(file)) {
    if (line.trim() === '') continue
    let value: unknown
    try {
      value = JSON.parse(line)
    } catch (error) {
      fail(`${file}, line ${number}: is no JSON: ${(error as Error).message}`)
    }
    const { text } = (value ?? {}) as { text?: unknown }
    if (typeof text !== 'string')
      fail(
        `${file}, line ${number}: must have a 'text'; chats have masks, which token files have not: train on them as jsonl`,
      )
    yield text as string
  }
}

function fail(message: string): never {
  throw new CoatError(`prepare: ${message}`, 'file', 'prepare', 'inputs')
}

/** A worker thread that encodes one bundle of texts after another. */
class Encoder {
  readonly #worker: Worker
  readonly #waiting: { resolve: (ids: Int32Array) => void; reject: (error: Error) => void }[] = []
  #broken: Error | null = null

  constructor(tokenizer: string | null) {
    const file = new URL(`./encoder${extname(import.meta.filename)}`, import.meta.url)
    this.#worker = new Worker(file, { workerData: { tokenizer } })
    this.#worker.on('message', (ids: Int32Array) => this.#waiting.shift()?.resolve(ids))
    this.#worker.on('error', (error) => this.#break(error))
    this.#worker.on('exit', () => this.#break(new Error('prepare: a tokenizing thread ended')))
  }

  encode(texts: readonly string[]): Promise<Int32Array> {
    if (this.#broken) return Promise.reject(this.#broken)
    return new Promise((resolve, reject) => {
      this.#waiting.push({ resolve, reject })
      this.#worker.postMessage(texts)
    })
  }

  async end(): Promise<void> {
    await this.#worker.terminate()
  }

  #break(error: Error): void {
    this.#broken ??= error
    for (const { reject } of this.#waiting.splice(0)) reject(this.#broken)
  }
}

/** A bar on stderr where that is a terminal, else a line every tenth. */
class ByteProgress implements Disposable {
  readonly #total: number
  readonly #bar: SingleBar | null
  readonly #started = performance.now()
  #shown = 0

  constructor(total: number) {
    this.#total = total
    this.#bar = process.stderr.isTTY
      ? new SingleBar({
          format: 'tokenizing {bar} {percentage} %  {rate}/s  {eta} s left',
          stream: process.stderr,
          hideCursor: true,
        })
      : null
    this.#bar?.start(total, 0, { rate: '-' })
  }

  update(read: number): void {
    const rate = showBytes(Math.round((read / (performance.now() - this.#started)) * 1000))
    this.#bar?.update(read, { rate })
    const tenth = Math.floor((10 * read) / Math.max(1, this.#total))
    if (this.#bar || tenth <= this.#shown) return
    this.#shown = tenth
    process.stderr.write(`tokenizing ${showNumber(10 * tenth)} %  ${rate}/s\n`)
  }

  [Symbol.dispose](): void {
    this.#bar?.stop()
  }
}
