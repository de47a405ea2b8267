// The loop: batch → forward → backward → step. Yields one metrics object a step and writes nothing.
import { setImmediate } from 'node:timers/promises'
import { type CheckpointOptions, loadCheckpoint, type Resumed, saveCheckpoint } from './checkpoint.ts'
import type { Batch, Dataset } from './data.ts'
import type { Module } from './modules.ts'
import { CoatError, type MemoryUsage, native } from './native.ts'
import { documentStarts, ignoreIndex } from './ops.ts'
import { type AdamWOptions, type FullOptions, type Optimizer, optimizerOf } from './optimizer.ts'
import type { Recipe } from './recipes.ts'
import { constant, type Schedule } from './schedule.ts'
import { type LedgerRow, noGrad, type Recompute, recomputes, Tape } from './tape.ts'
import { type Device, memory, resetPeak, scope, Tensor } from './tensor.ts'
import type { UpdateQuality } from './updates.ts'

/** What the trainer needs of a model. */
export interface TrainableModel extends Module {
  readonly recipe: Recipe
  /** Sizes, where it has them in one place: a checkpoint records and compares them. */
  readonly config?: object
  readonly device: Device
  /** weight · Σ cross-entropy over the targets that are not ignored, f32 [1]. */
  loss(ids: Tensor, targets: Tensor, sequence: number, weight: number, starts?: Tensor | null): Tensor
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
  /** Consecutive skips after which training stops with an error (default 10). */
  maxSkips?: number
  /** Called as the parts of a step are queued, to tell their times apart. */
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
  /** What backward makes again instead of keeping it (default `flow`). */
  recompute?: Recompute
  /**
   * In every so many steps, measure how much of the update the formats of parameters kept (default 0: never): `updates` of
   * the step's metrics. Such a step updates twice and reads all parameters back.
   */
  measureUpdates?: number
  /** Saves during `run()`, after every so many steps and after the last one; `resume(dir)` goes on from there. */
  checkpoint?: CheckpointOptions
}

/** What is queued next: a micro-batch's forward, its backward, the update; `end`: nothing more in this step. */
export type Phase = 'forward' | 'backward' | 'update' | 'end'

/** One step, as it happened. */
export interface StepMetrics {
  /** Steps done after this one, from 1. */
  step: number
  /** Mean cross-entropy by tokens, in nats. */
  loss: number
  /** Norm of all gradients before clipping. */
  gradNorm: number
  lr: number
  /** Tokens of this step that took part in the loss. */
  tokens: number
  tokensPerSecond: number
  /** Milliseconds of this step. */
  time: number
  /** Whether the update was skipped because a gradient was not finite: nothing changed then, but see `optimizerInBackward`. */
  skipped: boolean
  /** Skipped updates so far. */
  skippedSteps: number
  /** Infinities that quantization saturated in this step. */
  infs: number
  /** Bytes live after the step and their peaks within it. */
  memory: MemoryUsage
  /** How much of the update was kept, in steps that measure it. */
  updates?: UpdateQuality
}

const known = [
  ...['data', 'batch', 'accumulate', 'steps', 'optimizer', 'schedule', 'clip', 'maxSkips', 'phase'],
  ...['optimizerInBackward', 'cacheWeights', 'recompute', 'measureUpdates', 'checkpoint'],
]

/** Trains a model; `run()` is an async generator of metrics. Owns the optimizer's state. */
export class Trainer implements Disposable {
  readonly model: TrainableModel
  readonly optimizer: Optimizer
  readonly options: Required<Omit<TrainerOptions, 'optimizer' | 'checkpoint'>> & {
    readonly checkpoint: Required<CheckpointOptions> | null
  }
  /** Batches taken so far, skipped steps included. */
  batches = 0
  skippedSteps = 0
  /** Skipped steps since the last that was done. */
  skipsInARow = 0
  /** Norm of the gradients of the last step that was done. */
  lastNorm: number | null = null
  #ledger: { shape: string; rows: LedgerRow[] } | null = null

  constructor(model: TrainableModel, options: TrainerOptions) {
    checkNames(options, known)
    const { optimizer, checkpoint, ...rest } = options
    const full = {
      accumulate: 1,
      schedule: constant(),
      clip: 1,
      maxSkips: 10,
      phase: () => {},
      recompute: 'flow' as const,
      optimizerInBackward: false,
      cacheWeights: false,
      measureUpdates: 0,
      ...rest,
      checkpoint: checked(checkpoint),
    }
    for (const name of ['batch', 'accumulate', 'steps', 'maxSkips'] as const)
      if (!Number.isSafeInteger(full[name]) || full[name] < 1)
        throw new CoatError(
          `Trainer: ${name} is ${full[name]} and must be an integer of at least 1`,
          'value',
          'Trainer',
          name,
        )
    if (!(full.clip >= 0))
      throw new CoatError(`Trainer: clip is ${full.clip} and must be at least 0`, 'value', 'Trainer', 'clip')
    if (!recomputes.includes(full.recompute))
      throw new CoatError(
        `Trainer: recompute is ${full.recompute} and must be one of ${recomputes.join(', ')}`,
        'value',
        'Trainer',
        'recompute',
      )
    const { measureUpdates: measured } = full
    if (!Number.isSafeInteger(measured) || measured < 0 || (measured > 0 && full.optimizerInBackward))
      throw new CoatError(
        `Trainer: measureUpdates is ${measured} and must be an integer of at least 0, and 0 with optimizerInBackward`,
        'value',
        'Trainer',
        'measureUpdates',
      )
    if (full.optimizerInBackward && full.accumulate > 1)
      throw new CoatError(
        `Trainer: accumulate is ${full.accumulate} and must be 1 with optimizerInBackward, which keeps no gradients to add to`,
        'value',
        'Trainer',
        'accumulate',
      )
    this.model = model
    this.options = full
    this.optimizer = optimizerOf(model, model.recipe, optimizer)
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
    return loadCheckpoint(this, dir, options)
  }

  /** Runs until `steps` are done. The caller may stop at any step and go on with another `run()`. */
  async *run(): AsyncGenerator<StepMetrics, void, void> {
    while (this.optimizer.steps < this.options.steps) {
      const metrics = await this.step()
      if (!metrics.skipped) await this.#save()
      yield metrics
      await setImmediate()
    }
  }

  /** One step: `accumulate` micro-batches, then an update, or a skip when a gradient is not finite. */
  async step(): Promise<StepMetrics> {
    const { data, batch, accumulate, steps, schedule, clip, maxSkips, optimizerInBackward, cacheWeights } = this.options
    const { optimizer } = this
    const started = performance.now()
    const infsBefore = memory().infs
    resetPeak()
    optimizer.dropGrads()
    const batches = Array.from({ length: accumulate }, (_, i) => data.batch(this.batches + i, batch))
    const tokens = batches.reduce((sum, { targets }) => sum + counted(targets), 0)
    const losses: Tensor[] = []
    let loss = 0
    let gradNorm = 0
    let skip = false
    let updates: UpdateQuality | null = null
    const { measureUpdates: every } = this.options
    const measured = every > 0 && (optimizer.steps + 1) % every === 0
    const lr = optimizer.options.lr * schedule(optimizer.steps, steps)
    using within = optimizerInBackward ? optimizer.stepInBackward(lr, clip, this.lastNorm) : null
    try {
      this.#keepTwins(cacheWeights)
      for (const micro of batches) losses.push(this.#forwardBackward(micro, tokens === 0 ? 0 : 1 / tokens))
      this.#keepTwins(false)
      this.#begin('update')
      const norm = within?.end() ?? optimizer.gradNorm(clip)
      try {
        if (measured) updates = await optimizer.measuredStep(lr, norm.clip)
        else if (!within) optimizer.step(lr, norm.clip)
        for (const scale of this.model.delayedScales()) scale.advance()
        this.#begin('end')
        for (const part of losses) loss += await part.item()
        gradNorm = await norm.norm.item()
        skip = (await norm.clip.read())[1] !== 0
        if (skip) await this.#skipped(norm.norms, maxSkips)
      } finally {
        norm.norm.dispose()
        norm.norms.dispose()
        norm.clip.dispose()
      }
    } finally {
      this.#keepTwins(false)
      for (const part of losses) part.dispose()
      optimizer.dropGrads()
    }
    this.batches += accumulate
    if (!skip) {
      optimizer.advance()
      this.skipsInARow = 0
      this.lastNorm = gradNorm
    }
    const time = performance.now() - started
    const usage = memory()
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
      ...(updates && !skip ? { updates: { kept: updates.kept, read: updates.read } } : {}),
    }
  }

  /** Mean loss by tokens over `sequences` held-out sequences, in nats; parameters and state stay as they are. */
  async validate(sequences = 64): Promise<number> {
    const { data, batch } = this.options
    let sum = 0
    let tokens = 0
    for (const part of data.validation(sequences, batch)) {
      const count = counted(part.targets)
      const loss = noGrad(() => scope(() => this.#loss(part, 1))).keep()
      sum += await loss.item()
      tokens += count
      loss.dispose()
      await setImmediate()
    }
    return sum / tokens
  }

  dispose(): void {
    this.optimizer.dropGrads()
    this.optimizer.dispose()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  async #save(): Promise<void> {
    const { checkpoint, steps } = this.options
    const done = this.optimizer.steps
    if (checkpoint && (done % checkpoint.every === 0 || done === steps))
      await saveCheckpoint(this, checkpoint.dir, checkpoint)
  }

  #keepTwins(keeps: boolean): void {
    if (!this.options.cacheWeights) return
    for (const { tensor } of this.optimizer.params) {
      tensor.keepsTwins = keeps
      tensor.dropTwins()
    }
  }

  #forwardBackward(micro: Batch, weight: number): Tensor {
    using tape = new Tape({ recompute: this.options.recompute })
    return scope(() => {
      this.#begin('forward')
      const loss = tape.record(() => this.#loss(micro, weight))
      const shape = `${micro.ids.length} ${micro.sequence} ${micro.starts !== undefined}`
      if (this.#ledger?.shape !== shape) this.#ledger = { shape, rows: tape.ledger() }
      this.#begin('backward')
      tape.backward(loss)
      return loss.keep()
    })
  }

  #begin(part: Phase): void {
    native.note(part, this.model.device.kind)
    this.options.phase(part)
  }

  #loss({ ids, targets, sequence, starts }: Batch, weight: number): Tensor {
    const { device } = this.model
    const [inputs, labels] = [ids, targets].map((values) => Tensor.from(values, [values.length], { device }))
    const documents = starts ? documentStarts(starts, sequence, device) : null
    return this.model.loss(inputs as Tensor, labels as Tensor, sequence, weight, documents)
  }

  async #skipped(norms: Tensor, maxSkips: number): Promise<void> {
    this.skippedSteps += 1
    this.skipsInARow += 1
    if (this.skipsInARow < maxSkips) return
    const values = await norms.read()
    const bad = this.optimizer.clipped.filter((_, i) => !Number.isFinite(values[i]))
    throw new CoatError(
      `training: the gradient was not finite in ${this.skipsInARow} steps in a row (maxSkips), in: ${bad.map(({ name }) => name).join(', ')}`,
      'diverged',
      'training',
      bad[0]?.name ?? '',
    )
  }
}

function checked(checkpoint: CheckpointOptions | undefined): Required<CheckpointOptions> | null {
  if (checkpoint === undefined) return null
  const full = { keep: 3, ...checkpoint }
  const demand = (name: string, value: unknown, holds: boolean, rule: string) => {
    if (!holds) throw new CoatError(`Trainer: ${name} is ${value} and must be ${rule}`, 'value', 'Trainer', name)
  }
  checkNames(full, ['dir', 'every', 'keep'], 'checkpoint.')
  demand('checkpoint.dir', full.dir, typeof full.dir === 'string' && full.dir !== '', 'the path of a folder')
  for (const name of ['every', 'keep'] as const)
    demand(
      `checkpoint.${name}`,
      full[name],
      Number.isSafeInteger(full[name]) && full[name] >= 1,
      'an integer of at least 1',
    )
  return full
}

function counted(targets: Int32Array): number {
  let count = 0
  for (const target of targets) if (target !== ignoreIndex) count += 1
  return count
}

function checkNames(options: object, names: readonly string[], where = ''): void {
  for (const key of Object.keys(options))
    if (!names.includes(key))
      throw new CoatError(
        `Trainer: option '${where}${key}' is unknown; the options are ${names.join(', ')}`,
        'option',
        'Trainer',
        `${where}${key}`,
      )
}
