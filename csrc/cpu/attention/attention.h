// What forward and backward of attention share: which keys a query sees, exponents, memory of a task. Queries are the
// lanes: scores lie as [key][query], so softmax needs no horizontal sums and its result is at once a factor of the next
// product.
#pragma once
#include <vector>

#include "../../contract.h"
#include "../../formula.h"
#include "../../ops.h"
#include "../gemm.h"
#include "../parallel.h"

namespace coat::cpu {

constexpr float kMinExponent = -126.f;  // below it 2^x counts as 0: subnormals are slow

// The first key of the panel that holds `key`.
constexpr int64_t panel(int64_t key) { return key / kTileRows * kTileRows; }

// Keys [first, end) hold all that some queries see; each of them sees all of [sure, sure_end). With wrong starts too
// these are rows of the sequence, the queries' own among them.
struct Keys {
  int64_t first, end, sure, sure_end;
};

struct AttentionSizes {
  int64_t B, T, H, J, D, group, width;  // group: query heads a key/value head; width: columns of qkv
  bool causal;
  int64_t window;  // T where there is none
  float scale;
  const int32_t* starts;  // null where a sequence is one document
  int64_t q(int64_t b, int64_t t, int64_t h) const { return (b * T + t) * width + h * D; }
  int64_t k(int64_t b, int64_t t, int64_t j) const { return q(b, t, H + j); }
  int64_t v(int64_t b, int64_t t, int64_t j) const { return q(b, t, H + J + j); }
  int64_t out(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * H + h) * D; }
  int64_t lse(int64_t b, int64_t t, int64_t h) const { return (b * T + t) * H + h; }
  int32_t start(int64_t b, int64_t t) const { return starts ? starts[b * T + t] : 0; }
  Keys keys(int64_t b, int64_t first, int64_t queries) const {
    const int64_t last = first + queries - 1;
    Keys k{std::max<int64_t>(0, first - window + 1), causal ? last + 1 : std::min(T, last + window),
           std::max<int64_t>(0, last - window + 1), causal ? first + 1 : std::min(T, first + window)};
    if (!starts) return k;
    const int32_t *all = starts + b * T, one = all[first];
    const int32_t* next = std::upper_bound(all + first, all + T, all[last]);
    k.first = std::max(k.first, std::clamp<int64_t>(one, 0, first));
    k.end = std::min(k.end, std::max<int64_t>(next - all, last + 1));
    k.sure = std::max(k.sure, k.first);
    k.sure_end = one == all[last] ? std::min(k.sure_end, k.end) : k.sure;
    return k;
  }
};

template <class Args>
AttentionSizes attention_sizes(const Args& args) {
  const int64_t rows = args.qkv.shape.dims[0];
  check_heads(rows, args.T, args.H, args.J, args.window);
  return {rows / args.T,
          args.T,
          args.H,
          args.J,
          args.D,
          args.H / args.J,
          (args.H + 2 * args.J) * args.D,
          args.causal != 0,
          args.window > 0 ? std::min(args.window, args.T) : args.T,
          args.scale,
          args.starts.template as<int32_t>()};
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

// Which of 16 queries from `first` on see a key: all ones in their lanes.
class Mask {
 public:
  Mask() = default;
  Mask(const AttentionSizes& s, int64_t b, int64_t first, int64_t queries) : s_(&s), b_(b), first_(first) {
    if (!s.starts) return;
    for (int64_t i = 0; i < kTileCols; ++i) starts_[i] = s.start(b, first + std::min(i, queries - 1));
  }
  __m256 seen(int64_t key, int half) const {
    alignas(32) static const float lanes[kTileCols] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m256 lane = _mm256_load_ps(lanes + 8 * half);  // lane - distance = query - key
    const int64_t distance = key - first_;
    __m256 seen = _mm256_cmp_ps(lane, number(s_->causal ? distance : distance - s_->window + 1), _CMP_GE_OQ);
    if (s_->window < s_->T) seen = _mm256_and_ps(seen, _mm256_cmp_ps(lane, number(distance + s_->window), _CMP_LT_OQ));
    if (!s_->starts) return seen;
    const __m256i start = _mm256_load_si256(reinterpret_cast<const __m256i*>(starts_ + 8 * half));
    const int32_t key_start = s_->start(b_, std::min(key, s_->T - 1));  // panels go on behind the last key
    return _mm256_and_ps(seen, _mm256_castsi256_ps(_mm256_cmpeq_epi32(start, _mm256_set1_epi32(key_start))));
  }

 private:
  static __m256 number(int64_t x) { return _mm256_set1_ps(static_cast<float>(x)); }
  const AttentionSizes* s_ = nullptr;
  int64_t b_ = 0, first_ = 0;
  alignas(32) int32_t starts_[kTileCols];
};

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

// out and lse [B T, H] of qkv, which is f32 or bf16.
void attend(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse);

}  // namespace coat::cpu
