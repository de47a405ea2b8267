// The gradient of swiglu on the device, with the transposes that the products of a layer read.
#include <optional>

#include "swiglu.cuh"

namespace coat::cuda {
namespace {

// The same threads; dx has no runs, so its halves may lie anywhere. Moves dy, x and dx once; measuring reads dy and x
// once more.
template <bool Whole, class DY, class X, class DX>
__global__ __launch_bounds__(kThreads, 2) void swiglu_backward_kernel(DY dy, X x, Output<DX> dx, int64_t M, int64_t F) {
  dx.open();
  for (Walk at(M, runs_of(F)); at.more(); at.next()) {
    float g[kRun], gate[kRun], up[kRun];
    load_run(dy, at.row, F, at.run, Whole, g);
    load_half<Whole>(x, at, F, 0, gate);
    load_half<Whole>(x, at, F, 1, up);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      float dgate, dup;
      swiglu_gradient(gate[k], up[k], g[k], dgate, dup);
      gate[k] = dgate;
      up[k] = dup;
    }
    const int64_t i = at.row * 2 * F + at.run * kRun;
    if (Whole) {
      dx.put(i, 0, gate);
      dx.put(i + F, 0, up);
    } else {
      const int count = length_of(F, at.run);
      dx.put_some(i, 0, gate, count);
      dx.put_some(i + F, 0, up, count);
    }
  }
  dx.close();
}

// The scale of dx [1] by the scales of x, which lie [M, 2F / 16] and are all that is read of it; largest [blocks, 2]. A
// thread takes 8 scales at a time where these belong to one half.
__global__ __launch_bounds__(kThreads) void swiglu_backward_kernel_bound(E4M3G16 x, const float* amax, int64_t M,
                                                                         int64_t F, uint32_t* largest,
                                                                         uint32_t* counter, float* scale) {
  uint32_t most[2] = {};  // bits of bf16 magnitudes, those of gates and of ups: two a word at first
  if (F % (8 * kRun) == 0) {
    for (Walk at(2 * M, F / (8 * kRun)); at.more(); at.next()) {
      const uint4 eight = reinterpret_cast<const uint4*>(x.scale)[at.row * at.runs + at.run];
      constexpr uint32_t kMagnitudes = 0x7fff7fffu;
      const uint32_t two = __vmaxu2(__vmaxu2(eight.x & kMagnitudes, eight.y & kMagnitudes),
                                    __vmaxu2(eight.z & kMagnitudes, eight.w & kMagnitudes));
      most[0] = __vmaxu2(most[0], at.row % 2 == 0 ? two : 0u);
      most[1] = __vmaxu2(most[1], at.row % 2 == 0 ? 0u : two);
    }
  } else {
    for (Walk at(M, runs_of(2 * F)); at.more(); at.next()) {
      const uint32_t one = x.scale[at.row * at.runs + at.run] & 0x7fffu;
      if (at.run * kRun < F) most[0] = max(most[0], one);
      if ((at.run + 1) * kRun > F) most[1] = max(most[1], one);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = block_max(max(most[half] & 0xffffu, most[half] >> 16));
    if (threadIdx.x == 0) largest[2 * blockIdx.x + half] = most[half];
  }
  if (!is_last(counter, gridDim.x)) return;
  float reach[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t all = 0;
    for (unsigned block = threadIdx.x; block < gridDim.x; block += kThreads) all = max(all, largest[2 * block + half]);
    reach[half] = BFloat16::decode(static_cast<uint16_t>(block_max(all))) * E4M3::max();
  }
  if (threadIdx.x == 0) *scale = swiglu_gradient_scale(*amax, reach[0], reach[1]);
}

// Tiles of kTileRows rows and kTileCols columns of dy, a thread 16 columns of a row. The codes of dx go out as they are
// and, of the first `Turned` of gates, ups and products, through shared memory into the transposes, twin [2F, M] and
// product [F, M]: there a word holds four columns of a row, and a thread turns four words of four rows. Turned is 0, 2
// or 3; if it is not 0, M is a multiple of 4.
constexpr int kTileRows = 128, kTileCols = 64, kTileWords = kTileCols / 4, kTileThreads = kTileRows * kTileCols / kRun;
struct Tile {
  uint32_t word[kTileRows * kTileWords];
  // Four rows of a column group lie 32 words apart: spread over the banks.
  static __device__ int place(int row, int group) { return row * kTileWords + (group ^ (row / 4 % kTileWords)); }
  __device__ void put(int row, int col, const uint32_t (&codes)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) word[place(row, col / 4 + k)] = codes[k];
  }
  __device__ void put_one(int row, int col, uint8_t code) {
    reinterpret_cast<uint8_t*>(word)[place(row, col / 4) * 4 + col % 4] = code;
  }
  // Rows row to row + 3 of columns 4 group to 4 group + 3, a word a column.
  __device__ void turn(int row, int group, uint32_t (&column)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) column[j] = word[place(row + j, group)];
    turn_bytes(column[0], column[1], column[2], column[3]);
  }
};

template <int Turned, class DY, class X>
__global__ __launch_bounds__(kTileThreads, sizeof(CodeOf<DY>) + sizeof(CodeOf<X>) > 3
                                               ? 1
                                               : 2) void swiglu_backward_kernel_near(DY dy, Halves<X> x,
                                                                                     Output<E5M2T> dx, E5M2T twin,
                                                                                     Output<E4M3T> product, int64_t M) {
  __shared__ Tile tile[Turned > 0 ? Turned : 1];  // gates, ups, products
  const int64_t F = x.F, across = (F + kTileCols - 1) / kTileCols, tiles = (M + kTileRows - 1) / kTileRows * across;
  const int tile_row = threadIdx.x / (kTileCols / kRun), tile_col = threadIdx.x % (kTileCols / kRun) * kRun;
  dx.open();
  const float inverse = dx.inverse();
  if (Turned > 2) product.open();
  if (Turned > 0 && blockIdx.x == 0 && threadIdx.x == 0) twin.seal_as(dx.scale());
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t first_row = t / across * kTileRows, first_col = t % across * kTileCols;
    const int64_t row = first_row + tile_row, run = (first_col + tile_col) / kRun;
    const bool here = row < M && run < F / kRun;
    bool certain = true;
    if (here) {
      Pack<DY, kRun> pack_dy;
      Pack<X, kRun> pack_gate, pack_up;
      pack_dy.fetch(dy, row * F + run * kRun, 0);
      x.fetch(row, run, pack_gate, pack_up);
      float g[kRun], gate[kRun], up[kRun];
      pack_dy.unpack(dy, g);
      pack_gate.unpack(x.x, gate);
      pack_up.unpack(x.x, up);
      const float reach = reach_of(pack_dy, g), reach_gate = reach_of(pack_gate, gate),
                  reach_up = reach_of(pack_up, up);
      certain = is_near_scale(inverse) && lowest_of(reach_gate, kLowestGate, gate) > kLowestGate &&
                reach * fmaxf(reach_gate, reach_up) < kLargestProduct && reach_gate < kLargestProduct;
      if (Turned > 2) certain = certain && is_near_scale(product.inverse()) && reach_gate * reach_up < kLargestProduct;
      Pack<E5M2T, kRun> codes_gate, codes_up;
      Pack<E4M3T, 4> codes_product;
      {
        const float less = inverse - inverse * kNearError, more = fma_(inverse, kNearError, inverse);
        uint32_t differ = 0;
#pragma unroll
        for (int k = 0; k < kRun; k += 2) {
          float low_gate[2], high_gate[2], low_up[2], high_up[2], low_product[2], high_product[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float dgate, dup;
            const float s = swiglu_gradient<Near>(gate[k + j], up[k + j], g[k + j], dgate, dup);
            // so near to its root even the sign of silu' is open, which a product of 0 would hide
            if constexpr (std::is_same_v<X, F32>) certain = certain && !(abs_(gate[k + j] - kRoot) < 8e-6f);
            const float error = abs_(g[k + j] * up[k + j]) * fma_(abs_(gate[k + j]), s, s) * (inverse * kNearError);
            spread(dgate * inverse, error, low_gate[j], high_gate[j]);
            low_up[j] = dup * less;
            high_up[j] = dup * more;
            if constexpr (Turned > 2) {
              const float y = s * gate[k + j] * up[k + j] * product.inverse();
              low_product[j] = y * (1.f - kNearError);
              high_product[j] = y * (1.f + kNearError);
            }
          }
          differ |= encode_near<E5M2>(low_gate, high_gate, codes_gate.pair[k / 2]);
          differ |= encode_near<E5M2>(low_up, high_up, codes_up.pair[k / 2]);
          if constexpr (Turned > 2) {  // at once into the tile, to save registers; what is uncertain is put again
            differ |= encode_near<E4M3>(low_product, high_product, codes_product.pair[k / 2 % 2]);
            if (k % 4 == 2) tile[2].word[Tile::place(tile_row, (tile_col + k) / 4)] = codes_product.quad[0];
          }
        }
        certain = certain && differ == 0;
      }
      if (certain) {
        const int64_t i = row * 2 * F + run * kRun;
        dx.put_codes(i, codes_gate);
        dx.put_codes(i + F, codes_up);
        if constexpr (Turned > 0) {
          tile[0].put(tile_row, tile_col, codes_gate.quad);
          tile[1].put(tile_row, tile_col, codes_up.quad);
        }
      }
    }
    if (Turned > 2) __syncwarp();
    do_together(!certain, row, run, [&](int64_t its_row, int64_t col) {
      float gate, up, value[2];
      x.load(its_row, col, gate, up);
      swiglu_gradient(gate, up, dy.load(its_row * F + col, {}), value[0], value[1]);
      const int at_row = static_cast<int>(its_row - first_row), at_col = static_cast<int>(col - first_col);
      for (int half = 0; half < 2; ++half) {
        const uint8_t code = dx.put_one(its_row * 2 * F + half * F + col, value[half]);
        if constexpr (Turned > 0) tile[half].put_one(at_row, at_col, code);
      }
      if constexpr (Turned > 2) tile[2].put_one(at_row, at_col, product.put_one(col * M + its_row, swiglu(gate, up)));
    });
    if constexpr (Turned > 0) {
      __syncthreads();
      const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
      const int64_t m = first_row + 4 * lane, n = first_col + 4 * group;
      static_assert(kTileThreads / 32 == kTileWords && kTileRows == 4 * 32);
#pragma unroll
      for (int part = 0; part < Turned; ++part) {
        uint32_t column[4];
        tile[part].turn(4 * lane, group, column);
        if (m < M && n < F) {
          uint8_t* to = part == 2 ? &product.view().codes->code : &twin.codes[part * F * M].code;
#pragma unroll
          for (int c = 0; c < 4; ++c) *reinterpret_cast<uint32_t*>(to + (n + c) * M + m) = column[c];
        }
      }
      __syncthreads();
    }
  }
  dx.close();
  if (Turned > 2) product.close();
}

template <class DY, class X>
__global__ __launch_bounds__(kSearchThreads) void swiglu_backward_kernel_search(DY dy, Halves<X> x, uint32_t* max,
                                                                                int64_t M) {
  find_largest(
      max, M, x.F / kRun,
      [&](int64_t row, int64_t run, float known) {
        float gate, up, dgate, dup, unused;
        x.reach(row, run, gate, up);
        const float reach = reach_of(dy, row * x.F + run * kRun, 0);
        const float quick = reach * fmaxf(fmaxf(gate, kMostBelow), up * kSiluSlope);
        if (quick <= known) return quick;
        swiglu_gradient(fminf(gate, kSteepest), up, reach, dgate, unused);
        swiglu_gradient(gate, up, reach, unused, dup);
        return fmaxf(fmaxf(dgate, dup), kMostBelow * reach) * kBoundSlack<X>;
      },
      [&](Range& range, int64_t row, int64_t col) {
        float gate, up, dgate, dup;
        x.load(row, col, gate, up);
        swiglu_gradient(gate, up, dy.load(row * x.F + col, {}), dgate, dup);
        range.add(dgate);
        range.add(dup);
      });
}

}  // namespace

void swiglu_backward(const swiglu_backward_args& args) {
  const int64_t M = args.dy.shape.rows(), F = args.dy.shape.cols();
  const dim3 grid(blocks_for(M * runs_of(F), kThreads));
  const char* name = "swiglu_backward";
  const bool fused = args.twin && F % kRun == 0 && M % 4 == 0 && M * F > 0;
  std::optional<Scratch> memory;
  Tensor scale = args.amax;
  scale.data = nullptr;
  if (args.amax && args.x.format == E4M3G16::format()) {
    const unsigned blocks = std::max(1u, blocks_for(M * runs_of(2 * F), kThreads * 8, 8));
    memory.emplace((2 * blocks + 1) * sizeof(float));
    scale.data = memory->as<uint8_t>();
    launch(name, swiglu_backward_kernel_bound, dim3(blocks), dim3(kThreads), 0, E4M3G16(args.x), args.amax.as<float>(),
           M, F, memory->as<uint32_t>() + 1, counters(), memory->as<float>());
  }
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      using DY = std::remove_const_t<decltype(dy)>;
      using X = std::remove_const_t<decltype(x)>;
      const Halves<X> halves{x, F};
      write(name, args.dx, scale, Views<F32, BF16, E5M2T>{}, [&]<class DX>(const Output<DX>& dx) {
        if constexpr (std::is_same_v<DX, Measured>) {
          if (F % kRun == 0)
            return launch(name, swiglu_backward_kernel_search<DY, X>, grid, dim3(kSearchThreads), 0, dy, halves,
                          dx.max(), M);
        } else if constexpr (std::is_same_v<DX, E5M2T>) {
          const int64_t tiles = (M + kTileRows - 1) / kTileRows * ((F + kTileCols - 1) / kTileCols);
          if (F % kRun == 0)
            return launch(name,
                          !fused         ? swiglu_backward_kernel_near<0, DY, X>
                          : args.product ? swiglu_backward_kernel_near<3, DY, X>
                                         : swiglu_backward_kernel_near<2, DY, X>,
                          dim3(blocks_for(tiles, 1, 2)), dim3(kTileThreads), 0, dy, halves, dx,
                          E5M2T(fused ? args.twin : args.dx),
                          Output<E4M3T>(E4M3T(args.product ? args.product : args.dx), args.scale.as<float>()), M);
        } else {
          if (F % kRun == 0)
            return launch(name, swiglu_backward_kernel<true, DY, X, DX>, grid, dim3(kThreads), 0, dy, x, dx, M, F);
        }
        launch(name, swiglu_backward_kernel<false, DY, X, DX>, grid, dim3(kThreads), 0, dy, x, dx, M, F);
      });
    });
  });
  if (fused) return;
  if (args.twin) convert_transposed({args.device, args.dx, {}, args.twin});
  if (args.product) {
    Tensor y = args.product;
    std::swap(y.shape.dims[0], y.shape.dims[1]);
    const Scratch codes(bytes_of(y.format, y.shape));
    y.data = codes.as<uint8_t>();
    swiglu_forward({args.device, args.x, args.scale, y});
    convert_transposed({args.device, y, {}, args.product});
  }
}

}  // namespace coat::cuda
