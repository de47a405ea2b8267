// Keys and values of a sequence that grows: what attention needs of the rows before, so that each row is computed once.
import * as ops from './ops.ts'
import { type Device, Tensor } from './tensor.ts'

/** Sizes of one attention, as a cache needs them. */
export interface CachedSizes {
  heads: number
  kvHeads: number
  headDim: number
  rotation: ops.Rotation | null
  /** A row sees those less than `window` rows away (0: all). */
  window?: number
}

export class KeyValues implements Disposable {
  /** Rows that it can hold. */
  readonly capacity: number
  /** Rows that are in it. */
  rows = 0
  readonly #device: Device
  readonly #caches = new Map<object, Tensor>()
  #table: { first: number; tensor: Tensor } | null = null

  constructor(capacity: number, device: Device) {
    this.capacity = capacity
    this.#device = device
  }

  /** Attention of new rows qkv [M, (H + 2J)·D], which RoPE turns in place, for `layer` → [M, H·D]. */
  attend(layer: object, qkv: Tensor, sizes: CachedSizes): Tensor {
    const { kvHeads, headDim, rotation, window = 0 } = sizes
    let cache = this.#caches.get(layer)
    if (!cache) {
      const format = qkv.format === 'f32' ? 'f32' : 'bf16'
      cache = Tensor.zeros([this.capacity, 2 * kvHeads * headDim], { format, device: this.#device }).keep()
      this.#caches.set(layer, cache)
    }
    const rope = rotation ? this.#turns(qkv.shape[0] as number, headDim, rotation) : null
    return ops.attentionCached(qkv, cache, { ...sizes, rope, window, first: this.rows })
  }

  /** Takes the rows of a pass over all layers into account. */
  advance(rows: number): void {
    this.rows += rows
    this.#table?.tensor.dispose()
    this.#table = null
  }

  dispose(): void {
    this.advance(0)
    for (const cache of this.#caches.values()) cache.dispose()
    this.#caches.clear()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  // The layers of a model share one rotation.
  #turns(rows: number, headDim: number, rotation: ops.Rotation): Tensor {
    const known = this.#table
    if (known?.first === this.rows && known.tensor.shape[0] === rows && known.tensor.shape[1] === headDim)
      return known.tensor
    this.advance(0)
    const tensor = ops.ropeTable(rows, headDim, rotation, this.#device, this.rows).keep()
    this.#table = { first: this.rows, tensor }
    return tensor
  }
}
