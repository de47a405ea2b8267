// grad_norm: norms of a list of gradients, the clip factor and whether the step must be skipped.
#include <vector>

#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

constexpr int64_t kChunk = 16384;

// One gradient of the list: its chunks are those of the list from first_chunk on.
struct Gradient {
  const uint8_t* data;
  int64_t n, first_chunk, chunks;
  bool narrow;  // bf16
};

// Sum of squares of the thread's share of [begin, end), in FP64. The square of an f32 value is exact there, so a fused
// step rounds as a product and a sum do.
template <class Code>
__device__ double squares_of(const Code* codes, int64_t begin, int64_t end) {
  constexpr int E = kLane<Code>, U = 4;
  double sum[U] = {};
  __builtin_assume(__isGlobal(codes));  // the pointer comes out of memory
  by_case(end - begin == kChunk, [&](auto whole) {
#pragma unroll 1
    for (int64_t start = begin; start < end; start += kThreads * U * E) {
      Lane<Code, E> lane[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = start + (u * kThreads + threadIdx.x) * E;
        lane[u].template fetch<whole.value>(codes, i, end - i);
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int k = 0; k < E; ++k) {
          const double x = static_cast<double>(Code::decode(lane[u].code[k].code));
          sum[u] = __fma_rn(x, x, sum[u]);
        }
    }
  });
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// One block a chunk of a gradient of the list. Reads each gradient once; 8 bytes written a chunk.
__global__ void __launch_bounds__(kThreads) grad_norm_kernel(const Gradient* list, int count, double* partial) {
  const Gradient g = owner_of(list, count, &Gradient::first_chunk, blockIdx.x);
  const int64_t begin = (blockIdx.x - g.first_chunk) * kChunk, end = min(g.n, begin + kChunk);
  const double sum = block_sum(g.narrow ? squares_of(reinterpret_cast<const BFloat16*>(g.data), begin, end)
                                        : squares_of(reinterpret_cast<const Float32*>(g.data), begin, end));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block a gradient adds its chunks.
__global__ void __launch_bounds__(kThreads)
    grad_norm_kernel_norms(const Gradient* list, const double* partial, double* squares, float* norms) {
  const Gradient g = list[blockIdx.x];
  double sum = 0;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < g.chunks; c += kThreads) sum += partial[g.first_chunk + c];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  squares[blockIdx.x] = sum;
  norms[blockIdx.x] = static_cast<float>(sqrt(sum));
}

// One block: the norm of all and the clip. Squares of f32 values do not overflow FP64: not finite means a value was
// not.
__global__ void __launch_bounds__(kThreads)
    grad_norm_kernel_clip(const double* squares, int count, double limit, float* norm, float* clip) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += squares[i];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  const double all = sqrt(sum);
  norm[0] = static_cast<float>(all);
  clip[0] = limit > 0 && all > limit ? static_cast<float>(limit / all) : 1.f;
  clip[1] = isfinite(all) ? 0.f : 1.f;
}

}  // namespace

void grad_norm(const grad_norm_args& args) {
  const int count = static_cast<int>(args.g.size());
  std::vector<Gradient> list;
  int64_t chunks = 0;
  for (const Tensor& g : args.g) {
    const int64_t n = g.shape.numel(), own = (n + kChunk - 1) / kChunk;
    list.push_back({g.data, n, chunks, own, g.format.dtype == DType::bf16});
    chunks += own;
  }
  const int64_t bytes = count * static_cast<int64_t>(sizeof(Gradient));
  const Scratch table(bytes), sums((chunks + count) * static_cast<int64_t>(sizeof(double)));
  copy_in(table.as<uint8_t>(), list.data(), bytes);
  double *partial = sums.as<double>(), *squares = partial + chunks;
  launch("grad_norm", grad_norm_kernel, static_cast<unsigned>(chunks), kThreads, 0, table.as<Gradient>(), count,
         partial);
  launch("grad_norm", grad_norm_kernel_norms, static_cast<unsigned>(count), kThreads, 0, table.as<Gradient>(), partial,
         squares, args.norms.as<float>());
  launch("grad_norm", grad_norm_kernel_clip, 1, kThreads, 0, squares, count, static_cast<double>(args.max_norm),
         args.norm.as<float>(), args.clip.as<float>());
}

}  // namespace coat::cuda
