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
}

const defaults: Required<AdamWOptions> = { lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8, weightDecay: 0.1 }

/** Checked options with defaults filled in; for `new Trainer(model, { optimizer: adamw({ … }) })`. */
export function adamw(options: AdamWOptions = {}): Required<AdamWOptions> {
  for (const key of Object.keys(options))
    if (!Object.hasOwn(defaults, key))
      throw new CoatError(
        `adamw: option '${key}' is unknown; the options are ${Object.keys(defaults).join(', ')}`,
        'option',
        'adamw',
        key,
      )
  const full = { ...defaults, ...options }
  const demand = (name: string, value: number, holds: boolean, rule: string) => {
    if (!holds) throw new CoatError(`adamw: ${name} is ${value} and must be ${rule}`, 'value', 'adamw', name)
  }
  demand('lr', full.lr, Number.isFinite(full.lr) && full.lr >= 0, 'a finite number of at least 0')
  demand('eps', full.eps, full.eps > 0, 'greater than 0')
  demand('weightDecay', full.weightDecay, full.weightDecay >= 0, 'at least 0')
  full.betas.forEach((beta, i) => {
    demand(`betas[${i}]`, beta, beta >= 0 && beta < 1, 'at least 0 and less than 1')
  })
  return full
}

interface Slot {
  param: Param
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
    this.#slots = this.params.map((param) =>
      scope(() => ({
        param,
        master:
          recipe.master && param.tensor.format === 'bf16'
            ? held(native.convert(param.tensor.handle, null, 'f32'))
            : null,
        m: zeroState(param.tensor, recipe.m),
        v: zeroState(param.tensor, recipe.v),
      })),
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
    const { betas, eps, weightDecay } = this.options
    const t = this.steps + 1
    // 1 - beta and 1 - beta^t in float64: in f32 they lose most digits for beta near 1
    const [beta1, beta2] = betas
    const correct1 = 1 - beta1 ** t
    const correct2 = Math.sqrt(1 - beta2 ** t)
    for (const decay of [true, false])
      for (const withMaster of [true, false]) {
        const slots = this.#trained().filter(
          ({ param, master }) => param.decay === decay && (master !== null) === withMaster,
        )
        if (slots.length === 0) continue
        native.adamw(
          slots.map(({ param }) => param.tensor.handle),
          withMaster ? slots.map(({ master }) => (master as Tensor).handle) : null,
          slots.map(({ param }) => (param.grad as Tensor).handle),
          slots.map(({ m }) => m.handle),
          slots.map(({ v }) => v.handle),
          clip?.handle ?? null,
          lr,
          beta1,
          1 - beta1,
          beta2,
          1 - beta2,
          eps,
          decay ? weightDecay : 0,
          correct1,
          correct2,
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
