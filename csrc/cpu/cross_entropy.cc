// cross_entropy: log-sum-exp and loss row by row; the sum over rows in FP64.
#include "../formula.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {
namespace {

void check_targets(const Tensor& targets, int64_t V, int64_t ignore) {
  const int32_t* target = targets.as<int32_t>();
  for (int64_t m = 0; m < targets.shape.numel(); ++m)
    if (target[m] != ignore && (target[m] < 0 || target[m] >= V))
      fail("value", "targets", "targets[", m, "] is ", target[m], " and must be ", ignore,
           " (ignored) or at least 0 and less than V = ", V);
}

// The largest of x, NaN if any is.
float largest_of(const float* x, int64_t pieces) {
  float top[kPiece];
  uint32_t bad[kPiece] = {};
  std::fill(top, top + kPiece, -kInf);
  for (int64_t i = 0; i < pieces * kPiece; i += kPiece)
    for (int k = 0; k < kPiece; ++k) {
      top[k] = x[i + k] > top[k] ? x[i + k] : top[k];
      bad[k] |= mask_of(x[i + k] != x[i + k]);
    }
  float largest = top[0];
  for (int k = 0; k < kPiece; ++k) {
    if (bad[k] != 0) return kNaN;
    largest = top[k] > largest ? top[k] : largest;
  }
  return largest;
}

}  // namespace

void cross_entropy_forward(const cross_entropy_forward_args& args) {
  const int64_t M = args.logits.shape.rows(), V = args.logits.shape.cols();
  check_targets(args.targets, V, args.ignore);
  const int32_t* target = args.targets.as<int32_t>();
  float* lse = args.lse.as<float>();
  std::vector<double> losses(M, 0.0);
  parallel(M, rows_of_chunk(V), [&](int64_t begin, int64_t end) {
    // what stands behind the last column adds no more than e^kSoftmaxLow
    const int64_t pieces = (V + kPiece - 1) / kPiece;
    std::vector<float> x(pieces * kPiece, -kInf);
    for (int64_t m = begin; m < end; ++m) {
      read_row(args.logits, m, x.data());
      const float top = largest_of(x.data(), pieces), reference = softmax_reference(top);
      const double sum = sum_of(pieces, [&](int64_t piece) {
        float term[kPiece];
        for (int k = 0; k < kPiece; ++k) term[k] = softmax_term(x[piece * kPiece + k], reference);
        return sum_piece(term);
      });
      lse[m] = softmax_lse(top, sum);
      if (target[m] != args.ignore) losses[m] = static_cast<double>(lse[m]) - static_cast<double>(x[target[m]]);
    }
  });
  const double total = sum_of(M, [&](int64_t m) { return losses[m]; });
  *args.loss.as<float>() = static_cast<float>(total * static_cast<double>(*args.weight.as<float>()));
}

void cross_entropy_backward(const cross_entropy_backward_args& args) {
  const int64_t V = args.logits.shape.cols();
  check_targets(args.targets, V, args.ignore);
  const int32_t* target = args.targets.as<int32_t>();
  const float* lse = args.lse.as<float>();
  const float factor = *args.dloss.as<float>() * *args.weight.as<float>();
  write_rows(args.dx, {}, [&](int64_t m, float* out) {
    if (target[m] == args.ignore) {
      std::fill(out, out + V, 0.f);
      return;
    }
    read_row(args.logits, m, out);
    for (int64_t v = 0; v < V; ++v) out[v] = softmax_(out[v], lse[m]);
    out[target[m]] -= 1.f;
    for (int64_t v = 0; v < V; ++v) out[v] *= factor;
  });
}

}  // namespace coat::cpu
