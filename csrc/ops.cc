// run(): one function a line of ops.def; chooses the backend and names the op in errors.
#include "ops.h"

#include "graph.h"

namespace coat {

namespace {

template <class Arguments>
void run_named(const char* name, void (*op)(const Arguments&), const Arguments& args) {
  try {
    op(args);
  } catch (Error& error) {
    if (error.op.empty()) error.op = name;
    throw;
  }
}

}  // namespace

#define OP(family, op_name, doc, ...)                                     \
  void run(const op_name##_args& args) {                                  \
    if (Graph::records(Device::cpu) && args.device == Device::cpu) {      \
      Graph::on_cpu([args] { run_named(#op_name, cpu::op_name, args); }); \
    } else if (args.device == Device::cpu) {                              \
      run_named(#op_name, cpu::op_name, args);                            \
    } else {                                                              \
      run_named(#op_name, cuda::op_name, args);                           \
      cuda::launched(#op_name);                                           \
    }                                                                     \
  }
#include "ops.def"
#undef OP

amax_args amax_of(const Tensor& x, const Tensor& y) {
  amax_args measure;
  measure.device = x.device;
  measure.x = x;
  measure.y = y;
  return measure;
}

}  // namespace coat
