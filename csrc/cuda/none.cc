// Stands in for the CUDA backend when it is not compiled in: the whole list, each entry refuses.
#include "../ops.h"

namespace coat::cuda {

#define OP(family, name, doc, ...)                                                                    \
  void name(const name##_args&) {                                                                     \
    fail("no_cuda", "device",                                                                         \
         "this build of coat-fp8 has no CUDA backend: use device 'cpu', or build with COAT_CUDA=on"); \
  }
#include "../ops.def"
#undef OP

}  // namespace coat::cuda
