// Slots behind number handles, one owner a tensor; live and peak bytes by purpose. One Memory an environment (main
// thread or worker); nothing here is shared between them.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "arena.h"
#include "graph.h"

namespace coat {

enum class Purpose : uint8_t { param, grad, state, saved, temp, scratch };
inline constexpr const char* kPurposes[] = {"param", "grad", "state", "saved", "temp", "scratch"};
constexpr int kPurposeCount = 6;

class Memory {
 public:
  struct Usage {
    int64_t live[kPurposeCount] = {}, peak[kPurposeCount] = {};
    int64_t live_total = 0, peak_total = 0;
    int64_t at_peak[kPurposeCount] = {};  // live when the total was largest
    int64_t tensors = 0;
  };

  // guard: 64 bytes on both sides of every allocation are watched and fresh tensors are filled with NaN (COAT_GUARD=1).
  explicit Memory(bool guard) : guard_(guard), status_(new Status) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // A new tensor with undefined content, and the handle that owns it.
  double make(const Format& format, const Shape& shape, Device device, Purpose purpose);
  // The tensor behind a handle; throws when it was freed or never was. `argument` is named in the error.
  const Tensor& get(double handle, const std::string& argument) const;
  // The same for what an op reads or writes.
  const Tensor& use(double handle, const std::string& argument);
  void free(double handle);
  void retag(double handle, Purpose purpose);
  int64_t version(double handle) const;
  void changed(double handle);
  const Usage& usage() const { return usage_; }
  void reset_peak();
  // The most bytes that tensors may hold together; 0: no limit. Scratch inside a kernel does not count.
  void limit(int64_t bytes) { limit_ = bytes; }
  int64_t limit() const { return limit_; }
  // Every element of a tensor of 4-byte elements.
  void fill(const Tensor& tensor, uint32_t word);

  // Ops of the device are recorded from begin() to end(), which numbers the graph, or drops it unless it is to be kept;
  // run() runs it. Tensors that it uses are in memory until no graph is left, though their handles may be freed.
  void begin(Device device, int64_t reserve);
  int64_t end(bool keep);
  void run(int64_t graph);
  void drop(int64_t graph);

  // Whether the CUDA device was opened for a tensor.
  bool on_device() const { return cuda_; }
  // Throws when a byte outside a live tensor was written.
  void check_guards() const;
  // Infinities that quantizing stores saturated, on both devices.
  int64_t infs() const;

 private:
  struct Slot {
    Tensor tensor;
    Purpose purpose = Purpose::temp;
    int64_t bytes = 0, generation = 0, version = 0;
    bool live = false;
    bool recorded = false;  // made for an open graph, in memory that is kept for graphs
    bool used = false;      // by a graph
  };
  struct Recording {
    std::unique_ptr<Graph> graph;
    std::vector<double> changed;
  };
  const Slot& slot(double handle, const std::string& argument) const;
  Slot& slot(double handle, const std::string& argument) {
    return const_cast<Slot&>(static_cast<const Memory*>(this)->slot(handle, argument));
  }
  uint8_t* allocate(int64_t bytes);
  uint8_t* take(int64_t size);
  uint8_t* take_recorded(int64_t size);
  uint8_t* allocate_on_device(int64_t bytes);
  void release(const Slot& slot);
  void give_back(const Tensor& tensor, int64_t bytes);
  void settle();
  bool intact(const Slot& slot) const;
  void check_limit(const Format& format, const Shape& shape, int64_t bytes, Purpose purpose) const;
  int64_t drop_idle();
  void note_peak();

  bool guard_;
  bool cuda_ = false;  // whether the device was opened
  std::unique_ptr<Status> status_;
  Usage usage_;
  int64_t limit_ = 0;
  std::vector<Slot> slots_;
  std::vector<int64_t> unused_;
  std::map<int64_t, std::vector<uint8_t*>> idle_;  // freed blocks by size, for the next tensor of that size
  int64_t idle_bytes_ = 0;
  Arena arena_;  // what graphs of the CPU work in
  Recording open_;
  std::map<int64_t, Recording> graphs_;
  int64_t last_graph_ = 0;
  std::vector<std::pair<Tensor, int64_t>> kept_;  // freed tensors that graphs use, and their bytes
};

}  // namespace coat
