// A model of one's own: what a byte says about the next, with FP8 layers from the library and a loss of its own.
import { mobyDick } from '../bench/corpus.ts'
import { start } from '../bench/options.ts'
import {
  build,
  type Device,
  gradientOf,
  LayerNorm,
  Linear,
  MLP,
  Module,
  matrixParam,
  ops,
  Param,
  type Recipe,
  type RecipeName,
  scope,
  type Tensor,
  TextDataset,
  type TrainableModel,
  Trainer,
} from '../lib/index.ts'

const hidden = 64

/** Bytes → embedding → one gated layer around a residual → head. Its parameters are found by themselves, and named by it. */
class NextByte extends Module implements TrainableModel {
  readonly recipe: Recipe
  readonly device: Device
  readonly embedding: Param
  readonly norm: LayerNorm
  readonly mlp: MLP
  readonly last: LayerNorm
  readonly head: Linear

  constructor(options: { recipe: RecipeName; seed: number }) {
    super()
    const made = build(options)
    this.recipe = made.recipe
    this.device = made.device
    this.embedding = new Param(made, 'bytes.weight', matrixParam(made.recipe, 256, hidden, 0.1))
    this.norm = new LayerNorm(made, 'norm', { size: hidden, eps: 1e-5 })
    this.mlp = new MLP(made, 'mlp', { hidden, inner: 160, activation: 'swiglu' })
    // `plain`: in the format of the residual stream, as heads are best
    this.last = new LayerNorm(made, 'last', { size: hidden, eps: 1e-5, plain: true })
    this.head = new Linear(made, 'head', { inputs: hidden, outputs: 256, plain: true })
  }

  /** Logits [M, 256] of ids [M]. Everything made inside a scope is freed, but for what it returns. */
  forward(ids: Tensor): Tensor {
    const { stream } = this.recipe
    return scope(() => {
      const x = ops.embedding(ids, this.embedding.tensor, { y: stream, dw: gradientOf(this.recipe) })
      // what the next norm reads is made with the sum
      const y = ops.add(x, this.mlp.forward(this.norm.forward(x)), stream, this.last.reader)
      return this.head.forward(this.last.forward(y))
    })
  }

  loss(ids: Tensor, targets: Tensor, _sequence: number, weight: ops.Weight): Tensor {
    return scope(() => ops.crossEntropy(this.forward(ids), targets, weight))
  }
}

/** Held-out losses before and after. */
export async function customModule(
  recipe: RecipeName = 'coat',
  print: (text: string) => void = console.log,
): Promise<[number, number]> {
  using model = new NextByte({ recipe, seed: 1 })
  const data = new TextDataset(mobyDick(), { sequence: 64, seed: 1 })
  using trainer = new Trainer(model, { data, batch: 16, steps: 80, optimizer: { lr: 5e-3 } })
  const before = await trainer.validate(32)
  for await (const _ of trainer.run());
  const after = await trainer.validate(32)
  print(`${recipe}: held-out loss ${before.toFixed(3)} → ${after.toFixed(3)} nats a byte`)
  return [before, after]
}

await start(import.meta.filename, async ([recipe]) => {
  await customModule(recipe as RecipeName | undefined)
})
