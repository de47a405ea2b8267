// Stored lines of operands on 16-byte boundaries, as the copy engine and vectors of 16 bytes need them.
#include "products.cuh"

namespace coat::cuda {
namespace {

constexpr int kThreads = 256;

// Lines of `width` codes to lines of `stride`, with zeros between. One block a line. Bytes per code: itself, twice.
template <class Code>
__global__ void __launch_bounds__(kThreads)
    matmul_kernel_padded(const Code* from, Code* to, int64_t lines, int64_t width, int64_t stride) {
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x)
    for (int64_t i = threadIdx.x; i < stride; i += kThreads)
      to[line * stride + i] = i < width ? from[line * width + i] : Code(0);
}

}  // namespace

Lines lines_of(const char* name, const Tensor& x, std::optional<Scratch>& room) {
  const int64_t lines = x.shape.dims[0], width = x.shape.dims[1], bytes = code_bytes(x.format.dtype, 1);
  if (reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && width * bytes % 16 == 0) return {x.data, lines, width, width};
  const int64_t stride = (width * bytes + 15) / 16 * 16 / bytes;
  room.emplace(lines * stride * bytes);
  const auto copy = [&](auto code) {
    using Code = decltype(code);
    launch(name, matmul_kernel_padded<Code>, blocks_for(lines, 1), kThreads, 0, x.as<Code>(), room->as<Code>(), lines,
           width, stride);
  };
  bytes == 4 ? copy(uint32_t{}) : bytes == 2 ? copy(uint16_t{}) : copy(uint8_t{});
  return {room->as<uint8_t>(), lines, width, stride};
}

}  // namespace coat::cuda
