// attention: new rows of one sequence against the keys and values of all rows so far. For generation, a row or a prompt
// at a time; no gradient.
#include <cstring>

#include "../../contract.h"
#include "../../formula.h"
#include "../../ops.h"
#include "../rows.h"

namespace coat::cpu {

// A task: one head of one row. Scores are exponents of 2; sums run over the keys in order.
void attention_cached(const attention_cached_args& args) {
  const int64_t M = args.qkv.shape.rows(), H = args.H, J = args.J, D = args.D;
  check_cached(M, args.cache.shape.rows(), H, J, args.first, args.window);
  const int64_t width = args.qkv.shape.cols(), row = args.cache.shape.cols();
  const int64_t size = args.qkv.format.dtype == DType::f32 ? 4 : 2;
  for (int64_t m = 0; m < M; ++m)  // k and v of a row lie in qkv as they do in the cache
    std::memcpy(args.cache.data + (args.first + m) * row * size, args.qkv.data + (m * width + H * D) * size,
                row * size);
  const Writer writer(args.out, {});
  const float scale = args.scale * kLog2E;
  parallel(M * H, 1, [&](int64_t task, int64_t) {
    const int64_t m = task / H, h = task % H, column = h / (H / J) * D;
    const int64_t end = args.first + m + 1, begin = args.window > 0 ? std::max<int64_t>(0, end - args.window) : 0;
    std::vector<float> q(D), one(D), scores(end - begin), out(D, 0.f);
    read(args.qkv, m * width + h * D, m * width + (h + 1) * D, q.data());
    float top = -kInf;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t key = t * row + column;
      read(args.cache, key, key + D, one.data());
      const float score = static_cast<float>(dot_row(q.data(), one.data(), D)) * scale;
      scores[t - begin] = score;
      top = score > top || score != score ? score : top;
    }
    double total = 0;
    for (float& score : scores) total += score = exp2_(score - top);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t value = t * row + J * D + column;
      read(args.cache, value, value + D, one.data());
      const float p = scores[t - begin];
      for (int64_t d = 0; d < D; ++d) out[d] = fma_(p, one[d], out[d]);
    }
    for (float& x : out) x /= static_cast<float>(total);
    writer.write((m * H + h) * D, (m * H + h + 1) * D, out.data());
  });
}

}  // namespace coat::cpu
