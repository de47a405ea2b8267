// adamw, lion, sgd: one pass over a list of parameters, piece by piece: decode, update, range, seal, store.
#include <memory>

#include "../contract.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {
namespace {

constexpr int64_t kStretch = 256;  // elements at a time: whole runs of every format

using Stored = Views<F32, BF16, BF16X2, F16T, E4M3T, E4M3G64, E4M3G128, E4M3G256, E4M3X64, E4M3X128, E4M3X256, E5M2G128,
                     E5M2X128, D8G256, U8G256, D4G128, U4G128>;

// A tensor of the list whose stretches are seen as f32; the runs of its format are flat. A format with one scale a
// tensor is read with the scale that it had at first, and has a new one after measure() and seal().
struct Series {
  virtual ~Series() = default;
  virtual bool measures() const = 0;
  virtual void load(int64_t begin, int64_t count, float* x) const = 0;
  virtual void measure(int64_t count, const float* x) = 0;
  virtual void seal() = 0;
  virtual void store(int64_t begin, int64_t count, const float* x) const = 0;
};

template <class V>
class SeriesOf final : public Series {
 public:
  explicit SeriesOf(const V& view) : view_(view) {
    if constexpr (kTensor) open_ = view_.open(0);
  }
  bool measures() const override { return kTensor; }
  void load(int64_t begin, int64_t count, float* x) const override {
    const V view = view_;  // a local one, which codes cannot alias
    each_run(begin, count, [&](int64_t b, int64_t from, int64_t to) {
      const auto open = kTensor ? open_ : view.open(b);
      float* __restrict target = x + (from - begin);
      for (int64_t i = 0; i < to - from; ++i) target[i] = view.load(from + i, open);
    });
  }
  void measure(int64_t count, const float* x) override {
    Range range;
    for (int64_t i = 0; i < count; ++i) range.add(x[i]);
    infs_.fetch_add(range.infs, std::memory_order_relaxed);
    uint32_t seen = max_.load(std::memory_order_relaxed);
    while (seen < range.max && !max_.compare_exchange_weak(seen, range.max, std::memory_order_relaxed)) {
    }
  }
  void seal() override {
    if constexpr (kTensor) {
      using Code = std::remove_reference_t<decltype(*view_.codes)>;
      count_infs(view_.status, infs_);
      sealed_ = view_.seal_as(scale_for<Code, true>(Range{max_, 0}));
    }
  }
  void store(int64_t begin, int64_t count, const float* x) const override {
    const V view = view_;
    each_run(begin, count, [&](int64_t b, int64_t from, int64_t to) {
      const float* __restrict source = x + (from - begin);
      auto sealed = sealed_;
      if constexpr (V::run != 0) {
        RangeOf<V> range;
        for (int64_t i = 0; i < to - from; ++i) range.add(source[i]);
        sealed = view.seal(b, range);
      }
      for (int64_t i = 0; i < to - from; ++i) view.store(from + i, sealed, source[i]);
    });
  }

 private:
  static constexpr bool kTensor = V::format().scaling == Scaling::tensor;
  // f(block, from, to) for the runs of a stretch.
  template <class F>
  static void each_run(int64_t begin, int64_t count, F&& f) {
    if constexpr (V::run == 0) {
      f(0, begin, begin + count);
    } else {
      static_assert(kStretch % V::run == 0);
      for (int64_t i = begin; i < begin + count; i += V::run) f(i / V::run, i, std::min(begin + count, i + V::run));
    }
  }
  const V view_;
  typename V::Open open_{};
  typename V::Sealed sealed_{};
  std::atomic<uint32_t> max_{0}, infs_{0};
};

template <class... V>
bool holds(const Tensor& t, Views<V...>) {
  return ((t.format == V::format()) || ...);
}

// With `floor`, a format that could store what is positive as 0 does not.
std::unique_ptr<Series> series_of(const char* argument, const Tensor& t, bool floor = false) {
  std::unique_ptr<Series> series;
  const auto make = [&](const auto& view) {
    series = std::make_unique<SeriesOf<std::remove_cvref_t<decltype(view)>>>(view);
  };
  if (floor && holds(t, FlooredViews{}))
    with(argument, t, FlooredViews{}, make);
  else
    with(argument, t, Stored{}, make);
  return series;
}

// The parts of a tensor in bf16x2, as tensors of their own.
struct Parts {
  Tensor high, low;
  explicit Parts(const Tensor& t) : high(t), low(t) {
    high.format = low.format = BF16::format();
    low.data = t.scales<uint8_t>();
  }
};

// One member of the list, its absent tensors false, and how its parameter is rounded.
struct Member {
  Tensor p, master, lost, g, m, v;
  bool v_floor;
  int64_t index;
  int32_t rounding;
  uint64_t seed;
};

// The values of a stretch: the parameter as the rule has it and as it is stored, what that loses, the moments, and
// second parts where Collage computes with them.
enum Value { kExact, kKept, kLost, kFirst, kSecond, kGradient, kLow, kSecondLow, kValues };

// Collage's update of a stretch.
void update_parts(const Collage& rule, float factor, int64_t count, float (&x)[kValues][kStretch], bool p_parts,
                  bool v_parts) {
  for (int64_t i = 0; i < count; ++i) {
    TwoParts p{x[kExact][i], p_parts ? x[kLow][i] : 0.f}, v{x[kSecond][i], v_parts ? x[kSecondLow][i] : 0.f};
    rule.update(p_parts, v_parts, p, x[kGradient][i] * factor, x[kFirst][i], v);
    x[kExact][i] = p.high, x[kLow][i] = p.low;
    x[kSecond][i] = v.high, x[kSecondLow][i] = v.low;
  }
}

template <class Rule>
void update(const Rule& rule, float factor, const Member& member) {
  struct Target {
    std::unique_ptr<Series> series;
    Value value;
  };
  std::vector<Target> targets;
  const auto target = [&](const char* argument, const Tensor& t, Value value, bool floor = false) {
    if (t) targets.push_back({series_of(argument, t, floor), value});
  };
  const auto in_parts = [&](const char* argument, const Tensor& t, Value high, Value low) {
    target(argument, Parts(t).high, high);
    target(argument, Parts(t).low, low);
  };
  const bool computes = std::is_same_v<Rule, AdamW> && member.m.format == BF16::format();
  const bool p_parts = computes && member.p.format == BF16X2::format();
  const bool v_parts = computes && member.v.format == BF16X2::format();
  if (p_parts)
    in_parts("p", member.p, kKept, kLow);
  else
    target("p", member.p, kKept);
  target("master", member.master, kExact);
  target("lost", member.lost, kLost);
  target("m", member.m, kFirst);
  if (v_parts)
    in_parts("v", member.v, kSecond, kSecondLow);
  else
    target("v", member.v, kSecond, member.v_floor);
  const auto g = series_of("g", member.g);

  const auto read = [&](int64_t begin, int64_t count, float(&x)[kValues][kStretch]) {
    for (const auto& [series, value] : targets) series->load(begin, count, x[value]);
    g->load(begin, count, x[kGradient]);
    if (!member.master) std::copy(x[kKept], x[kKept] + count, x[kExact]);
    if (member.lost)
      for (int64_t i = 0; i < count; ++i) x[kExact][i] += x[kLost][i];
  };
  const auto round = [&](int64_t begin, int64_t count, float(&x)[kValues][kStretch]) {
    if (member.rounding == kStochastic) {
      static_assert(kStretch % kDrawn == 0);
      for (int64_t i = 0; i < count; i += kDrawn) {
        const Random random = rounding_bits(member.seed, member.index, begin + i);
        for (int64_t k = i; k < std::min(count, i + kDrawn); ++k)
          x[kKept][k] = round_stochastic(x[kExact][k], random.half(static_cast<int>(k - i)));
      }
    } else if (member.rounding == kKahan) {
      for (int64_t i = 0; i < count; ++i) x[kKept][i] = round_kahan(x[kExact][i], x[kLost][i]);
    } else {
      std::copy(x[kExact], x[kExact] + count, x[kKept]);
    }
  };
  // use(series, begin, count, values) for the targets of every stretch
  const auto sweep = [&](auto&& use) {
    parallel(member.p.shape.numel(), kChunk, [&](int64_t first, int64_t last) {
      float x[kValues][kStretch];
      for (int64_t begin = first; begin < last; begin += kStretch) {
        const int64_t count = std::min(kStretch, last - begin);
        read(begin, count, x);
        if constexpr (std::is_same_v<Rule, AdamW>) {
          if (p_parts || v_parts)
            update_parts(Collage(rule), factor, count, x, p_parts, v_parts);
          else
            for (int64_t i = 0; i < count; ++i)
              rule.update(x[kExact][i], x[kGradient][i] * factor, x[kFirst][i], x[kSecond][i]);
        } else {
          for (int64_t i = 0; i < count; ++i) rule.update(x[kExact][i], x[kGradient][i] * factor, x[kFirst][i]);
        }
        round(begin, count, x);
        for (auto& [series, value] : targets) use(*series, begin, count, x[value]);
      }
    });
  };

  bool measures = false;
  for (const auto& [series, value] : targets) measures = measures || series->measures();
  if (measures) {
    sweep([](Series& series, int64_t, int64_t count, const float* x) {
      if (series.measures()) series.measure(count, x);
    });
    for (auto& [series, value] : targets) series->seal();
  }
  sweep([](Series& series, int64_t begin, int64_t count, const float* x) { series.store(begin, count, x); });
}

template <class Rule, class Args>
void update_list(const Args& args, const std::vector<Tensor>& v, bool v_floor) {
  check_flat("m", args.m);
  check_flat("v", v);
  check_rounding(args.rounding, args.p, args.master, args.lost);
  const float* clip = args.clip ? args.clip.template as<float>() : nullptr;
  if (clip && clip[1] != 0.f) return;
  const auto at = [](const std::vector<Tensor>& list, size_t i) { return list.empty() ? Tensor{} : list[i]; };
  for (size_t i = 0; i < args.p.size(); ++i) {
    if (args.p[i].shape.numel() == 0) continue;
    update(Rule(args), clip ? clip[0] : 1.f,
           {args.p[i], at(args.master, i), at(args.lost, i), args.g[i], args.m[i], at(v, i), v_floor,
            static_cast<int64_t>(i), args.rounding, args.seed});
  }
  if constexpr (requires { args.amax; })
    for (size_t i = 0; i < args.amax.size(); ++i) amax(amax_of(args.p[i], args.amax[i]));
}

}  // namespace

void adamw(const adamw_args& args) { update_list<AdamW>(args, args.v, args.v_floor != 0); }
void lion(const lion_args& args) { update_list<Lion>(args, {}, false); }
void sgd(const sgd_args& args) { update_list<Sgd>(args, {}, false); }

}  // namespace coat::cpu
