// run(): one function a line of ops.def; chooses the backend and names the op in errors.
#include "ops.h"

namespace coat {

#define OP(family, op_name, doc, ...)                                         \
  void run(const op_name##_args& args) {                                      \
    try {                                                                     \
      args.device == Device::cuda ? cuda::op_name(args) : cpu::op_name(args); \
    } catch (Error & error) {                                                 \
      if (error.op.empty()) error.op = #op_name;                              \
      throw;                                                                  \
    }                                                                         \
  }
#include "ops.def"
#undef OP

}  // namespace coat
