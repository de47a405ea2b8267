// GENERATED from csrc/ops.def by `npm run generate`: the ops of the native addon with dims and formats.

/** A tensor of the native addon: slot and generation in one number. */
export type Handle = number

/** Every format word (csrc/tensor.h). */
export type AnyFormat = 'f32' | 'bf16' | 'f16' | 'bf16x2' | 'f16/t' | 'e4m3/t' | 'e5m2/t' | 'e4m3/g16' | 'i8/g16' | 'e4m3/g64' | 'e4m3/g128' | 'e4m3/g256' | 'e4m3/b128' | 'e4m3/r' | 'e4m3/g128p2' | 'e4m3/b128p2' | 'e4m3/x64' | 'e4m3/x128' | 'e4m3/x256' | 'e5m2/g128' | 'e5m2/x128' | 'd8/g256' | 'u8/g256' | 'd4/g128' | 'u4/g128' | 'i32'

export interface NativeOps {
  /** y = x in the format of y. A per-tensor scale is measured (largest finite |x| maps to the largest code; of f16, the power of two that is not below such a scale, as those of rows, and of runs and blocks with p2), or taken from scale, or kept when x has the format of y. x […], scale [1], y […]. */
  convert(x: Handle, scale: Handle | null, y: 'f32' | 'bf16' | 'f16' | 'bf16x2' | 'f16/t' | 'e4m3/t' | 'e5m2/t' | 'e4m3/g16' | 'i8/g16' | 'e4m3/g64' | 'e4m3/g128' | 'e4m3/g256' | 'e4m3/b128' | 'e4m3/r' | 'e4m3/g128p2' | 'e4m3/b128p2' | 'e4m3/x64' | 'e4m3/x128' | 'e4m3/x256' | 'e5m2/g128' | 'e5m2/x128' | 'd8/g256' | 'u8/g256' | 'd4/g128' | 'u4/g128'): Handle
  /** y = x in the format of y as convert makes it, but no positive value becomes the code of 0: the smallest positive code instead. For second moments, which are divided by. x […], scale [1], y […]. */
  convert_floored(x: Handle, scale: Handle | null, y: 'f16/t' | 'e4m3/t' | 'e5m2/t' | 'e4m3/g64' | 'e4m3/g128' | 'e4m3/g256' | 'e5m2/g128' | 'u8/g256'): Handle
  /** y = transpose of x in the format of y; scales as in convert, so codes equal those of convert, except in runs, which lie in the rows of y. x [M, N], scale [1], y [N, M]. */
  convert_transposed(x: Handle, scale: Handle | null, y: 'f32' | 'bf16' | 'e4m3/t' | 'e5m2/t' | 'e4m3/g128' | 'e4m3/b128' | 'e4m3/r' | 'e4m3/g128p2' | 'e4m3/b128p2'): Handle
  /** y = x in the format of y, and across = its transpose, in one pass: what convert and convert_transposed make. x [M, N], scale [1], y [M, N], across [N, M]. */
  convert_both(x: Handle, scale: Handle | null, y: 'e4m3/t' | 'e5m2/t', across: 'e4m3/t' | 'e5m2/t'): [y: Handle, across: Handle]
  /** y becomes x, codes and scales: the way to change a tensor that is held in place. y […], x […]. */
  assign(y: Handle, x: Handle): void
  /** y = largest |x|; NaN if any x is NaN, else Inf if any is infinite. x […], y [1]. */
  amax(x: Handle): Handle
  /** scale = the one that convert measures for y in this format where the largest |y| is amax; where that is NaN or Inf, the one for the largest finite number. pow2: the power of two that is not below it. amax [1], scale [1]. */
  scale_from_amax(amax: Handle, format: 'e4m3/t' | 'e5m2/t', rounding: 'exact' | 'pow2'): Handle
  /** y = the scale stored in x. x […], y [1]. */
  scale_of(x: Handle): Handle
  /** history[0] = the larger of it and amax; an amax that is NaN or infinite is passed over. history [H], amax [1]. */
  observe_amax(history: Handle, amax: Handle): void
  /** scale = headroom times the one that convert measures for this format where the largest |y| is that of history (max) or history[0] (most_recent); where that is 0 scale stays. Then history moves on by one, with 0 at its front, unless history[0] is 0. history [H], scale [1]. */
  scale_from_history(history: Handle, scale: Handle, format: 'e4m3/t' | 'e5m2/t', pick: 'max' | 'most_recent', headroom: number): void
  /** y = a + b, summed in FP32; twin = the same FP32 sum, quantized. a […], b […], y […], twin […]. */
  add(a: Handle, b: Handle, y: 'f32' | 'bf16', twin: 'e4m3/g16' | null): [y: Handle, twin: Handle | null]
  /** y = y + x, summed in FP32. y […], x […]. */
  add_into(y: Handle, x: Handle): void
  /** y = y * factor. y […], factor [1]. */
  multiply_into(y: Handle, factor: Handle): void
  /** y[n] = sum over m of x[m, n], FP32 partial sums fixed by shape: the gradient of a bias. x [M, N], y [N]. */
  column_sum(x: Handle, y: 'f32' | 'bf16'): Handle
  /** y = R elements of x, the first of them x[from]. x [N], y [R]. */
  slice(x: Handle, y: 'f32' | 'bf16' | 'i32', from: number, R: number): Handle
  /** y = R rows of x, the first of them x[from], and its scale. x [M, N], y [R, N]. */
  slice_rows(x: Handle, y: 'f32' | 'bf16' | 'e4m3/t', from: number, R: number): Handle
  /** Rows of y become those of x, the first of them y[to]. y [M, N], x [R, N]. */
  place_rows(y: Handle, x: Handle, to: number): void
  /** y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps), row by row; scale, if given, is the per-tensor scale of y. x [M, N], w [N], scale [1], y [M, N], rstd [M]. */
  rmsnorm_forward(x: Handle, w: Handle, scale: Handle | null, y: 'f32' | 'bf16' | 'e4m3/t' | 'e4m3/g16', eps: number): [y: Handle, rstd: Handle]
  /** y = transpose of what rmsnorm_forward makes of x with this scale, given the rstd that it made: the same codes. x [M, N], w [N], rstd [M], scale [1], y [N, M]. */
  rmsnorm_transposed(x: Handle, w: Handle, rstd: Handle, scale: Handle): Handle
  /** dx = rstd * (w * dy - xhat * mean(w * dy * xhat)) (+ residual), dw = sum over rows of dy * xhat, xhat = x * rstd; amax = largest |dx|. dy [M, N], x [M, N], w [N], rstd [M], residual [M, N], dx [M, N], dw [N], amax [1]. */
  rmsnorm_backward(dy: Handle, x: Handle, w: Handle, rstd: Handle, residual: Handle | null, dx: 'f32' | 'bf16', dw: 'f32' | 'bf16', amax: 'f32' | null): [dx: Handle, dw: Handle, amax: Handle | null]
  /** y = a + b, summed in FP32; twin = the same FP32 sum, quantized; rstd is that of rmsnorm_forward of the twin, and scale the one that it would measure for an e4m3/t output: give it that scale, and it needs one pass. a [M, N], b [M, N], w [N], y [M, N], twin [M, N], rstd [M], scale [1]. */
  add_rmsnorm_forward(a: Handle, b: Handle, w: Handle, y: 'f32' | 'bf16', eps: number): [y: Handle, twin: Handle, rstd: Handle, scale: Handle]
  /** y = (x - mean) * rstd * w + b row by row, without w and b when absent; rstd = 1 / sqrt(var + eps). x [M, N], w [N], b [N], scale [1], y [M, N], mean [M], rstd [M]. */
  layernorm_forward(x: Handle, w: Handle | null, b: Handle | null, scale: Handle | null, y: 'f32' | 'bf16' | 'e4m3/t' | 'e4m3/g16', eps: number): [y: Handle, mean: Handle, rstd: Handle]
  /** g = w * dy: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); dw = sum of dy * xhat, db = sum of dy, over rows. dy [M, N], x [M, N], w [N], mean [M], rstd [M], dx [M, N], dw [N], db [N]. */
  layernorm_backward(dy: Handle, x: Handle, w: Handle | null, mean: Handle, rstd: Handle, dx: 'f32' | 'bf16', dw: 'f32' | 'bf16' | null, db: 'f32' | 'bf16' | null): [dx: Handle, dw: Handle | null, db: Handle | null]
  /** y = silu(gate) * up with gate = x[:, :F], up = x[:, F:]; scale, if given, is the per-tensor scale of y. x [M, 2*F], scale [1], y [M, F]. */
  swiglu_forward(x: Handle, scale: Handle | null, y: 'f32' | 'bf16' | 'e4m3/t' | 'e4m3/g16'): Handle
  /** dx = [dy * up * silu'(gate), dy * silu(gate)]; twin = transpose of dx, the same codes; product = transpose of swiglu_forward's y with this scale, the same codes. amax, if given, is no less than any |dy|: where x is e4m3/g16 the scale of dx is then not measured, but the power of two that is not below amax * max(1.1 U, G) / 57344 with U and G the largest |up| and |gate| that the scales of x allow (448 times a scale); a bound of NaN or Inf stands for the largest finite number. dy [M, F], x [M, 2*F], amax [1], scale [1], dx [M, 2*F], twin [2*F, M], product [F, M]. */
  swiglu_backward(dy: Handle, x: Handle, amax: Handle | null, scale: Handle | null, dx: 'f32' | 'bf16' | 'e5m2/t', twin: 'e5m2/t' | null, product: 'e4m3/t' | null): [dx: Handle, twin: Handle | null, product: Handle | null]
  /** y = x * Phi(x), the exact (erf) form; scale, if given, is the per-tensor scale of y. x [M, N], scale [1], y [M, N]. */
  gelu_forward(x: Handle, scale: Handle | null, y: 'f32' | 'bf16' | 'e4m3/t' | 'e4m3/g16'): Handle
  /** dx = dy * (Phi(x) + x * phi(x)). dy [M, N], x [M, N], dx [M, N]. */
  gelu_backward(dy: Handle, x: Handle, dx: 'f32' | 'bf16' | 'e5m2/t'): Handle
  /** Rotates q and k of qkv in place, half against half as in Llama: (a, b) -> (a cos - b sin, b cos + a sin). table[t] = D/2 cosines, D/2 sines; row m has position m mod T, less starts[m] when given; direction -1 turns back (the gradient). table [T, D], qkv [B*T, (H+2*J)*D], starts [B*T]. */
  rope(table: Handle, qkv: Handle, starts: Handle | null, H: number, J: number, D: number, direction: number): void
  /** out = softmax(scale * q k^T) v by sequence of T rows and head; H query heads share J key/value heads; lse = log-sum-exp of each query's scores. A query sees the keys of its sequence, of its document when starts are given, up to itself when causal, and less than window rows away unless window is 0. amax = largest |out| as stored. qkv [B*T, (H+2*J)*D], starts [B*T], out [B*T, H*D], lse [B*T, H], amax [1]. */
  attention_forward(qkv: Handle, starts: Handle | null, out: 'f32' | 'bf16', amax: 'f32' | null, T: number, H: number, J: number, D: number, causal: number, window: number, scale: number): [out: Handle, lse: Handle, amax: Handle | null]
  /** Gradient of attention_forward for q, k and v, packed as qkv is. Quantized qkv is rounded to bf16 first. Without out and lse both are made again from qkv: those of the values that a copy was made of would leave in the gradient of the scores what softmax takes out. With table, that of rope, the gradients of q and k are turned back. amax = largest |dqkv|. dout [B*T, H*D], qkv [B*T, (H+2*J)*D], starts [B*T], out [B*T, H*D], lse [B*T, H], table [T, D], dqkv [B*T, (H+2*J)*D], amax [1]. */
  attention_backward(dout: Handle, qkv: Handle, starts: Handle | null, out: Handle | null, lse: Handle | null, table: Handle | null, dqkv: 'f32' | 'bf16', amax: 'f32' | null, T: number, H: number, J: number, D: number, causal: number, window: number, scale: number): [dqkv: Handle, amax: Handle | null]
  /** Takes from every column of the keys of qkv its mean over each sequence of T rows, in place: to attention and its gradients that makes no difference, and what is left loses less in 8 bits. qkv [B*T, (H+2*J)*D]. */
  attention_center(qkv: Handle, T: number, H: number, J: number, D: number): void
  /** Attention of M rows that follow first other ones of one sequence: their k and v go to the rows of cache from first on, in place; out = softmax(scale * q k^T) v over the cache up to the row itself, of it the last window rows unless window is 0; H query heads share J key/value heads. qkv [M, (H+2*J)*D], cache [T, 2*J*D], out [M, H*D]. */
  attention_cached(qkv: Handle, cache: Handle, out: 'f32' | 'bf16', H: number, J: number, D: number, first: number, window: number, scale: number): Handle
  /** y[m] = w[ids[m]]. ids [M], w [V, N], y [M, N]. */
  embedding_forward(ids: Handle, w: Handle, y: 'f32' | 'bf16'): Handle
  /** dw[v] = sum of dy[m] over the m with ids[m] = v, in ascending m, in FP32. ids [M], dy [M, N], dw [V, N]. */
  embedding_backward(ids: Handle, dy: Handle, dw: 'f32' | 'bf16', V: number): Handle
  /** loss = weight * sum over rows of lse[m] - logits[m, targets[m]]; rows whose target is ignore add nothing. lse in FP32, the sum in FP64. logits [M, V], targets [M], weight [1], loss [1], lse [M]. */
  cross_entropy_forward(logits: Handle, targets: Handle, weight: Handle, ignore: number): [loss: Handle, lse: Handle]
  /** dx[m, v] = dloss * weight * (exp(logits[m, v] - lse[m]) - [v = targets[m]]); zero in ignored rows. dloss [1], logits [M, V], targets [M], lse [M], weight [1], dx [M, V]. */
  cross_entropy_backward(dloss: Handle, logits: Handle, targets: Handle, lse: Handle, weight: Handle, dx: 'f32' | 'bf16', ignore: number): Handle
  /** y = a b^T (+ bias in every row). FP8 products are exact, sums are FP32, on cuda of sums of 128 FP8 products that the tensor cores make with 14 bits, times the scales of runs and blocks; those of tensors and rows multiply the sum; beside a bf16 operand FP8 codes are bf16 ones, exactly, with sums as those of bf16; with accumulate fast, for operands with a scale a tensor, sums of all of K are made with 14 bits, on cuda of as many parts of K as share a tile of y, on the CPU in one as an imitation that is near; y is rounded once; amax = largest |y| as stored: NaN if any is NaN, else Inf if any is infinite. a [M, K], b [N, K], bias [N], y [M, N], amax [1]. */
  matmul_nt(a: Handle, b: Handle, bias: Handle | null, y: 'f32' | 'bf16' | 'e4m3/g16', amax: 'f32' | null, accumulate?: 'split' | 'fast'): [y: Handle, amax: Handle | null]
  /** y = a b^T (+ bias in every row) with q and k turned as rope turns them, all in FP32 as in matmul_nt; y is rounded once. table [T, D], a [B*T, K], b [(H+2*J)*D, K], bias [(H+2*J)*D], starts [B*T], y [B*T, (H+2*J)*D]. */
  matmul_nt_rope(table: Handle, a: Handle, b: Handle, bias: Handle | null, starts: Handle | null, H: number, J: number, D: number, accumulate?: 'split' | 'fast'): Handle
  /** y = a b; amax, and FP8 beside bf16, as in matmul_nt. a [M, K], b [K, N], y [M, N], amax [1]. */
  matmul_nn(a: Handle, b: Handle, y: 'f32' | 'bf16', amax: 'f32' | null): [y: Handle, amax: Handle | null]
  /** y = a^T b; amax, and FP8 beside bf16, as in matmul_nt. a [K, M], b [K, N], y [M, N], amax [1]. */
  matmul_tn(a: Handle, b: Handle, y: 'f32' | 'bf16', amax: 'f32' | null): [y: Handle, amax: Handle | null]
  /** y = y + a b^T, summed in FP32 and rounded once; accumulate as in matmul_nt. y [M, N], a [M, K], b [N, K]. */
  matmul_nt_into(y: Handle, a: Handle, b: Handle, accumulate?: 'split' | 'fast'): void
  /** y = y + a b, summed in FP32 and rounded once. y [M, N], a [M, K], b [K, N]. */
  matmul_nn_into(y: Handle, a: Handle, b: Handle): void
  /** y = y + a^T b, summed in FP32 and rounded once. y [M, N], a [K, M], b [K, N]. */
  matmul_tn_into(y: Handle, a: Handle, b: Handle): void
  /** AdamW on a list of parameters with one set of hyper-parameters: m = beta1 m + gain1 g, v = beta2 v + gain2 g^2, p -= lr (p weight_decay + m / ((sqrt(v) / correct2 + eps) correct1)), g first multiplied by clip[0]; nothing changes when clip[1] is not 0. The update uses m and v before they are rounded to their formats; with v_floor no positive v is stored as 0, and what has one scale a tensor gets a power of two. master, when given, is the parameter and p its rounded copy. A bf16 p is rounded to nearest, or up with the probability of what is left over (stochastic: the bits of seed, the index in the list and the element), or to nearest with what that lost kept in lost and added back before the next update (kahan). With m in bf16, and p or v in bf16x2, the update is that of Collage: every step of m and v, and what p loses, is rounded to bf16; beta2 has two parts where v has. amax, when given, becomes the largest |p| as stored: NaN if any is NaN, else Inf if any is infinite. p […], master […], lost […], g […], m […], v […], amax [1], clip [2]. */
  adamw(p: readonly Handle[], master: readonly Handle[] | null, lost: readonly Handle[] | null, g: readonly Handle[], m: readonly Handle[], v: readonly Handle[], amax: readonly Handle[] | null, clip: Handle | null, lr: number, beta1: number, gain1: number, beta2: number, gain2: number, eps: number, weight_decay: number, correct1: number, correct2: number, v_floor: number, rounding: 'nearest' | 'stochastic' | 'kahan', seed: number): void
  /** Lion on a list of parameters: p -= lr (p weight_decay + sign(beta1 m + gain1 g)) with sign(0) = 0, then m = beta2 m + gain2 g; clip, master, lost and rounding as in adamw. p […], master […], lost […], g […], m […], clip [2]. */
  lion(p: readonly Handle[], master: readonly Handle[] | null, lost: readonly Handle[] | null, g: readonly Handle[], m: readonly Handle[], clip: Handle | null, lr: number, beta1: number, gain1: number, beta2: number, gain2: number, weight_decay: number, rounding: 'nearest' | 'stochastic' | 'kahan', seed: number): void
  /** SGD with momentum on a list of parameters: d = g + weight_decay p, m = momentum m + gain d, p -= lr m, or p -= lr (d + momentum m) with nesterov; clip, master, lost and rounding as in adamw. p […], master […], lost […], g […], m […], clip [2]. */
  sgd(p: readonly Handle[], master: readonly Handle[] | null, lost: readonly Handle[] | null, g: readonly Handle[], m: readonly Handle[], clip: Handle | null, lr: number, momentum: number, gain: number, weight_decay: number, nesterov: number, rounding: 'nearest' | 'stochastic' | 'kahan', seed: number): void
  /** y = x rounded to numbers of this arithmetic. x […], y […]. */
  round_to(x: Handle, arithmetic: 'float' | 'fixed' | 'ieee', range: number, precision: number, shift: number, rounding: 'nearest' | 'stochastic', seed: number): Handle
  /** y = a b^T (+ bias in every row): every sum of an exact product and of chunks of `chunk` products is rounded, in order; with chunk 0 y alone is, its sum being FP64. a [M, K], b [N, K], bias [N], y [M, N]. */
  matmul_emulated(a: Handle, b: Handle, bias: Handle | null, chunk: number, arithmetic: 'float' | 'fixed' | 'ieee', range: number, precision: number, shift: number, rounding: 'nearest' | 'stochastic', seed: number): Handle
  /** sgd in three steps that are each rounded: d = g + weight_decay p, m = momentum m + gain d, p -= lr m, or p -= lr (d + momentum m) with nesterov; clip as in adamw. p […], g […], m […], clip [2]. */
  sgd_emulated(p: readonly Handle[], g: readonly Handle[], m: readonly Handle[], clip: Handle | null, lr: number, momentum: number, gain: number, weight_decay: number, nesterov: number, arithmetic: 'float' | 'fixed' | 'ieee', range: number, precision: number, shift: number, rounding: 'nearest' | 'stochastic', seed: number): void
  /** norm = sqrt of the sum of all squares (pieces of 16 in FP32, added in FP64, fixed by shape), norms one a tensor; clip = [factor, skip]: factor = min(1, max_norm / norm), 1 when max_norm is 0; skip = 1 when a value is not finite. g […], norm [1], norms [L], clip [2]. */
  grad_norm(g: readonly Handle[], max_norm: number): [norm: Handle, norms: Handle, clip: Handle]
  /** y[i] = mean + std * standard normal of (seed, i): the same bits on every device. y [M, N]. */
  random_normal(y: 'f32' | 'bf16', M: number, N: number, mean: number, std: number, seed: number, device: 'cpu' | 'cuda'): Handle
  /** y[i] = low + (high - low) * uniform in (0, 1) of (seed, i). y [M, N]. */
  random_uniform(y: 'f32' | 'bf16', M: number, N: number, low: number, high: number, seed: number, device: 'cpu' | 'cuda'): Handle
}
