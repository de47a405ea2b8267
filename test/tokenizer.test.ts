// Tokenizers: ids of a real tokenizer.json against golden ones, round trips, and what is refused.
import { existsSync } from 'node:fs'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { ByteTokenizer, HuggingFaceTokenizer } from '../lib/index.ts'

let folder = ''
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'coat-tokenizer-'))
})
afterAll(() => rm(folder, { recursive: true }))

it('bytes go there and back', () => {
  const tokenizer = new ByteTokenizer()
  expect(tokenizer.decode(tokenizer.encode('Grüße, 日本'))).toBe('Grüße, 日本')
  expect(tokenizer.decode([0xff])).toBe('\ufffd')
  expect(tokenizer.special).toEqual({})
})

const words = {
  version: '1.0',
  added_tokens: [{ id: 5, content: '<end>', special: true }],
  normalizer: null,
  pre_tokenizer: { type: 'WhitespaceSplit' },
  post_processor: null,
  decoder: null,
  model: { type: 'WordLevel', vocab: { '<unk>': 0, red: 1, fish: 2, blue: 3 }, unk_token: '<unk>' },
}

it('an id beyond the gap of a vocabulary counts, and a tokenizer may lack a config', async () => {
  const file = join(folder, 'words.json')
  await writeFile(file, JSON.stringify(words))
  const tokenizer = await HuggingFaceTokenizer.open(file)
  expect(tokenizer.size).toBe(6)
  expect(tokenizer.special).toEqual({})
  expect([...tokenizer.encode('blue fish red cow <end>')]).toEqual([3, 2, 1, 0, 5])
  expect(() => tokenizer.decode([1, 6])).toThrow(/ids\[1\] is 6 and must be an integer in \[0, 6\)/)
})

it.each([
  ['no file', null, /cannot be read as JSON: ENOENT/],
  ['no JSON', '{"model":', /cannot be read as JSON/],
  ['no object', '[1]', /must hold a JSON object/],
  ['no vocabulary', '{"model":{"type":"BPE"}}', /has no model\.vocab and must be a tokenizer\.json/],
  ['an unknown kind', JSON.stringify({ ...words, decoder: { type: 'Odd' } }), /cannot be used: .*Odd/],
])('refuses %s', async (name, content, message) => {
  const file = join(folder, `${name}.json`)
  if (content !== null) await writeFile(file, content)
  await expect(HuggingFaceTokenizer.open(file)).rejects.toThrow(message)
  await expect(HuggingFaceTokenizer.open(file)).rejects.toThrow(file)
})

const stories = resolve(process.env.COAT_TEST_DATA ?? '../shared/data', 'stories260k')
describe.skipIf(!existsSync(stories))('stories260k', () => {
  it('gives the golden ids and their text', async () => {
    const tokenizer = await HuggingFaceTokenizer.open(stories)
    const golden = JSON.parse(await readFile(join(stories, 'golden.json'), 'utf8'))
    expect(tokenizer.size).toBe(512)
    expect(tokenizer.special).toEqual({ bos: 1, eos: 2, unk: 0 })
    expect([...tokenizer.encode(golden.prompt64.text)]).toEqual(golden.prompt64.token_ids)
    expect([...tokenizer.encode(golden.prompt64.text, { special: false })]).toEqual(golden.prompt64.token_ids.slice(1))
    golden.padded_batch.texts.forEach((text: string, row: number) => {
      const length = golden.padded_batch.lengths[row]
      expect([...tokenizer.encode(text)]).toEqual(golden.padded_batch.input_ids[row].slice(0, length))
    })
    expect(tokenizer.decode(golden.prompt64.token_ids)).toBe(golden.prompt64.text)
    expect(tokenizer.decode(golden.greedy.new_token_ids)).toBe(golden.greedy.text)
  })
  it('every text comes back', async () => {
    const tokenizer = await HuggingFaceTokenizer.open(join(stories, 'tokenizer.json'))
    for (const text of ['', ' ', 'a  b\n\tc ', 'Grüße, 日本 👩‍🚀', "don't , stop ."])
      expect(tokenizer.decode(tokenizer.encode(text))).toBe(text)
  })
})
