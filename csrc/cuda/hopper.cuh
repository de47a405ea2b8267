// What only Hopper has: tensor maps and the copy engine that reads and writes tiles by them, barriers in shared memory
// that count its bytes, products of warpgroups, clusters. The only inline PTX of this kind.
#pragma once
#include <cuda.h>

#include "device.cuh"

namespace coat::cuda {

// ---- tensor maps (host) ----

// A matrix [lines, width] of codes of `size` bytes, `stride` bytes from line to line, read or written in tiles of 128
// bytes by `tile_lines` lines that stand in shared memory in swizzled rows of 128 bytes. Reading outside gives zeros,
// writing outside does nothing.
CUtensorMap tensor_map(const char* op, const void* codes, int size, int64_t lines, int64_t width, int64_t stride,
                       int tile_lines);
// The same of bf16 codes [sequences, lines, heads, width], whose lines are `stride` codes apart: a tile lies in one
// head of one sequence.
CUtensorMap tensor_map_of_heads(const char* op, const void* codes, int64_t sequences, int64_t lines, int64_t heads,
                                int64_t width, int64_t stride, int tile_lines);

// ---- shared memory ----

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// Where 16-byte piece `piece` of line `line` stands in a tile of lines of 128 bytes.
__device__ inline uint32_t swizzled(int line, int piece) {
  return static_cast<uint32_t>(line * 128 + ((piece ^ line) & 7) * 16);
}
// Makes ordinary writes to shared memory visible to the copy engine and the tensor cores.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- barriers ----

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at the barrier of this address in block `block` of the cluster, in no order with ordinary writes.
__device__ inline void barrier_arrive(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; mbarrier.arrive.shared::cluster.b64 _, "
      "[remote];}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
// Waits for the `threads` threads that meet at number `name`.
__device__ inline void meet(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// Counts as meeting, without waiting.
__device__ inline void meet_later(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ---- clusters ----

__device__ inline uint32_t block_of_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- the copy engine ----

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The tile whose first code is at (line, column), to shared memory at `to`; its bytes count at `barrier`.
__device__ inline void load_tile(const CUtensorMap& map, uint32_t to, uint32_t barrier, int line, int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(line)
      : "memory");
}
// The same to the same addresses of all blocks of `mask`.
__device__ inline void load_tile_to(uint16_t mask, const CUtensorMap& map, uint32_t to, uint32_t barrier, int line,
                                    int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(line), "h"(mask)
      : "memory");
}
__device__ inline void store_tile(const CUtensorMap& map, uint32_t from, int line, int column) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(from), "r"(column), "r"(line)
               : "memory");
}
// Tiles of a map of heads.
__device__ inline void load_tile(const CUtensorMap& map, uint32_t to, uint32_t barrier, int sequence, int line,
                                 int head, int column) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(line), "r"(sequence)
      : "memory");
}
__device__ inline void store_tile(const CUtensorMap& map, uint32_t from, int sequence, int line, int head, int column) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(column), "r"(head), "r"(line), "r"(sequence)
               : "memory");
}
// Bytes in a row, in multiples of 16.
__device__ inline void load_bytes(const void* from, uint32_t to, uint32_t barrier, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// 16 bytes, there after fetches_done() of the same thread. `Shared`: through the first cache, for sectors that are
// fetched in halves.
template <bool Shared = false>
__device__ inline void fetch_piece(uint32_t to, const void* from) {
  if constexpr (Shared)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void fetches_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ inline void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the stores of this thread have read their shared memory.
__device__ inline void stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit codes to shared memory; the lane gives the address of line lane % 8 of matrix lane / 8.
__device__ inline void store_matrices(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

// Neighbours to shared memory at once.
__device__ inline void put_shared(uint32_t at, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}
__device__ inline void put_shared(uint32_t at, uint16_t codes) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(codes) : "memory");
}

__device__ inline float2 get_shared(uint32_t at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}
// What lies there in block `block` of the cluster.
__device__ inline float4 get_shared_of(uint32_t block, uint32_t at) {
  float4 x;
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, "
      "[remote];}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(at), "r"(block)
      : "memory");
  return x;
}

// The number of this thread's warpgroup in its block, known to the compiler to be that of the whole warp.
__device__ inline int warpgroup() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0); }
// The number of this thread in its warpgroup, read again every time: a register less to keep.
__device__ inline int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % 128;
}

// ---- loads that stay before the products that hide their latency; nobody writes there meanwhile ----

__device__ inline float load_now(const float* from) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(from));
  return x;
}
__device__ inline float2 load_now(const float2* from) {
  float2 x;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from));
  return x;
}

// ---- registers ----

template <int Count>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// ---- products of a warpgroup: sums [64, 64 to 256] += a [64, 32 bytes] b^T [64 to 256, 32 bytes] ----

// Where an operand stands in shared memory, in tiles of lines of 128 bytes. Along K: 8 lines are 1024 bytes. Across it:
// 8 lines of K are 1024 bytes, and tiles of 64 codes are `apart` bytes apart.
__device__ inline uint64_t operand_at(uint32_t address, uint32_t apart) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(apart >> 4) << 16 | 64ull << 32 |
         1ull << 62;
}
// The operand `bytes` further on.
__device__ inline uint64_t operand_after(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Open>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Open) : "memory");
}
// Keeps the compiler from moving uses of the sums over what is asynchronous.
template <int Count>
__device__ inline void hold(float (&sums)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Codes of pairs as the words they are: else the compiler takes words apart that are read in halves, too, and joins
// them again for the products.
template <int Count>
__device__ inline void hold(uint32_t (&codes)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(codes[i]));
}

// The same number, of which the compiler does not know that: it computes again what follows from it.
__device__ inline unsigned anew(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

#define COAT_SUMS_8(s, i)                                                                                     \
  "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), \
      "+f"(s[i + 7])
#define COAT_MADE_8(s, i)                                                                                     \
  "=f"(s[i]), "=f"(s[i + 1]), "=f"(s[i + 2]), "=f"(s[i + 3]), "=f"(s[i + 4]), "=f"(s[i + 5]), "=f"(s[i + 6]), \
      "=f"(s[i + 7])
#define COAT_SUMS_32(s, i) COAT_SUMS_8(s, i), COAT_SUMS_8(s, i + 8), COAT_SUMS_8(s, i + 16), COAT_SUMS_8(s, i + 24)
#define COAT_SUMS_64(s, i) COAT_SUMS_32(s, i), COAT_SUMS_32(s, i + 32)
#define COAT_LIST_32                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define COAT_LIST_64                                                                 \
  COAT_LIST_32                                                                       \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define COAT_LIST_128                                                                            \
  COAT_LIST_64                                                                                   \
  ", "                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define COAT_FP8(types)                                                                                   \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32." types \
               " {" COAT_LIST_64 "}, %64, %65, p, 1, 1;}"                                                 \
               : COAT_SUMS_64(s, 0)                                                                       \
               : "l"(a), "l"(b), "r"(adds))
// From zero when `adds` is 0.
template <class A, class B>
__device__ inline void multiply(float (&s)[64], uint64_t a, uint64_t b, int adds) {
  if constexpr (std::is_same_v<A, E4M3>)
    COAT_FP8("e4m3.e4m3");
  else
    COAT_FP8("e5m2.e4m3");
}
#undef COAT_FP8
#define COAT_BF16(n, list, a, b, p, types, ...)                                              \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned.m64n" n \
               "k16.f32.bf16.bf16 {" list "}, " a ", " b ", p, 1, 1, " types ";}" __VA_ARGS__)
template <bool AlongA, bool AlongB>
__device__ inline void multiply(float (&s)[32], uint64_t a, uint64_t b, int adds = 1) {
  COAT_BF16("64", COAT_LIST_32, "%32", "%33", "%34", "%35, %36",
            : COAT_SUMS_32(s, 0)
            : "l"(a), "l"(b), "r"(adds), "n"(AlongA ? 0 : 1), "n"(AlongB ? 0 : 1));
}
// The first of several products: what the sums were is lost, and their registers are free until here.
template <bool AlongA, bool AlongB>
__device__ inline void multiply_first(float (&s)[32], uint64_t a, uint64_t b) {
  COAT_BF16("64", COAT_LIST_32, "%32", "%33", "%34", "%35, %36",
            : COAT_MADE_8(s, 0), COAT_MADE_8(s, 8), COAT_MADE_8(s, 16), COAT_MADE_8(s, 24)
            : "l"(a), "l"(b), "n"(0), "n"(AlongA ? 0 : 1), "n"(AlongB ? 0 : 1));
}
template <bool AlongA, bool AlongB>
__device__ inline void multiply(float (&s)[64], uint64_t a, uint64_t b, int adds = 1) {
  COAT_BF16("128", COAT_LIST_64, "%64", "%65", "%66", "%67, %68",
            : COAT_SUMS_64(s, 0)
            : "l"(a), "l"(b), "r"(adds), "n"(AlongA ? 0 : 1), "n"(AlongB ? 0 : 1));
}
template <bool AlongA, bool AlongB>
__device__ inline void multiply(float (&s)[128], uint64_t a, uint64_t b, int adds = 1) {
  COAT_BF16("256", COAT_LIST_128, "%128", "%129", "%130", "%131, %132",
            : COAT_SUMS_64(s, 0), COAT_SUMS_64(s, 64)
            : "l"(a), "l"(b), "r"(adds), "n"(AlongA ? 0 : 1), "n"(AlongB ? 0 : 1));
}
// The same with a in registers: what a lane holds of 16 of K are the codes of pairs of neighbours of the sums of a
// product, rounded.
#define COAT_HELD(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
template <bool AlongB>
__device__ inline void multiply_held(float (&s)[32], const uint32_t* a, uint64_t b, int adds = 1) {
  COAT_BF16("64", COAT_LIST_32, "{%32, %33, %34, %35}", "%36", "%37", "%38",
            : COAT_SUMS_32(s, 0)
            : COAT_HELD(a), "l"(b), "r"(adds), "n"(AlongB ? 0 : 1));
}
template <bool AlongB>
__device__ inline void multiply_held(float (&s)[64], const uint32_t* a, uint64_t b, int adds = 1) {
  COAT_BF16("128", COAT_LIST_64, "{%64, %65, %66, %67}", "%68", "%69", "%70",
            : COAT_SUMS_64(s, 0)
            : COAT_HELD(a), "l"(b), "r"(adds), "n"(AlongB ? 0 : 1));
}
template <bool AlongB>
__device__ inline void multiply_held(float (&s)[128], const uint32_t* a, uint64_t b, int adds = 1) {
  COAT_BF16("256", COAT_LIST_128, "{%128, %129, %130, %131}", "%132", "%133", "%134",
            : COAT_SUMS_64(s, 0), COAT_SUMS_64(s, 64)
            : COAT_HELD(a), "l"(b), "r"(adds), "n"(AlongB ? 0 : 1));
}
#undef COAT_HELD
#undef COAT_BF16
#undef COAT_SUMS_64
#undef COAT_SUMS_32
#undef COAT_SUMS_8
#undef COAT_MADE_8
#undef COAT_LIST_32
#undef COAT_LIST_64
#undef COAT_LIST_128

}  // namespace coat::cuda
