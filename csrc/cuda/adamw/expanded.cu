// adamw for moments in e4m3/x128, parameters and gradients in f32 or bf16: one pass at the speed of memory, through the
// special function unit.
#include <vector>

#include "batch.cuh"

namespace coat::cuda {
namespace {

constexpr uint32_t kAll = 0xffffffffu;
constexpr float kLeast = 0x1p-120f, kMost = 0x1p120f;  // beyond, values or their powers may be subnormal or infinite
constexpr float kLog2Largest = 8.80735492f;            // of 448
constexpr float kLeastFloor = 1e-13f;                  // beside it, the root of a subnormal does not matter
constexpr float kLargestRate = 0x1p40f;                // by which the least floor stays normal

__device__ inline float root_near(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// IEEE results between kLeast and kMost.
struct Inside {
  static __device__ float inverse(float b) {
    const float r = inverse_near(b);
    return fma_(r, -fma_(b, r, -1.f), r);
  }
  static __device__ float quotient(float a, float b) { return quotient(a, b, inverse(b)); }
  static __device__ float quotient(float a, float b, float inverse) {
    const float q = a * inverse;
    return fma_(inverse, fma_(-b, q, a), q);
  }
  static __device__ float root(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    const float g = x * r;
    return fma_(fma_(-g, g, x), 0.5f * r, g);
  }
};

// A number of m, known to lanes of even number, and the same of v, known to the others: for both.
struct Two {
  float m, v;
  __device__ explicit Two(float own) {
    const float other = __shfl_xor_sync(kAll, own, 1);
    const bool odd = threadIdx.x % 2;
    m = odd ? other : own;
    v = odd ? own : other;
  }
};

// log2 of the magnitude of code c lies at 256 c + 4 lane: a copy a lane, so that no two lanes meet in a bank, and one
// permutation of bytes makes the address.
constexpr int kTable = 128 * 64;
__device__ inline void fill(float* table) {
  static_assert(kWarps * 32 == 128);
  const int lane = threadIdx.x % 32, first = static_cast<int>(threadIdx.x) - lane;
  const float own = log2_(E4M3::decode(static_cast<uint8_t>(threadIdx.x)));
  for (int k = 0; k < 32; k += 4) {
    const float x = __shfl_sync(kAll, own, k + lane / 8);
    reinterpret_cast<float4*>(table + (first + k + lane / 8) * 64)[lane % 8] = {x, x, x, x};
  }
}
__device__ inline float log_of(uint32_t table, uint32_t word, int k) {
  float y;
  const uint32_t at = __byte_perm(word, threadIdx.x % 32 * 4, 0x5504u | static_cast<uint32_t>(k) << 4);
  asm("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(table + at));
  return y;
}

// Moments as codes, by the unit: of |x|^k 2^shift, with the sign of x.
template <bool Signed, class Codes>
__device__ inline void encode(Codes& codes, float k, float shift, const float (&x)[kPart]) {
#pragma unroll
  for (int w = 0; w < kPart / 4; ++w) {
    float y[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      y[c] = exp2_near(fma_(log2_near(fabsf(x[4 * w + c])), k, shift));
      if (Signed) y[c] = float_of(bits_of(y[c]) | (bits_of(x[4 * w + c]) & 0x80000000u));
    }
    codes.word[w] = encode_four<E4M3>(y[0], y[1], y[2], y[3]);
  }
}
// The same, and decoding, as format.h has them.
template <class Codes>
__device__ inline void decode_exactly(E4M3X128 view, int64_t run, Codes& codes, float (&x)[kPart]) {
  const E4M3X128::Open open = view.open(run);
  view.codes = codes.code;
#pragma unroll
  for (int k = 0; k < kPart; ++k) x[k] = view.load(k, open);
}
template <class Codes>
__device__ inline void encode_exactly(E4M3X128 view, E4M3X128::Sealed sealed, const float (&x)[kPart], Codes& codes) {
  view.codes = codes.code;
#pragma unroll
  for (int k = 0; k < kPart; ++k) view.store(k, sealed, x[k]);
}

// Range over a run, exactly; infinities stay with their lanes.
__device__ inline RangeWithMin range_of(const float (&x)[kPart]) {
  RangeWithMin range;
  add_all(range, x);
  merge_lanes<kLanes>(range);
  return range;
}

// The update with its constants folded: m = beta1 m + gain1 g, v = beta2 v + gain2 g g,
// p = p + decay p - m / (root sqrt(v) + floor).
struct Folded {
  float gain1, gain2, root, floor, decay;
  bool safe;  // the unit can take it
  __device__ Folded(const AdamW& rule, float factor)
      : gain1(rule.gain1 * factor),
        gain2(rule.gain2 * factor * factor),
        root(rule.root / rule.lr),
        floor(rule.floor / rule.lr),
        decay(-rule.lr * rule.weight_decay),
        safe(rule.floor >= kLeastFloor && rule.lr > kLeast && rule.lr < kLargestRate && root < kMost &&
             factor > 1e-12f) {}
};

// A lane has 16 elements and 8 lanes a run. Lanes of even number care for m, the others for v, so that what is computed
// once a run (1 / k; the new scale, k and centre, exactly) is computed for four runs and both moments at once; the
// logarithms of a maximum and a minimum by two lanes. Special functions an element: 2 powers to decode, a root, a
// reciprocal, 2 logarithms and 2 powers to encode. Bytes an element: p 8 or 4 (or master 8 and p 2), g 4 or 2, moments
// 2 each and 24 / 128 for their scales.
template <class Source, bool Copies, bool Stochastic, class Gradient>
__global__ void __launch_bounds__(kWarps * 32, std::is_same_v<Source, BFloat16> ? 5 : 4)
    adamw_kernel_expanded(const Entry<Source, Gradient>* list, int count, AdamW rule, const float* clip, uint64_t seed,
                          Status* status) {
  if (clip && clip[1] != 0.f) return;
  const float factor = clip ? clip[0] : 1.f;
  using Member = Entry<Source, Gradient>;
  constexpr int E = Batch<Source, Gradient>::E;
  __shared__ alignas(16) float logs[kTable];
  __shared__ alignas(Member) uint8_t bytes[sizeof(Member)];  // its pointers would take too many registers
  Member& entry = *reinterpret_cast<Member*>(bytes);
  fill(logs);
  {
    const Member found = owner_of(list, count, &Member::first_block, blockIdx.x);
    if (threadIdx.x == 0) entry = found;
  }
  __syncthreads();
  const auto table = static_cast<uint32_t>(__cvta_generic_to_shared(logs));
  const bool odd = threadIdx.x % 2, upper = threadIdx.x % 4 / 2;
  const int64_t n = entry.n;
  const Folded fold(rule, factor);
  uint32_t most = 0;  // the largest |p| as stored, of bf16 in each half

  const auto update = [&](auto whole, int64_t i, Batch<Source, Gradient>& batch, auto&& fetch_next) {
    constexpr bool kWhole = whole.value;
    const int64_t left = n - i, run = i / kRun;
    const E4M3X128& mine = odd ? entry.v : entry.m;
    const bool exists = kWhole || run * kRun < n;
    float m[kPart], v[kPart];
    {
      float p[kPart], g[kPart];
#pragma unroll
      for (int k = 0; k < kPart; ++k) g[k] = batch.g.decode(k), p[k] = batch.p.decode(k);
      const int64_t b = exists ? run : 0;
      const float scale = mine.scale[b], centre = mine.centre[b];
      const float inverse_k = Inside::inverse(mine.k[b]), shift = log2_normal<Inside>(scale) * inverse_k;
      // log2 of what codes stand for
      const float high = fma_(8.81f, inverse_k, shift), low = fma_(-9.01f, inverse_k, shift);
      if (__all_sync(kAll, fold.safe && scale > kLeast && scale < kMost && high < 120.f && low > -120.f)) {
        const Two shifts(shift), inverses(inverse_k), centres(centre * (odd ? rule.beta2 : rule.beta1));
#pragma unroll
        for (int w = 0; w < kPart / 4; ++w) {
          const uint32_t m_word = batch.m.word[w] & 0x7f7f7f7fu, v_word = batch.v.word[w] & 0x7f7f7f7fu;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int k = 4 * w + c;
            const float m_power = exp2_near(fma_(log_of(table, m_word, c), inverses.m, shifts.m));
            const float v_power = exp2_near(fma_(log_of(table, v_word, c), inverses.v, shifts.v));
            const uint32_t sign = batch.m.word[w] << (24 - 8 * c) & 0x80000000u;
            m[k] = fma_(float_of(bits_of(m_power) | sign), centres.m, g[k] * fold.gain1);
            v[k] = fma_(v_power, centres.v, g[k] * fold.gain2 * g[k]);
            const float inverse = inverse_near(fma_(root_near(v[k]), fold.root, fold.floor));
            p[k] = fma_(-m[k], inverse, fma_(p[k], fold.decay, p[k]));
          }
        }
      } else {
        decode_exactly(entry.m, b, batch.m, m);
        decode_exactly(entry.v, b, batch.v, v);
#pragma unroll
        for (int k = 0; k < kPart; ++k) rule.update(p[k], g[k] * factor, m[k], v[k]);
      }
      if constexpr (Stochastic) {
#pragma unroll
        for (int c = 0; c < kPart / E; ++c) {
          const int64_t at = i + c * decltype(batch.p)::kStep;
          const Random random = rounding_bits(seed, entry.index, at);
          const bool second = E < kDrawn && at % kDrawn != 0;  // half of what is drawn is another lane's
          const uint32_t words[4] = {second ? random.word[2] : random.word[0], second ? random.word[3] : random.word[1],
                                     random.word[2], random.word[3]};
#pragma unroll
          for (int e = 0; e < E; ++e)
            p[c * E + e] = round_stochastic(p[c * E + e], words[e / 2] >> (e % 2 * 16) & 0xffffu);
        }
      }
      if constexpr (!kWhole) {  // what does not exist counts for nothing
#pragma unroll
        for (int k = 0; k < kPart; ++k)
          if (k / E * decltype(batch.p)::kStep + k % E >= left) p[k] = 0.f;
      }
      batch.p.encode(p);
      batch.p.template put<kWhole>(entry.source.codes, i, left);
      if constexpr (Copies) {
        Pieces<BFloat16, E> copy;
        copy.encode(p);
        copy.template put<kWhole>(entry.copy.codes, i, left);
        copy.raise(most);
      } else {
        batch.p.raise(most);
      }
    }
    fetch_next();

    // Extremes of the moment that this lane cares for. Zeros, which no range sees, and infinities are rare.
    float high_m = 0.f, low_m = kInf, high_v = 0.f, low_v = kInf;
#pragma unroll
    for (int k = 0; k < kPart; ++k) {
      high_m = fmaxf(high_m, fabsf(m[k])), low_m = fminf(low_m, fabsf(m[k]));
      high_v = fmaxf(high_v, v[k]), low_v = fminf(low_v, v[k]);
    }
    float high = odd ? high_v : high_m, low = odd ? low_v : low_m;
    high = fmaxf(high, __shfl_xor_sync(kAll, odd ? high_m : high_v, 1));
    low = fminf(low, __shfl_xor_sync(kAll, odd ? low_m : low_v, 1));
#pragma unroll
    for (int offset = 2; offset < kLanes; offset *= 2) {
      high = fmaxf(high, __shfl_xor_sync(kAll, high, offset));
      low = fminf(low, __shfl_xor_sync(kAll, low, offset));
    }
    RangeWithMin range;
    range.max = bits_of(high), range.min = bits_of(low);
    if (__any_sync(kAll, !(low > 0.f && high < kInf))) {
#pragma unroll
      for (int k = 0; k < kPart; ++k) v[k] = AdamW::kept(v[k]);
      const RangeWithMin of_m = range_of(m), of_v = range_of(v);
      range = odd ? of_v : of_m;
      if (of_m.infs + of_v.infs > 0) count_infs(status, of_m.infs + of_v.infs);
      range.infs = 0;
      low = float_of(range.min);
    }
    Pieces<E4M3, E> m_codes, v_codes;
    if (__all_sync(kAll, low > kLeast && high < kMost)) {
      // as E4M3X128::seal does; a run of zeros is one of ones
      const float extreme = upper ? low : high, log2_own = log2_normal<Inside>(extreme);
      const float log2_other = __shfl_xor_sync(kAll, log2_own, 2), log2_high = upper ? log2_other : log2_own;
      const float root_own = Inside::root(extreme), product = root_own * __shfl_xor_sync(kAll, root_own, 2);
      const bool level = high == low || high == 0.f;
      const float middle = level ? (high > 0.f ? high : 1.f) : product, log2_middle = log2_normal<Inside>(middle);
      const float power =
          level ? 1.f : E4M3X128::power_for<Inside>(upper ? log2_other - log2_own : log2_own - log2_other);
      const float top = level ? 1.f : exp2_normal((log2_high - log2_middle) * power);
      const float scale = E4M3X128::scale_for_top<Inside>(top);
      if (exists && threadIdx.x % kLanes < 2) mine.scale[run] = scale, mine.k[run] = power, mine.centre[run] = middle;
      // |x|^k by the scale is 2^(k (log2 x - log2 max)) times the largest code
      const Two k(power), shift(fma_(-power, level ? log2_middle : log2_high, kLog2Largest));
      encode<true>(m_codes, k.m, shift.m, m);
      encode<false>(v_codes, k.v, shift.v, v);
    } else {
      E4M3X128::Sealed own{1.f, 1.f, 0.f};
      if (exists) own = mine.seal(run, range);  // all lanes that care for it store the same numbers
      const Two inverse(own.inverse), k(own.k), log2_centre(own.log2_centre);
      encode_exactly(entry.m, {inverse.m, k.m, log2_centre.m}, m, m_codes);
      encode_exactly(entry.v, {inverse.v, k.v, log2_centre.v}, v, v_codes);
    }
    m_codes.template put<kWhole>(entry.m.codes, i, left);
    v_codes.template put<kWhole>(entry.v.codes, i, left);
  };

  // first the whole batches of this warp, then perhaps a part of one
  int64_t i = (blockIdx.x - entry.first_block) * kElements + threadIdx.x / 32 * kBatch;
  const int64_t reach = n - i;
  const int rounds =
      reach < kBatch ? 0 : static_cast<int>(reach < kElements ? (reach - kBatch) / kStride + 1 : kRounds);
  Ahead<Source, Gradient> ahead(entry, i);
  i += Batch<Source, Gradient>::first();
  Batch<Source, Gradient> batch;
  // with the registers of fewer blocks, a batch is fetched while the one before it is encoded
  constexpr bool kEarly = !std::is_same_v<Source, BFloat16>;
  if (kEarly && rounds > 0) batch.template fetch<true>(entry, i, 0);
#pragma unroll 1
  for (int round = 1; round <= rounds; ++round, i += kStride) {
    ahead.fetch(round < rounds);
    if constexpr (!kEarly) batch.template fetch<true>(entry, i, 0);
    update(std::true_type{}, i, batch, [&] {
      if (kEarly && round < rounds) batch.template fetch<true>(entry, i + kStride, 0);
    });
  }
  if (rounds < kRounds && rounds * kStride < reach) {
    batch.template fetch<false>(entry, i, n - i);
    update(std::false_type{}, i, batch, [] {});
  }
  if (!entry.amax) return;
  if constexpr (Copies || sizeof(Source) == 2) most = max(most & 0xffff0000u, most << 16);
  most = block_max(most);
  if (threadIdx.x == 0) atomicMax(entry.amax, most);
}

// The members of the list with these formats, in one launch.
template <class Source, bool Copies, bool Stochastic, class Gradient>
void run(const adamw_args& args) {
  if (args.master.empty() == Copies) return;
  using Member = Entry<Source, Gradient>;
  std::vector<Member> list;
  int64_t blocks = 0;
  for (size_t i = 0; i < args.p.size(); ++i) {
    const Tensor &p = args.p[i], &g = args.g[i], &source = Copies ? args.master[i] : p;
    const int64_t n = p.shape.numel();
    if (!is_expanded_case(args, i) || !(source.format == PlainOf<Source>::format()) ||
        !(g.format == PlainOf<Gradient>::format()) || n == 0)
      continue;
    list.push_back({E4M3X128(args.m[i]), E4M3X128(args.v[i]), PlainOf<Source>(source), BF16(p), PlainOf<Gradient>(g),
                    args.amax.empty() ? nullptr : args.amax[i].as<uint32_t>(), n, blocks, static_cast<int64_t>(i)});
    blocks += (n + kElements - 1) / kElements;
  }
  if (list.empty()) return;
  const int64_t bytes = static_cast<int64_t>(list.size() * sizeof(Member));
  const Scratch table(bytes);
  copy_in(table.as<uint8_t>(), list.data(), bytes);
  launch("adamw", adamw_kernel_expanded<Source, Copies, Stochastic, Gradient>, static_cast<unsigned>(blocks),
         kWarps * 32, 0, table.as<Member>(), static_cast<int>(list.size()), AdamW(args),
         args.clip ? args.clip.as<float>() : nullptr, static_cast<uint64_t>(args.seed), args.p[0].status);
}

}  // namespace

bool is_expanded_case(const adamw_args& args, size_t i) {
  const auto plain = [](const Tensor& t) { return t.format == F32::format() || t.format == BF16::format(); };
  return args.m[i].format == E4M3X128::format() && args.v[i].format == E4M3X128::format() && plain(args.p[i]) &&
         plain(args.g[i]) && args.rounding != kKahan && (args.master.empty() || args.p[i].format == BF16::format());
}

void adamw_expanded(const adamw_args& args) {
  const auto of = [&]<class Source, bool Copies, bool Stochastic>() {
    run<Source, Copies, Stochastic, Float32>(args);
    run<Source, Copies, Stochastic, BFloat16>(args);
  };
  of.template operator()<Float32, true, false>();
  if (args.rounding == kStochastic) {
    of.template operator()<BFloat16, false, true>();
  } else {
    of.template operator()<Float32, false, false>();
    of.template operator()<BFloat16, false, false>();
  }
}

}  // namespace coat::cuda
