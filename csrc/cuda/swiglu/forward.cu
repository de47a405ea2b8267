// swiglu on the device: silu(gate) * up on the two halves of a row.
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

// The same for whole runs, nearly first; the codes of the next run are fetched before this one is computed.
template <class X, class Y>
__global__ __launch_bounds__(kThreads, sizeof(CodeOf<X>) == 1 ? 4 : 2) void swiglu_forward_kernel_near(Halves<X> x,
                                                                                                       Output<Y> y,
                                                                                                       int64_t M) {
  const int64_t F = x.F;
  y.open();
  const float inverse = y.inverse();
  Pack<X, kRun> next_gate, next_up;
  Walk at(M, F / kRun);
  if (at.more()) x.fetch(at.row, at.run, next_gate, next_up);
  while (__any_sync(0xffffffffu, at.more())) {
    const int64_t row = at.row, run = at.run;
    const bool here = at.more();
    float v[kRun], up[kRun];
    next_gate.unpack(x.x, v);
    next_up.unpack(x.x, up);
    const float reach_gate = reach_of(next_gate, v), reach_up = reach_of(next_up, up);
    bool certain = is_near_scale(inverse) && lowest_of(reach_gate, kLowestGate, v) > kLowestGate &&
                   reach_gate * reach_up < kLargestProduct;
    at.next();
    if (at.more()) x.fetch(at.row, at.run, next_gate, next_up);
#pragma unroll
    for (int k = 0; k < kRun; ++k) v[k] = swiglu<Near>(v[k], up[k]);
    if (here) {
      Pack<Y, kRun> pack;
      certain = encode_near(pack, v, kNearError, inverse) && certain;
      if (certain) y.put_codes(row * F + run * kRun, pack);
    }
    do_together(here && !certain, row, run, [&](int64_t its_row, int64_t col) {
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

// The same for coded x, of which the scales of eight runs are read at once: most groups are far below the largest
// value. F is a multiple of 128.
__global__ __launch_bounds__(kSearchThreads) void swiglu_forward_kernel_search_coded(Halves<E4M3G16> x, uint32_t* max,
                                                                                     int64_t M) {
  constexpr int kGroup = 8;
  find_largest<kGroup>(
      max, M, x.F / (kGroup * kRun),
      [&](int64_t row, int64_t group, float known) {
        const auto* scales = reinterpret_cast<const uint4*>(x.x.scale) + row * 2 * (x.F / (kGroup * kRun)) + group;
        const uint4 gates = scales[0], ups = scales[x.F / (kGroup * kRun)];
        const uint32_t gate_words[4] = {gates.x, gates.y, gates.z, gates.w}, up_words[4] = {ups.x, ups.y, ups.z, ups.w};
        const auto reach = [](uint32_t word, int half) {
          return float_of((half == 0 ? word << 16 : word) & 0x7fff0000u) * E4M3::max();
        };
        float quick = 0.f;
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {  // silu(x) is below x
          const float gate = reach(gate_words[k / 2], k % 2), up = reach(up_words[k / 2], k % 2);
          quick = fmaxf(quick, fmaxf(gate, kMostBelow) * up);
        }
        quick *= kNearSlack;
        if (quick <= known) return quick;
        float bound = 0.f;
#pragma unroll 1
        for (int k = 0; k < kGroup; ++k) {
          float gate, up;
          x.reach(row, group * kGroup + k, gate, up);
          bound = fmaxf(bound, fmaxf(swiglu(gate, up), kMostBelow * up));
        }
        return bound;
      },
      [&](Range& range, int64_t row, int64_t col) {
        float gate, up;
        x.load(row, col, gate, up);
        range.add(swiglu(gate, up));
      });
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
        if constexpr (std::is_same_v<X, E4M3G16>)
          if (F % 128 == 0)
            return launch(name, swiglu_forward_kernel_search_coded, dim3(blocks_for(M * (F / 128), kSearchThreads)),
                          dim3(kSearchThreads), 0, halves, y.max(), M);
        if (F % kRun == 0)
          return launch(name, swiglu_forward_kernel_search<X>, grid, dim3(kSearchThreads), 0, halves, y.max(), M);
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
