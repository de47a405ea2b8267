// rmsnorm on the device, also of the sum of two tensors.
#include "../ops.h"
#include "norms_backward.cuh"

namespace coat::cuda {
namespace {

// Blocks of a multiprocessor; magnitudes of w that a block keeps at most; runs that a lane fetches ahead.
constexpr int kAddBlocks = 2, kPeaks = 4096;
template <class A, class B>
constexpr int kAddAhead = sizeof(CodeOf<A>) + sizeof(CodeOf<B>) > 4 ? 1 : 2;

// What the blocks of add_rmsnorm_forward_kernel share.
struct Found {
  uint32_t largest, blocks;
};

// One warp a row, one run a lane at a time: y and the twin in one sweep with the squares of the twin's values, then the
// largest |twin * rstd * w|, for which hardly a run has to be read again. The last block turns it into the scale.
// Element by element unless N is a multiple of 32. Moves a, b, y and the twin once.
template <class A, class B, class Y>
__global__ __launch_bounds__(kWarps * 32,
                             kAddBlocks) void add_rmsnorm_forward_kernel(A a, B b, Vector w, Y y, E4M3G16 twin,
                                                                         float* rstd, float* scale, Found* found,
                                                                         float eps, int64_t M, int64_t N, int kept) {
  constexpr int kAhead = kAddAhead<A, B>;
  const int lane = threadIdx.x % 32;
  const int64_t runs = runs_of(N);
  const bool whole = N % 32 == 0;
  const double per = per_column(N);
  extern __shared__ uint32_t peaks[];  // of w by run, as bits; runs that share one have the larger
  for (int i = threadIdx.x; i < kept; i += blockDim.x) peaks[i] = 0;
  __syncthreads();
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    const float magnitude = fabsf(w[n]);
    if (magnitude <= kInf) atomicMax(&peaks[n / kRun & (kept - 1)], bits_of(magnitude));
  }
  __syncthreads();
  uint32_t peak_of_all = 0;
  for (int i = threadIdx.x; i < kept; i += blockDim.x) peak_of_all = max(peak_of_all, peaks[i]);
  const float top_w = float_of(block_max(peak_of_all));
  Peak peak(&found->largest);
  uint32_t infs = 0;
  Pack<A, kRun> next_a[kAhead];  // codes on their way, if `whole`
  Pack<B, kRun> next_b[kAhead];
  const auto fetch = [&](int u, int64_t row, int64_t run) {
    if (row >= M || run >= runs) return;
    next_a[u].fetch(a, row * N + run * kRun, 0);
    next_b[u].fetch(b, row * N + run * kRun, 0);
  };
  const int64_t begin = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, rows = int64_t{gridDim.x} * kWarps;
#pragma unroll
  for (int u = 0; u < kAhead; ++u)
    if (whole) fetch(u, begin, lane + u * 32);
  for (int64_t row = begin; row < M; row += rows) {
    peak.look();
    double sum = 0;
    float top = 0.f;  // bounds what this lane has of the twin; passes over NaN
    for (int64_t first = lane; first - lane < runs; first += 32 * kAhead)
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int64_t run = first + u * 32, i = row * N + run * kRun, block = row * runs + run;
        const bool inside = run < runs;
        float x[kRun] = {}, other[kRun] = {};
        if (whole) {
          next_a[u].unpack(a, x);
          next_b[u].unpack(b, other);
          const bool here = run + 32 * kAhead < runs;  // else the row after this one
          fetch(u, here ? row : row + rows, here ? run + 32 * kAhead : lane + u * 32);
        } else if (inside) {
          load_run(a, row, N, run, false, x);
          load_run(b, row, N, run, false, other);
        }
#pragma unroll
        for (int k = 0; k < kRun; ++k) x[k] += other[k];
        if (whole) put_strip(y, i, x, inside);
        if (!inside) continue;
        Range range = range_of(x);
        infs += range.infs;
        range.infs = 0;
        const float inverse = twin.seal(block, range).inverse;
        Pack<E4M3G16, kRun> codes;
        codes.scale = BFloat16::encode_up(scale_for<E4M3>(range));
#pragma unroll
        for (int k = 0; k < kRun; k += 2) codes.pair[k / 2] = encode_pair<E4M3>(x[k] * inverse, x[k + 1] * inverse);
        if (whole) {
          *reinterpret_cast<int4*>(twin.codes + i) = codes.word[0];
        } else {
          const int count = length_of(N, run);
#pragma unroll
          for (int k = 0; k < kRun; ++k) {
            if (k >= count) continue;
            y.store(i + k, {}, x[k]);
            twin.codes[i + k] = codes.code[k];
          }
        }
        top = fmaxf(top, BFloat16::decode(codes.scale) * E4M3::max());
        codes.unpack(twin, x);
        sum += square_piece(x);
      }
    const float r = inverse_deviation(warp_sum(sum), per, eps);
    if (lane == 0) rstd[row] = r;
    const bool misses = peak.misses(top * r * top_w);
    for (int64_t first = 0; misses && first < runs; first += 32) {
      const int64_t run = first + lane;
      const bool inside = run < runs;
      float bound = 0.f;
      if (inside) bound = twin.open(row * runs + run).scale * E4M3::max() * r * float_of(peaks[run & (kept - 1)]);
      if (!peak.misses(bound)) continue;
      float x[kRun] = {};
      if (inside) load_run(twin, row, N, run, whole, x);
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (run * kRun + k < N) x[k] = x[k] * r * w[run * kRun + k];
      peak.add(x);
    }
    peak.tell();
  }
  if (__syncthreads_or(infs != 0)) {
    infs = block_sum(infs);
    if (threadIdx.x == 0) count_infs(twin.status, infs);
  }
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&found->blocks, 1u) == gridDim.x - 1)
    *scale = scale_for<E4M3>(Range{atomicMax(&found->largest, 0u), 0});
}

}  // namespace

void rmsnorm_forward(const rmsnorm_forward_args& args) {
  check_row_not_empty(args.x);
  norm_forward<false>("rmsnorm_forward", args,
                      Norm{Vector(args.w), Vector(args.w), nullptr, args.rstd.as<float>(), args.eps});
}

void rmsnorm_backward(const rmsnorm_backward_args& args) {
  norm_backward<false>("rmsnorm_backward", args,
                       Norm{Vector(args.w), Vector(args.w), nullptr, args.rstd.as<float>(), 0.f}, args.dw, Tensor{});
}

void add_rmsnorm_forward(const add_rmsnorm_forward_args& args) {
  const char* name = "add_rmsnorm_forward";
  const int64_t M = args.a.shape.rows(), N = args.a.shape.cols();
  check_row_not_empty(args.a, "a");
  const Scratch found(sizeof(Found));
  check(cudaMemsetAsync(found.as<Found>(), 0, sizeof(Found), stream()), name);
  int kept = 1;
  while (kept < runs_of(N) && kept < kPeaks) kept *= 2;
  with("a", args.a, Views<F32, BF16>{}, [&](const auto a) {
    with("b", args.b, Views<F32, BF16>{}, [&](const auto b) {
      with("y", args.y, Views<F32, BF16>{}, [&](const auto y) {
        using A = std::remove_const_t<decltype(a)>;
        using B = std::remove_const_t<decltype(b)>;
        using Y = std::remove_const_t<decltype(y)>;
        launch(name, add_rmsnorm_forward_kernel<A, B, Y>, dim3(std::max(1u, blocks_for(M, kWarps, kAddBlocks))),
               dim3(kWarps * 32), kept * sizeof(uint32_t), a, b, Vector(args.w), y, E4M3G16(args.twin),
               args.rstd.as<float>(), args.scale.as<float>(), found.as<Found>(), args.eps, M, N, kept);
      });
    });
  });
}

}  // namespace coat::cuda
