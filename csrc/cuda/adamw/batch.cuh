// What a warp of the kernel for e4m3/x128 reads and writes at a time: four runs of 128 elements, 16 elements a lane.
#pragma once
#include "../lanes.cuh"

namespace coat::cuda {

constexpr int kRun = 128, kPart = 16, kLanes = kRun / kPart;  // elements of a run and of a lane, lanes of a run
constexpr int kRuns = 32 / kLanes, kBatch = kRuns * kRun;     // runs and elements of a batch
constexpr int kWarps = 4, kRounds = 16;                       // of a block, which shares a table of logarithms
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

// What a warp will read, on its way to L2 a round ahead, one of the ten arrays a lane: the latency of memory is longer
// than the work of a round.
struct Ahead {
  const uint8_t* at;
  uint32_t bytes, step;
  template <class Source, class Gradient>
  __device__ Ahead(const Entry<Source, Gradient>& entry, int64_t first) {
    const int lane = threadIdx.x % 32, kind = lane / 2;
    const E4M3X128& moment = lane % 2 ? entry.v : entry.m;
    const float* numbers = kind == 1 ? moment.scale : kind == 2 ? moment.k : moment.centre;
    auto codes = reinterpret_cast<const uint8_t*>(moment.codes);
    uint32_t size = 1;
    if (lane == 8) codes = reinterpret_cast<const uint8_t*>(entry.g.codes), size = sizeof(Gradient);
    if (lane == 9) codes = reinterpret_cast<const uint8_t*>(entry.source.codes), size = sizeof(Source);
    const bool per_run = kind >= 1 && kind <= 3;
    at = per_run ? reinterpret_cast<const uint8_t*>(numbers + first / kRun) : codes + first * size;
    bytes = lane > 9 ? 0 : per_run ? kRuns * 4 : kBatch * size;
    step = per_run ? kStride / kRun * 4 : kStride * size;
  }
  // Of the batch a round later than the last; `exists`: it is whole.
  __device__ void fetch(bool exists) {
    at += step;
    if (exists && bytes) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
  }
};

}  // namespace coat::cuda
