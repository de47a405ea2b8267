// adamw for moments in e4m3/x128.
#include "adamw.cuh"

namespace coat::cuda {
namespace {

constexpr int kPart = 4;
// Four values that are f32 or bf16, chosen at run time: fetched first, decoded when needed.
struct Part {
  union {
    Lane<Float32, kPart> f32;
    Lane<BFloat16, kPart> bf16;
  };
  template <bool Whole>
  __device__ void fetch(const uint8_t* data, bool narrow, int64_t i, int64_t left) {
    if (narrow)
      bf16.fetch<Whole>(reinterpret_cast<const BFloat16*>(data), i, left);
    else
      f32.fetch<Whole>(reinterpret_cast<const Float32*>(data), i, left);
  }
  __device__ void decode(bool narrow, float (&x)[kPart]) const {
#pragma unroll
    for (int k = 0; k < kPart; ++k) x[k] = narrow ? BFloat16::decode(bf16.code[k].code) : f32.code[k].code;
  }
};
template <bool Whole>
__device__ void put(uint8_t* data, bool narrow, int64_t i, int64_t left, const float (&x)[kPart]) {
  if (narrow) {
    Lane<BFloat16, kPart> out;
#pragma unroll
    for (int k = 0; k < kPart; ++k) out.code[k].code = BFloat16::encode(x[k]);
    out.template put<Whole>(reinterpret_cast<BFloat16*>(data), i, left);
  } else {
    Lane<Float32, kPart> out;
#pragma unroll
    for (int k = 0; k < kPart; ++k) out.code[k].code = x[k];
    out.template put<Whole>(reinterpret_cast<Float32*>(data), i, left);
  }
}

constexpr int kTogether = 4, kAhead = 2;    // runs that a warp works on at a time; and fetches ahead
constexpr int kRoundsOfBlock = 2;           // … one batch after the other
constexpr int kBatch = kWarps * kTogether;  // runs of the warps of a block
constexpr int64_t kLongChunk = kBatch * kRoundsOfBlock * kRun;  // elements of a block

// What a lane knows of one moment of one run, for the lanes of its warp to ask for.
struct Opened {
  float shift = 0.f, inverse_k = 1.f, centre = 0.f;
  bool near = true;  // all exponents are far from those of subnormals and infinities
  __device__ void set(const E4M3X128& view, int64_t run) {
    const auto open = view.open(run);
    shift = open.shift, inverse_k = open.inverse_k, centre = open.centre;
    const float high = fma_(8.81f, inverse_k, shift), low = fma_(-9.01f, inverse_k, shift);  // log2 of codes
    near = high < 120.f && low > -120.f;
  }
};
// 2^x of format.h where no power is subnormal or infinite: the same bits.
__device__ inline float exp2_inside(float x) {
  const float shifted = x + kRoundToInteger;  // its bits shifted left by 23 are the exponent
  return float_of(bits_of(exp2_fraction(x - (shifted - kRoundToInteger))) + (bits_of(shifted) << 23));
}
// Four elements of a moment, as E4M3X128::load has them. logs[code][lane]: log2 of the magnitudes of codes, a copy a
// lane, so that no two lanes meet in a bank.
__device__ inline void decode(uint32_t word, const float* logs, const Opened& own, int owner, const E4M3X128& view,
                              int64_t run, float (&x)[kPart]) {
  const float shift = __shfl_sync(0xffffffffu, own.shift, owner),
              inverse_k = __shfl_sync(0xffffffffu, own.inverse_k, owner);
  const float centre = __shfl_sync(0xffffffffu, own.centre, owner);
  if (__shfl_sync(0xffffffffu, own.near ? 1 : 0, owner)) {
#pragma unroll
    for (int k = 0; k < kPart; ++k) {
      const uint32_t code = word >> (8 * k) & 0x7fu;
      const float magnitude = exp2_inside(fma_(logs[code * 32 + threadIdx.x % 32], inverse_k, shift)) * centre;
      const float value = code == 0x7f ? kNaN : code == 0 ? 0.f : magnitude;
      x[k] = float_of(bits_of(value) | (word << (24 - 8 * k) & 0x80000000u));
    }
  } else {
    Lane<E4M3, kPart> lane;
    lane.word[0] = word;
    lane.decode(view, view.open(run), x);
  }
}

// Extremes of a run of a moment, in every lane: bits of the largest magnitude, NaN > Inf > finite, and of the smallest
// that is not zero, less 1.
struct Extremes {
  uint32_t max = 0, min = ~0u;
  __device__ explicit Extremes(const float (&x)[kPart]) {
#pragma unroll
    for (int k = 0; k < kPart; ++k) {
      const uint32_t a = bits_of(x[k]) & 0x7fffffffu;
      max = ::max(max, a);
      min = ::min(min, a - 1);
    }
    max = __reduce_max_sync(0xffffffffu, max);
    min = __reduce_min_sync(0xffffffffu, min);
  }
  __device__ bool finite() const { return max < 0x7f800000u; }
};
// Range of a run with infinities or NaN; the infinities stay with their lanes.
__device__ inline RangeWithMin range_of(const float (&x)[kPart]) {
  RangeWithMin range;
  add_all(range, x);
  merge_lanes<32>(range);
  return range;
}

// What storing needs of one moment of one run.
struct Closed {
  E4M3X128::Sealed sealed{1.f, 1.f, 0.f};
  float inverse_centre = 0.f, shift = 0.f, error = 1.f;
  bool near = false;
  __device__ void set(const E4M3X128& view, int64_t run, const RangeWithMin& range) {
    sealed = view.seal(run, range);
    const float centre = view.centre[run];
    inverse_centre = 1.f / centre;
    shift = log2_(sealed.inverse);
    // of 2^(k log2(x / centre) + shift): that of the special function unit, and that of the formula, whose logarithms
    // have relative errors of 3e-7 each
    const float octaves = fmaxf(abs_(log2_near(float_of(range.max))), abs_(log2_near(float_of(range.min))));
    error = fma_(sealed.k * (octaves + 1.f), 7e-7f, 0x1p-17f);
    near = range.max != 0 && centre > 0x1p-60f && centre < 0x1p60f && float_of(range.min) > 0x1p-120f;
  }
};
// Stores four elements of a run: nearly first, exactly where that does not settle all codes of the run.
template <bool Whole>
__device__ inline void store(const E4M3X128& view, const Closed& own, int owner, int64_t i, int64_t left,
                             const float (&x)[kPart]) {
  constexpr uint32_t kAll = 0xffffffffu;
  const float k = __shfl_sync(kAll, own.sealed.k, owner), shift = __shfl_sync(kAll, own.shift, owner);
  const float inverse_centre = __shfl_sync(kAll, own.inverse_centre, owner);
  const float error = __shfl_sync(kAll, own.error, owner);
  Lane<E4M3, kPart> out;
  bool sure = __shfl_sync(kAll, own.near ? 1 : 0, owner) != 0;
  if (sure) {
    float low[kPart], high[kPart];
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      const float y = exp2_near(fma_(log2_near(abs_(x[c]) * inverse_centre), k, shift));
      const float signed_y = copysign_(y, x[c]);
      low[c] = signed_y - signed_y * error;
      high[c] = fma_(signed_y, error, signed_y);
    }
    out.word[0] = encode_pair<E4M3>(high[0], high[1]) | encode_pair<E4M3>(high[2], high[3]) << 16;
    const uint32_t other = encode_pair<E4M3>(low[0], low[1]) | encode_pair<E4M3>(low[2], low[3]) << 16;
    sure = out.word[0] == other;
  }
  if (__any_sync(kAll, !sure)) {
    const typename E4M3X128::Sealed sealed{__shfl_sync(kAll, own.sealed.inverse, owner), k,
                                           __shfl_sync(kAll, own.sealed.log2_centre, owner)};
    out.encode(view, sealed, x);
  }
  out.template put<Whole>(view.codes, i, left);
}

// The same update for moments in e4m3/x128, with the same bits. A warp works on kTogether runs at a time, so that what
// is computed once a run (1 / k, the new scale, k and centre) is computed for all of them at once, a lane each.
__global__ void __launch_bounds__(kWarps * 32, 4)
    adamw_kernel_expanded(const Item<E4M3X128>* list, int count, AdamW rule, const float* clip, Status* status) {
  if (clip && clip[1] != 0.f) return;
  const float factor = clip ? clip[0] : 1.f;
  __shared__ float logs[128 * 32];
  static_assert(kWarps * 32 == 128);
  {
    const float own = log2_(E4M3::decode(static_cast<uint8_t>(threadIdx.x)));
    const int lane = threadIdx.x % 32, first = threadIdx.x - lane;
    for (int k = 0; k < 32; ++k) logs[(first + k) * 32 + lane] = __shfl_sync(0xffffffffu, own, k);
  }
  __syncthreads();
  const Item<E4M3X128> item = owner_of(list, count, &Item<E4M3X128>::first_block, blockIdx.x);
  const uint8_t* source = item.master ? item.master : item.p;
  const bool source_narrow = !item.master && item.p_narrow;
  const int lane = threadIdx.x % 32, task = lane / 2;  // lanes 2 b and 2 b + 1 care for m and v of run b
  const E4M3X128 mine = lane % 2 ? item.v : item.m;
  const int64_t runs = (item.n + kRun - 1) / kRun;
  uint32_t infs = 0;
#pragma unroll 1
  for (int round = 0; round < kRoundsOfBlock; ++round) {
    const int64_t batch = (blockIdx.x - item.first_block) * kRoundsOfBlock + round;
    const int64_t first = batch * kBatch + threadIdx.x / 32 * kTogether;
    if (first >= runs) break;
    const bool cares = task < kTogether && first + task < runs;
    Opened opened;
    if (cares) opened.set(mine, first + task);
    by_case((first + kTogether) * kRun <= item.n, [&](auto whole) {
      constexpr bool kWhole = whole.value;
      Part p_part[kAhead], g_part[kAhead];
      Lane<E4M3, kPart> m_lane[kAhead], v_lane[kAhead];
      const auto fetch = [&](int b) {
        const int64_t i = (first + b) * kRun + lane * kPart, left = item.n - i;
        p_part[b % kAhead].template fetch<kWhole>(source, source_narrow, i, left);
        g_part[b % kAhead].template fetch<kWhole>(item.g, item.g_narrow, i, left);
        m_lane[b % kAhead].template fetch<kWhole>(item.m.codes, i, left);
        v_lane[b % kAhead].template fetch<kWhole>(item.v.codes, i, left);
      };
#pragma unroll
      for (int b = 0; b < kAhead; ++b) fetch(b);
      float m[kTogether][kPart], v[kTogether][kPart];
      RangeWithMin range;
#pragma unroll
      for (int b = 0; b < kTogether; ++b) {
        const int64_t run = first + b, i = run * kRun + lane * kPart, left = item.n - i;
        float p[kPart], g[kPart];
        decode(m_lane[b % kAhead].word[0], logs, opened, 2 * b, item.m, kWhole || run < runs ? run : 0, m[b]);
        decode(v_lane[b % kAhead].word[0], logs, opened, 2 * b + 1, item.v, kWhole || run < runs ? run : 0, v[b]);
        p_part[b % kAhead].decode(source_narrow, p);
        g_part[b % kAhead].decode(item.g_narrow, g);
        if (b + kAhead < kTogether) fetch(b + kAhead);
#pragma unroll
        for (int k = 0; k < kPart; ++k) rule.update(p[k], g[k] * factor, m[b][k], v[b][k]);
        if (item.master) put<kWhole>(item.master, false, i, left, p);
        put<kWhole>(item.p, item.p_narrow, i, left, p);
        const Extremes of_m(m[b]), of_v(v[b]);
        if (of_m.finite() && of_v.finite()) {
          if (task == b) {
            range.max = lane % 2 ? of_v.max : of_m.max;
            const uint32_t least = lane % 2 ? of_v.min : of_m.min;
            range.min = least == ~0u ? range.min : least + 1;
          }
        } else {
          const RangeWithMin slow_m = range_of(m[b]), slow_v = range_of(v[b]);
          infs += slow_m.infs + slow_v.infs;
          if (task == b) {
            range = lane % 2 ? slow_v : slow_m;
            range.infs = 0;
          }
        }
      }
      Closed closed;
      if (cares) closed.set(mine, first + task, range);
#pragma unroll
      for (int b = 0; b < kTogether; ++b) {
        const int64_t i = (first + b) * kRun + lane * kPart, left = item.n - i;
        store<kWhole>(item.m, closed, 2 * b, i, left, m[b]);
        store<kWhole>(item.v, closed, 2 * b + 1, i, left, v[b]);
      }
    });
  }
  count_infs_of_block(status, infs);
}

}  // namespace

void adamw_expanded(const adamw_args& args) { List<E4M3X128>(args, kLongChunk).run(adamw_kernel_expanded, args); }

}  // namespace coat::cuda
