// convert: from any format to any other, and transposed for the formats that matmul reads.
#include <cstring>

#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

namespace {

void requantize(const Tensor& x, const Tensor& scale, const Tensor& y, bool floored) {
  const bool by_row = y.format.scaling == Scaling::run;
  const int64_t rows = by_row ? y.shape.rows() : 1, cols = by_row ? y.shape.cols() : y.shape.numel();
  if (rows * cols == 0 && y.format.scaling != Scaling::tensor) return;
  static_assert(kChunk % 256 == 0);  // whole runs, hence whole bytes
  write_pieces(
      y, scale, rows, cols, y.format.run == kWholeRow ? cols : kChunk,
      [&](int64_t begin, int64_t end, float* out) { read(x, begin, end, out); }, floored);
}

// Block by block: each is read whole before its scale is known. read_rows(m0, m1, n0, n1, out): these rows and columns.
template <class View, class Read>
void write_blocks_of(const Tensor& y, Read&& read_rows) {
  const View view(y);
  constexpr int64_t kSide = View::run;
  const int64_t M = y.shape.rows(), N = y.shape.cols(), across = (N + kSide - 1) / kSide;
  parallel(blocks_of(y.format, y.shape), 1, [&](int64_t b, int64_t) {
    const int64_t m0 = b / across * kSide, m1 = std::min(M, m0 + kSide);
    const int64_t n0 = b % across * kSide, n1 = std::min(N, n0 + kSide), width = n1 - n0;
    std::vector<float> values((m1 - m0) * width);
    read_rows(m0, m1, n0, n1, values.data());
    Range range;
    for (const float value : values) range.add(value);
    const auto sealed = view.seal(b, range);
    for (int64_t m = m0; m < m1; ++m)
      for (int64_t n = n0; n < n1; ++n) view.store(m * N + n, sealed, values[(m - m0) * width + n - n0]);
  });
}

template <class Read>
void write_blocks(const Tensor& y, Read&& read_rows) {
  with("y", y, Views<E4M3B128, E4M3B128P2>{},
       [&](const auto view) { write_blocks_of<std::remove_const_t<decltype(view)>>(y, read_rows); });
}

}  // namespace

void convert(const convert_args& args) {
  const Tensor &x = args.x, &y = args.y;
  if (x.format == y.format && !args.scale)
    std::memcpy(y.data, x.data, bytes_of(x.format, x.shape));
  else if (y.format.scaling == Scaling::block)
    write_blocks(y, [&](int64_t m0, int64_t m1, int64_t n0, int64_t n1, float* out) {
      for (const int64_t N = y.shape.cols(); m0 < m1; ++m0, out += n1 - n0) read(x, m0 * N + n0, m0 * N + n1, out);
    });
  else
    requantize(x, args.scale, y, false);
}

void assign(const assign_args& args) { std::memcpy(args.y.data, args.x.data, bytes_of(args.x.format, args.x.shape)); }

void convert_floored(const convert_floored_args& args) { requantize(args.x, args.scale, args.y, true); }

namespace {

// Codes of the width of Code move as they are.
template <class Code>
void move_transposed(const Code* x, Code* y, int64_t M, int64_t N) {
  each_tile(M, N, kTile, [&](int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
    Code tile[kTile][kTile];
    for (int64_t m = m0; m < m1; ++m)
      for (int64_t n = n0; n < n1; ++n) tile[n - n0][m - m0] = x[m * N + n];
    for (int64_t n = n0; n < n1; ++n) std::memcpy(y + n * M + m0, tile[n - n0], (m1 - m0) * sizeof(Code));
  });
}

}  // namespace

void convert_transposed(const convert_transposed_args& args) {
  const Tensor &x = args.x, &y = args.y;
  const int64_t M = x.shape.dims[0], N = x.shape.dims[1];
  if (x.format == y.format && x.format.scaling == Scaling::block) {
    const int64_t down = runs_of_row(x.format, M), across = runs_of_row(x.format, N);
    move_transposed(x.scales<uint32_t>(), y.scales<uint32_t>(), down, across);
    return move_transposed(x.data, y.data, M, N);
  }
  if (y.format.scaling == Scaling::block)
    return write_blocks(y, [&](int64_t n0, int64_t n1, int64_t m0, int64_t m1, float* out) {
      std::vector<float> row(n1 - n0);
      for (int64_t m = m0; m < m1; ++m) {
        read(x, m * N + n0, m * N + n1, row.data());
        for (int64_t n = 0; n < n1 - n0; ++n) out[n * (m1 - m0) + m - m0] = row[n];
      }
    });
  if (x.format == y.format && x.format.run == 0 && !args.scale) {
    if (x.format.dtype == DType::f32) return move_transposed(x.as<uint32_t>(), y.as<uint32_t>(), M, N);
    if (x.format.dtype == DType::bf16) return move_transposed(x.as<uint16_t>(), y.as<uint16_t>(), M, N);
    *y.scales<float>() = *x.scales<float>();
    return move_transposed(x.data, y.data, M, N);
  }
  Writer writer(y, args.scale);
  if (writer.measures()) {
    const int64_t n = x.shape.numel();
    parallel(n, kChunk, [&](int64_t begin, int64_t end) {
      std::vector<float> values(end - begin);
      read(x, begin, end, values.data());
      writer.measure(values.data(), end - begin);
    });
    writer.seal();
  }
  if (x.shape.numel() == 0) return;
  write_transposed(writer, M, N, y.format.run == kWholeRow ? M : kTile,
                   [&](int64_t m, int64_t n0, int64_t n1, float* out) { read(x, m * N + n0, m * N + n1, out); });
}

void convert_both(const convert_both_args& args) {
  convert({args.device, args.x, args.scale, args.y});
  convert_transposed({args.device, args.y, {}, args.across});
}

}  // namespace coat::cpu
