// attention, forward, on the tensor cores.
#include "tensor.cuh"

namespace coat::cuda {
namespace {

__global__ void __launch_bounds__(256)
    attention_ends_kernel(const int32_t* starts, int64_t T, int64_t rows, int32_t* ends) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= rows) return;
  const int64_t row = i % T;
  const int32_t* of = starts + (i - row);
  int64_t low = row, high = T;  // the next document begins in (low, high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (of[middle] > row ? high : low) = middle;
  }
  ends[i] = static_cast<int32_t>(high - 1);
}

// A block works on 128 queries, 64 a warpgroup, against tiles of keys.
template <int Head>
struct ForwardShape {
  static constexpr int kKeys = Head == 256 ? 64 : 128, kSlots = 2;
  static constexpr int kQuerySlots = Head == 256 ? 1 : 2;
  using Own = HeadTile<Head, 64>;      // queries of a warpgroup
  using Keys = HeadTile<Head, kKeys>;  // keys, or values
  static constexpr uint32_t kQueryBytes = 2 * Own::kBytes;
  static constexpr uint32_t kShared = kQuerySlots * kQueryBytes + 2 * kSlots * Keys::kBytes + 1024;
};

// What a lane knows of the two rows that it holds: largest score so far, sum of the probabilities of its own columns.
struct Softmax {
  float top[2] = {-kInf, -kInf}, total[2] = {0.f, 0.f};

  // Scores to probabilities, in units of the new maximum; `shrink`: what the old units were in new ones.
  template <int Count>
  __device__ void operator()(float (&s)[Count], float exponent, float (&shrink)[2]) {
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      float most = top[down];
#pragma unroll
      for (int i = 0; i < Count; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * down], s[i + 2 * down + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float zero = most == -kInf ? 0.f : most * exponent;  // a row that has seen nothing yet
      shrink[down] = exp2_near(fmaf(top[down], exponent, -zero));
      top[down] = most;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Count; i += 4)
#pragma unroll
        for (int k = 2 * down; k < 2 * down + 2; ++k) {
          s[i + k] = exp2_near(fmaf(s[i + k], exponent, -zero));
          sum += s[i + k];
        }
      total[down] = fmaf(total[down], shrink[down], sum);
    }
  }
};

// One thread fetches queries, keys and values of one piece of work after the other; two warpgroups multiply, take the
// softmax of tile after tile of keys, and multiply again: the values of a tile while the scores of the next one are
// made. Bytes per query and head: 2 D read, 2 D written, keys and values from L2.
template <int Head>
__global__ void __launch_bounds__(384, 1)
    attention_forward_kernel_tensor(const __grid_constant__ CUtensorMap q_map,
                                    const __grid_constant__ CUtensorMap kv_map,
                                    const __grid_constant__ CUtensorMap out_map, const AttentionProblem p,
                                    const Work work, float* lse) {
  using Shape = ForwardShape<Head>;
  using Own = typename Shape::Own;
  using Keys = typename Shape::Keys;
  constexpr int kKeys = Shape::kKeys, kSlots = Shape::kSlots, kQuerySlots = Shape::kQuerySlots;
  extern __shared__ uint8_t raw[];
  __shared__ alignas(8) uint64_t barriers[2 * kQuerySlots + 4 * kSlots];
  __shared__ AttentionTask tasks[kQuerySlots];
  const uint32_t queries = (shared_address(raw) + 1023) / 1024 * 1024;
  const uint32_t keys = queries + kQuerySlots * Shape::kQueryBytes, values = keys + kSlots * Keys::kBytes;
  const uint32_t q_full = shared_address(barriers), q_empty = q_full + 8 * kQuerySlots;
  const uint32_t k_full = q_empty + 8 * kQuerySlots, k_empty = k_full + 8 * kSlots;
  const uint32_t v_full = k_empty + 8 * kSlots, v_empty = v_full + 8 * kSlots;
  if (threadIdx.x == 0) {
    barriers_of_ring(q_full, kQuerySlots, 8);
    barriers_of_ring(k_full, kSlots, 2);
    barriers_of_ring(v_full, kSlots, 2);
    barrier_init_done();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      Ring<kQuerySlots> q_ring;
      Ring<kSlots> ring;
      for (unsigned index = work.next();;) {
        barrier_wait(q_empty + 8 * q_ring.slot, q_ring.phase ^ 1);
        if (index >= work.count) {
          tasks[q_ring.slot].unit = -1;
          barrier_expect(q_full + 8 * q_ring.slot, 0);
          break;
        }
        const AttentionTask task = task_of<false>(p, index, p.group, kKeys);
        tasks[q_ring.slot] = task;
        const int kv = task.unit - task.sequence * p.J;
        barrier_expect(q_full + 8 * q_ring.slot, Shape::kQueryBytes);
#pragma unroll
        for (int g = 0; g < 2; ++g)
          Own::load(q_map, queries + q_ring.slot * Shape::kQueryBytes + g * Own::kBytes, q_full + 8 * q_ring.slot,
                    task.sequence, task.first + 64 * g, task.head);
        q_ring.next();
        index = work.next();
        for (int tile = task.against.last; tile >= task.against.first; --tile) {
          const uint32_t at = ring.slot * Keys::kBytes, barrier = 8 * ring.slot;
          barrier_wait(k_empty + barrier, ring.phase ^ 1);
          barrier_expect(k_full + barrier, Keys::kBytes);
          Keys::load(kv_map, keys + at, k_full + barrier, task.sequence, tile * kKeys, p.H + kv);
          barrier_wait(v_empty + barrier, ring.phase ^ 1);
          barrier_expect(v_full + barrier, Keys::kBytes);
          Keys::load(kv_map, values + at, v_full + barrier, task.sequence, tile * kKeys, p.H + p.J + kv);
          ring.next();
        }
      }
    }
  } else {
    take_registers<232>();
    const int group = warpgroup() - 1, thread = static_cast<int>(threadIdx.x) % 128;
    Ring<kQuerySlots> q_ring;
    Ring<kSlots> k_ring, v_ring;
    float s[kKeys / 2], out[Head / 2];
    uint32_t codes[kKeys / 4];
    const Turns turns(group);
    const auto release = [&](uint32_t empty, int slot) {
      if (thread == 0) barrier_arrive(empty + 8 * slot, 0);
    };
    while (true) {
      barrier_wait(q_full + 8 * q_ring.slot, q_ring.phase);
      const AttentionTask task = tasks[q_ring.slot];
      if (task.unit < 0) break;
      const int first = task.first + 64 * group;
      Span seen[2];
#pragma unroll
      for (int down = 0; down < 2; ++down) seen[down] = visible<false>(p, task.sequence, first + sum_row(thread, down));
      const Span plain = tasks[q_ring.slot].plain[group];
      const uint32_t q_at = queries + q_ring.slot * Shape::kQueryBytes + group * Own::kBytes;
      Softmax softmax;
      float shrink[2];
      const auto score = [&] {
        barrier_wait(k_full + 8 * k_ring.slot, k_ring.phase);
        const uint64_t q_lines = Own::along(q_at), k_lines = Keys::along(keys + k_ring.slot * Keys::kBytes);
        hold(s);
        products_begin();
#pragma unroll
        for (int k = 0; k < Head / 16; ++k)
          multiply<true, true>(s, Own::along(q_lines, k), Keys::along(k_lines, k), k > 0);
        products_commit();
      };
      const auto mix = [&](bool adds) {
        barrier_wait(v_full + 8 * v_ring.slot, v_ring.phase);
        const uint64_t v_lines = Keys::across(values + v_ring.slot * Keys::kBytes);
        hold(out);
        products_begin();
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
          multiply_held<false>(out, &codes[4 * k], Keys::across(v_lines, k), k > 0 || adds);
        products_commit();
      };
      const auto mask = [&](int tile) {
        const int key = tile * kKeys;
        if (key >= plain.first && key + kKeys - 1 <= plain.last) return;
#pragma unroll
        for (int down = 0; down < 2; ++down) hide(s, down, seen[down], key, thread, -kInf);
      };

      turns.take();
      score();
      turns.end();
      products_wait<0>();
      hold(s);
      release(k_empty, k_ring.slot);
      k_ring.next();
      mask(task.against.last);
      softmax(s, p.exponent, shrink);
      round_sums(s, codes);
      for (int tile = task.against.last - 1; tile >= task.against.first; --tile) {
        turns.take();
        score();
        mix(tile < task.against.last - 1);
        turns.end();
        products_wait<1>();
        hold(s);
        release(k_empty, k_ring.slot);
        k_ring.next();
        mask(tile);
        softmax(s, p.exponent, shrink);
        products_wait<0>();
        hold(out);
        release(v_empty, v_ring.slot);
        v_ring.next();
#pragma unroll
        for (int i = 0; i < Head / 2; ++i) out[i] *= shrink[i / 2 % 2];
        round_sums(s, codes);
      }
      mix(task.against.last > task.against.first);
      products_wait<0>();
      hold(out);
      release(v_empty, v_ring.slot);
      v_ring.next();

#pragma unroll
      for (int down = 0; down < 2; ++down) {
        float total = softmax.total[down];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const float inverse = 1.f / total;
#pragma unroll
        for (int i = 2 * down; i < Head / 2; i += 4) out[i] *= inverse, out[i + 1] *= inverse;
        const int64_t q = first + sum_row(thread, down);
        if (thread % 4 == 0 && q < p.T)
          lse[(int64_t{task.sequence} * p.T + q) * p.H + task.head] =
              (softmax.top[down] * p.exponent + log2_near(total)) * kLn2;
      }
      if (p.largest) leave_largest(p, first, thread, out);
      send_sums<Head>(out, q_at, Own::kTile, out_map, task.sequence, first, task.head, thread, 1 + group);
      if (thread == 0) stores_have_read();
      __syncwarp();  // all lanes have read the task: one of every warp says so
      if (thread % 32 == 0) barrier_arrive(q_empty + 8 * q_ring.slot, 0);
      q_ring.next();
    }
    if (thread == 0) stores_done();
  }
}

template <int Head>
void start(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse, uint32_t* largest) {
  using Shape = ForwardShape<Head>;
  constexpr const char* kName = "attention_forward";
  const DocumentEnds ends(kName, s, !s.causal);
  const AttentionProblem p = problem_of(s, ends.get(), 16 << 20, nullptr, largest);
  const int64_t heads = s.H + 2 * s.J;
  const auto map_of = [&](const Tensor& x, int64_t heads, int lines) {
    return tensor_map_of_heads(kName, x.data, s.B, s.T, heads, s.D, heads * s.D, lines);
  };
  const Work work{counters(), static_cast<unsigned>(p.units) * p.group * p.tiles};
  launch(kName, attention_forward_kernel_tensor<Head>, work.blocks(), 384, Shape::kShared, map_of(qkv, heads, 64),
         map_of(qkv, heads, Shape::kKeys), map_of(out, s.H, 64), p, work, lse);
}

}  // namespace

DocumentEnds::DocumentEnds(const char* op, const AttentionSizes& s, bool wanted) {
  if (!s.starts || !wanted) return;
  const int64_t rows = s.B * s.T;
  room_.emplace(rows * 4);
  launch(op, attention_ends_kernel, static_cast<unsigned>((rows + 255) / 256), 256, 0, s.starts, s.T, rows,
         room_->as<int32_t>());
}

bool attention_forward_tensor(const AttentionSizes& s, const Tensor& qkv, const Tensor& out, float* lse,
                              uint32_t* largest) {
  if (!fits_tensor(s) || qkv.format.dtype != DType::bf16 || out.format.dtype != DType::bf16) return false;
  if (largest) check(cudaMemsetAsync(largest, 0, sizeof(uint32_t), stream()), "attention_forward");
  if (s.D <= 64)
    start<64>(s, qkv, out, lse, largest);
  else if (s.D <= 128)
    start<128>(s, qkv, out, lse, largest);
  else
    start<256>(s, qkv, out, lse, largest);
  return true;
}

}  // namespace coat::cuda
