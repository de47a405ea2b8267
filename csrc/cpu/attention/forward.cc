// attention forward: softmax(q k^T) v by blocks of keys.
#include "attention.h"

namespace coat::cpu {
namespace {

constexpr int64_t kKeys = 192;           // keys of a block
constexpr int64_t kQueriesOfTask = 512;  // rows of q, over the heads of a group, that a task makes

// Arrays of a task: panels of k, v and q, scores [key][query], sums [D][query]. Panels hold keys [origin, end).
struct Forward {
  int64_t origin = 0, end = 0;
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

// Makes the scores of keys [from, to) of a block that 8 queries do not see minus infinity. Not inlined: around it GCC
// keeps fewer constants of the exponent in registers.
[[gnu::noinline]] void hide(const Mask& mask, int64_t key, int64_t from, int64_t to, int half, float* scores) {
  const __m256 lowest = _mm256_set1_ps(-kInf);
  for (int64_t i = std::max<int64_t>(0, from); i < to; ++i)
    _mm256_storeu_ps(scores + i * kTileCols,
                     _mm256_blendv_ps(lowest, _mm256_loadu_ps(scores + i * kTileCols), mask.seen(key + i, half)));
}

// 16 queries of one head from `first` on; the keys come in blocks, with a running maximum and sum.
void attend_tile(const AttentionSizes& s, const Forward& f, const Tensor& qkv, const Tensor& out, float* lse, int64_t b,
                 int64_t h, int64_t first) {
  const int64_t queries = std::min<int64_t>(kTileCols, s.T - first), D = s.D;
  Keys keys = s.keys(b, first, queries);
  keys.first = std::max(keys.first, f.origin);  // already so, unless starts are wrong
  keys.end = std::min(keys.end, f.end);
  const Mask mask(s, b, first, queries);
  pack<kTileCols>({qkv, false, s.q(b, first, h), s.width}, 0, queries, 0, D, f.q);
  const float scale = s.scale * kLog2E;  // scores are exponents of 2
  for (int64_t i = 0; i < D * kTileCols; ++i) f.q[i] *= scale;

  const __m256 lowest = _mm256_set1_ps(-kInf), finite = _mm256_set1_ps(-kLargest);
  __m256 top[2] = {lowest, lowest}, total[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  std::fill(f.sums, f.sums + round_up(D, kTileRows) * kTileCols, 0.f);
  for (int64_t key = panel(keys.first); key < keys.end; key += kKeys) {
    const int64_t block = std::min(keys.end - key, kKeys);
    for (int64_t i = 0; i < block; i += kTileRows)
      put(product<1, kTileRows>(D, f.k + (key - f.origin + i) / kTileRows * f.k_panel, f.q, kTileCols),
          f.scores + i * kTileCols, kTileCols);
    __m256 shrink[2];
    for (int half = 0; half < 2; ++half) {
      float* scores = f.scores + 8 * half;
      hide(mask, key, 0, std::min(block, keys.sure - key), half, scores);
      hide(mask, key, keys.sure_end - key, block, half, scores);
      __m256 most = top[half];
      for (int64_t i = 0; i < block; ++i) most = _mm256_max_ps(_mm256_loadu_ps(scores + i * kTileCols), most);
      most = _mm256_max_ps(finite, most);  // some queries may see nothing in this block
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
      const float* v = f.v + d / kTileRows * f.v_panel + (key - f.origin) * kTileRows;
      const Tile t = product<1, kTileRows>(block, v, f.scores, kTileCols);
      float* sums = f.sums + d * kTileCols;
      for (int r = 0; r < kTileRows; ++r, sums += kTileCols) {
        _mm256_storeu_ps(sums, _mm256_fmadd_ps(_mm256_loadu_ps(sums), shrink[0], t.row[r].low));
        _mm256_storeu_ps(sums + 8, _mm256_fmadd_ps(_mm256_loadu_ps(sums + 8), shrink[1], t.row[r].high));
      }
    }
  }

  alignas(32) float tops[kTileCols], totals[kTileCols];
  for (int half = 0; half < 2; ++half) {
    _mm256_store_ps(tops + 8 * half, top[half]);
    _mm256_store_ps(totals + 8 * half, total[half]);
  }
  for (int64_t i = 0; i < queries; ++i) lse[s.lse(b, first + i, h)] = (tops[i] + log2_(totals[i])) * kLn2;
  for (int64_t d = 0; d < D; ++d)
    for (int half = 0; half < 2; ++half) {
      float* sums = f.sums + d * kTileCols + 8 * half;
      _mm256_storeu_ps(sums, _mm256_div_ps(_mm256_loadu_ps(sums), total[half]));
    }
  const int64_t deep = round_up(D, 8);
  transpose(f.sums, kTileCols, D, kTileCols, f.transposed, deep);
  for (int64_t i = 0; i < queries; ++i) encode(out, s.out(b, first + i, h), D, f.transposed + i * deep);
}

}  // namespace

// A task: the query heads of one key/value head of one sequence, in chunks of rows.
void attend(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse) {
  if (s.B == 0 || s.H == 0) return;
  const int64_t rows = round_up(std::max<int64_t>(kQueriesOfTask / s.group, kTileCols), kTileCols);
  const int64_t chunks = (s.T + rows - 1) / rows;
  parallel(s.B * s.J * chunks, 1, [&](int64_t task, int64_t) {
    const int64_t b = task / chunks / s.J, j = task / chunks % s.J, begin = task % chunks * rows;
    const int64_t end = std::min(s.T, begin + rows);
    const Keys range = s.keys(b, begin, end - begin);
    const int64_t origin = panel(range.first), keys = range.end - origin;
    Carver carver;
    Forward f(carver, keys, s.D);
    carver = {0, scratch<Forward>(carver.used)};
    f = Forward(carver, keys, s.D);
    f.origin = origin;
    f.end = range.end;
    pack<kTileRows>({qkv, false, s.k(b, 0, j), s.width}, origin, keys, 0, s.D, f.k);
    pack<kTileRows>({qkv, true, s.v(b, 0, j), s.width}, 0, s.D, origin, keys, f.v);
    for (int64_t h = j * s.group; h < (j + 1) * s.group; ++h)
      for (int64_t first = begin; first < end; first += kTileCols) attend_tile(s, f, qkv, out, lse, b, h, first);
  });
}

void attention_forward(const attention_forward_args& args) {
  attend(attention_sizes(args), args.qkv, args.out, args.lse.as<float>());
  if (args.amax) amax(amax_of(args.out, args.amax));
}

}  // namespace coat::cpu
