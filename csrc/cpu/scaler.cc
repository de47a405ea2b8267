// scaler: the largest magnitude of a tensor, the scale that follows from it, and the scale that a tensor carries.
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

// The bits of |x| order as integers, with NaN above Inf: one integer maximum says all.
void amax(const amax_args& args) {
  const int64_t n = args.x.shape.numel();
  std::atomic<uint32_t> largest{0};
  parallel(n, kChunk, [&](int64_t begin, int64_t end) {
    std::vector<float> values(end - begin);
    read(args.x, begin, end, values.data());
    uint32_t most = 0;
    for (float x : values) most = std::max(most, bits_of(x) & 0x7fffffffu);
    raise(largest, most);
  });
  *args.y.as<float>() = float_of(largest);
}

void scale_from_amax(const scale_from_amax_args& args) {
  const float amax = *args.amax.as<float>();
  const float scale = args.format == 0 ? coat::scale_from_amax<E4M3>(amax) : coat::scale_from_amax<E5M2>(amax);
  *args.scale.as<float>() = args.rounding == 0 ? scale : power_not_below(scale);
}

void scale_of(const scale_of_args& args) { *args.y.as<float>() = *args.x.scales<float>(); }

void observe_amax(const observe_amax_args& args) {
  float& front = *args.history.as<float>();
  const float amax = *args.amax.as<float>();
  if (amax < kInf && amax > front) front = amax;
}

void scale_from_history(const scale_from_history_args& args) {
  float* history = args.history.as<float>();
  const int64_t n = args.history.shape.numel();
  float& scale = *args.scale.as<float>();
  const float amax = args.pick == 0 ? *std::max_element(history, history + n) : history[0];
  const auto next = args.format == 0 ? delayed_scale<E4M3> : delayed_scale<E5M2>;
  scale = next(amax, args.headroom, scale);
  if (history[0] == 0.f) return;
  std::copy_backward(history, history + n - 1, history + n);
  history[0] = 0.f;
}

}  // namespace coat::cpu
