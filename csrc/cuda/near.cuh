// Nearly first, exactly where it matters. The exact formulas take more instructions than the memory leaves time for;
// the special function unit gives them within a known error. That is enough to tell the code of almost every element:
// where the whole interval of the error has one code, the exact value has it too. And it is enough to tell which few
// elements can be the largest of a tensor. The others are computed exactly, so that every bit is what the exact formula
// gives.
#pragma once
#include "runs.cuh"

namespace coat::cuda {

// Exact of formula.h through the special function unit.
struct Near {
  static __device__ float exp(float x) { return exp2_near(x * kLog2E); }
  static __device__ float inverse(float x) { return inverse_near(x); }
};
// Largest error of SwiGLU and its gradient by Near, relative to the sum of the magnitudes of its terms: more than twice
// what is found over all arguments in the ranges that the kernels allow (2^-21.4). It holds where nothing on the way is
// subnormal.
constexpr float kNearError = 0x1p-20f;

// Element i of x, in run b.
template <class X>
__device__ inline float load_one(const X& x, int64_t i, int64_t b) {
  return x.load(i, x.open(b));
}

// A bound for the magnitudes of a run: by its scale, else by looking at all of them, NaN aside.
template <class View>
__device__ inline float reach_of(const Pack<View, kRun>& pack) {
  float reach = 0.f;
  if constexpr (View::run != 0) {
    reach = abs_(BFloat16::decode(pack.scale)) * CodeOf<View>::max();
  } else if constexpr (std::is_same_v<View, BF16>) {
    __nv_bfloat162 most = __habs2(reinterpret_cast<const __nv_bfloat162&>(pack.pair[0]));
#pragma unroll
    for (int k = 1; k < kRun / 2; ++k)
      most = __hmax2(most, __habs2(reinterpret_cast<const __nv_bfloat162&>(pack.pair[k])));
    const float2 two = decode_pair<BFloat16>(reinterpret_cast<const uint32_t&>(most));
    reach = fmaxf(fmaxf(reach, two.x), two.y);
  } else {
#pragma unroll
    for (int k = 0; k < kRun; ++k) reach = fmaxf(reach, abs_(pack.code[k].code));
  }
  return reach;
}
// The same of a run in memory: elements from i on, run b.
template <class View>
__device__ inline float reach_of(const View& view, int64_t i, int64_t b) {
  Pack<View, kRun> pack;
  if constexpr (View::run != 0)
    pack.scale = view.scale[b];
  else
    pack.fetch(view, i, b);
  return reach_of(pack);
}
// The smallest of a run, NaN aside, or less.
template <class View>
__device__ inline float lowest_of(const Pack<View, kRun>& pack, float reach, float limit) {
  if (reach < -limit) return -reach;
  float lowest = kInf;
#pragma unroll
  for (int k = 0; k < kRun; ++k) lowest = fminf(lowest, pack.value(k) * pack.unit());
  return lowest;
}

// Tells subnormals, whose error is larger, from zeros: no less than kSmallest where the value is none.
constexpr uint32_t kSmallest = 2 * 0x08000000u;
__device__ inline uint32_t smallest_of(float x) { return 2 * bits_of(x) - 1; }

template <class Y>
constexpr bool kHasNear = std::is_same_v<Y, BF16> || Y::format().scaling == Scaling::tensor;

// Codes of four values in units of the scale, given the ends of what each can be. Not 0 if the ends have other codes.
template <class Code>
__device__ inline uint32_t encode_near(const float (&low)[4], const float (&high)[4], uint32_t* codes) {
  if constexpr (sizeof(Code) == 1) {
    codes[0] = encode_four<Code>(high[0], high[1], high[2], high[3]);
    return codes[0] ^ encode_four<Code>(low[0], low[1], low[2], low[3]);
  } else {
    codes[0] = encode_pair<Code>(high[0], high[1]);
    codes[1] = encode_pair<Code>(high[2], high[3]);
    return (codes[0] ^ encode_pair<Code>(low[0], low[1])) | (codes[1] ^ encode_pair<Code>(low[2], low[3]));
  }
}
// Scales for which a value that was rounded as a subnormal is far below the smallest code.
__device__ inline bool is_near_scale(float inverse) { return inverse < 0x1p80f; }

// use(row, col) for every element of the runs that lanes of the warp ask for, 16 lanes at work. All lanes must call it.
template <class Use>
__device__ inline void do_together(bool asked, int64_t row, int64_t run, Use&& use) {
  const int lane = threadIdx.x % 32;
  for (uint32_t todo = __ballot_sync(0xffffffffu, asked); todo != 0; todo &= todo - 1) {
    const int from = __ffs(static_cast<int>(todo)) - 1;
    const int64_t its_row = __shfl_sync(0xffffffffu, row, from), its_run = __shfl_sync(0xffffffffu, run, from);
    if (lane < kRun) use(its_row, its_run * kRun + lane);
  }
}

// The bits of the largest finite value over [rows, runs], merged into *max, by bounds: bound(row, run, known) is no
// less than any finite value of the run, or anything below `known` if that is, and runs that cannot matter are not
// computed. value(range, row, col) adds those of one element. A warp computes the few runs that can matter together,
// the most promising first; where many remain, every lane its own. Here a run is `Runs` of the format; many have a
// quick bound, bound(row, run, Inf), that does not branch, so that several are fetched at once. blockDim.x is
// kSearchThreads.
constexpr int kSearchThreads = 256, kSearchRounds = 4, kSearchMany = 8;
// A bound may be the formula at the largest argument of the run: in coded runs other arguments are whole codes away, in
// f32 they can lie so near that a rounding puts their value above by a hair.
template <class X>
constexpr float kBoundSlack = std::is_same_v<X, F32> ? 1.f + 0x1p-20f : 1.f;
constexpr float kNearSlack = 1.f + 0x1p-16f;  // for a formula of Near
template <int Elements, class Value>
__device__ inline uint32_t largest_of_run(int from, int64_t row, int64_t run, Value&& value) {  // of lane `from`
  Range range;
  const int64_t its_row = __shfl_sync(0xffffffffu, row, from), its_run = __shfl_sync(0xffffffffu, run, from);
  for (int k = threadIdx.x % 32; k < Elements; k += 32) value(range, its_row, its_run * Elements + k);
  return warp_max(range.max);
}
template <int Runs = 1, class Bound, class Value>
__device__ inline void find_largest(uint32_t* max, int64_t rows, int64_t runs, Bound&& bound, Value&& value) {
  constexpr uint32_t kAll = 0xffffffffu;
  constexpr int kElements = Runs * kRun, kAhead = Runs > 1 ? 2 : 4;
  __shared__ uint32_t best;
  if (threadIdx.x == 0) best = atomicMax(max, 0u);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  Walk at(rows, runs);
  while (__any_sync(kAll, at.more())) {
    int64_t row[kAhead], run[kAhead];
    uint32_t most[kAhead];
    const uint32_t before = __shfl_sync(kAll, lane == 0 ? atomicMax(&best, 0u) : 0u, 0);
    uint32_t known = before;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      row[u] = at.row, run[u] = at.run;
      // bits order like the values; a bound of NaN stands above all
      most[u] = at.more() ? bits_of(bound(at.row, at.run, Runs > 1 ? kInf : float_of(known))) : 0u;
      at.next();
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (Runs > 1 && most[u] > known) most[u] = bits_of(bound(row[u], run[u], float_of(known)));
      for (int round = 0;; ++round) {
        const uint32_t asking = __ballot_sync(kAll, most[u] > known);
        if (asking == 0) break;
        Range range;
        if (round >= kSearchRounds && __popc(asking) >= kSearchMany) {
          if (most[u] > known) {
#pragma unroll 1
            for (int k = 0; k < kElements; ++k) value(range, row[u], run[u] * kElements + k);
          }
          most[u] = 0;
        } else {
          const uint32_t top = warp_max(most[u] > known ? most[u] : 0u);
          const int from = __ffs(static_cast<int>(__ballot_sync(kAll, most[u] == top))) - 1;
          range.max = largest_of_run<kElements>(from, row[u], run[u], value);
          if (lane == from) most[u] = 0;
        }
        known = ::max(known, warp_max(range.max));
      }
    }
    if (lane == 0 && known > before) atomicMax(&best, known);
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(max, best);
}

// A first look, for find_largest to begin with, at one run in kSeedStep along all rows and columns: a warp computes the
// run with the largest of its bounds.
constexpr int kSeedStep = 8;
template <int Runs = 1, class Bound, class Value>
__device__ inline void find_seed(uint32_t* max, int64_t rows, int64_t runs, Bound&& bound, Value&& value) {
  uint32_t most = 0;
  int64_t row = 0, run = 0;
  for (Walk at((rows + kSeedStep - 1) / kSeedStep, runs); at.more(); at.next()) {
    const int64_t its_row = ::min(at.row * kSeedStep + at.run / 2 % kSeedStep, rows - 1);  // two: a sector of scales
    const uint32_t its_most = bits_of(bound(its_row, at.run, kInf));
    if (its_most > most) most = its_most, row = its_row, run = at.run;
  }
  const int from = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, most == warp_max(most)))) - 1;
  const uint32_t found = block_max(largest_of_run<Runs * kRun>(from, row, run, value));
  if (threadIdx.x == 0) atomicMax(max, found);
}

}  // namespace coat::cuda
