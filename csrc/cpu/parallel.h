// Threads of the CPU backend: one pool a process. Work is cut into chunks by shape alone, never by the number of
// threads, so results do not depend on it.
#pragma once
#include <atomic>
#include <cstdint>

namespace coat::cpu {

// Number of threads that take part in an op, the caller included; COAT_THREADS or the number of cores at first.
int threads();
// Throws unless 1 <= count <= 256.
void set_threads(int64_t count);

// Runs task(context, i) for every i in [0, count), in any order and on any thread, and returns when all are done. The
// first exception is thrown again. A caller that finds the pool busy, or is inside a task, runs everything itself.
void run_tasks(int64_t count, void (*task)(void*, int64_t), void* context);

// body(begin, end) over [0, n) in chunks of `chunk`.
template <class Body>
void parallel(int64_t n, int64_t chunk, Body&& body) {
  if (n <= 0) return;
  if (chunk < 1) chunk = 1;
  const int64_t count = (n + chunk - 1) / chunk;
  struct Context {
    int64_t n, chunk;
    Body* body;
  } context{n, chunk, &body};
  run_tasks(
      count,
      [](void* pointer, int64_t i) {
        auto& c = *static_cast<Context*>(pointer);
        const int64_t begin = i * c.chunk, end = begin + c.chunk < c.n ? begin + c.chunk : c.n;
        (*c.body)(begin, end);
      },
      &context);
}

// Elements that one chunk should hold so that waking a thread pays.
constexpr int64_t kChunk = 16384;
// Rows of `cols` elements that make up one chunk.
inline int64_t rows_of_chunk(int64_t cols) { return cols >= kChunk ? 1 : kChunk / (cols < 1 ? 1 : cols); }

// most = max(most, seen), in any order of callers.
inline void raise(std::atomic<uint32_t>& most, uint32_t seen) {
  uint32_t known = most.load(std::memory_order_relaxed);
  while (known < seen && !most.compare_exchange_weak(known, seen, std::memory_order_relaxed)) {
  }
}

}  // namespace coat::cpu
