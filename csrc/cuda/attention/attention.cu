// attention on the device: which kernels make it. Quantized inputs are rounded to bf16 in scratch, once.
#include <optional>

#include "attention.cuh"

namespace coat::cuda {
namespace {

// A tensor as the kernels read it.
class Plainly {
 public:
  explicit Plainly(const Tensor& x) : tensor(x) {
    if (x.format.scaling == Scaling::none) return;
    memory_.emplace(x.shape.numel() * 2);
    tensor.format = BF16::format();
    tensor.data = memory_->as<uint8_t>();
    convert_args args;
    args.device = x.device;
    args.x = x;
    args.y = tensor;
    convert(args);
  }
  Tensor tensor;

 private:
  std::optional<Scratch> memory_;
};

}  // namespace

void attention_forward(const attention_forward_args& args) {
  const AttentionSizes s = attention_sizes(args);
  float* lse = args.lse.as<float>();
  if (attention_forward_tensor(s, args.qkv, args.out, lse, args.amax.as<uint32_t>())) return;
  attention_forward_generic(s, args.qkv, args.out, lse);
  if (args.amax) amax(amax_of(args.out, args.amax));
}

void attention_backward(const attention_backward_args& args) {
  const AttentionSizes s = attention_sizes(args);
  const Plainly qkv(args.qkv), out(args.out);
  std::optional<Scratch> made;
  if (!args.lse) {
    made.emplace(s.B * s.T * s.H * int64_t{sizeof(float)});
    if (!attention_lse_tensor(s, qkv.tensor, made->as<float>()))
      attention_lse_generic(s, qkv.tensor, made->as<float>());
  }
  const float* lse = made ? made->as<float>() : args.lse.as<float>();
  if (args.table) check_rotation(args.D, -1);
  // heads that fill their tiles are turned and measured on the way out
  const bool whole = !args.table || s.D == 64 || s.D == 128;
  const float* table = whole ? args.table.as<float>() : nullptr;
  uint32_t* largest = whole ? args.amax.as<uint32_t>() : nullptr;
  if (attention_backward_tensor(s, args.dout, qkv.tensor, out.tensor, lse, table, args.dqkv, largest)) {
    if (whole) return;
  } else {
    attention_backward_generic(s, args.dout, qkv.tensor, out.tensor, lse, args.dqkv);
  }
  if (args.table) rope(turn_back_of(args));
  if (args.amax) amax(amax_of(args.dqkv, args.amax));
}

}  // namespace coat::cuda
