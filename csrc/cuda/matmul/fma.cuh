// Products in FP32 on the ordinary units: operands on their way from global to shared memory, and the kernel.
#pragma once
#include "result.cuh"

namespace coat::cuda {

constexpr int kTile = 128;     // rows and columns of y that a block makes
constexpr int kFmaDepth = 16;  // step along K
constexpr int kFmaThreads = 256;

// Stored lines begin on 16-byte boundaries; between their end and the next boundary there are zeros.
struct Operand {
  const uint8_t* codes;
  int64_t size, stride;  // rows (of a) or columns (of b) of y; elements from one stored line to the next
  int64_t step, hop;     // bytes from one vector of a thread to its next, and from one step along K to the next
};

struct FmaProduct {
  Operand a, b;
  Result result;
  int steps, tail;  // steps along K, and the depth of the last one
};

// The part of an operand that a block needs for one step along K, on its way from global to shared memory: read early
// into registers, so that the next step loads while this one is multiplied. AlongK: stored lines run along K.
template <bool AlongK>
struct Piece {
  static constexpr int kLines = AlongK ? kTile : kFmaDepth, kWidth = AlongK ? kFmaDepth : kTile;
  static constexpr int kAcross = kWidth / 4, kVectors = kLines * kAcross / kFmaThreads;
  // elements from line to line in shared memory: 8 lines of 16 bytes lie in different banks
  static constexpr int kPitch = kTile + 4;

  union Vector {
    uint4 whole;
    float value[4];
  } raw[kVectors];

  const uint8_t* at;  // the next element of this thread
  int reach;  // AlongK: rows (or columns) of y from this thread's first one on; else the depth of its first line

  // Vector v of a thread lies kStep lines below vector v - 1.
  static constexpr int kStep = kFmaThreads / kAcross;
  static_assert(kStep * kAcross == kFmaThreads);
  __device__ static int line(int v) { return static_cast<int>(threadIdx.x) / kAcross + v * kStep; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % kAcross * 4; }

  // From row (or column) `first` of y on, at depth 0.
  __device__ Piece(const Operand& x, int64_t first) {
    at = x.codes + 4 * ((AlongK ? first * x.stride : first) + line(0) * x.stride + column());
    const int size = static_cast<int>(x.size - first < kTile ? x.size - first : kTile);
    reach = AlongK ? size - line(0) : (column() < size ? line(0) : kFmaDepth);
  }

  // The next step, which has this depth; what lies outside is 0, and so is the rest of a stored line's last vector.
  __device__ void load(const Operand& x, int depth) {
    const int lines = AlongK ? (column() < depth ? reach : 0) : depth - reach;
    const uint8_t* from = at;
#pragma unroll
    for (int v = 0; v < kVectors; ++v, from += x.step)
      raw[v].whole = v * kStep < lines ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    at += x.hop;
  }

  // To shared memory as [depth][row or column].
  __device__ void put(float* to) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (AlongK) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(column() + i) * kPitch + line(v)] = raw[v].value[i];
      } else {
        *reinterpret_cast<uint4*>(to + line(v) * kPitch + column()) = raw[v].whole;
      }
    }
  }
};

// One block a tile of 128 x 128; a thread 8 x 8 of it, in two times two blocks of 4 x 4; K in steps of 16, two buffers.
// Sums run over K in ascending order, so the three forms agree bit for bit. y has at most 2^38 elements, so that the
// number of its tiles fits gridDim.x. Bytes per element of y: K / 16 read.
template <bool AlongA, bool AlongB, class Y>
__global__ void __launch_bounds__(kFmaThreads, 2) matmul_kernel_fma(const FmaProduct p, const Y y) {
  constexpr int kPitch = Piece<AlongA>::kPitch;
  __shared__ __align__(16) float as[2][kFmaDepth * kPitch], bs[2][kFmaDepth * kPitch];
  __shared__ int rows_at, columns_at;  // of the tile; registers are short
  const int row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;

  float sums[8][8] = {};
  const Order place(blockIdx.x, static_cast<unsigned>((p.result.M + kTile - 1) / kTile),
                    static_cast<unsigned>((p.result.N + kTile - 1) / kTile));
  if (threadIdx.x == 0) {
    rows_at = static_cast<int>(place.row);
    columns_at = static_cast<int>(place.column);
  }
  Piece<AlongA> a(p.a, place.row * kTile);
  Piece<AlongB> b(p.b, place.column * kTile);
  a.load(p.a, p.steps > 1 ? kFmaDepth : p.tail);
  a.put(as[0]);
  b.load(p.b, p.steps > 1 ? kFmaDepth : p.tail);
  b.put(bs[0]);
  __syncthreads();
  for (int step = 0; step < p.steps; ++step) {
    const int now = step & 1;
    const bool more = step + 1 < p.steps;
#pragma unroll
    for (int d = 0; d < kFmaDepth; ++d) {
      if (d == 0 && more) a.load(p.a, step + 2 < p.steps ? kFmaDepth : p.tail);
      if (d == kFmaDepth / 2 && more) b.load(p.b, step + 2 < p.steps ? kFmaDepth : p.tail);
      float fa[8], fb[8];
      const float *from_a = as[now] + d * kPitch + row, *from_b = bs[now] + d * kPitch + col;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        *reinterpret_cast<float4*>(fa + i) = *reinterpret_cast<const float4*>(from_a + 16 * i);
        *reinterpret_cast<float4*>(fb + i) = *reinterpret_cast<const float4*>(from_b + 16 * i);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fma_(fa[i], fb[j], sums[i][j]);
      if (d == kFmaDepth / 2 - 3 && more) a.put(as[now ^ 1]);
      if (d == kFmaDepth - 1 && more) b.put(bs[now ^ 1]);
    }
    __syncthreads();
  }

  const float scale = p.result.scale();
  const int64_t m = static_cast<int64_t>(rows_at) * kTile + row, n = static_cast<int64_t>(columns_at) * kTile + col;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      float x[4] = {sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]};
      most = max(most, finish(p.result, y, scale, m + i % 4 + i / 4 * 64, n + 16 * j, x));
    }
  p.result.keep_amax<Y>(most);
}

}  // namespace coat::cuda
