// Rows on the device: weights, threads that share a row, sums along rows and over rows.
#pragma once
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

constexpr int kWarps = 8;  // of a block whose warps have a row each

// Count elements of a vector for each thread of the block, kept in shared memory where registers are short. A thread
// reads only what it wrote, at one address and what follows it; an odd number of vectors from thread to thread makes
// neighbours meet in different banks, and the last of them has room for one number more.
template <int Count>
struct Shelf {
  static constexpr unsigned kStride = Count / 4 + 1;
  COAT_HD static size_t vectors(unsigned threads) { return size_t{threads} * kStride; }
  static size_t bytes(unsigned threads) { return vectors(threads) * sizeof(float4); }
  float4* mine;
  __device__ void fill(float4* base, const Vector& from, int64_t n, bool inside) {
    mine = base + threadIdx.x * kStride;
    float x[Count] = {}, largest = 0.f;
    if (inside) from.load(n, x);
#pragma unroll
    for (int k = 0; k < Count; k += 4) mine[k / 4] = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
#pragma unroll
    for (int k = 0; k < Count; ++k) largest = fmaxf(largest, fabsf(x[k]));
    mine[Count / 4].x = largest;
  }
  // Elements k to k + 3.
  __device__ float4 load(int k) const { return mine[k / 4]; }
  // The largest magnitude of all, but for NaN.
  __device__ float peak() const { return mine[Count / 4].x; }
};

// Stores the runs of a warp in f32 or bf16: neighbours trade halves, so that every access fills whole sectors of
// memory. i is the first element of the lane's run. All lanes call it; an even number of them is inside.
template <class Y>
__device__ inline void put_strip(const Y& y, int64_t i, const Pack<Y, kRun>& pack, bool inside) {
  constexpr int kWords = sizeof(CodeOf<Y>);
  static_assert(kWords == 2 || kWords == 4);
  int word[kWords * 4];
#pragma unroll
  for (int k = 0; k < kWords * 4; ++k) word[k] = static_cast<int>(pack.quad[k]);
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

// How the threads of a block share rows: `lanes` threads a row, a power of two up to 32, or the whole block.
struct Sharing {
  unsigned lanes = 1, threads = 256;
  explicit Sharing(int64_t threads_of_row) {
    while (lanes < 32 && lanes < threads_of_row) lanes *= 2;
    if (threads_of_row > 32) lanes = threads = static_cast<unsigned>((threads_of_row + 31) / 32 * 32);
  }
  // Blocks that are resident all at once, `most` threads a multiprocessor: each loads its weights once.
  dim3 grid(int64_t rows, unsigned most) const {
    return dim3(blocks_for(rows, threads / lanes, std::max(1u, most / threads)));
  }
};

// The sums over a piece of a row, C columns of which are this thread's and the rest its neighbours', in each of them.
template <int C>
__device__ inline double join_piece(const float (&quarter)[C / 4]) {
  if constexpr (C == 16) {
    return static_cast<double>(join_quarters(quarter[0], quarter[1], quarter[2], quarter[3]));
  } else {
    static_assert(C == 8);
    const float a = quarter[0] + __shfl_xor_sync(0xffffffffu, quarter[0], 1);
    return static_cast<double>(a + (quarter[1] + __shfl_xor_sync(0xffffffffu, quarter[1], 1)));
  }
}
template <int C>
__device__ inline double dot_of(const float (&a)[C], const float (&b)[C]) {
  float quarter[C / 4];
#pragma unroll
  for (int k = 0; k < C; k += 4) quarter[k / 4] = dot_quarter(a + k, b + k);
  return join_piece<C>(quarter);
}
template <int C>
__device__ inline double sum_of(const float (&a)[C]) {
  float quarter[C / 4];
#pragma unroll
  for (int k = 0; k < C; k += 4) quarter[k / 4] = sum_quarter(a + k);
  return join_piece<C>(quarter);
}
template <int C>
__device__ inline double squares_of(const float (&a)[C]) {
  if constexpr (C == 16) {
    return square_piece(a);
  } else {
    const double sum = dot_of(a, a);
    if (!__any_sync(0xffffffffu, !holds_squares(sum))) return sum;
    double exact = 0;
    for (int k = 0; k < C; ++k) exact += static_cast<double>(a[k]) * static_cast<double>(a[k]);
    exact += __shfl_xor_sync(0xffffffffu, exact, 1);
    return holds_squares(sum) ? sum : exact;
  }
}

constexpr int kMostWarps = 16;  // of a block that joins its sums below

// The sum of `mine` over the first `warps` lanes, in every lane: of lanes 0 to 15 and of lanes 16 to 31 apart. The
// others count as zeros, also where nothing else makes a sum of negative zeros positive.
__device__ inline double join_warps(const double* partial, int warps) {
  const int lane = threadIdx.x % kMostWarps;
  double x = (lane < warps ? partial[lane] : 0.0) + 0.0;
#pragma unroll
  for (int offset = kMostWarps / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The sum of x over the `lanes` threads of a row, in each of them. All threads of the block must call it, with `turn` 0
// and 1 in turns: who comes early to the next sum does not write where others still read, so that one barrier is
// enough.
__device__ inline double row_sum(double x, int lanes, int turn) {
  if (lanes <= 32) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  }
  __shared__ double partial[2][kMostWarps];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = x;
  __syncthreads();
  return join_warps(partial[turn], blockDim.x / 32);
}

// Sums over the block of K values, which come as sums over pieces of C columns: totals[v] = finish(sum), in every
// thread. The threads of a piece divide the values among them, and so do the halves of a warp. `turn` as in row_sum.
template <int C, int K, class Finish>
__device__ inline void block_sums(const double (&x)[K], int turn, float (&totals)[K], Finish&& finish) {
  constexpr int kSharers = kPiece / C, kOwn = K / kSharers;
  static_assert(kSharers <= 2 && kOwn >= 1 && (K == 1 || K % 2 == 0));
  __shared__ double partial[2][K][kMostWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int v = 0; v < kOwn; ++v) {
    double mine = kSharers == 2 && lane % 2 == 1 ? x[v * kSharers + kSharers - 1] : x[v * kSharers];
#pragma unroll
    for (int offset = 16; offset >= kSharers; offset /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, offset);
    if (lane < kSharers) partial[turn][v * kSharers + lane][warp] = mine;
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < K; v += 2) {
    const float total = finish(join_warps(partial[turn][K == 1 ? 0 : v + lane / kMostWarps], warps));
    totals[v] = K == 1 ? total : __shfl_sync(0xffffffffu, total, 0);
    if constexpr (K > 1) totals[v + 1] = __shfl_sync(0xffffffffu, total, kMostWarps);
  }
}

// The largest finite magnitude of all elements, as bits in *all. A run with a bound that is not above what the grid has
// found need not be computed. Exact, since rounding is monotone: the bound of the operands bounds the result.
class Peak {
 public:
  explicit __device__ Peak(uint32_t* all) : all_(all) {}
  // Asks what the grid has found: early, since the answer takes a while, and the 1st, 2nd, 4th, 8th .. time, since all
  // ask at one place and what is largest changes ever more rarely.
  __device__ void look() {
    if ((looks_ & (looks_ - 1)) == 0) known_ = *static_cast<volatile uint32_t*>(all_);
    ++looks_;
  }
  // Whether anything that a lane bounds has to be computed; also with NaN for a bound.
  __device__ bool misses(float bound) const {
    return __any_sync(0xffffffffu, !(bound <= float_of(found_ > known_ ? found_ : known_)));
  }
  __device__ void add(const float (&x)[kRun]) {
    const uint32_t largest = warp_max(range_of(x).max);
    found_ = largest > found_ ? largest : found_;
  }
  __device__ void tell() {
    if (threadIdx.x % 32 == 0 && found_ > known_) atomicMax(all_, found_);
    known_ = found_ > known_ ? found_ : known_;
  }

 private:
  uint32_t* all_;
  uint32_t known_ = 0, found_ = 0, looks_ = 1;
};

// ---- sums over rows ----

inline int64_t chunks_of(int64_t rows) { return (rows + kSumRows - 1) / kSumRows; }

// partial [chunks, Parts, kinds, N] into one vector a kind: parts are 1, or strands to be joined; then groups of chunks
// and, in one chain a column, the groups. A block has 32 columns; its warps add groups, and one of them the groups.
// What the kernel before left in *found, if anything, goes to *largest, and *found becomes 0 again.
template <int Parts>
__global__ __launch_bounds__(kWarps * 32) void sum_chunks_kernel(const float* partial, int64_t chunks, int64_t N,
                                                                 int kinds, Vector first, Vector second,
                                                                 uint32_t* found, uint32_t* largest) {
  constexpr int kAhead = Parts == 1 ? 4 : 1, kTile = kWarps * kAhead;  // groups
  __shared__ double tile[kTile][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t width = kinds * N, n = int64_t{blockIdx.x} * 32 + lane;
  double sum = 0;
  after_previous();
  if (largest && blockIdx.x == 0 && threadIdx.x == 0) *largest = atomicExch(found, 0u);
  for (int64_t begin = 0; begin < chunks; begin += kTile * kGroup) {
    float x[kAhead][kGroup][Parts];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const int64_t chunk = begin + (k * kWarps + warp) * kGroup + c;
#pragma unroll
        for (int p = 0; p < Parts; ++p)
          x[k][c][p] = chunk < chunks && n < width ? partial[(chunk * Parts + p) * width + n] : 0.f;
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      double group = 0;
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        if constexpr (Parts == 1)
          group += static_cast<double>(x[k][c][0]);
        else
          group += static_cast<double>(join_strands(x[k][c]));
      }
      tile[k * kWarps + warp][lane] = group;
    }
    __syncthreads();
    const int64_t groups = (chunks - begin + kGroup - 1) / kGroup;
    const int count = static_cast<int>(groups < kTile ? groups : kTile);
    if (warp == 0) {
#pragma unroll 8
      for (int k = 0; k < count; ++k) sum += tile[k][lane];
    }
    __syncthreads();
  }
  if (warp != 0 || n >= width) return;
  if (n < N && first.f32.codes) first.store(n, static_cast<float>(sum));
  if (n >= N && second.f32.codes) second.store(n - N, static_cast<float>(sum));
}

inline void sum_chunks(const char* name, const float* partial, int64_t chunks, int parts, int64_t N, int kinds,
                       const Tensor& first, const Tensor& second, uint32_t* found, uint32_t* largest) {
  launch_next(name, parts == 1 ? sum_chunks_kernel<1> : sum_chunks_kernel<kStrands>,
              dim3(static_cast<unsigned>((kinds * N + 31) / 32)), dim3(kWarps * 32), 0, partial, chunks, N, kinds,
              Vector(first), Vector(second), found, largest);
}

}  // namespace coat::cuda
