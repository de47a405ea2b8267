// What 8-bit states do to AdamW's moments: real moments of an fp32 run on real text, stored in every pair of formats.
import { adamw, type Device, LlamaForCausalLM, Tensor, TextDataset, Trainer } from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { htmlTable, pageHtml, showNumber, type Table } from '../lib/report.ts'
import { corpus } from './corpus.ts'
import { makeRow, type Row } from './row.ts'

export interface OptimizerBenchOptions {
  device: Device
  /** Steps of training before the moments are taken. */
  steps: number
}
export const optimizerDefaults = { steps: 100 }

/** Formats of the paper's tables 1 and 8, in its order; DE8 is the dynamic map, unsigned for v. */
const eightBit = ['e4m3/g128', 'e4m3/x128', 'e5m2/g128', 'e5m2/x128'] as const
export const stateFormats = { m: [...eightBit, 'd8/g256'], v: [...eightBit, 'u8/g256'] } as const
/** Formats of v that are also stored with a floor: what is positive never becomes 0. */
export const flooredFormats = ['e4m3/g128', 'e5m2/g128', 'u8/g256'] as const

/** MSE of m / sqrt(v) in COAT's tables, first moment by second; its unit is not known, so ratios are compared. */
const paper: readonly (readonly (number | null)[])[] = [
  [20.1, 18.08, 25.65, 18.16, null],
  [15.13, 12.31, 21.96, 12.43, 14.01],
  [37.02, 35.96, 40.3, 36, null],
  [17.79, 15.48, 23.84, 15.57, null],
  [12.11, 8.27, 20.02, 8.43, 10.54],
]
const eps = 1e-8

export interface StateErrors {
  /** Mean square of the error of m / (sqrt(v) + 1e-8), first moment by second. */
  mse: number[][]
  /** RMS of the error by the RMS of the values. */
  rms: Record<'m' | 'v', number[]>
  /** Part of the positive second moments that are stored as 0. */
  lost: number[]
  /** The same of second moments stored with a floor, in the order of flooredFormats; m in e4m3/g128. */
  floored: Record<'mse' | 'rms' | 'lost', number[]>
  /** Groups by exponent k, rounded down to an integer, of e4m3/x128. */
  k: Record<'m' | 'v', Map<number, number>>
  groups: number
  elements: number
  steps: number
}

/** Trains a small Llama in fp32 and stores its moments in every format. */
export async function optimizerBench({ device, steps }: OptimizerBenchOptions): Promise<StateErrors> {
  const size = { hidden_size: 128, intermediate_size: 344, num_hidden_layers: 2, num_attention_heads: 4 }
  using model = new LlamaForCausalLM(
    { ...size, vocab_size: 256, tie_word_embeddings: true, initializer_range: 0.08 },
    { recipe: 'fp32', device, seed: 1 },
  )
  const data = new TextDataset(corpus(), { sequence: 256, seed: 1 })
  using trainer = new Trainer(model, { data, batch: 8, steps, optimizer: adamw({ lr: 2e-3 }), clip: 1 })
  for await (const _ of trainer.run());
  const moments = trainer.optimizer.params.map((param) => trainer.optimizer.stateOf(param) as { m: Tensor; v: Tensor })
  return { ...(await stateErrors(moments)), steps }
}

/** The errors of moments that are given in f32, [1, n] each. */
export async function stateErrors(moments: readonly { m: Tensor; v: Tensor }[]): Promise<Omit<StateErrors, 'steps'>> {
  const zeros = (formats: readonly unknown[]) => formats.map(() => 0)
  const mse = stateFormats.m.map(() => zeros(stateFormats.v))
  const rms = { m: zeros(stateFormats.m), v: zeros(stateFormats.v) }
  const lost = zeros(stateFormats.v)
  const floored = { mse: zeros(flooredFormats), rms: zeros(flooredFormats), lost: zeros(flooredFormats) }
  const all = { m: 0, v: 0 }
  const k = { m: new Map<number, number>(), v: new Map<number, number>() }
  let [elements, groups, positive] = [0, 0, 0]
  const add = (to: number[], f: number, exact: ArrayLike<number>, term: (x: number, i: number) => number) => {
    to[f] = at(to, f) + sumOf(exact, term)
  }
  for (const { m, v } of moments) {
    const [exactM, exactV] = [await m.read(), await v.read()]
    const storedM = await Promise.all(stateFormats.m.map(async (format) => await m.as(format).read()))
    const storedV = await Promise.all(stateFormats.v.map(async (format) => await v.as(format).read()))
    const flooredV = await Promise.all(
      flooredFormats.map(async (format) => {
        using low = Tensor.own(native.convert_floored(v.handle, null, format))
        return await low.read()
      }),
    )
    const update = exactM.map((x, i) => x / (Math.sqrt(at(exactV, i)) + eps))
    const squares = (to: number[], f: number, ms: ArrayLike<number>, vs: ArrayLike<number>) =>
      add(to, f, update, (x, i) => (at(ms, i) / (Math.sqrt(at(vs, i)) + eps) - x) ** 2)
    const ofV = (to: { rms: number[]; lost: number[] }, f: number, vs: ArrayLike<number>) => {
      add(to.rms, f, exactV, (x, i) => (x - at(vs, i)) ** 2)
      add(to.lost, f, exactV, (x, i) => (x > 0 && vs[i] === 0 ? 1 : 0))
    }
    elements += exactM.length
    all.m += sumOf(exactM, (x) => x * x)
    all.v += sumOf(exactV, (x) => x * x)
    positive += sumOf(exactV, (x) => (x > 0 ? 1 : 0))
    storedM.forEach((ms, first) => {
      add(rms.m, first, exactM, (x, i) => (x - at(ms, i)) ** 2)
      storedV.forEach((vs, second) => {
        squares(mse[first] as number[], second, ms, vs)
      })
    })
    storedV.forEach((vs, f) => {
      ofV({ rms: rms.v, lost }, f, vs)
    })
    flooredV.forEach((vs, f) => {
      ofV(floored, f, vs)
      squares(floored.mse, f, storedM[0] as ArrayLike<number>, vs)
    })
    for (const [name, tensor] of [
      ['m', m],
      ['v', v],
    ] as const)
      for (const exponent of await exponentsOf(tensor)) {
        const bin = Math.floor(exponent)
        k[name].set(bin, (k[name].get(bin) ?? 0) + 1)
      }
    groups += Math.ceil(exactM.length / 128)
  }
  const part = (values: number[], total: number) => values.map((value) => value / total)
  const root = (values: number[], total: number) => part(values, total).map(Math.sqrt)
  return {
    mse: mse.map((row) => part(row, elements)),
    rms: { m: root(rms.m, all.m), v: root(rms.v, all.v) },
    lost: part(lost, positive),
    floored: {
      mse: part(floored.mse, elements),
      rms: root(floored.rms, all.v),
      lost: part(floored.lost, positive),
    },
    k,
    groups,
    elements,
  }
}

const at = (values: ArrayLike<number>, i: number) => values[i] as number
function sumOf(values: ArrayLike<number>, term: (x: number, i: number) => number): number {
  let total = 0
  for (let i = 0; i < values.length; i++) total += term(at(values, i), i)
  return total
}

/** The k of every group in e4m3/x128: after the codes, padded to 16, come scales, exponents and centres in f32. */
async function exponentsOf(x: Tensor): Promise<Float32Array> {
  const bytes = await x.as('e4m3/x128').readBytes()
  const count = Math.ceil(x.numel / 128)
  const from = Math.ceil(x.numel / 16) * 16 + 4 * count
  return new Float32Array(bytes.slice(from, from + 4 * count).buffer)
}

export function optimizerRows(
  { mse, rms, lost, floored, k, groups, elements, steps }: StateErrors,
  device: Device,
): Row[] {
  const fields = { kind: 'state', device: device.kind, shape: { steps, elements } } as const
  const one = (
    name: string,
    metric: 'error' | 'share',
    formats: Partial<Record<'m' | 'v', string>>,
    value: number,
    baseline: Row['baseline'] = null,
  ) =>
    makeRow({ ...fields, name: `optimizer/${name}`, metric, unit: metric === 'share' ? '%' : '1', formats, baseline }, [
      value,
    ])
  const plain = { name: 'plain E4M3', median: at(mse[0] as number[], 0) }
  return [
    ...mse.flatMap((row, first) =>
      row.map((value, second) =>
        one(
          'mse',
          'error',
          { m: stateFormats.m[first] as string, v: stateFormats.v[second] as string },
          value,
          first + second > 0 ? plain : null,
        ),
      ),
    ),
    ...stateFormats.m.map((format, f) => one('rms', 'error', { m: format }, at(rms.m, f))),
    ...stateFormats.v.flatMap((format, f) => [
      one('rms', 'error', { v: format }, at(rms.v, f)),
      one('lost', 'share', { v: format }, 100 * at(lost, f)),
    ]),
    ...flooredFormats.flatMap((format, f) => {
      const bare = stateFormats.v.indexOf(format)
      const without = (median: number) => ({ name: 'without the floor', median })
      const pair = { m: stateFormats.m[0], v: format }
      return [
        one('floored/mse', 'error', pair, at(floored.mse, f), without(at(mse[0] as number[], bare))),
        one('floored/rms', 'error', { v: format }, at(floored.rms, f), without(at(rms.v, bare))),
        one('floored/lost', 'share', { v: format }, 100 * at(floored.lost, f), without(100 * at(lost, bare))),
      ]
    }),
    ...(['m', 'v'] as const).flatMap((name) =>
      [...k[name]]
        .sort(([a], [b]) => a - b)
        .map(([bin, count]) =>
          makeRow(
            {
              ...fields,
              name: 'optimizer/k',
              metric: 'share',
              unit: '%',
              formats: { [name]: 'e4m3/x128' },
              shape: { ...fields.shape, k: bin },
            },
            [(100 * count) / groups],
          ),
        ),
    ),
  ]
}

/** The paper's table with ours, errors of each moment, what a floor of v does, and the histogram of k. */
export function optimizerTables({ mse, rms, lost, floored, k, groups }: StateErrors): Table[] {
  const base = mse[0]?.[0] as number
  const percent = (x: number) => `${showNumber(100 * x)} %`
  const share = (count: number) => percent(count / groups)
  const bins = [...new Set([...k.m.keys(), ...k.v.keys()])].sort((a, b) => a - b)
  const formats = [...new Set([...stateFormats.m, ...stateFormats.v])]
  const cell = (format: (typeof formats)[number], of: readonly string[], values: number[]) => {
    const f = of.indexOf(format)
    return f < 0 ? '–' : percent(at(values, f))
  }
  return [
    {
      head: ['MSE of m/√v: m, v →', ...stateFormats.v],
      rows: mse.map((row, first) => [
        stateFormats.m[first] as string,
        ...row.map((value, second) => {
          const theirs = paper[first]?.[second]
          const beside = theirs ? ` (paper ${(theirs / 20.1).toFixed(2)} ×)` : ''
          return `${value.toExponential(2)} = ${showNumber(value / base)} ×${beside}`
        }),
      ]),
    },
    {
      head: ['stored in', 'error of m', 'error of v', 'v > 0 stored as 0'],
      rows: formats.map((format) => [
        format,
        cell(format, stateFormats.m, rms.m),
        cell(format, stateFormats.v, rms.v),
        cell(format, stateFormats.v, lost),
      ]),
    },
    {
      head: ['v in, m in e4m3/g128', 'MSE of m/√v', 'with a floor', 'v > 0 stored as 0', 'with a floor'],
      rows: flooredFormats.map((format, f) => {
        const bare = stateFormats.v.indexOf(format)
        return [
          format,
          at(mse[0] as number[], bare).toExponential(2),
          at(floored.mse, f).toExponential(2),
          percent(at(lost, bare)),
          percent(at(floored.lost, f)),
        ]
      }),
    },
    {
      head: ['k from', 'groups of m', 'groups of v'],
      rows: bins.map((bin) => [String(bin), share(k.m.get(bin) ?? 0), share(k.v.get(bin) ?? 0)]),
    },
  ]
}

/** The tables, and the histogram of k as a chart. */
export async function optimizerHtml(errors: StateErrors): Promise<string> {
  const { shareChart } = await import('../lib/charts.ts')
  const shares = (['m', 'v'] as const).flatMap((name) =>
    [...errors.k[name]].map(([bin, count]) => ({ name, at: bin, percent: (100 * count) / errors.groups })),
  )
  const [mse, moments, floors] = optimizerTables(errors) as [Table, Table, Table]
  return pageHtml(
    'AdamW with 8-bit states',
    [
      `Moments of ${errors.elements.toLocaleString('en-US')} parameters after ${errors.steps} steps of an fp32 run, stored in every pair of formats.`,
    ],
    [
      {
        heading: 'Error of m/√v',
        note: 'Mean square, first moment by second, and as a multiple of plain E4M3; in parentheses the multiples of COAT, tables 1 and 8.',
        body: htmlTable(mse),
      },
      { heading: 'Error of each moment', note: 'Root mean square, by that of the values.', body: htmlTable(moments) },
      {
        heading: 'A floor under second moments',
        note: 'Positive second moments that would be stored as 0 become the smallest positive code, so that m is not divided by eps.',
        body: htmlTable(floors),
      },
      {
        heading: 'Exponent of range expansion',
        note: 'Groups of 128 in e4m3/x128 by their k, rounded down.',
        body: shareChart('k', shares),
      },
    ],
  )
}
