// Graphs of both devices.
#include "graph.h"

namespace coat {

thread_local Graph* Graph::open_ = nullptr;

Graph::Graph(Device device, int64_t reserve) : device_(device) {
  if (open_) fail("graph", "device", "a graph is being recorded; it must end before another begins");
  if (device == Device::cuda) on_device_ = std::make_unique<cuda::Graph>(reserve);
  open_ = this;
}

Graph::~Graph() {
  if (open_ == this) open_ = nullptr;
}

void Graph::close() {
  open_ = nullptr;
  if (on_device_) on_device_->close();
}

void Graph::run() {
  if (on_device_) on_device_->run();
  for (const auto& step : steps_) step();
}

bool Graph::records(Device device) { return open_ && open_->device_ == device; }

}  // namespace coat
