// Every format decoded from its bytes in float64, independently of the native code, and what its rounding may make of a value.
import type { AnyFormat } from '../lib/native.gen.ts'
import { numelOf, type Shape } from './values.ts'

export const kinds = {
  f32: { mantissa: 23, bias: 127, max: 3.4028234663852886e38, top: 0 },
  bf16: { mantissa: 7, bias: 127, max: 3.3895313892515355e38, top: 0 },
  e4m3: { mantissa: 3, bias: 7, max: 448, top: 0x7e },
  e5m2: { mantissa: 2, bias: 15, max: 57344, top: 0x7b },
  i32: { mantissa: 31, bias: 0, max: 2 ** 31, top: 0 },
}
export type Kind = keyof typeof kinds

/** The value of an FP8 code, by the definition of its bits. */
export function valueOfCode(kind: 'e4m3' | 'e5m2', code: number): number {
  const { mantissa, bias } = kinds[kind]
  const sign = code & 0x80 ? -1 : 1
  const exponent = (code & 0x7f) >> mantissa
  const fraction = (code & ((1 << mantissa) - 1)) / 2 ** mantissa
  if (kind === 'e4m3' && (code & 0x7f) === 0x7f) return Number.NaN
  if (kind === 'e5m2' && exponent === 31) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN
  return sign * (exponent === 0 ? fraction * 2 ** (1 - bias) : (1 + fraction) * 2 ** (exponent - bias))
}

export interface Block {
  scale: number
  k: number
  centre: number
}

/** A tensor as stored: values in float64, codes, and the block of scale, k and centre of each element. */
export interface Stored {
  values: Float64Array
  codes: Uint8Array
  blocks: Block[]
  blockOf(i: number): number
}

export const plain: Block = { scale: 1, k: 1, centre: 1 }

export function decode(format: AnyFormat, shape: Shape, bytes: Uint8Array): Stored {
  const [kind, scaling = ''] = format.split('/') as [Kind, string?]
  const n = numelOf(shape)
  const cols = shape.at(-1) ?? 1
  if (scaling === '') {
    const at = { f32: Float32Array, bf16: Uint16Array, i32: Int32Array, e4m3: Uint8Array, e5m2: Uint8Array }[kind]
    const words = new at(bytes.slice().buffer)
    const float = new Float32Array(1)
    const bits = new Uint32Array(float.buffer)
    const value = (word: number) => {
      bits[0] = word << 16
      return float[0] as number
    }
    const values = kind === 'bf16' ? Float64Array.from(words, value) : Float64Array.from(words)
    return { values, codes: bytes, blocks: [], blockOf: () => 0 }
  }
  const run = Number(scaling.slice(1))
  const runs = Math.ceil(cols / run)
  const blockOf = (i: number) =>
    scaling === 't'
      ? 0
      : scaling[0] === 'x'
        ? Math.floor(i / run)
        : Math.floor(i / cols) * runs + Math.floor((i % cols) / run)
  const count = scaling === 't' ? 1 : scaling[0] === 'x' ? Math.ceil(n / run) : n === 0 ? 0 : (n / cols) * runs
  const side = bytes.slice(Math.ceil(n / 16) * 16)
  const numbers = decode(format.endsWith('g16') ? 'bf16' : 'f32', [side.length], side).values
  const blocks = Array.from({ length: count }, (_, b) => {
    const [scale, k = 1, centre = 1] = [b, b + count, b + 2 * count].map((i) => numbers[i])
    if (!(scale !== undefined && scale > 0 && k > 0 && centre > 0 && scale + k + centre < 1e39))
      throw new Error(`block ${b} of ${format}[${shape}] has scale ${scale}, k ${k}, centre ${centre}`)
    return { scale, k, centre }
  })
  const codes = bytes.slice(0, n)
  const values = Float64Array.from(codes, (code, i) => {
    const { scale, k, centre } = blocks[blockOf(i)] as Block
    const x = valueOfCode(kind as 'e4m3', code) * scale
    return scaling[0] === 'x' ? Math.sign(x) * Math.abs(x) ** (1 / k) * centre : x
  })
  return { values, codes, blocks, blockOf }
}

export function stepOf(kind: Kind, magnitude: number): number {
  const { mantissa, bias } = kinds[kind]
  return 2 ** (Math.max(Math.floor(Math.log2(magnitude)), 1 - bias) - mantissa)
}

/** The values that x may have become: half a step of its format at x, and `slack` for FP32 arithmetic. */
export function interval(kind: Kind, block: Block, x: number, slack: number, saturates: boolean): [number, number] {
  const { scale, k, centre } = block
  const exact = (Math.abs(x) / centre) ** k / scale
  const code = saturates ? Math.min(exact, kinds[kind].max) : exact
  const half = stepOf(kind, code) / 2
  const back = (c: number) => (Math.max(c, 0) * scale) ** (1 / k) * centre
  const [low, high] = [back(code - half) - slack, back(code + half) + slack]
  return x < 0 ? [-high, -low] : [low, high]
}

/**
 * The block that range expansion gives a run (COAT section 3.2, and formulas for zeros and equal magnitudes); `top` is the
 * largest code.
 */
export function expansionOf(run: ArrayLike<number>, top: number): Block {
  const sizes = Array.from(run, Math.abs).filter((x) => x > 0)
  if (sizes.length === 0) return { scale: 1 / top, k: 1, centre: 1 }
  const [max, min] = [Math.max(...sizes), Math.min(...sizes)]
  if (max === min) return { scale: 1 / top, k: 1, centre: max }
  const sixteenths = Math.floor((16 * Math.log2(top ** 2 / 2)) / (Math.log2(max) - Math.log2(min)))
  const k = Math.min(Math.max(sixteenths, 1), 1024) / 16
  const centre = Math.sqrt(max) * Math.sqrt(min)
  return { scale: (max / centre) ** k / top, k, centre }
}
