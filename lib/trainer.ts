// The loop: batch → forward → backward → step. Yields one metrics object a step and writes nothing.
import { setImmediate } from 'node:timers/promises'
import { emulationsOf, quantizesGradients } from './axes.ts'
import { type CheckpointOptions, loadCheckpoint, type Resumed, saveCheckpoint } from './checkpoint.ts'
import type { Batch, Dataset } from './data.ts'
import { counted, evaluate, expectIds, type Inputs, inputsOf, lossOf, type Scorer } from './evaluate.ts'
import { type Exchange, exchangeOf, type MuSetting } from './exchange.ts'
import { expectGraphs, type Recorded, StepGraph, shapeOf, stepsBeforeGraph } from './graph.ts'
import { SpikeGuard, type SpikeOptions } from './guard.ts'
import { LossScale } from './lossscale.ts'
import type { Module, Param } from './modules.ts'
import { CoatError, type MemoryUsage, native } from './native.ts'
import type { Weight } from './ops.ts'
import { type AdamWOptions, type FullOptions, type Optimizer, optimizerOf } from './optimizer.ts'
import { alone, expectTogether, type Ranks } from './ranks.ts'
import type { Communication, LossScaling, Partition, Recipe } from './recipes.ts'
import { constant, type Schedule } from './schedule.ts'
import { checked, checkNames, expectCount } from './settings.ts'
import { type LedgerRow, type Recompute, recomputes, Tape } from './tape.ts'
import { memory, resetPeak, scope, Tensor } from './tensor.ts'
import type { UpdateQuality } from './updates.ts'

/** What the trainer needs of a model. */
export interface TrainableModel extends Module, Scorer {
  readonly recipe: Recipe
  /** Sizes, where it has them in one place: a checkpoint records and compares them. */
  readonly config?: object
  /** What it was built with: it too, where products are rounded at random. */
  readonly seed?: number
}

/** What is queued next: a micro-batch's forward, its backward, the update; `end`: nothing more in this step. */
export type Phase = 'forward' | 'backward' | 'update' | 'end'

/** What a caller is told as it happens; `run()` waits for promises. */
export interface TrainerCallbacks {
  /** After every step, skipped ones too, before it is yielded. */
  step?(metrics: StepMetrics): void | Promise<void>
  /** After a checkpoint was saved. */
  saved?(folder: string, step: number): void | Promise<void>
}

export interface RunOptions {
  /**
   * Signals after which `run()` saves and ends (default none): at the next micro-batch, dropping the step that it is in, which
   * a resumed run does again. The same signal once more has its usual effect. Handlers are removed when `run()` ends.
   */
  signals?: readonly NodeJS.Signals[]
}

export interface TrainerOptions {
  data: Dataset
  /** Sequences of one micro-batch. */
  batch: number
  /** Micro-batches of one step (default 1); the loss is the mean over all their tokens. */
  accumulate?: number
  /** Steps to do; skipped ones do not count. */
  steps: number
  /** What `adamw`, `lion` or `sgd` made, or options of AdamW. */
  optimizer?: FullOptions | AdamWOptions
  schedule?: Schedule
  /** Largest global norm of the gradients (default 1; 0: no clipping). Steps with a NaN or Inf are skipped either way. */
  clip?: number
  /** Consecutive skips after which training stops with an error (default 10); not those by which a loss scale above 1 falls. */
  maxSkips?: number
  /**
   * The factor of the loss in backward (default: the recipe's). Where gradients are quantized, an infinity that this saturates
   * counts as an overflow, too, and each step waits for its numbers.
   */
  lossScale?: LossScaling
  /** The factor of gradients that are summed as FP8 (default: as the recipe says). */
  mu?: MuSetting
  /** How gradients travel between ranks (default: as the recipe says). */
  communicate?: Communication
  /** Which rank keeps the states of what (default: as the recipe says). */
  partition?: Partition
  /** Skips steps whose loss or gradient norm jumps (default: none is skipped for that). */
  spike?: SpikeOptions
  /** Mean loss over `sequences` (default 64) held-out sequences after every so many steps and after the last one. */
  validate?: { every: number; sequences?: number }
  callbacks?: TrainerCallbacks
  /** Called as the parts of a step are queued, to tell their times apart; with `graph`, `forward` stands for backward, too. */
  phase?: (part: Phase) => void
  /**
   * Update each parameter in backward, as soon as its gradient is complete, and free the gradient then (default no); needs
   * `accumulate` 1. Gradients are clipped by the norm of the step before, in the first step each by its own; where one is
   * not finite its parameter alone stays, and the step counts as skipped though others have moved.
   */
  optimizerInBackward?: boolean
  /**
   * Keep quantized weights and their transposes from their first use in a step to its last micro-batch (default no): the
   * bytes of both, instead of two passes over the weights a micro-batch.
   */
  cacheWeights?: boolean
  /**
   * Record the micro-batches of a step as a CUDA graph and run that from then on (default no): the same bits, and hardly any
   * work of the host, which small models wait for. The first steps, and those whose batches have another shape, run op by op;
   * so do all where something cannot be recorded, after a warning. A model's forward must do the same in every step, whatever
   * its inputs hold. Costs the bytes of gradients between steps. Signals are heard between steps.
   */
  graph?: boolean
  /** What backward makes again instead of keeping it (default `flow`). */
  recompute?: Recompute
  /**
   * In every so many steps, measure how much of the update the formats of parameters kept (default 0: never): `updates` of
   * the step's metrics. Such a step updates twice and reads all parameters back.
   */
  measureUpdates?: number
  /**
   * What trains together (default: this trainer alone), each with a batch of its own: gradients are of the tokens of all, each
   * keeps the optimizer's states for its part of the parameters, and the others get what it made of them.
   */
  ranks?: Ranks
  /** Saves during `run()`, after every so many steps and after the last one; `resume(dir)` goes on from there. */
  checkpoint?: CheckpointOptions
}

/** One step, as it happened. */
export interface StepMetrics {
  /** Steps done after this one, from 1. */
  step: number
  /** Mean cross-entropy by tokens, in nats; of all ranks. */
  loss: number
  /** Norm of all gradients before clipping. */
  gradNorm: number
  lr: number
  /** Tokens of this step, of all ranks, that took part in the loss. With none its gradient is 0, and it is a step: decay and momentum act. */
  tokens: number
  tokensPerSecond: number
  /** Milliseconds of this step. */
  time: number
  /** The loss scale of this step, if there is one. */
  lossScale?: number
  /** Whether the update was skipped, because a gradient was not finite or the step a spike: nothing changed then, but see `optimizerInBackward`. */
  skipped: boolean
  /** Skipped updates so far. */
  skippedSteps: number
  /** Infinities that quantization saturated in this step. */
  infs: number
  /** Bytes live after the step and their peaks within it. */
  memory: MemoryUsage
  /** Loss on held-out data, where it was measured after this step. */
  validation?: number
  /** How much of the update was kept, in steps that measure it. */
  updates?: UpdateQuality
}

const known = [
  ...['data', 'batch', 'accumulate', 'steps', 'optimizer', 'schedule', 'clip'],
  ...['maxSkips', 'spike', 'validate', 'callbacks', 'phase'],
  ...['optimizerInBackward', 'cacheWeights', 'graph', 'recompute', 'measureUpdates', 'checkpoint', 'ranks'],
  ...['lossScale', 'mu', 'communicate', 'partition'],
]

/** Options of which the trainer makes something. */
type Apart =
  | 'optimizer'
  | 'spike'
  | 'validate'
  | 'checkpoint'
  | 'lossScale'
  | 'mu'
  | 'ranks'
  | 'communicate'
  | 'partition'

/** Trains a model; `run()` is an async generator of metrics. Owns the optimizer's state. */
export class Trainer implements Disposable {
  readonly model: TrainableModel
  readonly optimizer: Optimizer
  readonly ranks: Ranks
  readonly options: Required<Omit<TrainerOptions, Apart>> & {
    readonly checkpoint: Required<CheckpointOptions> | null
    readonly validate: { every: number; sequences: number } | null
  }
  readonly guard: SpikeGuard | null
  readonly lossScale: LossScale | null
  /** How gradients of micro-batches as ranks, or of ranks, are summed, where it is not as they are. */
  readonly exchange: Exchange | null
  /** Batches taken so far, skipped steps included. */
  batches = 0
  skippedSteps = 0
  /** Skipped steps since the last that was done. */
  skipsInARow = 0
  /** Why `run()` ended before all steps were done: a signal, or `stop()`. */
  stopped: NodeJS.Signals | 'stop' | null = null
  /** Norm of the gradients of the last step that was done. */
  lastNorm: number | null = null
  #ledger: { shape: string; rows: LedgerRow[] } | null = null
  /** The step that the last checkpoint of this trainer has. */
  #saved = -1
  #busy = false
  #graph: StepGraph | null = null
  /** Whether something could not be recorded. */
  #graphless = false
  /** Steps without a graph, one after the other, of batches of one shape, and bytes that the last of them needed at once. */
  #plain = { shape: '', steps: 0, bytes: 0 }

  constructor(model: TrainableModel, options: TrainerOptions) {
    checkNames(options, known)
    const { recipe } = model
    const {
      optimizer,
      checkpoint,
      spike,
      validate,
      lossScale: scaling = recipe.lossScale ?? 'none',
      mu = recipe.mu ?? 'none',
      ranks = alone,
      communicate = recipe.communicate ?? 'f32',
      partition = recipe.partition ?? 'whole',
      ...rest
    } = options
    const full = {
      accumulate: 1,
      schedule: constant(),
      clip: 1,
      maxSkips: 10,
      callbacks: {},
      phase: () => {},
      recompute: 'flow' as const,
      optimizerInBackward: false,
      cacheWeights: false,
      graph: false,
      measureUpdates: 0,
      ...rest,
      validate: validate === undefined ? null : checked({ sequences: 64, ...validate }, 'validate', 'sequences'),
      checkpoint: checkpoint === undefined ? null : checked({ keep: 3, ...checkpoint }, 'checkpoint', 'keep', ['dir']),
    }
    for (const name of ['batch', 'accumulate', 'steps', 'maxSkips'] as const) expectCount(name, full[name])
    checkNames(full.callbacks, ['step', 'saved'], 'callbacks.')
    checkNames(spike ?? {}, ['sigma', 'window'], 'spike.')
    const refuse = (name: string, text: string): never => {
      throw new CoatError(`Trainer: ${name} ${text}`, 'value', 'Trainer', name)
    }
    if (!(full.clip >= 0)) refuse('clip', `is ${full.clip} and must be at least 0`)
    if (!recomputes.includes(full.recompute))
      refuse('recompute', `is ${full.recompute} and must be one of ${recomputes.join(', ')}`)
    const { measureUpdates: measured } = full
    if (!Number.isSafeInteger(measured) || measured < 0 || (measured > 0 && full.optimizerInBackward))
      refuse('measureUpdates', `is ${measured} and must be an integer of at least 0, and 0 with optimizerInBackward`)
    if (full.optimizerInBackward) {
      if (full.accumulate > 1)
        refuse(
          'accumulate',
          `is ${full.accumulate} and must be 1 with optimizerInBackward, which keeps no gradients to add to`,
        )
      if (spike !== undefined)
        refuse('spike', 'cannot be had with optimizerInBackward, which updates before the norm is known')
      if (full.graph)
        refuse(
          'graph',
          'cannot be had with optimizerInBackward, whose learning rate differs from step to step within what is recorded',
        )
    }
    if (full.graph) expectGraphs(model)
    expectTogether(ranks, model, full)
    this.ranks = ranks
    this.model = model
    this.options = full
    this.guard = spike === undefined ? null : new SpikeGuard(spike)
    this.lossScale = scaling === 'none' ? null : new LossScale(scaling)
    const trained = model.parameters().filter(({ frozen }) => !frozen)
    if (communicate !== 'f32' && emulationsOf(recipe).length > 0)
      refuse(
        'communicate',
        `is ${JSON.stringify(communicate)} and must be f32 with emulated arithmetic, whose gradients are f32`,
      )
    this.exchange = exchangeOf(trained, { mu, communicate }, full, ranks)
    const { rank, count } = ranks
    this.optimizer = optimizerOf(model, recipe, optimizer, { rank, count, partition })
  }

  /** Whether a step is running: another one, and checkpoints, are refused meanwhile. */
  get busy(): boolean {
    return this.#busy
  }

  /** Bytes that micro-batches of the last shape kept for backward, by op and format. */
  get ledger(): readonly LedgerRow[] {
    return this.#ledger?.rows ?? []
  }

  /**
   * Goes on from the newest complete checkpoint of `dir`: parameters, states, counters, place in the data and learning rate,
   * bit for bit; `run()` does the steps that are left. See `loadCheckpoint` for what is refused and what `allow` permits.
   */
  async resume(dir: string, options: { allow?: readonly string[] } = {}): Promise<Resumed> {
    this.#dropGraph()
    return loadCheckpoint(this, dir, options)
  }

  /**
   * Runs until `steps` are done, or `stop()` or a signal ends it. The caller may leave at any step and go on with another
   * `run()`.
   */
  async *run({ signals = [] }: RunOptions = {}): AsyncGenerator<StepMetrics, void, void> {
    this.stopped = null
    const listeners = signals.map((signal) => {
      const stop = () => {
        this.stopped = signal
      }
      process.once(signal, stop)
      return () => process.off(signal, stop)
    })
    const { steps, validate, callbacks } = this.options
    try {
      while (this.optimizer.steps < steps) {
        const metrics = await this.#step(() => this.stopped !== null)
        if (!metrics) {
          this.stopped ??= 'stop'
          break
        }
        if (!metrics.skipped && due(metrics.step, validate?.every, steps))
          metrics.validation = await this.validate(validate?.sequences)
        await callbacks.step?.(metrics)
        if (!metrics.skipped && due(metrics.step, this.options.checkpoint?.every, steps)) await this.#save()
        yield metrics
        await setImmediate()
      }
      if (this.stopped) await this.#save()
    } catch (error) {
      this.ranks.leave(error)
      throw error
    } finally {
      for (const remove of listeners) remove()
    }
  }

  /** Ends `run()` at the next micro-batch, with a checkpoint where there is a folder for them. */
  stop(): void {
    this.stopped = 'stop'
  }

  /** One step: `accumulate` micro-batches, then an update, or a skip when a gradient is not finite or the step a spike. */
  async step(): Promise<StepMetrics> {
    return (await this.#step(() => false)) as StepMetrics
  }

  /** Mean loss by tokens over `sequences` held-out sequences, in nats; parameters and state stay as they are. */
  async validate(sequences = 64): Promise<number> {
    const { data, batch } = this.options
    return (await evaluate(this.model, data.validation(sequences, batch))).loss
  }

  dispose(): void {
    this.exchange?.dispose()
    this.optimizer.dropGrads()
    this.#dropGraph()
    this.optimizer.dispose()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  /** A step, or null when one of the ranks is `interrupted()` before a micro-batch: then nothing has changed. */
  async #step(interrupted: () => boolean): Promise<StepMetrics | null> {
    if (this.#busy)
      throw new CoatError('training: a step is running; wait for it before the next', 'busy', 'training', 'step')
    this.#busy = true
    try {
      return await this.#micros(interrupted)
    } catch (error) {
      this.ranks.leave(error)
      throw error
    } finally {
      this.#busy = false
    }
  }

  async #micros(interrupted: () => boolean): Promise<StepMetrics | null> {
    const { data, batch, accumulate, steps, schedule, clip, optimizerInBackward, cacheWeights } = this.options
    const { optimizer, guard, ranks, lossScale, exchange } = this
    const scale = lossScale?.value ?? 1
    // quantizing saturates infinities, and counts them
    const hidden = exchange?.quantizes || (lossScale !== null && quantizesGradients(this.model.recipe))
    const started = performance.now()
    const infsBefore = memory().infs
    resetPeak()
    optimizer.dropGrads()
    const place = data.state?.()
    const batches = Array.from({ length: accumulate }, (_, i) => data.batch(this.batches + i, batch))
    const { vocab_size: vocabulary } = { vocab_size: undefined, ...this.model.config }
    // on a GPU an id out of range would come to light steps later
    if (typeof vocabulary === 'number')
      for (const [i, micro] of batches.entries()) expectIds(micro, vocabulary, `batch ${this.batches + i} of the data`)
    const tokens = await ranks.sum(batches.reduce((sum, { targets }) => sum + counted(targets), 0))
    const losses: Tensor[] = []
    let loss = 0
    let gradNorm = 0
    let overflow = false
    let spike = false
    let updates: UpdateQuality | null = null
    const { measureUpdates: every } = this.options
    const measured = every > 0 && (optimizer.steps + 1) % every === 0
    const lr = optimizer.options.lr * schedule(optimizer.steps, steps)
    const weight = tokens === 0 ? 0 : scale / tokens
    const graph = this.#graphFor(batches)
    const interrupt = async () => {
      const stops = (await ranks.sum(Number(interrupted()))) > 0
      if (stops && place) data.restore?.(place)
      return stops
    }
    using within = optimizerInBackward ? optimizer.stepInBackward(lr, clip, this.lastNorm, scale) : null
    try {
      if (graph) {
        if (await interrupt()) return null
        this.#begin('forward')
        losses.push(...graph.run(batches, weight).losses)
      } else {
        this.#keepTwins(cacheWeights)
        for (const micro of batches) {
          if (losses.length > 0) await setImmediate() // signals are heard between turns of the event loop
          if (await interrupt()) return null
          losses.push(this.#forwardBackward(() => inputsOf(micro, this.model.device), weight, shapeOf([micro])))
          exchange?.take()
        }
        exchange?.sum()
        this.#keepTwins(false)
      }
      this.#begin('update')
      await (exchange ? exchange.add(ranks) : ranks.add(optimizer.gradients))
      const norm = graph?.recorded.norm ?? within?.end() ?? optimizer.gradNorm(clip, scale)
      try {
        const measure = async () => {
          let own = 0
          for (const part of losses) own += (await part.item()) / scale
          loss = await ranks.sum(own)
          gradNorm = await norm.norm.item()
          const over = (await norm.clip.read())[1] !== 0 || (hidden && memory().infs > infsBefore)
          overflow = (await ranks.sum(Number(over))) > 0
        }
        // what may skip for more than the device knows has to wait for the numbers; else the update is queued behind the gradients
        const waits = guard !== null || hidden
        if (waits) await measure()
        spike = guard?.isSpike(loss, gradNorm) ?? false
        const dropped = spike || overflow
        if (!dropped && measured) updates = await optimizer.measuredStep(lr, norm.clip)
        else if (!dropped && !within) optimizer.step(lr, norm.clip)
        await optimizer.share(ranks)
        for (const scale of this.model.delayedScales()) scale.advance()
        this.#begin('end')
        if (!waits) await measure()
        if (spike || overflow) await this.#skipped(norm.norms, spike)
        else await exchange?.update()
      } finally {
        norm.norm.dispose()
        norm.norms.dispose()
        norm.clip.dispose()
      }
    } finally {
      this.#keepTwins(false)
      for (const part of losses) part.dispose()
      exchange?.drop()
      optimizer.dropGrads()
    }
    this.batches += accumulate
    const skip = spike || overflow
    if (!skip) {
      optimizer.advance()
      this.skipsInARow = 0
      this.lastNorm = gradNorm
      guard?.add(loss, gradNorm)
    }
    lossScale?.update(overflow, optimizer.steps)
    const time = performance.now() - started
    const usage = memory()
    if (graph) usage.peak = graph.peakWith(usage.peak)
    else this.#plain.bytes = usage.peak.total - usage.live.total
    // what it clips by has the scale in it
    if (lossScale && lossScale.value !== scale) this.#dropGraph()
    return {
      step: optimizer.steps,
      loss,
      gradNorm,
      lr,
      tokens,
      tokensPerSecond: (tokens / time) * 1000,
      time,
      skipped: skip,
      skippedSteps: this.skippedSteps,
      infs: usage.infs - infsBefore,
      memory: usage,
      ...(lossScale ? { lossScale: scale } : {}),
      ...(updates && !skip ? { updates: { kept: updates.kept, read: updates.read } } : {}),
    }
  }

  /** A checkpoint of the steps that are done, unless it is there; parameters that are not finite never take a healthy one's place. */
  async #save(): Promise<void> {
    const { checkpoint, callbacks } = this.options
    const { steps } = this.optimizer
    if (!checkpoint || this.#saved === steps) return
    await this.#expectFinite()
    const folder = await saveCheckpoint(this, checkpoint.dir, checkpoint)
    this.#saved = steps
    await callbacks.saved?.(folder, steps)
  }

  async #expectFinite(): Promise<void> {
    const bad: Param[] = []
    for (const param of this.model.parameters()) {
      const { handle, format } = param.tensor
      const clip = scope(() => {
        const read = format === 'f32' || format === 'bf16' ? handle : native.convert(handle, null, 'f32')
        if (read !== handle) Tensor.own(read)
        const [, , clip] = native.grad_norm([read], 0).map((part) => Tensor.own(part))
        return (clip as Tensor).keep()
      })
      if ((await clip.read())[1] !== 0) bad.push(param)
      clip.dispose()
    }
    if (bad.length > 0)
      diverged(`parameters are not finite after step ${this.optimizer.steps}, which is not saved`, bad)
  }

  #keepTwins(keeps: boolean): void {
    if (!this.options.cacheWeights) return
    for (const { tensor } of this.optimizer.params) {
      tensor.keepsTwins = keeps
      tensor.dropTwins()
    }
  }

  #forwardBackward(
    inputs: () => Inputs,
    weight: Weight,
    shape: string,
    begin = (part: Phase) => this.#begin(part),
  ): Tensor {
    using tape = new Tape({ recompute: this.options.recompute })
    return scope(() => {
      begin('forward')
      const loss = tape.record(() => lossOf(this.model, inputs(), weight))
      if (this.#ledger?.shape !== shape) this.#ledger = { shape, rows: tape.ledger() }
      begin('backward')
      tape.backward(loss)
      return loss.keep()
    })
  }

  /** The graph for a step of these batches; null where it runs op by op. */
  #graphFor(batches: readonly Batch[]): StepGraph | null {
    if (!this.options.graph || this.#graphless) return null
    const shape = shapeOf(batches)
    const plain = this.#plain
    if (this.#graph?.shape === shape) {
      plain.steps = 0
      return this.#graph
    }
    if (plain.shape !== shape) this.#plain = { shape, steps: 0, bytes: 0 }
    if (this.#plain.steps++ < stepsBeforeGraph) return null
    this.#dropGraph()
    try {
      this.#graph = new StepGraph(this.model, batches, plain.bytes, (inputs, weight) =>
        this.#record(batches, inputs, weight),
      )
    } catch (error) {
      if (!(error instanceof CoatError)) throw error
      this.#graphless = true
      process.emitWarning(`training: steps run without a graph: ${error.message}`, { code: 'COAT_GRAPH' })
    }
    return this.#graph
  }

  #record(batches: readonly Batch[], inputs: readonly Inputs[], weight: Tensor): Recorded {
    this.#keepTwins(this.options.cacheWeights)
    try {
      const losses = batches.map((micro, i) =>
        this.#forwardBackward(
          () => inputs[i] as Inputs,
          weight,
          shapeOf([micro]),
          () => {},
        ),
      )
      this.#keepTwins(false)
      const norm = this.optimizer.gradNorm(this.options.clip, this.lossScale?.value)
      for (const scale of this.model.delayedScales()) scale.advance()
      return { losses, norm }
    } finally {
      this.#keepTwins(false)
    }
  }

  #dropGraph(): void {
    this.#graph?.dispose()
    this.#graph = null
    this.#plain = { shape: '', steps: 0, bytes: 0 }
  }

  #begin(part: Phase): void {
    native.note(part, this.model.device.kind)
    this.options.phase(part)
  }

  async #skipped(norms: Tensor, spike: boolean): Promise<void> {
    const { maxSkips } = this.options
    this.skippedSteps += 1
    if (!spike && this.lossScale?.falls(this.optimizer.steps)) return
    this.skipsInARow += 1
    if (this.skipsInARow < maxSkips) return
    const values = await norms.read()
    const bad = spike ? [] : this.optimizer.clipped.filter((_, i) => !Number.isFinite(values[i]))
    const what = spike ? 'loss or gradient norm was a spike' : 'the gradient was not finite'
    diverged(`${what} in ${this.skipsInARow} steps in a row (maxSkips)`, bad)
  }
}

function diverged(text: string, params: readonly { name: string }[]): never {
  const names = params.map(({ name }) => name)
  const where = names.length > 0 ? `, in: ${names.join(', ')}` : ''
  throw new CoatError(`training: ${text}${where}`, 'diverged', 'training', names[0] ?? '')
}

/** Whether something that happens `every` so many steps, and after the last one, happens after this one. */
function due(step: number, every: number | undefined, steps: number): boolean {
  return every !== undefined && (step % every === 0 || step === steps)
}
