// Tensors: a format, a shape and one native allocation; conversion on demand, and who holds what for how long.
import type { AnyFormat, Handle } from './native.gen.ts'
import {
  type Bytes,
  CoatError,
  type DeviceKind,
  type MemoryUsage,
  native,
  type Purpose,
  type TensorInfo,
} from './native.ts'

/** A format word: `dtype[/t | /r | /gN | /bN | /xN]`, `p2` for scales that are powers of two; `bf16x2` is a value and its remainder (csrc/tensor.h). */
export type Format = AnyFormat
/** Formats of numbers, as against ids. */
export type FloatFormat = Exclude<Format, 'i32'>
/** Whether a format stores scales beside its codes. */
export function isScaled(format: Format): boolean {
  return format.includes('/')
}
export type Shape = readonly number[]

/** Where tensors live. */
export interface Device extends Disposable {
  readonly kind: DeviceKind
  /** What was found, as `NVIDIA H200, 139 GiB, …`. */
  readonly description: string
  /** Resolves when everything queued so far is done; rejects with what the device reported. */
  sync(): Promise<void>
  dispose(): void
}

/** What names a device. */
export type DeviceName = 'cpu' | 'cuda' | 'cuda:0'

class OpenDevice implements Device {
  readonly kind: DeviceKind
  readonly description: string
  constructor(kind: DeviceKind) {
    this.kind = kind
    this.description = native.open(kind)
  }
  async sync(): Promise<void> {
    await native.sync(this.kind)
  }
  dispose(): void {}
  [Symbol.dispose](): void {
    this.dispose()
  }
}

const opened = new Map<DeviceKind, Device>()

function openOnce(kind: DeviceKind): Device {
  const known = opened.get(kind) ?? new OpenDevice(kind)
  opened.set(kind, known)
  return known
}

/** `device('cpu')`, `device('cuda')`, or `device()` for the best there is: CUDA where it can be used, else the CPU. */
export function device(name?: string | Device): Device {
  if (name === undefined) {
    try {
      return openOnce('cuda')
    } catch (error) {
      if (error instanceof CoatError && error.code === 'no_cuda') return openOnce('cpu')
      throw error
    }
  }
  if (typeof name !== 'string') return name
  if (name === 'cpu') return openOnce('cpu')
  if (name === 'cuda' || name === 'cuda:0') return openOnce('cuda')
  throw new CoatError(`device is '${name}' and must be 'cpu', 'cuda' or 'cuda:0'`, 'device', 'device', 'name')
}

/** Bytes by purpose, live and at their peak, on this thread. */
export function memory(): MemoryUsage {
  return native.memory()
}

/** Starts the peaks of `memory()` again from what is live now. */
export function resetPeak(): void {
  native.resetPeak()
}

/**
 * The most bytes that the tensors of this thread may hold together; null: no limit. What would go beyond fails with a
 * CoatError of code `out_of_memory`, as on a device of that size. Scratch inside a kernel does not count.
 */
export function limitMemory(bytes: number | null): void {
  native.memoryLimit(bytes ?? 0)
}

export type { Bytes, MemoryUsage }

/** Receives the gradients of a tensor that outlives the tape: a parameter. */
export interface GradientSink {
  readonly name?: string
  accumulate(gradient: Tensor): void
  /** Backward has no more gradients for it, and reads its tensor no more. */
  complete?(): void
  /** A gradient that it has and nobody else holds: an op may add to it in place instead of making another. */
  readonly held?: Tensor | null
}

/** How backward makes a `/t` tensor again instead of keeping it: in one pass from `sources` and its scale, in the same bits. */
export interface Remake {
  readonly sources: readonly Tensor[]
  /** f32 [1] */
  readonly scale: Tensor
  make(sources: readonly Tensor[]): Handle
  /** Its transpose, in one pass as well, in the codes of what `make` gives; null: it is transposed after it is made. */
  across: ((sources: readonly Tensor[]) => Handle) | null
}

/** The scale of the `/t` tensor that an RMSNorm with this weight and eps will make of a tensor: its producer measured it. */
export interface Foretold {
  w: Tensor
  /** Of w, when it was measured. */
  version: number
  eps: number
  /** f32 [1] */
  scale: Tensor
}

interface Twin {
  tensor: Tensor
  version: number
}

let nextId = 1
const scopes: Set<Tensor>[] = []

export interface TensorOptions {
  format?: Format
  /** Default: the CPU. */
  device?: Device | DeviceName
  purpose?: Purpose
}

/** A tensor of some format and shape. Immutable, except for what optimizer and accumulation change in place. */
export class Tensor implements Disposable {
  readonly handle: Handle
  /** Tells tensors apart even after they are freed. */
  readonly id = nextId++
  /** Where gradients of this tensor go; null for intermediate results. */
  sink: GradientSink | null = null
  requiresGrad = false
  /** Lives as long as its module or optimizer: the tape reads it without holding it. */
  persistent = false
  /** Holds its scale. */
  remake: Remake | null = null
  /** Holds its scale. */
  foretold: Foretold | null = null
  /** The scaled format in which the op that made this tensor reads its gradient, or writes another one after it. */
  gradientFormat: Format | null = null
  /** Keeps the scale of `/t` twins until the tensor changes: for weights, whose twins are made many times a step. */
  keepsScale = false
  /** Keeps all twins until the tensor changes or this is turned off. */
  keepsTwins = false

  #scope: Set<Tensor> | null = null
  #user = false
  #source: Tensor | null = null
  #retained = 0
  #freed = false
  #twins = new Map<string, Twin>()
  #scales = new Map<Format, Twin>()
  #amax: Twin | null = null

  #info: TensorInfo | null = null
  #format: Format | null

  private constructor(handle: Handle, format: Format | null) {
    this.handle = handle
    this.#format = format
  }

  // Asked for when it is first wanted, since most intermediate results go from one op to the next without it.
  get #known(): TensorInfo {
    this.#info ??= native.info(this.handle)
    return this.#info
  }
  get format(): Format {
    this.#format ??= this.#known.format
    return this.#format
  }
  get shape(): Shape {
    return this.#known.shape
  }
  get bytes(): number {
    return this.#known.bytes
  }
  get device(): DeviceKind {
    return this.#known.device
  }

  /**
   * The tensor behind a handle that an op returned: held by the innermost scope, or by the caller outside of scopes. Its
   * format may be said by who asked for it.
   */
  static own(handle: Handle, format: Format | null = null): Tensor {
    const tensor = new Tensor(handle, format)
    tensor.#hand(scopes.at(-1))
    return tensor
  }

  /** A tensor with these values, row-major; rounded to `format` (default `f32`, `i32` for integers). */
  static from(
    values: Float32Array | Int32Array | readonly number[],
    shape: Shape,
    options: TensorOptions = {},
  ): Tensor {
    const count = shape.reduce((product, size) => product * size, 1)
    if (values.length !== count)
      throw new CoatError(
        `values has ${values.length} elements and shape [${shape.join(', ')}] has ${count}`,
        'shape',
        'Tensor.from',
        'values',
      )
    const integers = values instanceof Int32Array
    const format = options.format ?? (integers ? 'i32' : 'f32')
    if (integers !== (format === 'i32'))
      throw new CoatError(
        `format is '${format}' and must be ${integers ? "'i32' for an Int32Array" : 'a floating-point format, or the values an Int32Array'}`,
        'format',
        'Tensor.from',
        'format',
      )
    return Tensor.#made(shape, format, options, (plain) =>
      native.write(plain, values instanceof Float32Array || integers ? values : Float32Array.from(values)),
    )
  }

  static zeros(shape: Shape, options: TensorOptions = {}): Tensor {
    return Tensor.full(shape, 0, options)
  }

  /** A tensor with this value everywhere. */
  static full(shape: Shape, value: number, options: TensorOptions = {}): Tensor {
    return Tensor.#made(shape, options.format ?? 'f32', options, (plain) => native.fill(plain, value))
  }

  static #made(shape: Shape, format: Format, options: TensorOptions, fill: (plain: Handle) => void): Tensor {
    const { purpose = 'temp' } = options
    const whole = format === 'i32' || format === 'f32'
    const plain = native.make(whole ? format : 'f32', shape, device(options.device ?? 'cpu').kind, purpose)
    let made = plain
    try {
      fill(plain)
      if (!whole) made = native.convert(plain, null, format)
      native.retag(made, purpose)
    } catch (error) {
      native.free(plain)
      throw error
    }
    if (!whole) native.free(plain)
    return Tensor.own(made)
  }

  static #retain(handle: Handle): Tensor {
    return new Tensor(handle, 'f32').retain()
  }

  get numel(): number {
    return this.shape.reduce((product, size) => product * size, 1)
  }
  get disposed(): boolean {
    return this.#freed
  }
  /** Whether one holder alone has this tensor, so that it may be changed in place. */
  get exclusive(): boolean {
    return this.#count() === 1
  }

  /**
   * This tensor in another format, made once and shared by all who ask; it dies with this tensor, or when this tensor
   * changes. `transposed`: [M, N] becomes [N, M]. A `/t` twin and its transpose share one scale, hence their codes; it is
   * measured, unless the tensor carries its largest magnitude.
   */
  as(format: FloatFormat, options: { transposed?: boolean } = {}): Tensor {
    const transposed = options.transposed ?? false
    if (format === this.format && !transposed) return this
    const version = native.version(this.handle)
    const key = transposed ? `${format} transposed` : format
    const known = this.#twins.get(key)
    if (known && known.version === version) return known.tensor
    if (known) this.#dropTwin(key)
    const scale = this.#scaleOf(format, version)
    let handle: Handle
    if (!transposed) {
      handle = native.convert(this.handle, scale, format)
    } else {
      const source = this.#across(format, version)
      handle = native.convert_transposed(source.handle, source === this ? scale : null, transposable(format))
    }
    const twin = this.adoptTwin(handle, format, key, version)
    if (this.keepsScale && scale === null && format.endsWith('/t'))
      this.#scales.set(format, { tensor: Tensor.#retain(native.scale_of(twin.handle)), version })
    return twin
  }

  /** Makes the twin in this format and its transpose at once, where one pass makes both: soon `as` is asked for each. */
  makeBoth(format: FloatFormat): void {
    const version = native.version(this.handle)
    if ((this.format !== 'f32' && this.format !== 'bf16') || (format !== 'e4m3/t' && format !== 'e5m2/t')) return
    const keys = [format, `${format} transposed`] as const
    if (keys.some((key) => this.#twins.get(key)?.version === version)) return
    for (const key of keys) this.#dropTwin(key)
    const made = native.convert_both(this.handle, this.#scaleOf(format, version), format, format)
    keys.forEach((key, i) => {
      this.adoptTwin(made[i] as Handle, format, key, version)
    })
  }

  // What a transposed twin is made of: a `/t` one of its straight twin where that is there, runs of exact values.
  #across(format: FloatFormat, version: number): Tensor {
    const straight = format.endsWith('/t') ? this.#twins.get(format) : undefined
    if (straight?.version === version) return straight.tensor
    if (transposables.has(this.format)) return this
    return this.as(format.endsWith('/t') ? format : 'f32')
  }

  /** Takes a twin that a producer wrote besides this tensor. */
  adoptTwin(handle: Handle, format: Format, key: string = format, version = native.version(this.handle)): Tensor {
    const tensor = new Tensor(handle, format)
    tensor.#source = this
    this.#twins.set(key, { tensor, version })
    return tensor
  }

  /** Takes the largest |x| of this tensor, f32 [1], from a producer that knows it: the scale of a `/t` twin. */
  adoptAmax(handle: Handle): void {
    this.#amax?.tensor.release()
    this.#amax = { tensor: Tensor.#retain(handle), version: native.version(this.handle) }
  }

  /** The largest |x|, f32 [1], that it carries, unless it has changed since. */
  get knownAmax(): Tensor | null {
    const known = this.#amax
    return known && known.version === native.version(this.handle) ? known.tensor : null
  }

  /** The largest |x|, f32 [1]: that which it carries, or measured now and carried from then on. */
  amax(): Tensor {
    if (!this.knownAmax) this.adoptAmax(native.amax(this.handle as Parameters<typeof native.amax>[0]))
    return (this.#amax as Twin).tensor
  }

  /** Says that what changed this tensor in place brought the largest |x| that it carried up to date. */
  renewAmax(): void {
    if (this.#amax) this.#amax.version = native.version(this.handle)
  }

  /** Whether FP8 twins by one scale were asked for since it last changed, so that its largest |x| is worth knowing. */
  get isOperand(): boolean {
    const version = native.version(this.handle)
    return [...this.#scales].some(([format, kept]) => measurable.has(format) && kept.version === version)
  }

  /** Gives `/t` twins of this format that are made from now on this scale, f32 [1]. */
  adoptScale(format: Format, scale: Tensor): void {
    this.#scales.get(format)?.tensor.release()
    this.#scales.set(format, { tensor: scale.retain(), version: native.version(this.handle) })
  }

  /** The same with the power of two that is not below the scale that they would measure. */
  adoptPowerOfTwo(format: 'e4m3/t' | 'e5m2/t'): void {
    const scale = Tensor.own(native.scale_from_amax(this.amax().handle, format, 'pow2'))
    this.adoptScale(format, scale)
    scale.dispose()
  }

  /** The tensor of which this one is a twin. */
  get source(): Tensor | null {
    return this.#source
  }

  /** The twins that it has now. */
  twins(): Tensor[] {
    return [...this.#twins.values()].map(({ tensor }) => tensor)
  }

  /** Frees the twins that nobody else holds, or the straight one of a format, unless it keeps them; kept scales stay. */
  dropTwins(only?: FloatFormat): void {
    if (this.keepsTwins) return
    for (const key of [...this.#twins.keys()]) if (only === undefined || key === only) this.#dropTwin(key)
  }

  /** Frees all that was made of its values and nobody else holds: twins, scales, the largest magnitude. */
  forget(): void {
    for (const key of [...this.#twins.keys()]) this.#dropTwin(key)
    for (const { tensor } of this.#scales.values()) tensor.release()
    this.#scales.clear()
    this.#amax?.tensor.release()
    this.#amax = null
  }

  /** The values, decoded: Int32Array for `i32`, else Float32Array. */
  async read(): Promise<Float32Array | Int32Array> {
    if (this.format === 'i32') return new Int32Array(await native.read(this.handle))
    if (this.format === 'f32') return new Float32Array(await native.read(this.handle))
    const plain = native.convert(this.handle, null, 'f32')
    try {
      return new Float32Array(await native.read(plain))
    } finally {
      native.free(plain)
    }
  }

  /** The bytes as stored: codes, padding to 16, scales. */
  async readBytes(): Promise<Uint8Array> {
    return new Uint8Array(await native.read(this.handle))
  }

  /** The value of a tensor of one element. */
  async item(): Promise<number> {
    if (this.numel !== 1)
      throw new CoatError(
        `item() needs a tensor of one element, received ${this.format}[${this.shape.join(', ')}]`,
        'shape',
        'item',
        'tensor',
      )
    return (await this.read())[0] as number
  }

  /** One more holder, who must `release()`. */
  retain(): this {
    this.#retained += 1
    return this
  }
  release(): void {
    this.#retained -= 1
    this.#settle()
  }

  /** Takes the tensor out of its scope: it lives until `dispose()`. */
  keep(): this {
    this.#scope?.delete(this)
    this.#scope = null
    this.#user = true
    return this
  }

  /** Gives up the caller's hold; the memory is freed when nobody else (tape, parameter, source) holds it. */
  dispose(): void {
    if (this.#freed) return
    if (this.#scope) {
      this.#scope.delete(this)
      this.#scope = null
    } else if (this.#user) {
      this.#user = false
    } else if (this.#source) {
      this.#source.#forget(this)
    }
    this.#settle()
  }
  [Symbol.dispose](): void {
    this.dispose()
  }

  /** Runs f and frees every tensor made inside it, except those that it returns (alone, in arrays or in objects). */
  static scope<T>(f: () => T): T {
    const mine = new Set<Tensor>()
    scopes.push(mine)
    let result: T
    try {
      result = f()
      if (result instanceof Promise)
        throw new CoatError('scope(f): f returned a promise and must be synchronous', 'scope', 'scope', 'f')
    } catch (error) {
      scopes.pop()
      for (const tensor of [...mine]) tensor.dispose()
      throw error
    }
    scopes.pop()
    for (const tensor of tensorsIn(result))
      if (tensor.#scope === mine || (tensor.#source && !tensor.#scope && !tensor.#user)) {
        mine.delete(tensor)
        tensor.#hand(scopes.at(-1))
      }
    for (const tensor of [...mine]) tensor.dispose()
    return result
  }

  #hand(to: Set<Tensor> | undefined): void {
    this.#scope = to ?? null
    this.#user = to === undefined
    to?.add(this)
  }
  #count(): number {
    return this.#retained + (this.#scope ? 1 : 0) + (this.#user ? 1 : 0) + (this.#source ? 1 : 0)
  }
  #settle(): void {
    if (this.#freed || this.#count() > 0) return
    this.#freed = true
    this.forget()
    this.remake?.scale.release()
    this.foretold?.scale.release()
    this.remake = null
    this.foretold = null
    native.free(this.handle)
  }
  #dropTwin(key: string): void {
    const twin = this.#twins.get(key)
    if (!twin) return
    this.#twins.delete(key)
    twin.tensor.#source = null
    twin.tensor.#settle()
  }
  #forget(twin: Tensor): void {
    for (const [key, entry] of this.#twins) if (entry.tensor === twin) this.#dropTwin(key)
  }
  #scaleOf(format: Format, version: number): Handle | null {
    const kept = this.#scales.get(format)
    if (kept?.version === version) return kept.tensor.handle
    this.#scales.delete(format)
    kept?.tensor.release()
    if (this.#amax?.version !== version || !measurable.has(format)) return null
    const tensor = Tensor.#retain(native.scale_from_amax(this.#amax.tensor.handle, format as 'e4m3/t', 'exact'))
    this.#scales.set(format, { tensor, version })
    return tensor.handle
  }
}

export const scope = Tensor.scope

/** Formats whose scale follows from the largest |x|. */
const measurable: ReadonlySet<Format> = new Set(['e4m3/t', 'e5m2/t'])

/** Formats that have a transpose. */
export const transposables: ReadonlySet<Format> = new Set(
  native.table().find(({ name }) => name === 'convert_transposed')?.arguments[0]?.formats,
)
type Transposable = Parameters<typeof native.convert_transposed>[2]
function transposable(format: Format): Transposable {
  return format as Transposable // the native contract refuses what has no transpose, by name
}

/** x [M, N] as a new tensor [N, M] of its format. */
export function transposed(x: Tensor): Tensor {
  return Tensor.own(native.convert_transposed(x.handle, null, transposable(x.format)))
}

function* tensorsIn(value: unknown): Generator<Tensor> {
  if (value instanceof Tensor) yield value
  else if (Array.isArray(value)) for (const item of value) yield* tensorsIn(item)
  else if (value && typeof value === 'object' && Object.getPrototypeOf(value) === Object.prototype)
    for (const item of Object.values(value)) yield* tensorsIn(item)
}
