// attention, backward: what both kernels read of every query.
#pragma once
#include "tensor.cuh"

namespace coat::cuda {

// Of every query and head: its log-sum-exp as an exponent of 2, and delta = dout . out. [sequences, H, tiles, 2, 64]:
// 64 of the one, then 64 of the other. What is beyond T has an infinite log-sum-exp, which makes its probabilities
// zero.
constexpr int kStatisticsRows = 64;
struct Statistics {
  float* numbers;
  int tiles;
  __device__ float* of(const AttentionProblem& p, int sequence, int head, int tile) const {
    return numbers + ((int64_t{sequence} * p.H + head) * tiles + tile) * (2 * kStatisticsRows);
  }
};

}  // namespace coat::cuda
