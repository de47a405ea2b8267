// attention against softmax in float64: shared key/value heads, causal and not, odd lengths and head sizes.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkGradient, checkOp, own, read, tensor } from '../harness.ts'
import { type Given, largest, Random, valuesOf } from '../values.ts'

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
  }
}

/** From q, k, v and dout alone; `out`, and `lse` where the op is given it, enter through p and delta. */
function backward(given: Given) {
  const { B, T, H, J, D, dout, out, scale } = given
  const lse = given.lse ?? forward(given).lse
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
  return { dqkv: valuesOf(dqkv, width), '|dqkv|': valuesOf(sizes.map((size) => size + 1e-30)) }
}

// Documents of many lengths, others in every sequence.
const startOf = (b: number, t: number) =>
  Math.max(...[0, 1 + b, 2 + b, 19, 48, 49, 64, 96 - 7 * b].filter((s) => s <= t))

describe('attention', () => {
  const both = [0, 1].flatMap((causal) => [
    { B: 1, T: 1, H: 1, J: 1, D: 1, causal, window: 0, scale: 1 },
    { B: 2, T: 17, H: 8, J: 8, D: 8, causal, window: 1, scale: 0.35 },
    { B: 1, T: 63, H: 8, J: 2, D: 16, causal, window: 7, scale: 0.25 },
    { B: 2, T: 65, H: 8, J: 1, D: 33, causal, window: 64, scale: 0.17 },
    { B: 1, T: 127, H: 9, J: 3, D: 8, causal, window: 0, scale: 0.35 },
    { B: 1, T: 129, H: 2, J: 1, D: 64, causal, window: 33, scale: 0.125 },
  ])
  const sizes = [{ B: 0, T: 3, H: 2, J: 1, D: 4, causal: 1, window: 0, scale: 1 }, ...both]
  const data = {
    qkv: (random: Random) => random.normal(),
    dout: (random: Random) => random.normal(),
    starts: (_: Random, { T }: { T: number }, m: number) => startOf(Math.floor(m / T), m % T),
  }
  checkOp('attention_forward', { exact: false, sizes, data, reference: forward })
  // lse above that of forward, so that p does not overflow; quantized inputs are rounded to bf16
  checkOp('attention_backward', {
    exact: false,
    sizes,
    data: { ...data, lse: (random) => 6 + random.uniform() },
    slack: ({ qkv, out }) => (qkv === 'e4m3/g16' || out === 'e4m3/g16' ? 2 ** -7 : 1e-6),
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
    const [out, lse] = own(native.attention_forward(x, null, format, T, H, J, D, 1, 0, 0.3))
    const dy = tensor(format, [dout.length / (H * D), H * D], dout)
    const dx = own(native.attention_backward(dy, x, null, out, lse, format, T, H, J, D, 1, 0, 0.3))
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
    expect(() => native.attention_forward(x, null, 'f32', 3, 3, 2, 2, 0, 0, 1)).toThrow(
      'attention_forward: J is 2 and must divide H = 3',
    )
    const none = tensor('f32', [0, 14], [])
    expect(() => native.attention_forward(none, null, 'f32', 0, 3, 2, 2, 0, 0, 1)).toThrow(/^attention_forward: /)
  })
})
