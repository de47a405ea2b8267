// add: sums of two tensors, in-place accumulation, and the sum over rows that is the gradient of a bias.
#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

using Wide = Views<F32, BF16>;
constexpr int kUnroll = 4;

// One vector of each tensor a lane, 4 a thread, all loads before the first sum; the lanes of a run of 16 of the twin
// find its range by shuffles. The twin is that of the FP32 sum. Reads a and b once, writes y (and 17/16 bytes of twin)
// once.
template <class A, class B, class Y, bool Twin>
__global__ void __launch_bounds__(kThreads) add_kernel(A a, B b, Y y, E4M3G16 twin, Rows rows) {
  constexpr int E = kLane<CodeOf<A>, CodeOf<B>, CodeOf<Y>>;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll);
  uint32_t infs = 0;
  by_case(rows.whole<E>(first, kThreads * kUnroll), [&](auto whole) {
    using Here = Spot<E, whole.value>;
    Lane<CodeOf<A>, E> a_lane[kUnroll];
    Lane<CodeOf<B>, E> b_lane[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Here spot(rows, first + u * kThreads + threadIdx.x);
      a_lane[u].template fetch<whole.value>(a.codes, spot.i, spot.left);
      b_lane[u].template fetch<whole.value>(b.codes, spot.i, spot.left);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t q = first + u * kThreads + threadIdx.x;
      const Here spot(rows, q);
      float sum[E], other[E];
      a_lane[u].decode(a, {}, sum);
      b_lane[u].decode(b, {}, other);
#pragma unroll
      for (int k = 0; k < E; ++k) sum[k] = sum[k] + other[k];
      Lane<CodeOf<Y>, E> out;
      out.encode(y, {}, sum);
      out.template put<whole.value>(y.codes, spot.i, spot.left);
      if constexpr (Twin) {
        Range range;
        add_all(range, sum);
        infs += range.infs;
        range.infs = 0;
        merge_lanes<E4M3G16::run / E>(range);
        E4M3G16::Sealed sealed{};
        if (whole.value || q < rows.total()) sealed = twin.seal(spot.template block<E4M3G16>(rows), range);
        Lane<E4M3, E> code;
        code.encode(twin, sealed, sum);
        code.template put<whole.value>(twin.codes, spot.i, spot.left);
      }
    }
  });
  if constexpr (Twin) count_infs_of_block(twin.status, infs);
}

template <bool Twin>
void start_add(const char* name, const Tensor& a, const Tensor& b, const Tensor& y, const Tensor& twin) {
  const bool by_row = Twin && is_ragged(twin);
  with("a", a, Wide{}, [&](const auto a_view) {
    with("b", b, Wide{}, [&](const auto b_view) {
      with("y", y, Wide{}, [&](const auto y_view) {
        using A = std::remove_const_t<decltype(a_view)>;
        using B = std::remove_const_t<decltype(b_view)>;
        using Y = std::remove_const_t<decltype(y_view)>;
        constexpr int E = kLane<CodeOf<A>, CodeOf<B>, CodeOf<Y>>;
        const Rows rows = Rows::of(by_row ? y.shape.rows() : 1, by_row ? y.shape.cols() : y.shape.numel(), E,
                                   Twin ? E4M3G16::run / E : 1);
        const int64_t blocks = (rows.total() + kThreads * kUnroll - 1) / (kThreads * kUnroll);
        launch(name, add_kernel<A, B, Y, Twin>, static_cast<unsigned>(blocks), kThreads, 0, a_view, b_view, y_view,
               E4M3G16(twin), rows);
      });
    });
  });
}

constexpr int kColumnThreads = kStrands * 32, kRowsAhead = 8;  // 8 rows of 16 bytes a thread in flight

// One vector of columns a lane, one strand of a chunk of kSumRows rows a warp; the strands meet in shared memory.
// `across` blocks a chunk. Reads x once; partial [chunks, N] in FP32.
template <class X>
__global__ void __launch_bounds__(kColumnThreads, 4)
    column_sum_kernel(X x, int64_t M, int64_t N, unsigned across, float* partial) {
  constexpr int E = kLane<CodeOf<X>>, kColumns = 32 * E;
  __shared__ float4 strands[kStrands][kColumns / 4];
  let_next_begin();
  const int lane = threadIdx.x % 32, strand = threadIdx.x / 32;
  const int64_t chunk = int64_t{blockIdx.x / across}, begin = chunk * kSumRows, end = min(M, begin + kSumRows);
  const int64_t n0 = int64_t{blockIdx.x % across} * kColumns, n = n0 + lane * E;
  float sum[E] = {};
  by_case(n0 + kColumns <= N && N % E == 0, [&](auto whole) {
    const auto add_rows = [&](auto count, int64_t row) {
      Lane<CodeOf<X>, E> from[count.value];
#pragma unroll
      for (int r = 0; r < count.value; ++r) from[r].template fetch<whole.value>(x.codes, (row + r) * N + n, N - n);
      if constexpr (whole.value) __syncwarp();  // or the compiler saves registers by sinking loads to their use
#pragma unroll
      for (int r = 0; r < count.value; ++r) {
        float value[E];
        from[r].decode(x, {}, value);
#pragma unroll
        for (int k = 0; k < E; ++k) sum[k] += value[k];
      }
    };
    int64_t row = begin + strand * kStrandRows;
    const int64_t stop = min(end, row + kStrandRows);
    if constexpr (whole.value) {
#pragma unroll 1
      for (; row + kRowsAhead <= stop; row += kRowsAhead) add_rows(std::integral_constant<int, kRowsAhead>{}, row);
    }
#pragma unroll 1
    for (; row < stop; ++row) add_rows(std::integral_constant<int, 1>{}, row);
  });
#pragma unroll
  for (int k = 0; k < E; k += 4)
    strands[strand][(lane * E + k) / 4] = make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= kColumns || n0 + column >= N) return;
  float all[kStrands];
#pragma unroll
  for (int s = 0; s < kStrands; ++s) all[s] = reinterpret_cast<const float*>(strands[s])[column];
  partial[chunk * N + n0 + column] = join_strands(all);
}

constexpr int kShelf = 128;  // chunks in shared memory at a time

// 32 columns a block, whose threads fetch the chunks, all at once; one warp adds them in FP64, in order. Reads partial
// once.
template <class Y>
__global__ void __launch_bounds__(kColumnThreads)
    column_sum_kernel_chunks(const float* partial, int64_t chunks, int64_t N, Y y) {
  __shared__ float shelf[kShelf][32];
  constexpr int kWarps = kColumnThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t n = int64_t{blockIdx.x} * 32 + lane;
  after_previous();
  double sum = 0;
  for (int64_t first = 0; first < chunks; first += kShelf) {
    float held[kShelf / kWarps];
#pragma unroll
    for (int i = 0; i < kShelf / kWarps; ++i) {
      const int64_t c = first + warp + i * kWarps;
      held[i] = c < chunks && n < N ? partial[c * N + n] : 0.f;
    }
    if (first > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < kShelf / kWarps; ++i) shelf[warp + i * kWarps][lane] = held[i];
    __syncthreads();
    if (warp == 0) {
      const int count = static_cast<int>(min(int64_t{kShelf}, chunks - first));
#pragma unroll 16
      for (int c = 0; c < count; ++c) sum += static_cast<double>(shelf[c][lane]);
    }
  }
  if (warp == 0 && n < N) y.store(n, {}, static_cast<float>(sum));
}

}  // namespace

void add(const add_args& args) {
  if (args.twin)
    start_add<true>("add", args.a, args.b, args.y, args.twin);
  else
    start_add<false>("add", args.a, args.b, args.y, args.y);
}

void add_into(const add_into_args& args) { start_add<false>("add_into", args.y, args.x, args.y, args.y); }

void column_sum(const column_sum_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols(), chunks = (M + kSumRows - 1) / kSumRows;
  if (N == 0) return;
  const Scratch partial(chunks * N * static_cast<int64_t>(sizeof(float)));
  with("x", args.x, Wide{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    const int64_t columns = 32 * kLane<CodeOf<X>>, across = (N + columns - 1) / columns;
    launch("column_sum", column_sum_kernel<X>, static_cast<unsigned>(chunks * across), kColumnThreads, 0, x, M, N,
           static_cast<unsigned>(across), partial.as<float>());
  });
  with("y", args.y, Wide{}, [&](const auto y) {
    using Y = std::remove_const_t<decltype(y)>;
    launch_next("column_sum", column_sum_kernel_chunks<Y>, static_cast<unsigned>((N + 31) / 32), kColumnThreads,
                partial.as<float>(), chunks, N, y);
  });
}

}  // namespace coat::cuda
