// matmul: y = a b^T, a b and a^T b: on tensor cores for bf16 and FP8, in FP32 FMA for f32.
#include "../../contract.h"
#include "../../ops.h"
#include "products.cuh"

namespace coat::cuda {
namespace {

void multiply(const Call& call) {
  if (call.amax) check(cudaMemsetAsync(call.amax.data, 0, sizeof(uint32_t), stream()), call.name);
  if (call.into && call.K == 0) return;
  if (call.M == 0 || call.N == 0 || (!call.turn.table && multiply_by_cublaslt(call))) return;
  if (!call.promotes) return multiply_unpromoted(call);
  if (call.a.format.dtype == DType::bf16 || call.b.format.dtype == DType::bf16) return multiply_bf16(call);
  switch (call.a.format.dtype) {
    case DType::f32:
      return multiply_f32(call);
    case DType::e4m3:
      if (call.b.format.scaling == Scaling::block) return multiply_runs_by_blocks(call);
      if (call.b.format.run == 128) return multiply_runs_by_runs(call);
      return multiply_e4m3(call);
    default:
      return multiply_e5m2(call);
  }
}

template <class Args>
Call call_of(const char* name, Form form, const Args& args) {
  constexpr bool into = !requires { args.amax; };
  Call call{name, form, args.a, args.b, {}, args.y, {}, into};
  if constexpr (requires { args.bias; }) call.bias = args.bias;
  if constexpr (requires { args.accumulate; }) {
    check_accumulate(args.accumulate, args.a, args.b);
    call.promotes = args.accumulate == kSplit;
  }
  if constexpr (!into) {
    call.amax = args.amax;
  } else {
    check_apart("a", args.y, args.a);
    check_apart("b", args.y, args.b);
  }
  call.M = args.y.shape.dims[0];
  call.N = args.y.shape.dims[1];
  call.K = args.a.shape.dims[form == Form::tn ? 0 : 1];
  return call;
}

}  // namespace

void matmul_nt(const matmul_nt_args& args) { multiply(call_of("matmul_nt", Form::nt, args)); }

// Where lanes do not hold the pairs, turned by the kernel of rope before y is rounded.
void matmul_nt_rope(const matmul_nt_rope_args& args) {
  check_rotation(args.D, 1);
  check_accumulate(args.accumulate, args.a, args.b);
  const char* name = "matmul_nt_rope";
  Call call{name, Form::nt, args.a, args.b, args.bias, args.y, {}, false};
  call.M = args.y.shape.rows();
  call.N = args.y.shape.cols();
  call.K = args.a.shape.cols();
  call.promotes = args.accumulate == kSplit;
  if ((args.D == 64 || args.D == 128) && call.K > 0) {
    call.turn = {args.table.as<float>(), args.starts.as<int32_t>(), args.table.shape.rows(), (args.H + args.J) * args.D,
                 static_cast<int>(args.D)};
    return multiply(call);
  }
  const Scratch room(call.M * call.N * static_cast<int64_t>(sizeof(float)));
  call.y.format = F32::format();
  call.y.data = room.as<uint8_t>();
  multiply(call);
  rope(turn_of(args, call.y, 1));
  convert({Device::cuda, call.y, {}, args.y});
}

void matmul_nn(const matmul_nn_args& args) { multiply(call_of("matmul_nn", Form::nn, args)); }
void matmul_tn(const matmul_tn_args& args) { multiply(call_of("matmul_tn", Form::tn, args)); }
void matmul_nt_into(const matmul_nt_into_args& args) { multiply(call_of("matmul_nt_into", Form::nt, args)); }
void matmul_nn_into(const matmul_nn_into_args& args) { multiply(call_of("matmul_nn_into", Form::nn, args)); }
void matmul_tn_into(const matmul_tn_into_args& args) { multiply(call_of("matmul_tn_into", Form::tn, args)); }

}  // namespace coat::cuda
