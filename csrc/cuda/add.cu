// add: sums of two tensors, in-place accumulation and scaling, and the sum over rows that is the gradient of a bias.
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

// One vector a lane, 4 a thread. Reads and writes y once.
template <class Y>
__global__ void __launch_bounds__(kThreads) multiply_into_kernel(Y y, const float* factor, Rows rows) {
  constexpr int E = kLane<CodeOf<Y>>;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll);
  const float by = *factor;
  by_case(rows.whole<E>(first, kThreads * kUnroll), [&](auto whole) {
    using Here = Spot<E, whole.value>;
    Lane<CodeOf<Y>, E> lane[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Here spot(rows, first + u * kThreads + threadIdx.x);
      lane[u].template fetch<whole.value>(y.codes, spot.i, spot.left);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Here spot(rows, first + u * kThreads + threadIdx.x);
      float value[E];
      lane[u].decode(y, {}, value);
#pragma unroll
      for (int k = 0; k < E; ++k) value[k] = value[k] * by;
      lane[u].encode(y, {}, value);
      lane[u].template put<whole.value>(y.codes, spot.i, spot.left);
    }
  });
}

constexpr int kColumnThreads = kStrands * 32, kRowsAhead = 8;  // 8 rows of 16 bytes a thread in flight
constexpr int kGroupsAhead = 16;                               // that the last block reads at once

// One vector of columns a lane, one strand of a chunk of kSumRows rows a warp, a group of chunks a block: the strands
// meet in shared memory. The last block of a strip of columns to end adds the groups. Reads x once; partial [groups, N]
// in FP64.
template <class X, class Y>
__global__ void __launch_bounds__(kColumnThreads, 4)
    column_sum_kernel(X x, Y y, int64_t M, int64_t N, unsigned strip, unsigned strips, unsigned groups, double* partial,
                      uint32_t* counter) {
  constexpr int E = kLane<CodeOf<X>>, kColumns = 32 * E;
  __shared__ float4 strands[2][kStrands][kColumns / 4];
  const int lane = threadIdx.x % 32, strand = threadIdx.x / 32, column = threadIdx.x;
  const unsigned group = blockIdx.x / strips, place = blockIdx.x % strips;
  const int64_t n0 = int64_t{strip + place} * kColumns, n = n0 + lane * E;
  const bool adds = column < kColumns && n0 + column < N;
  double total = 0;
#pragma unroll 1
  for (int c = 0; c < kGroup; ++c) {
    const int64_t chunk = int64_t{group} * kGroup + c, begin = chunk * kSumRows, end = min(M, begin + kSumRows);
    if (begin >= M) break;
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
      strands[c % 2][strand][(lane * E + k) / 4] = make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
    __syncthreads();  // one a chunk: those of the next one lie elsewhere
    if (!adds) continue;
    float all[kStrands];
#pragma unroll
    for (int s = 0; s < kStrands; ++s) all[s] = reinterpret_cast<const float*>(strands[c % 2][s])[column];
    total += static_cast<double>(join_strands(all));
  }
  if (adds) partial[group * N + n0 + column] = total;
  if (!is_last(counter + place, groups) || !adds) return;
  total = 0;
  for (unsigned first = 0; first < groups; first += kGroupsAhead) {
    double held[kGroupsAhead];
#pragma unroll
    for (int k = 0; k < kGroupsAhead; ++k)
      held[k] = first + k < groups ? __ldcg(partial + (first + k) * N + n0 + column) : 0.0;
#pragma unroll
    for (int k = 0; k < kGroupsAhead; ++k) total += held[k];
  }
  y.store(n0 + column, {}, static_cast<float>(total));
}

}  // namespace

void add(const add_args& args) {
  if (args.twin)
    start_add<true>("add", args.a, args.b, args.y, args.twin);
  else
    start_add<false>("add", args.a, args.b, args.y, args.y);
}

void add_into(const add_into_args& args) { start_add<false>("add_into", args.y, args.x, args.y, args.y); }

void multiply_into(const multiply_into_args& args) {
  with("y", args.y, Wide{}, [&](const auto y) {
    using Y = std::remove_const_t<decltype(y)>;
    const Rows rows = Rows::of(1, args.y.shape.numel(), kLane<CodeOf<Y>>, 1);
    const int64_t blocks = (rows.total() + kThreads * kUnroll - 1) / (kThreads * kUnroll);
    launch("multiply_into", multiply_into_kernel<Y>, static_cast<unsigned>(blocks), kThreads, 0, y,
           args.factor.as<float>(), rows);
  });
}

void column_sum(const column_sum_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols();
  if (N == 0) return;
  const auto groups = static_cast<unsigned>(std::max<int64_t>((M + kSumRows * kGroup - 1) / (kSumRows * kGroup), 1));
  const Scratch partial(groups * N * static_cast<int64_t>(sizeof(double)));
  with("x", args.x, Wide{}, [&](const auto x) {
    with("y", args.y, Wide{}, [&](const auto y) {
      using X = std::remove_const_t<decltype(x)>;
      using Y = std::remove_const_t<decltype(y)>;
      const int64_t columns = 32 * kLane<CodeOf<X>>, strips = (N + columns - 1) / columns;
      for (int64_t strip = 0; strip < strips; strip += kCounters) {
        const auto count = static_cast<unsigned>(std::min<int64_t>(strips - strip, kCounters));
        launch("column_sum", column_sum_kernel<X, Y>, groups * count, kColumnThreads, 0, x, y, M, N,
               static_cast<unsigned>(strip), count, groups, partial.as<double>(), counters());
      }
    });
  });
}

}  // namespace coat::cuda
