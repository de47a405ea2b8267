// adamw for moments in e4m3/x128, parameters and gradients in f32 or bf16: one pass at the speed of memory, through the
// special function unit.
#include <vector>

#include "batch.cuh"

namespace coat::cuda {
namespace {

constexpr uint32_t kInfBits = 0x7f800000u;
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

// Range over a run of what `of` makes of x, exactly; infinities stay with their lanes.
template <class Of>
__device__ inline RangeWithMin range_of(const float (&x)[kPart], Of&& of) {
  RangeWithMin range;
#pragma unroll
  for (int k = 0; k < kPart; ++k) range.add(of(x[k]));
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

// Registers are what limits the warps of a multiprocessor; they stand in two blocks, since each has its own table.
template <class Source>
constexpr int kWarpsFor = sizeof(Source) == 2 ? 10 : 8;
template <class Source>
constexpr int64_t kStrideFor = kWarpsFor<Source> * kBatch;  // elements of a round of a block, and of all its rounds
template <class Source>
constexpr int64_t kElementsFor = kRounds * kStrideFor<Source>;
constexpr int kTableBytes = kTable * 4;

// A lane has 16 elements and 8 lanes a run. Lanes of even number care for m, the others for v, so that what is computed
// once a run (1 / k; the new scale, k and centre, exactly) is computed for four runs and both moments at once; the
// logarithms of a maximum and a minimum by two lanes. Special functions an element: 2 powers to decode, a root, a
// reciprocal, 2 logarithms and 2 powers to encode. Bytes an element: p 8 or 4 (or master 8 and p 2), g 4 or 2, moments
// 2 each and 24 / 128 for their scales.
template <class Source, bool Copies, bool Stochastic, class Gradient>
__global__ void __launch_bounds__(kWarpsFor<Source> * 32, 2)
    adamw_kernel_expanded(const Entry<Source, Gradient>* list, int count, AdamW rule, const float* clip,
                          const __grid_constant__ RandomKeys keys, Status* status) {
  if (clip && clip[1] != 0.f) return;
  const float factor = clip ? clip[0] : 1.f;
  using Member = Entry<Source, Gradient>;
  constexpr int E = Batch<Source, Gradient>::E;
  constexpr int64_t kStride = kStrideFor<Source>, kElements = kElementsFor<Source>;
  extern __shared__ __align__(128) uint8_t shared[];         // the table, a stage a warp
  __shared__ alignas(Member) uint8_t bytes[sizeof(Member)];  // its pointers would take too many registers
  float* logs = reinterpret_cast<float*>(shared);
  Member& entry = *reinterpret_cast<Member*>(bytes);
  const int warp = threadIdx.x / 32;
  Stage<Source, Gradient>& stage = reinterpret_cast<Stage<Source, Gradient>*>(shared + kTableBytes)[warp];
  fill(logs);
  {
    const Member found = owner_of(list, count, &Member::first_block, blockIdx.x);
    if (threadIdx.x == 0) entry = found;
  }
  __syncthreads();
  const uint32_t table = shared_address(logs);
  const bool odd = threadIdx.x % 2, upper = threadIdx.x % 4 / 2;
  const int64_t n = entry.n;
  const Folded fold(rule, factor);
  uint32_t most = 0;  // the largest |p| as stored, of bf16 in each half
  const E4M3X128& mine = entry.moment[threadIdx.x % 2];

  // Of the batch of which this lane's elements begin at i; after_reading() is called when all of it is in registers.
  const auto update = [&](auto whole, int64_t i, Batch<Source, Gradient>& batch, const Numbers& own,
                          auto&& after_reading) {
    constexpr bool kWhole = whole.value;
    const int64_t left = n - i, run = run_of(i);
    const bool exists = kWhole || run * kRun < n;
    float m[kPart], v[kPart];
    {
      float p[kPart];
      const int64_t b = exists ? run : 0;
      const float scale = own.scale;
      const float inverse_k = Inside::inverse(own.k), shift = log2_normal<Inside>(scale) * inverse_k;
      // log2 of what codes stand for
      const float high = fma_(8.81f, inverse_k, shift), low = fma_(-9.01f, inverse_k, shift);
      if (__all_sync(kAll, fold.safe && scale > kLeast && scale < kMost && high < 120.f && low > -120.f)) {
        const Two shifts(shift), inverses(inverse_k), centres(own.centre * (odd ? rule.beta2 : rule.beta1));
#pragma unroll
        for (int w = 0; w < kPart / 4; ++w) {
          const uint32_t m_word = batch.m.word[w] & 0x7f7f7f7fu, v_word = batch.v.word[w] & 0x7f7f7f7fu;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int k = 4 * w + c;
            const float m_power = exp2_near(fma_(log_of(table, m_word, c), inverses.m, shifts.m));
            const float v_power = exp2_near(fma_(log_of(table, v_word, c), inverses.v, shifts.v));
            const uint32_t sign = batch.m.word[w] << (24 - 8 * c) & 0x80000000u;
            const float g = batch.g.decode(k), before = batch.p.decode(k);
            m[k] = fma_(float_of(bits_of(m_power) | sign), centres.m, g * fold.gain1);
            v[k] = fma_(v_power, centres.v, g * fold.gain2 * g);
            const float inverse = inverse_near(fma_(root_near(v[k]), fold.root, fold.floor));
            p[k] = fma_(-m[k], inverse, fma_(before, fold.decay, before));
          }
        }
      } else {
        decode_exactly(entry.moment[0], b, batch.m, m);
        decode_exactly(entry.moment[1], b, batch.v, v);
#pragma unroll
        for (int k = 0; k < kPart; ++k) {
          p[k] = batch.p.decode(k);
          rule.update(p[k], batch.g.decode(k) * factor, m[k], v[k]);
        }
      }
      if constexpr (!kWhole) {  // what does not exist counts for nothing, and stays 0 however it is rounded
#pragma unroll
        for (int k = 0; k < kPart; ++k)
          if (batch.p.place(k) >= left) p[k] = 0.f;
      }
      if constexpr (Stochastic) {
        float no_number = 0.f;  // unless all are finite
#pragma unroll
        for (int k = 0; k < kPart; ++k) no_number = fma_(p[k], 0.f, no_number);
        uint32_t words[kPart / 2];
#pragma unroll
        for (int c = 0; c < kPart; c += E) {
          const int64_t at = i + batch.p.place(c);
          const Random random = rounding_bits(keys, entry.index, at);
          const bool second = E < kDrawn && at % kDrawn != 0;  // half of what is drawn is another lane's
#pragma unroll
          for (int w = 0; w < E / 2; ++w) words[c / 2 + w] = second ? random.word[w % 2 + 2] : random.word[w];
        }
        if (no_number != 0.f) {
#pragma unroll
          for (int k = 0; k < kPart; ++k) p[k] = round_stochastic(p[k], words[k / 2] >> (k % 2 * 16) & 0xffffu);
#pragma unroll
          for (int w = 0; w < kPart / 2; ++w) words[w] = 0;
        }
#pragma unroll
        for (int k = 0; k < kPart; k += 2) batch.p.put_rounded(k, p[k], p[k + 1], words[k / 2]);
      } else {
        batch.p.encode(p);
      }
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
    after_reading();

    // Extremes of the moment that this lane cares for. Zeros, which no range sees, and infinities are rare.
    float high_m = 0.f, low_m = kInf;
    uint32_t high_v = 0, low_v = kInfBits;  // bits of magnitudes order as they do, NaN above all
#pragma unroll
    for (int k = 0; k < kPart; k += 2) {
      high_m = fmaxf(fmaxf(high_m, fabsf(m[k])), fabsf(m[k + 1]));
      low_m = fminf(fminf(low_m, fabsf(m[k])), fabsf(m[k + 1]));
      high_v = __vimax3_u32(high_v, bits_of(v[k]), bits_of(v[k + 1]));
      low_v = __vimin3_u32(low_v, bits_of(v[k]), bits_of(v[k + 1]));
    }
    RangeWithMin range;
    range.max = odd ? high_v : bits_of(high_m), range.min = odd ? low_v : bits_of(low_m);
    range.max = max(range.max, __shfl_xor_sync(kAll, odd ? bits_of(high_m) : high_v, 1));
    range.min = min(range.min, __shfl_xor_sync(kAll, odd ? bits_of(low_m) : low_v, 1));
#pragma unroll
    for (int offset = 2; offset < kLanes; offset *= 2) {
      range.max = max(range.max, __shfl_xor_sync(kAll, range.max, offset));
      range.min = min(range.min, __shfl_xor_sync(kAll, range.min, offset));
    }
    if (__any_sync(kAll, range.min == 0 || range.max >= kInfBits)) {
      const RangeWithMin of_m = range_of(m, [](float x) { return x; }), of_v = range_of(v, AdamW::kept);
      range = odd ? of_v : of_m;
      if (of_m.infs + of_v.infs > 0) count_infs(status, of_m.infs + of_v.infs);
      range.infs = 0;
    }
    float high = float_of(range.max), low = float_of(range.min);
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
      const float log2_reach = level ? log2_middle : log2_high;
      const Two k(power), shift(fma_(-power, log2_reach, kLog2Largest));
      encode<true>(m_codes, k.m, shift.m, m);
      encode<false>(v_codes, k.v, shift.v, v);
    } else {
      E4M3X128::Sealed sealed{1.f, 1.f, 0.f};
      if (exists) sealed = mine.seal(run, range);  // all lanes that care for it store the same numbers
      const Two inverse(sealed.inverse), k(sealed.k), log2_centre(sealed.log2_centre);
#pragma unroll
      for (int k = 0; k < kPart; ++k) v[k] = AdamW::kept(v[k]);
      encode_exactly(entry.moment[0], {inverse.m, k.m, log2_centre.m}, m, m_codes);
      encode_exactly(entry.moment[1], {inverse.v, k.v, log2_centre.v}, v, v_codes);
    }
    m_codes.template put<kWhole>(entry.moment[0].codes, i, left);
    v_codes.template put<kWhole>(entry.moment[1].codes, i, left);
  };

  // first the whole batches of this warp, then perhaps a part of one
  int64_t i = (blockIdx.x - entry.first_block) * kElements + warp * kBatch;
  const int64_t reach = n - i;
  const int rounds =
      reach < kBatch ? 0 : static_cast<int>(reach < kElements ? (reach - kBatch) / kStride + 1 : kRounds);
  Batch<Source, Gradient> batch;
  Numbers own, next;
  stage.begin(entry, i);
  i += batch.first();
  if (rounds > 0) {
    __syncwarp();
    stage.load(kWarpsFor<Source>);
    next.fetch(mine, run_of(i));
  }
#pragma unroll 1
  for (int round = 0; round < rounds; ++round, i += kStride) {
    stage.take(batch, round % 2);
    own = next;
    update(std::true_type{}, i, batch, own, [&] {
      if (round + 1 == rounds) return;
      __syncwarp();
      stage.load(kWarpsFor<Source>);
      next.fetch(mine, run_of(i + kStride));
    });
  }
  if (rounds < kRounds && rounds * kStride < reach) {
    const int64_t left = n - i;
    batch.m.fetch(entry.moment[0].codes, i, left);
    batch.v.fetch(entry.moment[1].codes, i, left);
    batch.g.fetch(entry.g.codes, i, left);
    batch.p.fetch(entry.source.codes, i, left);
    own.fetch(mine, run_of(i) * kRun < n ? run_of(i) : 0);  // a lane without elements may care for a run
    update(std::false_type{}, i, batch, own, [] {});
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
  constexpr int64_t kElements = kElementsFor<Source>;
  std::vector<Member> list;
  int64_t blocks = 0;
  for (size_t i = 0; i < args.p.size(); ++i) {
    const Tensor &p = args.p[i], &g = args.g[i], &source = Copies ? args.master[i] : p;
    const int64_t n = p.shape.numel();
    if (!is_expanded_case(args, i) || !(source.format == PlainOf<Source>::format()) ||
        !(g.format == PlainOf<Gradient>::format()) || n == 0)
      continue;
    list.push_back({{E4M3X128(args.m[i]), E4M3X128(args.v[i])},
                    PlainOf<Source>(source),
                    BF16(p),
                    PlainOf<Gradient>(g),
                    args.amax.empty() ? nullptr : args.amax[i].as<uint32_t>(),
                    n,
                    blocks,
                    static_cast<int64_t>(i)});
    blocks += (n + kElements - 1) / kElements;
  }
  if (list.empty()) return;
  constexpr int kShared = kTableBytes + kWarpsFor<Source> * sizeof(Stage<Source, Gradient>);
  const int64_t bytes = static_cast<int64_t>(list.size() * sizeof(Member));
  const Scratch table(bytes);
  copy_in(table.as<uint8_t>(), list.data(), bytes);
  launch("adamw", adamw_kernel_expanded<Source, Copies, Stochastic, Gradient>, static_cast<unsigned>(blocks),
         kWarpsFor<Source> * 32, kShared, table.as<Member>(), static_cast<int>(list.size()), AdamW(args),
         args.clip ? args.clip.as<float>() : nullptr, RandomKeys(static_cast<uint64_t>(args.seed)), args.p[0].status);
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
