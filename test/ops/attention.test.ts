// attention against softmax in float64: shared key/value heads, causal and not, odd lengths and head sizes.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkGradient, checkOp, own, read, tensor } from '../harness.ts'
import { type Given, largest, matrix, Random, sum, valuesOf } from '../values.ts'

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
  const { B, T, H, D, causal, scale } = given
  const { q, k, v } = parts(given)
  const [out, outSize] = [new Float64Array(B * T * H * D), new Float64Array(B * T * H * D)]
  const [lse, lseSize] = [new Float64Array(B * T * H), new Float64Array(B * T * H)]
  for (let b = 0; b < B; b++)
    for (let h = 0; h < H; h++)
      for (let t = 0; t < T; t++) {
        const keys = causal ? t + 1 : T
        const scores = Float64Array.from(
          { length: keys },
          (_, s) => scale * sum(D, (i) => q(b, h, t, i) * k(b, h, s, i)),
        )
        const size = largest(keys, (s) => Math.abs(scale) * sum(D, (i) => Math.abs(q(b, h, t, i) * k(b, h, s, i))))
        const top = Math.max(...scores)
        const total = Math.log(scores.reduce((all, score) => all + Math.exp(score - top), 0))
        const row = (b * T + t) * H + h
        lse[row] = top + total
        lseSize[row] = size + total
        const p = scores.map((score) => Math.exp(score - top - total))
        for (let i = 0; i < D; i++) {
          out[row * D + i] = sum(keys, (s) => (p[s] as number) * v(b, h, s, i))
          outSize[row * D + i] = (1 + size) * sum(keys, (s) => (p[s] as number) * Math.abs(v(b, h, s, i))) + 1e-30
        }
      }
  return {
    out: valuesOf(out, H * D),
    '|out|': valuesOf(outSize),
    lse: valuesOf(lse, H),
    '|lse|': valuesOf(lseSize),
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

/** From q, k, v and dout alone; `out` and `lse` as the op is given them enter through p and delta. */
function backward(given: Given) {
  const { B, T, H, J, D, dout, out, lse, causal, scale } = given
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
        for (let s = 0; s < (causal ? t + 1 : T); s++) {
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
  return { dqkv: valuesOf(dqkv, width), '|dqkv|': valuesOf(sizes.map((size) => size + 1e-30)) }
}

describe('attention', () => {
  const both = [0, 1].flatMap((causal) => [
    { B: 1, T: 1, H: 1, J: 1, D: 1, causal, scale: 1 },
    { B: 2, T: 17, H: 8, J: 8, D: 8, causal, scale: 0.35 },
    { B: 1, T: 63, H: 8, J: 2, D: 16, causal, scale: 0.25 },
    { B: 1, T: 65, H: 8, J: 1, D: 33, causal, scale: 0.17 },
    { B: 1, T: 127, H: 9, J: 3, D: 8, causal, scale: 0.35 },
    { B: 1, T: 129, H: 2, J: 1, D: 64, causal, scale: 0.125 },
  ])
  const sizes = [{ B: 0, T: 3, H: 2, J: 1, D: 4, causal: 1, scale: 1 }, ...both]
  const data = { qkv: (random: Random) => random.normal(), dout: (random: Random) => random.normal() }
  checkOp('attention_forward', { exact: false, sizes, data, reference: forward })
  // lse above that of forward, so that p does not overflow
  checkOp('attention_backward', {
    exact: false,
    sizes,
    data: { ...data, lse: (random) => 6 + random.uniform() },
    reference: backward,
  })
  for (const causal of [0, 1])
    checkGradient(`attention, causal ${causal}`, {
      numbers: { B: 1, T: 4, H: 4, J: 2, D: 2, N: 8, causal, scale: 0.6 },
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

  const call = async (
    format: 'f32' | 'bf16',
    qkv: ArrayLike<number>,
    dout: ArrayLike<number>,
    T: number,
    H: number,
    J: number,
    D: number,
  ) => {
    const x = tensor(format, [qkv.length / ((H + 2 * J) * D), (H + 2 * J) * D], qkv)
    const [out, lse] = own(native.attention_forward(x, format, T, H, J, D, 1, 0.3))
    const dy = tensor(format, [dout.length / (H * D), H * D], dout)
    const dx = own(native.attention_backward(dy, x, out, lse, format, T, H, J, D, 1, 0.3))
    return { out: await read(out), dx: await read(dx) }
  }
  const random = new Random(9)
  const normal = (n: number) => Array.from({ length: n }, () => random.normal())

  it('shared heads equal repeated heads, and their gradients the sum', async () => {
    const [T, H, J, D] = [19, 6, 2, 8]
    const [qkv, dout] = [normal(T * (H + 2 * J) * D), normal(T * H * D)]
    const shared = await call('f32', qkv, dout, T, H, J, D)
    const row = (t: number) => qkv.slice(t * (H + 2 * J) * D, (t + 1) * (H + 2 * J) * D)
    const repeat = (heads: number[]) => [0, 1].flatMap((j) => [0, 1, 2].flatMap(() => heads.slice(j * D, (j + 1) * D)))
    const wide = Array.from({ length: T }, (_, t) => {
      const x = row(t)
      return [...x.slice(0, H * D), ...repeat(x.slice(H * D, (H + J) * D)), ...repeat(x.slice((H + J) * D))]
    })
    const repeated = await call('f32', wide.flat(), dout, T, H, H, D)
    for (const [i, x] of shared.out.entries()) expect(x).toBeCloseTo(repeated.out[i] as number, 5)
    for (let t = 0; t < T; t++)
      for (let n = 0; n < (H + 2 * J) * D; n++) {
        const at = (head: number) => repeated.dx[(t * 3 * H + head) * D + (n % D)] as number
        const head = Math.floor(n / D)
        const first = head < H + J ? H + (head - H) * 3 : 2 * H + (head - H - J) * 3
        const wanted = head < H ? at(head) : at(first) + at(first + 1) + at(first + 2)
        expect(shared.dx[t * (H + 2 * J) * D + n]).toBeCloseTo(wanted, 4)
      }
  })

  it('a position sees nothing after it, and sequences of a batch nothing of each other', async () => {
    const [T, H, J, D] = [65, 2, 1, 8]
    const width = (H + 2 * J) * D
    const [qkv, dout] = [normal(2 * T * width), normal(2 * T * H * D)]
    const whole = await call('f32', qkv, dout, T, H, J, D)
    const changed = qkv.map((x, i) => (i >= T * width ? Number.NaN : i >= 40 * width ? 1e3 * x : x))
    const half = await call('f32', changed, dout, T, H, J, D)
    expect(half.out.slice(0, 40 * H * D)).toEqual(whole.out.slice(0, 40 * H * D))
    const second = await call('f32', qkv.slice(T * width), dout.slice(T * H * D), T, H, J, D)
    expect(second.out).toEqual(whole.out.slice(T * H * D))
    expect(second.dx).toEqual(whole.dx.slice(T * width))
  })

  it('scores far from 0 neither overflow nor vanish', async () => {
    const { out, dx } = await call('f32', [100, 0, 1000, 0, 1, 2, 100, 0, -1000, 0, 3, 4], [1, 1, 1, 1], 2, 1, 1, 2)
    expect(out).toEqual([1, 2, 1, 2])
    for (const x of dx) expect(Number.isFinite(x)).toBe(true)
  })

  it('J must divide H, and T be at least 1', () => {
    const x = tensor('f32', [3, 14], new Float32Array(42))
    expect(() => native.attention_forward(x, 'f32', 3, 3, 2, 2, 0, 1)).toThrow(
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
    expect(() => native.attention_forward(none, 'f32', 0, 3, 2, 2, 0, 1)).toThrow(/^attention_forward: /)
  })
})
