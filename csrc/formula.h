// Scalar formulas of ops, one source for both backends. No libm: only format.h's polynomials and IEEE arithmetic.
#pragma once
#include "format.h"

namespace coat {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// Sums over rows (gradients of weights and biases) run in FP32 within strands of kStrandRows rows, a chunk of kSumRows
// rows joins its strands in FP32, the kGroup chunks of a group are added in FP64, and so are the groups, always in
// order. Part of the formula, because both backends must give the same bits.
constexpr int kStrandRows = 16, kStrands = 8, kGroup = 4;
constexpr int64_t kSumRows = kStrandRows * kStrands;
COAT_HD float join_strands(const float (&sum)[kStrands]) {
  float total = sum[0];
  for (int s = 1; s < kStrands; ++s) total += sum[s];
  return total;
}

// Sums along a row (means of norms) run in FP32 within pieces of kPiece columns, which are added in FP64: quarters of a
// piece, joined as join_quarters does. Zeros behind the end of a row change nothing.
constexpr int kPiece = 16;
COAT_HD float dot_quarter(const float* a, const float* b) {
  return fma_(a[3], b[3], fma_(a[2], b[2], fma_(a[1], b[1], a[0] * b[0])));
}
COAT_HD float sum_quarter(const float* a) { return ((a[0] + a[1]) + a[2]) + a[3]; }
COAT_HD float join_quarters(float a, float b, float c, float d) { return (a + c) + (b + d); }
COAT_HD double dot_piece(const float (&a)[kPiece], const float (&b)[kPiece]) {
  return static_cast<double>(join_quarters(dot_quarter(a, b), dot_quarter(a + 4, b + 4), dot_quarter(a + 8, b + 8),
                                           dot_quarter(a + 12, b + 12)));
}
COAT_HD double sum_piece(const float (&a)[kPiece]) {
  return static_cast<double>(
      join_quarters(sum_quarter(a), sum_quarter(a + 4), sum_quarter(a + 8), sum_quarter(a + 12)));
}
// Whether FP32 held the squares of a piece.
COAT_HD bool holds_squares(double sum) { return sum >= 0x1p-80 && sum < 0x1p120; }
// Sum of squares. Where FP32 cannot hold them, in FP64, where the square of no f32 overflows.
COAT_HD double square_piece(const float (&a)[kPiece]) {
  const double sum = dot_piece(a, a);
  if (holds_squares(sum)) return sum;
  uint32_t any = 0;
  for (int k = 0; k < kPiece; ++k) any |= bits_of(a[k]);
  double exact = 0;
  if (any << 1 == 0) return exact;  // zeros, which are common, need no slow arithmetic
  for (int k = 0; k < kPiece; ++k) exact += static_cast<double>(a[k]) * static_cast<double>(a[k]);
  return exact;
}

// Norms of rows of n columns, from FP64 sums: per = 1 / n, since a product costs a fraction of a quotient.
COAT_HD double per_column(int64_t n) { return 1.0 / static_cast<double>(n); }
// 1 / sqrt(sum * per + eps); in FP64 where FP32 cannot hold the variance.
COAT_HD float inverse_deviation(double sum, double per, float eps) {
  const double variance = sum * per + static_cast<double>(eps);
  const float x = static_cast<float>(variance);
  if (x >= kMinNormal && x < kInf) return 1.f / sqrt_(x);
#ifdef __CUDA_ARCH__
  return static_cast<float>(1.0 / __dsqrt_rn(variance));
#else
  return static_cast<float>(1.0 / __builtin_sqrt(variance));
#endif
}
// Sum of (x - middle)^2, given the sum of (x - m)^2 with m = middle rounded to FP32: x - m is exact where it matters.
COAT_HD double spread_about(double squares, double middle, float m, int64_t n) {
  const double off = middle - static_cast<double>(m), spread = squares - static_cast<double>(n) * (off * off);
  return spread < 0 ? 0 : spread;
}

// e^x, for softmax and sigmoid.
COAT_HD float exp_(float x) { return exp2_(x * kLog2E); }

// What the formulas below are made of. The device has a faster stand-in, see cuda/near.cuh.
struct Exact {
  static COAT_HD float exp(float x) { return exp_(x); }
  static COAT_HD float inverse(float x) { return 1.f / x; }
};

// ---- softmax over the columns of a row, with few instructions an element ----

// e^x for kSoftmaxLow <= x <= kSoftmaxHigh, where no power of two is subnormal or infinite, so that an integer addition
// scales by it; exactly 1 at 0. Polynomial of degree 5 in the fraction of x log2 e, relative error below 1.3e-6, and
// 3e-7 for |x| < 8. Anything outside gives anything, the same on both backends unless it is Inf or NaN.
constexpr float kSoftmaxLow = -80.f, kSoftmaxHigh = 64.f;
COAT_HD float softmax_exp_(float x) {
  const float shifted = fma_(x, kLog2E, kRoundToInteger);  // whose own bits shifted left by 23 are 0
  const float f = fma_(x, kLog2E, -(shifted - kRoundToInteger));
  float p = 1.32647273e-3f;
  p = fma_(p, f, 9.67151299e-3f);
  p = fma_(p, f, 5.55073358e-2f);
  p = fma_(p, f, 2.40222424e-1f);
  p = fma_(p, f, 6.93147004e-1f);
  p = fma_(p, f, 1.f);
  return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

// What a sum of exponentials subtracts from every x first: nothing while the row's largest lies where e^x is safe, so
// that a sum need not wait for it; else the largest.
COAT_HD float softmax_reference(float top) { return top >= -32.f && top <= kSoftmaxHigh ? 0.f : top; }
// One term of the sum. What lies below kSoftmaxLow counts as e^kSoftmaxLow: against the largest term that is nothing.
COAT_HD float softmax_term(float x, float reference) {
  const float d = x - reference;
  return softmax_exp_(d > kSoftmaxLow ? d : kSoftmaxLow);
}
// Logarithm of the sum of e^x; `top` is NaN if any x is. Divided by its largest term the sum is at least 1: lse >= top.
COAT_HD float softmax_lse(float top, double sum) {
  if (!(abs_(top) < kInf)) return top < 0.f ? top : kNaN;
  const float largest = softmax_term(top, softmax_reference(top));
  return top + kLn2 * log2_(static_cast<float>(sum / static_cast<double>(largest)));
}
// e^(x - lse), 0 below e^kSoftmaxLow; NaN where x is NaN, lse is not finite or far below x.
COAT_HD float softmax_(float x, float lse) {
  const float d = x - lse, p = softmax_exp_(d);
  return d < kSoftmaxHigh ? (d > kSoftmaxLow ? p : 0.f) : kNaN;
}

template <class By = Exact>
COAT_HD float sigmoid_(float x) {
  return By::inverse(1.f + By::exp(-x));
}

// SwiGLU: silu(gate) * up, and the gradients for gate and up; the latter returns sigmoid(gate).
template <class By = Exact>
COAT_HD float swiglu(float gate, float up) {
  return sigmoid_<By>(gate) * gate * up;
}
template <class By = Exact>
COAT_HD float swiglu_gradient(float gate, float up, float dy, float& dgate, float& dup) {
  const float s = sigmoid_<By>(gate);
  dup = dy * (s * gate);
  dgate = dy * up * (s * fma_(gate, 1.f - s, 1.f));
  return s;
}

// The scale of that gradient as e5m2/t where no |dy| is above amax, no |gate| above `gate` and no |up| above `up`:
// |silu(x)| <= |x| and |silu'(x)| < kSiluSlope. Bits of magnitudes order like them, NaN above all; a bound of NaN or
// Inf stands for the largest finite number.
constexpr float kSiluSlope = 1.1f;
COAT_HD float swiglu_gradient_scale(float amax, float gate, float up) {
  const uint32_t a = bits_of(gate), b = bits_of(kSiluSlope * up);
  return scale_from_bound<E5M2>(amax * float_of(a > b ? a : b));
}

// Phi(x) = erfc(-x / sqrt 2) / 2, the normal distribution function. erfc(z) e^(z^2) is a polynomial in 1 / (1 + z / 2),
// fitted for relative error below 2e-7 on [0, 10]. Here Phi(-|x|).
COAT_HD float normal_tail(float x) {
  const float z = abs_(x) * 0.707106781f;
  const float t = 1.f / fma_(z, 0.5f, 1.f);
  float p = -0.0550492521f;
  p = fma_(p, t, 0.263893274f);
  p = fma_(p, t, -0.441456901f);
  p = fma_(p, t, 0.221165654f);
  p = fma_(p, t, 0.0170973252f);
  p = fma_(p, t, 0.181239847f);
  p = fma_(p, t, 0.249796843f);
  p = fma_(p, t, 0.281097736f);
  p = fma_(p, t, 0.282221458f);
  p = fma_(p, t, -6.0152955e-06f);
  return 0.5f * p * exp_(-z * z);
}
COAT_HD float normal_cdf(float x) {
  const float tail = normal_tail(x);
  return x < 0.f ? tail : (x >= 0.f ? 1.f - tail : x);
}

// GELU in its exact form, x Phi(x), and its derivative Phi(x) + x phi(x).
COAT_HD float gelu(float x) { return x * normal_cdf(x); }
COAT_HD float gelu_derivative(float x) { return fma_(x, 0.398942280f * exp_(-0.5f * x * x), normal_cdf(x)); }

// ---- numbers in two parts, high + low, high the bf16 that is nearest to them; every step is rounded to bf16 ----

COAT_HD float to_bf16(float x) { return BFloat16::decode(BFloat16::encode(x)); }

struct TwoParts {
  float high, low;
};
// a + b, exactly, in any order of their magnitudes; what is not finite has no second part.
COAT_HD TwoParts two_sum(float a, float b) {
  const float sum = to_bf16(a + b), of_b = to_bf16(sum - a), of_a = to_bf16(sum - of_b);
  return {sum, abs_(sum) < kInf ? to_bf16(to_bf16(b - of_b) + to_bf16(a - of_a)) : 0.f};
}
COAT_HD TwoParts grow(TwoParts x, float a) {
  const TwoParts sum = two_sum(x.high, a);
  return two_sum(sum.high, to_bf16(x.low + sum.low));
}
// FP32 holds the product of two bf16.
COAT_HD TwoParts product(TwoParts a, TwoParts b) {
  const float exact = a.high * b.high, high = to_bf16(exact);
  const float crossed = to_bf16(to_bf16(a.high * b.low) + to_bf16(a.low * b.high));
  return two_sum(high, to_bf16(to_bf16(exact - high) + crossed));
}

// What the rules with two averages of gradients have in common: gain = 1 - beta.
struct Averages {
  float lr, beta1, gain1, beta2, gain2, weight_decay;
  template <class Args>
  explicit Averages(const Args& args)
      : lr(args.lr),
        beta1(args.beta1),
        gain1(args.gain1),
        beta2(args.beta2),
        gain2(args.gain2),
        weight_decay(args.weight_decay) {}
};

// One AdamW update (COAT section 1.3 order: moments, bias-corrected denominator with eps outside the root, decoupled
// decay on the old parameter). correct1 = 1 - beta1^t, correct2 = sqrt(1 - beta2^t).
struct AdamW : Averages {
  static constexpr int moments = 2;
  float root, floor;  // the denominator is root sqrt(v) + floor
  template <class Args>
  explicit AdamW(const Args& args)
      : Averages(args), root(args.correct1 / args.correct2), floor(args.eps * args.correct1) {}
  COAT_HD void update(float& p, float g, float& m, float& v) const {
    m = fma_(m, beta1, gain1 * g);
    v = fma_(v, beta2, (gain2 * g) * g);
    p = p - step(p, m, v);
    v = kept(v);
  }
  // What the parameter loses.
  COAT_HD float step(float p, float m, float v) const {
    return lr * fma_(p, weight_decay, m / fma_(sqrt_(v), root, floor));
  }
  // Where g^2 overflows v is the largest number: no scale counts an infinity, so that as a code it could become 1.
  static COAT_HD float kept(float v) { return v == kInf ? kLargest : v; }
};

// One AdamW update with moments in bf16 where the parameter or the second moment has two parts (Collage, arXiv
// 2405.03637): moments are rounded at every step, as bf16 arithmetic has it, and beta2 has two parts where v has. Of
// numbers in two parts the denominator and the decay read the first.
struct Collage : AdamW {
  TwoParts decay;  // of v: beta2, which near 1 is 1 in bf16
  COAT_HD explicit Collage(const AdamW& rule) : AdamW(rule) {
    const float high = to_bf16(beta2);
    decay = {high,
             to_bf16(high > 0.5f ? (1.f - high) - gain2 : beta2 - high)};  // gain2 has more digits of what is left
  }
  // p is in bf16 where it has parts, else exact.
  COAT_HD void update(bool p_parts, bool v_parts, TwoParts& p, float g, float& m, TwoParts& v) const {
    m = to_bf16(to_bf16(m * beta1) + gain1 * g);
    const float square = (gain2 * g) * g;
    if (v_parts)
      v = grow(product(v, decay), kept(to_bf16(square)));
    else
      v.high = to_bf16(to_bf16(v.high * beta2) + square);
    v.high = kept(v.high);
    const float lost = step(p.high, m, v.high);
    if (p_parts)
      p = grow(p, to_bf16(-lost));
    else
      p.high = p.high - lost;
  }
  static COAT_HD float kept(float v) { return v == kInf ? float_of(0x7f7f0000u) : v; }
};

// One Lion update (Chen et al., 2023, arXiv 2302.06675, algorithm 2): the sign of one average moves the parameter,
// another one is kept. sign(0) = 0, and NaN stays NaN.
struct Lion : Averages {
  static constexpr int moments = 1;
  using Averages::Averages;
  COAT_HD void update(float& p, float g, float& m) const {
    const float c = fma_(m, beta1, gain1 * g);
    p = p - lr * fma_(p, weight_decay, c > 0.f ? 1.f : (c < 0.f ? -1.f : c));
    m = fma_(m, beta2, gain2 * g);
  }
};

// One update of SGD with momentum, as PyTorch has it: decay is a part of the gradient, and the caller's gain is 1 at
// the first step, then 1 - dampening.
struct Sgd {
  static constexpr int moments = 1;
  float lr, momentum, gain, weight_decay;
  bool nesterov;
  template <class Args>
  explicit Sgd(const Args& args)
      : lr(args.lr),
        momentum(args.momentum),
        gain(args.gain),
        weight_decay(args.weight_decay),
        nesterov(args.nesterov != 0) {}
  COAT_HD void update(float& p, float g, float& m) const {
    const float d = fma_(p, weight_decay, g);
    m = fma_(m, momentum, gain * d);
    p = p - lr * (nesterov ? fma_(m, momentum, d) : m);
  }
};

// Philox 4x32-10: 128 random bits for (seed, counter), the same on every device and after a resume.
struct RandomKeys {
  uint32_t word[20];
  COAT_HD explicit RandomKeys(uint64_t seed) : word{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)} {
    for (int i = 2; i < 20; ++i) word[i] = word[i - 2] + (i % 2 == 0 ? 0x9E3779B9u : 0xBB67AE85u);
  }
};
struct Random {
  uint32_t word[4];
  COAT_HD Random(uint64_t seed, uint64_t counter) : Random(RandomKeys(seed), counter) {}
  COAT_HD Random(const RandomKeys& keys, uint64_t counter)
      : word{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0} {
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = wide_product(word[0], 0xD2511F53u), b = wide_product(word[2], 0xCD9E8D57u);
      word[0] = static_cast<uint32_t>(b >> 32) ^ word[1] ^ keys.word[2 * round];
      word[1] = static_cast<uint32_t>(b);
      word[2] = static_cast<uint32_t>(a >> 32) ^ word[3] ^ keys.word[2 * round + 1];
      word[3] = static_cast<uint32_t>(a);
    }
  }
  // 16 bits, i < 8
  COAT_HD uint32_t half(int i) const { return word[i / 2] >> (i % 2 * 16) & 0xffffu; }
  // in (0, 1): 23 random bits and a half
  COAT_HD float uniform(int i) const { return (static_cast<float>(word[i] >> 9) + 0.5f) * 1.1920929e-7f; }
  // standard normal by Box-Muller: sqrt(-2 ln u) cos(2 pi w), the cosine folded to [-pi/4, pi/4]
  COAT_HD float normal() const {
    const float radius = sqrt_(-2.f * kLn2 * log2_(uniform(0)));
    const float turn = uniform(1) * 8.f;  // eighths of a circle
    const int eighth = static_cast<int>(turn), quarter = (eighth + 1) >> 1;
    const float a = (turn - static_cast<float>(2 * quarter)) * 0.785398163f, a2 = a * a;
    const float sine = a * fma_(a2, fma_(a2, fma_(a2, -1.98412698e-4f, 8.33333333e-3f), -1.66666667e-1f), 1.f);
    const float cosine =
        fma_(a2, fma_(a2, fma_(a2, fma_(a2, 2.48015873e-5f, -1.38888889e-3f), 4.16666667e-2f), -0.5f), 1.f);
    const float value = (quarter & 1) ? sine : cosine;
    return radius * ((quarter == 1 || quarter == 2) ? -value : value);
  }
};

// ---- attention ----

// The mean of T values from their sums in strands: strand s adds values s, s + kStrands, .. in this order.
COAT_HD float mean_of_strands(const float (&sum)[kStrands], int64_t T) {
  return join_strands(sum) / static_cast<float>(T);
}

// ---- rope ----

// Position of row t of a sequence of T in its document, which begins at `start`; inside the table for any start.
COAT_HD int64_t rope_position(int64_t t, int64_t start, int64_t T) {
  const int64_t position = t - start;
  return position < 0 ? 0 : position < T ? position : T - 1;
}

// ---- rounding of parameters to bf16 ----

// Stochastic rounding: one draw of Random serves kDrawn consecutive elements, element e its half e % kDrawn, so that
// the bits depend on the seed, the member of the list and the element alone.
constexpr int kDrawn = 8;
template <class Keys>  // those of a seed, or the seed
COAT_HD Random rounding_bits(const Keys& keys, int64_t member, int64_t element) {
  return Random(keys, static_cast<uint64_t>(member) << 40 | static_cast<uint64_t>(element) / kDrawn);
}
// x as a bf16, up with the probability of what is cut off; NaN and infinities stay.
COAT_HD float round_stochastic(float x, uint32_t bits) {
  const uint32_t u = bits_of(x);
  return (u & 0x7f800000u) == 0x7f800000u ? x : float_of((u + bits) & 0xffff0000u);
}
// x as a bf16, and in `lost` what that loses; nothing of what is no number.
COAT_HD float round_kahan(float x, float& lost) {
  const float kept = to_bf16(x);
  lost = abs_(kept) < kInf ? x - kept : 0.f;
  return kept;
}

}  // namespace coat
