// A process to kill: trains, saves every step, and prints every file operation just before it.
import { writeSync } from 'node:fs'
import promises from 'node:fs/promises'
import { syncBuiltinESMExports } from 'node:module'

const say = (line) => writeSync(1, `${line}\n`)
for (const name of ['open', 'mkdir', 'rename', 'rm', 'link', 'writeFile']) {
  const real = promises[name]
  promises[name] = async (...args) => {
    say(name)
    const result = await real(...args)
    if (name !== 'open') return result
    for (const method of ['write', 'sync']) {
      const own = result[method].bind(result)
      result[method] = (...rest) => {
        say(method)
        return own(...rest)
      }
    }
    return result
  }
}
syncBuiltinESMExports()

const { LlamaForCausalLM, TextDataset, Trainer } = await import('../dist/lib/index.js')
const [dir, resume] = process.argv.slice(2)
const config = { hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 256 }
const model = new LlamaForCausalLM(config, { recipe: 'coat', seed: 1 })
const data = new TextDataset('Call me Ishmael. Some years ago. '.repeat(40), { sequence: 16, seed: 7 })
const checkpoint = { dir, every: 1, keep: 2 }
const callbacks = { saved: (_, step) => say(`saved ${step}`) }
const trainer = new Trainer(model, { data, batch: 1, steps: 100_000, checkpoint, callbacks })
if (resume) say(`resumed ${(await trainer.resume(dir)).step}`)
for await (const { step, loss } of trainer.run()) say(`step ${step} ${loss}`)
