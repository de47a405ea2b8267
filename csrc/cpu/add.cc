// add: sums of two tensors, in-place accumulation and scaling, and the sum over rows that is the gradient of a bias.
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void add(const add_args& args) {
  const int64_t rows = args.y.shape.rows(), cols = args.y.shape.cols();
  if (rows * cols == 0) return;
  // pieces of a row that hold whole runs of the twin; without a twin the tensor is one row
  const int64_t seen_rows = args.twin ? rows : 1, seen_cols = args.twin ? cols : rows * cols;
  Writer twin(args.twin ? args.twin : args.y, Tensor{});
  write_pieces(args.y, {}, seen_rows, seen_cols, kChunk, [&](int64_t begin, int64_t end, float* out) {
    std::vector<float> b(end - begin);
    read(args.a, begin, end, out);
    read(args.b, begin, end, b.data());
    for (int64_t i = 0; i < end - begin; ++i) out[i] = out[i] + b[i];
    if (args.twin) twin.write(begin, end, out);
  });
}

void add_into(const add_into_args& args) {
  write_pieces(args.y, {}, 1, args.y.shape.numel(), kChunk, [&](int64_t begin, int64_t end, float* out) {
    std::vector<float> x(end - begin);
    read(args.y, begin, end, out);
    read(args.x, begin, end, x.data());
    for (int64_t i = 0; i < end - begin; ++i) out[i] = out[i] + x[i];
  });
}

void multiply_into(const multiply_into_args& args) {
  const float factor = *args.factor.as<float>();
  write_pieces(args.y, {}, 1, args.y.shape.numel(), kChunk, [&](int64_t begin, int64_t end, float* out) {
    read(args.y, begin, end, out);
    for (int64_t i = 0; i < end - begin; ++i) out[i] = out[i] * factor;
  });
}

void column_sum(const column_sum_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols();
  const std::vector<float> total = sum_rows(M, N, [&](int64_t row, float* sums) {
    std::vector<float> x(N);
    read_row(args.x, row, x.data());
    for (int64_t n = 0; n < N; ++n) sums[n] += x[n];
  });
  Writer(args.y, {}).write(0, N, total.data());
}

}  // namespace coat::cpu
