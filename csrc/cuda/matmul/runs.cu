// Products of two e4m3 operands with a scale a run of 128 along K.
#include "start.cuh"

namespace coat::cuda {
namespace {

constexpr int kSide = 32;

// Scales [N, steps] to [steps, width]; columns from N on get 0. One block a tile of 32 x 32, 8 rows at a time.
__global__ void __launch_bounds__(kSide * 8)
    matmul_kernel_turned(const float* from, float* to, int64_t N, int64_t steps, int64_t width) {
  __shared__ float tile[kSide][kSide + 1];
  const int64_t n0 = int64_t{blockIdx.x} * kSide, k0 = int64_t{blockIdx.y} * kSide;
  const int x = threadIdx.x % kSide;
  for (int y = threadIdx.x / kSide; y < kSide; y += 8)
    tile[y][x] = n0 + y < N && k0 + x < steps ? from[(n0 + y) * steps + k0 + x] : 0.f;
  __syncthreads();
  for (int y = threadIdx.x / kSide; y < kSide; y += 8)
    if (k0 + y < steps) to[(k0 + y) * width + n0 + x] = tile[x][y];
}

}  // namespace

void multiply_runs_by_runs(const Call& call) {
  const int64_t steps = (call.K + 127) / 128, width = (call.N + 127) / 128 * 128;
  const Scratch turned(steps * width * static_cast<int64_t>(sizeof(float)));
  const dim3 tiles(static_cast<unsigned>(width / kSide), static_cast<unsigned>((steps + kSide - 1) / kSide));
  launch(call.name, matmul_kernel_turned, tiles, kSide * 8, 0, call.b.scales<float>(), turned.as<float>(), call.N,
         steps, width);
  const RunsByRuns scales{call.a.scales<float>(), turned.as<float>(), steps, width};
  multiply<E4M3, E4M3, true, true>(call, Views<F32, BF16, E4M3G16>{}, scales);
}

}  // namespace coat::cuda
