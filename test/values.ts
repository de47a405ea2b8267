// Data and arithmetic of the references: seeded numbers, and float64 tensors that are functions of their indices.
export type Shape = readonly number[]
export const numelOf = (shape: Shape) => shape.reduce((product, size) => product * size, 1)

/** Seeded numbers: mulberry32 and Box-Muller. */
export class Random {
  #state: number
  constructor(seed: number) {
    this.#state = seed
  }
  uniform(): number {
    this.#state = (this.#state + 0x6d2b79f5) | 0
    let t = Math.imul(this.#state ^ (this.#state >>> 15), this.#state | 1)
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61)
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32
  }
  integer(below: number): number {
    return Math.floor(this.uniform() * below)
  }
  normal(): number {
    return Math.sqrt(-2 * Math.log(1 - this.uniform())) * Math.cos(2 * Math.PI * this.uniform())
  }
  /** Normal, with a few zeros and a few numbers far from 1. */
  typical(): number {
    const x = this.normal()
    const die = this.uniform()
    return die < 0.05 ? 0 : die < 0.1 ? x * 50 : die < 0.15 ? x * 1e-3 : x
  }
}

/** A tensor of the references: x(i) flat, x(row, column) in a matrix. */
export interface Values {
  (i: number, j?: number): number
  readonly data: Float64Array
}

export function valuesOf(data: Float64Array, cols = 1): Values {
  return Object.assign((i: number, j?: number) => data[j === undefined ? i : i * cols + j] as number, { data })
}
export function vector(n: number, f: (i: number) => number): Values {
  return valuesOf(Float64Array.from({ length: n }, (_, i) => f(i)))
}
export function matrix(rows: number, cols: number, f: (i: number, j: number) => number): Values {
  const data = new Float64Array(rows * cols)
  for (let i = 0; i < rows; i++) for (let j = 0; j < cols; j++) data[i * cols + j] = f(i, j)
  return valuesOf(data, cols)
}
export function sum(n: number, f: (i: number) => number): number {
  let total = 0
  for (let i = 0; i < n; i++) total += f(i)
  return total
}
export function largest(n: number, f: (i: number) => number): number {
  let most = Number.NEGATIVE_INFINITY
  for (let i = 0; i < n; i++) most = Math.max(most, f(i))
  return most
}

export type Letter = 'B' | 'D' | 'F' | 'H' | 'J' | 'K' | 'L' | 'M' | 'N' | 'T' | 'V'
export type Hyper =
  | ('beta1' | 'gain1' | 'beta2' | 'gain2' | 'weight_decay' | 'correct1' | 'correct2' | 'v_floor')
  | ('momentum' | 'gain' | 'nesterov')
export type Scalar =
  | 'causal'
  | 'direction'
  | 'eps'
  | 'first'
  | 'headroom'
  | 'high'
  | 'ignore'
  | 'low'
  | 'lr'
  | 'max_norm'
  | 'scale'
  | 'seed'
  | 'window'
export type List = 'g' | 'lost' | 'm' | 'master' | 'p' | 'v'
export type Name =
  | (
      | 'a'
      | 'amax'
      | 'b'
      | 'bias'
      | 'cache'
      | 'clip'
      | 'dloss'
      | 'dout'
      | 'dy'
      | 'factor'
      | 'history'
      | 'ids'
      | 'logits'
      | 'lse'
      | 'mean'
      | 'out'
      | 'qkv'
      | 'residual'
      | 'rstd'
      | 'weight'
    )
  | ('starts' | 'table' | 'targets' | 'w' | 'x' | 'y')
/** Arguments of an op as the reference sees them: decoded to float64; absent ones are null. */
export type Given = Record<Letter | Hyper | Scalar | 'std', number> & Record<Name, Values> & Record<List, Values[]>

/** The largest magnitude of each, with room for the rounding of what it is of; scales.test.ts holds it exactly. */
export function maximaOf(list: readonly Values[]) {
  const amax = list.map(({ data }) => vector(1, () => data.reduce((most, x) => Math.max(most, Math.abs(x)), 0)))
  return { amax, '|amax|': amax.map((most) => vector(1, () => 1000 * most(0))) }
}

/** A model and a text that train in seconds. */
export const smallLlama = {
  hidden_size: 32,
  intermediate_size: 80,
  num_hidden_layers: 2,
  num_attention_heads: 4,
  num_key_value_heads: 2,
  vocab_size: 256,
  max_position_embeddings: 64,
  tie_word_embeddings: true,
}
export const sentence = 'Four score and seven years ago our fathers brought forth on this continent a new nation. '
