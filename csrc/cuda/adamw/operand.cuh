// Parameters, masters, gradients and what roundings have lost: their format is a branch at run time.
#pragma once
#include "../lanes.cuh"

namespace coat::cuda::generic {

enum class Kind : uint8_t { f32, bf16, bf16x2, f16t, e4m3t };
__host__ __device__ constexpr bool is_scaled(Kind kind) { return kind == Kind::f16t || kind == Kind::e4m3t; }

// A parameter, its master, what its rounding has lost, or a gradient.
struct Operand {
  uint8_t* codes = nullptr;  // null: absent
  uint8_t* side = nullptr;   // the scale, or the remainders
  Kind kind = Kind::f32;
};

inline Operand operand_of(const Tensor& t) {
  if (!t) return {};
  uint8_t* side = t.format.scaling == Scaling::none ? nullptr : t.scales<uint8_t>();
  if (t.format == F32::format()) return {t.data, side, Kind::f32};
  if (t.format == BF16::format()) return {t.data, side, Kind::bf16};
  if (t.format == BF16X2::format()) return {t.data, side, Kind::bf16x2};
  if (t.format == F16T::format()) return {t.data, side, Kind::f16t};
  if (t.format == E4M3T::format()) return {t.data, side, Kind::e4m3t};
  fail("format", "p", text_of(t), " is no format of a parameter or gradient that adamw is compiled for");
}

// E elements of an operand: fetched first, decoded when needed.
template <int E>
struct Part {
  union {
    Lane<Float32, E> f32;
    struct {
      Lane<BFloat16, E> high, low;
    } two;
    Lane<Float16, E> half;
    Lane<E4M3, E> byte;
  };
  template <class Code>
  static __device__ const Code* at(const uint8_t* data) {
    return reinterpret_cast<const Code*>(data);
  }
  template <bool Whole>
  __device__ void fetch(const Operand& x, int64_t i, int64_t left) {
    if (x.kind == Kind::f32) {
      f32.template fetch<Whole>(at<Float32>(x.codes), i, left);
    } else if (x.kind == Kind::f16t) {
      half.template fetch<Whole>(at<Float16>(x.codes), i, left);
    } else if (x.kind == Kind::e4m3t) {
      byte.template fetch<Whole>(at<E4M3>(x.codes), i, left);
    } else {
      two.high.template fetch<Whole>(at<BFloat16>(x.codes), i, left);
      if (x.kind == Kind::bf16x2) two.low.template fetch<Whole>(at<BFloat16>(x.side), i, left);
    }
  }
  __device__ void decode(Kind kind, float scale, float (&x)[E]) const {
    if (kind == Kind::f32) {
#pragma unroll
      for (int k = 0; k < E; ++k) x[k] = f32.code[k].code;
    } else if (kind == Kind::f16t) {
#pragma unroll
      for (int k = 0; k < E; ++k) x[k] = Float16::decode(half.code[k].code) * scale;
    } else if (kind == Kind::e4m3t) {
#pragma unroll
      for (int k = 0; k < E; ++k) x[k] = E4M3::decode(byte.code[k].code) * scale;
    } else {
#pragma unroll
      for (int k = 0; k < E; ++k) x[k] = BFloat16::decode(two.high.code[k].code);
      if (kind == Kind::bf16x2) {
#pragma unroll
        for (int k = 0; k < E; ++k) x[k] = x[k] + BFloat16::decode(two.low.code[k].code);
      }
    }
  }
  // As the views of these formats store; inverse: of the scale.
  template <bool Whole>
  __device__ void put(const Operand& to, float inverse, int64_t i, int64_t left, const float (&x)[E]) {
    if (to.kind == Kind::f32) {
#pragma unroll
      for (int k = 0; k < E; ++k) f32.code[k].code = x[k];
      f32.template put<Whole>(reinterpret_cast<Float32*>(to.codes), i, left);
    } else if (to.kind == Kind::f16t) {
#pragma unroll
      for (int k = 0; k < E; ++k) half.code[k].code = Float16::encode(x[k] * inverse);
      half.template put<Whole>(reinterpret_cast<Float16*>(to.codes), i, left);
    } else if (to.kind == Kind::e4m3t) {
#pragma unroll
      for (int k = 0; k < E; ++k) byte.code[k].code = E4M3::encode(x[k] * inverse);
      byte.template put<Whole>(reinterpret_cast<E4M3*>(to.codes), i, left);
    } else {
#pragma unroll
      for (int k = 0; k < E; ++k) two.high.code[k].code = BFloat16::encode(x[k]);
      two.high.template put<Whole>(reinterpret_cast<BFloat16*>(to.codes), i, left);
      if (to.kind != Kind::bf16x2) return;
#pragma unroll
      for (int k = 0; k < E; ++k) {
        const float high = BFloat16::decode(two.high.code[k].code);
        two.low.code[k].code = abs_(high) < kInf ? BFloat16::encode(x[k] - high) : uint16_t{0};
      }
      two.low.template put<Whole>(reinterpret_cast<BFloat16*>(to.side), i, left);
    }
  }
};

}  // namespace coat::cuda::generic
