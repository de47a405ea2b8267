// Graphs: the compute stream captured, and the memory that what was captured works in.
#include "../arena.h"
#include "device.cuh"

namespace coat::cuda {
namespace {

// Graphs of one thread run one after the other in its stream, so they share memory: what outlives a graph is still
// held when the next is recorded.
struct Recorded {
  Arena arena;
  int graphs = 0;
  bool open = false;
};
thread_local Recorded recorded;

void settle() {
  if (recorded.graphs > 0 || recorded.arena.in_use() || recorded.arena.empty()) return;
  cudaStreamSynchronize(stream());
  recorded.arena.drop([](uint8_t* chunk) { cudaFree(chunk); });
}

}  // namespace

bool records() { return recorded.open; }

uint8_t* allocate_recorded(int64_t bytes) {
  if (uint8_t* block = recorded.arena.allocate(bytes)) return block;
  // the device may have to finish what it does before it has room, which is no part of what is recorded
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  const int64_t size = Arena::rounded(std::max(bytes, Arena::kChunk));
  void* chunk = nullptr;
  const cudaError_t result = cudaMalloc(&chunk, static_cast<size_t>(size));
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(result, "cudaMalloc");
  recorded.arena.add(static_cast<uint8_t*>(chunk), size);
  return recorded.arena.allocate(bytes);
}

bool release_recorded(uint8_t* data) {
  if (recorded.arena.empty() || !recorded.arena.release(data)) return false;
  settle();
  return true;
}

struct Graph::State {
  cudaGraphExec_t ready = nullptr;
  bool open = true;
};

Graph::Graph(int64_t reserve) : state_(std::make_unique<State>()) {
  if (waits_after_every_op())
    fail("graph", "device", "COAT_SYNC=1 waits after every op, which cannot be recorded; unset it");
  if (recorded.arena.empty() && reserve > 0) {
    // from the pool, which has about as much from steps that were not recorded; without it cudaMalloc has to do
    const int64_t size = Arena::rounded(reserve);
    if (uint8_t* chunk = allocate(size)) recorded.arena.add(chunk, size);
  }
  const cudaError_t result = cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal);
  if (result != cudaSuccess) settle();
  check(result, "cudaStreamBeginCapture");
  recorded.graphs += 1;
  recorded.open = true;
}

Graph::~Graph() {
  if (state_->open) {
    cudaGraph_t captured = nullptr;
    cudaStreamEndCapture(stream(), &captured);
    if (captured) cudaGraphDestroy(captured);
    cudaGetLastError();
    recorded.open = false;
  }
  if (state_->ready) cudaGraphExecDestroy(state_->ready);
  recorded.graphs -= 1;
  settle();
}

void Graph::close() {
  state_->open = recorded.open = false;
  cudaGraph_t captured = nullptr;
  check(cudaStreamEndCapture(stream(), &captured), "cudaStreamEndCapture");
  const cudaError_t result = cudaGraphInstantiate(&state_->ready, captured, 0);
  cudaGraphDestroy(captured);
  check(result, "cudaGraphInstantiate");
}

void Graph::run() {
  check(cudaGraphLaunch(state_->ready, stream()), "cudaGraphLaunch");
  launched("graph");
}

}  // namespace coat::cuda
