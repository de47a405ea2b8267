// Models saved and loaded again: equal bits, names and settings of Hugging Face, tied embeddings, saves that fail.
import { existsSync } from 'node:fs'
import { cp, mkdir, readdir, readFile, writeFile } from 'node:fs/promises'
import { join, resolve } from 'node:path'
import { afterEach, describe, expect, it } from 'vitest'
import {
  LlamaForCausalLM,
  memory,
  noGrad,
  readSafetensors,
  StoredTensor,
  scope,
  Tensor,
  type TensorSource,
  writeSafetensors,
} from '../lib/index.ts'
import { eachInFolder } from './folders.ts'

let folder = ''
let tensorsBefore = 0
eachInFolder((path) => {
  folder = path
  tensorsBefore = memory().tensors
})
afterEach(() => expect(memory().tensors).toBe(tensorsBefore))

/** Every file of the folder, as it is. */
async function contents(): Promise<Record<string, Buffer>> {
  const files = (await readdir(folder, { withFileTypes: true })).filter((entry) => entry.isFile())
  return Object.fromEntries(
    await Promise.all(files.map(async ({ name }) => [name, await readFile(join(folder, name))])),
  )
}

const tiny = {
  hidden_size: 8,
  intermediate_size: 12,
  num_hidden_layers: 2,
  num_attention_heads: 2,
  num_key_value_heads: 1,
  vocab_size: 16,
}
async function logits(model: LlamaForCausalLM): Promise<Uint8Array> {
  const ids = Int32Array.from({ length: 8 }, (_, i) => (i * 7) % model.config.vocab_size)
  using y = noGrad(() => scope(() => model.forward(Tensor.from(ids, [8]), 8)))
  return y.readBytes()
}
// toEqual looks at every byte by itself, which takes seconds
function same(a: Uint8Array, b: Uint8Array | undefined): boolean {
  return b !== undefined && Buffer.compare(a, b) === 0
}
async function expectSame(a: LlamaForCausalLM, b: LlamaForCausalLM): Promise<void> {
  const [mine, theirs] = [a.parameters(), b.parameters()]
  expect(theirs.map(({ name }) => name)).toEqual(mine.map(({ name }) => name))
  for (const [i, { name, tensor }] of mine.entries())
    expect(same(await tensor.readBytes(), await theirs[i]?.tensor.readBytes()), name).toBe(true)
  expect(same(await logits(a), await logits(b))).toBe(true)
}

describe('savePretrained', () => {
  const data = join(resolve(process.env.COAT_TEST_DATA ?? '../shared/data'), 'stories260k')
  const there = existsSync(join(data, 'config.json'))
  if (!there) console.warn(`stories260k skipped: ${data} is not there (set COAT_TEST_DATA)`)

  it.skipIf(!there).each(['fp32', 'bf16'] as const)('stories260k in %s comes back bit for bit', async (recipe) => {
    using model = await LlamaForCausalLM.fromPretrained(data, { recipe })
    await model.savePretrained(folder)
    using one = await LlamaForCausalLM.fromPretrained(folder, { recipe })
    await expectSame(model, one)
    await model.savePretrained(folder, { shardBytes: 100_000 })
    expect((await readdir(folder)).filter((name) => name.endsWith('.safetensors')).length).toBeGreaterThan(3)
    using shards = await LlamaForCausalLM.fromPretrained(folder, { recipe })
    await expectSame(model, shards)
  })

  it.skipIf(!there)('stories260k has the names, shapes, values and settings that it came with', async () => {
    using model = await LlamaForCausalLM.fromPretrained(data, { recipe: 'fp32' })
    await model.savePretrained(folder)
    const [was, is] = [await readSafetensors(data), await readSafetensors(folder)]
    expect([...is.tensors.keys()].sort()).toEqual([...was.tensors.keys()].sort())
    for (const [name, tensor] of was.tensors) {
      expect(is.tensors.get(name)?.shape, name).toEqual(tensor.shape)
      expect(same(await tensor.bytes(), await is.tensors.get(name)?.bytes()), name).toBe(true)
    }
    const config = async (from: string) => JSON.parse(await readFile(join(from, 'config.json'), 'utf8'))
    expect(await config(folder)).toEqual(await config(data))
  })

  it.each(['f32', 'bf16'] as const)('in %s whatever the parameters are', async (dtype) => {
    using model = new LlamaForCausalLM(tiny, { recipe: dtype === 'f32' ? 'bf16' : 'fp32', seed: 1 })
    await model.savePretrained(folder, { dtype })
    const { tensors } = await readSafetensors(folder)
    expect(new Set([...tensors.values()].map((tensor) => tensor.dtype))).toEqual(new Set([dtype.toUpperCase()]))
    const { param, rows } = model.find('model.layers.1.self_attn.v_proj.weight') ?? expect.fail('no v_proj')
    using rounded = Tensor.from((await param.tensor.read()) as Float32Array, param.tensor.shape, { format: dtype })
    const goal = (await rounded.read()).slice(rows[0] * 8, rows[1] * 8)
    expect(await tensors.get('model.layers.1.self_attn.v_proj.weight')?.values()).toEqual(goal)
    expect(JSON.parse(await readFile(join(folder, 'config.json'), 'utf8')).torch_dtype).toBe(
      dtype === 'bf16' ? 'bfloat16' : 'float32',
    )
    await expect(model.savePretrained(folder, { dtype: 'f16' as 'f32' })).rejects.toThrow(
      /dtype is 'f16' and must be 'f32' or 'bf16'/,
    )
  })

  it.each([
    ['mistral', 'MistralForCausalLM'],
    ['qwen2', 'Qwen2ForCausalLM'],
    ['olmo', 'OlmoForCausalLM'],
    ['llama', 'LlamaForCausalLM'],
  ] as const)('%s comes back, negative zeros too', async (model_type, architecture) => {
    using model = new LlamaForCausalLM({ ...tiny, model_type }, { recipe: 'bf16', seed: 3 })
    const values = (await model.embedding.tensor.read()) as Float32Array
    values[3] = -0
    model.embedding.write(values)
    expect(Object.is((await model.embedding.tensor.read())[3], -0)).toBe(true)
    await model.savePretrained(folder)
    using back = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'bf16' })
    await expectSame(model, back)
    expect(JSON.parse(await readFile(join(folder, 'config.json'), 'utf8')).architectures).toEqual([architecture])
  })

  it('a stretched rotation is kept, wherever it was given', async () => {
    const fields = { rope_type: 'linear', factor: 2 }
    for (const change of [{ rope_scaling: fields }, { rope_parameters: { ...fields, rope_theta: 5e5 } }]) {
      using model = new LlamaForCausalLM({ ...tiny, ...change }, { recipe: 'fp32', seed: 3 })
      await model.savePretrained(folder)
      using back = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
      await expectSame(model, back)
      expect(back.config).toEqual(model.config)
      expect(back.config.rope_scaling).toMatchObject(fields)
    }
  })

  it('C8: tied embeddings are one copy and an alias; either name loads, neither does not', async () => {
    using model = new LlamaForCausalLM({ ...tiny, tie_word_embeddings: true }, { recipe: 'fp32', seed: 4 })
    await model.savePretrained(folder)
    const { tensors, metadata } = await readSafetensors(folder)
    const [embedding, head] = ['model.embed_tokens.weight', 'lm_head.weight'] as const
    expect(tensors.has(embedding)).toBe(true)
    expect(tensors.has(head)).toBe(false)
    expect(metadata).toEqual({ format: 'pt', [head]: embedding })
    using both = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    await expectSame(model, both)
    const before = await logits(both)
    both.embedding.write(new Float32Array(both.embedding.tensor.numel).fill(0.5))
    expect(same(await logits(both), before)).toBe(false)
    expect(both.head).toBe(null)

    // a head of its own finds its values by the alias
    const config = join(folder, 'config.json')
    const text = await readFile(config, 'utf8')
    await writeFile(config, text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    using untied = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    const own = untied.head?.weight.tensor ?? expect.fail('no head')
    expect(same(await own.readBytes(), await model.embedding.tensor.readBytes())).toBe(true)
    expect(same(await logits(untied), before)).toBe(true)
    await writeFile(config, text)

    const others = new Map(tensors)
    others.delete(embedding)
    await writeSafetensors(join(folder, 'other'), others)
    await writeSafetensors(join(folder, 'head'), [...others, [head, tensors.get(embedding) as StoredTensor]])
    for (const name of ['other', 'head']) await cp(join(folder, 'config.json'), join(folder, name, 'config.json'))
    using only = await LlamaForCausalLM.fromPretrained(join(folder, 'head'), { recipe: 'fp32' })
    await expectSame(model, only)
    await expect(LlamaForCausalLM.fromPretrained(join(folder, 'other'), { recipe: 'fp32' })).rejects.toThrow(
      /has no tensor 'model\.embed_tokens\.weight'/,
    )
  })

  it('names all that is missing, and what has another shape', async () => {
    using model = new LlamaForCausalLM(tiny, { recipe: 'fp32' })
    await model.savePretrained(folder)
    const { tensors } = await readSafetensors(folder)
    const [up, down] = ['model.layers.0.mlp.up_proj.weight', 'model.layers.0.mlp.down_proj.weight'] as const
    const { path, dtype, range } = tensors.get(up) ?? expect.fail('no up_proj')
    const changed = new Map(tensors).set(up, new StoredTensor(path, up, dtype, [8, 12], range))
    await writeSafetensors(folder, changed)
    await expect(LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })).rejects.toThrow(
      /'model\.layers\.0\.mlp\.up_proj\.weight' \[8, 12\], which must be \[12, 8\]/,
    )
    await model.savePretrained(folder)
    const fewer = new Map(tensors)
    for (const name of [up, down, 'lm_head.weight']) fewer.delete(name)
    await writeSafetensors(folder, fewer)
    const failing = LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    for (const name of [up, down, 'lm_head.weight']) await expect(failing).rejects.toThrow(`'${name}'`)
  })

  it('refuses tensors without a place, and FP8 codes without scales; old tables are passed over', async () => {
    using model = new LlamaForCausalLM(tiny, { recipe: 'fp32', seed: 1 })
    await model.savePretrained(folder)
    const { tensors } = await readSafetensors(folder)
    const norm = tensors.get('model.norm.weight') as StoredTensor
    const withNorm = (name: string, source: TensorSource = norm) =>
      writeSafetensors(folder, new Map<string, TensorSource>(tensors).set(name, source))
    await withNorm('model.layers.0.self_attn.rotary_emb.inv_freq')
    using back = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    await expectSame(model, back)
    await withNorm('model.layers.0.self_attn.q_norm.weight')
    await expect(LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })).rejects.toThrow(
      /gives no place: 'model\.layers\.0\.self_attn\.q_norm\.weight'/,
    )
    await withNorm('model.norm.weight', { dtype: 'F8_E4M3', shape: [8], pieces: () => [new Uint8Array(8)] })
    await expect(LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })).rejects.toThrow(
      /'model\.norm\.weight' F8_E4M3, whose scales are unknown: it must be F32, BF16 or F16/,
    )
  })

  it('leaves config and weights as they were when it fails', async () => {
    using model = new LlamaForCausalLM(tiny, { recipe: 'fp32', seed: 1 })
    using other = new LlamaForCausalLM(tiny, { recipe: 'fp32', seed: 2 })
    await model.savePretrained(folder)
    await mkdir(join(folder, 'model-00002-of-00003.safetensors'))
    const before = await contents()
    const total = other.parameters().reduce((sum, { tensor }) => sum + tensor.numel * 4, 0)
    await expect(other.savePretrained(folder, { shardBytes: Math.ceil(total / 2.5) })).rejects.toThrow(/is a folder/)
    expect(await contents()).toEqual(before)
    using back = await LlamaForCausalLM.fromPretrained(folder, { recipe: 'fp32' })
    await expectSame(model, back)
  })
})
