// layernorm on the device, with or without weight and bias.
#include "../ops.h"
#include "norms_backward.cuh"

namespace coat::cuda {

void layernorm_forward(const layernorm_forward_args& args) {
  check_row_not_empty(args.x);
  norm_forward<true>("layernorm_forward", args,
                     Norm{Vector(args.w, 1.f), Vector(args.b), args.mean.as<float>(), args.rstd.as<float>(), args.eps,
                          per_column(args.x.shape.cols())});
}

void layernorm_backward(const layernorm_backward_args& args) {
  norm_backward<true>("layernorm_backward", args,
                      Norm{Vector(args.w, 1.f), Vector(args.w), args.mean.as<float>(), args.rstd.as<float>(), 0.f,
                           per_column(args.x.shape.cols())},
                      args.dw, args.db);
}

}  // namespace coat::cuda
