// random: Philox numbers by (seed, index), the same on every device.
#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

using Wide = Views<F32, BF16>;

// One vector of 16 bytes a thread, one Philox block an element, which is what the time goes to. Writes y once.
template <class Y>
__global__ void __launch_bounds__(kThreads) random_normal_kernel(Y y, int64_t n, uint64_t seed, float mean, float std) {
  constexpr int E = kLane<CodeOf<Y>>;
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * E;
  float value[E];
#pragma unroll
  for (int k = 0; k < E; ++k) value[k] = fma_(Random(seed, static_cast<uint64_t>(i + k)).normal(), std, mean);
  Lane<CodeOf<Y>, E> out;
  out.encode(y, {}, value);
  out.template put<false>(y.codes, i, n - i);
}

// The same for low + range * uniform.
template <class Y>
__global__ void __launch_bounds__(kThreads)
    random_uniform_kernel(Y y, int64_t n, uint64_t seed, float low, float range) {
  constexpr int E = kLane<CodeOf<Y>>;
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * E;
  float value[E];
#pragma unroll
  for (int k = 0; k < E; ++k) value[k] = fma_(Random(seed, static_cast<uint64_t>(i + k)).uniform(0), range, low);
  Lane<CodeOf<Y>, E> out;
  out.encode(y, {}, value);
  out.template put<false>(y.codes, i, n - i);
}

template <class Y>
unsigned blocks_of(int64_t n) {
  constexpr int64_t kPerBlock = kThreads * kLane<CodeOf<Y>>;
  return static_cast<unsigned>((n + kPerBlock - 1) / kPerBlock);
}

}  // namespace

void random_normal(const random_normal_args& args) {
  const int64_t n = args.y.shape.numel();
  with("y", args.y, Wide{}, [&](const auto y) {
    using Y = std::remove_const_t<decltype(y)>;
    launch("random_normal", random_normal_kernel<Y>, blocks_of<Y>(n), kThreads, 0, y, n, args.seed, args.mean,
           args.std);
  });
}

void random_uniform(const random_uniform_args& args) {
  const int64_t n = args.y.shape.numel();
  with("y", args.y, Wide{}, [&](const auto y) {
    using Y = std::remove_const_t<decltype(y)>;
    launch("random_uniform", random_uniform_kernel<Y>, blocks_of<Y>(n), kThreads, 0, y, n, args.seed, args.low,
           args.high - args.low);
  });
}

}  // namespace coat::cuda
