// What swiglu's kernels share: where the two halves of a row lie, and the arguments that the quick formulas allow.
#pragma once
#include "../../ops.h"
#include "../near.cuh"

namespace coat::cuda {

constexpr unsigned kThreads = 256;
// Within them nothing on the way is lost that a code would show, scales being as is_near_scale() allows.
constexpr float kLowestGate = -86.f, kLargestFactor = 0x1p30f;
constexpr float kMostBelow = 0.2785f, kSteepest = 2.3994f;  // largest |silu(x)| for x < 0; where silu' is largest

// 16 columns of half 0, the gates, or 1, the ups, of x: those of run at.run of y.
template <bool Whole, class X>
__device__ inline void load_half(const X& x, const Walk& at, int64_t F, int half, float (&out)[kRun]) {
  if (Whole)
    load_run(x, at.row, 2 * F, half * at.runs + at.run, true, out);
  else
    load_some(x, at.row, 2 * F, half * F + at.run * kRun, length_of(F, at.run), out);
}

// x with F a multiple of 16: where the halves of a run or an element of y lie.
template <class X>
struct Halves {
  X x;
  int64_t F;
  // Scales of the run of gates that begins with element i, and of that of ups.
  __device__ void fetch_scales(int64_t i, uint16_t (&of_both)[2]) const {
    if constexpr (X::run != 0) {
      const auto* from = x.scale + static_cast<uint64_t>(i) / kRun;
      of_both[0] = from[0];
      of_both[1] = from[F / kRun];
    }
  }
  __device__ void reach(int64_t row, int64_t run, float& gate, float& up) const {
    const int64_t runs = F / kRun, i = row * 2 * F + run * kRun, b = row * 2 * runs + run;
    gate = reach_of(x, i, b);
    up = reach_of(x, i + F, b + runs);
  }
  __device__ void load(int64_t row, int64_t col, float& gate, float& up) const {
    const int64_t i = row * 2 * F + col, b = i / kRun;
    gate = load_one(x, i, b);
    up = load_one(x, i + F, b + F / kRun);
  }
};

}  // namespace coat::cuda
