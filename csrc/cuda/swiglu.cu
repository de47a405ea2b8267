// swiglu on the device: silu(gate) * up on the two halves of a row.
#include "../ops.h"
#include "near.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr float kLowestGate = -86.f, kLargestProduct = 0x1p100f;  // within them nothing overflows or flushes
constexpr float kMostBelow = 0.2785f, kSteepest = 2.3994f;        // largest |silu(x)| for x < 0; where silu' is largest
constexpr float kRoot = -1.27846454f;                             // of silu'
constexpr float kMostSlope = 1.1f;                                // … and above that

// 16 columns of half 0, the gates, or 1, the ups, of x: those of run at.run of y.
template <bool Whole, class X>
__device__ inline void load_half(const X& x, const Walk& at, int64_t F, int half, float (&out)[kRun]) {
  if (Whole)
    load_run(x, at.row, 2 * F, half * at.runs + at.run, true, out);
  else
    load_some(x, at.row, 2 * F, half * F + at.run * kRun, length_of(F, at.run), out);
}

// x with F a multiple of 16: where the halves of a run or an element of y lie.
template <class X>
struct Halves {
  X x;
  int64_t F;
  __device__ void fetch(int64_t row, int64_t run, Pack<X, kRun>& gate, Pack<X, kRun>& up) const {
    const int64_t runs = F / kRun, i = row * 2 * F + run * kRun, b = row * 2 * runs + run;
    gate.fetch(x, i, b);
    up.fetch(x, i + F, b + runs);
  }
  __device__ void reach(int64_t row, int64_t run, float& gate, float& up) const {
    const int64_t runs = F / kRun, i = row * 2 * F + run * kRun, b = row * 2 * runs + run;
    gate = reach_of(x, i, b);
    up = reach_of(x, i + F, b + runs);
  }
  __device__ void load(int64_t row, int64_t col, float& gate, float& up) const {
    const int64_t i = row * 2 * F + col, b = i / kRun;
    gate = load_one(x, i, b);
    up = load_one(x, i + F, b + F / kRun);
  }
};

// A thread takes 16 columns of y at a time: 16 gates and the 16 ups F columns behind. Whole: F is a multiple of 16, so
// that runs are full and none crosses from gate to up; else element by element. Moves x and y once; a /t scale that has
// to be measured reads x once more.
template <bool Whole, class X, class Y>
__global__ __launch_bounds__(kThreads, 2) void swiglu_forward_kernel(X x, Output<Y> y, int64_t M, int64_t F) {
  y.open();
  for (Walk at(M, runs_of(F)); at.more(); at.next()) {
    float gate[kRun], up[kRun];
    load_half<Whole>(x, at, F, 0, gate);
    load_half<Whole>(x, at, F, 1, up);
#pragma unroll
    for (int k = 0; k < kRun; ++k) gate[k] = swiglu(gate[k], up[k]);
    put_run(y, at.row, F, at.run, Whole, gate);
  }
  y.close();
}

// The same for whole runs, nearly first; the codes of the next run are fetched before this one is computed.
template <class X, class Y>
__global__ __launch_bounds__(kThreads, sizeof(CodeOf<X>) == 1 ? 4 : 2) void swiglu_forward_kernel_near(Halves<X> x,
                                                                                                       Output<Y> y,
                                                                                                       int64_t M) {
  const int64_t F = x.F;
  y.open();
  const float inverse = y.inverse();
  Pack<X, kRun> next_gate, next_up;
  Walk at(M, F / kRun);
  if (at.more()) x.fetch(at.row, at.run, next_gate, next_up);
  while (__any_sync(0xffffffffu, at.more())) {
    const int64_t row = at.row, run = at.run;
    const bool here = at.more();
    float v[kRun], up[kRun];
    next_gate.unpack(x.x, v);
    next_up.unpack(x.x, up);
    const float reach_gate = reach_of(next_gate, v), reach_up = reach_of(next_up, up);
    bool certain = is_near_scale(inverse) && lowest_of(reach_gate, kLowestGate, v) > kLowestGate &&
                   reach_gate * reach_up < kLargestProduct;
    at.next();
    if (at.more()) x.fetch(at.row, at.run, next_gate, next_up);
#pragma unroll
    for (int k = 0; k < kRun; ++k) v[k] = swiglu<Near>(v[k], up[k]);
    if (here) {
      Pack<Y, kRun> pack;
      certain = encode_near(pack, v, kNearError, inverse) && certain;
      if (certain) y.put_codes(row * F + run * kRun, pack);
    }
    do_together(here && !certain, row, run, [&](int64_t its_row, int64_t col) {
      float gate, up;
      x.load(its_row, col, gate, up);
      y.put_one(its_row * F + col, swiglu(gate, up));
    });
  }
  y.close();
}

template <class X>
__global__ __launch_bounds__(kSearchThreads) void swiglu_forward_kernel_search(Halves<X> x, uint32_t* max, int64_t M) {
  find_largest(
      max, M, x.F / kRun,
      [&](int64_t row, int64_t run, float known) {
        float gate, up;
        x.reach(row, run, gate, up);
        const float quick = fmaxf(swiglu<Near>(gate, up), kMostBelow * up) * kNearSlack;
        if (quick <= known) return quick;
        return fmaxf(swiglu(gate, up), kMostBelow * up) * kBoundSlack<X>;
      },
      [&](Range& range, int64_t row, int64_t col) {
        float gate, up;
        x.load(row, col, gate, up);
        range.add(swiglu(gate, up));
      });
}

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

// Tiles of kTileRows rows and kTileCols columns of dy, a thread 16 columns of a row. The codes of dx go out as they are
// and, with Twin, through shared memory into twin [2F, M], the transpose: there a word holds four columns of a row, and
// a thread turns four words of four rows. M is a multiple of 4 with Twin.
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

template <bool Twin, class DY, class X>
__global__ __launch_bounds__(kTileThreads, sizeof(CodeOf<DY>) + sizeof(CodeOf<X>) > 3
                                               ? 1
                                               : 2) void swiglu_backward_kernel_near(DY dy, Halves<X> x,
                                                                                     Output<E5M2T> dx, E5M2T twin,
                                                                                     int64_t M) {
  __shared__ Tile tile[Twin ? 2 : 1];  // gates, ups
  const int64_t F = x.F, across = (F + kTileCols - 1) / kTileCols, tiles = (M + kTileRows - 1) / kTileRows * across;
  const int tile_row = threadIdx.x / (kTileCols / kRun), tile_col = threadIdx.x % (kTileCols / kRun) * kRun;
  dx.open();
  const float inverse = dx.inverse();
  if (Twin && blockIdx.x == 0 && threadIdx.x == 0) twin.seal_as(dx.scale());
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
      Pack<E5M2T, kRun> codes_gate, codes_up;
      {
        const float less = inverse - inverse * kNearError, more = fma_(inverse, kNearError, inverse);
        uint32_t differ = 0;
#pragma unroll
        for (int k = 0; k < kRun; k += 2) {
          float low_gate[2], high_gate[2], low_up[2], high_up[2];
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
          }
          differ |= encode_near<E5M2>(low_gate, high_gate, codes_gate.pair[k / 2]);
          differ |= encode_near<E5M2>(low_up, high_up, codes_up.pair[k / 2]);
        }
        certain = certain && differ == 0;
      }
      if (certain) {
        const int64_t i = row * 2 * F + run * kRun;
        dx.put_codes(i, codes_gate);
        dx.put_codes(i + F, codes_up);
        if (Twin) {
          tile[0].put(tile_row, tile_col, codes_gate.quad);
          tile[1].put(tile_row, tile_col, codes_up.quad);
        }
      }
    }
    do_together(!certain, row, run, [&](int64_t its_row, int64_t col) {
      float gate, up, value[2];
      x.load(its_row, col, gate, up);
      swiglu_gradient(gate, up, dy.load(its_row * F + col, {}), value[0], value[1]);
      for (int half = 0; half < 2; ++half) {
        const uint8_t code = dx.put_one(its_row * 2 * F + half * F + col, value[half]);
        if (Twin) tile[half].put_one(static_cast<int>(its_row - first_row), static_cast<int>(col - first_col), code);
      }
    });
    if constexpr (Twin) {
      __syncthreads();
      const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
      const int64_t m = first_row + 4 * lane, n = first_col + 4 * group;
      static_assert(kTileThreads / 32 == kTileWords && kTileRows == 4 * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t column[4];
        tile[half].turn(4 * lane, group, column);
        if (m < M && n < F) {
#pragma unroll
          for (int c = 0; c < 4; ++c) *reinterpret_cast<uint32_t*>(twin.codes + (half * F + n + c) * M + m) = column[c];
        }
      }
      __syncthreads();
    }
  }
  dx.close();
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
        const float quick = reach * fmaxf(fmaxf(gate, kMostBelow), up * kMostSlope);
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

void swiglu_forward(const swiglu_forward_args& args) {
  const int64_t M = args.y.shape.rows(), F = args.y.shape.cols();
  const dim3 grid(blocks_for(M * runs_of(F), kThreads));
  const char* name = "swiglu_forward";
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    const Halves<X> halves{x, F};
    write(name, args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      if constexpr (std::is_same_v<Y, Measured>) {
        if (F % kRun == 0)
          return launch(name, swiglu_forward_kernel_search<X>, grid, dim3(kSearchThreads), 0, halves, y.max(), M);
      } else if constexpr (kHasNear<Y> && sizeof(CodeOf<X>) + sizeof(CodeOf<Y>) < 4) {  // else there is time
        if (F % kRun == 0)
          return launch(name, swiglu_forward_kernel_near<X, Y>, dim3(blocks_for(M * runs_of(F), kThreads, 4)),
                        dim3(kThreads), 0, halves, y, M);
      } else {
        if (F % kRun == 0) return launch(name, swiglu_forward_kernel<true, X, Y>, grid, dim3(kThreads), 0, x, y, M, F);
      }
      launch(name, swiglu_forward_kernel<false, X, Y>, grid, dim3(kThreads), 0, x, y, M, F);
    });
  });
}

void swiglu_backward(const swiglu_backward_args& args) {
  const int64_t M = args.dy.shape.rows(), F = args.dy.shape.cols();
  const dim3 grid(blocks_for(M * runs_of(F), kThreads));
  const char* name = "swiglu_backward";
  const bool fused = args.twin && args.dx.format == E5M2T::format() && F % kRun == 0 && M % 4 == 0;
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      using DY = std::remove_const_t<decltype(dy)>;
      using X = std::remove_const_t<decltype(x)>;
      const Halves<X> halves{x, F};
      write(name, args.dx, {}, Views<F32, BF16, E5M2T>{}, [&]<class DX>(const Output<DX>& dx) {
        if constexpr (std::is_same_v<DX, Measured>) {
          if (F % kRun == 0)
            return launch(name, swiglu_backward_kernel_search<DY, X>, grid, dim3(kSearchThreads), 0, dy, halves,
                          dx.max(), M);
        } else if constexpr (std::is_same_v<DX, E5M2T>) {
          const int64_t tiles = (M + kTileRows - 1) / kTileRows * ((F + kTileCols - 1) / kTileCols);
          if (F % kRun == 0)
            return launch(name,
                          fused ? swiglu_backward_kernel_near<true, DY, X> : swiglu_backward_kernel_near<false, DY, X>,
                          dim3(blocks_for(tiles, 1, 2)), dim3(kTileThreads), 0, dy, halves, dx,
                          E5M2T(fused ? args.twin : args.dx), M);
        } else {
          if (F % kRun == 0)
            return launch(name, swiglu_backward_kernel<true, DY, X, DX>, grid, dim3(kThreads), 0, dy, x, dx, M, F);
        }
        launch(name, swiglu_backward_kernel<false, DY, X, DX>, grid, dim3(kThreads), 0, dy, x, dx, M, F);
      });
    });
  });
  if (args.twin && (!fused || args.twin.shape.numel() == 0)) {
    convert_transposed_args turned;
    turned.x = args.dx;
    turned.y = args.twin;
    convert_transposed(turned);
  }
}

}  // namespace coat::cuda
