// What the sums of 128 FP8 products are multiplied by before they are added: nothing, or the scales of runs and blocks.
#pragma once
#include "../hopper.cuh"
#include "result.cuh"

namespace coat::cuda {

// Scales of whole tensors wait for the end. Of<Halves> belongs to a thread, which has two rows, 8 apart, and in every
// half, 128 columns, 64 elements in the order of Finish.
struct NoScales {
  static constexpr bool kPromotes = true;  // FP8 sums leave the tensor cores every 128 of K
  static constexpr bool kOfRuns = false;   // of both operands, for which a tile of one half leaves registers
  template <int Halves>
  struct Of {
    __device__ Of(const NoScales&, const Result&, int64_t, int64_t, int) {}
    __device__ void fetch(const NoScales&) {}
    __device__ void add(float* sums, const float (&part)[64], int) const {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[i] += part[i];
    }
  };
};

// Where FP8 sums stay in the tensor cores.
struct Unpromoted : NoScales {
  static constexpr bool kPromotes = false;
};

// The scales of a thread's two rows of an operand with runs of 128 along K, step by step. Rows outside of y have those
// of another.
struct RowScales {
  const float* at;
  bool two;  // both rows lie in y
  float scale[2];
  __device__ RowScales(const float* scales, int64_t steps, int64_t M, int64_t row, int first) {
    at = scales + min(row, M - 1) * steps + first;
    two = row + 8 < M;
  }
  __device__ void fetch(int64_t steps) {
    scale[0] = load_now(at);
    scale[1] = load_now(two ? at + 8 * steps : at);
    ++at;
  }
};

// a in runs of 128 along K, b in blocks of 128 x 128. fetch() stands before the products that hide its latency, and
// reads what the first cache has in 7 of 8 steps.
struct RunsByBlocks {
  static constexpr bool kPromotes = true, kOfRuns = false;
  const float *a, *b;
  int64_t steps;  // along K, each a run and a block
  template <int Halves>
  struct Of {
    RowScales rows;
    const float* block;
    bool all;  // every half begins in y
    float scale[Halves];
    __device__ Of(const RunsByBlocks& s, const Result& p, int64_t row, int64_t n, int first)
        : rows(s.a, s.steps, p.M, row, first) {
      block = s.b + n / 128 * s.steps + first;
      all = n + 128 * (Halves - 1) < p.N;
    }
    __device__ void fetch(const RunsByBlocks& s) {
      rows.fetch(s.steps);
#pragma unroll
      for (int h = 0; h < Halves; ++h) scale[h] = load_now(all ? block + h * s.steps : block);
      ++block;
    }
    __device__ void add(float* sums, const float (&part)[64], int h) const {
      const float factor[2] = {rows.scale[0] * scale[h], rows.scale[1] * scale[h]};
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[i] = fma_(part[i], factor[i / 2 % 2], sums[i]);
    }
  };
};

// Both in runs of 128 along K. Scales of b come turned: those of a step side by side, `width` columns, a multiple of
// 128. A thread fetches those of its 32 columns.
struct RunsByRuns {
  static constexpr bool kPromotes = true, kOfRuns = true;
  const float *a, *b;
  int64_t steps, width;
  template <int Halves>
  struct Of {
    static_assert(Halves == 1);
    RowScales rows;
    const float* columns;
    float2 scale[16];
    __device__ Of(const RunsByRuns& s, const Result& p, int64_t row, int64_t n, int first)
        : rows(s.a, s.steps, p.M, row, first) {
      columns = s.b + first * s.width + n + threadIdx.x % 4 * 2;
    }
    __device__ void fetch(const RunsByRuns& s) {
      rows.fetch(s.steps);
#pragma unroll
      for (int j = 0; j < 16; ++j) scale[j] = load_now(reinterpret_cast<const float2*>(columns + 8 * j));
      columns += s.width;
    }
    __device__ void add(float* sums, const float (&part)[64], int) const {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const float column = i % 2 == 0 ? scale[i / 4].x : scale[i / 4].y;
        sums[i] = fma_(part[i], rows.scale[i / 2 % 2] * column, sums[i]);
      }
    }
  };
};

}  // namespace coat::cuda
