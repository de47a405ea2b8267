// Products of f32 operands.
#include "fma.cuh"
#include "products.cuh"

namespace coat::cuda {
namespace {

template <bool AlongK>
Operand operand(const Lines& x) {
  const int64_t step = kFmaThreads * 4 / (AlongK ? kFmaDepth : kTile) * x.stride * 4;
  return {x.codes, AlongK ? x.lines : x.width, x.stride, step, kFmaDepth * (AlongK ? 1 : x.stride) * 4};
}

template <bool AlongA, bool AlongB, class... Y>
void multiply(const Call& call, Views<Y...> list) {
  std::optional<Scratch> rooms[2];
  const int64_t steps = (call.K + kFmaDepth - 1) / kFmaDepth;
  const FmaProduct p{operand<AlongA>(lines_of(call.name, call.a, 4, rooms[0])),
                     operand<AlongB>(lines_of(call.name, call.b, 4, rooms[1])), call.result(), static_cast<int>(steps),
                     static_cast<int>(call.K == 0 ? 0 : call.K - (steps - 1) * kFmaDepth)};
  const auto tiles = static_cast<unsigned>(((call.M + kTile - 1) / kTile) * ((call.N + kTile - 1) / kTile));
  with("y", call.y, list, [&](const auto view) {
    using V = std::remove_const_t<decltype(view)>;
    launch(call.name, matmul_kernel_fma<AlongA, AlongB, V>, tiles, kFmaThreads, 0, p, view);
  });
}

}  // namespace

void multiply_f32(const Call& call) {
  switch (call.form) {
    case Form::nt:
      return multiply<true, true>(call, Views<F32, BF16, E4M3G16>{});
    case Form::nn:
      return multiply<true, false>(call, Views<F32, BF16>{});
    case Form::tn:
      return multiply<false, false>(call, Views<F32, BF16>{});
  }
}

}  // namespace coat::cuda
