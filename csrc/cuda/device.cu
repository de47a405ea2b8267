// The device: one compute stream a thread, memory in stream order, copies, and faults that surface late.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "device.cuh"

namespace coat::cuda {
namespace {

// What one thread (one Node environment) holds of the device.
struct Context {
  cudaStream_t stream = nullptr;
  Status* status = nullptr;
  std::vector<std::string> ops;  // launched since the last wait, the oldest first
  std::string about;
  int multiprocessors = 0;
  uint32_t* counters = nullptr;
};
thread_local Context context;

constexpr size_t kKeptOps = 64;

std::string names(const std::vector<std::string>& ops) {
  std::string text;
  for (const auto& op : ops) text += (text.empty() ? "" : ", ") + op;
  return text;
}

// Turns what a wait returned, and what kernels reported, into an error.
void judge(cudaError_t result, Status* status, const std::vector<std::string>& ops) {
  if (result != cudaSuccess)
    fail("cuda", "device", "the device stopped with \"", cudaGetErrorString(result),
         "\"; ops launched since the last wait: ", names(ops));
  if (!status || status->fault == kNoFault) return;
  const auto kind = status->fault;
  const int64_t index = status->fault_index, value = status->fault_value, limit = status->fault_limit;
  status->fault = kNoFault;
  const std::string after = "; ops launched since the last wait: " + names(ops);
  if (kind == kBadId)
    fail("value", "ids", "ids[", index, "] is ", value, " and must be at least 0 and less than V = ", limit, after);
  if (kind == kBadTarget)
    fail("value", "targets", "targets[", index, "] is ", value,
         " and must be the ignored value or at least 0 and less than V = ", limit, after);
  if (kind == kDamaged) fail("guard", "tensor", "memory outside of a tensor was written", after);
  fail("value", "scale", "scale must be a positive finite number", after);
}

}  // namespace

bool waits_after_every_op() {
  static const bool on = [] {
    const char* text = std::getenv("COAT_SYNC");
    return text && *text && std::strcmp(text, "0") != 0;
  }();
  return on;
}

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  if (result == cudaErrorMemoryAllocation) fail("out_of_memory", "device", "out of memory on cuda in ", what);
  fail("cuda", "device", what, " failed: ", cudaGetErrorString(result));
}

namespace {

cudaMemPool_t default_pool() {
  cudaMemPool_t pool;
  check(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
  return pool;
}

}  // namespace

std::string open() {
  if (context.stream) return context.about;
  int count = 0, driver = 0, runtime = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (found != cudaSuccess || count == 0) {
    cudaGetLastError();
    fail("no_cuda", "device",
         "device 'cuda' is not there: ", found == cudaSuccess ? "no GPU" : cudaGetErrorString(found),
         " (driver supports CUDA ", driver / 1000, ".", driver % 1000 / 10, ", this build needs ", runtime / 1000, ".",
         runtime % 1000 / 10, "); use device 'cpu'");
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  if (properties.major != 9 || properties.minor != 0)
    fail("no_cuda", "device", "device 'cuda' is ", properties.name, " of compute capability ", properties.major, ".",
         properties.minor, " and must be of 9.0 (H100, H200); use device 'cpu'");
  check(cudaSetDevice(0), "cudaSetDevice");
  uint64_t keep = UINT64_MAX;  // freed blocks stay with the process, for the next step
  check(cudaMemPoolSetAttribute(default_pool(), cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  check(cudaHostAlloc(reinterpret_cast<void**>(&context.status), sizeof(Status), cudaHostAllocMapped), "cudaHostAlloc");
  new (context.status) Status;
  check(cudaMalloc(&context.counters, kCounters * sizeof(uint32_t)), "cudaMalloc");
  check(cudaMemset(context.counters, 0, kCounters * sizeof(uint32_t)), "cudaMemset");
  cudaStream_t made;
  check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
  context.stream = made;
  context.multiprocessors = properties.multiProcessorCount;
  std::ostringstream text;
  text << properties.name << ", " << properties.totalGlobalMem / (1024 * 1024 * 1024) << " GiB, CUDA " << driver / 1000
       << "." << driver % 1000 / 10 << " driver, " << runtime / 1000 << "." << runtime % 1000 / 10 << " runtime";
  context.about = text.str();
  return context.about;
}

cudaStream_t stream() {
  open();
  return context.stream;
}
int multiprocessors() {
  open();
  return context.multiprocessors;
}
uint32_t* counters() {
  open();
  return context.counters;
}
Status* status() {
  open();
  return context.status;
}

uint8_t* allocate(int64_t bytes) {
  if (records()) return allocate_recorded(bytes);
  void* data = nullptr;
  const cudaError_t result = cudaMallocAsync(&data, static_cast<size_t>(bytes < 1 ? 1 : bytes), stream());
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(result, "cudaMallocAsync");
  return static_cast<uint8_t*>(data);
}

// Not checked: it runs in destructors, and a device that failed says so at the next wait.
void release(uint8_t* data) {
  if (data && context.stream && !release_recorded(data)) cudaFreeAsync(data, context.stream);
}

void fill(uint8_t* data, int value, int64_t bytes) {
  if (bytes > 0) check(cudaMemsetAsync(data, value, static_cast<size_t>(bytes), stream()), "cudaMemsetAsync");
}

namespace {

// One thread a word.
__global__ void fill_words_kernel(uint32_t* data, uint32_t word, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) data[i] = word;
}

// One thread a byte of a guard.
__global__ void check_bytes_kernel(const uint8_t* data, uint8_t value, int64_t count, Status* status) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count && data[i] != value) report(status, kDamaged, i, data[i], value);
}

}  // namespace

void fill_words(uint8_t* data, uint32_t word, int64_t count) {
  if (word == 0)
    fill(data, 0, count * 4);
  else
    launch("fill", fill_words_kernel, blocks_for(count, 256), 256, 0, reinterpret_cast<uint32_t*>(data), word, count);
}

void check_bytes(const uint8_t* data, int value, int64_t count) {
  launch("check_bytes", check_bytes_kernel, dim3(static_cast<unsigned>((count + 255) / 256)), dim3(256), 0, data,
         static_cast<uint8_t>(value), count, status());
}

Pool pool() {
  open();
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const auto figure = [](cudaMemPoolAttr attribute) {
    uint64_t value = 0;
    check(cudaMemPoolGetAttribute(default_pool(), attribute, &value), "cudaMemPoolGetAttribute");
    return static_cast<int64_t>(value);
  };
  return {figure(cudaMemPoolAttrUsedMemCurrent),
          figure(cudaMemPoolAttrUsedMemHigh),
          figure(cudaMemPoolAttrReservedMemCurrent),
          figure(cudaMemPoolAttrReservedMemHigh),
          static_cast<int64_t>(free),
          static_cast<int64_t>(total)};
}

void reset_pool_peak() {
  uint64_t zero = 0;
  for (auto attribute : {cudaMemPoolAttrUsedMemHigh, cudaMemPoolAttrReservedMemHigh})
    check(cudaMemPoolSetAttribute(default_pool(), attribute, &zero), "cudaMemPoolSetAttribute");
}

// From pageable memory the runtime stages the bytes before it returns.
void copy_in(uint8_t* data, const void* bytes, int64_t count) {
  if (count > 0)
    check(cudaMemcpyAsync(data, bytes, static_cast<size_t>(count), cudaMemcpyHostToDevice, stream()),
          "cudaMemcpyAsync");
}

namespace {

// Page-locked memory for reads. Small blocks, such as those of losses, are kept: to lock and unlock pages waits for the
// device.
constexpr int64_t kSmall = 4096;
struct Locked {
  std::mutex mutex;
  std::vector<uint8_t*> idle;
};
Locked& locked() {
  static Locked* pool = new Locked;  // never destroyed: threads may end after static objects
  return *pool;
}

uint8_t* lock_host(int64_t bytes) {
  if (bytes <= kSmall) {
    std::lock_guard guard(locked().mutex);
    if (!locked().idle.empty()) {
      uint8_t* block = locked().idle.back();
      locked().idle.pop_back();
      return block;
    }
  }
  void* block = nullptr;
  check(cudaHostAlloc(&block, static_cast<size_t>(std::max(bytes, kSmall)), cudaHostAllocDefault), "cudaHostAlloc");
  return static_cast<uint8_t*>(block);
}

void unlock_host(uint8_t* block, int64_t bytes) {
  if (bytes > kSmall) {
    cudaFreeHost(block);
    return;
  }
  std::lock_guard guard(locked().mutex);
  locked().idle.push_back(block);
}

}  // namespace

struct Reading::State {
  int64_t bytes = 0;
  uint8_t* host = nullptr;
  cudaEvent_t done = nullptr;
  Status* status = nullptr;
  std::vector<std::string> ops;
};

Reading::Reading(const uint8_t* data, int64_t bytes) : state_(new State) {
  state_->bytes = bytes;
  try {
    state_->host = lock_host(bytes);
    if (bytes > 0)
      check(cudaMemcpyAsync(state_->host, data, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream()),
            "cudaMemcpyAsync");
    check(cudaEventCreateWithFlags(&state_->done, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
    check(cudaEventRecord(state_->done, stream()), "cudaEventRecord");
  } catch (...) {
    // a copy may be under way: the block is given up rather than handed to another read
    delete state_;
    throw;
  }
  state_->status = context.status;
  state_->ops.swap(context.ops);
}

Reading::~Reading() {
  cudaEventSynchronize(state_->done);
  cudaEventDestroy(state_->done);
  unlock_host(state_->host, state_->bytes);
  delete state_;
}

void Reading::wait() { judge(cudaEventSynchronize(state_->done), state_->status, state_->ops); }
const uint8_t* Reading::host() const { return state_->host; }

void synchronize() {
  const cudaError_t result = cudaStreamSynchronize(stream());
  std::vector<std::string> ops;
  ops.swap(context.ops);
  judge(result, context.status, ops);
}

Marks::~Marks() {
  for (void* event : events_) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

int64_t Marks::set() {
  if (used_ == static_cast<int64_t>(events_.size())) {
    cudaEvent_t made;
    check(cudaEventCreate(&made), "cudaEventCreate");
    events_.push_back(made);
  }
  check(cudaEventRecord(static_cast<cudaEvent_t>(events_[used_]), stream()), "cudaEventRecord");
  return used_++;
}

double Marks::between(int64_t from, int64_t to) {
  for (int64_t i : {from, to})
    if (i < 0 || i >= used_) fail("value", "mark", "mark ", i, " is not one of the ", used_, " that were made");
  const auto event = [&](int64_t i) { return static_cast<cudaEvent_t>(events_[i]); };
  float milliseconds = 0;
  check(cudaEventSynchronize(event(to)), "cudaEventSynchronize");
  check(cudaEventElapsedTime(&milliseconds, event(from), event(to)), "cudaEventElapsedTime");
  return milliseconds;
}

void launched(const char* op) {
  if (context.ops.size() >= kKeptOps) context.ops.erase(context.ops.begin());
  context.ops.emplace_back(op);
  if (waits_after_every_op()) synchronize();
}

void close() {
  if (!context.stream) return;
  cudaStreamSynchronize(context.stream);
  cudaStreamDestroy(context.stream);
  cudaFreeHost(context.status);
  cudaFree(context.counters);
  context = Context{};
}

}  // namespace coat::cuda
