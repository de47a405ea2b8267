// slice: rows copied out of a tensor, and into a plain one.
#include "../contract.h"
#include "../ops.h"
#include "device.cuh"

namespace coat::cuda {
namespace {

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes > 0)
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()), "slice");
}

// `count` rows, or elements where there is one dimension: those of y from y_first on become those of x from x_first on.
void copy(const Tensor& y, int64_t y_first, const Tensor& x, int64_t x_first, int64_t count) {
  const int64_t row = code_bytes(x.format.dtype, x.shape.rank > 1 ? x.shape.cols() : 1);
  copy(y.data + y_first * row, x.data + x_first * row, count * row);
}

}  // namespace

void slice(const slice_args& args) {
  check_slice("from", args.from, args.R, args.x.shape.numel());
  copy(args.y, 0, args.x, args.from, args.R);
}

void slice_rows(const slice_rows_args& args) {
  check_slice("from", args.from, args.R, args.x.shape.rows());
  copy(args.y, 0, args.x, args.from, args.R);
  if (args.x.format.scaling == Scaling::tensor) copy(args.y.scales<uint8_t>(), args.x.scales<uint8_t>(), sizeof(float));
}

void place_rows(const place_rows_args& args) {
  const int64_t rows = args.x.shape.rows();
  check_slice("to", args.to, rows, args.y.shape.rows());
  copy(args.y, args.to, args.x, 0, rows);
}

}  // namespace coat::cuda
