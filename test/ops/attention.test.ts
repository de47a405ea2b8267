// attention against softmax in float64: shared key/value heads, causal and not, odd lengths and head sizes.
import { describe, expect, it } from 'vitest'
import { LlamaForCausalLM } from '../../lib/index.ts'
import type { Handle } from '../../lib/native.gen.ts'
import { native } from '../../lib/native.ts'
import { stepOf } from '../decode.ts'
import { bytesOf, checkGradient, checkOp, devices, moved, own, present, stored, tensor } from '../harness.ts'
import { type Given, largest, matrix, Random, smallLlama, sum, valuesOf } from '../values.ts'

/** Views of packed rows: q(b, h, t, i), k and v by the head that h reads. */
function parts({ qkv, T, H, J, D }: Given) {
  const width = (H + 2 * J) * D
  const at = (b: number, t: number, head: number, i: number) => qkv((b * T + t) * width + head * D + i)
  const shared = (h: number) => Math.floor(h / (H / J))
  return {
    q: (b: number, h: number, t: number, i: number) => at(b, t, h, i),
    k: (b: number, h: number, t: number, i: number) => at(b, t, H + shared(h), i),
    v: (b: number, h: number, t: number, i: number) => at(b, t, H + J + shared(h), i),
  }
}

/** The positions whose keys query t of sequence b sees. */
function seen({ T, starts, causal, window }: Given, b: number, t: number): number[] {
  const start = (s: number) => (starts ? starts(b * T + s) : 0)
  const near = (s: number) => window === 0 || Math.abs(t - s) < window
  const all = Array.from({ length: causal ? t + 1 : T }, (_, s) => s)
  return all.filter((s) => near(s) && start(s) === start(t))
}

/** The sum of n products, and of their magnitudes. */
function dot(n: number, a: (i: number) => number, b: (i: number) => number): [number, number] {
  let [total, size] = [0, 0]
  for (let i = 0; i < n; i++) {
    const x = a(i) * b(i)
    total += x
    size += Math.abs(x)
  }
  return [total, size]
}

function forward(given: Given) {
  const { B, T, H, D, scale } = given
  const { q, k, v } = parts(given)
  const [out, outSize] = [new Float64Array(B * T * H * D), new Float64Array(B * T * H * D)]
  const [lse, lseSize] = [new Float64Array(B * T * H), new Float64Array(B * T * H)]
  for (let b = 0; b < B; b++)
    for (let h = 0; h < H; h++)
      for (let t = 0; t < T; t++) {
        const keys = seen(given, b, t)
        const products = keys.map((s) =>
          dot(
            D,
            (i) => q(b, h, t, i),
            (i) => k(b, h, s, i),
          ),
        )
        const scores = Float64Array.from(products, ([product]) => scale * product)
        const size = largest(keys.length, (n) => Math.abs(scale) * (products[n] as [number, number])[1])
        const top = Math.max(...scores)
        const total = Math.log(scores.reduce((all, score) => all + Math.exp(score - top), 0))
        const row = (b * T + t) * H + h
        lse[row] = top + total
        lseSize[row] = size + total
        const p = scores.map((score) => Math.exp(score - top - total))
        for (let i = 0; i < D; i++) {
          const [total, magnitude] = dot(
            keys.length,
            (n) => p[n] as number,
            (n) => v(b, h, keys[n] as number, i),
          )
          out[row * D + i] = total
          outSize[row * D + i] = (1 + size) * magnitude + 1e-30
        }
      }
  return {
    out: valuesOf(out, H * D),
    '|out|': valuesOf(outSize),
    lse: valuesOf(lse, H),
    '|lse|': valuesOf(lseSize),
    ...amaxOf(out, outSize),
  }
}

/** The cache with the new rows in it, and what these see. */
function cached(given: Given) {
  const { M, T, H, J, D, first, window, scale, qkv, cache } = given
  const [width, row] = [(H + 2 * J) * D, 2 * J * D]
  const filled = matrix(T, row, (t, n) => {
    const m = t - first
    return m >= 0 && m < M ? qkv(m * width + H * D + n) : cache(t * row + n)
  })
  const [out, sizes] = [new Float64Array(M * H * D), new Float64Array(M * H * D)]
  for (let m = 0; m < M; m++)
    for (let h = 0; h < H; h++) {
      const last = first + m
      const begin = window > 0 ? Math.max(0, last + 1 - window) : 0
      const column = Math.floor(h / (H / J)) * D
      const rows = Array.from({ length: last + 1 - begin }, (_, i) => begin + i)
      const dots = rows.map((t) =>
        dot(
          D,
          (i) => qkv(m * width + h * D + i),
          (i) => filled(t, column + i),
        ),
      )
      const top = Math.max(...dots.map(([score]) => scale * score))
      const size = Math.max(...dots.map(([, magnitude]) => Math.abs(scale) * magnitude))
      const p = dots.map(([score]) => Math.exp(scale * score - top))
      const total = p.reduce((a, b) => a + b, 0)
      for (let i = 0; i < D; i++) {
        const value = (j: number) => filled(rows[j] as number, J * D + column + i)
        const at = (m * H + h) * D + i
        out[at] = sum(rows.length, (j) => ((p[j] as number) / total) * value(j))
        sizes[at] = (1 + size) * sum(rows.length, (j) => ((p[j] as number) / total) * Math.abs(value(j))) + 1e-30
      }
    }
  return { cache: filled, out: valuesOf(out, H * D), '|out|': valuesOf(sizes) }
}

/** Turns the gradients of q and k back in place; `sizes` are what their rounding may be. */
function turnBack({ B, T, H, J, D, table, starts }: Given, [dqkv, sizes]: [Float64Array, Float64Array]) {
  const width = (H + 2 * J) * D
  const half = D / 2
  for (let m = 0; m < B * T; m++) {
    const position = (m % T) - (starts ? starts(m) : 0)
    for (let head = 0; head < H + J; head++)
      for (let i = 0; i < half; i++) {
        const [first, second] = [m * width + head * D + i, m * width + head * D + i + half]
        const [c, s] = [table(position * D + i), table(position * D + half + i)]
        const [a, b] = [dqkv[first] as number, dqkv[second] as number]
        dqkv[first] = a * c + b * s
        dqkv[second] = b * c - a * s
        const [x, y, u, v] = [sizes[first] as number, sizes[second] as number, Math.abs(c), Math.abs(s)]
        sizes[first] = x * u + y * v
        sizes[second] = y * u + x * v
      }
  }
}

/** The largest magnitude, to be held exactly against op amax. */
function amaxOf(values: Float64Array, sizes: Float64Array) {
  const most = (list: Float64Array) => largest(list.length, (i) => Math.abs(list[i] as number))
  return {
    amax: valuesOf(Float64Array.of(most(values))),
    '|amax|': valuesOf(Float64Array.of(4000 * most(sizes) + 1e-30)),
  }
}

/** From q, k, v and dout alone; `out` and `lse`, where the op is given them, enter through p and delta. */
function backward(given: Given) {
  const { B, T, H, J, D, dout, scale } = given
  const { out, lse } = (given.lse as unknown) ? given : forward(given)
  const { q, k, v } = parts(given)
  const width = (H + 2 * J) * D
  const [dqkv, sizes] = [new Float64Array(B * T * width), new Float64Array(B * T * width)]
  const add = (at: number, value: number, size: number) => {
    dqkv[at] = (dqkv[at] as number) + value
    sizes[at] = (sizes[at] as number) + Math.abs(size)
  }
  for (let b = 0; b < B; b++)
    for (let h = 0; h < H; h++) {
      const head = Math.floor(h / (H / J)) * D
      for (let t = 0; t < T; t++) {
        const row = b * T + t
        const dy = (i: number) => dout(row * H * D + h * D + i)
        const [delta, deltaSize] = dot(D, dy, (i) => out(row * H * D + h * D + i))
        for (const s of seen(given, b, t)) {
          const [qk, qkSize] = dot(
            D,
            (i) => q(b, h, t, i),
            (i) => k(b, h, s, i),
          )
          const [dp, dpSize] = dot(D, dy, (i) => v(b, h, s, i))
          const spread = 1 + scale * qkSize + Math.abs(lse(row * H + h))
          const p = Math.exp(scale * qk - lse(row * H + h))
          const ds = scale * p * (dp - delta)
          const dsSize = scale * p * (deltaSize + dpSize) * spread
          const key = (b * T + s) * width + H * D + head
          for (let i = 0; i < D; i++) {
            add(row * width + h * D + i, ds * k(b, h, s, i), dsSize * k(b, h, s, i))
            add(key + i, ds * q(b, h, t, i), dsSize * q(b, h, t, i))
            add(key + J * D + i, p * dy(i), p * spread * dy(i))
          }
        }
      }
    }
  if (given.table as unknown) turnBack(given, [dqkv, sizes])
  return {
    dqkv: valuesOf(dqkv, width),
    '|dqkv|': valuesOf(sizes.map((size) => size + 1e-30)),
    ...amaxOf(dqkv, sizes),
  }
}

/** One call, of one sequence or several. */
interface Case {
  T: number
  H: number
  J: number
  D: number
  causal: number
  window?: number
  starts?: Int32Array
  scale?: number
}

/**
 * Forward and backward in float64, row by row. `round`: what an implementation stores that keeps its matrices in bf16, but the
 * softmax in f32: the probabilities that meet v and dout, their gradient, that of the scores, and the results.
 */
function attend(one: Case, qkv: Float64Array, dout: Float64Array, round = (x: number) => x) {
  const { T, H, J, D, causal, window = 0, starts, scale = D ** -0.5 } = one
  const width = (H + 2 * J) * D
  const rows = qkv.length / width
  const at = (values: Float64Array, i: number) => values[i] as number
  const product = (a: Float64Array, i: number, b: Float64Array, j: number) => {
    let total = 0
    for (let d = 0; d < D; d++) total += at(a, i + d) * at(b, j + d)
    return total
  }
  const add = (to: Float64Array, i: number, factor: number, from: Float64Array, j: number) => {
    for (let d = 0; d < D; d++) to[i + d] = at(to, i + d) + factor * at(from, j + d)
  }
  const [out, lse, dx] = [new Float64Array(rows * H * D), new Float64Array(rows * H), new Float64Array(qkv.length)]
  const [p, dp] = [new Float64Array(T), new Float64Array(T)]
  for (let m = 0; m < rows; m++)
    for (let h = 0; h < H; h++) {
      const t = m % T
      const q = m * width + h * D
      const y = (m * H + h) * D
      const k = (s: number) => (m - t + s) * width + (H + Math.floor((h * J) / H)) * D
      const keys: number[] = []
      for (let s = 0; s < (causal ? t + 1 : T); s++)
        if ((window === 0 || Math.abs(t - s) < window) && (!starts || starts[m] === starts[m - t + s])) keys.push(s)
      let top = Number.NEGATIVE_INFINITY
      for (const s of keys) {
        p[s] = scale * product(qkv, q, qkv, k(s))
        top = Math.max(top, at(p, s))
      }
      let total = 0
      for (const s of keys) total += Math.exp(at(p, s) - top)
      lse[m * H + h] = top + Math.log(total)
      let delta = 0
      for (const s of keys) {
        p[s] = Math.exp(at(p, s) - top) / total
        dp[s] = round(product(dout, y, qkv, k(s) + J * D))
        delta += at(p, s) * at(dp, s)
        add(out, y, round(at(p, s)), qkv, k(s) + J * D)
      }
      for (const s of keys) {
        const ds = scale * round(at(p, s) * (at(dp, s) - delta))
        add(dx, q, ds, qkv, k(s))
        add(dx, k(s), ds, qkv, q)
        add(dx, k(s) + J * D, round(at(p, s)), dout, y)
      }
    }
  return { out: out.map(round), lse, dx: dx.map(round) }
}

const bfloat16 = (x: number) => {
  const step = stepOf('bf16', Math.abs(x))
  const [down, part] = [Math.floor(x / step), x / step - Math.floor(x / step)]
  return step * (part === 0.5 ? down + (down & 1) : Math.round(x / step))
}
const minus = (a: Float64Array, b: Float64Array) => a.map((x, i) => x - (b[i] as number))
const largestOf = (x: Float64Array) => x.reduce((most, value) => Math.max(most, Math.abs(value)), 0)
const rms = (x: Float64Array) => Math.sqrt(x.reduce((total, value) => total + value * value, 0) / x.length)
const cosine = (a: Float64Array, b: Float64Array) =>
  a.reduce((total, x, i) => total + x * (b[i] as number), 0) / (a.length * rms(a) * rms(b))
/** Starts of documents of these lengths in one sequence. */
const startsOf = (lengths: number[]) => {
  let first = 0
  return Int32Array.from(
    lengths.flatMap((length) => {
      first += length
      return new Array<number>(length).fill(first - length)
    }),
  )
}

// Documents of many lengths, others in every sequence.
const startIn = (b: number, t: number) =>
  Math.max(...[0, 1 + b, 2 + b, 19, 48, 49, 64, 96 - 7 * b].filter((s) => s <= t))

describe('attention', () => {
  const both = [0, 1].flatMap((causal) => [
    { B: 1, T: 1, H: 1, J: 1, D: 1, causal, window: 0, scale: 1 },
    { B: 2, T: 17, H: 8, J: 8, D: 8, causal, window: 1, scale: 0.35 },
    { B: 1, T: 63, H: 4, J: 2, D: 8, causal, window: 7, scale: 0.25 },
    { B: 2, T: 33, H: 4, J: 1, D: 33, causal, window: 32, scale: 0.17 },
    { B: 1, T: 65, H: 3, J: 3, D: 16, causal, window: 0, scale: 0.35 },
    { B: 1, T: 129, H: 2, J: 1, D: 8, causal, window: 65, scale: 0.35 },
  ])
  const sizes = [{ B: 0, T: 3, H: 2, J: 1, D: 4, causal: 1, window: 0, scale: 1 }, ...both]
  const data = {
    qkv: (random: Random) => random.normal(),
    dout: (random: Random) => random.normal(),
    starts: (_: Random, { T }: { T: number }, m: number) => startIn(Math.floor(m / T), m % T),
  }
  checkOp('attention_forward', { exact: false, sizes, data, reference: forward })
  // lse above that of forward, so that p does not overflow; quantized inputs, and out made again, are rounded to bf16
  checkOp('attention_backward', {
    exact: false,
    sizes: sizes.filter(({ D }) => D % 2 === 0), // rope turns pairs
    data: { ...data, lse: (random) => 6 + random.uniform() },
    slack: ({ qkv, out, table }) => (qkv?.includes('/') || !out || table ? 2 ** -7 : 1e-6),
    reference: backward,
  })
  for (const causal of [0, 1])
    checkGradient(`attention, causal ${causal}`, {
      numbers: { B: 1, T: 4, H: 4, J: 2, D: 2, N: 8, causal, window: 3, scale: 0.6 },
      inputs: { qkv: [4, 16] },
      forward: (given) => forward(given).out,
      backward: (given) => backward({ ...given, ...forward(given) }),
      gradients: { dqkv: 'qkv' },
    })

  checkOp('attention_cached', {
    exact: false,
    sizes: [
      { M: 0, T: 3, H: 2, J: 1, D: 4, first: 3, window: 0, scale: 1 },
      { M: 1, T: 1, H: 1, J: 1, D: 1, first: 0, window: 0, scale: 1 },
      { M: 1, T: 40, H: 8, J: 2, D: 16, first: 30, window: 0, scale: 0.25 },
      { M: 1, T: 300, H: 4, J: 4, D: 33, first: 299, window: 7, scale: 0.17 },
      { M: 17, T: 17, H: 9, J: 3, D: 8, first: 0, window: 0, scale: 0.35 },
      { M: 7, T: 31, H: 6, J: 1, D: 64, first: 11, window: 9, scale: 0.125 },
    ],
    data: { qkv: (random) => random.normal(), cache: (random) => random.normal() },
    reference: cached,
  })

  const random = new Random(9)
  const numbers = (n: number) => Float64Array.from({ length: n }, () => random.normal())
  const inputs = ({ T, H, J, D }: Case, B = 1) => [numbers(B * T * (H + 2 * J) * D), numbers(B * T * H * D)] as const

  checkOp('attention_center', {
    sizes: sizes.map(({ B, T, H, J, D }) => ({ B, T, H, J, D })),
    reference: ({ qkv, B, T, H, J, D }) => {
      const less = (size: boolean) =>
        matrix(B * T, (H + 2 * J) * D, (m, n) => {
          const x = (t: number) => (size ? Math.abs(qkv(m - (m % T) + t, n)) : qkv(m - (m % T) + t, n))
          const mean = n >= H * D && n < (H + J) * D ? sum(T, x) / T : 0
          return size ? x(m % T) + mean : x(m % T) - mean
        })
      return { qkv: less(false), '|qkv|': less(true) }
    },
  })

  describe.each(devices)('on %s', (device) => {
    const test = it.skipIf(!present(device))

    /** Results of forward and backward, and the inputs after rounding to the format. */
    async function run(format: 'f32' | 'bf16', one: Case, qkv: ArrayLike<number>, dout: ArrayLike<number>) {
      const { T, H, J, D, causal, window = 0, starts } = one
      const of = (columns: number, values: ArrayLike<number>) =>
        moved(tensor(format, [values.length / columns, columns], values), device)
      const [x, dy] = [await of((H + 2 * J) * D, qkv), await of(H * D, dout)]
      const documents = starts ? await moved(tensor('i32', [starts.length], starts), device) : null
      const rules = [T, H, J, D, causal, window, one.scale ?? D ** -0.5] as const
      const [out, lse, most] = own(native.attention_forward(x, documents, format, 'f32', ...rules))
      expect(await bytesOf(most as Handle)).toEqual(await bytesOf(own(native.amax(out))))
      const dx = own(native.attention_backward(dy, x, documents, out, lse, null, format, null, ...rules)[0])
      // as 8-bit copies keep them
      const copy = await moved(x, device)
      native.attention_center(copy, T, H, J, D)
      const from = (kept: 'e4m3/g16' | 'i8/g16') => {
        const copied = own(native.convert(copy, null, kept))
        return own(native.attention_backward(dy, copied, documents, null, null, null, format, null, ...rules)[0])
      }
      const handles = { qkv: x, dout: dy, out, lse, dx, fromFp8: from('e4m3/g16'), fromInt8: from('i8/g16') }
      const values: Record<string, Float64Array> = {}
      for (const [name, handle] of Object.entries(handles)) values[name] = (await stored(handle)).values
      return values as Record<keyof typeof handles, Float64Array>
    }

    /** The parts of results that have errors of their own. */
    function parts({ H, J, D }: Case, out: Float64Array, dx: Float64Array): Record<string, Float64Array> {
      const width = (H + 2 * J) * D
      const columns = (from: number, to: number) => dx.filter((_, i) => i % width >= from * D && i % width < to * D)
      return { out, dq: columns(0, H), dk: columns(H, H + J), dv: columns(H + J, H + 2 * J) }
    }

    test.each<Case>([
      { T: 1, H: 4, J: 2, D: 64, causal: 1 },
      { T: 63, H: 2, J: 1, D: 80, causal: 1 },
      { T: 63, H: 2, J: 2, D: 96, causal: 0 },
      { T: 65, H: 4, J: 1, D: 8, causal: 0, window: 9 },
      { T: 65, H: 1, J: 1, D: 128, causal: 1, window: 33 },
      { T: 127, H: 2, J: 1, D: 128, causal: 1, starts: startsOf([1, 64, 62]) },
      { T: 129, H: 1, J: 1, D: 256, causal: 0, starts: startsOf([63, 1, 65]) },
      { T: 129, H: 3, J: 1, D: 64, causal: 1, window: 20, starts: startsOf([64, 65]) },
      { T: 1000, H: 1, J: 1, D: 64, causal: 1 },
      { T: 1000, H: 2, J: 1, D: 8, causal: 0, window: 130, starts: startsOf([7, 500, 193, 300]) },
      { T: 2047, H: 1, J: 1, D: 8, causal: 1, starts: startsOf([1, 1000, 1046]) },
      { T: 2047, H: 1, J: 1, D: 8, causal: 0, window: 300 },
    ])('T $T, heads $H/$J of $D, causal $causal: f32 to 1e-5 of the largest, bf16 as good as plain', async (one) => {
      const [qkv, dout] = inputs(one)
      for (const format of ['f32', 'bf16'] as const) {
        const got = await run(format, one, qkv, dout)
        const exact = attend(one, got.qkv, got.dout)
        got.lse.forEach((lse, i) => {
          expect(Math.abs(lse - (exact.lse[i] as number))).toBeLessThan(1e-5 * (1 + Math.abs(lse)))
        })
        const plain = format === 'bf16' ? attend(one, got.qkv, got.dout, bfloat16) : exact
        const wanted = parts(one, exact.out, exact.dx)
        const allowed = parts(one, plain.out, plain.dx)
        for (const [name, values] of Object.entries(parts(one, got.out, got.dx))) {
          const right = wanted[name] as Float64Array
          const most = largestOf(right)
          for (const norm of [largestOf, rms]) {
            const bound = 2 * norm(minus(allowed[name] as Float64Array, right)) + 1e-5 * (most || 1)
            expect(norm(minus(values, right)), `${name} in ${format}`).toBeLessThanOrEqual(bound)
          }
        }
      }
    })

    test.each([
      [64, null],
      [80, null],
      [128, [40, 1, 88]],
    ])('heads of %i, documents %o: gradients come turned back, and amax is that of what comes', async (D, lengths) => {
      const [T, H, J] = [129, 4, 2]
      const one: Case = { T, H, J, D, causal: 1 }
      const [qkv, dout] = inputs(one, 2)
      const of = (columns: number, values: ArrayLike<number>) =>
        moved(tensor('bf16', [values.length / columns, columns], values), device)
      const [x, dy] = [await of((H + 2 * J) * D, qkv), await of(H * D, dout)]
      const angles = Float64Array.from({ length: T * D }, (_, i) => {
        const angle = Math.floor(i / D) * 10000 ** (-(i % (D / 2)) / (D / 2))
        return i % D < D / 2 ? Math.cos(angle) : Math.sin(angle)
      })
      const table = await moved(tensor('f32', [T, D], angles), device)
      const all = lengths ? [...startsOf(lengths), ...startsOf(lengths)] : null
      const starts = all ? await moved(tensor('i32', [all.length], all), device) : null
      const rules = [T, H, J, D, 1, 0, D ** -0.5] as const
      const [out, lse] = own(native.attention_forward(x, starts, 'bf16', null, ...rules))
      const [turned, most] = native.attention_backward(dy, x, starts, out, lse, table, 'bf16', 'f32', ...rules)
      own([turned, most as Handle])
      expect(await bytesOf(most as Handle)).toEqual(await bytesOf(own(native.amax(turned))))
      const apart = own(native.attention_backward(dy, x, starts, out, lse, null, 'f32', null, ...rules)[0])
      native.rope(table, apart, starts, H, J, D, -1)
      const [got, wanted] = [(await stored(turned)).values, (await stored(apart)).values]
      // what both round of the products in bf16, and what turned rounds at its end
      const off = minus(got, wanted)
      expect(rms(off)).toBeLessThan(0.01 * rms(wanted))
      expect(largestOf(off)).toBeLessThan(0.02 * largestOf(wanted))
    })

    test.each([
      [8, 8],
      [8, 2],
      [8, 1],
      [28, 4],
      [9, 3],
      [40, 8],
    ])('S8: %i heads on %i equal repeated heads, and the gradients of these their sum, to 1e-5', async (H, J) => {
      const one: Case = { T: 19, H, J, D: 8, causal: 1 }
      const [qkv, dout] = inputs(one)
      const repeats = H / J
      const head = (h: number) =>
        h < H ? h : h < H + H ? H + Math.floor((h - H) / repeats) : H + J + Math.floor((h - 2 * H) / repeats)
      const wide = Float64Array.from({ length: 19 * 3 * H * 8 }, (_, i) => {
        const [t, h, d] = [Math.floor(i / (24 * H)), Math.floor(i / 8) % (3 * H), i % 8]
        return qkv[(t * (H + 2 * J) + head(h)) * 8 + d] as number
      })
      const shared = await run('f32', one, qkv, dout)
      const repeated = await run('f32', { ...one, J: H }, wide, dout)
      expect(largestOf(minus(shared.out, repeated.out))).toBeLessThan(1e-5)
      const summed = new Float64Array(qkv.length)
      repeated.dx.forEach((x, i) => {
        const [t, h, d] = [Math.floor(i / (24 * H)), Math.floor(i / 8) % (3 * H), i % 8]
        const at = (t * (H + 2 * J) + head(h)) * 8 + d
        summed[at] = (summed[at] as number) + x
      })
      expect(largestOf(minus(shared.dx, summed))).toBeLessThan(1e-5 * (1 + largestOf(summed)))
    })

    test.each([1, 63, 65, 127, 1000])('S10: T %i: NaN in other sequences changes no bit', async (T) => {
      for (const causal of [0, 1])
        for (const format of ['f32', 'bf16'] as const) {
          const one: Case = { T, H: 2, J: 1, D: T < 200 ? 64 : 8, causal }
          const [qkv, dout] = inputs(one)
          const between = (values: Float64Array) => {
            const all = new Float64Array(3 * values.length).fill(Number.NaN)
            all.set(values, values.length)
            return all
          }
          const alone = await run(format, one, qkv, dout)
          const among = await run(format, one, between(qkv), between(dout))
          for (const name of ['out', 'lse', 'dx', 'fromFp8', 'fromInt8'] as const) {
            const { length } = alone[name]
            expect(among[name].subarray(length, 2 * length), name).toEqual(alone[name])
          }
        }
    })

    test('a position sees nothing after it', async () => {
      const one: Case = { T: 65, H: 2, J: 1, D: 8, causal: 1 }
      const [qkv, dout] = inputs(one)
      const changed = qkv.map((x, i) => (i >= 40 * 32 ? 1e3 * x : x))
      const [a, b] = [await run('f32', one, qkv, dout), await run('f32', one, changed, dout)]
      expect(b.out.slice(0, 40 * 16)).toEqual(a.out.slice(0, 40 * 16))
    })

    // sums run in another order when tiles begin elsewhere; the tensor cores also round probabilities to bf16 by tiles
    const units = device === 'cpu' ? 1 : 2
    test(`packed documents equal the same one by one, to bf16 units of the largest in a row: ${units}`, async () => {
      const lengths = [1, 63, 65, 127, 44, 200]
      for (const causal of [0, 1]) {
        const one: Case = { T: 500, H: 2, J: 1, D: 64, causal }
        const [qkv, dout] = inputs(one)
        const packed = await run('bf16', { ...one, starts: startsOf(lengths) }, qkv, dout)
        let first = 0
        for (const T of lengths) {
          const rows = (values: Float64Array, width: number) => values.subarray(first * width, (first + T) * width)
          const alone = await run('bf16', { ...one, T }, rows(qkv, 256), rows(dout, 128))
          for (const [name, width] of [
            ['out', 128],
            ['dx', 256],
          ] as const) {
            const [a, b] = [rows(packed[name], width), alone[name]]
            for (let at = 0; at < a.length; at += width) {
              const row = b.subarray(at, at + width)
              const off = largestOf(minus(a.subarray(at, at + width), row))
              expect(off, name).toBeLessThanOrEqual(units * stepOf('bf16', largestOf(row)))
            }
          }
          first += T
        }
      }
    })

    test('scores far from 0 neither overflow nor vanish', async () => {
      const one: Case = { T: 2, H: 1, J: 1, D: 2, causal: 1, scale: 0.3 }
      const { out, dx } = await run('f32', one, [100, 0, 1000, 0, 1, 2, 100, 0, -1000, 0, 3, 4], [1, 1, 1, 1])
      expect([...out]).toEqual([1, 2, 1, 2])
      for (const x of dx) expect(Number.isFinite(x)).toBe(true)
    })

    test('starts that are no starts touch nothing outside', async () => {
      const values = [-1, 0, 1, 999, 2 ** 31 - 1, -(2 ** 31), 64, 3]
      for (const causal of [0, 1])
        for (const window of [0, 5]) {
          const starts = Int32Array.from({ length: 3 * 129 }, () => values[random.integer(values.length)] as number)
          const one: Case = { T: 129, H: 2, J: 1, D: 8, causal, window, starts }
          await run('f32', one, ...inputs(one, 3))
          native.checkGuards()
        }
    })

    test.each<Case>([
      { T: 256, H: 4, J: 4, D: 64, causal: 1 },
      { T: 256, H: 4, J: 1, D: 64, causal: 0, starts: startsOf([100, 156]) },
      { T: 256, H: 2, J: 1, D: 128, causal: 1, window: 100 },
    ])(
      'gradients from 8-bit copies: heads $H/$J of $D, causal $causal: as those of bf16, common to all keys or not',
      async (one) => {
        const { T, H, J, D } = one
        const [qkv, dout] = inputs(one)
        const [ofFp8, ofInt8] = [[] as number[], [] as number[]]
        for (const common of [0, 8]) {
          const isKey = (i: number) =>
            Math.floor((i % ((H + 2 * J) * D)) / D / H) === 1 && i % ((H + 2 * J) * D) < (H + J) * D
          const shifted = qkv.map((x, i) => (isKey(i) ? x + common : x))
          const { out, dx, fromFp8, fromInt8 } = await run('bf16', one, shifted, dout)
          ofFp8.push(cosine(dx, fromFp8))
          const exact = Object.values(parts(one, out, dx))
          for (const [i, part] of Object.values(parts(one, out, fromInt8)).entries())
            ofInt8.push(cosine(exact[i] as Float64Array, part))
        }
        // the tensor cores round probabilities to bf16, of the copies other ones
        expect(Math.min(...ofFp8), `${T}: ${ofFp8}`).toBeGreaterThan(device === 'cpu' ? 0.999 : 0.9985)
        expect(Math.min(...ofInt8), `${T}: ${ofInt8}`).toBeGreaterThan(0.9995)
      },
    )
  })

  it('J must divide H, T be at least 1, and window at least 0', () => {
    const x = tensor('f32', [3, 14], new Float32Array(42))
    expect(() => native.attention_forward(x, null, 'f32', null, 3, 3, 2, 2, 0, 0, 1)).toThrow(
      'attention_forward: J is 2 and must divide H = 3',
    )
    const cache = tensor('f32', [4, 8], new Float32Array(32))
    const cached = (H: number, J: number, first: number, window: number) => () =>
      native.attention_cached(x, cache, 'f32', H, J, 2, first, window, 1)
    expect(cached(3, 2, 0, 0)).toThrow('attention_cached: J is 2 and must divide H = 3')
    expect(() =>
      native.attention_cached(tensor('f32', [3, 12], new Float32Array(36)), cache, 'f32', 2, 2, 2, 2, 0, 1),
    ).toThrow('attention_cached: first is 2 and must be from 0 to T - M = 1, so that the rows fit')
    expect(() =>
      native.attention_cached(tensor('f32', [3, 12], new Float32Array(36)), cache, 'f32', 2, 2, 2, 0, -1, 1),
    ).toThrow('attention_cached: window is -1 and must be at least 0')
    const none = tensor('f32', [0, 14], [])
    expect(() => native.attention_forward(none, null, 'f32', null, 0, 3, 2, 2, 0, 0, 1)).toThrow(/^attention_forward: /)
    const even = tensor('f32', [3, 8], new Float32Array(24))
    expect(() => native.attention_forward(even, null, 'f32', null, 3, 2, 1, 2, 0, -1, 1)).toThrow(
      'attention_forward: window is -1 and must be at least 0',
    )
    // S8: before anything is made
    const heads = { hidden_size: 66, num_attention_heads: 33, num_key_value_heads: 2 }
    const before = native.memory().tensors
    expect(() => new LlamaForCausalLM({ ...smallLlama, ...heads }, { recipe: 'fp32' })).toThrow(
      'num_key_value_heads is 2 and must divide num_attention_heads = 33',
    )
    expect(native.memory().tensors).toBe(before)
  })
})
