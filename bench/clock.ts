// Points in time of a device: its own clock on CUDA, the host's where ops are done when they return.
import type { Device } from '../lib/index.ts'
import { native } from '../lib/native.ts'

export class Clock {
  readonly #cuda: boolean
  constructor({ kind }: Device) {
    this.#cuda = kind === 'cuda'
  }
  /** A point that the device reaches after what was queued so far. */
  mark(): number {
    return this.#cuda ? native.mark() : performance.now()
  }
  /** Milliseconds between two points; waits for them. */
  between(from: number, to: number): number {
    return this.#cuda ? native.elapsed(from, to) : to - from
  }
  /** Ends the use of the points so far. */
  restart(): void {
    native.forgetMarks()
  }
}
