// What a chip can do at most, to compare with.
export interface Ceilings {
  /** GB/s read and written by a plain copy. */
  copy: number
  /** TFLOP/s of the tensor cores. */
  bf16: number
  fp8: number
}

/** Products from data sheets (without sparsity), copies as measured. */
const chips: Readonly<Record<string, Ceilings>> = {
  'NVIDIA H200': { copy: 4230, bf16: 989, fp8: 1979 },
}

/** Those of the chip whose name begins so; null: unknown. */
export function ceilingsOf(gpu: string | null): Ceilings | null {
  return Object.entries(chips).find(([name]) => gpu?.startsWith(name))?.[1] ?? null
}
