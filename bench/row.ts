// One measurement as a row: its type, how it is made, written, read again and shown.
import { execFileSync } from 'node:child_process'
import { appendFileSync } from 'node:fs'
import { CoatError, device } from '../lib/index.ts'
import { native } from '../lib/native.ts'
import {
  claim,
  markdownTable,
  peakOf,
  purposes,
  type Run,
  showBytes,
  showNumber,
  type Table,
  writeWhole,
} from '../lib/report.ts'

const kinds = ['op', 'step', 'memory', 'train', 'state'] as const
const metrics = [
  'time',
  'bandwidth',
  'flops',
  'tokens',
  'bytes',
  'batch',
  'parameters',
  'loss',
  'error',
  'share',
] as const

export interface Row {
  schema: 1
  kind: (typeof kinds)[number]
  /** The op, or the program and what it measured: `adamw`, `step/peak/saved`. */
  name: string
  recipe: string | null
  device: 'cpu' | 'cuda'
  gpu: string | null
  /** Sizes by letter or word; on the CPU also `threads`. */
  shape: Record<string, number>
  /** Formats by argument. */
  formats: Record<string, string>
  metric: (typeof metrics)[number]
  unit: string
  median: number
  p20: number
  p80: number
  /** Measurements behind the percentiles. */
  n: number
  baseline: { name: string; median: number } | null
  commit: string
  date: string
  build: { node: string; cuda: string | null }
}

/** Where and when something is measured. */
export type Origin = Pick<Row, 'gpu' | 'commit' | 'date' | 'build'>

export function originOf(device: Row['device']): Origin {
  return {
    gpu: null,
    commit: commit(),
    date: new Date().toISOString(),
    build: { node: process.versions.node, cuda: null },
    ...(device === 'cuda' ? gpuFields() : {}),
  }
}

/** A row from its measurements; what is left out has its usual value. */
export function makeRow(
  fields: Pick<Row, 'kind' | 'name' | 'metric' | 'unit'> & Partial<Row>,
  measured: readonly number[],
): Row {
  return {
    schema: 1,
    recipe: null,
    device: 'cpu',
    formats: {},
    median: percentile(measured, 50),
    p20: percentile(measured, 20),
    p80: percentile(measured, 80),
    n: measured.length,
    baseline: null,
    ...originOf(fields.device ?? 'cpu'),
    ...fields,
    shape: { ...(fields.device === 'cuda' ? {} : { threads: native.threads() }), ...fields.shape },
  }
}

// From `NVIDIA H200, 139 GiB, CUDA 13.0 driver, 13.0 runtime`.
function gpuFields(): Pick<Row, 'gpu' | 'build'> {
  const { description } = device('cuda')
  const cuda = description.match(/([\d.]+) runtime/)?.[1] ?? null
  return { gpu: description.split(',')[0] ?? null, build: { node: process.versions.node, cuda } }
}

/** One quantity as a row a recipe, with bf16 as the others' baseline where it is among them. */
export function recipeRows<Result extends { recipe: string }>(
  results: readonly Result[],
  fields: Parameters<typeof makeRow>[0],
  values: (result: Result) => number[],
): Row[] {
  const base = results.find(({ recipe }) => recipe === 'bf16')
  const median = base && percentile(values(base), 50)
  return results.map((result) => {
    const baseline = median === undefined || result === base ? null : { name: 'bf16', median }
    return makeRow({ ...fields, recipe: result.recipe, baseline }, values(result))
  })
}

/** Peak bytes by purpose and in all, a row each a recipe. */
export function peakRows(results: readonly Run[], program: string, fields: Partial<Row>): Row[] {
  return [...purposes, 'total' as const].flatMap((purpose) =>
    recipeRows(
      results,
      { ...fields, kind: 'memory', name: `${program}/peak/${purpose}`, metric: 'bytes', unit: 'B' },
      ({ steps }) => [peakOf(steps)[purpose]],
    ),
  )
}

/** The value below which `percent` of the values lie, between neighbours where it falls there. */
export function percentile(values: readonly number[], percent: number): number {
  const sorted = [...values].sort((a, b) => a - b)
  const place = ((sorted.length - 1) * percent) / 100
  const low = sorted[Math.floor(place)]
  const high = sorted[Math.ceil(place)]
  if (low === undefined || high === undefined)
    throw new CoatError('percentile: values are empty and must be at least one', 'value', 'percentile', 'values')
  return low + (high - low) * (place - Math.floor(place))
}

// As a dependency the package lies in somebody else's clone.
let known = import.meta.dirname.includes('node_modules') ? '' : undefined

/** The commit that is measured, or '' outside a clone. */
function commit(): string {
  try {
    known ??= execFileSync('git', ['rev-parse', 'HEAD'], {
      cwd: import.meta.dirname,
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'ignore'],
    }).trim()
  } catch {
    known = ''
  }
  return known
}

/** What is wrong with a value as a row; null: nothing. */
export function rowProblem(value: unknown): string | null {
  if (typeof value !== 'object' || value === null) return 'a row must be an object'
  const row = value as Row
  const words = (entries: unknown, type: string) =>
    typeof entries === 'object' && entries !== null && Object.values(entries).every((entry) => typeof entry === type)
  const holds: Record<keyof Row, boolean> = {
    schema: row.schema === 1,
    kind: kinds.includes(row.kind),
    name: typeof row.name === 'string' && row.name !== '',
    recipe: row.recipe === null || typeof row.recipe === 'string',
    device: ['cpu', 'cuda'].includes(row.device),
    gpu: row.gpu === null || typeof row.gpu === 'string',
    shape: words(row.shape, 'number'),
    formats: words(row.formats, 'string'),
    metric: metrics.includes(row.metric),
    unit: typeof row.unit === 'string' && row.unit !== '',
    median: Number.isFinite(row.median),
    p20: Number.isFinite(row.p20) && row.p20 <= row.median,
    p80: Number.isFinite(row.p80) && row.p80 >= row.median,
    n: Number.isSafeInteger(row.n) && row.n >= 1,
    baseline: row.baseline === null || (typeof row.baseline?.name === 'string' && Number.isFinite(row.baseline.median)),
    commit: /^([0-9a-f]{40})?$/.test(row.commit),
    date: !Number.isNaN(Date.parse(row.date)),
    build: typeof row.build?.node === 'string' && (row.build.cuda === null || typeof row.build.cuda === 'string'),
  }
  for (const [field, good] of Object.entries(holds))
    if (!good) return `${field} is ${JSON.stringify(row[field as keyof Row])}`
  const extra = Object.keys(row).find((field) => !Object.hasOwn(holds, field))
  return extra === undefined ? null : `field '${extra}' is unknown`
}

/** Rows as a JSON array: a whole file or none. */
export function writeRows(file: string, rows: readonly Row[]): void {
  writeWhole(file, `[\n${rows.map((row) => JSON.stringify(row)).join(',\n')}\n]\n`)
}

/** Rows as JSON lines at the end of a file. */
export function appendRows(file: string, rows: readonly Row[]): void {
  claim(file)
  appendFileSync(file, rows.map((row) => `${JSON.stringify(row)}\n`).join(''))
}

/** Rows from the text of a JSON array or of JSON lines. */
export function parseRows(text: string): Row[] {
  const fail = (problem: string): never => {
    throw new CoatError(`rows: ${problem}`, 'row', 'parseRows', 'text')
  }
  const parts = text.trimStart().startsWith('[') ? [text] : text.split('\n').filter((line) => line.trim() !== '')
  const rows = parts.flatMap((part): unknown[] => {
    try {
      return JSON.parse(part)
    } catch (error) {
      return fail(`not JSON (${(error as Error).message})`)
    }
  })
  rows.forEach((row, i) => {
    const problem = rowProblem(row)
    if (problem) fail(`row ${i + 1}: ${problem}`)
  })
  return rows as Row[]
}

/** Rows as a Markdown table: one column a recipe where all rows have one, else one line a row. */
export function markdownRows(rows: readonly Row[]): string {
  const names = [...new Set(rows.map(({ name }) => name))]
  const by = [...new Set(rows.map(({ recipe }) => recipe))]
  const cells = names.map((name) =>
    by.map((recipe) => rows.filter((row) => row.name === name && row.recipe === recipe)),
  )
  if (by.includes(null) || cells.flat().some((found) => found.length !== 1)) return lines(rows)
  const last = by.at(-1) as string
  const ratio = (found: Row | undefined) => (found?.baseline ? (found.median / found.baseline.median).toFixed(3) : '')
  return markdownTable({
    head: ['', ...(by as string[]), `${last} / ${rows.find(({ baseline }) => baseline)?.baseline?.name ?? ''}`],
    rows: cells.map((found, i) => [
      names[i] as string,
      ...found.flat().map((row) => showValue(row, row.median)),
      ratio(found.at(-1)?.[0]),
    ]),
  })
}

function lines(rows: readonly Row[]): string {
  const base = rows.find(({ baseline }) => baseline)?.baseline?.name
  return markdownTable({
    head: ['name', 'recipe or formats', 'shape', 'median', 'p20 to p80', ...(base ? [`of ${base}`] : [])],
    rows: rows.map((row) => [
      row.name,
      row.recipe ?? words(row.formats),
      words(row.shape),
      showValue(row, row.median),
      `${showValue(row, row.p20)} to ${showValue(row, row.p80)}`,
      ...(base ? [row.baseline ? showShare(row, row.baseline) : ''] : []),
    ]),
  })
}

/**
 * Quantities of several systems, a line each by recipe (or formats) and shape, with ratios to the system `base` at the same
 * shape. Of rows about the same thing the last counts.
 */
export function compareRows(rows: readonly Row[], base: string, names: readonly string[]): string {
  const found = new Map<string, { system: string; shape: string; cells: Map<string, Row> }>()
  for (const row of rows) {
    if (!names.includes(row.name)) continue
    const system = row.recipe ?? words(row.formats)
    const { threads: _, ...sizes } = row.shape
    const shape = words(Object.fromEntries(Object.entries(sizes).sort(([a], [b]) => (a < b ? -1 : 1))))
    const key = JSON.stringify([shape, system])
    const line = found.get(key) ?? { system, shape, cells: new Map() }
    line.cells.set(row.name, row)
    found.set(key, line)
  }
  if (found.size === 0) return notMeasured
  const lines = [...found.values()]
  const shapes = [...new Set(lines.map(({ shape }) => shape))]
  const cell = (name: string, row: Row | undefined, own: string) => {
    if (!row) return ''
    const value = showValue(row, row.median)
    const other = lines.find(({ system, shape }) => system === base && shape === own)?.cells.get(name)
    return other && other !== row ? `${value} (${(row.median / other.median).toFixed(3)} ×)` : value
  }
  return markdownTable({
    head: ['', ...names, ...(shapes.length > 1 ? ['shape'] : [])],
    rows: shapes.flatMap((shape) =>
      lines
        .filter((line) => line.shape === shape)
        .map(({ system, cells }) => [
          system,
          ...names.map((name) => cell(name, cells.get(name), shape)),
          ...(shapes.length > 1 ? [shape] : []),
        ]),
    ),
  })
}

/** Losses by recipe, over seeds and data orders: their mean, and the mean, least and largest difference to the baseline's. */
export function lossTable(rows: readonly Row[]): Table {
  const groups = new Map<string, Row[]>()
  for (const row of rows) {
    const { seed: _, order: __, threads: ___, ...shape } = row.shape
    const key = JSON.stringify([row.name, row.recipe, shape])
    groups.set(key, [...(groups.get(key) ?? []), row])
  }
  const signed = (part: number) => `${part < 0 ? '' : '+'}${(100 * part).toFixed(3)} %`
  const mean = (list: readonly number[]) => list.reduce((sum, x) => sum + x, 0) / list.length
  const base = rows.find(({ baseline }) => baseline)?.baseline?.name ?? 'baseline'
  return {
    head: ['recipe', 'what', 'runs', 'loss', `against ${base}`, 'least', 'most'],
    rows: [...groups.values()].map((group) => {
      const [{ name, recipe, shape }] = group as [Row]
      const parts = group.flatMap(({ median, baseline }) => (baseline ? [median / baseline.median - 1] : []))
      const differences =
        parts.length > 0 ? [mean(parts), Math.min(...parts), Math.max(...parts)].map(signed) : ['', '', '']
      return [
        `${recipe}${shape.twin ? ', moved' : ''}`,
        shape.from === undefined ? name : `${name} from step ${shape.from}`,
        String(group.length),
        mean(group.map(({ median }) => median)).toFixed(4),
        ...differences,
      ]
    }),
  }
}

/** What `coat-bench recipes` measures, a line a recipe and length. Of rows about the same thing the last counts. */
export function recipeTable(rows: readonly Row[]): Table {
  const lines = new Map<string, Map<string, Row>>()
  for (const row of rows) {
    const { threads: _, ...shape } = row.shape
    const key = JSON.stringify([row.recipe, row.device, shape])
    const line = lines.get(key) ?? new Map()
    lines.set(key, line.set(row.name, row))
  }
  const head = ['recipe', 'steps', 'held-out loss', 'less bf16', 'B/param by formats', 'measured', 'kept for backward']
  return {
    head: [...head, 'tokens/s'],
    rows: [...lines.values()].map((line) => {
      const [{ recipe, shape }] = [...line.values()] as [Row]
      const cell = (name: string, show: (row: Row) => string, otherwise = '-') => {
        const row = line.get(`recipes/${name}`)
        return row ? show(row) : otherwise
      }
      const less = ({ median, baseline }: Row) => (baseline ? difference(median - baseline.median) : '-')
      return [
        shape.emulated ? `${recipe} (emulated)` : String(recipe),
        String(shape.steps),
        cell('validation', ({ median }) => median.toFixed(4), 'stopped'),
        cell('validation', less),
        cell('bytes/predicted', ({ median }) => median.toFixed(3)),
        cell('bytes/measured', ({ median }) => median.toFixed(3)),
        cell('saved', ({ median }) => showBytes(median)),
        cell('tokens', ({ median }) => showNumber(median)),
      ]
    }),
  }
}

function difference(x: number): string {
  return `${x < 0 ? '' : '+'}${x.toFixed(4)}`
}

function words(entries: Record<string, string | number>): string {
  return Object.entries(entries)
    .map(([name, value]) => `${name} ${value}`)
    .join(', ')
}

const notMeasured = 'Not measured yet.'
const section =
  /(<!-- (?:rows (\S+)(?: (\S+) (\S+))?|compare (\S+) (\S+) (\S+)|losses (\S+)|recipes (\S+)) -->\n)[\s\S]*?(<!-- end -->)/g

/**
 * A Markdown text with its sections filled from rows of files, of which `read` gives '' for one that is not there:
 * `<!-- rows FILE [NAME METRIC] -->` … `<!-- end -->`, where NAME begins the names of rows, or is `*`; and
 * `<!-- compare FILE BASE NAME,NAME -->` … `<!-- end -->`, as `compareRows` does; `<!-- losses FILE -->` and `<!-- recipes FILE -->` … `<!-- end -->`.
 */
export function fillSections(markdown: string, read: (file: string) => string): string {
  return markdown.replace(section, (_, start, file, name, metric, compared, base, names, losses, recipes, end) => {
    const rows = parseRows(read(file ?? compared ?? losses ?? recipes))
    const wanted = (row: Row) => !name || ((name === '*' || row.name.startsWith(name)) && row.metric === metric)
    const chosen = rows.filter(wanted)
    const table = compared
      ? compareRows(rows, base, names.split(','))
      : chosen.length === 0
        ? notMeasured
        : losses || recipes
          ? markdownTable((losses ? lossTable : recipeTable)(chosen))
          : markdownRows(chosen)
    return `${start}${table}\n${end}`
  })
}

// Losses differ by tenths of a percent.
function showShare({ metric, median }: Row, baseline: { median: number }): string {
  return `${((100 * median) / baseline.median).toFixed(metric === 'loss' ? 2 : 0)} %`
}

function showValue({ metric, unit }: Row, value: number): string {
  if (unit === 'B') return showBytes(value)
  if (unit === '1') return value.toExponential(2)
  return metric === 'loss' ? `${value.toFixed(4)} ${unit}` : `${showNumber(value)} ${unit}`
}
