// The tape: what forward recorded, what it keeps for backward (by op and format), and backward itself.
import type { Handle } from './native.gen.ts'
import { CoatError, native } from './native.ts'
import {
  type FloatFormat,
  type Format,
  type GradientSink,
  type Remake,
  scope,
  Tensor,
  transposables,
} from './tensor.ts'

/**
 * Gradients of the inputs, in their order, from the gradient of the output and the saved tensors; null: none. `take(i, format)`
 * is what input i has of its gradient so far, if that has this format: what is returned for it then holds that too. `across()`
 * is the tensor that was saved to be read transposed, transposed.
 */
export type Backward = (
  gradient: Tensor,
  saved: readonly Tensor[],
  take: Take,
  across: () => Tensor,
) => (Tensor | null)[]
type Take = (i: number, format: Format) => Tensor | null

interface Input {
  id: number
  sink: GradientSink | null
  wanted: boolean
}

interface Node {
  op: string
  inputs: Input[]
  output: number
  saved: readonly Tensor[]
  across: Tensor | null
  backward: Backward
}

/** What `push` may be told. */
export interface Pushed {
  /** Whether what is saved counts as that (default true): not gradients that forward made in advance. */
  counts?: boolean
  /** A tensor that backward reads transposed, and not as it is. */
  across?: Tensor | null
}

/** One tensor that backward will want: kept, or made again once from others. */
interface Save {
  op: string
  /** Whether it is `saved`: not where it is a gradient that forward made in advance. */
  counts: boolean
  count: number
  remake: Remake | null
  made: Tensor | null
  /** Made at once, where `made` was not there to be transposed. */
  turned: Tensor | null
}

export interface LedgerRow {
  op: string
  format: string
  tensors: number
  bytes: number
}

/**
 * What is made again in backward instead of kept: nothing (`none`: what backward reads is kept); what one pass over a kept
 * tensor gives (`flow`); whole layers (`layer`: of each its input is kept, and its forward runs once more).
 */
export type Recompute = 'none' | 'flow' | 'layer'
export const recomputes: readonly Recompute[] = ['none', 'flow', 'layer']

let current: Tape | null = null

/** Records differentiable operations while `record` runs; `backward` then unwinds them, freeing as it goes. */
export class Tape implements Disposable {
  readonly recompute: Recompute
  #nodes: Node[] = []
  #saves = new Map<Tensor, Save>()
  #gradients = new Map<number, Tensor>()
  /** The gradient 1 of the loss, during backward. */
  #seed: Tensor | null = null
  /** What gradients would go to, on a tape that keeps nothing else. */
  #trial: Set<Tensor> | null = null
  /** Inputs of nodes that gradients still come from, by where they go; null on a tape within a layer of another. */
  #uses: Map<GradientSink, number> | null = new Map()

  constructor(options: { recompute?: Recompute } = {}) {
    this.recompute = options.recompute ?? 'flow'
  }

  /** The tape that records now, if one does. */
  static get current(): Tape | null {
    return current
  }

  record<T>(f: () => T): T {
    const outer = current
    current = this
    try {
      return f()
    } finally {
      current = outer
    }
  }

  /**
   * Adds one operation, whose forward is done: `saved` are the tensors that its backward reads. Twins among them that are to be
   * made again are freed.
   */
  push(
    op: string,
    inputs: readonly Tensor[],
    output: Tensor,
    saved: readonly Tensor[],
    backward: Backward,
    { counts = true, across = null }: Pushed = {},
  ): void {
    output.requiresGrad = true
    if (this.#trial) {
      for (const input of inputs) if (input.sink && input.requiresGrad) this.#trial.add(input)
      return
    }
    if (this.#uses)
      for (const { sink, requiresGrad } of inputs)
        if (sink && requiresGrad) this.#uses.set(sink, (this.#uses.get(sink) ?? 0) + 1)
    for (const tensor of heldBy({ saved, across })) this.#hold(tensor, op, counts)
    this.#nodes.push({
      op,
      inputs: inputs.map((input) => ({ id: input.id, sink: input.sink, wanted: input.requiresGrad })),
      output: output.id,
      saved,
      across,
      backward,
    })
  }

  /**
   * f(), which reads x and `more` and gives the same bits whenever it runs. Where the tape that records recomputes layers, it
   * keeps of f only what f reads, x with its twins, and backward runs f again.
   */
  static layer(x: Tensor, more: readonly Tensor[], f: () => Tensor): Tensor {
    const tape = current
    if (tape?.recompute !== 'layer') return f()
    const trial = new Tape({ recompute: 'none' })
    const leaves = new Set<Tensor>()
    trial.#trial = leaves
    const y = trial.record(f)
    if (y.requiresGrad) {
      tape.push('layer', [x, ...leaves], y, [x, ...x.twins(), ...more], (dy) => {
        using again = new Tape()
        again.#uses = null
        tape.#gradients.set(again.record(f).id, dy.retain())
        again.#unwind(tape.#gradients)
        return []
      })
    }
    return y
  }

  /** Whether a gradient is the 1 that backward began with. */
  isSeed(gradient: Tensor): boolean {
    return gradient === this.#seed
  }

  /** Bytes kept for backward now, by op and format; they add up to `memory().live.saved`. */
  ledger(): LedgerRow[] {
    const rows = new Map<string, LedgerRow>()
    for (const [tensor, { op, counts, remake }] of this.#saves) {
      if (remake || tensor.persistent || !counts) continue
      const key = `${op} ${tensor.format}`
      const row = rows.get(key) ?? { op, format: tensor.format, tensors: 0, bytes: 0 }
      row.tensors += 1
      row.bytes += tensor.bytes
      rows.set(key, row)
    }
    return [...rows.values()]
  }

  /** Sends the gradient 1 into `loss` ([1]) and leaves gradients in the parameters. The tape is empty afterwards. */
  backward(loss: Tensor): void {
    if (loss.numel !== 1 || loss.format !== 'f32')
      throw new CoatError(
        `backward: loss ${loss.format}[${loss.shape.join(', ')}] must be f32[1]`,
        'shape',
        'backward',
        'loss',
      )
    const outer = current
    current = null
    try {
      this.#seed = retained(Tensor.full([1], 1, { device: loss.device }))
      this.#gradients.set(loss.id, this.#seed)
      this.#unwind(this.#gradients)
    } finally {
      current = outer
      this.#seed = null
      for (const gradient of this.#gradients.values()) gradient.release()
      this.#gradients.clear()
      this.dispose()
    }
  }

  // Gradients by the id of the tensor that they are of.
  #unwind(gradients: Map<number, Tensor>): void {
    for (let node = this.#nodes.pop(); node; node = this.#nodes.pop()) {
      const { inputs, saved, across, backward } = node
      const gradient = gradients.get(node.output)
      gradients.delete(node.output)
      const taken: Tensor[] = []
      const take: Take = (i, format) => {
        const { id, sink, wanted } = inputs[i] as Input
        const held = gradients.get(id)
        if (sink || !wanted || held?.format !== format) return null
        gradients.delete(id)
        taken.push(held)
        return held
      }
      try {
        if (gradient)
          scope(() => {
            const kept = saved.map((tensor) => this.#get(tensor))
            const results = backward(gradient, kept, take, () => this.#getAcross(across as Tensor))
            inputs.forEach((input, i) => {
              const result = results[i]
              if (result && input.wanted) accumulate(gradients, input, result)
            })
          })
      } finally {
        gradient?.release()
        for (const tensor of taken) tensor.release()
        for (const tensor of heldBy(node)) this.#drop(tensor)
      }
      if (this.#uses) this.#completed(inputs, this.#uses)
    }
  }

  #completed(inputs: readonly Input[], uses: Map<GradientSink, number>): void {
    for (const { sink, wanted } of inputs) {
      if (!sink || !wanted) continue
      const left = (uses.get(sink) as number) - 1
      if (left > 0) uses.set(sink, left)
      else {
        uses.delete(sink)
        sink.complete?.()
      }
    }
  }

  /** Frees everything the tape holds. */
  dispose(): void {
    for (const node of this.#nodes) for (const tensor of heldBy(node)) this.#drop(tensor)
    this.#nodes = []
    this.#uses?.clear()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  #hold(tensor: Tensor, op: string, counts: boolean): void {
    const known = this.#saves.get(tensor)
    if (known) {
      known.count += 1
      return
    }
    const wanted = this.recompute !== 'none' && !tensor.persistent
    const remake = wanted ? (tensor.remake ?? this.#remakeOfTwin(tensor)) : null
    this.#saves.set(tensor, { op, counts, count: 1, remake, made: null, turned: null })
    if (remake) {
      for (const source of [...remake.sources, remake.scale]) this.#hold(source, op, counts)
      if (remake !== tensor.remake) {
        remake.scale.release() // the tape alone holds it
        tensor.dispose()
      }
    } else if (!tensor.persistent) {
      tensor.retain()
      if (counts) native.retag(tensor.handle, 'saved')
    }
  }

  // A quantized twin of a tensor that is kept anyway costs one pass to make again, and its scale four bytes to keep.
  #remakeOfTwin(tensor: Tensor): Remake | null {
    const source = tensor.source
    const kept = source && this.#saves.get(source)
    if (!kept || kept.remake || !tensor.format.endsWith('/t')) return null
    const format = tensor.format as FloatFormat
    return remakeOf(
      tensor,
      [source],
      (scale, x) => native.convert(x, scale, format),
      transposables.has(source.format) ? (scale, x) => native.convert_transposed(x, scale, format as 'e4m3/t') : null,
    )
  }

  #get(tensor: Tensor): Tensor {
    const save = this.#saves.get(tensor) as Save
    if (save.remake) save.made ??= this.#make(tensor, save.remake, save.remake.make)
    return save.made ?? tensor
  }

  // Nobody else may read it as it is, and then a pass that makes it so is saved; if somebody does, none is lost.
  #getAcross(tensor: Tensor): Tensor {
    const save = this.#saves.get(tensor) as Save
    const { remake } = save
    if (!remake?.across || save.made) return this.#get(tensor).as(tensor.format as FloatFormat, { transposed: true })
    save.turned ??= this.#make(tensor, remake, remake.across)
    return save.turned
  }

  #make({ format }: Tensor, { sources }: Remake, make: Remake['make']): Tensor {
    return Tensor.own(make(sources.map((source) => this.#get(source))), format).keep()
  }

  #drop(tensor: Tensor): void {
    const save = this.#saves.get(tensor)
    if (!save || --save.count > 0) return
    this.#saves.delete(tensor)
    if (save.remake) {
      save.made?.dispose()
      save.turned?.dispose()
      for (const source of [...save.remake.sources, save.remake.scale]) this.#drop(source)
    } else if (!tensor.persistent) {
      tensor.release()
      if (save.counts && !tensor.disposed) native.retag(tensor.handle, 'temp')
    }
  }
}

function heldBy({ saved, across }: Pick<Node, 'saved' | 'across'>): readonly Tensor[] {
  return across ? [across, ...saved] : saved
}

/** The tape that records an operation with these inputs: the one that records now, if one of them wants a gradient. */
export function recordedBy(...inputs: (Tensor | null)[]): Tape | null {
  return inputs.some((input) => input?.requiresGrad) ? Tape.current : null
}

function accumulate(gradients: Map<number, Tensor>, input: Input, gradient: Tensor): void {
  if (input.sink) input.sink.accumulate(gradient)
  else gradients.set(input.id, addGradient(gradients.get(input.id) ?? null, gradient))
}

/** The sum of a held gradient and another one: in place when nobody else holds the first. The caller holds the result. */
export function addGradient(held: Tensor | null, gradient: Tensor): Tensor {
  if (!held) return gradient.retain()
  if (held.exclusive) {
    native.add_into(held.handle, gradient.handle)
    return held
  }
  const [sum] = native.add(held.handle, gradient.handle, held.format as 'f32' | 'bf16', null)
  held.release()
  return retained(Tensor.own(sum))
}

/** Moves the hold on a new tensor from scope or caller to whoever will release it. */
export function retained(tensor: Tensor): Tensor {
  tensor.retain().dispose()
  return tensor
}

/** What makes a `/t` tensor, given the handle of its scale. */
export type Make = (scale: Handle, ...sources: Handle[]) => Handle

/**
 * How `tensor`, a `/t` output whose scale the result holds, is made again, and by `across` transposed; `known` is that scale,
 * where it is at hand.
 */
export function remakeOf(
  tensor: Tensor,
  sources: readonly Tensor[],
  make: Make,
  across: Make | null = null,
  known: Tensor | null = null,
): Remake {
  const scale = known?.retain() ?? retained(Tensor.own(native.scale_of(tensor.handle), 'f32'))
  const by = (make: Make) => (held: readonly Tensor[]) => make(scale.handle, ...held.map(({ handle }) => handle))
  return { sources, scale, make: by(make), across: across && by(across) }
}

/** Runs f without recording. */
export function noGrad<T>(f: () => T): T {
  const outer = current
  current = null
  try {
    return f()
  } finally {
    current = outer
  }
}
