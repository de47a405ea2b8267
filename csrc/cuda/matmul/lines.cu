// Stored lines of operands on 16-byte boundaries, as the copy engine and vectors of 16 bytes need them, and FP8 codes
// as bf16, which has them all.
#include "products.cuh"

namespace coat::cuda {
namespace {

constexpr int kThreads = 256;

// Lines of `width` codes to lines of `stride`, with zeros between. One block a line. Bytes per code: it is read and
// written once.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    matmul_kernel_padded(const From* from, To* to, int64_t lines, int64_t width, int64_t stride) {
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x)
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < stride; i += kThreads) {
      To code{};
      if (i < width) {
        if constexpr (std::is_same_v<From, To>)
          code = from[line * width + i];
        else
          code.code = To::encode(From::decode(from[line * width + i].code));
      }
      to[line * stride + i] = code;
    }
}

}  // namespace

Lines lines_of(const char* name, const Tensor& x, int64_t bytes, std::optional<Scratch>& room) {
  const int64_t lines = x.shape.dims[0], width = x.shape.dims[1];
  const bool widens = bytes != code_bytes(x.format.dtype, 1);
  if (!widens && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && width * bytes % 16 == 0)
    return {x.data, lines, width, width};
  const int64_t stride = (width * bytes + 15) / 16 * 16 / bytes;
  room.emplace(lines * stride * bytes);
  const auto copy = [&](auto from, auto to) {
    using From = decltype(from);
    using To = decltype(to);
    launch(name, matmul_kernel_padded<From, To>, blocks_for(lines, 1), kThreads, 0, x.as<From>(), room->as<To>(), lines,
           width, stride);
  };
  if (widens)
    x.format.dtype == DType::e4m3 ? copy(E4M3{}, BFloat16{}) : copy(E5M2{}, BFloat16{});
  else
    bytes == 4 ? copy(uint32_t{}, uint32_t{}) : bytes == 2 ? copy(uint16_t{}, uint16_t{}) : copy(uint8_t{}, uint8_t{});
  return {room->as<uint8_t>(), lines, width, stride};
}

}  // namespace coat::cuda
