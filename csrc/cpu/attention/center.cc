// attention_center: keys less their mean over the sequence.
#include "attention.h"

namespace coat::cpu {

// A task: the keys of one head of one sequence.
void attention_center(const attention_center_args& args) {
  const int64_t rows = args.qkv.shape.rows(), width = args.qkv.shape.cols(), T = args.T, D = args.D;
  check_heads(rows, T, args.H, args.J, 0);
  parallel(rows / T * args.J, 1, [&](int64_t task, int64_t) {
    const int64_t first = task / args.J * T * width + (args.H + task % args.J) * D;
    std::vector<float> row(D), sums(kStrands * D), mean(D);
    for (int64_t t = 0; t < T; ++t) {
      decode(args.qkv, first + t * width, D, row.data());
      for (int64_t d = 0; d < D; ++d) sums[t % kStrands * D + d] += row[d];
    }
    for (int64_t d = 0; d < D; ++d) {
      float sum[kStrands];
      for (int64_t s = 0; s < kStrands; ++s) sum[s] = sums[s * D + d];
      mean[d] = mean_of_strands(sum, T);
    }
    for (int64_t t = 0; t < T; ++t) {
      decode(args.qkv, first + t * width, D, row.data());
      for (int64_t d = 0; d < D; ++d) row[d] -= mean[d];
      encode(args.qkv, first + t * width, D, row.data());
    }
  });
}

}  // namespace coat::cpu
