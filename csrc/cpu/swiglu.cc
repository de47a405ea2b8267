// swiglu: silu(gate) * up on the two halves of a row.
#include "../formula.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {
namespace {

// The scale of dx by the scales of x, e4m3/g16, alone. A run that reaches over both halves counts for both.
float bounded_scale(const Tensor& x, float amax) {
  const int64_t M = x.shape.rows(), F = x.shape.cols() / 2, runs = (2 * F + E4M3G16::run - 1) / E4M3G16::run;
  const E4M3G16 view(x);
  std::atomic<uint32_t> largest_gate{0}, largest_up{0};
  parallel(M, rows_of_chunk(runs), [&](int64_t begin, int64_t end) {
    uint32_t gate = 0, up = 0;
    for (int64_t row = begin; row < end; ++row)
      for (int64_t run = 0; run < runs; ++run) {
        const uint32_t bits = bits_of(view.open(row * runs + run).scale) & 0x7fffffffu;
        if (run * E4M3G16::run < F) gate = std::max(gate, bits);
        if ((run + 1) * E4M3G16::run > F) up = std::max(up, bits);
      }
    raise(largest_gate, gate);
    raise(largest_up, up);
  });
  return swiglu_gradient_scale(amax, float_of(largest_gate) * E4M3::max(), float_of(largest_up) * E4M3::max());
}

void transpose(const Tensor& x, const Tensor& y) {
  convert_transposed_args args;
  args.x = x;
  args.y = y;
  convert_transposed(args);
}

}  // namespace

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
  Tensor bounded = args.amax;
  float scale = 0.f;
  bounded.data = nullptr;
  if (args.amax && args.x.format == E4M3G16::format()) {
    scale = bounded_scale(args.x, *args.amax.as<float>());
    bounded.data = reinterpret_cast<uint8_t*>(&scale);
  }
  write_rows(args.dx, bounded, [&](int64_t row, float* __restrict out) {
    std::vector<float> buffer(3 * F);
    read_row(args.x, row, buffer.data());
    read_row(args.dy, row, buffer.data() + 2 * F);
    const float *gate = buffer.data(), *up = gate + F, *dy = up + F;
    for (int64_t i = 0; i < F; ++i) swiglu_gradient(gate[i], up[i], dy[i], out[i], out[F + i]);
  });
  if (args.twin) transpose(args.dx, args.twin);
  if (!args.product) return;
  Tensor y = args.product;
  std::swap(y.shape.dims[0], y.shape.dims[1]);
  std::vector<uint8_t> memory(bytes_of(y.format, y.shape));
  y.data = memory.data();
  swiglu_forward_args forward;
  forward.x = args.x;
  forward.scale = args.scale;
  forward.y = y;
  swiglu_forward(forward);
  transpose(y, args.product);
}

}  // namespace coat::cpu
