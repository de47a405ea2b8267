// Emulated arithmetic, one source for both backends: f32 values that hold numbers of fewer bits, rounded after each
// operation. A reference for arithmetic that no machine here has, and slow.
#pragma once
#include "formula.h"

namespace coat {

COAT_HD uint64_t bits_of_double(double x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  return __builtin_bit_cast(uint64_t, x);
#endif
}
COAT_HD double double_of(uint64_t u) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(u));
#else
  return __builtin_bit_cast(double, u);
#endif
}
constexpr double power_of_two(int exponent) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(1023 + exponent) << 52);
}
constexpr double kInfinite = power_of_two(1024);

// Numbers of a sign, `range` bits of exponent and `precision` bits behind the leading one, in the manner of IEEE 754
// with the highest exponent left out (float), or with infinities there (ieee); or of `range` bits before the point, the
// sign included, and `precision` behind it (fixed: Gupta et al., 2015, arXiv 1502.02551); all divided by 2^shift. What
// is too large becomes the largest, or with ieee infinite where it is rounded beyond that; NaN stays NaN.
struct Arithmetic {
  double low, high;  // ends of what is rounded
  double most;       // beyond it lie infinities
  double least;      // the power of two below which neighbours come no closer
  double unit;       // distance of neighbours as a part of the power of two under them
  uint64_t seed;
  bool stochastic;

  // Of the arguments of an op.
  template <class Args>
  explicit Arithmetic(const Args& args) : seed(args.seed), stochastic(args.rounding == 1) {
    const bool fixed = args.arithmetic == 1, ieee = args.arithmetic == 2;
    const int64_t few = fixed ? 1 : 2, many = fixed ? 25 : 8, behind = fixed ? 25 - args.range : 23;
    if (args.range < few || args.range > many)
      fail("value", "range", "range is ", args.range, " and must be from ", few, " to ", many);
    if (args.precision < 0 || args.precision > behind)
      fail("value", "precision", "precision is ", args.precision, " and must be from 0 to ", behind);
    if (args.shift < 0 || args.shift > 64) fail("value", "shift", "shift is ", args.shift, " and must be from 0 to 64");
    const int range = static_cast<int>(args.range), precision = static_cast<int>(args.precision);
    const int bias = (1 << (range - 1)) - 1;  // of a float
    // all fixed numbers lie in one such power
    least = power_of_two(fixed ? range : 1 - bias);
    unit = power_of_two(fixed ? -range - precision : -precision);
    high = fixed ? power_of_two(range - 1) - power_of_two(-precision) : power_of_two(bias) * (2 - unit);
    low = fixed ? -power_of_two(range - 1) : -high;
    most = ieee ? high : kInfinite;
    if (ieee) high = power_of_two(bias + 1), low = -high;
    const double shifted = power_of_two(-static_cast<int>(args.shift));
    least *= shifted, high *= shifted, low *= shifted, most *= shifted;
  }

  // Where a number falls between its neighbours: from -1/2 to 1/2 of their distance, from the bits of the seed, the
  // place and the number, so that what is computed again is rounded alike and needs no count of steps.
  COAT_HD double offset(double x, uint64_t place) const {
    const uint64_t counter = place ^ static_cast<uint64_t>(bits_of(static_cast<float>(x))) << 32;
    return (static_cast<double>(Random(seed, counter).word[0] >> 8) + 0.5) * 0x1p-24 - 0.5;
  }
  // To the nearest number, ties to even ones; with an offset up with the probability of what is left over. Adding and
  // subtracting 1.5 * 2^52 distances rounds, since FP64 has 53 bits.
  COAT_HD double round(double x, double offset) const {
    const double c = x < low ? low : (x > high ? high : x);
    const double power = double_of(bits_of_double(c) & 0x7ff0000000000000u);
    const double distance = (power > least ? power : least) * unit;
    const double anchor = distance * 0x1.8p52;
    const double rounded = ((c + offset * distance) + anchor) - anchor;
    return rounded > most ? kInfinite : (rounded < -most ? -kInfinite : rounded);
  }
  COAT_HD double round_at(double x, uint64_t place) const { return round(x, stochastic ? offset(x, place) : 0.0); }
  template <int W>
  COAT_HD void round_all(double (&x)[W], uint64_t place, uint64_t next) const {
    double offsets[W] = {};
    if (stochastic)
      for (int c = 0; c < W; ++c) offsets[c] = offset(x[c], place + c * next);
    for (int c = 0; c < W; ++c) x[c] = round(x[c], offsets[c]);
  }
};

inline void check_chunk(int64_t chunk) {
  if (chunk < 0) fail("value", "chunk", "chunk is ", chunk, " and must be at least 0");
}

// W neighbouring elements of a product: y[c] = sum over k of a[k] * b[k * b_step + c], in FP64, where products are
// exact. Each sum is rounded, within chunks of k and then of chunks (Wang et al., 2018, arXiv 1812.08011, section 2.3);
// with chunk 0 the whole alone. The places are those of K sums and as many more as there are chunks, and one: `element`
// is the first element's number in y.
template <int W>
COAT_HD void emulated_sums(const Arithmetic& arithmetic, const float* a, const float* b, int64_t b_step, int64_t K,
                           int64_t chunk, const float (&bias)[W], uint64_t element, float (&y)[W]) {
  const int64_t length = chunk == 0 ? K : chunk, chunks = length == 0 ? 0 : (K + length - 1) / length;
  const uint64_t each = static_cast<uint64_t>(K + chunks + 1), first = element * each;
  double total[W] = {};
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = i * length, end = begin + length < K ? begin + length : K;
    double part[W] = {};
    for (int64_t k = begin; k < end; ++k) {
      const double left = static_cast<double>(a[k]);
      for (int c = 0; c < W; ++c) part[c] += left * static_cast<double>(b[k * b_step + c]);
      if (chunk != 0) arithmetic.round_all(part, first + static_cast<uint64_t>(k), each);
    }
    for (int c = 0; c < W; ++c) total[c] += part[c];
    if (chunk != 0) arithmetic.round_all(total, first + static_cast<uint64_t>(K + i), each);
  }
  for (int c = 0; c < W; ++c) total[c] += static_cast<double>(bias[c]);
  arithmetic.round_all(total, first + (each - 1), each);
  for (int c = 0; c < W; ++c) y[c] = static_cast<float>(total[c]);
}

// One update of SGD as formula.h has it, in three steps that are each rounded: decay, momentum, parameter (Wang et al.,
// 2018, section 2.2).
struct EmulatedSgd {
  Arithmetic arithmetic;
  double lr, momentum, gain, weight_decay;
  bool nesterov;
  template <class Args>
  explicit EmulatedSgd(const Args& args)
      : arithmetic(args),
        lr(args.lr),
        momentum(args.momentum),
        gain(args.gain),
        weight_decay(args.weight_decay),
        nesterov(args.nesterov != 0) {}
  COAT_HD void update(float& p, float& m, float g, float factor, int64_t member, int64_t element) const {
    const uint64_t place = static_cast<uint64_t>(member) << 42 | static_cast<uint64_t>(element) << 2;
    const double before = static_cast<double>(p), clipped = static_cast<double>(g) * static_cast<double>(factor);
    const double d = arithmetic.round_at(clipped + weight_decay * before, place);
    const double moment = arithmetic.round_at(momentum * static_cast<double>(m) + gain * d, place + 1);
    const double by = nesterov ? d + momentum * moment : moment;
    m = static_cast<float>(moment);
    p = static_cast<float>(arithmetic.round_at(before - lr * by, place + 2));
  }
};

}  // namespace coat
