// A profile that COAT_PROFILE wrote, as tables: where the time goes, and how near each op comes to what the chip can do.
import { CoatError } from '../lib/index.ts'
import { showNumber, type Table } from '../lib/report.ts'
import type { Ceilings } from './ceilings.ts'
import type { Sizes } from './measure.ts'
import { opCases } from './ops.ts'
import { makeRow, type Row } from './row.ts'

/** One event of the trace; times in microseconds. */
export interface TraceEvent {
  name: string
  cat: string
  ph: 'X' | 'i'
  ts: number
  dur?: number
  args?: { device: 'cpu' | 'cuda'; bytes: number; sizes: Sizes; formats: Readonly<Record<string, string>> }
}

/** Calls of one kind, added up over the steps. */
export interface Share {
  name: string
  calls: number
  /** Milliseconds. */
  time: number
  bytes: number
  flops: number
  /** Milliseconds at the ceiling: of the copy for ops that move bytes, of the tensor cores for products. */
  ideal: number
}

export interface Profile {
  device: 'cpu' | 'cuda'
  /** Steps that count; 1 where the trace knows none. */
  steps: number
  families: Share[]
  ops: Share[]
  /** Milliseconds from the first op to the end of the last, and those of its parts by what was queued. */
  span: number
  parts: readonly { name: string; time: number }[]
}

export function traceOf(text: string): TraceEvent[] {
  try {
    const trace: unknown = JSON.parse(text)
    if (!Array.isArray(trace)) throw new Error('not an array')
    return trace
  } catch (error) {
    throw new CoatError(`profile: not a trace (${(error as Error).message})`, 'profile', 'profile', 'file')
  }
}

/** Adds up the ops between notes `measured` and `done`, or those of the whole trace where it has none. */
export function profileOf(trace: readonly TraceEvent[], ceilings: Ceilings | null): Profile {
  const place = (note: string) => trace.findIndex(({ cat, name }) => cat === 'note' && name === note)
  const [from, to] = [place('measured'), place('done')]
  const counted = from >= 0 && to > from ? trace.slice(from + 1, to) : trace
  const calls = counted.filter(({ ph }) => ph === 'X')
  const [start] = calls
  const last = calls.at(-1)
  if (!start?.args || !last) throw new CoatError('profile: the trace holds no op', 'profile', 'profile', 'file')
  const parts = new Map<string, number>()
  let part: string | null = null
  for (const event of counted)
    if (event.ph === 'i') part = event.name
    else if (part !== null) parts.set(part, (parts.get(part) ?? 0) + (event.dur ?? 0) / 1000)
  return {
    device: start.args.device,
    steps: Math.max(1, counted.filter(({ cat, name }) => cat === 'note' && name === 'end').length),
    families: sharesBy(calls, ({ cat }) => cat, ceilings),
    ops: sharesBy(calls, ({ name, args }) => `${name} ${words(args?.sizes)} ${words(args?.formats)}`, ceilings),
    span: (last.ts + (last.dur ?? 0) - start.ts) / 1000,
    parts: [...parts].map(([name, time]) => ({ name, time })),
  }
}

function words(entries: Readonly<Record<string, string | number>> = {}): string {
  return Object.entries(entries)
    .map(([name, value]) => `${name}${typeof value === 'number' ? '' : ' '}${value}`)
    .join(' ')
}

function sharesBy(calls: readonly TraceEvent[], nameOf: (event: TraceEvent) => string, ceilings: Ceilings | null) {
  const shares = new Map<string, Share>()
  for (const call of calls) {
    const name = nameOf(call)
    const share = shares.get(name) ?? { name, calls: 0, time: 0, bytes: 0, flops: 0, ideal: 0 }
    const { bytes = 0, sizes = {}, formats = {} } = call.args ?? {}
    const flops = flopsOf(call.name, sizes)
    share.calls += 1
    share.time += (call.dur ?? 0) / 1000
    share.bytes += bytes
    share.flops += flops ?? 0
    if (ceilings) share.ideal += flops === null ? bytes / ceilings.copy / 1e6 : flops / rateOf(formats, ceilings) / 1e9
    shares.set(name, share)
  }
  return [...shares.values()].sort((a, b) => b.time - a.time)
}

/** Floating-point operations of a call, causal where it is attention; null: an op that is measured in bytes. */
function flopsOf(op: string, sizes: Sizes): number | null {
  return opCases.find((one) => one.op === op && one.flops)?.flops?.(sizes) ?? null
}

function rateOf(formats: Readonly<Record<string, string>>, { bf16, fp8 }: Ceilings): number {
  return /^e[45]m/.test(formats.a ?? '') ? fp8 : bf16
}

/** By family, with what lies between ops; then the `top` kinds of calls that take the most time. */
export function profileTables({ families, ops, span, steps, parts }: Profile, top: number): Table[] {
  const busy = families.reduce((sum, { time }) => sum + time, 0)
  const perStep = (time: number) => showNumber(time / steps)
  const percent = (share: number) => `${(100 * share).toFixed(1)} %`
  const line = ({ name, calls, time, bytes, flops, ideal }: Share) => [
    name,
    showNumber(calls / steps),
    perStep(time),
    percent(time / span),
    flops > 0 ? '' : showNumber(bytes / time / 1e6),
    flops > 0 ? showNumber(flops / time / 1e9) : '',
    ideal > 0 ? percent(ideal / time) : '',
  ]
  const head = ['calls a step', 'ms a step', 'share', 'GB/s', 'TFLOP/s', 'of its ceiling']
  const rest = (name: string, time: number) => [name, '', perStep(time), percent(time / span), '', '', '']
  return [
    { head: ['family', ...head], rows: [...families.map(line), rest('between ops', span - busy), rest('all', span)] },
    ...(parts.length > 0
      ? [{ head: ['part', 'ms a step'], rows: parts.map(({ name, time }) => [name, perStep(time)]) }]
      : []),
    { head: ['op', ...head], rows: ops.slice(0, top).map(line) },
  ]
}

/** Time, share of the step and part of the ceiling, of every family (`profile/NAME/time` …) and of the `top` kinds of calls. */
export function profileRows({ device, families, ops, span, steps }: Profile, name: string, top: number): Row[] {
  const rowsOf = (program: string, what: string) => (share: Pick<Share, 'name' | 'time' | 'ideal'>) => {
    const shared = { kind: 'step', device, shape: { steps }, formats: { [what]: share.name } } as const
    const percent = (part: string, value: number) =>
      makeRow({ ...shared, name: `${program}/${part}`, metric: 'share', unit: '%' }, [100 * value])
    return [
      makeRow({ ...shared, name: `${program}/time`, metric: 'time', unit: 'ms' }, [share.time / steps]),
      percent('share', share.time / span),
      ...(share.ideal > 0 ? [percent('of_ceiling', share.ideal / share.time)] : []),
    ]
  }
  return [
    ...[...families, { name: 'all', time: span, ideal: 0 }].flatMap(rowsOf(`profile/${name}`, 'family')),
    ...ops.slice(0, top).flatMap(rowsOf(`profile/${name}/ops`, 'op')),
  ]
}
