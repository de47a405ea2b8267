// convert to and from formats with a scale a block of 128 x 128.
#include "convert.cuh"

namespace coat::cuda {
namespace {

constexpr int kSide = E4M3B128::run, kWide = 8;                     // elements of a thread in a row
constexpr int kAcross = kSide / kWide, kStep = kThreads / kAcross;  // rows of a block of threads
constexpr int kRows = kSide / kStep;                                // of a thread

// Where the elements of a thread lie: row(s) in a block of y or x, kWide columns from `column` on.
struct Corner {
  int64_t M, N, block, m, column;
  __device__ Corner(int64_t M_, int64_t N_) : M(M_), N(N_), block(blockIdx.x) {
    const int64_t across = (N + kSide - 1) / kSide;
    m = block / across * kSide + threadIdx.x / kAcross;
    column = block % across * kSide + threadIdx.x % kAcross * kWide;
  }
  // use(s, first element, how many there are) for every row.
  template <class F>
  __device__ void each(F&& use) const {
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      const int64_t row = m + s * kStep;
      use(s, row * N + column, row < M ? N - column : 0);
    }
  }
};

// One block of threads a block of y, which it holds in registers until its scale is known. Reads x once, writes y once.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads) convert_kernel_to_blocks(X x, Y y, int64_t M, int64_t N) {
  const Corner corner(M, N);
  Lane<CodeOf<X>, kWide> from[kRows];
  corner.each([&](int s, int64_t i, int64_t left) { from[s].template fetch<false>(x.codes, i, left); });
  Range range;
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    float value[kWide];
    from[s].decode(x, {}, value);
    add_all(range, value);
  }
  count_infs_of_block(y.status, range.infs);
  const auto sealed = y.seal(corner.block, {block_max(range.max), 0});
  corner.each([&](int s, int64_t i, int64_t left) {
    float value[kWide];
    from[s].decode(x, {}, value);
    Lane<E4M3, kWide> to;
    to.encode(y, sealed, value);
    to.template put<false>(y.codes, i, left);
  });
}

template <class Y>
__global__ void __launch_bounds__(kThreads) convert_kernel_from_blocks(E4M3B128 x, Y y, int64_t M, int64_t N) {
  const Corner corner(M, N);
  const auto open = x.open(corner.block);
  corner.each([&](int, int64_t i, int64_t left) {
    Lane<E4M3, kWide> from;
    from.fetch<false>(x.codes, i, left);
    float value[kWide];
    from.decode(x, open, value);
    Lane<CodeOf<Y>, kWide> to;
    to.encode(y, {}, value);
    to.template put<false>(y.codes, i, left);
  });
}

}  // namespace

void convert_blocks(const Tensor& x, const Tensor& y) {
  const bool from = x.format.scaling == Scaling::block;
  const int64_t M = x.shape.rows(), N = x.shape.cols();
  const auto blocks = static_cast<unsigned>(blocks_of(E4M3B128::format(), x.shape));
  with(from ? "y" : "x", from ? y : x, Views<F32, BF16>{}, [&](const auto plain) {
    using V = std::remove_const_t<decltype(plain)>;
    if (from)
      launch("convert", convert_kernel_from_blocks<V>, blocks, kThreads, 0, E4M3B128(x), plain, M, N);
    else
      with("y", y, Views<E4M3B128, E4M3B128P2>{}, [&](const auto view) {
        launch("convert", convert_kernel_to_blocks<V, std::remove_const_t<decltype(view)>>, blocks, kThreads, 0, plain,
               view, M, N);
      });
  });
}

}  // namespace coat::cuda
