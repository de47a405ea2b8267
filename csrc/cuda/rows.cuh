// Rows on the device: packs of neighbouring elements, outputs in any format, sums of a row and over rows: what the
// row-wise families of this folder share.
#pragma once
#include "device.cuh"

namespace coat::cuda {

template <class View>
using CodeOf = std::remove_reference_t<decltype(*std::declval<View>().codes)>;

// ---- Count neighbouring elements of one row and one run, as they lie in memory: fetched early, decoded when used ----

template <int Bytes>
using Word = std::conditional_t<Bytes % 16 == 0, int4, std::conditional_t<Bytes == 8, int2, int>>;

template <class View, int Count>
struct Pack {
  using Code = CodeOf<View>;
  static constexpr int kBytes = Count * static_cast<int>(sizeof(Code));
  using Word = cuda::Word<kBytes>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  union {
    Word word[kWords];
    Code code[Count];
  };
  uint16_t scale = 0;  // that of the run, undecoded: nothing waits for it at the fetch

  // All elements zero.
  __device__ Pack() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = Word{};
  }
  // Elements i to i + Count - 1, of run b; i is a multiple of Count.
  __device__ void fetch(const View& view, int64_t i, int64_t b) {
    const Word* from = reinterpret_cast<const Word*>(view.codes + i);
#pragma unroll
    for (int k = 0; k < kWords; ++k) word[k] = from[k];
    if constexpr (View::run != 0) scale = view.scale[b];
  }
  __device__ void unpack(View view, float (&x)[Count]) {
    view.codes = code;
    if constexpr (View::run != 0) view.scale = &scale;
    const auto open = view.open(0);
#pragma unroll
    for (int k = 0; k < Count; ++k) x[k] = view.load(k, open);
  }
  __device__ void put(View view, int64_t i, typename View::Sealed sealed, const float (&x)[Count]) {
    Word* to = reinterpret_cast<Word*>(view.codes + i);
    view.codes = code;
#pragma unroll
    for (int k = 0; k < Count; ++k) view.store(k, sealed, x[k]);
#pragma unroll
    for (int k = 0; k < kWords; ++k) to[k] = word[k];
  }
};

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

// ---- runs of 16 elements: a thread has one at a time; the last run of a row may be short ----

constexpr int kRun = 16;
inline int64_t runs_of(int64_t cols) { return (cols + kRun - 1) / kRun; }

// Elements [begin, begin + count) of a row, at their places from the start of a run of the thread; zeros behind. Any
// alignment, any number of columns: `begin` need not be the start of a run of x.
template <class View>
__device__ inline void load_some(const View& x, int64_t row, int64_t cols, int64_t begin, int count, float (&out)[kRun]) {
  const int64_t runs = (cols + kRun - 1) / kRun;
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    out[k] = 0.f;
    if (k < count) out[k] = x.load(row * cols + begin + k, x.open(row * runs + (begin + k) / kRun));
  }
}

// Range of a run. Its maximum in one instruction an element: fmaxf passes over NaN; infinities are counted when met.
__device__ inline Range range_of(const float (&x)[kRun]) {
  float largest = 0.f;
#pragma unroll
  for (int k = 0; k < kRun; ++k) largest = fmaxf(largest, fabsf(x[k]));
  Range range{bits_of(largest), 0};
  if (largest == kInf) {
    range.max = 0;
#pragma unroll 1
    for (int k = 0; k < kRun; ++k) range.add(x[k]);
  }
  return range;
}

// Where a kernel puts its runs: a tensor in the format of Y. The scale of /t is `given`, or follows from `max`, the bits of
// the largest finite value that a pass with Measured found. open() first; at the end every thread of the block calls close().
template <class Y>
class Output {
 public:
  static constexpr Scaling kScaling = Y::format().scaling;
  explicit Output(const Y& y, const float* given = nullptr, const uint32_t* max = nullptr)
      : y_(y), given_(given), max_(max) {}

  __device__ void open() {
    infs_ = 0;
    if constexpr (kScaling == Scaling::tensor) {
      const float scale = given_ ? *given_ : scale_for<CodeOf<Y>>(Range{max_ ? *max_ : 0u, 0});
      sealed_ = {1.f / scale};
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        y_.seal_as(scale);
        if (!(scale >= kMinNormal && scale < kInf)) report(y_.status, kBadScale, 0, 0, 0);
      }
    }
  }
  // 16 elements from i on, a multiple of 16, the whole run b.
  __device__ void put(int64_t i, int64_t b, const float (&x)[kRun]) {
    Pack<Y, kRun> pack;
    pack.put(y_, i, seal(b, x), x);
  }
  // The first `count` of x, the others being zero: i is the start of run b, or of anything where Y has no runs.
  __device__ void put_some(int64_t i, int64_t b, const float (&x)[kRun], int count) {
    const auto sealed = seal(b, x);
#pragma unroll
    for (int k = 0; k < kRun; ++k)
      if (k < count) y_.store(i + k, sealed, x[k]);
  }
  __device__ void close() {
    if constexpr (kScaling != Scaling::none) {
      if (!__syncthreads_or(infs_ != 0)) return;
      const uint32_t infs = block_sum(infs_);
      if (threadIdx.x == 0) count_infs(y_.status, infs);
    }
  }

 private:
  __device__ typename Y::Sealed seal(int64_t b, const float (&x)[kRun]) {
    if constexpr (kScaling == Scaling::none) {
      return {};
    } else {
      Range range = range_of(x);
      infs_ += range.infs;
      range.infs = 0;  // counted by close(), all at once
      if constexpr (kScaling == Scaling::run) return y_.seal(b, range);
      return sealed_;
    }
  }

  Y y_;
  const float* given_;
  const uint32_t* max_;
  typename Y::Sealed sealed_;
  uint32_t infs_;
};

// The pass that only looks: *max becomes the bits of the largest finite |x|; max is order-free, so the atomic is exact.
struct Measured {};
template <>
class Output<Measured> {
 public:
  explicit Output(uint32_t* max) : max_(max) {}
  __device__ void open() { seen_ = 0; }
  __device__ void put(int64_t, int64_t, const float (&x)[kRun]) {
    const uint32_t largest = range_of(x).max;
    seen_ = largest > seen_ ? largest : seen_;
  }
  __device__ void put_some(int64_t i, int64_t b, const float (&x)[kRun], int) { put(i, b, x); }
  __device__ void close() {
    const uint32_t largest = block_max(seen_);
    if (threadIdx.x == 0 && largest > 0) atomicMax(max_, largest);
  }

 private:
  uint32_t* max_;
  uint32_t seen_;
};

// One thread: the scale of a /t tensor without elements.
template <class Y>
__global__ void seal_empty_kernel(Output<Y> y) {
  y.open();
}

// start(output) for the format of y, one of V: once, or for a scale that has to be measured with Measured first: computing
// twice is cheaper than keeping f32 values.
template <class... V, class Start>
void write(const char* name, const Tensor& y, const Tensor& scale, Views<V...> formats, Start&& start) {
  with("y", y, formats, [&](const auto view) {
    using Y = std::remove_const_t<decltype(view)>;
    if constexpr (Y::format().scaling == Scaling::tensor) {
      const float* given = scale ? scale.as<float>() : nullptr;
      if (y.shape.numel() == 0) {
        launch(name, seal_empty_kernel<Y>, dim3(1), dim3(1), 0, Output<Y>(view, given));
      } else if (given) {
        start(Output<Y>(view, given));
      } else {
        const Scratch max(sizeof(uint32_t));
        check(cudaMemsetAsync(max.as<uint32_t>(), 0, sizeof(uint32_t), stream()), name);
        start(Output<Measured>(max.as<uint32_t>()));
        start(Output<Y>(view, nullptr, max.as<uint32_t>()));
      }
    } else {
      start(Output<Y>(view));
    }
  });
}

// A thread's walk over the runs of [rows, runs] in strides of the grid: one division a thread, none a step.
struct Walk {
  int64_t row, run, rows, runs, step_rows, step_runs;
  __device__ Walk(int64_t rows_, int64_t runs_) : rows(rows_), runs(runs_) {
    const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
    row = first / runs;
    run = first - row * runs;
    step_rows = step / runs;
    step_runs = step - step_rows * runs;
  }
  __device__ bool more() const { return row < rows; }
  __device__ void next() {
    row += step_rows;
    run += step_runs;
    if (run >= runs) {
      run -= runs;
      ++row;
    }
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
  // Two rounds of the blocks that a multiprocessor holds: enough to balance, few enough to keep weights in registers.
  dim3 grid(int64_t rows) const { return dim3(blocks_for(rows, threads / lanes, 4096 / threads)); }
};

// finish(sum of x over the `lanes` threads of a row), in each of them. One warp finishes for the block: the divisions and
// roots of FP64 are long. All threads of the block must call it.
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

// Sums of K values over the block, finished likewise: totals[v] = finish(sum of x[v]), in shared memory until the next call.
// A warp folds K values at once: at each of the first steps a thread keeps the half of the values that its lane stands for.
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

// One thread a column: out[n] = sum over chunks of partial[chunk, n] in FP64, in order, rounded once; 4 bytes read a chunk
// and column. Reads run ahead by 16 chunks, since a column is one chain of additions.
__global__ inline void sum_chunks_kernel(const float* partial, int64_t chunks, int64_t stride, int64_t N, Vector out);

}  // namespace coat::cuda
