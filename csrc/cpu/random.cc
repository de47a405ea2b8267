// random: Philox numbers by (seed, index), the same on every device.
#include "../formula.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void random_normal(const random_normal_args& args) {
  write_pieces(args.y, {}, 1, args.y.shape.numel(), kChunk, [&](int64_t begin, int64_t end, float* out) {
    for (int64_t i = begin; i < end; ++i)
      out[i - begin] = fma_(Random(args.seed, static_cast<uint64_t>(i)).normal(), args.std, args.mean);
  });
}

void random_uniform(const random_uniform_args& args) {
  write_pieces(args.y, {}, 1, args.y.shape.numel(), kChunk, [&](int64_t begin, int64_t end, float* out) {
    for (int64_t i = begin; i < end; ++i)
      out[i - begin] = fma_(Random(args.seed, static_cast<uint64_t>(i)).uniform(0), args.high - args.low, args.low);
  });
}

}  // namespace coat::cpu
