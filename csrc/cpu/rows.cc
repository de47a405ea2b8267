// Decoding and encoding of whole pieces, one compiled loop a format.
#include "rows.h"

namespace coat::cpu {
namespace {

using All =
    Views<F32, BF16, E4M3T, E5M2T, E4M3G16, I8G16, E4M3G64, E4M3G128, E4M3G256, E4M3B128, E4M3R, E4M3G128P2, E4M3B128P2,
          E4M3X64, E4M3X128, E4M3X256, E5M2G128, E5M2X128, F16, F16T, BF16X2, D8G256, U8G256, D4G128, U4G128>;

// f(block, from, to) for the runs that [begin, end) touches.
template <class V, class F>
void each_run(const Tensor& t, int64_t begin, int64_t end, F&& f) {
  if constexpr (V::run == 0) {
    f(0, begin, end);
  } else if constexpr (V::format().scaling != Scaling::run && V::format().scaling != Scaling::block) {
    for (int64_t i = begin; i < end;) {
      const int64_t b = i / V::run, to = std::min(end, (b + 1) * V::run);
      f(b, i, to);
      i = to;
    }
  } else {
    const int64_t cols = t.shape.cols(), runs = runs_of_row(V::format(), cols);
    const int64_t length = V::run == kWholeRow ? cols : V::run;
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / cols, run = (i - row * cols) / length;
      const int64_t to = std::min(end, row * cols + std::min(cols, (run + 1) * length));
      f((V::format().scaling == Scaling::block ? row / V::run : row) * runs + run, i, to);
      i = to;
    }
  }
}

}  // namespace

void read(const Tensor& t, int64_t begin, int64_t end, float* out) {
  with("x", t, All{}, [&](const auto view) {
    each_run<std::remove_const_t<decltype(view)>>(t, begin, end, [&](int64_t b, int64_t from, int64_t to) {
      const auto open = view.open(b);
      float* __restrict target = out + (from - begin);
      const int64_t count = to - from;
      for (int64_t i = 0; i < count; ++i) target[i] = view.load(from + i, open);
    });
  });
}

Writer::Writer(const Tensor& y, const Tensor& scale, bool floored)
    : y_(y), measures_(y.format.scaling == Scaling::tensor && !scale), floored_(floored) {
  if (y.format.scaling != Scaling::tensor || !scale) return;
  const float given = *scale.as<float>();
  if (!(given >= kMinNormal && given < kInf))
    fail("value", "scale", "scale is ", given, " and must be a positive finite number");
  *y.scales<float>() = given;
  inverse_ = 1.f / given;
}

void Writer::measure(const float* x, int64_t count) {
  Range range;
  for (int64_t i = 0; i < count; ++i) range.add(x[i]);
  raise(max_, range.max);
}

void Writer::seal() {
  const Range range{max_.load(), 0};  // infinities are counted as they are written
  with("y", y_, Views<E4M3T, E5M2T, F16T>{}, [&](const auto view) { inverse_ = view.seal(0, range).inverse; });
}

void Writer::write(int64_t begin, int64_t end, const float* x) const {
  const auto use = [&](const auto view) {
    using V = std::remove_const_t<decltype(view)>;
    constexpr Scaling kScaling = V::format().scaling;
    each_run<V>(y_, begin, end, [&](int64_t b, int64_t from, int64_t to) {
      const float* __restrict source = x + (from - begin);
      const int64_t count = to - from;
      typename V::Sealed sealed{};
      if constexpr (V::run != 0) {
        RangeOf<V> range;
        for (int64_t i = 0; i < count; ++i) range.add(source[i]);
        sealed = view.seal(b, range);
      } else if constexpr (kSaturates<V>) {
        uint32_t infs = 0;
        for (int64_t i = 0; i < count; ++i) infs += abs_(source[i]) == kInf ? 1u : 0u;
        count_infs(y_.status, infs);
      }
      if constexpr (kScaling == Scaling::tensor) sealed = {inverse_};
      for (int64_t i = 0; i < count; ++i) view.store(from + i, sealed, source[i]);
    });
  };
  floored_ ? with("y", y_, FlooredViews{}, use) : with("y", y_, All{}, use);
}

}  // namespace coat::cpu
