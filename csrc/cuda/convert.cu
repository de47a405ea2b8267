// convert: from any format to any other, and transposed for the formats that matmul reads.
#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

using All = Views<F32, BF16, E4M3T, E5M2T, E4M3G16, E4M3G128, E4M3X128>;
using Matrices = Views<F32, BF16, E4M3T, E5M2T>;

// Bits of the largest finite |x|, merged into *measured, which starts at 0. The grid walks the tensor, 4 vectors of 16
// bytes a thread in flight. Reads x once.
template <class X>
__global__ void __launch_bounds__(kThreads) convert_kernel_measure(X x, Rows rows, uint32_t* measured) {
  const uint32_t largest = largest_of<true>(x, rows);
  if (threadIdx.x == 0 && largest > 0) atomicMax(measured, largest);
}

// One vector of E elements a lane, U of them a thread; the lanes of a run of y find its range by shuffles. After a
// measuring pass the blocks go backwards, since the end of x is what the L2 still holds. Reads x once, writes y once.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(X x, Y y, Rows rows, const float* given, const uint32_t* measured) {
  using From = CodeOf<X>;
  using To = CodeOf<Y>;
  constexpr bool kHeavy = kScaling<X> == Scaling::expand || kScaling<Y> == Scaling::expand;
  constexpr int E = kLane<From, To>, U = kHeavy ? 1 : 4;
  const int64_t block = measured ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t first = block * (kThreads * U);
  uint32_t infs = 0;
  by_case(rows.whole<E>(first, kThreads * U), [&](auto whole) {
    using Here = Spot<E, whole.value>;
    Lane<From, E> from[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const Here spot(rows, first + u * kThreads + threadIdx.x);
      from[u].template fetch<whole.value>(x.codes, spot.i, spot.left);
    }
    typename Y::Sealed sealed{};
    if constexpr (kScaling<Y> == Scaling::tensor) sealed = seal_tensor(y, given, measured);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t q = first + u * kThreads + threadIdx.x;
      const Here spot(rows, q);
      float value[E];
      from[u].decode(x, spot.open(x, rows), value);
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
  });
  if constexpr (kScaling<Y> != Scaling::none) count_infs_of_block(y.status, infs);
}

// use(given, measured): the scale given, or the maximum measured, or neither.
template <class Y, class X, class F>
void with_scale(const Tensor& tensor, const X& x, const Tensor& scale, F&& use) {
  if constexpr (kScaling<Y> != Scaling::tensor) {
    use(nullptr, nullptr);
  } else if (scale) {
    use(scale.as<float>(), nullptr);
  } else {
    const Scratch measured(sizeof(uint32_t));
    check(cudaMemsetAsync(measured.as<uint32_t>(), 0, sizeof(uint32_t), stream()), "convert");
    const Rows rows = rows_of<X>(tensor);
    launch("convert", convert_kernel_measure<X>, largest_blocks(rows), kThreads, 0, x, rows, measured.as<uint32_t>());
    use(nullptr, measured.as<uint32_t>());
  }
}

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes > 0)
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()), "convert");
}

void requantize(const Tensor& x, const Tensor& scale, const Tensor& y) {
  const bool by_row = is_ragged(x) || is_ragged(y);
  with("x", x, All{}, [&](const auto x_view) {
    with("y", y, All{}, [&](const auto y_view) {
      using X = std::remove_const_t<decltype(x_view)>;
      using Y = std::remove_const_t<decltype(y_view)>;
      constexpr int E = kLane<CodeOf<X>, CodeOf<Y>>;
      constexpr bool kHeavy = kScaling<X> == Scaling::expand || kScaling<Y> == Scaling::expand;
      const Rows rows = Rows::of(by_row ? x.shape.rows() : 1, by_row ? x.shape.cols() : x.shape.numel(), E,
                                 Y::run == 0 ? 1 : Y::run / E);
      const int64_t per_block = kThreads * (kHeavy ? 1 : 4), blocks = (rows.total() + per_block - 1) / per_block;
      // a tensor without elements still has a scale
      const auto grid = static_cast<unsigned>(std::max<int64_t>(blocks, kScaling<Y> == Scaling::tensor));
      with_scale<Y>(x, x_view, scale, [&](const float* given, const uint32_t* measured) {
        launch("convert", convert_kernel<X, Y>, grid, kThreads, 0, x_view, y_view, rows, given, measured);
      });
    });
  });
}

}  // namespace

void convert(const convert_args& args) {
  const Tensor &x = args.x, &y = args.y;
  if (x.format == y.format && !args.scale) return copy(y.data, x.data, bytes_of(x.format, x.shape));
  if (x.shape.numel() == 0 && y.format.scaling != Scaling::tensor) return;
  const bool expands = x.format.scaling == Scaling::expand || y.format.scaling == Scaling::expand;
  if (!expands || !(is_ragged(x) || is_ragged(y))) return requantize(x, args.scale, y);
  // runs that end with a row against runs that do not: through f32, which is what both read and write
  const Scratch values(x.shape.numel() * static_cast<int64_t>(sizeof(float)));
  Tensor middle = y;
  middle.format = F32::format();
  middle.data = values.as<uint8_t>();
  requantize(x, {}, middle);
  requantize(middle, args.scale, y);
}

namespace {

// Codes that are moved and not read.
struct Bits8 {
  uint8_t code;
  static COAT_HD uint8_t encode(float x) { return static_cast<uint8_t>(bits_of(x)); }
  static COAT_HD float decode(uint8_t code) { return float_of(code); }
};
using Bytes = Plain<Bits8, DType::e4m3>;

// A tile of kDown rows (along M) and kAcross columns (along N) of x: 128 bytes of each row of x, 128 or 256 of each of
// y.
template <class X, class Y>
struct Tile {
  static constexpr int kFrom = sizeof(CodeOf<X>), kTo = sizeof(CodeOf<Y>);
  static constexpr int V = 16 / kFrom;  // elements of a vector of x
  static constexpr int W = 4 / kTo;     // elements of a word of y
  static constexpr int kAcross = 8 * V, kDown = kTo == 4 ? 64 : 128;
  static constexpr int kPasses = kDown / (32 * W);  // 8 threads hold a row of the tile, 32 groups of 8 hold W rows each
  static constexpr int kRowVectors = kDown * kTo / 16;  // vectors of a row of y in the tile
};

// One tile a block, `across` of them along N. A thread reads W rows of one vector, so that it holds whole words of y,
// and puts them into shared memory as rows of y, vectors shuffled by exclusive or with the vector of x: neither side
// meets a bank twice. Values are encoded before, so shared memory holds codes. Reads x once, writes y once, 16 bytes a
// lane on both sides.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads) convert_transposed_kernel(X x, Y y, int64_t M, int64_t N, unsigned across,
                                                                      const float* given, const uint32_t* measured) {
  using T = Tile<X, Y>;
  using From = CodeOf<X>;
  using To = CodeOf<Y>;
  constexpr int V = T::V, W = T::W, P = T::kPasses, R = T::kRowVectors;
  __shared__ int4 tile[T::kAcross * R];
  const int64_t m0 = int64_t{blockIdx.x / across} * T::kDown, n0 = int64_t{blockIdx.x % across} * T::kAcross;
  const int column = threadIdx.x % 8, group = threadIdx.x / 8;
  const bool inside = m0 + T::kDown <= M && n0 + T::kAcross <= N && N % V == 0 && M % (16 / T::kTo) == 0;
  typename X::Open open{};
  if (M * N > 0) open = x.open(0);
  uint32_t infs = 0;
  by_case(inside, [&](auto whole) {
    Lane<From, V> from[P][W];
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const int64_t m = m0 + (p * 32 + group) * W + w, n = n0 + column * V;
        from[p][w].template fetch<whole.value>(x.codes, m * N + n, m < M ? N - n : 0);
      }
    typename Y::Sealed sealed{};
    if constexpr (kScaling<Y> == Scaling::tensor) sealed = seal_tensor(y, given, measured);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int q = p * 32 + group;
      uint32_t* words = reinterpret_cast<uint32_t*>(tile) + column * V * R * 4 + ((q / 4) ^ column) * 4 + q % 4;
      float value[W][V];
#pragma unroll
      for (int w = 0; w < W; ++w) {
        from[p][w].decode(x, open, value[w]);
        if constexpr (kScaling<Y> == Scaling::tensor) {
          Range range;
          add_all(range, value[w]);
          infs += range.infs;
        }
      }
      Lane<To, W * V> to;  // V words
      Y held = y;
      held.codes = to.code;
#pragma unroll
      for (int k = 0; k < V; ++k)
#pragma unroll
        for (int w = 0; w < W; ++w) held.store(k * W + w, sealed, value[w][k]);
#pragma unroll
      for (int k = 0; k < V; ++k) words[k * R * 4] = to.word[k];
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < T::kAcross * R / kThreads; ++t) {
      const int vector = t * kThreads + threadIdx.x, row = vector / R, place = vector % R;
      Lane<To, 16 / T::kTo> out;
      out.vector[0] = tile[row * R + (place ^ (row / V))];
      const int64_t n = n0 + row, m = m0 + place * (16 / T::kTo);
      out.template put<whole.value>(y.codes, n * M + m, n < N ? M - m : 0);
    }
  });
  if constexpr (kScaling<Y> != Scaling::none) count_infs_of_block(y.status, infs);
}

template <class X, class Y>
void transpose(const X& x, const Y& y, int64_t M, int64_t N, const float* given, const uint32_t* measured) {
  using T = Tile<X, Y>;
  const int64_t across = (N + T::kAcross - 1) / T::kAcross, tiles = (M + T::kDown - 1) / T::kDown * across;
  const auto grid = static_cast<unsigned>(std::max<int64_t>(tiles, kScaling<Y> == Scaling::tensor));
  launch("convert_transposed", convert_transposed_kernel<X, Y>, grid, kThreads, 0, x, y, M, N,
         static_cast<unsigned>(std::max<int64_t>(across, 1)), given, measured);
}

}  // namespace

void convert_transposed(const convert_transposed_args& args) {
  const Tensor &x = args.x, &y = args.y;
  const int64_t M = x.shape.dims[0], N = x.shape.dims[1];
  if (x.format == y.format && !args.scale && x.format.scaling == Scaling::tensor) {
    copy(reinterpret_cast<uint8_t*>(y.scales<float>()), reinterpret_cast<const uint8_t*>(x.scales<float>()), 4);
    return transpose(Bytes(x), Bytes(y), M, N, nullptr, nullptr);
  }
  with("x", x, Matrices{}, [&](const auto x_view) {
    with("y", y, Matrices{}, [&](const auto y_view) {
      using Y = std::remove_const_t<decltype(y_view)>;
      with_scale<Y>(x, x_view, args.scale, [&](const float* given, const uint32_t* measured) {
        transpose(x_view, y_view, M, N, given, measured);
      });
    });
  });
}

}  // namespace coat::cuda
