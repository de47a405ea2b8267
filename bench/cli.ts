#!/usr/bin/env node
// npx coat-bench: rows about ops and about training steps; without a command, bf16 against coat in a minute.
import { existsSync, readFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { Command, Option } from 'commander'
import { type Device, device, type LedgerRow } from '../lib/index.ts'
import { claim, type Table, textTable, writeWhole } from '../lib/report.ts'
import { ceilingsOf } from './ceilings.ts'
import { type FidelityOptions, fidelityBench, fidelityDefaults } from './fidelity.ts'
import { batchRows, type FitOptions, findBatch, findModel, fitTable, modelRows, trial } from './fit.ts'
import { layerBench, layerRows, layerTable, layerWarmUp } from './layer.ts'
import { opBench, opTable } from './measure.ts'
import { type ModelName, modelNames } from './models.ts'
import { casesLike } from './ops.ts'
import { optimizerBench, optimizerDefaults, optimizerHtml, optimizerRows, optimizerTables } from './optimizer.ts'
import {
  byteCount,
  count,
  integers,
  type NamedRecipe,
  namedRecipes,
  oneOf,
  rate,
  settings,
  someOf,
  start,
} from './options.ts'
import { profileOf, profileRows, profileTables, traceOf } from './profile.ts'
import { type RecipesOptions, recipesBench, recipesDefaults, recipesHtml, recipesRows } from './recipes.ts'
import {
  appendRows,
  fillSections,
  lossTable,
  markdownRows,
  parseRows,
  type Row,
  recipeTable,
  writeRows,
} from './row.ts'
import {
  ledgerTable,
  type StepOptions,
  stepBench,
  stepDefaults,
  stepNotes,
  stepRows,
  stepTable,
  timingNotes,
} from './step.ts'

/** Runs one command; `print` takes what it has to say. */
export async function bench(args: readonly string[], print: (text: string) => void = console.log): Promise<void> {
  const program = new Command('coat-bench')
    .description('Measures coat-fp8: its ops and its training steps. Without a command: steps of bf16 and coat.')
    .exitOverride()
  const command = <Own>(name: string, description: string, run: (device: Device, options: Own) => Promise<Row[]>) =>
    program
      .command(name, { isDefault: name === 'step' })
      .description(description)
      .option('--device <name>', 'cpu or cuda; by default the best there is')
      .option('--json <file>', 'write the rows to this file, as a JSON array')
      .option('--append <file>', 'add the rows to the end of this file, as JSON lines')
      .allowExcessArguments(false)
      .action(async (options: Own & { device?: string; json?: string; append?: string }) => {
        using where = device(options.device)
        for (const file of [options.json, options.append]) if (file) claim(file)
        const rows = await run(where, options)
        if (options.json) writeRows(options.json, rows)
        if (options.append) appendRows(options.append, rows)
      })

  command('ops', 'every op: checked, then timed', async (device, options: { filter: string }) => {
    const announce = (name: string) => process.stderr.write(`${name}\n`)
    const rows = await opBench(casesLike(options.filter), { device, announce })
    print(textTable(opTable(rows)))
    return rows
  }).option('--filter <name>', 'only ops with this in their name', '')

  const { steps, batch, sequence } = stepDefaults
  const sized = (to: Command) =>
    to
      .option('--hidden <n>', 'width of the small model (256), or of the layer', count)
      .option('--layers <n>', 'layers, where not those of the model', count)
      .option('--batch <n>', 'sequences of a step', count, batch)
      .option('--sequence <n>', 'tokens of a sequence', count, sequence)
      .option('--memory-limit <bytes>', 'the most that tensors may hold together, such as 80GiB', byteCount)
      .option('--trainer <name=value>', 'one more option of the trainer, such as accumulate=2', settings)
  sized(
    command(
      'step',
      'steps of a Llama with random weights on random tokens',
      async (device, { recipe, model, findBatch: batches, findModel: models, ...rest }: StepFlags) => {
        const options = { ...rest, recipes: recipe, device, model: model[0] as ModelName }
        if (!batches && !models) return await stepsOf(options, print)
        const fits = []
        for (const { name } of recipe)
          fits.push(
            await (models ? findModel(name, model.length > 1 ? model : modelNames, options) : findBatch(name, options)),
          )
        print(textTable(fitTable(fits, options.memoryLimit)))
        return models ? modelRows(fits, options) : batchRows(fits, options)
      },
    ),
  )
    .option(
      '--model <names>',
      `one of ${modelNames.join(', ')}; for --find-model several, by default all`,
      someOf(modelNames),
      ['small'] as ModelName[],
    )
    .addOption(recipesOption('--recipe <names>', 'bf16,coat'))
    .option('--steps <n>', 'steps to measure, after those that do not count', count, steps)
    .option('--find-batch', 'the largest batch of which a step fits --memory-limit')
    .option('--find-model', 'the largest of the models of which a step fits it')

  const fidelity = fidelityDefaults
  command(
    'fidelity',
    'training losses on real text against bf16, run by run; call it again to go on',
    async (device, { budget, ...options }: Omit<FidelityOptions, 'device'> & { budget?: number }) => {
      const end = performance.now() + 1000 * (budget ?? Number.POSITIVE_INFINITY)
      const { rows, complete } = await fidelityBench({ ...options, device, spent: () => performance.now() >= end })
      print(textTable(lossTable(rows)))
      if (!complete) print(unfinished)
      return rows
    },
  )
    .requiredOption('--dir <folder>', 'where what is done and what is under way is kept')
    .addOption(recipesOption('--recipes <names>', 'bf16,coat'))
    .option('--seeds <numbers>', 'seeds of weights and batches', integers, fidelity.seeds)
    .option('--steps <n>', 'steps of a run', count, fidelity.steps)
    .option('--tail <n>', 'last steps whose loss is averaged', count, fidelity.tail)
    .option('--every <n>', 'steps from one checkpoint of a run to the next', count, fidelity.every)
    .option('--budget <seconds>', 'no further step begins after this time', rate)
    .option('--branch-from <step>', 'branches of bf16 at this step instead of whole runs', count)
    .option('--branch-steps <n>', 'steps of a branch', count, fidelity.branchSteps)
    .option('--orders <n>', 'data orders of the branches', count, fidelity.orders)
    .option('--hidden <n>', 'width of the model', count, fidelity.hidden)
    .option('--inner <n>', 'width of its MLP', count, fidelity.inner)
    .option('--layers <n>', 'layers of the model', count, fidelity.layers)
    .option('--heads <n>', 'heads of its attention', count, fidelity.heads)
    .option('--batch <n>', 'sequences of a step', count, fidelity.batch)
    .option('--sequence <n>', 'bytes of a sequence', count, fidelity.sequence)
    .option('--warmup <n>', 'steps in which the learning rate rises', count, fidelity.warmup)
    .option('--lr <rate>', 'the learning rate', rate, fidelity.lr)

  sized(
    program
      .command('fit')
      .description('whether one step fits, as JSON')
      .option('--model <name>', 'the model', oneOf(modelNames), 'small' as ModelName)
      .addOption(recipesOption('--recipe <name>', 'coat'))
      .option('--device <name>', 'cpu or cuda; by default the best there is'),
  ).action(async ({ recipe, device: name, ...options }: FitOptions & { recipe: NamedRecipe[]; device?: string }) => {
    using where = device(name as string | undefined)
    print(JSON.stringify(await trial({ ...options, device: where }, recipe[0] as NamedRecipe)))
  })

  program
    .command('profile')
    .description('what COAT_PROFILE wrote, as tables: by family, by part of a step, by op')
    .argument('<file>', 'the trace')
    .option('--top <n>', 'kinds of calls to list', count, 30)
    .option('--copy <rate>', 'GB/s of a plain copy, where not those of an H200', rate)
    .option('--name <name>', 'what the rows are of, in their names', 'step')
    .option('--append <file>', 'add rows by family and op to the end of this file, as JSON lines')
    .action((file: string, { top, copy, name, append }: ProfileFlags) => {
      const trace = traceOf(readFileSync(file, 'utf8'))
      const chip = trace.some(({ args }) => args?.device === 'cuda') ? ceilingsOf('NVIDIA H200') : null
      const profile = profileOf(trace, chip && { ...chip, copy: copy ?? chip.copy })
      print(profileTables(profile, top).map(textTable).join('\n\n'))
      if (append) appendRows(append, profileRows(profile, name, top))
    })

  const usual = recipesDefaults
  command(
    'recipes',
    'every recipe trained on the same text from the same seed: losses, bytes, rates; with --dir call it again to go on',
    async (device, { recipe, html, budget, ...rest }: RecipesFlags) => {
      if (html) claim(html)
      const end = performance.now() + 1000 * (budget ?? Number.POSITIVE_INFINITY)
      const options = { ...rest, recipes: recipe, device, spent: () => performance.now() >= end }
      const { results, complete } = await recipesBench(options)
      const rows = recipesRows(results, options)
      print(textTable(recipeTable(rows)))
      for (const { recipe, stopped } of results) if (stopped !== null) print(`${recipe}: ${stopped}`)
      if (!complete) print(unfinished)
      if (html) writeWhole(html, await recipesHtml(results, options))
      return rows
    },
  )
    .addOption(recipesOption('--recipe <names>', 'all'))
    .option('--dir <folder>', 'where what is done is kept')
    .option('--budget <seconds>', 'no further recipe begins after this time', rate)
    .option('--steps <n>', 'steps of training', count, usual.steps)
    .option('--emulated-steps <n>', 'steps of recipes whose arithmetic is emulated', count, usual.emulatedSteps)
    .option('--hidden <n>', 'width of the model', count, usual.hidden)
    .option('--inner <n>', 'width of its MLP', count, usual.inner)
    .option('--layers <n>', 'layers of the model', count, usual.layers)
    .option('--heads <n>', 'heads of its attention', count, usual.heads)
    .option('--batch <n>', 'sequences of a step', count, usual.batch)
    .option('--sequence <n>', 'bytes of a sequence', count, usual.sequence)
    .option('--lr <rate>', 'the learning rate', rate, usual.lr)
    .option('--html <file>', 'write a report to this file')

  command(
    'optimizer',
    'real moments of an fp32 run in every pair of 8-bit formats',
    async (device, options: { steps: number; html?: string }) => {
      if (options.html) claim(options.html)
      const errors = await optimizerBench({ device, steps: options.steps })
      print(optimizerTables(errors).map(textTable).join('\n\n'))
      if (options.html) writeWhole(options.html, await optimizerHtml(errors))
      return optimizerRows(errors, device)
    },
  )
    .option('--steps <n>', 'steps of training before the moments are taken', count, optimizerDefaults.steps)
    .option('--html <file>', 'write a report to this file')

  program
    .command('table')
    .description('rows of a file as a Markdown table')
    .argument('<file>', 'a JSON array or JSON lines')
    .action((file: string) => print(markdownRows(parseRows(readFileSync(file, 'utf8')))))

  program
    .command('fill')
    .description('fills the sections of a Markdown file that show rows')
    .argument('<file>', 'the Markdown file, beside which the files with rows lie')
    .action((file: string) => {
      const read = (name: string) => {
        const path = join(dirname(file), name)
        return existsSync(path) ? readFileSync(path, 'utf8') : ''
      }
      writeWhole(file, fillSections(readFileSync(file, 'utf8'), read))
    })

  await program.parseAsync(args, { from: 'user' })
}

interface StepFlags extends Omit<StepOptions, 'device' | 'recipes' | 'model'> {
  recipe: NamedRecipe[]
  model: ModelName[]
  findBatch?: boolean
  findModel?: boolean
}

interface RecipesFlags extends Omit<RecipesOptions, 'device' | 'recipes' | 'spent'> {
  recipe: NamedRecipe[]
  html?: string
  budget?: number
}

const unfinished = '\nThe budget is spent before all is done: the same command goes on.'

interface ProfileFlags {
  top: number
  copy?: number
  name: string
  append?: string
}

function recipesOption(flags: string, usual: string): Option {
  const text = 'recipes with commas between them, or all; coat+dw=f32 changes an axis'
  return new Option(flags, text).argParser(namedRecipes).default(namedRecipes(usual), usual)
}

async function stepsOf(options: StepOptions, print: (text: string) => void): Promise<Row[]> {
  const show = (
    results: readonly { recipe: string; ledger: readonly LedgerRow[] }[],
    table: Table,
    notes: readonly string[],
  ) => {
    print(`${textTable(table)}\n\n${notes.join('\n')}`)
    for (const { recipe, ledger } of results)
      print(`\n${recipe}, kept for backward:\n${textTable(ledgerTable(ledger))}`)
  }
  if (options.model === 'layer') {
    const results = await layerBench(options)
    const rows = layerRows(results, options)
    show(results, layerTable(results, options), timingNotes(rows, 'layer/both', options.device, layerWarmUp))
    return rows
  }
  const results = await stepBench(options)
  show(results, stepTable(results, options), stepNotes(results, options))
  return stepRows(results, options)
}

await start(import.meta.filename, bench)
