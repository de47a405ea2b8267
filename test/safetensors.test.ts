// Safetensors: every dtype there and back, headers and indexes that lie, files over 2 GiB, writes that fail.
import { createHash } from 'node:crypto'
import fs, { readdirSync, readFileSync, statSync } from 'node:fs'
import { cp, mkdir, open, readdir, readFile, rm, symlink, writeFile } from 'node:fs/promises'
import { syncBuiltinESMExports } from 'node:module'
import { basename, dirname, join } from 'node:path'
import { beforeEach, describe, expect, it } from 'vitest'
import {
  CoatError,
  type Dtype,
  memory,
  readSafetensors,
  type StoredTensor,
  Tensor,
  type TensorSource,
  writeSafetensors,
} from '../lib/index.ts'
import { eachInFolder } from './folders.ts'

let root = ''
let folder = ''
eachInFolder((path, outside) => {
  folder = path
  root = outside
})

/** A file with this header and data, its length field as given. */
async function file(
  header: string | Uint8Array,
  data: Uint8Array = new Uint8Array(0),
  name = 'model.safetensors',
  length = BigInt(Buffer.byteLength(header)),
): Promise<string> {
  const prefix = Buffer.alloc(8)
  prefix.writeBigUInt64LE(length)
  const path = join(folder, name)
  await writeFile(path, Buffer.concat([prefix, Buffer.from(header), data]))
  return path
}
async function refused(path: string, ...messages: RegExp[]): Promise<void> {
  const error = await readSafetensors(path).then(
    () => expect.fail(`${path} was read`),
    (reason) => reason,
  )
  expect(error).toBeInstanceOf(CoatError)
  for (const message of messages) expect(error.message).toMatch(message)
}
async function stored(path: string, name: string): Promise<StoredTensor> {
  return (await readSafetensors(path)).tensors.get(name) ?? expect.fail(`no tensor ${name}`)
}
function bytes(dtype: Dtype, shape: readonly number[], data: Uint8Array): TensorSource {
  return { dtype, shape, pieces: () => [data] }
}
function f32(...values: number[]): TensorSource {
  return bytes('F32', [values.length], new Uint8Array(Float32Array.from(values).buffer))
}
function contents(of = folder): Record<string, string> {
  const hash = (path: string) => createHash('sha256').update(readFileSync(path)).digest('hex')
  return Object.fromEntries(
    readdirSync(of)
      .filter((name) => statSync(join(of, name)).isFile())
      .map((name) => [name, hash(join(of, name))]),
  )
}
/** Runs f with fs/promises.open replaced: how the system fails, or what is opened, at will. */
async function withOpen<T>(instead: (path: string, flags: string) => void, f: () => Promise<T>): Promise<T> {
  const before = fs.promises.open
  fs.promises.open = (async (path: string, flags: string) => {
    instead(path, flags)
    return before(path, flags)
  }) as typeof before
  syncBuiltinESMExports()
  try {
    return await f()
  } finally {
    fs.promises.open = before
    syncBuiltinESMExports()
  }
}

describe('values', () => {
  it('are those of F32, BF16, F16, F8_E4M3, F8_E5M2', async () => {
    const codes = (...list: number[]) => new Uint8Array(Uint16Array.from(list).buffer)
    const path = join(folder, 'a.safetensors')
    await writeSafetensors(path, {
      f32: f32(1.5, -0),
      bf16: bytes('BF16', [1, 2], codes(0x3fc0, 0xc000)),
      f16: bytes('F16', [2, 1], codes(0x3e00, 0x0001)),
      e4m3: bytes('F8_E4M3', [6], Uint8Array.of(0x38, 0xb8, 0x01, 0x7e, 0x80, 0x7f)),
      e5m2: bytes('F8_E5M2', [5], Uint8Array.of(0x3c, 0xbc, 0x01, 0x7b, 0x7c)),
    })
    const values = async (name: string) => [...(await (await stored(path, name)).values())]
    expect(await values('f32')).toEqual([1.5, -0])
    expect(await values('bf16')).toEqual([1.5, -2])
    expect(await values('f16')).toEqual([1.5, 2 ** -24])
    expect(await values('e4m3')).toEqual([1, -1, 2 ** -9, 448, -0, Number.NaN])
    expect(await values('e5m2')).toEqual([1, -1, 2 ** -16, 57344, Number.POSITIVE_INFINITY])
  })

  it('of all FP8 codes are those of the library', async () => {
    const all = Uint8Array.from({ length: 256 }, (_, i) => i)
    const path = join(folder, 'a.safetensors')
    await writeSafetensors(path, { e4m3: bytes('F8_E4M3', [256], all), e5m2: bytes('F8_E5M2', [256], all) })
    for (const [name, largest] of [
      ['e4m3', 448],
      ['e5m2', 57344],
    ] as const) {
      const finite = (await (await stored(path, name)).values()).map((x) => (Number.isFinite(x) ? x : 0))
      // the largest value has the largest code, so that the scale is 1
      expect(Math.max(...finite)).toBe(largest)
      using tensor = Tensor.from(finite, [256], { format: `${name}/t` })
      const codes = (await tensor.readBytes()).subarray(0, 256)
      expect([...codes].filter((code, i) => finite[i] !== 0 && code !== i)).toEqual([])
    }
  })

  it('of every format of tensors come back', async () => {
    const path = join(folder, 'a.safetensors')
    const values = Float32Array.of(1, -0, 0.1, -1e-7, 65504, 2 ** -130)
    using a = Tensor.from(values, [2, 3])
    using b = Tensor.from(values, [6], { format: 'bf16' })
    using c = Tensor.from(values, [3, 1, 2], { format: 'f16' })
    using d = Tensor.from(Int32Array.of(-1, 2 ** 31 - 1, 7), [3])
    await writeSafetensors(path, { a, b, c, d })
    const { tensors } = await readSafetensors(path)
    expect([...tensors.values()].map(({ name, dtype }) => `${name} ${dtype}`).sort()).toEqual([
      'a F32',
      'b BF16',
      'c F16',
      'd I32',
    ])
    for (const [name, tensor] of Object.entries({ a, b, c, d })) {
      using back = await (tensors.get(name) as StoredTensor).tensor()
      expect(back.format).toBe(tensor.format)
      expect(back.shape).toEqual(tensor.shape)
      expect(await back.readBytes()).toEqual(await tensor.readBytes())
    }
  })

  it('of FP8 make a bf16 tensor, or another', async () => {
    const path = join(folder, 'a.safetensors')
    await writeSafetensors(path, [['a', bytes('F8_E4M3', [2], Uint8Array.of(0x39, 0xc8))]])
    const from = await stored(path, 'a')
    using plain = await from.tensor()
    using wide = await from.tensor({ format: 'f32' })
    expect([plain.format, ...(await plain.read())]).toEqual(['bf16', 1.125, -4])
    expect([wide.format, ...(await wide.read())]).toEqual(['f32', 1.125, -4])
  })

  it('are refused of dtypes that hold none, and of formats that have scales', async () => {
    const path = join(folder, 'a.safetensors')
    await writeSafetensors(path, { a: bytes('I64', [1], new Uint8Array(8)) })
    const a = await stored(path, 'a')
    await expect(a.values()).rejects.toThrow(/tensor 'a' has dtype I64 and must have one of F32, BF16, F16, F8_E4M3/)
    using scaled = Tensor.from([1, 2], [2], { format: 'e4m3/t' })
    await expect(writeSafetensors(path, { scaled })).rejects.toThrow(
      /tensor 'scaled' has format 'e4m3\/t' and must have one of f32, bf16, f16, i32/,
    )
  })
})

it('C9: every dtype comes back byte for byte, under its own name', async () => {
  const dtypes: [Dtype, number][] = [
    ['BOOL', 1],
    ['U8', 1],
    ['I8', 1],
    ['F8_E4M3', 1],
    ['F8_E5M2', 1],
    ['I16', 2],
    ['U16', 2],
    ['F16', 2],
    ['BF16', 2],
    ['I32', 4],
    ['U32', 4],
    ['F32', 4],
    ['F64', 8],
    ['I64', 8],
    ['U64', 8],
  ]
  const sources = dtypes.map(([dtype, width], i) => {
    const data = Uint8Array.from({ length: 3 * width }, (_, j) => (dtype === 'BOOL' ? j % 2 : i * 31 + j * 7))
    return [dtype, bytes(dtype, [3, 1], data)] as const
  })
  const [one, other, copy] = ['one', 'other', 'copy'].map((name) => join(folder, `${name}.safetensors`)) as [
    string,
    string,
    string,
  ]
  await writeSafetensors(one, sources)
  await writeSafetensors(other, sources.toReversed())
  const { tensors, metadata } = await readSafetensors(one)
  await writeSafetensors(copy, tensors)
  for (const [dtype, source] of sources) {
    expect(tensors.get(dtype)?.dtype).toBe(dtype)
    expect(tensors.get(dtype)?.shape).toEqual([3, 1])
    expect(await tensors.get(dtype)?.bytes()).toEqual([...(source.pieces() as Uint8Array[])][0])
  }
  expect(metadata).toEqual({ format: 'pt' })
  for (const [dtype, width] of dtypes) expect((tensors.get(dtype)?.range[0] as number) % width, dtype).toBe(0)
  const raw = await readFile(one)
  expect(raw.readBigUInt64LE() % 8n).toBe(0n)
  expect(await readFile(other)).toEqual(raw)
  expect(await readFile(copy)).toEqual(raw)
})

it.each(['F4', 'F8_E8M0', 'constructor'])('C9: refuses dtype %s', async (dtype) => {
  const path = await file(`{"Y":{"dtype":"${dtype}","shape":[1],"data_offsets":[0,1]}}`, new Uint8Array(1))
  await refused(path, new RegExp(`${path}.*unsupported dtype ${dtype} for tensor 'Y'`))
})

/** How many bytes each read of a file asks for while f runs. */
async function lengthsRead(f: () => Promise<unknown>): Promise<number[]> {
  const before = fs.promises.open
  const lengths: number[] = []
  fs.promises.open = (async (path: string, flags: string) => {
    const handle = await before(path, flags)
    const read = handle.read.bind(handle) as (...args: [Uint8Array, number, number, number]) => Promise<unknown>
    return Object.assign(handle, {
      read: (...args: [Uint8Array, number, number, number]) => {
        lengths.push(args[2])
        return read(...args)
      },
    })
  }) as typeof before
  syncBuiltinESMExports()
  try {
    await f()
    return lengths
  } finally {
    fs.promises.open = before
    syncBuiltinESMExports()
  }
}

describe('C4: header length', () => {
  it.each<[bigint, RegExp]>([
    [0n, /must start with '\{'/],
    [1n, /is not JSON/],
    [10n, /says that its header has 10 bytes; the file has 10/],
    [2n ** 63n, /says that its header has 9223372036854775808 bytes/],
    [2n ** 64n - 1n, /says that its header has 18446744073709551615 bytes/],
  ])('of %s', async (length, message) => {
    const path = await file('{}', undefined, undefined, length)
    await refused(path, message, new RegExp(path))
  })

  it.each([0, 1, 2, 3, 4, 5, 6, 7])('in a file of %s bytes', async (size) => {
    const path = join(folder, 'a.safetensors')
    await writeFile(path, new Uint8Array(size))
    await refused(path, new RegExp(`${path}: has ${size} bytes and must have at least 8`))
  })

  it.each<[string | Uint8Array, RegExp]>([
    ['[]', /must start with '\{'/],
    ['null', /must start with '\{'/],
    [' {}', /must start with '\{'/],
    ['{"a":', /is not JSON/],
    [Uint8Array.of(0x7b, 0x22, 0xff, 0x22, 0x3a, 0x31, 0x7d), /is not UTF-8/],
    ['{"__metadata__":{"a":1}}', /__metadata__ must be an object of strings/],
  ])('of the header %s', async (header, message) => refused(await file(header), message))

  it('of more than 100 MB, at once and without the memory', async () => {
    const path = join(folder, 'a.safetensors')
    const length = 100_000_001
    const handle = await open(path, 'w')
    const prefix = Buffer.alloc(8)
    prefix.writeBigUInt64LE(BigInt(length))
    await handle.write(prefix)
    await handle.truncate(8 + length)
    await handle.close()
    const before = process.memoryUsage()
    const reads = await lengthsRead(() =>
      refused(path, /says that its header has 100000001 bytes; .* a header at most 100000000/),
    )
    expect(reads).toEqual([8])
    expect(process.memoryUsage().arrayBuffers - before.arrayBuffers).toBeLessThan(10e6)
  })

  it('nothing but the length is read where it cannot be, all of the header else', async () => {
    for (const length of [10n, 2n ** 63n, 2n ** 64n - 1n]) {
      const path = await file('{}', undefined, undefined, length)
      expect(await lengthsRead(() => refused(path, /says that its header has/))).toEqual([8])
    }
    const path = await file('{} ')
    expect(await lengthsRead(() => readSafetensors(path))).toEqual([8, 3])
  })
})

describe('C5: offsets and shapes', () => {
  const entry = (dtype: unknown, shape: unknown, offsets: unknown) =>
    JSON.stringify({ dtype, shape, data_offsets: offsets })
  it.each<[string, string, RegExp]>([
    ['begin after end', `"a":${entry('F32', [2], [8, 0])}`, /'a' lies at 8 to 0/],
    ['end past the data', `"a":${entry('F32', [20], [0, 80])}`, /'a' lies at 0 to 80, outside of the file's 8 bytes/],
    ['overlap', `"a":${entry('F32', [1], [0, 4])},"b":${entry('U8', [5], [3, 8])}`, /'b' overlaps tensor 'a'/],
    [
      'gap',
      `"a":${entry('U8', [2], [0, 2])},"b":${entry('F32', [1], [4, 8])}`,
      /between tensor 'a' and tensor 'b' is a gap of 2 bytes/,
    ],
    ['gap at first', `"a":${entry('F32', [1], [4, 8])}`, /between the header and tensor 'a' is a gap of 4 bytes/],
    ['trailing bytes', `"a":${entry('F32', [1], [0, 4])}`, /after tensor 'a' are 4 bytes too many/],
    ['nothing but data', '', /after the header are 8 bytes too many/],
    ['another size', `"a":${entry('F32', [3], [0, 8])}`, /'a' F32\[3\] has 8 bytes and must have 12/],
    [
      'overflow',
      `"a":${entry('F32', [2 ** 33, 2 ** 33], [0, 8])}`,
      /'a' F32\[.*\] has 8 bytes and must have 295147905179352830000/,
    ],
    ['negative', `"a":${entry('F32', [-2, -1], [0, 8])}`, /'a' has no valid dtype, shape and data_offsets/],
    ['fractional', `"a":${entry('F32', [0.5, 4], [0, 8])}`, /'a' has no valid/],
    ['string', `"a":${entry('F32', ['2'], [0, 8])}`, /'a' has no valid/],
    ['null', `"a":${entry('F32', [Number.NaN], [0, 8])}`, /'a' has no valid/],
    ['NaN', '"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}', /is not JSON/],
    ['fractional offset', `"a":${entry('F32', [2], [0, 7.5])}`, /'a' has no valid/],
    ['negative offset', `"a":${entry('F32', [2], [-8, 0])}`, /'a' has no valid/],
    ['three offsets', `"a":${entry('F32', [2], [0, 8, 8])}`, /'a' has no valid/],
    ['no dtype', '"a":{"shape":[2],"data_offsets":[0,8]}', /'a' has no valid/],
    ['no shape', '"a":{"dtype":"F32","data_offsets":[0,8]}', /'a' has no valid/],
    ['no offsets', '"a":{"dtype":"F32","shape":[2]}', /'a' has no valid/],
    ['no entry', '"a":7', /'a' has no valid/],
    ['unknown dtype', `"a":${entry('F33', [2], [0, 8])}`, /unsupported dtype F33 for tensor 'a'/],
  ])('refuses: %s', async (_, entries, message) => {
    const path = await file(`{${entries}}`, new Uint8Array(8))
    await refused(path, message, new RegExp(path))
  })

  it('accepts another order, empty tensors, scalars and trailing spaces', async () => {
    const data = new Uint8Array(Float32Array.of(1, 2, 3).buffer)
    const header = `{"b":${entry('F32', [2], [4, 12])},"e":${entry('F32', [0, 4], [4, 4])},"a":${entry('F32', [], [0, 4])}}`
    const path = await file(`${header}     `, data)
    const { tensors } = await readSafetensors(path)
    expect([...((await tensors.get('a')?.values()) ?? [])]).toEqual([1])
    expect([...((await tensors.get('b')?.values()) ?? [])]).toEqual([2, 3])
    expect(tensors.get('e')?.shape).toEqual([0, 4])
    expect(await tensors.get('e')?.values()).toEqual(new Float32Array(0))
    const copy = join(folder, 'copy.safetensors')
    await writeSafetensors(copy, tensors)
    expect([...((await (await readSafetensors(copy)).tensors.get('b')?.values()) ?? [])]).toEqual([2, 3])
  })
})

const index = 'model.safetensors.index.json'
async function indexed(map: unknown): Promise<string> {
  await writeFile(join(folder, index), JSON.stringify({ weight_map: map }))
  return folder
}

describe('C6: shards outside of the folder', () => {
  it.each(['../x.safetensors', '/abs/x.safetensors', 'a/../../x', '..\\x.safetensors', 'x\0.safetensors', '..', ''])(
    'refuses %j',
    async (shard) => {
      await writeFile(join(root, 'x.safetensors'), 'outside')
      const where = await indexed({ a: shard })
      const opened: string[] = []
      await withOpen(
        (path) => opened.push(path),
        () => refused(where, /index\.json: shard ".*" must be the name of a file in the folder/),
      )
      expect(opened).toEqual([])
    },
  )

  it('refuses a link that leaves it', async () => {
    await writeSafetensors(join(root, 'x.safetensors'), { a: f32(1) })
    await symlink('../x.safetensors', join(folder, 'link.safetensors'))
    const where = await indexed({ a: 'link.safetensors' })
    const opened: string[] = []
    const watch = (f: () => Promise<unknown>) => withOpen((path) => opened.push(path), f)
    await watch(() => refused(where, /shard 'link\.safetensors' is a link to .*x\.safetensors and must stay/))
    expect(opened).toEqual([])
    await watch(() => readSafetensors(join(root, 'x.safetensors')))
    expect(opened).toEqual([join(root, 'x.safetensors')])
  })

  it('accepts a link inside of it, and the blobs of a cache', async () => {
    await writeSafetensors(join(folder, 'x.safetensors'), { a: f32(1) })
    await symlink('x.safetensors', join(folder, 'link.safetensors'))
    expect([...(await readSafetensors(await indexed({ a: 'link.safetensors' }))).tensors.keys()]).toEqual(['a'])
    const cache = folder
    folder = join(cache, 'snapshots', 'main')
    await mkdir(folder, { recursive: true })
    await mkdir(join(cache, 'blobs'))
    await cp(join(cache, 'x.safetensors'), join(cache, 'blobs', 'c0de'))
    await symlink('../../blobs/c0de', join(folder, 'm.safetensors'))
    expect([...(await readSafetensors(await indexed({ a: 'm.safetensors' }))).tensors.keys()]).toEqual(['a'])
  })
})

describe('C7: an index that lies', () => {
  beforeEach(async () => {
    await writeSafetensors(join(folder, '1.safetensors'), { a: f32(1), b: f32(2) })
    await writeSafetensors(join(folder, '2.safetensors'), { b: f32(3) })
    await writeSafetensors(join(folder, '3.safetensors'), { c: f32(3) })
  })
  it.each<[string, unknown, RegExp]>([
    [
      'a tensor in two shards',
      { a: '1.safetensors', b: '2.safetensors' },
      /tensor 'b' lies in shard '2\.safetensors' and also in '1\.safetensors'/,
    ],
    [
      'a tensor that the shard lacks',
      { c: '3.safetensors', d: '3.safetensors' },
      /tensor 'd' must lie in shard '3\.safetensors', which does not have it/,
    ],
    ['a shard that is not there', { a: '4.safetensors' }, /shard '4\.safetensors' is not there/],
    [
      'a shard with more tensors',
      { a: '1.safetensors' },
      /shard '1\.safetensors' has a tensor 'b' that the index does not name/,
    ],
    ['a place that is no name', { a: 7 }, /tensor 'a' lies in 7 and must lie in a named file/],
    ['no map', [], /has no weight_map/],
  ])('refuses: %s', async (_, map, message) => refused(await indexed(map), message, new RegExp(index)))

  it('reads one that does not', async () => {
    const { tensors } = await readSafetensors(
      await indexed({ a: '1.safetensors', b: '1.safetensors', c: '3.safetensors' }),
    )
    expect([...tensors.keys()].sort()).toEqual(['a', 'b', 'c'])
    expect([...((await tensors.get('b')?.values()) ?? [])]).toEqual([2])
  })
})

it('C10: reads and writes a tensor of 2 GiB + 64 KiB in little memory', async () => {
  const size = 2 ** 31 + 2 ** 16
  const path = await file(`{"a":{"dtype":"U8","shape":[${size}],"data_offsets":[0,${size}]}}`)
  const from = statSync(path).size
  const handle = await open(path, 'r+')
  await handle.truncate(from + size)
  for (const at of [0, 2 ** 31 - 1, 2 ** 31, size - 1]) await handle.write(Uint8Array.of(at % 251), 0, 1, from + at)
  await handle.close()
  const before = process.memoryUsage.rss()
  let peak = before
  const digest = async (tensor: StoredTensor): Promise<string> => {
    const hash = createHash('sha256')
    for await (const piece of tensor.pieces()) {
      hash.update(piece)
      peak = Math.max(peak, process.memoryUsage.rss())
    }
    return hash.digest('hex')
  }
  const copy = join(folder, 'copy.safetensors')
  await writeSafetensors(copy, { a: await stored(path, 'a') })
  peak = Math.max(peak, process.memoryUsage.rss())
  const [one, other] = [await stored(path, 'a'), await stored(copy, 'a')]
  expect(statSync(copy).size).toBeGreaterThan(size)
  expect(await digest(other)).toBe(await digest(one))
  expect(peak - before).toBeLessThan(512 * 2 ** 20)
  await rm(copy)
}, 300_000)

describe('writes', () => {
  const four = () => ({ a: f32(1, 2), b: f32(3, 4), c: f32(5, 6, 7), d: f32(8) })

  it('shards, and goes back to one file, without leftovers', async () => {
    await writeSafetensors(folder, four())
    expect(await readdir(folder)).toEqual(['model.safetensors'])
    const files = await writeSafetensors(folder, four(), { shardBytes: 16, metadata: { key: 'value' } })
    expect(files.map((path) => basename(path))).toEqual([
      'model-00001-of-00002.safetensors',
      'model-00002-of-00002.safetensors',
      index,
    ])
    expect((await readdir(folder)).sort()).toEqual(files.map((path) => basename(path)).sort())
    const { tensors, metadata } = await readSafetensors(folder)
    expect(metadata).toEqual({ key: 'value' })
    expect([...((await tensors.get('c')?.values()) ?? [])]).toEqual([5, 6, 7])
    expect(JSON.parse(await readFile(join(folder, index), 'utf8'))).toEqual({
      metadata: { total_size: 32 },
      weight_map: Object.fromEntries([...'abcd'].map((name) => [name, basename(files[name < 'c' ? 0 : 1] as string)])),
    })
    await writeSafetensors(folder, four(), { shardBytes: 1 })
    expect((await readdir(folder)).length).toBe(5)
    await writeSafetensors(folder, four())
    expect(await readdir(folder)).toEqual(['model.safetensors'])
    expect((await readSafetensors(folder)).tensors.size).toBe(4)
  })

  it('no tensors at all', async () => {
    await writeSafetensors(folder, {})
    expect((await readSafetensors(folder)).tensors.size).toBe(0)
  })

  it.each<[string, Record<string, TensorSource>, object, RegExp]>([
    ['bytes too few', { a: bytes('F32', [2], new Uint8Array(7)) }, {}, /'a' F32\[2\] gave bytes other than its 8/],
    ['bytes too many', { a: bytes('F32', [2], new Uint8Array(9)) }, {}, /'a' F32\[2\] gave bytes other than its 8/],
    ['shape', { a: bytes('F32', [0.5], new Uint8Array(2)) }, {}, /'a' has shape \[0\.5\]/],
    ['dtype', { a: bytes('F4' as Dtype, [2], new Uint8Array(1)) }, {}, /unsupported dtype F4 for tensor 'a'/],
    ['name', { __metadata__: f32(1) }, {}, /a tensor is called '__metadata__'/],
    ['shardBytes', { a: f32(1) }, { shardBytes: 0 }, /shardBytes is 0 and must be at least 1/],
    ['metadata', { a: f32(1) }, { metadata: { x: 1 } }, /metadata 'x' is 1 and must be a string/],
  ])('not with a wrong %s', async (_, tensors, options, message) => {
    await writeSafetensors(folder, { old: f32(1) })
    const before = contents()
    await expect(writeSafetensors(folder, tensors, options)).rejects.toThrow(message)
    expect(contents()).toEqual(before)
  })

  it('not over old files when the source fails, and holds no tensor then', async () => {
    await writeSafetensors(folder, four(), { shardBytes: 16 })
    const [before, tensors] = [contents(), memory().tensors]
    const broken: TensorSource = {
      dtype: 'F32',
      shape: [4],
      *pieces() {
        yield new Uint8Array(8)
        throw new Error('the source is broken')
      },
    }
    const held = Tensor.zeros([8])
    const failing = writeSafetensors(folder, { ...four(), z: broken, held }, { shardBytes: 16 })
    held.dispose()
    await expect(failing).rejects.toThrow(/cannot be written/)
    await expect(failing).rejects.toHaveProperty('cause.message', 'the source is broken')
    expect(contents()).toEqual(before)
    expect(memory().tensors).toBe(tensors)
  })

  it('not over old files when a name is taken by a folder', async () => {
    await writeSafetensors(folder, four())
    await mkdir(join(folder, 'model-00002-of-00002.safetensors'))
    const before = contents()
    await expect(writeSafetensors(folder, four(), { shardBytes: 16 })).rejects.toThrow(
      /model-00002-of-00002\.safetensors is a folder and must be a file/,
    )
    expect(contents()).toEqual(before)
  })

  it('puts old files back when a rename fails half-way', async () => {
    await writeSafetensors(folder, four(), { shardBytes: 16 })
    const before = contents()
    const rename = fs.promises.rename
    fs.promises.rename = async (from, to) => {
      if (String(from).endsWith('.new') && basename(String(to)) === index) throw new Error('no rename')
      return rename(from, to)
    }
    syncBuiltinESMExports()
    try {
      await expect(writeSafetensors(folder, { a: f32(9), b: f32(9) }, { shardBytes: 4 })).rejects.toThrow(CoatError)
    } finally {
      fs.promises.rename = rename
      syncBuiltinESMExports()
    }
    expect(contents()).toEqual(before)
  })

  it('not into a folder that cannot be written, or a file', async () => {
    await writeSafetensors(folder, four())
    const before = contents()
    const failing = withOpen(
      (path, flags) => {
        if (dirname(path) === folder && flags !== 'r') throw Object.assign(new Error('EACCES'), { code: 'EACCES' })
      },
      () => writeSafetensors(folder, { a: f32(1) }),
    )
    await expect(failing).rejects.toThrow(CoatError)
    await expect(failing).rejects.toHaveProperty('cause.code', 'EACCES')
    await writeFile(join(root, 'taken'), '')
    await expect(writeSafetensors(join(root, 'taken', 'x'), four())).rejects.toThrow(/taken\/x: cannot be written/)
    expect(contents()).toEqual(before)
  })
})
