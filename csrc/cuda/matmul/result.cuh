// What all kernels of products share: the order of tiles, and the way from sums to y.
#pragma once
#include "../device.cuh"

namespace coat::cuda {

// y and what enters it besides a and b.
struct Result {
  int64_t M, N;
  const float *a_scale, *b_scale;  // null: 1
  const uint8_t* bias;             // null: none
  bool bias_bf16;
  bool pairs;  // two neighbours of y, from an even column on, can be stored at once

  __device__ float scale() const { return (a_scale ? *a_scale : 1.f) * (b_scale ? *b_scale : 1.f); }
  __device__ float with_bias(float x, int64_t n) const {
    if (bias == nullptr || n >= N) return x;
    return x + (bias_bf16 ? BFloat16::decode(reinterpret_cast<const uint16_t*>(bias)[n])
                          : reinterpret_cast<const float*>(bias)[n]);
  }
};

// Tile `index` of down x across: bands of 8 rows of tiles run through all columns one after the other, so that tiles at
// work at the same time share a and b in L2.
struct Order {
  int64_t row, column;
  __device__ Order(unsigned index, unsigned down, unsigned across) {
    constexpr unsigned kBand = 8;
    const unsigned band = index / across / kBand * kBand, in = index - band * across;
    const unsigned rows = min(down - band, kBand);
    row = band + in % rows;
    column = in / rows;
  }
};

template <class Y>
__device__ inline void store2(const Y& y, int64_t i, typename Y::Sealed sealed, float x0, float x1) {
  using Code = CodeOf<Y>;
  using Bits =
      std::conditional_t<sizeof(Code) == 4, uint64_t, std::conditional_t<sizeof(Code) == 2, uint32_t, uint16_t>>;
  union {
    Code code[2];
    Bits bits;
  } raw;
  Y held = y;
  held.codes = raw.code;
  held.store(0, sealed, x0);
  held.store(1, sealed, x1);
  *reinterpret_cast<Bits*>(y.codes + i) = raw.bits;
}

// Sums x of row m at four columns from n on to y: scale, bias, one rounding. The 4 lanes of a quad hold the 16 columns
// of one run of e4m3/g16; all lanes of the warp must call.
template <class Y>
__device__ inline void finish(const Result& p, const Y& y, float scale, int64_t m, int64_t n, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = p.with_bias(x[i] * scale, n + i);
  typename Y::Sealed sealed{};
  if constexpr (Y::run == 16) {
    Range range;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (n + i < p.N) range.add(x[i]);
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      Range other;
      other.max = __shfl_xor_sync(0xffffffffu, range.max, offset);
      other.infs = __shfl_xor_sync(0xffffffffu, range.infs, offset);
      range.merge(other);
    }
    if (threadIdx.x % 4 == 0 && m < p.M && n < p.N) sealed = y.seal(m * ((p.N + 15) / 16) + n / 16, range);
    sealed.inverse = __shfl_sync(0xffffffffu, sealed.inverse, threadIdx.x % 32 / 4 * 4);
  }
  if (m >= p.M) return;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int64_t to = m * p.N + n + i;
    if (p.pairs && n + i + 1 < p.N) {
      store2(y, to, sealed, x[i], x[i + 1]);
    } else {
      if (n + i < p.N) y.store(to, sealed, x[i]);
      if (n + i + 1 < p.N) y.store(to + 1, sealed, x[i + 1]);
    }
  }
}

}  // namespace coat::cuda
