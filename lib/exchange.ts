// Gradients of several ranks in FP8 (FP8-LM, arXiv 2310.18313): one scale for all, the factor that keeps their sum within the
// format, and micro-batches that stand for ranks.
import { CoatError, native } from './native.ts'
import type { Ranks } from './ranks.ts'
import { type Communication, communications } from './recipes.ts'
import { retained } from './tape.ts'
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
    const scale = unifiedScale(amax, mu)
    const rounded = (rank: Tensor) => Tensor.own(native.convert(codesOf(rank, scale).handle, null, 'f32'))
    const total = scope(() => rounded(first))
    for (const rank of others) scope(() => native.add_into(total.handle, rounded(rank).handle))
    return { sum: Tensor.own(native.convert(total.handle, scale.handle, 'e4m3/t')), count: ranks.length }
  })
}

// The scale of all ranks, of the largest magnitude of them all.
function unifiedScale(amax: Tensor, mu: number): Tensor {
  const scale = Tensor.own(native.scale_from_amax(amax.handle, 'e4m3/t', 'pow2'))
  native.multiply_into(scale.handle, Tensor.from([1 / mu], [1], { device: amax.device }).handle)
  return scale
}

function codesOf(gradient: Tensor, scale: Tensor): Tensor {
  const plain = isScaled(gradient.format) ? Tensor.own(native.convert(gradient.handle, null, 'f32')) : gradient
  return Tensor.own(native.convert(plain.handle, scale.handle, 'e4m3/t'))
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
  readonly tensor: Tensor
  readonly gradFormat: string | null
  grad: Tensor | null
  gradScale: 'exact' | 'pow2'
}

function give(holder: GradientHolder, gradient: Tensor): void {
  holder.grad?.release()
  holder.grad = retained(gradient)
  native.retag(gradient.handle, 'grad')
}

/** Gradients that are summed as those of several ranks, some of them in e4m3/t with a factor mu a tensor. */
abstract class Exchange implements Disposable {
  /** What changes the result. */
  readonly settings: object
  /** Whether it rounds to FP8, where infinities saturate. */
  readonly quantizes: boolean
  readonly #before: readonly GradientHolder['gradScale'][]
  protected readonly scaled: readonly { readonly holder: GradientHolder; readonly mu: AutomaticMu | null }[]

  constructor(scaled: readonly GradientHolder[], mu: MuOptions | null, settings: object) {
    this.scaled = scaled.map((holder) => ({ holder, mu: mu && new AutomaticMu(mu) }))
    this.#before = scaled.map(({ gradScale }) => gradScale)
    for (const holder of scaled) holder.gradScale = 'pow2'
    this.quantizes = scaled.length > 0
    this.settings = { ...settings, ...(mu ? { mu: new AutomaticMu(mu).options } : {}) }
  }

  /** Takes what a micro-batch has left. */
  take(): void {}
  /** Gives each holder the sum of what was taken. */
  sum(): void {}
  /** Drops what was taken and not summed. */
  drop(): void {}
  /** Gives each holder the sum of all ranks. */
  abstract add(ranks: Ranks): Promise<void>

  /** Measures the sums, which the holders still have, and adapts mu. */
  async update(): Promise<void> {
    for (const { holder, mu } of this.scaled)
      if (holder.grad && mu && mu.options.reading !== 'fixed') mu.update(await saturatedShare(holder.grad))
  }

  /** mu by the names of tensors: plain JSON. */
  state(): Record<string, number> {
    return Object.fromEntries(this.scaled.flatMap(({ holder, mu }) => (mu ? [[holder.name, mu.value]] : [])))
  }
  restore(state: Record<string, number>): void {
    for (const { holder, mu } of this.scaled) if (mu) mu.value = state[holder.name] ?? mu.value
  }

  dispose(): void {
    this.drop()
    for (const [i, { holder }] of this.scaled.entries()) holder.gradScale = this.#before[i] ?? 'exact'
  }
  [Symbol.dispose](): void {
    this.dispose()
  }
}

export type { Exchange }

/**
 * Micro-batches of a step that stand for ranks: each leaves gradients in e4m3/t, which wait for one another, a byte an element
 * each, and are summed as FP8, with a factor mu a tensor.
 */
export class RankedGradients extends Exchange {
  readonly #parts = new Map<GradientHolder, Tensor[]>()

  constructor(params: readonly GradientHolder[], options: MuOptions) {
    const scaled = params.filter(({ gradFormat }) => gradFormat === 'e4m3/t')
    if (scaled.length === 0)
      throw new CoatError("mu: no parameter has a gradient in e4m3/t: dw must be 'e4m3/t'", 'value', 'mu', 'dw')
    super(scaled, options, {})
    for (const holder of scaled) this.#parts.set(holder, [])
  }

  override take(): void {
    for (const [holder, parts] of this.#parts) {
      if (holder.grad) parts.push(holder.grad)
      holder.grad = null
    }
  }

  override sum(): void {
    for (const { holder, mu } of this.scaled) {
      const parts = this.#parts.get(holder) ?? []
      if (parts.length === 0) continue
      give(holder, sumGradients(parts, mu?.value).sum)
      for (const part of parts.splice(0)) part.release()
    }
  }

  /** There is one. */
  async add(): Promise<void> {}

  override drop(): void {
    for (const parts of this.#parts.values()) for (const part of parts.splice(0)) part.release()
  }
}

/**
 * Gradients that are rounded before ranks send them to each other, and stay so: all of them to bf16, or those of matrices to
 * e4m3/t with one scale for all ranks, as `sumGradients` has it, and a factor mu a tensor.
 */
export class SentGradients extends Exchange {
  readonly #params: readonly GradientHolder[]
  readonly #format: 'bf16' | 'e4m3/t'

  constructor(params: readonly GradientHolder[], format: 'bf16' | 'e4m3/t', mu: MuOptions | null = null) {
    super(format === 'bf16' ? [] : params.filter(({ tensor }) => tensor.shape.length === 2), mu, {
      communicate: format,
    })
    this.#params = params
    this.#format = format
  }

  async add(ranks: Ranks): Promise<void> {
    const here = this.#params.filter(({ grad }) => grad !== null)
    if (this.#format === 'bf16') {
      for (const holder of here)
        if (holder.grad && holder.grad.format !== 'bf16')
          give(holder, Tensor.own(native.convert(holder.grad.handle, null, 'bf16')))
    } else await this.#round(ranks)
    await ranks.add(
      here.map(({ grad }) => grad as Tensor),
      'kept',
    )
  }

  async #round(ranks: Ranks): Promise<void> {
    const sent = this.scaled.flatMap(({ holder, mu }) => (holder.grad ? [{ holder, mu, grad: holder.grad }] : []))
    const largest = sent.map(({ grad }) =>
      scope(() => Tensor.own(native.convert(grad.amax().handle, null, 'f32')).keep()),
    )
    try {
      await ranks.most(largest)
      for (const [i, { holder, mu, grad }] of sent.entries())
        scope(() => give(holder, codesOf(grad, unifiedScale(largest[i] as Tensor, mu?.value ?? 1))))
    } finally {
      for (const tensor of largest) tensor.dispose()
    }
  }
}

/** How a trainer has mu: a reading with its defaults, or with others. */
export type MuSetting = 'none' | MuReading | Omit<MuOptions, 'ranks'>

/** How the gradients of micro-batches, or of several ranks, are summed; null: as they are. */
export function exchangeOf(
  params: readonly GradientHolder[],
  { mu, communicate }: { mu: MuSetting; communicate: Communication },
  options: { accumulate: number; optimizerInBackward: boolean; graph: boolean },
  { count }: Pick<Ranks, 'count'>,
): Exchange | null {
  const refuse = (text: string, name = 'mu'): never => {
    throw new CoatError(`Trainer: ${text}`, 'value', 'Trainer', name)
  }
  if (!communications.includes(communicate))
    refuse(
      `communicate is ${JSON.stringify(communicate)} and must be one of ${communications.join(', ')}`,
      'communicate',
    )
  if (typeof mu !== 'string' && (typeof mu !== 'object' || mu === null || Array.isArray(mu)))
    refuse(`mu is ${JSON.stringify(mu)} and must be none, absolute, relative, fixed, or an object`)
  const several = count > 1
  if (mu === 'none') return several && communicate !== 'f32' ? new SentGradients(params, communicate) : null
  if (several && communicate !== 'e4m3/t')
    refuse(`mu is ${JSON.stringify(mu)} and must be none where several ranks communicate in ${communicate}`)
  for (const name of ['optimizerInBackward', 'graph'] as const)
    if (options[name])
      refuse(`mu is ${JSON.stringify(mu)} and must be none with ${name}: micro-batches are summed one step at a time`)
  const names = ['reading', 'threshold', 'window', 'bounds']
  const given = typeof mu === 'string' ? { reading: mu } : mu
  for (const name of Object.keys(given))
    if (!names.includes(name)) refuse(`option 'mu.${name}' is unknown; the options are ${names.join(', ')}`)
  return several
    ? new SentGradients(params, 'e4m3/t', { ...given, ranks: count })
    : new RankedGradients(params, { ...given, ranks: options.accumulate })
}
