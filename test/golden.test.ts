// A real pretrained Llama (stories260k in Hugging Face layout) against golden float64 values: forward, gradients, AdamW.
import { existsSync, readFileSync } from 'node:fs'
import { join, resolve } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { AdamW, LlamaForCausalLM, memory, noGrad, scope, Tape, Tensor } from '../lib/index.ts'

interface Recorded {
  shape: number[]
  norm: number
  first8: number[]
}
interface Golden {
  prompt64: {
    token_ids: number[]
    logits: Record<string, number[]>
    mean_loss: number
    gradient_norm: number
    gradients: Record<string, Recorded>
  }
  greedy: { prompt_ids: number[]; new_token_ids: number[] }
  adamw: {
    settings: { lr: number; beta1: number; beta2: number; eps: number; weight_decay_matrices: number }
    first_step: { loss_after: number; parameters: Record<string, Recorded> }
    losses: number[]
  }
  padded_batch: {
    input_ids: number[][]
    labels: number[][]
    token_count: number
    mean_loss_by_tokens: number
    gradient_norm: number
    gradient_norms: Record<string, number>
  }
}

const folder = join(resolve(process.env.COAT_TEST_DATA ?? '../shared/data'), 'stories260k')
const there = existsSync(join(folder, 'golden.json'))
if (!there) console.warn(`golden tests skipped: ${folder} is not there (set COAT_TEST_DATA)`)
const golden = (there ? JSON.parse(readFileSync(join(folder, 'golden.json'), 'utf8')) : {}) as Golden

function norm(x: ArrayLike<number>): number {
  return Math.sqrt(Array.from(x).reduce((sum, value) => sum + value * value, 0))
}
/** ‖a − b‖ / ‖b‖ */
function distance(a: ArrayLike<number>, b: ArrayLike<number>): number {
  return norm(Array.from(b, (value, i) => value - (a[i] as number))) / norm(b)
}
function relative(a: number, b: number): number {
  return Math.abs(a - b) / Math.abs(b)
}

/** Next-token targets of one sequence: every id predicts the one after it, the last predicts nothing. */
function shifted(ids: readonly number[]): number[] {
  return [...ids.slice(1), -100]
}

function lossOf(
  model: LlamaForCausalLM,
  ids: readonly number[][],
  labels: readonly number[][],
  backward: boolean,
): Tensor {
  const targets = labels.flatMap(shifted)
  const weight = 1 / targets.filter((target) => target !== -100).length
  const sequence = (ids[0] as number[]).length
  using tape = new Tape()
  return scope(() => {
    const input = Tensor.from(Int32Array.from(ids.flat()), [ids.length * sequence])
    const target = Tensor.from(Int32Array.from(targets), [targets.length])
    const run = () => model.loss(input, target, sequence, weight)
    if (!backward) return noGrad(run)
    const loss = tape.record(run)
    tape.backward(loss)
    return loss
  })
}

/** Values of a named tensor of the checkpoint, as the fused parameters hold it. */
async function partOf(model: LlamaForCausalLM, name: string, pick: 'tensor' | 'grad'): Promise<Float32Array> {
  const { param, rows } = model.find(name) ?? expect.fail(`no parameter ${name}`)
  const tensor = param[pick] ?? expect.fail(`no ${pick} of ${name}`)
  const values = (await tensor.read()) as Float32Array
  const width = values.length / (param.tensor.shape[0] as number)
  return values.slice(rows[0] * width, rows[1] * width)
}

async function take(tensor: Tensor): Promise<number> {
  using held = tensor
  return held.item()
}

describe.skipIf(!there)('stories260k', () => {
  const before = memory().tensors
  afterAll(() => expect(memory().tensors).toBe(before))

  describe('fp32', () => {
    let model: LlamaForCausalLM
    beforeAll(async () => {
      model = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    })
    afterAll(() => model.dispose())

    it('has the recorded logits', async () => {
      const { token_ids: ids, logits } = golden.prompt64
      const values = await scopeRead(() => model.forward(Tensor.from(Int32Array.from(ids), [64]), 64))
      for (const [position, recorded] of Object.entries(logits)) {
        const row = values.subarray(Number(position) * 512, (Number(position) + 1) * 512)
        expect(distance(row, recorded), `logits at ${position}`).toBeLessThan(1e-4)
      }
    })

    it('has the recorded loss and gradients', async () => {
      const { token_ids: ids, mean_loss, gradient_norm, gradients } = golden.prompt64
      expect(relative(await take(lossOf(model, [ids], [ids], true)), mean_loss)).toBeLessThan(1e-4)
      let squares = 0
      for (const [name, recorded] of Object.entries(gradients)) {
        const values = await partOf(model, name, 'grad')
        expect(values.length).toBe(recorded.shape.reduce((a, b) => a * b, 1))
        expect(relative(norm(values), recorded.norm), `norm of ${name}`).toBeLessThan(1e-4)
        expect(distance(values.subarray(0, 8), recorded.first8), `first8 of ${name}`).toBeLessThan(1e-4)
        squares += norm(values) ** 2
      }
      expect(relative(Math.sqrt(squares), gradient_norm)).toBeLessThan(1e-4)
      for (const param of model.parameters()) param.dropGrad()
    })

    it('continues the recorded greedy text', async () => {
      const { prompt_ids, new_token_ids } = golden.greedy
      expect(await model.generate(prompt_ids, { maxTokens: new_token_ids.length })).toEqual(new_token_ids)
    })

    it('averages a padded batch by tokens', async () => {
      const { input_ids, labels, token_count, mean_loss_by_tokens, gradient_norms, gradient_norm } = golden.padded_batch
      expect(labels.flatMap(shifted).filter((label) => label !== -100).length).toBe(token_count)
      expect(relative(await take(lossOf(model, input_ids, labels, true)), mean_loss_by_tokens)).toBeLessThan(1e-4)
      let squares = 0
      for (const [name, recorded] of Object.entries(gradient_norms)) {
        const own = norm(await partOf(model, name, 'grad'))
        expect(relative(own, recorded), name).toBeLessThan(1e-4)
        squares += own ** 2
      }
      expect(relative(Math.sqrt(squares), gradient_norm)).toBeLessThan(1e-4)
      for (const param of model.parameters()) param.dropGrad()
    })
  })

  it('takes the recorded AdamW steps in fp32', async () => {
    using model = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    const { first_step, losses } = golden.adamw
    const embedding = 'model.embed_tokens.weight'
    const unk = (await partOf(model, embedding, 'tensor')).slice(0, 8)
    const seen = await train(model, async (step) => {
      if (step > 0) return
      for (const [key, { norm: length, first8 }] of Object.entries(first_step.parameters)) {
        const values = await partOf(model, key, 'tensor')
        expect(relative(norm(values), length), `norm of ${key}`).toBeLessThan(1e-4)
        expect(distance(values.subarray(0, 8), first8), `first8 of ${key}`).toBeLessThan(1e-4)
      }
      // gradients of this row are about 1e-10: how far it moves tells whether eps is added after the bias correction
      const stepped = await partOf(model, embedding, 'tensor')
      const { lr, weight_decay_matrices: decay } = golden.adamw.settings
      const decayed = Array.from(unk, (p) => p * (1 - lr * decay))
      const goal = first_step.parameters[embedding]?.first8 as number[]
      const move = (to: ArrayLike<number>) => decayed.map((p, i) => (to[i] as number) - p)
      expect(distance(move(stepped), move(goal))).toBeLessThan(0.01)
    })
    losses.forEach((recorded, i) => {
      expect(relative(seen[i] as number, recorded), `loss after ${i} steps`).toBeLessThan(1e-4)
    })
  })

  // One passage of 63 tokens says little about a rounding: the loss by tokens over everything recorded (182 predictions).
  it.each([
    ['bf16', 0.01],
    ['coat', 0.03],
  ] as const)('%s: loss over all recorded text within %d of fp32, and the steps go down', async (name, tolerance) => {
    using reference = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    using model = await LlamaForCausalLM.fromPretrained(folder, { recipe: name })
    const text = golden.greedy.prompt_ids.concat(golden.greedy.new_token_ids)
    const all = async (of: LlamaForCausalLM): Promise<number> => {
      const { prompt64, padded_batch } = golden
      const first = await take(lossOf(of, [prompt64.token_ids], [prompt64.token_ids], false))
      const second = await take(lossOf(of, padded_batch.input_ids, padded_batch.labels, false))
      const third = await take(lossOf(of, [text], [text], false))
      return (63 * first + 55 * second + 64 * third) / (63 + 55 + 64)
    }
    expect(relative(await all(model), await all(reference))).toBeLessThan(tolerance)
    const seen = await train(model, async () => {})
    for (let i = 1; i < seen.length; i++) expect(seen[i] as number).toBeLessThan(seen[i - 1] as number)
    expect(seen.at(-1)).toBeLessThan(0.03)
  })
})

/** The recorded AdamW settings on prompt64: the loss before every step, and `after(step)` behind each. */
async function train(model: LlamaForCausalLM, after: (step: number) => Promise<void>): Promise<number[]> {
  const { settings, losses } = golden.adamw
  using optimizer = new AdamW(model, model.recipe, {
    lr: settings.lr,
    betas: [settings.beta1, settings.beta2],
    eps: settings.eps,
    weightDecay: settings.weight_decay_matrices,
  })
  const ids = golden.prompt64.token_ids
  const seen: number[] = []
  for (let step = 0; step < losses.length; step++) {
    seen.push(await take(lossOf(model, [ids], [ids], true)))
    optimizer.step(settings.lr)
    optimizer.advance()
    optimizer.dropGrads()
    await after(step)
  }
  return seen
}

async function scopeRead(f: () => Tensor): Promise<Float32Array> {
  using tensor = noGrad(() => scope(f))
  return (await tensor.read()) as Float32Array
}
