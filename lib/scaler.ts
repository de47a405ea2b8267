// Scales of `/t` tensors that are not those of their own largest magnitude: powers of two, and delayed scaling, where they
// follow from the magnitudes that a place in the model saw in steps before.
import { CoatError, native } from './native.ts'
import type { DelayedScaling, Recipe } from './recipes.ts'
import { type Device, type FloatFormat, type Format, Tensor } from './tensor.ts'

/** Gives tensors at one place in a model the scale that they are quantized with. */
export interface PlacedScale extends Disposable {
  /** Has x take this scale when it is quantized, and, if `observed`, remembers its largest magnitude. */
  give(x: Tensor, observed: boolean): void
}

/** A copy of values in another format; its one scale in e4m3 is measured, or the power of two that is not below that. */
export function rounded(values: Tensor, format: Format, scaling: 'exact' | 'pow2'): Tensor {
  const pow2 = scaling === 'pow2' && format === 'e4m3/t'
  const scale = pow2 ? Tensor.own(native.scale_from_amax(values.amax().handle, format, scaling)) : null
  return Tensor.own(native.convert(values.handle, scale?.handle ?? null, format as 'f32'))
}

/** The power of two that is not below the scale that a tensor would measure, as FP8-LM has it. */
export class PowerOfTwoScale implements PlacedScale {
  readonly format: 'e4m3/t' | 'e5m2/t'

  constructor(format: FloatFormat) {
    this.format = perTensor(format, 'PowerOfTwoScale')
  }

  give(x: Tensor): void {
    // what is quantized has its scale
    if (x.format !== this.format) x.adoptPowerOfTwo(this.format)
  }

  [Symbol.dispose](): void {}
}

/**
 * The scale of one place in a model: of an input, a weight or a gradient of one product. Within a step it stays; `advance()`
 * makes the next one of what was seen, on the device. Until a first step was seen tensors have the scales that they measure.
 */
export class DelayedScale implements PlacedScale {
  readonly name: string
  readonly format: 'e4m3/t' | 'e5m2/t'
  readonly scaling: DelayedScaling
  /** f32 [history], of the step that goes on first. */
  readonly history: Tensor
  /** f32 [1] */
  readonly scale: Tensor
  /** Whether `scale` is of steps before. */
  ready = false
  #seen = false

  constructor(name: string, format: FloatFormat, scaling: DelayedScaling, device: Device) {
    this.name = name
    this.format = perTensor(format, 'DelayedScale')
    this.scaling = scaling
    this.history = placed(Tensor.zeros([scaling.history], { device }))
    this.scale = placed(Tensor.from([1], [1], { device }))
  }

  give(x: Tensor, observed: boolean): void {
    if (observed) {
      native.observe_amax(this.history.handle, x.amax().handle)
      this.#seen = true
    }
    if (this.ready) x.adoptScale(this.format, this.scale)
  }

  /** Ends a step: nothing changes where this place did not run in it. */
  advance(): void {
    if (!this.#seen) return
    const { pick, margin } = this.scaling
    native.scale_from_history(this.history.handle, this.scale.handle, this.format, pick, 2 ** margin)
    this.#seen = false
    this.ready = true
  }

  dispose(): void {
    this.history.dispose()
    this.scale.dispose()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }
}

/** Those of the operands of one product, after a recipe; null: the operands measure them. */
export function placedScales(
  scale: Recipe['scale'],
  name: string,
  formats: Readonly<Record<'x' | 'w' | 'dy', FloatFormat>>,
  device: Device,
): Record<'x' | 'w' | 'dy', PlacedScale> | null {
  if (scale === 'current') return null
  const of = (operand: 'x' | 'w' | 'dy') =>
    scale === 'pow2'
      ? new PowerOfTwoScale(formats[operand])
      : new DelayedScale(`${name}.${operand}`, formats[operand], scale, device)
  return { x: of('x'), w: of('w'), dy: of('dy') }
}

function perTensor(format: FloatFormat, op: string): 'e4m3/t' | 'e5m2/t' {
  if (format === 'e4m3/t' || format === 'e5m2/t') return format
  throw new CoatError(`${op}: format is '${format}' and must be 'e4m3/t' or 'e5m2/t'`, 'format', op, 'format')
}

function placed(tensor: Tensor): Tensor {
  native.retag(tensor.handle, 'scratch')
  tensor.persistent = true
  return tensor.keep()
}
