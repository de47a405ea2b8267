// A tile of a matrix between rows of x and rows of y, in shared memory: what the kernels that transpose share.
#pragma once
#include <cuda_pipeline.h>

#include "lanes.cuh"

namespace coat::cuda {

// A block's tile: kDown rows (along M) of kAcross bytes (along N) of x, 16 bytes of 8 rows a thread in flight.
constexpr int kDown = 128, kAcross = 128, kTileThreads = kDown * kAcross / 128;
// Blocks run over kStripe tiles along N, then down along M: what is under way then covers long stretches of x and of y.
constexpr int kStripe = 32;

// The tiles of [M, N], each of so many columns.
struct Tiles {
  int64_t M, N;
  unsigned across, of_stripe;
  Tiles(int64_t M_, int64_t N_, int columns) : M(M_), N(N_) {
    const int64_t wide = std::max<int64_t>((N + columns - 1) / columns, 1);
    across = static_cast<unsigned>(wide);
    of_stripe = static_cast<unsigned>(std::max<int64_t>(down() * std::min<int64_t>(wide, kStripe), 1));
  }
  int64_t down() const { return (M + kDown - 1) / kDown; }
  // A tensor without elements still has a scale.
  dim3 grid(bool scaled) const {
    return dim3(static_cast<unsigned>(std::max<int64_t>(N == 0 ? 0 : down() * across, scaled)));
  }
};

// The tile of a block: where it begins, and its vectors in shared memory, as they lie in x but shuffled by exclusive or
// so that neither side meets a bank twice.
template <class From, class To>
struct Tile {
  static constexpr int kFrom = sizeof(From), kTo = sizeof(To);
  static constexpr int V = 16 / kFrom;  // elements of a vector of x
  static constexpr int W = 4 / kFrom;   // elements of a word of x: columns that a thread turns at once
  static constexpr int G = 16 / kTo;    // elements of a vector of y: rows that a thread turns at once
  static constexpr int kColumns = kAcross / kFrom;
  static constexpr int kWords = kAcross / 4, R = kAcross / 16;
  static constexpr int kVectors = kDown * R;
  static constexpr int kTurns = kWords * (kDown / G) / kTileThreads;

  int4* vectors;
  int64_t M, N, m0, n0;
  __device__ Tile(int4* vectors_, const Tiles& tiles) : vectors(vectors_), M(tiles.M), N(tiles.N) {
    const unsigned column = blockIdx.x / tiles.of_stripe * kStripe, i = blockIdx.x % tiles.of_stripe;
    const unsigned wide = min(static_cast<unsigned>(kStripe), tiles.across - column);
    m0 = int64_t{i / wide} * kDown;
    n0 = int64_t{column + i % wide} * kColumns;
  }
  // Whether all of it exists and is aligned on both sides.
  __device__ bool whole() const { return m0 + kDown <= M && n0 + kColumns <= N && N % V == 0 && M % G == 0; }

  // Where vector `place` of a row stands.
  __device__ int4* at(int row, int place) const { return vectors + row * R + (place ^ (row / G % 8)); }

  // Starts to bring it in: 16 bytes a lane.
  template <bool Whole>
  __device__ void fetch(const From* x) const {
    const int place = threadIdx.x % R, first = threadIdx.x / R;
    const int64_t n = n0 + place * V;
#pragma unroll
    for (int p = 0; p < kVectors / kTileThreads; ++p) {
      const int row = first + p * (kTileThreads / R);
      int4* to = at(row, place);
      if constexpr (Whole) {
        __pipeline_memcpy_async(to, x + (m0 + row) * N + n, 16);
      } else {
        Lane<From, V> lane;
        lane.template fetch<false>(x, (m0 + row) * N + n, m0 + row < M ? N - n : 0);
        *to = lane.vector[0];
      }
    }
    __pipeline_commit();
  }

  // use(row, column, vector) for what this thread brought in, from that row and column of the tile on.
  template <class Use>
  __device__ void each_brought(Use&& use) const {
    const int place = threadIdx.x % R, first = threadIdx.x / R;
#pragma unroll 4
    for (int p = 0; p < kVectors / kTileThreads; ++p) {
      const int row = first + p * (kTileThreads / R);
      Lane<From, V> lane;
      lane.vector[0] = *at(row, place);
      use(row, place * V, lane);
    }
  }

  // use(down, at, row): G rows of one word at a time, from row `down` and column `at` of the tile on. Of the lanes of a
  // warp, 8 lie along M and 4 along N; the warps first fill rows of y. 8 threads next to each other have 128 bytes of a
  // row of y.
  template <class Use>
  __device__ void each_turn(Use&& use) const {
#pragma unroll 1
    for (int t = 0; t < kTurns; ++t) {
      constexpr int kGroups = kDown / G / 8;
      const int lane = threadIdx.x % 32, task = threadIdx.x / 32 + t * (kTileThreads / 32);
      const int eighth = lane % 8, down = (task % kGroups * 8 + eighth) * G, vector = task / kGroups;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(vectors + down * R + (vector ^ eighth)) + lane / 8;
      uint32_t row[G];
#pragma unroll
      for (int g = 0; g < G; ++g) row[g] = from[g * kWords];
      use(down, (vector * 4 + lane / 8) * W, row);
    }
  }

  // G rows of one word, whose codes move as they are: put(w, vector of y) for each of its W columns.
  template <class Put>
  static __device__ void turn(uint32_t (&row)[G], Put&& put) {
    if constexpr (W == 4) {
#pragma unroll
      for (int g = 0; g < G; g += 4) turn_bytes(row[g], row[g + 1], row[g + 2], row[g + 3]);
    }
#pragma unroll
    for (int w = 0; w < W; ++w) {
      Lane<To, G> out;
#pragma unroll
      for (int g = 0; g < G; g += W)
        out.word[g / W] = W == 2 ? __byte_perm(row[g], row[g + W - 1], w == 0 ? 0x5410 : 0x7632) : row[g + w];
      put(w, out);
    }
  }

  // G rows of column `at` of the tile, from row `down` of it on: a vector of y.
  template <bool Whole, bool Streamed = false>
  __device__ void put(To* y, int down, int at, const Lane<To, G>& out) const {
    const int64_t m = m0 + down, n = n0 + at;
    out.template put<Whole, Streamed>(y, n * M + m, n < N ? M - m : 0);
  }
  // What became of a vector of x, as it lies in x.
  template <bool Whole>
  __device__ void put_straight(To* y, int row, int column, const Lane<To, V>& out) const {
    const int64_t m = m0 + row, n = n0 + column;
    out.template put<Whole>(y, m * N + n, m < M ? N - n : 0);
  }
};

}  // namespace coat::cuda
