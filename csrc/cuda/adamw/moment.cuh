// Moments: their formats are compiled.
#pragma once
#include "../lanes.cuh"

namespace coat::cuda::generic {

// The view of a rule that has no second moment.
struct Absent {
  static constexpr Format format() { return F32::format(); }
  static constexpr int run = 0;
  struct Open {};
  struct Sealed {};
  Float32* codes = nullptr;
  explicit Absent(const Tensor&) {}
};

template <class V>
constexpr bool kHalves = V::format().dtype == DType::d4 || V::format().dtype == DType::u4;  // codes of 4 bits
template <class V>
constexpr bool kPaired = kScaling<V> == Scaling::remainder;
template <class V>
constexpr bool kOfTensor = kScaling<V> == Scaling::tensor;

// Elements that a warp works on at a time: whole runs of both moments, and at least four bytes of codes a lane.
template <class M, class V>
constexpr int kUnit = std::max({128, M::run, V::run, kHalves<M> || kHalves<V> ? 256 : 0});

template <class V, class... List>
constexpr bool has_floor(Views<List...>) {
  return (std::is_same_v<Floored<V>, List> || ...);
}
// The view of a second moment: with a floor where its format may have one, and without.
template <class V>
using Second = std::conditional_t<has_floor<V>(FlooredViews{}), Floored<V>, V>;
template <class V>
struct Bare {
  using View = V;
};
template <class V>
struct Bare<Floored<V>> {
  using View = V;
};

// E elements of a moment.
template <class V, int E>
struct Codes {
  Lane<CodeOf<V>, kHalves<V> ? E / 2 : E> lane;
  Lane<BFloat16, kPaired<V> ? E : 2> low;

  template <bool Whole>
  __device__ void fetch(const V& view, int64_t i, int64_t left) {
    if constexpr (kHalves<V>)
      lane.template fetch<Whole>(view.codes, i / 2, (left + 1) / 2);
    else
      lane.template fetch<Whole>(view.codes, i, left);
    if constexpr (kPaired<V>) low.template fetch<Whole>(view.low, i, left);
  }
  template <bool Whole>
  __device__ void decode(const V& view, typename V::Open open, int64_t left, float (&x)[E]) {
    if constexpr (!kHalves<V> && !kPaired<V>) {
      lane.decode(view, open, x);
    } else {
      const V held = here(view);
#pragma unroll
      for (int k = 0; k < E; ++k) x[k] = held.load(k, open);
    }
    if constexpr (!Whole && kScaling<V> == Scaling::flat) {  // the first code of a map is not that of 0
#pragma unroll
      for (int k = 0; k < E; ++k) x[k] = k < left ? x[k] : 0.f;
    }
  }
  template <bool Whole, class As>
  __device__ void put(const As& view, typename V::Sealed sealed, int64_t i, int64_t left, const float (&x)[E]) {
    if constexpr (!kHalves<V> && !kPaired<V>) {
      lane.encode(view, sealed, x);
    } else {
      const As held = here(view);
#pragma unroll
      for (int k = 0; k < E; ++k)
        if (Whole || !kHalves<V> || k < left) held.store(k, sealed, x[k]);
    }
    if constexpr (kHalves<V>)
      lane.template put<Whole>(view.codes, i / 2, (left + 1) / 2);
    else
      lane.template put<Whole>(view.codes, i, left);
    if constexpr (kPaired<V>) low.template put<Whole>(view.low, i, left);
  }

  // Both parts of what has two, and back.
  __device__ void parts(float (&high)[E], float (&second)[E]) const {
#pragma unroll
    for (int k = 0; k < E; ++k)
      high[k] = BFloat16::decode(lane.code[k].code), second[k] = BFloat16::decode(low.code[k].code);
  }
  template <bool Whole>
  __device__ void put_parts(const V& view, int64_t i, int64_t left, const float (&high)[E], const float (&second)[E]) {
#pragma unroll
    for (int k = 0; k < E; ++k)
      lane.code[k].code = BFloat16::encode(high[k]), low.code[k].code = BFloat16::encode(second[k]);
    lane.template put<Whole>(view.codes, i, left);
    low.template put<Whole>(view.low, i, left);
  }

 private:
  // The view with its codes in registers.
  template <class As>
  __device__ As here(As view) {
    view.codes = lane.code;
    if constexpr (kPaired<V>) view.low = low.code;
    return view;
  }
};

}  // namespace coat::cuda::generic
