// run(): one function a line of ops.def; chooses the backend and names the op in errors.
#include "ops.h"

#include "cuda/device.h"

namespace coat {

#define OP(family, op_name, doc, ...)            \
  void run(const op_name##_args& args) {         \
    try {                                        \
      if (args.device == Device::cpu) {          \
        cpu::op_name(args);                      \
      } else {                                   \
        cuda::op_name(args);                     \
        cuda::launched(#op_name);                \
      }                                          \
    } catch (Error & error) {                    \
      if (error.op.empty()) error.op = #op_name; \
      throw;                                     \
    }                                            \
  }
#include "ops.def"
#undef OP

}  // namespace coat
