// adamw for first moments in expanded runs: all pairs that expanded.cu has not.
#include "generic.cuh"

namespace coat::cuda::generic {

void run_expanded(const AdamW& rule, const Call& call) {
  run_pairs(
      rule, call,
      Pairs<Pair<E4M3X128, E4M3G128>, Pair<E4M3X128, E4M3X128>, Pair<E4M3X128, E5M2G128>, Pair<E4M3X128, E5M2X128>,
            Pair<E5M2X128, E4M3G128>, Pair<E5M2X128, E4M3X128>, Pair<E5M2X128, E5M2G128>, Pair<E5M2X128, E5M2X128>,
            Pair<E4M3X64, E4M3X64>, Pair<E4M3X256, E4M3X256>>{});
}

}  // namespace coat::cuda::generic
