// cross_entropy: log-sum-exp and loss a row a block; the sum over rows in FP64, in one block.
#include "../ops.h"
#include "device.cuh"

namespace coat::cuda {
namespace {

constexpr int kThreads = 512;

__device__ bool good_target(int64_t target, int64_t ignore, int64_t m, int64_t V, Status* status) {
  if (target == ignore) return false;
  if (target >= 0 && target < V) return true;
  if (threadIdx.x == 0) report(status, kBadTarget, m, target, V);
  return false;
}

// One block a row: the largest logit, then the sum of exponentials in FP64. The row is read twice, the second time from
// the cache. Moves sizeof(logit) bytes an element.
template <class Logits>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_forward_kernel(Logits logits, const int32_t* targets, float* lse, double* losses, int64_t M,
                                 int64_t V, int64_t ignore, bool whole, Status* status) {
  for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
    const int64_t row = m * V, width = whole ? 16 : 1;
    const auto open = logits.open(0);
    float top = -kInf;
    const auto each = [&](auto&& use) {
      for (int64_t v = threadIdx.x * width; v < V; v += kThreads * width) {
        if (whole) {
          float x[16];
          load16(logits, row + v, open, x);
#pragma unroll
          for (int k = 0; k < 16; ++k) use(x[k]);
        } else {
          use(logits.load(row + v, open));
        }
      }
    };
    each([&](float x) { top = x > top ? x : top; });
    // an order-preserving integer code of the float: larger floats have larger codes
    const uint32_t bits = bits_of(top);
    const uint32_t code = block_max(bits & 0x80000000u ? ~bits : bits | 0x80000000u);
    top = float_of(code & 0x80000000u ? code & 0x7fffffffu : ~code);
    const float reference = top > -kInf ? top : 0.f;
    double sum = 0;
    each([&](float x) { sum += static_cast<double>(exp_(x - reference)); });
    sum = block_sum(sum);
    if (threadIdx.x == 0) lse[m] = reference + kLn2 * log2_(static_cast<float>(sum));
    const int64_t target = targets[m];
    const bool counts = good_target(target, ignore, m, V, status);
    if (threadIdx.x == 0)
      losses[m] = counts ? static_cast<double>(reference + kLn2 * log2_(static_cast<float>(sum))) -
                               static_cast<double>(logits.load(row + target, open))
                         : 0.0;
    __syncthreads();
  }
}

// One block: thread i adds rows i, i + 1024, …; then the block's tree.
__global__ void cross_entropy_forward_kernel_sum(const double* losses, float* loss, int64_t M, float weight) {
  double sum = 0;
  for (int64_t m = threadIdx.x; m < M; m += blockDim.x) sum += losses[m];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *loss = static_cast<float>(sum * static_cast<double>(weight));
}

// One block a row. Moves twice sizeof(logit) bytes an element.
template <class Logits, class DX>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(const float* dloss, Logits logits, const int32_t* targets, const float* lse, DX dx,
                                  int64_t M, int64_t V, int64_t ignore, float weight, bool whole, Status* status) {
  const float factor = *dloss * weight;
  for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
    const int64_t row = m * V, target = targets[m], width = whole ? 16 : 1;
    const bool counts = good_target(target, ignore, m, V, status);
    const float level = lse[m];
    const auto gradient = [&](float x, int64_t v) {
      if (!counts) return 0.f;
      float g = exp_(x - level);
      if (v == target) g -= 1.f;
      return g * factor;
    };
    for (int64_t v = threadIdx.x * width; v < V; v += kThreads * width) {
      if (whole) {
        float x[16];
        load16(logits, row + v, logits.open(0), x);
#pragma unroll
        for (int k = 0; k < 16; ++k) x[k] = gradient(x[k], v + k);
        store16(dx, row + v, {}, x);
      } else {
        dx.store(row + v, {}, gradient(logits.load(row + v, logits.open(0)), v));
      }
    }
  }
}

}  // namespace

void cross_entropy_forward(const cross_entropy_forward_args& args) {
  const int64_t M = args.logits.shape.rows(), V = args.logits.shape.cols();
  Scratch losses(M * static_cast<int64_t>(sizeof(double)));
  with("logits", args.logits, Views<F32, BF16>{}, [&](const auto logits) {
    launch("cross_entropy_forward", cross_entropy_forward_kernel<std::remove_const_t<decltype(logits)>>,
           static_cast<unsigned>(std::min<int64_t>(M, 1 << 20)), kThreads, 0, logits, args.targets.as<int32_t>(),
           args.lse.as<float>(), losses.as<double>(), M, V, args.ignore, V % 16 == 0, args.logits.status);
  });
  launch("cross_entropy_forward", cross_entropy_forward_kernel_sum, 1, 1024, 0, losses.as<double>(),
         args.loss.as<float>(), M, args.weight);
}

void cross_entropy_backward(const cross_entropy_backward_args& args) {
  const int64_t M = args.logits.shape.rows(), V = args.logits.shape.cols();
  with("logits", args.logits, Views<F32, BF16>{}, [&](const auto logits) {
    with("dx", args.dx, Views<F32, BF16>{}, [&](const auto dx) {
      launch("cross_entropy_backward",
             cross_entropy_backward_kernel<std::remove_const_t<decltype(logits)>, std::remove_const_t<decltype(dx)>>,
             static_cast<unsigned>(std::min<int64_t>(M, 1 << 20)), kThreads, 0, args.dloss.as<float>(), logits,
             args.targets.as<int32_t>(), args.lse.as<float>(), dx, M, V, args.ignore, args.weight, V % 16 == 0,
             args.logits.status);
    });
  });
}

}  // namespace coat::cuda
