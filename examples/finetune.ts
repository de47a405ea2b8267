// Fine-tuning: a model that writes children's stories learns the language of Moby Dick, then to answer.
import { writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { mobyDick } from '../bench/corpus.ts'
import { start } from '../bench/options.ts'
import {
  adamw,
  cosine,
  type Dataset,
  HuggingFaceTokenizer,
  JsonlDataset,
  LlamaForCausalLM,
  type RecipeName,
  TextDataset,
  Trainer,
} from '../lib/index.ts'

/** Held-out losses before and after each part. */
export interface Tuned {
  text: [number, number]
  chat: [number, number]
}

/** `folder`: a model with its tokenizer in Hugging Face layout, such as stories260k. */
export async function finetune(
  folder: string,
  recipe: RecipeName = 'coat',
  steps = 200,
  print: (text: string) => void = console.log,
): Promise<Tuned> {
  using model = await LlamaForCausalLM.fromPretrained(folder, { recipe })
  const tokenizer = await HuggingFaceTokenizer.open(folder)
  const train = async (what: string, data: Dataset, lr: number, count: number): Promise<[number, number]> => {
    using trainer = new Trainer(model, {
      data,
      batch: 8,
      steps: count,
      optimizer: adamw({ lr, weightDecay: 0.1 }),
      schedule: cosine({ warmup: Math.ceil(count / 10) }),
    })
    const before = await trainer.validate(1000)
    for await (const _ of trainer.run());
    const after = await trainer.validate(1000)
    print(`${recipe}, ${what}: held-out loss ${before.toFixed(4)} → ${after.toFixed(4)}`)
    return [before, after]
  }

  const chapters = mobyDick()
  const text = await train('text', new TextDataset(chapters, { sequence: 128, seed: 1, tokenizer }), 5e-4, steps)

  // questions with answers: only what the assistant says counts
  const file = join(tmpdir(), `coat-chats-${process.pid}.jsonl`)
  const chats = chapters.map((chapter, i) => ({
    messages: [
      { role: 'user', content: `How does chapter ${i} begin?` },
      { role: 'assistant', content: chapter.replace(/\s+/g, ' ').trim().slice(0, 200) },
    ],
  }))
  writeFileSync(file, chats.map((chat) => `${JSON.stringify(chat)}\n`).join(''))
  const marks = (role: string) => ({ open: `${role}: `, close: '\n' })
  const data = await JsonlDataset.open(file, { sequence: 128, seed: 1, tokenizer, marks, heldOut: 0.1 })
  const chat = await train('chat', data, 1e-3, Math.ceil(steps / 5))

  const prompt = [...tokenizer.encode('user: How does chapter 3 begin?\nassistant: ')]
  print(tokenizer.decode(await model.generate(prompt, { maxTokens: 40, temperature: 0.5 })))
  return { text, chat }
}

await start(import.meta.filename, async ([folder, recipe]) => {
  if (folder === undefined) throw new Error('usage: node dist/examples/finetune.js <folder of a model> [recipe]')
  await finetune(folder, recipe as RecipeName | undefined)
})
