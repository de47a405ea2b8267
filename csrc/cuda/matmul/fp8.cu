// Products of e4m3 and e5m2 by e4m3 operands.
#include "start.cuh"

namespace coat::cuda {

using AnyY = Views<F32, BF16, E4M3G16>;

void multiply_e4m3(const Call& call) {
  if (call.turn.table) return multiply<E4M3, E4M3, true, true>(call, Views<Turned>{});
  multiply<E4M3, E4M3, true, true>(call, AnyY{});
}
void multiply_e5m2(const Call& call) { multiply<E5M2, E4M3, true, true>(call, AnyY{}); }

}  // namespace coat::cuda
