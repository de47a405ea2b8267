// Who takes which member of a list of adamw.
#pragma once
#include "../../contract.h"
#include "../../formula.h"
#include "../../ops.h"
#include "../lanes.cuh"

namespace coat::cuda {

constexpr int kWarps = 4;  // of a block: few, since registers limit how many blocks fit

// The largest |p| as stored of what a block updates, for a parameter of which it is wanted: bits of magnitudes, which
// order as integers with NaN above Inf, in shared memory, since registers are scarce. All threads of a block begin and
// end it, with a barrier of the block after the first and another before the second.
struct Largest {
  uint32_t* of;  // null: not wanted
  uint32_t most;
  __device__ void begin(uint32_t* wanted) {
    if (threadIdx.x == 0) of = wanted, most = 0;
  }
  // All lanes of the warp must call it.
  __device__ void raise(uint32_t bits) {
    bits = warp_max(bits);
    if (threadIdx.x % 32 == 0) atomicMax(&most, bits);
  }
  __device__ void end() const {
    if (threadIdx.x == 0 && of) atomicMax(of, most);
  }
};

// Whether expanded.cu takes member i: moments in e4m3/x128, parameters and gradients in f32 or bf16, and no list of
// what rounding has lost. The kernel of generic.cuh takes all others.
bool is_expanded_case(const adamw_args& args, size_t i);

// The members that is_expanded_case names.
void adamw_expanded(const adamw_args& args);

}  // namespace coat::cuda
