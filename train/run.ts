// One run after its configuration: model and data, the loop with its logs, and what it leaves behind.
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs'
import { copyFile, readFile } from 'node:fs/promises'
import { join } from 'node:path'
import {
  adamw,
  ByteTokenizer,
  CoatError,
  constant,
  cosine,
  type Dataset,
  type Device,
  device,
  EventFile,
  freeze,
  HuggingFaceTokenizer,
  JsonlDataset,
  LlamaForCausalLM,
  linear,
  lion,
  MetricsFile,
  Progress,
  type Schedule,
  type StepMetrics,
  sgd,
  TextDataset,
  TokenDataset,
  type Tokenizer,
  Trainer,
  wsd,
} from '../lib/index.ts'
import { peakOf, peakQuantities, reportHtml, type Step, showNumber, writeWhole } from '../lib/report.ts'
import type { RunConfig } from './config.ts'

export interface RunFlags {
  resume?: boolean
  /** Settings that may differ from the checkpoint's. */
  allow?: readonly string[]
}

/** Trains after a configuration; `print` takes what it has to say. Resolves to the signal that ended the run early. */
export async function train(
  config: RunConfig,
  flags: RunFlags,
  print: (text: string) => void,
): Promise<NodeJS.Signals | null> {
  using where = device(config.device)
  const tokenizer = await tokenizerOf(config)
  const { data, vocabulary } = await dataOf(config, tokenizer)
  using model = await modelOf(config, where, vocabulary)
  const { out, validate, spike, checkpoint, recompute, optimizerInBackward, cacheWeights, lossScale, mu } = config
  for (const pattern of config.freeze) freeze(model, pattern)
  using trainer = new Trainer(model, {
    data,
    batch: config.batch,
    accumulate: config.accumulate,
    steps: config.steps,
    clip: config.clip,
    maxSkips: config.maxSkips,
    optimizer: optimizerOf(config),
    schedule: scheduleOf(config),
    ...(spike ? { spike } : {}),
    ...(recompute ? { recompute } : {}),
    ...(optimizerInBackward ? { optimizerInBackward } : {}),
    ...(cacheWeights ? { cacheWeights } : {}),
    ...(lossScale !== undefined ? { lossScale } : {}),
    ...(mu !== undefined ? { mu } : {}),
    ...(validate ? { validate } : {}),
    ...(checkpoint ? { checkpoint: { ...checkpoint, dir: join(out, 'checkpoints') } } : {}),
  })
  const parameters = model.parameters().reduce((sum, { tensor }) => sum + tensor.numel, 0)
  print(`${showNumber(parameters)} parameters, ${recipeName(config)}, ${where.description}`)
  const from = flags.resume ? await resumed(trainer, out, flags.allow ?? [], print) : 0
  const metricsFile = join(out, 'metrics.jsonl')
  using metrics = new MetricsFile(metricsFile, flags.resume ? { after: from } : {})
  if (metrics.dropped > 0) print(`${metricsFile}: dropped ${metrics.dropped} lines of steps after ${from}`)
  using events = new EventFile(join(out, 'tensorboard'), flags.resume ? { from: from + 1 } : {})
  const steps: (Step & { validation?: number })[] = flags.resume ? stepsIn(metricsFile) : []
  {
    using progress = new Progress(recipeName(config), config.steps)
    for await (const step of trainer.run({ signals: ['SIGINT', 'SIGTERM'] })) {
      metrics.write(recipeName(config), step)
      events.write(step.step, scalarsOf(step))
      progress.update(step)
      if (!step.skipped) steps.push(step)
    }
  }
  if (trainer.stopped) {
    const kept = checkpoint ? `; step ${trainer.optimizer.steps} is saved, --resume goes on from it` : ''
    print(`stopped by ${trainer.stopped}${kept}`)
    return trainer.stopped as NodeJS.Signals
  }
  const sample = await sampleOf(config, model, tokenizer)
  await writeReport(config, steps, sample)
  await saveModel(config, model)
  const last = steps.at(-1)
  const held = last?.validation === undefined ? '' : `, held-out loss ${last.validation.toFixed(4)}`
  print(`step ${last?.step}, loss ${last?.loss.toFixed(4)}${held}`)
  if (sample) print(sample)
  print(`${join(out, 'model')} has the model, ${join(out, 'report.html')} the charts`)
  return null
}

const recipeName = ({ recipe }: RunConfig) => (typeof recipe === 'string' ? recipe : 'custom')

async function tokenizerOf({ model, data }: RunConfig): Promise<Tokenizer> {
  if (data.tokenizer !== undefined) return HuggingFaceTokenizer.open(data.tokenizer)
  if (model.from !== undefined && existsSync(join(model.from, 'tokenizer.json')))
    return HuggingFaceTokenizer.open(model.from)
  return new ByteTokenizer()
}

/** The data, and above which id there is none. */
async function dataOf({ data }: RunConfig, tokenizer: Tokenizer): Promise<{ data: Dataset; vocabulary: number }> {
  const { sequence, seed, heldOut } = data
  const order = { sequence, seed, heldOut }
  const vocabulary = tokenizer.size
  if (data.tokens !== undefined) {
    const files = await TokenDataset.open(data.tokens, order)
    return { data: files, vocabulary: files.vocabulary }
  }
  if (data.jsonl !== undefined)
    return { data: await JsonlDataset.open(data.jsonl, { ...order, tokenizer }), vocabulary }
  const documents = textFiles([data.text ?? []].flat()).map((file) => readFileSync(file, 'utf8'))
  return { data: new TextDataset(documents, { ...order, tokenizer }), vocabulary }
}

/** The files themselves, and of folders all that end in one of `endings`, by name. */
export function textFiles(paths: readonly string[], endings: readonly string[] = ['.txt']): string[] {
  return paths.flatMap((path) => {
    let folder: boolean
    try {
      folder = statSync(path).isDirectory()
    } catch (error) {
      throw new CoatError(`${path} cannot be read: ${(error as Error).message}`, 'path', 'coat-train', 'data')
    }
    if (!folder) return [path]
    const names = readdirSync(path, { recursive: true, encoding: 'utf8' }).sort()
    const files = names
      .filter((name) => endings.some((ending) => name.endsWith(ending)))
      .map((name) => join(path, name))
    if (files.length === 0)
      throw new CoatError(`${path} has no file that ends in ${endings.join(' or ')}`, 'path', 'coat-train', 'data')
    return files
  })
}

async function modelOf(config: RunConfig, where: Device, vocabulary: number): Promise<LlamaForCausalLM> {
  const { model, recipe, seed } = config
  const options = { recipe, device: where, seed }
  const made =
    model.from === undefined
      ? new LlamaForCausalLM({ vocab_size: vocabulary, ...model.config }, options)
      : await LlamaForCausalLM.fromPretrained(model.from, options)
  const has = made.config.vocab_size
  if (has >= vocabulary) return made
  made.dispose()
  throw new CoatError(
    `the model's vocab_size is ${has} and must be at least ${vocabulary}, the vocabulary of the data`,
    'config',
    'coat-train',
    'model.config.vocab_size',
  )
}

function optimizerOf({ optimizer: { rule, ...options } }: RunConfig) {
  return { adamw, lion, sgd }[rule](options)
}

function scheduleOf({ schedule: { name, ...options } }: RunConfig): Schedule {
  return { constant, linear, cosine, wsd }[name](options)
}

async function resumed(
  trainer: Trainer,
  out: string,
  allow: readonly string[],
  print: (text: string) => void,
): Promise<number> {
  const { folder, step, warnings } = await trainer.resume(join(out, 'checkpoints'), { allow })
  for (const warning of warnings) print(`warning: ${warning}`)
  print(`resumed ${folder}`)
  return step
}

function scalarsOf({ loss, gradNorm, lr, tokensPerSecond, skippedSteps, memory, validation, lossScale }: StepMetrics) {
  return {
    loss,
    ...(validation === undefined ? {} : { validation }),
    'gradient norm': gradNorm,
    'learning rate': lr,
    'tokens per second': tokensPerSecond,
    'skipped steps': skippedSteps,
    ...(lossScale === undefined ? {} : { 'loss scale': lossScale }),
    'peak bytes': memory.peak.total,
  }
}

/** Steps that an earlier part of the run left; skipped ones do not count. */
function stepsIn(file: string): (Step & { validation?: number })[] {
  const lines = readFileSync(file, 'utf8').split('\n').filter(Boolean)
  return lines.map((line) => JSON.parse(line)).filter(({ loss, skipped }) => loss !== null && !skipped)
}

async function sampleOf({ sample }: RunConfig, model: LlamaForCausalLM, tokenizer: Tokenizer): Promise<string | null> {
  if (!sample) return null
  const { prompt, ...options } = sample
  const ids = await model.generate([...tokenizer.encode(prompt)], options)
  return prompt + tokenizer.decode(ids).replace(/[^\P{Cc}\n]/gu, ' ')
}

async function writeReport(config: RunConfig, steps: readonly Step[], sample: string | null): Promise<void> {
  const name = recipeName(config)
  const validation = (steps.at(-1) as { validation?: number } | undefined)?.validation
  const peaks = peakQuantities([peakOf(steps)])
  const html = await reportHtml({
    title: `coat-train ${config.out}`,
    notes: [`${steps.length} steps of ${config.batch * config.accumulate} × ${config.data.sequence} tokens, ${name}.`],
    runs: [{ recipe: name, steps, ...(validation === undefined ? {} : { validation }) }],
    table: { head: ['', name], rows: peaks.map(({ name: row, values, show }) => [row, show(values[0] as number)]) },
    texts: { Configuration: JSON.stringify(config, null, 2), ...(sample ? { Sample: sample } : {}) },
  })
  writeWhole(join(config.out, 'report.html'), html)
}

/** The model as transformers loads it, with the tokenizer that it has. */
async function saveModel({ out, save, model: { from }, data }: RunConfig, model: LlamaForCausalLM): Promise<void> {
  const folder = join(out, 'model')
  await model.savePretrained(folder, save?.dtype ? { dtype: save.dtype } : {})
  const source = data.tokenizer ?? from
  if (source === undefined) return
  for (const name of ['tokenizer.json', 'tokenizer_config.json'])
    if (await readFile(join(source, name)).then(Boolean, () => false))
      await copyFile(join(source, name), join(folder, name))
}
