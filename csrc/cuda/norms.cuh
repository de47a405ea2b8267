// Norms on the device, forward: rmsnorm, and, Centred, layernorm. Sums along rows in pieces, everything else in FP32.
#pragma once
#include "../contract.h"
#include "rows.cuh"

namespace coat::cuda {

// Strips a warp at most, forward; and blocks of a multiprocessor, by the bytes of a code.
constexpr int kForwardDepth = 8;
template <class X, bool Centred>
constexpr int kForwardBlocks = sizeof(CodeOf<X>) == 1   ? (Centred ? 3 : 4)
                               : sizeof(CodeOf<X>) == 2 ? 2
                                                        : 1;
// Blocks of norm_scale_kernel on a multiprocessor, and runs that a lane reads at a time.
template <bool Centred>
constexpr int kScaleBlocks = Centred ? 2 : 3;
template <class X, bool Centred>
constexpr int kScaleAhead = (Centred ? 8 : 4) / sizeof(CodeOf<X>);

struct Norm {
  Vector w, b;
  float *mean, *rstd;  // of each row
  float eps;
};

// The numbers of one row.
template <bool Centred>
struct RowNumbers {
  float m = 0.f, r;
  __device__ void load(const Norm& norm, int64_t row) {
    if constexpr (Centred) m = norm.mean[row];
    r = norm.rstd[row];
  }
  __device__ void store(const Norm& norm, int64_t row) const {
    if constexpr (Centred) norm.mean[row] = m;
    norm.rstd[row] = r;
  }
  __device__ float hat(float x) const { return Centred ? (x - m) * r : x * r; }
  __device__ float out(float x, float w, float b) const { return Centred ? fma_(hat(x), w, b) : hat(x) * w; }
  // Of anything with magnitudes not above these.
  __device__ float bound(float x, float w, float b) const {
    return Centred ? fma_((x + fabsf(m)) * r, w, b) : x * r * w;
  }
};

// The numbers of a row whose runs each(add) shows: add(x, count) for every run of the thread, each time it is called,
// count of whose elements exist and the others are zeros. Whole: all or none.
template <bool Centred, bool Whole, class Each>
__device__ inline RowNumbers<Centred> numbers_of(const Team& team, double per, float eps, int& turn, Each&& each) {
  RowNumbers<Centred> row;
  double sum[1] = {0}, middle = 0;
  if constexpr (Centred) {
    each([&](const float(&x)[kRun], int) { sum[0] += sum_piece(x); });
    row_totals(sum, team, turn);
    middle = sum[0] * per;
    row.m = static_cast<float>(middle);
    sum[0] = 0;
  }
  each([&](float(&x)[kRun], int count) {
    if constexpr (Centred) {
      const float m = count > 0 ? row.m : 0.f;
#pragma unroll
      for (int k = 0; k < kRun; ++k) x[k] = Whole || k < count ? x[k] - m : 0.f;
    }
    sum[0] += square_piece(x);
  });
  row_totals(sum, team, turn);
  if constexpr (Centred) sum[0] = spread_about(sum[0], middle, row.m, team.N);
  row.r = inverse_deviation(sum[0], per, eps);
  return row;
}

// Warps walk the rows, each with its strips of a row in shared memory: read twice or three times there, and replaced by
// those of the next row as the last reading goes. Moves x once and y once.
template <bool Centred, class X, class Y>
__global__ __launch_bounds__(kWarps * 32, kForwardBlocks<X, Centred>) void norm_forward_kernel(X x, Norm norm,
                                                                                               Output<Y> y, Team team) {
  constexpr bool kMeasures = std::is_same_v<Y, Measured>;
  constexpr bool kBounds = X::run != 0 && Output<Y>::kScaling == Scaling::tensor;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = warp % team.warps;
  const int64_t step = int64_t{gridDim.x} * team.rows;
  extern __shared__ int4 shared[];
  const Shelf weights{reinterpret_cast<float4*>(shared)}, biases{weights.base + (Centred ? team.strips * 128 : 0)};
  float* peaks = reinterpret_cast<float*>(biases.base + team.strips * 128);
  float* bias_peaks = peaks + (Centred ? team.strips * 32 : 0);
  uint8_t* place = reinterpret_cast<uint8_t*>(bias_peaks + team.strips * 32) + warp * team.depth * Strip<X>::kBytes;
  clear_strips(place, team.depth * Strip<X>::kBytes);
  // rows of a block lie far apart: the last round of the grid is spread over all multiprocessors
  int64_t row = blockIdx.x + int64_t{gridDim.x} * (warp / team.warps);
  typename Strip<X>::Source source(x, row, team);
  uint8_t* to = place;
  for (int strip = mine; strip < team.strips && row < team.M; strip += team.warps, to += Strip<X>::kBytes)
    source.fetch(to, strip, team);
  commit_strips();
  const float top_w = weights.fill(norm.w, team, kMeasures ? peaks : nullptr);
  float top_b = 0.f;
  if constexpr (Centred) top_b = biases.fill(norm.b, team, kMeasures ? bias_peaks : nullptr);
  y.open();
  __syncthreads();
  const double per = per_column(team.N);
  int turn = 0;
  uint32_t* all = nullptr;
  if constexpr (kMeasures) all = y.max();
  Peak peak(all);
  int64_t block = row * team.runs + lane;  // of the first strip of the row
  for (int64_t first = blockIdx.x; first < team.M; first += step, row += step, block += step * team.runs) {
    if constexpr (kMeasures) peak.look();
    wait_for_strips();
    float top = 0.f;  // bounds what this lane has of the row; passes over NaN, which no range sees
    const auto numbers = numbers_of<Centred, true>(team, per, norm.eps, turn, [&](auto&& add) {
      if (row >= team.M) return;
      const uint8_t* from = place;
#pragma unroll 2
      for (int strip = mine; strip < team.strips; strip += team.warps, from += Strip<X>::kBytes) {
        float v[kRun];
        Strip<X>::unpack(from, x, v);
        if constexpr (kBounds) top = fmaxf(top, Strip<X>::bound(from));
        add(v, team.inside(strip) ? kRun : 0);
      }
    });
    if (row >= team.M) continue;
    if (mine == 0 && lane == 0) numbers.store(norm, row);
    top = numbers.bound(top, top_w, top_b);
    const bool finite = kBounds && top < kInf;
    bool misses = true;
    if constexpr (kBounds && kMeasures) misses = peak.misses(top);
    const bool more = row + step < team.M;
    source.skip(step, team);
    uint8_t* from = place;
#pragma unroll 2
    for (int strip = mine; strip < team.strips; strip += team.warps, from += Strip<X>::kBytes) {
      const int64_t b = block + strip * 32;
      const bool inside = team.inside(strip);
      bool needed = misses;
      if constexpr (kBounds && kMeasures)
        if (needed)
          needed = peak.misses(numbers.bound(Strip<X>::bound(from), peaks[strip * 32 + lane],
                                             Centred ? bias_peaks[strip * 32 + lane] : 0.f));
      if (needed) {
        float v[kRun];
        Strip<X>::unpack(from, x, v);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float4 w = weights.load(strip, q), c = Centred ? biases.load(strip, q) : float4{};
          v[4 * q] = numbers.out(v[4 * q], w.x, c.x);
          v[4 * q + 1] = numbers.out(v[4 * q + 1], w.y, c.y);
          v[4 * q + 2] = numbers.out(v[4 * q + 2], w.z, c.z);
          v[4 * q + 3] = numbers.out(v[4 * q + 3], w.w, c.w);
        }
        if constexpr (kMeasures) {
          peak.add(v);
        } else if constexpr (Output<Y>::kScaling == Scaling::none) {
          put_strip(y.view(), b * kRun, v, inside);
        } else {
          if (inside && finite) y.put_finite(b * kRun, b, v);
          if (inside && !finite) y.put(b * kRun, b, v);
        }
      }
      __syncwarp();
      if (more) source.fetch(from, strip, team);
    }
    commit_strips();
    if constexpr (kMeasures) peak.tell();
  }
  y.close();
}

// Any number of columns: one warp a row, which it reads twice or three times, after the first from the caches; element
// by element unless N is a multiple of 16.
template <bool Centred, class X, class Y>
__global__ __launch_bounds__(kWarps * 32, 2) void norm_forward_kernel_wide(X x, Norm norm, Output<Y> y, Team team) {
  const int lane = threadIdx.x % 32;
  const int64_t N = team.N, runs = runs_of(N);
  const bool whole = N % kRun == 0;
  const double per = per_column(N);
  int turn = 0;
  y.open();
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < team.M;
       row += int64_t{gridDim.x} * kWarps) {
    const auto numbers = numbers_of<Centred, false>(team, per, norm.eps, turn, [&](auto&& add) {
      for (int64_t run = lane; run < runs; run += 32) {
        float v[kRun];
        load_run(x, row, N, run, whole, v);
        add(v, length_of(N, run));
      }
    });
    if (lane == 0) numbers.store(norm, row);
    for (int64_t run = lane; run < runs; run += 32) {
      float v[kRun];
      load_run(x, row, N, run, whole, v);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const int64_t n = run * kRun + k;
        if (n < N) v[k] = numbers.out(v[k], norm.w[n], Centred ? norm.b[n] : 0.f);
      }
      put_run(y, row, N, run, whole, v);
    }
  }
  y.close();
}

// y where the numbers of rows are known, after its scale was measured: a lane keeps its run of w and b, and walks rows
// from the last to the first, of which the caches hold most. Moves x once and y once.
template <bool Centred, class X, class Y>
__global__ __launch_bounds__(kWarps * 32, kScaleBlocks<Centred>) void norm_scale_kernel(X x, Norm norm, Output<Y> y,
                                                                                        Team team) {
  constexpr int kAhead = kScaleAhead<X, Centred>;
  const int64_t N = team.N, runs = N / kRun, warps = int64_t{gridDim.x} * kWarps;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, step = warps / team.strips;
  const int64_t run = warp % team.strips * 32 + threadIdx.x % 32;
  const bool inside = run < runs && warp < step * team.strips;
  float w[kRun] = {}, b[kRun] = {};
  if (inside) norm.w.load(run * kRun, w);
  if (inside && Centred) norm.b.load(run * kRun, b);
  y.open();
  for (int64_t first = warp / team.strips; inside && first < team.M; first += step * kAhead) {
    Pack<X, kRun> pack[kAhead];
    RowNumbers<Centred> numbers[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t row = team.M - 1 - (first + j * step);
      if (row < 0) continue;
      pack[j].fetch(x, row * N + run * kRun, row * runs + run);
      numbers[j].load(norm, row);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t row = team.M - 1 - (first + j * step);
      if (row < 0) continue;
      float v[kRun];
      pack[j].unpack(x, v);
#pragma unroll
      for (int k = 0; k < kRun; ++k) v[k] = numbers[j].out(v[k], w[k], b[k]);
      y.put(row * N + run * kRun, row * runs + run, v);
    }
  }
  y.close();
}

template <bool Centred, class Args>
void norm_forward(const char* name, const Args& args, const Norm& norm) {
  const Team team(args.x.shape.rows(), args.x.shape.cols(), kForwardDepth);
  const int64_t M = team.M, N = team.N;
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    const int64_t bytes = int64_t{Shelf::bytes(team.strips) + team.strips * 128} * (Centred ? 2 : 1) +
                          int64_t{team.rows} * team.warps * team.depth * Strip<X>::kBytes;
    const bool held = N % 32 == 0 && team.rows > 0 && bytes <= kMostShared;
    write(name, args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      if (std::is_same_v<Y, E4M3T> && !args.scale && N % kRun == 0) {
        const int64_t warps =
            std::max<int64_t>(team.strips, int64_t{multiprocessors()} * kScaleBlocks<Centred> * kWarps);
        if constexpr (std::is_same_v<Y, E4M3T>)
          launch(name, norm_scale_kernel<Centred, X, Y>,
                 dim3(static_cast<unsigned>(
                     std::min((warps + kWarps - 1) / kWarps, (M * team.strips + kWarps - 1) / kWarps))),
                 dim3(kWarps * 32), 0, x, norm, y, team);
      } else if (held) {
        const int64_t blocks = std::min<int64_t>(kForwardBlocks<X, Centred>, kMostShared / (bytes + 1024));
        launch(name, norm_forward_kernel<Centred, X, Y>, dim3(blocks_for(M, team.rows, std::max<int64_t>(blocks, 1))),
               dim3(team.threads()), static_cast<size_t>(bytes), x, norm, y, team);
      } else {
        Team one = team;
        one.warps = 1;
        launch(name, norm_forward_kernel_wide<Centred, X, Y>, dim3(blocks_for(M, kWarps, 8)), dim3(kWarps * 32), 0, x,
               norm, y, one);
      }
    });
  });
}

}  // namespace coat::cuda
