// A model that is one table of logits: row i says what follows token i, so that its losses and gradients are known numbers.
import {
  type Batch,
  build,
  type Dataset,
  type Device,
  type DeviceName,
  Module,
  matrixParam,
  ops,
  Param,
  type Recipe,
  recipes,
  scope,
  type Tensor,
  type TrainableModel,
} from '../lib/index.ts'

export class Bigram extends Module implements TrainableModel {
  readonly recipe: Recipe
  readonly device: Device
  readonly table: Param

  /** `rows` [tokens, followers]; parameters and arithmetic are f32, moments those of `states`. */
  constructor(
    rows: readonly (readonly number[])[],
    options: { states?: Pick<Recipe, 'm' | 'v'>; device?: DeviceName } = {},
  ) {
    super()
    const { states, device = 'cpu' } = options
    const made = build({ recipe: { ...recipes.fp32, ...states }, device })
    this.recipe = made.recipe
    this.device = made.device
    const [first = []] = rows
    this.table = new Param(made, 'table', matrixParam(made.recipe, rows.length, first.length, 0))
    this.table.write(Float32Array.from(rows.flat()))
  }

  loss(ids: Tensor, targets: Tensor, _sequence: number, weight: number): Tensor {
    return scope(() =>
      ops.crossEntropy(ops.embedding(ids, this.table.tensor, { y: 'f32', dw: 'f32' }), targets, weight),
    )
  }
}

/** Batches of one sequence each: what is listed, again and again. */
export function listed(...batches: { ids: number[]; targets: number[] }[]): Dataset {
  const all: Batch[] = batches.map(({ ids, targets }) => ({
    ids: Int32Array.from(ids),
    targets: Int32Array.from(targets),
    sequence: ids.length,
  }))
  const [{ sequence } = { sequence: 1 }] = all
  return { sequence, batch: (index) => structuredClone(all[index % all.length] as Batch), validation: () => [] }
}

/** The second of two logits, the first being 0, with which a token whose target is the first has this loss. */
export const logitOf = (loss: number) => Math.log(Math.exp(loss) - 1)
