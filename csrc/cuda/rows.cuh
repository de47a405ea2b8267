// Rows on the device: weights, rows on their way through shared memory, sums along rows and over rows.
#pragma once
#include <cuda_pipeline.h>

#include "runs.cuh"

namespace coat::cuda {

// A weight or a bias: f32 or bf16, chosen at run time; absent, every element is `missing`.
struct Vector {
  F32 f32;
  BF16 bf16;
  bool narrow;
  float missing;
  explicit Vector(const Tensor& t, float missing_ = 0.f)
      : f32(t), bf16(t), narrow(t.format == BF16::format()), missing(missing_) {}
  __device__ float operator[](int64_t n) const {
    if (!f32.codes) return missing;
    return narrow ? bf16.load(n, {}) : f32.load(n, {});
  }
  template <int Count>
  __device__ void load(int64_t n, float (&x)[Count]) const {
    if (!f32.codes) {
#pragma unroll
      for (int k = 0; k < Count; ++k) x[k] = missing;
    } else if (narrow) {
      Pack<BF16, Count> pack;
      pack.fetch(bf16, n, 0);
      pack.unpack(bf16, x);
    } else {
      Pack<F32, Count> pack;
      pack.fetch(f32, n, 0);
      pack.unpack(f32, x);
    }
  }
  __device__ void store(int64_t n, float x) const { narrow ? bf16.store(n, {}, x) : f32.store(n, {}, x); }
};

// ---- rows through shared memory: strips of 32 runs, one a lane ----

constexpr int kWarps = 8;                    // of a block
constexpr int kStrip = 32 * kRun;            // columns of a strip
constexpr int64_t kMostShared = 227 * 1024;  // bytes a block can have

// How the warps of a block share rows of N columns, a multiple of 32: warp w of a row has its strips w, w + warps, …
struct Team {
  int64_t M, N;
  int runs, strips, warps;  // of a row
  int rows, depth;          // at a time in a block, 0: N is too large; strips a warp at most
  Team(int64_t M_, int64_t N_, int most)
      : M(M_), N(N_), runs(static_cast<int>(std::min<int64_t>(N / kRun, 1 << 20))), strips((runs + 31) / 32) {
    warps = std::max(1, (strips + most - 1) / most);
    rows = kWarps / warps;
    depth = (strips + warps - 1) / warps;
  }
  unsigned threads() const { return static_cast<unsigned>(rows * warps * 32); }
  __device__ bool inside(int strip) const { return strip * 32 + static_cast<int>(threadIdx.x % 32) < runs; }
};

// Where a warp keeps the codes of one strip. They come asynchronously, side by side from global memory, and lie so that
// neither their arrival nor the reading of a run a lane meets a bank twice. Runs that do not exist are zeros if the
// place was cleared.
template <class X>
struct Strip {
  static constexpr int kWords = sizeof(CodeOf<X>);  // of 16 bytes, a run
  static constexpr int kBytes = 32 * (16 * kWords + (X::run != 0 ? 2 : 0));
  static __device__ int place(int run, int part) { return part * 32 + (run ^ (part * (8 / kWords))); }

  // A row to fetch strips from, as the lane sees it.
  struct Source {
    const int4* words;
    const uint32_t* scales = nullptr;
    __device__ Source(const X& x, int64_t row, const Team& team)
        : words(reinterpret_cast<const int4*>(x.codes + row * team.N) + threadIdx.x % 32) {
      if constexpr (X::run != 0)
        scales = reinterpret_cast<const uint32_t*>(x.scale + row * team.runs) + threadIdx.x % 32;
    }
    __device__ void skip(int64_t rows, const Team& team) {
      words += rows * team.runs * kWords;
      if constexpr (X::run != 0) scales += rows * (team.runs / 2);
    }
    __device__ void fetch(uint8_t* to, int strip, const Team& team) const {
      const int lane = threadIdx.x % 32, left = team.runs - strip * 32;
      int4* place_of_words = reinterpret_cast<int4*>(to);
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const int word = k * 32 + lane;
        if (word / kWords < left)
          __pipeline_memcpy_async(place_of_words + place(word / kWords, word % kWords),
                                  words + strip * (32 * kWords) + k * 32, sizeof(int4));
      }
      if constexpr (X::run != 0)
        if (lane < 16 && 2 * lane < left)
          __pipeline_memcpy_async(reinterpret_cast<uint32_t*>(place_of_words + 32) + lane, scales + strip * 16,
                                  sizeof(uint32_t));
    }
  };
  // The run of this lane.
  static __device__ void unpack(const uint8_t* from, const X& x, float (&v)[kRun]) {
    const int lane = threadIdx.x % 32;
    Pack<X, kRun> pack;
#pragma unroll
    for (int p = 0; p < kWords; ++p) pack.word[p] = reinterpret_cast<const int4*>(from)[place(lane, p)];
    if constexpr (X::run != 0) pack.scale = scales(from)[lane];
    pack.unpack(x, v);
  }
  // No element of the run is larger; Inf where only the elements can tell.
  static __device__ float bound(const uint8_t* from) {
    if constexpr (X::run == 0)
      return kInf;
    else
      return BFloat16::decode(scales(from)[threadIdx.x % 32]) * E4M3::max();
  }

 private:
  static __device__ const uint16_t* scales(const uint8_t* from) {
    return reinterpret_cast<const uint16_t*>(from + 32 * 16 * kWords);
  }
};

__device__ inline void clear_strips(uint8_t* to, int bytes) {
  for (int i = threadIdx.x % 32; i < bytes / 16; i += 32) reinterpret_cast<int4*>(to)[i] = int4{};
  __syncwarp();
}
// What the warp fetched since the last call is one group; wait_for_strips waits for all of them.
__device__ inline void commit_strips() { __pipeline_commit(); }
__device__ inline void wait_for_strips() {
  __pipeline_wait_prior(0);
  __syncwarp();
}

// A vector of N elements in shared memory, for all warps, by strips: neighbours meet in different banks.
struct Shelf {
  float4* base;
  static __host__ __device__ int bytes(int strips) { return strips * kStrip * static_cast<int>(sizeof(float)); }
  // The largest magnitude of the block, but for NaN; of every run, if asked for. All threads call it.
  __device__ float fill(const Vector& from, const Team& team, float* peaks) const {
    float top = 0.f;
    for (int run = threadIdx.x; run < team.strips * 32; run += blockDim.x) {
      float x[kRun] = {}, peak = 0.f;
      if (run < team.runs) from.load(int64_t{run} * kRun, x);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        base[(run / 32 * 4 + q) * 32 + run % 32] = make_float4(x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]);
#pragma unroll
      for (int k = 0; k < kRun; ++k) peak = fmaxf(peak, fabsf(x[k]));
      if (peaks) peaks[run] = peak;
      top = fmaxf(top, peak);
    }
    return float_of(block_max(bits_of(top)));
  }
  __device__ float4 load(int strip, int quarter) const { return base[(strip * 4 + quarter) * 32 + threadIdx.x % 32]; }
};

// The runs of a warp in f32 or bf16: neighbours trade halves, so that every access fills whole sectors of memory. i is
// the first element of the lane's run. All lanes call it; an even number of them is inside.
template <class Y>
__device__ inline void put_strip(const Y& y, int64_t i, const float (&x)[kRun], bool inside) {
  constexpr int kWords = sizeof(CodeOf<Y>);
  static_assert(kWords == 2 || kWords == 4);
  int word[kWords * 4];
#pragma unroll
  for (int k = 0; k < kWords * 4; ++k) {
    if constexpr (kWords == 2)
      word[k] = static_cast<int>(encode_pair<BFloat16>(x[2 * k], x[2 * k + 1]));
    else
      word[k] = __float_as_int(x[k]);
  }
  const int odd = threadIdx.x % 2;
  int4* to = reinterpret_cast<int4*>(y.codes + i) - odd * (kWords - 1);
#pragma unroll
  for (int h = 0; h < kWords; h += 2) {
    int *a = word + 4 * h, *b = a + 4;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int other = __shfl_xor_sync(0xffffffffu, odd ? a[c] : b[c], 1);
      a[c] = odd ? other : a[c];
      b[c] = odd ? b[c] : other;
    }
    if (!inside) continue;
    to[h] = make_int4(a[0], a[1], a[2], a[3]);
    to[h + kWords] = make_int4(b[0], b[1], b[2], b[3]);
  }
}

// ---- sums along rows, and maxima of everything ----

// Sums over the warps of a row, in each thread. All threads of the block call it, with the same `turn`.
template <int K>
__device__ inline void row_totals(double (&x)[K], const Team& team, int& turn) {
#pragma unroll
  for (int v = 0; v < K; ++v) x[v] = warp_sum(x[v]);
  if (team.warps == 1) return;
  __shared__ double part[2][K][kWarps];  // two turns: one barrier is enough
  turn ^= 1;
  const int warp = threadIdx.x / 32, first = warp / team.warps * team.warps;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int v = 0; v < K; ++v) part[turn][v][warp] = x[v];
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < K; ++v) {
    x[v] = part[turn][v][first];
    for (int w = 1; w < team.warps; ++w) x[v] += part[turn][v][first + w];
  }
}

// The largest finite magnitude of all elements, as bits in *all. A run with a bound that is not above what the grid has
// found need not be computed. Exact, since rounding is monotone: the bound of the operands bounds the result.
class Peak {
 public:
  explicit __device__ Peak(uint32_t* all) : all_(all) {}
  // Asks what the grid has found: early, since the answer takes a while.
  __device__ void look() { known_ = *static_cast<volatile uint32_t*>(all_); }
  // Whether anything that a lane bounds has to be computed; also with NaN for a bound.
  __device__ bool misses(float bound) const {
    return __any_sync(0xffffffffu, !(bound <= float_of(found_ > known_ ? found_ : known_)));
  }
  __device__ void add(const float (&x)[kRun]) {
    const uint32_t largest = warp_max(range_of(x).max);
    found_ = largest > found_ ? largest : found_;
  }
  __device__ void tell() const {
    if (threadIdx.x % 32 == 0 && found_ > known_) atomicMax(all_, found_);
  }

 private:
  uint32_t* all_;
  uint32_t known_ = 0, found_ = 0;
};

// ---- sums over rows ----

inline int64_t chunks_of(int64_t rows) { return (rows + kSumRows - 1) / kSumRows; }

// Sum of strands, or of what join_strands makes of some of them.
template <int Count>
__device__ inline float join_parts(float (&sum)[Count]) {
#pragma unroll
  for (int half = Count / 2; half > 0; half /= 2)
#pragma unroll
    for (int s = 0; s < half; ++s) sum[s] += sum[s + half];
  return sum[0];
}

// partial [chunks, Parts, kinds, N] into one vector a kind: parts joined, then one chain of FP64 additions a column, in
// the order of the chunks. A block has 32 columns; all warps read, one adds.
template <int Parts>
__global__ __launch_bounds__(kWarps * 32) void sum_chunks_kernel(const float* partial, int64_t chunks, int64_t N,
                                                                 int kinds, Vector first, Vector second) {
  constexpr int kAhead = Parts == 8 ? 4 : 16 / Parts, kTile = kWarps * kAhead;
  __shared__ float tile[kTile][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t width = kinds * N, n = int64_t{blockIdx.x} * 32 + lane;
  double sum = 0;
  for (int64_t begin = 0; begin < chunks; begin += kTile) {
    float x[kAhead][Parts];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t chunk = begin + k * kWarps + warp;
#pragma unroll
      for (int p = 0; p < Parts; ++p)
        x[k][p] = chunk < chunks && n < width ? partial[(chunk * Parts + p) * width + n] : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) tile[k * kWarps + warp][lane] = join_parts(x[k]);
    __syncthreads();
    const int count = static_cast<int>(chunks - begin < kTile ? chunks - begin : kTile);
    if (warp == 0) {
#pragma unroll 8
      for (int k = 0; k < count; ++k) sum += static_cast<double>(tile[k][lane]);
    }
    __syncthreads();
  }
  if (warp != 0 || n >= width) return;
  if (n < N && first.f32.codes) first.store(n, static_cast<float>(sum));
  if (n >= N && second.f32.codes) second.store(n - N, static_cast<float>(sum));
}

inline void sum_chunks(const char* name, const float* partial, int64_t chunks, int parts, int64_t N, int kinds,
                       const Tensor& first, const Tensor& second) {
  const auto kernel = parts == 1   ? sum_chunks_kernel<1>
                      : parts == 2 ? sum_chunks_kernel<2>
                      : parts == 4 ? sum_chunks_kernel<4>
                                   : sum_chunks_kernel<8>;
  launch(name, kernel, dim3(static_cast<unsigned>((kinds * N + 31) / 32)), dim3(kWarps * 32), 0, partial, chunks, N,
         kinds, Vector(first), Vector(second));
}

}  // namespace coat::cuda
