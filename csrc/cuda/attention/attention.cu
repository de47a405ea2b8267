// attention on the device: which kernels make it. Quantized qkv is rounded to bf16 in scratch, once.
#include <optional>

#include "attention.cuh"

namespace coat::cuda {
namespace {

void attend(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse, const Tensor& largest = {}) {
  if (attention_forward_tensor(s, qkv, out, lse, largest.as<uint32_t>())) return;
  attention_forward_generic(s, qkv, out, lse);
  if (largest) amax(amax_of(out, largest));
}

// The arguments of backward as the kernels read them: out and lse made again where they are absent.
class Complete {
 public:
  Complete(const attention_backward_args& given, const AttentionSizes& s) : args(given) {
    if (given.qkv.format.scaling != Scaling::none) {
      args.qkv = like(given.qkv, BF16::format(), qkv_);
      convert({Device::cuda, given.qkv, {}, args.qkv});
    }
    if (given.lse) return;
    args.out = like(given.dout, args.qkv.format, out_);
    args.lse = like({F32::format(), {1, {s.B * s.T * s.H}}}, F32::format(), lse_);
    attend(s, args.qkv, args.out, args.lse.as<float>());
  }
  attention_backward_args args;

 private:
  static Tensor like(const Tensor& x, const Format& format, std::optional<Scratch>& memory) {
    Tensor made = x;
    made.format = format;
    memory.emplace(bytes_of(format, x.shape));
    made.data = memory->as<uint8_t>();
    return made;
  }
  std::optional<Scratch> qkv_, out_, lse_;
};

}  // namespace

void attention_forward(const attention_forward_args& args) {
  attend(attention_sizes(args), args.qkv, args.out, args.lse.as<float>(), args.amax);
}

void attention_backward(const attention_backward_args& given) {
  const AttentionSizes s = attention_sizes(given);
  const Complete complete(given, s);
  const attention_backward_args& args = complete.args;
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
  if (args.table) rope(turn_back_of(args));
  if (args.amax) amax(amax_of(args.dqkv, args.amax));
}

}  // namespace coat::cuda
