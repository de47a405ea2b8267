// Reading of safetensors files: a JSON header with byte ranges, then raw tensors. The header is not trusted.
import { open } from 'node:fs/promises'
import { CoatError } from './native.ts'

export interface StoredTensor {
  dtype: string
  shape: number[]
  /** Byte range in the file. */
  range: [number, number]
}

const widths: Record<string, number> = { F32: 4, BF16: 2, F16: 2 }
const maxHeader = 100_000_000

/** Names, types, shapes and byte ranges of a file's tensors; every range is checked against shape and file size. */
export async function readHeader(path: string): Promise<Map<string, StoredTensor>> {
  const file = await open(path, 'r')
  const fail = (text: string): never => {
    throw new CoatError(`${path}: ${text}`, 'safetensors', 'readHeader', 'path')
  }
  try {
    const { size } = await file.stat()
    const prefix = Buffer.alloc(8)
    if ((await file.read(prefix, 0, 8, 0)).bytesRead < 8) fail(`has ${size} bytes and must have at least 8`)
    const length = prefix.readBigUInt64LE()
    if (length > BigInt(maxHeader) || length + 8n > BigInt(size))
      fail(`says that its header has ${length} bytes, and the file has ${size}`)
    const header = Buffer.alloc(Number(length))
    await file.read(header, 0, header.length, 8)
    let entries: Record<string, unknown> = {}
    try {
      entries = JSON.parse(header.toString('utf8'))
    } catch {
      fail('has a header that is not JSON')
    }
    const start = 8 + Number(length)
    const tensors = new Map<string, StoredTensor>()
    for (const [name, value] of Object.entries(entries)) {
      if (name === '__metadata__') continue
      const { dtype, shape, data_offsets: offsets } = (value ?? {}) as Record<string, unknown>
      const whole = (list: unknown): list is number[] =>
        Array.isArray(list) && list.every((item) => Number.isSafeInteger(item) && item >= 0)
      if (typeof dtype !== 'string' || !whole(shape) || !whole(offsets) || offsets.length !== 2) {
        fail(`tensor '${name}' has no valid dtype, shape and data_offsets`)
        continue
      }
      const [from, to] = offsets as [number, number]
      const width = widths[dtype]
      const count = shape.reduce((product, item) => product * item, 1)
      if (from > to || start + to > size) fail(`tensor '${name}' lies at ${from} to ${to}, outside of the file`)
      if (width !== undefined && to - from !== count * width)
        fail(`tensor '${name}' ${dtype}[${shape.join(', ')}] has ${to - from} bytes and must have ${count * width}`)
      tensors.set(name, { dtype, shape, range: [start + from, start + to] })
    }
    return tensors
  } finally {
    await file.close()
  }
}

/** The values of one stored tensor as f32. */
export async function readTensor(path: string, name: string, stored: StoredTensor): Promise<Float32Array> {
  const width = widths[stored.dtype]
  if (width === undefined)
    throw new CoatError(
      `${path}: tensor '${name}' has dtype ${stored.dtype} and must have one of ${Object.keys(widths).join(', ')}`,
      'safetensors',
      'readTensor',
      'dtype',
    )
  const [from, to] = stored.range
  const bytes = new Uint8Array(to - from)
  const file = await open(path, 'r')
  try {
    for (let done = 0; done < bytes.length; ) {
      const { bytesRead } = await file.read(bytes, done, Math.min(bytes.length - done, 2 ** 30), from + done)
      if (bytesRead === 0)
        throw new CoatError(`${path}: tensor '${name}' ends after ${done} bytes`, 'safetensors', 'readTensor', 'path')
      done += bytesRead
    }
  } finally {
    await file.close()
  }
  if (stored.dtype === 'F32') return new Float32Array(bytes.buffer)
  const codes = new Uint16Array(bytes.buffer)
  const values = new Float32Array(codes.length)
  if (stored.dtype === 'BF16') {
    const bits = new Uint32Array(values.buffer)
    for (let i = 0; i < codes.length; i++) bits[i] = (codes[i] as number) << 16
  } else {
    for (let i = 0; i < codes.length; i++) values[i] = halfToFloat(codes[i] as number)
  }
  return values
}

function halfToFloat(code: number): number {
  const sign = code & 0x8000 ? -1 : 1
  const exponent = (code >> 10) & 31
  const fraction = code & 1023
  if (exponent === 31) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25))
}
