// lion, by the kernel of generic.cuh.
#include "generic.cuh"

namespace coat::cuda {

void lion(const lion_args& args) {
  generic::run_single(Lion(args), generic::call_of("lion", args, {}, {}, false), generic::SingleViews{});
}

}  // namespace coat::cuda
