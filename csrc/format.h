// Arithmetic of formats, one source for both backends: codes, logarithms, ranges and a view a format.
// A kernel that writes a blocked format does: compute, range of the block, seal, store. Nothing else knows what a scale
// is.
#pragma once
#include <cstdint>
#include <type_traits>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#endif

#include "tensor.h"

#ifdef __CUDACC__
#define COAT_HD __host__ __device__ __forceinline__
#else
#define COAT_HD inline __attribute__((always_inline))
#endif

namespace coat {

COAT_HD uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}
COAT_HD float float_of(uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  return __builtin_bit_cast(float, u);
#endif
}
COAT_HD float fma_(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
COAT_HD float sqrt_(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}
COAT_HD float abs_(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
COAT_HD float copysign_(float magnitude, float sign) {
  return float_of((bits_of(magnitude) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

constexpr float kNaN = __builtin_nanf("");
constexpr float kInf = __builtin_inff();
constexpr float kMinNormal = 1.17549435e-38f;  // 2^-126: no stored scale is smaller, so that 1 / scale is finite

// 2^f for |f| <= 1/2.
COAT_HD float exp2_fraction(float f) {
  float p = 1.52527338e-5f;
  p = fma_(p, f, 1.54035304e-4f);
  p = fma_(p, f, 1.33335581e-3f);
  p = fma_(p, f, 9.61812911e-3f);
  p = fma_(p, f, 5.55041087e-2f);
  p = fma_(p, f, 2.40226507e-1f);
  p = fma_(p, f, 6.93147181e-1f);
  return fma_(p, f, 1.f);
}
constexpr float kRoundToInteger = 12582912.f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer

// 2^x. Polynomial in the fraction; relative error below 2e-7; saturates to 0 and Inf; NaN stays NaN.
COAT_HD float exp2_(float x) {
  const float c = x < -151.f ? -151.f : (x > 129.f ? 129.f : x);
  const float shifted = c + kRoundToInteger;
  const float p = exp2_fraction(c - (shifted - kRoundToInteger));
  const int whole = static_cast<int>(bits_of(shifted) - bits_of(kRoundToInteger));  // a conversion is slow
  const int half = whole >> 1;  // two factors: subnormal results round once
  return p * float_of(static_cast<uint32_t>(half + 127) << 23) *
         float_of(static_cast<uint32_t>(whole - half + 127) << 23);
}

// log2(x) for x > 0; -Inf at 0, NaN below. Exact at powers of two; relative error below 3e-7.
COAT_HD float log2_(float x) {
  const bool tiny = x < kMinNormal;
  const uint32_t u = bits_of(tiny ? x * 16777216.f : x);
  // m in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2), keep the exponent that is left over
  const int e = static_cast<int>(u - 0x3f3504f3u) >> 23;
  const float m = float_of(u - (static_cast<uint32_t>(e) << 23));
  const float t = (m - 1.f) / (m + 1.f), t2 = t * t;
  float p = 2.88539008f / 9.f;
  p = fma_(p, t2, 2.88539008f / 7.f);
  p = fma_(p, t2, 2.88539008f / 5.f);
  p = fma_(p, t2, 2.88539008f / 3.f);
  p = fma_(p, t2, 2.88539008f);
  const float y = fma_(t, p, static_cast<float>(tiny ? e - 24 : e));
  return x > 0.f ? (x < kInf ? y : kInf) : (x == 0.f ? -kInf : kNaN);
}

// ---- codes ----

// A value of Exponent/Mantissa bits with bias Bias and largest finite value Max: round to nearest even, finite values
// and infinities saturate to Max, NaN stays NaN.
template <int Mantissa, int Bias, uint32_t MaxBits, uint8_t NaNCode>
struct Float8 {
  uint8_t code;
  static COAT_HD constexpr float max() { return __builtin_bit_cast(float, MaxBits); }
  static COAT_HD uint8_t encode(float x) {
#ifdef __CUDA_ARCH__  // one instruction, the same rounding
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, Mantissa == 3 ? __NV_E4M3 : __NV_E5M2);
#else
    constexpr int shift = 23 - Mantissa;
    constexpr uint32_t min_normal = static_cast<uint32_t>(128 - Bias) << 23;
    constexpr uint32_t magic = static_cast<uint32_t>(127 + 1 - Bias - Mantissa + 23) << 23;
    const uint32_t u = bits_of(x), a = u & 0x7fffffffu;
    const uint32_t c = a < MaxBits ? a : MaxBits;
    const uint32_t normal =
        ((c + ((1u << (shift - 1)) - 1) + ((c >> shift) & 1u)) >> shift) - ((127 - Bias) << Mantissa);
    const uint32_t subnormal = bits_of(float_of(c) + float_of(magic)) - magic;
    const uint32_t code = a > 0x7f800000u ? NaNCode : (c < min_normal ? subnormal : normal);
    return static_cast<uint8_t>(code | ((u >> 24) & 0x80u));
#endif
  }
  static COAT_HD float decode(uint8_t code) {
#ifdef __CUDA_ARCH__
    const __half_raw half = __nv_cvt_fp8_to_halfraw(code, Mantissa == 3 ? __NV_E4M3 : __NV_E5M2);
    return __half2float(__half(half));
#else
    constexpr int shift = 23 - Mantissa;
    constexpr float step = __builtin_bit_cast(float, static_cast<uint32_t>(127 + 1 - Bias - Mantissa) << 23);
    const uint32_t a = code & 0x7fu;
    const float normal = float_of((a << shift) + (static_cast<uint32_t>(127 - Bias) << 23));
    const float subnormal = static_cast<float>(static_cast<int>(a)) * step;
    const float magnitude = a < (1u << Mantissa) ? subnormal : normal;
    constexpr bool has_inf = NaNCode != 0x7f;
    const float special = has_inf && a == (NaNCode & 0x7cu) ? kInf : kNaN;
    const uint32_t limit = has_inf ? (NaNCode & 0x7cu) : NaNCode;
    return copysign_(a >= limit ? special : magnitude, float_of(static_cast<uint32_t>(code) << 24));
#endif
  }
};
using E4M3 = Float8<3, 7, 0x43e00000u, 0x7f>;   // max 448
using E5M2 = Float8<2, 15, 0x47600000u, 0x7e>;  // max 57344

struct BFloat16 {
  uint16_t code;
  static COAT_HD uint16_t encode(float x) {
#ifdef __CUDA_ARCH__  // one instruction, the same rounding
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
#endif
  }
  static COAT_HD uint16_t encode_up(float x) {  // x >= 0: the smallest bf16 that is not below x
    return static_cast<uint16_t>((bits_of(x) + 0xffffu) >> 16);
  }
  static COAT_HD float decode(uint16_t code) { return float_of(static_cast<uint32_t>(code) << 16); }
};

struct Float32 {
  float code;
  static COAT_HD float encode(float x) { return x; }
  static COAT_HD float decode(float code) { return code; }
};

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

COAT_HD void count_infs(Status* status, uint32_t infs) {
  if (infs == 0) return;
#ifdef __CUDA_ARCH__
  atomicAdd(reinterpret_cast<unsigned long long*>(&status->infs), static_cast<unsigned long long>(infs));
#else
  __atomic_fetch_add(&status->infs, static_cast<int64_t>(infs), __ATOMIC_RELAXED);
#endif
}

// Scale that maps the range's maximum to the largest code; 1 / max for a range of zeros.
template <class Code>
COAT_HD float scale_for(const Range& range) {
  const float amax = range.max == 0 ? 1.f : float_of(range.max);
  const float scale = amax / Code::max();
  return scale < kMinNormal ? kMinNormal : scale;
}

// ---- views: open(b) -> what load needs of block b; seal(b, range) -> what store needs ----

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

// One f32 scale a tensor; the only block is 0.
template <class Code, DType Type>
struct PerTensor {
  static constexpr Format format() { return {Type, Scaling::tensor, 0}; }
  static constexpr int run = 0;
  struct Open {
    float scale;
  };
  struct Sealed {
    float inverse;
  };
  Code* codes;
  float* scale;
  Status* status;
  explicit PerTensor(const Tensor& t) : codes(t.as<Code>()), scale(t.scales<float>()), status(t.status) {}
  COAT_HD Open open(int64_t) const { return {*scale}; }
  COAT_HD float load(int64_t i, Open o) const { return Code::decode(codes[i].code) * o.scale; }
  COAT_HD Sealed seal(int64_t, const Range& range) const {
    count_infs(status, range.infs);
    return seal_as(scale_for<Code>(range));
  }
  COAT_HD Sealed seal_as(float given) const {  // a scale chosen elsewhere: delayed, cached or saved
    *scale = given;
    return {1.f / given};
  }
  COAT_HD void store(int64_t i, Sealed s, float x) const { codes[i].code = Code::encode(x * s.inverse); }
};

// One scale a run of N in a row; the last run of a row may be short. Scale of N = 16: bf16 rounded up, else f32.
template <class Code, DType Type, int N>
struct Runs {
  static constexpr Format format() { return {Type, Scaling::run, N}; }
  static constexpr int run = N;
  using Scale = std::conditional_t<N == 16, uint16_t, float>;
  struct Open {
    float scale;
  };
  struct Sealed {
    float inverse;
  };
  Code* codes;
  Scale* scale;
  Status* status;
  explicit Runs(const Tensor& t) : codes(t.as<Code>()), scale(t.scales<Scale>()), status(t.status) {}
  COAT_HD Open open(int64_t b) const {
    if constexpr (N == 16) return {BFloat16::decode(scale[b])};
    return {static_cast<float>(scale[b])};
  }
  COAT_HD float load(int64_t i, Open o) const { return Code::decode(codes[i].code) * o.scale; }
  COAT_HD Sealed seal(int64_t b, const Range& range) const {
    count_infs(status, range.infs);
    float s = scale_for<Code>(range);
    if constexpr (N == 16) {
      scale[b] = BFloat16::encode_up(s);
      s = BFloat16::decode(scale[b]);
    } else {
      scale[b] = s;
    }
    return {1.f / s};
  }
  COAT_HD void store(int64_t i, Sealed s, float x) const { codes[i].code = Code::encode(x * s.inverse); }
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
  COAT_HD Sealed seal(int64_t b, const RangeWithMin& range) const {
    count_infs(status, range.infs);
    float s = 1.f / Code::max(), power = 1.f, middle = 1.f;
    if (range.max != 0) {
      const float mx = float_of(range.max), mn = float_of(range.min);
      if (range.max == range.min) {
        middle = mx;
      } else {
        const float log2_r = log2_(mx) - log2_(mn);
        const float target = 16.f * log2_(Code::max() * Code::max() / 2.f);
        float q = target / log2_r;  // log2_r may round to 0 for neighbours: q is then Inf
        q = q < 1024.f ? q : 1024.f;
        const int steps = static_cast<int>(q);
        power = static_cast<float>(steps < 1 ? 1 : steps) / 16.f;
        middle = sqrt_(mx) * sqrt_(mn);
        const float top = exp2_((log2_(mx) - log2_(middle)) * power);
        s = top / Code::max();
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

using F32 = Plain<Float32, DType::f32>;
using BF16 = Plain<BFloat16, DType::bf16>;
using E4M3T = PerTensor<E4M3, DType::e4m3>;
using E5M2T = PerTensor<E5M2, DType::e5m2>;
using E4M3G16 = Runs<E4M3, DType::e4m3, 16>;
using E4M3G128 = Runs<E4M3, DType::e4m3, 128>;
using E4M3X128 = Expanded<E4M3, DType::e4m3, 128>;
using E5M2G128 = Runs<E5M2, DType::e5m2, 128>;
using E5M2X128 = Expanded<E5M2, DType::e5m2, 128>;

template <class... V>
struct Views {};

// Calls f with the view of t, one of the list named by the op: what is listed is what gets compiled.
template <class... V, class F>
void with(const char* argument, const Tensor& t, Views<V...>, F&& f) {
  const bool found = ((t.format == V::format() ? (f(V(t)), true) : false) || ...);
  if (!found) fail("format", argument, argument, " ", text_of(t), " has a format that this kernel is not compiled for");
}

}  // namespace coat
