// rmsnorm on the device: a row in the registers of its threads; the mean of squares in FP64, everything else in FP32.
#include "../contract.h"
#include "../ops.h"
#include "rows.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kMost = 512;          // threads a row
constexpr int64_t kHeld = kMost * kRun;  // columns that they hold in registers

// `lanes` threads a row, 16 columns a thread, the codes of the next row fetched before this one is reduced; w stays in
// registers. Moves x once and y once.
template <class X, class Y>
__global__ __launch_bounds__(kMost, sizeof(CodeOf<X>) == 4 ? 1 : 2) void rmsnorm_forward_kernel(
    X x, Vector w, Output<Y> y, float* rstd, float eps, int64_t M, int64_t N, int lanes) {
  const int lane = threadIdx.x % lanes, rows = blockDim.x / lanes;
  const int64_t step = int64_t{gridDim.x} * rows, n = int64_t{lane} * kRun, runs = N / kRun;
  const bool inside = n < N;
  int64_t row = int64_t{blockIdx.x} * rows + threadIdx.x / lanes;
  extern __shared__ float4 shared[];
  const Shelf<kRun> weights(shared, w, n, inside);
  y.open();
  Pack<X, kRun> next;
  if (inside && row < M) next.fetch(x, row * N + n, row * runs + lane);
  for (int64_t first = int64_t{blockIdx.x} * rows; first < M; first += step, row += step) {
    float v[kRun];
    next.unpack(x, v);
    if (inside && row + step < M) next.fetch(x, (row + step) * N + n, (row + step) * runs + lane);
    double even = 0, odd = 0;
#pragma unroll
    for (int k = 0; k < kRun; k += 2) {
      even += static_cast<double>(v[k]) * v[k];
      odd += static_cast<double>(v[k + 1]) * v[k + 1];
    }
    const float r = row_sum(even + odd, lanes, [&](double squares) { return inverse_deviation(squares, N, eps); });
    if (!inside || row >= M) continue;
    if (lane == 0) rstd[row] = r;
#pragma unroll
    for (int k = 0; k < kRun; k += 4) {
      float weight[4];
      weights.load(k, weight);
#pragma unroll
      for (int c = 0; c < 4; ++c) v[k + c] = v[k + c] * r * weight[c];
    }
    y.put(row * N + n, row * runs + lane, v);
  }
  y.close();
}

// Any number of columns: the same threads walk the runs of their row twice, the second time from the caches; element by
// element unless N is a multiple of 16.
template <class X, class Y>
__global__ __launch_bounds__(kMost, 2) void rmsnorm_forward_kernel_wide(X x, Vector w, Output<Y> y, float* rstd,
                                                                        float eps, int64_t M, int64_t N, int lanes) {
  const int lane = threadIdx.x % lanes, rows = blockDim.x / lanes;
  const int64_t step = int64_t{gridDim.x} * rows, runs = runs_of(N);
  const bool whole = N % kRun == 0;
  y.open();
  for (int64_t first = int64_t{blockIdx.x} * rows; first < M; first += step) {
    const int64_t row = first + threadIdx.x / lanes, end = row < M ? runs : 0;
    float v[kRun];
    double sum = 0;
    for (int64_t run = lane; run < end; run += lanes) {
      load_run(x, row, N, run, whole, v);
#pragma unroll
      for (int k = 0; k < kRun; ++k) sum += static_cast<double>(v[k]) * v[k];
    }
    const float r = row_sum(sum, lanes, [&](double squares) { return inverse_deviation(squares, N, eps); });
    if (row < M && lane == 0) rstd[row] = r;
    for (int64_t run = lane; run < end; run += lanes) {
      load_run(x, row, N, run, whole, v);
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (run * kRun + k < N) v[k] = v[k] * r * w[run * kRun + k];
      put_run(y, row, N, run, whole, v);
    }
  }
  y.close();
}

// One block a chunk of kSumRows rows, a thread C columns, R rows at a time: their means in one reduction. The codes of
// the next R are fetched before it, unless they are f32 and would take too many registers. A thread sums its columns
// over the rows in order. Moves dy, x and dx once.
template <class DY, class X, class DX, int C, int R>
__global__ __launch_bounds__(C == 4 ? 1024 : 512) void rmsnorm_backward_kernel(DY dy, X x, Vector w, const float* rstd,
                                                                               DX dx, float* partial, int64_t M,
                                                                               int64_t N) {
  constexpr bool kAhead = (Pack<DY, C>::kBytes + Pack<X, C>::kBytes) * R <= (C == 4 ? 48 : 96);
  const int64_t n = int64_t{threadIdx.x} * C, runs = runs_of(N);
  const int64_t begin = int64_t{blockIdx.x} * kSumRows, end = begin + kSumRows < M ? begin + kSumRows : M;
  const bool inside = n < N;
  extern __shared__ float4 shared[];
  const Shelf<C> weights(shared, w, n, inside);
  __shared__ float rstds[kSumRows];
  load_rows(rstd, begin, end, rstds);
  __syncthreads();
  float sums[C] = {};
  Pack<DY, C> next_dy[R];
  Pack<X, C> next_x[R];
  const auto fetch = [&](int64_t first) {
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const int64_t row = first + j;
      if (!inside || row >= end) continue;
      next_dy[j].fetch(dy, row * N + n, 0);
      next_x[j].fetch(x, row * N + n, row * runs + n / kRun);
    }
  };
  if (kAhead) fetch(begin);
  for (int64_t first = begin; first < end; first += R) {
    float g[R][C], xhat[R][C];
    double dot[R];
    if (!kAhead) fetch(first);
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const float r = rstds[first - begin + j];
      dot[j] = 0;
      next_dy[j].unpack(dy, g[j]);
      next_x[j].unpack(x, xhat[j]);
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        float weight[4];
        weights.load(k, weight);
#pragma unroll
        for (int c = k; c < k + 4; ++c) {
          xhat[j][c] *= r;
          if (first + j < end) sums[c] += g[j][c] * xhat[j][c];
          g[j][c] *= weight[c - k];
          dot[j] += static_cast<double>(g[j][c]) * xhat[j][c];
        }
      }
    }
    if (kAhead) fetch(first + R);
    const float* means = row_sums(dot, [&](double sum) { return static_cast<float>(sum / static_cast<double>(N)); });
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const float mean = means[j], r = rstds[first - begin + j];
#pragma unroll
      for (int c = 0; c < C; ++c) g[j][c] = r * (g[j][c] - xhat[j][c] * mean);
      Pack<DX, C> pack;
      if (inside && first + j < end) pack.put(dx, (first + j) * N + n, {}, g[j]);
    }
  }
#pragma unroll
  for (int c = 0; c < C; ++c)
    if (inside) partial[blockIdx.x * N + n + c] = sums[c];
}

// Any number of columns: one block a chunk, a thread every blockDim.x-th column; the sums of a thread's columns lie in
// `partial`. Reads dy and x twice, the second time from the caches.
template <class DY, class X, class DX>
__global__ __launch_bounds__(1024) void rmsnorm_backward_kernel_wide(DY dy, X x, Vector w, const float* rstd, DX dx,
                                                                     float* partial, int64_t M, int64_t N) {
  const int64_t runs = runs_of(N);
  const int64_t begin = int64_t{blockIdx.x} * kSumRows, end = begin + kSumRows < M ? begin + kSumRows : M;
  float* sums = partial + blockIdx.x * N;
  for (int64_t row = begin; row < end; ++row) {
    const float r = rstd[row];
    double dot[1] = {0};
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
      const float g = dy.load(row * N + n, {}), xhat = x.load(row * N + n, x.open(row * runs + n / kRun)) * r;
      sums[n] = (row == begin ? 0.f : sums[n]) + g * xhat;
      dot[0] += static_cast<double>(g * w[n]) * xhat;
    }
    const float mean = row_sums(dot, [&](double sum) { return static_cast<float>(sum / static_cast<double>(N)); })[0];
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
      const float g = dy.load(row * N + n, {}), xhat = x.load(row * N + n, x.open(row * runs + n / kRun)) * r;
      dx.store(row * N + n, {}, r * (g * w[n] - xhat * mean));
    }
  }
}

}  // namespace

void rmsnorm_forward(const rmsnorm_forward_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols();
  check_row_not_empty(args.x);
  const bool held = N % kRun == 0 && N <= kHeld;
  const Sharing sharing(runs_of(N), kMost);
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    write("rmsnorm_forward", args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      launch("rmsnorm_forward", held ? rmsnorm_forward_kernel<X, Y> : rmsnorm_forward_kernel_wide<X, Y>,
             sharing.grid(M), dim3(sharing.threads), held ? Shelf<kRun>::bytes(sharing.threads) : 0, x, Vector(args.w),
             y, args.rstd.as<float>(), args.eps, M, N, sharing.lanes);
    });
  });
}

void rmsnorm_backward(const rmsnorm_backward_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols(), chunks = chunks_of(M);
  if (N == 0) return;
  const Scratch partial(chunks * N * static_cast<int64_t>(sizeof(float)));
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      with("dx", args.dx, Views<F32, BF16>{}, [&](const auto dx) {
        using DY = std::remove_const_t<decltype(dy)>;
        using X = std::remove_const_t<decltype(x)>;
        using DX = std::remove_const_t<decltype(dx)>;
        const ChunkShape shape(N);
        const auto kernel = shape.columns == 4    ? rmsnorm_backward_kernel<DY, X, DX, 4, 2>
                            : shape.columns == 16 ? rmsnorm_backward_kernel<DY, X, DX, 16, 1>
                                                  : rmsnorm_backward_kernel_wide<DY, X, DX>;
        launch("rmsnorm_backward", kernel, dim3(static_cast<unsigned>(chunks)), dim3(shape.threads),
               shape.columns * sizeof(float) * shape.threads, dy, x, Vector(args.w), args.rstd.as<float>(), dx,
               partial.as<float>(), M, N);
      });
    });
  });
  sum_chunks("rmsnorm_backward", partial.as<float>(), chunks, N, args.dw);
}

}  // namespace coat::cuda
