// Every format decoded from its bytes in float64, independently of the native code, and what its rounding may make of a value.
import type { AnyFormat } from '../lib/native.gen.ts'
import { numelOf, type Shape } from './values.ts'

/** Floating-point codes; `full`: the least that the largest code of a measured block may be. */
export const kinds = {
  f32: { bits: 32, mantissa: 23, bias: 127, max: 3.4028234663852886e38, full: 0 },
  bf16: { bits: 16, mantissa: 7, bias: 127, max: 3.3895313892515355e38, full: 0 },
  bf16x2: { bits: 16, mantissa: 16, bias: 118, max: 3.3895313892515355e38, full: 0 }, // with its remainder
  f16: { bits: 16, mantissa: 10, bias: 15, max: 65504, full: 32752 }, // its scale is a power of two
  e4m3: { bits: 8, mantissa: 3, bias: 7, max: 448, full: 448 },
  e5m2: { bits: 8, mantissa: 2, bias: 15, max: 57344, full: 57344 },
  i8: { bits: 8, mantissa: 7, bias: -6, max: 127, full: 126 }, // steps of 1; its scale is up to 2^-7 too large
  i32: { bits: 32, mantissa: 31, bias: 0, max: 2 ** 31, full: 0 },
}

/** Levels of a dynamic map in ascending order: middles of equal parts of [0.1, 1] in decades, twice as many in each. */
function dynamicMap(decades: number, signed: boolean): number[] {
  const positive = Array.from({ length: decades }, (_, i) => {
    const parts = (signed ? 1 : 2) * 2 ** i
    return Array.from({ length: parts }, (_, j) => 10 ** (i + 1 - decades) * (0.1 + (0.9 * (j + 0.5)) / parts))
  }).flat()
  const levels = [0, 1, ...positive, ...(signed ? positive.map((x) => -x) : [])]
  return levels.map(Math.fround).sort((a, b) => a - b)
}
/** The values of the codes of a map; `full` as in kinds, 0 where only one sign is kept. */
export const maps = {
  d8: { bits: 8, levels: dynamicMap(7, true), full: 0.99 },
  u8: { bits: 8, levels: dynamicMap(7, false), full: 0 },
  d4: { bits: 4, levels: dynamicMap(3, true), full: 0.88 },
  u4: { bits: 4, levels: Array.from({ length: 16 }, (_, i) => (i + 1) / 16), full: 0 },
}
export type FloatKind = keyof typeof kinds
export type MapKind = keyof typeof maps
export type Kind = FloatKind | MapKind
export const isMap = (kind: Kind): kind is MapKind => kind in maps
export const fullOf = (kind: Kind) => (isMap(kind) ? maps[kind] : kinds[kind]).full

/** The value of a code, by the definition of its bits or from its map. */
export function valueOfCode(kind: 'e4m3' | 'e5m2' | 'i8' | 'f16' | MapKind, code: number): number {
  if (isMap(kind)) return maps[kind].levels[code] as number
  if (kind === 'i8') return code === 128 ? Number.NaN : code < 128 ? code : code - 256
  const { bits, mantissa, bias } = kinds[kind]
  const size = code & (2 ** (bits - 1) - 1)
  const sign = code === size ? 1 : -1
  const exponent = size >> mantissa
  const fraction = (size & (2 ** mantissa - 1)) / 2 ** mantissa
  if (kind === 'e4m3' && size === 0x7f) return Number.NaN
  if (kind !== 'e4m3' && exponent === 31) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN
  return sign * (exponent === 0 ? fraction * 2 ** (1 - bias) : (1 + fraction) * 2 ** (exponent - bias))
}

/** Whether the scales of FP8 codes are powers of two: the largest code may then be half of the largest that there is. */
export const hasPow2 = (format: AnyFormat) => /^e.*(\/r|p2)$/.test(format)

export interface Block {
  scale: number
  k: number
  centre: number
}

/** A tensor as stored: values in float64, codes, and the block of scale, k and centre of each element. */
export interface Stored {
  values: Float64Array
  codes: Uint8Array | Uint16Array
  blocks: Block[]
  blockOf(i: number): number
}

export const plain: Block = { scale: 1, k: 1, centre: 1 }

const aligned = (bytes: number) => Math.ceil(bytes / 16) * 16

function bf16Of(bytes: Uint8Array): Float64Array {
  const words = new Uint16Array(bytes.slice().buffer)
  return Float64Array.from(new Float32Array(Uint32Array.from(words, (word) => word << 16).buffer))
}

function plainValues(kind: FloatKind, n: number, bytes: Uint8Array): Float64Array {
  const { buffer } = bytes.slice()
  switch (kind) {
    case 'bf16':
      return bf16Of(bytes)
    case 'bf16x2': {
      const low = bf16Of(bytes.slice(aligned(2 * n)))
      return bf16Of(bytes.slice(0, 2 * n)).map((high, i) => Math.fround(high + (low[i] as number)))
    }
    case 'f16':
      return Float64Array.from(new Uint16Array(buffer), (code) => valueOfCode('f16', code))
    default:
      return Float64Array.from(kind === 'i32' ? new Int32Array(buffer) : new Float32Array(buffer))
  }
}

export function decode(format: AnyFormat, shape: Shape, bytes: Uint8Array): Stored {
  const [kind, scaling = ''] = format.split('/') as [Kind, string?]
  const n = numelOf(shape)
  const cols = shape.at(-1) ?? 1
  if (scaling === '')
    return { values: plainValues(kind as FloatKind, n, bytes), codes: bytes, blocks: [], blockOf: () => 0 }
  const run = scaling === 'r' ? cols : Number.parseInt(scaling.slice(1), 10)
  const runs = Math.ceil(cols / run)
  const flat = scaling[0] === 'x' || isMap(kind)
  const down = scaling[0] === 'b' ? run : 1 // rows that share scales
  const blockOf = (i: number) =>
    scaling === 't' ? 0 : flat ? Math.floor(i / run) : Math.floor(i / cols / down) * runs + Math.floor((i % cols) / run)
  const count = scaling === 't' ? 1 : flat ? Math.ceil(n / run) : n === 0 ? 0 : Math.ceil(n / cols / down) * runs
  const { bits } = isMap(kind) ? maps[kind] : kinds[kind]
  const length = Math.ceil((n * bits) / 8)
  const numbers = plainValues(format.endsWith('g16') ? 'bf16' : 'f32', 0, bytes.slice(aligned(length)))
  const blocks = Array.from({ length: count }, (_, b) => {
    const [scale, k = 1, centre = 1] = (scaling[0] === 'x' ? [b, b + count, b + 2 * count] : [b]).map((i) => numbers[i])
    const least = kind === 'u4' ? 0 : Number.MIN_VALUE // u4 has no 0: a run of zeros has the scale 0
    if (!(scale !== undefined && scale >= least && k > 0 && centre > 0 && scale + k + centre < 1e39))
      throw new Error(`block ${b} of ${format}[${shape}] has scale ${scale}, k ${k}, centre ${centre}`)
    return { scale, k, centre }
  })
  const stored = bytes.slice(0, length)
  const codes =
    bits === 16
      ? new Uint16Array(stored.buffer)
      : bits === 8
        ? stored
        : Uint8Array.from({ length: n }, (_, i) => ((stored[i >> 1] as number) >> (4 * (i % 2))) & 15)
  const values = new Float64Array(n)
  codes.forEach((code, i) => {
    const { scale, k, centre } = blocks[blockOf(i)] as Block
    const x = valueOfCode(kind as 'e4m3', code) * scale
    values[i] = scaling[0] === 'x' ? Math.sign(x) * Math.abs(x) ** (1 / k) * centre : x
  })
  return { values, codes, blocks, blockOf }
}

/** The level of a map next to y. */
export function nearest(kind: MapKind, y: number): number {
  const { levels } = maps[kind]
  let [low, high] = [0, levels.length - 1]
  while (high - low > 1) {
    const middle = (low + high) >> 1
    if ((levels[middle] as number) <= y) low = middle
    else high = middle
  }
  const [below, above] = [levels[low] as number, levels[high] as number]
  return y - below <= above - y ? below : above
}

export function stepOf(kind: FloatKind, magnitude: number): number {
  const { mantissa, bias } = kinds[kind]
  return 2 ** (Math.max(Math.floor(Math.log2(magnitude)), 1 - bias) - mantissa)
}

/** The values that x may have become: half a step of its format at x, and `slack` for FP32 arithmetic. */
export function interval(kind: Kind, block: Block, x: number, slack: number, saturates: boolean): [number, number] {
  const { scale, k, centre } = block
  if (isMap(kind)) {
    const step = slack / scale + Math.abs(x / scale) * 1e-6
    return scale === 0
      ? [-slack, slack]
      : [scale * nearest(kind, x / scale - step) - slack, scale * nearest(kind, x / scale + step) + slack]
  }
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
