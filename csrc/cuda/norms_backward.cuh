// Norms on the device, backward: rmsnorm, and, Centred, layernorm. Sums over rows in strands and chunks, those along
// rows in pieces.
#pragma once
#include "norms.cuh"

namespace coat::cuda {

// What a row's gradient is, from the means of g and of g * xhat, g = w * dy.
template <bool Centred>
__device__ inline float gradient_of(float r, float g, float xhat, float mean_g, float mean) {
  return Centred ? r * (g - mean_g - xhat * mean) : r * (g - xhat * mean);
}

// What is added to dx, in the format of dx, and where its largest magnitude goes; either may be null.
template <class DX>
struct Beside {
  DX residual;
  uint32_t* largest;
};

// The largest magnitude of what a block stores, of which the lanes have the bits of |x|.
template <class DX>
__device__ inline void leave_largest(const Beside<DX>& beside, uint32_t most) {
  most = warp_max(most);
  if (threadIdx.x % 32 == 0 && most > 0)
    atomicMax(beside.largest, bits_of(CodeOf<DX>::decode(CodeOf<DX>::encode(float_of(most)))));
}

// One block `strands` strands of a chunk, C columns a thread, R rows at a time: their means in one reduction. The codes
// of the next R are fetched before it. A thread sums its columns over the rows in order. Moves dy, x and dx once, and
// partial [chunks, sums, N], of strands instead of chunks where a block has only some of a chunk.
template <bool Centred, class DY, class X, class DX, int C, int R>
__global__ __launch_bounds__(512, 1) void norm_backward_kernel(DY dy, X x, Norm norm, DX dx, Beside<DX> beside,
                                                               float* partial, int64_t M, int64_t N, int strands) {
  constexpr int kSums = Centred ? 2 : 1;
  let_next_begin();
  const int64_t n = int64_t{threadIdx.x} * C, runs = N / kRun, begin = int64_t{blockIdx.x} * strands * kStrandRows;
  const int64_t end = begin + strands * kStrandRows < M ? begin + strands * kStrandRows : M;
  const bool inside = n < N;
  Pack<DY, C> next_dy[R];
  Pack<X, C> next_x[R];
  const bool adds = !Centred && beside.residual.codes, measures = !Centred && beside.largest;  // only rmsnorm does
  uint32_t most = 0;
  const auto fetch = [&](int64_t first) {
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const int64_t row = first + j;
      if (!inside || row >= end) continue;
      next_dy[j].fetch(dy, row * N + n, 0);
      next_x[j].fetch(x, row * N + n, row * runs + n / kRun);
    }
  };
  fetch(begin);
  extern __shared__ float4 shared[];
  Shelf<C> weights;
  weights.fill(shared, norm.w, n, inside);
  __shared__ RowNumbers<Centred> numbers[kSumRows];
  for (int i = threadIdx.x; i < kSumRows; i += blockDim.x)
    if (begin + i < end) numbers[i].load(norm, begin + i);
  __syncthreads();
  const double per = per_column(N);
  float strand[kSums][C] = {}, total[kSums][C] = {};
  const auto keep = [&](int64_t part, const float(&sum)[kSums][C]) {
    if (!partial || !inside) return;
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int c = 0; c < C; ++c) partial[(part * kSums + s) * N + n + c] = sum[s][c];
  };
  int ended = 0;  // strands
  const auto end_strand = [&] {
    if (strands < kStrands) keep(int64_t{blockIdx.x} * strands + ended, strand);
    ++ended;
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int c = 0; c < C; ++c) total[s][c] += strand[s][c], strand[s][c] = 0.f;
  };
  for (int64_t first = begin; first < end; first += R) {
    float g[R][C], xhat[R][C];
    Pack<DX, C> residual[R];
    double sums[R * kSums];
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const int i = static_cast<int>(first - begin) + j;
      const bool here = inside && first + j < end;
      next_dy[j].unpack(dy, g[j]);
      next_x[j].unpack(x, xhat[j]);
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        const float4 w = weights.load(k);
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int c = k; c < k + 4; ++c) {
          xhat[j][c] = here ? numbers[i].hat(xhat[j][c]) : 0.f;
          if (here) strand[0][c] += g[j][c] * xhat[j][c];
          if (Centred && here) strand[kSums - 1][c] += g[j][c];
          g[j][c] *= weight[c - k];
        }
      }
      sums[j] = dot_of(g[j], xhat[j]);
      if constexpr (Centred) sums[R + j] = sum_of(g[j]);
    }
    if ((first + R - begin) % kStrandRows == 0) end_strand();
#pragma unroll
    for (int j = 0; j < R; ++j)
      if (adds && inside && first + j < end) residual[j].fetch(beside.residual, (first + j) * N + n, 0);
    fetch(first + R);
    const float* means = block_sums<C>(sums, [&](double sum) { return static_cast<float>(sum * per); });
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const float mean = means[j], mean_g = Centred ? means[R * kSums - R + j] : 0.f;
      const float r = numbers[static_cast<int>(first - begin) + j].r;
#pragma unroll
      for (int c = 0; c < C; ++c) g[j][c] = gradient_of<Centred>(r, g[j][c], xhat[j][c], mean_g, mean);
      if (!inside || first + j >= end) continue;
      if (adds) {
        float more[C];
        residual[j].unpack(beside.residual, more);
#pragma unroll
        for (int c = 0; c < C; ++c) g[j][c] += more[c];
      }
      if (measures) {
#pragma unroll
        for (int c = 0; c < C; ++c) most = max(most, bits_of(g[j][c]) & 0x7fffffffu);
      }
      Pack<DX, C> pack;
      pack.put(dx, (first + j) * N + n, {}, g[j]);
    }
  }
  if (measures) leave_largest(beside, most);
  while (ended < strands) end_strand();
  if (strands == kStrands) keep(blockIdx.x, total);
}

// The number of strands of a block of norm_backward_kernel, a power of two, whose waves take the fewest rows; a wave
// begins as slowly as some rows more.
inline int strands_of_block(int64_t chunks) {
  constexpr int64_t kBegin = 6;
  int best = kStrands;
  int64_t least = INT64_MAX;
  for (int strands = kStrands; strands >= 1; strands /= 2) {
    const int64_t blocks = chunks * kStrands / strands, most = multiprocessors();
    const int64_t rows = (blocks + most - 1) / most * (strands * kStrandRows + kBegin);
    if (rows < least) least = rows, best = strands;
  }
  return best;
}

// Any number of columns: one block a strand of a chunk, a thread every blockDim.x-th run of its rows; the sums of its
// columns lie in partial. Reads dy and x twice, the second time from the caches.
template <bool Centred, class DY, class X, class DX>
__global__ __launch_bounds__(kWarps * 32, 2) void norm_backward_kernel_wide(DY dy, X x, Norm norm, DX dx,
                                                                            Beside<DX> beside, float* partial,
                                                                            int64_t M, int64_t N) {
  constexpr int kSums = Centred ? 2 : 1;
  const int64_t runs = runs_of(N), begin = int64_t{blockIdx.x} * kStrandRows;
  const int64_t end = begin + kStrandRows < M ? begin + kStrandRows : M;
  const bool whole = N % kRun == 0;
  const double per = per_column(N);
  uint32_t most = 0;
  float* sums = partial ? partial + int64_t{blockIdx.x} * kSums * N : nullptr;
  if (sums)
    for (int64_t i = threadIdx.x; i < kSums * N; i += blockDim.x) sums[i] = 0.f;
  __syncthreads();
  for (int64_t row = begin; row < end; ++row) {
    RowNumbers<Centred> numbers;
    numbers.load(norm, row);
    double dot = 0, sum = 0;
    float g[kRun], xhat[kRun];
    const auto load = [&](int64_t run, auto&& each) {
      load_run(dy, row, N, run, whole, g);
      load_run(x, row, N, run, whole, xhat);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const int64_t n = run * kRun + k;
        xhat[k] = n < N ? numbers.hat(xhat[k]) : 0.f;
        if (n < N) each(n, g[k], xhat[k]);
        if (n < N) g[k] *= norm.w[n];
      }
    };
    for (int64_t run = threadIdx.x; run < runs; run += blockDim.x) {
      load(run, [&](int64_t n, float gradient, float hat) {
        if (!sums) return;
        sums[n] += gradient * hat;
        if constexpr (Centred) sums[N + n] += gradient;
      });
      dot += dot_piece(g, xhat);
      if constexpr (Centred) sum += sum_piece(g);
    }
    const float mean = static_cast<float>(block_sum(dot) * per);
    const float mean_g = Centred ? static_cast<float>(block_sum(sum) * per) : 0.f;
    for (int64_t run = threadIdx.x; run < runs; run += blockDim.x) {
      load(run, [](int64_t, float, float) {});
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const int64_t at = row * N + run * kRun + k;
        if (run * kRun + k >= N) continue;
        float gradient = gradient_of<Centred>(numbers.r, g[k], xhat[k], mean_g, mean);
        if (beside.residual.codes) gradient += beside.residual.load(at, {});
        most = max(most, bits_of(gradient) & 0x7fffffffu);
        dx.store(at, {}, gradient);
      }
    }
  }
  if (beside.largest) leave_largest(beside, most);
}

// first, second: the sums over rows of dy * xhat and, Centred, of dy; absent ones are not written.
template <bool Centred, class Args>
void norm_backward(const char* name, const Args& args, const Norm& norm, const Tensor& first, const Tensor& second,
                   const Tensor& residual = {}, uint32_t* largest = nullptr) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols(), chunks = chunks_of(M);
  if (largest) check(cudaMemsetAsync(largest, 0, sizeof(uint32_t), stream()), name);
  if (N == 0) return;
  const bool sums = first || second;
  constexpr int kSums = Centred ? 2 : 1;
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      with("dx", args.dx, Views<F32, BF16>{}, [&](const auto dx) {
        using DY = std::remove_const_t<decltype(dy)>;
        using X = std::remove_const_t<decltype(x)>;
        using DX = std::remove_const_t<decltype(dx)>;
        Tensor added = residual;
        added.format = args.dx.format;
        const Beside<DX> beside{DX(added), largest};
        // a row in the registers of a block, or by strands, of which a block has one
        constexpr bool kWide = Centred && sizeof(CodeOf<DY>) + sizeof(CodeOf<X>) > 4;  // too many registers
        const int columns = N % kRun != 0 ? 0 : N <= 4096 ? 8 : N <= 8192 && !kWide ? 16 : 0;
        const int strands = columns ? strands_of_block(chunks) : 1;
        const int64_t blocks = chunks * kStrands / strands, parts = strands == kStrands ? 1 : kStrands;
        const Scratch scratch(sums ? chunks * parts * kSums * N * static_cast<int64_t>(sizeof(float)) : 0);
        float* partial = sums ? scratch.as<float>() : nullptr;
        constexpr int kMost = kWide ? 8 : 16, kRows = kWide ? 2 : 1;
        const dim3 grid(static_cast<unsigned>(blocks));
        if (columns) {
          const auto threads = static_cast<unsigned>((N / columns + 31) / 32 * 32);
          launch(name,
                 columns == 8 ? norm_backward_kernel<Centred, DY, X, DX, 8, 2>
                              : norm_backward_kernel<Centred, DY, X, DX, kMost, kRows>,
                 grid, dim3(threads), columns * sizeof(float) * threads, dy, x, norm, dx, beside, partial, M, N,
                 strands);
        } else {
          launch(name, norm_backward_kernel_wide<Centred, DY, X, DX>, grid, dim3(kWarps * 32), 0, dy, x, norm, dx,
                 beside, partial, M, N);
        }
        if (sums) sum_chunks(name, partial, chunks, static_cast<int>(parts), N, kSums, first, second);
      });
    });
  });
}

}  // namespace coat::cuda
