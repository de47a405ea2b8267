// Safetensors files: a JSON header with byte ranges, then raw tensors; one file, or shards with an index. Nothing read is trusted.
import { type FileHandle, mkdir, open, readFile, realpath, stat, writeFile } from 'node:fs/promises'
import { basename, dirname, join, resolve } from 'node:path'
import { CoatError, native } from './native.ts'
import { Replacement } from './replace.ts'
import { type Format, type Shape, Tensor, type TensorOptions } from './tensor.ts'

/** Bytes of one element of every dtype that is read and written. */
const widths = {
  BOOL: 1,
  U8: 1,
  I8: 1,
  F8_E4M3: 1,
  F8_E5M2: 1,
  I16: 2,
  U16: 2,
  F16: 2,
  BF16: 2,
  I32: 4,
  U32: 4,
  F32: 4,
  F64: 8,
  I64: 8,
  U64: 8,
} as const
/** A dtype word of the format. */
export type Dtype = keyof typeof widths

// The dtypes that are formats of the library without scales, both ways.
const dtypes: { readonly [Name in Format]?: Dtype } = { f32: 'F32', bf16: 'BF16', f16: 'F16', i32: 'I32' }

const maxHeader = 100_000_000
const pieceBytes = 2 ** 24

function refuse(path: string, text: string, argument = 'path', cause?: unknown): never {
  const options = cause === undefined ? {} : { cause }
  const reason = cause instanceof Error ? `: ${cause.message}` : ''
  throw new CoatError(`${path}: ${text}${reason}`, 'safetensors', 'safetensors', argument, options)
}

/** Anything that can be written: a shape, and its bytes, row-major and little-endian, in pieces of any size. */
export interface TensorSource {
  readonly dtype: Dtype
  readonly shape: Shape
  pieces(): AsyncIterable<Uint8Array> | Iterable<Uint8Array>
}

/** A tensor of a file: what its header says. Bytes are read when asked for. */
export class StoredTensor implements TensorSource {
  readonly path: string
  readonly name: string
  readonly dtype: Dtype
  readonly shape: Shape
  /** Byte range in the file. */
  readonly range: readonly [number, number]

  constructor(path: string, name: string, dtype: Dtype, shape: Shape, range: readonly [number, number]) {
    this.path = path
    this.name = name
    this.dtype = dtype
    this.shape = shape
    this.range = range
  }

  /** The stored bytes in pieces of at most 16 MiB, so that any size is read in little memory. */
  async *pieces(): AsyncGenerator<Uint8Array> {
    const file = await open(this.path, 'r').catch((error) => refuse(this.path, 'cannot be opened', 'path', error))
    try {
      const [from, to] = this.range
      for (let at = from; at < to; ) {
        const piece = new Uint8Array(Math.min(to - at, pieceBytes))
        await filled(file, piece, at, (done) =>
          refuse(this.path, `tensor '${this.name}' ends after ${at - from + done} of ${to - from} bytes`, this.name),
        )
        yield piece
        at += piece.length
      }
    } finally {
      await file.close()
    }
  }

  /** All stored bytes. */
  async bytes(): Promise<Uint8Array> {
    const all = new Uint8Array(this.range[1] - this.range[0])
    let at = 0
    for await (const piece of this.pieces()) {
      all.set(piece, at)
      at += piece.length
    }
    return all
  }

  /** The values as f32 [the shape], exact; F32, BF16, F16, F8_E4M3 and F8_E5M2 only. */
  async values(): Promise<Float32Array> {
    const decode = decoders[this.dtype]
    if (!decode)
      refuse(
        this.path,
        `tensor '${this.name}' has dtype ${this.dtype} and must have one of ${Object.keys(decoders).join(', ')}`,
        this.name,
      )
    const values = new Float32Array((this.range[1] - this.range[0]) / widths[this.dtype])
    let at = 0
    for await (const piece of this.pieces()) {
      const count = piece.length / widths[this.dtype]
      decode(piece, values.subarray(at, at + count))
      at += count
    }
    return values
  }

  /**
   * A tensor of these values: in the format of the dtype (f32, bf16, f16, i32; bf16 for FP8, whose values it holds
   * exactly) or in `format`. I32 and the dtypes of `values()` only.
   */
  async tensor(options: TensorOptions = {}): Promise<Tensor> {
    const values = this.dtype === 'I32' ? new Int32Array((await this.bytes()).buffer) : await this.values()
    const own = Object.entries(dtypes).find(([, dtype]) => dtype === this.dtype)?.[0] as Format | undefined
    return Tensor.from(values, this.shape, { format: own ?? 'bf16', ...options })
  }
}

const decoders: { readonly [Name in Dtype]?: (bytes: Uint8Array, values: Float32Array) => void } = {
  F32(bytes, values) {
    new Uint8Array(values.buffer, values.byteOffset, bytes.length).set(bytes)
  },
  BF16(bytes, values) {
    const codes = new Uint16Array(bytes.buffer)
    const bits = new Uint32Array(values.buffer, values.byteOffset, values.length)
    for (let i = 0; i < codes.length; i++) bits[i] = (codes[i] as number) << 16
  },
  F16(bytes, values) {
    const codes = new Uint16Array(bytes.buffer)
    for (let i = 0; i < codes.length; i++) values[i] = half(codes[i] as number)
  },
  F8_E4M3(bytes, values) {
    for (let i = 0; i < bytes.length; i++) values[i] = e4m3[bytes[i] as number] as number
  },
  F8_E5M2(bytes, values) {
    for (let i = 0; i < bytes.length; i++) values[i] = half((bytes[i] as number) << 8) // the upper byte of an f16
  },
}

function half(code: number): number {
  const sign = code & 0x8000 ? -1 : 1
  const exponent = (code >> 10) & 31
  const fraction = code & 1023
  if (exponent === 31) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25))
}

const e4m3 = Float32Array.from({ length: 256 }, (_, code) => {
  const exponent = (code >> 3) & 15
  const fraction = code & 7
  const size = exponent === 0 ? fraction * 2 ** -9 : (8 + fraction) * 2 ** (exponent - 10)
  return (code & 0x80 ? -1 : 1) * ((code & 0x7f) === 0x7f ? Number.NaN : size)
})

/** What a file, or a folder of shards, has. */
export interface Stored {
  tensors: Map<string, StoredTensor>
  /** `__metadata__` of the files, together. */
  metadata: Record<string, string>
}

/**
 * The tensors of a `.safetensors` file, or of a folder with `model.safetensors.index.json` and its shards or else with
 * `model.safetensors`. Reads headers only. Throws a CoatError that names file, tensor and rule when anything is not as the
 * format says: ranges must fit shapes and cover the file without gaps, index and shards must name the same tensors, and
 * shards must lie in the folder.
 */
export async function readSafetensors(path: string): Promise<Stored> {
  const found = await stat(path).catch((error) => refuse(path, 'cannot be opened', 'path', error))
  if (!found.isDirectory()) return readHeader(path)
  const index = join(path, 'model.safetensors.index.json')
  const size = await stat(index).then(
    (file) => file.size,
    (error) => (error.code === 'ENOENT' ? null : refuse(index, 'cannot be opened', 'path', error)),
  )
  if (size === null) return readHeader(join(path, 'model.safetensors'))
  if (size > maxHeader) refuse(index, `has ${size} bytes and must have at most ${maxHeader}`)
  return readShards(path, index)
}

async function readShards(folder: string, index: string): Promise<Stored> {
  const { weight_map: map } = objectOf(await readFile(index), (rule) => refuse(index, rule))
  if (!isObject(map)) refuse(index, 'has no weight_map and must have an object of it')
  const shards = new Map<string, Set<string>>()
  for (const [name, shard] of Object.entries(map)) {
    if (typeof shard !== 'string') refuse(index, `tensor '${name}' lies in ${shard} and must lie in a named file`, name)
    const names = shards.get(shard) ?? new Set()
    shards.set(shard, names.add(name))
  }
  // all names are looked at before any file is opened
  for (const shard of shards.keys()) await inside(folder, shard, index)
  const all: Stored = { tensors: new Map(), metadata: {} }
  for (const [shard, names] of shards) {
    const { tensors, metadata } = await readHeader(join(folder, shard))
    for (const [name, tensor] of tensors) {
      if (!names.has(name))
        refuse(
          index,
          Object.hasOwn(map, name)
            ? `tensor '${name}' lies in shard '${map[name]}' and also in '${shard}'`
            : `shard '${shard}' has a tensor '${name}' that the index does not name`,
          name,
        )
      all.tensors.set(name, tensor)
    }
    for (const name of names)
      if (!tensors.has(name))
        refuse(index, `tensor '${name}' must lie in shard '${shard}', which does not have it`, name)
    Object.assign(all.metadata, metadata)
  }
  return all
}

/** Refuses a shard outside of the folder, links included, except into the blobs of a Hugging Face cache. */
async function inside(folder: string, shard: string, index: string): Promise<void> {
  if (/[/\\\0]/.test(shard) || ['', '.', '..'].includes(shard))
    refuse(index, `shard ${JSON.stringify(shard)} must be the name of a file in the folder`, 'index')
  const real = await realpath(join(folder, shard)).catch((error) =>
    refuse(index, `shard '${shard}' is not there`, 'index', error),
  )
  const home = await realpath(folder)
  const blobs = basename(dirname(home)) === 'snapshots' ? resolve(home, '../../blobs') : home
  if (dirname(real) !== home && dirname(real) !== blobs)
    refuse(index, `shard '${shard}' is a link to ${real} and must stay in the folder`, 'index')
}

async function readHeader(path: string): Promise<Stored> {
  const file = await open(path, 'r').catch((error) => refuse(path, 'cannot be opened', 'path', error))
  try {
    const { size } = await file.stat()
    if (size < 8) refuse(path, `has ${size} bytes and must have at least 8`)
    const short = () => refuse(path, `became shorter than ${size} bytes`)
    const prefix = Buffer.alloc(8)
    await filled(file, prefix, 0, short)
    const length = prefix.readBigUInt64LE()
    if (length > BigInt(maxHeader) || length + 8n > BigInt(size))
      refuse(path, `says that its header has ${length} bytes; the file has ${size}, a header at most ${maxHeader}`)
    const header = Buffer.alloc(Number(length))
    await filled(file, header, 8, short)
    return parsed(path, header, size)
  } finally {
    await file.close()
  }
}

function parsed(path: string, header: Uint8Array, size: number): Stored {
  const entries = objectOf(header, (rule) => refuse(path, `its header ${rule}`))
  const start = 8 + header.length
  const { __metadata__: metadata = {}, ...rest } = entries
  if (!isObject(metadata) || Object.values(metadata).some((value) => typeof value !== 'string'))
    refuse(path, '__metadata__ must be an object of strings')
  const tensors = new Map<string, StoredTensor>()
  for (const [name, value] of Object.entries(rest)) {
    const { dtype, shape, data_offsets: offsets } = isObject(value) ? value : {}
    if (typeof dtype !== 'string' || !isSizes(shape) || !isSizes(offsets) || offsets.length !== 2)
      refuse(path, `tensor '${name}' has no valid dtype, shape and data_offsets: ${JSON.stringify(value)}`, name)
    if (!isDtype(dtype))
      refuse(
        path,
        `unsupported dtype ${dtype} for tensor '${name}'; it must be one of ${Object.keys(widths).join(', ')}`,
        name,
      )
    const [from, to] = offsets as [number, number]
    if (from > to || start + to > size)
      refuse(path, `tensor '${name}' lies at ${from} to ${to}, outside of the file's ${size - start} bytes`, name)
    const bytes = bytesOf(dtype, shape)
    if (to - from !== bytes)
      refuse(path, `tensor '${name}' ${dtype}[${shape.join(', ')}] has ${to - from} bytes and must have ${bytes}`, name)
    tensors.set(name, new StoredTensor(path, name, dtype, shape, [start + from, start + to]))
  }
  covered(path, [...tensors.values()], start, size)
  return { tensors, metadata: metadata as Record<string, string> }
}

/** Ranges must follow each other from the header to the end of the file. */
function covered(path: string, tensors: StoredTensor[], start: number, size: number): void {
  tensors.sort(({ range: a }, { range: b }) => a[0] - b[0] || a[1] - b[1])
  let end = start
  let before = 'the header'
  for (const { name, range } of tensors) {
    if (range[0] < end) refuse(path, `tensor '${name}' overlaps ${before}`, name)
    if (range[0] > end) refuse(path, `between ${before} and tensor '${name}' is a gap of ${range[0] - end} bytes`, name)
    end = range[1]
    before = `tensor '${name}'`
  }
  if (end !== size) refuse(path, `after ${before} are ${size - end} bytes too many`)
}

async function filled(file: FileHandle, bytes: Uint8Array, at: number, short: (done: number) => never): Promise<void> {
  for (let done = 0; done < bytes.length; ) {
    const { bytesRead } = await file.read(bytes, done, Math.min(bytes.length - done, pieceBytes), at + done)
    if (bytesRead === 0) short(done)
    done += bytesRead
  }
}

function objectOf(bytes: Uint8Array, refused: (rule: string) => never): Record<string, unknown> {
  // a first look, before much is decoded and parsed
  if (bytes.length === 0 || bytes[0] !== 0x7b) refused("must start with '{'")
  let text: string
  let value: unknown
  try {
    text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes)
  } catch {
    return refused('is not UTF-8')
  }
  try {
    value = JSON.parse(text)
  } catch {
    return refused('is not JSON')
  }
  return isObject(value) ? value : refused('must be an object')
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}
function isSizes(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((item) => Number.isSafeInteger(item) && item >= 0)
}
function isDtype(word: string): word is Dtype {
  return Object.hasOwn(widths, word)
}
function bytesOf(dtype: Dtype, shape: Shape): number {
  return shape.reduce((product, size) => product * size, 1) * widths[dtype]
}

export interface WriteOptions {
  /** Strings for the header; default `{ format: 'pt' }`, which transformers asks for. */
  metadata?: Readonly<Record<string, string>>
  /** Largest number of tensor bytes in a file (default 5e9); a larger tensor has a file of its own. */
  shardBytes?: number
}

type Named = readonly [name: string, source: TensorSource]

/**
 * Writes named tensors to `path`: a file if it ends in `.safetensors`, else a folder (made if needed) that gets
 * `model.safetensors`. More than `shardBytes` go to `model-00001-of-0000N.safetensors` and so on, with
 * `model.safetensors.index.json`. The order is that of element sizes, then names, whatever the order given.
 *
 * One tensor at a time is in memory. Files are written under other names and renamed when all are complete: a failure
 * leaves the old ones as they were. Shards and index of an earlier write that the new one does not have are removed.
 *
 * Tensors must be f32, bf16, f16 or i32: a format with scales is refused, as the file format has no place for a scale and
 * the names that programs give it (`weight_scale`, `weight_scale_inv`) mean opposite things. Tensors must not change meanwhile.
 * Resolves to the paths written. Throws a CoatError that names tensor and rule.
 */
export async function writeSafetensors(
  path: string,
  tensors: Iterable<readonly [string, Tensor | TensorSource]> | Readonly<Record<string, Tensor | TensorSource>>,
  options: WriteOptions = {},
): Promise<string[]> {
  const replacement = new Replacement()
  const held: Tensor[] = []
  try {
    const sources: Named[] = []
    for (const [name, item] of Symbol.iterator in tensors ? tensors : Object.entries(tensors)) {
      sources.push([name, item instanceof Tensor ? sourceOf(path, name, item) : item])
      if (item instanceof Tensor) held.push(item.retain())
    }
    const files = await stage(replacement, path, sources, options)
    await replacement.commit()
    return files
  } catch (error) {
    await replacement.abort()
    if (error instanceof CoatError) throw error
    const text = `${path}: cannot be written: ${(error as Error).message}`
    throw new CoatError(text, 'safetensors', 'writeSafetensors', 'path', { cause: error })
  } finally {
    for (const tensor of held) tensor.release()
  }
}

/** `writeSafetensors` of sources up to the renames, which are left to `replacement`. */
export async function stage(
  replacement: Replacement,
  path: string,
  sources: readonly Named[],
  { metadata = { format: 'pt' }, shardBytes = 5e9 }: WriteOptions = {},
): Promise<string[]> {
  if (!(shardBytes >= 1)) refuse(path, `shardBytes is ${shardBytes} and must be at least 1`, 'shardBytes')
  for (const [key, value] of Object.entries(metadata))
    if (typeof value !== 'string') refuse(path, `metadata '${key}' is ${value} and must be a string`, 'metadata')
  const ordered = inOrder(path, sources)
  const whole = path.endsWith('.safetensors') ? path : join(path, 'model.safetensors')
  const folder = dirname(whole)
  const stem = whole.slice(0, -'.safetensors'.length)
  await mkdir(folder, { recursive: true })
  const index = `${whole}.index.json`
  for (const old of await shardsOf(folder, index)) replacement.remove(old)
  replacement.remove(index)
  const shards = split(ordered, shardBytes)
  if (shards.length === 1) {
    await writeFileOf(replacement.write(whole), ordered, metadata)
    return [whole]
  }
  replacement.remove(whole)
  const count = String(shards.length).padStart(5, '0')
  const map: [string, string][] = []
  const files: string[] = []
  for (const [i, shard] of shards.entries()) {
    const file = `${stem}-${String(i + 1).padStart(5, '0')}-of-${count}.safetensors`
    await writeFileOf(replacement.write(file), shard, metadata)
    for (const [name] of shard) map.push([name, basename(file)])
    files.push(file)
  }
  const total = ordered.reduce((sum, [, { dtype, shape }]) => sum + bytesOf(dtype, shape), 0)
  const text = JSON.stringify({ metadata: { total_size: total }, weight_map: Object.fromEntries(map) }, null, 2)
  await writeFile(replacement.write(index), `${text}\n`, { flush: true })
  return [...files, index]
}

function inOrder(path: string, sources: readonly Named[]): Named[] {
  const seen = new Set<string>()
  for (const [name, { dtype, shape }] of sources) {
    if (name === '' || name === '__metadata__' || seen.has(name))
      refuse(path, `a tensor is called '${name}': names must differ, and be neither empty nor __metadata__`, 'tensors')
    if (!isDtype(dtype)) refuse(path, `unsupported dtype ${dtype} for tensor '${name}'`, name)
    if (!isSizes(shape)) refuse(path, `tensor '${name}' has shape [${shape}] and must have whole sizes`, name)
    seen.add(name)
  }
  // the widest first, so that every tensor lies at a multiple of its element size
  return [...sources].sort(
    ([a, { dtype: x }], [b, { dtype: y }]) => widths[y] - widths[x] || (a < b ? -1 : a > b ? 1 : 0),
  )
}

function split(sources: readonly Named[], shardBytes: number): Named[][] {
  const shards: Named[][] = [[]]
  let filledBytes = 0
  for (const named of sources) {
    const bytes = bytesOf(named[1].dtype, named[1].shape)
    if (filledBytes > 0 && filledBytes + bytes > shardBytes) {
      shards.push([])
      filledBytes = 0
    }
    shards.at(-1)?.push(named)
    filledBytes += bytes
  }
  return shards
}

/** The shards beside an index that it names; none if it cannot be understood. */
async function shardsOf(folder: string, index: string): Promise<string[]> {
  try {
    const { weight_map: map } = objectOf(await readFile(index), (rule) => refuse(index, rule))
    const names = new Set(Object.values(isObject(map) ? map : {}))
    return [...names]
      .filter((name) => typeof name === 'string' && /^[^/\\\0]+\.safetensors$/.test(name))
      .map((name) => join(folder, name as string))
  } catch {
    return []
  }
}

async function writeFileOf(
  path: string,
  sources: readonly Named[],
  metadata: Readonly<Record<string, string>>,
): Promise<void> {
  const entries: [string, unknown][] = [['__metadata__', metadata]]
  let end = 0
  for (const [name, { dtype, shape }] of sources) {
    const from = end
    end += bytesOf(dtype, shape)
    entries.push([name, { dtype, shape, data_offsets: [from, end] }])
  }
  const text = Buffer.from(JSON.stringify(Object.fromEntries(entries)))
  const header = Buffer.alloc(Math.ceil(text.length / 8) * 8, ' ')
  if (header.length > maxHeader)
    refuse(path, `the header has ${header.length} bytes and must have at most ${maxHeader}`)
  text.copy(header)
  const prefix = Buffer.alloc(8)
  prefix.writeBigUInt64LE(BigInt(header.length))
  const file = await open(path, 'wx')
  try {
    await append(file, prefix)
    await append(file, header)
    for (const [name, source] of sources) {
      const { dtype, shape } = source
      let left = bytesOf(dtype, shape)
      for await (const piece of source.pieces()) {
        left -= piece.length
        if (left < 0) break
        await append(file, piece)
      }
      if (left !== 0)
        refuse(
          path,
          `tensor '${name}' ${dtype}[${shape.join(', ')}] gave bytes other than its ${bytesOf(dtype, shape)}`,
          name,
        )
    }
    await file.sync()
  } finally {
    await file.close()
  }
}

async function append(file: FileHandle, bytes: Uint8Array): Promise<void> {
  for (let done = 0; done < bytes.length; )
    done += (await file.write(bytes, done, Math.min(bytes.length - done, pieceBytes))).bytesWritten
}

/** Rows [from, to) of a tensor (all by default), in its own format or rounded to `format`, as something to write. */
export function sourceOf(
  path: string,
  name: string,
  tensor: Tensor,
  format: Format = tensor.format,
  rows?: readonly [number, number],
): TensorSource {
  const dtype = dtypes[format]
  if (!dtype)
    refuse(path, `tensor '${name}' has format '${format}' and must have one of ${Object.keys(dtypes).join(', ')}`, name)
  const shape = rows ? [rows[1] - rows[0], ...tensor.shape.slice(1)] : tensor.shape
  const before = rows ? bytesOf(dtype, [rows[0], ...tensor.shape.slice(1)]) : 0
  return {
    dtype,
    shape,
    async *pieces() {
      const converted = format === tensor.format ? null : native.convert(tensor.handle, null, format as 'f32' | 'bf16')
      try {
        yield new Uint8Array(await native.read(converted ?? tensor.handle), before, bytesOf(dtype, shape))
      } finally {
        if (converted) native.free(converted)
      }
    },
  }
}
