// attention: softmax(q k^T) v by blocks of keys, and its gradient. Queries are the lanes: scores lie as [key][query],
// so softmax needs no horizontal sums and its result is at once a factor of the next product.
#include "../contract.h"
#include "../formula.h"
#include "../ops.h"
#include "gemm.h"
#include "parallel.h"

namespace coat::cpu {
namespace {

constexpr int64_t kKeys = 192;           // keys of a block in forward
constexpr int64_t kKeysBackward = 96;    // and in backward
constexpr int64_t kQueries = 64;         // queries of a block in backward
constexpr int64_t kQueriesOfTask = 512;  // rows of q, over the heads of a group, that a task of forward makes
constexpr float kMinExponent = -126.f;   // below it 2^x counts as 0: subnormals are slow

struct Sizes {
  int64_t B, T, H, J, D, group, width;  // group: query heads a key/value head; width: columns of qkv
  bool causal;
  float scale;
  int64_t q(int64_t b, int64_t t, int64_t h) const { return (b * T + t) * width + h * D; }
  int64_t k(int64_t b, int64_t t, int64_t j) const { return q(b, t, H + j); }
  int64_t v(int64_t b, int64_t t, int64_t j) const { return q(b, t, H + J + j); }
  int64_t out(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * H + h) * D; }
  int64_t lse(int64_t b, int64_t t, int64_t h) const { return (b * T + t) * H + h; }
};

template <class Args>
Sizes sizes_of(const Args& args) {
  const int64_t rows = args.qkv.shape.dims[0];
  check_heads(rows, args.T, args.H, args.J);
  return {rows / args.T,    args.T,    args.H, args.J, args.D, args.H / args.J, (args.H + 2 * args.J) * args.D,
          args.causal != 0, args.scale};
}

// 2^x with the bits of exp2_, but 0 where that is subnormal. The same polynomial once more, because what GCC makes
// of exp2_ in a loop takes twice as long.
inline __m256 exp2_of(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(kMinExponent), round = _mm256_set1_ps(12582912.f);
  const __m256 keep = _mm256_cmp_ps(x, lowest, _CMP_NLT_UQ);
  const __m256 c = _mm256_min_ps(_mm256_set1_ps(128.f), _mm256_max_ps(lowest, x));  // in this order NaN stays
  const __m256 n = _mm256_sub_ps(_mm256_add_ps(c, round), round), f = _mm256_sub_ps(c, n);
  __m256 p = _mm256_set1_ps(1.52527338e-5f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.54035304e-4f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.33335581e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.61812911e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.55041087e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.40226507e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.93147181e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(keep, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

inline const float* lane_numbers() {
  alignas(64) static const float lanes[kTileCols] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lanes;
}

// All ones in the lanes of 8 whose query is not before the key; `distance` = key - query of the first lane.
inline __m256 visible(int64_t distance, int half) {
  return _mm256_cmp_ps(_mm256_load_ps(lane_numbers() + 8 * half), _mm256_set1_ps(static_cast<float>(distance)),
                       _CMP_GE_OQ);
}

// ---- forward ----

// Cuts one allocation into arrays on 64-byte boundaries; without a base it measures.
struct Carver {
  int64_t used = 0;
  float* base = nullptr;
  float* take(int64_t floats) {
    float* p = base ? base + used : nullptr;
    used += round_up(floats, 16);
    return p;
  }
};

// Arrays of a task: panels of k, v and q, scores [key][query], sums [D][query].
struct Forward {
  float *k, *v, *q, *scores, *sums, *transposed;
  int64_t k_panel, v_panel;
  Forward(Carver& carver, int64_t keys, int64_t D) {
    const int64_t deep = round_up(D, 24);
    k_panel = panel_floats<kTileRows>(D);
    v_panel = panel_floats<kTileRows>(keys);
    k = carver.take(k_panel * round_up(keys, kTileRows) / kTileRows);
    v = carver.take(v_panel * (deep / kTileRows));
    q = carver.take(kTileCols * D);
    scores = carver.take(kTileCols * kKeys);
    sums = carver.take(kTileCols * deep);
    transposed = carver.take(kTileCols * deep);
  }
};

// 16 queries of one head from `first` on; the keys come in blocks, with a running maximum and sum.
void attend(const Sizes& s, const Forward& f, const attention_forward_args& args, int64_t b, int64_t h, int64_t first) {
  const int64_t queries = std::min<int64_t>(kTileCols, s.T - first), D = s.D;
  const int64_t keys = s.causal ? first + queries : s.T;
  pack<kTileCols>({args.qkv, false, s.q(b, first, h), s.width}, 0, queries, 0, D, f.q);
  const float scale = s.scale * kLog2E;  // scores are exponents of 2
  for (int64_t i = 0; i < D * kTileCols; ++i) f.q[i] *= scale;

  const __m256 lowest = _mm256_set1_ps(-kInf);
  __m256 top[2] = {lowest, lowest}, total[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  std::fill(f.sums, f.sums + round_up(D, kTileRows) * kTileCols, 0.f);
  for (int64_t key = 0; key < keys; key += kKeys) {
    const int64_t block = std::min(keys - key, kKeys);
    for (int64_t i = 0; i < block; i += kTileRows)
      put(product<1, kTileRows>(D, f.k + (key + i) / kTileRows * f.k_panel, f.q, kTileCols), f.scores + i * kTileCols,
          kTileCols);
    __m256 shrink[2];
    for (int half = 0; half < 2; ++half) {
      float* scores = f.scores + 8 * half;
      if (s.causal)
        for (int64_t i = std::max<int64_t>(0, first + 1 - key); i < block; ++i)
          _mm256_storeu_ps(scores + i * kTileCols, _mm256_blendv_ps(lowest, _mm256_loadu_ps(scores + i * kTileCols),
                                                                    visible(key + i - first, half)));
      __m256 most = top[half];
      for (int64_t i = 0; i < block; ++i) most = _mm256_max_ps(_mm256_loadu_ps(scores + i * kTileCols), most);
      shrink[half] = exp2_of(_mm256_sub_ps(top[half], most));
      __m256 sum = _mm256_setzero_ps();
      for (int64_t i = 0; i < block; ++i) {
        const __m256 p = exp2_of(_mm256_sub_ps(_mm256_loadu_ps(scores + i * kTileCols), most));
        _mm256_storeu_ps(scores + i * kTileCols, p);
        sum = _mm256_add_ps(sum, p);
      }
      top[half] = most;
      total[half] = _mm256_fmadd_ps(total[half], shrink[half], sum);
    }
    for (int64_t d = 0; d < D; d += kTileRows) {
      const Tile t =
          product<1, kTileRows>(block, f.v + d / kTileRows * f.v_panel + key * kTileRows, f.scores, kTileCols);
      float* sums = f.sums + d * kTileCols;
      for (int r = 0; r < kTileRows; ++r, sums += kTileCols) {
        _mm256_storeu_ps(sums, _mm256_fmadd_ps(_mm256_loadu_ps(sums), shrink[0], t.row[r].low));
        _mm256_storeu_ps(sums + 8, _mm256_fmadd_ps(_mm256_loadu_ps(sums + 8), shrink[1], t.row[r].high));
      }
    }
  }

  for (int64_t d = 0; d < D; ++d)
    for (int half = 0; half < 2; ++half) {
      float* sums = f.sums + d * kTileCols + 8 * half;
      _mm256_storeu_ps(sums, _mm256_div_ps(_mm256_loadu_ps(sums), total[half]));
    }
  const int64_t deep = round_up(D, 8);
  transpose(f.sums, kTileCols, D, kTileCols, f.transposed, deep);
  alignas(32) float tops[kTileCols], totals[kTileCols];
  for (int half = 0; half < 2; ++half) {
    _mm256_store_ps(tops + 8 * half, top[half]);
    _mm256_store_ps(totals + 8 * half, total[half]);
  }
  for (int64_t i = 0; i < queries; ++i) {
    encode(args.out, s.out(b, first + i, h), D, f.transposed + i * deep);
    args.lse.as<float>()[s.lse(b, first + i, h)] = (tops[i] + log2_(totals[i])) * kLn2;
  }
}

// ---- backward ----

// Arrays of a task: panels of k and v; dk, dv [key][row]; rows of a block of queries, their transposes [D][query]; p
// and ds [key][query].
struct Backward {
  int64_t row, k_panel, across_panel;
  float *k, *v, *k_across, *dk, *dv, *q, *dout, *q_t, *dout_t, *p, *ds, *dq_t, *dq, *out, *lse, *delta;
  Backward(Carver& carver, int64_t T, int64_t D) {
    const int64_t keys = round_up(T, kTileRows), deep = round_up(D, 24);
    row = round_up(D, kTileCols);
    k_panel = panel_floats<kTileRows>(D);
    across_panel = panel_floats<kTileRows>(T);
    k = carver.take(k_panel * keys / kTileRows);
    v = carver.take(k_panel * keys / kTileRows);
    k_across = carver.take(across_panel * (deep / kTileRows));
    dk = carver.take(keys * row);
    dv = carver.take(keys * row);
    for (float** rows : {&q, &dout, &dq}) *rows = carver.take(kQueries * row);
    for (float** rows : {&q_t, &dout_t, &dq_t}) *rows = carver.take(deep * kQueries);
    for (float** scores : {&p, &ds}) *scores = carver.take(kKeysBackward * kQueries);
    out = carver.take(row);
    lse = carver.take(kQueries);
    delta = carver.take(kQueries);
  }
};

// q, dout, their transposes, lse in powers of 2 and delta = dout . out of `queries` rows; rows that do not exist are
// zero and have an infinite lse, which makes their p zero.
void read_queries(const Sizes& s, const Backward& f, const attention_backward_args& args, int64_t b, int64_t h,
                  int64_t first, int64_t queries) {
  for (int64_t i = 0; i < kQueries; ++i) {
    float *q = f.q + i * f.row, *dout = f.dout + i * f.row;
    const int64_t n = i < queries ? s.D : 0;
    std::fill(q + n, q + f.row, 0.f);
    std::fill(dout + n, dout + f.row, 0.f);
    f.lse[i] = kInf;
    f.delta[i] = 0.f;
    if (i >= queries) continue;
    decode(args.qkv, s.q(b, first + i, h), n, q);
    decode(args.dout, s.out(b, first + i, h), n, dout);
    std::fill(f.out + n, f.out + f.row, 0.f);
    decode(args.out, s.out(b, first + i, h), n, f.out);
    __m256 sum = _mm256_setzero_ps();
    for (int64_t d = 0; d < f.row; d += 8)
      sum = _mm256_fmadd_ps(_mm256_loadu_ps(dout + d), _mm256_loadu_ps(f.out + d), sum);
    alignas(32) float part[8];
    _mm256_store_ps(part, sum);
    f.delta[i] = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    f.lse[i] = args.lse.as<float>()[s.lse(b, first + i, h)] * kLog2E;
  }
  transpose(f.q, f.row, kQueries, s.D, f.q_t, kQueries);
  transpose(f.dout, f.row, kQueries, s.D, f.dout_t, kQueries);
}

// p = 2^(score - lse) and ds = p (dp - delta) of 6 keys and 16 queries; `distance` = first key - first query.
void score(const Sizes& s, const Backward& f, int64_t key, int64_t at, int64_t query, int64_t distance) {
  float *p = f.p + at * kQueries + query, *ds = f.ds + at * kQueries + query;
  const int64_t panel = key / kTileRows * f.k_panel;
  put(product<1, kTileRows>(s.D, f.k + panel, f.q_t + query, kQueries), p, kQueries);
  put(product<1, kTileRows>(s.D, f.v + panel, f.dout_t + query, kQueries), ds, kQueries);
  const __m256 scale = _mm256_set1_ps(s.scale * kLog2E);
  const bool masked = s.causal && distance + kTileRows > 1;
  for (int half = 0; half < 2; ++half) {
    const __m256 lse = _mm256_loadu_ps(f.lse + query + 8 * half), delta = _mm256_loadu_ps(f.delta + query + 8 * half);
    for (int r = 0; r < kTileRows; ++r) {
      float *pr = p + r * kQueries + 8 * half, *dr = ds + r * kQueries + 8 * half;
      __m256 x = exp2_of(_mm256_fmsub_ps(_mm256_loadu_ps(pr), scale, lse));
      __m256 dx = _mm256_mul_ps(x, _mm256_sub_ps(_mm256_loadu_ps(dr), delta));
      if (masked) {
        const __m256 seen = visible(distance + r, half);
        x = _mm256_and_ps(x, seen);
        dx = _mm256_and_ps(dx, seen);
      }
      _mm256_storeu_ps(pr, x);
      _mm256_storeu_ps(dr, dx);
    }
  }
}

// One block of queries of one head: adds to dk and dv of all keys it sees, and writes its dq.
void differentiate(const Sizes& s, const Backward& f, const attention_backward_args& args, int64_t b, int64_t h,
                   int64_t first) {
  const int64_t queries = std::min(kQueries, s.T - first), D = s.D, keys = s.causal ? first + queries : s.T;
  read_queries(s, f, args, b, h, first, queries);
  std::fill(f.dq_t, f.dq_t + round_up(D, 24) * kQueries, 0.f);
  for (int64_t key = 0; key < keys; key += kKeysBackward) {
    const int64_t block = std::min(keys - key, kKeysBackward);
    for (int64_t i = 0; i < block; i += kTileRows)
      for (int64_t q = 0; q < queries; q += kTileCols)
        if (!s.causal || key + i < first + q + kTileCols) score(s, f, key + i, i, q, key + i - first - q);
    for (int64_t i = 0; i < block; i += kTileRows) {
      // queries before the first key do not see it
      const int64_t q = s.causal ? std::max<int64_t>(0, key + i - first) : 0;
      if (q >= queries) continue;
      for (int64_t d = 0; d < f.row; d += kTileCols) {
        const int64_t to = (key + i) * f.row + d, from = q * f.row + d;
        add(product<kQueries, 1>(queries - q, f.p + i * kQueries + q, f.dout + from, f.row), f.dv + to, f.row);
        add(product<kQueries, 1>(queries - q, f.ds + i * kQueries + q, f.q + from, f.row), f.dk + to, f.row);
      }
    }
    for (int64_t q = 0; q < queries; q += kTileCols) {
      const int64_t seen = s.causal ? std::min(block, first + std::min(q + kTileCols, queries) - key) : block;
      if (seen <= 0) continue;
      for (int64_t d = 0; d < D; d += kTileRows)
        add(product<1, kTileRows>(seen, f.k_across + d / kTileRows * f.across_panel + key * kTileRows, f.ds + q,
                                  kQueries),
            f.dq_t + d * kQueries + q, kQueries);
    }
  }
  for (int64_t i = 0; i < D * kQueries; ++i) f.dq_t[i] *= s.scale;
  transpose(f.dq_t, kQueries, D, kQueries, f.dq, f.row);
  for (int64_t i = 0; i < queries; ++i) encode(args.dqkv, s.q(b, first + i, h), D, f.dq + i * f.row);
}

}  // namespace

// A task: the query heads of one key/value head of one sequence, in chunks of rows.
void attention_forward(const attention_forward_args& args) {
  const Sizes s = sizes_of(args);
  if (s.B == 0 || s.H == 0) return;
  const int64_t rows = round_up(std::max<int64_t>(kQueriesOfTask / s.group, kTileCols), kTileCols);
  const int64_t chunks = (s.T + rows - 1) / rows;
  parallel(s.B * s.J * chunks, 1, [&](int64_t task, int64_t) {
    const int64_t b = task / chunks / s.J, j = task / chunks % s.J, begin = task % chunks * rows;
    const int64_t end = std::min(s.T, begin + rows), keys = s.causal ? end : s.T;
    Carver carver;
    Forward f(carver, keys, s.D);
    carver = {0, scratch<Forward>(carver.used)};
    f = Forward(carver, keys, s.D);
    pack<kTileRows>({args.qkv, false, s.k(b, 0, j), s.width}, 0, keys, 0, s.D, f.k);
    pack<kTileRows>({args.qkv, true, s.v(b, 0, j), s.width}, 0, s.D, 0, keys, f.v);
    for (int64_t h = j * s.group; h < (j + 1) * s.group; ++h)
      for (int64_t first = begin; first < end; first += kTileCols) attend(s, f, args, b, h, first);
  });
}

// A task: one key/value head of one sequence with all its query heads, so that dk and dv have one writer.
void attention_backward(const attention_backward_args& args) {
  const Sizes s = sizes_of(args);
  parallel(s.B * s.J, 1, [&](int64_t task, int64_t) {
    const int64_t b = task / s.J, j = task % s.J;
    Carver carver;
    Backward f(carver, s.T, s.D);
    carver = {0, scratch<Backward>(carver.used)};
    f = Backward(carver, s.T, s.D);
    pack<kTileRows>({args.qkv, false, s.k(b, 0, j), s.width}, 0, s.T, 0, s.D, f.k);
    pack<kTileRows>({args.qkv, false, s.v(b, 0, j), s.width}, 0, s.T, 0, s.D, f.v);
    pack<kTileRows>({args.qkv, true, s.k(b, 0, j), s.width}, 0, s.D, 0, s.T, f.k_across);
    const int64_t floats = round_up(s.T, kTileRows) * f.row;
    std::fill(f.dk, f.dk + floats, 0.f);
    std::fill(f.dv, f.dv + floats, 0.f);
    for (int64_t h = j * s.group; h < (j + 1) * s.group; ++h)
      for (int64_t first = 0; first < s.T; first += kQueries) differentiate(s, f, args, b, h, first);
    for (int64_t i = 0; i < floats; ++i) f.dk[i] *= s.scale;
    for (int64_t t = 0; t < s.T; ++t) {
      encode(args.dqkv, s.k(b, t, j), s.D, f.dk + t * f.row);
      encode(args.dqkv, s.v(b, t, j), s.D, f.dv + t * f.row);
    }
  });
}

}  // namespace coat::cpu
