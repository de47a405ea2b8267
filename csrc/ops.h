// ops.def as C++: an argument struct a line (`rmsnorm_forward_args`), the op in both backends, run() and visit().
#pragma once
#include <vector>

#include "tensor.h"

namespace coat {

// 1. Argument structs. An absent optional tensor is false.
#define IN(name, formats, dims) Tensor name;
#define OPT_IN(name, formats, dims) Tensor name;
#define INOUT(name, formats, dims) Tensor name;
#define OUT(name, formats, dims) Tensor name;
#define OPT_OUT(name, formats, dims) Tensor name;
#define LIST_IN(name, formats) std::vector<Tensor> name;
#define LIST_INOUT(name, formats) std::vector<Tensor> name;
#define OPT_LIST_IN(name, formats) std::vector<Tensor> name;
#define OPT_LIST_INOUT(name, formats) std::vector<Tensor> name;
#define OPT_LIST_ONES(name, formats) std::vector<Tensor> name;
#define F32(name) float name = 0;
#define I64(name) int64_t name = 0;
#define SEED(name) uint64_t name = 0;
#define ENUM(name, words) int32_t name = 0;
#define OPT_ENUM(name, words) int32_t name = 0;
#define ONLY(names, words)
#define OP(family, name, doc, ...) \
  struct name##_args {             \
    Device device = Device::cpu;   \
    __VA_ARGS__                    \
  };
#include "ops.def"
#undef OP

// 2. The ops of both backends: one missing in a backend's folder does not link.
#define OP(family, name, doc, ...) \
  namespace cpu {                  \
  void name(const name##_args&);   \
  }                                \
  namespace cuda {                 \
  void name(const name##_args&);   \
  }                                \
  void run(const name##_args&);
#include "ops.def"
#undef OP
#undef IN
#undef OPT_IN
#undef INOUT
#undef OUT
#undef OPT_OUT
#undef LIST_IN
#undef LIST_INOUT
#undef OPT_LIST_IN
#undef OPT_LIST_INOUT
#undef OPT_LIST_ONES
#undef F32
#undef I64
#undef SEED
#undef ENUM
#undef OPT_ENUM

// 3. visit(args, f): f(name, value) for every argument in order.
#define IN(name, formats, dims) f(#name, args.name);
#define OPT_IN(name, formats, dims) f(#name, args.name);
#define INOUT(name, formats, dims) f(#name, args.name);
#define OUT(name, formats, dims) f(#name, args.name);
#define OPT_OUT(name, formats, dims) f(#name, args.name);
#define LIST_IN(name, formats) f(#name, args.name);
#define LIST_INOUT(name, formats) f(#name, args.name);
#define OPT_LIST_IN(name, formats) f(#name, args.name);
#define OPT_LIST_INOUT(name, formats) f(#name, args.name);
#define OPT_LIST_ONES(name, formats) f(#name, args.name);
#define F32(name) f(#name, args.name);
#define I64(name) f(#name, args.name);
#define SEED(name) f(#name, args.name);
#define ENUM(name, words) f(#name, args.name);
#define OPT_ENUM(name, words) f(#name, args.name);
#define OP(family, name, doc, ...)       \
  template <class F>                     \
  void visit(name##_args& args, F&& f) { \
    __VA_ARGS__                          \
  }
#include "ops.def"
#undef OP
#undef IN
#undef OPT_IN
#undef INOUT
#undef OUT
#undef OPT_OUT
#undef LIST_IN
#undef LIST_INOUT
#undef OPT_LIST_IN
#undef OPT_LIST_INOUT
#undef OPT_LIST_ONES
#undef F32
#undef I64
#undef SEED
#undef ENUM
#undef OPT_ENUM
#undef ONLY

// What ends an op where it is not part of the kernels: turning q and k, or their gradients back, and measuring x into
// y.
template <class Args>
rope_args turn_of(const Args& args, const Tensor& qkv, int64_t direction) {
  rope_args turn;
  turn.device = args.device;
  turn.table = args.table;
  turn.qkv = qkv;
  turn.starts = args.starts;
  turn.H = args.H;
  turn.J = args.J;
  turn.D = args.D;
  turn.direction = direction;
  return turn;
}
amax_args amax_of(const Tensor& x, const Tensor& y);

// What attention_backward begins with in both backends: its arguments with quantized qkv rounded to bf16, and out and
// lse made again by attend(arguments) where they are absent. room(bytes) gives memory that outlives them.
template <class Room, class Convert, class Attend>
attention_backward_args completed(attention_backward_args args, Room&& room, Convert&& convert, Attend&& attend) {
  const auto made = [&](const Format& format, const Shape& shape) {
    Tensor x = args.dout;
    x.format = format;
    x.shape = shape;
    x.data = room(bytes_of(format, shape));
    return x;
  };
  if (args.qkv.format.scaling != Scaling::none) {
    const Tensor plain = made({DType::bf16, Scaling::none, 0}, args.qkv.shape);
    convert(args.qkv, plain);
    args.qkv = plain;
  }
  if (!args.lse) {
    args.out = made(args.qkv.format, args.dout.shape);
    args.lse = made({DType::f32, Scaling::none, 0}, {1, {args.dout.shape.rows() * args.H}});
    attend(args);
  }
  return args;
}

}  // namespace coat
