// Products on the tensor cores: the kernel for bf16 and FP8 operands in all three forms.
#pragma once
#include "../hopper.cuh"

namespace coat::cuda {

// One call, as the kernel sees it. M and N are those of y; steps run along K.
struct Product {
  int64_t M, N;
  int steps;
  unsigned down, across;         // tiles of a cluster in y
  const float *a_scale, *b_scale;  // null: 1
  const uint8_t* bias;           // null: none
  bool bias_bf16;
  bool by_tiles;  // y is written by the copy engine
};

constexpr int kTileRows = 128, kHalf = 128;  // rows of y a block, columns of it that a warpgroup multiplies at a time
constexpr int kProducts = 2;                 // warpgroups that multiply, 64 rows each
constexpr int kTensorThreads = (kProducts + 1) * 128;
constexpr int kBand = 8;                     // rows of clusters that run through all columns: they share b in L2
constexpr uint32_t kTileA = 16384, kHalfB = 16384, kStaging = 16384;

template <int Halves>
constexpr int kSlots = Halves == 2 ? 4 : 6;
template <int Halves>
constexpr uint32_t kSlotBytes = kTileA + Halves * kHalfB;
template <int Halves>
constexpr uint32_t kTensorShared = kSlots<Halves> * kSlotBytes<Halves> + kProducts * kStaging + 1024;

struct Place {
  int64_t m, n;
  __device__ Place(const Product& p, unsigned tile, int rows, int columns, unsigned rank) {
    const unsigned band = tile / p.across / kBand * kBand, in = tile - band * p.across;
    const unsigned lines = min(p.down - band, static_cast<unsigned>(kBand));
    m = static_cast<int64_t>(band + in % lines) * rows + rank * kTileRows;
    n = static_cast<int64_t>(in / lines) * columns;
  }
};

// The columns of y from n on that a warpgroup holds: lane l of warp w has rows 16 w + l / 4 and 8 below, and of every 8
// columns the two from 2 (l % 4) on.
template <class Y>
struct Finish {
  const Product& p;
  const Y& y;
  const CUtensorMap& map;
  float scale;
  uint32_t staging;
  int lane, warp, group;  // of the warpgroup
  uint32_t infs = 0;

  __device__ float with_bias(float x, int64_t n) const {
    if (p.bias == nullptr || n >= p.N) return x;
    return x + (p.bias_bf16 ? BFloat16::decode(reinterpret_cast<const uint16_t*>(p.bias)[n])
                            : reinterpret_cast<const float*>(p.bias)[n]);
  }
  // Seals the 8 runs of row m from column n on, of which this lane holds four values each: s[8 run + 4 side + first]
  // and the one after. Lane l % 4 of a quad seals runs l % 4 and 4 above, all lanes get the factors of all.
  __device__ void seal(const float (&s)[64], int first, int64_t m, int64_t n, float (&inverse)[8]) {
    const int quad = lane % 4;
    float own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t top[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        Range range;
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t column = n + 16 * (4 * half + r) + 8 * side + 2 * quad + e;
            if (column < p.N) range.add(s[8 * (4 * half + r) + 4 * side + first + e]);
          }
        top[r] = range.max;
        infs += m < p.M ? range.infs : 0;
      }
      const bool odd = quad % 2, high = quad / 2;
      uint32_t two[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t kept = odd ? top[2 * r + 1] : top[2 * r], sent = odd ? top[2 * r] : top[2 * r + 1];
        two[r] = max(kept, __shfl_xor_sync(0xffffffffu, sent, 1));
      }
      const uint32_t kept = high ? two[1] : two[0], sent = high ? two[0] : two[1];
      Range range{max(kept, __shfl_xor_sync(0xffffffffu, sent, 2)), 0};
      const int64_t run = n / 16 + 4 * half + quad;
      own[half] = 1.f;
      if (m < p.M && run * 16 < p.N) own[half] = y.seal(m * ((p.N + 15) / 16) + run, range).inverse;
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) inverse[r] = __shfl_sync(0xffffffffu, own[r / 4], (lane & ~3) + r % 4);
  }
  __device__ void wait_for_staging() {
    if (warp == 0 && lane == 0) stores_have_read();
    meet(1 + group, 128);
  }
  __device__ void send(int64_t m, int64_t n, int tiles, int columns) {
    publish_shared();
    meet(1 + group, 128);
    if (warp == 0 && lane == 0 && m < p.M) {
      for (int t = 0; t < tiles; ++t)
        if (n + t * columns < p.N)
          store_tile(map, staging + t * 8192, static_cast<int>(m), static_cast<int>(n + t * columns));
      stores_commit();
    }
  }
  // Half a tile: 64 rows from m on, 128 columns from n on.
  __device__ void operator()(float (&s)[64], int64_t m, int64_t n) {
    const int64_t row = m + 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = s[i] * scale;
    if (p.bias) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * j + e] = with_bias(s[4 * j + e], n + 8 * j + lane % 4 * 2 + e % 2);
    }
    if (!p.by_tiles) {
      directly(s, row, n);
      return;
    }
    using Code = std::remove_reference_t<decltype(*y.codes)>;
    if constexpr (sizeof(Code) == 2) {
      wait_for_staging();
      const int line = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int j = 0; j < 16; j += 2) {
        const int piece = j + lane / 16;
        store_matrices(staging + j / 8 * 8192 + swizzled(line, piece % 8), encode_pair<Code>(s[4 * j], s[4 * j + 1]),
                       encode_pair<Code>(s[4 * j + 2], s[4 * j + 3]), encode_pair<Code>(s[4 * j + 4], s[4 * j + 5]),
                       encode_pair<Code>(s[4 * j + 6], s[4 * j + 7]));
      }
      send(m, n, 2, 64);
    } else if constexpr (sizeof(Code) == 4) {
#pragma unroll
      for (int pass = 0; pass < 2; ++pass) {
        wait_for_staging();
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int down = 0; down < 2; ++down) {
            const int line = 16 * warp + lane / 4 + 8 * down;
            const uint32_t at = staging + j / 4 * 8192 + swizzled(line, j % 4 * 2 + lane % 4 / 2) + lane % 2 * 8;
            const float *pair = &s[4 * (8 * pass + j) + 2 * down];
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(pair[0]), "f"(pair[1]) : "memory");
          }
        send(m, n + 64 * pass, 2, 32);
      }
    } else {
      wait_for_staging();
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        float inverse[8];
        seal(s, 2 * down, row + 8 * down, n, inverse);
        const int line = 16 * warp + lane / 4 + 8 * down;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const uint32_t at = staging + swizzled(line, j / 2) + j % 2 * 8 + lane % 4 * 2;
          const float *pair = &s[4 * j + 2 * down];
          const auto codes =
              static_cast<uint16_t>(encode_pair<Code>(pair[0] * inverse[j / 2], pair[1] * inverse[j / 2]));
          asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(codes) : "memory");
        }
      }
      send(m, n, 1, 128);
    }
  }
  // Element by element, where lines of y do not begin on 16-byte boundaries.
  __device__ void directly(float (&s)[64], int64_t row, int64_t n) {
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      float inverse[8];
      if constexpr (Y::run == 16) seal(s, 2 * down, row + 8 * down, n, inverse);
      const int64_t m = row + 8 * down;
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          typename Y::Sealed sealed{};
          if constexpr (Y::run == 16) sealed.inverse = inverse[j / 2];
          const int64_t at = n + 8 * j + lane % 4 * 2 + e;
          if (m < p.M && at < p.N) y.store(m * p.N + at, sealed, s[4 * j + 2 * down + e]);
        }
    }
  }
};

// A cluster of blocks makes 128 rows of y a block and Halves * 128 columns, tile after tile. In a block one thread fetches
// by the copy engine, into a ring of slots of 128 bytes along K; two warpgroups multiply, 64 rows each. The blocks of a
// cluster fetch parts of b for each other. FP8 sums leave the tensor cores, which keep 14 bits, every 128 of K, and are
// added in FP32; while one warpgroup adds, the other multiplies. Bytes per element of y: K sizes of a / 256 + of b / 128
// read from L2, one element written.
template <class A, class B, bool AlongA, bool AlongB, class Y, int Halves, int Cluster>
__global__ void __launch_bounds__(kTensorThreads, 1)
    matmul_kernel_tensor(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                         const __grid_constant__ CUtensorMap y_map, const Product p, const Y y) {
  constexpr int kSlotCount = kSlots<Halves>, kSize = sizeof(A), kAlong = 128 / kSize;
  constexpr int kDepth = AlongA && AlongB ? kAlong : 64;  // of K in a slot
  constexpr int kMulti = 32 / kSize;                       // of K in one product
  constexpr bool kPromotes = kSize == 1;
  static_assert(kDepth == kAlong);
  extern __shared__ uint8_t raw[];
  __shared__ alignas(8) uint64_t barriers[2 * kSlotCount];
  const uint32_t slots = (shared_address(raw) + 1023) / 1024 * 1024, staging = slots + kSlotCount * kSlotBytes<Halves>;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kSlotCount;
  const uint32_t rank = Cluster == 1 ? 0 : block_of_cluster();
  const unsigned tiles = p.down * p.across, first = blockIdx.x / Cluster, stride = gridDim.x / Cluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlotCount; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kProducts * Cluster);
    }
    barrier_init_done();
    prefetch_map(a_map);
    prefetch_map(b_map);
  }
  if constexpr (Cluster == 1)
    __syncthreads();
  else
    meet_cluster();

  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      int slot = 0, phase = 1;
      for (unsigned tile = first; tile < tiles; tile += stride) {
        const Place place(p, tile, kTileRows * Cluster, Halves * kHalf, rank);
        const int m = static_cast<int>(place.m), n = static_cast<int>(place.n);
        for (int step = 0; step < p.steps; ++step) {
          const int k = step * kDepth;
          const uint32_t at = slots + slot * kSlotBytes<Halves>, done = full + 8 * slot;
          barrier_wait(empty + 8 * slot, phase);
          barrier_expect(done, kSlotBytes<Halves>);
          if constexpr (AlongA) {
            load_tile(a_map, at, done, m, k);
          } else {
            load_tile(a_map, at, done, k, m);
            load_tile(a_map, at + 8192, done, k, m + 64);
          }
          // b in as many parts as the cluster has blocks
          constexpr int kParts = AlongB ? 1 : Halves * 2 / Cluster, kColumns = Halves * kHalf / Cluster / kParts;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const int column = static_cast<int>(rank) * (Halves * kHalf / Cluster) + part * kColumns;
            const uint32_t to = at + kTileA + column * 128;
            const int line = AlongB ? n + column : k, across = AlongB ? k : n + column;
            if constexpr (Cluster == 1)
              load_tile(b_map, to, done, line, across);
            else
              load_tile_to((1 << Cluster) - 1, b_map, to, done, line, across);
          }
          if (++slot == kSlotCount) slot = 0, phase ^= 1;
        }
      }
    }
  } else {
    take_registers<232>();
    const int group = static_cast<int>(threadIdx.x) / 128 - 1, thread = static_cast<int>(threadIdx.x) % 128;
    const float scale = (p.a_scale ? *p.a_scale : 1.f) * (p.b_scale ? *p.b_scale : 1.f);
    Finish<Y> finish{p, y, y_map, scale, staging + group * kStaging, thread % 32, thread / 32, group};
    const auto release = [&](int slot) {
      if (thread < Cluster) barrier_arrive(empty + 8 * slot, thread);
    };
    int slot = 0, phase = 0;
    float sums[Halves * 64];
    for (unsigned tile = first; tile < tiles; tile += stride) {
#pragma unroll
      for (int i = 0; i < Halves * 64; ++i) sums[i] = 0.f;
      int before = -1;  // the slot whose products may still run
      for (int step = 0; step < p.steps; ++step) {
        barrier_wait(full + 8 * slot, phase);
        const uint32_t a_at = slots + slot * kSlotBytes<Halves> + group * 8192;
        const uint32_t b_at = slots + slot * kSlotBytes<Halves> + kTileA;
        const auto a_step = [&](int k) { return operand_at(a_at + k * (AlongA ? 32 : kMulti * 128), 8192); };
        const auto b_step = [&](int k) { return operand_at(b_at + k * (AlongB ? 32 : kMulti * 128), 8192); };
        if constexpr (kPromotes) {
          float part[64];
          const auto products = [&](float(&to)[64], int h) {
#pragma unroll
            for (int k = 0; k < kDepth / kMulti; ++k)
              multiply<A, B>(to, a_step(k), operand_at(b_at + h * kHalfB + k * 32, 8192), k > 0);
          };
#pragma unroll
          for (int h = 0; h < Halves; ++h) {
            hold(part);
            products_begin();
            products(part, h);
            products_commit();
            products_wait<0>();
            hold(part);
            if (h == Halves - 1) release(slot);
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[64 * h + i] += part[i];
          }
        } else {
hold(sums);
          products_begin();
#pragma unroll
          for (int k = 0; k < kDepth / kMulti; ++k) multiply<AlongA, AlongB>(sums, a_step(k), b_step(k));
          products_commit();
          products_wait<1>();
          if (before >= 0) release(before);
          before = slot;
        }
        if (++slot == kSlotCount) slot = 0, phase ^= 1;
      }
      if constexpr (!kPromotes) {
        products_wait<0>();
        hold(sums);
        if (before >= 0) release(before);
      }
      const Place place(p, tile, kTileRows * Cluster, Halves * kHalf, rank);
#pragma unroll
      for (int h = 0; h < Halves; ++h)
        finish(reinterpret_cast<float(&)[64]>(sums[64 * h]), place.m + 64 * group, place.n + kHalf * h);
    }
    if (thread == 0) stores_done();
    if constexpr (Y::run != 0)
      if (finish.infs) count_infs(y.status, finish.infs);
  }
  if constexpr (Cluster > 1) {
    __syncwarp();
    meet_cluster();
  }
}

}  // namespace coat::cuda
