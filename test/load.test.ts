// Parameters by name: out, in and frozen by pattern; and what a model makes of whole files.
import { existsSync, writeFileSync } from 'node:fs'
import { join, resolve } from 'node:path'
import { afterAll, describe, expect, it } from 'vitest'
import {
  ByteTokenizer,
  evaluate,
  freeze,
  HuggingFaceTokenizer,
  LlamaForCausalLM,
  load,
  memory,
  noGrad,
  perplexity,
  readSafetensors,
  scope,
  stateDict,
  Tensor,
  TextDataset,
  Trainer,
  writeTokens,
} from '../lib/index.ts'
import { eachInFolder } from './folders.ts'
import { smallLlama as config, sentence } from './values.ts'

let folder = ''
eachInFolder((path) => {
  folder = path
})
const before = memory().tensors
afterAll(() => expect(memory().tensors).toBe(before))

const modelOf = (seed: number, recipe: 'fp32' | 'bf16' | 'coat' = 'fp32') =>
  new LlamaForCausalLM(config, { recipe, seed })
async function valuesOf(model: LlamaForCausalLM, name: string): Promise<number[]> {
  const tensor = (await stateDict(model, name)).get(name) ?? expect.fail(`no ${name}`)
  return [...(await tensor.values())]
}

describe('stateDict and load', () => {
  it('have the names and shapes of checkpoints, parts of fused parameters too', async () => {
    using model = modelOf(1)
    const all = await stateDict(model)
    await model.savePretrained(folder)
    const { tensors } = await readSafetensors(folder)
    expect([...all.keys()].sort()).toEqual([...tensors.keys()].sort())
    for (const [name, stored] of tensors) {
      expect(all.get(name)?.shape).toEqual(stored.shape)
      expect(await all.get(name)?.values()).toEqual(await stored.values())
    }
    expect([...(await stateDict(model, '*layers.1.self_attn.k_proj*')).keys()]).toEqual([
      'model.layers.1.self_attn.k_proj.weight',
    ])
    expect([...(await stateDict(model, 'model.layers.0.self_attn.qkv_proj.weight')).keys()]).toHaveLength(3)
  })

  it('load what is like a pattern and leave the rest alone, from a state or a file', async () => {
    using source = modelOf(1)
    await source.savePretrained(folder)
    const states = [await stateDict(source), (await readSafetensors(folder)).tensors]
    for (const state of states)
      for (const recipe of ['fp32', 'bf16'] as const) {
        using model = modelOf(2, recipe)
        const names = await load(model, state, '*layers.0.self_attn.v_proj*')
        expect(names).toEqual(['model.layers.0.self_attn.v_proj.weight'])
        using other = modelOf(2, recipe)
        for (const [name, tensor] of await stateDict(other)) {
          const loaded = names.includes(name)
          using rounded = Tensor.from(
            await (loaded ? (state.get(name) as typeof tensor) : tensor).values(),
            tensor.shape,
            {
              format: recipe === 'fp32' || name.includes('norm') ? 'f32' : 'bf16',
            },
          )
          expect(await valuesOf(model, name), name).toEqual([...(await rounded.read())])
        }
      }
  })

  it('refuse patterns that name nothing, tensors that are missing, and other shapes; nothing changes then', async () => {
    using model = modelOf(1)
    using wide = new LlamaForCausalLM({ ...config, intermediate_size: 96 }, { recipe: 'fp32', seed: 2 })
    await expect(stateDict(model, 'model.layer.*')).rejects.toThrow(
      "stateDict: pattern is 'model.layer.*', which no parameter of the module is named like",
    )
    const state = await stateDict(wide)
    const norm = await valuesOf(model, 'model.norm.weight')
    await expect(load(model, state)).rejects.toThrow(
      "load: 'model.layers.0.mlp.gate_proj.weight' is [96, 32] and must be [80, 32]",
    )
    state.delete('model.norm.weight')
    state.delete('model.embed_tokens.weight')
    await expect(load(model, state)).rejects.toThrow(
      "load: the state has no tensor 'model.embed_tokens.weight', 'model.norm.weight'",
    )
    expect(await valuesOf(model, 'model.norm.weight')).toEqual(norm)
  })
})

describe('frozen parameters', () => {
  it.each(['bf16', 'coat'] as const)('%s: no gradient, no state, no change; others learn', async (recipe) => {
    using model = modelOf(1, recipe)
    const names = new Set([...freeze(model, 'model.embed_tokens.*'), ...freeze(model, '*layers.0.*')])
    const data = new TextDataset(sentence.repeat(40), { sequence: 16, seed: 7 })
    const first = await stateDict(model)
    using trainer = new Trainer(model, { data, batch: 2, steps: 4, optimizer: { lr: 0.01 } })
    const { optimizer } = trainer
    const frozen = model.parameters().filter(({ frozen }) => frozen)
    expect(optimizer.params).toEqual(model.parameters().filter(({ frozen }) => !frozen))
    for (const param of frozen) expect(() => optimizer.stateOf(param)).toThrow('is not trained')
    let seen = 0
    const step = optimizer.step.bind(optimizer)
    optimizer.step = (...args) => {
      seen += 1
      for (const { grad, name, frozen } of model.parameters()) expect(grad === null, name).toBe(frozen)
      step(...args)
    }
    for await (const { loss } of trainer.run()) expect(Number.isFinite(loss)).toBe(true)
    expect(seen).toBe(4)
    const last = await stateDict(model)
    for (const [name, tensor] of first) {
      const [was, is] = [await tensor.values(), await last.get(name)?.values()]
      const same = was.every((x, i) => x === is?.[i])
      expect(same, name).toBe(names.has(name))
    }
  })
  it('refuses a part of a fused parameter', () => {
    using model = modelOf(1)
    expect(() => freeze(model, '*q_proj*')).toThrow(
      "freeze: pattern is '*q_proj*', which names a part of 'model.layers.0.self_attn.qkv_proj.weight' alone; model.layers.0",
    )
    expect(model.parameters().some(({ frozen }) => frozen)).toBe(false)
  })
})

describe('perplexity', () => {
  const text = sentence.repeat(3)
  const stories = join(resolve(process.env.COAT_TEST_DATA ?? '../shared/data'), 'stories260k')
  const there = existsSync(join(stories, 'config.json'))
  if (!there) console.warn(`stories260k skipped: ${stories} is not there (set COAT_TEST_DATA)`)

  /** Sum of the losses of each sequence by itself, over what is predicted. */
  async function alone(model: LlamaForCausalLM, ids: ArrayLike<number>, sequence: number): Promise<number> {
    const all = Int32Array.from(ids)
    let sum = 0
    for (let start = 0; start + 1 < all.length; start += sequence) {
      const x = all.subarray(start, Math.min(start + sequence, all.length - 1))
      const y = all.subarray(start + 1, start + 1 + x.length)
      using loss = noGrad(() =>
        scope(() => model.loss(Tensor.from(x, [x.length]), Tensor.from(y, [y.length]), x.length, 1)),
      )
      sum += await loss.item()
    }
    return sum / (all.length - 1)
  }

  it('of a text counts every token but the first, whatever the batch', async () => {
    using model = modelOf(1)
    const file = join(folder, 'text.txt')
    writeFileSync(file, text)
    const ids = new ByteTokenizer().encode(text)
    for (const [sequence, batch] of [
      [16, 1],
      [16, 5],
      [64, 100],
      [7, 3],
    ] as const) {
      const { loss, tokens, perplexity: value } = await perplexity(model, file, { sequence, batch })
      expect(tokens).toBe(ids.length - 1)
      expect(Math.abs(loss - (await alone(model, ids, sequence)))).toBeLessThan(1e-5)
      expect(value).toBe(Math.exp(loss))
    }
    writeFileSync(file, 'a')
    await expect(perplexity(model, file, { sequence: 4 })).rejects.toThrow('has 1 tokens and must have at least 2')
    await expect(perplexity(model, file, { sequence: 0 })).rejects.toThrow('sequence is 0 and must be an integer')
  })

  it('of a token file and of JSON lines takes every sequence once', async () => {
    using model = modelOf(1)
    const ids = new ByteTokenizer().encode(text)
    const tokens = join(folder, 'tokens.bin')
    await writeTokens(tokens, ids, { vocabulary: 256 })
    const sequences = Math.floor((ids.length - 1) / 16)
    const result = await perplexity(model, tokens, { sequence: 16, batch: 4 })
    expect(result.tokens).toBe(16 * sequences)
    expect(Math.abs(result.loss - (await alone(model, ids.subarray(0, 16 * sequences + 1), 16)))).toBeLessThan(1e-5)
    const jsonl = join(folder, 'lines.jsonl')
    writeFileSync(jsonl, [1, 2, 3].map(() => `${JSON.stringify({ text: sentence })}\n`).join(''))
    expect((await perplexity(model, jsonl, { sequence: 32, batch: 2 })).tokens).toBe(3 * (sentence.length - 1))
  })

  it('of nothing is NaN, and of random weights about the vocabulary', async () => {
    using model = modelOf(1)
    const none = { ids: new Int32Array(16), targets: new Int32Array(16).fill(-100), sequence: 16 }
    expect(await evaluate(model, [none])).toEqual({ loss: Number.NaN, perplexity: Number.NaN, tokens: 0 })
    const file = join(folder, 'text.txt')
    writeFileSync(file, text)
    const { perplexity: value } = await perplexity(model, file, { sequence: 32 })
    expect(Math.abs(value / 256 - 1)).toBeLessThan(0.1)
  })

  it.skipIf(!there)('of a story is low for a model of stories', async () => {
    using model = await LlamaForCausalLM.fromPretrained(stories, { recipe: 'fp32' })
    const tokenizer = await HuggingFaceTokenizer.open(stories)
    const file = join(folder, 'story.txt')
    writeFileSync(file, 'Once upon a time, there was a little girl named Lily. She loved to play outside in the park.')
    const { perplexity: value } = await perplexity(model, file, { sequence: 128, tokenizer })
    expect(value).toBeGreaterThan(1)
    expect(value).toBeLessThan(8)
  })
})
