// embedding: rows by id, and the gradient summed id by id in the order of the tokens, after a stable sort.
#include <cub/device/device_radix_sort.cuh>

#include "../ops.h"
#include "device.cuh"

namespace coat::cuda {
namespace {

// One thread a piece of `width` (16 or 1) elements of a row of y. Moves sizeof(w) + sizeof(y) bytes an element.
template <class W, class Y>
__global__ void embedding_forward_kernel(const int32_t* ids, W w, Y y, int64_t M, int64_t N, int64_t V, bool whole,
                                         Status* status) {
  const int64_t width = whole ? 16 : 1, pieces = N / width;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < M * pieces; t += stride) {
    const int64_t m = t / pieces, n = (t - m * pieces) * width, id = ids[m];
    const bool good = id >= 0 && id < V;
    if (!good && n == 0) report(status, kBadId, m, id, V);
    if (whole) {
      float x[16] = {};
      if (good) load16(w, id * N + n, w.open(0), x);
      store16(y, m * N + n, {}, x);
    } else {
      y.store(m * N + n, {}, good ? w.load(id * N + n, w.open(0)) : 0.f);
    }
  }
}

// One thread a token: its id as key, V for a bad one, which sorts behind all others.
__global__ void embedding_backward_kernel_keys(const int32_t* ids, uint32_t* keys, int32_t* order, int64_t M, int64_t V,
                                               Status* status) {
  const int64_t m = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (m >= M) return;
  const int64_t id = ids[m];
  const bool good = id >= 0 && id < V;
  if (!good) report(status, kBadId, m, id, V);
  keys[m] = static_cast<uint32_t>(good ? id : V);
  order[m] = static_cast<int32_t>(m);
}

__device__ int64_t first_at_least(const uint32_t* keys, int64_t M, uint32_t key) {
  int64_t low = 0, high = M;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < key)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// One block an id, one thread 16 columns (or one): adds the rows of its tokens in ascending order, in FP32.
template <class DY, class DW>
__global__ void embedding_backward_kernel(const uint32_t* keys, const int32_t* order, DY dy, DW dw, int64_t M,
                                          int64_t N, bool whole) {
  const int64_t v = blockIdx.x;
  __shared__ int64_t range[2];
  if (threadIdx.x < 2) range[threadIdx.x] = first_at_least(keys, M, static_cast<uint32_t>(v + threadIdx.x));
  __syncthreads();
  const int64_t width = whole ? 16 : 1;
  for (int64_t n = threadIdx.x * width; n < N; n += blockDim.x * width) {
    float sum[16] = {};
    for (int64_t i = range[0]; i < range[1]; ++i) {
      const int64_t at = int64_t{order[i]} * N + n;
      if (whole) {
        float x[16];
        load16(dy, at, dy.open(0), x);
#pragma unroll
        for (int k = 0; k < 16; ++k) sum[k] += x[k];
      } else {
        sum[0] += dy.load(at, dy.open(0));
      }
    }
    if (whole)
      store16(dw, v * N + n, {}, sum);
    else
      dw.store(v * N + n, {}, sum[0]);
  }
}

}  // namespace

void embedding_forward(const embedding_forward_args& args) {
  const int64_t M = args.y.shape.rows(), N = args.y.shape.cols(), V = args.w.shape.rows();
  const bool whole = N % 16 == 0;
  const int64_t work = M * (whole ? N / 16 : N);
  with("w", args.w, Views<F32, BF16>{}, [&](const auto w) {
    with("y", args.y, Views<F32, BF16>{}, [&](const auto y) {
      launch("embedding_forward",
             embedding_forward_kernel<std::remove_const_t<decltype(w)>, std::remove_const_t<decltype(y)>>,
             blocks_for(work, 256), 256, 0, args.ids.as<int32_t>(), w, y, M, N, V, whole, args.ids.status);
    });
  });
}

void embedding_backward(const embedding_backward_args& args) {
  const int64_t M = args.dy.shape.rows(), N = args.dy.shape.cols(), V = args.V;
  if (M > INT32_MAX) fail("shape", "ids", "ids has ", M, " elements and must have at most ", INT32_MAX, " on cuda");
  if (V >= int64_t{1} << 31) fail("value", "V", "V is ", V, " and must be below 2^31");
  const bool whole = N % 16 == 0;
  Scratch keys(M * 4), sorted(M * 4), order(M * 4), tokens(M * 4);
  if (M > 0) {
    launch("embedding_backward", embedding_backward_kernel_keys, static_cast<unsigned>((M + 255) / 256), 256, 0,
           args.ids.as<int32_t>(), keys.as<uint32_t>(), order.as<int32_t>(), M, V, args.ids.status);
    int bits = 1;
    while (bits < 32 && (V >> bits) != 0) ++bits;
    size_t bytes = 0;
    check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys.as<uint32_t>(), sorted.as<uint32_t>(),
                                          order.as<int32_t>(), tokens.as<int32_t>(), M, 0, bits, stream()),
          "embedding_backward");
    Scratch room(static_cast<int64_t>(bytes));
    check(cub::DeviceRadixSort::SortPairs(room.as<void>(), bytes, keys.as<uint32_t>(), sorted.as<uint32_t>(),
                                          order.as<int32_t>(), tokens.as<int32_t>(), M, 0, bits, stream()),
          "embedding_backward");
  }
  const int64_t pieces = whole ? N / 16 : N;
  const unsigned threads =
      static_cast<unsigned>(std::min<int64_t>(256, std::max<int64_t>(32, (pieces + 31) / 32 * 32)));
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("dw", args.dw, Views<F32, BF16>{}, [&](const auto dw) {
      launch("embedding_backward",
             embedding_backward_kernel<std::remove_const_t<decltype(dy)>, std::remove_const_t<decltype(dw)>>,
             static_cast<unsigned>(V), threads, 0, sorted.as<uint32_t>(), tokens.as<int32_t>(), dy, dw, M, N, whole);
    });
  });
}

}  // namespace coat::cuda
