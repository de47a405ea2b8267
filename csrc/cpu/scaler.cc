// scaler: the largest magnitude of a tensor, and the scale that a tensor carries.
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
    uint32_t seen = largest.load(std::memory_order_relaxed);
    while (seen < most && !largest.compare_exchange_weak(seen, most, std::memory_order_relaxed)) {
    }
  });
  *args.y.as<float>() = float_of(largest);
}

void scale_of(const scale_of_args& args) { *args.y.as<float>() = *args.x.scales<float>(); }

}  // namespace coat::cpu
