// One case of an op: inputs made after the table, results checked, then timed: bytes a second, or operations a second.
import { CoatError, type Device, type FloatFormat, Tensor } from '../lib/index.ts'
import type { AnyFormat, Handle, NativeOps } from '../lib/native.gen.ts'
import { native, type OpArgument } from '../lib/native.ts'
import { showNumber, type Table } from '../lib/report.ts'
import { makeRow, percentile, type Row } from './row.ts'

export type Sizes = Readonly<Record<string, number>>
/** Decoded values by argument, inputs as they were before the call. */
export type Values = Readonly<Record<string, Float32Array | Int32Array>>

export interface OpCase {
  op: keyof NativeOps
  /** Letters of the table's dims; "*" is M N, and L the length of lists, whose members share M N elements. */
  sizes: Sizes
  /** What is timed on a GPU, unless the usual sizes of the letters; none: the case is checked only. */
  large?: readonly Sizes[]
  /** Elements of the members of lists on a GPU, unless equal shares of M N. */
  members?: readonly number[]
  /** Format of every tensor; optional ones that are not named are absent. */
  formats: Readonly<Record<string, AnyFormat>>
  /** Number arguments that are no sizes; `sizes` may have others for a row to show. */
  numbers?: Readonly<Record<string, number>>
  /** Words; those that are not named are the first of their list. */
  words?: Readonly<Record<string, string>>
  /** Floating-point operations; without it the case is measured in bytes. */
  flops?: (sizes: Sizes) => number
  /** Element i of `result`, in float64 from the inputs; `tolerance` where sums are less exact than the format. */
  expect?: { result: string; value: (i: number, values: Values, sizes: Sizes) => number; tolerance?: number }
}

/** Σ term(k) over k in [0, count). */
export function sum(count: number, term: (k: number) => number): number {
  let total = 0
  for (let k = 0; k < count; k++) total += term(k)
  return total
}

/** Rows of the packed documents of a case with `starts`. */
export const documentRows = (T: number) => Math.ceil(T / 8)

// Arguments that are no numbers between -1 and 1.
const fills: Readonly<Record<string, (u: number, sizes: Sizes, i: number) => number>> = {
  ids: (u, { V = 1 }) => Math.floor(u * V),
  targets: (u, { V = 1 }) => Math.floor(u * V),
  rstd: (u) => 1 + u,
  lse: (u) => 5 + u,
  v: (u) => u * u,
  clip: () => 0.5, // [factor, skip]: skip is set to 0 below
  dloss: () => 1,
  amax: () => 8, // normal numbers lie below it
  starts: (_, { T = 1 }, i) => (i % T) - ((i % T) % documentRows(T)),
  scale: () => 1 / 128, // for numbers up to 3.5 in e4m3
}

/** Half a unit in the last place, or half the widest gap of a map, as a part of the value, with some room for sums. */
const tolerances: Readonly<Record<string, number>> = {
  f32: 1e-4,
  bf16: 2 ** -7,
  bf16x2: 1e-4,
  f16: 2 ** -10,
  e4m3: 2 ** -3.5,
  e5m2: 2 ** -2.5,
  i8: 2 ** -5, // of a run's largest, which is a few times the size of the others
  d8: 2 ** -4,
  u8: 2 ** -4,
  d4: 2 ** -0.5,
  u4: 2 ** -0.5,
}

export interface OpBenchOptions {
  device: Device
  /** Milliseconds of measuring for one case (default 300). */
  budget?: number
  /** Called with every case before it runs. */
  announce?: (name: string) => void
}

/** Checks and times cases, all on one machine in one go with the bandwidth of a plain copy. */
export async function opBench(cases: readonly OpCase[], options: OpBenchOptions): Promise<Row[]> {
  const copy = copyRow(options)
  const found = [copy]
  if (options.device.kind === 'cuda') found.push(...(await readRows(options)))
  for (const one of cases) {
    options.announce?.(one.op)
    found.push(...(await measure(one, copy.median, options)))
  }
  return found
}

export function opTable(rows: readonly Row[]): Table {
  const rates = rows.filter(({ metric, name }) => metric !== 'time' || name.startsWith('read/'))
  return {
    head: ['op', 'shape', 'formats', 'ms', 'median', 'p20', 'p80', 'unit', 'baseline'],
    rows: rates.map((row) => {
      const time = rows.find((other) => other.metric === 'time' && other.name === row.name && same(other, row))
      return [
        row.name,
        Object.entries(row.shape)
          .filter(([letter]) => letter !== 'threads')
          .map((entry) => entry.join(''))
          .join(' '),
        Object.values(row.formats).join(' '),
        time ? showNumber(time.median) : '',
        ...[row.median, row.p20, row.p80].map(showNumber),
        row.unit,
        row.baseline ? `${Math.round((100 * row.median) / row.baseline.median)} % of ${row.baseline.name}` : '',
      ]
    }),
  }
}

function same(a: Row, b: Row): boolean {
  return JSON.stringify([a.shape, a.formats]) === JSON.stringify([b.shape, b.formats])
}

// Sizes on a GPU: a layer of Llama-2-7B with 16384 tokens, by the letters of the cases.
const large: Readonly<Record<string, number>> = {
  M: 16384,
  N: 4096,
  F: 11008,
  B: 8,
  T: 2048,
  H: 32,
  J: 32,
  D: 128,
  V: 32000,
}

function largeOf(sizes: Sizes): Sizes {
  return Object.fromEntries(Object.entries(sizes).map(([letter, size]) => [letter, large[letter] ?? size]))
}

/** Bandwidth of a plain copy of n floats: on the CPU by one thread of JavaScript. */
function copyRow(options: OpBenchOptions): Row {
  const { kind } = options.device
  const n = kind === 'cpu' ? 2 ** 24 : 2 ** 28
  const times = kind === 'cpu' ? copyOnCpu(n, options) : copyOnDevice(n, options)
  const shape: Record<string, number> = kind === 'cpu' ? { n, threads: 1 } : { n }
  return makeRow(
    { kind: 'op', name: 'copy', metric: 'bandwidth', unit: 'GB/s', device: kind, shape, formats: { x: 'f32' } },
    times.map((time) => (8 * n) / time / 1e6),
  )
}

function copyOnCpu(n: number, { budget = 300 }: OpBenchOptions): number[] {
  const from = new Float32Array(n).fill(1)
  const to = new Float32Array(n)
  return repeat(() => to.set(from), budget)
}

function copyOnDevice(n: number, { device, budget = 300 }: OpBenchOptions): number[] {
  const x = native.random_uniform('f32', 2 ** 14, n / 2 ** 14, -1, 1, 1, device.kind)
  const times = repeatOnDevice(() => [native.convert(x, null, 'f32')], budget)
  native.free(x)
  return times
}

/**
 * Milliseconds of every call on the device's clock, after three that do not count. Calls are queued behind work that
 * keeps the device busy meanwhile, so that no time of the host is among them.
 */
function repeatOnDevice(call: () => Handle[], budget: number): number[] {
  const times: number[] = []
  const spacer = native.random_uniform('f32', 2 ** 12, 2 ** 12, -1, 1, 1, 'cuda')
  for (let spent = 0, calls = 3; times.length < 8 || (spent < budget && times.length < 203); ) {
    for (let i = 0; i < 20; i++) native.free(native.convert(spacer, null, 'f32'))
    const marks = Array.from({ length: calls }, () => {
      const from = native.mark()
      const handles = call()
      const to = native.mark()
      for (const handle of handles) native.free(handle)
      return [from, to] as const
    })
    for (const [from, to] of marks) {
      times.push(native.elapsed(from, to))
      spent += times.at(-1) as number
    }
    native.forgetMarks()
    // one call can be too short for the clock
    calls = Math.max(5, Math.min(20, Math.ceil(budget / Math.max(times.at(-1) as number, 0.001))))
  }
  native.free(spacer)
  return times.slice(3)
}

/** A read behind some 20 ms of work: until the call returns, until the values are there, and the longest macrotask between. */
async function readRows({ device, budget = 300 }: OpBenchOptions): Promise<Row[]> {
  const work = native.random_uniform('f32', 2 ** 14, 2 ** 14, -1, 1, 1, device.kind)
  const x = native.random_uniform('f32', 1, 2 ** 18, -1, 1, 1, device.kind)
  const measured = { call: [] as number[], wait: [] as number[], macrotask: [] as number[] }
  for (const end = performance.now() + budget; measured.call.length < 5 || performance.now() < end; ) {
    for (let i = 0; i < 40; i++) native.free(native.convert(work, null, 'f32'))
    const started = performance.now()
    const reading = native.read(x)
    measured.call.push(performance.now() - started)
    let last = performance.now()
    let longest = 0
    let waiting = true
    const turn = (): void => {
      longest = Math.max(longest, performance.now() - last)
      last = performance.now()
      if (waiting) setImmediate(turn)
    }
    setImmediate(turn)
    await reading
    waiting = false
    measured.wait.push(performance.now() - started)
    measured.macrotask.push(longest)
  }
  native.free(work)
  native.free(x)
  const fields = { kind: 'op', metric: 'time', unit: 'ms', device: device.kind, shape: { n: 2 ** 18 } } as const
  return Object.entries(measured).map(([name, times]) =>
    makeRow({ ...fields, name: `read/${name}`, formats: { x: 'f32' } }, times),
  )
}

/** Milliseconds of every call, after three that do not count; `after` each comes what is not timed. */
function repeat<T>(call: () => T, budget: number, after: (result: T) => void = () => {}): number[] {
  const times: number[] = []
  const end = performance.now() + budget
  for (let i = -3; i < 5 || (performance.now() < end && i < 500); i++) {
    const started = performance.now()
    const result = call()
    if (i >= 0) times.push(performance.now() - started)
    after(result)
  }
  return times
}

async function measure(one: OpCase, copy: number, options: OpBenchOptions): Promise<Row[]> {
  if (options.device.kind === 'cpu') return await measureAt(one, copy, options, true)
  await measureAt(one, copy, { ...options, budget: 0 }, true)
  const found: Row[] = []
  for (const sizes of one.large ?? [largeOf(one.sizes)])
    found.push(...(await measureAt({ ...one, sizes }, copy, options, false)))
  return found
}

async function measureAt(one: OpCase, copy: number, options: OpBenchOptions, checked: boolean): Promise<Row[]> {
  const { device, budget = 300 } = options
  const entry = native.table().find(({ name }) => name === one.op)
  if (!entry) throw new CoatError(`op '${one.op}' is not in the table`, 'op', one.op)
  const call = native[one.op] as unknown as (...values: unknown[]) => unknown
  const inputs = new Map<string, Tensor[]>()
  try {
    const values: unknown[] = []
    for (const argument of entry.arguments) values.push(...argumentOf(argument, one, device, inputs, !checked))
    if (entry.arguments.every(({ mode, formats }) => formats.length === 0 || mode.startsWith('out')))
      values.push(device.kind)
    const run = () => [call(...values)].flat().filter((handle): handle is Handle => typeof handle === 'number')
    const before: Record<string, Float32Array | Int32Array> = {}
    for (const [name, tensors] of checked ? inputs : [])
      before[name] = joined(await Promise.all(tensors.map((tensor) => tensor.read())))
    const outputs = run().map((handle) => Tensor.own(handle).keep())
    let bytes = 0
    try {
      const made = entry.arguments.filter(
        ({ mode, name }) => mode === 'out' || (mode === 'opt_out' && one.formats[name]),
      )
      const results: [string, Tensor[]][] = made.map(({ name }, i) => [name, [outputs[i] as Tensor]])
      for (const { mode, name } of entry.arguments)
        if (mode.endsWith('inout')) results.push([name, inputs.get(name) ?? []])
      for (const [name, tensors] of checked ? results : [])
        verify(one, name, joined(await Promise.all(tensors.map((tensor) => tensor.read()))), before)
      // what is changed in place is read and written
      for (const tensor of [...[...inputs.values()].flat(), ...results.flatMap(([, tensors]) => tensors)])
        bytes += tensor.bytes
    } finally {
      for (const output of outputs) output.dispose()
    }
    const times =
      device.kind === 'cuda'
        ? repeatOnDevice(run, budget)
        : repeat(run, budget, (handles) => handles.forEach(native.free))
    const shared = {
      kind: 'op',
      name: one.op,
      device: device.kind,
      shape: one.sizes,
      formats: { ...one.formats, ...one.words },
    } as const
    const work = one.flops?.(one.sizes) ?? bytes
    const rates = times.map((time) => work / time / 1e6)
    const other = device.kind === 'cuda' && !checked && one.op.startsWith('matmul') ? timeOfCublaslt(run, budget) : null
    const baseline = other === null ? null : { name: 'cublaslt', median: work / other / 1e6 }
    return [
      makeRow({ ...shared, metric: 'time', unit: 'ms' }, times),
      one.flops
        ? makeRow({ ...shared, metric: 'flops', unit: 'GFLOP/s', baseline }, rates)
        : makeRow({ ...shared, metric: 'bandwidth', unit: 'GB/s', baseline: { name: 'copy', median: copy } }, rates),
    ]
  } finally {
    for (const tensor of [...inputs.values()].flat()) tensor.dispose()
  }
}

/** The median of the best of cuBLASLt's suggestions, which adds FP8 as the op does; null where it is not there or refuses. */
function timeOfCublaslt(run: () => Handle[], budget: number): number | null {
  let best: number | null = null
  try {
    for (let suggestion = 0; suggestion < 4 && native.baseline(suggestion); suggestion++) {
      run().forEach(native.free)
      const median = percentile(repeatOnDevice(run, budget / 4), 50)
      best = Math.min(best ?? median, median)
    }
  } catch (error) {
    if (!(error instanceof CoatError && error.code === 'baseline')) throw error
  } finally {
    native.baseline(-1)
  }
  return best
}

/** What an op's function takes for one argument of the table: a handle or a list, null, a format, a number. */
function argumentOf(
  { mode, name, dims, formats, words }: OpArgument,
  one: OpCase,
  device: Device,
  inputs: Map<string, Tensor[]>,
  onDevice: boolean,
): unknown[] {
  const format = one.formats[name]
  if (mode === 'f32' || mode === 'i64' || mode === 'seed') return [one.sizes[name] ?? one.numbers?.[name]]
  if (words.length > 0) return [one.words?.[name] ?? words[0]]
  if (mode === 'out' && formats.length === 1) return [] // known, so not asked for
  if (mode === 'out' || mode === 'opt_out') return [format ?? null]
  if (!format) return [null]
  const list = mode.includes('list')
  const share = () => Math.floor(product('M N', one.sizes) / (one.sizes.L ?? 1))
  const tensors = Array.from({ length: list ? (one.sizes.L ?? 1) : 1 }, (_, i) => {
    const shape =
      list && dims === '*' ? [1, (onDevice ? one.members?.[i] : undefined) ?? share()] : shapeOf(dims, one.sizes)
    return onDevice && shape.length === 2 && format !== 'i32'
      ? randomOn(device, name, shape as [number, number], format, i + 1)
      : Tensor.from(valuesOf(name, shape, format, one.sizes, i + 1), shape, { format, device }).keep()
  })
  inputs.set(name, tensors)
  return [list ? tensors.map(({ handle }) => handle) : tensors[0]?.handle]
}

/** Normal numbers, made on the device: hundreds of millions of them would take JavaScript minutes. */
function randomOn(
  device: Device,
  name: string,
  [rows, cols]: [number, number],
  format: FloatFormat,
  seed: number,
): Tensor {
  const range = { rstd: [1, 2], lse: [5, 6], v: [0, 1] }[name] as [number, number] | undefined
  const plain = range
    ? native.random_uniform('f32', rows, cols, ...range, seed, device.kind)
    : native.random_normal('f32', rows, cols, 0, 1, seed, device.kind)
  if (format === 'f32') return Tensor.own(plain).keep()
  const made = native.convert(plain, null, format)
  native.free(plain)
  return Tensor.own(made).keep()
}

function valuesOf(
  name: string,
  shape: readonly number[],
  format: AnyFormat,
  sizes: Sizes,
  seed: number,
): Float32Array | Int32Array {
  const n = shape.reduce((a, b) => a * b, 1)
  const fill = fills[name] ?? ((u: number) => 2 * u - 1)
  let state = [...name].reduce((hash, letter) => Math.imul(hash, 31) + letter.charCodeAt(0), seed) >>> 0
  const next = (_: unknown, i: number) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return fill(state / 2 ** 32, sizes, i)
  }
  const values = format === 'i32' ? Int32Array.from({ length: n }, next) : Float32Array.from({ length: n }, next)
  if (name === 'clip') values[1] = 0
  return values
}

function shapeOf(dims: string, sizes: Sizes): number[] {
  return (dims === '*' ? 'M N' : dims).split(' ').map((size) => product(size, sizes))
}

// A product of letters, integers and sums in parentheses: `(H+2*J)*D`.
function product(text: string, sizes: Sizes): number {
  const factors = text.match(/\([^)]*\)|\w+/g) ?? []
  return factors.reduce((total, factor) => {
    const terms = factor.startsWith('(') ? factor.slice(1, -1).split('+') : null
    return (
      total * (terms ? terms.reduce((all, term) => all + product(term, sizes), 0) : (sizes[factor] ?? Number(factor)))
    )
  }, 1)
}

function joined(parts: readonly (Float32Array | Int32Array)[]): Float32Array | Int32Array {
  if (parts.length === 1) return parts[0] as Float32Array
  const all = new Float32Array(parts.reduce((total, { length }) => total + length, 0))
  let place = 0
  for (const part of parts) {
    all.set(part, place)
    place += part.length
  }
  return all
}

/** All values are finite, and some places hold what the case expects. */
function verify(
  { op, sizes, formats, expect }: OpCase,
  name: string,
  values: Float32Array | Int32Array,
  inputs: Values,
): void {
  const fail = (i: number, rule: string): never => {
    throw new CoatError(`${op}: ${name}[${i}] is ${values[i]} and must be ${rule}`, 'verify', op, name)
  }
  for (let i = 0; i < values.length; i++) if (!Number.isFinite(values[i])) fail(i, 'finite')
  if (expect?.result !== name) return
  const tolerance = Math.max(tolerances[formats[name]?.split('/')[0] ?? ''] ?? 0, expect.tolerance ?? 0)
  const places = Math.min(16, values.length)
  const size = Math.sqrt(sum(values.length, (i) => (values[i] as number) ** 2) / values.length)
  for (let place = 0; place < places; place++) {
    const i = Math.floor(((place + 0.5) * values.length) / places)
    const wanted = expect.value(i, inputs, sizes)
    if (!(Math.abs((values[i] as number) - wanted) <= tolerance * Math.max(Math.abs(wanted), size)))
      fail(i, `about ${wanted}`)
  }
}
