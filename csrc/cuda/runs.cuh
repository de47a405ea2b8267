// Runs of 16 elements, one a thread at a time: packs of neighbouring elements, ranges, outputs in any format.
#pragma once
#include "device.cuh"

namespace coat::cuda {

// Count neighbouring elements of one row and one run, as they lie in memory: fetched early, decoded when used.
template <class View, int Count>
struct Pack {
  using Code = CodeOf<View>;
  static constexpr int kBytes = Count * static_cast<int>(sizeof(Code));
  using Word = std::conditional_t<kBytes % 16 == 0, int4, std::conditional_t<kBytes == 8, int2, int>>;
  using Pair = std::conditional_t<sizeof(Code) == 1, uint16_t, uint32_t>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  union {
    Word word[kWords];
    Code code[Count];
    Pair pair[kBytes / sizeof(Pair)];
    uint32_t quad[kBytes / 4];
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
    for (int k = 0; k < Count; k += 2) {
      if constexpr (std::is_same_v<Code, BFloat16>) {
        const float2 two = decode_pair<Code>(pair[k / 2]);
        x[k] = two.x;
        x[k + 1] = two.y;
      } else if constexpr (sizeof(Code) == 1) {
        const float2 two = decode_pair<Code>(pair[k / 2]);
        x[k] = two.x * open.scale;
        x[k + 1] = two.y * open.scale;
      } else {
        x[k] = view.load(k, open);
        x[k + 1] = view.load(k + 1, open);
      }
    }
  }
  // Element k of a view without a scale for the tensor, in units of the scale of the run, which is 1 where there are no
  // runs.
  __device__ float value(int k) const {
    if constexpr (std::is_same_v<Code, Float32>) {
      return code[k].code;
    } else {
      const float2 two = decode_pair<Code>(pair[k / 2]);
      return k % 2 == 0 ? two.x : two.y;
    }
  }
  __device__ float unit() const { return View::run != 0 ? BFloat16::decode(scale) : 1.f; }
  __device__ void put(const View& view, int64_t i, typename View::Sealed sealed, const float (&x)[Count]) {
    encode(sealed, x);
    store(view, i);
  }
  __device__ void encode(typename View::Sealed sealed, const float (&x)[Count]) {
#pragma unroll
    for (int k = 0; k < Count; k += 2) {
      if constexpr (std::is_same_v<Code, Float32>)
        code[k].code = x[k], code[k + 1].code = x[k + 1];
      else if constexpr (std::is_same_v<Code, BFloat16>)
        pair[k / 2] = encode_pair<Code>(x[k], x[k + 1]);
      else
        pair[k / 2] = encode_pair<Code>(x[k] * sealed.inverse, x[k + 1] * sealed.inverse);
    }
  }
  __device__ void store(const View& view, int64_t i) const {
    Word* to = reinterpret_cast<Word*>(view.codes + i);
#pragma unroll
    for (int k = 0; k < kWords; ++k) to[k] = word[k];
  }
};

// ---- runs of 16 elements: a thread has one at a time; the last run of a row may be short ----

constexpr int kRun = 16;
COAT_HD int64_t runs_of(int64_t cols) { return (cols + kRun - 1) / kRun; }
COAT_HD int length_of(int64_t cols, int64_t run) {
  const int64_t left = cols - run * kRun;
  return left < kRun ? static_cast<int>(left) : kRun;
}

// Elements [begin, begin + count) of a row, at their places from the start of a run of the thread; zeros behind. Any
// alignment, any number of columns: `begin` need not be the start of a run of x.
template <class View>
__device__ inline void load_some(const View& x, int64_t row, int64_t cols, int64_t begin, int count,
                                 float (&out)[kRun]) {
  const int64_t runs = runs_of(cols);
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    out[k] = 0.f;
    if (k < count) out[k] = x.load(row * cols + begin + k, x.open(row * runs + (begin + k) / kRun));
  }
}

// Run `run` of a row that begins with one; `whole` says that all runs are full and aligned.
template <class View>
__device__ inline void load_run(const View& x, int64_t row, int64_t cols, int64_t run, bool whole, float (&out)[kRun]) {
  if (whole) {
    Pack<View, kRun> pack;
    pack.fetch(x, row * cols + run * kRun, row * (cols / kRun) + run);
    pack.unpack(x, out);
  } else {
    load_some(x, row, cols, run * kRun, length_of(cols, run), out);
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
#pragma unroll
    for (int k = 0; k < kRun; ++k) range.add(x[k]);
  }
  return range;
}

// Where a kernel puts its runs: a tensor in the format of Y. The scale of /t is `given`, or follows from `max`, the
// bits of the largest finite value that a pass with Measured found. open() first; at the end every thread of the block
// calls close().
template <class Y>
class Output {
 public:
  static constexpr Scaling kScaling = Y::format().scaling;
  explicit Output(const Y& y, const float* given = nullptr, const uint32_t* max = nullptr)
      : y_(y), given_(given), max_(max) {}
  __device__ const Y& view() const { return y_; }

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
  // The same where no element is infinite, which spares the search for those.
  __device__ void put_finite(int64_t i, int64_t b, const float (&x)[kRun]) {
    Pack<Y, kRun> pack;
    if constexpr (kScaling == Scaling::tensor)
      pack.put(y_, i, sealed_, x);
    else
      put(i, b, x);
  }
  // The first `count` of x, the others being zero: i is the start of run b, or of anything where Y has no runs.
  __device__ void put_some(int64_t i, int64_t b, const float (&x)[kRun], int count) {
    const auto sealed = seal(b, x);
#pragma unroll
    for (int k = 0; k < kRun; ++k)
      if (k < count) y_.store(i + k, sealed, x[k]);
  }
  // For the codes that a kernel makes itself; not for formats with runs.
  __device__ typename Y::Sealed sealed() const { return sealed_; }
  __device__ float inverse() const {
    if constexpr (kScaling == Scaling::tensor) return sealed_.inverse;
    return 1.f;
  }
  __device__ void put_codes(int64_t i, const Pack<Y, kRun>& pack) { pack.store(y_, i); }
  __device__ float scale() const { return *y_.scale; }  // in the thread that wrote it
  // Returns the code.
  __device__ auto put_one(int64_t i, float x) {
    if constexpr (kScaling == Scaling::tensor) infs_ += abs_(x) == kInf ? 1u : 0u;
    y_.store(i, sealed_, x);
    return y_.codes[i].code;
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
  static constexpr Scaling kScaling = Scaling::tensor;
  explicit Output(uint32_t* max) : max_(max) {}
  COAT_HD uint32_t* max() const { return max_; }
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

template <class Y>
__device__ inline void put_run(Output<Y>& y, int64_t row, int64_t cols, int64_t run, bool whole,
                               const float (&x)[kRun]) {
  const int64_t i = row * cols + run * kRun, b = row * runs_of(cols) + run;
  whole ? y.put(i, b, x) : y.put_some(i, b, x, length_of(cols, run));
}

// One thread: the scale of a /t tensor without elements.
template <class Y>
__global__ void seal_empty_kernel(Output<Y> y) {
  y.open();
}

// start(output) for the format of y, one of V: once, or for a scale that has to be measured with Measured first:
// computing twice is cheaper than keeping f32 values.
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

}  // namespace coat::cuda
