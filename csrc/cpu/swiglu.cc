// swiglu: silu(gate) * up on the two halves of a row.
#include "../formula.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void swiglu_forward(const swiglu_forward_args& args) {
  const int64_t F = args.y.shape.cols();
  write_rows(args.y, args.scale, [&](int64_t row, float* __restrict out) {
    std::vector<float> buffer(2 * F);
    read_row(args.x, row, buffer.data());
    const float *gate = buffer.data(), *up = gate + F;
    for (int64_t i = 0; i < F; ++i) out[i] = swiglu(gate[i], up[i]);
  });
}

void swiglu_backward(const swiglu_backward_args& args) {
  const int64_t F = args.dy.shape.cols();
  write_rows(args.dx, {}, [&](int64_t row, float* __restrict out) {
    std::vector<float> buffer(3 * F);
    read_row(args.x, row, buffer.data());
    read_row(args.dy, row, buffer.data() + 2 * F);
    const float *gate = buffer.data(), *up = gate + F, *dy = up + F;
    for (int64_t i = 0; i < F; ++i) swiglu_gradient(gate[i], up[i], dy[i], out[i], out[F + i]);
  });
  if (!args.twin) return;
  convert_transposed_args turned;
  turned.x = args.dx;
  turned.y = args.twin;
  convert_transposed(turned);
}

}  // namespace coat::cpu
