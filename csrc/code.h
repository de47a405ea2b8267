// Numbers as bits: elementary functions and the codes of formats, one source for both backends.
#pragma once
#include <cstdint>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

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
// a b, all of it: the compiler adds zeros to the product of widened numbers.
COAT_HD uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
#else
  return uint64_t{a} * b;
#endif
}
COAT_HD float abs_(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
COAT_HD float copysign_(float magnitude, float sign) {
  return float_of((bits_of(magnitude) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

constexpr float kNaN = __builtin_nanf("");
constexpr float kInf = __builtin_inff(), kLargest = 3.40282347e38f;
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

// The same where neither the power nor a factor of it is subnormal or infinite.
COAT_HD float exp2_normal(float x) {
  const float shifted = x + kRoundToInteger;  // its bits shifted left by 23 are the exponent
  return float_of(bits_of(exp2_fraction(x - (shifted - kRoundToInteger))) + (bits_of(shifted) << 23));
}

// What logarithms and ranges take from IEEE arithmetic. The device has a stand-in with the same bits where operands are
// not far out, without the branches for those that are.
struct Ieee {
  static COAT_HD float quotient(float a, float b) { return a / b; }
  static COAT_HD float quotient(float a, float b, float) { return a / b; }  // given 1 / b
};

// log2(x) - below for normal x > 0.
template <class By>
COAT_HD float log2_normal(float x, int below = 0) {
  const uint32_t u = bits_of(x);
  // m in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2), keep the exponent that is left over
  const int e = static_cast<int>(u - 0x3f3504f3u) >> 23;
  const float m = float_of(u - (static_cast<uint32_t>(e) << 23));
  const float t = By::quotient(m - 1.f, m + 1.f), t2 = t * t;
  float p = 2.88539008f / 9.f;
  p = fma_(p, t2, 2.88539008f / 7.f);
  p = fma_(p, t2, 2.88539008f / 5.f);
  p = fma_(p, t2, 2.88539008f / 3.f);
  p = fma_(p, t2, 2.88539008f);
  return fma_(t, p, static_cast<float>(e - below));
}
// log2(x) for x > 0; -Inf at 0, NaN below. Exact at powers of two; relative error below 3e-7.
COAT_HD float log2_(float x) {
  const bool tiny = x < kMinNormal;
  const float y = log2_normal<Ieee>(tiny ? x * 16777216.f : x, tiny ? 24 : 0);
  return x > 0.f ? (x < kInf ? y : kInf) : (x == 0.f ? -kInf : kNaN);
}

// ---- codes ----

// A value of Mantissa bits with bias Bias and largest finite value Max: round to nearest even, finite values and
// infinities saturate to Max, NaN stays NaN.
template <class Word, int Mantissa, int Bias, uint32_t MaxBits, Word NaNCode>
struct SmallFloat {
  Word code;
  static constexpr int bits = 8 * sizeof(Word);
  static constexpr uint32_t sign = 1u << (bits - 1);
  static COAT_HD constexpr float max() { return __builtin_bit_cast(float, MaxBits); }
  static COAT_HD constexpr float least() {  // the smallest positive value
    return __builtin_bit_cast(float, static_cast<uint32_t>(127 + 1 - Bias - Mantissa) << 23);
  }
  static COAT_HD Word encode(float x) {
#ifdef __CUDA_ARCH__  // one instruction, the same rounding
    if constexpr (bits == 16) {
      const float c = x > max() ? max() : (x < -max() ? -max() : x);
      return __half_as_ushort(__float2half_rn(c));
    } else {
      return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, Mantissa == 3 ? __NV_E4M3 : __NV_E5M2);
    }
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
    return static_cast<Word>(code | ((u >> (32 - bits)) & sign));
#endif
  }
  static COAT_HD float decode(Word code) {
#ifdef __CUDA_ARCH__
    if constexpr (bits == 16) return __half2float(__ushort_as_half(code));
    const __half_raw half = __nv_cvt_fp8_to_halfraw(code, Mantissa == 3 ? __NV_E4M3 : __NV_E5M2);
    return __half2float(__half(half));
#else
    constexpr int shift = 23 - Mantissa;
    const uint32_t a = code & (sign - 1);
    const float normal = float_of((a << shift) + (static_cast<uint32_t>(127 - Bias) << 23));
    const float subnormal = static_cast<float>(static_cast<int>(a)) * least();
    const float magnitude = a < (1u << Mantissa) ? subnormal : normal;
    constexpr bool has_inf = NaNCode != sign - 1;  // then all exponents of ones are Inf or NaN
    constexpr uint32_t inf = sign - (1u << Mantissa), limit = has_inf ? inf : NaNCode;
    const float special = has_inf && a == inf ? kInf : kNaN;
    return copysign_(a >= limit ? special : magnitude, float_of(static_cast<uint32_t>(code) << (32 - bits)));
#endif
  }
};
using E4M3 = SmallFloat<uint8_t, 3, 7, 0x43e00000u, 0x7f>;          // max 448
using E5M2 = SmallFloat<uint8_t, 2, 15, 0x47600000u, 0x7e>;         // max 57344
using Float16 = SmallFloat<uint16_t, 10, 15, 0x477fe000u, 0x7e00>;  // max 65504

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

// Whole numbers from -127 to 127: round to nearest even, finite values and infinities saturate, NaN is the code -128.
struct Int8 {
  uint8_t code;
  static constexpr int bits = 8;
  static constexpr uint8_t nan = 0x80;
  static COAT_HD constexpr float max() { return 127.f; }
  static COAT_HD uint8_t encode(float x) {
    const float above = x > -max() ? x : -max(), c = above < max() ? above : max();
    const uint32_t whole = bits_of(c + kRoundToInteger);  // its lowest byte
    return static_cast<uint8_t>(x == x ? whole : nan);
  }
  static COAT_HD float decode(uint8_t code) {
    const float whole = static_cast<float>(static_cast<int8_t>(code));
    return code == nan ? kNaN : whole;
  }
};

struct Float32 {
  float code;
  static COAT_HD float encode(float x) { return x; }
  static COAT_HD float decode(float code) { return code; }
};

// ---- maps: levels of [-1, 1] or [0, 1], numbered in ascending order. They hold no NaN: it becomes the level of 0 ----

// The dynamic map of block-wise 8- and 4-bit optimizers (bitsandbytes, torchao): Bits - 1 decades below 1, each with
// twice the levels of the one under it, at the middles of equal parts of its [1/10, 1]; their negatives where Signed; 0
// and 1, but not -1. Level n, in a decade of P = 2^floor(log2 n) levels, is (18 n + 9 - 16 P) / (20 P) times the power
// of ten: exact integers and one division, hence one rounding.
template <int Bits, bool Signed>
struct DynamicMap {
  uint8_t code;
  static constexpr int bits = Bits, decades = Bits - 1;
  static constexpr int first = Signed ? 1 : 2;                          // n of the smallest positive level
  static constexpr int last = (1 << decades) * first - 1;               // n of the largest level below 1
  static constexpr int zero = Signed ? last : 0;                        // code of 0
  static constexpr int base = zero - first + 1, one = last + 1 + base;  // codes: n + base, and that of 1
  static constexpr bool has_zero = true;
  static COAT_HD constexpr float divisor(int decade) {  // 20 P 10^(decades - 1 - decade)
    float d = 20.f * first;
    for (int i = 1; i < decades; ++i) d *= i > decade ? 10.f : 2.f;
    return d;
  }
  static COAT_HD constexpr float level(int n, int P, float divisor) {
    return static_cast<float>(18 * n + 9 - 16 * P) / divisor;
  }
  // What is above it is nearer to level n of this decade, or to 1 where n = last + 1, than to the level before that.
  static COAT_HD constexpr float middle(int decade) {
    const int n = first << decade;
    const float below = decade == 0 ? 0.f : level(n - 1, n / 2, divisor(decade - 1));
    const float above = decade == decades ? 1.f : level(n, n, divisor(decade));
    return (below + above) / 2.f;
  }
  struct Decades {
    float divisor[decades] = {}, slope[decades] = {}, middle[decades + 1] = {};
    COAT_HD constexpr Decades() {
      for (int d = 0; d <= decades; ++d) middle[d] = DynamicMap::middle(d);
      for (int d = 0; d < decades; ++d) {
        divisor[d] = DynamicMap::divisor(d);
        slope[d] = divisor[d] / 18.f;
      }
    }
  };
  static COAT_HD constexpr float max() { return 1.f; }
  static COAT_HD constexpr float least() { return level(first, first, divisor(0)); }
  // The nearest level, in FP32: of two that are equally near the even n, of two decades the one nearer to 0.
  static COAT_HD uint8_t encode(float x) {
    constexpr Decades of{};
    const float size = Signed ? abs_(x) : x, y = size > 1.f ? 1.f : size;
    float slope = 0.f;
    int P = first;
    for (int d = 0; d < decades; ++d) {
      slope = y > of.middle[d] ? of.slope[d] : slope;
      P = y > of.middle[d] ? first << d : P;
    }
    const float exact = fma_(y, slope, fma_(static_cast<float>(P), 16.f / 18.f, -0.5f));
    int n = static_cast<int>(bits_of(exact + kRoundToInteger) - bits_of(kRoundToInteger));
    n = n < 2 * P - 1 ? n : 2 * P - 1;
    const int positive = y > of.middle[decades] ? one : n + base;
    const int signed_code = Signed && x < 0.f ? zero - n : positive;
    return static_cast<uint8_t>(y > of.middle[0] ? signed_code : zero);
  }
  static COAT_HD float decode(uint8_t code) {
#ifdef __CUDA_ARCH__
    return value_of(code);
#else
    static constexpr Values values{};
    return values.of[code];
#endif
  }

 private:
  static COAT_HD constexpr float value_of(int code) {
    constexpr Decades of{};
    const int above = code - zero, n = (above < 0 ? -above : above) + first - 1;
    float divisor = of.divisor[0];
    int P = first;
    for (int d = 1; d < decades; ++d) {
      divisor = n >= first << d ? of.divisor[d] : divisor;
      P = n >= first << d ? first << d : P;
    }
    const float size = code == one ? 1.f : (above == 0 ? 0.f : level(n, P, divisor));
    return above < 0 ? -size : size;
  }
  struct Values {
    float of[1 << Bits] = {};
    constexpr Values() {
      for (int code = 0; code < 1 << Bits; ++code) of[code] = value_of(code);
    }
  };
};
using D8 = DynamicMap<8, true>;
using U8 = DynamicMap<8, false>;
using D4 = DynamicMap<4, true>;

// 1/16, 2/16 … 1: no 0, so that what is divided by its root stays small. NaN and what is negative become 1/16.
struct U4 {
  uint8_t code;
  static constexpr int bits = 4;
  static constexpr bool has_zero = false;
  static COAT_HD constexpr float max() { return 1.f; }
  static COAT_HD constexpr float least() { return 1.f / 16.f; }
  static COAT_HD uint8_t encode(float x) {  // ties to even sixteenths
    const float y = x * 16.f, c = y > 1.f ? (y < 16.f ? y : 16.f) : 1.f;
    return static_cast<uint8_t>(bits_of(c + kRoundToInteger) - bits_of(kRoundToInteger) - 1u);
  }
  static COAT_HD float decode(uint8_t code) { return static_cast<float>(code + 1) / 16.f; }
};

}  // namespace coat
