// What an update was meant to change, and how much of that the formats of parameters kept (Collage, arXiv 2405.03637, section 4).

/** How much of an update arrived, by values before and after. */
export interface UpdateShare {
  /** Effective descent quality: the inner product of the intended and the effective change, by the norm of the intended. */
  edq: number
  /** `edq` by the norm of the intended change: 1 when nothing is lost. */
  ratio: number
  /** Percent of the elements that were meant to change and did not. */
  imprecision: number
}

/** Of what training goes on from (masters, remainders and what was lost included), and of what forward reads alone. */
export interface UpdateQuality {
  kept: UpdateShare
  read: UpdateShare
}

/** Values of one parameter, f32 each, around an update. */
export interface UpdateValues {
  kept: { before: Float32Array; after: Float32Array }
  read: { before: Float32Array; after: Float32Array }
  /** `kept.before` after the same update in FP32, moments included. */
  intended: Float32Array
}

// Sums over elements: products and squares first, so that parts of a model add up.
class Sums {
  product = 0
  square = 0
  lost = 0
  count = 0

  add(before: Float32Array, intended: Float32Array, from: Float32Array, to: Float32Array): void {
    this.count += before.length
    for (let i = 0; i < before.length; i++) {
      const wanted = (intended[i] as number) - (before[i] as number)
      const done = (to[i] as number) - (from[i] as number)
      this.product += wanted * done
      this.square += wanted * wanted
      if (wanted !== 0 && done === 0) this.lost += 1
    }
  }

  get share(): UpdateShare {
    const norm = Math.sqrt(this.square)
    return {
      edq: norm > 0 ? this.product / norm : 0,
      ratio: norm > 0 ? this.product / this.square : 1,
      imprecision: this.count > 0 ? (100 * this.lost) / this.count : 0,
    }
  }
}

/** The quality of an update of several parameters together. */
export class UpdateSums {
  #kept = new Sums()
  #read = new Sums()

  add({ kept, read, intended }: UpdateValues): void {
    this.#kept.add(kept.before, intended, kept.before, kept.after)
    this.#read.add(kept.before, intended, read.before, read.after)
  }

  get quality(): UpdateQuality {
    return { kept: this.#kept.share, read: this.#read.share }
  }
}
