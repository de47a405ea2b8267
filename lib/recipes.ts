// Recipes: rows of data. A published system is one row; a test, a bench or a program may make its own.
type Plain = 'f32' | 'bf16'
/** Runs with a scale, and with range expansion. */
type Runs = `e4m3/${'g' | 'x'}${64 | 128 | 256}` | `e5m2/${'g' | 'x'}128`

/** How a scale follows from the largest magnitudes of the last steps. */
export interface DelayedScaling {
  /** Steps that are remembered. */
  readonly history: number
  /** The largest magnitude of them all, or that of the last step. */
  readonly pick: 'max' | 'most_recent'
  /** Powers of two that are left free above it. */
  readonly margin: number
}

/** How the factor of the loss in backward follows from overflows; what is left out is as Micikevicius et al. have it. */
export interface DynamicLossScale {
  /** Of the first step (default 65536). */
  readonly initial?: number
  /** What multiplies it after `interval` steps in a row without an overflow (default 2, at most to 2^100). */
  readonly growth?: number
  /** (default 2000) */
  readonly interval?: number
  /** What multiplies it at an overflow, a gradient that is not finite; the step is skipped (default 0.5). */
  readonly backoff?: number
  /** The least that it may be when so many steps are done, by ascending steps (default: nothing). */
  readonly minimum?: readonly (readonly [steps: number, least: number])[]
}
/** `dynamic`: with the defaults; a number stays. */
export type LossScaling = 'none' | 'dynamic' | number | DynamicLossScale
/**
 * Numbers of few bits that f32 tensors hold: a sign, E bits of exponent and M of mantissa as in IEEE 754 (`e5m2`), where values
 * that are too large become the largest one, or with `/inf` infinite (`e5m10/inf` is half precision); or I bits before the
 * point, the sign included, and F behind it (`q4.12`). Rounded to nearest, or with `/sr` up with the probability of what is left
 * over.
 */
export type Arithmetic = `${`e${number}m${number}${'' | '/inf'}` | `q${number}.${number}`}${'' | '/sr'}`

/** Arithmetic that no machine here has, imitated in f32: a reference, and slow. */
export interface Emulation {
  /** Operands of products. */
  readonly operand: Arithmetic | Readonly<Record<'x' | 'w' | 'dy', Arithmetic>>
  /**
   * Every sum of products within a chunk, and of chunks; with chunk 0 their results alone. `f32`: sums are those of products
   * in f32, and chunk is 0.
   */
  readonly sum: Arithmetic | 'f32'
  /** Products of a chunk; 0: sums are FP64. */
  readonly chunk: number
  /** What whole sums are rounded to once more: results, gradients of inputs, and of weights and biases (default: nothing). */
  readonly result?: Arithmetic | Readonly<Partial<Record<'y' | 'dx' | 'dw', Arithmetic>>>
  /** A power of two that gradients are multiplied by in products, as a loss scale does. */
  readonly lossScale: number
  /** Parameters of matrices; with SGD, after each of the three steps of an update, moments too. `null`: they stay f32. */
  readonly update: Arithmetic | null
}

/** How gradients travel between ranks that train together. */
export type Communication = (typeof communications)[number]
export const communications = ['f32', 'bf16', 'e4m3/t'] as const
/** How states are divided between them. */
export type Partition = (typeof partitions)[number]
export const partitions = ['whole', 'flat'] as const

/** How a model is trained, axis by axis. */
export interface Recipe {
  /**
   * GEMM operand: input. In runs and rows there is one more for the gradient of the weight, with scales along its rows; those of
   * `e4m3/r`, and with `p2`, are powers of two.
   */
  x: Plain | 'e4m3/t' | 'e4m3/r' | 'e4m3/g128' | 'e4m3/g128p2'
  /** GEMM operand: weight. */
  w: Plain | 'e4m3/t' | 'e4m3/r' | 'e4m3/b128' | 'e4m3/b128p2'
  /** GEMM operand: gradient of the output. */
  dy: Plain | 'e5m2/t' | 'e4m3/r' | 'e4m3/g128' | 'e4m3/g128p2'
  /**
   * How the gradient of q, k and v is rounded for its products: as one tensor (`fused`, the default), or each with a scale, and
   * products, of its own (`split`).
   */
  qkvGrad?: 'fused' | 'split'
  /**
   * What the gradient of a weight is a product of: x and dy as operands, or as the `stream` has them. With the latter the weight
   * has one scale, a power of two, in the gradient of the input, as torchao's recipe rowwise_with_gw_hp.
   */
  dwFrom: 'operands' | 'stream'
  /**
   * Where FP8 products are summed: in FP32 from every 128 of K on (`split`); or, with 14 bits, in the tensor cores for all of K
   * (`fast`, as the published code of COAT), in the product of forward alone (`fast-forward`, as Transformer Engine and torchao).
   */
  accumulate: 'split' | 'fast' | 'fast-forward'
  /**
   * How a per-tensor scale is chosen: `current` measures every tensor; `pow2` takes the power of two that is not below that, of
   * gradients in dw 'e4m3/t', too; else it follows from the last steps. Of states and parameters it is a power of two anyway.
   */
  scale: 'current' | 'pow2' | DelayedScaling
  /** What nonlinear ops keep of their inputs for backward; with the stream's format they read it, too, whatever the flow. */
  saved: Plain | 'e4m3/g16'
  /**
   * What nonlinear ops read in forward: the tensor that is kept (`fp8`, as the COAT paper), or the value that its producer
   * still holds, of which the kept tensor is a copy for backward alone (`save`). The same bytes are kept.
   */
  flow: 'fp8' | 'save'
  /** Residual stream, attention and head. */
  stream: Plain
  /** What attention keeps for backward: q, k, v and its output in the format of the stream, or 8-bit copies of q, k and v. */
  attention: 'stream' | 'e4m3/g16' | 'i8/g16'
  /** Parameter of a matrix; norm weights are f32, and so are biases where this is neither f32 nor bf16. */
  param: Plain | 'bf16x2' | 'f16/t' | 'e4m3/t'
  /** The copy that the optimizer changes where the parameter is rounded. */
  master: 'f32' | 'f16/t' | null
  /**
   * How a bf16 parameter without a master is rounded: to `nearest`; up with the probability of what is left over
   * (`stochastic`); to nearest with the loss kept in bf16 and added back before the next update (`kahan`).
   */
  rounding: 'nearest' | 'stochastic' | 'kahan'
  /** Gradient of a matrix; `e4m3/t`: rounded when it is whole, and what is not a matrix has bf16. */
  dw: Plain | 'e4m3/t'
  /** First moment of AdamW, the moment of Lion, the momentum of SGD. */
  m: Plain | Runs | 'e4m3/t' | 'f16/t' | 'd8/g256' | 'd4/g128'
  /** Second moment of AdamW. */
  v: Plain | Runs | 'f16/t' | 'bf16x2' | 'u8/g256' | 'u4/g128'
  /** The factor of the loss in backward, by which gradients are divided before anything is done with them (default none). */
  lossScale?: LossScaling
  /**
   * How gradients of several ranks are added (default `f32`): as they are, in FP32, and rounded to their format; or rounded to
   * bf16 before and after; or those of matrices as FP8 with one scale for all ranks, a power of two, and mu, as FP8-LM has it.
   */
  communicate?: Communication
  /**
   * Which rank keeps the states of what (default `whole`): whole tensors, the largest first, each to the rank that has least; or
   * equal parts of all tensors end to end, for which matrices are cut, unless they or their states have one scale (`flat`).
   */
  partition?: Partition
  /**
   * The factor of gradients that are summed as FP8, over the scale of the largest: 1 / sqrt(ranks) (`fixed`), or what follows
   * from how many values of the sum saturate, by one of two readings of the paper (default none). Where there is one rank each
   * micro-batch of a step stands for a rank, with dw 'e4m3/t' (default: a gradient is rounded again whenever a micro-batch was
   * added).
   */
  mu?: 'none' | 'fixed' | 'absolute' | 'relative'
  /** Products of linear layers and updates in arithmetic that is imitated, where all else is f32. */
  emulated?: Emulation | null
  /** Axes that some blocks have of their own, by patterns of their names: `{ 'model.layers.0.*': { x: 'bf16', … } }`. */
  layers?: Readonly<Record<string, LayerRecipe>>
}

/** Axes of a block that differ from the model's. */
export type LayerRecipe = Partial<Omit<Recipe, (typeof whole)[number]>>
/** Axes of the whole model. */
export const whole = ['layers', 'stream', 'lossScale', 'mu', 'communicate', 'partition'] as const

// What Transformer Engine takes.
const history = { history: 1024, pick: 'max', margin: 0 } as const
// Of GNMT, by Mellempudi et al.
const rising = {
  minimum: [
    [40_000, 8192],
    [150_000, 32_768],
  ],
} as const

// Half precision, where what is too large is infinite (Micikevicius et al., 2018); e5m2 with gradients and activations
// rounded at random, over weights in half precision (Mellempudi et al., 2019).
const half = { operand: 'e5m10/inf', sum: 'f32', chunk: 0, result: 'e5m10/inf', lossScale: 1, update: null } as const
const e5m2 = { x: 'e5m2/inf/sr', w: 'e5m2/inf', dy: 'e5m2/inf/sr' } as const
const mellempudi = {
  operand: e5m2,
  sum: 'f32',
  chunk: 0,
  result: { dw: e5m2.dy },
  lossScale: 1,
  update: 'e5m10/inf',
} as const
// FP8 operands, sums in 16 bits by chunks (Wang et al., 2018); 16-bit fixed point (Gupta et al., 2015); short mantissas.
const wang = { operand: 'e5m2', sum: 'e6m9', chunk: 64, lossScale: 1024, update: 'e6m9/sr' } as const
const gupta = { operand: 'q4.12/sr', sum: 'q4.12/sr', chunk: 0, lossScale: 64, update: 'q2.14/sr' } as const
const e8m3 = { operand: 'e8m3', sum: 'e8m3', chunk: 0, lossScale: 1, update: null } as const
const e8m5 = { operand: 'e8m5', sum: 'e8m5', chunk: 0, lossScale: 1, update: null } as const

// biome-ignore format: rows that can be compared by eye
export const recipes = {
  //                    GEMM x, w, dy, what dw is made from, sums                                                                  scale             kept, flow                      stream          attention            parameter, master, rounding, gradient                                  moments
  fp32:               { x: 'f32',         w: 'f32',         dy: 'f32',         dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'f32',      flow: 'save', stream: 'f32',  attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32'       },
  bf16:               { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: 'f32',   rounding: 'nearest',    dw: 'bf16',   m: 'f32',       v: 'f32'       },
  coat:               { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'e4m3/g16', flow: 'fp8',  stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'bf16',   m: 'e4m3/x128', v: 'e4m3/x128' },
  'coat-paper':       { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'e4m3/g16', flow: 'fp8',  stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'bf16',   m: 'e4m3/x128', v: 'e4m3/x128' },
  'coat-bf16':        { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'e4m3/g16', flow: 'fp8',  stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'stochastic', dw: 'bf16',   m: 'e4m3/x128', v: 'e4m3/x128' },
  // no more than bf16, and what keeps small updates of its parameters
  'bf16-pure':        { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'nearest',    dw: 'bf16',   m: 'bf16',      v: 'bf16'      },
  'bf16-stochastic':  { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'stochastic', dw: 'bf16',   m: 'bf16',      v: 'bf16'      },
  'bf16-kahan':       { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'kahan',      dw: 'bf16',   m: 'bf16',      v: 'bf16'      },
  'collage-light':    { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16x2', master: null,    rounding: 'nearest',    dw: 'bf16',   m: 'bf16',      v: 'bf16'      },
  'collage-plus':     { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16x2', master: null,    rounding: 'nearest',    dw: 'bf16',   m: 'bf16',      v: 'bf16x2'    },
  // states alone: torchao with its stochastic rounding, bitsandbytes without
  adamw8bit:          { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'stochastic', dw: 'bf16',   m: 'd8/g256',   v: 'u8/g256'   },
  adamw4bit:          { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'stochastic', dw: 'bf16',   m: 'd4/g128',   v: 'u4/g128'   },
  adamwfp8:           { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'stochastic', dw: 'bf16',   m: 'e4m3/g256', v: 'e4m3/g256' },
  'bnb-adam8bit':     { x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: null,    rounding: 'nearest',    dw: 'bf16',   m: 'd8/g256',   v: 'u8/g256'   },
  // products alone: Transformer Engine and torchao a tensor (the same), torchao a row, Transformer Engine and DeepSeek-V3 a block
  'te-current':       { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32'       },
  'ao-tensorwise':    { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32'       },
  'te-delayed':       { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: history,   saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32'       },
  'ao-rowwise':       { x: 'e4m3/r',      w: 'e4m3/r',      dy: 'e4m3/r',      dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32'       },
  'ao-rowwise-gw-hp': { x: 'e4m3/r',      w: 'e4m3/r',      dy: 'e4m3/r',      dwFrom: 'stream',   accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32'       },
  'te-block':         { x: 'e4m3/g128p2', w: 'e4m3/b128p2', dy: 'e4m3/g128p2', dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32'       },
  'deepseek-v3':      { x: 'e4m3/g128',   w: 'e4m3/b128',   dy: 'e4m3/g128',   dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'bf16',      v: 'bf16'      },
  // FP8-LM: its parameters and gradients, then its moments
  'fp8-lm-o1':        { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'pow2',    saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f16/t',  master: null,    rounding: 'nearest',    dw: 'e4m3/t', m: 'f32',       v: 'f32'       },
  'fp8-lm-o2':        { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'pow2',    saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f16/t',  master: null,    rounding: 'nearest',    dw: 'e4m3/t', m: 'e4m3/t',    v: 'f16/t'     },
  'fp8-lm-o3':        { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'pow2',    saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'e4m3/t', master: 'f16/t', rounding: 'nearest',    dw: 'e4m3/t', m: 'e4m3/t',    v: 'f16/t'     },
  'fp8-lm-auto-mu':   { x: 'e4m3/t',      w: 'e4m3/t',      dy: 'e5m2/t',      dwFrom: 'operands', accumulate: 'split', scale: 'pow2',    saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'f16/t',  master: null,    rounding: 'nearest',    dw: 'e4m3/t', m: 'e4m3/t',    v: 'f16/t',     mu: 'relative', communicate: 'e4m3/t' },
  // loss scaling where bf16 stands for f16, of which there are no products
  'micikevicius-bf16':{ x: 'bf16',        w: 'bf16',        dy: 'bf16',        dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'bf16',     flow: 'save', stream: 'bf16', attention: 'stream', param: 'bf16',   master: 'f32',   rounding: 'nearest',    dw: 'bf16',   m: 'f32',       v: 'f32',       lossScale: 'dynamic' },
  // emulated: what no machine here computes, as f32 values
  'micikevicius-f16': { x: 'f32',         w: 'f32',         dy: 'f32',         dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'f32',      flow: 'save', stream: 'f32',  attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32', emulated: half, lossScale: 'dynamic' },
  'mellempudi-e5m2':  { x: 'f32',         w: 'f32',         dy: 'f32',         dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'f32',      flow: 'save', stream: 'f32',  attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32', emulated: mellempudi, lossScale: rising },
  'wang-152':         { x: 'f32',         w: 'f32',         dy: 'f32',         dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'f32',      flow: 'save', stream: 'f32',  attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32', emulated: wang },
  'gupta-fixed':      { x: 'f32',         w: 'f32',         dy: 'f32',         dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'f32',      flow: 'save', stream: 'f32',  attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32', emulated: gupta },
  e8m3:               { x: 'f32',         w: 'f32',         dy: 'f32',         dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'f32',      flow: 'save', stream: 'f32',  attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32', emulated: e8m3 },
  e8m5:               { x: 'f32',         w: 'f32',         dy: 'f32',         dwFrom: 'operands', accumulate: 'split', scale: 'current', saved: 'f32',      flow: 'save', stream: 'f32',  attention: 'stream', param: 'f32',    master: null,    rounding: 'nearest',    dw: 'f32',    m: 'f32',       v: 'f32', emulated: e8m5 },
} as const satisfies Record<string, Recipe>

export type RecipeName = keyof typeof recipes
