#!/usr/bin/env node
// npx coat-train: trains after a configuration, writes one to start from, and makes token files.
import { existsSync, writeFileSync } from 'node:fs'
import { constants } from 'node:os'
import { Command } from 'commander'
import { count, start } from '../bench/options.ts'
import { CoatError } from '../lib/index.ts'
import { claim, showNumber } from '../lib/report.ts'
import { readConfig } from './config.ts'
import { prepare } from './prepare.ts'
import { train } from './run.ts'
import { template } from './template.ts'

interface Flags {
  resume?: boolean
  allow?: string
  set: string[]
}

/** Runs one command; `print` takes what it has to say. */
export async function coatTrain(args: readonly string[], print: (text: string) => void = console.log): Promise<void> {
  const program = new Command('coat-train')
    .description('Pre-trains and fine-tunes language models in FP8.')
    .showHelpAfterError('(coat-train --help lists the commands, coat-train help COMMAND the options of one)')
    .exitOverride()
  const collect = (value: string, before: string[]) => [...before, value]
  program
    .command('run', { isDefault: true })
    .description('trains after a configuration: coat-train config.json')
    .argument('<config>', 'JSON with comments; see coat-train init')
    .option('--resume', 'go on from the newest checkpoint of the same run')
    .option('--allow <names>', 'with --resume: settings that may differ from the checkpoint, with commas between them')
    .option('--set <key=value>', 'change a setting, as optimizer.lr=1e-3; may be repeated', collect, [] as string[])
    .allowExcessArguments(false)
    .action(async (file: string, { resume = false, allow = '', set }: Flags) => {
      const names = allow.split(',').filter(Boolean)
      const signal = await train(readConfig(file, set), { resume, allow: names }, print)
      if (signal) process.exitCode = 128 + constants.signals[signal]
    })
  program
    .command('init')
    .description('writes a configuration to start from')
    .argument('[file]', 'where to', 'config.json')
    .allowExcessArguments(false)
    .action((file: string) => {
      if (existsSync(file)) throw new CoatError(`${file} is there already`, 'path', 'coat-train', 'file')
      claim(file)
      writeFileSync(file, template)
      print(`wrote ${file}; set its paths, then: npx coat-train ${file}`)
    })
  program
    .command('prepare')
    .description('tokenizes text files, folders and JSON lines to one token file')
    .argument('<inputs...>', 'files, or folders with .txt and .jsonl')
    .requiredOption('--out <file>', 'the token file to write')
    .option('--tokenizer <path>', 'a tokenizer.json or its folder; else bytes')
    .option('--threads <n>', 'threads that tokenize; by default all cores', count)
    .action(async (inputs: string[], options: { out: string; tokenizer?: string; threads?: number }) => {
      const { tokens, documents } = await prepare(inputs, options)
      print(`${options.out}: ${showNumber(tokens)} tokens of ${showNumber(documents)} documents`)
    })
  await program.parseAsync(args, { from: 'user' })
}

await start(import.meta.filename, coatTrain)
