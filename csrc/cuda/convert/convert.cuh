// What the files of convert share: measuring a scale, and the way through f32.
#pragma once
#include "../../ops.h"
#include "../lanes.cuh"

namespace coat::cuda {

// Bits of the largest finite |x|, merged into *measured, which starts at 0. 8 vectors of 16 bytes a thread. Reads x
// once.
template <class X>
__global__ void __launch_bounds__(kThreads) convert_kernel_measure(X x, Rows rows, uint32_t* measured) {
  const uint32_t largest = largest_of<true>(x, rows);
  if (threadIdx.x == 0 && largest > 0) atomicMax(measured, largest);
}

// use(given, measured): the scale given, or the maximum measured, or neither.
template <class Y, class X, class F>
void with_scale(const Tensor& tensor, const X& x, const Tensor& scale, F&& use) {
  if constexpr (kScaling<Y> != Scaling::tensor) {
    use(nullptr, nullptr);
  } else if (scale) {
    use(scale.as<float>(), nullptr);
  } else {
    const Scratch measured(sizeof(uint32_t));
    check(cudaMemsetAsync(measured.as<uint32_t>(), 0, sizeof(uint32_t), stream()), "convert");
    const Rows rows = rows_of<X>(tensor);
    launch("convert", convert_kernel_measure<X>, largest_blocks<X>(rows), kThreads, 0, x, rows,
           measured.as<uint32_t>());
    use(nullptr, measured.as<uint32_t>());
  }
}

// A tensor of f32 or bf16 in scratch, of the shape of another: what every format is read into and written from.
struct Plainly {
  Scratch memory;
  Tensor tensor;
  explicit Plainly(const Tensor& like, const Format& format = F32::format())
      : memory(bytes_of(format, like.shape)), tensor(like) {
    tensor.format = format;
    tensor.data = memory.as<uint8_t>();
  }
};

// Numbers in f32 or bf16, chosen at run time.
struct Numbers {
  F32 f32;
  BF16 bf16;
  bool narrow;
  explicit Numbers(const Tensor& t) : f32(t), bf16(t), narrow(t.format == BF16::format()) {}
  __device__ float load(int64_t i) const { return narrow ? bf16.load(i, {}) : f32.load(i, {}); }
  __device__ void store(int64_t i, float x) const { narrow ? bf16.store(i, {}, x) : f32.store(i, {}, x); }
};
inline bool is_plain(const Tensor& t) { return t.format == F32::format() || t.format == BF16::format(); }

// Between the formats of operands and activations, each to each.
void requantize(const Tensor& x, const Tensor& scale, const Tensor& y);

// Formats that only states and parameters have: to and from f32 and bf16 directly, else through f32.
bool is_state(const Format& format);
void convert_states(const Tensor& x, const Tensor& scale, const Tensor& y);

// Formats of operands alone, with scales of blocks or of powers of two, those of rows among them: to and from f32 and
// bf16 directly, else through f32.
inline bool is_operand(const Format& format) { return format.scaling == Scaling::block || format.pow2; }
void convert_blocks(const Tensor& x, const Tensor& y);
void convert_rows(const Tensor& x, const Tensor& y);

}  // namespace coat::cuda
