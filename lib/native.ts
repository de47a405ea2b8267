// Loads the native addon and says how to mend a failure. The only file that sees a .node file.
import { existsSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import type { AnyFormat, Handle, NativeOps } from './native.gen.ts'

/** What goes wrong in coat-fp8, native or not: `code` is stable, `op` and `argument` name the place, `message` gives value and rule. */
export class CoatError extends Error {
  override readonly name = 'CoatError'
  readonly code: string
  readonly op: string
  readonly argument: string
  constructor(message: string, code: string, op = '', argument = '', options?: ErrorOptions) {
    super(message, options)
    this.code = code
    this.op = op
    this.argument = argument
  }
}

/** What an allocation is for; the pool counts bytes by it. */
export type Purpose = 'param' | 'grad' | 'state' | 'saved' | 'temp' | 'scratch'

export type DeviceKind = 'cpu' | 'cuda'

/** Bytes by purpose, and their sum. */
export type Bytes = Record<Purpose | 'total', number>

export interface MemoryUsage {
  /** Bytes held now. */
  live: Bytes
  /** Largest number of bytes held at once, purpose by purpose, since the start or `resetPeak()`. */
  peak: Bytes
  /** What was held when all was most: its parts are of one moment and add up. */
  atPeak: Bytes
  /** Tensors alive. */
  tensors: number
  /** Infinities that a quantizing store saturated, since the start. */
  infs: number
}

/** What the pool of the CUDA device holds and how much of it is in use, scratch of kernels included; peaks since `resetPeak()`. */
export interface PoolUsage {
  used: number
  usedPeak: number
  reserved: number
  reservedPeak: number
  /** Bytes of the device: free for anybody, and in all. */
  free: number
  total: number
}

export interface TensorInfo {
  format: AnyFormat
  shape: number[]
  device: DeviceKind
  bytes: number
}

export interface OpArgument {
  mode:
    | 'in'
    | 'opt_in'
    | 'inout'
    | 'out'
    | 'opt_out'
    | 'list_in'
    | 'list_inout'
    | 'opt_list_in'
    | 'opt_list_inout'
    | 'f32'
    | 'i64'
    | 'seed'
    | 'word'
    | 'opt_word'
  name: string
  formats: AnyFormat[]
  dims: string
  /** What a word may be. */
  words: string[]
}

/** One line of csrc/ops.def. */
export interface OpEntry {
  family: string
  name: string
  doc: string
  arguments: OpArgument[]
  /** Legal combinations of formats of some arguments; all hold. */
  only: { names: string[]; combinations: (AnyFormat | null)[][] }[]
}

/** The addon: the ops of the table and what holds their tensors. */
export interface Native extends NativeOps {
  make(format: AnyFormat, shape: readonly number[], device: DeviceKind, purpose: Purpose): Handle
  free(tensor: Handle): void
  /** Replaces the bytes of a tensor: codes, then scales. */
  write(tensor: Handle, bytes: NodeJS.TypedArray): void
  /** Sets every element of an f32 or i32 tensor. */
  fill(tensor: Handle, value: number): void
  read(tensor: Handle): Promise<ArrayBuffer>
  /** Says what the device is; throws `no_cuda` with what was found when it cannot be used. */
  open(device: DeviceKind): string
  sync(device: DeviceKind): Promise<unknown>
  /** A point in time of the profile, where COAT_PROFILE asks for one. */
  note(name: string, device: DeviceKind): void
  /** A point in time of the CUDA device; `elapsed` waits and gives the milliseconds between two. */
  mark(): number
  elapsed(from: number, to: number): number
  forgetMarks(): void
  /**
   * What is queued on the device from now to `endGraph` is recorded, not run; `reserve`: bytes that it may need at once.
   * `endGraph` gives the graph, or drops it unless it is to be kept; what it uses stays in memory while there are graphs.
   */
  beginGraph(device: DeviceKind, reserve: number): void
  endGraph(keep: boolean): number
  runGraph(graph: number): void
  freeGraph(graph: number): void
  /** Products on CUDA are from now on made by cuBLASLt, by that one of its suggestions, below 0 no longer; whether it is there. */
  baseline(suggestion: number): boolean
  info(tensor: Handle): TensorInfo
  retag(tensor: Handle, purpose: Purpose): void
  version(tensor: Handle): number
  memory(): MemoryUsage
  /** null before a tensor is on the CUDA device. */
  pool(): PoolUsage | null
  /** The most bytes that tensors may hold together, 0: no limit; sets it where a number is given. */
  memoryLimit(bytes?: number): number
  resetPeak(): void
  checkGuards(): void
  threads(count?: number): number
  table(): OpEntry[]
  describe(): string
  setErrorClass(error: typeof CoatError): void
}

function packageRoot(): string {
  for (let folder = dirname(fileURLToPath(import.meta.url)); ; folder = dirname(folder)) {
    const file = join(folder, 'package.json')
    if (existsSync(file) && JSON.parse(readFileSync(file, 'utf8')).name === 'coat-fp8') return folder
    if (dirname(folder) === folder) throw new CoatError('the package folder of coat-fp8 was not found', 'addon')
  }
}

function load(): Native {
  const require = createRequire(import.meta.url)
  const root = packageRoot()
  try {
    const addon = require('node-gyp-build')(root) as Native
    addon.setErrorClass(CoatError)
    return addon
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause)
    throw new CoatError(
      [
        `the native addon of coat-fp8 could not be loaded: ${reason}`,
        `Looked for build/Release/coat_fp8.node and prebuilds/${process.platform}-${process.arch}/ in ${root}.`,
        'Possible solutions:',
        '  - build it from source: npx coat-build (needs cmake and a C++20 compiler; nvcc for CUDA)',
        '  - npm 12 does not run install scripts of dependencies: npm rebuild coat-fp8, after approving it',
        '  - supported are Linux x64 with AVX2 and FMA, glibc 2.34 or later, Node 20.19 or later',
      ].join('\n'),
      'addon',
      '',
      '',
      { cause },
    )
  }
}

export const native: Native = load()
