// One block of a model, forward and backward without an optimizer: times, and what is kept between the two.
import { Block, build, type Device, type LedgerRow, limitMemory, resetPeak, scope, Tape, Tensor } from '../lib/index.ts'
import { native } from '../lib/native.ts'
import { comparison, peakOf, peakQuantities, type Run, showBytes, showNumber, type Table } from '../lib/report.ts'
import { ceilingsOf } from './ceilings.ts'
import { Clock } from './clock.ts'
import { configOf, flopsOfLayer } from './models.ts'
import { makeRow, peakRows, type Row, recipeRows } from './row.ts'
import { type StepOptions, stepFields } from './step.ts'

/** What one recipe took; times in milliseconds. */
export interface LayerResult extends Run {
  forward: number[]
  backward: number[]
  both: number[]
  ledger: readonly LedgerRow[]
}

/** Times after three runs that do not count. */
export async function layerBench(options: StepOptions): Promise<LayerResult[]> {
  const results: LayerResult[] = []
  for (const { name, recipe } of options.recipes) {
    limitMemory(options.memoryLimit ?? null)
    try {
      results.push({ recipe: name, ...(await measure(options, recipe)) })
    } finally {
      limitMemory(null)
    }
  }
  return results
}

async function measure(options: StepOptions, recipe: StepOptions['recipes'][number]['recipe']) {
  const { device, batch, sequence, steps } = options
  const config = configOf(options)
  const { hidden_size: hidden, num_attention_heads: heads } = config
  using block = new Block(build({ recipe, device }), 'layer', {
    hidden,
    heads,
    kvHeads: config.num_key_value_heads ?? heads,
    headDim: config.head_dim ?? hidden / heads,
    ropeTheta: config.rope_theta ?? 10000,
    inner: config.intermediate_size,
    activation: 'swiglu',
    norm: 'rmsnorm',
    eps: 1e-5,
    normNames: ['input_layernorm', 'post_attention_layernorm'],
  })
  using x = noise(device, recipe.stream, batch * sequence, hidden, 1)
  using dout = noise(device, recipe.stream, batch * sequence, hidden, 2)
  x.requiresGrad = true
  const clock = new Clock(device)
  let ledger: readonly LedgerRow[] = []
  const run = () => {
    using tape = new Tape()
    scope(() => {
      const start = clock.mark()
      native.note('forward', device.kind)
      const y = tape.record(() => block.forward(x, sequence))
      const middle = clock.mark()
      native.note('backward', device.kind)
      ledger = tape.ledger()
      const end = Tensor.zeros([1], { device })
      tape.push('dout', [y], end, [], () => [dout])
      tape.backward(end)
      marks.push([start, middle, clock.mark()])
      native.note('end', device.kind)
    })
    for (const param of block.parameters()) param.dropGrad()
  }
  let marks: [number, number, number][] = []
  for (let i = 0; i < layerWarmUp; i++) run()
  await device.sync()
  marks = []
  resetPeak()
  native.note('measured', device.kind)
  for (let i = 0; i < steps; i++) run()
  native.note('done', device.kind)
  await device.sync()
  const times = (from: 0 | 1, to: 1 | 2) => marks.map((mark) => clock.between(mark[from], mark[to]))
  const result = { forward: times(0, 1), backward: times(1, 2), both: times(0, 2), ledger }
  clock.restart()
  return { ...result, steps: [{ step: steps, loss: 0, tokensPerSecond: 0, memory: { peak: native.memory().peak } }] }
}

function noise({ kind }: Device, format: 'f32' | 'bf16', rows: number, columns: number, seed: number): Tensor {
  return Tensor.own(native.random_normal(format, rows, columns, 0, 1, seed, kind)).keep()
}

/** Runs before those that are measured. */
export const layerWarmUp = 3

export function layerRows(results: readonly LayerResult[], options: StepOptions): Row[] {
  const { fields } = stepFields(options)
  const { hidden = 1, batch = 1, sequence = 1 } = fields.shape ?? {}
  const ms = { ...fields, kind: 'step', metric: 'time', unit: 'ms' } as const
  const saved = ({ ledger }: LayerResult) => ledger.reduce((sum, { bytes }) => sum + bytes, 0)
  const teraflop = (flopsOfLayer(configOf(options), sequence) * batch * sequence) / 1e12
  const rates = ({ both }: LayerResult) => both.map((time) => (teraflop / time) * 1000)
  const ceilings = ceilingsOf(options.device.description)
  return [
    ...recipeRows(results, { ...ms, name: 'layer/forward' }, ({ forward }) => forward),
    ...recipeRows(results, { ...ms, name: 'layer/backward' }, ({ backward }) => backward),
    ...recipeRows(results, { ...ms, name: 'layer/both' }, ({ both }) => both),
    ...recipeRows(results, { ...fields, kind: 'step', metric: 'flops', unit: 'TFLOP/s', name: 'layer/flops' }, rates),
    ...(['bf16', 'fp8'] as const).flatMap((name) =>
      ceilings
        ? recipeRows(
            results,
            { ...fields, kind: 'step', metric: 'share', unit: '%', name: `layer/utilisation/${name}` },
            (result) => rates(result).map((rate) => (100 * rate) / ceilings[name]),
          )
        : [],
    ),
    ...recipeRows(results, { ...fields, kind: 'memory', metric: 'bytes', unit: 'B', name: 'layer/saved' }, (result) => [
      saved(result),
    ]),
    // U: the bytes of the stream in bf16
    ...recipeRows(
      results,
      { ...fields, kind: 'memory', metric: 'share', unit: 'U', name: 'layer/saved_in_u' },
      (result) => [saved(result) / (batch * sequence * hidden * 2)],
    ),
    ...results.flatMap(({ recipe, ledger }) =>
      ledger.map(({ op, format, bytes }) =>
        makeRow(
          {
            ...fields,
            kind: 'memory',
            metric: 'bytes',
            unit: 'B',
            recipe,
            name: `layer/saved/${op}`,
            formats: { saved: format },
          },
          [bytes],
        ),
      ),
    ),
    ...peakRows(results, 'layer', fields),
  ]
}

export function layerTable(results: readonly LayerResult[], options: StepOptions): Table {
  const rows = layerRows(results, options)
  const quantity = (name: string, text: string, show = showNumber) => ({
    name: text,
    values: results.map(({ recipe }) => rows.find((row) => row.recipe === recipe && row.name === name)?.median ?? 0),
    show,
  })
  return comparison(
    results.map(({ recipe }) => recipe),
    [
      quantity('layer/forward', 'ms of forward'),
      quantity('layer/backward', 'ms of backward'),
      quantity('layer/both', 'ms of both'),
      quantity('layer/flops', 'TFLOP/s of the model'),
      quantity('layer/saved', 'kept for backward', showBytes),
      quantity('layer/saved_in_u', 'the same in B·T·D·2 bytes'),
      ...peakQuantities(results.map(({ steps }) => peakOf(steps))),
    ],
  )
}
