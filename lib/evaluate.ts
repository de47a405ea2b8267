// What a model makes of text that it is not trained on: mean loss by tokens, and the perplexity of a file.
import { readFile } from 'node:fs/promises'
import { setImmediate } from 'node:timers/promises'
import { type Batch, expectInteger, type OrderedDataset, refusal } from './data.ts'
import { JsonlDataset } from './jsonl.ts'
import { documentStarts, ignoreIndex, type Weight } from './ops.ts'
import { noGrad } from './tape.ts'
import { type Device, scope, Tensor } from './tensor.ts'
import { ByteTokenizer, type Tokenizer } from './tokenizer.ts'
import { isTokenFile, TokenDataset } from './tokens.ts'

/** A model that can say how likely tokens are. */
export interface Scorer {
  readonly device: Device
  /** weight · Σ cross-entropy over the targets that are not ignored, f32 [1]. */
  loss(ids: Tensor, targets: Tensor, sequence: number, weight: Weight, starts?: Tensor | null): Tensor
}

export interface Evaluation {
  /** Mean cross-entropy by tokens, in nats. */
  loss: number
  /** e to the loss. */
  perplexity: number
  /** Tokens that took part. */
  tokens: number
}

/** A batch on a device. */
export interface Inputs {
  /** i32 [B·T] */
  ids: Tensor
  /** i32 [B·T] */
  targets: Tensor
  /** i32 [B·T] */
  starts: Tensor | null
  sequence: number
}

export function inputsOf({ ids, targets, sequence, starts }: Batch, device: Device): Inputs {
  const of = (values: Int32Array) => Tensor.from(values, [values.length], { device })
  return {
    ids: of(ids),
    targets: of(targets),
    starts: starts ? documentStarts(starts, sequence, device) : null,
    sequence,
  }
}

/** The model's loss of one batch, f32 [1]. */
export function lossOf(model: Scorer, { ids, targets, sequence, starts }: Inputs, weight: Weight): Tensor {
  return model.loss(ids, targets, sequence, weight, starts)
}

/** Throws unless all ids of a batch, and all targets that are not ignored, lie in [0, vocabulary). */
export function expectIds({ ids, targets }: Batch, vocabulary: number, name: string): void {
  for (const [argument, values] of Object.entries({ ids, targets })) {
    const wrong = values.findIndex(
      (id) => (id < 0 || id >= vocabulary) && !(argument === 'targets' && id === ignoreIndex),
    )
    if (wrong >= 0)
      refusal('training')(
        argument,
        `${name}: ${argument}[${wrong}] is ${values[wrong]} and must be at least 0 and less than ${vocabulary}, the model's vocabulary`,
      )
  }
}

/** Targets that take part in the loss. */
export function counted(targets: Int32Array): number {
  let count = 0
  for (const target of targets) if (target !== ignoreIndex) count += 1
  return count
}

/** Mean loss by tokens over batches; the model stays as it is. */
export async function evaluate(model: Scorer, batches: Iterable<Batch>): Promise<Evaluation> {
  let sum = 0
  let tokens = 0
  for (const batch of batches) {
    using loss = noGrad(() => scope(() => lossOf(model, inputsOf(batch, model.device), 1))).keep()
    sum += await loss.item()
    tokens += counted(batch.targets)
    await setImmediate()
  }
  const loss = sum / tokens
  return { loss, perplexity: Math.exp(loss), tokens }
}

export interface PerplexityOptions {
  /** Tokens of one sequence; a token sees what is before it in its sequence. */
  sequence: number
  /** Sequences at a time (default 8). */
  batch?: number
  /** For text and JSON lines (default: bytes). */
  tokenizer?: Tokenizer
}

/**
 * Perplexity over a whole file: of token files every sequence, of `.jsonl` what a model would learn (as `JsonlDataset`), of
 * any other file its text but the first token, in sequences that share one token.
 */
export async function perplexity(model: Scorer, file: string, options: PerplexityOptions): Promise<Evaluation> {
  const { sequence, batch = 8, tokenizer = new ByteTokenizer() } = options
  expectInteger('perplexity', 'sequence', sequence, 1)
  expectInteger('perplexity', 'batch', batch, 1)
  const order = { sequence, heldOut: 0, shuffle: false }
  if (await isTokenFile(file)) {
    using data = await TokenDataset.open(file, order)
    return await evaluate(model, inOrder(data, batch))
  }
  if (file.endsWith('.jsonl')) {
    const data = await JsonlDataset.open(file, { ...order, tokenizer })
    return evaluate(model, inOrder(data, batch))
  }
  const tokens = Int32Array.from(tokenizer.encode(await readFile(file, 'utf8')))
  if (tokens.length < 2)
    refusal('perplexity')('file', `${file} has ${tokens.length} tokens and must have at least 2, one to predict`)
  return evaluate(model, windows(tokens, sequence, batch))
}

function* inOrder(data: OrderedDataset, batch: number): Generator<Batch> {
  for (let left = data.sequences; left > 0; left -= batch) yield data.next(Math.min(batch, left))
}

function* windows(tokens: Int32Array, sequence: number, batch: number): Generator<Batch> {
  const step = batch * sequence
  for (let start = 0; start + 1 < tokens.length; start += step) {
    const rows = Math.ceil(Math.min(step, tokens.length - 1 - start) / sequence)
    const ids = new Int32Array(rows * sequence)
    const targets = new Int32Array(ids.length).fill(ignoreIndex)
    ids.set(tokens.subarray(start, Math.min(start + ids.length, tokens.length)))
    targets.set(tokens.subarray(start + 1, start + 1 + ids.length))
    yield { ids, targets, sequence }
  }
}
