// Delayed scaling: the scale of a `/t` tensor follows from the magnitudes that its place in the model saw in steps before.
import { CoatError, native } from './native.ts'
import type { DelayedScaling } from './recipes.ts'
import { type Device, type FloatFormat, Tensor } from './tensor.ts'

/**
 * The scale of one place in a model: of an input, a weight or a gradient of one product. Within a step it stays; `advance()`
 * makes the next one of what was seen, on the device. Until a first step was seen tensors have the scales that they measure.
 */
export class DelayedScale implements Disposable {
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
    if (format !== 'e4m3/t' && format !== 'e5m2/t')
      throw new CoatError(
        `DelayedScale: format is '${format}' and must be 'e4m3/t' or 'e5m2/t'`,
        'format',
        'DelayedScale',
        'format',
      )
    this.name = name
    this.format = format
    this.scaling = scaling
    this.history = placed(Tensor.zeros([scaling.history], { device }))
    this.scale = placed(Tensor.from([1], [1], { device }))
  }

  /** Has x take this scale when it is quantized, and, if `observed`, remembers its largest magnitude for the next steps. */
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

function placed(tensor: Tensor): Tensor {
  native.retag(tensor.handle, 'scratch')
  tensor.persistent = true
  return tensor.keep()
}
