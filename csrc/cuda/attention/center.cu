// attention_center on the device: keys less their mean over the sequence.
#include "attention.cuh"

namespace coat::cuda {
namespace {

constexpr int kColumns = 32;

// One block 32 columns of the keys of a sequence, one strand of rows a row of threads. Reads keys twice, the second
// time from the cache where they fit, and writes them once.
template <class V>
__global__ void __launch_bounds__(kColumns* kStrands)
    attention_center_kernel(V qkv, int64_t T, int64_t width, int64_t first, int64_t columns) {
  __shared__ float sums[kStrands][kColumns];
  const int64_t groups = (columns + kColumns - 1) / kColumns, column = blockIdx.x % groups * kColumns + threadIdx.x;
  const int64_t base = blockIdx.x / groups * T * width + first + column;
  if (column < columns) {
    float sum = 0.f;
    for (int64_t t = threadIdx.y; t < T; t += kStrands) sum += qkv.load(base + t * width, {});
    sums[threadIdx.y][threadIdx.x] = sum;
  }
  __syncthreads();
  if (column >= columns) return;
  float all[kStrands];
#pragma unroll
  for (int s = 0; s < kStrands; ++s) all[s] = sums[s][threadIdx.x];
  const float mean = mean_of_strands(all, T);
  for (int64_t t = threadIdx.y; t < T; t += kStrands)
    qkv.store(base + t * width, {}, qkv.load(base + t * width, {}) - mean);
}

}  // namespace

void attention_center(const attention_center_args& args) {
  const int64_t rows = args.qkv.shape.rows(), columns = args.J * args.D;
  check_heads(rows, args.T, args.H, args.J, 0);
  const int64_t blocks = rows / args.T * ((columns + kColumns - 1) / kColumns);
  if (blocks > INT32_MAX) fail("shape", "qkv", "qkv needs ", blocks, " blocks, and a grid has at most ", INT32_MAX);
  with("qkv", args.qkv, Views<F32, BF16>{}, [&](const auto qkv) {
    launch("attention_center", attention_center_kernel<std::remove_const_t<decltype(qkv)>>,
           dim3(static_cast<unsigned>(blocks)), dim3(kColumns, kStrands), 0, qkv, args.T, args.qkv.shape.cols(),
           args.H * args.D, columns);
  });
}

}  // namespace coat::cuda
