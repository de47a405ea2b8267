// adamw: one pass over a list of parameters, run by run: decode moments, update, range, seal, store.
#include "../contract.h"
#include "../formula.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {
namespace {

constexpr int64_t kRun = 128;

// One run of one moment: the view of its format, as a flat tensor [1, n], and the f32 values.
template <class V>
struct Moment {
  const V view;
  float value[kRun];
  explicit Moment(const V& v) : view(v) {}
  void load(int64_t begin, int64_t count) {
    const auto open = view.open(begin / kRun);
    for (int64_t i = 0; i < count; ++i) value[i] = view.load(begin + i, open);
  }
  void store(int64_t begin, int64_t count) const {
    if constexpr (V::run == 0) {
      for (int64_t i = 0; i < count; ++i) view.store(begin + i, {}, value[i]);
    } else {
      static_assert(V::run == kRun);
      std::conditional_t<V::format().scaling == Scaling::expand, RangeWithMin, Range> range;
      for (int64_t i = 0; i < count; ++i) range.add(value[i]);
      const auto sealed = view.seal(begin / kRun, range);
      for (int64_t i = 0; i < count; ++i) view.store(begin + i, sealed, value[i]);
    }
  }
};

template <class V>
void update(const AdamW& rule, float factor, const Tensor& p, const Tensor& master, const Tensor& g, const V& m_view,
            const V& v_view) {
  const Writer p_writer(p, {}), master_writer(master ? master : p, {});
  parallel(p.shape.numel(), kChunk, [&](int64_t begin, int64_t end) {
    Moment<V> m(m_view), v(v_view);
    float parameter[kRun], gradient[kRun];
    for (int64_t at = begin; at < end; at += kRun) {
      const int64_t count = std::min(kRun, end - at);
      read(master ? master : p, at, at + count, parameter);
      read(g, at, at + count, gradient);
      m.load(at, count);
      v.load(at, count);
      for (int64_t i = 0; i < count; ++i) rule.update(parameter[i], gradient[i] * factor, m.value[i], v.value[i]);
      m.store(at, count);
      v.store(at, count);
      if (master) master_writer.write(at, at + count, parameter);
      p_writer.write(at, at + count, parameter);
    }
  });
}

}  // namespace

void adamw(const adamw_args& args) {
  check_flat("m", args.m);
  check_flat("v", args.v);
  const float* clip = args.clip ? args.clip.as<float>() : nullptr;
  if (clip && clip[1] != 0.f) return;
  const AdamW rule(args);
  for (size_t i = 0; i < args.p.size(); ++i) {
    const Tensor &m = args.m[i], &v = args.v[i];
    with("m", m, Views<F32, BF16, E4M3G128, E4M3X128>{}, [&](const auto m_view) {
      using V = std::remove_const_t<decltype(m_view)>;
      update(rule, clip ? clip[0] : 1.f, args.p[i], args.master.empty() ? Tensor{} : args.master[i], args.g[i], m_view,
             V(v));
    });
  }
}

}  // namespace coat::cpu
