// Products of e4m3 with a scale a run of 128 along K by e4m3 with a scale a block of 128 x 128.
#include "start.cuh"

namespace coat::cuda {

void multiply_runs_by_blocks(const Call& call) {
  const RunsByBlocks scales{call.a.scales<float>(), call.b.scales<float>(), (call.K + 127) / 128};
  multiply<E4M3, E4M3, true, true>(call, Views<F32, BF16, E4M3G16>{}, scales);
}

}  // namespace coat::cuda
