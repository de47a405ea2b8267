// matmul: y = a b^T, a b and a^T b: on tensor cores for bf16 and FP8, in FP32 FMA for f32.
#include "../../ops.h"
#include "products.cuh"

namespace coat::cuda {
namespace {

void multiply(const char* name, Form form, const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& y) {
  const int64_t K = a.shape.dims[form == Form::tn ? 0 : 1];
  const Call call{name, form, a, b, bias, y, y.shape.dims[0], y.shape.dims[1], K};
  if (call.M == 0 || call.N == 0 || multiply_by_cublaslt(call)) return;
  switch (a.format.dtype) {
    case DType::f32:
      return multiply_f32(call);
    case DType::bf16:
      return multiply_bf16(call);
    case DType::e4m3:
      return multiply_e4m3(call);
    default:
      return multiply_e5m2(call);
  }
}

}  // namespace

void matmul_nt(const matmul_nt_args& args) { multiply("matmul_nt", Form::nt, args.a, args.b, args.bias, args.y); }
void matmul_nn(const matmul_nn_args& args) { multiply("matmul_nn", Form::nn, args.a, args.b, {}, args.y); }
void matmul_tn(const matmul_tn_args& args) { multiply("matmul_tn", Form::tn, args.a, args.b, {}, args.y); }

}  // namespace coat::cuda
