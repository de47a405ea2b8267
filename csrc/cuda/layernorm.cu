// layernorm on the device, with or without weight and bias: a row in the registers of its threads; mean and variance in
// FP64, everything else in FP32.
#include "../contract.h"
#include "../ops.h"
#include "rows.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kMost = 512;          // threads a row; kernels promise half as many again, for 80 registers a thread
constexpr int64_t kHeld = kMost * kRun;  // columns that they hold in registers

// `lanes` threads a row, 16 columns a thread, the codes of the next row fetched before this one is reduced; w and b
// stay in shared memory. The variance is that of the differences from the FP64 mean: a second reduction, but nothing
// cancels. Moves x once and y once.
template <class X, class Y>
__global__ __launch_bounds__(kMost * 3 / 2) void layernorm_forward_kernel(X x, Vector w, Vector b, Output<Y> y,
                                                                          float* mean, float* rstd, float eps,
                                                                          int64_t M, int64_t N, int lanes) {
  const int lane = threadIdx.x % lanes, rows = blockDim.x / lanes;
  const int64_t step = int64_t{gridDim.x} * rows, n = int64_t{lane} * kRun, runs = N / kRun;
  const bool inside = n < N;
  int64_t row = int64_t{blockIdx.x} * rows + threadIdx.x / lanes;
  extern __shared__ float4 shared[];
  const Shelf<kRun> weights(shared, w, n, inside), biases(shared + blockDim.x * (kRun / 4), b, n, inside);
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
      even += static_cast<double>(v[k]);
      odd += static_cast<double>(v[k + 1]);
    }
    const double middle = row_sum(even + odd, lanes, [&](double sum) { return sum / static_cast<double>(N); });
    even = odd = 0;
#pragma unroll
    for (int k = 0; k < kRun; k += 2) {
      const double d = static_cast<double>(v[k]) - middle, e = static_cast<double>(v[k + 1]) - middle;
      even += d * d;
      odd += e * e;
    }
    const float r =
        row_sum(inside ? even + odd : 0.0, lanes, [&](double spread) { return inverse_deviation(spread, N, eps); });
    if (!inside || row >= M) continue;
    const float m = static_cast<float>(middle);
    if (lane == 0) {
      mean[row] = m;
      rstd[row] = r;
    }
#pragma unroll
    for (int k = 0; k < kRun; k += 4) {
      float weight[4], bias[4];
      weights.load(k, weight);
      biases.load(k, bias);
#pragma unroll
      for (int c = 0; c < 4; ++c) v[k + c] = fma_((v[k + c] - m) * r, weight[c], bias[c]);
    }
    y.put(row * N + n, row * runs + lane, v);
  }
  y.close();
}

// Any number of columns: the same threads walk the runs of their row three times, after the first from the caches;
// element by element unless N is a multiple of 16.
template <class X, class Y>
__global__ __launch_bounds__(kMost, 2) void layernorm_forward_kernel_wide(X x, Vector w, Vector b, Output<Y> y,
                                                                          float* mean, float* rstd, float eps,
                                                                          int64_t M, int64_t N, int lanes) {
  const int lane = threadIdx.x % lanes, rows = blockDim.x / lanes;
  const int64_t step = int64_t{gridDim.x} * rows, runs = runs_of(N);
  const bool whole = N % kRun == 0;
  y.open();
  for (int64_t first = int64_t{blockIdx.x} * rows; first < M; first += step) {
    const int64_t row = first + threadIdx.x / lanes, end = row < M ? runs : 0;
    float v[kRun];
    double partial = 0;
    for (int64_t run = lane; run < end; run += lanes) {
      load_run(x, row, N, run, whole, v);
#pragma unroll
      for (int k = 0; k < kRun; ++k) partial += static_cast<double>(v[k]);
    }
    const double middle = row_sum(partial, lanes, [&](double sum) { return sum / static_cast<double>(N); });
    partial = 0;
    for (int64_t run = lane; run < end; run += lanes) {
      load_run(x, row, N, run, whole, v);
      const int count = length_of(N, run);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const double d = static_cast<double>(v[k]) - middle;
        if (k < count) partial += d * d;
      }
    }
    const float r = row_sum(partial, lanes, [&](double spread) { return inverse_deviation(spread, N, eps); });
    const float m = static_cast<float>(middle);
    if (row < M && lane == 0) {
      mean[row] = m;
      rstd[row] = r;
    }
    for (int64_t run = lane; run < end; run += lanes) {
      load_run(x, row, N, run, whole, v);
      const int count = length_of(N, run);
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (k < count) v[k] = fma_((v[k] - m) * r, w[run * kRun + k], b[run * kRun + k]);
      put_run(y, row, N, run, whole, v);
    }
  }
  y.close();
}

// One block a chunk of kSumRows rows, a thread C columns, R rows at a time: their means in one reduction. The codes of
// the next R are fetched before it, unless they are f32 and would take too many registers. A thread sums its columns
// over the rows in order: dw, then db, in `partial`, if there is one. Moves dy, x and dx once.
template <class DY, class X, class DX, int C, int R>
__global__ __launch_bounds__(C == 4 ? 1024 : 512) void layernorm_backward_kernel(DY dy, X x, Vector w,
                                                                                 const float* mean, const float* rstd,
                                                                                 DX dx, float* partial, int64_t M,
                                                                                 int64_t N) {
  constexpr bool kAhead = (Pack<DY, C>::kBytes + Pack<X, C>::kBytes) * R <= (C == 4 ? 32 : 96);
  const int64_t n = int64_t{threadIdx.x} * C, runs = runs_of(N);
  const int64_t begin = int64_t{blockIdx.x} * kSumRows, end = begin + kSumRows < M ? begin + kSumRows : M;
  const bool inside = n < N;
  extern __shared__ float4 shared[];
  const Shelf<C> weights(shared, w, n, inside);
  __shared__ float means_x[kSumRows], rstds[kSumRows];
  load_rows(mean, begin, end, means_x);
  load_rows(rstd, begin, end, rstds);
  __syncthreads();
  float sums[C] = {}, sums_dy[C] = {};
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
    double dots[2 * R];  // of g, then of g * xhat
    if (!kAhead) fetch(first);
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const float m = means_x[first - begin + j], r = rstds[first - begin + j];
      dots[j] = dots[R + j] = 0;
      next_dy[j].unpack(dy, g[j]);
      next_x[j].unpack(x, xhat[j]);
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        float weight[4];
        weights.load(k, weight);
#pragma unroll
        for (int c = k; c < k + 4; ++c) {
          xhat[j][c] = (xhat[j][c] - m) * r;
          if (first + j < end) {
            sums[c] += g[j][c] * xhat[j][c];
            sums_dy[c] += g[j][c];
          }
          g[j][c] *= weight[c - k];
          dots[j] += static_cast<double>(g[j][c]);
          dots[R + j] += static_cast<double>(g[j][c]) * xhat[j][c];
        }
      }
    }
    if (kAhead) fetch(first + R);
    const float* means = row_sums(dots, [&](double sum) { return static_cast<float>(sum / static_cast<double>(N)); });
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const float a = means[j], b = means[R + j], r = rstds[first - begin + j];
#pragma unroll
      for (int c = 0; c < C; ++c) g[j][c] = r * (g[j][c] - a - xhat[j][c] * b);
      Pack<DX, C> pack;
      if (inside && first + j < end) pack.put(dx, (first + j) * N + n, {}, g[j]);
    }
  }
  if (!inside || !partial) return;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    partial[blockIdx.x * 2 * N + n + c] = sums[c];
    partial[(blockIdx.x * 2 + 1) * N + n + c] = sums_dy[c];
  }
}

// Any number of columns: one block a chunk, a thread every blockDim.x-th column; the sums of a thread's columns lie in
// `partial`. Reads dy and x twice, the second time from the caches.
template <class DY, class X, class DX>
__global__ __launch_bounds__(1024) void layernorm_backward_kernel_wide(DY dy, X x, Vector w, const float* mean,
                                                                       const float* rstd, DX dx, float* partial,
                                                                       int64_t M, int64_t N) {
  const int64_t runs = runs_of(N);
  const int64_t begin = int64_t{blockIdx.x} * kSumRows, end = begin + kSumRows < M ? begin + kSumRows : M;
  float *sums = partial + blockIdx.x * 2 * N, *sums_dy = sums + N;
  for (int64_t row = begin; row < end; ++row) {
    const float m = mean[row], r = rstd[row];
    const auto xhat_of = [&](int64_t n) { return (x.load(row * N + n, x.open(row * runs + n / kRun)) - m) * r; };
    double dots[2] = {0, 0};
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
      const float g = dy.load(row * N + n, {}), xhat = xhat_of(n), weighted = g * w[n];
      if (partial) {
        sums[n] = (row == begin ? 0.f : sums[n]) + g * xhat;
        sums_dy[n] = (row == begin ? 0.f : sums_dy[n]) + g;
      }
      dots[0] += static_cast<double>(weighted);
      dots[1] += static_cast<double>(weighted) * xhat;
    }
    const float* means = row_sums(dots, [&](double sum) { return static_cast<float>(sum / static_cast<double>(N)); });
    const float a = means[0], b = means[1];
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
      dx.store(row * N + n, {}, r * (dy.load(row * N + n, {}) * w[n] - a - xhat_of(n) * b));
  }
}

}  // namespace

void layernorm_forward(const layernorm_forward_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols();
  check_row_not_empty(args.x);
  const bool held = N % kRun == 0 && N <= kHeld;
  const Sharing sharing(runs_of(N), kMost);
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    write("layernorm_forward", args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{},
          [&]<class Y>(const Output<Y>& y) {
            launch("layernorm_forward", held ? layernorm_forward_kernel<X, Y> : layernorm_forward_kernel_wide<X, Y>,
                   sharing.grid(M), dim3(sharing.threads), held ? 2 * Shelf<kRun>::bytes(sharing.threads) : 0, x,
                   Vector(args.w, 1.f), Vector(args.b), y, args.mean.as<float>(), args.rstd.as<float>(), args.eps, M, N,
                   sharing.lanes);
          });
  });
}

void layernorm_backward(const layernorm_backward_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols(), chunks = chunks_of(M);
  if (N == 0) return;
  const bool sums = args.dw || args.db;
  const Scratch scratch(sums ? chunks * 2 * N * static_cast<int64_t>(sizeof(float)) : 0);
  float* partial = sums ? scratch.as<float>() : nullptr;
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      with("dx", args.dx, Views<F32, BF16>{}, [&](const auto dx) {
        using DY = std::remove_const_t<decltype(dy)>;
        using X = std::remove_const_t<decltype(x)>;
        using DX = std::remove_const_t<decltype(dx)>;
        const ChunkShape shape(N);
        const auto kernel = shape.columns == 4    ? layernorm_backward_kernel<DY, X, DX, 4, 2>
                            : shape.columns == 16 ? layernorm_backward_kernel<DY, X, DX, 16, 1>
                                                  : layernorm_backward_kernel_wide<DY, X, DX>;
        launch("layernorm_backward", kernel, dim3(static_cast<unsigned>(chunks)), dim3(shape.threads),
               shape.columns * sizeof(float) * shape.threads, dy, x, Vector(args.w, 1.f), args.mean.as<float>(),
               args.rstd.as<float>(), dx, partial, M, N);
      });
    });
  });
  if (args.dw) sum_chunks("layernorm_backward", partial, chunks, 2 * N, args.dw);
  if (args.db) sum_chunks("layernorm_backward", partial + N, chunks, 2 * N, args.db);
}

}  // namespace coat::cuda
