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

// A tensor of f32 in scratch, of the shape of another: what every format is read into and written from.
struct Plainly {
  Scratch memory;
  Tensor tensor;
  explicit Plainly(const Tensor& like)
      : memory(like.shape.numel() * static_cast<int64_t>(sizeof(float))), tensor(like) {
    tensor.format = F32::format();
    tensor.data = memory.as<uint8_t>();
  }
};

// Between the formats of operands and activations, each to each.
void requantize(const Tensor& x, const Tensor& scale, const Tensor& y);

// Formats that only states and parameters have: to and from f32 and bf16 directly, else through f32.
bool is_state(const Format& format);
void convert_states(const Tensor& x, const Tensor& scale, const Tensor& y);

}  // namespace coat::cuda
