// layernorm: row by row, with or without weight and bias; sums along rows in pieces, everything else
// in FP32.
#include "../contract.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void layernorm_forward(const layernorm_forward_args& args) {
  const int64_t N = args.x.shape.cols();
  check_row_not_empty(args.x);
  const std::vector<float> w = args.w ? read_all(args.w) : std::vector<float>(N, 1.f);
  const std::vector<float> b = args.b ? read_all(args.b) : std::vector<float>(N, 0.f);
  float *mean = args.mean.as<float>(), *rstd = args.rstd.as<float>();
  const double per = per_column(N);
  write_rows(args.y, args.scale, [&](int64_t row, float* out) {
    read_row(args.x, row, out);
    const double middle = sum_row(out, N) * per;
    const float m = static_cast<float>(middle);
    for (int64_t n = 0; n < N; ++n) out[n] = out[n] - m;
    const float r = inverse_deviation(spread_about(square_row(out, N), middle, m, N), per, args.eps);
    mean[row] = m;
    rstd[row] = r;
    for (int64_t n = 0; n < N; ++n) out[n] = fma_(out[n] * r, w[n], b[n]);
  });
}

void layernorm_backward(const layernorm_backward_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols();
  const std::vector<float> w = args.w ? read_all(args.w) : std::vector<float>(N, 1.f);
  const float *mean = args.mean.as<float>(), *rstd = args.rstd.as<float>();
  const double per = per_column(N);
  Writer dx(args.dx, {});
  // sums: dw, then db
  const std::vector<float> sums = sum_rows(M, 2 * N, [&](int64_t row, float* sums) {
    std::vector<float> buffer(3 * N);
    float* __restrict x = buffer.data();
    float* __restrict g = x + N;
    float* __restrict out = g + N;
    read_row(args.x, row, x);
    read_row(args.dy, row, g);
    for (int64_t n = 0; n < N; ++n) {
      x[n] = (x[n] - mean[row]) * rstd[row];
      sums[n] += g[n] * x[n];
      sums[N + n] += g[n];
      g[n] *= w[n];
    }
    const float a = static_cast<float>(sum_row(g, N) * per), b = static_cast<float>(dot_row(g, x, N) * per);
    for (int64_t n = 0; n < N; ++n) out[n] = rstd[row] * (g[n] - a - x[n] * b);
    dx.write(row * N, (row + 1) * N, out);
  });
  if (args.dw) Writer(args.dw, {}).write(0, N, sums.data());
  if (args.db) Writer(args.db, {}).write(0, N, sums.data() + N);
}

}  // namespace coat::cpu
