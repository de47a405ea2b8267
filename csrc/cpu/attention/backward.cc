// attention backward: the gradients of q, k and v by blocks of queries and keys.
#include <list>

#include "attention.h"

namespace coat::cpu {
namespace {

constexpr int64_t kKeys = 96;     // keys of a block
constexpr int64_t kQueries = 64;  // queries of a block

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
    for (float** scores : {&p, &ds}) *scores = carver.take(kKeys * kQueries);
    out = carver.take(row);
    lse = carver.take(kQueries);
    delta = carver.take(kQueries);
  }
};

// q, dout, their transposes, lse in powers of 2 and delta = dout . out of `queries` rows; rows that do not exist are
// zero and have an infinite lse, which makes their p zero.
void read_queries(const AttentionSizes& s, const Backward& f, const attention_backward_args& args, const float* lse,
                  int64_t b, int64_t h, int64_t first, int64_t queries) {
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
    f.lse[i] = lse[s.lse(b, first + i, h)] * kLog2E;
  }
  transpose(f.q, f.row, kQueries, s.D, f.q_t, kQueries);
  transpose(f.dout, f.row, kQueries, s.D, f.dout_t, kQueries);
}

// p = 2^(score - lse) and ds = p (dp - delta) of 6 keys, rows `at`.. of the block, and 16 queries.
void score(const AttentionSizes& s, const Backward& f, const Keys& keys, const Mask& mask, int64_t key, int64_t at,
           int64_t query) {
  float *p = f.p + at * kQueries + query, *ds = f.ds + at * kQueries + query;
  const int64_t panel = key / kTileRows * f.k_panel;
  put(product<1, kTileRows>(s.D, f.k + panel, f.q_t + query, kQueries), p, kQueries);
  put(product<1, kTileRows>(s.D, f.v + panel, f.dout_t + query, kQueries), ds, kQueries);
  const __m256 scale = _mm256_set1_ps(s.scale * kLog2E);
  const bool masked = key < keys.sure || key + kTileRows > keys.sure_end;
  for (int half = 0; half < 2; ++half) {
    const __m256 lse = _mm256_loadu_ps(f.lse + query + 8 * half), delta = _mm256_loadu_ps(f.delta + query + 8 * half);
    for (int r = 0; r < kTileRows; ++r) {
      float *pr = p + r * kQueries + 8 * half, *dr = ds + r * kQueries + 8 * half;
      __m256 x = exp2_of(_mm256_fmsub_ps(_mm256_loadu_ps(pr), scale, lse));
      __m256 dx = _mm256_mul_ps(x, _mm256_sub_ps(_mm256_loadu_ps(dr), delta));
      if (masked) {
        const __m256 seen = mask.seen(key + r, half);
        x = _mm256_and_ps(x, seen);
        dx = _mm256_and_ps(dx, seen);
      }
      _mm256_storeu_ps(pr, x);
      _mm256_storeu_ps(dr, dx);
    }
  }
}

// One block of queries of one head: adds to dk and dv of all keys it sees, and writes its dq.
void differentiate(const AttentionSizes& s, const Backward& f, const attention_backward_args& args, const float* lse,
                   int64_t b, int64_t h, int64_t first) {
  constexpr int64_t kTiles = kQueries / kTileCols;
  const int64_t queries = std::min(kQueries, s.T - first), D = s.D, tiles = (queries + kTileCols - 1) / kTileCols;
  read_queries(s, f, args, lse, b, h, first, queries);
  std::fill(f.dq_t, f.dq_t + round_up(D, 24) * kQueries, 0.f);
  Keys keys[kTiles];
  Mask masks[kTiles];
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t q = t * kTileCols, count = std::min<int64_t>(kTileCols, queries - q);
    keys[t] = s.keys(b, first + q, count);
    masks[t] = Mask(s, b, first + q, count);
  }
  const auto meet = [&](int64_t t, int64_t key) { return key < keys[t].end && key + kTileRows > keys[t].first; };
  const int64_t end = keys[tiles - 1].end;
  for (int64_t key = panel(keys[0].first); key < end; key += kKeys) {
    const int64_t block = std::min(end - key, kKeys);
    for (int64_t i = 0; i < block; i += kTileRows)
      for (int64_t t = 0; t < tiles; ++t)
        if (meet(t, key + i)) score(s, f, keys[t], masks[t], key + i, i, t * kTileCols);
    for (int64_t i = 0; i < block; i += kTileRows) {
      int64_t from = 0, to = tiles;
      while (from < to && !meet(from, key + i)) ++from;
      while (from < to && !meet(to - 1, key + i)) --to;
      // queries before the first key do not see it
      const int64_t q = std::max(from * kTileCols, s.causal ? key + i - first : 0);
      const int64_t count = std::min(queries, to * kTileCols) - q;
      if (count <= 0) continue;
      for (int64_t d = 0; d < f.row; d += kTileCols) {
        const int64_t to = (key + i) * f.row + d, from = q * f.row + d;
        add(product<kQueries, 1>(count, f.p + i * kQueries + q, f.dout + from, f.row), f.dv + to, f.row);
        add(product<kQueries, 1>(count, f.ds + i * kQueries + q, f.q + from, f.row), f.dk + to, f.row);
      }
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t from = std::max<int64_t>(0, panel(keys[t].first) - key), q = t * kTileCols;
      const int64_t count = std::min(block, keys[t].end - key) - from;
      if (count <= 0) continue;
      const float *k = f.k_across + (key + from) * kTileRows, *ds = f.ds + from * kQueries + q;
      for (int64_t d = 0; d < D; d += kTileRows)
        add(product<1, kTileRows>(count, k + d / kTileRows * f.across_panel, ds, kQueries), f.dq_t + d * kQueries + q,
            kQueries);
    }
  }
  for (int64_t i = 0; i < D * kQueries; ++i) f.dq_t[i] *= s.scale;
  transpose(f.dq_t, kQueries, D, kQueries, f.dq, f.row);
  for (int64_t i = 0; i < queries; ++i) encode(args.dqkv, s.q(b, first + i, h), D, f.dq + i * f.row);
}

}  // namespace

// A task: one key/value head of one sequence with all its query heads, so that dk and dv have one writer.
void attention_backward(const attention_backward_args& given) {
  const AttentionSizes s = attention_sizes(given);
  if (given.table) check_rotation(given.D, -1);
  std::list<std::vector<uint8_t>> rooms;
  const attention_backward_args args = completed(
      given, [&](int64_t bytes) { return rooms.emplace_back(bytes).data(); },
      [](const Tensor& x, const Tensor& y) {
        convert({Device::cpu, x, {}, y});
      },
      [&](const attention_backward_args& made) { attend(s, made.qkv, made.out, made.lse.as<float>()); });
  const float* lse = args.lse.as<float>();
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
      for (int64_t first = 0; first < s.T; first += kQueries) differentiate(s, f, args, lse, b, h, first);
    for (int64_t i = 0; i < floats; ++i) f.dk[i] *= s.scale;
    for (int64_t t = 0; t < s.T; ++t) {
      encode(args.dqkv, s.k(b, t, j), s.D, f.dk + t * f.row);
      encode(args.dqkv, s.v(b, t, j), s.D, f.dv + t * f.row);
    }
  });
  if (args.table) rope(turn_of(args, args.dqkv, -1));
  if (args.amax) amax(amax_of(args.dqkv, args.amax));
}

}  // namespace coat::cpu
