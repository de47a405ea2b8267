// attention, backward: the kernel of the gradients of queries.
#pragma once
#include "statistics.cuh"

namespace coat::cuda {

// A block works on 128 queries, 64 a warpgroup, against tiles of keys.
template <int Head>
struct QueriesShape {
  static constexpr int kKeys = 64;
  static constexpr int kOwnSlots = Head == 256 ? 1 : 2, kSlots = Head == 256 ? 1 : 3;
  using Own = HeadTile<Head, 64>;  // queries, or gradients of the output, of a warpgroup
  using Keys = HeadTile<Head, kKeys>;
  static constexpr uint32_t kOwnBytes = 4 * Own::kBytes, kSlot = 2 * Keys::kBytes;
  static constexpr uint32_t kShared = kOwnSlots * kOwnBytes + kSlots * kSlot + 1024;
};

// As the kernel of keys and values, with queries as rows. Bytes per query and head: 4 D read, 2 D written.
template <int Head>
__global__ void __launch_bounds__(384, 1)
    attention_backward_kernel_queries(const __grid_constant__ CUtensorMap q_map,
                                      const __grid_constant__ CUtensorMap kv_map,
                                      const __grid_constant__ CUtensorMap dout_map,
                                      const __grid_constant__ CUtensorMap dqkv_map, const AttentionProblem p,
                                      const Work work, const Statistics statistics) {
  using Shape = QueriesShape<Head>;
  using Own = typename Shape::Own;
  using Keys = typename Shape::Keys;
  constexpr int kKeys = Shape::kKeys, kSlots = Shape::kSlots, kOwnSlots = Shape::kOwnSlots;
  extern __shared__ uint8_t raw[];
  __shared__ alignas(8) uint64_t barriers[2 * kOwnSlots + 2 * kSlots];
  __shared__ AttentionTask tasks[kOwnSlots];
  const uint32_t owns = (shared_address(raw) + 1023) / 1024 * 1024, slots = owns + kOwnSlots * Shape::kOwnBytes;
  const uint32_t own_full = shared_address(barriers), own_empty = own_full + 8 * kOwnSlots;
  const uint32_t full = own_empty + 8 * kOwnSlots, empty = full + 8 * kSlots;
  if (threadIdx.x == 0) {
    barriers_of_ring(own_full, kOwnSlots, 8);
    barriers_of_ring(full, kSlots, 2);
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
        const AttentionTask task = task_of<false>(p, index, p.group, kKeys);
        tasks[own.slot] = task;
        const int kv = task.unit - task.sequence * p.J;
        const uint32_t at = owns + own.slot * Shape::kOwnBytes, done = own_full + 8 * own.slot;
        barrier_expect(done, Shape::kOwnBytes);
#pragma unroll
        for (int part = 0; part < 4; ++part)  // queries of both warpgroups, gradients of both
          Own::load(part < 2 ? q_map : dout_map, at + part * Own::kBytes, done, task.sequence,
                    task.first + part % 2 * 64, task.head);
        own.next();
        index = work.next();
        for (int tile = task.against.first; tile <= task.against.last; ++tile) {
          const uint32_t to = slots + ring.slot * Shape::kSlot, barrier = full + 8 * ring.slot;
          barrier_wait(empty + 8 * ring.slot, ring.phase ^ 1);
          barrier_expect(barrier, Shape::kSlot);
          Keys::load(kv_map, to, barrier, task.sequence, tile * kKeys, p.H + kv);
          Keys::load(kv_map, to + Keys::kBytes, barrier, task.sequence, tile * kKeys, p.H + p.J + kv);
          ring.next();
        }
      }
    }
  } else {
    take_registers<232>();
    const int group = warpgroup() - 1, thread = static_cast<int>(threadIdx.x) % 128;
    Ring<kOwnSlots> own;
    Ring<kSlots> ring;
    float dq[Head / 2], s[kKeys / 2], ds[kKeys / 2];
    uint32_t codes[kKeys / 4];
    const auto release = [&](int slot) {
      if (thread == 0) barrier_arrive(empty + 8 * slot, 0);
    };
    const Turns turns(group);
    while (true) {
      barrier_wait(own_full + 8 * own.slot, own.phase);
      const AttentionTask task = tasks[own.slot];
      if (task.unit < 0) break;
      const int first = task.first + 64 * group;
      Span seen[2];
      float lse[2], delta[2];
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int q = first + sum_row(thread, down);
        seen[down] = visible<false>(p, task.sequence, q);
        const float* of = statistics.of(p, task.sequence, task.head, q / kStatisticsRows) + q % kStatisticsRows;
        lse[down] = of[0];
        delta[down] = of[kStatisticsRows];
      }
      const Span plain = tasks[own.slot].plain[group];
      const uint32_t q_at = owns + own.slot * Shape::kOwnBytes + group * Own::kBytes, dout_at = q_at + 2 * Own::kBytes;
      int before = -1;
      for (int tile = task.against.first; tile <= task.against.last; ++tile) {
        const uint32_t k_at = slots + ring.slot * Shape::kSlot, v_at = k_at + Keys::kBytes;
        turns.take();
        barrier_wait(full + 8 * ring.slot, ring.phase);
        const uint64_t q_lines = Own::along(q_at), dout_lines = Own::along(dout_at);
        const uint64_t k_lines = Keys::along(k_at), v_lines = Keys::along(v_at);
        hold(s);
        hold(ds);
        products_begin();
#pragma unroll
        for (int k = 0; k < Head / 16; ++k)
          multiply<true, true>(s, Own::along(q_lines, k), Keys::along(k_lines, k), k > 0);
        products_commit();
#pragma unroll
        for (int k = 0; k < Head / 16; ++k)
          multiply<true, true>(ds, Own::along(dout_lines, k), Keys::along(v_lines, k), k > 0);
        products_commit();
        turns.end();
        products_wait<1>();
        hold(s);
        if (before >= 0) release(before);
        before = ring.slot;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] = exp2_near(fmaf(s[i], p.exponent, -lse[i / 2 % 2]));
        const int key = tile * kKeys;
        if (key < plain.first || key + kKeys - 1 > plain.last) {
#pragma unroll
          for (int down = 0; down < 2; ++down) hide(s, down, seen[down], key, thread, 0.f);
        }
        products_wait<0>();
        hold(ds);
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) ds[i] = s[i] * (ds[i] - delta[i / 2 % 2]);
        round_sums(ds, codes);
        hold(dq);
        products_begin();
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
          multiply_held<false>(dq, &codes[4 * k], Keys::across(Keys::across(k_at), k),
                               k > 0 || tile > task.against.first);
        products_commit();
        if constexpr (kSlots == 1) {
          products_wait<0>();
          release(before);
          before = -1;
        }
        ring.next();
      }
      products_wait<0>();
      hold(dq);
      if (before >= 0) release(before);
#pragma unroll
      for (int i = 0; i < Head / 2; ++i) dq[i] *= p.scale;
      if (kTurnsBack<Head> && p.table) turn_back<Head>(p, task.sequence, first, thread, dq);
      if (p.largest) leave_largest(p, first, thread, dq);
      send_sums<Head>(dq, q_at, Own::kTile, dqkv_map, task.sequence, first, task.head, thread, 1 + group);
      if (thread == 0) stores_have_read();
      __syncwarp();  // all lanes have read the task: one of every warp says so
      if (thread % 32 == 0) barrier_arrive(own_empty + 8 * own.slot, 0);
      own.next();
    }
    if (thread == 0) stores_done();
  }
}

}  // namespace coat::cuda
