// A thread of `coat-train prepare`: texts in, their token ids out.
import { parentPort, workerData } from 'node:worker_threads'
import { ByteTokenizer, encodeDocuments, HuggingFaceTokenizer } from '../lib/index.ts'

const { tokenizer: path } = workerData as { tokenizer: string | null }
const tokenizer = path === null ? new ByteTokenizer() : await HuggingFaceTokenizer.open(path)

parentPort?.on('message', (texts: string[]) => {
  const documents = [...encodeDocuments(texts, tokenizer)]
  const ids = new Int32Array(documents.reduce((sum, { length }) => sum + length, 0))
  let at = 0
  for (const document of documents) {
    ids.set(document, at)
    at += document.length
  }
  parentPort?.postMessage(ids, [ids.buffer])
})
