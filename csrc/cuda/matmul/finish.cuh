// From the sums of a warpgroup to y: scales, bias, what y holds, one rounding, through shared memory and the copy
// engine.
#pragma once
#include "../hopper.cuh"
#include "result.cuh"

namespace coat::cuda {

constexpr int kHalf = 128;               // columns of y that a warpgroup finishes at a time
constexpr uint32_t kStagingTile = 8192;  // 64 rows of 128 bytes

// The first of a thread's two rows of 64, by its warp of the warpgroup; the other is 8 below.
__device__ inline int row_of(int warp, int lane) { return 16 * warp + lane / 4; }

// 64 rows of y and 128 columns, as a warpgroup holds them: lane l of warp w has rows 16 w + l / 4 and 8 below, and of
// every 8 columns the two from 2 (l % 4) on. Element (row or 8 below, column 8 j + 2 (l % 4) + e) is s[4 j + 2 down +
// e].
template <class Y>
struct Finish {
  using Code = CodeOf<Y>;
  const Result& p;
  const Y& y;
  const CUtensorMap& map;
  bool by_tiles;  // y is written by the copy engine
  float scale;
  uint32_t staging;       // two tiles of this warpgroup
  int lane, warp, group;  // warp: of the warpgroup

  // To row m on, and column n on of p; in what is written these columns begin `shift` further.
  __device__ void operator()(float (&s)[64], int64_t m, int64_t n, int64_t shift) const {
    const int64_t row = m + row_of(warp, lane);
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] *= scale;
    if (p.differs()) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = p.completed(s[i], row + i / 2 % 2 * 8, n + i / 4 * 8 + lane % 4 * 2 + i % 2);
    }
    if constexpr (std::is_same_v<Y, Turned>) y.turn.D == 128 ? turn<64>(s, row, n) : turn<32>(s, row, n);
    if constexpr (Y::run == 16) {
#pragma unroll
      for (int down = 0; down < 2; ++down) seal(s, 2 * down, row + 8 * down, n);
    } else {
      if (p.into) add_held(s, row, n);
      if (p.amax) keep_amax(s, row, n);
    }
    if (!by_tiles)
      directly(s, row, n);
    else if constexpr (sizeof(Code) == 4)
      as_words(s, m, n, shift);
    else if constexpr (sizeof(Code) == 2)
      as_halves(s, m, n, shift);
    else
      as_bytes(s, m, n, shift);
  }

 private:
  // The row and the column of element i as this lane counts them: use(i) for those that lie in y.
  template <class F>
  __device__ void each_inside(int64_t row, int64_t n, F&& use) const {
    const int rows = static_cast<int>(min(p.M - row, int64_t{16}));
    const int columns = static_cast<int>(min(p.N - n, int64_t{kHalf})) - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (i / 2 % 2 * 8 < rows && i / 4 * 8 + i % 2 < columns) use(i);
  }
  // Heads of 2 Half columns, of which this lane has both elements of every pair. Rows outside y turn as the last one.
  template <int Half>
  __device__ void turn(float (&s)[64], int64_t row, int64_t n) const {
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int64_t m = min(row + 8 * down, p.M - 1);
      const int64_t t = static_cast<uint32_t>(m) % y.turn.T;
      const int64_t position = rope_position(t, y.turn.starts ? y.turn.starts[m] : 0, y.turn.T);
      const float* at = y.turn.table + position * 2 * Half + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        constexpr int kEights = Half / 8;  // columns of half a head
        const int in_half = j % kEights, low = j / kEights * 2 * kEights + in_half;
        if (n + 8 * low >= y.turn.columns) continue;
        asm volatile("" ::: "memory");  // registers are short: no load far ahead
        const float2 cosine = *reinterpret_cast<const float2*>(at + 8 * in_half);
        const float2 sine = *reinterpret_cast<const float2*>(at + Half + 8 * in_half);
        float *a = &s[4 * low + 2 * down], *b = a + 4 * kEights;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float c = e == 0 ? cosine.x : cosine.y, x = e == 0 ? sine.x : sine.y, old = a[e];
          a[e] = fma_(old, c, -(b[e] * x));
          b[e] = fma_(b[e], c, old * x);
        }
      }
    }
  }
  __device__ int64_t place(int64_t row, int64_t n, int i) const {
    return (row + i / 2 % 2 * 8) * p.N + n + i / 4 * 8 + lane % 4 * 2 + i % 2;
  }
  __device__ void add_held(float (&s)[64], int64_t row, int64_t n) const {
    if (!p.pairs) return each_inside(row, n, [&](int i) { s[i] = y.load(place(row, n, i), {}) + s[i]; });
    each_inside(row, n, [&](int i) {
      if (i % 2 != 0) return;
      const float2 held = load2(y, place(row, n, i));
      s[i] = held.x + s[i];
      s[i + 1] = held.y + s[i + 1];
    });
  }
  __device__ void keep_amax(const float (&s)[64], int64_t row, int64_t n) const {
    uint32_t most = 0;
    if (row + 8 < p.M && n + kHalf <= p.N) {
#pragma unroll
      for (int i = 0; i < 64; i += 2)
        most = __vimax3_u32(most, bits_of(s[i]) & 0x7fffffffu, bits_of(s[i + 1]) & 0x7fffffffu);
    } else {
      each_inside(row, n, [&](int i) { most = max(most, bits_of(s[i]) & 0x7fffffffu); });
    }
    p.keep_amax<Y>(most);
  }
  __device__ bool leads() const { return warp == 0 && lane == 0; }
  __device__ void wait_for_staging() const {
    if (leads()) stores_have_read();
    meet(1 + group, 128);
  }
  // Writes `tiles` tiles of staging, of 128 bytes of columns each.
  __device__ void send(int64_t m, int64_t n, int64_t shift, int tiles) const {
    constexpr int kColumns = 128 / sizeof(Code);
    publish_shared();
    meet(1 + group, 128);
    if (leads() && m < p.M) {
      for (int t = 0; t < tiles; ++t, n += kColumns)
        if (n < p.N) store_tile(map, staging + t * kStagingTile, static_cast<int>(m), static_cast<int>(shift + n));
      stores_commit();
    }
  }

  __device__ void as_words(const float (&s)[64], int64_t m, int64_t n, int64_t shift) const {
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      wait_for_staging();
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const float* pair = &s[4 * (8 * pass + j) + 2 * down];
          put_shared(staging + j / 4 * kStagingTile + swizzled(line(down), j % 4 * 2 + lane % 4 / 2) + lane % 2 * 8,
                     pair[0], pair[1]);
        }
      send(m, n + 64 * pass, shift, 2);
    }
  }
  __device__ void as_halves(const float (&s)[64], int64_t m, int64_t n, int64_t shift) const {
    wait_for_staging();
    const int stored = 16 * warp + lane % 16;
#pragma unroll
    for (int j = 0; j < 16; j += 2)
      store_matrices(staging + j / 8 * kStagingTile + swizzled(stored, (j + lane / 16) % 8),
                     encode_pair<Code>(s[4 * j], s[4 * j + 1]), encode_pair<Code>(s[4 * j + 2], s[4 * j + 3]),
                     encode_pair<Code>(s[4 * j + 4], s[4 * j + 5]), encode_pair<Code>(s[4 * j + 6], s[4 * j + 7]));
    send(m, n, shift, 2);
  }
  __device__ void as_bytes(const float (&s)[64], int64_t m, int64_t n, int64_t shift) const {
    wait_for_staging();
#pragma unroll
    for (int down = 0; down < 2; ++down)
#pragma unroll
      for (int j = 0; j < 16; ++j)
        put_shared(staging + swizzled(line(down), j / 2) + j % 2 * 8 + lane % 4 * 2,
                   static_cast<uint16_t>(encode_pair<Code>(s[4 * j + 2 * down], s[4 * j + 2 * down + 1])));
    send(m, n, shift, 1);
  }
  __device__ int line(int down) const { return row_of(warp, lane) + 8 * down; }

  // Element by element, where lines of y do not begin on 16-byte boundaries.
  __device__ void directly(const float (&s)[64], int64_t row, int64_t n) const {
    each_inside(row, n, [&](int i) { y.codes[place(row, n, i)].code = Code::encode(s[i]); });
  }

  // Seals the 8 runs of row m from column n on and brings them in units of their scales. This lane holds four values of
  // each: s[8 run + 4 side + first] and the one after; lane l % 4 of a quad seals runs l % 4 and 4 above. Columns
  // outside y are 0, or NaN under an infinite operand, and neither counts.
  __device__ void seal(float (&s)[64], int first, int64_t m, int64_t n) const {
    const int quad = lane % 4;
    const bool odd = quad % 2, high = quad / 2;
    float own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t top[4], two[2];
      bool any = false;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* of = &s[8 * (4 * half + r) + first];
        // the largest one but NaN, in one instruction a value
        top[r] = bits_of(fmaxf(fmaxf(fabsf(of[0]), fabsf(of[1])), fmaxf(fabsf(of[4]), fabsf(of[5]))));
        any |= top[r] >= 0x7f800000u;
      }
      if (any) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          Range range;
#pragma unroll
          for (int i = 0; i < 4; ++i) range.add(s[8 * (4 * half + r) + 4 * (i / 2) + first + i % 2]);
          top[r] = range.max;
          if (m < p.M) count_infs(y.status, range.infs);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t even = top[2 * r], after = top[2 * r + 1];
        two[r] = max(odd ? after : even, __shfl_xor_sync(0xffffffffu, odd ? even : after, 1));
      }
      Range range;
      range.max = max(high ? two[1] : two[0], __shfl_xor_sync(0xffffffffu, high ? two[0] : two[1], 2));
      const int64_t run = n / 16 + 4 * half + quad;
      own[half] = 1.f;
      if (m < p.M && run * 16 < p.N) own[half] = y.seal(m * ((p.N + 15) / 16) + run, range).inverse;
    }
#pragma unroll
    for (int run = 0; run < 8; ++run) {
      const float inverse = __shfl_sync(0xffffffffu, own[run / 4], (lane & ~3) + run % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[8 * run + 4 * (i / 2) + first + i % 2] *= inverse;
    }
  }
};

}  // namespace coat::cuda
