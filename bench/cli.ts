#!/usr/bin/env node
// npx coat-bench: rows about ops and about training steps; without a command, bf16 against coat in a minute.
import { readFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { Command } from 'commander'
import { type Device, device, type RecipeName } from '../lib/index.ts'
import { claim, textTable, writeWhole } from '../lib/report.ts'
import { opBench, opTable } from './measure.ts'
import { casesLike } from './ops.ts'
import { optimizerBench, optimizerDefaults, optimizerHtml, optimizerRows, optimizerTables } from './optimizer.ts'
import { count, recipeNames, start } from './options.ts'
import { appendRows, fillSections, markdownRows, parseRows, type Row, writeRows } from './row.ts'
import { ledgerTable, type StepOptions, stepBench, stepDefaults, stepRows, stepTable } from './step.ts'

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

  const { recipes, steps, hidden, layers, batch, sequence } = stepDefaults
  command(
    'step',
    'steps of a small Llama on random tokens',
    async (device, options: Omit<StepOptions, 'device' | 'recipes'> & { recipe: RecipeName[] }) => {
      const full = { ...options, recipes: options.recipe, device }
      const results = await stepBench(full)
      print(textTable(stepTable(results)))
      for (const result of results) print(`\n${result.recipe}, kept for backward:\n${textTable(ledgerTable(result))}`)
      return stepRows(results, full)
    },
  )
    .option('--recipe <names>', 'recipes with commas between them', recipeNames, recipes)
    .option('--steps <n>', 'steps to measure, after one that does not count', count, steps)
    .option('--hidden <n>', 'width of the model', count, hidden)
    .option('--layers <n>', 'layers of the model', count, layers)
    .option('--batch <n>', 'sequences of a step', count, batch)
    .option('--sequence <n>', 'tokens of a sequence', count, sequence)

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
      const read = (name: string) => readFileSync(join(dirname(file), name), 'utf8')
      writeWhole(file, fillSections(readFileSync(file, 'utf8'), read))
    })

  await program.parseAsync(args, { from: 'user' })
}

await start(import.meta.filename, bench)
