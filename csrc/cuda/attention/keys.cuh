// attention, backward: the kernel of the gradients of keys and values.
#pragma once
#include "statistics.cuh"

namespace coat::cuda {

// A block works on 128 keys, 64 a warpgroup, against tiles of 64 queries.
template <int Head>
struct KeysShape {
  static constexpr int kQueries = 64, kOwnSlots = Head == 256 ? 1 : 2, kSlots = Head == 256 ? 1 : 3;
  using Own = HeadTile<Head, 64>;  // keys, or values, of a warpgroup
  using Queries = HeadTile<Head, kQueries>;
  static constexpr uint32_t kOwnBytes = 4 * Own::kBytes;  // keys and values of both
  static constexpr uint32_t kStatistics = 8 * kQueries, kSlot = 2 * Queries::kBytes;
  static constexpr uint32_t kShared = kOwnSlots * kOwnBytes + kSlots * (kSlot + kStatistics) + 1024;
};

// One thread fetches the keys and values of a piece of work and then tile after tile of queries, of gradients of the
// output and of statistics, of all heads that share the keys. Two warpgroups make the scores of their keys against the
// queries, turned: keys are rows, so that probabilities and their gradients are operands as they come out of the tensor
// cores. Wants: 1 the gradient of values, 2 of keys, 3 both. Bytes per key and head: 4 D read, 4 D written, the rest
// from L2.
template <int Head, int Wants>
__global__ void __launch_bounds__(384, 1)
    attention_backward_kernel_keys(const __grid_constant__ CUtensorMap qkv_map,
                                   const __grid_constant__ CUtensorMap dout_map,
                                   const __grid_constant__ CUtensorMap dqkv_map, const AttentionProblem p,
                                   const Work work, const Statistics statistics) {
  using Shape = KeysShape<Head>;
  using Own = typename Shape::Own;
  using Queries = typename Shape::Queries;
  constexpr int kQueries = Shape::kQueries, kSlots = Shape::kSlots, kOwnSlots = Shape::kOwnSlots;
  constexpr bool kWantsV = Wants & 1, kWantsK = Wants & 2;
  extern __shared__ uint8_t raw[];
  __shared__ alignas(8) uint64_t barriers[2 * kOwnSlots + 2 * kSlots];
  __shared__ AttentionTask tasks[kOwnSlots];
  __shared__ int places[kSlots];  // first query of the tile in the slot
  const uint32_t owns = (shared_address(raw) + 1023) / 1024 * 1024, slots = owns + kOwnSlots * Shape::kOwnBytes;
  const uint32_t numbers = slots + kSlots * Shape::kSlot;
  const uint32_t own_full = shared_address(barriers), own_empty = own_full + 8 * kOwnSlots;
  const uint32_t full = own_empty + 8 * kOwnSlots, empty = full + 8 * kSlots;
  if (threadIdx.x == 0) {
    barriers_of_ring(own_full, kOwnSlots, 8);
    barriers_of_ring(full, kSlots, 8);
    barrier_init_done();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      Ring<kOwnSlots> own;
      Ring<kSlots> ring;
      for (unsigned index = work.next();;) {
        barrier_wait(own_empty + 8 * own.slot, own.phase ^ 1);
        if (index >= work.count) {
          tasks[own.slot].unit = -1;
          barrier_expect(own_full + 8 * own.slot, 0);
          break;
        }
        tasks[own.slot] = task_of<true>(p, index, 1, kQueries);
        const volatile AttentionTask& task = tasks[own.slot];
        const uint32_t at = owns + own.slot * Shape::kOwnBytes, done = own_full + 8 * own.slot;
        barrier_expect(done, Shape::kOwnBytes);
#pragma unroll
        for (int part = 0; part < 4; ++part)  // keys of both warpgroups, values of both
          Own::load(qkv_map, at + part * Own::kBytes, done, task.sequence, task.first + part % 2 * 64,
                    p.H + part / 2 * p.J + task.head);
        index = work.next();
        for (int head = task.head * p.group; head < (task.head + 1) * p.group; ++head) {
          for (int tile = task.against.first; tile <= task.against.last; ++tile) {
            const uint32_t to = slots + ring.slot * Shape::kSlot, barrier = full + 8 * ring.slot;
            const uint32_t number = numbers + ring.slot * Shape::kStatistics;
            barrier_wait(empty + 8 * ring.slot, ring.phase ^ 1);
            places[ring.slot] = tile * kQueries;
            barrier_expect(barrier, Shape::kSlot + Shape::kStatistics);
            Queries::load(qkv_map, to, barrier, task.sequence, tile * kQueries, head);
            Queries::load(dout_map, to + Queries::kBytes, barrier, task.sequence, tile * kQueries, head);
            load_bytes(statistics.of(p, task.sequence, head, tile), number, barrier, Shape::kStatistics);
            ring.next();
          }
        }
        own.next();
      }
    }
  } else {
    take_registers<232>();
    const int group = warpgroup() - 1;
    Ring<kOwnSlots> own;
    Ring<kSlots> ring;
    float dk[kWantsK ? Head / 2 : 2], dv[kWantsV ? Head / 2 : 2], s[kQueries / 2], ds[kQueries / 2];
    uint32_t codes[kQueries / 4], dcodes[kQueries / 4];
    // what all lanes have read of shared memory is free: one of every warp says so
    const auto release = [&](uint32_t barrier) {
      __syncwarp();
      if (thread_again() % 32 == 0) barrier_arrive(barrier, 0);
    };
    while (true) {
      barrier_wait(own_full + 8 * own.slot, own.phase);
      // read again wherever it is wanted: registers are short
      const volatile AttentionTask& task = tasks[own.slot];
      if (task.unit < 0) break;
      const uint32_t k_at = owns + own.slot * Shape::kOwnBytes + group * Own::kBytes, v_at = k_at + 2 * Own::kBytes;
      bool adds = false;
      for (int left = p.group * (task.against.last - task.against.first + 1); left > 0; --left) {
        const uint32_t q_at = slots + ring.slot * Shape::kSlot, dout_at = q_at + Queries::kBytes;
        const uint32_t number =
            numbers + ring.slot * Shape::kStatistics + thread_again() % 4 * 8;  // of this lane's columns
        barrier_wait(full + 8 * ring.slot, ring.phase);
        // what shared memory holds is read before products are begun: behind them it would wait
        float2 of[kQueries / 8];
#pragma unroll
        for (int i = 0; i < kQueries / 8; ++i) of[i] = get_shared(number + 32 * i);
        const int q = *const_cast<volatile int*>(&places[ring.slot]);
        const bool hides = q < task.plain[group].first || q + kQueries - 1 > task.plain[group].last;
        const uint64_t k_lines = Own::along(k_at), v_lines = Own::along(v_at);
        const uint64_t q_lines = Queries::along(q_at), dout_lines = Queries::along(dout_at);
        products_begin();
        multiply_first<true, true>(s, k_lines, q_lines);
#pragma unroll
        for (int k = 1; k < Head / 16; ++k) multiply<true, true>(s, Own::along(k_lines, k), Queries::along(q_lines, k));
        products_commit();
        if constexpr (kWantsK) {
          products_begin();
          multiply_first<true, true>(ds, v_lines, dout_lines);
#pragma unroll
          for (int k = 1; k < Head / 16; ++k)
            multiply<true, true>(ds, Own::along(v_lines, k), Queries::along(dout_lines, k));
        }
        products_commit();
        products_wait<1>();
        hold(s);
#pragma unroll
        for (int i = 0; i < kQueries / 2; i += 4) {
#pragma unroll
          for (int k = 0; k < 4; ++k)
            s[i + k] = exp2_near(fmaf(s[i + k], p.exponent, -(k % 2 ? of[i / 4].y : of[i / 4].x)));
        }
        if (hides) {
#pragma unroll
          for (int down = 0; down < 2; ++down) {
            const int thread = thread_again();
            hide(s, down, visible<true>(p, task.sequence, task.first + 64 * group + sum_row(thread, down)), q, thread,
                 0.f);
          }
        }
        round_sums(s, codes);  // also what their gradients read: registers hold no more
        hold(codes);
#pragma unroll
        for (int i = 0; i < kQueries / 8; ++i) of[i] = get_shared(number + 4 * kQueries + 32 * i);
        if constexpr (kWantsV) {
          hold(dv);
          products_begin();
#pragma unroll
          for (int k = 0; k < kQueries / 16; ++k)
            multiply_held<false>(dv, &codes[4 * k], Queries::across(Queries::across(dout_at), k), k > 0 || adds);
          products_commit();
        }
        products_wait<kWantsV ? 1 : 0>();
        if constexpr (kWantsK) {
          hold(ds);
#pragma unroll
          for (int i = 0; i < kQueries / 2; i += 4) {
#pragma unroll
            for (int k = i; k < i + 4; k += 2) {
              const float2 p = decode_pair<BFloat16>(codes[k / 2]);
              ds[k] = p.x * (ds[k] - of[i / 4].x);
              ds[k + 1] = p.y * (ds[k + 1] - of[i / 4].y);
            }
          }
          round_sums(ds, dcodes);
          hold(dk);
          products_begin();
#pragma unroll
          for (int k = 0; k < kQueries / 16; ++k)
            multiply_held<false>(dk, &dcodes[4 * k], Queries::across(Queries::across(q_at), k), k > 0 || adds);
          products_commit();
        }
        products_wait<0>();  // registers do not hold the scores of the next tile beside what runs
        release(empty + 8 * ring.slot);
        adds = true;
        ring.next();
      }
      if constexpr (kWantsV) {
        hold(dv);
        if (p.largest) leave_largest(p, task.first + 64 * group, thread_again(), dv);
        send_sums<Head>(dv, v_at, Own::kTile, dqkv_map, task.sequence, task.first + 64 * group, p.H + p.J + task.head,
                        thread_again(), 1 + group);
      }
      if constexpr (kWantsK) {
        hold(dk);
#pragma unroll
        for (int i = 0; i < Head / 2; ++i) dk[i] *= p.scale;
        if (kTurnsBack<Head> && p.table) turn_back<Head>(p, task.sequence, task.first + 64 * group, thread_again(), dk);
        if (p.largest) leave_largest(p, task.first + 64 * group, thread_again(), dk);
        send_sums<Head>(dk, k_at, Own::kTile, dqkv_map, task.sequence, task.first + 64 * group, p.H + task.head,
                        thread_again(), 1 + group);
      }
      if (thread_again() == 0) stores_have_read();
      release(own_empty + 8 * own.slot);
      own.next();
    }
    if (thread_again() == 0) stores_done();
  }
}

}  // namespace coat::cuda
