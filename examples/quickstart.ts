// The first thing to run: a small byte-level Llama on the State of the Union addresses, in BF16 and in FP8.
import { join } from 'node:path'
import { Command } from 'commander'
import { corpus } from '../bench/corpus.ts'
import { quickstart as settings } from '../bench/models.ts'
import { count, recipeNames, start } from '../bench/options.ts'
import { peakRows, percentile, type Row, recipeRows, writeRows } from '../bench/row.ts'
import {
  adamw,
  cosine,
  type Device,
  device,
  LlamaForCausalLM,
  type RecipeName,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import {
  claim,
  comparison,
  MetricsFile,
  Progress,
  peakOf,
  peakQuantities,
  type Run,
  reportHtml,
  showNumber,
  textTable,
  writeWhole,
} from '../lib/report.ts'

const { config, batch, sequence, seed, lr, warmup } = settings
const prompt = 'The people of the United States '

interface Result extends Run {
  recipe: RecipeName
  validation: number
  parameters: number
  /** Continues the prompt; after the last recipe only. */
  sample: string
}

async function train(
  recipe: RecipeName,
  data: TextDataset,
  steps: number,
  where: Device,
  metrics: MetricsFile,
  sampled: boolean,
): Promise<Result> {
  using model = new LlamaForCausalLM(config, { recipe, device: where, seed })
  using trainer = new Trainer(model, {
    data,
    batch,
    steps,
    optimizer: adamw({ lr, betas: [0.9, 0.95], weightDecay: 0.1 }),
    schedule: cosine({ warmup: Math.min(warmup, steps) }),
    clip: 1,
  })
  const done: Result['steps'][number][] = []
  {
    using progress = new Progress(recipe, steps)
    for await (const step of trainer.run()) {
      done.push(step)
      metrics.write(recipe, step)
      progress.update(step)
    }
  }
  const validation = await trainer.validate(128)
  const { tokenizer } = data
  const ids = sampled
    ? await model.generate([...tokenizer.encode(prompt)], { maxTokens: 160, temperature: 0.8, seed })
    : []
  return {
    recipe,
    steps: done,
    validation,
    parameters: model.parameters().reduce((sum, { tensor }) => sum + tensor.numel, 0),
    sample: (prompt + tokenizer.decode(ids)).replace(/\p{Cc}/gu, ' '),
  }
}

const ratesOf = ({ steps }: Run) => steps.map(({ tokensPerSecond }) => tokensPerSecond)

function rowsOf(results: readonly Result[], where: Device, steps: number): Row[] {
  const { hidden_size: hidden, num_hidden_layers: layers } = config
  const fields = { device: where.kind, shape: { hidden, layers, batch, sequence, steps } }
  const train = { ...fields, kind: 'train' } as const
  return [
    ...recipeRows(results, { ...train, name: 'quickstart/validation', metric: 'loss', unit: 'nats' }, (result) => [
      result.validation,
    ]),
    ...recipeRows(results, { ...train, name: 'quickstart/tokens', metric: 'tokens', unit: 'tokens/s' }, ratesOf),
    ...peakRows(results, 'quickstart', fields),
  ]
}

/** The whole program; `print` takes what it has to say. */
export async function quickstart(args: readonly string[], print: (text: string) => void = console.log): Promise<void> {
  const {
    steps,
    recipe,
    out,
    json,
    device: name,
  } = new Command('quickstart')
    .description('Trains a small Llama on the State of the Union addresses, once a recipe, and compares.')
    .option('--steps <n>', 'training steps', count, 160)
    .option('--recipe <names>', 'recipes with commas between them', recipeNames, ['bf16', 'coat'] as RecipeName[])
    .option('--device <name>', 'cpu or cuda; by default the best there is')
    .option('--out <dir>', 'folder for metrics.jsonl and report.html', 'runs/quickstart')
    .option('--json <file>', 'write bench rows to this file, as a JSON array')
    .allowExcessArguments(false)
    .exitOverride()
    .parse(args, { from: 'user' })
    .opts<{ steps: number; recipe: RecipeName[]; device?: string; out: string; json?: string }>()
  using where = device(name)
  if (json) claim(json)
  const data = new TextDataset(corpus(), { sequence, seed })
  using metrics = new MetricsFile(join(out, 'metrics.jsonl'))
  const results: Result[] = []
  for (const one of recipe) results.push(await train(one, data, steps, where, metrics, one === recipe.at(-1)))

  const table = comparison(recipe, [
    { name: 'validation loss', values: results.map(({ validation }) => validation), show: (x) => x.toFixed(4) },
    { name: 'tokens/s', values: results.map((result) => percentile(ratesOf(result), 50)), show: showNumber },
    ...peakQuantities(results.map((result) => peakOf(result.steps))),
  ])
  const last = results.at(-1) as Result
  const report = join(out, 'report.html')
  const notes = [
    `A byte-level Llama of ${showNumber(last.parameters)} parameters, ${steps} steps of ${batch} × ${sequence} bytes of the State of the Union addresses on ${where.kind.toUpperCase()}; same seed and batches for every recipe. Losses are nats per byte.`,
  ]
  const texts = { [`Sample (${last.recipe})`]: last.sample }
  writeWhole(report, await reportHtml({ title: 'coat-fp8 quickstart', notes, runs: results, table, texts }))
  if (json) writeRows(json, rowsOf(results, where, steps))
  print(`\n${textTable(table)}\n\nSample (${last.recipe}): ${last.sample}\n\nCharts: ${report}`)
}

await start(import.meta.filename, quickstart)
