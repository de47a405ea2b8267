// What 8-bit states do to AdamW's moments: real moments of an fp32 run on real text, stored in every pair of formats.
import {
  adamw,
  type Device,
  type FloatFormat,
  LlamaForCausalLM,
  type Tensor,
  TextDataset,
  Trainer,
} from '../lib/index.ts'
import { htmlTable, pageHtml, showNumber, type Table } from '../lib/report.ts'
import { corpus } from './corpus.ts'
import { makeRow, type Row } from './row.ts'

export interface OptimizerBenchOptions {
  device: Device
  /** Steps of training before the moments are taken. */
  steps: number
}
export const optimizerDefaults = { steps: 100 }

/** Formats of the paper's table, in its order. */
export const stateFormats = ['e4m3/g128', 'e4m3/x128', 'e5m2/g128', 'e5m2/x128'] as const
type StateFormat = (typeof stateFormats)[number]

/** MSE of m / sqrt(v) in COAT's table 1, first moment by second; its unit is not known, so ratios are compared. */
const paper: readonly (readonly number[])[] = [
  [20.1, 18.08, 25.65, 18.16],
  [15.13, 12.31, 21.96, 12.43],
  [37.02, 35.96, 40.3, 36],
  [17.79, 15.48, 23.84, 15.57],
]
const eps = 1e-8

export interface StateErrors {
  /** Mean square of the error of m / (sqrt(v) + 1e-8), first moment by second. */
  mse: number[][]
  /** RMS of the error by the RMS of the values. */
  rms: Record<'m' | 'v', number[]>
  /** Part of the positive second moments that are stored as 0. */
  lost: number[]
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
  const zeros = () => stateFormats.map(() => 0)
  const square = { mse: stateFormats.map(zeros), rms: { m: zeros(), v: zeros() }, all: { m: 0, v: 0 } }
  const lost = zeros()
  const k = { m: new Map<number, number>(), v: new Map<number, number>() }
  let [elements, groups, positive] = [0, 0, 0]
  for (const { m, v } of moments) {
    const [exactM, exactV] = [await m.read(), await v.read()]
    const [storedM, storedV] = [await stored(m), await stored(v)]
    elements += exactM.length
    for (const [name, exact, all] of [
      ['m', exactM, storedM],
      ['v', exactV, storedV],
    ] as const) {
      square.all[name] += sumOf(exact, (x) => x * x)
      all.forEach((values, f) => {
        square.rms[name][f] = at(square.rms[name], f) + sumOf(exact, (x, i) => (x - at(values, i)) ** 2)
      })
    }
    positive += sumOf(exactV, (x) => (x > 0 ? 1 : 0))
    storedV.forEach((values, f) => {
      lost[f] = at(lost, f) + sumOf(exactV, (x, i) => (x > 0 && values[i] === 0 ? 1 : 0))
    })
    const update = exactM.map((x, i) => x / (Math.sqrt(at(exactV, i)) + eps))
    storedM.forEach((ms, first) => {
      storedV.forEach((vs, second) => {
        const row = square.mse[first] as number[]
        row[second] = at(row, second) + sumOf(update, (x, i) => (at(ms, i) / (Math.sqrt(at(vs, i)) + eps) - x) ** 2)
      })
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
  return {
    mse: square.mse.map((row) => part(row, elements)),
    rms: {
      m: part(square.rms.m, square.all.m).map(Math.sqrt),
      v: part(square.rms.v, square.all.v).map(Math.sqrt),
    },
    lost: part(lost, positive),
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

async function stored(x: Tensor): Promise<ArrayLike<number>[]> {
  return await Promise.all(stateFormats.map(async (format) => await x.as(format as FloatFormat).read()))
}

/** The k of every group in e4m3/x128: after the codes, padded to 16, come scales, exponents and centres in f32. */
async function exponentsOf(x: Tensor): Promise<Float32Array> {
  const bytes = await x.as('e4m3/x128').readBytes()
  const count = Math.ceil(x.numel / 128)
  const from = Math.ceil(x.numel / 16) * 16 + 4 * count
  return new Float32Array(bytes.slice(from, from + 4 * count).buffer)
}

export function optimizerRows({ mse, rms, lost, k, groups, elements, steps }: StateErrors, device: Device): Row[] {
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
          { m: stateFormats[first] as StateFormat, v: stateFormats[second] as StateFormat },
          value,
          first + second > 0 ? plain : null,
        ),
      ),
    ),
    ...stateFormats.flatMap((format, f) => [
      one('rms', 'error', { m: format }, at(rms.m, f)),
      one('rms', 'error', { v: format }, at(rms.v, f)),
      one('lost', 'share', { v: format }, 100 * at(lost, f)),
    ]),
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

/** The paper's table with ours, errors of each moment, and the histogram of k. */
export function optimizerTables({ mse, rms, lost, k, groups }: StateErrors): Table[] {
  const base = mse[0]?.[0] as number
  const share = (count: number) => `${showNumber((100 * count) / groups)} %`
  const bins = [...new Set([...k.m.keys(), ...k.v.keys()])].sort((a, b) => a - b)
  return [
    {
      head: ['MSE of m/√v: m, v →', ...stateFormats],
      rows: mse.map((row, first) => [
        stateFormats[first] as string,
        ...row.map((value, second) => {
          const theirs = ((paper[first]?.[second] as number) / 20.1).toFixed(2)
          return `${value.toExponential(2)} = ${showNumber(value / base)} × (paper ${theirs} ×)`
        }),
      ]),
    },
    {
      head: ['stored in', 'error of m', 'error of v', 'v > 0 stored as 0'],
      rows: stateFormats.map((format, f) => [
        format,
        ...[rms.m, rms.v, lost].map((values) => `${showNumber(100 * at(values, f))} %`),
      ]),
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
  const [mse, moments] = optimizerTables(errors) as [Table, Table]
  return pageHtml(
    'AdamW with 8-bit states',
    [
      `Moments of ${errors.elements.toLocaleString('en-US')} parameters after ${errors.steps} steps of an fp32 run, stored in every pair of formats.`,
    ],
    [
      {
        heading: 'Error of m/√v',
        note: 'Mean square, first moment by second, and as a multiple of plain E4M3; in parentheses the multiples of COAT, table 1.',
        body: htmlTable(mse),
      },
      { heading: 'Error of each moment', note: 'Root mean square, by that of the values.', body: htmlTable(moments) },
      {
        heading: 'Exponent of range expansion',
        note: 'Groups of 128 in e4m3/x128 by their k, rounded down.',
        body: shareChart('k', shares),
      },
    ],
  )
}
