// convert: from any format to any other, and transposed for the formats that matmul reads.
#include "../tile.cuh"
#include "convert.cuh"

namespace coat::cuda {
namespace {

using Direct = Views<F32, BF16, E4M3T, E5M2T, E4M3G16, E4M3G128, E4M3X128, E5M2G128, E5M2X128>;
// Integers are made of numbers and numbers of them; other formats go through f32.
using Integers = Views<I8G16>;
using Plains = Views<F32, BF16>;
using Matrices = Views<F32, BF16, E4M3T, E5M2T>;

// Vectors of a thread of convert_kernel.
template <class X, class Y>
constexpr int kAhead = kScaling<X> == Scaling::expand || kScaling<Y> == Scaling::expand ? 1 : 4;

// One vector of E elements a lane, kAhead of them a thread, codes and scales fetched before the first store; the lanes
// of a run of y find its range by shuffles. After a measuring pass the blocks go backwards, since the end of x is what
// the L2 still holds. Reads x once, writes y once.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(X x, Y y, Rows rows, const float* given, const uint32_t* measured) {
  using From = CodeOf<X>;
  using To = CodeOf<Y>;
  constexpr int E = kLane<From, To>, kStep = kThreads * kAhead<X, Y>;
  const int64_t block = measured ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t start = block * kStep;
  uint32_t infs = 0;
  by_case(rows.whole<E>(start, kStep), [&](auto whole) {
    using Here = Spot<E, whole.value>;
    constexpr int U = whole.value ? kAhead<X, Y> : 1;
#pragma unroll 1
    for (int64_t first = start; first < start + kStep; first += kThreads * U) {
      Lane<From, E> from[U];
      typename X::Open open[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const Here spot(rows, first + u * kThreads + threadIdx.x);
        from[u].template fetch<whole.value>(x.codes, spot.i, spot.left);
        open[u] = spot.open(x, rows);
      }
      typename Y::Sealed sealed{};
      if constexpr (kScaling<Y> == Scaling::tensor) sealed = seal_tensor(y, given, measured);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t q = first + u * kThreads + threadIdx.x;
        const Here spot(rows, q);
        float value[E];
        from[u].decode(x, open[u], value);
        if constexpr (kScaling<Y> != Scaling::none) {
          RangeOf<Y> range;
          add_all(range, value);
          infs += range.infs;
          range.infs = 0;
          if constexpr (Y::run != 0) {
            merge_lanes<Y::run / E>(range);
            if (whole.value || q < rows.total()) sealed = y.seal(spot.template block<Y>(rows), range);
          }
        }
        Lane<To, E> to;
        to.encode(y, sealed, value);
        to.template put<whole.value>(y.codes, spot.i, spot.left);
      }
    }
  });
  if constexpr (kScaling<Y> != Scaling::none) count_infs_of_block(y.status, infs);
}

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes > 0)
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()), "convert");
}

template <class From, class To>
void requantize_among(From from, To to, const Tensor& x, const Tensor& scale, const Tensor& y) {
  const bool by_row = is_ragged(x) || is_ragged(y);
  with("x", x, from, [&](const auto x_view) {
    with("y", y, to, [&](const auto y_view) {
      using X = std::remove_const_t<decltype(x_view)>;
      using Y = std::remove_const_t<decltype(y_view)>;
      constexpr int E = kLane<CodeOf<X>, CodeOf<Y>>;
      const Rows rows = Rows::of(by_row ? x.shape.rows() : 1, by_row ? x.shape.cols() : x.shape.numel(), E,
                                 Y::run == 0 ? 1 : Y::run / E);
      const int64_t per_block = kThreads * kAhead<X, Y>, blocks = (rows.total() + per_block - 1) / per_block;
      // a tensor without elements still has a scale
      const auto grid = static_cast<unsigned>(std::max<int64_t>(blocks, kScaling<Y> == Scaling::tensor));
      with_scale<Y>(x, x_view, scale, [&](const float* given, const uint32_t* measured) {
        launch("convert", convert_kernel<X, Y>, grid, kThreads, 0, x_view, y_view, rows, given, measured);
      });
    });
  });
}

void convert_operand(const Tensor& x, const Tensor& scale, const Tensor& y) {
  const bool from = is_operand(x.format);
  const Format& format = (from ? x : y).format;
  if (!is_plain(from ? y : x)) {
    const Plainly middle(x);
    convert({Device::cuda, x, {}, middle.tensor});
    return convert({Device::cuda, middle.tensor, scale, y});
  }
  if (format.scaling == Scaling::block) return convert_blocks(x, y);
  if (format.run == kWholeRow) return convert_rows(x, y);
  if (!from) return requantize_among(Plains{}, Views<E4M3G128P2>{}, x, scale, y);
  Tensor alike = x;  // scales are read alike
  alike.format.pow2 = false;
  requantize(alike, scale, y);
}

}  // namespace

void requantize(const Tensor& x, const Tensor& scale, const Tensor& y) {
  const bool decodes = x.format == I8G16::format(), encodes = y.format == I8G16::format();
  if (!decodes && !encodes) return requantize_among(Direct{}, Direct{}, x, scale, y);
  if (decodes && is_plain(y)) return requantize_among(Integers{}, Plains{}, x, scale, y);
  if (encodes && is_plain(x)) return requantize_among(Plains{}, Integers{}, x, scale, y);
  const Plainly middle(x);
  requantize(x, {}, middle.tensor);
  requantize(middle.tensor, scale, y);
}

void convert(const convert_args& args) {
  const Tensor &x = args.x, &y = args.y;
  if (x.format == y.format && !args.scale) return copy(y.data, x.data, bytes_of(x.format, x.shape));
  if (x.shape.numel() == 0 && y.format.scaling != Scaling::tensor) return;
  if (is_operand(x.format) || is_operand(y.format)) return convert_operand(x, args.scale, y);
  if (is_state(x.format) || is_state(y.format)) return convert_states(x, args.scale, y);
  const bool expands = x.format.scaling == Scaling::expand || y.format.scaling == Scaling::expand;
  if (!expands || !(is_ragged(x) || is_ragged(y))) return requantize(x, args.scale, y);
  const Plainly middle(x);  // runs that end with a row against runs that do not
  requantize(x, {}, middle.tensor);
  requantize(middle.tensor, args.scale, y);
}

namespace {

// Codes of Bytes bytes that are moved and not read, and the scale of a /t tensor.
template <int Bytes>
struct Moved {
  struct Code {
    std::conditional_t<Bytes == 1, uint8_t, std::conditional_t<Bytes == 2, uint16_t, uint32_t>> code;
  };
  static constexpr Format format() { return {DType::f32, Scaling::none, 0}; }
  struct Open {};
  struct Sealed {};
  Code* codes;
  float* scale;
  explicit Moved(const Tensor& t)
      : codes(t.as<Code>()), scale(t.format.scaling == Scaling::tensor ? t.scales<float>() : nullptr) {}
  __device__ Open open(int64_t) const { return {}; }
};
template <class X, class Y>
constexpr bool kMoves = false;
template <int Bytes>
constexpr bool kMoves<Moved<Bytes>, Moved<Bytes>> = true;

// Whether x can become straight codes beside the turned ones.
template <class X, class Y>
constexpr bool kBoth = kScaling<X> == Scaling::none && kScaling<Y> == Scaling::tensor;

template <class X, class Y>
using TileOf = Tile<CodeOf<X>, CodeOf<Y>>;
template <class X, class Y>
constexpr int kTileBlocks =
    (sizeof(CodeOf<X>) == 1 && sizeof(CodeOf<Y>) == 1 && !kMoves<X, Y> ? 512 : 1024) / kTileThreads;

// G rows of one word of x, turned: put(w, vector of y) for each of its W columns.
template <class X, class Y, class T = TileOf<X, Y>, class Put>
__device__ inline void turn(const Y& y, typename X::Open open, typename Y::Sealed sealed, uint32_t (&row)[T::G],
                            uint32_t& infs, Put&& put) {
  if constexpr (kMoves<X, Y>) {
    T::turn(row, put);
  } else {
    constexpr int G = T::G, W = T::W;
    constexpr int kPair = W == 1 ? 1 : 2;
#pragma unroll
    for (int w = 0; w < W; w += kPair) {
      float value[kPair][G];
#pragma unroll
      for (int g = 0; g < G; ++g) {
        if constexpr (W == 1) {
          value[0][g] = float_of(row[g]);
        } else {
          const float2 two = decode_pair<CodeOf<X>>(row[g] >> (W == 4 ? w * 8 : 0));
          value[0][g] = two.x, value[1][g] = two.y;
          if constexpr (kScaling<X> == Scaling::tensor)
            value[0][g] = value[0][g] * open.scale, value[1][g] = value[1][g] * open.scale;
        }
      }
#pragma unroll
      for (int k = 0; k < kPair; ++k) {
        if constexpr (kScaling<Y> == Scaling::tensor) {
          Range range;
          add_all(range, value[k]);
          infs += range.infs;
        }
        Lane<CodeOf<Y>, G> out;
        out.encode(y, sealed, value[k]);
        put(w + k, out);
      }
    }
  }
}

// One tile a block. Reads x once, writes y once, 16 bytes a lane on both sides; `straight`, unless without codes,
// becomes x in the format of y, as many elements a lane as are read.
template <class X, class Y>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<X, Y>)
    convert_transposed_kernel(X x, Y y, Y straight, Tiles tiles, const float* given, const uint32_t* measured) {
  using T = TileOf<X, Y>;
  using Out = Lane<CodeOf<Y>, T::G>;
  __shared__ int4 vectors[T::kVectors];
  const T tile(vectors, tiles);
  by_case(tile.whole(), [&](auto whole) {
    tile.template fetch<whole.value>(x.codes);
    typename X::Open open{};
    if (whole.value || tile.M * tile.N > 0) open = x.open(0);
    typename Y::Sealed sealed{};
    if constexpr (kScaling<Y> == Scaling::tensor) sealed = seal_tensor(y, given, measured);
    if constexpr (kMoves<X, Y>)
      if (y.scale && blockIdx.x == 0 && threadIdx.x == 0) *y.scale = *x.scale;
    __pipeline_wait_prior(0);
    if constexpr (kBoth<X, Y>) {
      if (straight.codes) {
        seal_tensor(straight, given, measured);
        tile.each_brought([&](int row, int column, Lane<CodeOf<X>, T::V>& from) {
          float value[T::V];
          from.decode(x, open, value);
          Lane<CodeOf<Y>, T::V> to;
          to.encode(straight, sealed, value);
          tile.template put_straight<whole.value>(straight.codes, row, column, to);
        });
      }
    }
    __syncthreads();
    uint32_t infs = 0;
    tile.each_turn([&](int down, int at, uint32_t(&row)[T::G]) {
      turn<X, Y>(y, open, sealed, row, infs, [&](int w, const Out& out) {
        // 16-bit codes are streamed: their lines leave L2 in the order of rows
        tile.template put<whole.value, sizeof(CodeOf<Y>) == 2>(y.codes, down, at + w, out);
      });
    });
    if constexpr (kScaling<Y> == Scaling::tensor) count_infs_of_block(y.status, infs);
  });
}

template <class X, class Y>
void transpose(const X& x, const Y& y, int64_t M, int64_t N, const float* given, const uint32_t* measured,
               const Tensor& straight = {}) {
  const Tiles tiles(M, N, TileOf<X, Y>::kColumns);
  launch("convert_transposed", convert_transposed_kernel<X, Y>,
         tiles.grid(kScaling<Y> == Scaling::tensor || kMoves<X, Y>), kTileThreads, 0, x, y, Y(straight), tiles, given,
         measured);
}

}  // namespace

namespace {

// The scales of blocks as a matrix.
Tensor scales_of_blocks(const Tensor& x) {
  Tensor scales = x;
  scales.format = F32::format();
  scales.shape = {2, {runs_of_row(x.format, x.shape.dims[0]), runs_of_row(x.format, x.shape.dims[1])}};
  scales.data = x.scales<uint8_t>();
  return scales;
}

// Formats whose scales depend on rows or columns: transposed as f32 or bf16, but for blocks, which keep all they have.
void transpose_runs(const Tensor& x, const Tensor& scale, const Tensor& y) {
  if (x.format.scaling == Scaling::block && x.format == y.format) {
    const Tensor from = scales_of_blocks(x), to = scales_of_blocks(y);
    transpose(Moved<4>(from), Moved<4>(to), from.shape.dims[0], from.shape.dims[1], nullptr, nullptr);
    return transpose(Moved<1>(x), Moved<1>(y), x.shape.dims[0], x.shape.dims[1], nullptr, nullptr);
  }
  if (!is_plain(x)) {
    const Plainly middle(x);
    convert({Device::cuda, x, {}, middle.tensor});
    return convert_transposed({Device::cuda, middle.tensor, scale, y});
  }
  const Plainly middle(y, x.format);
  convert_transposed({Device::cuda, x, {}, middle.tensor});
  convert({Device::cuda, middle.tensor, scale, y});
}

}  // namespace

void convert_transposed(const convert_transposed_args& args) {
  const Tensor &x = args.x, &y = args.y;
  const int64_t M = x.shape.dims[0], N = x.shape.dims[1];
  if (x.format.run != 0 || y.format.run != 0) return transpose_runs(x, args.scale, y);
  if (x.format == y.format && (!args.scale || x.format.scaling == Scaling::none)) {
    if (x.format.dtype == DType::f32) return transpose(Moved<4>(x), Moved<4>(y), M, N, nullptr, nullptr);
    if (x.format.dtype == DType::bf16) return transpose(Moved<2>(x), Moved<2>(y), M, N, nullptr, nullptr);
    return transpose(Moved<1>(x), Moved<1>(y), M, N, nullptr, nullptr);
  }
  with("x", x, Matrices{}, [&](const auto x_view) {
    with("y", y, Matrices{}, [&](const auto y_view) {
      using X = std::remove_const_t<decltype(x_view)>;
      using Y = std::remove_const_t<decltype(y_view)>;
      if constexpr (kScaling<Y> == Scaling::tensor || !std::is_same_v<X, Y>)
        with_scale<Y>(x, x_view, args.scale, [&](const float* given, const uint32_t* measured) {
          transpose(x_view, y_view, M, N, given, measured);
        });
    });
  });
}

void convert_both(const convert_both_args& args) {
  const int64_t M = args.x.shape.dims[0], N = args.x.shape.dims[1];
  with("x", args.x, Views<F32, BF16>{}, [&](const auto x) {
    with("y", args.across, Views<E4M3T, E5M2T>{}, [&](const auto y) {
      with_scale<std::remove_const_t<decltype(y)>>(
          args.x, x, args.scale,
          [&](const float* given, const uint32_t* measured) { transpose(x, y, M, N, given, measured, args.y); });
    });
  });
}

void assign(const assign_args& args) {
  const auto bytes = static_cast<size_t>(bytes_of(args.x.format, args.x.shape));
  if (bytes == 0) return;
  check(cudaMemcpyAsync(args.y.data, args.x.data, bytes, cudaMemcpyDeviceToDevice, stream()), "assign");
}

}  // namespace coat::cuda
