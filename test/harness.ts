// checkOp holds one op of the table against a float64 reference in every legal combination of formats, on every device;
// checkGradient holds a reference backward against its forward.
import { afterEach, expect, it } from 'vitest'
import type { AnyFormat, Handle } from '../lib/native.gen.ts'
import { CoatError, type DeviceKind, native, type OpArgument, type OpEntry } from '../lib/native.ts'
import { decode, fullOf, hasPow2, interval, type Kind, plain, type Stored, valueOfCode } from './decode.ts'
import {
  type Given,
  type Letter,
  type List,
  matrix,
  type Name,
  numelOf,
  Random,
  type Shape,
  sum,
  type Values,
  valuesOf,
} from './values.ts'

export const devices: readonly DeviceKind[] = ['cpu', 'cuda']

/** Whether this build and this machine have the device; tests of an absent one are skipped, and counted. */
export function present(device: DeviceKind): boolean {
  try {
    native.free(native.make('f32', [1], device, 'temp'))
    return true
  } catch (error) {
    if (error instanceof CoatError && error.code === 'no_cuda') return false
    throw error
  }
}

// ---- handles of hand-written tests ----

const owned = new Set<Handle>()

/** Frees the handle, or the handles, when the test ends. */
export function own<T extends Handle | readonly (Handle | null)[]>(handles: T): T {
  for (const handle of [handles as (Handle | null)[]].flat()) if (handle !== null) owned.add(handle)
  return handles
}

afterEach(() => {
  native.checkGuards()
  const handles = [...owned]
  owned.clear()
  for (const handle of handles) native.free(handle)
  expect(native.memory().tensors).toBe(0)
  expect(native.memory().live.total).toBe(0)
})

/** Makes a tensor on the CPU with these values, rounded to the format. */
export function tensor(format: AnyFormat, shape: Shape, values: ArrayLike<number>, given?: Handle): Handle {
  const ids = native.make(format === 'i32' ? 'i32' : 'f32', shape, 'cpu', 'temp')
  native.write(ids, format === 'i32' ? Int32Array.from(values) : Float32Array.from(values))
  if (format === 'i32' || (format === 'f32' && given === undefined)) return own(ids)
  const made = native.convert(ids, given ?? null, format)
  native.free(ids)
  return own(made)
}

/** The same bytes on a device. */
export async function moved(handle: Handle, device: DeviceKind): Promise<Handle> {
  const { format, shape } = native.info(handle)
  const made = own(native.make(format, shape, device, 'temp'))
  native.write(made, await bytesOf(handle))
  return made
}

/** Decodes a tensor. */
export async function stored(handle: Handle): Promise<Stored> {
  const { format, shape } = native.info(handle)
  return decode(format, shape, new Uint8Array(await native.read(handle)))
}
export async function read(handle: Handle): Promise<number[]> {
  return [...(await stored(handle)).values]
}
export async function bytesOf(handle: Handle): Promise<Uint8Array> {
  return new Uint8Array(await native.read(handle))
}

// ---- the table ----

type Formats = Record<string, AnyFormat | null>
type Sizes = Record<string, number>

const isTensor = ({ formats }: OpArgument) => formats.length > 0
const isOutput = ({ mode }: OpArgument) => mode === 'out' || mode === 'opt_out'
const isChanged = ({ mode }: OpArgument) => mode.endsWith('inout')
const isList = ({ mode }: OpArgument) => mode.includes('list')

export function entryOf(name: string): OpEntry {
  const entry = native.table().find((row) => row.name === name)
  if (!entry) throw new Error(`the table has no op ${name}`)
  return entry
}

/** The value of a size of the table, such as (H+2*J)*D. */
function evaluate(dim: string, sizes: Sizes): number {
  const flat = dim.replace(/\(([^()]*)\)/g, (_, inner: string) => String(evaluate(inner, sizes)))
  const product = (text: string) => numelOf(text.split('*').map((factor) => sizes[factor] ?? Number(factor)))
  return flat.split('+').reduce((total, text) => total + product(text), 0)
}

const shapeOf = (dims: string, sizes: Sizes): Shape =>
  (dims === '*' ? ['M', 'N'] : dims.split(' ')).map((dim) => evaluate(dim, sizes))

/** Every legal combination of formats up to 64; else as few as show every pair of formats of two arguments. */
export function combinationsOf(entry: OpEntry): Formats[] {
  let all: Formats[] = [{}]
  for (const { name, mode, formats } of entry.arguments.filter(isTensor)) {
    const choices = mode.startsWith('opt') ? [null, ...formats] : formats
    all = all.flatMap((combination) => choices.map((format) => ({ ...combination, [name]: format })))
  }
  for (const { names, combinations } of entry.only)
    all = all.filter((row) => combinations.some((legal) => legal.every((word, i) => row[names[i] as string] === word)))
  if (all.length <= 64) return all
  const pairsOf = (row: Formats) => {
    const words = Object.entries(row).map(([name, format]) => `${name} ${format}`)
    return words.flatMap((word, i) => words.slice(i + 1).map((other) => `${word}, ${other}`))
  }
  const random = new Random(64)
  const candidates = all.map((row) => ({ row, pairs: pairsOf(row), order: random.uniform() }))
  candidates.sort((a, b) => a.order - b.order)
  const open = new Set(candidates.flatMap(({ pairs }) => pairs))
  const gain = ({ pairs }: { pairs: string[] }) => pairs.filter((pair) => open.has(pair)).length
  const chosen: Formats[] = []
  while (open.size > 0) {
    const best = candidates.reduce((a, b) => (gain(b) > gain(a) ? b : a))
    for (const pair of best.pairs) open.delete(pair)
    chosen.push(best.row)
  }
  return chosen
}

/** Calls an op with its arguments by name, one that reads no tensor with the device; the outputs by name. */
export function invoke(
  entry: OpEntry,
  by: Record<string, unknown>,
  device: DeviceKind = 'cpu',
): Record<string, Handle | null> {
  const silent = (argument: OpArgument) => argument.mode === 'out' && argument.formats.length === 1
  const list = entry.arguments.filter((argument) => !silent(argument)).map(({ name }) => by[name])
  const f = native[entry.name as 'scale_of'] as unknown as (...list: unknown[]) => Handle | Handle[]
  const source = entry.arguments.every((argument) => !isTensor(argument) || isOutput(argument))
  const results = [f(...list, ...(source ? [device] : []))].flat()
  return Object.fromEntries(entry.arguments.filter(isOutput).map(({ name }, i) => [name, results[i] ?? null]))
}

// ---- checkOp ----

/** Rows and columns for most ops: none, 1, primes, 16k ± 1, and more than one chunk of work. */
export const sizes = [
  ...[0, 1, 2].map((M) => ({ M, N: 16 })),
  ...[1, 15, 17, 31, 33, 127, 129].map((N, i) => ({ M: [1, 3, 5, 33, 31, 129, 17][i] as number, N })),
  { M: 257, N: 384 },
]

/** For ops that share a row among many threads: rows that several warps share, with and without a last part. */
export const wideSizes = [
  { M: 18, N: 1568 },
  { M: 3, N: 4640 },
  { M: 2, N: 6144 },
]

/** For sums over rows that blocks share on a device: enough rows that a block has a whole chunk of them. */
export const tallSize = { M: 16300, N: 16 }

/** Of every op that has an argument `scale`. */
const givenScale = 0.0625

type Approximate = Partial<Record<Kind, number>>

interface Input {
  shape: Shape
  bytes: Uint8Array
  values: Values
}

export interface OpCheck {
  /** Letters, and numbers of the op. `*` stands for [M, N]. */
  sizes: readonly Sizes[]
  /** Numbers of elements of the members of lists, which are [1, n]. */
  lists?: readonly number[]
  numbers?: Record<string, number>
  /** Words of a combination of formats; the others are the first of their list. */
  words?: (formats: Formats) => Record<string, string>
  /** One element of an argument, where typical numbers will not do. */
  data?: Partial<Record<Name | List, (random: Random, sizes: Record<Letter, number>, i: number) => number>>
  /** Expected outputs and changed arguments by name; under |name| the size that rounding errors are relative to. */
  reference: (given: Given) => Record<string, Values | Values[]>
  /** Whether CUDA must give the values of the CPU bit for bit (default true): not where sums run in another order. */
  exact?: boolean
  /**
   * Whether the scale of a `/t` output is `measured`, the `given` one, or follows from a bound (`bounded`), where it is not
   * the same for all: by default it is given where there is an argument `scale`.
   */
  scaleOf?: (output: string, formats: Formats) => 'measured' | 'pow2' | 'given' | 'bounded'
  /** Combinations whose CUDA kernel uses the special function unit: 8-bit codes may be one apart, and scales follow from what it gives. */
  near?: (formats: Formats) => boolean
  /**
   * For ops whose CUDA kernels use an approximate instruction an element: its relative error by the kind of the output.
   * Results in other kinds stay exact, and so does every scale.
   */
  approximate?: Approximate
  /** Which of the combinations are held, where some say nothing that others do not (default: all). */
  holds?: (formats: Formats) => boolean
  /** Relative FP32 error beyond the rounding to the output's format (default 1e-6). */
  slack?: number | ((formats: Formats, device: DeviceKind) => number)
}

// COAT_TEST_FEW=1: a few sizes and combinations, for runs under a sanitizer, where every launch is slow.
const few = process.env.COAT_TEST_FEW === '1'

/** Holds one op against its reference; see architecture.md 2.12. */
export function checkOp(name: string, every: OpCheck): void {
  const entry = entryOf(name)
  const combinations = combinationsOf(entry).filter((row, i) => (every.holds?.(row) ?? true) && (!few || i % 6 === 0))
  const check = { ...every, sizes: every.sizes.filter((_, i, { length }) => !few || i % 4 === 1 || i === length - 1) }
  const title = `${combinations.length} combinations of formats, ${check.sizes.length} sizes`
  for (const device of devices)
    it.skipIf(!present(device))(`${name} on ${device}: ${title}`, async ({ annotate }) => {
      const threads = native.threads()
      const apart = new Apart(check.approximate)
      for (const sizes of check.sizes)
        await checkSizes(entry, check, { L: check.lists?.length ?? 0, ...sizes }, device, combinations, apart)
      native.threads(threads)
      if (apart.total > 0) await annotate(apart.text)
    })
}

async function makeInput(
  argument: OpArgument,
  format: AnyFormat,
  shape: Shape,
  check: OpCheck,
  sizes: Sizes,
): Promise<Input> {
  const random = new Random(shape.reduce((seed, size) => seed * 31 + size, argument.name.charCodeAt(0)))
  const rule = check.data?.[argument.name as Name]
  const one = (i: number) =>
    argument.name === 'scale' ? givenScale : rule ? rule(random, sizes as Record<Letter, number>, i) : random.typical()
  const handle = tensor(
    format,
    shape,
    Float64Array.from({ length: numelOf(shape) }, (_, i) => one(i)),
  )
  const { values } = await stored(handle)
  return { shape, bytes: await bytesOf(handle), values: valuesOf(values, shape.at(-1)) }
}

async function checkSizes(
  entry: OpEntry,
  check: OpCheck,
  sizes: Sizes,
  device: DeviceKind,
  all: Formats[],
  apart: Apart,
): Promise<void> {
  const known = new Map<string, Input[]>()
  const references = new Map<string, ReturnType<OpCheck['reference']>>()
  const numbers: Record<string, number> = { ...check.numbers, ...sizes }
  const inputs = entry.arguments.filter((argument) => isTensor(argument) && !isOutput(argument))
  for (const { name, mode } of entry.arguments) if (mode === 'f32') numbers[name] = Math.fround(numbers[name] as number)

  for (const formats of all) {
    const given: Record<string, unknown> = { ...numbers }
    for (const argument of inputs) {
      const format = formats[argument.name] as AnyFormat | null
      const key = `${argument.name} ${format}`
      const own = shapeOf(argument.dims, sizes)
      const shapes = isList(argument) ? (check.lists ?? []).map((n) => (argument.dims === '*' ? [1, n] : own)) : [own]
      if (format && !known.has(key))
        known.set(key, await Promise.all(shapes.map((shape) => makeInput(argument, format, shape, check, sizes))))
      const values = known.get(key)?.map((input) => input.values) ?? null
      if (argument.name !== 'scale' || !isTensor(argument))
        given[argument.name] = isList(argument) ? values : (values?.[0] ?? null)
    }
    const key = inputs.map(({ name }) => (name === 'scale' ? '' : formats[name])).join()
    const expected = references.get(key) ?? check.reference(given as unknown as Given)
    references.set(key, expected)

    const where = `${entry.name} ${JSON.stringify(sizes)} ${JSON.stringify(formats)}`
    const slack = typeof check.slack === 'function' ? check.slack(formats, device) : (check.slack ?? 1e-6)
    const words = entry.arguments.filter(({ mode }) => mode === 'word').map(({ name, words }) => [name, words[0]])
    const values = { ...numbers, ...Object.fromEntries(words), ...check.words?.(formats) }
    let first: Map<string, Uint8Array> | undefined
    // on the CPU with several numbers of threads, on a device twice: the same bytes
    for (const threads of device === 'cpu' ? [1, 2, 7] : [1, 1]) {
      native.threads(threads)
      const results = await runOnce(entry, formats, values, known, device)
      for (const [name, { format, shape, bytes }] of results) {
        if (first && Buffer.compare(first.get(name) as Uint8Array, bytes) !== 0)
          throw new Error(`${where}: ${name} differs from the first run, with ${threads} threads`)
        const [bare = '', item] = name.split('[')
        const pick = (value?: Values | Values[]) =>
          Array.isArray(value) ? value[Number.parseInt(item ?? '0', 10)] : value
        const wanted = pick(expected[bare])
        if (!wanted) throw new Error(`the reference of ${entry.name} gives no ${bare}`)
        const scaled = check.scaleOf?.(bare, formats) ?? (formats.scale ? 'given' : 'measured')
        if (!first)
          verify(
            `${where}: ${name}`,
            format,
            shape,
            bytes,
            wanted,
            pick(expected[`|${bare}|`]),
            (device === 'cuda' ? check.approximate?.[kindOf(format)] : undefined) ?? slack,
            scaled,
          )
      }
      first ??= new Map([...results].map(([name, { bytes }]) => [name, bytes]))
      if (device === 'cuda' && threads === 1 && (check.exact ?? true))
        for (const [name, cpu] of await runOnce(entry, formats, values, known, 'cpu')) {
          const [what, mine] = [`${where}: ${name}`, results.get(name) as Result]
          if (check.near?.(formats)) compareNear(what, mine, cpu)
          else apart.compare(what, mine, cpu)
        }
    }
  }
}

const kindOf = (format: AnyFormat) => format.split('/')[0] as Kind

/** Codes in the order of their values, one step from each to the next. */
function orderOf(kind: Kind, codes: Uint8Array | Uint16Array): Int32Array {
  const wide = kind === 'bf16' || kind === 'f16'
  const half = wide ? 0x8000 : 0x80
  const words = kind === 'bf16' ? new Uint16Array(codes.slice().buffer) : codes
  return Int32Array.from(words, (code) => (code < half ? code : half - code))
}

/** Compares results of CUDA with those of the CPU, and counts the codes that an approximation moved to a neighbour. */
class Apart {
  total = 0
  #moved = 0
  readonly #approximate: Approximate
  constructor(approximate: Approximate = {}) {
    this.#approximate = approximate
  }

  get text(): string {
    return `${((100 * this.#moved) / this.total).toFixed(2)} % of ${this.total} codes are one apart from those of the CPU`
  }

  /**
   * Throws unless two results have the same values, whatever the bits of their NaNs; approximate ones may be one code
   * apart, or less than 2^-20 of the largest, since near a root of the formula neither device knows the code.
   */
  compare(where: string, { format, shape, bytes }: Result, cpu: Result): void {
    const kind = kindOf(format)
    const approximate = kind in this.#approximate
    if (approximate) this.total += numelOf(shape)
    if (Buffer.compare(bytes, cpu.bytes) === 0) return
    const [a, b] = [decode(format, shape, bytes), decode(format, shape, cpu.bytes)]
    const steps = approximate ? [a, b].map(({ codes }) => orderOf(kind, codes)) : []
    const largest = a.values.reduce((most, x) => Math.max(most, Math.abs(x) || 0), 0)
    a.values.forEach((value, i) => {
      const other = b.values[i] as number
      if (value === other || (Number.isNaN(value) && Number.isNaN(other))) return
      const [one = 0, two = 0] = steps.map((order) => order[i])
      const near = Math.abs(one - two) <= 1 || Math.abs(value - other) <= 2 ** -20 * largest
      if (!approximate || !near) throw new Error(`${where}: element ${i} is ${value} on cuda and ${other} on the CPU`)
      this.#moved++
    })
    expect(a.blocks, `${where}: scales`).toEqual(b.blocks)
  }
}

/** Throws unless the codes of two results are equal or next to each other, whatever the bits of their NaNs. */
function compareNear(where: string, { format, shape, bytes }: Result, cpu: Result): void {
  const [a, b] = [decode(format, shape, bytes), decode(format, shape, cpu.bytes)]
  if (a.blocks.length === 0) return // plain numbers are held against the reference
  const rank = (code: number) => ((code & 0x7f) + 1) * (code < 0x80 ? 1 : -1)
  a.values.forEach((value, i) => {
    const other = b.values[i] as number
    if (Math.abs(rank(a.codes[i] as number) - rank(b.codes[i] as number)) > 1 && !(value === 0 && other === 0))
      throw new Error(`${where}: element ${i} is ${value} on cuda and ${other} on the CPU, more than a code apart`)
  })
}

interface Result {
  format: AnyFormat
  shape: Shape
  bytes: Uint8Array
}
type Results = Map<string, Result>

/** One call with fresh copies of the inputs; the bytes of what it made and changed. Frees everything. */
async function runOnce(
  entry: OpEntry,
  formats: Formats,
  numbers: Record<string, number | string>,
  known: Map<string, Input[]>,
  device: DeviceKind,
): Promise<Results> {
  const before = native.memory()
  const handles: Handle[] = []
  const wanted = new Map<string, Handle>()
  const by: Record<string, unknown> = { ...formats, ...numbers }
  for (const argument of entry.arguments.filter((argument) => isTensor(argument) && !isOutput(argument))) {
    const format = formats[argument.name]
    if (!format) continue
    const made = (known.get(`${argument.name} ${format}`) as Input[]).map(({ shape, bytes }) => {
      const handle = native.make(format, shape, device, 'temp')
      native.write(handle, bytes)
      return handle
    })
    handles.push(...made)
    by[argument.name] = isList(argument) ? made : made[0]
    if (isChanged(argument))
      for (const [i, handle] of made.entries())
        wanted.set(isList(argument) ? `${argument.name}[${i}]` : argument.name, handle)
  }
  for (const [name, handle] of Object.entries(invoke(entry, by, device))) {
    if (handle === null) continue
    handles.push(handle)
    wanted.set(name, handle)
  }
  native.checkGuards()
  const results: Results = new Map()
  for (const [name, handle] of wanted) {
    const { format, shape } = native.info(handle)
    results.set(name, { format, shape, bytes: await bytesOf(handle) })
  }
  for (const handle of handles) native.free(handle)
  expect(native.memory().live).toEqual(before.live)
  expect(native.memory().tensors).toBe(before.tensors)
  return results
}

/** Every element within half a step, nothing left unwritten, no scale larger than needed. */
function verify(
  where: string,
  format: AnyFormat,
  shape: Shape,
  bytes: Uint8Array,
  wanted: Values,
  sizes: Values | undefined,
  relative: number,
  scaled: 'measured' | 'pow2' | 'given' | 'bounded',
): void {
  const { values, codes, blocks, blockOf } = decode(format, shape, bytes)
  const kind = kindOf(format)
  if (values.length !== wanted.data.length)
    throw new Error(`${where} has ${values.length} elements, the reference ${wanted.data.length}`)
  const measured = blocks.length > 0 && !(scaled !== 'measured' && scaled !== 'pow2' && format.endsWith('/t'))
  if (blocks.length > 0 && !measured && scaled === 'given' && blocks[0]?.scale !== givenScale)
    throw new Error(`${where} has scale ${blocks[0]?.scale}, not ${givenScale}`)
  const halves = hasPow2(format) || (scaled === 'pow2' && format === 'e4m3/t')
  const top = new Float64Array(blocks.length)
  values.forEach((value, i) => {
    const x = wanted(i)
    const b = blockOf(i)
    const slack = relative * Math.max(Math.abs(x), sizes ? sizes(i) : 0)
    const [low, high] = interval(kind, blocks[b] ?? plain, x, slack, !measured)
    if (!(value >= low && value <= high) && value !== x && !(Number.isNaN(x) && Number.isNaN(value)))
      throw new Error(`${where}: element ${i} is ${value}, the reference ${x} (from ${low} to ${high} is right)`)
    if (measured) top[b] = Math.max(top[b] as number, Math.abs(valueOfCode(kind as 'e4m3', codes[i] as number)))
  })
  if (measured)
    top.forEach((code, b) => {
      if (code !== 0 && code < fullOf(kind) / (halves ? 2 : 1))
        throw new Error(`${where}: the largest code of block ${b} is ${code}`)
      const scale = blocks[b]?.scale ?? 0
      if (code !== 0 && halves && !Number.isInteger(Math.log2(scale)))
        throw new Error(`${where} has scale ${scale}, which is no power of two`)
    })
}

// ---- gradients of references ----

/** What an op makes of many random elements: the same on both devices, but for results in approximate kinds. */
export function checkSame(
  title: string,
  run: (device: DeviceKind) => readonly (Handle | null)[],
  approximate?: Approximate,
): void {
  const promise = approximate ? 'nearly the same codes' : 'the same bytes'
  it.skipIf(!present('cuda'))(`${title}: ${promise} on cuda as on the cpu`, async ({ annotate }) => {
    const [expected, actual] = devices.map((device) => own(run(device))) as [Handle[], Handle[]]
    const apart = new Apart(approximate)
    for (const [i, handle] of expected.entries()) {
      const [cpu, cuda] = await Promise.all([handle, actual[i] as Handle].map(bytesOf))
      if (approximate) {
        const { format, shape } = native.info(handle)
        apart.compare(title, { format, shape, bytes: cuda as Uint8Array }, { format, shape, bytes: cpu as Uint8Array })
      } else {
        expect(Buffer.compare(cpu as Uint8Array, cuda as Uint8Array)).toBe(0)
      }
    }
    if (apart.total > 0) await annotate(apart.text)
  })
}

export interface GradientCheck {
  numbers: Record<string, number>
  /** Rows and columns of each input. */
  inputs: Partial<Record<Name, readonly [number, number]>>
  forward: (given: Given) => Values
  /** Given dy (or dout) besides the inputs. */
  backward: (given: Given) => Record<string, Values | Values[]>
  /** Which result of backward is the gradient of which input. */
  gradients: Record<string, Name>
}

/** Holds a reference backward against central differences of the reference forward. */
export function checkGradient(name: string, check: GradientCheck): void {
  it(`${name}: the reference gradient agrees with central differences`, () => {
    const random = new Random(7)
    const given = { ...check.numbers } as Record<string, unknown>
    for (const [input, [rows, cols]] of Object.entries(check.inputs))
      given[input] = matrix(rows, cols, () => random.normal())
    const y = check.forward(given as Given)
    const dy = valuesOf(
      y.data.map(() => random.normal()),
      check.numbers.N ?? check.numbers.F ?? check.numbers.D,
    )
    const exact = check.backward({ ...given, dy, dout: dy, dloss: dy } as unknown as Given)
    const h = 1e-5
    for (const [gradient, input] of Object.entries(check.gradients)) {
      const { data } = given[input] as Values
      const loss = () => sum(dy.data.length, (i) => dy(i) * check.forward(given as Given)(i))
      data.forEach((x, i) => {
        data[i] = x + h
        const above = loss()
        data[i] = x - h
        const below = loss()
        data[i] = x
        const value = (exact[gradient] as Values)(i)
        expect(Math.abs((above - below) / (2 * h) - value), `${gradient}[${i}] = ${value}`).toBeLessThan(
          1e-6 * (1 + Math.abs(value)),
        )
      })
    }
  })
}
