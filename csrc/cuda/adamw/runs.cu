// adamw for first moments in runs with a scale, and second moments in runs of any kind.
#include "generic.cuh"

namespace coat::cuda::generic {

void run_runs(const AdamW& rule, const Call& call) {
  run_pairs(
      rule, call,
      Pairs<Pair<E4M3G128, E4M3G128>, Pair<E4M3G128, E4M3X128>, Pair<E4M3G128, E5M2G128>, Pair<E4M3G128, E5M2X128>,
            Pair<E5M2G128, E4M3G128>, Pair<E5M2G128, E4M3X128>, Pair<E5M2G128, E5M2G128>, Pair<E5M2G128, E5M2X128>>{});
}

}  // namespace coat::cuda::generic
