// Products of bf16 operands, and of one with FP8 codes.
#include "start.cuh"

namespace coat::cuda {

void multiply_bf16(const Call& call) {
  switch (call.form) {
    case Form::nt:
      if (call.turn.table) return multiply<BFloat16, BFloat16, true, true>(call, Views<Turned>{});
      return multiply<BFloat16, BFloat16, true, true>(call, Views<F32, BF16, E4M3G16>{});
    case Form::nn:
      return multiply<BFloat16, BFloat16, true, false>(call, Views<F32, BF16>{});
    case Form::tn:
      return multiply<BFloat16, BFloat16, false, false>(call, Views<F32, BF16>{});
  }
}

}  // namespace coat::cuda
