// gelu: the exact form, element by element.
#include "../formula.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void gelu_forward(const gelu_forward_args& args) {
  const int64_t N = args.y.shape.cols();
  write_rows(args.y, args.scale, [&](int64_t row, float* out) {
    read_row(args.x, row, out);
    for (int64_t n = 0; n < N; ++n) out[n] = gelu(out[n]);
  });
}

void gelu_backward(const gelu_backward_args& args) {
  const int64_t N = args.dx.shape.cols();
  write_rows(args.dx, {}, [&](int64_t row, float* __restrict out) {
    std::vector<float> x(N);
    read_row(args.x, row, x.data());
    read_row(args.dy, row, out);
    for (int64_t n = 0; n < N; ++n) out[n] *= gelu_derivative(x[n]);
  });
}

}  // namespace coat::cpu
