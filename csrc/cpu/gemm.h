// Products of small tiles in AVX2 registers, and the packing that feeds them; matmul and attention build on these.
// A panel holds R lanes step by step: out[step * R + lane]. Sums run over the steps in ascending order.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "rows.h"

namespace coat::cpu {

constexpr int kTileRows = 6, kTileCols = 16;

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Floats that stay with the thread and only grow; one array a Slot, so that live arrays do not share one.
template <class Slot>
float* scratch(int64_t floats) {
  constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, alignment); }
  };
  thread_local std::unique_ptr<float, Free> array;
  thread_local int64_t held = 0;
  if (floats > held) {
    array.reset();
    held = 0;
    const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
    array.reset(static_cast<float*>(::operator new(bytes, alignment, std::nothrow)));
    if (!array) fail("out_of_memory", "device", "out of memory on cpu: requested ", bytes, " bytes of scratch");
    held = floats;
  }
  return array.get();
}

// ---- codes of a tensor as f32 and back ----

template <class Code>
inline void decode_as(const Tensor& x, int64_t i, int64_t n, float* __restrict out) {
  const Code* __restrict codes = x.as<Code>() + i;
  for (int64_t j = 0; j < n; ++j) out[j] = Code::decode(codes[j].code);
}

// out[j] = code i + j of x, without the scale of a whole tensor, hence exact in f32, but times those of runs and
// blocks. Not inlined: where GCC sees a bound of n it copies f32 by
// `rep movs`, which is slow for short runs.
[[gnu::noinline]] inline void decode(const Tensor& x, int64_t i, int64_t n, float* out) {
  if (n <= 0) return;
  if (x.format.run != 0) return read(x, i, i + n, out);
  switch (x.format.dtype) {
    case DType::f32:
      std::memcpy(out, x.as<float>() + i, static_cast<size_t>(n) * sizeof(float));
      break;
    case DType::bf16:
      decode_as<BFloat16>(x, i, n, out);
      break;
    case DType::e4m3:
      decode_as<E4M3>(x, i, n, out);
      break;
    case DType::e5m2:
      decode_as<E5M2>(x, i, n, out);
      break;
    default:  // matmul has no other operands
      break;
  }
}

// The n values at `in` as elements i.. of y, f32 or bf16.
inline void encode(const Tensor& y, int64_t i, int64_t n, const float* __restrict in) {
  if (n <= 0) return;
  if (y.format.dtype == DType::f32) {
    std::memcpy(y.as<float>() + i, in, static_cast<size_t>(n) * sizeof(float));
  } else {
    BFloat16* __restrict codes = y.as<BFloat16>() + i;
    for (int64_t j = 0; j < n; ++j) codes[j].code = BFloat16::encode(in[j]);
  }
}

// ---- transposing and packing ----

// to[j * to_row + i] = from[i * from_row + j] for i < 8 and j < min(8, rows_out).
inline void transpose8(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t rows_out = 8) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_row);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    s[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    s[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  if (rows_out >= 8) {
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + i * to_row, s[i]);
  } else {
    for (int i = 0; i < rows_out; ++i) _mm256_storeu_ps(to + i * to_row, s[i]);
  }
}

// The same for any size; both sides have room for sizes rounded up to 8.
inline void transpose(const float* from, int64_t from_row, int64_t rows, int64_t cols, float* to, int64_t to_row) {
  for (int64_t j = 0; j < cols; j += 8)
    for (int64_t i = 0; i < rows; i += 8) transpose8(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
}

// One factor of a product: lane i at step k is element offset + i * row + k, or offset + k * row + i when `across`.
struct Operand {
  Tensor tensor;
  bool across;
  int64_t offset, row;
};

// Panels of 6 are stored 8 lanes wide, each step over the last two lanes of the one before: hence two floats more.
template <int R>
constexpr int64_t panel_floats(int64_t steps) {
  return R * steps + (R % 8 ? 2 : 0);
}

// Lanes lane.. and steps step.. of x as panels of R; lanes of the last panel that do not exist are zero.
template <int R>
void pack(const Operand& x, int64_t lane, int64_t lanes, int64_t step, int64_t steps, float* out) {
  constexpr int kLanes = (R + 7) / 8 * 8, kSteps = 128, kPanels = 16, kWide = R * kPanels + 8, kDeep = 8;
  const int64_t panel = panel_floats<R>(steps);
  if (x.across) {
    alignas(64) float held[kDeep * kWide] = {};
    for (int64_t i = 0; i < lanes; i += R * kPanels) {
      const int64_t n = std::min<int64_t>(lanes - i, R * kPanels);
      if (n % R)
        for (int d = 0; d < kDeep; ++d) std::fill(held + d * kWide + n, held + d * kWide + round_up(n, R), 0.f);
      // several steps are decoded before the first is read again, at other boundaries than it was written
      for (int64_t k = 0; k < steps; k += kDeep) {
        const int64_t deep = std::min<int64_t>(steps - k, kDeep);
        for (int64_t d = 0; d < deep; ++d)
          decode(x.tensor, x.offset + (step + k + d) * x.row + lane + i, n, held + d * kWide);
        for (int64_t j = 0; j < n; j += R) {
          float* to = out + (i + j) / R * panel + k * R;
          for (int64_t d = 0; d < deep; ++d, to += R)
            for (int v = 0; v < kLanes; v += 8) _mm256_storeu_ps(to + v, _mm256_loadu_ps(held + d * kWide + j + v));
        }
      }
    }
    return;
  }
  alignas(64) float held[kLanes * kSteps] = {};  // rows past R stay zero
  for (int64_t i = 0; i < lanes; i += R, out += panel) {
    const int64_t n = std::min<int64_t>(lanes - i, R);
    if (n < R) std::fill(held + n * kSteps, held + R * kSteps, 0.f);
    for (int64_t k = 0; k < steps; k += kSteps) {
      const int64_t width = std::min<int64_t>(steps - k, kSteps);
      for (int64_t r = 0; r < n; ++r)
        decode(x.tensor, x.offset + (lane + i + r) * x.row + step + k, width, held + r * kSteps);
      for (int64_t w = 0; w < width; w += 8)
        for (int v = 0; v < kLanes; v += 8)
          transpose8(held + v * kSteps + w, kSteps, out + (k + w) * R + v, R, width - w);
    }
  }
}

// ---- the tile ----

struct TileRow {
  __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
  void add(const float* a, __m256 b_low, __m256 b_high) {
    const __m256 x = _mm256_broadcast_ss(a);
    low = _mm256_fmadd_ps(x, b_low, low);
    high = _mm256_fmadd_ps(x, b_high, high);
  }
};

struct Tile {
  TileRow row[kTileRows];
};

// sum over k of a[r * Row + k * Step] * b[k * b_step + c]. The rows are variables of their own, not an array, or GCC 12
// stores them in every step.
template <int Row, int Step>
inline __attribute__((always_inline)) Tile product(int64_t steps, const float* a, const float* b, int64_t b_step) {
  TileRow r0, r1, r2, r3, r4, r5;
  for (int64_t k = 0; k < steps; ++k, a += Step, b += b_step) {
    const __m256 low = _mm256_loadu_ps(b), high = _mm256_loadu_ps(b + 8);
    r0.add(a, low, high);
    r1.add(a + Row, low, high);
    r2.add(a + 2 * Row, low, high);
    r3.add(a + 3 * Row, low, high);
    r4.add(a + 4 * Row, low, high);
    r5.add(a + 5 * Row, low, high);
  }
  return {{r0, r1, r2, r3, r4, r5}};
}

// c = t, and c = c + t.
inline __attribute__((always_inline)) void put(const Tile& t, float* c, int64_t c_row) {
#pragma GCC unroll 6
  for (int r = 0; r < kTileRows; ++r) {
    _mm256_storeu_ps(c + r * c_row, t.row[r].low);
    _mm256_storeu_ps(c + r * c_row + 8, t.row[r].high);
  }
}

inline __attribute__((always_inline)) void add(const Tile& t, float* c, int64_t c_row) {
#pragma GCC unroll 6
  for (int r = 0; r < kTileRows; ++r) {
    _mm256_storeu_ps(c + r * c_row, _mm256_add_ps(_mm256_loadu_ps(c + r * c_row), t.row[r].low));
    _mm256_storeu_ps(c + r * c_row + 8, _mm256_add_ps(_mm256_loadu_ps(c + r * c_row + 8), t.row[r].high));
  }
}

// ---- the tile, with sums of 14 bits ----

constexpr int kTogether = 32;  // of K

// sum + the sum over k < steps, at most kTogether, of a[k * kTileRows] * b[k * kTileCols + c] of FP8 factors, as the
// tensor cores of Hopper add them: products and sum lose what lies below the 14th bit of the largest of them, and the
// result what lies below its own (DeepSeek-V3, arXiv 2412.19437, section 3.5.2). The rest is exact: in units of the
// last bit that is kept all numbers are integers below 2^21. Where one is infinite or NaN, so is the sum.
inline __m256 add_with_14_bits(__m256 sum, int64_t steps, const float* a, const float* b) {
  const auto bits = [](uint32_t u) { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(u))); };
  const auto product = [&](int64_t k) {
    return _mm256_mul_ps(_mm256_broadcast_ss(a + k * kTileRows), _mm256_loadu_ps(b + k * kTileCols));
  };
  const __m256 infinity = bits(0x7f800000u);  // all bits of the exponent, too
  // the power of two below the largest; products of FP8 codes are at least 2^-25
  __m256 power = _mm256_max_ps(_mm256_set1_ps(0x1p-60f), _mm256_and_ps(sum, infinity));
  for (int64_t k = 0; k < steps; ++k) power = _mm256_max_ps(power, _mm256_and_ps(product(k), infinity));
  const __m256 special = _mm256_cmp_ps(power, infinity, _CMP_EQ_OQ);
  const __m256 units = _mm256_div_ps(_mm256_set1_ps(0x1p13f), power);
  const auto whole = [&](__m256 x) {
    return _mm256_round_ps(_mm256_mul_ps(x, units), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  };
  __m256 total = whole(sum);
  for (int64_t k = 0; k < steps; ++k) total = _mm256_add_ps(total, whole(product(k)));
  total = _mm256_and_ps(_mm256_div_ps(total, units), bits(0xfffffc00u));
  if (_mm256_movemask_ps(special) == 0) return total;
  for (int64_t k = 0; k < steps; ++k) sum = _mm256_add_ps(sum, product(k));
  return _mm256_blendv_ps(total, sum, special);
}

// The same for c of a tile: products of `steps` of K, a panel and a strip, kTogether at a time.
inline void add_with_14_bits(int64_t steps, const float* a, const float* b, float* c) {
  for (int64_t k = 0; k < steps; k += kTogether)
    for (int r = 0; r < kTileRows; ++r)
      for (int half = 0; half < kTileCols; half += 8) {
        float* sums = c + r * kTileCols + half;
        const __m256 sum = add_with_14_bits(_mm256_loadu_ps(sums), std::min<int64_t>(steps - k, kTogether),
                                            a + k * kTileRows + r, b + k * kTileCols + half);
        _mm256_storeu_ps(sums, sum);
      }
}

}  // namespace coat::cpu
