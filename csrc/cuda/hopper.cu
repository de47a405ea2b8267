// Tensor maps, encoded by the driver, which is found at run time: the addon links to no driver library.
#include "hopper.cuh"

namespace coat::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder(const char* op) {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion");
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (!encode) fail("cuda", "device", op, ": the driver cannot encode tensor maps; it must support CUDA 12.0");
  return encode;
}

// Sizes from the innermost axis outwards, in codes; strides of the other axes in bytes.
template <int Rank>
CUtensorMap map_of(const char* op, const void* codes, int size, const cuuint64_t (&sizes)[Rank],
                   const cuuint64_t (&strides)[Rank - 1], const cuuint32_t (&tile)[Rank]) {
  const auto type = size == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  cuuint32_t steps[Rank];
  std::fill(steps, steps + Rank, 1);
  CUtensorMap map;
  const CUresult result = encoder(op)(&map, type, Rank, const_cast<void*>(codes), sizes, strides, tile, steps,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail("cuda", "device", op, ": no tensor map for lines of ", sizes[0], " codes of ", size, " bytes, ", strides[0],
         " bytes apart: driver error ", static_cast<int>(result));
  return map;
}

}  // namespace

CUtensorMap tensor_map(const char* op, const void* codes, int size, int64_t lines, int64_t width, int64_t stride,
                       int tile_lines) {
  const auto u = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  return map_of<2>(op, codes, size, {u(width), u(lines)}, {u(stride * size)},
                   {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(tile_lines)});
}

CUtensorMap tensor_map_of_heads(const char* op, const void* codes, int64_t sequences, int64_t lines, int64_t heads,
                                int64_t width, int64_t stride, int tile_lines) {
  const auto u = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  return map_of<4>(op, codes, 2, {u(width), u(heads), u(lines), u(sequences)},
                   {u(width * 2), u(stride * 2), u(lines * stride * 2)},
                   {64, 1, static_cast<cuuint32_t>(tile_lines), 1});
}

}  // namespace coat::cuda
