// What a warp of the kernel for e4m3/x128 reads and writes at a time: four runs of 128 elements, 16 elements a lane.
#pragma once
#include "adamw.cuh"

namespace coat::cuda {

constexpr int kRun = 128, kPart = 16, kLanes = kRun / kPart;  // elements of a run and of a lane, lanes of a run
constexpr int kRuns = 32 / kLanes, kBatch = kRuns * kRun;     // runs and elements of a batch
constexpr int kRounds = 16;                                   // of a block, which shares a table of logarithms
constexpr int64_t kStride = kWarps * kBatch, kElements = kRounds * kStride;  // elements of a round, of a block

template <class Code>
using PlainOf = Plain<Code, std::is_same_v<Code, Float32> ? DType::f32 : DType::bf16>;

// One parameter of the list; its blocks are those of the grid from first_block on.
template <class Source, class Gradient>
struct Entry {
  E4M3X128 m, v;
  PlainOf<Source> source;  // what is updated
  BF16 copy;               // its rounded copy, where it is a master
  PlainOf<Gradient> g;
  uint32_t* amax;  // null: not wanted
  int64_t n, first_block, index;
};

// The elements of a lane in pieces of E; those of the lanes of a run lie next to each other, so that every access of a
// warp fills whole sectors, whatever the width of the codes. Streamed: nothing is read twice.
template <class Code, int E>
struct Pieces {
  static constexpr int kCount = kPart / E, kBytes = E * static_cast<int>(sizeof(Code)), kStep = E * kLanes;
  using Vector = std::conditional_t<kBytes == 4, int, std::conditional_t<kBytes == 8, int2, int4>>;
  union {
    Vector vector[kCount];
    uint32_t word[kPart * sizeof(Code) / 4];
    Code code[kPart];
  };
  // Elements from + i on; `left` of them exist, counted from the lane's first. Those that do not are zeros.
  template <bool Whole>
  __device__ void fetch(const Code* from, int64_t i, int64_t left) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const Code* at = from + i + c * kStep;
      if (Whole || left >= c * kStep + E) {
        vector[c] = __ldcs(reinterpret_cast<const Vector*>(at));
      } else {
#pragma unroll
        for (int e = 0; e < E; ++e) code[c * E + e] = c * kStep + e < left ? at[e] : Code{};
      }
    }
  }
  template <bool Whole>
  __device__ void put(Code* to, int64_t i, int64_t left) const {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      Code* at = to + i + c * kStep;
      if (Whole || left >= c * kStep + E) {
        __stcs(reinterpret_cast<Vector*>(at), vector[c]);
      } else {
#pragma unroll
        for (int e = 0; e < E; ++e)
          if (c * kStep + e < left) at[e] = code[c * E + e];
      }
    }
  }
  __device__ float decode(int k) const {
    if constexpr (sizeof(Code) == 4)
      return code[k].code;
    else
      return float_of(k % 2 ? word[k / 2] & 0xffff0000u : word[k / 2] << 16);
  }
  // Raises `most` to the largest magnitude, word by word: bits of magnitudes order as integers.
  __device__ void raise(uint32_t& most) const {
#pragma unroll
    for (int w = 0; w < static_cast<int>(kPart * sizeof(Code) / 4); ++w) {
      if constexpr (sizeof(Code) == 4)
        most = max(most, word[w] & 0x7fffffffu);
      else
        most = __vmaxu2(most, word[w] & 0x7fff7fffu);
    }
  }
  __device__ void encode(const float (&x)[kPart]) {
#pragma unroll
    for (int k = 0; k < kPart; k += 2) {
      if constexpr (sizeof(Code) == 4)
        code[k].code = x[k], code[k + 1].code = x[k + 1];
      else
        word[k / 2] = encode_pair<Code>(x[k], x[k + 1]);
    }
  }
};

// What a lane reads of a batch, in pieces of 16 bytes of the widest tensor.
template <class Source, class Gradient>
struct Batch {
  static constexpr int E = kLane<Source, Gradient>;
  Pieces<E4M3, E> m, v;
  Pieces<Source, E> p;
  Pieces<Gradient, E> g;
  __device__ static int first() { return threadIdx.x % 32 / kLanes * kRun + threadIdx.x % kLanes * E; }
  template <bool Whole>
  __device__ void fetch(const Entry<Source, Gradient>& entry, int64_t i, int64_t left) {
    m.template fetch<Whole>(entry.m.codes, i, left);
    v.template fetch<Whole>(entry.v.codes, i, left);
    g.template fetch<Whole>(entry.g.codes, i, left);
    p.template fetch<Whole>(entry.source.codes, i, left);
  }
};

// What a warp will read, on its way to L2 a round ahead, one line of 128 bytes a lane: the latency of memory is longer
// than the work of a round.
template <class Source, class Gradient>
struct Ahead {
  // lines of a batch: m, v, g, p, and the numbers of the runs of both moments
  static constexpr int kG = kBatch * sizeof(Gradient) / 128, kP = kBatch * sizeof(Source) / 128;
  static constexpr int kM = kBatch / 128, kLines = 2 * kM + kG + kP + 6, kTurns = (kLines + 31) / 32;
  const uint8_t* at[kTurns];
  uint32_t step[kTurns];  // 0: no line
  __device__ Ahead(const Entry<Source, Gradient>& entry, int64_t first) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      int line = threadIdx.x % 32 + 32 * turn;
      const auto of = [&](const void* codes, int size, int lines) {
        if (line >= 0 && line < lines) {
          at[turn] = static_cast<const uint8_t*>(codes) + first * size + line * 128;
          step[turn] = kStride * size;
        }
        line -= lines;
      };
      const auto of_runs = [&](const float* numbers) {
        if (line == 0) {
          at[turn] = reinterpret_cast<const uint8_t*>(numbers + first / kRun);
          step[turn] = kStride / kRun * 4;
        }
        --line;
      };
      at[turn] = nullptr, step[turn] = 0;
      of(entry.m.codes, 1, kM);
      of(entry.v.codes, 1, kM);
      of(entry.g.codes, sizeof(Gradient), kG);
      of(entry.source.codes, sizeof(Source), kP);
      for (const E4M3X128* moment : {&entry.m, &entry.v}) {
        of_runs(moment->scale);
        of_runs(moment->k);
        of_runs(moment->centre);
      }
    }
  }
  // Of the batch a round later than the last; `exists`: it is whole.
  __device__ void fetch(bool exists) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      at[turn] += step[turn];
      if (exists && step[turn] != 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(at[turn]) : "memory");
    }
  }
};

}  // namespace coat::cuda
