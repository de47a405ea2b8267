// adamw for moments that are plain, have one scale a tensor, or codes of maps.
#include "generic.cuh"

namespace coat::cuda::generic {

void run_plain(const AdamW& rule, const Call& call) {
  run_pairs(rule, call,
            Pairs<Pair<F32, F32>, Pair<BF16, BF16>, Pair<BF16, BF16X2>, Pair<E4M3T, F16T>, Pair<D8G256, U8G256>,
                  Pair<D4G128, U4G128>, Pair<E4M3G64, E4M3G64>, Pair<E4M3G256, E4M3G256>>{});
}

}  // namespace coat::cuda::generic
