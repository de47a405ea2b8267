// Event files of TensorBoard: records with checksums around protocol buffers, as much of them as scalars need.
import { closeSync, mkdirSync, openSync, writeSync } from 'node:fs'
import { hostname } from 'node:os'
import { join } from 'node:path'

let nextFile = 0

/** One event file in a folder; TensorBoard shows all files of a folder as one run. */
export class EventFile implements Disposable {
  readonly path: string
  readonly #file: number

  /** `from`: the first step that will be written, where it is not the first of all: later ones in older files are dropped. */
  constructor(folder: string, options: { from?: number } = {}) {
    mkdirSync(folder, { recursive: true })
    const now = Date.now()
    const name = `events.out.tfevents.${Math.floor(now / 1000)}.${hostname()}.${process.pid}.${nextFile++}`
    this.path = join(folder, name)
    this.#file = openSync(this.path, 'wx')
    this.#write(event(now, 0, field(3, 'brain.Event:2')))
    // a session that starts at a step makes TensorBoard drop what older files have from that step on
    if (options.from !== undefined)
      this.#write(event(now, options.from, field(7, Buffer.concat([varint(8), varint(1)]))))
  }

  /** Scalars of one step, by tag. Numbers that are not finite are written as they are. */
  write(step: number, scalars: Readonly<Record<string, number>>): void {
    const values = Object.entries(scalars).map(([tag, value]) => {
      const number = Buffer.alloc(5)
      number[0] = (2 << 3) | 5
      number.writeFloatLE(value, 1)
      return field(1, Buffer.concat([field(1, tag), number]))
    })
    this.#write(event(Date.now(), step, field(5, Buffer.concat(values))))
  }

  dispose(): void {
    closeSync(this.#file)
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  // The length, its checksum, the bytes, their checksum; in one write, so that a reader never sees half a record.
  #write(bytes: Buffer): void {
    const length = Buffer.alloc(8)
    length.writeBigUInt64LE(BigInt(bytes.length))
    writeSync(this.#file, Buffer.concat([length, checksum(length), bytes, checksum(bytes)]))
  }
}

/** Event: 1 wall time in seconds, 2 step, and one more field. */
function event(milliseconds: number, step: number, what: Buffer): Buffer {
  const time = Buffer.alloc(9)
  time[0] = (1 << 3) | 1
  time.writeDoubleLE(milliseconds / 1000, 1)
  return Buffer.concat([time, varint(2 << 3), varint(step), what])
}

function field(number: number, content: string | Buffer): Buffer {
  const bytes = Buffer.from(content as string)
  return Buffer.concat([varint((number << 3) | 2), varint(bytes.length), bytes])
}

function varint(value: number): Buffer {
  const bytes: number[] = []
  let left = value
  for (; left >= 128; left = Math.floor(left / 128)) bytes.push((left % 128) | 128)
  return Buffer.from([...bytes, left])
}

const table = Uint32Array.from({ length: 256 }, (_, byte) => {
  let crc = byte
  for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1
  return crc
})

/** CRC-32C (Castagnoli). */
export function crc32c(bytes: Uint8Array): number {
  let crc = 0xffffffff
  for (const byte of bytes) crc = (crc >>> 8) ^ (table[(crc ^ byte) & 255] as number)
  return ~crc >>> 0
}

// Rotated and shifted, since a checksum of data that holds checksums would be weak.
function checksum(bytes: Uint8Array): Buffer {
  const crc = crc32c(bytes)
  const masked = Buffer.alloc(4)
  masked.writeUInt32LE((((crc >>> 15) | (crc << 17)) + 0xa282ead8) >>> 0)
  return masked
}
