// What the kernels of attention share: sizes, which rows see each other, and the kernels for any size.
#pragma once
#include "../../contract.h"
#include "../../ops.h"
#include "../device.cuh"

namespace coat::cuda {

// One call. Rows t of a sequence b see each other after causal, window and starts; between rows of wrong starts this
// means nothing, but every bound stays inside the sequence, and a tile's own rows inside its bounds.
struct AttentionSizes {
  int64_t B, T, H, J, D, group, row;  // group: query heads a key/value head; row: elements of a row of qkv
  bool causal;
  int64_t window;  // 0 where it hides nothing
  float scale;
  const int32_t* starts;  // null where a sequence is one document

  __host__ __device__ int64_t q(int64_t h) const { return h * D; }
  __host__ __device__ int64_t k(int64_t j) const { return (H + j) * D; }
  __host__ __device__ int64_t v(int64_t j) const { return (H + J + j) * D; }

  // Rows before from(b, first) share nothing with rows from `first` on, rows after to(last) nothing with rows up to
  // `last`; rows from `at` on are past(b, last, at) when their documents come after that of `last`.
  __device__ int64_t from(int64_t b, int64_t first) const {
    const int64_t near = window > 0 && first >= window ? first - window + 1 : 0;
    return starts ? max(near, min(int64_t{starts[b * T + first]}, first)) : near;
  }
  __device__ int64_t to(int64_t last) const { return window > 0 ? min(T, last + window) : T; }
  __device__ bool past(int64_t b, int64_t last, int64_t at) const {
    return starts && at > last && starts[b * T + at] > last;
  }

  // Where the document of a row begins; rows from T on have none.
  __device__ int32_t start(int64_t b, int64_t t) const { return starts && t < T ? starts[b * T + t] : 0; }
  __device__ bool sees(int64_t query, int32_t query_start, int64_t key, int32_t key_start) const {
    const int64_t back = query - key;
    return query < T && key < T && query_start == key_start && (!causal || back >= 0) &&
           (window == 0 || (back < window && -back < window));
  }
};

template <class Args>
AttentionSizes attention_sizes(const Args& args) {
  const int64_t rows = args.qkv.shape.rows();
  check_heads(rows, args.T, args.H, args.J, args.window);
  if (args.D < 1 || args.D > 256) fail("value", "D", "D is ", args.D, " and must be from 1 to 256 on cuda");
  return {rows / args.T,
          args.T,
          args.H,
          args.J,
          args.D,
          args.H / args.J,
          (args.H + 2 * args.J) * args.D,
          args.causal != 0,
          args.window < args.T ? args.window : 0,
          args.scale,
          args.starts.template as<int32_t>()};
}

// Tensors are f32 or bf16; lse [B T, H].
void attention_forward_generic(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse);
void attention_backward_generic(const AttentionSizes& s, const Tensor& dout, const Tensor& qkv, const Tensor& out,
                                const float* lse, const Tensor& dqkv);

// The same on the tensor cores, where they can: false, and nothing done, where they cannot. They also leave the largest
// magnitude of what they make, and the backward one turns the gradients of q and k back by the table of rope; either
// may be null.
bool attention_forward_tensor(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse,
                              uint32_t* largest);
bool attention_backward_tensor(const AttentionSizes& s, const Tensor& dout, const Tensor& qkv, const Tensor& out,
                               const float* lse, const float* table, const Tensor& dqkv, uint32_t* largest);

}  // namespace coat::cuda
