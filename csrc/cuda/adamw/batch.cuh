// What a warp of the kernel for e4m3/x128 reads and writes at a time: four runs of 128 elements, 16 elements a lane.
// The copy engine fetches whole batches, so that no lane waits for memory.
#pragma once
#include "../hopper.cuh"
#include "adamw.cuh"

namespace coat::cuda {

constexpr int kRun = 128, kPart = 16, kLanes = kRun / kPart;  // elements of a run and of a lane, lanes of a run
constexpr int kRuns = 32 / kLanes, kBatch = kRuns * kRun;     // runs and elements of a batch
constexpr int kRounds = 16;                                   // of a warp
constexpr uint32_t kAll = 0xffffffffu;

template <class Code>
using PlainOf = Plain<Code, std::is_same_v<Code, Float32> ? DType::f32 : DType::bf16>;

// One parameter of the list; its blocks are those of the grid from first_block on.
template <class Source, class Gradient>
struct Entry {
  E4M3X128 moment[2];      // m, v
  PlainOf<Source> source;  // what is updated
  BF16 copy;               // its rounded copy, where it is a master
  PlainOf<Gradient> g;
  uint32_t* amax;  // null: not wanted
  int64_t n, first_block, index;
};

__device__ inline int64_t run_of(int64_t i) { return static_cast<int64_t>(static_cast<uint64_t>(i) / kRun); }

// What open() reads of a run.
struct Numbers {
  float scale, k, centre;
  __device__ void fetch(const E4M3X128& moment, int64_t run) {
    scale = moment.scale[run], k = moment.k[run], centre = moment.centre[run];
  }
};

// log2 of the magnitude of code c lies at 256 c + 4 lane: a copy a lane, so that no two lanes meet in a bank, and one
// permutation of bytes makes the address.
constexpr int kTable = 128 * 64;
__device__ inline void fill(float* table) {
  if (threadIdx.x >= 128) return;
  const int lane = threadIdx.x % 32, first = static_cast<int>(threadIdx.x) - lane;
  const float own = log2_(E4M3::decode(static_cast<uint8_t>(threadIdx.x)));
  for (int k = 0; k < 32; k += 4) {
    const float x = __shfl_sync(kAll, own, k + lane / 8);
    reinterpret_cast<float4*>(table + (first + k + lane / 8) * 64)[lane % 8] = {x, x, x, x};
  }
}
__device__ inline float log_of(uint32_t table, uint32_t word, int k) {
  float y;
  const uint32_t at = __byte_perm(word, threadIdx.x % 32 * 4, 0x5504u | static_cast<uint32_t>(k) << 4);
  asm("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(table + at));
  return y;
}

// The elements of a lane in pieces of E; those of the lanes of a run lie next to each other, so that every access of a
// warp fills whole sectors, whatever the width of the codes.
template <class Code, int E>
struct Pieces {
  static constexpr int kCount = kPart / E, kBytes = E * static_cast<int>(sizeof(Code)), kStep = E * kLanes;
  using Vector = std::conditional_t<kBytes == 4, int, std::conditional_t<kBytes == 8, int2, int4>>;
  union {
    Vector vector[kCount];
    uint32_t word[kPart * sizeof(Code) / 4];
    Code code[kPart];
  };
  // From shared memory, `from` being where the first one lies.
  __device__ void take(const uint8_t* from) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) vector[c] = *reinterpret_cast<const Vector*>(from + c * kStep * sizeof(Code));
  }
  // Elements from + i on; `left` of them exist, counted from the lane's first. Those that do not are zeros.
  __device__ void fetch(const Code* from, int64_t i, int64_t left) {
#pragma unroll
    for (int k = 0; k < kPart; ++k) code[k] = place(k) < left ? from[i + place(k)] : Code{};
  }
  // Streamed: nothing is read twice.
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
  // Where element k of the lane lies, from its first one on.
  static __device__ int place(int k) { return k / E * kStep + k % E; }
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
  // Two of bf16, rounded by 16 random bits each, as round_stochastic does where neither is NaN or infinite.
  __device__ void put_rounded(int k, float a, float b, uint32_t bits) {
    word[k / 2] = __byte_perm(bits_of(a) + (bits & 0xffffu), bits_of(b) + (bits >> 16), 0x7632);
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
  Pieces<Gradient, E> g;
  Pieces<Source, E> p;
  // The lane's first element in a batch.
  static __device__ int first() { return threadIdx.x % 32 / kLanes * kRun + threadIdx.x % kLanes * E; }
};

// Batches on their way to a warp, one at a time: the copy engine brings them to shared memory while the warp works on
// the one before, which is in registers by then.
template <class Source, class Gradient>
struct Stage {
  static constexpr int kV = kBatch, kG = 2 * kBatch, kP = kG + kBatch * sizeof(Gradient);
  static constexpr int kCodes = kP + kBatch * sizeof(Source), kTensors = 4;
  struct Copy {
    const uint8_t* from;
    uint32_t to, bytes;
  };
  alignas(128) uint8_t codes[kCodes];  // m, v, g, p
  Copy copies[kTensors];               // the next ones, each for a lane of its own
  uint64_t full;                       // the barrier of what comes

  __device__ void begin(const Entry<Source, Gradient>& entry, int64_t i) {
    if (threadIdx.x % 32 != 0) return;
    const uint32_t to = shared_address(codes);
    const auto copy = [&](int k, const auto* from, int at) {
      copies[k] = {reinterpret_cast<const uint8_t*>(from + i), to + at, static_cast<uint32_t>(kBatch * sizeof(*from))};
    };
    copy(0, entry.moment[0].codes, 0);
    copy(1, entry.moment[1].codes, kV);
    copy(2, entry.g.codes, kG);
    copy(3, entry.source.codes, kP);
    barrier_init(shared_address(&full), 1);
    barrier_init_done();
  }
  // The next batch, `warps` batches behind the one before, once all lanes have taken that.
  __device__ void load(int warps) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(shared_address(&full), kCodes);
    __syncwarp();
    if (lane < kTensors) {
      const Copy copy = copies[lane];
      load_bytes(copy.from, copy.to, shared_address(&full), copy.bytes);
      copies[lane].from = copy.from + warps * copy.bytes;
    }
  }
  __device__ void take(Batch<Source, Gradient>& batch, uint32_t phase) const {
    barrier_wait(shared_address(&full), phase);
    const int first = batch.first();
    batch.m.take(codes + first);
    batch.v.take(codes + kV + first);
    batch.g.take(codes + kG + first * sizeof(Gradient));
    batch.p.take(codes + kP + first * sizeof(Source));
  }
};

}  // namespace coat::cuda
