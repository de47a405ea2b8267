// Choosing tokens: options of generation, and a token from logits.
import { refusal } from './data.ts'
import { CoatError, native } from './native.ts'
import { Tensor } from './tensor.ts'

export interface GenerateOptions {
  /** Tokens to add at most (default 100). */
  maxTokens?: number
  /** 0, the default, takes the likeliest token always; else logits are divided by it. */
  temperature?: number
  /** Chooses among the likeliest tokens that together have this probability (default 1: all). */
  topP?: number
  /** Seed of the choices (default 0). */
  seed?: number
  /** Ids that end the text, such as the tokenizer's `eos`; they are not part of it. */
  stop?: readonly number[]
}

type Choice = Required<Pick<GenerateOptions, 'temperature' | 'topP' | 'seed'>>

/** Options with their defaults, checked. */
export function generateOptions(prompt: readonly number[], options: GenerateOptions): Required<GenerateOptions> {
  const fail = refusal('generate')
  const full = { maxTokens: 100, temperature: 0, topP: 1, seed: 0, stop: [], ...options }
  const { maxTokens, temperature, topP, seed } = full
  for (const name of Object.keys(options))
    if (!['maxTokens', 'temperature', 'topP', 'seed', 'stop'].includes(name))
      fail(name, `option '${name}' is unknown; the options are maxTokens, temperature, topP, seed, stop`)
  if (prompt.length === 0) fail('prompt', 'prompt is empty and must hold at least one token')
  for (const [name, value, least] of [
    ['maxTokens', maxTokens, 1],
    ['seed', seed, 0],
  ] as const)
    if (!Number.isSafeInteger(value) || value < least)
      fail(name, `${name} is ${value} and must be an integer of at least ${least}`)
  if (!(temperature >= 0 && temperature < Number.POSITIVE_INFINITY))
    fail('temperature', `temperature is ${temperature} and must be a finite number of at least 0`)
  if (!(topP > 0 && topP <= 1)) fail('topP', `topP is ${topP} and must be above 0 and at most 1`)
  return full
}

/** Chances in (0, 1) that depend on seed and number alone. */
export async function uniforms(seed: number, count: number): Promise<Float32Array> {
  using tensor = Tensor.own(native.random_uniform('f32', 1, count, 0, 1, seed, 'cpu'))
  return (await tensor.read()) as Float32Array
}

/** A token by its logits [V]; `chance` in (0, 1) decides between those that may come. */
export function sampled(logits: ArrayLike<number>, { temperature, topP }: Choice, chance: number): number {
  let best = 0
  for (let i = 0; i < logits.length; i++) {
    if (Number.isNaN(logits[i])) throw new CoatError(`generate: logits[${i}] is NaN`, 'value', 'generate', 'logits')
    if ((logits[i] as number) > (logits[best] as number)) best = i
  }
  if (temperature === 0) return best
  const top = logits[best] as number
  const all = Array.from(logits, (x, token) => ({ token, weight: Math.exp((x - top) / temperature) }))
  const total = all.reduce((sum, { weight }) => sum + weight, 0)
  const kept = topP < 1 ? nucleus(all, topP * total) : all
  let left = chance * kept.reduce((sum, { weight }) => sum + weight, 0)
  for (const { token, weight } of kept) {
    left -= weight
    if (left < 0) return token
  }
  return best
}

interface Weighted {
  token: number
  weight: number
}

/** The heaviest, as few as reach `weight` together. */
function nucleus(all: readonly Weighted[], weight: number): Weighted[] {
  const sorted = all.toSorted((a, b) => b.weight - a.weight || a.token - b.token)
  let reached = 0
  const count = sorted.findIndex((item) => {
    reached += item.weight
    return reached >= weight
  })
  return count < 0 ? sorted : sorted.slice(0, count + 1)
}
