// One kernel for all rules and all formats of moments: decode, update, range, seal, store, run by run.
#pragma once
#include <algorithm>

#include "adamw.cuh"
#include "moment.cuh"
#include "operand.cuh"

namespace coat::cuda::generic {

constexpr int kUnitsOfBlock = 16;

// The scales of one parameter's tensors that have one scale each: the first launch measures, the second stores.
struct Scales {
  enum { kP, kM, kV, kMaster, kCount };
  float* scale[kCount] = {};  // null: another format
  DType type[kCount] = {};
  uint32_t max[kCount] = {};
  float old[kCount] = {}, fresh[kCount] = {};
};

// One parameter of the list; its blocks are those of the grid from first_block on.
template <class M, class V>
struct Item {
  M m;
  Second<V> v;
  Operand p, master, lost, g;
  Scales* scales;  // null where no format needs them
  uint32_t* amax;  // null: not wanted
  int64_t n, first_block, index;
};

// The largest |p| as stored of what a block updates, for a parameter of which it is wanted: bits of magnitudes, which
// order as integers with NaN above Inf, in shared memory, since registers are scarce. All threads of a block begin and
// end it, with a barrier of the block after the first and another before the second.
struct Largest {
  uint32_t* of;  // null: not wanted
  uint32_t most;
  __device__ void begin(uint32_t* wanted) {
    if (threadIdx.x == 0) of = wanted, most = 0;
  }
  // All lanes of the warp must call it.
  __device__ void raise(uint32_t bits) {
    bits = warp_max(bits);
    if (threadIdx.x % 32 == 0) atomicMax(&most, bits);
  }
  __device__ void end() const {
    if (threadIdx.x == 0 && of) atomicMax(of, most);
  }
};

// What all parameters of a call share.
struct Shared {
  const float* clip;
  uint64_t seed;
  int32_t rounding;
  bool v_floor, measure;
};

template <bool Whole, class V>
__device__ typename V::Open open_at(const V& view, int64_t i, int64_t left, const Scales* scales, int slot,
                                    const Shared& shared) {
  if constexpr (kOfTensor<V>)
    return {shared.measure ? *view.scale : scales->old[slot]};
  else if constexpr (V::run != 0)
    return Whole || left > 0 ? view.open(i / V::run) : typename V::Open{};
  else
    return {};
}

// Merges a lane's maximum into that of a tensor; all lanes of the warp must call it.
__device__ inline void measure(uint32_t max, Scales* scales, int slot) {
  const uint32_t most = warp_max(max);
  if (threadIdx.x % 32 == 0) atomicMax(&scales->max[slot], most);
}

// Stores a lane's part of a moment, or measures it; counts the infinities that its format does not keep.
template <bool Whole, int E, class V>
__device__ void put_moment(const V& view, int64_t i, int64_t left, const float (&x)[E], const Shared& shared,
                           Scales* scales, int slot, uint32_t& infs) {
  using B = typename Bare<V>::View;
  typename V::Sealed sealed{};
  if constexpr (V::run != 0 || kOfTensor<V>) {
    RangeOf<V> range;
    add_all(range, x);
    if (!shared.measure) infs += range.infs;
    range.infs = 0;
    if constexpr (kOfTensor<V>) {
      if (shared.measure) {
        measure(range.max, scales, slot);
        return;
      }
      sealed = {1.f / scales->fresh[slot]};
    } else if (!shared.measure) {
      merge_lanes<V::run / E>(range);
      if (Whole || left > 0) sealed = view.seal(i / V::run, range);
    }
  }
  if (shared.measure) return;
  Codes<B, E> codes;
  if constexpr (!std::is_same_v<B, V>) {
    if (shared.v_floor) {
      codes.template put<Whole>(view, sealed, i, left, x);
      return;
    }
  }
  codes.template put<Whole>(static_cast<const B&>(view), sealed, i, left, x);
}

// The parameter as it is stored, by the rounding of the call; a lane has elements [i, i + E).
template <int E>
__device__ void round(const Shared& shared, int64_t member, int64_t i, const float (&exact)[E], float (&kept)[E],
                      float (&lost)[E]) {
  static_assert(E <= kDrawn);
  if (shared.rounding == kStochastic) {
    const Random random = rounding_bits(shared.seed, member, i);
#pragma unroll
    for (int k = 0; k < E; ++k) {
      // i is a multiple of E, and a word of the draw must be chosen without memory
      const int at = static_cast<int>(i % kDrawn) + k;
      const uint32_t low = at & 4 ? random.word[2] : random.word[0], high = at & 4 ? random.word[3] : random.word[1];
      kept[k] = round_stochastic(exact[k], (at & 2 ? high : low) >> (at & 1 ? 16 : 0) & 0xffffu);
    }
  } else {
#pragma unroll
    for (int k = 0; k < E; ++k) kept[k] = shared.rounding == kKahan ? round_kahan(exact[k], lost[k]) : exact[k];
  }
}

// Blocks of a multiprocessor that registers must leave room for.
template <class M, class V, bool Usual>
constexpr int kBlocks = Usual                ? (M::run == 0 ? 10 : 8)
                        : kUnit<M, V> == 128 ? 5
                                             : 4;

// One warp a unit of elements, a few neighbours a lane; one block kUnitsOfBlock units of one parameter, which it finds
// in the table by bisection. Elements past a short tail count as zeros, which no range sees. Bytes an element: p 8 or 4
// (or master 8 and p 4 or 2), g 4 or 2, moments twice their size each. With `measure` nothing is stored but maxima.
// Usual: all members are_usual, which saves a third of the registers.
template <class Rule, class M, class V, bool Usual>
__global__ void __launch_bounds__(kWarps * 32, kBlocks<M, V, Usual>)
    adamw_kernel(const Item<M, V>* list, int count, Rule rule, Shared shared, Status* status) {
  if (shared.clip && shared.clip[1] != 0.f) return;
  constexpr int kElements = kUnit<M, V>, E = kElements / 32;
  const float factor = shared.clip ? shared.clip[0] : 1.f;
  Item<M, V> item = owner_of(list, count, &Item<M, V>::first_block, blockIdx.x);
  if constexpr (Usual) {  // what the compiler shall know
    shared.measure = false;
    shared.rounding = kNearest;
    item.lost = {};
    item.master.kind = Kind::f32;
    item.p.kind = item.p.kind == Kind::f32 ? Kind::f32 : Kind::bf16;
    item.g.kind = item.g.kind == Kind::f32 ? Kind::f32 : Kind::bf16;
  }
  // whether Collage may compute, as on the CPU, and does with second moments in two parts
  constexpr bool kComputes = !Usual && std::is_same_v<Rule, AdamW> && std::is_same_v<M, BF16>;
  constexpr bool kParts = kComputes && kPaired<V>;
  const bool p_parts = kComputes && item.p.kind == Kind::bf16x2;
  if (p_parts) {  // bf16 with what its rounding has lost, but for the arithmetic
    item.lost = {item.p.side, nullptr, Kind::bf16};
    item.p.kind = Kind::bf16;
  }
  const Operand source = item.master.codes ? item.master : item.p;
  const bool scaled_p = is_scaled(item.p.kind), scaled_master = item.master.codes && is_scaled(item.master.kind);
  const float source_scale = !is_scaled(source.kind) ? 1.f
                             : shared.measure        ? *reinterpret_cast<const float*>(source.side)
                                              : item.scales->old[item.master.codes ? Scales::kMaster : Scales::kP];
  const float g_scale = item.g.kind == Kind::e4m3t ? *reinterpret_cast<const float*>(item.g.side) : 1.f;
  // read where it is needed: registers are scarce
  const auto inverse = [&](bool scaled, int slot) { return scaled ? 1.f / item.scales->fresh[slot] : 1.f; };
  __shared__ Largest largest;
  largest.begin(item.amax);
  __syncthreads();
  uint32_t infs = 0;
#pragma unroll 1
  for (int turn = threadIdx.x / 32; turn < kUnitsOfBlock; turn += kWarps) {
    const int64_t unit = (blockIdx.x - item.first_block) * kUnitsOfBlock + turn;
    if (unit * kElements >= item.n) break;
    const int64_t i = unit * kElements + threadIdx.x % 32 * E, left = item.n - i;
    by_case((unit + 1) * kElements <= item.n, [&](auto whole) {
      constexpr bool kWhole = whole.value;
      Part<E> p_part, g_part, lost_part;
      Codes<M, E> m_codes;
      [[maybe_unused]] Codes<V, E> v_codes;
      p_part.template fetch<kWhole>(source, i, left);
      g_part.template fetch<kWhole>(item.g, i, left);
      if (item.lost.codes) lost_part.template fetch<kWhole>(item.lost, i, left);
      m_codes.template fetch<kWhole>(item.m, i, left);
      if constexpr (Rule::moments == 2) v_codes.template fetch<kWhole>(item.v, i, left);
      float p[E], g[E], m[E], kept[E], lost[E];
      [[maybe_unused]] float v[E], v_low[E];
      m_codes.template decode<kWhole>(item.m, open_at<kWhole>(item.m, i, left, item.scales, Scales::kM, shared), left,
                                      m);
      if constexpr (kParts)
        v_codes.parts(v, v_low);
      else if constexpr (Rule::moments == 2)
        v_codes.template decode<kWhole>(item.v, open_at<kWhole>(item.v, i, left, item.scales, Scales::kV, shared), left,
                                        v);
      p_part.decode(source.kind, source_scale, p);
      g_part.decode(item.g.kind, g_scale, g);
      if (item.lost.codes) {
        lost_part.decode(item.lost.kind, 1.f, lost);
        if (!p_parts) {
#pragma unroll
          for (int k = 0; k < E; ++k) p[k] = p[k] + lost[k];
        }
      }
#pragma unroll
      for (int k = 0; k < E; ++k) {
        if constexpr (kComputes) {
          if (kParts || p_parts) {
            TwoParts of_p{p[k], p_parts ? lost[k] : 0.f}, of_v{v[k], kParts ? v_low[k] : 0.f};
            Collage(rule).update(p_parts, kParts, of_p, g[k] * factor, m[k], of_v);
            p[k] = of_p.high, v[k] = of_v.high;
            if (p_parts) lost[k] = of_p.low;
            if constexpr (kParts) v_low[k] = of_v.low;
            continue;
          }
        }
        if constexpr (Rule::moments == 2)
          rule.update(p[k], g[k] * factor, m[k], v[k]);
        else
          rule.update(p[k], g[k] * factor, m[k]);
      }
      put_moment<kWhole>(item.m, i, left, m, shared, item.scales, Scales::kM, infs);
      if constexpr (kParts) {
        if (!shared.measure) v_codes.template put_parts<kWhole>(item.v, i, left, v, v_low);
      } else if constexpr (Rule::moments == 2) {
        put_moment<kWhole>(item.v, i, left, v, shared, item.scales, Scales::kV, infs);
      }
      round(shared, item.index, i, p, kept, lost);
      const auto see = [&](const float(&x)[E], int slot) {
        Range range;
#pragma unroll
        for (int k = 0; k < E; ++k)
          if (kWhole || k < left) range.add(x[k]);
        if (shared.measure) measure(range.max, item.scales, slot);
        if (!shared.measure) infs += range.infs;
      };
      if (scaled_p) see(kept, Scales::kP);
      if (scaled_master) see(p, Scales::kMaster);
      if (shared.measure) return;
      if (largest.of) {
        uint32_t most = 0;
#pragma unroll
        for (int k = 0; k < E; ++k)
          if (kWhole || k < left) most = max(most, bits_of(abs_(kept[k])));
        if (item.p.kind == Kind::bf16) most = bits_of(BFloat16::decode(BFloat16::encode(float_of(most))));
        largest.raise(most);
      }
      if (item.master.codes)
        p_part.template put<kWhole>(item.master, inverse(scaled_master, Scales::kMaster), i, left, p);
      if (item.lost.codes) lost_part.template put<kWhole>(item.lost, 1.f, i, left, lost);
      p_part.template put<kWhole>(item.p, inverse(scaled_p, Scales::kP), i, left, kept);
    });
  }
  if constexpr (!Usual || M::run != 0)
    count_infs_of_block(status, infs);
  else
    __syncthreads();
  largest.end();
}

// The new scales between the two launches.
void seal_scales(Scales* list, int count, const float* clip);

// ---- lists ----

// What an op has of all members of its list, whatever the rule; absent lists are empty.
struct Call {
  const char* op;
  const std::vector<Tensor>&p, &master, &lost, &g, &m, &v, &amax;
  Shared shared;
  std::vector<bool> taken;  // members that another kernel has; empty: none
};
template <class Args>
Call call_of(const char* op, const Args& args, const std::vector<Tensor>& v, const std::vector<Tensor>& amax,
             bool v_floor) {
  check_flat("m", args.m);
  check_flat("v", v);
  check_rounding(args.rounding, args.p, args.master, args.lost);
  const float* clip = args.clip ? args.clip.template as<float>() : nullptr;
  const Shared shared{clip, args.seed, args.rounding, v_floor, false};
  return {op, args.p, args.master, args.lost, args.g, args.m, v, amax, shared, {}};
}

// Pairs of formats that are worth a kernel of their own for parameters and gradients in f32 or bf16.
template <class M, class V>
constexpr bool kHot = (std::is_same_v<V, M> || std::is_same_v<V, Absent>)&&(
    std::is_same_v<M, F32> || std::is_same_v<M, BF16> || std::is_same_v<M, E4M3G128>);
template <class M, class V>
bool are_usual(const Item<M, V>& item) {
  const auto plain = [](const Operand& x) { return x.kind == Kind::f32 || x.kind == Kind::bf16; };
  return plain(item.p) && plain(item.g) && !item.lost.codes;
}

// Launches the kernel for the members whose moments have the formats of M and V.
template <class Rule, class M, class V>
void run_pair(const Rule& rule, const Call& call) {
  constexpr int64_t kChunk = kUnitsOfBlock * kUnit<M, V>;
  std::vector<Item<M, V>> items;
  std::vector<Scales> scales;
  int64_t blocks = 0;
  const auto at = [](const std::vector<Tensor>& list, size_t i) { return list.empty() ? Tensor{} : list[i]; };
  for (size_t i = 0; i < call.p.size(); ++i) {
    const Tensor &p = call.p[i], &m = call.m[i], v = at(call.v, i);
    const int64_t n = p.shape.numel();
    if (!(m.format == M::format()) || (v && !(v.format == V::format())) || n == 0) continue;
    if (!call.taken.empty() && call.taken[i]) continue;
    items.push_back({M(m), Second<V>(v), operand_of(p), operand_of(at(call.master, i)), operand_of(at(call.lost, i)),
                     operand_of(call.g[i]), nullptr, at(call.amax, i).template as<uint32_t>(), n, blocks,
                     static_cast<int64_t>(i)});
    Scales of{};
    const Tensor master = at(call.master, i);
    const Tensor* tensors[] = {&p, &m, &v, &master};
    for (int slot = 0; slot < Scales::kCount; ++slot)
      if (*tensors[slot] && tensors[slot]->format.scaling == Scaling::tensor) {
        of.scale[slot] = tensors[slot]->template scales<float>();
        of.type[slot] = tensors[slot]->format.dtype;
      }
    scales.push_back(of);
    blocks += (n + kChunk - 1) / kChunk;
  }
  if (items.empty()) return;
  const int count = static_cast<int>(items.size());
  const bool measured = std::any_of(scales.begin(), scales.end(), [](const Scales& of) {
    return std::any_of(of.scale, of.scale + Scales::kCount, [](const float* scale) { return scale != nullptr; });
  });
  // the table, and the scales behind it
  constexpr int64_t kItem = sizeof(Item<M, V>), kScales = sizeof(Scales);
  static_assert(kItem % alignof(Scales) == 0);
  const Scratch table(count * (kItem + (measured ? kScales : 0)));
  Scales* const of_device = reinterpret_cast<Scales*>(table.template as<uint8_t>() + count * kItem);
  if (measured) {
    copy_in(reinterpret_cast<uint8_t*>(of_device), scales.data(), count * kScales);
    for (int i = 0; i < count; ++i) items[i].scales = of_device + i;
  }
  copy_in(table.template as<uint8_t>(), items.data(), count * kItem);
  const auto walk = [&](bool measure) {
    Shared shared = call.shared;
    shared.measure = measure;
    const auto start = [&](auto kernel) {
      launch(call.op, kernel, static_cast<unsigned>(blocks), kWarps * 32, 0, table.template as<Item<M, V>>(), count,
             rule, shared, call.p[0].status);
    };
    if constexpr (kHot<M, V>) {
      if (call.shared.rounding == kNearest && std::all_of(items.begin(), items.end(), are_usual<M, V>))
        return start(adamw_kernel<Rule, M, V, true>);
    }
    start(adamw_kernel<Rule, M, V, false>);
  };
  if (measured) {
    walk(true);
    seal_scales(of_device, count, call.shared.clip);
  }
  walk(false);
}

// The pairs of formats of a list, each with a kernel of its own.
template <class M, class V>
struct Pair {};
template <class... P>
struct Pairs {};
template <class Rule, class... M, class... V>
void run_pairs(const Rule& rule, const Call& call, Pairs<Pair<M, V>...>) {
  (run_pair<Rule, M, V>(rule, call), ...);
}

// The pairs of ops.def, in files that compile side by side.
void run_plain(const AdamW& rule, const Call& call);
void run_runs(const AdamW& rule, const Call& call);
void run_expanded(const AdamW& rule, const Call& call);
// The formats of ops.def for rules with one moment.
template <class Rule, class... M>
void run_single(const Rule& rule, const Call& call, Views<M...>) {
  (run_pair<Rule, M, Absent>(rule, call), ...);
}
using SingleViews = Views<F32, BF16, F16T, E4M3T, E4M3G64, E4M3G128, E4M3G256, E4M3X64, E4M3X128, E4M3X256, E5M2G128,
                          E5M2X128, D8G256, D4G128>;

}  // namespace coat::cuda::generic
