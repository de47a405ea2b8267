// Products on the tensor cores: the kernel for bf16 and FP8 operands in all three forms.
#pragma once
#include "finish.cuh"
#include "plan.h"
#include "scales.cuh"

namespace coat::cuda {

// What blocks that stand one below the other make at a time: a block 64 rows of y a warpgroup, and columns in halves of
// 128. Where parts of K meet, a cluster has as many such groups of blocks as there are parts, all on one tile of y.
template <int Products, int Halves, int Cluster, bool PartsMeet = false>
struct TileShape {
  static constexpr int kProducts = Products, kHalves = Halves, kCluster = Cluster;
  static constexpr bool kMeets = PartsMeet, kAlone = Cluster == 1 && !PartsMeet;
  static constexpr int kRows = 64 * Products, kColumns = kHalf * Halves;  // of a block
  static constexpr int kThreads = (Products + 1) * 128;
  static constexpr uint32_t kBytesA = kRows * 128, kHalfB = kHalf * 128, kSlotBytes = kBytesA + Halves * kHalfB;
  static constexpr int kSlots = 192 * 1024 / kSlotBytes;
  static constexpr uint32_t kStaging = 2 * kStagingTile;
  static constexpr uint32_t kShared = kSlots * kSlotBytes + Products * kStaging + 1024;
  static constexpr uint32_t kLineOfSums = 4 * (kColumns + 8);  // bytes; lines one after the other begin 8 banks apart
  static_assert(!PartsMeet || kRows * kLineOfSums <= kSlots * kSlotBytes);
};
// That of a row of kShapes.
template <int Row, bool PartsMeet = false>
using ShapeOf = TileShape<kShapes[Row].rows / kShapes[Row].cluster / 64, kShapes[Row].columns / kHalf,
                          kShapes[Row].cluster, PartsMeet>;

// One call, as the kernel sees it.
struct TensorProduct {
  Result result;
  int steps, chunk;       // along K in all, and of one part of K
  unsigned down, across;  // tiles of a cluster in y
  unsigned splits;        // parts of K, each of which makes its own sums
  int64_t apart;          // columns from the sums of one part to those of the next
  bool by_tiles;          // y is written by the copy engine
};

// A piece of work of a cluster is a tile of y and a part of K: its steps along K, and where the tile lies.
struct Steps {
  int first, last;
  __device__ Steps(const TensorProduct& p, unsigned index) {
    first = static_cast<int>(index / (p.down * p.across)) * p.chunk;
    last = min(first + p.chunk, p.steps);
  }
};
template <class Shape>
struct Place {
  int64_t m, n, shift;
  __device__ Place(const TensorProduct& p, unsigned index, unsigned rank) {
    const unsigned tiles = p.down * p.across, part = index / tiles;
    const Order order(index - part * tiles, p.down, p.across);
    m = (order.row * Shape::kCluster + rank) * Shape::kRows;
    n = order.column * Shape::kColumns;
    shift = part * p.apart;
  }
};

// The sums of a warpgroup to shared memory, line by line.
template <class Shape>
__device__ inline void lay_out(const float (&sums)[Shape::kHalves * 64], uint32_t to, int group, int thread) {
  to += (64 * group + row_of(thread / 32, thread % 32)) * Shape::kLineOfSums + thread % 4 * 8;
#pragma unroll
  for (int i = 0; i < Shape::kHalves * 64; i += 2)
    put_shared(to + i / 2 % 2 * 8 * Shape::kLineOfSums + i / 4 * 32, sums[i], sums[i + 1]);
}

// What one of `parts` blocks, the first of them `first` of the cluster, makes of a tile of y: every parts-th row, from
// the sums that all of them have laid out, added in ascending order as matmul_kernel_splits does; a warp a few rows at
// a time.
template <class Shape, class Y>
__device__ inline void join_parts(const Result& p, const Y& y, uint32_t sums, int parts, int part, uint32_t first,
                                  int warp, int64_t m, int64_t n) {
  constexpr int kAhead = 4, kWarps = 4 * Shape::kProducts;
  const float scale = p.scale();
  const int lane = static_cast<int>(threadIdx.x) % 32, rows = static_cast<int>(min(p.M - m, int64_t{Shape::kRows}));
  uint32_t most = 0;
#pragma unroll 1
  for (int row = part + parts * warp; row < rows; row += parts * kWarps * kAhead) {
    float x[kAhead][4] = {};
#pragma unroll 2
    for (int other = 0; other < parts; ++other)
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int from = row + parts * kWarps * k;
        if (from >= rows) continue;
        const float4 some =
            get_shared_of(first + other * Shape::kCluster, sums + from * Shape::kLineOfSums + lane * 16);
        x[k][0] += some.x;
        x[k][1] += some.y;
        x[k][2] += some.z;
        x[k][3] += some.w;
      }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int to = row + parts * kWarps * k;
      if (to < rows) most = max(most, finish(p, y, scale, m + to, n + lane * 4, x[k]));
    }
  }
  p.keep_amax<Y>(most);
}

// A cluster of blocks takes one piece of work after the other. In a block one thread fetches by the copy engine, into a
// ring of slots of 128 bytes along K; up to three warpgroups multiply. The blocks of a cluster stand one below the
// other and fetch parts of b for each other. FP8 sums leave the tensor cores, which keep 14 bits, every 128 of K, and
// are added in FP32, times the scales of runs and blocks; while one warpgroup adds, another multiplies, or it itself.
// Those of bf16, and of FP8 with Unpromoted, stay there for the whole piece of K.
// Bytes per element of y: K (size of a / columns + size of b / rows) of a cluster read from L2, one element written.
// Where parts of K meet, a cluster has one tile of y, and its blocks read each other's sums.
template <class A, class B, bool AlongA, bool AlongB, class Y, class Shape, class Scales>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    matmul_kernel_tensor(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                         const __grid_constant__ CUtensorMap y_map, const TensorProduct p, const Y y,
                         const Scales scales) {
  constexpr int kProducts = Shape::kProducts, kHalves = Shape::kHalves, kCluster = Shape::kCluster;
  constexpr int kSlots = Shape::kSlots, kSize = sizeof(A);
  constexpr int kDepth = 128 / kSize;  // of K in a slot
  constexpr int kMulti = 32 / kSize;   // of K in one product
  constexpr uint32_t kTileBytes = 8192;
  constexpr bool kPromotes = kSize == 1 && Scales::kPromotes;
  // whether a warpgroup adds one part while it multiplies the next: there are registers for two
  constexpr bool kAhead = kPromotes && kHalves == 1 && kProducts <= 2 && !Scales::kOfRuns;
  static_assert(kSize == 2 || (AlongA && AlongB), "the tensor cores take FP8 operands along K only");
  extern __shared__ uint8_t raw[];
  __shared__ alignas(8) uint64_t barriers[2 * kSlots];
  const uint32_t slots = (shared_address(raw) + 1023) / 1024 * 1024, staging = slots + kSlots * Shape::kSlotBytes;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kSlots;
  const uint32_t block = Shape::kAlone ? 0 : block_of_cluster(), rank = block % kCluster, first = block - rank;
  const unsigned tiles = p.down * p.across, stride = gridDim.x / kCluster;
  const unsigned begin =
      Shape::kMeets ? first / kCluster * tiles + blockIdx.x / (kCluster * p.splits) : blockIdx.x / kCluster;
  const unsigned count = Shape::kMeets ? begin + 1 : tiles * p.splits;
  if (!Shape::kMeets && p.splits > 1) let_next_begin();  // the kernel that adds the parts
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kProducts * kCluster);
    }
    barrier_init_done();
    prefetch_map(a_map);
    prefetch_map(b_map);
  }
  if constexpr (Shape::kAlone)
    __syncthreads();
  else
    meet_cluster();

  if (threadIdx.x < 128) {
    if constexpr (kProducts > 1) give_registers<kProducts == 3 ? 32 : 40>();
    if (threadIdx.x == 0) {
      int slot = 0, phase = 1;
      for (unsigned index = begin; index < count; index += stride) {
        const Place<Shape> place(p, index, rank);
        const Steps steps(p, index);
        const int m = static_cast<int>(place.m), n = static_cast<int>(place.n);
        for (int step = steps.first; step < steps.last; ++step) {
          const int k = step * kDepth;
          const uint32_t at = slots + slot * Shape::kSlotBytes, done = full + 8 * slot;
          barrier_wait(empty + 8 * slot, phase);
          barrier_expect(done, Shape::kSlotBytes);
          if constexpr (AlongA) {
            load_tile(a_map, at, done, m, k);
          } else {
#pragma unroll
            for (int g = 0; g < kProducts; ++g) load_tile(a_map, at + g * kTileBytes, done, k, m + 64 * g);
          }
          // b in as many parts as the cluster has blocks
          constexpr int kOwn = Shape::kColumns / kCluster, kParts = AlongB ? 1 : kOwn / 64;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const int column = static_cast<int>(rank) * kOwn + part * 64;
            const uint32_t to = at + Shape::kBytesA + column * 128;
            const int line = AlongB ? n + column : k, across = AlongB ? k : n + column;
            if constexpr (kCluster == 1)
              load_tile(b_map, to, done, line, across);
            else
              load_tile_to(((1 << kCluster) - 1) << first, b_map, to, done, line, across);
          }
          if (++slot == kSlots) slot = 0, phase ^= 1;
        }
      }
    }
    if constexpr (Shape::kMeets) {
      __syncwarp();
      meet_cluster();
    }
  } else {
    if constexpr (kProducts > 1) take_registers<kProducts == 3 ? 160 : 232>();
    const int group = warpgroup() - 1, thread = static_cast<int>(threadIdx.x) % 128;
    const float scale = p.result.scale();
    const auto release = [&](int slot) {
      if (thread < kCluster) barrier_arrive(empty + 8 * slot, first + thread);
    };
    int slot = 0, phase = 0;
    float sums[kHalves * 64];
    for (unsigned index = begin; index < count; index += stride) {
      const Steps steps(p, index);
#pragma unroll
      for (int i = 0; i < kHalves * 64; ++i) sums[i] = 0.f;
      int before = -1;  // the slot whose products may still run
      const Place<Shape> begin_at(p, index, rank);
      typename Scales::template Of<kHalves> factors(
          scales, p.result, begin_at.m + 64 * group + row_of(thread / 32, thread % 32), begin_at.n, steps.first);
      if constexpr (kAhead) {
        float parts[2][64];
        int taken = slot;
        const auto multiply_to = [&](float(&part)[64]) {
          barrier_wait(full + 8 * slot, phase);
          const uint32_t at = slots + slot * Shape::kSlotBytes;
          const uint64_t a_at = operand_at(at + group * kTileBytes, kTileBytes);
          const uint64_t b_at = operand_at(at + Shape::kBytesA, kTileBytes);
          hold(part);
          products_begin();
#pragma unroll
          for (int k = 0; k < kDepth / kMulti; ++k)
            multiply<A, B>(part, operand_after(a_at, k * 32), operand_after(b_at, k * 32), k > 0);
          products_commit();
          if (++slot == kSlots) slot = 0, phase ^= 1;
        };
        // with `Open` later products under way
        const auto take = [&]<int Open>(float(&part)[64]) {
          factors.fetch(scales);
          products_wait<Open>();
          hold(part);
          release(taken);
          if (++taken == kSlots) taken = 0;
          factors.add(sums, part, 0);
        };
        int left = steps.last - steps.first;
        multiply_to(parts[0]);
        for (; left > 2; left -= 2) {
          multiply_to(parts[1]);
          take.template operator()<1>(parts[0]);
          multiply_to(parts[0]);
          take.template operator()<1>(parts[1]);
        }
        if (left == 2) {
          multiply_to(parts[1]);
          take.template operator()<1>(parts[0]);
          take.template operator()<0>(parts[1]);
        } else {
          take.template operator()<0>(parts[0]);
        }
      } else {
        for (int step = steps.first; step < steps.last; ++step) {
          factors.fetch(scales);
          barrier_wait(full + 8 * slot, phase);
          const uint32_t at = slots + slot * Shape::kSlotBytes;
          const uint64_t a_at = operand_at(at + group * kTileBytes, kTileBytes);
          const uint64_t b_at = operand_at(at + Shape::kBytesA, kTileBytes);
          const auto a_step = [&](int k) { return operand_after(a_at, k * (AlongA ? 32 : kMulti * 128)); };
          const auto b_step = [&](int k) { return operand_after(b_at, k * (AlongB ? 32 : kMulti * 128)); };
          if constexpr (kPromotes) {
            float part[64];
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
              hold(part);
              products_begin();
#pragma unroll
              for (int k = 0; k < kDepth / kMulti; ++k)
                multiply<A, B>(part, a_step(k), operand_after(b_at, h * Shape::kHalfB + k * 32), k > 0);
              products_commit();
              products_wait<0>();
              hold(part);
              if (h == kHalves - 1) release(slot);
              factors.add(sums + 64 * h, part, h);
            }
          } else {
            hold(sums);
            products_begin();
#pragma unroll
            for (int k = 0; k < kDepth / kMulti; ++k) {
              if constexpr (kSize == 2) {
                multiply<AlongA, AlongB>(sums, a_step(k), b_step(k));
              } else {
#pragma unroll
                for (int h = 0; h < kHalves; ++h)
                  multiply<A, B>(reinterpret_cast<float(&)[64]>(sums[64 * h]), a_step(k),
                                 operand_after(b_step(k), h * Shape::kHalfB), 1);
              }
            }
            products_commit();
            products_wait<1>();
            if (before >= 0) release(before);
            before = slot;
          }
          if (++slot == kSlots) slot = 0, phase ^= 1;
        }
      }
      if constexpr (!kPromotes) {
        products_wait<0>();
        hold(sums);
        if (before >= 0) release(before);
      }
      if constexpr (Shape::kMeets) {
        meet(1 + kProducts, kProducts * 128);  // the others have read what this one overwrites
        lay_out<Shape>(sums, slots, group, thread);
        continue;
      }
      const Place<Shape> place(p, index, rank);
      const int again = static_cast<int>(anew(thread));  // registers are short in the loop above
      const Finish<Y> finish{p.result,   y,          y_map, p.by_tiles, scale, staging + group * Shape::kStaging,
                             again % 32, again / 32, group};
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        finish(reinterpret_cast<float(&)[64]>(sums[64 * h]), place.m + 64 * group, place.n + kHalf * h, place.shift);
    }
    if constexpr (Shape::kMeets) {
      static_assert(kHalves == 1);
      meet_cluster();
      const Place<Shape> place(p, begin, rank);
      join_parts<Shape>(p.result, y, slots, static_cast<int>(p.splits), static_cast<int>(first) / kCluster, rank,
                        4 * group + thread / 32, place.m, place.n);
    } else if (thread == 0) {
      stores_have_read();
    }
  }
  if constexpr (!Shape::kAlone) {
    __syncwarp();
    meet_cluster();  // nobody leaves while others write to its shared memory or read it
  }
}

}  // namespace coat::cuda
