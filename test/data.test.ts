// Text data sets and the byte tokenizer.
import { expect, it } from 'vitest'
import { ByteTokenizer, TextDataset } from '../lib/index.ts'

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
