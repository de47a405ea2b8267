// rmsnorm: row by row, also of the sum of two tensors; sums along rows in pieces, everything else in FP32.
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
    const float r = inverse_deviation(square_row(out, N), per_column(N), args.eps);
    rstd[row] = r;
    for (int64_t n = 0; n < N; ++n) out[n] = out[n] * r * w[n];
  });
}

void rmsnorm_transposed(const rmsnorm_transposed_args& args) {
  const int64_t M = args.x.shape.rows(), N = args.x.shape.cols();
  check_row_not_empty(args.x);
  const std::vector<float> w = read_all(args.w);
  const float* rstd = args.rstd.as<float>();
  write_transposed(Writer(args.y, args.scale), M, N, kTile, [&](int64_t m, int64_t n0, int64_t n1, float* out) {
    read(args.x, m * N + n0, m * N + n1, out);
    for (int64_t n = n0; n < n1; ++n) out[n - n0] = out[n - n0] * rstd[m] * w[n];
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
    const float mean = static_cast<float>(dot_row(g, x, N) * per_column(N));
    for (int64_t n = 0; n < N; ++n) out[n] = rstd[row] * (g[n] - x[n] * mean);
    if (args.residual) {
      read_row(args.residual, row, x);
      for (int64_t n = 0; n < N; ++n) out[n] += x[n];
    }
    dx.write(row * N, (row + 1) * N, out);
  });
  if (args.amax) amax(amax_of(args.dx, args.amax));
  Writer(args.dw, {}).write(0, N, dw.data());
}

void add_rmsnorm_forward(const add_rmsnorm_forward_args& args) {
  const int64_t N = args.a.shape.cols();
  check_row_not_empty(args.a, "a");
  const std::vector<float> w = read_all(args.w);
  float* rstd = args.rstd.as<float>();
  std::atomic<uint32_t> largest{0};
  const Writer twin(args.twin, {});
  write_rows(args.y, {}, [&](int64_t row, float* out) {
    std::vector<float> x(N);
    read_row(args.a, row, out);
    read_row(args.b, row, x.data());
    for (int64_t n = 0; n < N; ++n) out[n] = out[n] + x[n];
    twin.write(row * N, (row + 1) * N, out);
    read_row(args.twin, row, x.data());
    const float r = inverse_deviation(square_row(x.data(), N), per_column(N), args.eps);
    rstd[row] = r;
    Range range;
    for (int64_t n = 0; n < N; ++n) range.add(x[n] * r * w[n]);
    uint32_t seen = largest.load(std::memory_order_relaxed);
    while (seen < range.max && !largest.compare_exchange_weak(seen, range.max, std::memory_order_relaxed)) {
    }
  });
  *args.scale.as<float>() = scale_for<E4M3>(Range{largest.load(), 0});
}

}  // namespace coat::cpu
