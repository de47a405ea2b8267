// Tensor maps, encoded by the driver, which is found at run time: the addon links to no driver library.
#include "hopper.cuh"

namespace coat::cuda {

CUtensorMap tensor_map(const char* op, const void* codes, int size, int64_t lines, int64_t width, int64_t stride,
                       int tile_lines) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion");
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (!encode) fail("cuda", "device", op, ": the driver cannot encode tensor maps; it must support CUDA 12.0");
  const auto type = size == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(lines)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * size)};
  const cuuint32_t tile[2] = {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(tile_lines)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 2, const_cast<void*>(codes), sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail("cuda", "device", op, ": no tensor map for [", lines, ", ", width, "] with ", stride, " codes of ", size,
         " bytes a line: driver error ", static_cast<int>(result));
  return map;
}

}  // namespace coat::cuda
