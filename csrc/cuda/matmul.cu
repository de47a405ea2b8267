// matmul: y = a b^T, a b and a^T b by tiles of 128 x 128: on tensor cores for bf16 and FP8, in FP32 FMA for f32.
#include <optional>

#include "../ops.h"
#include "tiles.cuh"

namespace coat::cuda {
namespace {

constexpr int kMmaThreads = 128, kFmaThreads = 256;
constexpr int kMmaDepth = 32;  // step along K of the kernel for tensor cores: two products of 16
constexpr int kFmaDepth = 16;  // and of the kernel for f32
constexpr int kGroup = 8;      // rows of tiles that run one after the other through all columns: they share b in L2

struct Product {
  Operand a, b;
  int64_t M, N;
  int steps, tail;      // steps along K, and the depth of the last one
  const uint8_t* bias;  // null: none
  bool bias_bf16;
  bool pairs;  // two neighbours of y, from an even column on, can be stored at once
};

// ---- what both kernels share ----

// This block's tile. y has at most 2^38 elements, so that the number of its tiles fits gridDim.x.
struct Place {
  int row, column;
  Place() = default;
  __device__ explicit Place(const Product& p) {
    const auto down = static_cast<unsigned>((p.M + kTile - 1) / kTile);
    const auto across = static_cast<unsigned>((p.N + kTile - 1) / kTile);
    const unsigned band = blockIdx.x / across / kGroup * kGroup, in = blockIdx.x - band * across;
    const unsigned rows = min(down - band, static_cast<unsigned>(kGroup));
    row = static_cast<int>(band + in % rows);
    column = static_cast<int>(in / rows);
  }
  __device__ int64_t m() const { return static_cast<int64_t>(row) * kTile; }
  __device__ int64_t n() const { return static_cast<int64_t>(column) * kTile; }
};

__device__ inline float scale_of(const Product& p) {
  return (p.a.scale ? *p.a.scale : 1.f) * (p.b.scale ? *p.b.scale : 1.f);
}

template <class Y>
__device__ inline void store2(const Y& y, int64_t i, typename Y::Sealed sealed, float x0, float x1) {
  using Code = std::remove_reference_t<decltype(*y.codes)>;
  using Bits =
      std::conditional_t<sizeof(Code) == 4, uint64_t, std::conditional_t<sizeof(Code) == 2, uint32_t, uint16_t>>;
  union {
    Code code[2];
    Bits bits;
  } raw;
  Y held = y;
  held.codes = raw.code;
  held.store(0, sealed, x0);
  held.store(1, sealed, x1);
  *reinterpret_cast<Bits*>(y.codes + i) = raw.bits;
}

// Sums x of row m at columns n, n + 1, n + apart, n + apart + 1 to y: scale, bias, one rounding. The 4 lanes of a quad
// hold the 16 columns of one run of e4m3/g16; all lanes of the warp must call.
template <class Y>
__device__ inline void finish(const Product& p, const Y& y, float scale, int64_t m, int64_t n, int apart,
                              float (&x)[4]) {
  const int64_t at[4] = {n, n + 1, n + apart, n + apart + 1};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] *= scale;
    if (p.bias && at[i] < p.N)
      x[i] += p.bias_bf16 ? BFloat16::decode(reinterpret_cast<const uint16_t*>(p.bias)[at[i]])
                          : reinterpret_cast<const float*>(p.bias)[at[i]];
  }
  typename Y::Sealed sealed{};
  if constexpr (Y::run == 16) {
    Range range;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (at[i] < p.N) range.add(x[i]);
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      Range other;
      other.max = __shfl_xor_sync(0xffffffffu, range.max, offset);
      other.infs = __shfl_xor_sync(0xffffffffu, range.infs, offset);
      range.merge(other);
    }
    if (threadIdx.x % 4 == 0 && m < p.M && n < p.N) sealed = y.seal(m * ((p.N + 15) / 16) + n / 16, range);
    sealed.inverse = __shfl_sync(0xffffffffu, sealed.inverse, threadIdx.x % 32 / 4 * 4);
  }
  if (m >= p.M) return;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int64_t to = m * p.N + at[i];
    if (p.pairs && at[i + 1] < p.N) {
      store2(y, to, sealed, x[i], x[i + 1]);
    } else {
      if (at[i] < p.N) y.store(to, sealed, x[i]);
      if (at[i + 1] < p.N) y.store(to + 1, sealed, x[i + 1]);
    }
  }
}

// One block a tile of 128 x 128, 4 warps of 64 x 64 each; K in steps of 32, two buffers in shared memory. FP8 becomes
// bf16 on the way there. Tensor cores cut low bits off where they add, so they sum 32 products only; those sums are
// added in FP32. Bytes per element of y: K (size of a + size of b) / 128 read, one element written.
template <class A, class B, bool AlongA, bool AlongB, class Y>
__global__ void __launch_bounds__(kMmaThreads, 2) matmul_kernel_mma(const Product p, const Y y) {
  using PieceA = Piece<A, AlongA, kMmaDepth, kMmaThreads>;
  using PieceB = Piece<B, AlongB, kMmaDepth, kMmaThreads>;
  constexpr int kPitchA = PieceA::kPitch, kPitchB = PieceB::kPitch;
  __shared__ __align__(16) uint16_t as[2][PieceA::kLines * kPitchA], bs[2][PieceB::kLines * kPitchB];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp / 2 * 64, col = warp % 2 * 64;
  // where this lane's line of the first matrices lies, for a: row, depth; for b: column, depth
  const int am = AlongA ? lane % 16 : lane / 8 % 2 * 8, ak = AlongA ? lane / 16 * 8 : lane % 8 + lane / 16 * 8;
  const int bn = AlongB ? lane % 8 + lane / 16 * 8 : lane / 16 * 8, bk = AlongB ? lane / 8 % 2 * 8 : lane % 16;
  const int a_at = AlongA ? (row + am) * kPitchA + ak : ak * kPitchA + row + am;
  const int b_at = AlongB ? (col + bn) * kPitchB + bk : bk * kPitchB + col + bn;
  constexpr int kRowA = AlongA ? kPitchA : 1, kDepthA = AlongA ? 1 : kPitchA;
  constexpr int kColB = AlongB ? kPitchB : 1, kDepthB = AlongB ? 1 : kPitchB;

  float sums[4][8][4] = {};  // [16 rows][8 columns][of the lane]
  __shared__ Place kept;     // registers are short
  const Place place(p);
  if (threadIdx.x == 0) kept = place;
  PieceA a(p.a, place.m());
  PieceB b(p.b, place.n());
  a.load(p.a, p.steps > 1 ? kMmaDepth : p.tail);
  a.put(as[0]);
  b.load(p.b, p.steps > 1 ? kMmaDepth : p.tail);
  b.put(bs[0]);
  __syncthreads();
  for (int step = 0; step < p.steps; ++step) {
    const int now = step & 1;
    const bool more = step + 1 < p.steps;
    uint32_t fb[2][8][2];
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        load_matrices<!AlongB>(fb[s][j][0], fb[s][j][1], fb[s][j + 1][0], fb[s][j + 1][1],
                               bs[now] + b_at + 8 * j * kColB + 16 * s * kDepthB);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i == 0 && more) a.load(p.a, step + 2 < p.steps ? kMmaDepth : p.tail);
      if (i == 2 && more) b.load(p.b, step + 2 < p.steps ? kMmaDepth : p.tail);
      uint32_t fa[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s)
        load_matrices<!AlongA>(fa[s][0], fa[s][1], fa[s][2], fa[s][3],
                               as[now] + a_at + 16 * i * kRowA + 16 * s * kDepthA);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float part[4];
        multiply_add(part, fa[0], fb[0][j], 0.f, 0.f, 0.f, 0.f);
        multiply_add(part, fa[1], fb[1][j], part[0], part[1], part[2], part[3]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] += part[e];
      }
      if (i == 1 && more) a.put(as[now ^ 1]);
      if (i == 3 && more) b.put(bs[now ^ 1]);
    }
    __syncthreads();
  }

  const float scale = scale_of(p);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        float x[4] = {sums[i][j][2 * half], sums[i][j][2 * half + 1], sums[i][j + 1][2 * half],
                      sums[i][j + 1][2 * half + 1]};
        finish(p, y, scale, kept.m() + row + 16 * i + 8 * half + lane / 4, kept.n() + col + 8 * j + lane % 4 * 2, 8, x);
      }
}

// One block a tile of 128 x 128; a thread 8 x 8 of it, in two times two blocks of 4 x 4; K in steps of 16, two buffers.
// Sums run over K in ascending order, so the three forms agree bit for bit. Bytes per element of y: K / 16 read.
template <bool AlongA, bool AlongB, class Y>
__global__ void __launch_bounds__(kFmaThreads, 2) matmul_kernel_fma(const Product p, const Y y) {
  using PieceA = Piece<Float32, AlongA, kFmaDepth, kFmaThreads>;
  using PieceB = Piece<Float32, AlongB, kFmaDepth, kFmaThreads>;
  constexpr int kPitch = PieceA::kPitch;
  __shared__ __align__(16) float as[2][kFmaDepth * kPitch], bs[2][kFmaDepth * kPitch];
  __shared__ Place kept;  // registers are short
  const int row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;

  float sums[8][8] = {};
  const Place place(p);
  if (threadIdx.x == 0) kept = place;
  PieceA a(p.a, place.m());
  PieceB b(p.b, place.n());
  a.load(p.a, p.steps > 1 ? kFmaDepth : p.tail);
  a.put(as[0]);
  b.load(p.b, p.steps > 1 ? kFmaDepth : p.tail);
  b.put(bs[0]);
  __syncthreads();
  for (int step = 0; step < p.steps; ++step) {
    const int now = step & 1;
    const bool more = step + 1 < p.steps;
#pragma unroll
    for (int d = 0; d < kFmaDepth; ++d) {
      if (d == 0 && more) a.load(p.a, step + 2 < p.steps ? kFmaDepth : p.tail);
      if (d == kFmaDepth / 2 && more) b.load(p.b, step + 2 < p.steps ? kFmaDepth : p.tail);
      float fa[8], fb[8];
      const float *from_a = as[now] + d * kPitch + row, *from_b = bs[now] + d * kPitch + col;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        *reinterpret_cast<float4*>(fa + i) = *reinterpret_cast<const float4*>(from_a + 16 * i);
        *reinterpret_cast<float4*>(fb + i) = *reinterpret_cast<const float4*>(from_b + 16 * i);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fma_(fa[i], fb[j], sums[i][j]);
      if (d == kFmaDepth / 2 - 3 && more) a.put(as[now ^ 1]);
      if (d == kFmaDepth - 1 && more) b.put(bs[now ^ 1]);
    }
    __syncthreads();
  }

  const float scale = scale_of(p);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      float x[4] = {sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]};
      finish(p, y, scale, kept.m() + row + i % 4 + i / 4 * 64, kept.n() + col + 16 * j, 2, x);
    }
}

// Lines of `width` codes to lines of `stride`, with zeros between. One block a line. Bytes per code: itself, twice.
template <class Code>
__global__ void __launch_bounds__(kFmaThreads)
    matmul_kernel_padded(const Code* from, Code* to, int64_t lines, int64_t width, int64_t stride) {
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x)
    for (int64_t i = threadIdx.x; i < stride; i += kFmaThreads)
      to[line * stride + i] = i < width ? from[line * width + i] : Code(0);
}

// ---- host ----

bool on_boundary(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// An operand for kernels of `threads` threads and steps of `depth`. Lines that do not begin on 16-byte boundaries are
// copied to `room`.
template <bool AlongK>
Operand operand(const char* name, const Tensor& x, int threads, int depth, std::optional<Scratch>& room) {
  const int64_t lines = x.shape.dims[0], width = x.shape.dims[1], bytes = code_bytes(x.format.dtype, 1);
  Operand result{
      x.data, x.format.scaling == Scaling::tensor ? x.scales<float>() : nullptr, AlongK ? lines : width, width, 0, 0};
  if (!on_boundary(x.data, 16) || width * bytes % 16 != 0) {
    result.stride = (width * bytes + 15) / 16 * 16 / bytes;
    room.emplace(lines * result.stride * bytes);
    result.codes = room->as<uint8_t>();
    const auto copy = [&](auto code) {
      using Code = decltype(code);
      launch(name, matmul_kernel_padded<Code>, blocks_for(lines, 1), kFmaThreads, 0, x.as<Code>(), room->as<Code>(),
             lines, width, result.stride);
    };
    bytes == 4 ? copy(uint32_t{}) : bytes == 2 ? copy(uint16_t{}) : copy(uint8_t{});
  }
  result.step = threads * (16 / bytes) / (AlongK ? depth : kTile) * result.stride * bytes;
  result.hop = depth * (AlongK ? 1 : result.stride) * bytes;
  return result;
}

template <bool AlongA, bool AlongB, class... Y>
void multiply(const char* name, const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& y,
              Views<Y...> list) {
  const int64_t M = a.shape.dims[AlongA ? 0 : 1], N = b.shape.dims[AlongB ? 0 : 1], K = a.shape.dims[AlongA ? 1 : 0];
  if (M == 0 || N == 0) return;
  std::optional<Scratch> rooms[2];
  const bool fma = a.format.dtype == DType::f32;
  const int threads = fma ? kFmaThreads : kMmaThreads, depth = fma ? kFmaDepth : kMmaDepth;
  const Operand left = operand<AlongA>(name, a, threads, depth, rooms[0]);
  const Operand right = operand<AlongB>(name, b, threads, depth, rooms[1]);
  const int64_t steps = (K + depth - 1) / depth;
  const Product p{left,
                  right,
                  M,
                  N,
                  static_cast<int>(steps),
                  static_cast<int>(K == 0 ? 0 : K - (steps - 1) * depth),
                  bias.data,
                  bias.format.dtype == DType::bf16,
                  N % 2 == 0 && on_boundary(y.data, 8)};
  const auto tiles = static_cast<unsigned>(((M + kTile - 1) / kTile) * ((N + kTile - 1) / kTile));
  with("y", y, list, [&](const auto view) {
    using V = std::remove_const_t<decltype(view)>;
    const auto start = [&](auto kernel) { launch(name, kernel, tiles, threads, 0, p, view); };
    if (fma) {
      start(matmul_kernel_fma<AlongA, AlongB, V>);
    } else if (a.format.dtype == DType::bf16) {
      start(matmul_kernel_mma<BFloat16, BFloat16, AlongA, AlongB, V>);
    } else if constexpr (AlongA && AlongB) {
      if (a.format.dtype == DType::e4m3)
        start(matmul_kernel_mma<E4M3, E4M3, true, true, V>);
      else
        start(matmul_kernel_mma<E5M2, E4M3, true, true, V>);
    }
  });
}

}  // namespace

void matmul_nt(const matmul_nt_args& args) {
  multiply<true, true>("matmul_nt", args.a, args.b, args.bias, args.y, Views<F32, BF16, E4M3G16>{});
}

void matmul_nn(const matmul_nn_args& args) {
  multiply<true, false>("matmul_nn", args.a, args.b, {}, args.y, Views<F32, BF16>{});
}

void matmul_tn(const matmul_tn_args& args) {
  multiply<false, false>("matmul_tn", args.a, args.b, {}, args.y, Views<F32, BF16>{});
}

}  // namespace coat::cuda
