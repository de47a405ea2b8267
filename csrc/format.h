// Arithmetic of formats, one source for both backends: ranges, and a view a format.
// A kernel that writes a blocked format does: compute, range of the block, seal, store. Nothing else knows what a scale
// is.
#pragma once
#include <type_traits>

#include "code.h"
#include "tensor.h"

namespace coat {

// ---- ranges ----

// All bits where true: a mask, because compilers turn a chain of choices into branches that they cannot vectorize.
COAT_HD uint32_t mask_of(bool condition) { return 0u - static_cast<uint32_t>(condition); }

// Largest finite |x| and the number of infinities. NaN and Inf never set a scale.
struct Range {
  uint32_t max = 0;
  uint32_t infs = 0;
  COAT_HD void add(float x) {
    const uint32_t a = bits_of(x) & 0x7fffffffu;
    const uint32_t finite = a & mask_of(a < 0x7f800000u);
    max = finite > max ? finite : max;
    infs += a == 0x7f800000u ? 1u : 0u;
  }
  COAT_HD void merge(const Range& other) {
    max = other.max > max ? other.max : max;
    infs += other.infs;
  }
};

// The same with the smallest |x| that is not zero (exact wherever the zeros sit).
struct RangeWithMin : Range {
  uint32_t min = 0x7f800000u;
  COAT_HD void add(float x) {
    Range::add(x);
    const uint32_t a = bits_of(x) & 0x7fffffffu;
    const uint32_t keep = mask_of(a - 1u < 0x7f7fffffu);  // neither zero nor Inf nor NaN
    const uint32_t positive = (a & keep) | (0x7f800000u & ~keep);
    min = positive < min ? positive : min;
  }
  COAT_HD void merge(const RangeWithMin& other) {
    Range::merge(other);
    min = other.min < min ? other.min : min;
  }
};

// The same for maps, which hold no NaN: infs counts those as well.
struct RangeWithNaN : Range {
  COAT_HD void add(float x) {
    Range::add(x);
    infs += (bits_of(x) & 0x7fffffffu) > 0x7f800000u ? 1u : 0u;
  }
};

COAT_HD void count_infs(Status* status, uint32_t infs) {
  if (infs == 0) return;
#ifdef __CUDA_ARCH__
  atomicAdd(reinterpret_cast<unsigned long long*>(&status->infs), static_cast<unsigned long long>(infs));
#else
  __atomic_fetch_add(&status->infs, static_cast<int64_t>(infs), __ATOMIC_RELAXED);
#endif
}

// The smallest power of two that is not below x, which is positive and finite.
COAT_HD float power_not_below(float x) { return float_of((bits_of(x) + 0x7fffffu) & 0x7f800000u); }

// Scale that maps the range's maximum to the largest code; 1 / max for a range of zeros. Pow2, as always of f16
// (FP8-LM): the power of two that is not below it, under which codes round as values do.
template <class Code, bool Pow2 = Code::bits == 16>
COAT_HD float scale_for(const Range& range) {
  const float amax = range.max == 0 ? 1.f : float_of(range.max);
  const float exact = amax / Code::max();
  const float scale = Pow2 ? power_not_below(exact) : exact;
  return scale < kMinNormal ? kMinNormal : scale;
}

// The scale for a tensor of which only the largest |x| is known; NaN and Inf stand for the largest finite number.
template <class Code>
COAT_HD float scale_from_amax(float amax) {
  const uint32_t a = bits_of(amax) & 0x7fffffffu;
  return scale_for<Code>(Range{a < 0x7f800000u ? a : bits_of(kLargest), 0});
}

// The scale for a tensor of which only a bound of |x| is known: the power of two that is not below that of such a
// largest |x|. Codes are then the values' own digits, however wide the bound is. A bound 2^k above the largest |x|
// costs the lowest k of the 2^32 that E5M2 spans, values that are 2^(31 - k) below the largest.
template <class Code>
COAT_HD float scale_from_bound(float bound) {
  return power_not_below(scale_from_amax<Code>(bound));
}

// The scale after a step, from the largest magnitude that it shall hold; none was seen: it stays.
template <class Code>
COAT_HD float delayed_scale(float amax, float headroom, float scale) {
  if (amax == 0.f) return scale;
  const float next = scale_from_amax<Code>(amax) * headroom;
  return next < kMinNormal ? kMinNormal : next > kLargest ? kLargest : next;
}

// ---- views: open(b) -> what load needs of block b; seal(b, range) -> what store needs; store = put what is scaled
// ----

template <class Code, DType Type>
struct Plain {
  static constexpr Format format() { return {Type, Scaling::none, 0}; }
  static constexpr int run = 0;
  struct Open {};
  struct Sealed {};
  Code* codes;
  explicit Plain(const Tensor& t) : codes(t.as<Code>()) {}
  COAT_HD Open open(int64_t) const { return {}; }
  COAT_HD float load(int64_t i, Open) const { return Code::decode(codes[i].code); }
  COAT_HD void store(int64_t i, Sealed, float x) const { codes[i].code = Code::encode(x); }
};

// What views with a scale a block share: codes times the scale.
template <class Code, class Scale>
struct Scaled {
  struct Open {
    float scale;
  };
  struct Sealed {
    float inverse;
  };
  Code* codes;
  Scale* scale;
  Status* status;
  explicit Scaled(const Tensor& t) : codes(t.as<Code>()), scale(t.scales<Scale>()), status(t.status) {}
  COAT_HD float load(int64_t i, Open o) const { return Code::decode(codes[i].code) * o.scale; }
  static COAT_HD float scaled(Sealed s, float x) { return x * s.inverse; }
  COAT_HD void put(int64_t i, float y) const { codes[i].code = Code::encode(y); }
  COAT_HD void store(int64_t i, Sealed s, float x) const { put(i, scaled(s, x)); }
};

// One f32 scale a tensor; the only block is 0.
template <class Code, DType Type>
struct PerTensor : Scaled<Code, float> {
  static constexpr Format format() { return {Type, Scaling::tensor, 0}; }
  static constexpr int run = 0;
  using Base = Scaled<Code, float>;
  using Base::Base, Base::scale, Base::status;
  using typename Base::Open, typename Base::Sealed;
  COAT_HD Open open(int64_t) const { return {*scale}; }
  COAT_HD Sealed seal(int64_t, const Range& range) const {
    count_infs(status, range.infs);
    return seal_as(scale_for<Code>(range));
  }
  COAT_HD Sealed seal_as(float given) const {  // a scale chosen elsewhere: delayed, cached or saved
    *scale = given;
    return {1.f / given};
  }
};

// One scale a run of N in a row; the last run of a row may be short. Scale of N = 16: bf16 rounded up, else f32.
template <class Code, DType Type, int N, bool Pow2 = false>
struct Runs : Scaled<Code, std::conditional_t<N == 16, uint16_t, float>> {
  static constexpr Format format() { return {Type, Scaling::run, N, Pow2}; }
  static constexpr int run = N;
  using Scale = std::conditional_t<N == 16, uint16_t, float>;
  using Base = Scaled<Code, Scale>;
  using Base::Base, Base::scale, Base::status;
  using typename Base::Open, typename Base::Sealed;
  COAT_HD Open open(int64_t b) const {
    if constexpr (N == 16) return {BFloat16::decode(scale[b])};
    return {static_cast<float>(scale[b])};
  }
  COAT_HD Sealed seal(int64_t b, const Range& range) const {
    count_infs(status, range.infs);
    float s = scale_for<Code, Pow2>(range);
    if constexpr (N == 16) {
      scale[b] = BFloat16::encode_up(s);
      s = BFloat16::decode(scale[b]);
    } else {
      scale[b] = s;
    }
    return {1.f / s};
  }
};

// One f32 scale a block of N x N of a matrix; the last ones of its rows and columns may be short.
template <class Code, DType Type, int N, bool Pow2 = false>
struct Blocks : Runs<Code, Type, N, Pow2> {
  static constexpr Format format() { return {Type, Scaling::block, N, Pow2}; }
  using Runs<Code, Type, N, Pow2>::Runs;
};

// Dynamic range expansion (COAT section 3.2): x is stored as sign(x) * (|x| / centre)^k / scale, in runs of N over the
// flat tensor, with k = floor(16 log2(max^2 / 2) / log2 R) / 16, 1/16 <= k <= 64, R = MX / MN over the non-zero |x|.
template <class Code, DType Type, int N>
struct Expanded {
  static constexpr Format format() { return {Type, Scaling::expand, N}; }
  static constexpr int run = N;
  struct Open {
    float shift, inverse_k, centre;
  };
  struct Sealed {
    float inverse, k, log2_centre;
  };
  Code* codes;
  float *scale, *k, *centre;
  Status* status;
  explicit Expanded(const Tensor& t) : codes(t.as<Code>()), scale(t.scales<float>()), status(t.status) {
    k = scale + blocks_of(t.format, t.shape);
    centre = k + blocks_of(t.format, t.shape);
  }
  COAT_HD Open open(int64_t b) const {
    const float inverse_k = 1.f / k[b];
    return {log2_(scale[b]) * inverse_k, inverse_k, centre[b]};
  }
  // The logarithm is one of 127: a kernel may take it from a table.
  COAT_HD float load(int64_t i, Open o) const {
    const float x = Code::decode(codes[i].code);
    const float magnitude = exp2_(fma_(log2_(abs_(x)), o.inverse_k, o.shift)) * o.centre;
    return x == 0.f ? x : copysign_(magnitude, x);
  }
  // k for the logarithm of R; that may round to 0 for neighbours, and the quotient is Inf or NaN.
  template <class By>
  static COAT_HD float power_for(float log2_r) {
    const float q = By::quotient(16.f * log2_(Code::max() * Code::max() / 2.f), log2_r);
    const int steps = static_cast<int>(q < 1024.f ? q : 1024.f);
    return static_cast<float>(steps < 1 ? 1 : steps) / 16.f;
  }
  // The scale that maps the largest power to the largest code.
  template <class By>
  static COAT_HD float scale_for_top(float top) {
    return By::quotient(top, Code::max(), 1.f / Code::max());
  }
  COAT_HD Sealed seal(int64_t b, const RangeWithMin& range) const {
    count_infs(status, range.infs);
    float s = 1.f / Code::max(), power = 1.f, middle = 1.f;
    if (range.max != 0) {
      const float mx = float_of(range.max), mn = float_of(range.min);
      if (range.max == range.min) {
        middle = mx;
      } else {
        const float log2_mx = log2_(mx);
        power = power_for<Ieee>(log2_mx - log2_(mn));
        middle = sqrt_(mx) * sqrt_(mn);
        s = scale_for_top<Ieee>(exp2_((log2_mx - log2_(middle)) * power));
      }
    }
    scale[b] = s;
    k[b] = power;
    centre[b] = middle;
    return {1.f / s, power, log2_(middle)};
  }
  COAT_HD void store(int64_t i, Sealed s, float x) const {
    const float e = exp2_((log2_(abs_(x)) - s.log2_centre) * s.k);
    const bool keep = !(abs_(x) > 0.f);  // zero keeps its sign, NaN stays NaN
    codes[i].code = Code::encode(keep ? x : copysign_(e * s.inverse, x));
  }
};

// One f32 scale, the largest magnitude, a run of N over the flat tensor; codes of a map. Codes of 4 bits lie two a
// byte, the first in the low half: a store of the first clears the second, so one thread stores both, in this order. A
// run of zeros has the scale 1, and 0 where the map has no zero, so that it decodes to zeros.
template <class Code, DType Type, int N>
struct Mapped : Scaled<Code, float> {
  static constexpr Format format() { return {Type, Scaling::flat, N}; }
  static constexpr int run = N;
  using Base = Scaled<Code, float>;
  using Base::Base, Base::codes, Base::scale, Base::status, Base::scaled;
  using typename Base::Open, typename Base::Sealed;
  COAT_HD Open open(int64_t b) const { return {scale[b]}; }
  COAT_HD float load(int64_t i, Open o) const {
    if constexpr (Code::bits == 8) return Code::decode(codes[i].code) * o.scale;
    const int byte = codes[i >> 1].code;
    return Code::decode(static_cast<uint8_t>((i & 1) != 0 ? byte >> 4 : byte & 15)) * o.scale;
  }
  COAT_HD Sealed seal(int64_t b, const RangeWithNaN& range) const {
    count_infs(status, range.infs);
    const float s = scale_for<Code>(range);
    scale[b] = !Code::has_zero && range.max == 0 ? 0.f : s;
    return {1.f / s};
  }
  COAT_HD void put(int64_t i, float y) const {
    const uint8_t code = Code::encode(y);
    if constexpr (Code::bits == 8)
      codes[i].code = code;
    else if ((i & 1) == 0)
      codes[i >> 1].code = code;
    else
      codes[i >> 1].code = static_cast<uint8_t>(codes[i >> 1].code | code << 4);
  }
  COAT_HD void store(int64_t i, Sealed s, float x) const { put(i, scaled(s, x)); }
};

// Value and remainder, both bf16, each in a plane of its own: 16 bits of a value, unless it is not finite.
struct BF16X2 {
  static constexpr Format format() { return {DType::bf16, Scaling::remainder, 0}; }
  static constexpr int run = 0;
  struct Open {};
  struct Sealed {};
  BFloat16 *codes, *low;
  explicit BF16X2(const Tensor& t) : codes(t.as<BFloat16>()), low(t.scales<BFloat16>()) {}
  COAT_HD Open open(int64_t) const { return {}; }
  COAT_HD float load(int64_t i, Open) const { return BFloat16::decode(codes[i].code) + BFloat16::decode(low[i].code); }
  COAT_HD void store(int64_t i, Sealed, float x) const {
    codes[i].code = BFloat16::encode(x);
    const float high = BFloat16::decode(codes[i].code);
    low[i].code = abs_(high) < kInf ? BFloat16::encode(x - high) : uint16_t{0};
  }
};

// V without the code of 0 for what is positive: the smallest positive code instead, so that a second moment is never
// stored as less than it can be divided by. No other code changes.
template <class V>
struct Floored : V {
  using Code = std::remove_reference_t<decltype(*V::codes)>;
  using V::V;
  static COAT_HD float scaled(typename V::Sealed s, float x) {
    const float y = V::scaled(s, x);
    return x > 0.f && y < Code::least() ? Code::least() : y;
  }
  COAT_HD void store(int64_t i, typename V::Sealed s, float x) const { V::put(i, scaled(s, x)); }
};

// What seal takes.
template <class V>
using RangeOf = std::conditional_t<V::format().scaling == Scaling::expand, RangeWithMin,
                                   std::conditional_t<V::format().scaling == Scaling::flat, RangeWithNaN, Range>>;

// Whether storing turns infinities into the largest code.
template <class V>
constexpr bool kSaturates = V::format().dtype != DType::f32 && V::format().dtype != DType::bf16;

using F32 = Plain<Float32, DType::f32>;
using BF16 = Plain<BFloat16, DType::bf16>;
using F16 = Plain<Float16, DType::f16>;
using F16T = PerTensor<Float16, DType::f16>;
using E4M3T = PerTensor<E4M3, DType::e4m3>;
using E5M2T = PerTensor<E5M2, DType::e5m2>;
using E4M3G16 = Runs<E4M3, DType::e4m3, 16>;
using I8G16 = Runs<Int8, DType::i8, 16>;
using E4M3G64 = Runs<E4M3, DType::e4m3, 64>;
using E4M3G128 = Runs<E4M3, DType::e4m3, 128>;
using E4M3G256 = Runs<E4M3, DType::e4m3, 256>;
using E4M3B128 = Blocks<E4M3, DType::e4m3, 128>;
using E4M3R = Runs<E4M3, DType::e4m3, kWholeRow, true>;
using E4M3G128P2 = Runs<E4M3, DType::e4m3, 128, true>;
using E4M3B128P2 = Blocks<E4M3, DType::e4m3, 128, true>;
using E4M3X64 = Expanded<E4M3, DType::e4m3, 64>;
using E4M3X128 = Expanded<E4M3, DType::e4m3, 128>;
using E4M3X256 = Expanded<E4M3, DType::e4m3, 256>;
using E5M2G128 = Runs<E5M2, DType::e5m2, 128>;
using E5M2X128 = Expanded<E5M2, DType::e5m2, 128>;
using D8G256 = Mapped<D8, DType::d8, 256>;
using U8G256 = Mapped<U8, DType::u8, 256>;
using D4G128 = Mapped<D4, DType::d4, 128>;
using U4G128 = Mapped<U4, DType::u4, 128>;

template <class... V>
struct Views {};

// Formats that second moments may have with a floor: those that can lose what is small in a run.
using FlooredViews = Views<Floored<F16T>, Floored<E4M3T>, Floored<E5M2T>, Floored<E4M3G64>, Floored<E4M3G128>,
                           Floored<E4M3G256>, Floored<E5M2G128>, Floored<U8G256>>;

// Calls f with the view of t, one of the list named by the op: what is listed is what gets compiled.
template <class... V, class F>
void with(const char* argument, const Tensor& t, Views<V...>, F&& f) {
  const bool found = ((t.format == V::format() ? (f(V(t)), true) : false) || ...);
  if (!found) fail("format", argument, argument, " ", text_of(t), " has a format that this kernel is not compiled for");
}

}  // namespace coat
