// embedding: rows by id, and the gradient summed id by id in the order of the tokens.
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {
namespace {

void check_ids(const Tensor& ids, int64_t V) {
  const int32_t* id = ids.as<int32_t>();
  for (int64_t m = 0; m < ids.shape.numel(); ++m)
    if (id[m] < 0 || id[m] >= V)
      fail("value", "ids", "ids[", m, "] is ", id[m], " and must be at least 0 and less than V = ", V);
}

}  // namespace

void embedding_forward(const embedding_forward_args& args) {
  check_ids(args.ids, args.w.shape.rows());
  const int32_t* id = args.ids.as<int32_t>();
  write_rows(args.y, {}, [&](int64_t row, float* out) { read_row(args.w, id[row], out); });
}

// Counting sort by id keeps the tokens of one id in order; then every row of dw is one independent sum.
void embedding_backward(const embedding_backward_args& args) {
  const int64_t M = args.dy.shape.rows(), N = args.dy.shape.cols(), V = args.V;
  check_ids(args.ids, V);
  const int32_t* id = args.ids.as<int32_t>();
  std::vector<int64_t> first(V + 1, 0), order(M);
  for (int64_t m = 0; m < M; ++m) ++first[id[m] + 1];
  for (int64_t v = 0; v < V; ++v) first[v + 1] += first[v];
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (int64_t m = 0; m < M; ++m) order[next[id[m]]++] = m;
  write_rows(args.dw, {}, [&](int64_t v, float* out) {
    std::vector<float> dy(N);
    std::fill(out, out + N, 0.f);
    for (int64_t i = first[v]; i < first[v + 1]; ++i) {
      read_row(args.dy, order[i], dy.data());
      for (int64_t n = 0; n < N; ++n) out[n] += dy[n];
    }
  });
}

}  // namespace coat::cpu
