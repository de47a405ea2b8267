// Optimizers: which parameters with which formats, one native call for many tensors; clipping stays on the device.
import { axesOf } from './axes.ts'
import { roundInto } from './emulate.ts'
import type { Module, Param } from './modules.ts'
import { CoatError, native } from './native.ts'
import { type Piece, partitionFlat, partitionWhole, placeRows, type Rows, rowsOf } from './partition.ts'
import type { Ranks } from './ranks.ts'
import { type Partition, partitions, type Recipe } from './recipes.ts'
import {
  type AdamWOptions,
  type AdamWOverride,
  adamw,
  checkMoments,
  checkRounding,
  checkSafe,
  entryOf,
  type FullAdamWOptions,
  type FullLionOptions,
  type FullOptions,
  type FullSgdOptions,
  isFinite32,
  type LionOptions,
  lion,
  type Numbers,
  type Rounding,
  rules,
  type SgdOptions,
  sgd,
} from './rules.ts'
import { type Format, isScaled, scope, Tensor } from './tensor.ts'
import { type UpdateQuality, UpdateSums } from './updates.ts'

export type {
  AdamWOptions,
  AdamWOverride,
  FullOptions,
  LionOptions,
  LionOverride,
  Rounding,
  SgdOptions,
  SgdOverride,
} from './rules.ts'
export { adamw, lion, sgd } from './rules.ts'

interface Slot {
  param: Param
  /** Those that it is for; null: all. */
  rows: Rows | null
  numbers: Numbers
  /** Learning rate as a part of the optimizer's. */
  share: number
  rounding: Rounding
  /** Equal for slots that one native call takes together: the place of the first of them. */
  call: number
  master: Tensor | null
  lost: Tensor | null
  m: Tensor
  v: Tensor | null
}

/** The tensors of one parameter's state: moments, seen as [1, n], what a master keeps, what Kahan's rounding has lost. */
export interface ParamState {
  /** In the recipe's format, in the parameter's shape. */
  master: Tensor | null
  /** bf16, in the parameter's shape. */
  lost: Tensor | null
  /** [1, n] in the recipe's format. */
  m: Tensor
  /** [1, n] in the recipe's format; null where the rule has one moment. */
  v: Tensor | null
}

/** Norm of all gradients and what the next step does with it; device tensors, read when wanted. */
export interface GradientNorm {
  /** f32 [1] */
  norm: Tensor
  /** f32 [L], one a trained parameter. */
  norms: Tensor
  /** f32 [2]: factor for the gradients, and 1 when the step must be skipped. */
  clip: Tensor
}

/** A step that goes on within backward. */
export interface StepInBackward extends Disposable {
  /** Ends it: norms of the gradients that there were; `clip[1]` is 1 when one was not finite. */
  end(): GradientNorm
}

/** What an optimizer reads of a recipe. */
export type OptimizerRecipe = Pick<Recipe, 'master' | 'm' | 'v' | 'layers'> & { rounding?: Rounding }

const whole: PartOf = { rank: 0, count: 1 }

/** Which of several optimizers of the same parameters this is: each keeps the states of its part, and updates that. */
export interface PartOf {
  readonly rank: number
  readonly count: number
  /** (default `whole`) */
  readonly partition?: Partition
}

/** A parameter, or rows of it, and the rank that updates it. */
export interface ParamPiece extends Piece {
  readonly param: Param
  /** The parameter's, with its rows where it is cut. */
  readonly name: string
}

/** A rule over the parameters of a module that are not frozen, with the state formats of a recipe. */
export class Optimizer<Options extends FullOptions = FullOptions> implements Disposable {
  readonly options: Options
  readonly params: readonly Param[]
  /** Which rank updates what of `params`, in their order; no rank has two pieces of one. */
  readonly pieces: readonly ParamPiece[]
  /** Those of `params` of which this optimizer updates something. */
  readonly owned: readonly Param[]
  /** Steps done: t of the bias correction. Skipped steps do not count. */
  steps = 0
  #slots: Slot[]
  #clipped: Param[] | null = null
  #disposed = false

  constructor(module: Module, recipe: OptimizerRecipe, options: Options, part: PartOf = whole) {
    this.options = options
    const { rule, lr, parameters } = options
    const { moments } = rules[rule]
    this.params = module.parameters().filter((param) => !param.frozen)
    if (this.params.length === 0)
      throw new CoatError(`${rule}: the module has no parameter to train`, 'value', rule, 'module')
    const matched = parameters.map(({ match }, i) => {
      const named = new Set(module.parameters(match))
      for (const param of named)
        if (param.named(match) === 'partly')
          throw new CoatError(
            `${rule}: parameters[${i}].match is '${match}', which names a part of '${param.name}' alone; ${param.parts.map(({ name }) => name).join(', ')} are one parameter`,
            'value',
            rule,
            `parameters[${i}].match`,
          )
      if (named.size === 0)
        throw new CoatError(
          `${rule}: parameters[${i}].match is '${match}', which no parameter of the module is named like`,
          'value',
          rule,
          `parameters[${i}].match`,
        )
      return named
    })
    const { master: common = null } = recipe
    if (common !== null && common !== 'f32' && common !== 'f16/t')
      throw new CoatError(
        `${rule}: the recipe's master is ${common} and must be f32, f16/t or null`,
        'format',
        rule,
        'master',
      )
    checkRounding(rule, options.rounding ?? recipe.rounding ?? 'nearest', common, this.params)
    const entry = entryOf(rule)
    const plans = this.params.map((param) => {
      const given = parameters.filter((_, i) => matched[i]?.has(param)).flatMap((override) => Object.entries(override))
      const own: Partial<AdamWOverride> = Object.fromEntries(given.filter(([, value]) => value !== undefined))
      const { m, v, master, rounding = 'nearest' } = axesOf(recipe, param.layer)
      const all = { ...rules.sgd.defaults, ...rules.adamw.defaults, ...options, m, v, ...own }
      checkMoments(param, all, entry)
      if (rule === 'adamw' && !all.allowUnsafe) checkSafe(param, all)
      const { betas, eps, vFloor, momentum, dampening, nesterov } = all
      const weightDecay = param.decay || own.weightDecay !== undefined ? all.weightDecay : 0
      const numbers = { lr: all.lr, betas, eps, vFloor, momentum, dampening, nesterov, weightDecay }
      const narrow = param.tensor.format === 'bf16'
      const doubled = param.tensor.format === 'f32' ? null : (master ?? null)
      const mode = narrow ? (options.rounding ?? rounding) : 'nearest'
      const share = lr > 0 ? all.lr / lr : 1
      return { param, numbers, share, rounding: mode, doubled, m: all.m, v: all.v }
    })
    this.pieces = piecesOf(plans, part)
    const mine = this.pieces.filter(({ rank }) => rank === part.rank)
    this.owned = mine.map(({ param }) => param)
    const calls = new Map<string, number>()
    const called = this.pieces.map(({ place, rows }) => {
      const { numbers, doubled, rounding, param } = plans[place] as (typeof plans)[number]
      const key = JSON.stringify([numbers, doubled, rounding, param.arithmetic, rows !== null])
      const call = calls.get(key) ?? calls.size
      calls.set(key, call)
      return call
    })
    this.#slots = mine.map((piece) =>
      scope(() => {
        const { place, rows } = piece
        const { doubled, m, v, ...plan } = plans[place] as (typeof plans)[number]
        const tensor = rows ? rowsOf(plan.param.tensor, rows) : plan.param.tensor
        return {
          call: called[this.pieces.indexOf(piece)] as number,
          rows,
          ...plan,
          master: doubled && held(native.convert(tensor.handle, null, doubled)),
          lost: plan.rounding === 'kahan' ? zeroState(tensor.shape, tensor, 'bf16') : null,
          // states are flat, so that their groups go on over the ends of rows
          m: zeroState([1, tensor.numel], tensor, m),
          v: moments.includes('v') ? zeroState([1, tensor.numel], tensor, v) : null,
        }
      }),
    )
  }

  /** Bytes of moments, masters and what roundings lost. */
  get stateBytes(): number {
    const tensors = this.#slots.flatMap(({ master, lost, m, v }) => [master, lost, m, v])
    return tensors.reduce((sum, tensor) => sum + (tensor?.bytes ?? 0), 0)
  }

  stateOf(param: Param): ParamState {
    const slot = this.#slots.find((entry) => entry.param === param)
    if (!slot) {
      const { rule } = this.options
      const owner = this.pieces.find((piece) => piece.param === param)?.rank
      const why = owner === undefined ? 'is not trained' : `is updated by rank ${owner}, which has its state`
      throw new CoatError(`${rule}: parameter '${param.name}' ${why}`, 'value', rule, 'param')
    }
    const { master, lost, m, v } = slot
    return { master, lost, m, v }
  }

  /**
   * A step within backward: from now to `end()` every parameter is updated as soon as its gradient is complete, and the
   * gradient is freed. The norm of all gradients is not known by then, so that `lastNorm`, that of the step before, gives the
   * clip factor for `maxNorm` (0: none); null: each gradient is clipped by its own norm. A parameter whose gradient is not
   * finite keeps its value and state. Gradients, but not norms, are `scale` times what they should be.
   */
  stepInBackward(lr: number, maxNorm = 0, lastNorm: number | null = null, scale = 1): StepInBackward {
    this.#expect(lr)
    const factor = (lastNorm !== null && lastNorm > maxNorm && maxNorm > 0 ? maxNorm / lastNorm : 1) / scale
    const by = factor === 1 ? null : this.#number(factor)
    const norms: Tensor[] = []
    const params: Param[] = []
    const calls = this.#slots.length
    this.#slots.forEach((slot, i) => {
      const { param } = slot
      param.onComplete = () => {
        if (!param.grad) return
        const parts = native.grad_norm([param.grad.handle], lastNorm === null ? maxNorm * scale : 0)
        const [norm, same, clip] = parts.map((handle) => Tensor.own(handle)) as [Tensor, Tensor, Tensor]
        // [factor, skip]: a skip that is not 0 stays so
        if (by) native.multiply_into(clip.handle, by.handle)
        this.#update([slot], lr, clip, calls + i)
        norms.push(norm.keep())
        params.push(param)
        for (const tensor of [same, clip]) tensor.dispose()
        param.dropGrad()
      }
    })
    const stop = () => {
      for (const { param } of this.#slots) param.onComplete = null
      for (const tensor of norms.splice(0)) tensor.dispose()
      by?.dispose()
    }
    return {
      end: () => {
        const norm = this.#norms(norms, 0, scale)
        this.#clipped = params
        stop()
        return norm
      },
      [Symbol.dispose]: stop,
    }
  }

  /**
   * Norm of the gradients, and the clip factor for `maxNorm` (0: none) that `step` applies. Of gradients that are `scale` times
   * what they should be both are those of what they should be, so that `step` divides by it.
   */
  gradNorm(maxNorm = 0, scale = 1): GradientNorm {
    this.#clipped = null
    return this.#norms(this.gradients, maxNorm, scale)
  }

  /** Gradients that there are, of all parameters. */
  get gradients(): Tensor[] {
    return this.params.flatMap(({ grad }) => grad ?? [])
  }

  #norms(tensors: readonly Tensor[], maxNorm: number, scale: number): GradientNorm {
    const parts = native.grad_norm(
      tensors.map(({ handle }) => handle),
      maxNorm * scale,
    )
    if (scale !== 1) {
      using inverse = this.#number(1 / scale)
      // [factor, skip]: a skip that is not 0 stays so
      for (const part of parts) native.multiply_into(part, inverse.handle)
    }
    const [norm, norms, clip] = parts
    return { norm: Tensor.own(norm), norms: Tensor.own(norms), clip: Tensor.own(clip) }
  }

  /** f32 [1], out of scopes. */
  #number(value: number): Tensor {
    return Tensor.full([1], value, { device: (this.params[0] as Param).tensor.device }).keep()
  }

  /** Parameters in the order of the `norms` of `gradNorm()`, or of a step in backward. */
  get clipped(): Param[] {
    return this.#clipped ?? this.params.filter(({ grad }) => grad)
  }

  /**
   * One update with learning rate `lr`; nothing changes when clip says to skip. Count it with `advance()` once it is known
   * not to be skipped.
   */
  step(lr: number, clip: Tensor | null = null): void {
    this.#expect(lr)
    const calls = new Map<number, Slot[]>()
    for (const slot of this.#trained()) {
      const together = calls.get(slot.call)
      if (together) together.push(slot)
      else calls.set(slot.call, [slot])
    }
    for (const [call, slots] of calls) this.#update(slots, lr, clip, call)
  }

  /**
   * `step`, and how much of the update the formats of parameters kept, of each and of all. Costs a second update in FP32 and
   * reads parameters back, one after the other.
   */
  async measuredStep(
    lr: number,
    clip: Tensor | null = null,
  ): Promise<UpdateQuality & { parameters: Map<string, UpdateQuality> }> {
    const slots = this.#trained()
    const before = slots.map((slot) => ({ ...valuesOf(slot), intended: this.#intended(slot, lr, clip) }))
    try {
      this.step(lr, clip)
      const all = new UpdateSums()
      const parameters = new Map<string, UpdateQuality>()
      for (const [i, slot] of slots.entries()) {
        const from = before[i] as (typeof before)[number]
        const to = valuesOf(slot)
        try {
          const read = async (tensor: Tensor) => (await tensor.read()) as Float32Array
          const values = {
            kept: { before: await read(from.kept), after: await read(to.kept) },
            read: { before: await read(from.read), after: await read(to.read) },
            intended: await read(from.intended),
          }
          const one = new UpdateSums()
          for (const sums of [one, all]) sums.add(values)
          parameters.set(slot.param.name, one.quality)
        } finally {
          for (const tensor of Object.values(to)) tensor.dispose()
        }
      }
      return { ...all.quality, parameters }
    } finally {
      for (const tensors of before) for (const tensor of Object.values(tensors)) tensor.dispose()
    }
  }

  /** The parameter after a step of a copy in FP32, moments and all. */
  #intended(slot: Slot, lr: number, clip: Tensor | null): Tensor {
    const { rule } = this.options
    const { numbers, share, param } = slot
    return scope(() => {
      const m = copyOf(slot.m)
      const v = slot.v && copyOf(slot.v)
      const p = valuesOf(slot).kept
      const exact = {
        master: null,
        lost: null,
        amax: null,
        arithmetic: null,
        clip: clip?.handle ?? null,
        rounding: 'nearest',
        seed: 0,
      } as const
      const lists = { p: [p.handle], g: [(param.grad as Tensor).handle], m: [m.handle], v: v ? [v.handle] : [] }
      rules[rule].run({ ...exact, ...lists, t: this.steps + 1 }, { ...numbers, lr: lr * share, vFloor: false })
      return p
    })
  }

  #expect(lr: number): void {
    const { rule } = this.options
    const refuse = (name: string, value: unknown, rules: string) => {
      throw new CoatError(`${rule}: ${name} is ${value} and must be ${rules}`, 'value', rule, name)
    }
    if (this.#disposed) throw new CoatError(`${rule}: the optimizer was disposed`, 'disposed', rule)
    if (!isFinite32(lr) || lr < 0) refuse('lr', lr, 'a finite number of at least 0')
    if (!Number.isSafeInteger(this.steps) || this.steps < 0) refuse('steps', this.steps, 'an integer of at least 0')
  }

  /** One native call, which `call` tells from the others of the step: its random bits come from it. */
  #update(slots: readonly Slot[], lr: number, clip: Tensor | null, call: number): void {
    const { rule, seed } = this.options
    const t = this.steps + 1
    const {
      numbers,
      share,
      rounding,
      param: { arithmetic },
    } = slots[0] as Slot
    const bits = seedOf(seed, t, call)
    const all = (of: (slot: Slot) => Tensor | null) => slots.map((slot) => (of(slot) as Tensor).handle)
    const some = (of: (slot: Slot) => Tensor | null) => (of(slots[0] as Slot) ? all(of) : null)
    const measures = this.#measures(slots)
    scope(() => {
      const tensors = slots.map(({ param, rows }) => (rows ? rowsOf(param.tensor, rows) : param.tensor))
      const gradients = slots.map(({ param, rows }) => {
        const grad = param.grad as Tensor
        return rows ? rowsOf(grad, rows) : grad
      })
      rules[rule].run(
        {
          p: tensors.map(({ handle }) => handle),
          master: some(({ master }) => master),
          lost: some(({ lost }) => lost),
          g: gradients.map(({ handle }) => handle),
          m: all(({ m }) => m),
          v: some(({ v }) => v) ?? [],
          amax: measures ? all(({ param }) => param.tensor.amax()) : null,
          clip: clip?.handle ?? null,
          rounding,
          arithmetic,
          seed: bits,
          t,
        },
        { ...numbers, lr: lr * share },
      )
      // of what a rule has rounded itself this changes nothing
      if (arithmetic) for (const { handle } of tensors) roundInto(handle, arithmetic, bits)
      for (const [i, { param, rows }] of slots.entries()) if (rows) placeRows(param.tensor, tensors[i] as Tensor, rows)
    })
    if (measures) for (const { param } of slots) param.tensor.renewAmax()
  }

  /**
   * Whether the next pass reads one of these parameters in FP8, whose scale then follows from the largest magnitude that the
   * update leaves. A skipped step leaves that of before, so that it must be known before: it is measured once, and again
   * after a parameter was changed from outside.
   */
  #measures(slots: readonly Slot[]): boolean {
    const { measured } = rules[this.options.rule]
    if (slots.some(({ rows }) => rows)) return false
    const tensors = slots.map(({ param }) => param.tensor)
    return tensors.some(({ isOperand }) => isOperand) && tensors.every(({ format }) => measured.includes(format))
  }

  advance(): void {
    this.steps += 1
  }

  /** Gives the parameters what their ranks have made of them. */
  async share(ranks: Ranks): Promise<void> {
    const cut = (rows: Rows, { tensor }: Param) => scope(() => rowsOf(tensor, rows).keep())
    const tensors = this.pieces.map(({ param, rows }) => (rows ? cut(rows, param) : param.tensor))
    try {
      await ranks.share(
        tensors,
        this.pieces.map(({ rank }) => rank),
      )
      for (const [i, { param, rows, rank }] of this.pieces.entries())
        if (rows && rank !== ranks.rank) placeRows(param.tensor, tensors[i] as Tensor, rows)
    } finally {
      for (const [i, { rows }] of this.pieces.entries()) if (rows) tensors[i]?.dispose()
    }
  }

  dropGrads(): void {
    for (const param of this.params) param.dropGrad()
  }

  dispose(): void {
    for (const { master, lost, m, v } of this.#slots) for (const tensor of [master, lost, m, v]) tensor?.dispose()
    this.#slots = []
    this.#disposed = true
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  #trained(): Slot[] {
    return this.#slots.filter(({ param }) => param.grad !== null)
  }
}

/** Pieces of parameters with these formats of moments, in the order of parameters. */
function piecesOf(
  plans: readonly { param: Param; m: Format; v: Format }[],
  { count, partition = 'whole' }: PartOf,
): ParamPiece[] {
  const shapes = plans.map(({ param: { tensor }, m, v }) => {
    const [rows = 1, ...columns] = tensor.shape
    const whole = (format: Format) => isScaled(format) && format.endsWith('/t')
    const plain = tensor.format === 'f32' || tensor.format === 'bf16'
    return {
      ...{ rows, columns: columns.reduce((a, b) => a * b, 1) },
      cuttable: columns.length === 1 && plain && !whole(m) && !whole(v),
    }
  })
  if (!partitions.includes(partition))
    throw new CoatError(
      `partition is ${JSON.stringify(partition)} and must be whole or flat`,
      'value',
      'partition',
      'partition',
    )
  const wholePieces = () => {
    const parts = partitionWhole(
      shapes.map(({ rows, columns }) => rows * columns),
      count,
    )
    return plans.map((_, place) => ({ place, rank: parts.findIndex((places) => places.includes(place)), rows: null }))
  }
  const pieces = partition === 'flat' ? partitionFlat(shapes, count) : wholePieces()
  return pieces.map((piece) => {
    const { param } = plans[piece.place] as (typeof plans)[number]
    return { ...piece, param, name: piece.rows ? `${param.name}[${piece.rows.join(':')}]` : param.name }
  })
}

/** AdamW over the parameters of a module. */
export class AdamW extends Optimizer<FullAdamWOptions> {
  constructor(module: Module, recipe: OptimizerRecipe, options: AdamWOptions = {}, part: PartOf = whole) {
    super(module, recipe, adamw(options), part)
  }
}

/** Lion over the parameters of a module. */
export class Lion extends Optimizer<FullLionOptions> {
  constructor(module: Module, recipe: OptimizerRecipe, options: LionOptions = {}, part: PartOf = whole) {
    super(module, recipe, lion(options), part)
  }
}

/** SGD with momentum over the parameters of a module. */
export class Sgd extends Optimizer<FullSgdOptions> {
  constructor(module: Module, recipe: OptimizerRecipe, options: SgdOptions = {}, part: PartOf = whole) {
    super(module, recipe, sgd(options), part)
  }
}

/** The optimizer that options are for; options without a rule are AdamW's. */
export function optimizerOf(
  module: Module,
  recipe: OptimizerRecipe,
  options: FullOptions | AdamWOptions = {},
  part: PartOf = whole,
): Optimizer {
  if (!('rule' in options) || options.rule === 'adamw') return new AdamW(module, recipe, options, part)
  return options.rule === 'lion' ? new Lion(module, recipe, options, part) : new Sgd(module, recipe, options, part)
}

// 53 bits of (seed, step, call): three rounds of the finalizer of splitmix64.
function seedOf(...parts: number[]): number {
  const bits = (x: bigint) => BigInt.asUintN(64, x)
  const mixed = parts.reduce((state, part) => {
    let x = bits((state ^ BigInt(part)) + 0x9e3779b97f4a7c15n)
    x = bits((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n)
    x = bits((x ^ (x >> 27n)) * 0x94d049bb133111ebn)
    return x ^ (x >> 31n)
  }, 0n)
  return Number(mixed >> 11n)
}

function copyOf(tensor: Tensor, format: 'f32' | 'bf16' = 'f32'): Tensor {
  const copy = native.convert(tensor.handle, null, format)
  return Tensor.own(copy)
}

// f32 copies of what training goes on from, and of what forward reads.
function valuesOf({ param: { tensor }, master, lost }: Slot): { kept: Tensor; read: Tensor } {
  return scope(() => {
    const kept = copyOf(master ?? tensor)
    if (lost) native.add_into(kept.handle, lost.handle)
    return { kept, read: copyOf(tensor.format === 'bf16x2' ? copyOf(tensor, 'bf16') : tensor) }
  })
}

function held(handle: number): Tensor {
  native.retag(handle, 'state')
  const tensor = Tensor.own(handle).keep()
  tensor.persistent = true
  return tensor
}

function zeroState(shape: readonly number[], { device }: Tensor, format: Format): Tensor {
  const zeros = Tensor.zeros(shape, { device })
  const state = held(native.convert(zeros.handle, null, format as 'f32'))
  zeros.dispose()
  return state
}
