// Pre-training: a book becomes a token file, a small model learns from it, and a second run goes on from a checkpoint.
import { mkdirSync } from 'node:fs'
import { join } from 'node:path'
import { mobyDick } from '../bench/corpus.ts'
import { start } from '../bench/options.ts'
import {
  adamw,
  ByteTokenizer,
  encodeDocuments,
  LlamaForCausalLM,
  perplexity,
  TokenDataset,
  Trainer,
  writeTokens,
  wsd,
} from '../lib/index.ts'

export async function pretrain(
  [out = 'runs/pretrain']: readonly string[],
  print: (text: string) => void = console.log,
): Promise<void> {
  const tokenizer = new ByteTokenizer()
  const [file, held] = [join(out, 'train.bin'), join(out, 'held-out.bin')]
  mkdirSync(out, { recursive: true })
  const chapters = mobyDick()
  await writeTokens(file, encodeDocuments(chapters.slice(0, -2), tokenizer, 0), { vocabulary: tokenizer.size })
  await writeTokens(held, encodeDocuments(chapters.slice(-2), tokenizer, 0), { vocabulary: tokenizer.size })

  const config = {
    vocab_size: tokenizer.size,
    hidden_size: 64,
    intermediate_size: 160,
    num_hidden_layers: 2,
    num_attention_heads: 4,
    tie_word_embeddings: true,
    initializer_range: 0.08,
  }
  const dir = join(out, 'checkpoints')
  /** A model and a trainer as if nothing had been before; only the checkpoint connects one with the next. */
  const trainUntil = async (last: number): Promise<void> => {
    using model = new LlamaForCausalLM(config, { recipe: 'coat', seed: 1 })
    using data = await TokenDataset.open(file, { sequence: 64, seed: 1 })
    using trainer = new Trainer(model, {
      data,
      batch: 8,
      steps: 60,
      optimizer: adamw({ lr: 4e-3, weightDecay: 0.1 }),
      schedule: wsd({ warmup: 10, decay: 20 }),
      spike: { sigma: 10, window: 16 },
      validate: { every: 20, sequences: 16 },
      checkpoint: { dir, every: 20, keep: 2 },
    })
    if (last > 30) print(`resumed after step ${(await trainer.resume(dir)).step}`)
    for await (const { step, loss, validation } of trainer.run()) {
      if (validation !== undefined) print(`step ${step}  loss ${loss.toFixed(3)}  held-out ${validation.toFixed(3)}`)
      if (step === last) break
    }
    if (last < 60) return
    const { perplexity: value } = await perplexity(model, held, { sequence: 64 })
    print(`perplexity of the last chapters: ${value.toFixed(2)} a byte`)
    let text = 'The whale '
    const prompt = [...tokenizer.encode(text)]
    for await (const id of model.stream(prompt, { maxTokens: 60, temperature: 0.7, topP: 0.9 }))
      text += tokenizer.decode([id])
    print(text)
    await model.savePretrained(join(out, 'model'))
  }
  await trainUntil(30)
  await trainUntil(60)
}

await start(import.meta.filename, pretrain)
