// Host memory behind the slots. Freed blocks are kept by size class, because fresh pages cost more than the arithmetic.
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cuda/device.h"

namespace coat {
namespace {

constexpr int64_t kGuard = 64, kDeviceGuard = 256;  // the device's own alignment
constexpr uint8_t kGuardByte = 0xA5;
constexpr int64_t kIdleLimit = int64_t{1} << 31;
constexpr int64_t kSlotBits = 24;

// Multiples of 64 bytes up to 4 KiB, then eighths of a power of two.
int64_t size_class(int64_t bytes) {
  int64_t step = 64;
  while (step * 8 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace

Memory::~Memory() {
  open_ = {};
  graphs_.clear();
  settle();
  for (auto& slot : slots_)
    if (slot.live) give_back(slot.tensor, slot.bytes);
  drop_idle();
  if (cuda_) cuda::close();
}

int64_t Memory::drop_idle() {
  const int64_t dropped = idle_bytes_;
  for (auto& [size, blocks] : idle_)
    for (uint8_t* block : blocks) std::free(block);
  idle_.clear();
  idle_bytes_ = 0;
  return dropped;
}

uint8_t* Memory::take(int64_t size) {
  auto found = idle_.find(size);
  if (found != idle_.end() && !found->second.empty()) {
    uint8_t* block = found->second.back();
    found->second.pop_back();
    idle_bytes_ -= size;
    return block;
  }
  auto* block = static_cast<uint8_t*>(std::aligned_alloc(64, size));
  if (!block && drop_idle() > 0) block = static_cast<uint8_t*>(std::aligned_alloc(64, size));
  return block;
}

uint8_t* Memory::take_recorded(int64_t size) {
  if (uint8_t* block = arena_.allocate(size)) return block;
  const int64_t bytes = Arena::rounded(std::max(size, Arena::kChunk));
  auto* chunk = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
  if (!chunk) return nullptr;
  arena_.add(chunk, bytes);
  return arena_.allocate(size);
}

uint8_t* Memory::allocate(int64_t bytes) {
  const int64_t size = size_class(bytes + (guard_ ? 2 * kGuard : 0) + 1);
  uint8_t* block = Graph::records(Device::cpu) ? take_recorded(size) : take(size);
  if (!block)
    fail("out_of_memory", "device", "out of memory on cpu: requested ", bytes, " bytes, ", usage_.live_total,
         " bytes held by ", usage_.tensors, " tensors");
  if (!guard_) return block;
  Graph::on_cpu([block, bytes] {
    std::memset(block, kGuardByte, kGuard);
    std::memset(block + kGuard, 0xff, bytes);
    std::memset(block + kGuard + bytes, kGuardByte, kGuard);
  });
  return block + kGuard;
}

uint8_t* Memory::allocate_on_device(int64_t bytes) {
  const int64_t guard = guard_ ? kDeviceGuard : 0;
  uint8_t* block = cuda::allocate(bytes + 2 * guard);
  if (!block) {
    const cuda::Pool pool = cuda::pool();
    fail("out_of_memory", "device", "out of memory on cuda: requested ", bytes, " bytes, ", pool.free,
         " bytes free on the device, ", pool.reserved, " bytes held by the pool, of which ", usage_.live_total, " in ",
         usage_.tensors, " tensors");
  }
  if (!guard_) return block;
  cuda::fill(block, kGuardByte, guard);
  cuda::fill(block + guard, 0xff, bytes);
  cuda::fill(block + guard + bytes, kGuardByte, guard);
  return block + guard;
}

void Memory::release(const Slot& slot) {
  const bool graphs = open_.graph || !graphs_.empty();
  if (!slot.recorded && ((slot.used && graphs) || Graph::records(slot.tensor.device)))
    kept_.emplace_back(slot.tensor, slot.bytes);  // what is recorded must not free what was there before
  else
    give_back(slot.tensor, slot.bytes);
}

void Memory::give_back(const Tensor& tensor, int64_t bytes) {
  if (tensor.device == Device::cuda) {
    cuda::release(tensor.data - (guard_ ? kDeviceGuard : 0));
    return;
  }
  uint8_t* block = tensor.data - (guard_ ? kGuard : 0);
  if (arena_.release(block)) {
    settle();
    return;
  }
  const int64_t size = size_class(bytes + (guard_ ? 2 * kGuard : 0) + 1);
  if (idle_bytes_ + size > kIdleLimit) {
    std::free(block);
    return;
  }
  idle_[size].push_back(block);
  idle_bytes_ += size;
}

void Memory::check_limit(const Format& format, const Shape& shape, int64_t bytes, Purpose purpose) const {
  if (limit_ == 0 || usage_.live_total + bytes <= limit_) return;
  std::string held;
  for (int p = 0; p < kPurposeCount; ++p)
    if (usage_.live[p] > 0) held += ", " + std::to_string(usage_.live[p]) + " " + kPurposes[p];
  fail("out_of_memory", "limit", "out of memory: ", word_of(format), text_of(shape), " (", kPurposes[int(purpose)],
       ") needs ", bytes, " bytes; ", usage_.live_total, " bytes are live", held, " and the limit is ", limit_);
}

double Memory::make(const Format& format, const Shape& shape, Device device, Purpose purpose) {
  double numel = 1;
  for (int i = 0; i < shape.rank; ++i) numel *= static_cast<double>(shape.dims[i]);
  if (numel > 1e15) fail("shape", "shape", "shape ", text_of(shape), " has more than 10^15 elements");
  if (device == Device::cuda) {
    cuda::open();
    cuda_ = true;
  }
  const int64_t bytes = bytes_of(format, shape);
  check_limit(format, shape, bytes, purpose);
  uint8_t* data = device == Device::cuda ? allocate_on_device(bytes) : allocate(bytes);
  if (format.scaling != Scaling::none) {  // the padding between codes and scales is part of what read() gives
    const int64_t codes = code_bytes(format.dtype, shape.numel()), padding = scales_offset(format, shape) - codes;
    if (device == Device::cuda)
      cuda::fill(data + codes, 0, padding);
    else if (padding > 0)
      Graph::on_cpu([=] { std::memset(data + codes, 0, padding); });
  }
  int64_t index;
  if (unused_.empty()) {
    index = static_cast<int64_t>(slots_.size());
    if (index >> kSlotBits) fail("handles", "tensor", "more than ", int64_t{1} << kSlotBits, " tensors are alive");
    slots_.emplace_back();
  } else {
    index = unused_.back();
    unused_.pop_back();
  }
  Slot& slot = slots_[index];
  slot.tensor = {format, shape, device, data, device == Device::cuda ? cuda::status() : status_.get()};
  slot.purpose = purpose;
  slot.bytes = bytes;
  slot.version = 0;
  slot.generation += 1;
  slot.live = true;
  slot.recorded = Graph::records(device);
  slot.used = false;
  const int p = static_cast<int>(purpose);
  usage_.tensors += 1;
  usage_.live[p] += bytes;
  usage_.live_total += bytes;
  note_peak();
  return static_cast<double>((slot.generation << kSlotBits) | index);
}

const Memory::Slot& Memory::slot(double handle, const std::string& argument) const {
  const int64_t whole = handle >= 0 && handle < 9007199254740992.0 ? static_cast<int64_t>(handle) : -1;
  const int64_t index = whole & ((int64_t{1} << kSlotBits) - 1), generation = whole >> kSlotBits;
  if (whole < 0 || static_cast<double>(whole) != handle || index >= static_cast<int64_t>(slots_.size()) ||
      generation <= 0 || generation > slots_[index].generation)
    fail("handle", argument, argument, " is ", handle, ", which is no tensor handle of this thread");
  if (generation != slots_[index].generation || !slots_[index].live)
    fail("freed", argument, argument, " was freed: a tensor cannot be used after dispose() or after its scope ended");
  return slots_[index];
}

const Tensor& Memory::get(double handle, const std::string& argument) const { return slot(handle, argument).tensor; }

const Tensor& Memory::use(double handle, const std::string& argument) {
  Slot& used = slot(handle, argument);
  if (open_.graph) used.used = true;
  return used.tensor;
}

void Memory::fill(const Tensor& tensor, uint32_t word) {
  const int64_t count = tensor.shape.numel();
  if (tensor.device == Device::cuda)
    cuda::fill_words(tensor.data, word, count);
  else
    Graph::on_cpu([data = tensor.as<uint32_t>(), count, word] { std::fill_n(data, count, word); });
}

// On the device the answer comes with the next wait.
bool Memory::intact(const Slot& slot) const {
  if (slot.tensor.device == Device::cuda) {
    cuda::check_bytes(slot.tensor.data - kDeviceGuard, kGuardByte, kDeviceGuard);
    cuda::check_bytes(slot.tensor.data + slot.bytes, kGuardByte, kDeviceGuard);
    return true;
  }
  for (int64_t i = 0; i < kGuard; ++i)
    if (slot.tensor.data[i - kGuard] != kGuardByte || slot.tensor.data[slot.bytes + i] != kGuardByte) return false;
  return true;
}

void Memory::free(double handle) {
  Slot& s = slot(handle, "tensor");
  // what is recorded has its guards when it runs, and only the device checks them then
  const bool recorded_check = s.tensor.device == Device::cuda && Graph::records(Device::cuda);
  const bool damaged = guard_ && (!s.recorded || recorded_check) && !intact(s);
  release(s);
  s.live = false;
  const int p = static_cast<int>(s.purpose);
  usage_.tensors -= 1;
  usage_.live[p] -= s.bytes;
  usage_.live_total -= s.bytes;
  unused_.push_back(&s - slots_.data());
  if (damaged) fail("guard", "tensor", "memory outside of ", text_of(s.tensor), " was written");
}

void Memory::retag(double handle, Purpose purpose) {
  Slot& s = slot(handle, "tensor");
  usage_.live[static_cast<int>(s.purpose)] -= s.bytes;
  s.purpose = purpose;
  const int p = static_cast<int>(purpose);
  usage_.live[p] += s.bytes;
  note_peak();
}

// What is live is the largest so far, where it is. A purpose that is given later than its bytes is that of the peak,
// too.
void Memory::note_peak() {
  for (int p = 0; p < kPurposeCount; ++p) usage_.peak[p] = std::max(usage_.peak[p], usage_.live[p]);
  if (usage_.live_total < usage_.peak_total) return;
  usage_.peak_total = usage_.live_total;
  std::copy(usage_.live, usage_.live + kPurposeCount, usage_.at_peak);
}

int64_t Memory::version(double handle) const { return slot(handle, "tensor").version; }
void Memory::changed(double handle) {
  slot(handle, "tensor").version += 1;
  if (open_.graph) open_.changed.push_back(handle);
}

void Memory::reset_peak() {
  std::fill(usage_.peak, usage_.peak + kPurposeCount, 0);
  usage_.peak_total = 0;
  note_peak();
  if (cuda_) cuda::reset_pool_peak();
}

int64_t Memory::infs() const { return status_->infs + (cuda_ ? cuda::status()->infs : 0); }

void Memory::check_guards() const {
  if (!guard_) return;
  for (const auto& slot : slots_)
    if (slot.live && !slot.recorded && !intact(slot))
      fail("guard", "tensor", "memory outside of ", text_of(slot.tensor), " was written");
}

// ---- graphs ----

void Memory::begin(Device device, int64_t reserve) { open_ = {std::make_unique<Graph>(device, reserve), {}}; }

int64_t Memory::end(bool keep) {
  if (!open_.graph) fail("graph", "graph", "no graph is being recorded");
  Recording done = std::move(open_);
  open_ = {};
  try {
    if (keep) {
      done.graph->close();
      graphs_.emplace(++last_graph_, std::move(done));
      return last_graph_;
    }
  } catch (...) {
    done = {};
    settle();
    throw;
  }
  done = {};
  settle();
  return 0;
}

void Memory::run(int64_t graph) {
  const auto found = graphs_.find(graph);
  if (found == graphs_.end()) fail("graph", "graph", "graph ", graph, " is none of the ", graphs_.size(), " there are");
  found->second.graph->run();
  for (double handle : found->second.changed) {
    Slot& changed = slots_[static_cast<int64_t>(handle) & ((int64_t{1} << kSlotBits) - 1)];
    if (changed.live && changed.generation == static_cast<int64_t>(handle) >> kSlotBits) changed.version += 1;
  }
}

void Memory::drop(int64_t graph) {
  graphs_.erase(graph);
  settle();
}

// Without a graph, what was kept for one goes.
void Memory::settle() {
  if (open_.graph || !graphs_.empty()) return;
  for (auto& slot : slots_) slot.used = false;
  const auto kept = std::move(kept_);
  kept_.clear();
  for (const auto& [tensor, bytes] : kept) give_back(tensor, bytes);
  if (!arena_.in_use()) arena_.drop([](uint8_t* chunk) { std::free(chunk); });
}

}  // namespace coat
