// Gradients of several ranks in FP8 (FP8-LM, arXiv 2310.18313): one scale for all, the factor that keeps their sum within the
// format, micro-batches that stand for ranks, and which rank keeps the states of which tensors.
import { CoatError, native } from './native.ts'
import { isScaled, scope, Tensor } from './tensor.ts'

/** A sum of gradients as FP8 codes; the mean is its value by `count`. */
export interface GradientSum {
  sum: Tensor
  count: number
}

/**
 * The sum of the ranks' gradients, plain or e4m3/t, and of one shape, as FP8 arithmetic makes it: all are rounded to e4m3 with the scale
 * of the largest of them, a power of two, by `mu`; what the sum has above the largest code saturates (section 2.1, equations 4
 * to 6). Nothing is read back.
 */
export function sumGradients(ranks: readonly Tensor[], mu = 1): GradientSum {
  const [first, ...others] = ranks
  if (!first || !(mu > 0 && Number.isFinite(mu)))
    throw new CoatError(
      `sumGradients: ranks are ${ranks.length} and mu is ${mu}, which must be at least 1 and a number above 0`,
      'value',
      'sumGradients',
      first ? 'mu' : 'ranks',
    )
  return scope(() => {
    const { device } = first
    const amax = Tensor.zeros([1], { device })
    for (const rank of ranks) native.observe_amax(amax.handle, rank.amax().handle)
    const scale = Tensor.own(native.scale_from_amax(amax.handle, 'e4m3/t', 'pow2'))
    native.multiply_into(scale.handle, Tensor.from([1 / mu], [1], { device }).handle)
    const rounded = (rank: Tensor) => {
      const plain = isScaled(rank.format) ? Tensor.own(native.convert(rank.handle, null, 'f32')) : rank
      const codes = Tensor.own(native.convert(plain.handle, scale.handle, 'e4m3/t'))
      return Tensor.own(native.convert(codes.handle, null, 'f32'))
    }
    const total = scope(() => rounded(first))
    for (const rank of others) scope(() => native.add_into(total.handle, rounded(rank).handle))
    return { sum: Tensor.own(native.convert(total.handle, scale.handle, 'e4m3/t')), count: ranks.length }
  })
}

/** The part of the codes of an e4m3/t tensor that are the largest: what may have saturated. Two numbers are read back. */
export async function saturatedShare(tensor: Tensor): Promise<number> {
  const { format, shape, device, numel } = tensor
  if (format !== 'e4m3/t')
    throw new CoatError(
      `saturatedShare: tensor ${format}[${shape.join(', ')}] must be e4m3/t`,
      'format',
      'saturatedShare',
      'tensor',
    )
  if (numel === 0) return 0
  const { scale, norm } = scope(() => {
    const scale = Tensor.own(native.scale_of(tensor.handle), 'f32')
    // with 432 * 2^10 times the scale 448 rounds to the smallest code, 2^-9, and 416 to 0, so that the norm counts
    const high = Tensor.from([counted], [1], { device })
    native.multiply_into(high.handle, scale.handle)
    const values = Tensor.own(native.convert(tensor.handle, null, 'f32'))
    const marks = Tensor.own(native.convert(values.handle, high.handle, 'e4m3/t'))
    const [norm] = native.grad_norm([marks.handle], 0).map((handle) => Tensor.own(handle))
    return { scale: scale.keep(), norm: (norm as Tensor).keep() }
  })
  try {
    const one = (await scale.item()) * counted * 2 ** -9
    return Math.round(((await norm.item()) / one) ** 2) / numel
  } finally {
    scale.dispose()
    norm.dispose()
  }
}
const counted = 432 * 2 ** 10

/**
 * Two readings of the paper's rule, and none. `absolute`: mu becomes 1/2 when values saturate and grows to 2 within `window` steps.
 * `relative`, as MS-AMP's pull request 140 has it: mu is halved when values saturate and doubles within `window` steps,
 * beginning at 1 / sqrt(ranks). `fixed`: it stays there, as in MS-AMP.
 */
export type MuReading = 'absolute' | 'relative' | 'fixed'

export interface MuOptions {
  reading?: MuReading
  ranks: number
  /** Share of saturated values above which mu shrinks (default 1e-5). */
  threshold?: number
  /** Steps of growth (default 1000). */
  window?: number
  /** Bounds of the relative reading (default 2^-16 and 1: more than 1 can only saturate more). */
  bounds?: readonly [number, number]
}

/** The automatic factor mu, from the shares of saturated values of steps before. */
export class AutomaticMu {
  readonly options: Required<MuOptions>
  value: number

  constructor(options: MuOptions) {
    const full = { reading: 'relative', threshold: 1e-5, window: 1000, bounds: [2 ** -16, 1], ...options } as const
    const demand = (name: keyof MuOptions, holds: boolean, rule: string) => {
      if (!holds)
        throw new CoatError(`AutomaticMu: ${name} is ${full[name]} and must be ${rule}`, 'value', 'AutomaticMu', name)
    }
    demand('reading', ['absolute', 'relative', 'fixed'].includes(full.reading), 'absolute, relative or fixed')
    demand('ranks', Number.isSafeInteger(full.ranks) && full.ranks >= 1, 'an integer of at least 1')
    demand('threshold', full.threshold >= 0 && full.threshold < 1, 'at least 0 and less than 1')
    demand('window', Number.isSafeInteger(full.window) && full.window >= 1, 'an integer of at least 1')
    demand('bounds', full.bounds[0] > 0 && full.bounds[0] <= full.bounds[1], 'two numbers above 0 in their order')
    this.options = full
    this.value = full.reading === 'absolute' ? 1 : this.#bounded(1 / Math.sqrt(full.ranks))
  }

  /** After a step in which this share of the values saturated. */
  update(share: number): void {
    const { reading, threshold, window } = this.options
    if (reading === 'fixed') return
    const saturates = share > threshold
    if (reading === 'absolute') this.value = saturates ? 0.5 : Math.min(2, this.value * 4 ** (1 / window))
    else this.value = this.#bounded(this.value * (saturates ? 0.5 : 2 ** (1 / window)))
  }

  #bounded(value: number): number {
    const [low, high] = this.options.bounds
    return Math.min(high, Math.max(low, value))
  }
}

/** What holds the gradient of a trained tensor: a parameter. */
export interface GradientHolder {
  readonly name: string
  readonly gradFormat: string | null
  grad: Tensor | null
  gradScale: 'exact' | 'pow2'
}

/**
 * Micro-batches of a step that stand for ranks: each leaves gradients in e4m3/t, which wait for one another, a byte an element
 * each, and are summed as FP8, with a factor mu a tensor.
 */
export class RankedGradients implements Disposable {
  readonly options: Required<MuOptions>
  readonly #holders: readonly { holder: GradientHolder; mu: AutomaticMu; parts: Tensor[] }[]

  constructor(params: readonly GradientHolder[], options: MuOptions) {
    const scaled = params.filter(({ gradFormat }) => gradFormat === 'e4m3/t')
    if (scaled.length === 0)
      throw new CoatError("mu: no parameter has a gradient in e4m3/t: dw must be 'e4m3/t'", 'value', 'mu', 'dw')
    for (const holder of scaled) holder.gradScale = 'pow2'
    this.#holders = scaled.map((holder) => ({ holder, mu: new AutomaticMu(options), parts: [] }))
    this.options = new AutomaticMu(options).options
  }

  /** Takes what a micro-batch has left. */
  take(): void {
    for (const { holder, parts } of this.#holders) {
      if (holder.grad) parts.push(holder.grad)
      holder.grad = null
    }
  }

  /** Gives each holder the sum of what was taken. */
  sum(): void {
    for (const { holder, mu, parts } of this.#holders) {
      if (parts.length === 0) continue
      const { sum } = sumGradients(parts, mu.value)
      holder.grad = sum.retain()
      sum.dispose()
      native.retag(sum.handle, 'grad')
      for (const part of parts.splice(0)) part.release()
    }
  }

  /** Measures the sums, which the holders still have, and adapts mu. */
  async update(): Promise<void> {
    for (const { holder, mu } of this.#holders)
      if (holder.grad && mu.options.reading !== 'fixed') mu.update(await saturatedShare(holder.grad))
  }

  /** mu by the names of tensors: plain JSON. */
  state(): Record<string, number> {
    return Object.fromEntries(this.#holders.map(({ holder, mu }) => [holder.name, mu.value]))
  }
  restore(state: Record<string, number>): void {
    for (const { holder, mu } of this.#holders) mu.value = state[holder.name] ?? mu.value
  }

  /** Drops what was taken and not summed. */
  drop(): void {
    for (const { parts } of this.#holders) for (const part of parts.splice(0)) part.release()
  }

  dispose(): void {
    this.drop()
    for (const { holder } of this.#holders) holder.gradScale = 'exact'
  }
  [Symbol.dispose](): void {
    this.dispose()
  }
}

/** How a trainer has it: a reading with its defaults, or with others. */
export type MuSetting = 'none' | MuReading | Omit<MuOptions, 'ranks'>

/** Micro-batches as ranks, unless `mu` is none. */
export function exchangeOf(
  params: readonly GradientHolder[],
  mu: MuSetting,
  options: { accumulate: number; optimizerInBackward: boolean; graph: boolean },
): RankedGradients | null {
  if (mu === 'none') return null
  const refuse = (text: string): never => {
    throw new CoatError(`Trainer: ${text}`, 'value', 'Trainer', 'mu')
  }
  for (const name of ['optimizerInBackward', 'graph'] as const)
    if (options[name])
      refuse(`mu is ${JSON.stringify(mu)} and must be none with ${name}: micro-batches are summed one step at a time`)
  const names = ['reading', 'threshold', 'window', 'bounds']
  const given = typeof mu === 'string' ? { reading: mu } : mu
  for (const name of Object.keys(given))
    if (!names.includes(name)) refuse(`option 'mu.${name}' is unknown; the options are ${names.join(', ')}`)
  return new RankedGradients(params, { ...given, ranks: options.accumulate })
}

/**
 * Whole tensors to ranks (algorithm 1): the largest first, each to the rank that has least so far, the lower one of equals.
 * Returns the places of the tensors in `sizes`, by rank: tensors with one scale each are not cut.
 */
export function partitionWhole(sizes: readonly number[], ranks: number): number[][] {
  if (!Number.isSafeInteger(ranks) || ranks < 1)
    throw new CoatError(
      `partitionWhole: ranks is ${ranks} and must be an integer of at least 1`,
      'value',
      'partitionWhole',
      'ranks',
    )
  const parts = Array.from({ length: ranks }, () => ({ load: 0, places: [] as number[] }))
  const order = sizes.map((size, place) => ({ size, place })).sort((a, b) => b.size - a.size || a.place - b.place)
  for (const { size, place } of order) {
    const least = parts.reduce((best, part) => (part.load < best.load ? part : best))
    least.load += size
    least.places.push(place)
  }
  return parts.map(({ places }) => places)
}
