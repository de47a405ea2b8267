// Data sets: text, token files and JSON lines; orders that resume exactly, and files that are refused.
import { mkdtemp, open, readdir, readFile, rm, truncate, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import {
  ByteTokenizer,
  type Dataset,
  encodeDocuments,
  JsonlDataset,
  LlamaForCausalLM,
  readJsonl,
  TextDataset,
  TokenDataset,
  type Tokenizer,
  Trainer,
  writeTokens,
} from '../lib/index.ts'

let folder = ''
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'coat-data-'))
})
afterAll(() => rm(folder, { recursive: true }))

/** A token file of the ids 0 … count − 1, shifted. */
async function counting(name: string, count: number, first = 0, vocabulary = 128256): Promise<string> {
  const file = join(folder, name)
  await writeTokens(
    file,
    Array.from({ length: count }, (_, i) => first + i),
    { vocabulary },
  )
  return file
}

const text = Array.from({ length: 400 }, (_, i) => `line ${i}`).join('\n')

it('batches depend on seed and number alone, and targets follow ids', () => {
  const data = new TextDataset(text, { sequence: 16, seed: 3 })
  const batch = data.batch(5, 8)
  data.batch(1, 2)
  expect(data.batch(5, 8)).toEqual(batch)
  expect(data.batch(6, 8).ids).not.toEqual(batch.ids)
  expect(new TextDataset(text, { sequence: 16, seed: 4 }).batch(5, 8).ids).not.toEqual(batch.ids)
  for (let row = 0; row < 8; row++)
    expect(batch.targets.slice(row * 16, row * 16 + 15)).toEqual(batch.ids.slice(row * 16 + 1, row * 16 + 16))
})

it('holds out the end of one text, or whole documents of many', () => {
  const one = new TextDataset(text, { sequence: 16, heldOut: 0.1 })
  expect(one.train.length + one.heldOut.length).toBe(text.length)
  expect(one.heldOut.length).toBe(Math.ceil(text.length * 0.1))
  const documents = Array.from({ length: 40 }, (_, i) => `document ${i} `.repeat(20))
  const many = new TextDataset(documents, { sequence: 16, heldOut: 0.1 })
  const held = new ByteTokenizer().decode(many.heldOut)
  const train = new ByteTokenizer().decode(many.train)
  for (const i of [9, 19, 29, 39]) {
    expect(held).toContain(`document ${i} `)
    expect(train).not.toContain(`document ${i} `)
  }
})

it('validation windows lie side by side', () => {
  const data = new TextDataset(text, { sequence: 16, heldOut: 0.2 })
  const batches = data.validation(10, 4)
  expect(batches.map(({ ids }) => ids.length / 16)).toEqual([4, 4, 2])
  const ids = batches.flatMap((batch) => [...batch.ids])
  expect(ids).toEqual([...data.heldOut.slice(0, 160)])
  expect(data.validation(100000, 64).reduce((sum, batch) => sum + batch.ids.length / 16, 0)).toBe(
    Math.floor((data.heldOut.length - 1) / 16),
  )
})

it.each<[string | string[], object, RegExp]>([
  ['', {}, /documents hold no text/],
  [['', ' \n '], {}, /documents hold no text/],
  ['short', {}, /the training part has 4 tokens and must have at least sequence \+ 1 = 17/],
  [text, { sequence: 0 }, /sequence is 0 and must be an integer of at least 1/],
  [text, { heldOut: 1 }, /heldOut is 1 and must lie between 0 and 1/],
  [text, { seed: -1 }, /seed is -1 and must be an integer of at least 0/],
])('refuses %j %j', (documents, options, message) => {
  expect(() => new TextDataset(documents, { sequence: 16, ...options })).toThrow(message)
})

describe('token files', () => {
  it('D1: the header carries the width, and ids beyond 65535 come back', async () => {
    const wide = await counting('wide.bin', 101, 65500)
    using data = await TokenDataset.open(wide, { sequence: 100, heldOut: 0, shuffle: false })
    expect([...data.batch(0, 1).ids]).toEqual(Array.from({ length: 100 }, (_, i) => 65500 + i))
    expect(data.batch(0, 1).targets[99]).toBe(65600)
    expect(data.vocabulary).toBe(128256)
    expect((await readFile(wide)).length).toBe(32 + 4 * 101)
    const narrow = await counting('narrow.bin', 101, 0, 65536)
    expect((await readFile(narrow)).length).toBe(32 + 2 * 101)
    await expect(writeTokens(narrow, [1, 70000], { vocabulary: 65536 })).rejects.toThrow(
      'writeTokens: ids[1] is 70000 and must be an integer in [0, 65536), the vocabulary',
    )
    // A refused write leaves what was there, and nothing else.
    expect((await readFile(narrow)).length).toBe(32 + 2 * 101)
    expect((await readdir(folder)).filter((name) => name.startsWith('.') || name.endsWith('.partial'))).toEqual([])
  })

  it('the bytes are those of the docstring', async () => {
    const file = join(folder, 'bytes.bin')
    expect(await writeTokens(file, [1, 258], { vocabulary: 300 })).toBe(2)
    expect((await readFile(file)).toString('hex')).toBe(
      '636f6174746f6b0a' + '01000000' + '02000000' + '2c01000000000000' + '0200000000000000' + '01000201',
    )
  })

  it('ids may come in chunks of any length', async () => {
    const whole = Int32Array.from({ length: 150_000 }, (_, i) => (i * 7919) % 50_000)
    await writeTokens(join(folder, 'whole.bin'), whole, { vocabulary: 50_000 })
    async function* chunks() {
      for (const [from, to] of [
        [0, 0],
        [0, 1],
        [1, 140_000],
        [140_000, 150_000],
      ] as const)
        yield whole.subarray(from, to)
    }
    await writeTokens(join(folder, 'chunks.bin'), chunks(), { vocabulary: 50_000 })
    const bytes = await readFile(join(folder, 'chunks.bin'))
    expect(bytes.equals(await readFile(join(folder, 'whole.bin')))).toBe(true)
    using data = await TokenDataset.open(join(folder, 'chunks.bin'), { sequence: 149_999, heldOut: 0 })
    expect(data.next(1).ids.findIndex((id, i) => id !== whole[i])).toBe(-1)
  })

  it('D2: a file of more than 4 GiB gives the ids at token 2^31 + 5', async () => {
    const file = await counting('sparse.bin', 2, 0, 256)
    const count = 2 ** 31 + 64
    const handle = await open(file, 'r+')
    const size = Buffer.alloc(8)
    size.writeBigUInt64LE(BigInt(count))
    await handle.write(size, 0, 8, 24)
    // What an offset of 32 bits would find instead.
    await handle.write(Buffer.alloc(64, 9), 0, 64, 32)
    await handle.write(Uint8Array.of(201, 0, 202, 0), 0, 4, 32 + 2 * (2 ** 31 + 5))
    await handle.close()
    await truncate(file, 32 + 2 * count)
    using data = await TokenDataset.open(file, { sequence: 16, heldOut: 0, shuffle: false })
    const { ids, targets } = data.batch(2 ** 27, 1)
    expect([...ids.subarray(4, 8)]).toEqual([0, 201, 202, 0])
    expect([...targets.subarray(4, 7)]).toEqual([201, 202, 0])
    // A shuffled order of 2^31 sequences needs no list of them.
    using single = await TokenDataset.open(file, { sequence: 1, heldOut: 0 })
    expect(single.sequences).toBe(count - 1)
    const before = process.memoryUsage().arrayBuffers
    single.batch(5_000_000, 256)
    expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(2 ** 20)
  })

  const places = (data: Dataset, index: number, size: number) => [...data.batch(index, size).ids]

  describe.each([true, false])('shuffle: %s', (shuffle) => {
    it('D3: resumes exactly at every position, over the borders of files and epochs', async () => {
      const files = [await counting('a.bin', 7), await counting('b.bin', 12, 100), await counting('c.bin', 3, 200)]
      const options = { sequence: 2, seed: 5, heldOut: 0, shuffle }
      using whole = await TokenDataset.open(files, options)
      expect(whole.sequences).toBe(3 + 5 + 1)
      const all = Array.from({ length: 45 }, (_, i) => places(whole, i, 1))
      if (!shuffle)
        expect(all.slice(0, 9).flat()).toEqual([
          0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 200, 201,
        ])
      for (let at = 0; at <= 27; at++) {
        using first = await TokenDataset.open(files, options)
        for (let i = 0; i < at; i++) first.next(1)
        expect(first.position).toBe(at)
        using second = await TokenDataset.open(files, options)
        second.restore(JSON.parse(JSON.stringify(first.state())))
        // Another size of batches goes on at the same place.
        const following = [1, 2, 3].map((size) => [...second.next(size).ids])
        expect(following).toEqual(
          [all.slice(at, at + 1), all.slice(at + 1, at + 3), all.slice(at + 3, at + 6)].map((rows) => rows.flat()),
        )
        expect(second.position).toBe(at + 6)
      }
    })
  })

  it.each([1, 2, 3, 4, 5, 16, 17, 64, 65, 1000])(
    'D4: %i sequences: epoch 3 has each once, also when resumed within',
    async (count) => {
      const file = await counting(`order${count}.bin`, count + 1)
      const options = { sequence: 1, seed: 2 ** 40 + 3, heldOut: 0 }
      using whole = await TokenDataset.open(file, options)
      const epoch = (number: number) => places(whole, number, count)
      const third = epoch(3)
      const sorted = Array.from({ length: count }, (_, i) => i)
      expect([...third].sort((a, b) => a - b)).toEqual(sorted)
      using resumed = await TokenDataset.open(file, options)
      resumed.restore({ ...whole.state(), position: 3 * count + Math.floor(count / 3) })
      expect([...resumed.next(count - Math.floor(count / 3)).ids]).toEqual(third.slice(Math.floor(count / 3)))
      expect([...resumed.next(count).ids]).toEqual(epoch(4))
      if (count < 16) return
      expect(third).not.toEqual(sorted)
      expect(epoch(2)).not.toEqual(third)
      // The high half of the seed counts.
      using other = await TokenDataset.open(file, { ...options, seed: 3 })
      expect(places(other, 3, count)).not.toEqual(third)
    },
  )

  it('an order looks like chance: places of an element over 4000 epochs', async () => {
    using data = await TokenDataset.open(await counting('chance.bin', 11), { sequence: 1, heldOut: 0 })
    const seen = Array.from({ length: 10 }, () => new Array<number>(10).fill(0))
    for (let epoch = 0; epoch < 4000; epoch++)
      places(data, epoch, 10).forEach((id, at) => {
        ;(seen[id] as number[])[at]! += 1
      })
    // 400 expected, deviation 19: six deviations.
    for (const row of seen) for (const times of row) expect(Math.abs(times - 400)).toBeLessThan(114)
  })

  it('D5: empty documents give neither ids nor separators', async () => {
    const tokenizer = new ByteTokenizer()
    const ids = (documents: string[], separator?: number) =>
      [...encodeDocuments(documents, tokenizer, separator)].flatMap((document) => [...document])
    expect(ids(['', 'a', ''], 0)).toEqual([97, 0])
    expect(ids(['a', 'b'], 0)).toEqual([97, 0, 98, 0])
    expect(ids(['a', 'b'])).toEqual([97, 98])
    await expect(
      writeTokens(join(folder, 'none.bin'), encodeDocuments(['', ''], tokenizer, 0), { vocabulary: 256 }),
    ).rejects.toThrow('writeTokens: ids hold no token')
  })

  it('documents begin after the separator, which is refused outside the vocabulary', async () => {
    const file = join(folder, 'separated.bin')
    await writeTokens(file, [5, 6, 0, 7, 0, 0, 8, 9, 9], { vocabulary: 10 })
    using data = await TokenDataset.open(file, { sequence: 4, heldOut: 0, shuffle: false, separator: 0 })
    expect(data.batch(0, 2)).toMatchObject({
      ids: Int32Array.of(5, 6, 0, 7, 0, 0, 8, 9),
      starts: Int32Array.of(0, 0, 0, 3, 0, 1, 2, 2),
    })
    await expect(TokenDataset.open(file, { sequence: 4, separator: 10 })).rejects.toThrow(
      'separator is 10 and must be an integer in [0, 10), the vocabulary',
    )
  })

  it('D6: an id beyond the vocabulary is refused where it is read, and other batches go on', async () => {
    const file = await counting('beyond.bin', 41, 0, 256)
    const handle = await open(file, 'r+')
    await handle.write(Uint8Array.of(0, 1), 0, 2, 32 + 2 * 25)
    await handle.close()
    using data = await TokenDataset.open(file, { sequence: 8, heldOut: 0, shuffle: false })
    expect(places(data, 2, 1)[0]).toBe(16)
    expect(() => data.batch(3, 1)).toThrow(
      `TokenDataset: ${file}: token 25 is 256 and must be below its vocabulary 256`,
    )
    expect(data.position).toBe(3)
    expect(places(data, 4, 1)[0]).toBe(32)
  })

  it('D7: four ranks take each of 103 sequences once, and a state fits another number of ranks', async () => {
    const file = await counting('ranks.bin', 104)
    const opened = (rank: number, world: number) =>
      TokenDataset.open(file, { sequence: 1, seed: 4, heldOut: 0, rank, world })
    using alone = await opened(0, 1)
    const ranks = await Promise.all([0, 1, 2, 3].map((rank) => opened(rank, 4)))
    const taken = Array.from({ length: 13 }, () => ranks.map((data) => [...data.next(2).ids])).flat(2)
    expect([...taken.slice(0, 103)].sort((a, b) => a - b)).toEqual(Array.from({ length: 103 }, (_, i) => i))
    expect(taken).toEqual(places(alone, 0, 104))
    expect(places(ranks[2] as TokenDataset, 5, 2)).toEqual(taken.slice(44, 46))
    const state = (ranks[1] as TokenDataset).state()
    expect(state.position).toBe(104)
    const pair = await Promise.all([0, 1].map((rank) => opened(rank, 2)))
    for (const data of pair) data.restore(state)
    expect(pair.flatMap((data) => [...data.next(3).ids])).toEqual([...alone.next(6).ids])
    for (const data of [...ranks, ...pair]) data.dispose()
    await expect(opened(4, 4)).rejects.toThrow('rank is 4 and must be below world, 4')
    await expect(opened(0, 0)).rejects.toThrow('world is 0 and must be an integer of at least 1')
  })

  it('training and held-out parts share no token', async () => {
    const files = [await counting('left.bin', 103), await counting('right.bin', 50, 1000)]
    using data = await TokenDataset.open(files, { sequence: 4, heldOut: 0.2 })
    const tokens = (batches: { ids: Int32Array; targets: Int32Array }[]) =>
      new Set(batches.flatMap(({ ids, targets }) => [...ids, ...targets]))
    const train = tokens([data.batch(0, data.sequences)])
    const batches = data.validation(100, 3)
    const held = tokens(batches)
    expect([...held].filter((id) => train.has(id))).toEqual([])
    expect(batches.map(({ ids }) => ids.length / 4)).toEqual([3, 3])
    expect(Math.min(...held)).toBe(83)
    expect(data.validation(2, 3).map(({ ids }) => ids.length / 4)).toEqual([2])
  })

  const damage = (change: (bytes: Buffer) => Buffer | undefined) => async (file: string) => {
    const bytes = await readFile(file)
    await writeFile(file, change(bytes) ?? bytes)
  }
  const put = (value: number, at: number) => damage((bytes) => void bytes.writeUInt32LE(value, at))
  it.each<[string, (file: string) => Promise<void>, RegExp]>([
    ['another magic', put(0x20202020, 0), /starts with " {4}tok\\n" and must start with "coattok\\n"/],
    ['another version', put(2, 8), /has version 2 and must have 1/],
    ['an unknown width', put(3, 12), /has width 3 and must have 2 or 4/],
    ['uint16 ids said to be uint32', put(4, 12), /has 72 bytes and must have 112: 32 and 20 ids of 4/],
    ['no vocabulary', put(0, 16), /has vocabulary 0 and must have one in \[1, 65536\] for width 2/],
    ['a vocabulary too large for its width', put(65537, 16), /has vocabulary 65537 and must have one in \[1, 65536\]/],
    ['half a file', damage((bytes) => bytes.subarray(0, 52)), /has 52 bytes and must have 72/],
    ['an odd byte more', damage((bytes) => Buffer.concat([bytes, Buffer.alloc(1)])), /has 73 bytes and must have 72/],
    [
      'half a header',
      damage((bytes) => bytes.subarray(0, 31)),
      /has 31 bytes and must have at least the 32 of its header/,
    ],
    ['no file', rm, /cannot be opened: ENOENT/],
  ])('refuses %s', async (name, spoil, message) => {
    const file = await counting(`${name}.bin`, 20, 0, 256)
    await spoil(file)
    await expect(TokenDataset.open(file, { sequence: 4 })).rejects.toThrow(message)
    await expect(TokenDataset.open(file, { sequence: 4 })).rejects.toThrow(file)
  })

  it('refuses options, states and uses by name', async () => {
    const file = await counting('options.bin', 100, 0, 256)
    const other = await counting('other.bin', 100, 0, 300)
    const opened = (options: object, files: string | string[] = file) =>
      TokenDataset.open(files, { sequence: 4, ...options })
    await expect(opened({ sequence: 0 })).rejects.toThrow('sequence is 0 and must be an integer of at least 1')
    await expect(opened({ seed: 0.5 })).rejects.toThrow('seed is 0.5 and must be an integer of at least 0')
    await expect(opened({ heldOut: 1 })).rejects.toThrow('heldOut is 1 and must be at least 0 and below 1')
    await expect(opened({ sequence: 99 })).rejects.toThrow('the training part of 100 tokens has no sequence')
    await expect(opened({ heldOut: 0.04 })).rejects.toThrow('the held-out part of 100 tokens has no sequence')
    await expect(opened({}, [])).rejects.toThrow('file is an empty list')
    await expect(opened({}, [file, other])).rejects.toThrow(`${other} has vocabulary 300 and must have 256`)
    await expect(writeTokens(file, [-1], { vocabulary: 8 })).rejects.toThrow('ids[0] is -1 and must be an integer')
    await expect(writeTokens(file, [7, 8], { vocabulary: 8 })).rejects.toThrow('ids[1] is 8 and must be an integer')
    await expect(writeTokens(file, [0.5], { vocabulary: 8 })).rejects.toThrow('ids[0] is 0.5 and must be an integer')
    await expect(writeTokens(file, [0], { vocabulary: 2 ** 32 })).rejects.toThrow('must be at most 2^31')
    const data = await opened({ heldOut: 0 })
    expect(() => data.restore({ ...data.state(), seed: 9 })).toThrow('seed is 9 in the state and 0 here')
    expect(() => data.restore({ ...data.state(), sequences: 9 })).toThrow('sequences is 9 in the state and 24 here')
    expect(() => data.restore({ ...data.state(), position: -1 })).toThrow('state.position is -1 and must be')
    expect(() => data.batch(0, 0)).toThrow('size is 0 and must be an integer of at least 1')
    expect(() => data.validation(1, 1)).toThrow('nothing is held out to validate with')
    data.dispose()
    data.dispose()
    expect(() => data.batch(0, 1)).toThrow(`${file} is closed`)
  })
})

describe('JSON lines', () => {
  // Ids of bytes, and a start and an end of documents.
  const tokenizer: Tokenizer = {
    size: 258,
    special: { bos: 256, eos: 257 },
    encode: (text, { special = true } = {}) =>
      Int32Array.of(...(special ? [256] : []), ...new ByteTokenizer().encode(text)),
    decode: (ids) => new ByteTokenizer().decode(ids),
  }
  const marks = (role: string) => ({ open: role === 'user' ? '?' : '!', close: '.' })
  const say = (role: string, content: string) => ({ role, content })
  async function lines(name: string, ...content: unknown[]): Promise<string> {
    const file = join(folder, `${name}.jsonl`)
    await writeFile(file, content.map((line) => (typeof line === 'string' ? line : JSON.stringify(line))).join('\n'))
    return file
  }
  const bytes = (text: string) => [...Buffer.from(text)]

  it('counts the loss of the assistant alone, and never predicts the start of a document', async () => {
    const file = await lines(
      'chat',
      { messages: [say('user', 'ab'), say('assistant', 'c'), say('user', 'd'), say('assistant', 'ef')], id: 1 },
      { text: 'gh' },
    )
    const data = await JsonlDataset.open(file, { sequence: 10, heldOut: 0, tokenizer, marks, shuffle: false })
    expect(data.sequences).toBe(2)
    const { ids, targets } = data.batch(0, 2)
    const chat = [256, ...bytes('?ab.!c.?d.!ef.'), 257]
    expect([...ids]).toEqual([...chat, 256, ...bytes('gh'), 257])
    const no = -100
    const learned = [no, no, no, no, no, ...bytes('c.'), no, no, no, no, ...bytes('ef.'), 257, no]
    expect([...targets]).toEqual([...learned, ...bytes('gh'), 257, no])
  })

  it('says where documents begin when asked: they, and what fills up the end, see nothing of each other', async () => {
    const file = await lines('begins', { text: 'abcd' }, { text: 'e' }, { text: 'fg' })
    const data = await JsonlDataset.open(file, { sequence: 6, heldOut: 0, shuffle: false, tokenizer, documents: true })
    const { ids, starts } = data.batch(0, 3)
    const tokens = [256, ...bytes('abcd'), 257, 256, ...bytes('e'), 257, 256, ...bytes('fg'), 257]
    expect([...ids]).toEqual([...tokens, ...new Array(5).fill(0)])
    expect([...(starts as Int32Array)]).toEqual([0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 0, 1, 1, 1, 1, 1])
    const joined = await JsonlDataset.open(file, { sequence: 6, heldOut: 0, tokenizer })
    expect(joined.batch(0, 1).starts).toBeUndefined()
  })

  it('learns nothing of what a user says last', async () => {
    const file = await lines('last', { messages: [say('assistant', 'a'), say('user', 'b')] })
    const documents = []
    for await (const document of readJsonl(file, { tokenizer, marks })) documents.push(document)
    expect(documents).toEqual([
      { ids: Int32Array.of(256, ...bytes('!a.?b.'), 257), learned: Uint8Array.of(0, 0, 1, 1, 0, 0, 0, 0) },
    ])
  })

  it('fills the last sequence up without loss, and marks turns as ChatML unless told otherwise', async () => {
    const file = await lines('chatml', { messages: [say('user', 'é'), say('assistant', 'ok')] })
    const data = await JsonlDataset.open(file, { sequence: 100, heldOut: 0 })
    const { ids, targets } = data.batch(0, 1)
    const said = '<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n'
    const length = Buffer.byteLength(said)
    expect(data.tokenizer.decode(ids.subarray(0, length))).toBe(said)
    expect([...ids.subarray(length)]).toEqual(new Array(100 - length).fill(0))
    expect(Buffer.from(targets.filter((target) => target !== -100)).toString()).toBe('ok<|im_end|>\n')
    expect(targets.length).toBe(100)
  })

  it('D5: passes over blank lines and empty texts, and keeps U+2028 within its line', async () => {
    const text = 'a\u2028b'
    const file = await lines('blank', '', { text: '' }, `{"text":"${text}"}\r`, ' ', '')
    const data = await JsonlDataset.open(file, { sequence: 5, heldOut: 0 })
    expect(data.documents).toEqual({ train: 1, heldOut: 0 })
    expect(data.tokenizer.decode(data.batch(0, 1).ids)).toBe(text)
    const empty = await lines('empty', { text: '' }, { text: '' })
    await expect(JsonlDataset.open(empty, { sequence: 5 })).rejects.toThrow(`${empty} hold no document`)
  })

  it('holds out whole documents, and resumes as token files do', async () => {
    const file = await lines(
      'many',
      ...Array.from({ length: 40 }, (_, i) => ({ text: `<${i}>`.padEnd(5 + (i % 7), '.') })),
    )
    const options = { sequence: 8, heldOut: 0.1, seed: 3 }
    const data = await JsonlDataset.open(file, options)
    expect(data.documents).toEqual({ train: 36, heldOut: 4 })
    const decode = (ids: Int32Array) => data.tokenizer.decode(ids)
    const held = data
      .validation(100, 100)
      .map(({ ids }) => decode(ids))
      .join('')
    const train = decode((await JsonlDataset.open(file, { ...options, shuffle: false })).batch(0, data.sequences).ids)
    for (let i = 0; i < 40; i++) {
      expect(held.includes(`<${i}>`), `${i}`).toBe([9, 19, 29, 39].includes(i))
      expect(train.includes(`<${i}>`), `${i}`).toBe(![9, 19, 29, 39].includes(i))
    }
    data.batch(2, 5)
    const again = await JsonlDataset.open(file, options)
    again.restore(data.state())
    expect(again.next(7)).toEqual(data.next(7))
    expect(again.position).toBe(22)
    await expect(JsonlDataset.open(file, { ...options, heldOut: 0.02 })).rejects.toThrow(
      'heldOut is 0.02 and must give at least one of the 40 documents',
    )
  })

  it.each<[unknown, RegExp]>([
    ['{"text":', /is no JSON: /],
    ['[1]', /must be a JSON object/],
    [{ prompt: 'a' }, /must have either 'text' or 'messages'/],
    [{ text: 'a', messages: [] }, /must have either 'text' or 'messages'/],
    [{ text: 5 }, /text is 5 and must be a string/],
    [{ messages: [] }, /messages is \[\] and must be a list of at least one message/],
    [{ messages: [null] }, /messages\[0\] is null and must be an object/],
    [{ messages: [say('Assistant', 'a')] }, /messages\[0\]\.role is "Assistant" and must be one of system, /],
    [{ messages: [{ role: 'user' }] }, /messages\[0\]\.content is missing and must be a string/],
    [{ messages: [say('user', 'a')] }, /messages hold none of role 'assistant'/],
  ])('refuses %j by line', async (line, message) => {
    const file = await lines('bad', { text: 'good' }, '', line)
    const opened = JsonlDataset.open(file, { sequence: 4 })
    await expect(opened).rejects.toThrow(message)
    await expect(opened).rejects.toThrow(`${file}, line 3: `)
  })

  it('reads lines longer than a read of the disk', async () => {
    const texts = [70_000, 3, 200_000].map((length, i) => String(i).repeat(length))
    const file = await lines('long', ...texts.map((text) => ({ text })))
    const found: string[] = []
    for await (const { ids } of readJsonl(file)) found.push(new ByteTokenizer().decode(ids))
    expect(found.map((text, i) => text === texts[i])).toEqual([true, true, true])
  })

  it('refuses a file that is not there and what is no UTF-8', async () => {
    const absent = join(folder, 'absent.jsonl')
    await expect(JsonlDataset.open(absent, { sequence: 4 })).rejects.toThrow(`${absent} cannot be opened: ENOENT`)
    const file = join(folder, 'latin.jsonl')
    await writeFile(file, Buffer.from('{"text":"ok"}\n{"text":"\xe9"}\n', 'latin1'))
    await expect(JsonlDataset.open(file, { sequence: 4 })).rejects.toThrow(`${file}, line 2: is no UTF-8`)
  })

  it('becomes a token file', async () => {
    const file = await lines('stream', { text: 'ab' }, { text: 'c' })
    async function* ids() {
      for await (const document of readJsonl(file, { tokenizer })) yield document.ids
    }
    expect(await writeTokens(join(folder, 'stream.bin'), ids(), { vocabulary: tokenizer.size })).toBe(7)
    using data = await TokenDataset.open(join(folder, 'stream.bin'), { sequence: 6, heldOut: 0 })
    expect([...data.next(1).ids]).toEqual([256, 97, 98, 257, 256, 99])
  })
})

it('a trainer takes any of them, and goes on where a state says', async () => {
  const model = new LlamaForCausalLM(
    {
      hidden_size: 32,
      intermediate_size: 64,
      num_hidden_layers: 1,
      num_attention_heads: 2,
      num_key_value_heads: 2,
      vocab_size: 256,
      max_position_embeddings: 32,
      tie_word_embeddings: true,
    },
    { recipe: 'fp32', seed: 1 },
  )
  const file = join(folder, 'train.bin')
  await writeTokens(file, new ByteTokenizer().encode(text), { vocabulary: 256 })
  const chats = join(folder, 'train.jsonl')
  const message = (role: string, i: number) => ({ role, content: `line ${i}` })
  await writeFile(
    chats,
    Array.from({ length: 30 }, (_, i) =>
      JSON.stringify({ messages: [message('user', i), message('assistant', i + 1)] }),
    ).join('\n'),
  )
  const kinds = [
    () => TokenDataset.open(file, { sequence: 16, seed: 1 }),
    () => JsonlDataset.open(chats, { sequence: 16, seed: 1 }),
  ]
  for (const kind of kinds) {
    const data = await kind()
    const trainer = new Trainer(model, { data, batch: 3, accumulate: 2, steps: 2 })
    for await (const { loss, tokens } of trainer.run()) {
      expect(loss).toBeGreaterThan(0)
      expect(tokens).toBeGreaterThan(0)
    }
    expect(await trainer.validate(4)).toBeGreaterThan(0)
    const state = data.state()
    expect(state.position).toBe(12)
    trainer.dispose()
    const again = await kind()
    again.restore(state)
    const other = new Trainer(model, { data: again, batch: 3, accumulate: 2, steps: 1 })
    other.batches = again.position / 3
    const asked = vi.spyOn(again, 'batch')
    await other.step()
    expect(asked.mock.results.map(({ value }) => value)).toEqual([data.next(3), data.next(3)])
    other.dispose()
  }
})
