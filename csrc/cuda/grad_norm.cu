// grad_norm: norms of a list of gradients, the clip factor and whether the step must be skipped.
#include <vector>

#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

constexpr int64_t kChunk = 16384;                 // elements, or a multiple of it where there are many chunks
constexpr int64_t kManyChunks = 2048;             // one block adds them
constexpr int kAhead = 8;                         // vectors of 16 bytes of a thread in flight
constexpr int kMembers = 100;                     // gradients that a launch takes
constexpr int kWarps = kThreads / 32, kSums = 8;  // of the block that adds the chunks; sums of a thread in flight

// One gradient of the list: its chunks end where those of the next begin.
struct Gradient {
  const uint8_t* data;
  int64_t n, first_chunk;
  DType type;
};
// They travel as an argument of the kernel, so no copy to the device goes before it.
struct Gradients {
  int64_t chunk;
  int count;
  Gradient member[kMembers + 1];  // and one more, where the last one's chunks end
};

// The scale behind the codes of e4m3/t.
__device__ inline const float* scale_of(const Gradient& g) {
  return reinterpret_cast<const float*>(g.data + (g.n + 15) / 16 * 16);
}

// Sum of squares of the thread's share of [begin, end): pieces of 16 elements in FP32, added in FP64.
template <class Code>
__device__ double squares_of(const Code* codes, float scale, int64_t begin, int64_t end) {
  __builtin_assume(__isGlobal(codes));  // the pointer comes out of memory
  double sum = 0;
  by_case((end - begin) % kChunk == 0, [&](auto whole) {
    using Piece = Lane<Code, kPiece>;
    constexpr int kMost = static_cast<int>(kChunk) / (kThreads * kPiece);
    constexpr int U = whole.value ? (kAhead / Piece::kVectors < kMost ? kAhead / Piece::kVectors : kMost) : 1;
    static_assert(kChunk % (kThreads * U * kPiece) == 0);
#pragma unroll 1
    for (int64_t start = begin; start < end; start += kThreads * U * kPiece) {
      Piece piece[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = start + (u * kThreads + threadIdx.x) * kPiece;
        piece[u].template fetch<whole.value>(codes, i, end - i);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        float x[kPiece];
#pragma unroll
        for (int k = 0; k < kPiece; ++k) x[k] = Code::decode(piece[u].code[k].code) * scale;
        sum += square_piece(x);
      }
    }
  });
  return sum;
}

// What the blocks of a launch give: norms of its gradients, and of all so far. `warps` warps add a gradient's chunks.
struct Given {
  double limit;
  bool go_on;  // from the *total of an earlier launch
  int warps;
  double *partial, *total;
  float *norms, *norm, *clip;
  uint32_t* counter;
};

// The norms from the sums of the chunks, as many gradients at a time as there are warps for; then the norm of all so
// far and the clip. Squares of f32 values do not overflow FP64: not finite means a value was not.
__device__ inline void finish(const Gradients& list, const Given& given) {
  __shared__ double sums[kWarps];
  const int warps = given.warps, warp = threadIdx.x / 32, share = threadIdx.x % (warps * 32), step = warps * 32;
  double all = given.go_on && threadIdx.x == 0 ? *given.total : 0;
  for (int first = 0; first < list.count; first += kWarps / warps) {
    const int i = first + warp / warps;
    double sum = 0;
    if (i < list.count) {
      const int64_t end = list.member[i + 1].first_chunk;
      for (int64_t c = list.member[i].first_chunk + share; c < end; c += kSums * step) {
        double x[kSums];
#pragma unroll
        for (int k = 0; k < kSums; ++k) x[k] = c + k * step < end ? __ldcg(given.partial + c + k * step) : 0;
#pragma unroll
        for (int k = 0; k < kSums; ++k) sum += x[k];
      }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[warp] = sum;
    __syncthreads();
    if (share == 0 && i < list.count) {
      for (int w = 1; w < warps; ++w) sum += sums[warp + w];
      sums[warp] = sum;
      given.norms[i] = static_cast<float>(sqrt(sum));
    }
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 0; w < kWarps && first + w / warps < list.count; w += warps) all += sums[w];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  *given.total = all;
  const double root = sqrt(all);
  given.norm[0] = static_cast<float>(root);
  given.clip[0] = given.limit > 0 && root > given.limit ? static_cast<float>(given.limit / root) : 1.f;
  given.clip[1] = isfinite(root) ? 0.f : 1.f;
}

// One block a chunk; the last to end finishes. Reads each gradient once; 8 bytes written a chunk.
__global__ void __launch_bounds__(kThreads) grad_norm_kernel(const __grid_constant__ Gradients list, Given given) {
  if (blockIdx.x < list.member[list.count].first_chunk) {
    const Gradient g = owner_of(list.member, list.count, &Gradient::first_chunk, blockIdx.x);
    const int64_t begin = (blockIdx.x - g.first_chunk) * list.chunk, end = min(g.n, begin + list.chunk);
    double sum;
    if (g.type == DType::f32)
      sum = squares_of(reinterpret_cast<const Float32*>(g.data), 1.f, begin, end);
    else if (g.type == DType::bf16)
      sum = squares_of(reinterpret_cast<const BFloat16*>(g.data), 1.f, begin, end);
    else
      sum = squares_of(reinterpret_cast<const E4M3*>(g.data), *scale_of(g), begin, end);
    sum = block_sum(sum);
    if (threadIdx.x == 0) given.partial[blockIdx.x] = sum;
  }
  if (is_last(given.counter, gridDim.x)) finish(list, given);
}

int64_t chunks_of(int64_t n, int64_t chunk) { return (n + chunk - 1) / chunk; }

// Members [first, first + kMembers) of the list, as many as there are.
Gradients gradients_of(const std::vector<Tensor>& all, size_t first) {
  Gradients list{};
  list.count = static_cast<int>(std::min<size_t>(all.size() - first, kMembers));
  int64_t elements = 0, chunks = 0;
  for (int i = 0; i < list.count; ++i) elements += all[first + i].shape.numel();
  list.chunk = kChunk * std::max<int64_t>(chunks_of(elements, kChunk * kManyChunks), 1);
  for (int i = 0; i < list.count; ++i) {
    const Tensor& g = all[first + i];
    list.member[i] = {g.data, g.shape.numel(), chunks, g.format.dtype};
    chunks += chunks_of(g.shape.numel(), list.chunk);
  }
  list.member[list.count].first_chunk = chunks;
  return list;
}

}  // namespace

void grad_norm(const grad_norm_args& args) {
  const Scratch sums((kManyChunks + kMembers + 1) * static_cast<int64_t>(sizeof(double)));
  double *total = sums.as<double>(), *partial = total + 1;
  size_t first = 0;
  do {
    const Gradients list = gradients_of(args.g, first);
    int warps = kWarps;
    while (warps > 1 && kWarps / warps < list.count) warps /= 2;
    const Given given{static_cast<double>(args.max_norm),
                      first > 0,
                      warps,
                      partial,
                      total,
                      args.norms.as<float>() + first,
                      args.norm.as<float>(),
                      args.clip.as<float>(),
                      counters()};
    // without chunks there is still a norm
    const int64_t blocks = std::max<int64_t>(list.member[list.count].first_chunk, 1);
    launch("grad_norm", grad_norm_kernel, static_cast<unsigned>(blocks), kThreads, 0, list, given);
    first += list.count;
  } while (first < args.g.size());
}

}  // namespace coat::cuda
