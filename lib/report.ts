// What a run shows and leaves behind: tables, a progress bar, metrics as JSON lines, a report as one HTML file.
import {
  accessSync,
  closeSync,
  constants,
  existsSync,
  mkdirSync,
  openSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
  writeSync,
} from 'node:fs'
import { dirname } from 'node:path'
import { SingleBar } from 'cli-progress'
import { type Bytes, CoatError, type Purpose } from './native.ts'

/** What memory is held for, in the order in which reports list it. */
export const purposes: readonly Purpose[] = ['param', 'state', 'grad', 'saved', 'temp', 'scratch']

/** What a report needs of one step's metrics. */
export interface Step {
  step: number
  loss: number
  tokensPerSecond: number
  memory: { peak: Bytes }
}

export interface Table {
  head: readonly string[]
  /** Cells, as many a row as in the head; the first column is text, the others are numbers. */
  rows: readonly (readonly string[])[]
}

/** Columns lined up with spaces. */
export function textTable({ head, rows }: Table): string {
  const widths = head.map((_, i) => Math.max(...[head, ...rows].map((row) => row[i]?.length ?? 0)))
  const line = (cells: readonly string[]) =>
    cells
      .map((cell, i) => (i === 0 ? cell.padEnd(widths[i] ?? 0) : cell.padStart(widths[i] ?? 0)))
      .join('  ')
      .trimEnd()
  return [line(head), widths.map((width) => '-'.repeat(width)).join('  '), ...rows.map(line)].join('\n')
}

export function markdownTable({ head, rows }: Table): string {
  const line = (cells: readonly string[]) => `| ${cells.map((cell) => cell.replaceAll('|', '\\|')).join(' | ')} |`
  return [line(head), line(head.map((_, i) => (i === 0 ? '---' : '---:'))), ...rows.map(line)].join('\n')
}

/** One quantity of several recipes. */
export interface Quantity {
  name: string
  /** In the order of the recipes. */
  values: readonly number[]
  show: (value: number) => string
}

/** Quantities by recipe, with ratios to `base` where it is one of them. */
export function comparison(recipes: readonly string[], quantities: readonly Quantity[], base = 'bf16'): Table {
  const at = recipes.indexOf(base)
  const others = at < 0 ? [] : recipes.map((_, i) => i).filter((i) => i !== at)
  return {
    head: ['', ...recipes, ...others.map((i) => `${recipes[i]} / ${base}`)],
    rows: quantities.map(({ name, values, show }) => [
      name,
      ...values.map(show),
      ...others.map((i) => ratio(values[i] as number, values[at] as number)),
    ]),
  }
}

function ratio(value: number, base: number): string {
  return base === 0 ? '-' : (value / base).toFixed(3)
}

/** 1536 → '1.5 KiB'. */
export function showBytes(count: number): string {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log2(Math.max(1, count)) / 10)))
  return power === 0 ? `${count} B` : `${(count / 1024 ** power).toFixed(1)} ${['B', 'KiB', 'MiB', 'GiB'][power]}`
}

/** 12345.6 → '12,346'; three significant digits below 100. */
export function showNumber(value: number): string {
  return Math.abs(value) >= 100 ? Math.round(value).toLocaleString('en-US') : String(Number(value.toPrecision(3)))
}

/** Largest bytes by purpose over steps. */
export function peakOf(steps: readonly Step[]): Bytes {
  const most = (name: keyof Bytes) => Math.max(0, ...steps.map(({ memory }) => memory.peak[name]))
  return {
    param: most('param'),
    grad: most('grad'),
    state: most('state'),
    saved: most('saved'),
    temp: most('temp'),
    scratch: most('scratch'),
    total: most('total'),
  }
}

/** How the most that steps held at once divides: 80 MiB = 40 MiB param + 40 MiB saved. */
export function showSplit(bytes: Bytes): string {
  const parts = purposes.filter((purpose) => bytes[purpose] > 0)
  return `${showBytes(bytes.total)} = ${parts.map((purpose) => `${showBytes(bytes[purpose])} ${purpose}`).join(' + ')}`
}

/** Peak bytes by purpose and in all as rows of a comparison. */
export function peakQuantities(peaks: readonly Bytes[]): Quantity[] {
  return [...purposes, 'total' as const].map((name) => ({
    name: `peak ${name}`,
    values: peaks.map((peak) => peak[name]),
    show: showBytes,
  }))
}

/** Makes the folder of a file that will be written later, so that a wrong path is known before a long run. */
export function claim(file: string): void {
  try {
    mkdirSync(dirname(file), { recursive: true })
    accessSync(dirname(file), constants.W_OK)
    if (existsSync(file) && statSync(file).isDirectory()) throw new Error('it is a folder')
  } catch (error) {
    throw new CoatError(`${file} cannot be written: ${(error as Error).message}`, 'path', 'report', 'file')
  }
}

/** Writes a whole file or none: under another name first, then renamed. */
export function writeWhole(file: string, text: string): void {
  claim(file)
  const part = `${file}.${process.pid}.part`
  try {
    writeFileSync(part, text)
    renameSync(part, file)
  } catch (error) {
    rmSync(part, { force: true })
    throw error
  }
}

/** Metrics as JSON lines: one object a step, with the recipe's name; NaN and infinities are null there. */
export class MetricsFile implements Disposable {
  readonly #file: number
  /** Lines of later steps than `after` that were taken out of the file. */
  readonly dropped: number = 0

  /** A new file; or, with `after`, one that goes on behind the lines up to that step. */
  constructor(file: string, options: { after?: number } = {}) {
    const { after } = options
    claim(file)
    if (after !== undefined && existsSync(file)) {
      const lines = readFileSync(file, 'utf8').split('\n').filter(Boolean)
      const kept = lines.filter((line) => stepIn(line) <= after)
      this.dropped = lines.length - kept.length
      writeWhole(file, kept.map((line) => `${line}\n`).join(''))
    }
    this.#file = openSync(file, after === undefined ? 'w' : 'a')
  }
  write(recipe: string, metrics: Step): void {
    writeSync(this.#file, `${JSON.stringify({ recipe, ...metrics })}\n`)
  }
  [Symbol.dispose](): void {
    closeSync(this.#file)
  }
}

/** The step of a line; a line that was cut has none that counts. */
function stepIn(line: string): number {
  try {
    return Number(JSON.parse(line).step)
  } catch {
    return Number.POSITIVE_INFINITY
  }
}

/** A bar on stderr where that is a terminal, else a line every 25 steps. */
export class Progress implements Disposable {
  readonly #name: string
  readonly #steps: number
  readonly #bar: SingleBar | null

  constructor(name: string, steps: number) {
    this.#name = name
    this.#steps = steps
    this.#bar = process.stderr.isTTY
      ? new SingleBar({
          format: `${name} {bar} {value}/{total}  loss {loss}  {rate} tokens/s  {eta} s left`,
          stream: process.stderr,
          hideCursor: true,
        })
      : null
    this.#bar?.start(steps, 0, { loss: '-', rate: '-' })
  }

  update({ step, loss, tokensPerSecond }: Step): void {
    const shown = { loss: loss.toFixed(3), rate: showNumber(tokensPerSecond) }
    if (this.#bar) this.#bar.update(step, shown)
    else if (step === 1 || step % 25 === 0 || step === this.#steps)
      process.stderr.write(`${this.#name}  step ${step}/${this.#steps}  loss ${shown.loss}  ${shown.rate} tokens/s\n`)
  }

  [Symbol.dispose](): void {
    this.#bar?.stop()
  }
}

/** One recipe's training, as a report shows it. */
export interface Run {
  recipe: string
  steps: readonly Step[]
  /** Loss on held-out data, where it was measured. */
  validation?: number
}

export interface Report {
  title: string
  /** Paragraphs before the charts. */
  notes: readonly string[]
  runs: readonly Run[]
  table: Table
  /** Texts to show as they are, by heading. */
  texts?: Readonly<Record<string, string>>
}

/** A report as one HTML file that asks for nothing else: charts are SVG inside it. */
export async function reportHtml({ title, notes, runs, table, texts = {} }: Report): Promise<string> {
  const { lossChart, memoryChart } = await import('./charts.ts')
  const losses = lossChart(
    runs.map(({ recipe, steps, validation }) => ({
      name: recipe,
      values: steps.map(({ loss }) => loss),
      final: validation ?? null,
    })),
  )
  const bars = memoryChart(
    runs.map(({ recipe, steps }) => {
      const peak = peakOf(steps)
      return { name: recipe, bytes: purposes.map((purpose) => [purpose, peak[purpose]] as const) }
    }),
  )
  return pageHtml(title, notes, [
    {
      heading: 'Loss',
      note: 'Thin: the training loss of every step; thick: its running mean; dot: the loss on held-out text after the last step.',
      body: losses,
    },
    { heading: 'Memory', note: 'Every purpose at its own peak; the peaks need not fall together.', body: bars },
    { heading: 'Numbers', body: htmlTable(table) },
    ...Object.entries(texts).map(([heading, text]) => ({ heading, body: `<pre>${escapeHtml(text)}</pre>` })),
  ])
}

/** Part of a page: `body` is HTML. */
export interface Section {
  heading: string
  note?: string
  body: string
}

/** A page that asks for nothing else. */
export function pageHtml(title: string, notes: readonly string[], sections: readonly Section[]): string {
  const paragraph = (text: string) => `<p>${escapeHtml(text)}</p>\n`
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escapeHtml(title)}</title>
<style>
body { max-width: 800px; margin: 2em auto; padding: 0 1em; font: 15px/1.5 system-ui, sans-serif; color: #222; background: white }
figure { margin: 0 }
table { border-collapse: collapse }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
pre { padding: 1em; background: #f5f5f5; white-space: pre-wrap }
</style>
</head>
<body>
<h1>${escapeHtml(title)}</h1>
${notes.map(paragraph).join('')}${sections
  .map(
    ({ heading, note, body }) =>
      `<h2>${escapeHtml(heading)}</h2>\n${note === undefined ? '' : paragraph(note)}${body}\n`,
  )
  .join('')}</body>
</html>
`
}

export function htmlTable({ head, rows }: Table): string {
  const line = (cells: readonly string[], tag: string) =>
    `<tr>${cells.map((cell) => `<${tag}>${escapeHtml(cell)}</${tag}>`).join('')}</tr>`
  return `<table>\n${[line(head, 'th'), ...rows.map((row) => line(row, 'td'))].join('\n')}\n</table>`
}

function escapeHtml(text: string): string {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;')
}
