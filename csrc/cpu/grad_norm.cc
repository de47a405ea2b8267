// grad_norm: norms of a list of gradients, the clip factor and whether the step must be skipped.
#include <cmath>

#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void grad_norm(const grad_norm_args& args) {
  float* norms = args.norms.as<float>();
  double total = 0;
  for (size_t i = 0; i < args.g.size(); ++i) {
    const int64_t n = args.g[i].shape.numel();
    std::vector<double> partial((n + kChunk - 1) / kChunk, 0.0);
    parallel(n, kChunk, [&](int64_t begin, int64_t end) {
      std::vector<float> x((end - begin + kPiece - 1) / kPiece * kPiece, 0.f);
      read(args.g[i], begin, end, x.data());
      partial[begin / kChunk] = sum_of(x.size() / kPiece, [&](int64_t k) {
        return square_piece(*reinterpret_cast<const float(*)[kPiece]>(x.data() + k * kPiece));
      });
    });
    double squares = 0;
    for (double sum : partial) squares += sum;
    norms[i] = static_cast<float>(std::sqrt(squares));
    total += squares;
  }
  const double norm = std::sqrt(total);  // squares of f32 values do not overflow FP64: not finite means a value was not
  float* clip = args.clip.as<float>();
  *args.norm.as<float>() = static_cast<float>(norm);
  const double limit = static_cast<double>(args.max_norm);
  clip[0] = limit > 0 && norm > limit ? static_cast<float>(limit / norm) : 1.f;
  clip[1] = std::isfinite(norm) ? 0.f : 1.f;
}

}  // namespace coat::cpu
