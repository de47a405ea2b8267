// What the kernels of adamw share: who takes which member of a list, and the table of parameters that one launch walks.
#pragma once
#include <vector>

#include "../../contract.h"
#include "../../formula.h"
#include "../../ops.h"
#include "../lanes.cuh"

namespace coat::cuda {

constexpr int kRun = 128;
constexpr int kWarps = 4;  // small blocks, since registers limit how many fit

// One parameter of the list; its blocks are those of the grid from first_block on.
template <class V>
struct Item {
  V m, v;
  uint8_t *p, *master;  // master: null where there is none
  const uint8_t* g;
  int64_t n, first_block;
  bool p_narrow, g_narrow;  // bf16
};

// Whether expanded.cu takes member i of the list: moments in e4m3/x128, parameters and gradients in f32 or bf16, and no
// list of what rounding has lost. The kernel of generic.cuh takes all others.
inline bool is_expanded_case(const adamw_args& args, size_t i) {
  const auto plain = [](const Tensor& t) { return t.format == F32::format() || t.format == BF16::format(); };
  return args.m[i].format == E4M3X128::format() && args.v[i].format == E4M3X128::format() && plain(args.p[i]) &&
         plain(args.g[i]) && args.rounding != kKahan;
}

// The parameters of a call that expanded.cu takes, `elements` of one parameter a block.
template <class V>
struct List {
  std::vector<Item<V>> items;
  int64_t blocks = 0;
  List(const adamw_args& args, int64_t elements) {
    for (size_t i = 0; i < args.p.size(); ++i) {
      const Tensor &p = args.p[i], &g = args.g[i];
      const int64_t n = p.shape.numel();
      if (!is_expanded_case(args, i) || n == 0) continue;
      items.push_back({V(args.m[i]), V(args.v[i]), p.data, args.master.empty() ? nullptr : args.master[i].data, g.data,
                       n, blocks, p.format.dtype == DType::bf16, g.format.dtype == DType::bf16});
      blocks += (n + elements - 1) / elements;
    }
  }
  template <class Kernel>
  void run(Kernel kernel, const adamw_args& args) const {
    if (items.empty()) return;
    const int64_t bytes = static_cast<int64_t>(items.size() * sizeof(Item<V>));
    const Scratch table(bytes);
    copy_in(table.as<uint8_t>(), items.data(), bytes);
    launch("adamw", kernel, static_cast<unsigned>(blocks), kWarps * 32, 0, table.template as<Item<V>>(),
           static_cast<int>(items.size()), AdamW(args), args.clip ? args.clip.as<float>() : nullptr, args.p[0].status);
  }
};

// The members that is_expanded_case names.
void adamw_expanded(const adamw_args& args);

}  // namespace coat::cuda
