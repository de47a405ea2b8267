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

// What is added to dx, in the format of dx, and where the largest magnitude of dx is found; either may be null.
template <class DX>
struct Beside {
  DX residual;
  uint32_t* largest;  // 0 before
};

// The largest magnitude of what a block stores, of which the lanes have the bits of |x|.
template <class DX>
__device__ inline void leave_largest(const Beside<DX>& beside, uint32_t most) {
  most = warp_max(most);
  if (threadIdx.x % 32 == 0 && most > 0)
    atomicMax(beside.largest, bits_of(CodeOf<DX>::decode(CodeOf<DX>::encode(float_of(most)))));
}
// The largest codes of packs without their signs, which order as magnitudes do: two at a time where they are short.
template <class DX, int C>
__device__ inline uint32_t largest_codes(uint32_t most, const Pack<DX, C>& pack) {
#pragma unroll
  for (int i = 0; i < Pack<DX, C>::kBytes / 4; ++i)
    most = sizeof(CodeOf<DX>) == 2 ? __vmaxu2(most, pack.quad[i] & 0x7fff7fffu) : max(most, pack.quad[i] & 0x7fffffffu);
  return most;
}

// One block `strands` strands of a chunk, C columns a thread, R rows at a time: their means in one reduction. The codes
// of the next R rows are fetched as soon as the registers of these are free: dy and x before the reduction, what is
// added after it. A thread sums its columns over the rows in order. Moves dy, x, the residual and dx once, and partial
// [chunks, sums, N], of strands instead of chunks where a block has only some of a chunk; the sums of a whole chunk
// grow in shared memory.
template <bool Centred, class DY, class X, class DX, int C, int R>
__global__ __launch_bounds__(512, 1) void norm_backward_kernel(DY dy, X x, Norm norm, DX dx, Beside<DX> beside,
                                                               float* partial, int64_t M, int64_t N, int strands) {
  constexpr int kSums = Centred ? 2 : 1;
  let_next_begin();
  const int64_t begin = int64_t{blockIdx.x} * strands * kStrandRows, left = M - begin;
  const int most_rows = strands * kStrandRows, rows = static_cast<int>(left < most_rows ? left : most_rows);
  // offsets among the rows of the block are short: it has at most 128 * 8192 elements
  const uint32_t width = static_cast<uint32_t>(N), n = threadIdx.x * C;
  const bool inside = n < width, whole = strands == kStrands, pairs = C == kRun && width % (2 * kRun) == 0;
  const bool adds = !Centred && beside.residual.codes, measures = !Centred && beside.largest;  // only rmsnorm does
  dy.codes += begin * N;
  x.codes += begin * N;
  if constexpr (X::run != 0) x.scale += begin * (N / kRun);
  dx.codes += begin * N;
  if (adds) beside.residual.codes += begin * N;
  // zeros outside the row and behind the last row, which add nothing to any sum
  const auto fetch = [&](auto& packs, const auto& view, int first) {
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const uint32_t i = static_cast<uint32_t>(first + j) * width + n;
      if (inside && first + j < rows)
        packs[j].fetch(view, i, i / kRun);
      else if (R > 1)
        packs[j] = {};
    }
  };
  after_previous();
  Pack<DY, C> next_dy[R];
  Pack<X, C> next_x[R];
  Pack<DX, C> next_more[R];
  fetch(next_dy, dy, 0);
  fetch(next_x, x, 0);
  if (adds) fetch(next_more, beside.residual, 0);
  extern __shared__ float4 shared[];
  Shelf<C> weights;
  weights.fill(shared, norm.w, n, inside);
  float4* totals = shared + Shelf<C>::vectors(blockDim.x) + threadIdx.x;
  if (whole)
#pragma unroll
    for (int k = 0; k < kSums * C / 4; ++k) totals[k * blockDim.x] = make_float4(0.f, 0.f, 0.f, 0.f);
  __shared__ RowNumbers<Centred> numbers[kSumRows];
  for (int i = threadIdx.x; i < kSumRows; i += blockDim.x) {
    numbers[i] = {};
    if (i < rows) numbers[i].load(norm, begin + i);
  }
  __syncthreads();
  float strand[kSums * C] = {};
  uint32_t most = 0;
  const auto keep = [&](int64_t part, int k, const float4& sums) {
    if (partial && inside) *reinterpret_cast<float4*>(partial + (part * kSums + k / C) * N + n + k % C) = sums;
  };
  int ended = 0;  // strands
  const auto end_strand = [&] {
#pragma unroll
    for (int k = 0; k < kSums * C; k += 4) {
      float4 sums = make_float4(strand[k], strand[k + 1], strand[k + 2], strand[k + 3]);
      if (whole) {
        float4& total = totals[k / 4 * blockDim.x];
        sums = make_float4(total.x + sums.x, total.y + sums.y, total.z + sums.z, total.w + sums.w);
        total = sums;
        if (ended == kStrands - 1) keep(blockIdx.x, k, sums);
      } else {
        keep(int64_t{blockIdx.x} * strands + ended, k, sums);
      }
      strand[k] = strand[k + 1] = strand[k + 2] = strand[k + 3] = 0.f;
    }
    ++ended;
  };
  for (int first = 0; first < rows; first += R) {
    float g[R][C], xhat[R][C], r[R];
    double sums[R * kSums];
#pragma unroll
    for (int j = 0; j < R; ++j) {
      RowNumbers<Centred> row{};
      if (inside) row = numbers[first + j];
      r[j] = row.r;
      next_dy[j].unpack(dy, g[j]);
      next_x[j].unpack(x, xhat[j]);
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        const float4 w = weights.load(k);
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int c = k; c < k + 4; ++c) {
          xhat[j][c] = row.hat(xhat[j][c]);
          strand[c] += g[j][c] * xhat[j][c];
          if (Centred) strand[kSums * C - C + c] += g[j][c];
          g[j][c] *= weight[c - k];
        }
      }
      sums[j] = dot_of(g[j], xhat[j]);
      if constexpr (Centred) sums[R + j] = sum_of(g[j]);
    }
    fetch(next_dy, dy, first + R);
    fetch(next_x, x, first + R);
    float means[R * kSums];
    block_sums<C>(sums, first / R % 2, means, [&](double sum) { return static_cast<float>(sum * norm.per); });
    if ((first + R) % kStrandRows == 0) end_strand();
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const float mean = means[j], mean_g = Centred ? means[R * kSums - R + j] : 0.f;
#pragma unroll
      for (int c = 0; c < C; ++c) g[j][c] = gradient_of<Centred>(r[j], g[j][c], xhat[j][c], mean_g, mean);
      if (adds) {
        float more[C];
        next_more[j].unpack(beside.residual, more);
#pragma unroll
        for (int c = 0; c < C; ++c) g[j][c] += more[c];
      }
      const bool here = inside && first + j < rows;
      const uint32_t i = static_cast<uint32_t>(first + j) * width + n;
      Pack<DX, C> pack;
      pack.encode({}, g[j]);
      if (measures && here) most = largest_codes(most, pack);
      if constexpr (C == kRun)
        if (pairs) put_strip(dx, i, pack, here);
      if (!pairs && here) pack.store(dx, i);
    }
    if (adds) fetch(next_more, beside.residual, first + R);
  }
  if (measures) leave_largest(beside, sizeof(CodeOf<DX>) == 2 ? max(most & 0xffff0000u, most << 16) : most);
  while (ended < strands) end_strand();
}

// The number of strands of a block of norm_backward_kernel, a power of two, whose waves take the fewest rows; a wave
// begins as slowly as some rows more. `resident`: blocks of a multiprocessor.
inline int strands_of_block(int64_t chunks, int resident) {
  constexpr int64_t kBegin = 6;
  int best = kStrands;
  int64_t least = INT64_MAX;
  for (int strands = kStrands; strands >= 1; strands /= 2) {
    const int64_t blocks = chunks * kStrands / strands, most = multiprocessors() * resident;
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
    const float mean = static_cast<float>(block_sum(dot) * norm.per);
    const float mean_g = Centred ? static_cast<float>(block_sum(sum) * norm.per) : 0.f;
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
  // `largest` is only asked for together with sums, whose kernel puts it there
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols(), chunks = chunks_of(M);
  if (N == 0) {
    if (largest) check(cudaMemsetAsync(largest, 0, sizeof(uint32_t), stream()), name);
    return;
  }
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
        const Beside<DX> beside{DX(added), largest ? counters() : nullptr};
        // a row in the registers of a block, or by strands, of which a block has one
        constexpr bool kWide = Centred && sizeof(CodeOf<DY>) + sizeof(CodeOf<X>) > 4;  // too many registers
        constexpr int C = kWide ? 8 : 16, R = kWide ? 2 : 1, kMost = 512;
        const bool held = N % kRun == 0 && N <= kMost * C;
        const auto threads = static_cast<unsigned>(held ? (N / C + 31) / 32 * 32 : kWarps * 32);
        const int strands = held ? strands_of_block(chunks, kMost / static_cast<int>(threads)) : 1;
        const int64_t blocks = chunks * kStrands / strands, parts = strands == kStrands ? 1 : kStrands;
        const Scratch scratch(sums ? chunks * parts * kSums * N * static_cast<int64_t>(sizeof(float)) : 0);
        float* partial = sums ? scratch.as<float>() : nullptr;
        const dim3 grid(static_cast<unsigned>(blocks));
        if (held) {
          launch_next(name, norm_backward_kernel<Centred, DY, X, DX, C, R>, grid, dim3(threads),
                      Shelf<C>::bytes(threads) + (parts == 1 ? kSums * C * sizeof(float) * threads : 0), dy, x, norm,
                      dx, beside, partial, M, N, strands);
        } else {
          launch(name, norm_backward_kernel_wide<Centred, DY, X, DX>, grid, dim3(threads), 0, dy, x, norm, dx, beside,
                 partial, M, N);
        }
        if (sums)
          sum_chunks(name, partial, chunks, static_cast<int>(parts), N, kSums, first, second, beside.largest, largest);
      });
    });
  });
}

}  // namespace coat::cuda
