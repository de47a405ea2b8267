// Norms on the device, backward: rmsnorm, and, Centred, layernorm. Sums over rows in strands and chunks, those along
// rows in pieces.
#pragma once
#include "norms.cuh"

namespace coat::cuda {

// Strips a warp at most, backward: their sums over rows take 16 or, Centred, 32 registers each.
template <bool Centred, class DY, class X>
constexpr int kBackwardDepth = Centred || sizeof(CodeOf<DY>) + sizeof(CodeOf<X>) > 6 ? 4 : 8;

// A lane's values of one run, backward: g = dy, xhat.
template <bool Centred>
__device__ inline void hats(const RowNumbers<Centred>& numbers, float (&x)[kRun], bool inside) {
  RowNumbers<Centred> here = numbers;
  if (!inside) here.m = 0.f;  // x is 0 there, and so is xhat
#pragma unroll
  for (int k = 0; k < kRun; ++k) x[k] = here.hat(x[k]);
}
__device__ inline void weigh(const Shelf& weights, int strip, float (&g)[kRun]) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float4 w = weights.load(strip, q);
    g[4 * q] *= w.x;
    g[4 * q + 1] *= w.y;
    g[4 * q + 2] *= w.z;
    g[4 * q + 3] *= w.w;
  }
}
// The means that the gradient of a row takes off: of g * xhat and, Centred, of g.
template <bool Centred>
struct RowMeans {
  double sum[Centred ? 2 : 1] = {};
  float b, a;
  __device__ void add(const float (&g)[kRun], const float (&xhat)[kRun]) {
    sum[0] += dot_piece(g, xhat);
    if constexpr (Centred) sum[1] += sum_piece(g);
  }
  __device__ void finish(double per) {
    b = static_cast<float>(sum[0] * per);
    if constexpr (Centred) a = static_cast<float>(sum[1] * per);
  }
  __device__ float gradient(float r, float g, float xhat) const {
    return Centred ? r * (g - a - xhat * b) : r * (g - xhat * b);
  }
};

// A block has some strands of a chunk, team.rows of them, and walks their rows side by side; a warp has at most Depth
// strips of a row, whose sums over rows it keeps in registers. Codes come through shared memory, those of the next row
// as soon as the last reading of this one goes. Moves dy, x and dx once, and partial [chunks, parts, sums, N].
template <bool Centred, class DY, class X, class DX, int Depth>
__global__ __launch_bounds__(kWarps * 32, 1) void norm_backward_kernel(DY dy, X x, Norm norm, DX dx, float* partial,
                                                                       Team team) {
  constexpr int kBytes = Strip<DY>::kBytes + Strip<X>::kBytes, kSums = Centred ? 2 : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = warp % team.warps, place_of = warp / team.warps;
  const int parts = kStrands / team.rows, part = blockIdx.x % parts;
  const int64_t begin = int64_t{blockIdx.x / parts} * kSumRows;
  const int64_t end = begin + kSumRows < team.M ? begin + kSumRows : team.M;
  extern __shared__ int4 shared[];
  const Shelf weights{reinterpret_cast<float4*>(shared)};
  float4* exchange = weights.base + team.strips * 128;  // of sums, when the codes are done with
  uint8_t* place = reinterpret_cast<uint8_t*>(exchange) + warp * Depth * kBytes;
  clear_strips(place, Depth * kBytes);
  int64_t row = begin + part + parts * place_of;
  typename Strip<DY>::Source source_dy(dy, row, team);
  typename Strip<X>::Source source_x(x, row, team);
  uint8_t* to = place;
  for (int strip = mine; strip < team.strips && row < end; strip += team.warps, to += kBytes) {
    source_dy.fetch(to, strip, team);
    source_x.fetch(to + Strip<DY>::kBytes, strip, team);
  }
  commit_strips();
  RowNumbers<Centred> next;
  if (row < end) next.load(norm, row);
  weights.fill(norm.w, team, nullptr);
  __syncthreads();
  const double per = per_column(team.N);
  int turn = 0;
  float sums[Depth][kRun] = {}, sums_dy[Centred ? Depth : 1][kRun] = {};
  for (int64_t first = begin; first < end; first += kStrands, row += kStrands) {
    const auto numbers = next;
    if (row + kStrands < end) next.load(norm, row + kStrands);
    wait_for_strips();
    RowMeans<Centred> means;
    float g[kRun], xhat[kRun];
#pragma unroll
    for (int u = 0; u < Depth; ++u) {
      const int strip = mine + u * team.warps;
      if (row >= end || strip >= team.strips) continue;
      Strip<DY>::unpack(place + u * kBytes, dy, g);
      Strip<X>::unpack(place + u * kBytes + Strip<DY>::kBytes, x, xhat);
      hats(numbers, xhat, team.inside(strip));
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        sums[u][k] += g[k] * xhat[k];
        if constexpr (Centred) sums_dy[u][k] += g[k];
      }
      weigh(weights, strip, g);
      means.add(g, xhat);
    }
    row_totals(means.sum, team, turn);
    means.finish(per);
    if (row >= end) continue;
    const bool more = row + kStrands < end;
    source_dy.skip(kStrands, team);
    source_x.skip(kStrands, team);
    uint8_t* from = place;
#pragma unroll 1
    for (int strip = mine; strip < team.strips; strip += team.warps, from += kBytes) {
      const bool inside = team.inside(strip);
      Strip<DY>::unpack(from, dy, g);
      Strip<X>::unpack(from + Strip<DY>::kBytes, x, xhat);
      hats(numbers, xhat, inside);
      weigh(weights, strip, g);
#pragma unroll
      for (int k = 0; k < kRun; ++k) g[k] = means.gradient(numbers.r, g[k], xhat[k]);
      put_strip(dx, row * team.N + strip * kStrip + lane * kRun, g, inside);
      __syncwarp();
      if (!more) continue;
      source_dy.fetch(from, strip, team);
      source_x.fetch(from + Strip<DY>::kBytes, strip, team);
    }
    commit_strips();
  }
  if (!partial) return;
  const auto join = [&](float(&sum)[Depth][kRun], int kind) {
    for (int half = team.rows / 2; half > 0; half /= 2) {
      __syncthreads();
      float4* at = exchange + ((place_of & (half - 1)) * team.warps + mine) * Depth * 128 + lane;
#pragma unroll
      for (int u = 0; u < Depth; ++u)
#pragma unroll
        for (int k = 0; k < kRun; k += 4)
          if (place_of >= half && place_of < 2 * half)
            at[(u * 4 + k / 4) * 32] = make_float4(sum[u][k], sum[u][k + 1], sum[u][k + 2], sum[u][k + 3]);
      __syncthreads();
#pragma unroll
      for (int u = 0; u < Depth; ++u)
#pragma unroll
        for (int k = 0; k < kRun; k += 4) {
          if (place_of >= half) continue;
          const float4 other = at[(u * 4 + k / 4) * 32];
          sum[u][k] += other.x;
          sum[u][k + 1] += other.y;
          sum[u][k + 2] += other.z;
          sum[u][k + 3] += other.w;
        }
    }
#pragma unroll
    for (int u = 0; u < Depth; ++u) {
      const int strip = mine + u * team.warps;
      if (place_of > 0 || strip >= team.strips || !team.inside(strip)) continue;
      float* out = partial + (int64_t{blockIdx.x} * kSums + kind) * team.N + strip * kStrip + lane * kRun;
#pragma unroll
      for (int k = 0; k < kRun; k += 4)
        *reinterpret_cast<float4*>(out + k) = make_float4(sum[u][k], sum[u][k + 1], sum[u][k + 2], sum[u][k + 3]);
    }
  };
  join(sums, 0);
  if constexpr (Centred) join(sums_dy, 1);
}

// Any number of columns: one block a strand of a chunk, a thread every blockDim.x-th run of its rows; the sums of its
// columns lie in partial. Reads dy and x twice, the second time from the caches.
template <bool Centred, class DY, class X, class DX>
__global__ __launch_bounds__(kWarps * 32, 2) void norm_backward_kernel_wide(DY dy, X x, Norm norm, DX dx,
                                                                            float* partial, Team team) {
  constexpr int kSums = Centred ? 2 : 1;
  const int64_t N = team.N, runs = runs_of(N), begin = int64_t{blockIdx.x / kStrands} * kSumRows;
  const int64_t end = begin + kSumRows < team.M ? begin + kSumRows : team.M;
  const bool whole = N % kRun == 0;
  const double per = per_column(N);
  float* sums = partial ? partial + int64_t{blockIdx.x} * kSums * N : nullptr;
  if (sums)
    for (int64_t i = threadIdx.x; i < kSums * N; i += blockDim.x) sums[i] = 0.f;
  __syncthreads();
  for (int64_t row = begin + blockIdx.x % kStrands; row < end; row += kStrands) {
    RowNumbers<Centred> numbers;
    numbers.load(norm, row);
    RowMeans<Centred> means;
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
      means.add(g, xhat);
    }
    for (double& sum : means.sum) sum = block_sum(sum);
    means.finish(per);
    for (int64_t run = threadIdx.x; run < runs; run += blockDim.x) {
      load(run, [](int64_t, float, float) {});
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (run * kRun + k < N) dx.store(row * N + run * kRun + k, {}, means.gradient(numbers.r, g[k], xhat[k]));
    }
  }
}

// first, second: the sums over rows of dy * xhat and, Centred, of dy; absent ones are not written.
template <bool Centred, class Args>
void norm_backward(const char* name, const Args& args, const Norm& norm, const Tensor& first, const Tensor& second) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols(), chunks = chunks_of(M);
  if (N == 0) return;
  const bool sums = first || second;
  constexpr int kSums = Centred ? 2 : 1;
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      with("dx", args.dx, Views<F32, BF16>{}, [&](const auto dx) {
        using DY = std::remove_const_t<decltype(dy)>;
        using X = std::remove_const_t<decltype(x)>;
        using DX = std::remove_const_t<decltype(dx)>;
        constexpr int kDepth = kBackwardDepth<Centred, DY, X>;
        Team team(M, N, kDepth);
        // strands of a block: a power of two, fewer where that keeps more multiprocessors busy
        int strands = kStrands;
        while (strands > 1 && (strands > team.rows || chunks * (kStrands / strands) * 4 < multiprocessors() * 3))
          strands /= 2;
        const int64_t bytes =
            Shelf::bytes(team.strips) + int64_t{strands} * team.warps * kDepth * (Strip<DY>::kBytes + Strip<X>::kBytes);
        const bool held = N % 32 == 0 && team.rows > 0 && bytes <= kMostShared;
        team.rows = held ? strands : 1;
        const int parts = kStrands / team.rows;
        const Scratch scratch(sums ? chunks * parts * kSums * N * static_cast<int64_t>(sizeof(float)) : 0);
        float* partial = sums ? scratch.as<float>() : nullptr;
        launch(name,
               held ? norm_backward_kernel<Centred, DY, X, DX, kDepth> : norm_backward_kernel_wide<Centred, DY, X, DX>,
               dim3(static_cast<unsigned>(chunks * parts)), dim3(held ? team.threads() : kWarps * 32),
               held ? static_cast<size_t>(bytes) : 0, dy, x, norm, dx, partial, team);
        if (sums) sum_chunks(name, partial, chunks, parts, N, kSums, first, second);
      });
    });
  });
}

}  // namespace coat::cuda
