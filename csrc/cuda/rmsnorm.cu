// rmsnorm on the device, also of the sum of two tensors.
#include "../ops.h"
#include "norms_backward.cuh"
#include "tile.cuh"

namespace coat::cuda {
namespace {

// What the blocks of add_rmsnorm_forward share, zeros before and after, and what they give.
struct Found {
  uint32_t largest, blocks;
};
struct Given {
  Vector w;
  E4M3G16 twin;
  float *rstd, *scale;
  Found* found;
  float eps;
  double per;  // column
};

// The codes of a run of the twin and its values in x; infinities are counted.
__device__ inline Pack<E4M3G16, kRun> quantize(const E4M3G16& twin, float (&x)[kRun], uint32_t& infs) {
  const Range range = range_of(x);
  infs += range.infs;
  Pack<E4M3G16, kRun> codes;
  codes.scale = BFloat16::encode_up(scale_for<E4M3>(range));
  const float inverse = 1.f / BFloat16::decode(codes.scale);
#pragma unroll
  for (int k = 0; k < kRun; k += 2) codes.pair[k / 2] = encode_pair<E4M3>(x[k] * inverse, x[k + 1] * inverse);
  codes.unpack(twin, x);
  return codes;
}
// The last block of the grid turns the largest norm into the scale. All threads of the block call it.
__device__ inline void finish(const Given& given, uint32_t infs) {
  if (__syncthreads_or(infs != 0)) {
    infs = block_sum(infs);
    if (threadIdx.x == 0) count_infs(given.twin.status, infs);
  }
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicInc(&given.found->blocks, gridDim.x - 1) == gridDim.x - 1)
    *given.scale = scale_for<E4M3>(Range{atomicExch(&given.found->largest, 0u), 0});
}

constexpr int kAddMost = 512;  // threads a row at most; those of a multiprocessor, and the registers that leaves them
template <class A, class B>
constexpr int kAddResident = sizeof(CodeOf<A>) + sizeof(CodeOf<B>) > 4 ? 512 : 768;
template <class A, class B>
constexpr int kAddRegisters = 65536 / kAddResident<A, B> / 8 * 8;

// `lanes` threads a row, a run each, the codes of the next row fetched before this one is reduced: y and the twin, the
// squares of the twin's values, then the largest |twin * rstd * w|, which few runs can be. N is a multiple of 32. Moves
// a, b, y and the twin once.
template <class A, class B, class Y>
__global__ __maxnreg__((kAddRegisters<A, B>)) void add_rmsnorm_forward_kernel(A a, B b, Y y, Given given, int64_t M,
                                                                              int64_t N, int lanes) {
  const int lane = threadIdx.x % lanes, slot = threadIdx.x / lanes, rows = blockDim.x / lanes, n = lane * kRun;
  const int64_t step = int64_t{gridDim.x} * rows;
  const bool inside = n < N;
  const uint32_t offset = static_cast<uint32_t>(slot * static_cast<int>(N) + n);  // in the block's rows
  int64_t first = int64_t{blockIdx.x} * rows;
  let_next_begin();
  after_previous();
  Pack<A, kRun> next_a;
  Pack<B, kRun> next_b;
  const auto fetch = [&](int64_t begin) {
    if (!inside || begin + slot >= M) {  // zeros
      next_a = {};
      next_b = {};
      return;
    }
    A from_a = a;
    B from_b = b;
    from_a.codes += begin * N;
    from_b.codes += begin * N;
    next_a.fetch(from_a, offset, 0);
    next_b.fetch(from_b, offset, 0);
  };
  fetch(first);
  extern __shared__ float4 shared[];
  Shelf<kRun> weights;
  weights.fill(shared, given.w, n, inside);
  Peak peak(&given.found->largest);
  uint32_t infs = 0;
  int turn = 0;
  for (; first < M; first += step, turn ^= 1) {
    peak.look();
    const bool here = inside && first + slot < M;
    const uint64_t i = static_cast<uint64_t>(first * N) + offset;
    float x[kRun], other[kRun];
    next_a.unpack(a, x);
    next_b.unpack(b, other);
    fetch(first + step);
#pragma unroll
    for (int k = 0; k < kRun; ++k) x[k] = x[k] + other[k];
    Pack<Y, kRun> sum;
    sum.encode({}, x);
    put_strip(y, i, sum, here);
    const auto codes = quantize(given.twin, x, infs);
    if (here) {
      codes.store(given.twin, i);
      given.twin.scale[i / kRun] = codes.scale;
    }
    const float r = inverse_deviation(row_sum(square_piece(x), lanes, turn), given.per, given.eps);
    if (here && lane == 0) given.rstd[first + slot] = r;
    const float bound = BFloat16::decode(codes.scale) * E4M3::max() * r * weights.peak();
    if (!peak.misses(here ? bound : 0.f)) continue;
#pragma unroll
    for (int k = 0; k < kRun; k += 4) {
      const float4 w = weights.load(k);
      x[k] = here ? x[k] * r * w.x : 0.f;
      x[k + 1] = here ? x[k + 1] * r * w.y : 0.f;
      x[k + 2] = here ? x[k + 2] * r * w.z : 0.f;
      x[k + 3] = here ? x[k + 3] * r * w.w : 0.f;
    }
    peak.add(x);
    peak.tell();
  }
  finish(given, infs);
}

// Any number of columns: one warp a row, element by element.
template <class A, class B, class Y>
__global__ __launch_bounds__(kWarps * 32, 2) void add_rmsnorm_forward_kernel_wide(A a, B b, Y y, Given given, int64_t M,
                                                                                  int64_t N, int) {
  const int lane = threadIdx.x % 32;
  const int64_t runs = runs_of(N);
  Peak peak(&given.found->largest);
  uint32_t infs = 0;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < M; row += int64_t{gridDim.x} * kWarps) {
    double sum = 0;
    float x[kRun];
    for (int64_t run = lane; run < runs; run += 32) {
      const int64_t i = row * N + run * kRun;
      const int count = length_of(N, run);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        x[k] = k < count ? a.load(i + k, {}) + b.load(i + k, {}) : 0.f;
        if (k < count) y.store(i + k, {}, x[k]);
      }
      const auto codes = quantize(given.twin, x, infs);
      given.twin.scale[row * runs + run] = codes.scale;
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (k < count) given.twin.codes[i + k] = codes.code[k];
      sum += square_piece(x);
    }
    const float r = inverse_deviation(warp_sum(sum), given.per, given.eps);
    if (lane == 0) given.rstd[row] = r;
    for (int64_t first = 0; first < runs; first += 32) {
      const int64_t run = first + lane;
#pragma unroll
      for (int k = 0; k < kRun; ++k) x[k] = 0.f;
      if (run < runs) load_run(given.twin, row, N, run, false, x);
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (run * kRun + k < N) x[k] = x[k] * r * given.w[run * kRun + k];
      peak.add(x);
    }
    peak.tell();
  }
  finish(given, infs);
}

// ---- transposed ----

using Turned = Tile<E4M3, E4M3>;
static_assert(kTileThreads == kDown && kTileThreads == Turned::kColumns && Turned::G == kRun);

// What the codes of a tile are multiplied by. The scales of runs lie as the rows of y do; between those of the rows
// that a thread turns and of the next thread's there is room, so that lanes that read 16 bytes each meet no bank twice.
struct alignas(16) Factors {
  static constexpr int kRuns = Turned::kColumns / kRun, kGroups = kDown / kRun;
  uint16_t scale[kRuns][kGroups][kRun + 8];
  float rstd[kGroups][kRun + 4];
  float w[Turned::kColumns];

  // A thread brings a row and a column, zeros where there is none. Whether its products are certainly finite.
  __device__ bool fetch(const Turned& tile, const E4M3G16& x, const Norm& norm) {
    const int own = threadIdx.x;
    const int64_t m = tile.m0 + own, n = tile.n0 + own, runs = runs_of(tile.N), run = tile.n0 / kRun;
    Lane<uint16_t, kRuns> scales;
    scales.fetch<false>(x.scale, m * runs + run, m < tile.M ? runs - run : 0);
    const float r = m < tile.M ? norm.rstd[m] : 0.f, v = n < tile.N ? norm.w[n] : 0.f;
    bool finite = fabsf(v) < 0x1p64f;
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
      scale[k][own / kRun][own % kRun] = scales.code[k];
      finite = finite && fabsf(BFloat16::decode(scales.code[k])) * E4M3::max() * r < 0x1p63f;
    }
    rstd[own / kRun][own % kRun] = r;
    w[own] = v;
    return finite;
  }
  // use(g, the values of norms) for the words of a turn.
  template <class Use>
  __device__ void each_row(int down, int at, const uint32_t (&row)[kRun], Use&& use) const {
    Lane<uint16_t, kRun> scales;
    scales.fetch<true>(scale[at / kRun][down / kRun], 0, kRun);
    Lane<Float32, kRun> r;
    r.fetch<true>(reinterpret_cast<const Float32*>(rstd[down / kRun]), 0, kRun);
    const float4 v = *reinterpret_cast<const float4*>(w + at);
#pragma unroll
    for (int g = 0; g < kRun; ++g) {
      const float s = BFloat16::decode(scales.code[g]), t = r.code[g].code;
      const float2 low = decode_pair<E4M3>(row[g]), high = decode_pair<E4M3>(row[g] >> 16);
      const float out[4] = {low.x * s * t * v.x, low.y * s * t * v.y, high.x * s * t * v.z, high.y * s * t * v.w};
      use(g, out);
    }
  }
};

// One tile a block. A word of four codes becomes one of those of y, then words are turned. Infinities are looked for
// only where there may be some. Reads x once, writes y once, 16 bytes a lane on both sides.
__global__ void __launch_bounds__(kTileThreads, 6)
    rmsnorm_transposed_kernel(E4M3G16 x, Norm norm, E4M3T y, Tiles tiles, const float* given) {
  __shared__ int4 vectors[Turned::kVectors];
  __shared__ Factors factors;
  const Turned tile(vectors, tiles);
  by_case(tile.whole(), [&](auto whole) {
    tile.fetch<whole.value>(x.codes);
    const bool finite = factors.fetch(tile, x, norm);
    const auto sealed = seal_tensor(y, given, nullptr);
    __pipeline_wait_prior(0);
    const bool counts = __syncthreads_or(!finite);
    tile.each_turn([&](int down, int at, uint32_t(&row)[kRun]) {
      factors.each_row(down, at, row, [&](int g, const float(&out)[4]) {
        Lane<E4M3, 4> codes;
        codes.encode(y, sealed, out);
        row[g] = codes.word[0];
      });
      Turned::turn(row, [&](int k, const Lane<E4M3, kRun>& out) { tile.put<whole.value>(y.codes, down, at + k, out); });
    });
    if (!counts) return;
    uint32_t infs = 0;
    tile.each_turn([&](int down, int at, const uint32_t(&row)[kRun]) {
      factors.each_row(down, at, row, [&](int, const float(&out)[4]) {
        Range range;
        add_all(range, out);
        infs += range.infs;
      });
    });
    count_infs_of_block(y.status, infs);
  });
}

}  // namespace

void rmsnorm_forward(const rmsnorm_forward_args& args) {
  check_row_not_empty(args.x);
  norm_forward<false>(
      "rmsnorm_forward", args,
      Norm{Vector(args.w), Vector(args.w), nullptr, args.rstd.as<float>(), args.eps, per_column(args.x.shape.cols())});
}

void rmsnorm_transposed(const rmsnorm_transposed_args& args) {
  check_row_not_empty(args.x);
  const Tiles tiles(args.x.shape.rows(), args.x.shape.cols(), Turned::kColumns);
  launch("rmsnorm_transposed", rmsnorm_transposed_kernel, tiles.grid(true), dim3(kTileThreads), 0, E4M3G16(args.x),
         Norm{Vector(args.w), Vector(args.w), nullptr, args.rstd.as<float>(), 0.f, 0.0}, E4M3T(args.y), tiles,
         args.scale.as<float>());
}

void rmsnorm_backward(const rmsnorm_backward_args& args) {
  norm_backward<false>(
      "rmsnorm_backward", args,
      Norm{Vector(args.w), Vector(args.w), nullptr, args.rstd.as<float>(), 0.f, per_column(args.x.shape.cols())},
      args.dw, Tensor{}, args.residual, args.amax.as<uint32_t>());
}

void add_rmsnorm_forward(const add_rmsnorm_forward_args& args) {
  const char* name = "add_rmsnorm_forward";
  const int64_t M = args.a.shape.rows(), N = args.a.shape.cols();
  check_row_not_empty(args.a, "a");
  const Given given{Vector(args.w),
                    E4M3G16(args.twin),
                    args.rstd.as<float>(),
                    args.scale.as<float>(),
                    reinterpret_cast<Found*>(counters()),
                    args.eps,
                    per_column(N)};
  with("a", args.a, Views<F32, BF16>{}, [&](const auto a) {
    with("b", args.b, Views<F32, BF16>{}, [&](const auto b) {
      with("y", args.y, Views<F32, BF16>{}, [&](const auto y) {
        using A = std::remove_const_t<decltype(a)>;
        using B = std::remove_const_t<decltype(b)>;
        using Y = std::remove_const_t<decltype(y)>;
        // without rows there is still a scale
        if (N % 32 == 0 && N <= kAddMost * kRun) {
          const Sharing sharing(N / kRun);
          launch_next(name, add_rmsnorm_forward_kernel<A, B, Y>,
                      dim3(std::max(1u, sharing.grid(M, kAddResident<A, B>).x)), dim3(sharing.threads),
                      Shelf<kRun>::bytes(sharing.threads), a, b, y, given, M, N, static_cast<int>(sharing.lanes));
        } else {
          launch(name, add_rmsnorm_forward_kernel_wide<A, B, Y>, dim3(std::max(1u, blocks_for(M, kWarps, 2))),
                 dim3(kWarps * 32), 0, a, b, y, given, M, N, 0);
        }
      });
    });
  });
}

}  // namespace coat::cuda
