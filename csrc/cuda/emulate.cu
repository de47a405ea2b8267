// emulate: numbers of few bits held as f32, sums of them and updates, rounded after each operation.
#include "../emulate.h"

#include "../ops.h"
#include "device.cuh"

namespace coat::cuda {
namespace {

constexpr int kBlock = 256;

unsigned blocks_of(int64_t n) { return static_cast<unsigned>((n + kBlock - 1) / kBlock); }
__device__ int64_t thread() { return int64_t{blockIdx.x} * kBlock + threadIdx.x; }

// One element a thread.
__global__ void __launch_bounds__(kBlock) round_to_kernel(Arithmetic arithmetic, const float* x, float* y, int64_t n) {
  const int64_t i = thread();
  if (i < n)
    y[i] =
        copysign_(static_cast<float>(arithmetic.round_at(static_cast<double>(x[i]), static_cast<uint64_t>(i))), x[i]);
}

// One element of y a thread, in the order of the CPU.
__global__ void __launch_bounds__(kBlock)
    matmul_emulated_kernel(Arithmetic arithmetic, const float* a, const float* b, const float* bias, float* y,
                           int64_t M, int64_t N, int64_t K, int64_t chunk) {
  const int64_t i = thread();
  if (i >= M * N) return;
  const int64_t m = i / N, n = i % N;
  const float added[1] = {bias ? bias[n] : 0.f};
  float sum[1];
  emulated_sums(arithmetic, a + m * K, b + n * K, 1, K, chunk, added, static_cast<uint64_t>(i), sum);
  y[i] = sum[0];
}

// One element a thread.
__global__ void __launch_bounds__(kBlock) sgd_emulated_kernel(EmulatedSgd rule, float* p, float* m, const float* g,
                                                              const float* clip, int64_t member, int64_t n) {
  const int64_t i = thread();
  if (i >= n || (clip && clip[1] != 0.f)) return;
  rule.update(p[i], m[i], g[i], clip ? clip[0] : 1.f, member, i);
}

}  // namespace

void round_to(const round_to_args& args) {
  const int64_t n = args.x.shape.numel();
  launch("round_to", round_to_kernel, blocks_of(n), kBlock, 0, Arithmetic(args), args.x.as<float>(), args.y.as<float>(),
         n);
}

void matmul_emulated(const matmul_emulated_args& args) {
  check_chunk(args.chunk);
  const int64_t M = args.a.shape.rows(), K = args.a.shape.cols(), N = args.b.shape.rows();
  launch("matmul_emulated", matmul_emulated_kernel, blocks_of(M * N), kBlock, 0, Arithmetic(args), args.a.as<float>(),
         args.b.as<float>(), args.bias ? args.bias.as<float>() : nullptr, args.y.as<float>(), M, N, K, args.chunk);
}

void sgd_emulated(const sgd_emulated_args& args) {
  const EmulatedSgd rule(args);
  const float* clip = args.clip ? args.clip.as<float>() : nullptr;
  for (size_t member = 0; member < args.p.size(); ++member) {
    const int64_t n = args.p[member].shape.numel();
    launch("sgd_emulated", sgd_emulated_kernel, blocks_of(n), kBlock, 0, rule, args.p[member].as<float>(),
           args.m[member].as<float>(), args.g[member].as<float>(), clip, static_cast<int64_t>(member), n);
  }
}

}  // namespace coat::cuda
