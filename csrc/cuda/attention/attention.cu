// attention on the device: which kernels make it. Quantized qkv is rounded to bf16 in scratch, once.
#include <list>

#include "attention.cuh"

namespace coat::cuda {
namespace {

void attend(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse, const Tensor& largest = {}) {
  if (attention_forward_tensor(s, qkv, out, lse, largest.as<uint32_t>())) return;
  attention_forward_generic(s, qkv, out, lse);
  if (largest) amax(amax_of(out, largest));
}

}  // namespace

void attention_forward(const attention_forward_args& args) {
  attend(attention_sizes(args), args.qkv, args.out, args.lse.as<float>(), args.amax);
}

void attention_backward(const attention_backward_args& given) {
  const AttentionSizes s = attention_sizes(given);
  std::list<Scratch> rooms;
  const attention_backward_args args = completed(
      given, [&](int64_t bytes) { return rooms.emplace_back(bytes).as<uint8_t>(); },
      [](const Tensor& x, const Tensor& y) {
        convert({Device::cuda, x, {}, y});
      },
      [&](const attention_backward_args& made) { attend(s, made.qkv, made.out, made.lse.as<float>()); });
  const float* lse = args.lse.as<float>();
  if (args.table) check_rotation(args.D, -1);
  // heads that fill their tiles are turned and measured on the way out
  const bool whole = !args.table || s.D == 64 || s.D == 128;
  const float* table = whole ? args.table.as<float>() : nullptr;
  uint32_t* largest = whole ? args.amax.as<uint32_t>() : nullptr;
  if (attention_backward_tensor(s, args.dout, args.qkv, args.out, lse, table, args.dqkv, largest)) {
    if (whole) return;
  } else {
    attention_backward_generic(s, args.dout, args.qkv, args.out, lse, args.dqkv);
  }
  if (args.table) rope(turn_of(args, args.dqkv, -1));
  if (args.amax) amax(amax_of(args.dqkv, args.amax));
}

}  // namespace coat::cuda
