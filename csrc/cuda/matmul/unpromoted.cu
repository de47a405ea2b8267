// Products of e4m3 and e5m2 by e4m3 operands with a scale a tensor whose sums stay in the tensor cores.
#include "start.cuh"

namespace coat::cuda {

void multiply_unpromoted(const Call& call) {
  using AnyY = Views<F32, BF16, E4M3G16>;
  constexpr Unpromoted scales;
  if (call.a.format.dtype == DType::e5m2) return multiply<E5M2, E4M3, true, true>(call, AnyY{}, scales);
  if (call.turn.table) return multiply<E4M3, E4M3, true, true>(call, Views<Turned>{}, scales);
  multiply<E4M3, E4M3, true, true>(call, AnyY{}, scales);
}

}  // namespace coat::cuda
