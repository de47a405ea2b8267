// Modules: parameters, and the layers of a decoder built from them after a recipe.
import { layerRecipe, matcherOf, type RecipeChange, recipe } from './axes.ts'
import type { KeyValues } from './cache.ts'
import { roundInto } from './emulate.ts'
import { CoatError, native } from './native.ts'
import * as ops from './ops.ts'
import type { Arithmetic, Recipe, RecipeName } from './recipes.ts'
import { DelayedScale, placedScales, rounded } from './scaler.ts'
import { addGradient, retained, Tape } from './tape.ts'
import { type Device, type DeviceName, device, type GradientSink, isScaled, scope, Tensor } from './tensor.ts'

/** What building a module needs to know. */
export interface Build {
  recipe: Recipe
  /** The block that is built, for recipes whose layers differ. */
  layer: string | null
  device: Device
  /** Seed of the initial values: a parameter's own stream comes from it and the parameter's name. */
  seed: number
}

export function build(options: {
  recipe: RecipeName | Recipe | RecipeChange
  device?: Device | DeviceName
  seed?: number
}): Build {
  const seed = options.seed ?? 0
  if (!Number.isSafeInteger(seed) || seed < 0)
    throw new CoatError(`seed is ${seed} and must be an integer of at least 0`, 'value', 'build', 'seed')
  return { recipe: recipe(options.recipe), layer: null, device: device(options.device ?? 'cpu'), seed }
}

/** A named part of a fused parameter: rows [from, to) of the tensor. */
export interface Part {
  name: string
  rows: readonly [number, number]
}

export interface ParamOptions {
  shape: readonly number[]
  format: Recipe['param']
  /** Format of the gradient when it is whole; by default that in which it was made. */
  grad?: Recipe['dw']
  /** Standard deviation of normal initial values, or one value for all. */
  init: { std: number } | { value: number }
  /** Whether weight decay applies. */
  decay: boolean
  parts?: readonly Part[]
}

/** A trained tensor and its gradient. Fused ones (q|k|v, gate|up) carry the names of their parts as checkpoints have them. */
export class Param implements GradientSink, Disposable {
  readonly name: string
  /** The block that it is a part of. */
  readonly layer: string | null
  readonly tensor: Tensor
  readonly decay: boolean
  readonly parts: readonly Part[]
  readonly gradFormat: Recipe['dw'] | null
  /** What its values are rounded to where the recipe emulates that. */
  readonly arithmetic: Arithmetic | null
  grad: Tensor | null = null
  /** How a gradient in `gradFormat` is scaled: by the largest of its values, or by a power of two as FP8-LM does. */
  gradScale: 'exact' | 'pow2'
  /** Called in backward when `grad` is whole and the tensor may change. */
  onComplete: (() => void) | null = null

  constructor(build: Build, name: string, options: ParamOptions) {
    this.name = name
    this.layer = build.layer
    this.decay = options.decay
    const { shape, init, format } = options
    this.parts = options.parts ?? [{ name, rows: [0, shape[0] as number] }]
    this.gradFormat = options.grad ?? null
    this.gradScale = build.recipe.scale === 'pow2' ? 'pow2' : 'exact'
    this.tensor = scope(() => {
      if ('value' in init)
        return Tensor.from(new Float32Array(shape.reduce((a, b) => a * b, 1)).fill(init.value), shape, {
          format,
          device: build.device,
        }).keep()
      const [rows, cols] = shape as [number, number]
      const drawn = format === 'bf16' ? format : 'f32'
      const values = Tensor.own(
        native.random_normal(drawn, rows, cols, 0, init.std, seedOf(build.seed, name), build.device.kind),
      )
      // one scale is a power of two, as the optimizer leaves it
      return (drawn === format ? values : rounded(values, format, 'pow2')).keep()
    })
    this.arithmetic = shape.length === 2 ? (build.recipe.emulated?.update ?? null) : null
    this.#round()
    native.retag(this.tensor.handle, 'param')
    this.tensor.sink = this
    this.tensor.requiresGrad = true
    this.tensor.persistent = true
    this.tensor.keepsScale = true
  }

  /** Whether its name, or those of its parts, are like the pattern. */
  named(pattern: string | RegExp): 'wholly' | 'partly' | 'not' {
    const like = this.partsLike(pattern).length
    return like === this.parts.length ? 'wholly' : like > 0 ? 'partly' : 'not'
  }

  /** Names of its parts that are like the pattern; all of them where its own name is. */
  partsLike(pattern: string | RegExp): string[] {
    const matcher = typeof pattern === 'string' ? matcherOf(pattern) : pattern
    const names = this.parts.map(({ name }) => name)
    return matcher.test(this.name) ? names : names.filter((name) => matcher.test(name))
  }

  /** A frozen parameter gets neither gradient nor optimizer state. */
  get frozen(): boolean {
    return !this.tensor.requiresGrad
  }
  set frozen(value: boolean) {
    this.tensor.requiresGrad = !value
  }

  accumulate(gradient: Tensor): void {
    if (this.grad && isScaled(this.grad.format))
      this.#become(Tensor.own(native.convert(this.grad.handle, null, 'bf16')))
    this.grad = addGradient(this.grad, gradient)
    native.retag(this.grad.handle, 'grad')
  }

  complete(): void {
    const { gradFormat, grad } = this
    if (grad && gradFormat && grad.format !== gradFormat)
      scope(() => this.#become(rounded(grad, gradFormat, this.gradScale)))
    this.onComplete?.()
  }

  #become(grad: Tensor): void {
    this.dropGrad()
    this.grad = retained(grad)
    native.retag(grad.handle, 'grad')
  }

  get held(): Tensor | null {
    return this.grad?.exclusive && !isScaled(this.grad.format) ? this.grad : null
  }

  dropGrad(): void {
    this.grad?.release()
    this.grad = null
  }

  /** Replaces the values by those of f32 `values` [the parameter's shape], rounded to its format. */
  write(values: Float32Array): void {
    const { shape, device, format, handle } = this.tensor
    if (format === 'f32') native.write(handle, values)
    else scope(() => native.assign(handle, rounded(Tensor.from(values, shape, { device }), format, 'pow2').handle))
    this.#round()
  }

  #round(): void {
    if (this.arithmetic) roundInto(this.tensor.handle, this.arithmetic, 0)
  }

  dispose(): void {
    this.dropGrad()
    this.tensor.dispose()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }
}

// FNV-1a over the name, mixed with the seed: 52 bits, so that it stays an exact number.
function seedOf(seed: number, name: string): number {
  let low = 0x811c9dc5 ^ seed
  let high = 0x9747b28c ^ Math.floor(seed / 2 ** 32)
  for (let i = 0; i < name.length; i++) {
    low = Math.imul(low ^ name.charCodeAt(i), 0x01000193)
    high = Math.imul(high ^ name.charCodeAt(i), 0x85ebca6b) ^ (low >>> 13)
  }
  return (low >>> 0) + (high & 0xfffff) * 2 ** 32
}

/** Something with parameters. Its fields that are parameters, modules or arrays of modules are found by themselves. */
export abstract class Module implements Disposable {
  /** All parameters below this module; `pattern` picks by name, `*` standing for anything. */
  parameters(pattern = '*'): Param[] {
    const matcher = matcherOf(pattern)
    return [...this.#walk()].filter((param) => param.named(matcher) !== 'not')
  }

  *#walk(): Generator<Param> {
    for (const item of this.#children())
      if (item instanceof Param) yield item
      else yield* item.#walk()
  }
  *#children(): Generator<Param | Module> {
    for (const value of Object.values(this))
      for (const item of Array.isArray(value) ? value : [value])
        if (item instanceof Param || item instanceof Module) yield item
  }

  /** The scales of steps before that products below this module have, if the recipe delays them. */
  delayedScales(): DelayedScale[] {
    return [...this.#children()].flatMap((item) => (item instanceof Module ? item.delayedScales() : []))
  }

  dispose(): void {
    for (const item of this.#children()) item.dispose()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }
}

export interface LinearOptions {
  inputs: number
  outputs: number
  bias?: boolean
  /** Standard deviation of the initial weight. */
  std?: number
  /** Format of the result; the stream's by default. */
  result?: ops.LinearFormats['y']
  /** Keep operands in the stream's format whatever the recipe says: the head. */
  plain?: boolean
  parts?: readonly Part[]
  biasParts?: readonly Part[]
  /** Whether the gradient of the result has a scale for each part of the weight. */
  splitGradient?: boolean
}

/** y = x wᵀ + b: x [M, inputs] → [M, outputs]. */
export class Linear extends Module {
  readonly weight: Param
  readonly bias: Param | null
  readonly formats: ops.LinearFormats
  readonly scales: ops.LinearScales | null

  constructor(build: Build, name: string, options: LinearOptions) {
    super()
    const { recipe } = build
    const { inputs, outputs, std = 0.02 } = options
    const { emulated } = recipe
    const placed = emulated && !options.plain ? { emulated: { ...emulated, seed: seedOf(build.seed, name) } } : {}
    const split = options.splitGradient && options.parts ? { dyParts: options.parts.map(({ rows }) => rows) } : {}
    this.formats = { ...linearFormats(recipe, options), ...placed, ...split }
    this.scales = options.plain ? null : placedScales(recipe.scale, name, this.formats, build.device)
    this.weight = new Param(build, `${name}.weight`, {
      ...matrixParam(recipe, outputs, inputs, std),
      ...(options.parts ? { parts: options.parts } : {}),
    })
    this.bias = options.bias
      ? new Param(build, `${name}.bias`, {
          shape: [outputs],
          format: plainParam(recipe),
          init: { value: 0 },
          decay: false,
          ...(options.biasParts ? { parts: options.biasParts } : {}),
        })
      : null
  }

  forward(x: Tensor, turn: ops.HeadTurn | null = null): Tensor {
    return ops.linear(x, this.weight.tensor, this.bias?.tensor ?? null, this.formats, this.scales, turn)
  }

  /** forward(swiglu(x)): x [M, 2·inputs] → [M, outputs]; consumes x. */
  afterSwiglu(x: Tensor, activation: ops.ActivationFormats): Tensor {
    const { weight, bias, formats, scales } = this
    return ops.swigluLinear(x, weight.tensor, bias?.tensor ?? null, activation, formats, scales)
  }

  override delayedScales(): DelayedScale[] {
    return Object.values(this.scales ?? {}).filter((scale) => scale instanceof DelayedScale)
  }

  override dispose(): void {
    for (const scale of this.delayedScales()) scale.dispose()
    super.dispose()
  }
}

/** A matrix [rows, columns] in the formats of a recipe. */
export function matrixParam({ param, dw }: Recipe, rows: number, columns: number, std: number): ParamOptions {
  const grad = isScaled(dw) ? { grad: dw } : {}
  return { shape: [rows, columns], format: param, init: { std }, decay: true, ...grad }
}

function plainParam({ param }: Recipe): 'f32' | 'bf16' {
  return param === 'bf16' ? 'bf16' : 'f32'
}

/** The format in which gradients of parameters are made. */
export function gradientOf({ dw }: Recipe): 'f32' | 'bf16' {
  return dw === 'f32' ? 'f32' : 'bf16'
}

export function linearFormats(
  recipe: Recipe,
  options: { plain?: boolean; result?: ops.LinearFormats['y'] },
): ops.LinearFormats {
  const { stream, x, w, dy, dwFrom, accumulate } = recipe
  const exact = dwFrom === 'stream' && isScaled(x) ? ({ wAcross: 'e4m3/t', dwFrom: stream } as const) : {}
  const sums = accumulate === 'split' ? {} : { accumulate }
  const operands = options.plain ? { x: stream, w: stream, dy: stream } : { x, w, dy, ...exact, ...sums }
  return { ...operands, y: options.result ?? stream, dx: stream, dw: gradientOf(recipe) }
}

// What nonlinear ops read and keep, and what they write: the operand of the product that follows, where they can make it with
// the scale that they measure.
function nonlinear({ saved, flow, x, scale, stream }: Recipe): Pick<ops.NormFormats, 'x' | 'saved' | 'y'> {
  return { x: flow === 'save' ? stream : saved, saved, y: x === 'e4m3/t' && scale === 'current' ? x : stream }
}

function normFormats(recipe: Recipe, plain: boolean): ops.NormFormats {
  const { stream } = recipe
  const dw = gradientOf(recipe)
  const read = plain ? { x: stream, saved: stream, y: stream } : nonlinear(recipe)
  return { ...read, dx: stream, dw }
}

/** RMSNorm over rows [M, size]; the weight is f32. `plain`: input and result keep the stream's format, as before the head. */
export class RMSNorm extends Module {
  readonly weight: Param
  readonly eps: number
  readonly formats: ops.NormFormats

  constructor(build: Build, name: string, options: { size: number; eps: number; plain?: boolean }) {
    super()
    this.eps = options.eps
    this.formats = normFormats(build.recipe, options.plain ?? false)
    this.weight = new Param(build, `${name}.weight`, normParam(options.size, 1))
  }

  get reader(): ops.Reader {
    return { formats: this.formats, rms: { w: this.weight.tensor, eps: this.eps } }
  }

  forward(x: Tensor): Tensor {
    return ops.rmsnorm(x, this.weight.tensor, this.eps, this.formats)
  }
}

/** LayerNorm over rows [M, size]; without weight and bias when `affine` is false (OLMo). */
export class LayerNorm extends Module {
  readonly weight: Param | null
  readonly bias: Param | null
  readonly eps: number
  readonly formats: ops.NormFormats

  constructor(build: Build, name: string, options: { size: number; eps: number; affine?: boolean; plain?: boolean }) {
    super()
    const affine = options.affine ?? true
    this.eps = options.eps
    this.formats = normFormats(build.recipe, options.plain ?? false)
    this.weight = affine ? new Param(build, `${name}.weight`, normParam(options.size, 1)) : null
    this.bias = affine ? new Param(build, `${name}.bias`, normParam(options.size, 0)) : null
  }

  get reader(): ops.Reader {
    return { formats: this.formats }
  }

  forward(x: Tensor): Tensor {
    return ops.layernorm(x, this.weight?.tensor ?? null, this.bias?.tensor ?? null, this.eps, this.formats)
  }
}

function normParam(size: number, value: number): ParamOptions {
  return { shape: [size], format: 'f32', init: { value }, decay: false }
}

export interface AttentionSizes {
  hidden: number
  heads: number
  kvHeads: number
  headDim: number
  /** Biases on q, k and v (Qwen2). */
  qkvBias?: boolean
  /** Bias on the output projection. */
  outputBias?: boolean
  causal?: boolean
  /** A row sees those less than `window` rows away (default 0: all). */
  window?: number
  /** Base of the rotation, or null for none. */
  ropeTheta: number | null
  ropeScaling?: ops.RopeScaling | null
  /** Standard deviation of the initial output projection. */
  outputStd?: number
}

/** Attention with one fused q|k|v projection: x [B·T, hidden] → [B·T, hidden]. */
export class Attention extends Module {
  readonly qkv: Linear
  readonly output: Linear
  readonly sizes: AttentionSizes
  readonly stream: 'f32' | 'bf16'
  /** Format of what is kept for backward. */
  readonly saved: 'f32' | 'bf16' | 'e4m3/g16' | 'i8/g16'
  readonly device: Device
  #rope: { sequence: number; table: Tensor } | null = null

  constructor(build: Build, name: string, sizes: AttentionSizes) {
    super()
    const { hidden, heads, kvHeads, headDim } = sizes
    this.sizes = sizes
    this.stream = build.recipe.stream
    this.saved = build.recipe.attention === 'stream' ? this.stream : build.recipe.attention
    this.device = build.device
    const q = heads * headDim
    const kv = kvHeads * headDim
    const parts = (kind: string): Part[] => [
      { name: `${name}.q_proj.${kind}`, rows: [0, q] },
      { name: `${name}.k_proj.${kind}`, rows: [q, q + kv] },
      { name: `${name}.v_proj.${kind}`, rows: [q + kv, q + 2 * kv] },
    ]
    this.qkv = new Linear(build, `${name}.qkv_proj`, {
      inputs: hidden,
      outputs: q + 2 * kv,
      bias: sizes.qkvBias ?? false,
      parts: parts('weight'),
      biasParts: parts('bias'),
      splitGradient: build.recipe.qkvGrad === 'split',
    })
    this.output = new Linear(build, `${name}.o_proj`, {
      inputs: q,
      outputs: hidden,
      bias: sizes.outputBias ?? false,
      ...(sizes.outputStd === undefined ? {} : { std: sizes.outputStd }),
    })
  }

  /** `sequence`: rows T of one; `starts` i32 [B·T] (`ops.documentStarts`); `past`: of one sequence before x, no gradients. */
  forward(x: Tensor, sequence: number, starts: Tensor | null = null, past: KeyValues | null = null): Tensor {
    const { heads, kvHeads, headDim, causal = true, window = 0, ropeTheta: theta, ropeScaling } = this.sizes
    if (past) {
      const rotation = theta === null ? null : { theta, scaling: ropeScaling ?? null }
      return this.output.forward(past.attend(this, this.qkv.forward(x), { heads, kvHeads, headDim, rotation, window }))
    }
    const rope = this.#table(sequence)
    const turn = rope && ops.turnsHeads(this.qkv.formats) ? { rope, starts, heads, kvHeads, headDim } : null
    const mixed = ops.attention(this.qkv.forward(x, turn), {
      sequence,
      heads,
      kvHeads,
      headDim,
      causal,
      rope,
      turned: turn !== null,
      starts,
      window,
      saved: this.saved,
      measured: this.output.formats.x === 'e4m3/t',
      dx: this.stream,
    })
    return this.output.forward(mixed)
  }

  #table(sequence: number): Tensor | null {
    const { ropeTheta: theta, ropeScaling: scaling = null } = this.sizes
    if (theta === null) return null
    if (this.#rope?.sequence !== sequence) {
      this.#rope?.table.dispose()
      const table = ops.ropeTable(sequence, this.sizes.headDim, { theta, scaling }, this.device).keep()
      table.persistent = true
      native.retag(table.handle, 'scratch')
      this.#rope = { sequence, table }
    }
    return this.#rope.table
  }

  override dispose(): void {
    this.#rope?.table.dispose()
    this.#rope = null
    super.dispose()
  }
}

export interface MLPSizes {
  hidden: number
  inner: number
  activation: 'swiglu' | 'gelu'
  bias?: boolean
  /** Standard deviation of the initial output projection. */
  outputStd?: number
}

/** Two projections around an activation, SwiGLU with one fused gate|up projection or GELU: x [M, hidden] → [M, hidden]. */
export class MLP extends Module {
  readonly input: Linear
  readonly output: Linear
  readonly activation: MLPSizes['activation']
  readonly formats: ops.ActivationFormats

  constructor(build: Build, name: string, sizes: MLPSizes) {
    super()
    const { hidden, inner } = sizes
    const read = nonlinear(build.recipe)
    const gated = sizes.activation === 'swiglu'
    this.activation = sizes.activation
    const { dy, scale, stream } = build.recipe
    this.formats = { ...read, dx: dy === 'e5m2/t' && scale === 'current' ? dy : stream }
    const parts = (kind: string): Part[] =>
      gated
        ? [
            { name: `${name}.gate_proj.${kind}`, rows: [0, inner] },
            { name: `${name}.up_proj.${kind}`, rows: [inner, 2 * inner] },
          ]
        : [{ name: `${name}.up_proj.${kind}`, rows: [0, inner] }]
    this.input = new Linear(build, gated ? `${name}.gate_up_proj` : `${name}.up_proj`, {
      inputs: hidden,
      outputs: gated ? 2 * inner : inner,
      bias: sizes.bias ?? false,
      result: read.x,
      parts: parts('weight'),
      biasParts: parts('bias'),
    })
    this.output = new Linear(build, `${name}.down_proj`, {
      inputs: inner,
      outputs: hidden,
      bias: sizes.bias ?? false,
      ...(sizes.outputStd === undefined ? {} : { std: sizes.outputStd }),
    })
  }

  forward(x: Tensor): Tensor {
    // the wide input of the activation is freed before the next product
    const { input, output, formats } = this
    if (this.activation === 'gelu') return output.forward(scope(() => ops.gelu(input.forward(x), formats)))
    return scope(() => output.afterSwiglu(input.forward(x), formats))
  }
}

export interface BlockSizes extends AttentionSizes, MLPSizes {
  norm: 'rmsnorm' | 'layernorm'
  /** Whether LayerNorm has weight and bias. */
  affine?: boolean
  eps: number
  /** Names of the two norms in a checkpoint. */
  normNames: readonly [string, string]
}

/** A pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x)): [B·T, hidden] → [B·T, hidden]. */
export class Block extends Module {
  readonly attentionNorm: RMSNorm | LayerNorm
  readonly attention: Attention
  readonly mlpNorm: RMSNorm | LayerNorm
  readonly mlp: MLP
  readonly stream: 'f32' | 'bf16'

  constructor(model: Build, name: string, sizes: BlockSizes) {
    super()
    const build = { ...model, recipe: layerRecipe(model.recipe, name), layer: name }
    this.stream = build.recipe.stream
    this.attentionNorm = normOf(build, `${name}.${sizes.normNames[0]}`, sizes)
    this.attention = new Attention(build, `${name}.self_attn`, sizes)
    this.mlpNorm = normOf(build, `${name}.${sizes.normNames[1]}`, sizes)
    this.mlp = new MLP(build, `${name}.mlp`, sizes)
  }

  /** `next`: the norm that will read the result, if it is known. What it asks for is then made with the result. */
  forward(
    x: Tensor,
    sequence: number,
    starts: Tensor | null = null,
    next: RMSNorm | LayerNorm | null = null,
    past: KeyValues | null = null,
  ): Tensor {
    return Tape.layer(x, starts ? [starts] : [], () => {
      const change = () => this.attention.forward(this.attentionNorm.forward(x), sequence, starts, past)
      const middle = scope(() => ops.add(x, change(), this.stream, this.mlpNorm.reader))
      const reader = next?.reader ?? { formats: this.attentionNorm.formats }
      const y = scope(() => ops.add(middle, this.mlp.forward(this.mlpNorm.forward(middle)), this.stream, reader))
      middle.dispose()
      return y
    })
  }
}

/** The norm that a model's sizes ask for. */
export function normOf(
  build: Build,
  name: string,
  sizes: { hidden: number; norm: 'rmsnorm' | 'layernorm'; affine?: boolean; eps: number; plain?: boolean },
): RMSNorm | LayerNorm {
  const options = { size: sizes.hidden, eps: sizes.eps, plain: sizes.plain ?? false }
  return sizes.norm === 'rmsnorm'
    ? new RMSNorm(build, name, options)
    : new LayerNorm(build, name, { ...options, affine: sizes.affine ?? true })
}

/** Modules one after the other; each input is freed once the next module has read it. */
export class Sequential extends Module {
  readonly modules: readonly (Module & { forward(x: Tensor): Tensor })[]
  constructor(modules: readonly (Module & { forward(x: Tensor): Tensor })[]) {
    super()
    this.modules = modules
  }
  forward(x: Tensor): Tensor {
    let y = x
    for (const module of this.modules) {
      const next = scope(() => module.forward(y))
      if (y !== x) y.dispose()
      y = next
    }
    return y
  }
}
