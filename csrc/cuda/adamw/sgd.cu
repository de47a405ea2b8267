// sgd, by the kernel of generic.cuh.
#include "generic.cuh"

namespace coat::cuda {

void sgd(const sgd_args& args) {
  generic::run_single(Sgd(args), generic::call_of("sgd", args, {}, {}, false), generic::SingleViews{});
}

}  // namespace coat::cuda
