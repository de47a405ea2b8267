// Reports: tables, JSON lines, whole files, and an HTML file that needs nothing else.
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { parseHTML } from 'linkedom'
import { afterAll, describe, expect, test } from 'vitest'
import {
  claim,
  comparison,
  MetricsFile,
  markdownTable,
  peakOf,
  purposes,
  reportHtml,
  type Step,
  showBytes,
  showNumber,
  textTable,
  writeWhole,
} from '../lib/report.ts'

const folder = mkdtempSync(join(tmpdir(), 'coat-report-'))
afterAll(() => rmSync(folder, { recursive: true }))

function stepOf(step: number, loss: number, saved: number): Step {
  const peak = { param: 2 ** 20, grad: 2 ** 19, state: 2 ** 21, saved, temp: 1000, scratch: 10, total: 2 ** 22 + saved }
  return { step, loss, tokensPerSecond: 1000 + step, memory: { peak } }
}
const steps = (saved: number) => Array.from({ length: 30 }, (_, i) => stepOf(i + 1, 5 / (i + 1), saved + i))

describe('tables', () => {
  const table = comparison(
    ['bf16', 'coat'],
    [
      { name: 'loss', values: [2, 2.02], show: (x) => x.toFixed(2) },
      { name: 'bytes', values: [0, 1536], show: showBytes },
    ],
  )

  test('a comparison ends with ratios to bf16', () => {
    expect(table.head).toEqual(['', 'bf16', 'coat', 'coat / bf16'])
    expect(table.rows).toEqual([
      ['loss', '2.00', '2.02', '1.010'],
      ['bytes', '0 B', '1.5 KiB', '-'],
    ])
    expect(comparison(['coat'], []).head).toEqual(['', 'coat'])
  })

  test('text lines up, Markdown has its rule', () => {
    expect(textTable(table).split('\n')).toEqual([
      '       bf16     coat  coat / bf16',
      '-----  ----  -------  -----------',
      'loss   2.00     2.02        1.010',
      'bytes   0 B  1.5 KiB            -',
    ])
    expect(markdownTable({ head: ['a', 'b'], rows: [['x|y', '1']] })).toBe('| a | b |\n| --- | ---: |\n| x\\|y | 1 |')
  })

  test('numbers are shown with what matters', () => {
    expect([0, 1023, 1024, 2 ** 30].map(showBytes)).toEqual(['0 B', '1023 B', '1.0 KiB', '1.0 GiB'])
    expect([12345.6, 99.96, 0.012345].map(showNumber)).toEqual(['12,346', '100', '0.0123'])
  })
})

describe('files', () => {
  test('metrics are one JSON object a line, with the recipe', () => {
    const file = join(folder, 'deep', 'metrics.jsonl')
    {
      using metrics = new MetricsFile(file)
      for (const step of steps(7)) metrics.write('coat', step)
    }
    const lines = readFileSync(file, 'utf8').trimEnd().split('\n')
    expect(lines.map((line) => JSON.parse(line))).toEqual(steps(7).map((step) => ({ recipe: 'coat', ...step })))
  })

  test('a file is written whole, and leaves no part behind', () => {
    writeWhole(join(folder, 'whole', 'a.txt'), 'one')
    writeWhole(join(folder, 'whole', 'a.txt'), 'two')
    expect(readdirSync(join(folder, 'whole'))).toEqual(['a.txt'])
    expect(readFileSync(join(folder, 'whole', 'a.txt'), 'utf8')).toBe('two')
  })

  test('a path that cannot be written is refused before anything is', () => {
    writeFileSync(join(folder, 'file'), '')
    const inFile = join(folder, 'file', 'rows.json')
    expect(() => claim(inFile)).toThrow(`${inFile} cannot be written: `)
    expect(() => claim(folder)).toThrow(`${folder} cannot be written: it is a folder`)
    expect(existsSync(inFile)).toBe(false)
  })
})

describe('report', async () => {
  const runs = [
    { recipe: 'bf16', steps: steps(8 * 2 ** 20), validation: 0.5 },
    { recipe: 'coat', steps: steps(4 * 2 ** 20), validation: 0.51 },
  ]
  const html = await reportHtml({
    title: 'a < b',
    notes: ['first & last'],
    runs,
    table: { head: ['', 'bf16'], rows: [['<loss>', '2']] },
    texts: { Sample: '<script>alert(1)</script>' },
  })
  const { document } = parseHTML(html)

  test('peaks are the largest over steps', () => {
    expect(peakOf(runs[0]?.steps ?? []).saved).toBe(8 * 2 ** 20 + 29)
  })

  test('asks for nothing outside the file', () => {
    expect(document.querySelectorAll('script, link, img, iframe, object, [src], [href]')).toHaveLength(0)
    expect(html).not.toMatch(/@import|url\(/)
    expect(html.match(/https?:\/\/[^"' <]*/g) ?? []).toEqual([])
  })

  test('draws the loss of every recipe and the memory of every purpose', () => {
    const [losses, memory] = document.querySelectorAll('figure')
    for (const recipe of ['bf16', 'coat']) {
      expect(losses?.textContent).toContain(recipe)
      expect(memory?.textContent).toContain(recipe)
    }
    for (const purpose of purposes) expect(memory?.textContent).toContain(purpose)
    expect(losses?.querySelectorAll('[aria-label="line"] path')).toHaveLength(4)
    expect(losses?.querySelectorAll('[aria-label="dot"] circle')).toHaveLength(2)
    expect(memory?.querySelectorAll('[aria-label="bar"] rect')).toHaveLength(2 * purposes.length)
    expect(losses?.textContent).toContain('loss (nats per token)')
    expect(memory?.textContent).toContain('peak memory (MiB)')
    expect(html).not.toContain('NaN')
  })

  test('escapes what it is given', () => {
    expect(document.querySelector('h1')?.textContent).toBe('a < b')
    expect(document.querySelector('pre')?.textContent).toBe('<script>alert(1)</script>')
    expect(document.querySelector('td')?.textContent).toBe('<loss>')
  })
})
