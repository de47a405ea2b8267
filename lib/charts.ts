// Charts as SVG inside HTML text. The only file that imports the charting packages; scripts/build-dist.cjs bundles them.
import * as Plot from '@observablehq/plot'
import { parseHTML } from 'linkedom'

export interface Curve {
  name: string
  /** Value of every step, from step 1. */
  values: readonly number[]
  /** Value on held-out data after the last step. */
  final: number | null
}

export interface Bar {
  name: string
  /** Bytes by purpose, in the order in which they are stacked. */
  bytes: readonly (readonly [purpose: string, bytes: number])[]
}

// Okabe and Ito's palette, which colour-blind eyes tell apart too.
const colours = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9']

function render(options: Plot.PlotOptions): string {
  const { document } = parseHTML('<!doctype html><html><body></body></html>')
  const style = { background: 'white', fontSize: '12px' }
  return Plot.plot({ document, width: 760, marginLeft: 60, marginBottom: 45, style, ...options }).outerHTML
}

/** Training loss by step, one curve a name: thin as it was, thick its running mean; a dot for the held-out loss. */
export function lossChart(curves: readonly Curve[]): string {
  const points = curves.flatMap(({ name, values }) => values.map((loss, i) => ({ name, step: i + 1, loss })))
  const ends = curves.flatMap(({ name, values, final }) =>
    final === null ? [] : [{ name, step: values.length, loss: final }],
  )
  const window = Math.max(1, Math.round(points.length / curves.length / 15))
  const channels = { x: 'step', y: 'loss', stroke: 'name' }
  return render({
    height: 380,
    grid: true,
    ariaLabel: 'Training loss by step',
    x: { label: 'step', tickFormat: 'd' },
    y: { label: 'loss (nats per token)' },
    color: { legend: true, domain: curves.map(({ name }) => name), range: colours },
    marks: [
      Plot.line(points, { ...channels, strokeWidth: 0.8, strokeOpacity: 0.4 }),
      Plot.line(points, Plot.windowY({ k: window, anchor: 'middle' }, { ...channels, strokeWidth: 2 })),
      Plot.dot(ends, { x: 'step', y: 'loss', fill: 'name', stroke: 'white', r: 5 }),
    ],
  })
}

/** Bytes by purpose, one stacked bar a name. */
export function memoryChart(bars: readonly Bar[]): string {
  const parts = bars.flatMap(({ name, bytes }) =>
    bytes.map(([purpose, count]) => ({ name, purpose, mebibytes: count / 2 ** 20 })),
  )
  const purposes = [...new Set(parts.map(({ purpose }) => purpose))]
  const sums = bars.map(({ name, bytes }) => ({
    name,
    total: bytes.reduce((sum, [, count]) => sum + count, 0) / 2 ** 20,
  }))
  return render({
    height: 95 + 50 * bars.length,
    marginRight: 80,
    ariaLabel: 'Peak memory by purpose',
    x: { label: 'peak memory (MiB)', grid: true },
    y: { label: null, domain: bars.map(({ name }) => name) },
    color: { legend: true, domain: purposes, range: colours },
    marks: [
      Plot.barX(parts, { x: 'mebibytes', y: 'name', fill: 'purpose', order: purposes, inset: 0.5 }),
      Plot.text(sums, {
        x: 'total',
        y: 'name',
        text: ({ total }) => `${total.toFixed(1)} MiB`,
        textAnchor: 'start',
        dx: 6,
      }),
      Plot.ruleX([0]),
    ],
  })
}

/** Parts of a whole in percent by number, bars of several names side by side. */
export function shareChart(label: string, shares: readonly { name: string; at: number; percent: number }[]): string {
  const names = [...new Set(shares.map(({ name }) => name))]
  return render({
    height: 300,
    ariaLabel: `Share by ${label}`,
    x: { axis: null, domain: names },
    fx: { label, tickFormat: 'd' },
    y: { label: 'share (%)', grid: true },
    color: { legend: true, domain: names, range: colours },
    marks: [Plot.barY(shares, { fx: 'at', x: 'name', y: 'percent', fill: 'name' }), Plot.ruleY([0])],
  })
}
