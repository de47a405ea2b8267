// attention, backward, on the tensor cores: one kernel makes the gradients of keys and values, another one those of
// queries. Both make scores and their gradients anew, each in the order in which it adds, so that no two blocks add to
// the same place and equal inputs give equal bits.
#include "keys.cuh"
#include "queries.cuh"

namespace coat::cuda {
namespace {

// A block makes the statistics of 64 queries of a head; 32 lanes read a row of out and dout, 8 codes each.
__global__ void __launch_bounds__(256)
    attention_statistics_kernel(const BFloat16* dout, const BFloat16* out, const float* lse, const AttentionProblem p,
                                const Statistics to) {
  const int head = static_cast<int>(blockIdx.x / to.tiles % p.H);
  const int sequence = static_cast<int>(blockIdx.x / to.tiles / p.H), tile = static_cast<int>(blockIdx.x % to.tiles);
  const int first = tile * kStatisticsRows;
  float* numbers = to.of(p, sequence, head, tile);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < kStatisticsRows; i += 8) {
    const int q = first + i;
    float sum = 0.f, of = kInf;
    if (q < p.T) {
      const int64_t row = (int64_t{sequence} * p.T + q) * p.H + head;
      if (lane * 8 < p.D) {
        const uint4 x = *reinterpret_cast<const uint4*>(out + row * p.D + lane * 8);
        const uint4 y = *reinterpret_cast<const uint4*>(dout + row * p.D + lane * 8);
        const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 a = decode_pair<BFloat16>(xs[k]), b = decode_pair<BFloat16>(ys[k]);
          sum = fmaf(a.x, b.x, sum);
          sum = fmaf(a.y, b.y, sum);
        }
      }
      sum = warp_sum(sum);
      of = lse[row] * kLog2E;
    }
    if (lane == 0) {
      numbers[i] = of;
      numbers[kStatisticsRows + i] = sum;
    }
  }
}

template <int Head>
void start(const AttentionSizes& s, const Tensor& dout, const Tensor& qkv, const Tensor& out, const float* lse,
           const float* table, const Tensor& dqkv, uint32_t* largest) {
  constexpr const char* kName = "attention_backward";
  const int64_t heads = s.H + 2 * s.J, tiles = (s.T + kTaskRows - 1) / kTaskRows * (kTaskRows / kStatisticsRows);
  const auto map_of = [&](const Tensor& x, int64_t heads, int lines) {
    return tensor_map_of_heads(kName, x.data, s.B, s.T, heads, s.D, heads * s.D, lines);
  };
  const Scratch room(s.B * s.H * tiles * (2 * kStatisticsRows * 4));
  const Statistics statistics{room.as<float>(), static_cast<int>(tiles)};
  const DocumentEnds ends(kName, s, true);
  const AttentionProblem p = problem_of(s, ends.get(), 16 << 20, table, largest);
  // pieces that last longer for every head that shares them: the order counts for more than L2
  const AttentionProblem by_unit = problem_of(s, ends.get(), 64 << 20, table, largest);
  launch(kName, attention_statistics_kernel, static_cast<unsigned>(s.B * s.H * tiles), 256, 0, dout.as<BFloat16>(),
         out.as<BFloat16>(), lse, p, statistics);
  const auto work_of = [&](int64_t heads) {
    return Work{counters(), static_cast<unsigned>(p.units * heads) * static_cast<unsigned>(p.tiles)};
  };
  const Work by_keys = work_of(1), by_queries = work_of(p.group);
  const CUtensorMap qkv_map = map_of(qkv, heads, 64), dout_map = map_of(dout, s.H, 64), to = map_of(dqkv, heads, 64);
  const auto keys = [&](auto wants) {
    launch(kName, attention_backward_kernel_keys<Head, decltype(wants)::value>, by_keys.blocks(), 384,
           KeysShape<Head>::kShared, qkv_map, dout_map, to, by_unit, by_keys, statistics);
  };
  if constexpr (Head == 256) {  // registers do not hold the sums of both
    keys(std::integral_constant<int, 1>{});
    keys(std::integral_constant<int, 2>{});
  } else {
    keys(std::integral_constant<int, 3>{});
  }
  launch(kName, attention_backward_kernel_queries<Head>, by_queries.blocks(), 384, QueriesShape<Head>::kShared, qkv_map,
         map_of(qkv, heads, QueriesShape<Head>::kKeys), dout_map, to, p, by_queries, statistics);
}

}  // namespace

bool attention_backward_tensor(const AttentionSizes& s, const Tensor& dout, const Tensor& qkv, const Tensor& out,
                               const float* lse, const float* table, const Tensor& dqkv, uint32_t* largest) {
  for (const Tensor* x : {&dout, &qkv, &out, &dqkv})
    if (x->format.dtype != DType::bf16) return false;
  if (!fits_tensor(s)) return false;
  if (largest) check(cudaMemsetAsync(largest, 0, sizeof(uint32_t), stream()), "attention_backward");
  if (s.D <= 64)
    start<64>(s, dout, qkv, out, lse, table, dqkv, largest);
  else if (s.D <= 128)
    start<128>(s, dout, qkv, out, lse, table, dqkv, largest);
  else
    start<256>(s, dout, qkv, out, lse, table, dqkv, largest);
  return true;
}

}  // namespace coat::cuda
