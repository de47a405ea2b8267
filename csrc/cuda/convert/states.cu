// convert for the formats of states and parameters: each to and from f32 and bf16, whatever the alignment.
#include "convert.cuh"

namespace coat::cuda {
namespace {

using States = Views<F16, F16T, BF16X2, E4M3G64, E4M3G256, E4M3X64, E4M3X256, D8G256, U8G256, D4G128, U4G128>;

constexpr int kWarps = 8;
template <class V>
constexpr int kRunOf = V::run == 0 ? 256 : V::run;

// A warp a run, a lane every 32nd pair of neighbours: no two lanes share a byte of 4-bit codes.
template <int N>
struct Runs32 {
  int64_t rows, cols, runs;  // runs of a row
  Runs32(const Tensor& t) {
    const bool by_row = is_ragged(t);
    rows = by_row ? t.shape.rows() : 1;
    cols = by_row ? t.shape.cols() : t.shape.numel();
    runs = (cols + N - 1) / N;
  }
  unsigned blocks() const { return static_cast<unsigned>((rows * runs + kWarps - 1) / kWarps); }
  // The run of this warp.
  __device__ int64_t own() const { return int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; }
  // use(place, element) for what this lane has of a run.
  template <class F>
  __device__ void each(int64_t run, F&& use) const {
    const int64_t row = rows == 1 ? 0 : run / runs, first = (run - row * runs) * N;
#pragma unroll
    for (int k = 0; k < N / 32; ++k) {
      const int64_t col = first + k / 2 * 64 + threadIdx.x % 32 * 2 + k % 2;
      if (col < cols) use(k, row * cols + col);
    }
  }
};

// Reads x once, writes y once.
template <class X, int N = kRunOf<X>>
__global__ void __launch_bounds__(kWarps * 32) convert_kernel_from_state(X x, Numbers y, Runs32<N> rows) {
  const int64_t run = rows.own();
  if (run >= rows.rows * rows.runs) return;
  const auto open = x.open(X::run == 0 ? 0 : run);
  rows.each(run, [&](int, int64_t i) { y.store(i, x.load(i, open)); });
}
template <class Y, int N = kRunOf<Y>>
__global__ void __launch_bounds__(kWarps * 32) convert_kernel_to_state(Numbers x, Y y, Runs32<N> rows, Status* status,
                                                                       const float* given, const uint32_t* measured) {
  const int64_t run = rows.own();
  uint32_t infs = 0;
  typename Y::Sealed sealed{};
  if constexpr (kScaling<Y> == Scaling::tensor) sealed = seal_tensor(y, given, measured);
  if (run < rows.rows * rows.runs) {
    float value[N / 32] = {};
    rows.each(run, [&](int k, int64_t i) { value[k] = x.load(i); });
    if constexpr (kSaturates<Y>) {
      RangeOf<Y> range;
      add_all(range, value);
      infs = range.infs;
      range.infs = 0;
      if constexpr (Y::run != 0) {
        merge_lanes<32>(range);
        sealed = y.seal(run, range);
      }
    }
    rows.each(run, [&](int k, int64_t i) { y.store(i, sealed, value[k]); });
  }
  count_infs_of_block(status, infs);
}

template <class List>
void encode(List list, const Tensor& x, const Tensor& scale, const Tensor& y) {
  with("y", y, list, [&](const auto y_view) {
    using Y = std::remove_const_t<decltype(y_view)>;
    const Runs32<kRunOf<Y>> rows(y);
    // a tensor without elements still has a scale
    const unsigned grid = std::max(rows.blocks(), kScaling<Y> == Scaling::tensor ? 1u : 0u);
    const auto start = [&](const float* given, const uint32_t* measured) {
      launch("convert", convert_kernel_to_state<Y>, grid, kWarps * 32, 0, Numbers(x), y_view, rows, y.status, given,
             measured);
    };
    if (x.format == F32::format())
      with_scale<Y>(x, F32(x), scale, start);
    else
      with_scale<Y>(x, BF16(x), scale, start);
  });
}

template <class... V>
bool is_one_of(const Format& format, Views<V...>) {
  return ((format == V::format()) || ...);
}

}  // namespace

bool is_state(const Format& format) { return is_one_of(format, States{}); }

void convert_states(const Tensor& x, const Tensor& scale, const Tensor& y) {
  if (is_state(x.format) && is_plain(y)) {
    with("x", x, States{}, [&](const auto x_view) {
      using X = std::remove_const_t<decltype(x_view)>;
      const Runs32<kRunOf<X>> rows(x);
      launch("convert", convert_kernel_from_state<X>, rows.blocks(), kWarps * 32, 0, x_view, Numbers(y), rows);
    });
  } else if (is_state(y.format) && is_plain(x)) {
    encode(States{}, x, scale, y);
  } else {
    const Plainly middle(x);
    is_state(x.format) ? convert_states(x, {}, middle.tensor) : requantize(x, {}, middle.tensor);
    is_state(y.format) ? convert_states(middle.tensor, scale, y) : requantize(middle.tensor, scale, y);
  }
}

void convert_floored(const convert_floored_args& args) { encode(FlooredViews{}, args.x, args.scale, args.y); }

}  // namespace coat::cuda
