// The largest magnitude that adamw leaves of what it updates.
import { describe, expect, it } from 'vitest'
import type { AnyFormat, Handle } from '../lib/native.gen.ts'
import { type DeviceKind, native } from '../lib/native.ts'
import { bytesOf, devices, moved, own, present, read, tensor } from './harness.ts'
import { step, usual } from './steps.ts'
import { Random, vector } from './values.ts'

const zeros = (format: AnyFormat, n: number) => tensor(format, [1, n], new Float64Array(n))

describe('amax of adamw', () => {
  const lengths = [0, 1, 3, 127, 128, 129, 2047, 2048, 2051, 70_001]
  const roundings = [
    ['f32', 'nearest', null],
    ['bf16', 'nearest', null],
    ['bf16', 'nearest', 'f32'],
    ['bf16', 'stochastic', null],
    ['bf16', 'kahan', null],
  ] as const
  const measured = [
    ['e4m3/x128', 'e4m3/x128'],
    ['f32', 'f32'],
    ['e4m3/g128', 'e4m3/g128'],
    ['e4m3/t', 'f16/t'],
    ['d8/g256', 'u8/g256'],
  ] as const
  interface Measured {
    /** An element of the last member. */
    special?: number
    lr?: number
    clip?: Handle
    wanted?: boolean
  }
  /** A step of members of `lengths` on a device, from numbers that are the same each time. */
  const measuredStep = async (
    device: DeviceKind,
    [first, second]: readonly [AnyFormat, AnyFormat],
    [format, rounding, doubled]: (typeof roundings)[number],
    { special, lr = 0.1, clip, wanted = true }: Measured = {},
  ) => {
    const random = new Random(13)
    const made = async (format: AnyFormat, n: number, value: (i: number) => number) =>
      await moved(tensor(format, [1, n], vector(n, value).data), device)
    const members: Record<'p' | 'g' | 'm' | 'v' | 'amax', Handle>[] = []
    for (const n of lengths) {
      const isSpecial = (i: number) => special !== undefined && n > 70_000 && i === 69_999
      const p = await made(format, n, (i) => (isSpecial(i) ? (special as number) : random.normal()))
      const g = await made('bf16', n, (i) => (isSpecial(i) ? 1 : random.normal()))
      const [m, v] = [await made(first, n, () => 0), await made(second, n, () => 0)]
      // what was there before counts for nothing
      members.push({ p, g, m, v, amax: await moved(tensor('f32', [1], [1000]), device) })
    }
    const pick = (key: 'p' | 'g' | 'm' | 'v' | 'amax') => members.map((member) => member[key])
    const copies = (format: 'f32' | 'bf16') => own(pick('p').map((p) => native.convert(p, null, format)))
    const lost = rounding === 'kahan' ? copies('bf16') : undefined
    for (const handle of lost ?? []) native.multiply_into(handle, await moved(tensor('f32', [1], [2 ** -9]), device))
    const extra = { rounding, seed: 5, clip, ...(doubled && { master: copies(doubled) }), ...(lost && { lost }) }
    const lists = [pick('p'), pick('g'), pick('m'), pick('v')] as const
    step(1, ...lists, { ...usual, lr }, { ...extra, amax: wanted ? pick('amax') : undefined })
    return members
  }

  for (const device of devices)
    describe.skipIf(!present(device))(`amax on ${device}`, () => {
      it.each(measured)('m %s, v %s: is that of p as stored, and changes nothing else', async (...pair) => {
        for (const kind of roundings) {
          const [members, others] = [
            await measuredStep(device, pair, kind),
            await measuredStep(device, pair, kind, { wanted: false }),
          ]
          for (const [i, { p, m, v, amax }] of members.entries()) {
            const other = others[i] as (typeof members)[number]
            expect(await bytesOf(amax), `${kind}, ${lengths[i]}`).toEqual(await bytesOf(own(native.amax(p))))
            for (const [one, two] of [
              [p, other.p],
              [m, other.m],
              [v, other.v],
            ] as const)
              expect(await bytesOf(one)).toEqual(await bytesOf(two))
            expect(await read(other.amax)).toEqual([1000])
          }
        }
      })

      it.each(measured)('m %s, v %s: NaN if any is NaN, else Inf if any is infinite', async (...pair) => {
        for (const [special, lr, expected] of [
          [Number.NaN, 0.1, Number.NaN],
          [-3.3e38, 1e38, Number.POSITIVE_INFINITY], // by the step
        ] as const)
          for (const kind of roundings) {
            const amaxes = (await measuredStep(device, pair, kind, { special, lr })).map(({ amax }) => amax)
            expect(await read(amaxes.at(-1) as Handle), `${kind}`).toEqual([expected])
            expect((await read(amaxes.at(-2) as Handle))[0]).toBeLessThan(2e38)
          }
      })

      it.each(measured)('m %s, v %s: a skipped step leaves it', async (...pair) => {
        const clip = await moved(tensor('f32', [2], [0.5, 1]), device)
        for (const kind of roundings)
          for (const { amax } of await measuredStep(device, pair, kind, { clip }))
            expect(await read(amax)).toEqual([1000])
      })
    })

  it('amax is refused of parameters in other formats, and in other shapes', () => {
    const states = () => [zeros('f32', 2)]
    const given = (format: AnyFormat, amax: Handle) => () =>
      step(1, [zeros(format, 2)], states(), states(), states(), usual, { amax: [amax] })
    expect(given('f32', tensor('f32', [2], [0, 0]))).toThrow('adamw: amax[0] f32[2] must have 1 = 1 in dimension 0')
    expect(given('bf16x2', tensor('f32', [1], [0]))).toThrow(
      /^adamw: p bf16x2, amax f32 is not a combination of this op/,
    )
  })
})
