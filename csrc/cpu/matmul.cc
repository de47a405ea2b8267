// matmul: y = a b^T, a b and a^T b from blocks packed as f32; a block of y a task.
#include "../contract.h"
#include "../ops.h"
#include "gemm.h"
#include "parallel.h"
#include "rows.h"

namespace coat::cpu {
namespace {

constexpr int kTile = kTileRows * kTileCols;
constexpr int64_t kDepth = 320;             // most of K that registers sum up before the sum goes to memory
constexpr int64_t kRowsOfTask = 96;         // rows of y that a task makes, fewer when y is small: a stays in L2
constexpr int64_t kColsOfTask = 512;        // and columns
constexpr int64_t kTasks = 16;              // tasks wanted, so that threads end together
constexpr int64_t kPackedFloats = 4 << 20;  // room for packed b; a wider b is taken in parts

struct PackedB;
struct TaskArrays;
struct Bias;

struct Product {
  Operand a, b;
  int64_t M, N, K;
  Tensor y;
  float scale = 1.f;
  bool into = false;                      // the product is added to what y holds
  bool short_sums = false;                // of 14 bits, as where all of K stays in the tensor cores
  std::atomic<uint32_t>* amax = nullptr;  // the bits of the largest |y|
  const float* bias = nullptr;
};

// Rows m.. and columns n.. of y from a tile of sums. A tile's row is one run of e4m3/g16. The whole tile is encoded on
// the stack, in loops long enough for GCC to vectorise well, and then copied. What lies past the end of y is 0, or NaN
// under an infinite operand: neither counts in a range.
template <class Y>
void finish(const Product& p, const float* sums, int64_t m, int64_t n) {
  alignas(64) float x[kTile];
  for (int i = 0; i < kTile; ++i) x[i] = sums[i] * p.scale;
  if (p.bias)
    for (int i = 0; i < kTile; ++i) x[i] += p.bias[n + i % kTileCols];
  const Y y(p.y);
  const int rows = static_cast<int>(std::min<int64_t>(kTileRows, p.M - m));
  const int cols = static_cast<int>(std::min<int64_t>(kTileCols, p.N - n));
  if constexpr (Y::run == 0)
    if (p.into)
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c) x[r * kTileCols + c] = y.load((m + r) * p.N + n + c, {}) + x[r * kTileCols + c];
  typename Y::Sealed sealed[kTile]{};
  if constexpr (Y::run == kTileCols) {
    Range each[kTile];
    for (int i = 0; i < kTile; ++i) each[i].add(x[i]);
    for (int r = 0; r < rows; ++r) {
      Range range;
#pragma GCC unroll 1
      for (int c = 0; c < kTileCols; ++c) range.merge(each[r * kTileCols + c]);
      const auto seal = y.seal((m + r) * ((p.N + kTileCols - 1) / kTileCols) + n / kTileCols, range);
      for (int c = 0; c < kTileCols; ++c) sealed[r * kTileCols + c] = seal;
    }
  }
  std::remove_pointer_t<decltype(y.codes)> codes[kTile];
  Y tile = y;
  tile.codes = codes;
  for (int i = 0; i < kTile; ++i) tile.store(i, sealed[i], x[i]);
  if constexpr (Y::run == 0)
    if (p.amax) {
      uint32_t most = 0;
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c) most = std::max(most, bits_of(tile.load(r * kTileCols + c, {})) & 0x7fffffffu);
      raise(*p.amax, most);
    }
  auto* to = y.codes + m * p.N + n;
  for (int r = 0; r < rows; ++r, to += p.N) {
    if (cols == kTileCols)
      std::memcpy(to, codes + r * kTileCols, kTileCols * sizeof(*to));
    else
      std::memcpy(to, codes + r * kTileCols, static_cast<size_t>(cols) * sizeof(*to));
  }
}

using Finish = void (*)(const Product&, const float*, int64_t, int64_t);

// K in `count` equal blocks, a multiple of `unit` each but for the last.
struct Depth {
  int64_t block = 0, count = 0;
  Depth(int64_t K, int64_t unit) {
    if (K == 0) return;
    const int64_t least = (K + kDepth - 1) / kDepth;
    block = round_up((K + least - 1) / least, unit);
    count = (K + block - 1) / block;
  }
};

// One task: rows m0..m1 and columns n0..n1 of y. `packed` holds `width` columns of b from `first` on, by blocks of K.
void make_block(const Product& p, const Depth& depth, const float* packed, int64_t first, int64_t width, int64_t m0,
                int64_t m1, int64_t n0, int64_t n1, Finish finish) {
  const int64_t panels = (m1 - m0 + kTileRows - 1) / kTileRows;
  const int64_t room = round_up(panels * panel_floats<kTileRows>(depth.block), 16);
  const int64_t strips = (n1 - n0 + kTileCols - 1) / kTileCols;
  float* a = scratch<TaskArrays>(room + (depth.count > 1 ? panels * strips * kTile : kTile));
  float* sums = a + room;
  if (depth.count == 0) {
    std::fill(sums, sums + kTile, 0.f);
    for (int64_t n = n0; n < n1; n += kTileCols)
      for (int64_t m = m0; m < m1; m += kTileRows) finish(p, sums, m, n);
  }
  for (int64_t d = 0; d < depth.count; ++d) {
    const int64_t k = d * depth.block, steps = std::min(depth.block, p.K - k), panel = panel_floats<kTileRows>(steps);
    pack<kTileRows>(p.a, m0, m1 - m0, k, steps, a);
    const float* b = packed + k * width + (n0 - first) * steps;
    float* c = sums;
    for (int64_t n = n0; n < n1; n += kTileCols, b += kTileCols * steps)
      for (int64_t i = 0; i < panels; ++i) {
        if (p.short_sums) {
          if (d == 0) std::fill(c, c + kTile, 0.f);
          add_with_14_bits(steps, a + i * panel, b, c);
        } else {
          const Tile t = product<1, kTileRows>(steps, a + i * panel, b, kTileCols);
          if (d == 0)
            put(t, c, kTileCols);
          else
            add(t, c, kTileCols);
        }
        if (d + 1 == depth.count) finish(p, c, m0 + i * kTileRows, n);
        if (depth.count > 1) c += kTile;
      }
  }
}

void make(const Product& p, const Tensor& bias) {
  if (p.M == 0 || p.N == 0 || (p.into && p.K == 0)) return;
  Product product = p;
  if (bias) {
    float* values = scratch<Bias>(round_up(p.N, kTileCols));
    decode(bias, 0, p.N, values);
    std::fill(values + p.N, values + round_up(p.N, kTileCols), 0.f);
    product.bias = values;
  }
  Finish finish = nullptr;
  with("y", p.y, Views<F32, BF16, E4M3G16>{}, [&](auto y) { finish = coat::cpu::finish<decltype(y)>; });

  const Depth depth(p.K, p.short_sums ? kTogether : 8);
  const int64_t most =
      round_up(std::max<int64_t>(kPackedFloats / std::max<int64_t>(p.K, 1), kColsOfTask / 2), kTileCols);
  for (int64_t first = 0; first < p.N; first += most) {
    const int64_t end = std::min(p.N, first + most), width = round_up(end - first, kTileCols);
    int64_t strips = (width + kColsOfTask - 1) / kColsOfTask, rows = kRowsOfTask;
    int64_t cols = round_up((width + strips - 1) / strips, kTileCols);
    const auto tasks = [&] { return ((p.M + rows - 1) / rows) * ((width + cols - 1) / cols); };
    while (tasks() < kTasks && rows > 4 * kTileRows) rows /= 2;
    while (tasks() < kTasks && cols > 4 * kTileCols) cols = round_up(cols / 2, kTileCols);

    // b once for all tasks, a strip of columns and a block of K at a time
    float* packed = scratch<PackedB>(width * p.K);
    const int64_t strip = 8 * kTileCols, strips_of_b = (width + strip - 1) / strip;
    parallel(strips_of_b * depth.count, 1, [&](int64_t job, int64_t) {
      const int64_t d = job / strips_of_b, n = job % strips_of_b * strip;
      const int64_t k = d * depth.block, steps = std::min(depth.block, p.K - k);
      pack<kTileCols>(p.b, first + n, std::min(strip, end - first - n), k, steps, packed + k * width + n * steps);
    });
    strips = (width + cols - 1) / cols;
    parallel(tasks(), 1, [&](int64_t job, int64_t) {
      const int64_t m = job / strips * rows, n = first + job % strips * cols;
      make_block(product, depth, packed, first, width, m, std::min(p.M, m + rows), n, std::min(end, n + cols), finish);
    });
  }
}

enum class Form { nt, nn, tn };  // y = a b^T, a b, a^T b

float scale_of(const Tensor& x) { return x.format.scaling == Scaling::tensor ? *x.scales<float>() : 1.f; }

template <class Args>
void multiply(Form form, const Args& args) {
  const int64_t M = args.y.shape.dims[0], N = args.y.shape.dims[1], K = args.a.shape.dims[form == Form::tn ? 0 : 1];
  const bool across_a = form == Form::tn, across_b = form != Form::nt;
  std::atomic<uint32_t> most{0};
  Product p{{args.a, across_a, 0, across_a ? M : K}, {args.b, across_b, 0, across_b ? N : K}, M, N, K, args.y};
  p.scale = scale_of(args.a) * scale_of(args.b);
  Tensor bias;
  if constexpr (requires { args.bias; }) bias = args.bias;
  if constexpr (requires { args.accumulate; }) {
    check_accumulate(args.accumulate, args.a, args.b);
    p.short_sums = args.accumulate == kFast;
  }
  if constexpr (requires { args.amax; }) {
    if (args.amax) p.amax = &most;
    make(p, bias);
    if (args.amax) *args.amax.template as<float>() = float_of(most);
  } else {
    check_apart("a", args.y, args.a);
    check_apart("b", args.y, args.b);
    p.into = true;
    make(p, bias);
  }
}

}  // namespace

void matmul_nt(const matmul_nt_args& args) { multiply(Form::nt, args); }

void matmul_nt_rope(const matmul_nt_rope_args& args) {
  constexpr int64_t kRows = 4 * kRowsOfTask;  // whose sums wait to be turned
  check_rotation(args.D, 1);
  check_accumulate(args.accumulate, args.a, args.b);
  const int64_t M = args.y.shape.rows(), N = args.y.shape.cols(), K = args.a.shape.cols();
  const HeadTurn turn(args);
  const Writer writer(args.y, {});
  std::vector<float> sums(std::min(M, kRows) * N);
  for (int64_t first = 0; first < M; first += kRows) {
    const int64_t rows = std::min(M - first, kRows);
    Tensor a = args.a, y = args.y;
    a.data += first * code_bytes(a.format.dtype, K);
    a.shape.dims[0] = y.shape.dims[0] = rows;
    y.format = F32::format();
    y.data = reinterpret_cast<uint8_t*>(sums.data());
    Product p{{a, false, 0, K}, {args.b, false, 0, K}, rows, N, K, y};
    p.scale = scale_of(args.a) * scale_of(args.b);
    p.short_sums = args.accumulate == kFast;
    make(p, args.bias);
    parallel(rows, rows_of_chunk(N), [&](int64_t begin, int64_t end) {
      for (int64_t m = first + begin; m < first + end; ++m) {
        float* row = sums.data() + (m - first) * N;
        turn(row, m);
        writer.write(m * N, (m + 1) * N, row);
      }
    });
  }
}

void matmul_nn(const matmul_nn_args& args) { multiply(Form::nn, args); }
void matmul_tn(const matmul_tn_args& args) { multiply(Form::tn, args); }
void matmul_nt_into(const matmul_nt_into_args& args) { multiply(Form::nt, args); }
void matmul_nn_into(const matmul_nn_into_args& args) { multiply(Form::nn, args); }
void matmul_tn_into(const matmul_tn_into_args& args) { multiply(Form::tn, args); }

}  // namespace coat::cpu
