// The CUDA device as memory.cc, ops.cc and binding.cc see it: plain declarations, implemented by device.cu, or by
// none.cc where CUDA is not compiled in.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../tensor.h"

namespace coat::cuda {

// Throws no_cuda with what was found unless this thread can use a device of compute capability 9.0; says what it is.
std::string open();
// Memory in stream order. allocate returns null when the device has no room.
uint8_t* allocate(int64_t bytes);
void release(uint8_t* data);
void fill(uint8_t* data, int value, int64_t bytes);
void fill_words(uint8_t* data, uint32_t word, int64_t count);
// Reports kDamaged at the next wait unless `count` bytes at data have this value.
void check_bytes(const uint8_t* data, int value, int64_t count);
// What the pool holds of the device and how much of it is in use, scratch of kernels included, now and at most since
// the peaks were reset; what is free of the device's memory.
struct Pool {
  int64_t used = 0, used_peak = 0, reserved = 0, reserved_peak = 0, free = 0, total = 0;
};
Pool pool();
void reset_pool_peak();
// Host to device: the host bytes may change when it returns.
void copy_in(uint8_t* data, const void* bytes, int64_t count);
// A copy to host memory, queued now. wait() may run on any thread, blocks, and throws what the device reported since
// the last wait; then the bytes are at host().
class Reading {
 public:
  Reading(const uint8_t* data, int64_t bytes);
  ~Reading();
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  void wait();
  const uint8_t* host() const;

 private:
  struct State;
  State* state_;
};
// Waits for everything that this thread queued.
void synchronize();
// Points in time of the device's own clock: set() queues one and numbers it, between() waits for both and gives the
// milliseconds between them; the numbers start again after forget().
class Marks {
 public:
  Marks() = default;
  ~Marks();
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  int64_t set();
  double between(int64_t from, int64_t to);
  void forget() { used_ = 0; }

 private:
  std::vector<void*> events_;  // those that are not in use are kept for the next round
  int64_t used_ = 0;
};
// What this thread queues from its making to close() is recorded instead, and queued whenever run() is called. Memory
// that is taken meanwhile is given to nothing else while a graph of this thread lives. reserve: bytes of it to begin
// with.
class Graph {
 public:
  explicit Graph(int64_t reserve);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void close();
  void run();

 private:
  struct State;
  std::unique_ptr<State> state_;
};
// Products of this thread are from now on made by cuBLASLt, to compare with, by that one of its suggestions; below 0 by
// our kernels again. Returns whether the library is asked and there.
bool choose_cublaslt(int suggestion);
// Called after every op: remembers its name for errors; waits when COAT_SYNC=1.
void launched(const char* op);
// Counters that kernels of this thread write, readable at any time.
Status* status();
// Gives the stream of this thread back.
void close();

}  // namespace coat::cuda
