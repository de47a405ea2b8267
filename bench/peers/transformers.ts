// This library's half of transformers_check.py: what a model computes, written down, and models of transformers read.
import { mkdirSync, readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import {
  CoatError,
  type Device,
  device,
  LlamaForCausalLM,
  noGrad,
  type RecipeName,
  scope,
  Tape,
  Tensor,
  type TensorSource,
  writeSafetensors,
} from '../../lib/index.ts'
import { start } from '../options.ts'

function ids(tokens: readonly number[], where: Device): Tensor {
  return Tensor.from(Int32Array.from(tokens), [tokens.length], { device: where })
}

function source(values: Float32Array, shape: readonly number[]): TensorSource {
  return { dtype: 'F32', shape, pieces: () => [new Uint8Array(values.buffer, values.byteOffset, values.byteLength)] }
}

async function logitsOf(model: LlamaForCausalLM, tokens: readonly number[]): Promise<TensorSource> {
  using y = noGrad(() => scope(() => model.forward(ids(tokens, model.device), tokens.length)))
  return source((await y.read()) as Float32Array, y.shape)
}

/** Mean loss of predicting each token but the first, and the gradients of all parts of parameters. */
async function gradientsOf(model: LlamaForCausalLM, tokens: readonly number[]): Promise<[string, TensorSource][]> {
  const targets = [...tokens.slice(1), -100]
  using tape = new Tape()
  using loss = scope(() => {
    const made = tape.record(() =>
      model.loss(ids(tokens, model.device), ids(targets, model.device), tokens.length, 1 / (tokens.length - 1)),
    )
    tape.backward(made)
    return made
  })
  const list: [string, TensorSource][] = [['loss', source((await loss.read()) as Float32Array, [1])]]
  for (const { grad, tensor, parts } of model.parameters()) {
    const values = (await (grad as Tensor).read()) as Float32Array
    const width = values.length / (tensor.shape[0] as number)
    for (const { name, rows } of parts)
      list.push([
        `gradient ${name}`,
        source(values.slice(rows[0] * width, rows[1] * width), [rows[1] - rows[0], ...tensor.shape.slice(1)]),
      ])
  }
  return list
}

const formats = { fp32: 'f32', bf16: 'bf16' } as const

/** `give`: the model of `folder` as this library saves and computes it, into `work`. */
async function give(folder: string, work: string, where: Device): Promise<void> {
  const { prompt64 } = JSON.parse(readFileSync(join(folder, 'golden.json'), 'utf8'))
  const tokens: number[] = prompt64.token_ids
  for (const recipe of ['fp32', 'bf16'] as const) {
    using model = await LlamaForCausalLM.fromPretrained(folder, { recipe, device: where })
    const out = join(work, `ours-${recipe}`)
    mkdirSync(out, { recursive: true })
    await model.savePretrained(out, { dtype: formats[recipe] })
    const values = [['logits', await logitsOf(model, tokens)] as const, ...(await gradientsOf(model, tokens))]
    await writeSafetensors(join(work, `ours-${recipe}.safetensors`), values)
  }
}

/** `take`: the logits of every folder `theirs-*` of `work`, for its tokens.json, into `taken-*`. */
async function take(work: string, where: Device): Promise<void> {
  for (const name of readdirSync(work).filter((entry) => /^theirs-[^.]+$/.test(entry))) {
    const tokens: number[] = JSON.parse(readFileSync(join(work, `${name}.json`), 'utf8'))
    const values: [string, TensorSource][] = []
    for (const recipe of ['fp32', 'bf16'] satisfies RecipeName[]) {
      using model = await LlamaForCausalLM.fromPretrained(join(work, name), { recipe, device: where })
      values.push([`logits ${recipe}`, await logitsOf(model, tokens)])
    }
    await writeSafetensors(join(work, `${name.replace('theirs', 'taken')}.safetensors`), values)
  }
}

await start(import.meta.filename, async ([what, ...paths]) => {
  const [first = '', second = ''] = paths
  if (what === 'give') {
    using where = device(paths[2])
    await give(first, second, where)
  } else if (what === 'take') {
    using where = device(paths[1])
    await take(first, where)
  } else
    throw new CoatError(
      `'${what}' must be give <model> <work> [device] or take <work> [device]`,
      'value',
      'transformers',
    )
})
