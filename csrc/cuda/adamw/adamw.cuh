// Who takes which member of a list of adamw.
#pragma once
#include "../../contract.h"
#include "../../formula.h"
#include "../../ops.h"
#include "../lanes.cuh"

namespace coat::cuda {

constexpr int kWarps = 4;  // of a block: few, since registers limit how many blocks fit

// Whether expanded.cu takes member i: moments in e4m3/x128, parameters and gradients in f32 or bf16, and no list of
// what rounding has lost. The kernel of generic.cuh takes all others.
bool is_expanded_case(const adamw_args& args, size_t i);

// The members that is_expanded_case names.
void adamw_expanded(const adamw_args& args);

}  // namespace coat::cuda
