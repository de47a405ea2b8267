// The examples run, and what they train learns; fine-tuning in FP8 ends near BF16.
import { existsSync, readdirSync } from 'node:fs'
import { join, resolve } from 'node:path'
import { describe, expect, it } from 'vitest'
import { customModule } from '../examples/custom-module.ts'
import { finetune } from '../examples/finetune.ts'
import { pretrain } from '../examples/pretrain.ts'
import { LlamaForCausalLM } from '../lib/index.ts'
import { eachInFolder } from './folders.ts'

let folder = ''
eachInFolder((path) => {
  folder = path
})

it('pretrain: resumes, learns, and leaves a model', async () => {
  const said: string[] = []
  await pretrain([folder], (text) => said.push(text))
  expect(said[1]).toBe('resumed after step 20')
  expect(said.map((line) => /^step \d+/.exec(line)?.[0]).filter(Boolean)).toEqual(['step 20', 'step 40', 'step 60'])
  const held = said.flatMap((line) =>
    /held-out (.*)/.exec(line)?.[1] ? [Number(/held-out (.*)/.exec(line)?.[1])] : [],
  )
  expect(held[2]).toBeLessThan(held[0] as number)
  expect(Number(/perplexity of the last chapters: ([\d.]+)/.exec(said.join('\n'))?.[1])).toBeLessThan(24)
  expect(readdirSync(join(folder, 'checkpoints')).sort()).toEqual(['step-00000040', 'step-00000060'])
  using model = await LlamaForCausalLM.fromPretrained(join(folder, 'model'), { recipe: 'bf16' })
  expect(model.config.hidden_size).toBe(64)
})

it.each(['fp32', 'bf16', 'coat'] as const)('custom-module: %s learns', async (recipe) => {
  const [before, after] = await customModule(recipe, () => {})
  expect(before).toBeGreaterThan(5.4)
  expect(after).toBeLessThan(2.75)
})

describe('finetune', () => {
  const stories = join(resolve(process.env.COAT_TEST_DATA ?? '../shared/data'), 'stories260k')
  const there = existsSync(join(stories, 'config.json'))
  if (!there) console.warn(`stories260k skipped: ${stories} is not there (set COAT_TEST_DATA)`)

  it.skipIf(!there)(
    'coat ends within 0.5 % of bf16 on text, and both learn to answer',
    { timeout: 600_000 },
    async () => {
      const said: string[] = []
      const bf16 = await finetune(stories, 'bf16', 100, (text) => said.push(text))
      const coat = await finetune(stories, 'coat', 100, (text) => said.push(text))
      for (const { text, chat } of [bf16, coat]) {
        expect(text[1]).toBeLessThan(text[0] - 0.6)
        expect(chat[1]).toBeLessThan(chat[0] - 0.05)
      }
      expect(coat.text[1] / bf16.text[1], said.join('\n')).toBeLessThan(1.005)
      expect(coat.text[1] / bf16.text[1], said.join('\n')).toBeGreaterThan(0.995)
    },
  )
})
