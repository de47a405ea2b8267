// scaler: the largest magnitude of a tensor, the scale that follows from it, and the scale that a tensor carries.
#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

// Bits of |x| order as integers, with NaN above Inf: one integer maximum says all. 8 vectors of 16 bytes a thread;
// *largest starts at 0. Reads x once.
template <class X>
__global__ void __launch_bounds__(kThreads) amax_kernel(X x, Rows rows, uint32_t* largest) {
  const uint32_t most = largest_of<false>(x, rows);
  if (threadIdx.x == 0 && most > 0) atomicMax(largest, most);
}

// One thread.
template <class Code>
__global__ void scale_from_amax_kernel(const float* amax, float* scale, bool pow2) {
  const float exact = coat::scale_from_amax<Code>(*amax);
  *scale = pow2 ? power_not_below(exact) : exact;
}

// One thread.
__global__ void observe_amax_kernel(float* history, const float* amax) {
  if (*amax<kInf&& * amax> * history) *history = *amax;
}

// One warp. The history moves on from its end: what a lane reads, no lane has written.
template <class Code>
__global__ void scale_from_history_kernel(float* history, int64_t n, float* scale, bool recent, float headroom) {
  uint32_t most = 0;  // magnitudes order as their bits
  for (int64_t i = threadIdx.x; i < (recent ? 1 : n); i += 32) most = max(most, bits_of(history[i]));
  most = warp_max(most);
  const bool moves = history[0] != 0.f;
  __syncwarp();
  if (threadIdx.x == 0) *scale = delayed_scale<Code>(float_of(most), headroom, *scale);
  if (!moves) return;
  for (int64_t first = (n - 1) / 32 * 32; first >= 0; first -= 32) {
    const int64_t i = first + threadIdx.x;
    const float before = i > 0 && i < n ? history[i - 1] : 0.f;
    __syncwarp();
    if (i < n) history[i] = before;
    __syncwarp();
  }
}

}  // namespace

void amax(const amax_args& args) {
  uint32_t* y = args.y.as<uint32_t>();
  check(cudaMemsetAsync(y, 0, sizeof(uint32_t), stream()), "amax");
  with("x", args.x, Views<F32, BF16, F16T, E4M3T, E5M2T, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    const Rows rows = rows_of<X>(args.x);
    launch("amax", amax_kernel<X>, largest_blocks<X>(rows), kThreads, 0, x, rows, y);
  });
}

void scale_from_amax(const scale_from_amax_args& args) {
  const auto kernel = args.format == 0 ? scale_from_amax_kernel<E4M3> : scale_from_amax_kernel<E5M2>;
  launch("scale_from_amax", kernel, 1, 1, 0, args.amax.as<float>(), args.scale.as<float>(), args.rounding != 0);
}

void scale_of(const scale_of_args& args) {
  check(cudaMemcpyAsync(args.y.data, args.x.scales<float>(), sizeof(float), cudaMemcpyDeviceToDevice, stream()),
        "scale_of");
}

void observe_amax(const observe_amax_args& args) {
  launch("observe_amax", observe_amax_kernel, 1, 1, 0, args.history.as<float>(), args.amax.as<float>());
}

void scale_from_history(const scale_from_history_args& args) {
  const auto kernel = args.format == 0 ? scale_from_history_kernel<E4M3> : scale_from_history_kernel<E5M2>;
  launch("scale_from_history", kernel, 1, 32, 0, args.history.as<float>(), args.history.shape.numel(),
         args.scale.as<float>(), args.pick != 0, args.headroom);
}

}  // namespace coat::cuda
