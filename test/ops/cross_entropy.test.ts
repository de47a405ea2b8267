// cross_entropy against float64: odd vocabularies, ignored rows, huge logits.
import { describe, expect, it } from 'vitest'
import { native } from '../../lib/native.ts'
import { checkGradient, checkOp, own, read, tensor } from '../harness.ts'
import { type Given, largest, matrix, sum, vector } from '../values.ts'

function forward({ logits, targets, ignore, weight, M, V }: Given) {
  const top = vector(M, (m) => largest(V, (v) => logits(m, v)))
  const rest = vector(M, (m) => Math.log(sum(V, (v) => Math.exp(logits(m, v) - top(m)))))
  const loss = (f: (m: number) => number) =>
    vector(1, () => weight(0) * sum(M, (m) => (targets(m) === ignore ? 0 : f(m))))
  return {
    lse: vector(M, (m) => top(m) + rest(m)),
    '|lse|': vector(M, (m) => Math.abs(top(m)) + rest(m)),
    loss: loss((m) => top(m) + rest(m) - logits(m, targets(m))),
    '|loss|': loss((m) => Math.abs(top(m)) + rest(m) + Math.abs(logits(m, targets(m)))),
  }
}

function backward({ dloss, logits, targets, lse, ignore, weight, M, V }: Given) {
  const each = (f: (p: number, distance: number, hit: number) => number) =>
    matrix(M, V, (m, v) => {
      const distance = logits(m, v) - lse(m)
      return targets(m) === ignore ? 0 : f(Math.exp(distance), Math.abs(distance), targets(m) === v ? 1 : 0)
    })
  const factor = dloss(0) * weight(0)
  return {
    dx: each((p, _, hit) => factor * (p - hit)),
    '|dx|': each((p, distance, hit) => Math.abs(factor) * (p * (1 + distance) + hit + 1e-30)),
  }
}

describe('cross_entropy', () => {
  const sizes = [
    { M: 0, V: 5 },
    { M: 1, V: 1 },
    { M: 3, V: 17 },
    { M: 33, V: 129 },
    { M: 5, V: 1021 },
    { M: 129, V: 257 },
    { M: 7, V: 144 },
    { M: 2, V: 16389 },
    { M: 3, V: 16416 },
  ]
  const numbers = { ignore: -100 }
  const weight = () => 0.3
  const targets = (random: { integer(below: number): number }, { V }: { V: number }, i: number) =>
    i % 5 === 3 ? -100 : random.integer(V)
  checkOp('cross_entropy_forward', { sizes, numbers, data: { targets, weight }, reference: forward })
  // rows whose largest logit lies far from 0, and columns that are out of the running
  checkOp('cross_entropy_forward', {
    sizes: [
      { M: 8, V: 35 },
      { M: 8, V: 2064 },
    ],
    numbers,
    data: {
      weight,
      targets: (_, { V }) => V - 1,
      logits: (random, { V }, i) =>
        i % V === 7
          ? Number.NEGATIVE_INFINITY
          : ([0, 70, -50, 1e30, -1e30, 60, -30, -500][Math.floor(i / V)] as number) + random.normal(),
    },
    reference: forward,
  })
  // lse above every logit, as it comes from forward
  checkOp('cross_entropy_backward', {
    sizes,
    numbers,
    data: { targets, weight, lse: (random) => 3 + random.uniform(), logits: (random) => random.normal() },
    reference: backward,
  })
  checkGradient('cross_entropy', {
    numbers: { M: 1, V: 6, N: 6, ignore: -100 },
    inputs: { logits: [1, 6], targets: [1, 1], weight: [1, 1] },
    forward: (given) => forward({ ...given, targets: vector(1, () => 2) }).loss,
    backward: (given) => backward({ ...given, targets: vector(1, () => 2), lse: forward(given).lse }),
    gradients: { dx: 'logits' },
  })

  const run = async (logits: number[][], targets: number[], weight = 1) => {
    const [M, V] = [logits.length, logits[0]?.length ?? 0]
    const x = tensor('f32', [M, V], logits.flat())
    const t = tensor('i32', [M], targets)
    const w = tensor('f32', [1], [weight])
    const [loss, lse] = own(native.cross_entropy_forward(x, t, w, -100))
    const dx = own(native.cross_entropy_backward(tensor('f32', [1], [1]), x, t, lse, w, 'f32', -100))
    return { loss: (await read(loss))[0] as number, lse: await read(lse), dx: await read(dx) }
  }

  it.each([
    [50257, 10.824905],
    [32003, 10.373585],
  ])('zero logits over %i words cost their logarithm', async (V, expected) => {
    const { loss, dx } = await run([new Array(V).fill(0)], [V - 1])
    expect(loss).toBeCloseTo(expected, 5)
    expect((dx[0] as number) * V).toBeCloseTo(1, 5)
  })

  it('ignored rows cost nothing; when all are ignored loss and gradient are exactly 0', async () => {
    const one = await run([[1, 2, 3]], [0])
    const two = await run(
      [
        [1, 2, 3],
        [5, 6, 9],
      ],
      [0, -100],
    )
    expect(two.loss).toBe(one.loss)
    expect(two.dx).toEqual([...one.dx, 0, 0, 0])
    const none = await run([[1, 2, 3]], [-100])
    expect([none.loss, ...none.dx]).toEqual([0, 0, 0, 0])
  })

  it('huge logits neither overflow nor vanish', async () => {
    const { loss, lse, dx } = await run(
      [
        [3e38, -3e38, 0],
        [1e4, 1e4, -1e4],
      ],
      [0, 1],
    )
    expect(lse[0]).toBe(Math.fround(3e38))
    expect(loss).toBeCloseTo(Math.log(2), 3)
    expect(dx).toEqual([0, 0, 0, 0.5, -0.5, 0].map((x) => expect.closeTo(x, 3)))
  })

  it('a logit of -Inf is out of the running, NaN makes the loss NaN', async () => {
    expect((await run([[Number.NEGATIVE_INFINITY, 0, 0]], [1])).loss).toBeCloseTo(Math.log(2), 6)
    expect((await run([[0, Number.NaN, 0]], [0])).loss).toBeNaN()
  })

  it('the loss of a sure row is not negative, its gradient in the target not positive', async () => {
    const logits = Array.from({ length: 40 }, (_, m) => [m * 2.7 - 40.3, m * 2.7 - 40.3 - 30, m * 2.7 - 80])
    const { loss, lse, dx } = await run(logits, new Array(40).fill(0))
    expect(loss).toBeGreaterThanOrEqual(0)
    for (const [m, value] of lse.entries()) {
      expect(value).toBeGreaterThanOrEqual(Math.fround(logits[m]?.[0] as number))
      expect(dx[3 * m]).toBeLessThanOrEqual(0)
    }
  })

  it('rows without a finite largest logit: -Inf, and NaN', async () => {
    const low = Number.NEGATIVE_INFINITY
    const rows = [
      [low, low],
      [Number.NaN, low],
      [Number.POSITIVE_INFINITY, 0],
    ]
    const { lse, dx } = await run(rows, [-100, -100, -100])
    expect(lse).toEqual([low, Number.NaN, Number.NaN])
    expect(dx).toEqual([0, 0, 0, 0, 0, 0])
    expect((await run(rows, [0, 0, 0])).dx).toEqual(new Array(6).fill(Number.NaN))
  })

  it.each([-1, 3])('target %s of 3 is refused with its place', (target) => {
    const x = tensor('f32', [2, 3], [1, 2, 3, 4, 5, 6])
    const given = [x, tensor('i32', [2], [-100, target]), tensor('f32', [1], [1])] as const
    expect(() => native.cross_entropy_forward(...given, -100)).toThrow(
      `cross_entropy_forward: targets[1] is ${target} and must be -100 (ignored) or at least 0 and less than V = 3`,
    )
  })
})
