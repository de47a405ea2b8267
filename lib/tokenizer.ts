// Tokenizers: text to token ids and back.

export interface Tokenizer {
  /** Number of ids. */
  readonly size: number
  encode(text: string): Uint8Array | Int32Array
  decode(ids: ArrayLike<number>): string
}

/** One id a byte of UTF-8; what is not UTF-8 decodes to U+FFFD. */
export class ByteTokenizer implements Tokenizer {
  readonly size = 256
  encode(text: string): Uint8Array {
    return new TextEncoder().encode(text)
  }
  decode(ids: ArrayLike<number>): string {
    return new TextDecoder().decode(Uint8Array.from(ids))
  }
}
