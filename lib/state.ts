// Parameters by the names that checkpoints have: out to plain values, and back in, all of them or those like a pattern.
import type { Module, Param } from './modules.ts'
import { CoatError } from './native.ts'

/** Values of a named tensor, as a `StoredTensor` has them. */
export interface Values {
  readonly shape: readonly number[]
  values(): Promise<Float32Array>
}

/** Named tensors: what `stateDict` returns, or the tensors of `readSafetensors`. */
export type State = ReadonlyMap<string, Values>

interface NamedPart {
  name: string
  param: Param
  /** Rows [from, to) of the parameter. */
  rows: readonly [number, number]
  shape: readonly number[]
}

/** The parts of all parameters under the names of checkpoints; fused parameters have several. */
export function partsOf(module: Module): NamedPart[] {
  return module.parameters().flatMap((param) =>
    param.parts.map(({ name, rows }) => ({
      name,
      param,
      rows,
      shape: [rows[1] - rows[0], ...param.tensor.shape.slice(1)],
    })),
  )
}

/** Copies of the parameters whose names are like the pattern, `*` standing for anything, as f32. */
export async function stateDict(module: Module, pattern = '*'): Promise<Map<string, Values>> {
  const state = new Map<string, Values>()
  for (const { name, param, rows, shape } of picked('stateDict', module, pattern)) {
    const width = param.tensor.numel / (param.tensor.shape[0] as number)
    const copy = ((await param.tensor.read()) as Float32Array).slice(rows[0] * width, rows[1] * width)
    state.set(name, { shape, values: async () => copy })
  }
  return state
}

/**
 * Writes the tensors of `state` into the parameters whose names are like the pattern, rounded to their formats. All of
 * these must be there in their shapes, else nothing changes; other tensors of `state` are left alone. Load before an
 * optimizer is made: it may keep a copy of its own. Resolves to the names.
 */
export async function load(module: Module, state: State, pattern = '*'): Promise<string[]> {
  const parts = picked('load', module, pattern)
  const refuse = (text: string, argument: string): never => {
    throw new CoatError(`load: ${text}`, 'state', 'load', argument)
  }
  const missing = parts.filter(({ name }) => !state.has(name)).map(({ name }) => name)
  if (missing.length > 0) refuse(`the state has no tensor '${missing.join("', '")}'`, missing[0] as string)
  for (const { name, shape } of parts) {
    const found = state.get(name)?.shape
    if (`${found}` !== `${shape}`) refuse(`'${name}' is [${found?.join(', ')}] and must be [${shape.join(', ')}]`, name)
  }
  for (const param of new Set(parts.map((part) => part.param))) {
    const own = parts.filter((part) => part.param === param)
    const { tensor } = param
    const whole = own.length === param.parts.length
    const values = whole ? new Float32Array(tensor.numel) : ((await tensor.read()) as Float32Array)
    const width = values.length / (tensor.shape[0] as number)
    for (const { name, rows } of own) values.set((await state.get(name)?.values()) as Float32Array, rows[0] * width)
    param.write(values)
  }
  return parts.map(({ name }) => name)
}

/**
 * Freezes the parameters whose names are like the pattern, before a trainer is made: they get neither gradient nor optimizer
 * state, and stay as they are. Parts of a fused parameter, such as q alone of q, k and v, are refused. Returns the names.
 */
export function freeze(module: Module, pattern: string): string[] {
  const parts = picked('freeze', module, pattern)
  for (const param of new Set(parts.map((part) => part.param)))
    if (param.named(pattern) === 'partly')
      throw new CoatError(
        `freeze: pattern is '${pattern}', which names a part of '${param.name}' alone; ${param.parts.map(({ name }) => name).join(', ')} are one parameter`,
        'value',
        'freeze',
        'pattern',
      )
  for (const { param } of parts) param.frozen = true
  return parts.map(({ name }) => name)
}

function picked(op: string, module: Module, pattern: string): NamedPart[] {
  const parts = partsOf(module)
  const wanted = new Set(module.parameters(pattern).flatMap((param) => param.partsLike(pattern)))
  const found = parts.filter(({ name }) => wanted.has(name))
  if (found.length === 0)
    throw new CoatError(
      `${op}: pattern is '${pattern}', which no parameter of the module is named like`,
      'value',
      op,
      'pattern',
    )
  return found
}
