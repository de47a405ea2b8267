// The rules of the table as calls meet them: what is refused, in which words, and that a refusal leaves nothing behind.
import { readFileSync } from 'node:fs'
import { describe, expect, it } from 'vitest'
import { CoatError, native } from '../lib/native.ts'
import { entryOf, own, present, tensor } from './harness.ts'

const f32 = (...shape: number[]) => tensor('f32', shape, new Float32Array(shape.reduce((a, b) => a * b, 1)).fill(1))
const bf16 = (...shape: number[]) => own(native.convert(f32(...shape), null, 'bf16'))
const ids = (...values: number[]) => tensor('i32', [values.length], values)

/** Calls f, which has to throw; expects the memory to be as before. */
function refusal(f: () => unknown): CoatError {
  const before = native.memory()
  try {
    f()
  } catch (error) {
    expect(error).toBeInstanceOf(CoatError)
    const { live, tensors } = native.memory()
    expect({ live, tensors }).toEqual({ live: before.live, tensors: before.tensors })
    return error as CoatError
  }
  throw new Error('nothing was refused')
}
// a wrong argument that TypeScript would refuse
const loose = native as unknown as Record<string, (...list: unknown[]) => unknown>

// the numbers of adamw
const ones = [1, 1, 1, 1, 1, 1, 1, 1, 1, 0] as const
const [parameters, , pairs] = entryOf('adamw').only.map(({ combinations }) =>
  combinations.map((row) => row.map((format) => format ?? 'none').join(', ')).join('; '),
)
function adamwOn(
  p: number[],
  master: number[] | null,
  lost: number[] | null,
  rounding: 'nearest' | 'stochastic' | 'kahan',
) {
  const states = () => p.map((handle) => f32(...native.info(handle).shape))
  native.adamw(p, master, lost, states(), states(), states(), null, null, ...ones, rounding, 0)
}

describe('refusals name op, argument, value and rule', () => {
  const cases: [string, string, string, string, () => unknown][] = [
    [
      'a size that another argument fixed',
      'shape',
      'w',
      'rmsnorm_forward: w f32[32] must have N = 64, as in x bf16[8, 64]',
      () => native.rmsnorm_forward(bf16(8, 64), f32(32), null, 'bf16', 1e-5),
    ],
    [
      'an output format that is not given',
      'type',
      'y',
      'convert: y is undefined and must be a string',
      () => native.convert(f32(4), null, undefined as unknown as 'f32'),
    ],
    [
      'a dtype',
      'format',
      'ids',
      'embedding_forward: ids f32[2] must be i32',
      () => native.embedding_forward(f32(2), f32(4, 3), 'f32'),
    ],
    [
      'a quantized tensor where plain ones are read',
      'format',
      'a',
      'add: a e4m3/t[4] must be f32 or bf16',
      () => native.add(own(native.convert(f32(4), null, 'e4m3/t')), f32(4), 'f32', null),
    ],
    ['a rank', 'shape', 'x', 'column_sum: x f32[4] must have 2 sizes [M N]', () => native.column_sum(f32(4), 'f32')],
    [
      'a rank of one',
      'shape',
      'w',
      'rmsnorm_forward: w f32[4, 1] must have 1 size [N]',
      () => native.rmsnorm_forward(f32(3, 4), f32(4, 1), null, 'f32', 1e-5),
    ],
    [
      'a shape that must equal another',
      'shape',
      'b',
      'add: b f32[3, 2] must have the shape [2, 3], as a f32[2, 3]',
      () => native.add(f32(2, 3), f32(3, 2), 'f32', null),
    ],
    [
      'an odd number of columns for two halves',
      'shape',
      'x',
      'swiglu_forward: x f32[2, 7] must have size 2*F in dimension 1, which 7 is not',
      () => native.swiglu_forward(f32(2, 7), null, 'f32'),
    ],
    [
      'columns that are not those of the heads',
      'shape',
      'qkv',
      'attention_forward: qkv f32[6, 40] must have (H+2*J)*D = 64 in dimension 1 (H = 4, J = 2, D = 8)',
      () => native.attention_forward(f32(6, 40), null, 'f32', null, 3, 4, 2, 8, 1, 0, 1),
    ],
    [
      'rows that are no whole sequences',
      'shape',
      'qkv',
      'attention_forward: qkv f32[7, 64] must have size B*T (T = 3) in dimension 0, which 7 is not',
      () => native.attention_forward(f32(7, 64), null, 'f32', null, 3, 4, 2, 8, 1, 0, 1),
    ],
    [
      'the contraction',
      'shape',
      'b',
      'matmul_nt: b f32[5, 7] must have K = 8, as in a f32[3, 8]',
      () => native.matmul_nt(f32(3, 8), f32(5, 7), null, 'f32', null),
    ],
    [
      'formats that do not go together',
      'format',
      'a',
      'matmul_nt: a f32, b bf16 is not a combination of this op, which has: f32, f32; bf16, bf16; bf16, e4m3/t; e4m3/t, bf16; e5m2/t, bf16; e4m3/t, e4m3/t; e5m2/t, e4m3/t; e4m3/g128, e4m3/b128; e4m3/g128, e4m3/g128; e4m3/g128p2, e4m3/b128p2; e4m3/g128p2, e4m3/g128p2; e4m3/r, e4m3/r; e4m3/r, e4m3/t',
      () => native.matmul_nt(f32(2, 2), bf16(2, 2), null, 'f32', null),
    ],
    [
      'formats of members of lists that do not go together',
      'format',
      'm',
      `adamw: m f32, v bf16 is not a combination of this op, which has: ${pairs}`,
      () => native.adamw([f32(2)], null, null, [f32(2)], [f32(2)], [bf16(2)], null, null, ...ones, 'nearest', 0),
    ],
    [
      'a format of a result',
      'format',
      'y',
      'swiglu_forward: y e5m2/t must be f32, bf16, e4m3/t or e4m3/g16',
      () => loose.swiglu_forward?.(f32(2, 8), null, 'e5m2/t'),
    ],
    [
      'a word that is no format',
      'format',
      'y',
      'convert: y is "fp8", which is no format; the formats are f32, bf16, f16, bf16x2, f16/t, e4m3/t, e5m2/t, e4m3/g16, i8/g16, e4m3/g64, e4m3/g128, e4m3/g256, e4m3/b128, e4m3/r, e4m3/g128p2, e4m3/b128p2, e4m3/x64, e4m3/x128, e4m3/x256, e5m2/g128, e5m2/x128, d8/g256, u8/g256, d4/g128, u4/g128, i32',
      () => loose.convert?.(f32(2), null, 'fp8'),
    ],
    [
      'lists of different lengths',
      'shape',
      'g',
      'adamw: g has 1 tensors and must have 2, as p',
      () => native.adamw([f32(2), f32(3)], null, null, [f32(2)], [f32(2)], [f32(2)], null, null, ...ones, 'nearest', 0),
    ],
    [
      'members of different sizes',
      'shape',
      'g',
      'adamw: g[1] f32[4] must have 3 elements, as p[1] f32[3]',
      () => native.adamw([f32(2), f32(3)], null, null, [f32(2), f32(4)], [], [], null, null, ...ones, 'nearest', 0),
    ],
    [
      'what cannot be rounded at random',
      'format',
      'p',
      'adamw: p[1] f32[3] must be bf16 with rounding stochastic',
      () => adamwOn([bf16(2), f32(3)], null, null, 'stochastic'),
    ],
    [
      'a master of what is rounded at random',
      'value',
      'rounding',
      'adamw: rounding is stochastic and must be nearest with a master, which loses nothing',
      () => adamwOn([bf16(2)], [f32(2)], null, 'stochastic'),
    ],
    [
      "Kahan's rounding with a master",
      'format',
      'p',
      `adamw: p bf16, master f32, lost bf16 is not a combination of this op, which has: ${parameters}`,
      () => adamwOn([bf16(2)], [f32(2)], [bf16(2)], 'kahan'),
    ],
    [
      "Kahan's rounding without what is lost",
      'value',
      'lost',
      'adamw: lost is absent and must be given with rounding kahan only',
      () => adamwOn([bf16(2)], null, null, 'kahan'),
    ],
    [
      'what is lost without its rounding',
      'value',
      'lost',
      'adamw: lost is given and must be given with rounding kahan only',
      () => adamwOn([bf16(2)], null, [bf16(2)], 'nearest'),
    ],
    [
      'an unknown rounding',
      'value',
      'rounding',
      'adamw: rounding is "up" and must be one of nearest, stochastic, kahan',
      () => adamwOn([f32(2)], null, null, 'up' as 'nearest'),
    ],
    ['no list', 'type', 'g', 'grad_norm: g is 7 and must be a list of tensors', () => loose.grad_norm?.(7, 1)],
    [
      'a number that is none',
      'type',
      'eps',
      'rmsnorm_forward: eps is NaN and must be a number',
      () => native.rmsnorm_forward(f32(2, 2), f32(2), null, 'f32', Number.NaN),
    ],
    [
      'a text for a number',
      'type',
      'eps',
      'rmsnorm_forward: eps is small and must be a number',
      () => loose.rmsnorm_forward?.(f32(2, 2), f32(2), null, 'f32', 'small'),
    ],
    [
      'a broken integer',
      'type',
      'V',
      'embedding_backward: V is 2.5 and must be an integer below 2^53',
      () => native.embedding_backward(ids(0), f32(1, 2), 'f32', 2.5),
    ],
    [
      'a negative size',
      'value',
      'V',
      'embedding_backward: V is -1 and must not be negative',
      () => native.embedding_backward(ids(), f32(0, 2), 'f32', -1),
    ],
    [
      'a negative seed',
      'value',
      'seed',
      'random_normal: seed is -1 and must not be negative',
      () => native.random_normal('f32', 2, 2, 0, 1, -1, 'cpu'),
    ],
    ['a missing tensor', 'type', 'b', 'add: b is missing', () => loose.add?.(f32(2), null, 'f32', null)],
    ['too few arguments', 'arguments', '', 'add: takes 4 arguments and was given 2', () => loose.add?.(f32(2), f32(2))],
    ['too many arguments', 'arguments', '', 'amax: takes 1 arguments and was given 2', () => loose.amax?.(f32(2), 1)],
    [
      'what is no handle',
      'handle',
      'x',
      'amax: x is 12345678, which is no tensor handle of this thread',
      () => native.amax(12345678),
    ],
    [
      'a broken handle',
      'handle',
      'x',
      'amax: x is -1, which is no tensor handle of this thread',
      () => native.amax(-1),
    ],
    ['a handle of another type', 'type', 'x', 'amax: x is hello and must be a number', () => loose.amax?.('hello')],
    [
      'an unknown device',
      'device',
      'device',
      'make: device is "tpu" and must be "cpu" or "cuda"',
      () => loose.make?.('f32', [1], 'tpu', 'temp'),
    ],
    [
      'an unknown purpose',
      'purpose',
      'purpose',
      'make: purpose is "fun" and must be one of param, grad, state, saved, temp, scratch',
      () => loose.make?.('f32', [1], 'cpu', 'fun'),
    ],
    [
      'five sizes',
      'shape',
      'shape',
      'make: shape has 5 sizes and must have at most 4',
      () => native.make('f32', [1, 1, 1, 1, 1], 'cpu', 'temp'),
    ],
    [
      'a size below 0',
      'shape',
      'shape',
      'make: shape[1] is -2 and must not be negative',
      () => native.make('f32', [1, -2], 'cpu', 'temp'),
    ],
    [
      'an endless shape',
      'shape',
      'shape',
      'make: shape [1000000, 1000000, 1000000] has more than 10^15 elements',
      () => native.make('f32', [1e6, 1e6, 1e6], 'cpu', 'temp'),
    ],
    [
      'bytes of another length',
      'shape',
      'bytes',
      'write: bytes has 12 bytes and e4m3/t[5] has 20',
      () => native.write(own(native.make('e4m3/t', [5], 'cpu', 'temp')), new Uint8Array(12)),
    ],
    ['no bytes', 'type', 'bytes', 'write: bytes must be a typed array', () => loose.write?.(f32(1), [1])],
    [
      'no threads',
      'value',
      'threads',
      'threads: threads is 0 and must be an integer from 1 to 256',
      () => native.threads(0),
    ],
  ]
  it.each(cases)('%s', (_, code, argument, message, f) => {
    let error: unknown
    try {
      f()
    } catch (thrown) {
      error = thrown
    }
    expect(error).toBeInstanceOf(CoatError)
    const { name: _name, ...shown } = error as CoatError
    expect({ ...shown, message: (error as CoatError).message }).toEqual({
      message,
      code,
      argument,
      op: message.split(':')[0],
    })
  })

  it.skipIf(present('cuda'))('a device that is not there', () => {
    const error = refusal(() => native.make('f32', [1], 'cuda', 'temp'))
    expect([error.code, error.argument]).toEqual(['no_cuda', 'device'])
    expect(error.message).toMatch(/^make: device 'cuda' is not there: .*; use device 'cpu'/)
  })

  it('freed tensors are recognised', () => {
    const x = native.make('f32', [2], 'cpu', 'temp')
    native.free(x)
    const text = 'was freed: a tensor cannot be used after dispose() or after its scope ended'
    expect(refusal(() => native.amax(x)).message).toBe(`amax: x ${text}`)
    expect(refusal(() => native.free(x)).message).toBe(`free: tensor ${text}`)
    expect(refusal(() => native.info(x)).code).toBe('freed')
    const alive = f32(1)
    expect(refusal(() => native.grad_norm([alive, x], 1)).argument).toBe('g[1]')
  })

  it('J that does not divide H is refused by name', () => {
    const qkv = f32(3, 14)
    const error = refusal(() => native.attention_forward(qkv, null, 'f32', null, 3, 3, 2, 2, 0, 0, 1))
    expect([error.message, error.code]).toEqual(['attention_forward: J is 2 and must divide H = 3', 'value'])
  })
})

describe('a refusal leaves nothing behind', () => {
  it('when the arguments are wrong, and when the kernel refuses after the outputs were made', () => {
    const [x, w] = [f32(3, 4), f32(4)]
    const [zero, bad, targets] = [tensor('f32', [1], [0]), ids(0, 9, 1), ids(0, 1, 7)]
    refusal(() => native.rmsnorm_forward(x, w, zero, 'e4m3/t', 1e-5))
    refusal(() => native.embedding_forward(bad, x, 'f32'))
    refusal(() => native.embedding_backward(bad, x, 'f32', 3))
    refusal(() => native.cross_entropy_forward(x, targets, zero, -100))
    refusal(() => native.add(x, w, 'bf16', 'e4m3/g16'))
    refusal(() => native.random_normal('f32', 1e6, 1e10, 0, 1, 1, 'cpu'))
  })
  it('and does not count as a change', () => {
    const y = f32(2)
    const version = native.version(y)
    const three = f32(3)
    refusal(() => native.add_into(y, three))
    expect(native.version(y)).toBe(version)
  })
})

describe('generated code', () => {
  it('lib/native.gen.ts is what the addon describes', () => {
    expect(readFileSync(new URL('../lib/native.gen.ts', import.meta.url), 'utf8')).toBe(native.describe())
  })
  it('the addon exports the ops of the table and the functions of Native', () => {
    const source = readFileSync(new URL('../lib/native.ts', import.meta.url), 'utf8')
    const body = source.slice(source.indexOf('export interface Native extends NativeOps {'))
    const own = [...body.slice(0, body.indexOf('\n}')).matchAll(/^ {2}(\w+)\(/gm)].map((match) => match[1])
    expect(Object.keys(native).sort()).toEqual([...native.table().map(({ name }) => name), ...own].sort())
  })
})
