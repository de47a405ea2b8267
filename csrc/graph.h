// Ops that are recorded instead of run, to be run together as often as wanted: on CUDA a graph of the device, on the
// CPU a list.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "cuda/device.h"

namespace coat {

// What it reads and writes stays where it is: memory.h sees to that. One can be open in a thread.
class Graph {
 public:
  // From now on what this thread would run on the device is recorded. reserve: bytes that it may need at once.
  Graph(Device device, int64_t reserve);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  // Ends that. Throws where something could not be recorded; the graph is of no use then.
  void close();
  void run();

  // Whether ops of this device are being recorded.
  static bool records(Device device);
  // Runs f, which works in memory of the CPU, now or whenever the open graph runs.
  template <class F>
  static void on_cpu(F&& f) {
    if (records(Device::cpu))
      open_->steps_.emplace_back(std::forward<F>(f));
    else
      f();
  }

 private:
  static thread_local Graph* open_;
  Device device_;
  std::vector<std::function<void()>> steps_;
  std::unique_ptr<cuda::Graph> on_device_;
};

}  // namespace coat
