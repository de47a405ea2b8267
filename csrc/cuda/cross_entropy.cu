// cross_entropy: log-sum-exp and loss a row a block; the sum over rows in FP64, in one block.
#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

constexpr int kForwardThreads = 256, kBackwardThreads = 256;
constexpr int kForwardBlocks = 4, kBackwardBlocks = 5;  // a multiprocessor: what registers are left for
// What a thread asks for before it computes: pieces of bf16 (f32 fills the registers with fewer); vectors.
constexpr int kForwardAhead = 4, kBackwardAhead = 4;

__device__ bool good_target(int64_t target, int64_t ignore, int64_t m, int64_t V, Status* status) {
  if (target == ignore) return false;
  if (target >= 0 && target < V) return true;
  if (threadIdx.x == 0) report(status, kBadTarget, m, target, V);
  return false;
}

// The larger of two f32, or of two pairs of bf16; NaN wins.
template <class Code>
__device__ inline uint32_t larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(Code) == 2) {
    uint32_t pair;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
  } else {
    float one;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(one) : "f"(float_of(a)), "f"(float_of(b)));
    return bits_of(one);
  }
}
// x in every element of such a word.
template <class Code>
__device__ inline uint32_t word_of(float x) {
  return sizeof(Code) == 2 ? bits_of(x) | bits_of(x) >> 16 : bits_of(x);
}

// Values of codes, one instruction each. Element 2 i of a pair is the low half.
template <class Code, int E>
__device__ inline void unpack(const Lane<Code, E>& lane, float (&x)[E]) {
#pragma unroll
  for (int k = 0; k < E; ++k) {
    if constexpr (sizeof(Code) == 2)
      x[k] = float_of(k % 2 == 0 ? lane.word[k / 2] << 16 : lane.word[k / 2] & 0xffff0000u);
    else
      x[k] = lane.code[k].code;
  }
}

// A code of floats that grows with them, NaN on top, and back.
__device__ inline uint32_t rank_of(float x) {
  const uint32_t bits = bits_of(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float of_rank(uint32_t rank) { return float_of(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank); }

// Sum of the thread's terms, piece by piece, of a row that begins at `row`; with Find also the largest element: those
// sums have reference 0. Whole says that pieces are full and aligned.
template <bool Find, bool Whole, class Logits>
__device__ inline double add_terms(const Logits& logits, int64_t row, int64_t V, float reference, uint32_t& top) {
  using Code = CodeOf<Logits>;
  constexpr int U = !Find ? 1 : sizeof(Code) == 2 ? kForwardAhead : (kForwardAhead + 3) / 4;
  const int64_t pieces = (V + kPiece - 1) / kPiece;
  double sum = 0;
  for (int64_t first = threadIdx.x; first < pieces; first += kForwardThreads * U) {
    Lane<Code, kPiece> lane[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t v = (first + u * kForwardThreads) * kPiece;
      if (v < V) lane[u].template fetch<Whole>(logits.codes, row + v, V - v);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t v = (first + u * kForwardThreads) * kPiece;
      if (v >= V) continue;
      if constexpr (!Whole) {
#pragma unroll
        for (int k = 0; k < kPiece; ++k)
          if (k >= V - v) lane[u].code[k].code = Code::encode(-kInf);
      }
      if constexpr (Find) {
        const uint32_t low = word_of<Code>(kSoftmaxLow);
#pragma unroll
        for (uint32_t& word : lane[u].word) {
          top = larger<Code>(top, word);
          word = larger<Code>(word, low);
        }
      }
      float x[kPiece];
      unpack(lane[u], x);
#pragma unroll
      for (int k = 0; k < kPiece; ++k) x[k] = Find ? softmax_exp_(x[k]) : softmax_term(x[k], reference);
      sum += sum_piece(x);
    }
  }
  return sum;
}

// One block a row, which is read once unless its largest element lies out of range. Moves sizeof(logit) bytes an
// element.
template <class Logits, bool Whole>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks)
    cross_entropy_forward_kernel(Logits logits, const int32_t* targets, float* lse, double* losses, int64_t M,
                                 int64_t V, int64_t ignore, Status* status) {
  using Code = CodeOf<Logits>;
  constexpr int kWarps = kForwardThreads / 32;
  __shared__ double sums[kWarps];
  __shared__ uint32_t ranks[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
    const int64_t row = m * V, target = targets[m];
    uint32_t tops = word_of<Code>(-kInf);
    double sum = warp_sum(add_terms<true, Whole>(logits, row, V, 0.f, tops));
    const bool counts = good_target(target, ignore, m, V, status);
    const float hit = counts && threadIdx.x == 0 ? logits.load(row + target, {}) : 0.f;
    const uint32_t odd = rank_of(float_of(sizeof(Code) == 2 ? tops & 0xffff0000u : tops));
    const uint32_t even = sizeof(Code) == 2 ? rank_of(float_of(tops << 16)) : odd;
    const uint32_t mine = warp_max(max(odd, even));
    if (lane == 0) {
      sums[warp] = sum;
      ranks[warp] = mine;
    }
    __syncthreads();
    const float top = of_rank(warp_max(lane < kWarps ? ranks[lane] : 0u));
    const float reference = softmax_reference(top);
    if (reference != 0.f && abs_(top) < kInf) {
      sum = warp_sum(add_terms<false, Whole>(logits, row, V, reference, tops));
      if (lane == 0) sums[warp] = sum;
      __syncthreads();
    }
    if (warp == 0) {
      sum = warp_sum(lane < kWarps ? sums[lane] : 0.0);
      if (lane == 0) {
        const float level = softmax_lse(top, sum);
        lse[m] = level;
        losses[m] = counts ? static_cast<double>(level) - static_cast<double>(hit) : 0.0;
      }
    }
    __syncthreads();
  }
}

// One block: thread i adds rows i, i + 1024, …; then the block's tree.
__global__ void cross_entropy_forward_kernel_sum(const double* losses, float* loss, int64_t M, const float* weight) {
  double sum = 0;
#pragma unroll 8
  for (int64_t m = threadIdx.x; m < M; m += 1024) sum += losses[m];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *loss = static_cast<float>(sum * static_cast<double>(*weight));
}

// One block a row; an ignored row is not read. Moves sizeof(logit) + sizeof(dx) bytes an element.
template <class Logits, class DX, bool Whole>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    cross_entropy_backward_kernel(const float* dloss, Logits logits, const int32_t* targets, const float* lse, DX dx,
                                  int64_t M, int64_t V, int64_t ignore, const float* weight, Status* status) {
  using In = CodeOf<Logits>;
  using Out = CodeOf<DX>;
  constexpr int E = kLane<In, Out>, U = kBackwardAhead;
  const float factor = *dloss * *weight;
  for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
    const int64_t row = m * V, target = targets[m];
    const bool counts = good_target(target, ignore, m, V, status);
    const float level = lse[m];
    for (int64_t first = int64_t{threadIdx.x} * E; first < V; first += kBackwardThreads * E * U) {
      Lane<In, E> in[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t v = first + u * kBackwardThreads * E;
        if (counts && v < V) in[u].template fetch<Whole>(logits.codes, row + v, V - v);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t v = first + u * kBackwardThreads * E;
        if (v >= V) continue;
        float x[E] = {};
        if (counts) {
          unpack(in[u], x);
#pragma unroll
          for (int k = 0; k < E; ++k) x[k] = softmax_(x[k], level);
          if (v <= target && target < v + E) {
#pragma unroll
            for (int k = 0; k < E; ++k)
              if (v + k == target) x[k] -= 1.f;
          }
#pragma unroll
          for (int k = 0; k < E; ++k) x[k] *= factor;
        }
        Lane<Out, E> out;
        out.encode(dx, {}, x);
        out.template put<Whole>(dx.codes, row + v, V - v);
      }
    }
  }
}

unsigned blocks_of(int64_t M) { return static_cast<unsigned>(std::min<int64_t>(M, 1 << 20)); }

}  // namespace

void cross_entropy_forward(const cross_entropy_forward_args& args) {
  const int64_t M = args.logits.shape.rows(), V = args.logits.shape.cols();
  Scratch losses(M * static_cast<int64_t>(sizeof(double)));
  with("logits", args.logits, Views<F32, BF16>{}, [&](const auto logits) {
    using Logits = std::remove_const_t<decltype(logits)>;
    launch("cross_entropy_forward",
           V % kPiece == 0 ? cross_entropy_forward_kernel<Logits, true> : cross_entropy_forward_kernel<Logits, false>,
           blocks_of(M), kForwardThreads, 0, logits, args.targets.as<int32_t>(), args.lse.as<float>(),
           losses.as<double>(), M, V, args.ignore, args.logits.status);
  });
  launch("cross_entropy_forward", cross_entropy_forward_kernel_sum, 1, 1024, 0, losses.as<double>(),
         args.loss.as<float>(), M, args.weight.as<float>());
}

void cross_entropy_backward(const cross_entropy_backward_args& args) {
  const int64_t M = args.logits.shape.rows(), V = args.logits.shape.cols();
  with("logits", args.logits, Views<F32, BF16>{}, [&](const auto logits) {
    with("dx", args.dx, Views<F32, BF16>{}, [&](const auto dx) {
      using Logits = std::remove_const_t<decltype(logits)>;
      using DX = std::remove_const_t<decltype(dx)>;
      const bool whole = V % kLane<CodeOf<Logits>, CodeOf<DX>> == 0;
      launch("cross_entropy_backward",
             whole ? cross_entropy_backward_kernel<Logits, DX, true> : cross_entropy_backward_kernel<Logits, DX, false>,
             blocks_of(M), kBackwardThreads, 0, args.dloss.as<float>(), logits, args.targets.as<int32_t>(),
             args.lse.as<float>(), dx, M, V, args.ignore, args.weight.as<float>(), args.logits.status);
    });
  });
}

}  // namespace coat::cuda
