// AdamW: which parameters with which formats, one native call for many tensors; clipping stays on the device.
import type { Module, Param } from './modules.ts'
import { CoatError, native } from './native.ts'
import type { Recipe } from './recipes.ts'
import { type Format, scope, Tensor } from './tensor.ts'

export interface AdamWOptions {
  /** Learning rate, times the schedule's factor (default 1e-3). */
  lr?: number
  /** Decay of the first and the second moment (default 0.9, 0.95). */
  betas?: readonly [number, number]
  /** Added to sqrt(v) after its bias correction (default 1e-8). */
  eps?: number
  /** Decoupled decay of matrices and embeddings (default 0.1); norms, biases and all 1-D tensors have none. */
  weightDecay?: number
  /** Parameters with values of their own; where several match, the last that has a value gives it. */
  parameters?: readonly AdamWOverride[]
  /** Take formats of v that store small values as 0, after which one step can be thousands of learning rates (default no). */
  allowUnsafe?: boolean
}

/** What the parameters that `match` names do differently. */
export interface AdamWOverride {
  /** A name as checkpoints have it; `*` stands for anything: `model.embed_tokens.*`. */
  match: string
  /** Learning rate, times the schedule's factor. */
  lr?: number
  betas?: readonly [number, number]
  eps?: number
  /** Decoupled decay, also of what has none by default. */
  weightDecay?: number
  /** Format of the first moment; the pair m, v must be one that the optimizer has. */
  m?: Recipe['m']
  /** Format of the second moment. */
  v?: Recipe['v']
}

const defaults: Required<AdamWOptions> = {
  lr: 1e-3,
  betas: [0.9, 0.95],
  eps: 1e-8,
  weightDecay: 0.1,
  parameters: [],
  allowUnsafe: false,
}
const overrides = ['match', 'lr', 'betas', 'eps', 'weightDecay', 'm', 'v']

/** Checked options with defaults filled in; for `new Trainer(model, { optimizer: adamw({ … }) })`. */
export function adamw(options: AdamWOptions = {}): Required<AdamWOptions> {
  checkNames(options, Object.keys(defaults), '')
  const full = { ...defaults, ...options }
  checkNumbers(full, '')
  full.parameters.forEach((override, i) => {
    const where = `parameters[${i}].`
    checkNames(override, overrides, where)
    if (typeof override.match !== 'string')
      throw new CoatError(
        `adamw: ${where}match is ${override.match} and must be the name of parameters`,
        'type',
        'adamw',
        `${where}match`,
      )
    checkNumbers(override, where)
    if (override.lr !== undefined && full.lr === 0)
      throw new CoatError(
        `adamw: ${where}lr is ${override.lr} and lr is 0, which must be greater: the schedule scales both alike`,
        'value',
        'adamw',
        `${where}lr`,
      )
  })
  return full
}

function checkNames(options: object, names: readonly string[], where: string): void {
  for (const key of Object.keys(options))
    if (!names.includes(key))
      throw new CoatError(
        `adamw: option '${where}${key}' is unknown; the options are ${names.join(', ')}`,
        'option',
        'adamw',
        `${where}${key}`,
      )
}

function checkNumbers({ lr, betas, eps, weightDecay }: Omit<AdamWOptions, 'parameters'>, where: string): void {
  const demand = (name: string, value: number | undefined, holds: (value: number) => boolean, rule: string) => {
    if (value !== undefined && !holds(value))
      throw new CoatError(`adamw: ${where}${name} is ${value} and must be ${rule}`, 'value', 'adamw', `${where}${name}`)
  }
  demand('lr', lr, (value) => Number.isFinite(value) && value >= 0, 'a finite number of at least 0')
  demand('eps', eps, (value) => value > 0, 'greater than 0')
  demand('weightDecay', weightDecay, (value) => value >= 0, 'at least 0')
  betas?.forEach((beta, i) => {
    demand(`betas[${i}]`, beta, (value) => value >= 0 && value < 1, 'at least 0 and less than 1')
  })
}

/** The numbers of one native call; parameters that share them go together. */
interface Group {
  /** Learning rate as a part of the optimizer's. */
  share: number
  betas: readonly [number, number]
  eps: number
  decay: number
}

interface Slot {
  param: Param
  group: Group
  /** Equal for slots that one native call takes together. */
  call: string
  master: Tensor | null
  m: Tensor
  v: Tensor
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

/** AdamW over the parameters of a module that are not frozen, with the state formats of a recipe. */
export class AdamW implements Disposable {
  readonly options: Required<AdamWOptions>
  readonly params: readonly Param[]
  /** Steps done: t of the bias correction. Skipped steps do not count. */
  steps = 0
  #slots: Slot[]

  constructor(module: Module, recipe: Pick<Recipe, 'master' | 'm' | 'v'>, options: AdamWOptions = {}) {
    this.options = adamw(options)
    this.params = module.parameters().filter((param) => !param.frozen)
    if (this.params.length === 0)
      throw new CoatError('adamw: the module has no parameter to train', 'value', 'adamw', 'module')
    const { lr, parameters } = this.options
    const matched = parameters.map(({ match }, i) => {
      const named = new Set(module.parameters(match))
      if (named.size === 0)
        throw new CoatError(
          `adamw: parameters[${i}].match is '${match}', which no parameter of the module is named like`,
          'value',
          'adamw',
          `parameters[${i}].match`,
        )
      return named
    })
    const pairs = native.table().find((row) => row.name === 'adamw')?.only.combinations ?? []
    const plans = this.params.map((param) => {
      const given = parameters.filter((_, i) => matched[i]?.has(param)).flatMap((override) => Object.entries(override))
      const own: Partial<AdamWOverride> = Object.fromEntries(given.filter(([, value]) => value !== undefined))
      const all = { ...this.options, m: recipe.m, v: recipe.v, ...own }
      checkPair(param, all.m, all.v, pairs)
      if (!this.options.allowUnsafe) checkSafe(param, all.v)
      const decay = param.decay || own.weightDecay !== undefined ? all.weightDecay : 0
      const group: Group = { share: lr > 0 ? all.lr / lr : 1, betas: all.betas, eps: all.eps, decay }
      return { param, group, m: all.m, v: all.v }
    })
    this.#slots = plans.map(({ param, group, m, v }) =>
      scope(() => {
        const doubled = recipe.master !== null && param.tensor.format === 'bf16'
        return {
          param,
          group,
          call: JSON.stringify([group, doubled]),
          master: doubled ? held(native.convert(param.tensor.handle, null, 'f32')) : null,
          m: zeroState(param.tensor, m),
          v: zeroState(param.tensor, v),
        }
      }),
    )
  }

  /** Bytes of moments and masters. */
  get stateBytes(): number {
    return this.#slots.reduce((sum, { master, m, v }) => sum + (master?.bytes ?? 0) + m.bytes + v.bytes, 0)
  }

  /** The tensors of one parameter's state: moments in the recipe's format, seen as [1, n], and the master. */
  stateOf(param: Param): { master: Tensor | null; m: Tensor; v: Tensor } {
    const slot = this.#slots.find((entry) => entry.param === param)
    if (!slot) throw new CoatError(`adamw: parameter '${param.name}' is not trained`, 'value', 'adamw', 'param')
    return { master: slot.master, m: slot.m, v: slot.v }
  }

  /** Norm of the gradients, and the clip factor for `maxNorm` (0: none) that `step` applies. */
  gradNorm(maxNorm = 0): GradientNorm {
    const gradients = this.#trained().map(({ param }) => (param.grad as Tensor).handle)
    const [norm, norms, clip] = native.grad_norm(gradients, maxNorm)
    return { norm: Tensor.own(norm), norms: Tensor.own(norms), clip: Tensor.own(clip) }
  }

  /** Parameters in the order of `gradNorm().norms`. */
  get clipped(): Param[] {
    return this.#trained().map(({ param }) => param)
  }

  /**
   * One update with learning rate `lr`; nothing changes when clip says to skip. Count it with `advance()` once it is known
   * not to be skipped.
   */
  step(lr: number, clip: Tensor | null = null): void {
    const t = this.steps + 1
    const calls = new Map<string, Slot[]>()
    for (const slot of this.#trained()) {
      const together = calls.get(slot.call)
      if (together) together.push(slot)
      else calls.set(slot.call, [slot])
    }
    for (const slots of calls.values()) {
      const [{ group, master }] = slots as [Slot]
      const [beta1, beta2] = group.betas
      native.adamw(
        slots.map(({ param }) => param.tensor.handle),
        master ? slots.map(({ master }) => (master as Tensor).handle) : null,
        slots.map(({ param }) => (param.grad as Tensor).handle),
        slots.map(({ m }) => m.handle),
        slots.map(({ v }) => v.handle),
        clip?.handle ?? null,
        lr * group.share,
        beta1,
        // 1 - beta and 1 - beta^t in float64: in f32 they lose most digits for beta near 1
        1 - beta1,
        beta2,
        1 - beta2,
        group.eps,
        group.decay,
        1 - beta1 ** t,
        Math.sqrt(1 - beta2 ** t),
      )
    }
  }

  advance(): void {
    this.steps += 1
  }

  dropGrads(): void {
    for (const { param } of this.#slots) param.dropGrad()
  }

  dispose(): void {
    for (const { master, m, v } of this.#slots) for (const tensor of [master, m, v]) tensor?.dispose()
    this.#slots = []
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  #trained(): Slot[] {
    return this.#slots.filter(({ param }) => param.grad !== null)
  }
}

// The pairs of formats that the native op has.
function checkPair({ name }: Param, m: Format, v: Format, pairs: readonly (readonly (Format | null)[])[]): void {
  if (pairs.some((pair) => pair[0] === m && pair[1] === v)) return
  throw new CoatError(
    `adamw: m ${m} with v ${v}, of parameter '${name}', is not a pair of the optimizer, which has ${pairs.map((pair) => pair.join(' with ')).join(', ')}`,
    'format',
    'adamw',
    'm',
  )
}

// Without range expansion one large value of a run makes the small ones 0.
function checkSafe({ name }: Param, v: Format): void {
  if (!/^e\dm\d\/[gt]/.test(v)) return
  throw new CoatError(
    `adamw: v ${v}, of parameter '${name}', stores small second moments as 0, and the next step divides by them; take v ${v.replace(/\/.*/, '/x128')}, or set allowUnsafe`,
    'value',
    'adamw',
    'v',
  )
}

function held(handle: number): Tensor {
  native.retag(handle, 'state')
  const tensor = Tensor.own(handle).keep()
  tensor.persistent = true
  return tensor
}

// States are flat, [1, n], so that their groups go on over the ends of rows.
function zeroState({ numel, device }: Tensor, format: Format): Tensor {
  const zeros = Tensor.zeros([1, numel], { device })
  const state = held(native.convert(zeros.handle, null, format as 'f32'))
  zeros.dispose()
  return state
}
