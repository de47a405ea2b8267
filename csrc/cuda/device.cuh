// What kernels share: the stream, launches that check, reductions over a block, loads and stores of 16 elements.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "../formula.h"
#include "device.h"

namespace coat::cuda {

cudaStream_t stream();
int multiprocessors();
// kCounters zeros, which a kernel leaves as it found them.
uint32_t* counters();
constexpr int kCounters = 1024;
void check(cudaError_t result, const char* what);
bool waits_after_every_op();

// Memory while a graph is recorded, and whether one is; release_recorded: whether the block was such memory.
bool records();
uint8_t* allocate_recorded(int64_t bytes);
bool release_recorded(uint8_t* data);

// The ways to start a kernel; all check.
template <class... Parameters>
void allow_shared(const char* name, void (*kernel)(Parameters...), size_t shared) {
  if (shared > 32 * 1024)  // with the static part it must not exceed 48 KiB unless asked for
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), name);
}
template <class... Parameters, class... Given>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Given&&... given) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared(name, kernel, shared);
  kernel<<<grid, block, shared, stream()>>>(Parameters(given)...);
  check(cudaGetLastError(), name);
}
template <class... Parameters, class... Given>
void launch_as(cudaLaunchAttribute attribute, const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
               size_t shared, Given&&... given) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared(name, kernel, shared);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream();
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(given)...), name);
}

// In clusters of `cluster` neighbours of the grid.
template <class... Parameters, class... Given>
void launch_clusters(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster,
                     size_t shared, Given&&... given) {
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim.x = cluster;
  size.val.clusterDim.y = size.val.clusterDim.z = 1;
  launch_as(size, name, kernel, grid, block, shared, given...);
}

// A kernel that may begin while the one before it in the stream ends, which hides the time of a launch: it calls
// after_previous() before it touches memory, and what it waits for may call let_next_begin() early.
template <class... Parameters, class... Given>
void launch_next(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                 Given&&... given) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  launch_as(overlap, name, kernel, grid, block, shared, given...);
}
__device__ inline void after_previous() { cudaGridDependencySynchronize(); }
__device__ inline void let_next_begin() { cudaTriggerProgrammaticLaunchCompletion(); }

// Blocks for `work` pieces of `per_block`, at most `waves` a multiprocessor: kernels walk the rest in strides of the
// grid.
inline unsigned blocks_for(int64_t work, int64_t per_block, int64_t waves = 16) {
  const int64_t blocks = (work + per_block - 1) / per_block;
  return static_cast<unsigned>(std::min<int64_t>(blocks, multiprocessors() * waves));
}

// Memory of one op, freed in stream order when it goes out of scope.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(allocate(bytes < 1 ? 1 : bytes)) {
    if (!data_) fail("out_of_memory", "device", "out of memory on cuda: requested ", bytes, " bytes of scratch");
  }
  ~Scratch() { release(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint8_t* data_;
};

// ---- reductions, in an order fixed by the size of the block ----

template <class T>
__device__ inline T warp_sum(T x) {
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ inline uint32_t warp_max(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Sum over the block, in every thread. All threads must call it; blockDim.x is a multiple of 32, at most 1024.
template <class T>
__device__ inline T block_sum(T x) {
  __shared__ T partial[32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : T(0);
  return warp_sum(x);
}
__device__ inline uint32_t block_max(uint32_t x) {
  __shared__ uint32_t partial[32];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0u;
  return warp_max(x);
}

// Whether this block is the last of `blocks` to come here: it sees what all of them wrote before, past the first cache.
// *counter, one of counters(), is 0 again afterwards. All threads of the block must call it.
__device__ inline bool is_last(uint32_t* counter, uint32_t blocks) {
  __threadfence();
  __syncthreads();
  const bool last = __syncthreads_or(threadIdx.x == 0 && atomicInc(counter, blocks - 1) == blocks - 1);
  if (last) __threadfence();
  return last;
}

// Reports a broken rule; the first report stays.
__device__ inline void report(Status* status, Fault fault, int64_t index, int64_t value, int64_t limit) {
  if (atomicCAS(&status->fault, 0ull, static_cast<unsigned long long>(fault)) != 0ull) return;
  status->fault_index = index;
  status->fault_value = value;
  status->fault_limit = limit;
}

// ---- the special function unit ----

// 2^x, log2 x and 1 / x, nearly: relative errors of 2^-22 and, of the logarithm, absolute ones where |log2 x| < 1.
__device__ inline float exp2_near(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_near(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float inverse_near(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- codes ----

template <class View>
using CodeOf = std::remove_reference_t<decltype(*std::declval<View>().codes)>;

// Two neighbours in one instruction where there is one: the values of decode and encode of format.h one by one, but for
// the bits of a NaN. 8-bit codes lie in the low half of a word.
template <class Code>
__device__ inline float2 decode_pair(uint32_t codes) {
  if constexpr (std::is_same_v<Code, BFloat16>)
    return make_float2(float_of(codes << 16), float_of(codes & 0xffff0000u));
  else if constexpr (std::is_same_v<Code, Float16>)
    return make_float2(Float16::decode(static_cast<uint16_t>(codes)),
                       Float16::decode(static_cast<uint16_t>(codes >> 16)));
  else if constexpr (std::is_same_v<Code, Int8>)
    return make_float2(Int8::decode(static_cast<uint8_t>(codes)), Int8::decode(static_cast<uint8_t>(codes >> 8)));
  else
    return __half22float2(
        __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(codes), std::is_same_v<Code, E4M3> ? __NV_E4M3 : __NV_E5M2));
}
template <class Code>
__device__ inline uint32_t encode_pair(float a, float b) {
  if constexpr (std::is_same_v<Code, BFloat16>) {
    const __nv_bfloat162_raw two = __floats2bfloat162_rn(a, b);
    return two.x | static_cast<uint32_t>(two.y) << 16;
  } else if constexpr (std::is_same_v<Code, Float16>) {
    return Float16::encode(a) | static_cast<uint32_t>(Float16::encode(b)) << 16;
  } else if constexpr (std::is_same_v<Code, Int8>) {
    return Int8::encode(a) | static_cast<uint32_t>(Int8::encode(b)) << 8;
  } else {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE,
                                    std::is_same_v<Code, E4M3> ? __NV_E4M3 : __NV_E5M2);
  }
}
// Four FP8 codes, the first in the lowest byte.
template <class Code>
__device__ inline uint32_t encode_four(float a, float b, float c, float d) {
  uint32_t codes;
  if constexpr (std::is_same_v<Code, E4M3>)
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  else
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// Four words of four bytes as a matrix, transposed.
__device__ inline void turn_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const uint32_t ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab, cd, 0x5410);
  b = __byte_perm(ab, cd, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410);
  d = __byte_perm(ab_high, cd_high, 0x7632);
}

// ---- 16 elements a thread: i is a multiple of 16 and all 16 lie inside the tensor and the row ----

template <class View>
__device__ inline void load16(const View& view, int64_t i, typename View::Open open, float (&x)[16]) {
  using Code = CodeOf<View>;
  constexpr int kVectors = sizeof(Code);  // 16 elements of n bytes are n vectors of 16 bytes
  union {
    int4 vector[kVectors];
    Code code[16];
  } raw;
  const int4* from = reinterpret_cast<const int4*>(view.codes + i);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) raw.vector[v] = from[v];
  View held = view;
  held.codes = raw.code;
#pragma unroll
  for (int k = 0; k < 16; ++k) x[k] = held.load(k, open);
}

template <class View>
__device__ inline void store16(const View& view, int64_t i, typename View::Sealed sealed, const float (&x)[16]) {
  using Code = CodeOf<View>;
  constexpr int kVectors = sizeof(Code);
  union {
    int4 vector[kVectors];
    Code code[16];
  } raw;
  View held = view;
  held.codes = raw.code;
#pragma unroll
  for (int k = 0; k < 16; ++k) held.store(k, sealed, x[k]);
  int4* to = reinterpret_cast<int4*>(view.codes + i);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) to[v] = raw.vector[v];
}

}  // namespace coat::cuda
