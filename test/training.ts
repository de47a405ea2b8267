// A model and its trainer that live and go together, for tests of whole trainings.
import { createHash } from 'node:crypto'
import type { LlamaForCausalLM, StepMetrics, Trainer } from '../lib/index.ts'

export class Training implements Disposable {
  readonly model: LlamaForCausalLM
  readonly trainer: Trainer
  constructor(model: LlamaForCausalLM, trainer: Trainer) {
    this.model = model
    this.trainer = trainer
  }
  /** Runs to the end. */
  async steps(): Promise<StepMetrics[]> {
    const list: StepMetrics[] = []
    for await (const metrics of this.trainer.run()) list.push(metrics)
    return list
  }
  async losses(): Promise<number[]> {
    return (await this.steps()).map(({ loss }) => loss)
  }
  /** A digest of parameters and states. */
  async bits(): Promise<string> {
    const hash = createHash('sha256')
    for (const param of this.model.parameters()) {
      const { m, v, master } = this.trainer.optimizer.stateOf(param)
      for (const tensor of [param.tensor, m, v, master]) if (tensor) hash.update(await tensor.readBytes())
    }
    return hash.digest('hex')
  }
  [Symbol.dispose](): void {
    this.trainer.dispose()
    this.model.dispose()
  }
}
