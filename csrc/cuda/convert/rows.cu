// convert to and from e4m3 with a scale a row.
#include "convert.cuh"

namespace coat::cuda {
namespace {

// use(column, how many there are from it on) for the vectors of E elements of a row that this thread has.
template <int E, class F>
__device__ inline void each_vector(int64_t N, F&& use) {
  for (int64_t n = int64_t{threadIdx.x} * E; n < N; n += kThreads * E) use(n, N - n);
}

// One block a row: first its range, then its codes. Reads x twice, the second time from caches where a row fits, and
// writes y once.
template <class X>
__global__ void __launch_bounds__(kThreads) convert_kernel_to_rows(X x, E4M3R y, int64_t N) {
  constexpr int E = kLane<CodeOf<X>>;
  const int64_t row = blockIdx.x;
  const auto read = [&](int64_t n, int64_t left, float(&value)[E]) {
    Lane<CodeOf<X>, E> from;
    from.template fetch<false>(x.codes, row * N + n, left);
    from.decode(x, {}, value);
  };
  Range range;
  each_vector<E>(N, [&](int64_t n, int64_t left) {
    float value[E];
    read(n, left, value);
    add_all(range, value);
  });
  count_infs_of_block(y.status, range.infs);
  const auto sealed = y.seal(row, {block_max(range.max), 0});
  each_vector<E>(N, [&](int64_t n, int64_t left) {
    float value[E];
    read(n, left, value);
    Lane<E4M3, E> to;
    to.encode(y, sealed, value);
    to.template put<false>(y.codes, row * N + n, left);
  });
}

template <class Y>
__global__ void __launch_bounds__(kThreads) convert_kernel_from_rows(E4M3R x, Y y, int64_t N) {
  constexpr int E = kLane<CodeOf<Y>>;
  const int64_t row = blockIdx.x;
  const auto open = x.open(row);
  each_vector<E>(N, [&](int64_t n, int64_t left) {
    Lane<E4M3, E> from;
    from.template fetch<false>(x.codes, row * N + n, left);
    float value[E];
    from.decode(x, open, value);
    Lane<CodeOf<Y>, E> to;
    to.encode(y, {}, value);
    to.template put<false>(y.codes, row * N + n, left);
  });
}

}  // namespace

void convert_rows(const Tensor& x, const Tensor& y) {
  const bool from = x.format == E4M3R::format();
  const auto rows = static_cast<unsigned>(x.shape.rows());
  with(from ? "y" : "x", from ? y : x, Views<F32, BF16>{}, [&](const auto plain) {
    using V = std::remove_const_t<decltype(plain)>;
    if (from)
      launch("convert", convert_kernel_from_rows<V>, rows, kThreads, 0, E4M3R(x), plain, x.shape.cols());
    else
      launch("convert", convert_kernel_to_rows<V>, rows, kThreads, 0, plain, E4M3R(y), x.shape.cols());
  });
}

}  // namespace coat::cuda
