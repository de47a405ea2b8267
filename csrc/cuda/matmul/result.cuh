// What all kernels of products share: the order of tiles, and the way from sums to y.
#pragma once
#include "../device.cuh"

namespace coat::cuda {

// A y of which q and k are turned, as rope does.
struct Turned : BF16 {
  struct Turn {
    const float* table;  // null: none is to be turned
    const int32_t* starts;
    int64_t T, columns;  // those of q and k
    int D;               // 64 or 128
  };
  Turn turn{};
  explicit Turned(const Tensor& t) : BF16(t) {}
};

// y and what enters it besides a and b.
struct Result {
  int64_t M, N;
  const float *a_scale, *b_scale;  // null: 1
  const float *a_rows, *b_rows;    // a scale a row; null: 1
  const uint8_t* bias;             // null: none
  bool bias_bf16;
  bool pairs;      // two neighbours of y, from an even column on, lie on a boundary of both
  bool into;       // the product is added to what y holds
  uint32_t* amax;  // the bits of the largest |y|, which starts at 0; null: not wanted

  __device__ float scale() const { return (a_scale ? *a_scale : 1.f) * (b_scale ? *b_scale : 1.f); }
  // Whether anything differs from element to element: what completed() does to the sum of one, times the scale.
  __device__ bool differs() const { return a_rows || b_rows || bias; }
  __device__ float completed(float x, int64_t m, int64_t n) const {
    if (m >= M || n >= N) return x;
    if (a_rows) x = x * a_rows[m];
    if (b_rows) x = x * b_rows[n];
    if (!bias) return x;
    return x + (bias_bf16 ? BFloat16::decode(reinterpret_cast<const uint16_t*>(bias)[n])
                          : reinterpret_cast<const float*>(bias)[n]);
  }
  // Bits of the largest |y| that the lanes of a warp have, raised to what Y stores: rounding keeps the order.
  template <class Y>
  __device__ void keep_amax(uint32_t most) const {
    if (amax == nullptr) return;
    most = warp_max(most);
    using Code = CodeOf<Y>;
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(amax, bits_of(Code::decode(Code::encode(float_of(most)))));
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

// Two neighbours of a plain y.
template <class Y>
__device__ inline float2 load2(const Y& y, int64_t i) {
  if constexpr (std::is_same_v<CodeOf<Y>, Float32>)
    return *reinterpret_cast<const float2*>(y.codes + i);
  else
    return decode_pair<CodeOf<Y>>(*reinterpret_cast<const uint32_t*>(y.codes + i));
}
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

// Sums x of row m at four columns from n on to y: scale, bias, what y holds, one rounding. The 4 lanes of a quad hold
// the 16 columns of one run of e4m3/g16; all lanes of the warp must call. Returns the bits of the largest |x|.
template <class Y>
__device__ inline uint32_t finish(const Result& p, const Y& y, float scale, int64_t m, int64_t n, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = p.completed(x[i] * scale, m, n + i);
  uint32_t most = 0;
  if constexpr (Y::run == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (m < p.M && n + i < p.N) {
        if (p.into) x[i] = y.load(m * p.N + n + i, {}) + x[i];
        most = max(most, bits_of(x[i]) & 0x7fffffffu);
      }
  }
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
  if (m >= p.M) return most;
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
  return most;
}

}  // namespace coat::cuda
