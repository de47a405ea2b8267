// Reading and writing of tensors in any format through f32 buffers: what the row-wise families of this folder share.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "../formula.h"
#include "parallel.h"

namespace coat::cpu {

// Elements [begin, end) of t, row-major, decoded to f32.
void read(const Tensor& t, int64_t begin, int64_t end, float* out);
inline void read_row(const Tensor& t, int64_t row, float* out) {
  const int64_t cols = t.shape.cols();
  read(t, row * cols, (row + 1) * cols, out);
}
// A whole tensor, such as the weight of a norm.
inline std::vector<float> read_all(const Tensor& t) {
  std::vector<float> values(t.shape.numel());
  read(t, 0, t.shape.numel(), values.data());
  return values;
}

// Encodes f32 values into y piece by piece. A /t format needs its scale first: given, or measured by showing every
// piece to measure() and calling seal(). `floored`: no positive value becomes the code of 0.
class Writer {
 public:
  Writer(const Tensor& y, const Tensor& scale, bool floored = false);
  bool measures() const { return measures_; }
  void measure(const float* x, int64_t count);
  void seal();
  // Elements [begin, end); begin lies at the start of a run and end at the end of one, or of a row.
  void write(int64_t begin, int64_t end, const float* x) const;

 private:
  const Tensor& y_;
  bool measures_, floored_;
  float inverse_ = 1.f;
  std::atomic<uint32_t> max_{0};
  std::atomic<int64_t> infs_{0};
};

// What rope does to a row: the pairs (i, i + D/2) of query and key heads by D/2 cosines and D/2 sines of its position.
class HeadTurn {
 public:
  template <class Args>
  explicit HeadTurn(const Args& args, float sign = 1.f)
      : table_(args.table.template as<float>()),
        starts_(args.starts.template as<int32_t>()),
        T_(args.table.shape.rows()),
        heads_(args.H + args.J),
        D_(args.D),
        sign_(sign) {}
  void operator()(float* row, int64_t m) const {
    const int64_t half = D_ / 2;
    const float* turn = table_ + rope_position(m % T_, starts_ ? starts_[m] : 0, T_) * D_;
    for (int64_t head = 0; head < heads_; ++head) {
      float *first = row + head * D_, *second = first + half;
      for (int64_t i = 0; i < half; ++i) {
        const float a = first[i], b = second[i], s = turn[half + i] * sign_;
        first[i] = fma_(a, turn[i], -(b * s));
        second[i] = fma_(b, turn[i], a * s);
      }
    }
  }

 private:
  const float* table_;
  const int32_t* starts_;
  int64_t T_, heads_, D_;
  float sign_;
};

// Fills y, seen as [rows, cols] and cut into pieces of at most `piece` elements of a row, with what body(begin, end,
// out) computes in f32. Runs body twice a piece where a scale has to be measured: cheaper than keeping the f32 values.
template <class Body>
void write_pieces(const Tensor& y, const Tensor& scale, int64_t rows, int64_t cols, int64_t piece, Body&& body,
                  bool floored = false) {
  Writer writer(y, scale, floored);
  piece = std::max<int64_t>(1, std::min(piece, cols));
  const int64_t pieces = (cols + piece - 1) / piece;
  const auto sweep = [&](auto&& use) {
    parallel(rows * pieces, rows_of_chunk(piece), [&](int64_t first, int64_t last) {
      std::vector<float> out(piece);
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = i / pieces, start = (i % pieces) * piece;
        const int64_t begin = row * cols + start, end = row * cols + std::min(cols, start + piece);
        body(begin, end, out.data());
        use(begin, end, out.data());
      }
    });
  };
  if (writer.measures()) {
    sweep([&](int64_t begin, int64_t end, const float* x) { writer.measure(x, end - begin); });
    writer.seal();
  }
  sweep([&](int64_t begin, int64_t end, const float* x) { writer.write(begin, end, x); });
}

// The same row by row: body(row, out).
template <class Body>
void write_rows(const Tensor& y, const Tensor& scale, Body&& body) {
  const int64_t cols = y.shape.cols();
  write_pieces(y, scale, y.shape.rows(), cols, cols,
               [&](int64_t begin, int64_t, float* out) { body(begin / cols, out); });
}

constexpr int64_t kTile = 128;  // whole runs

// f(m0, m1, n0, n1) for the tiles of [M, N], which have this many rows.
template <class F>
void each_tile(int64_t M, int64_t N, int64_t height, F&& f) {
  const int64_t across = (N + kTile - 1) / kTile, down = (M + height - 1) / height;
  parallel(across * down, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = i / down * kTile, m = i % down * height;
      f(m, std::min(M, m + height), n, std::min(N, n + kTile));
    }
  });
}

// Fills a tensor [N, M] with the transpose of what body(m, n0, n1, out) computes in f32 of row m, in tiles of this many
// rows, which are the pieces that `writer` gets.
template <class Body>
void write_transposed(const Writer& writer, int64_t M, int64_t N, int64_t height, Body&& body) {
  each_tile(M, N, height, [&](int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
    const auto tile = std::make_unique_for_overwrite<float[]>(height * kTile);
    std::vector<float> row(height);
    for (int64_t m = m0; m < m1; ++m) body(m, n0, n1, &tile[(m - m0) * kTile]);
    for (int64_t n = n0; n < n1; ++n) {
      for (int64_t m = m0; m < m1; ++m) row[m - m0] = tile[(m - m0) * kTile + n - n0];
      writer.write(n * M + m0, n * M + m1, row.data());
    }
  });
}

// Sum of f(i) over [0, n): eight FP64 partial sums, fixed by n.
template <class F>
double sum_of(int64_t n, F&& f) {
  double partial[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int64_t lane = 0; lane < 8; ++lane) partial[lane] += static_cast<double>(f(i + lane));
  for (; i < n; ++i) partial[i % 8] += static_cast<double>(f(i));
  return ((partial[0] + partial[4]) + (partial[1] + partial[5])) +
         ((partial[2] + partial[6]) + (partial[3] + partial[7]));
}

// A sum along rows of n columns in pieces, as formula.h says: piece(a piece of every row), the last filled with zeros.
template <class Piece, class... Row>
double sum_pieces(int64_t n, Piece&& piece, const Row*... row) {
  struct Padded {
    float x[kPiece] = {};
    Padded(const float* from, int64_t count) { std::copy(from, from + count, x); }
  };
  double sum = 0;
  int64_t i = 0;
  for (; i + kPiece <= n; i += kPiece) sum += piece(*reinterpret_cast<const float(*)[kPiece]>(row + i)...);
  if (i < n) sum += piece(Padded(row + i, n - i).x...);
  return sum;
}
inline double sum_row(const float* a, int64_t n) {
  return sum_pieces(
      n, [](const float(&x)[kPiece]) { return sum_piece(x); }, a);
}
inline double square_row(const float* a, int64_t n) {
  return sum_pieces(
      n, [](const float(&x)[kPiece]) { return square_piece(x); }, a);
}
inline double dot_row(const float* a, const float* b, int64_t n) {
  return sum_pieces(
      n, [](const float(&x)[kPiece], const float(&y)[kPiece]) { return dot_piece(x, y); }, a, b);
}

// Sums over rows: body(row, sums) adds a row to `sums` [width]; strands, chunks and their order as formula.h says.
template <class Body>
std::vector<float> sum_rows(int64_t rows, int64_t width, Body&& body) {
  const int64_t chunks = (rows + kSumRows - 1) / kSumRows;
  std::vector<float> partial(chunks * width), total(width);
  parallel(rows, kSumRows, [&](int64_t begin, int64_t end) {
    std::vector<float> strands(kStrands * width, 0.f);
    for (int64_t row = begin; row < end; ++row) body(row, strands.data() + (row - begin) / kStrandRows * width);
    for (int64_t n = 0; n < width; ++n) {
      float sum[kStrands];
      for (int64_t s = 0; s < kStrands; ++s) sum[s] = strands[s * width + n];
      partial[begin / kSumRows * width + n] = join_strands(sum);
    }
  });
  for (int64_t n = 0; n < width; ++n) {
    double sum = 0;
    for (int64_t first = 0; first < chunks; first += kGroup) {
      double group = 0;
      for (int64_t c = first; c < std::min(chunks, first + kGroup); ++c)
        group += static_cast<double>(partial[c * width + n]);
      sum += group;
    }
    total[n] = static_cast<float>(sum);
  }
  return total;
}

}  // namespace coat::cpu
