// adamw: one launch over the runs of a whole list of parameters: decode moments, update, range, seal, store.
#include <vector>

#include "../contract.h"
#include "../formula.h"
#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

constexpr int kRun = 128, kPart = 4;             // a lane has a part of the run of its warp
constexpr int kWarps = 4, kRunsOfBlock = 16;     // small blocks, since registers limit how many warps fit
constexpr int64_t kChunk = kRunsOfBlock * kRun;  // elements of a block

// One parameter of the list; its blocks are those of the grid from first_block on.
template <class V>
struct Item {
  V m, v;
  uint8_t *p, *master;  // master: null where there is none
  const uint8_t* g;
  int64_t n, first_block;
  bool p_narrow, g_narrow;  // bf16
};

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

template <class V>
__device__ typename V::Open open_run(const V& view, int64_t run) {
  if constexpr (V::run == 0)
    return {};
  else
    return view.open(run);
}

// Stores a lane's part of a run of a moment; counts the infinities that its format does not keep.
template <bool Whole, class V>
__device__ void put_moment(const V& view, int64_t run, int64_t i, int64_t left, const float (&x)[kPart],
                           uint32_t& infs) {
  typename V::Sealed sealed{};
  if constexpr (V::run != 0) {
    static_assert(V::run == kRun);
    RangeOf<V> range;
    add_all(range, x);
    infs += range.infs;
    range.infs = 0;
    merge_lanes<32>(range);
    sealed = view.seal(run, range);
  }
  Lane<CodeOf<V>, kPart> out;
  out.encode(view, sealed, x);
  out.template put<Whole>(view.codes, i, left);
}

// One warp a run of 128 elements, 4 a lane; one block 16 runs of one parameter, which it finds in the table by
// bisection. Elements past a short tail count as zeros, which no range sees. Bytes an element: p 8 or 4 (or master 8
// and p 4 or 2), g 4 or 2, moments twice their size each.
template <class V>
__global__ void __launch_bounds__(kWarps * 32)
    adamw_kernel(const Item<V>* list, int count, AdamW rule, const float* clip, Status* status) {
  if (clip && clip[1] != 0.f) return;
  const float factor = clip ? clip[0] : 1.f;
  const Item<V> item = owner_of(list, count, &Item<V>::first_block, blockIdx.x);
  const uint8_t* source = item.master ? item.master : item.p;
  const bool source_narrow = !item.master && item.p_narrow;
  uint32_t infs = 0;
#pragma unroll 1
  for (int turn = threadIdx.x / 32; turn < kRunsOfBlock; turn += kWarps) {
    const int64_t run = (blockIdx.x - item.first_block) * kRunsOfBlock + turn;
    if (run * kRun >= item.n) break;
    const int64_t i = run * kRun + threadIdx.x % 32 * kPart, left = item.n - i;
    by_case((run + 1) * kRun <= item.n, [&](auto whole) {
      constexpr bool kWhole = whole.value;
      Part p_part, g_part;
      Lane<CodeOf<V>, kPart> m_lane, v_lane;
      p_part.fetch<kWhole>(source, source_narrow, i, left);
      g_part.fetch<kWhole>(item.g, item.g_narrow, i, left);
      m_lane.template fetch<kWhole>(item.m.codes, i, left);
      v_lane.template fetch<kWhole>(item.v.codes, i, left);
      float p[kPart], g[kPart], m[kPart], v[kPart];
      const auto m_open = open_run(item.m, run), v_open = open_run(item.v, run);
      m_lane.decode(item.m, m_open, m);
      v_lane.decode(item.v, v_open, v);
      p_part.decode(source_narrow, p);
      g_part.decode(item.g_narrow, g);
#pragma unroll
      for (int k = 0; k < kPart; ++k) rule.update(p[k], g[k] * factor, m[k], v[k]);
      put_moment<kWhole>(item.m, run, i, left, m, infs);
      put_moment<kWhole>(item.v, run, i, left, v, infs);
      if (item.master) put<kWhole>(item.master, false, i, left, p);
      put<kWhole>(item.p, item.p_narrow, i, left, p);
    });
  }
  if constexpr (V::run != 0) count_infs_of_block(status, infs);
}

// ---- e4m3/x128: exact in few instructions ----

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

// The parameters whose moments have the format of V.
template <class V>
void update(const adamw_args& args) {
  constexpr bool kExpands = std::is_same_v<V, E4M3X128>;
  constexpr int64_t kElements = kExpands ? kLongChunk : kChunk;
  std::vector<Item<V>> list;
  int64_t blocks = 0;
  for (size_t i = 0; i < args.p.size(); ++i) {
    const Tensor &p = args.p[i], &g = args.g[i];
    const int64_t n = p.shape.numel();
    if (!(args.m[i].format == V::format()) || n == 0) continue;
    list.push_back({V(args.m[i]), V(args.v[i]), p.data, args.master.empty() ? nullptr : args.master[i].data, g.data, n,
                    blocks, p.format.dtype == DType::bf16, g.format.dtype == DType::bf16});
    blocks += (n + kElements - 1) / kElements;
  }
  if (list.empty()) return;
  const AdamW rule(args);
  const int64_t bytes = static_cast<int64_t>(list.size() * sizeof(Item<V>));
  const Scratch table(bytes);
  copy_in(table.as<uint8_t>(), list.data(), bytes);
  const auto kernel = [] {
    if constexpr (kExpands)
      return adamw_kernel_expanded;
    else
      return adamw_kernel<V>;
  }();
  launch("adamw", kernel, static_cast<unsigned>(blocks), kWarps * 32, 0, table.as<Item<V>>(),
         static_cast<int>(list.size()), rule, args.clip ? args.clip.as<float>() : nullptr, args.p[0].status);
}

}  // namespace

void adamw(const adamw_args& args) {
  check_flat("m", args.m);
  check_flat("v", args.v);
  update<F32>(args);
  update<BF16>(args);
  update<E4M3G128>(args);
  update<E4M3X128>(args);
}

}  // namespace coat::cuda
