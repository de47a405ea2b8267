// The gradient of swiglu on the device, with the transposes that the products of a layer read.
#include <optional>

#include "../hopper.cuh"
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
// product [F, M]: there a thread turns 16 rows of four columns. Turned is 0, 2 or 3; if it is not 0, M is a multiple
// of 4.
constexpr int kTileRows = 128, kTileCols = 64, kTileRuns = kTileCols / kRun, kTileThreads = kTileRows * kTileRuns;
struct Tile {
  int4 run[kTileThreads];
  // Eight threads that put the runs of two rows fill the banks once, and so does a warp that takes words of rows 16
  // apart.
  static __device__ int place(int row, int run) { return (row * kTileRuns + (run ^ (row / 16 % 4))) ^ (row / 64 * 4); }
  __device__ void put_one(int row, int col, uint8_t code) {
    reinterpret_cast<uint8_t*>(run + place(row, col / kRun))[col % kRun] = code;
  }
  // 16 rows, of which `row` is the first and a multiple of 16, of columns 4 word to 4 word + 3 of a run, into lines of
  // length M: `to` is the start in the first. `left` rows exist.
  __device__ void turn(int row, int at, int word, uint8_t* to, int64_t M, int64_t left) const {
    const int first = place(row, at);
    const auto* even_rows = reinterpret_cast<const uint32_t*>(run + first) + word;
    const auto* odd_rows = reinterpret_cast<const uint32_t*>(run + (first ^ kTileRuns)) + word;
    union {
      int4 codes;
      uint32_t four[4];
    } column[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      uint32_t four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = (j % 2 == 0 ? even_rows : odd_rows)[(r * 4 + j / 2 * 2) * kTileRuns * 4];
      turn_bytes(four[0], four[1], four[2], four[3]);
#pragma unroll
      for (int c = 0; c < 4; ++c) column[c].four[r] = four[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c, to += M) {
      if (M % 16 == 0) {
        *reinterpret_cast<int4*>(to) = column[c].codes;
      } else {
#pragma unroll
        for (int r = 0; r < 4; ++r)
          if (r * 4 < left) reinterpret_cast<uint32_t*>(to)[r] = column[c].four[r];
      }
    }
  }
};

// What the threads of a tile read next, on its way while they compute. The threads of a row share the fetches of theirs
// in pieces of 16 bytes, neighbours neighbouring pieces; all lie in one warp.
template <class View>
struct Ahead {
  static constexpr int kPieces = sizeof(CodeOf<View>), kEach = 16 / kPieces;  // of a thread, elements of a piece
  int4 piece[kTileThreads * kPieces];
  static __device__ int place(int p) {  // spread over the banks for those who put and those who take
    const int row = threadIdx.x / kTileRuns;
    return row * kTileRuns * kPieces ^ (kPieces == 1 ? 0 : row % 2 * 5) ^ p;
  }
  // Of the row of this thread, whose first `cols` columns exist. `from` is the first piece of this thread.
  __device__ void fetch(const CodeOf<View>* from, int cols) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int p = threadIdx.x % kTileRuns + i * kTileRuns;
      if (p * kEach < cols)
        fetch_piece(shared_address(piece + (place(threadIdx.x % kTileRuns) ^ i * kTileRuns)),
                    from + i * kTileRuns * kEach);
    }
  }
  __device__ void take(Pack<View, kRun>& pack) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pack.word[i] = piece[place(threadIdx.x % kTileRuns * kPieces) ^ i];
  }
};
template <int Turned, class DY, class X>
struct TileMemory {
  Ahead<DY> dy;
  Ahead<X> gate, up;
  // Gates, ups, products; twice, so that those of the last tile leave while others come.
  Tile tile[Turned > 0 ? 2 : 1][Turned > 0 ? Turned : 1];
};

// The ends of four values, in units of what they are to be encoded in.
__device__ inline void ends_of(const float (&x)[4], float less, float more, float (&low)[4], float (&high)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) low[j] = x[j] * less, high[j] = x[j] * more;
}
constexpr float kLargestGradient = 0x1p60f;  // as kLargestFactor, of a product of dy

template <int Turned, class DY, class X>
__global__ __launch_bounds__(kTileThreads, sizeof(CodeOf<DY>) + sizeof(CodeOf<X>) > 3
                                               ? 1
                                               : 2) void swiglu_backward_kernel_near(DY dy, Halves<X> x,
                                                                                     Output<E5M2T> dx, E5M2T twin,
                                                                                     Output<E4M3T> product, int64_t M) {
  extern __shared__ int4 memory[];
  auto& shared = *reinterpret_cast<TileMemory<Turned, DY, X>*>(memory);
  const int64_t F = x.F, across = (F + kTileCols - 1) / kTileCols;
  const int tile_row = threadIdx.x / kTileRuns, tile_col = threadIdx.x % kTileRuns * kRun;
  dx.open();
  const float inverse = dx.inverse();
  if (Turned > 2) product.open();
  if (Turned > 0 && blockIdx.x == 0 && threadIdx.x == 0) twin.seal_as(dx.scale());
  const bool scaled = is_near_scale(inverse) && (Turned <= 2 || is_near_scale(product.inverse()));
  const float widest = fmaxf(1.f, inverse * 0x1p-40f);  // of what a gradient is multiplied with, of scales less
  int64_t next_row = blockIdx.x / across * kTileRows, next_col = blockIdx.x % across * kTileCols;
  const int64_t step_rows = gridDim.x / across * kTileRows, step_cols = gridDim.x % across * kTileCols;
  const int own = threadIdx.x % kTileRuns;
  // The run of this thread in dx and x, and the first piece of dy that it fetches: where they lie, and the way to the
  // next tile, also from the end of a row of tiles.
  int64_t next = (next_row + tile_row) * 2 * F + next_col + tile_col;
  int64_t next_dy = (next_row + tile_row) * F + next_col + own * Ahead<DY>::kEach;
  const int64_t step = step_rows * 2 * F + step_cols, turned_step = step + kTileRows * 2 * F - across * kTileCols;
  const int64_t step_dy = step_rows * F + step_cols, turned_step_dy = step_dy + kTileRows * F - across * kTileCols;
  bool next_here;
  int next_width;
  uint16_t next_scale[2] = {};
  const auto fetch = [&] {
    const bool exists = next_row + tile_row < M;
    next_width = static_cast<int>(::min(F - next_col, int64_t{kTileCols}));
    next_here = exists && tile_col < next_width;
    if (!exists) return;
    const auto* from = x.x.codes + next + (own * Ahead<X>::kEach - tile_col);
    shared.dy.fetch(dy.codes + next_dy, next_width);
    shared.gate.fetch(from, next_width);
    shared.up.fetch(from + F, next_width);
    if (X::run != 0 && next_here) x.fetch_scales(next, next_scale);
  };
  fetch();
  for (int odd = 0; next_row < M; odd ^= 1) {
    const int64_t first_row = next_row, first_col = next_col, i = next;
    const int width = next_width;
    const bool here = next_here;
    Pack<DY, kRun> pack_dy;
    Pack<X, kRun> gates, ups;
    fetches_done();
    __syncwarp();
    shared.dy.take(pack_dy);
    shared.gate.take(gates);
    shared.up.take(ups);
    gates.scale = next_scale[0], ups.scale = next_scale[1];
    __syncwarp();
    next_row += step_rows;
    next_col += step_cols;
    const bool turns = next_col >= F;
    if (turns) {
      next_col -= across * kTileCols;
      next_row += kTileRows;
    }
    next += turns ? turned_step : step;
    next_dy += turns ? turned_step_dy : step_dy;
    fetch();
    auto& tile = shared.tile[Turned > 0 ? odd : 0];
    bool certain = true;
    if (here) {
      const float unit_gate = gates.unit(), reach_gate = reach_of(gates), reach_up = reach_of(ups);
      certain = scaled && reach_gate < kLargestFactor && reach_up < kLargestFactor &&
                reach_of(pack_dy) * fmaxf(fmaxf(reach_gate, reach_up), widest) < kLargestGradient &&
                lowest_of(gates, reach_gate, kLowestGate) > kLowestGate;
      // The ends of silu' are s times those of a sum; the error of the gate with the largest magnitude is that of all.
      // What is the same for the whole run is multiplied once: the ups stay in their unit.
      const float error = fma_(reach_gate, kNearError, kNearError), less = 1.f - error, more = 1.f + error;
      const float by_gate = inverse * ups.unit(), by_product = product.inverse() * ups.unit();
      Pack<E5M2T, kRun> codes_gate, codes_up;
      Pack<E4M3T, kRun> codes_product;
      uint32_t differ = 0;
#pragma unroll
      for (int k = 0; k < kRun; k += 4) {
        float low_gate[4], high_gate[4], up[4], made[4], low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float g = pack_dy.value(k + j), of_up = ups.value(k + j), gate = gates.value(k + j) * unit_gate;
          const float s = sigmoid_<Near>(gate), silu = s * gate, rest = 1.f - s;
          const float factor = g * of_up * (s * by_gate);
          low_gate[j] = factor * fma_(gate, rest, less);
          high_gate[j] = factor * fma_(gate, rest, more);
          up[j] = g * silu;
          made[j] = silu * of_up;
        }
        differ |= encode_near<E5M2>(low_gate, high_gate, codes_gate.quad + k / 4);
        ends_of(up, inverse * (1.f - kNearError), inverse * (1.f + kNearError), low, high);
        differ |= encode_near<E5M2>(low, high, codes_up.quad + k / 4);
        if constexpr (Turned > 2) {
          ends_of(made, by_product * (1.f - kNearError), by_product * (1.f + kNearError), low, high);
          differ |= encode_near<E4M3>(low, high, codes_product.quad + k / 4);
        }
      }
      certain = certain && differ == 0;
      if (certain) {
        dx.put_codes(i, codes_gate);
        dx.put_codes(i + F, codes_up);
        if constexpr (Turned > 0) {
          const int at = Tile::place(tile_row, own);
          tile[0].run[at] = codes_gate.word[0];
          tile[1].run[at] = codes_up.word[0];
          if constexpr (Turned > 2) tile[2].run[at] = codes_product.word[0];
        }
      }
    }
    do_together(!certain, first_row + tile_row, (first_col + tile_col) / kRun, [&](int64_t its_row, int64_t its_col) {
      float gate, up, value[2];
      x.load(its_row, its_col, gate, up);
      swiglu_gradient(gate, up, dy.load(its_row * F + its_col, {}), value[0], value[1]);
      const int at_row = static_cast<int>(its_row - first_row), at_col = static_cast<int>(its_col - first_col);
      for (int half = 0; half < 2; ++half) {
        const uint8_t code = dx.put_one(its_row * 2 * F + half * F + its_col, value[half]);
        if constexpr (Turned > 0) tile[half].put_one(at_row, at_col, code);
      }
      if constexpr (Turned > 2)
        tile[2].put_one(at_row, at_col, product.put_one(its_col * M + its_row, swiglu(gate, up)));
    });
    if constexpr (Turned > 0) {
      __syncthreads();
      // a warp for all rows of a run: eight threads for four of its columns
      const int task = threadIdx.x / 32, part = task / kTileRuns, run = task % kTileRuns;
      const int down = threadIdx.x % 8 * 16, word = threadIdx.x % 32 / 8;
      static_assert(kTileRows == 8 * 16 && 3 * kTileRuns <= kTileThreads / 32);
      if (part < Turned && first_row + down < M && run * kRun < width)
        tile[part].turn(down, run, word,
                        (part == 2 ? &product.view().codes->code : &twin.codes[part * F * M].code) +
                            (first_col * M + first_row) + ((run * kRun + word * 4) * M + down),
                        M, M - first_row - down);
    }
  }
  dx.close();
  if (Turned > 2) product.close();
}

template <int Turned, class DY, class X>
void launch_near(const DY& dy, const Halves<X>& x, const Output<E5M2T>& dx, const swiglu_backward_args& args,
                 int64_t M) {
  const int64_t tiles = (M + kTileRows - 1) / kTileRows * ((x.F + kTileCols - 1) / kTileCols);
  launch("swiglu_backward", swiglu_backward_kernel_near<Turned, DY, X>, dim3(blocks_for(tiles, 1, 2)),
         dim3(kTileThreads), sizeof(TileMemory<Turned, DY, X>), dy, x, dx, E5M2T(Turned > 0 ? args.twin : args.dx),
         Output<E4M3T>(E4M3T(Turned > 2 ? args.product : args.dx), args.scale.as<float>()), M);
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
          if (F % kRun == 0)
            return (!fused         ? launch_near<0, DY, X>
                    : args.product ? launch_near<3, DY, X>
                                   : launch_near<2, DY, X>)(dy, halves, dx, args, M);
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
