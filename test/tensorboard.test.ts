// Event files: records, checksums and messages, read back by a reader of its own; JSON lines of a resumed run.
import { readFileSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { EventFile, MetricsFile } from '../lib/index.ts'
import { crc32c } from '../lib/tensorboard.ts'
import { eachInFolder } from './folders.ts'

let folder = ''
eachInFolder((path) => {
  folder = path
})

it('the checksum is CRC-32C', () => {
  expect(crc32c(Buffer.from('123456789'))).toBe(0xe3069283)
  expect(crc32c(new Uint8Array(32))).toBe(0x8a9136aa)
  expect(crc32c(new Uint8Array(32).fill(255))).toBe(0x62a8ab43)
  expect(crc32c(new Uint8Array(0))).toBe(0)
})

/** Fields of a protocol buffer: numbers, doubles and floats as such, others as bytes. */
function fieldsOf(bytes: Buffer): [number, number | Buffer][] {
  const fields: [number, number | Buffer][] = []
  let at = 0
  const varint = (): number => {
    let value = 0
    for (let scale = 1; ; scale *= 128) {
      const byte = bytes[at++] as number
      value += (byte & 127) * scale
      if (byte < 128) return value
    }
  }
  while (at < bytes.length) {
    const key = varint()
    const [number, kind] = [key >> 3, key & 7]
    if (kind === 0) {
      fields.push([number, varint()])
      continue
    }
    const length = kind === 1 ? 8 : kind === 5 ? 4 : varint()
    const content = bytes.subarray(at, at + length)
    at += length
    fields.push([number, kind === 1 ? content.readDoubleLE() : kind === 5 ? content.readFloatLE() : content])
  }
  return fields
}

/** Messages of the records of a file, whose checksums must be right. */
function recordsOf(path: string): [number, number | Buffer][][] {
  const all = readFileSync(path)
  const messages: [number, number | Buffer][][] = []
  const expectChecksum = (bytes: Buffer, at: number) => {
    const rotated = (all.readUInt32LE(at) - 0xa282ead8) >>> 0
    expect(((rotated >>> 17) | (rotated << 15)) >>> 0).toBe(crc32c(bytes))
  }
  for (let at = 0; at < all.length; ) {
    const length = Number(all.readBigUInt64LE(at))
    expectChecksum(all.subarray(at, at + 8), at + 8)
    const bytes = all.subarray(at + 12, at + 12 + length)
    expectChecksum(bytes, at + 12 + length)
    messages.push(fieldsOf(bytes))
    at += 16 + length
  }
  return messages
}

describe('TensorBoard', () => {
  it('T7: has the version, then scalars by step, not finite ones too', () => {
    using file = new EventFile(folder)
    file.write(1, { loss: 2.5, 'learning rate': 0.001 })
    file.write(300, { loss: Number.NaN, norm: Number.POSITIVE_INFINITY })
    const [head, ...events] = recordsOf(file.path)
    expect(dirname(file.path)).toBe(folder)
    expect(file.path).toMatch(/events\.out\.tfevents\.\d{10}\./)
    expect(head?.map(([number]) => number)).toEqual([1, 2, 3])
    expect(String(head?.[2]?.[1])).toBe('brain.Event:2')
    const read = events.map((event) => {
      const [[, time], [, step], [kind, summary]] = event as [[1, number], [2, number], [5, Buffer]]
      expect(kind).toBe(5)
      expect(Math.abs(time - Date.now() / 1000)).toBeLessThan(600)
      const scalars = fieldsOf(summary).map(([, value]) => fieldsOf(value as Buffer).map(([, part]) => part))
      return [step, ...scalars.map(([tag, value]) => [String(tag), value])]
    })
    expect(read).toEqual([
      [1, ['loss', 2.5], ['learning rate', Math.fround(0.001)]],
      [300, ['loss', Number.NaN], ['norm', Number.POSITIVE_INFINITY]],
    ])
  })
  it('T7: a resumed run tells TensorBoard from which step on older files do not count', () => {
    using first = new EventFile(folder)
    using second = new EventFile(folder, { from: 201 })
    expect(second.path).not.toBe(first.path)
    const [, start] = recordsOf(second.path)
    expect(start?.[1]).toEqual([2, 201])
    expect(start?.[2]?.[0]).toBe(7)
    expect(fieldsOf(start?.[2]?.[1] as Buffer)).toEqual([[1, 1]])
  })
})

describe('JSON lines', () => {
  const peak = { param: 1, grad: 1, state: 1, saved: 1, temp: 1, scratch: 1, total: 6 }
  const step = (number: number, loss = 1) => ({ step: number, loss, tokensPerSecond: 1, memory: { peak } })
  const steps = (file: string) =>
    readFileSync(file, 'utf8')
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line).step)

  it('T7: what is not finite is null', () => {
    const file = join(folder, 'metrics.jsonl')
    {
      using metrics = new MetricsFile(file)
      metrics.write('coat', step(1, Number.NaN))
      metrics.write('coat', step(2))
    }
    const lines = readFileSync(file, 'utf8')
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line))
    expect(lines.map(({ loss }) => loss)).toEqual([null, 1])
  })
  it('T7: a run resumed from step 200 of 249 drops the lines after it, a cut one too', () => {
    const file = join(folder, 'metrics.jsonl')
    {
      using metrics = new MetricsFile(file)
      for (let i = 1; i <= 249; i++) metrics.write('coat', step(i))
    }
    writeFileSync(file, `${readFileSync(file, 'utf8')}{"step": 25`)
    using metrics = new MetricsFile(file, { after: 200 })
    expect(metrics.dropped).toBe(50)
    metrics.write('coat', step(201))
    expect(steps(file)).toEqual(Array.from({ length: 201 }, (_, i) => i + 1))
    using fresh = new MetricsFile(file)
    fresh.write('coat', step(1))
    expect(steps(file)).toEqual([1])
    using nowhere = new MetricsFile(join(folder, 'other.jsonl'), { after: 3 })
    expect(nowhere.dropped).toBe(0)
  })
})
