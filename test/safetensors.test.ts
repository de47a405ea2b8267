// Reading of safetensors: values, and headers that lie.
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { CoatError } from '../lib/index.ts'
import { readHeader, readTensor, type StoredTensor } from '../lib/safetensors.ts'

let folder = ''
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'coat-'))
})
afterAll(() => rm(folder, { recursive: true }))

async function file(header: string, data: Uint8Array, length = Buffer.byteLength(header)): Promise<string> {
  const prefix = Buffer.alloc(8)
  prefix.writeBigUInt64LE(BigInt(length))
  const path = join(
    folder,
    `${Math.abs(Buffer.from(header).reduce((h, b) => Math.imul(h, 31) + b, length | 0))}.safetensors`,
  )
  await writeFile(path, Buffer.concat([prefix, Buffer.from(header), data]))
  return path
}

it('reads F32, BF16 and F16', async () => {
  const data = Buffer.alloc(16)
  data.writeFloatLE(1.5, 0)
  data.writeFloatLE(-2, 4)
  data.writeUInt16LE(0x3fc0, 8) // bf16 1.5
  data.writeUInt16LE(0xc000, 10) // bf16 -2
  data.writeUInt16LE(0x3e00, 12) // f16 1.5
  data.writeUInt16LE(0x0001, 14) // f16 2^-24
  const path = await file(
    JSON.stringify({
      __metadata__: { format: 'pt' },
      a: { dtype: 'F32', shape: [2], data_offsets: [0, 8] },
      b: { dtype: 'BF16', shape: [1, 2], data_offsets: [8, 12] },
      c: { dtype: 'F16', shape: [2, 1], data_offsets: [12, 16] },
    }),
    data,
  )
  const header = await readHeader(path)
  expect([...header.keys()]).toEqual(['a', 'b', 'c'])
  const read = (name: string) => readTensor(path, name, header.get(name) as StoredTensor)
  expect([...(await read('a'))]).toEqual([1.5, -2])
  expect([...(await read('b'))]).toEqual([1.5, -2])
  expect([...(await read('c'))]).toEqual([1.5, 2 ** -24])
})

it.each<[string, number | undefined, RegExp]>([
  [
    '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,80]}}',
    undefined,
    /tensor 'a' lies at 0 to 80, outside of the file/,
  ],
  ['{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}', undefined, /lies at 8 to 0/],
  ['{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', undefined, /'a' F32\[3\] has 8 bytes and must have 12/],
  ['{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', undefined, /has no valid dtype, shape and data_offsets/],
  ['{"a":7}', undefined, /has no valid dtype/],
  ['{"a":', undefined, /a header that is not JSON/],
  ['{}', 2 ** 40, /says that its header has 1099511627776 bytes, and the file has/],
])('refuses %s', async (header, length, message) => {
  const path = await file(header, Buffer.alloc(8), length)
  await expect(readHeader(path)).rejects.toThrow(CoatError)
  await expect(readHeader(path)).rejects.toThrow(message)
})

it('refuses a file that is too short, and a type that it does not know', async () => {
  const path = join(folder, 'short.safetensors')
  await writeFile(path, 'abc')
  await expect(readHeader(path)).rejects.toThrow(/has 3 bytes and must have at least 8/)
  const other = await file('{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}', Buffer.alloc(8))
  const header = await readHeader(other)
  await expect(readTensor(other, 'a', header.get('a') as StoredTensor)).rejects.toThrow(
    /dtype I64 and must have one of F32, BF16, F16/,
  )
})
