// embedding: rows by id, and the gradient summed id by id in the order of the tokens, which are listed by id first.
#include "../ops.h"
#include "lanes.cuh"

namespace coat::cuda {
namespace {

constexpr int kIds = 256;                              // ids that a block lists
constexpr int kIndexThreads = 1024, kIndexTokens = 4;  // threads of it; tokens a thread and step
constexpr int kGroup = 16, kAhead = 8;                 // ids a warp sums, fewer than 32; rows it asks for at once
constexpr int kSumThreads = 256, kSumBlocks = 3;       // blocks a multiprocessor

// One thread a piece of `width` (16 or 1) elements of a row of y. Moves sizeof(w) + sizeof(y) bytes an element.
template <class W, class Y>
__global__ void embedding_forward_kernel(const int32_t* ids, W w, Y y, int64_t M, int64_t N, int64_t V, bool whole,
                                         Status* status) {
  const int64_t width = whole ? 16 : 1, pieces = N / width;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < M * pieces; t += stride) {
    const int64_t m = t / pieces, n = (t - m * pieces) * width, id = ids[m];
    const bool good = id >= 0 && id < V;
    if (!good && n == 0) report(status, kBadId, m, id, V);
    if (whole) {
      float x[16] = {};
      if (good) load16(w, id * N + n, w.open(0), x);
      store16(y, m * N + n, {}, x);
    } else {
      y.store(m * N + n, {}, good ? w.load(id * N + n, w.open(0)) : 0.f);
    }
  }
}

// Tokens sorted by id, those of one id in ascending order: those of id v are tokens[first[v]] to
// tokens[first[v + 1] - 1]. A block lists the tokens of kIds ids: it looks through all ids once to count, and once more
// in steps to list; what lies before its own is counted too, so that no block waits for another.
__global__ void __launch_bounds__(kIndexThreads)
    embedding_backward_kernel_index(const int32_t* ids, uint32_t* first, uint32_t* tokens, int64_t M, int64_t V,
                                    Status* status) {
  constexpr int kWarps = kIndexThreads / 32, kStep = kIndexThreads * kIndexTokens;
  __shared__ uint32_t next[kIds];  // counts of the ids; then where the next token of each goes
  __shared__ uint32_t found[kWarps];
  __shared__ uint32_t listed[kStep];  // the tokens of a step, in order, and their ids
  __shared__ uint16_t id_of[kStep];
  const uint32_t begin = blockIdx.x * kIds, count = static_cast<uint32_t>(min(int64_t{kIds}, V - begin));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < kIds; i += kIndexThreads) next[i] = 0;
  __syncthreads();
  uint32_t before = 0;  // tokens of smaller ids; a negative id is a large number here
#pragma unroll 8
  for (int64_t m = threadIdx.x; m < M; m += kIndexThreads) {
    const int32_t id = ids[m];
    before += static_cast<uint32_t>(id) < begin;
    if (static_cast<uint32_t>(id) - begin < count) atomicAdd(&next[static_cast<uint32_t>(id) - begin], 1u);
    if (blockIdx.x == 0 && (id < 0 || id >= V)) report(status, kBadId, m, id, V);
  }
  before = block_sum(before);
  __syncthreads();
  if (warp == 0) {
    for (int i = lane; i < kIds; i += 32) {
      const uint32_t mine = next[i];
      uint32_t sum = mine;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint32_t left = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += left;
      }
      next[i] = before + sum - mine;
      before += __shfl_sync(0xffffffffu, sum, 31);
      if (i < count) first[begin + i] = next[i];
    }
    if (lane == 0 && begin + count == V) first[V] = before;
  }
  for (int64_t start = 0; start < M; start += kStep) {
    // Token start + (warp * kIndexTokens + j) * 32 + lane. A warp counts what it found, then all list.
    const int64_t base = start + warp * (32 * kIndexTokens) + lane;
    uint32_t local[kIndexTokens], at[kIndexTokens], sum = 0;
#pragma unroll
    for (int j = 0; j < kIndexTokens; ++j)
      local[j] = base + j * 32 < M ? static_cast<uint32_t>(ids[base + j * 32]) - begin : count;
#pragma unroll
    for (int j = 0; j < kIndexTokens; ++j) {
      const uint32_t mine = __ballot_sync(0xffffffffu, local[j] < count);
      at[j] = sum + __popc(mine & ((1u << lane) - 1u));
      sum += __popc(mine);
    }
    if (lane == 0) found[warp] = sum;
    __syncthreads();
    const uint32_t other = lane < kWarps ? found[lane] : 0u;
    const uint32_t total = __reduce_add_sync(0xffffffffu, other);
    const uint32_t place = __reduce_add_sync(0xffffffffu, lane < warp ? other : 0u);
#pragma unroll
    for (int j = 0; j < kIndexTokens; ++j)
      if (local[j] < count) {
        listed[place + at[j]] = static_cast<uint32_t>(base + j * 32);
        id_of[place + at[j]] = static_cast<uint16_t>(local[j]);
      }
    __syncthreads();
    if (warp == 0) {
      for (uint32_t i = lane; i - lane < total; i += 32) {
        const uint32_t mine = i < total ? id_of[i] : kIds;
        const uint32_t same = __match_any_sync(0xffffffffu, mine), rank = __popc(same & ((1u << lane) - 1u));
        const uint32_t to = mine < kIds ? next[mine] + rank : 0u;
        __syncwarp();
        if (mine < kIds) {
          tokens[to] = listed[i];
          if (rank == 0) next[mine] += __popc(same);
        }
        __syncwarp();
      }
    }
  }
}

// A warp sums kGroup neighbouring ids in 32 vectors of columns: it walks through the rows of their tokens, which lie
// one behind the other in `tokens`, kAhead at a time, and writes a row of dw where an id ends. Moves sizeof(dy) bytes
// an element of dy and sizeof(dw) an element of dw.
template <class DY, class DW, bool Whole>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    embedding_backward_kernel(const uint32_t* first, const uint32_t* tokens, DY dy, DW dw, int64_t N, int64_t V,
                              int64_t slices) {
  using In = CodeOf<DY>;
  using Out = CodeOf<DW>;
  constexpr int E = kLane<In, Out>;
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (kSumThreads / 32), units = (V + kGroup - 1) / kGroup * slices;
  for (int64_t unit = int64_t{blockIdx.x} * (kSumThreads / 32) + threadIdx.x / 32; unit < units; unit += warps) {
    const int64_t group = unit / slices, n = ((unit - group * slices) * 32 + lane) * E, left = N - n;
    const int64_t begin = group * kGroup;
    const int count = static_cast<int>(min(int64_t{kGroup}, V - begin));
    const uint32_t edge = first[begin + min(lane, count)];  // lane i: where id begin + i starts
    const uint32_t end = __shfl_sync(0xffffffffu, edge, count);
    int id = 0;
    uint32_t id_end = __shfl_sync(0xffffffffu, edge, 1);
    float sum[E] = {};
    const auto finish = [&] {
      if (left > 0) {
        Lane<Out, E> out;
        out.encode(dw, {}, sum);
        const int64_t to = (begin + id) * N + n;
        if constexpr (Whole)  // one vector, in an instruction that the compiler does not cut up
          __stwb(reinterpret_cast<typename Lane<Out, E>::Vector*>(dw.codes + to), out.vector[0]);
        else
          out.template put<Whole>(dw.codes, to, left);
      }
#pragma unroll
      for (int k = 0; k < E; ++k) sum[k] = 0.f;
      ++id;
      id_end = __shfl_sync(0xffffffffu, edge, id + 1);
    };
    for (uint32_t chunk = __shfl_sync(0xffffffffu, edge, 0); chunk < end; chunk += 32) {
      const uint32_t mine = chunk + lane < end ? tokens[chunk + lane] : 0u;
      for (int start = 0; start < 32 && chunk + start < end; start += kAhead) {
        Lane<In, E> in[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const uint32_t token = __shfl_sync(0xffffffffu, mine, start + u);
          if (chunk + start + u < end && left > 0) in[u].template fetch<Whole>(dy.codes, token * N + n, left);
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          if (chunk + start + u >= end) break;
#pragma unroll 1
          while (chunk + start + u >= id_end) finish();
          float x[E] = {};
          if (left > 0) in[u].decode(dy, {}, x);
#pragma unroll
          for (int k = 0; k < E; ++k) sum[k] += x[k];
        }
      }
    }
#pragma unroll 1
    while (id < count) finish();
  }
}

}  // namespace

void embedding_forward(const embedding_forward_args& args) {
  const int64_t M = args.y.shape.rows(), N = args.y.shape.cols(), V = args.w.shape.rows();
  const bool whole = N % 16 == 0;
  const int64_t work = M * (whole ? N / 16 : N);
  with("w", args.w, Views<F32, BF16>{}, [&](const auto w) {
    with("y", args.y, Views<F32, BF16>{}, [&](const auto y) {
      launch("embedding_forward",
             embedding_forward_kernel<std::remove_const_t<decltype(w)>, std::remove_const_t<decltype(y)>>,
             blocks_for(work, 256), 256, 0, args.ids.as<int32_t>(), w, y, M, N, V, whole, args.ids.status);
    });
  });
}

void embedding_backward(const embedding_backward_args& args) {
  const int64_t M = args.dy.shape.rows(), N = args.dy.shape.cols(), V = args.V;
  if (M > INT32_MAX) fail("shape", "ids", "ids has ", M, " elements and must have at most ", INT32_MAX, " on cuda");
  if (V >= int64_t{1} << 31) fail("value", "V", "V is ", V, " and must be below 2^31");
  const Scratch first((V + 1) * 4), tokens(M * 4);
  launch("embedding_backward", embedding_backward_kernel_index,
         static_cast<unsigned>(std::max<int64_t>(1, (V + kIds - 1) / kIds)), kIndexThreads, 0, args.ids.as<int32_t>(),
         first.as<uint32_t>(), tokens.as<uint32_t>(), M, V, args.ids.status);
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("dw", args.dw, Views<F32, BF16>{}, [&](const auto dw) {
      using DY = std::remove_const_t<decltype(dy)>;
      using DW = std::remove_const_t<decltype(dw)>;
      constexpr int64_t kSlice = 32 * kLane<CodeOf<DY>, CodeOf<DW>>, kWarps = kSumThreads / 32;
      const int64_t slices = (N + kSlice - 1) / kSlice, units = (V + kGroup - 1) / kGroup * slices;
      launch("embedding_backward",
             N % kSlice == 0 ? embedding_backward_kernel<DY, DW, true> : embedding_backward_kernel<DY, DW, false>,
             static_cast<unsigned>(std::min<int64_t>((units + kWarps - 1) / kWarps, 1 << 30)), kSumThreads, 0,
             first.as<uint32_t>(), tokens.as<uint32_t>(), dy, dw, N, V, slices);
    });
  });
}

}  // namespace coat::cuda
