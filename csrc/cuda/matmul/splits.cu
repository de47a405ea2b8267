// y from sums of parts of K: where y has too few tiles for the device, several blocks share a tile.
#include "products.cuh"

namespace coat::cuda {
namespace {

constexpr int kThreads = 128;

// Four columns of a row a thread, parts added in ascending order. Bytes per element of y: 4 splits read.
template <class Y>
__global__ void __launch_bounds__(kThreads)
    matmul_kernel_splits(const Result p, const Y y, const float* parts, int splits, int64_t apart) {
  after_previous();
  const float scale = p.scale();
  uint32_t most = 0;
  const int64_t quads = (p.N + 15) / 16 * 4, end = (p.M * quads + 31) / 32 * 32;  // whole warps
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end; i += int64_t{gridDim.x} * kThreads) {
    const int64_t m = i / quads, n = i % quads * 4;
    float x[4] = {};
    if (m < p.M && n < p.N) {
      const float* from = parts + m * splits * apart + n;
#pragma unroll 4
      for (int s = 0; s < splits; ++s) {
        const float4 part = *reinterpret_cast<const float4*>(from + s * apart);
        x[0] += part.x;
        x[1] += part.y;
        x[2] += part.z;
        x[3] += part.w;
      }
    }
    most = max(most, finish(p, y, scale, m, n, x));
  }
  p.keep_amax<Y>(most);
}

}  // namespace

void add_splits(const Call& call, const float* parts, int splits, int64_t apart) {
  const unsigned blocks = blocks_for(call.M * ((call.N + 15) / 16 * 4), kThreads);
  with("y", call.y, Views<F32, BF16, E4M3G16>{}, [&](const auto view) {
    using V = std::remove_const_t<decltype(view)>;
    launch_next(call.name, matmul_kernel_splits<V>, blocks, kThreads, 0, call.result(), view, parts, splits, apart);
  });
}

}  // namespace coat::cuda
