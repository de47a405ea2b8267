// Attention on the tensor cores: what the forward and the backward kernels share. Who sees whom, the order of work,
// tiles of heads in shared memory, and the arithmetic of a warpgroup's scores.
#pragma once
#include <optional>

#include "../hopper.cuh"
#include "attention.cuh"

namespace coat::cuda {

// One call as the kernels see it; positions of a sequence fit an int.
struct AttentionProblem {
  int T, D, H, J, group, sequences, window;
  bool causal;
  float scale, exponent;         // exponent = scale * log2 e: scores as exponents of 2
  const int32_t *starts, *ends;  // first and last position of the document of every row [sequences * T], or null
  const float* table;            // of rope, by which gradients of q and k are turned back, or null
  uint32_t* largest;             // bits of the largest magnitude of out, or of a gradient, or null
  int units, chunk, tiles;       // key/value heads of all sequences, those of a chunk of the work, tiles of a sequence
};

constexpr int kTaskRows = 128;  // of a piece of work

// Whether the tensor cores can take a call of bf16: lines of heads that the copy engine can read and that fill half a
// tile (smaller heads lose more by bf16 probabilities, and tiles to zeros), scores that grow with q k^T, sizes that an
// int holds.
inline bool fits_tensor(const AttentionSizes& s) {
  const int64_t most = int64_t{1} << 30;
  return s.D % 8 == 0 && s.D >= 32 && s.D <= 256 && s.scale > 0.f && s.T < most && s.window < most &&
         s.B < most / s.H && s.B * s.H < most / ((s.T + 63) / 64);
}

// `held`: bytes of keys and values of a chunk of the work.
inline AttentionProblem problem_of(const AttentionSizes& s, const int32_t* ends, int64_t held,
                                   const float* table = nullptr, uint32_t* largest = nullptr) {
  const auto as_int = [](int64_t x) { return static_cast<int>(x); };
  const int64_t units = s.B * s.J, chunk = std::clamp<int64_t>(held / (s.T * s.D * 4), 1, units);
  return {as_int(s.T),
          as_int(s.D),
          as_int(s.H),
          as_int(s.J),
          as_int(s.group),
          as_int(s.B),
          as_int(s.window),
          s.causal,
          s.scale,
          s.scale * kLog2E,
          s.starts,
          ends,
          table,
          largest,
          as_int(units),
          as_int(chunk),
          as_int((s.T + kTaskRows - 1) / kTaskRows)};
}

// Last positions of documents, made from their first ones where a kernel needs them.
class DocumentEnds {
 public:
  DocumentEnds(const char* op, const AttentionSizes& s, bool wanted);
  const int32_t* get() const { return room_ ? room_->as<int32_t>() : nullptr; }

 private:
  std::optional<Scratch> room_;
};

// Positions from first to last; none when last < first.
struct Span {
  int first, last;
};

// What query `row` of a sequence sees, or with Turned the queries that see key `row`. Both ends grow with the row.
template <bool Turned>
__device__ inline Span visible(const AttentionProblem& p, int sequence, int row) {
  row = min(row, p.T - 1);
  const bool before = !Turned || !p.causal, after = Turned || !p.causal;
  Span span{row, row};
  if (before) {
    span.first = p.window ? max(row - (p.window - 1), 0) : 0;
    if (p.starts) span.first = min(max(span.first, p.starts[int64_t{sequence} * p.T + row]), row);
  }
  if (after) {
    span.last = p.window ? static_cast<int>(min(int64_t{row} + p.window, int64_t{p.T})) - 1 : p.T - 1;
    if (p.starts) span.last = max(min(span.last, p.ends[int64_t{sequence} * p.T + row]), row);
  }
  return span;
}

// A piece of work: 128 rows of a head, 64 a warpgroup, against tiles of rows on the other side of the scores.
// `against`: the tiles that some row sees; `plain`: the rows that all rows of a warpgroup see.
struct AttentionTask {
  int head, sequence, unit, first;
  Span against, plain[2];
};

// The heads of a chunk, whose keys and values fit into L2, come before those of the next one; within a chunk the
// longest pieces come first, and query heads that share a key/value head follow each other. `heads`: those of a unit
// that are work of their own.
template <bool Turned>
__device__ inline AttentionTask task_of(const AttentionProblem& p, unsigned index, int heads, int tile_rows) {
  const unsigned of_chunk = static_cast<unsigned>(p.chunk) * heads * p.tiles, chunk = index / of_chunk;
  const unsigned within = index - chunk * of_chunk, begin = chunk * p.chunk;
  const unsigned members = min(static_cast<unsigned>(p.chunk), p.units - begin) * heads;
  const unsigned tile = within / members, member = within % members;
  AttentionTask task;
  task.unit = static_cast<int>(begin + member / heads);
  task.sequence = task.unit / p.J;
  task.head = (task.unit - task.sequence * p.J) * heads + static_cast<int>(member % heads);
  task.first = static_cast<int>(!Turned && p.causal ? p.tiles - 1 - tile : tile) * kTaskRows;
  task.against = {visible<Turned>(p, task.sequence, task.first).first / tile_rows,
                  visible<Turned>(p, task.sequence, task.first + kTaskRows - 1).last / tile_rows};
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const int first = task.first + 64 * group;
    task.plain[group] = {visible<Turned>(p, task.sequence, first + 63).first,
                         visible<Turned>(p, task.sequence, first).last};
  }
  return task;
}

// Hands out pieces of work to the blocks of a grid, in order: whoever is ready takes the next one, which changes
// nothing in what it makes of it. Whoever asks last leaves the counter at 0 again.
struct Work {
  uint32_t* counter;
  unsigned count;
  unsigned blocks() const { return std::min<unsigned>(count, multiprocessors()); }
  __device__ unsigned next() const {
    const unsigned index = atomicAdd(counter, 1u);
    if (index == count + gridDim.x - 1) atomicExch(counter, 0u);
    return index;
  }
};

// A ring of slots that one thread fills and warpgroups empty.
template <int Slots>
struct Ring {
  int slot = 0, phase = 0;
  __device__ void next() {
    if (++slot == Slots) slot = 0, phase ^= 1;
  }
};

// The barriers of such a ring, from `full` on: those that the copy engine fills, then those that so many arrivals
// empty.
__device__ inline void barriers_of_ring(uint32_t full, int slots, uint32_t arrivals) {
  for (int i = 0; i < slots; ++i) {
    barrier_init(full + 8 * i, 1);
    barrier_init(full + 8 * (slots + i), arrivals);
  }
}

// The two warpgroups of a block take turns at the tensor cores: one multiplies while the other is at its softmax. Both
// take as many turns.
struct Turns {
  int group;
  __device__ explicit Turns(int group) : group(group) {
    if (group == 1) end();
  }
  __device__ void take() const { meet(3 + group, 256); }
  __device__ void end() const { meet_later(4 - group, 256); }
};

// Lines of a head stand as tiles of 64 columns, each of `Lines` lines of 128 bytes.
template <int Head, int Lines>
struct HeadTile {
  static constexpr int kColumns = Head / 64;
  static constexpr uint32_t kTile = Lines * 128, kBytes = kColumns * kTile;
  // Lines as an operand along the head's columns, 16 columns a step, and across them, 16 lines a step.
  static __device__ uint64_t along(uint32_t at) { return operand_at(at, 8192); }
  static __device__ uint64_t along(uint64_t lines, int step) {
    return operand_after(lines, step / 4 * kTile + step % 4 * 32);
  }
  static __device__ uint64_t across(uint32_t at) { return operand_at(at, kTile); }
  static __device__ uint64_t across(uint64_t lines, int step) { return operand_after(lines, step * 2048); }
  static __device__ void load(const CUtensorMap& map, uint32_t at, uint32_t barrier, int sequence, int line, int head) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) load_tile(map, at + c * kTile, barrier, sequence, line, head, 64 * c);
  }
};

// Sums [64, 2 * Count] of a warpgroup: a lane holds of each 8 columns two neighbours of two rows, 8 rows apart.
__device__ inline int sum_row(int thread, int down) { return thread / 32 * 16 + thread % 32 / 4 + 8 * down; }

// Puts `hidden` in place of what row `down` of a lane does not see of the columns from `first` on.
template <int Count>
__device__ inline void hide(float (&s)[Count], int down, Span seen, int first, int thread, float hidden) {
  const int origin = first + thread % 4 * 2, low = seen.first - origin, high = seen.last - origin;
#pragma unroll
  for (int i = 2 * down; i < Count; i += 4)
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (i / 4 * 8 + k < low || i / 4 * 8 + k > high) s[i + k] = hidden;
}

// The codes of sums as the first operand of a product: 4 registers for 16 columns.
template <int Count>
__device__ inline void round_sums(const float (&s)[Count], uint32_t (&codes)[Count / 2]) {
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) codes[i] = encode_pair<BFloat16>(s[2 * i], s[2 * i + 1]);
}

// Sums of a warpgroup as 64 lines of bf16 in the tiles at `at`, and from there to the lines of a head by the copy
// engine, which leaves out what lies outside. `name` is a barrier of the warpgroup's 128 threads.
template <int Head>
__device__ inline void send_sums(const float (&s)[Head / 2], uint32_t at, uint32_t tile, const CUtensorMap& map,
                                 int sequence, int line, int head, int thread, int name) {
  const int stored = thread / 32 * 16 + thread % 16;
#pragma unroll
  for (int j = 0; j < Head / 8; j += 2)
    store_matrices(at + j / 8 * tile + swizzled(stored, (j + thread % 32 / 16) % 8),
                   encode_pair<BFloat16>(s[4 * j], s[4 * j + 1]), encode_pair<BFloat16>(s[4 * j + 2], s[4 * j + 3]),
                   encode_pair<BFloat16>(s[4 * j + 4], s[4 * j + 5]),
                   encode_pair<BFloat16>(s[4 * j + 6], s[4 * j + 7]));
  publish_shared();
  meet(name, 128);
  if (thread == 0) {
#pragma unroll
    for (int c = 0; c < Head / 64; ++c) store_tile(map, at + c * tile, sequence, line, head, 64 * c);
    stores_commit();
  }
}

// Where registers hold the turning of gradients beside all else.
template <int Head>
inline constexpr bool kTurnsBack = Head <= 128;

// Gradients of 64 rows of q or k from row `first` on, turned back as rope turns: the pair of a column lies half a head
// on, in the same lane.
template <int Head>
__device__ inline void turn_back(const AttentionProblem& p, int sequence, int first, int thread, float (&s)[Head / 2]) {
#pragma unroll
  for (int down = 0; down < 2; ++down) {
    const int t = min(first + sum_row(thread, down), p.T - 1);
    const int64_t start = p.starts ? p.starts[int64_t{sequence} * p.T + t] : 0;
    const float* cosine = p.table + rope_position(t, start, p.T) * Head + thread % 4 * 2;
#pragma unroll
    for (int i = 2 * down; i < Head / 4; i += 4) {
      const float2 c = *reinterpret_cast<const float2*>(cosine + i / 4 * 8);
      const float2 sine = *reinterpret_cast<const float2*>(cosine + Head / 2 + i / 4 * 8);
      const auto turn = [](float& a, float& b, float c, float sine) {
        const float old = a;
        a = fma_(old, c, b * sine);
        b = fma_(b, c, -(old * sine));
      };
      turn(s[i], s[i + Head / 4], c.x, sine.x);
      turn(s[i + 1], s[i + 1 + Head / 4], c.y, sine.y);
    }
  }
}

// The largest magnitude of 64 rows of out or of a gradient as they are stored. The bits of |x| order as integers, with
// NaN above Inf.
template <int Count>
__device__ inline void leave_largest(const AttentionProblem& p, int first, int thread, const float (&s)[Count]) {
  uint32_t most = 0;
#pragma unroll
  for (int down = 0; down < 2; ++down) {
    if (first + sum_row(thread, down) >= p.T) continue;
#pragma unroll
    for (int i = 2 * down; i < Count; i += 4) most = max(most, max(bits_of(fabsf(s[i])), bits_of(fabsf(s[i + 1]))));
  }
  most = bits_of(BFloat16::decode(BFloat16::encode(float_of(warp_max(most)))));
  if (thread % 32 == 0) atomicMax(p.largest, most);
}

}  // namespace coat::cuda
