// Several trainers of one model, each with its part of the data and of the states: what they ask of each other, and ranks
// that live in one process and wait for each other there.
import { CoatError, native } from './native.ts'
import { isScaled, scope, Tensor } from './tensor.ts'

/** One of several that train together. All make the same calls in the same order; a call resolves when all have made it. */
export interface Ranks {
  /** Which one this is, from 0. */
  readonly rank: number
  readonly count: number
  /** The sum of the numbers of all, added in their order: the same on each. */
  sum(value: number): Promise<number>
  /** What rank 0 says. */
  tell<Value>(value: Value): Promise<Value>
  /**
   * Every tensor becomes the sum of those at its place, added in f32 in the order of ranks and rounded once. Where it is scaled,
   * its scale is then measured, or that which all have at its place (`kept`), with which large sums saturate.
   */
  add(tensors: readonly Tensor[], scales?: 'measured' | 'kept'): Promise<void>
  /** Every tensor, f32 [1], becomes the largest finite of those at its place, which are at least 0; 0 where none is finite. */
  most(tensors: readonly Tensor[]): Promise<void>
  /** Every tensor becomes that of its owner, code by code. */
  share(tensors: readonly Tensor[], owners: readonly number[]): Promise<void>
  /** This one cannot go on: what the others wait for, now or later, is rejected with the reason. */
  leave(reason: unknown): void
}

/** The only one of its kind. */
export const alone: Ranks = {
  rank: 0,
  count: 1,
  sum: async (value) => value,
  tell: async (value) => value,
  add: async () => {},
  most: async () => {},
  share: async () => {},
  leave: () => {},
}

/** Ranks of one process and one thread, each for a trainer with a model of its own: they take turns, and nothing is faster. */
export function localRanks(count: number): Ranks[] {
  if (!Number.isSafeInteger(count) || count < 1)
    throw new CoatError(
      `localRanks: count is ${count} and must be an integer of at least 1`,
      'value',
      'localRanks',
      'count',
    )
  const meeting = new Meeting(count)
  return Array.from({ length: count }, (_, rank) => new LocalRank(meeting, rank, count))
}

interface Waiting {
  rank: number
  call: string
  value: unknown
  resolve: (values: unknown[]) => void
  reject: (reason: unknown) => void
}

/** Where all bring a value and leave with those of all. */
class Meeting {
  readonly #count: number
  #here: Waiting[] = []
  #left: CoatError | null = null

  constructor(count: number) {
    this.#count = count
  }

  meet<Value>(rank: number, call: string, value: Value): Promise<Value[]> {
    return new Promise((resolve, reject) => {
      if (this.#left) return reject(this.#left)
      this.#here.push({ rank, call, value, resolve: resolve as Waiting['resolve'], reject })
      if (this.#here.length < this.#count) return
      const all = this.#here.splice(0).sort((a, b) => a.rank - b.rank)
      const odd = all.find((one, i) => one.rank !== i || one.call !== all[0]?.call)
      if (odd) {
        const calls = all.map((one) => `rank ${one.rank} calls ${one.call}`).join(', ')
        const error = new CoatError(`ranks: all must make the same call; ${calls}`, 'ranks', 'ranks', odd.call)
        for (const one of all) one.reject(error)
      } else for (const one of all) one.resolve(all.map((each) => each.value))
    })
  }

  leave(rank: number, reason: unknown): void {
    const text = `ranks: rank ${rank} left: ${reason instanceof Error ? reason.message : reason}`
    this.#left ??= new CoatError(text, 'ranks', 'ranks', 'leave', { cause: reason })
    for (const one of this.#here.splice(0)) one.reject(this.#left)
  }
}

class LocalRank implements Ranks {
  readonly rank: number
  readonly count: number
  readonly #meeting: Meeting

  constructor(meeting: Meeting, rank: number, count: number) {
    this.#meeting = meeting
    this.rank = rank
    this.count = count
  }

  async sum(value: number): Promise<number> {
    return (await this.#meet('sum', value)).reduce((total, one) => total + one, 0)
  }

  async tell<Value>(value: Value): Promise<Value> {
    return (await this.#meet('tell', value))[0] as Value
  }

  async add(tensors: readonly Tensor[], scales: 'measured' | 'kept' = 'measured'): Promise<void> {
    const all = await this.#lists('add', tensors)
    if (this.rank === 0)
      for (const [i, { format, handle }] of tensors.entries())
        scope(() => {
          const scale = scales === 'kept' && isScaled(format) ? Tensor.own(native.scale_of(handle)) : null
          const [total, ...others] = all.map((list) => converted(list[i] as Tensor, 'f32')) as [Tensor, ...Tensor[]]
          for (const other of others) native.add_into(total.handle, other.handle)
          const sum = converted(total, format as 'f32', scale)
          for (const list of all) native.assign((list[i] as Tensor).handle, sum.handle)
        })
    await this.#meet('added', null)
  }

  async most(tensors: readonly Tensor[]): Promise<void> {
    const all = await this.#lists('most', tensors)
    if (this.rank === 0)
      for (const [i, { device }] of tensors.entries())
        scope(() => {
          const most = Tensor.zeros([1], { device })
          for (const list of all) native.observe_amax(most.handle, (list[i] as Tensor).handle)
          for (const list of all) native.assign((list[i] as Tensor).handle, most.handle)
        })
    await this.#meet('compared', null)
  }

  async share(tensors: readonly Tensor[], owners: readonly number[]): Promise<void> {
    const all = await this.#lists('share', tensors)
    for (const [i, tensor] of tensors.entries()) {
      const theirs = all[owners[i] as number]?.[i] as Tensor
      if (theirs !== tensor) native.assign(tensor.handle, theirs.handle)
    }
    await this.#meet('shared', null)
  }

  leave(reason: unknown): void {
    this.#meeting.leave(this.rank, reason)
  }

  #meet<Value>(call: string, value: Value): Promise<Value[]> {
    return this.#meeting.meet(this.rank, call, value)
  }

  async #lists(call: string, tensors: readonly Tensor[]): Promise<(readonly Tensor[])[]> {
    const all = await this.#meet(call, tensors)
    const other = all.findIndex((list) => list.length !== all[0]?.length)
    if (other >= 0)
      throw new CoatError(
        `ranks: ${call}: rank ${other} has ${all[other]?.length} tensors and must have ${all[0]?.length}, as rank 0`,
        'ranks',
        'ranks',
        'tensors',
      )
    return all
  }
}

function converted(tensor: Tensor, format: 'f32', scale: Tensor | null = null): Tensor {
  return Tensor.own(native.convert(tensor.handle, scale?.handle ?? null, format))
}

// Refuses what is no place among several.
function expectPlace(ranks: Ranks): void {
  const { rank = Number.NaN, count = Number.NaN }: Partial<Ranks> = ranks ?? {}
  if (!(Number.isSafeInteger(count) && Number.isSafeInteger(rank) && rank >= 0 && rank < count))
    throw new CoatError(
      `Trainer: ranks has rank ${rank} and count ${count}, which must be integers, and rank from 0 to less than count`,
      'value',
      'Trainer',
      'ranks',
    )
}

/** Refuses what cannot be had of a trainer that trains together with others, where there are any. */
export function expectTogether(
  ranks: Ranks,
  model: { delayedScales(): readonly unknown[] },
  {
    data,
    optimizerInBackward,
    measureUpdates,
    graph,
  }: {
    data: { rank?: number; world?: number }
    optimizerInBackward: boolean
    measureUpdates: number
    graph: boolean
  },
): void {
  expectPlace(ranks)
  const { rank, count } = ranks
  if (count === 1) return
  const refuse = (name: string, text: string): never => {
    throw new CoatError(`Trainer: ${name} ${text}`, 'value', 'Trainer', name)
  }
  const { rank: of = rank, world = count } = data
  if (of !== rank || world !== count)
    refuse('data', `is for rank ${of} of ${world} and must be for rank ${rank} of ${count}, as ranks says`)
  if (optimizerInBackward) refuse('optimizerInBackward', 'updates before the gradients of several ranks are added')
  if (graph) refuse('graph', 'records whole steps, within which several ranks meet')
  if (measureUpdates > 0) refuse('measureUpdates', `is ${measureUpdates} and must be 0 with several ranks`)
  if (model.delayedScales().length > 0)
    refuse('model', 'has scales of steps before, which would differ between ranks; its recipe must measure them')
}
