// The gradients of a step as a graph: recorded once, then run as one, so that the host does not queue op after op.
import type { Batch } from './data.ts'
import { type Inputs, inputsOf, type Scorer } from './evaluate.ts'
import type { Module, Param } from './modules.ts'
import { type Bytes, CoatError, native } from './native.ts'
import { expectStarts } from './ops.ts'
import type { GradientNorm } from './optimizer.ts'
import { scope, Tensor } from './tensor.ts'

/** Steps that a trainer does without a graph first: kernels are loaded then, and scales of steps before are there. */
export const stepsBeforeGraph = 2

/** What a graph leaves besides gradients. */
export interface Recorded {
  /** Of the micro-batches, f32 [1] each. */
  losses: readonly Tensor[]
  norm: GradientNorm
}

/** What has to be the same for a graph to fit. */
export function shapeOf(batches: readonly Batch[]): string {
  return batches.map(({ ids, sequence, starts }) => `${ids.length} ${sequence} ${starts !== undefined}`).join(', ')
}

/**
 * All micro-batches of a step and the norm of their gradients. Whatever differs from step to step comes in through tensors that
 * stay: ids, targets, document starts and the weight of the loss. Learning rate, random bits and step number belong to the
 * update, which follows as in other steps.
 */
export class StepGraph implements Disposable {
  readonly shape: string
  readonly recorded: Recorded
  readonly #inputs: readonly Inputs[]
  readonly #weight: Tensor
  readonly #graph: number
  readonly #gradients: (readonly [Param, Tensor])[]
  /** Most bytes at once, when it was recorded. */
  readonly #peak: Bytes

  /** `record` makes the gradients, where there are none before; `reserve`: bytes that it may need at once. */
  constructor(
    model: Module & Scorer,
    batches: readonly Batch[],
    reserve: number,
    record: (inputs: readonly Inputs[], weight: Tensor) => Recorded,
  ) {
    const { device } = model
    const params = model.parameters()
    this.shape = shapeOf(batches)
    const made = scope(() => ({
      inputs: batches.map((batch) => inputsOf(batch, device)),
      weight: Tensor.full([1], 0, { device }),
    }))
    this.#inputs = made.inputs
    this.#weight = made.weight
    for (const tensor of this.#given) tensor.retain()
    // what it reads of a parameter it must make itself, for the parameter will have changed; what it makes is not there yet
    const forget = () => {
      for (const { tensor } of params) tensor.forget()
    }
    forget()
    try {
      native.beginGraph(device.kind, reserve)
      let done = false
      try {
        this.recorded = record(made.inputs, made.weight)
        done = true
      } finally {
        this.#graph = native.endGraph(done)
      }
      this.#peak = native.memory().peak
      for (const tensor of this.#results) tensor.retain()
      this.#gradients = params.flatMap((param) => (param.grad ? [[param, param.grad] as const] : []))
      for (const [param] of this.#gradients) param.grad = null
    } catch (error) {
      for (const param of params) param.dropGrad()
      release(this.#given)
      throw error
    } finally {
      forget()
    }
  }

  /** Leaves the gradients of these batches, each loss by `weight`, in the parameters. */
  run(batches: readonly Batch[], weight: number): Recorded {
    for (const [i, { ids, targets, starts }] of this.#inputs.entries()) {
      const batch = batches[i] as Batch
      native.write(ids.handle, batch.ids)
      native.write(targets.handle, batch.targets)
      if (!starts || !batch.starts) continue
      expectStarts(batch.starts, batch.sequence)
      native.write(starts.handle, batch.starts)
    }
    native.write(this.#weight.handle, Float32Array.of(weight))
    native.runGraph(this.#graph)
    for (const [param, gradient] of this.#gradients) param.grad = gradient.retain()
    return this.recorded
  }

  /** Peaks of a step that ran it: what it works in counts as if every tensor were made anew. */
  peakWith(peak: Bytes): Bytes {
    const most = ([purpose, bytes]: [string, number]) => [purpose, Math.max(bytes, this.#peak[purpose as keyof Bytes])]
    return Object.fromEntries(Object.entries(peak).map(most))
  }

  dispose(): void {
    native.freeGraph(this.#graph)
    for (const [, gradient] of this.#gradients.splice(0)) gradient.release()
    release([...this.#results, ...this.#given])
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  get #given(): Tensor[] {
    return [
      this.#weight,
      ...this.#inputs.flatMap(({ ids, targets, starts }) => (starts ? [ids, targets, starts] : [ids, targets])),
    ]
  }
  get #results(): Tensor[] {
    const { losses, norm } = this.recorded
    return [...losses, norm.norm, norm.norms, norm.clip]
  }
}

function release(tensors: readonly Tensor[]): void {
  for (const tensor of tensors) {
    tensor.dispose()
    tensor.release()
  }
}

/** Throws unless a trainer's steps can be graphs on this device. */
export function expectGraphs({ device }: Scorer): void {
  // to test all but the device itself: lists of ops that are recorded and run in the same way
  if (device.kind === 'cuda' || process.env.COAT_GRAPH === 'cpu') return
  throw new CoatError(
    `Trainer: graph is true and must be false on device '${device.kind}', which has no graphs; those of 'cuda' do`,
    'value',
    'Trainer',
    'graph',
  )
}
