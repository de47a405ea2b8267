// swiglu on the device: silu(gate) * up on the two halves of a row.
#include "../hopper.cuh"
#include "swiglu.cuh"

namespace coat::cuda {
namespace {

// A thread takes 16 columns of y at a time: 16 gates and the 16 ups F columns behind. Whole: F is a multiple of 16, so
// that runs are full and none crosses from gate to up; else element by element. Moves x and y once; a /t scale that has
// to be measured reads x once more.
template <bool Whole, class X, class Y>
__global__ __launch_bounds__(kThreads, 2) void swiglu_forward_kernel(X x, Output<Y> y, int64_t M, int64_t F) {
  y.open();
  for (Walk at(M, runs_of(F)); at.more(); at.next()) {
    float gate[kRun], up[kRun];
    load_half<Whole>(x, at, F, 0, gate);
    load_half<Whole>(x, at, F, 1, up);
#pragma unroll
    for (int k = 0; k < kRun; ++k) gate[k] = swiglu(gate[k], up[k]);
    put_run(y, at.row, F, at.run, Whole, gate);
  }
  y.close();
}

// The same for whole runs, nearly first; the next run is on its way while this one is computed.
template <class X, class Y>
__global__ __launch_bounds__(kThreads, sizeof(CodeOf<X>) == 1 ? 4 : 2) void swiglu_forward_kernel_near(Halves<X> x,
                                                                                                       Output<Y> y,
                                                                                                       int64_t M) {
  constexpr bool kPlain = std::is_same_v<Y, BF16>;
  const int64_t F = x.F;
  y.open();
  const float inverse = y.inverse();
  constexpr int kPieces = sizeof(CodeOf<X>), kEach = 16 / kPieces;
  __shared__ int4 ahead[2][kPieces][kThreads];
  uint16_t next_scale[2] = {};
  Walk at(M, F / kRun);
  int64_t next = at.row * F + at.run * kRun;  // in y
  const int64_t step = int64_t{gridDim.x} * kThreads * kRun;
  const auto fetch = [&] {
    if (!at.more()) return;
    const int64_t i = next + at.row * F;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int p = 0; p < kPieces; ++p)
        fetch_piece<(kPieces > 1)>(shared_address(&ahead[half][p][threadIdx.x]), x.x.codes + i + half * F + p * kEach);
    x.fetch_scales(i, next_scale);
  };
  fetch();
  while (__any_sync(0xffffffffu, at.more())) {
    const int64_t row = at.row, run = at.run, i = next;
    const bool here = at.more();
    Pack<X, kRun> gates, ups;
    fetches_done();
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      gates.word[p] = ahead[0][p][threadIdx.x];
      ups.word[p] = ahead[1][p][threadIdx.x];
    }
    gates.scale = next_scale[0], ups.scale = next_scale[1];
    __syncwarp();
    at.next();
    next += step;
    fetch();
    bool certain = true;
    if (here) {  // a branch, behind which the compiler leaves what follows: after the fetch
      const float reach_gate = reach_of(gates), unit_gate = gates.unit();
      // where zeros and subnormals are told apart, values are whole; else the unit of the ups joins that of y
      const float unit_up = kPlain ? ups.unit() : 1.f, by = kPlain ? 1.f : inverse * ups.unit();
      const float divisor = Near::inverse(by + by * kNearError);  // joins the division of the sigmoid
      Pack<Y, kRun> pack;
      uint32_t differ = 0, least = ~0u;
#pragma unroll
      for (int k = 0; k < kRun; k += 4) {
        float low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float gate = gates.value(k + j) * unit_gate;
          high[j] = Near::inverse(fma_(Near::exp(-gate), divisor, divisor)) * gate * (ups.value(k + j) * unit_up);
          low[j] = high[j] * (1.f - 2.f * kNearError);
          if constexpr (kPlain) least = min(least, smallest_of(high[j]));
        }
        differ |= encode_near<CodeOf<Y>>(low, high, pack.quad + k * sizeof(CodeOf<Y>) / 4);
      }
      certain = differ == 0 && least >= kSmallest && is_near_scale(inverse) && abs_(by) > 0x1p-100f &&
                lowest_of(gates, reach_gate, kLowestGate) > kLowestGate && reach_gate < kLargestFactor &&
                reach_of(ups) < kLargestFactor;
      if (certain) y.put_codes(i, pack);
    }
    do_together(!certain, row, run, [&](int64_t its_row, int64_t col) {
      float gate, up;
      x.load(its_row, col, gate, up);
      y.put_one(its_row * F + col, swiglu(gate, up));
    });
  }
  y.close();
}

template <class X>
__global__ __launch_bounds__(kSearchThreads) void swiglu_forward_kernel_search(Halves<X> x, uint32_t* max, int64_t M) {
  find_largest(
      max, M, x.F / kRun,
      [&](int64_t row, int64_t run, float known) {
        float gate, up;
        x.reach(row, run, gate, up);
        const float quick = fmaxf(swiglu<Near>(gate, up), kMostBelow * up) * kNearSlack;
        if (quick <= known) return quick;
        return fmaxf(swiglu(gate, up), kMostBelow * up) * kBoundSlack<X>;
      },
      [&](Range& range, int64_t row, int64_t col) {
        float gate, up;
        x.load(row, col, gate, up);
        range.add(swiglu(gate, up));
      });
}

// The products of two pairs of bf16 scales, as magnitudes, of gates and of ups. silu(x) is below x where x is positive.
__device__ inline uint32_t largest_product(uint32_t gates, uint32_t ups) {
  constexpr uint32_t kMagnitudes = 0x7fff7fffu;
  constexpr uint32_t kBelow = 0x3a233a23u;  // two bf16 of no less than kMostBelow in units of the largest code
  const uint32_t gate = __vmaxu2(gates & kMagnitudes, kBelow), up = ups & kMagnitudes;
  const __nv_bfloat162 product =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(gate), reinterpret_cast<const __nv_bfloat162&>(up));
  return reinterpret_cast<const uint32_t&>(product);
}

// The same for coded x, of which the scales of eight runs are read at once: most groups are far below the largest
// value, of which a launch with Seed gives an idea before. F is a multiple of 128.
template <bool Seed>
__global__ __launch_bounds__(kSearchThreads, 6) void swiglu_forward_kernel_search_coded(Halves<E4M3G16> x,
                                                                                        uint32_t* max, int64_t M) {
  if (Seed)
    let_next_begin();
  else
    after_previous();
  constexpr int kGroup = 8;
  const int64_t groups = x.F / (kGroup * kRun);
  const auto bound = [&](int64_t row, int64_t group, float known) {
    const auto* scales = reinterpret_cast<const uint4*>(x.x.scale) + row * 2 * groups + group;
    const uint4 gates = scales[0], ups = scales[groups];
    uint32_t most = largest_product(gates.x, ups.x);
    most = __vmaxu2(most, largest_product(gates.y, ups.y));
    most = __vmaxu2(most, largest_product(gates.z, ups.z));
    most = __vmaxu2(most, largest_product(gates.w, ups.w));
    // the roundings to bf16 are below the factor, and what they flush is below the summand
    constexpr float kReach = E4M3::max() * E4M3::max() * (1.f + 0x1p-7f);
    const float quick = fma_(float_of(::max(most << 16, most & 0xffff0000u)), kReach, 0x1p-100f);
    if (known == kInf || quick <= known) return quick;
    float bound = 0.f;
#pragma unroll 1
    for (int k = 0; k < kGroup; ++k) {
      float gate, up;
      x.reach(row, group * kGroup + k, gate, up);
      bound = fmaxf(bound, fmaxf(swiglu(gate, up), kMostBelow * up));
    }
    return bound;
  };
  const auto value = [&](Range& range, int64_t row, int64_t col) {
    float gate, up;
    x.load(row, col, gate, up);
    range.add(swiglu(gate, up));
  };
  if (Seed)
    find_seed<kGroup>(max, M, groups, bound, value);
  else
    find_largest<kGroup>(max, M, groups, bound, value);
}

// Chosen here, by type: g++ drops such a choice from a lambda inside the one that knows the type.
template <class X>
void search(const char* name, const Halves<X>& x, uint32_t* max, int64_t M) {
  if constexpr (std::is_same_v<X, E4M3G16>) {
    if (x.F % 128 == 0) {
      const int64_t groups = M * (x.F / 128);
      launch(name, swiglu_forward_kernel_search_coded<true>, dim3(blocks_for(groups, kSearchThreads * kSeedStep, 2)),
             dim3(kSearchThreads), 0, x, max, M);
      return launch_next(name, swiglu_forward_kernel_search_coded<false>, dim3(blocks_for(groups, kSearchThreads, 6)),
                         dim3(kSearchThreads), 0, x, max, M);
    }
  }
  launch(name, swiglu_forward_kernel_search<X>, dim3(blocks_for(M * runs_of(x.F), kThreads)), dim3(kSearchThreads), 0,
         x, max, M);
}

}  // namespace

void swiglu_forward(const swiglu_forward_args& args) {
  const int64_t M = args.y.shape.rows(), F = args.y.shape.cols();
  const dim3 grid(blocks_for(M * runs_of(F), kThreads));
  const char* name = "swiglu_forward";
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    const Halves<X> halves{x, F};
    write(name, args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      if constexpr (std::is_same_v<Y, Measured>) {
        if (F % kRun == 0) return search(name, halves, y.max(), M);
      } else if constexpr (kHasNear<Y> && sizeof(CodeOf<X>) + sizeof(CodeOf<Y>) < 4) {  // else there is time
        if (F % kRun == 0)
          return launch(name, swiglu_forward_kernel_near<X, Y>, dim3(blocks_for(M * runs_of(F), kThreads, 4)),
                        dim3(kThreads), 0, halves, y, M);
      } else {
        if (F % kRun == 0) return launch(name, swiglu_forward_kernel<true, X, Y>, grid, dim3(kThreads), 0, x, y, M, F);
      }
      launch(name, swiglu_forward_kernel<false, X, Y>, grid, dim3(kThreads), 0, x, y, M, F);
    });
  });
}

}  // namespace coat::cuda
