// Tiles of products: operands on their way from global to shared memory, and the instructions of the tensor cores.
#pragma once
#include "rows.cuh"

namespace coat::cuda {

constexpr int kTile = 128;  // rows and columns of y that a block makes

// Stored lines begin on 16-byte boundaries; between their end and the next boundary there are zeros.
struct Operand {
  const uint8_t* codes;
  const float* scale;    // null: 1
  int64_t size, stride;  // rows (of a) or columns (of b) of y; elements from one stored line to the next
  int64_t step, hop;     // bytes from one vector of a thread to its next, and from one step along K to the next
};

// The part of an operand that a block needs for one step along K, on its way from global to shared memory: read early
// into registers, so that the next step loads while this one is multiplied. AlongK: stored lines run along K.
template <class Code, bool AlongK, int Depth, int kThreads>
struct Piece {
  static constexpr int kSize = sizeof(Code), kPer = 16 / kSize;
  static constexpr int kLines = AlongK ? kTile : Depth, kWidth = AlongK ? Depth : kTile;
  static constexpr int kAcross = kWidth / kPer, kVectors = kLines * kAcross / kThreads;
  // elements from line to line in shared memory: 8 lines of 16 bytes lie in different banks
  static constexpr int kPitch = kSize == 4 ? kTile + 4 : kWidth + 8;

  union Vector {
    uint4 whole;
    uint32_t word[4];
    float value[4];
  } raw[kVectors];

  const uint8_t* at;  // the next element of this thread
  int reach;  // AlongK: rows (or columns) of y from this thread's first one on; else the depth of its first line

  // Vector v of a thread lies kStep lines below vector v - 1.
  static constexpr int kStep = kThreads / kAcross;
  static_assert(kStep * kAcross == kThreads);
  __device__ static int line(int v) { return static_cast<int>(threadIdx.x) / kAcross + v * kStep; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % kAcross * kPer; }

  // From row (or column) `first` of y on, at depth 0.
  __device__ Piece(const Operand& x, int64_t first) {
    at = x.codes + kSize * ((AlongK ? first * x.stride : first) + line(0) * x.stride + column());
    const int size = static_cast<int>(x.size - first < kTile ? x.size - first : kTile);
    reach = AlongK ? size - line(0) : (column() < size ? line(0) : Depth);
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

  // To shared memory as bf16, which holds every E4M3 and E5M2 exactly.
  __device__ void put(uint16_t* to) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint16_t* line_at = to + line(v) * kPitch + column();
      if constexpr (sizeof(Code) == 2) {
        *reinterpret_cast<uint4*>(line_at) = raw[v].whole;
      } else {
        Vector wide[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 pair = decode_pair<Code>(static_cast<uint16_t>(raw[v].word[i / 2] >> (i % 2 * 16)));
          wide[i / 4].word[i % 4] = __byte_perm(bits_of(pair.x), bits_of(pair.y), 0x7632);
        }
        reinterpret_cast<uint4*>(line_at)[0] = wide[0].whole;
        reinterpret_cast<uint4*>(line_at)[1] = wide[1].whole;
      }
    }
  }

  // To shared memory as f32 [depth][row or column].
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

// ---- PTX ----

// Four 8 x 8 matrices of bf16; the lane gives the address of line lane % 8 of matrix lane / 8.
template <bool Transposed>
__device__ inline void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const uint16_t* line) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(line));
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(at)
                 : "memory");
}

// d [16, 8] = a [16, 16] b [16, 8] + c
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float c0, float c1,
                                    float c2, float c3) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

}  // namespace coat::cuda
