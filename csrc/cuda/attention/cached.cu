// attention: new rows of one sequence against the keys and values of all rows so far. For generation, a row or a prompt
// at a time; no gradient.
#include "../../contract.h"
#include "../../ops.h"
#include "../device.cuh"

namespace coat::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Cached {
  int64_t H, J, D, group, width, row, first, window;  // width, row: elements of a row of qkv and of the cache
  float scale;
};

// k and v of a row lie in qkv as they do in the cache. Moves them once in and once out.
template <class V>
__global__ void attention_cached_kernel_store(V qkv, V cache, int64_t rows, Cached s) {
  const int64_t count = rows * s.row, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t m = i / s.row;
    cache.codes[s.first * s.row + i] = qkv.codes[m * s.width + s.H * s.D + (i - m * s.row)];
  }
}

// A block: one head of one row; a warp: every kWarps-th key with a running maximum, its lanes the elements of the head,
// which the warps join at the end in their order. Scores are exponents of 2. Reads keys and values of a head once.
template <class V>
__global__ __launch_bounds__(kThreads) void attention_cached_kernel(V qkv, V cache, V out, Cached s) {
  extern __shared__ float shared[];
  const int D = static_cast<int>(s.D), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float *q = shared, *sum = shared + D * (1 + warp), *tops = shared + D * (1 + kWarps), *totals = tops + kWarps;
  const int64_t m = blockIdx.x / s.H, h = blockIdx.x - m * s.H, column = h / s.group * s.D;
  for (int d = threadIdx.x; d < D; d += kThreads) q[d] = qkv.load(m * s.width + h * s.D + d, {}) * s.scale;
  for (int d = lane; d < D; d += 32) sum[d] = 0.f;
  __syncthreads();
  const int64_t end = s.first + m + 1, begin = s.window > 0 && end > s.window ? end - s.window : 0;
  float top = -kInf, total = 0.f;
  for (int64_t t = begin + warp; t < end; t += kWarps) {
    const int64_t key = t * s.row + column, value = key + s.J * s.D;
    float score = 0.f;
    for (int d = lane; d < D; d += 32) score = fmaf(q[d], cache.load(key + d, {}), score);
    score = warp_sum(score);
    const float most = score > top || score != score ? score : top;
    const float shrink = exp2_(top - most), p = exp2_(score - most);
    for (int d = lane; d < D; d += 32) sum[d] = fmaf(sum[d], shrink, p * cache.load(value + d, {}));
    total = fmaf(total, shrink, p);
    top = most;
  }
  if (lane == 0) {
    tops[warp] = top;
    totals[warp] = total;
  }
  __syncthreads();
  float most = tops[0], all = 0.f;
  for (int w = 1; w < kWarps; ++w) most = tops[w] > most || tops[w] != tops[w] ? tops[w] : most;
  for (int w = 0; w < kWarps; ++w) all = fmaf(totals[w], exp2_(tops[w] - most), all);
  for (int d = threadIdx.x; d < D; d += kThreads) {
    float x = 0.f;
    for (int w = 0; w < kWarps; ++w) x = fmaf(shared[D * (1 + w) + d], exp2_(tops[w] - most), x);
    out.store((m * s.H + h) * s.D + d, {}, x / all);
  }
}

}  // namespace

void attention_cached(const attention_cached_args& args) {
  const int64_t M = args.qkv.shape.rows(), H = args.H, J = args.J, D = args.D;
  check_cached(M, args.cache.shape.rows(), H, J, args.first, args.window);
  if (D > 1024) fail("value", "D", "D is ", D, " and must be at most 1024 on cuda");
  if (M * H > INT32_MAX) fail("shape", "qkv", "M * H is ", M * H, " and must be at most ", INT32_MAX);
  const Cached s{
      H, J, D, H / J, args.qkv.shape.cols(), args.cache.shape.cols(), args.first, args.window, args.scale * kLog2E};
  with("qkv", args.qkv, Views<F32, BF16>{}, [&](const auto qkv) {
    using V = std::remove_const_t<decltype(qkv)>;
    const V cache(args.cache), out(args.out);
    launch("attention_cached", attention_cached_kernel_store<V>, dim3(blocks_for(M * s.row, kThreads)), dim3(kThreads),
           0, qkv, cache, M, s);
    launch("attention_cached", attention_cached_kernel<V>, dim3(static_cast<unsigned>(M * H)), dim3(kThreads),
           static_cast<size_t>(D * (1 + kWarps) + 2 * kWarps) * sizeof(float), qkv, cache, out, s);
  });
}

}  // namespace coat::cuda
