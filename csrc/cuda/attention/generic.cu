// attention for any T, D up to 256 and any grouping of heads: tiles of queries against tiles of keys in shared memory,
// FP32 throughout; the online softmax forward, the probabilities from the log-sum-exp backward.
#include "attention.cuh"

namespace coat::cuda {
namespace {

constexpr int kThreads = 256, kSide = 16;  // threads form a square: ty rows, tx columns of a tile

// What a block works on: sequence, head and first row of its tile, from one index, since other axes of a grid are
// short.
struct Place {
  int64_t b, head, first;
  __device__ Place(int64_t T, int64_t heads, int rows) {
    const int64_t tiles = (T + rows - 1) / rows, i = blockIdx.x;
    first = i % tiles * rows;
    head = i / tiles % heads;
    b = i / tiles / heads;
  }
};

unsigned grid_of(const AttentionSizes& s, int64_t heads, int rows) {
  const int64_t blocks = (s.T + rows - 1) / rows * heads * s.B;
  if (blocks > INT32_MAX) fail("shape", "qkv", "qkv needs ", blocks, " blocks, and a grid has at most ", INT32_MAX);
  return static_cast<unsigned>(blocks);
}

// A tile has R * 16 rows of D elements; the stride D + 1 keeps columns of 16 rows in 16 banks. Rows from T on are zero.
template <int R, class View>
__device__ void load_tile(const View& view, int64_t first, int64_t row, int64_t column, int64_t T, int64_t D,
                          float* tile) {
  const int count = static_cast<int>(R * kSide * D), width = static_cast<int>(D);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int r = i / width, d = i - r * width;
    const int64_t t = first + r;
    tile[r * (width + 1) + d] = t < T ? view.load(t * row + column + d, view.open(0)) : 0.f;
  }
}

// acc[i][j] = sum over d of a[R ty + i][d] * b[tx + 16 j][d].
template <int R>
__device__ void dot_tiles(const float* a, const float* b, int D, float (&acc)[R][R]) {
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int j = 0; j < R; ++j) acc[i][j] = 0.f;
  for (int d = 0; d < D; ++d) {
    float left[R], right[R];
#pragma unroll
    for (int i = 0; i < R; ++i) left[i] = a[(R * ty + i) * (D + 1) + d];
#pragma unroll
    for (int j = 0; j < R; ++j) right[j] = b[(tx + kSide * j) * (D + 1) + d];
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
      for (int j = 0; j < R; ++j) acc[i][j] = fmaf(left[i], right[j], acc[i][j]);
  }
}

// out[i][c] += sum over k of p[R ty + i][k] * b[k][tx + 16 c], p with a stride of R * 16 + 1.
template <int R, int C>
__device__ void accumulate_tile(const float* p, const float* b, int D, float (&out)[R][C]) {
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
  for (int k = 0; k < R * kSide; ++k) {
    float left[R];
#pragma unroll
    for (int i = 0; i < R; ++i) left[i] = p[(R * ty + i) * (R * kSide + 1) + k];
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int d = tx + kSide * c;
      const float right = d < D ? b[k * (D + 1) + d] : 0.f;
#pragma unroll
      for (int i = 0; i < R; ++i) out[i][c] = fmaf(left[i], right, out[i][c]);
    }
  }
}

__device__ float row_max(float x) {
  for (int offset = 8; offset > 0; offset >>= 1) {
    const float other = __shfl_xor_sync(0xffffffffu, x, offset);
    x = other > x || other != other ? other : x;
  }
  return x;
}
__device__ float row_sum(float x) {
  for (int offset = 8; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Writes acc as rows `first`.. of a head's D columns.
template <int R, int C, class View>
__device__ void store_tile(const View& view, int64_t first, int64_t row, int64_t column, int64_t T, int64_t D,
                           const float (&acc)[R][C]) {
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int64_t t = first + R * ty + i, d = tx + kSide * c;
      if (t < T && d < D) view.store(t * row + column + d, {}, acc[i][c]);
    }
}

// One block 16 R queries of a head. Reads q once, k and v once a tile of queries that sees them.
template <int R, int C, class In, class Out>
__global__ void __launch_bounds__(kThreads) attention_forward_kernel(In qkv, Out out, float* lse, AttentionSizes s) {
  extern __shared__ float shared[];
  constexpr int kRows = R * kSide;
  const int D = static_cast<int>(s.D), tile = kRows * (D + 1);
  float *q = shared, *k = q + tile, *v = k + tile, *p = v + tile;
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
  const Place place(s.T, s.H, kRows);
  const int64_t b = place.b, h = place.head, j = h / s.group, first = place.first, last = min(s.T, first + kRows) - 1;
  const int64_t base = b * s.T * s.row;
  load_tile<R>(qkv, first, s.row, base + s.q(h), s.T, s.D, q);
  float top[R], total[R], acc[R][C];
  int32_t start[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    start[i] = s.start(b, first + R * ty + i);
    top[i] = -kInf;
    total[i] = 0.f;
#pragma unroll
    for (int c = 0; c < C; ++c) acc[i][c] = 0.f;
  }
  const int64_t end = s.causal ? last + 1 : s.to(last);
  for (int64_t key = s.from(b, first) / kRows * kRows; key < end && !s.past(b, last, key); key += kRows) {
    __syncthreads();
    load_tile<R>(qkv, key, s.row, base + s.k(j), s.T, s.D, k);
    load_tile<R>(qkv, key, s.row, base + s.v(j), s.T, s.D, v);
    __syncthreads();
    float score[R][R];
    int32_t key_start[R];
    dot_tiles<R>(q, k, D, score);
#pragma unroll
    for (int c = 0; c < R; ++c) key_start[c] = s.start(b, key + tx + kSide * c);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int64_t query = first + R * ty + i;
      float most = top[i];
#pragma unroll
      for (int c = 0; c < R; ++c) {
        const bool seen = s.sees(query, start[i], key + tx + kSide * c, key_start[c]);
        score[i][c] = seen ? score[i][c] * s.scale : -kInf;
        most = score[i][c] > most || score[i][c] != score[i][c] ? score[i][c] : most;
      }
      most = row_max(most);
      const float level = most == -kInf ? 0.f : most, keep = exp_(top[i] - level);
      float sum = 0.f;
#pragma unroll
      for (int c = 0; c < R; ++c) {
        const float e = exp_(score[i][c] - level);
        p[(R * ty + i) * (kRows + 1) + tx + kSide * c] = e;
        sum += e;
      }
      total[i] = fmaf(total[i], keep, row_sum(sum));
      top[i] = most;
#pragma unroll
      for (int c = 0; c < C; ++c) acc[i][c] *= keep;
    }
    __syncthreads();
    accumulate_tile<R, C>(p, v, D, acc);
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int64_t t = first + R * ty + i;
#pragma unroll
    for (int c = 0; c < C; ++c) acc[i][c] = acc[i][c] / total[i];
    if (tx == 0 && t < s.T) lse[(b * s.T + t) * s.H + h] = top[i] + kLn2 * log2_(total[i]);
  }
  store_tile<R, C>(out, first, s.H * s.D, b * s.T * s.H * s.D + h * s.D, s.T, s.D, acc);
}

// One warp a (row, head): delta = sum of dout * out over D.
template <class DOut, class Out>
__global__ void attention_backward_kernel_delta(DOut dout, Out out, float* delta, int64_t heads, int64_t D) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (i >= heads) return;
  float sum = 0.f;
  for (int64_t d = threadIdx.x % 32; d < D; d += 32)
    sum = fmaf(dout.load(i * D + d, dout.open(0)), out.load(i * D + d, out.open(0)), sum);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) delta[i] = sum;
}

// One block 16 R queries of a head: dq = scale * sum over keys of ds k, ds = p (dout v - delta).
template <int R, int C, class DOut, class In, class DX>
__global__ void __launch_bounds__(kThreads)
    attention_backward_kernel_q(DOut dout, In qkv, const float* lse, const float* delta, DX dqkv, AttentionSizes s) {
  extern __shared__ float shared[];
  constexpr int kRows = R * kSide;
  const int D = static_cast<int>(s.D), tile = kRows * (D + 1);
  float *q = shared, *g = q + tile, *k = g + tile, *v = k + tile, *ds = v + tile;
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
  const Place place(s.T, s.H, kRows);
  const int64_t b = place.b, h = place.head, j = h / s.group, first = place.first, last = min(s.T, first + kRows) - 1;
  const int64_t base = b * s.T * s.row, outs = b * s.T * s.H * s.D + h * s.D;
  load_tile<R>(qkv, first, s.row, base + s.q(h), s.T, s.D, q);
  load_tile<R>(dout, first, s.H * s.D, outs, s.T, s.D, g);
  float acc[R][C] = {};
  const int64_t end = s.causal ? last + 1 : s.to(last);
  for (int64_t key = s.from(b, first) / kRows * kRows; key < end && !s.past(b, last, key); key += kRows) {
    __syncthreads();
    load_tile<R>(qkv, key, s.row, base + s.k(j), s.T, s.D, k);
    load_tile<R>(qkv, key, s.row, base + s.v(j), s.T, s.D, v);
    __syncthreads();
    float score[R][R], dp[R][R];
    dot_tiles<R>(q, k, D, score);
    dot_tiles<R>(g, v, D, dp);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int64_t query = first + R * ty + i;
      const int64_t at_row = (b * s.T + query) * s.H + h;
      const float level = query < s.T ? lse[at_row] : 0.f, mean = query < s.T ? delta[at_row] : 0.f;
      const int32_t start = s.start(b, query);
#pragma unroll
      for (int c = 0; c < R; ++c) {
        const int64_t at = key + tx + kSide * c;
        const bool seen = s.sees(query, start, at, s.start(b, at));
        ds[(R * ty + i) * (kRows + 1) + tx + kSide * c] =
            seen ? exp_(score[i][c] * s.scale - level) * (dp[i][c] - mean) * s.scale : 0.f;
      }
    }
    __syncthreads();
    accumulate_tile<R, C>(ds, k, D, acc);
  }
  store_tile<R, C>(dqkv, first, s.row, base + s.q(h), s.T, s.D, acc);
}

// One block 16 R keys of a key/value head: dv = sum over heads and queries of p dout, dk of ds q, heads in order.
template <int R, int C, class DOut, class In, class DX>
__global__ void __launch_bounds__(kThreads)
    attention_backward_kernel_kv(DOut dout, In qkv, const float* lse, const float* delta, DX dqkv, AttentionSizes s) {
  extern __shared__ float shared[];
  constexpr int kRows = R * kSide;
  const int D = static_cast<int>(s.D), tile = kRows * (D + 1);
  float *k = shared, *v = k + tile, *q = v + tile, *g = q + tile, *p = g + tile;
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
  const Place place(s.T, s.J, kRows);
  const int64_t b = place.b, j = place.head, first = place.first, last = min(s.T, first + kRows) - 1;
  const int64_t base = b * s.T * s.row;
  load_tile<R>(qkv, first, s.row, base + s.k(j), s.T, s.D, k);
  load_tile<R>(qkv, first, s.row, base + s.v(j), s.T, s.D, v);
  float dk[R][C] = {}, dv[R][C] = {};
  for (int64_t h = j * s.group; h < (j + 1) * s.group; ++h) {
    const int64_t begin = s.causal ? first : s.from(b, first) / kRows * kRows;
    for (int64_t query = begin; query < s.to(last) && !s.past(b, last, query); query += kRows) {
      __syncthreads();
      load_tile<R>(qkv, query, s.row, base + s.q(h), s.T, s.D, q);
      load_tile<R>(dout, query, s.H * s.D, b * s.T * s.H * s.D + h * s.D, s.T, s.D, g);
      __syncthreads();
      float score[R][R], dp[R][R];
      dot_tiles<R>(k, q, D, score);
      dot_tiles<R>(v, g, D, dp);
#pragma unroll
      for (int c = 0; c < R; ++c) {
        const int64_t at = query + tx + kSide * c, at_row = (b * s.T + at) * s.H + h;
        const float level = at < s.T ? lse[at_row] : 0.f, mean = at < s.T ? delta[at_row] : 0.f;
        const int32_t start = s.start(b, at);
#pragma unroll
        for (int i = 0; i < R; ++i) {
          const int64_t key = first + R * ty + i;
          const bool seen = s.sees(at, start, key, s.start(b, key));
          const float e = seen ? exp_(score[i][c] * s.scale - level) : 0.f;
          p[(R * ty + i) * (kRows + 1) + tx + kSide * c] = e;
          score[i][c] = seen ? e * (dp[i][c] - mean) * s.scale : 0.f;
        }
      }
      __syncthreads();
      accumulate_tile<R, C>(p, g, D, dv);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < R; ++i)
#pragma unroll
        for (int c = 0; c < R; ++c) p[(R * ty + i) * (kRows + 1) + tx + kSide * c] = score[i][c];
      __syncthreads();
      accumulate_tile<R, C>(p, q, D, dk);
    }
  }
  store_tile<R, C>(dqkv, first, s.row, base + s.k(j), s.T, s.D, dk);
  store_tile<R, C>(dqkv, first, s.row, base + s.v(j), s.T, s.D, dv);
}

// f(R, C) with the rows a thread has in a tile and the columns it has in a head: tiles of D > 128 are half as high.
template <class F>
void with_tiles(int64_t D, F&& f) {
  if (D <= 64)
    f(std::integral_constant<int, 4>{}, std::integral_constant<int, 4>{});
  else if (D <= 128)
    f(std::integral_constant<int, 4>{}, std::integral_constant<int, 8>{});
  else
    f(std::integral_constant<int, 2>{}, std::integral_constant<int, 16>{});
}

size_t shared_bytes(int rows, int64_t tiles, int64_t D) {
  return static_cast<size_t>(tiles * rows * (D + 1) + rows * (rows + 1)) * sizeof(float);
}

}  // namespace

void attention_forward_generic(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse) {
  with("qkv", qkv, Views<F32, BF16>{}, [&](const auto in) {
    with("out", out, Views<F32, BF16>{}, [&](const auto result) {
      with_tiles(s.D, [&](auto R, auto C) {
        constexpr int rows = R * kSide;
        using In = std::remove_const_t<decltype(in)>;
        launch("attention_forward", attention_forward_kernel<R, C, In, std::remove_const_t<decltype(result)>>,
               grid_of(s, s.H, rows), kThreads, shared_bytes(rows, 3, s.D), in, result, lse, s);
      });
    });
  });
}

void attention_backward_generic(const AttentionSizes& s, const Tensor& dout, const Tensor& qkv, const Tensor& out,
                                const float* lse, const Tensor& dqkv) {
  const char* op = "attention_backward";
  const int64_t heads = s.B * s.T * s.H;
  const Scratch delta(heads * int64_t{sizeof(float)});
  const float* mean = delta.as<float>();
  with("dout", dout, Views<F32, BF16>{}, [&](const auto g) {
    using G = std::remove_const_t<decltype(g)>;
    with("out", out, Views<F32, BF16>{}, [&](const auto y) {
      launch(op, attention_backward_kernel_delta<G, std::remove_const_t<decltype(y)>>,
             static_cast<unsigned>((heads + 7) / 8), kThreads, 0, g, y, delta.as<float>(), heads, s.D);
    });
    with("qkv", qkv, Views<F32, BF16>{}, [&](const auto x) {
      with("dqkv", dqkv, Views<F32, BF16>{}, [&](const auto dx) {
        using X = std::remove_const_t<decltype(x)>;
        using DX = std::remove_const_t<decltype(dx)>;
        with_tiles(s.D, [&](auto R, auto C) {
          constexpr int rows = R * kSide;
          const size_t shared = shared_bytes(rows, 4, s.D);
          launch(op, attention_backward_kernel_q<R, C, G, X, DX>, grid_of(s, s.H, rows), kThreads, shared, g, x, lse,
                 mean, dx, s);
          launch(op, attention_backward_kernel_kv<R, C, G, X, DX>, grid_of(s, s.J, rows), kThreads, shared, g, x, lse,
                 mean, dx, s);
        });
      });
    });
  });
}

}  // namespace coat::cuda
