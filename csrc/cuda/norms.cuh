// Norms on the device, forward: rmsnorm, and, Centred, layernorm. Sums along rows in pieces, everything else in FP32.
#pragma once
#include "../contract.h"
#include "rows.cuh"

namespace coat::cuda {

// Blocks of norm_scale_kernel on a multiprocessor, and runs that a lane reads at a time.
template <bool Centred>
constexpr int kScaleBlocks = Centred ? 2 : 3;
template <class X, bool Centred>
constexpr int kScaleAhead = (Centred ? 8 : 4) / sizeof(CodeOf<X>);

struct Norm {
  Vector w, b;
  float *mean, *rstd;  // of each row
  float eps;
  double per;  // column
};

// The numbers of one row.
template <bool Centred>
struct RowNumbers {
  float m, r;
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

// How a block holds rows in registers: C columns a thread next to each other, and D such stretches, of all threads of
// the row each. Threads of a row at most, those of a multiprocessor, and the registers that leaves them.
template <class X, class Y, bool Centred>
struct Held {
  static constexpr bool kNarrow = std::is_same_v<X, BF16> && std::is_same_v<Y, BF16>;
  static constexpr int C = kNarrow ? 8 : 16;
  static constexpr int D = X::run != 0 && !Centred && !std::is_same_v<Y, E4M3G16> ? 2 : 1;
  static constexpr int kMost = Centred ? 384 : 512 / D;
  static constexpr int kResident = Centred || (D == 2 && std::is_same_v<Y, Measured>) ? 768
                                   : D == 2                                           ? 896
                                   : kNarrow                                          ? 1536
                                   : sizeof(CodeOf<X>) == 4                           ? 512
                                                                                      : 1024;
  static constexpr int kRegisters = 65536 / kResident / 8 * 8;
};

// `lanes` threads a row, the codes of the next row fetched before this one is reduced. Moves x once and y once.
template <bool Centred, class X, class Y, class H = Held<X, Y, Centred>>
__global__ __maxnreg__((H::kRegisters)) void norm_forward_kernel(X x, Norm norm, Output<Y> y, int64_t M, int64_t N,
                                                                 int lanes) {
  constexpr int C = H::C, D = H::D;
  constexpr bool kMeasures = std::is_same_v<Y, Measured>, kBounds = X::run != 0;
  const int lane = threadIdx.x % lanes, slot = threadIdx.x / lanes, rows = blockDim.x / lanes;
  const int64_t step = int64_t{gridDim.x} * rows;
  const int width = static_cast<int>(N);
  const auto column = [&](int d) { return (d * lanes + lane) * C; };
  const auto offset = [&](int d) { return static_cast<uint32_t>(slot * width + column(d)); };  // in the block's rows
  int64_t first = int64_t{blockIdx.x} * rows;
  let_next_begin();
  after_previous();
  Pack<X, C> next[D];
  const auto fetch = [&](int64_t begin) {
    X from = x;
    from.codes += begin * N;
    if constexpr (X::run != 0) from.scale += begin * (N / kRun);
#pragma unroll
    for (int d = 0; d < D; ++d)
      if (column(d) < width && begin + slot < M) next[d].fetch(from, offset(d), offset(d) / kRun);
  };
  fetch(first);
  extern __shared__ float4 shared[];
  Shelf<C> weights[D], biases[D];
#pragma unroll
  for (int d = 0; d < D; ++d) {
    const size_t shelf = Shelf<C>::vectors(blockDim.x);
    weights[d].fill(shared + d * shelf, norm.w, column(d), column(d) < width);
    if (Centred) biases[d].fill(shared + (D + d) * shelf, norm.b, column(d), column(d) < width);
  }
  y.open();
  uint32_t* all = nullptr;
  if constexpr (kMeasures) all = y.max();
  Peak peak(all);
  const bool counts = C == 16 || threadIdx.x % 2 == 0;  // one thread a piece
  int turn = 0;
  for (; first < M; first += step, turn ^= 1) {
    if constexpr (kMeasures) peak.look();
    float v[D][C], reach[D];
#pragma unroll
    for (int d = 0; d < D; ++d) {
      next[d].unpack(x, v[d]);
      reach[d] = kInf;
      if constexpr (kBounds) reach[d] = abs_(BFloat16::decode(next[d].scale)) * CodeOf<X>::max();
    }
    fetch(first + step);
    RowNumbers<Centred> numbers;
    double sum = 0, middle = 0;
    if constexpr (Centred) {
#pragma unroll
      for (int d = 0; d < D; ++d) sum += sum_of(v[d]);
      middle = row_sum(counts ? sum : 0.0, lanes, 0) * norm.per;
      numbers.m = static_cast<float>(middle);
      sum = 0;
#pragma unroll
      for (int d = 0; d < D; ++d) {
        float off[C];
#pragma unroll
        for (int k = 0; k < C; ++k) off[k] = column(d) < width ? v[d][k] - numbers.m : 0.f;
        sum += squares_of(off);
      }
    } else {
#pragma unroll
      for (int d = 0; d < D; ++d) sum += squares_of(v[d]);
    }
    double squares = row_sum(counts ? sum : 0.0, lanes, Centred ? 1 : turn);
    if constexpr (Centred) squares = spread_about(squares, middle, numbers.m, N);
    numbers.r = inverse_deviation(squares, norm.per, norm.eps);
    const bool exists = first + slot < M;
    if (lane == 0 && exists) numbers.store(norm, first + slot);
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const bool here = column(d) < width && exists;
      const float bound =
          kBounds || kMeasures ? numbers.bound(reach[d], weights[d].peak(), Centred ? biases[d].peak() : 0.f) : kInf;
      if constexpr (kMeasures) {
        if (!peak.misses(here ? bound : 0.f)) continue;
      } else {
        if (!here) continue;
      }
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        const float4 w = weights[d].load(k), b = Centred ? biases[d].load(k) : float4{};
        v[d][k] = numbers.out(v[d][k], w.x, b.x);
        v[d][k + 1] = numbers.out(v[d][k + 1], w.y, b.y);
        v[d][k + 2] = numbers.out(v[d][k + 2], w.z, b.z);
        v[d][k + 3] = numbers.out(v[d][k + 3], w.w, b.w);
      }
      if constexpr (kMeasures) {
#pragma unroll
        for (int k = 0; k < C; ++k) v[d][k] = here ? v[d][k] : 0.f;
        peak.add(v[d]);
        peak.tell();
      } else if constexpr (C == 8) {
        Pack<Y, C> pack;
        pack.put(y.view(), first * N + offset(d), {}, v[d]);
      } else {
        const uint64_t i = static_cast<uint64_t>(first * N) + offset(d);
        if (kBounds && bound < kInf)
          y.put_finite(i, i / kRun, v[d]);
        else
          y.put(i, i / kRun, v[d]);
      }
    }
  }
  y.close();
}

// Any number of columns: one warp a row, which it reads twice or three times, after the first from the caches; element
// by element unless N is a multiple of 16.
template <bool Centred, class X, class Y>
__global__ __launch_bounds__(kWarps * 32, 2) void norm_forward_kernel_wide(X x, Norm norm, Output<Y> y, int64_t M,
                                                                           int64_t N, int) {
  const int lane = threadIdx.x % 32;
  const int64_t runs = runs_of(N);
  const bool whole = N % kRun == 0;
  y.open();
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < M; row += int64_t{gridDim.x} * kWarps) {
    const auto total = [&](auto&& piece) {
      double sum = 0;
      for (int64_t run = lane; run < runs; run += 32) {
        float v[kRun];
        load_run(x, row, N, run, whole, v);
        sum += piece(v, length_of(N, run));
      }
      return warp_sum(sum);
    };
    RowNumbers<Centred> numbers;
    double middle = 0;
    if constexpr (Centred) {
      middle = total([](const float(&v)[kRun], int) { return sum_piece(v); }) * norm.per;
      numbers.m = static_cast<float>(middle);
    }
    double squares = total([&](float(&v)[kRun], int count) {
      if constexpr (Centred) {
#pragma unroll
        for (int k = 0; k < kRun; ++k) v[k] = k < count ? v[k] - numbers.m : 0.f;
      }
      return square_piece(v);
    });
    if constexpr (Centred) squares = spread_about(squares, middle, numbers.m, N);
    numbers.r = inverse_deviation(squares, norm.per, norm.eps);
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
                                                                                        int64_t M, int64_t N) {
  constexpr int kAhead = kScaleAhead<X, Centred>;
  const int64_t runs = N / kRun, strips = (runs + 31) / 32;  // a strip: 32 runs, one a lane
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, step = int64_t{gridDim.x} * kWarps / strips;
  const int64_t run = warp % strips * 32 + threadIdx.x % 32;
  const bool inside = run < runs && warp < step * strips;
  float w[kRun] = {}, b[kRun] = {};
  if (inside) norm.w.load(run * kRun, w);
  if (inside && Centred) norm.b.load(run * kRun, b);
  y.open();
  for (int64_t first = warp / strips; inside && first < M; first += step * kAhead) {
    Pack<X, kRun> pack[kAhead];
    RowNumbers<Centred> numbers[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t row = M - 1 - (first + j * step);
      if (row < 0) continue;
      pack[j].fetch(x, row * N + run * kRun, row * runs + run);
      numbers[j].load(norm, row);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t row = M - 1 - (first + j * step);
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
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols(), strips = (N / kRun + 31) / 32;
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    write(name, args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      if constexpr (std::is_same_v<Y, E4M3T>) {
        if (!args.scale && N % kRun == 0) {
          const int64_t warps = std::max<int64_t>(strips, int64_t{multiprocessors()} * kScaleBlocks<Centred> * kWarps);
          const int64_t blocks = std::min((warps + kWarps - 1) / kWarps, (M * strips + kWarps - 1) / kWarps);
          return launch(name, norm_scale_kernel<Centred, X, Y>, dim3(static_cast<unsigned>(blocks)), dim3(kWarps * 32),
                        0, x, norm, y, M, N);
        }
      }
      using H = Held<X, Y, Centred>;
      if (N % kRun == 0 && N <= H::kMost * H::C * H::D) {
        const Sharing sharing((N / H::C + H::D - 1) / H::D);
        const auto start = [&](auto... all) {  // after the memset before a measurement there is no kernel to overlap
          std::is_same_v<Y, Measured> ? launch(name, all...) : launch_next(name, all...);
        };
        start(norm_forward_kernel<Centred, X, Y>, sharing.grid(M, H::kResident), dim3(sharing.threads),
              Shelf<H::C>::bytes(sharing.threads) * H::D * (Centred ? 2 : 1), x, norm, y, M, N,
              static_cast<int>(sharing.lanes));
      } else {
        launch(name, norm_forward_kernel_wide<Centred, X, Y>, dim3(blocks_for(M, kWarps, 8)), dim3(kWarps * 32), 0, x,
               norm, y, M, N, 0);
      }
    });
  });
}

}  // namespace coat::cuda
