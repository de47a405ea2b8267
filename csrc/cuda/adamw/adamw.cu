// adamw: one launch over the runs of a whole list of parameters: decode moments, update, range, seal, store.
#include "../../contract.h"
#include "adamw.cuh"

namespace coat::cuda {
namespace {

constexpr int kPart = 4;  // a lane has a part of the run of its warp
constexpr int kRunsOfBlock = 16;
constexpr int64_t kChunk = kRunsOfBlock * kRun;  // elements of a block

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

}  // namespace

void adamw(const adamw_args& args) {
  check_flat("m", args.m);
  check_flat("v", args.v);
  List<F32>(args, kChunk).run(adamw_kernel<F32>, args);
  List<BF16>(args, kChunk).run(adamw_kernel<BF16>, args);
  List<E4M3G128>(args, kChunk).run(adamw_kernel<E4M3G128>, args);
  adamw_expanded(args);
}

}  // namespace coat::cuda
