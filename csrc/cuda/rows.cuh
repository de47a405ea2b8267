// Rows on the device: weights, threads that share a row, its sums, and sums over rows: what the norms share.
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

// Count elements of a vector for each thread of the block, kept in shared memory where registers are short. A thread
// reads only what it wrote, and lies so that neighbours meet in different banks.
template <int Count>
struct Shelf {
  static size_t bytes(unsigned threads) { return size_t{threads} * Count * sizeof(float); }
  float4* mine;
  __device__ Shelf(float4* base, const Vector& from, int64_t n, bool inside) : mine(base + threadIdx.x) {
    float x[Count] = {};
    if (inside) from.load(n, x);
#pragma unroll
    for (int k = 0; k < Count; k += 4) mine[k / 4 * blockDim.x] = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
  }
  // Elements k to k + 3.
  __device__ void load(int k, float (&x)[4]) const {
    const float4 four = mine[k / 4 * blockDim.x];
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  }
};

// ---- sums of a row ----

// How the threads of a block share rows: `lanes` threads a row, a power of two up to 32, or the whole block.
struct Sharing {
  unsigned lanes, threads;
  // pieces: how many threads a row can use
  explicit Sharing(int64_t pieces, unsigned most) : lanes(1), threads(256) {
    while (lanes < 32 && lanes < pieces) lanes *= 2;
    if (pieces > 32) lanes = threads = static_cast<unsigned>(std::min<int64_t>((pieces + 31) / 32 * 32, most));
  }
  // Two rounds of the blocks that a multiprocessor holds: enough to balance, few enough to load weights seldom.
  dim3 grid(int64_t rows) const { return dim3(blocks_for(rows, threads / lanes, 4096 / threads)); }
};

// finish(sum of x over the `lanes` threads of a row), in each of them. One warp finishes for the block: the divisions
// and roots of FP64 are long. All threads of the block must call it.
template <class Finish>
__device__ inline auto row_sum(double x, int lanes, Finish&& finish) {
  using Result = decltype(finish(x));
  if (lanes <= 32) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return finish(x);
  }
  __shared__ double partial[32];
  __shared__ Result result;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = warp_sum(x);
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  if (warp == 0) {
    const Result finished = finish(warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0));
    if (lane == 0) result = finished;
  }
  __syncthreads();
  return result;
}

// Sums of K values over the block, finished likewise: totals[v] = finish(sum of x[v]), in shared memory until the next
// call. A warp folds K values at once: at each of the first steps a thread keeps the half of the values that its lane
// stands for.
template <int K, class Finish>
__device__ inline const float* row_sums(double (&x)[K], Finish&& finish) {
  static_assert(K == 1 || K == 2 || K == 4);
  __shared__ double partial[K][32];
  __shared__ float totals[K];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int offset = 16;
#pragma unroll
  for (int half = K / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int v = 0; v < half; ++v) {
      const double sent = upper ? x[v] : x[v + half], kept = upper ? x[v + half] : x[v];
      x[v] = kept + __shfl_xor_sync(0xffffffffu, sent, offset);
    }
  }
  for (; offset > 0; offset /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], offset);
  if (lane % (32 / K) == 0) partial[lane / (32 / K)][warp] = x[0];
  __syncthreads();
  for (int v = warp; v < K; v += warps) {
    const float finished = finish(warp_sum(lane < warps ? partial[v][lane] : 0.0));
    if (lane == 0) totals[v] = finished;
  }
  __syncthreads();
  return totals;
}

// 1 / sqrt(sum / n + eps) for the rows of a norm; in FP64, where the square of no f32 overflows.
__device__ inline float inverse_deviation(double sum, int64_t n, float eps) {
  return static_cast<float>(1.0 / sqrt(sum / static_cast<double>(n) + static_cast<double>(eps)));
}

// ---- sums over rows ----

inline int64_t chunks_of(int64_t rows) { return (rows + kSumRows - 1) / kSumRows; }

// How a block walks the rows of a chunk: `columns` neighbouring columns a thread, held in registers, or 1: any number
// of columns in strides of the block.
struct ChunkShape {
  int columns;
  unsigned threads;
  explicit ChunkShape(int64_t N) : columns(N % 4 == 0 && N <= 4096 ? 4 : N % 16 == 0 && N <= 8192 ? 16 : 1) {
    threads = static_cast<unsigned>(std::min<int64_t>((N + columns * 32 - 1) / (columns * 32) * 32, 1024));
  }
};

// One number a row of the chunk [begin, end) into shared memory; 0 for rows that are not there.
__device__ inline void load_rows(const float* from, int64_t begin, int64_t end, float (&to)[kSumRows]) {
  for (int i = threadIdx.x; i < kSumRows; i += blockDim.x) to[i] = begin + i < end ? from[begin + i] : 0.f;
}

// One thread a column: out[n] = sum over chunks of partial[chunk, n] in FP64, in order, rounded once; 4 bytes read a
// chunk and column. Ahead chunks are read at a time, since a column is one chain of additions.
template <int Ahead>
__global__ void sum_chunks_kernel(const float* partial, int64_t chunks, int64_t stride, int64_t N, Vector out) {
  const int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (n >= N) return;
  double sum = 0;
  for (int64_t first = 0; first < chunks; first += Ahead) {
    float x[Ahead];
#pragma unroll
    for (int k = 0; k < Ahead; ++k) x[k] = first + k < chunks ? partial[(first + k) * stride + n] : 0.f;
#pragma unroll
    for (int k = 0; k < Ahead; ++k)
      if (first + k < chunks) sum += static_cast<double>(x[k]);
  }
  out.store(n, static_cast<float>(sum));
}

// The sums of kSumRows rows each, [chunks, stride], into out [N].
template <int Ahead = 16>
void sum_chunks(const char* name, const float* partial, int64_t chunks, int64_t stride, const Tensor& out) {
  const int64_t N = out.shape.numel();
  launch(name, sum_chunks_kernel<Ahead>, dim3(static_cast<unsigned>((N + 31) / 32)), dim3(32), 0, partial, chunks,
         stride, N, Vector(out));
}

}  // namespace coat::cuda
