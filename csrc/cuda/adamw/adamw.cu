// adamw: who takes which members of a list, and the scales of tensors between two launches.
#include "generic.cuh"

namespace coat::cuda {
namespace generic {
namespace {

__device__ float scale_of(DType type, const Range& range) {
  if (type == DType::f16) return scale_for<Float16>(range);
  return type == DType::e4m3 ? scale_for<E4M3>(range) : scale_for<E5M2>(range);
}

// A thread a parameter.
__global__ void adamw_kernel_seal(Scales* list, int count, const float* clip) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count || (clip && clip[1] != 0.f)) return;
  Scales& of = list[i];
  for (int slot = 0; slot < Scales::kCount; ++slot) {
    if (!of.scale[slot]) continue;
    of.old[slot] = *of.scale[slot];
    of.fresh[slot] = scale_of(of.type[slot], Range{of.max[slot], 0});
    *of.scale[slot] = of.fresh[slot];
  }
}

}  // namespace

void seal_scales(Scales* list, int count, const float* clip) {
  launch("adamw", adamw_kernel_seal, static_cast<unsigned>((count + 31) / 32), 32, 0, list, count, clip);
}

}  // namespace generic

void adamw(const adamw_args& args) {
  generic::Call call = generic::call_of("adamw", args, args.v, args.v_floor != 0);
  for (size_t i = 0; i < args.p.size(); ++i) call.taken.push_back(is_expanded_case(args, i));
  const AdamW rule(args);
  generic::run_plain(rule, call);
  generic::run_runs(rule, call);
  generic::run_expanded(rule, call);
  adamw_expanded(args);
}

}  // namespace coat::cuda
