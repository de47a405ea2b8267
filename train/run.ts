// One run after its configuration: model and data, the loop with its logs, and what it leaves behind.
import { existsSync, readFileSync } from 'node:fs'
import { copyFile, readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { foldersOf } from '../lib/checkpoint.ts'
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
import { readText, shownFiles, textFiles } from './texts.ts'

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
  await expectFresh(config, flags)
  using where = device(config.device)
  const tokenizer = await tokenizerOf(config)
  const { data, vocabulary } = await dataOf(config, tokenizer)
  using model = await modelOf(config, where, vocabulary)
  const { out, validate, spike, checkpoint, recompute, optimizerInBackward, cacheWeights, graph } = config
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
    ...(graph ? { graph } : {}),
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
    const kept = checkpoint
      ? `; step ${trainer.optimizer.steps} is saved, --resume goes on from it`
      : '; nothing is saved, for the configuration has no checkpoint'
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

/** Without `resume` a run must not take the place of one that could go on. */
async function expectFresh({ out }: RunConfig, { resume = false, allow = [] }: RunFlags): Promise<void> {
  if (!resume && allow.length > 0) refuse('--allow is for a run that goes on and needs --resume', '--allow')
  const [newest] = resume ? [] : await foldersOf(join(out, 'checkpoints'))
  if (newest)
    refuse(
      `${newest.folder} is of a run that --resume goes on with; a new one needs another out, or ${out} to be removed`,
      'out',
    )
}

function refuse(message: string, argument: string): never {
  throw new CoatError(message, 'config', 'coat-train', argument)
}

/** Errors of f with the key of the configuration that they are about. */
async function about<Result>(key: string, f: () => Result | Promise<Result>): Promise<Result> {
  try {
    return await f()
  } catch (error) {
    if (!(error instanceof CoatError)) throw error
    throw new CoatError(`${key}: ${error.message}`, error.code, error.op, key, { cause: error })
  }
}

const recipeName = ({ recipe }: RunConfig) => (typeof recipe === 'string' ? recipe : 'custom')

async function tokenizerOf({ model: { from }, data: { tokenizer } }: RunConfig): Promise<Tokenizer> {
  if (tokenizer !== undefined) return about('data.tokenizer', () => HuggingFaceTokenizer.open(tokenizer))
  if (from !== undefined && existsSync(join(from, 'tokenizer.json')))
    return about('model.from', () => HuggingFaceTokenizer.open(from))
  return new ByteTokenizer()
}

/** The data, and above which id there is none. */
async function dataOf(
  { data, sample }: RunConfig,
  tokenizer: Tokenizer,
): Promise<{ data: Dataset; vocabulary: number }> {
  const { sequence, seed, heldOut, tokens, jsonl, text = [] } = data
  const order = { sequence, seed, heldOut }
  const vocabulary = tokenizer.size
  if (tokens !== undefined) {
    const files = await about('data.tokens', () => TokenDataset.open(tokens, order))
    if (sample && files.vocabulary > vocabulary)
      refuse(
        `sample needs data.tokenizer, with which data.tokens were made: they have a vocabulary of ${files.vocabulary}, and ${data.tokenizer === undefined ? 'bytes have' : 'it has'} one of ${vocabulary}`,
        'data.tokenizer',
      )
    return { data: files, vocabulary: files.vocabulary }
  }
  if (jsonl !== undefined)
    return { data: await about('data.jsonl', () => JsonlDataset.open(jsonl, { ...order, tokenizer })), vocabulary }
  const files = await about('data.text', () => textFiles([text].flat()))
  const documents = await about('data.text', () => Promise.all(files.map(readText)))
  const made = () => new TextDataset(documents, { ...order, tokenizer })
  return { data: await about(`data.text: ${shownFiles(files)}`, made), vocabulary }
}

async function modelOf(config: RunConfig, where: Device, vocabulary: number): Promise<LlamaForCausalLM> {
  const { model, recipe, seed } = config
  const options = { recipe, device: where, seed }
  const { from } = model
  const made =
    from === undefined
      ? await about('model', () => new LlamaForCausalLM({ vocab_size: vocabulary, ...model.config }, options))
      : await about('model.from', () => LlamaForCausalLM.fromPretrained(from, options))
  const { vocab_size: ids, max_position_embeddings: positions } = made.config
  const { sequence } = config.data
  if (ids >= vocabulary && (positions === undefined || positions >= sequence)) return made
  made.dispose()
  if (ids < vocabulary)
    refuse(
      `the model's vocab_size is ${ids} and must be at least ${vocabulary}, the vocabulary of the data`,
      'model.config.vocab_size',
    )
  refuse(
    `data.sequence is ${sequence} and must be at most ${positions}, the model's max_position_embeddings`,
    'data.sequence',
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

function scalarsOf({ loss, gradNorm, lr, tokensPerSecond, skippedSteps, memory, validation }: StepMetrics) {
  return {
    loss,
    ...(validation === undefined ? {} : { validation }),
    'gradient norm': gradNorm,
    'learning rate': lr,
    'tokens per second': tokensPerSecond,
    'skipped steps': skippedSteps,
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
