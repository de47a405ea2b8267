// rope on the device: turns the pairs (i, i + D/2) of every query and key head by the angle of its position, in place.
#include "../contract.h"
#include "../ops.h"
#include "runs.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kPairs = 8;  // a thread: 16 bytes of either half in bf16

// a / b for a >= 0, b > 0: most fit into 32 bits, where division is several times shorter.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// A thread turns Count pairs of one head at a time, neighbours the next ones: the heads of a row meet the same stretch
// of the table in L1. Value heads are not touched. Moves queries and keys once in and once out.
template <int Count, class V>
__global__ __launch_bounds__(kThreads) void rope_kernel(V qkv, const float* table, const int32_t* starts, int64_t rows,
                                                        int64_t cols, int64_t T, int64_t heads, int64_t D, float sign) {
  const int64_t half = D / 2, pieces = half / Count;
  for (Walk at(rows, heads * pieces); at.more(); at.next()) {
    const int64_t head = quotient(at.run, pieces), i = (at.run - head * pieces) * Count;
    const int64_t first = at.row * cols + head * D + i, second = first + half;
    const int64_t position = rope_position(at.row - quotient(at.row, T) * T, starts ? starts[at.row] : 0, T);
    const float* cosine = table + position * D + i;
    const auto turn = [sign](float& a, float& b, float c, float sine) {
      const float s = sine * sign, old = a;
      a = fma_(old, c, -(b * s));
      b = fma_(b, c, old * s);
    };
    if constexpr (Count == 1) {
      float a = qkv.load(first, {}), b = qkv.load(second, {});
      turn(a, b, cosine[0], cosine[half]);
      qkv.store(first, {}, a);
      qkv.store(second, {}, b);
    } else {
      Pack<V, Count> low, high;
      low.fetch(qkv, first, 0);
      high.fetch(qkv, second, 0);
      float a[Count], b[Count];
      low.unpack(qkv, a);
      high.unpack(qkv, b);
#pragma unroll
      for (int k = 0; k < Count; k += 4) {
        const float4 c = *reinterpret_cast<const float4*>(cosine + k);
        const float4 s = *reinterpret_cast<const float4*>(cosine + half + k);
        turn(a[k], b[k], c.x, s.x);
        turn(a[k + 1], b[k + 1], c.y, s.y);
        turn(a[k + 2], b[k + 2], c.z, s.z);
        turn(a[k + 3], b[k + 3], c.w, s.w);
      }
      low.put(qkv, first, {}, a);
      high.put(qkv, second, {}, b);
    }
  }
}

}  // namespace

void rope(const rope_args& args) {
  const int64_t rows = args.qkv.shape.rows(), cols = args.qkv.shape.cols(), T = args.table.shape.rows();
  const int64_t half = args.D / 2, heads = args.H + args.J;
  check_rotation(args.D, args.direction);
  const bool whole = half % kPairs == 0;
  with("qkv", args.qkv, Views<F32, BF16>{}, [&](const auto qkv) {
    using V = std::remove_const_t<decltype(qkv)>;
    launch("rope", whole ? rope_kernel<kPairs, V> : rope_kernel<1, V>,
           dim3(blocks_for(rows * heads * (whole ? half / kPairs : half), kThreads)), dim3(kThreads), 0, qkv,
           args.table.as<float>(), args.starts.as<int32_t>(), rows, cols, T, heads, args.D,
           static_cast<float>(args.direction));
  });
}

}  // namespace coat::cuda
