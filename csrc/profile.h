// Times of ops as a Chrome trace (COAT_PROFILE=file): one event an op, with what it was given and the bytes it moves.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "contract.h"
#include "cuda/device.h"

namespace coat {

// The ops of one environment. On CUDA the times are the device's own: points in its stream before and after each op.
// The file is whole JSON after every flush(); who holds a Profile flushes at every wait, and its end flushes the rest.
class Profile {
 public:
  // Null unless COAT_PROFILE names a file.
  static std::unique_ptr<Profile> wanted();
  ~Profile();

  // An op: begin, its sizes and arguments; start, the op itself, end. One that fails has no end and leaves no event.
  void begin(const Op& op, Device device);
  void size(const std::string& name, int64_t value);
  void argument(const Argument& argument, const Tensor& tensor);
  void argument(const Argument& argument, const std::vector<Tensor>& tensors);
  void argument(const Argument& argument, int64_t number);
  template <class T>
  void argument(const Argument&, const T&) {}
  void start();
  void end();

  // A point in time.
  void note(const std::string& name, Device device);
  // Waits for what is under way and writes it; throws when the file cannot be written.
  void flush();

 private:
  using Time = double;  // microseconds of the host's clock, or a number of marks_
  struct Event {
    std::string text;  // JSON without its times
    Device device;
    Time from, to;  // to below 0: a point
  };
  Profile(std::string file, int thread) : file_(std::move(file)), thread_(thread) {}
  Time now(Device device);
  void add(std::string text, Device device, Time from, Time to);

  std::string file_;
  int thread_;
  const Op* op_ = nullptr;  // the one under way
  Device device_ = Device::cpu;
  Time from_ = 0;
  std::string sizes_, formats_;
  int64_t bytes_ = 0;
  std::vector<Event> events_;
  cuda::Marks marks_;
  double origin_ = 0;  // the host's time at mark 0
};

}  // namespace coat
