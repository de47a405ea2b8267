// adamw: who takes which members of a list, what is cleared before and sealed between launches.
#include "generic.cuh"

namespace coat::cuda {
namespace generic {
namespace {

__device__ float scale_of(DType type, const Range& range) {
  return type == DType::f16 ? scale_for<Float16, true>(range) : scale_for<E4M3, true>(range);
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

namespace {

// A thread a maximum, which kernels then raise; a step that is skipped leaves it.
__global__ void adamw_kernel_clear(uint32_t* const* list, int count, const float* clip) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count && !(clip && clip[1] != 0.f)) *list[i] = 0;
}

void clear_largest(const std::vector<Tensor>& amax, const float* clip) {
  if (amax.empty()) return;
  std::vector<uint32_t*> list;
  for (const Tensor& of : amax) list.push_back(of.as<uint32_t>());
  const int64_t bytes = static_cast<int64_t>(list.size() * sizeof(uint32_t*));
  const Scratch table(bytes);
  copy_in(table.as<uint8_t>(), list.data(), bytes);
  launch("adamw", adamw_kernel_clear, static_cast<unsigned>((list.size() + 31) / 32), 32, 0, table.as<uint32_t*>(),
         static_cast<int>(list.size()), clip);
}

}  // namespace

void adamw(const adamw_args& args) {
  generic::Call call = generic::call_of("adamw", args, args.v, args.amax, args.v_floor != 0);
  clear_largest(args.amax, call.shared.clip);
  for (size_t i = 0; i < args.p.size(); ++i) call.taken.push_back(is_expanded_case(args, i));
  const AdamW rule(args);
  generic::run_plain(rule, call);
  generic::run_runs(rule, call);
  generic::run_expanded(rule, call);
  adamw_expanded(args);
}

}  // namespace coat::cuda
