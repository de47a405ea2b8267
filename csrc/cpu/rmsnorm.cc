// rmsnorm: row by row; the mean of squares in FP64, everything else in FP32.
#include "../contract.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void rmsnorm_forward(const rmsnorm_forward_args& args) {
  const int64_t N = args.x.shape.cols();
  check_row_not_empty(args.x);
  const std::vector<float> w = read_all(args.w);
  float* rstd = args.rstd.as<float>();
  write_rows(args.y, args.scale, [&](int64_t row, float* out) {
    read_row(args.x, row, out);
    const double squares = sum_of(N, [&](int64_t n) { return static_cast<double>(out[n]) * out[n]; });
    const float r = inverse_deviation(squares, N, args.eps);
    rstd[row] = r;
    for (int64_t n = 0; n < N; ++n) out[n] = out[n] * r * w[n];
  });
}

void rmsnorm_backward(const rmsnorm_backward_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols();
  const std::vector<float> w = read_all(args.w);
  const float* rstd = args.rstd.as<float>();
  Writer dx(args.dx, {});
  const std::vector<float> dw = sum_rows(M, N, [&](int64_t row, float* sums) {
    std::vector<float> buffer(3 * N);
    float* __restrict x = buffer.data();
    float* __restrict g = x + N;
    float* __restrict out = g + N;
    read_row(args.x, row, x);
    read_row(args.dy, row, g);
    for (int64_t n = 0; n < N; ++n) {
      x[n] *= rstd[row];
      sums[n] += g[n] * x[n];
      g[n] *= w[n];
    }
    const float mean = static_cast<float>(sum_of(N, [&](int64_t n) { return static_cast<double>(g[n]) * x[n]; }) /
                                          static_cast<double>(N));
    for (int64_t n = 0; n < N; ++n) out[n] = rstd[row] * (g[n] - x[n] * mean);
    dx.write(row * N, (row + 1) * N, out);
  });
  Writer(args.dw, {}).write(0, N, dw.data());
}

}  // namespace coat::cpu
