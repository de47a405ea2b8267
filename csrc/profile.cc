// The trace in memory and its file, which all environments of a process share.
#include "profile.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace coat {
namespace {

// Waiting for this many events costs the device a pause, so it must be rare.
constexpr size_t kMost = size_t{1} << 16;

double host_time() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

// A JSON array that is whole after every append.
class File {
 public:
  static File& shared() {
    static File* file = new File;  // never destroyed: environments may end after static objects
    return *file;
  }
  void open(const std::string& name) {
    std::lock_guard guard(mutex_);
    if (handle_) return;
    handle_ = std::fopen(name.c_str(), "w");
    if (!handle_ || std::fputs("[", handle_) < 0 || std::fputs(kEnd, handle_) < 0 || std::fflush(handle_) != 0)
      refuse(name);
  }
  void append(const std::string& name, const std::string& text) {
    std::lock_guard guard(mutex_);
    const long end = static_cast<long>(std::strlen(kEnd));
    if (std::fseek(handle_, -end, SEEK_END) != 0) refuse(name);
    std::fputs(empty_ ? "\n" : ",\n", handle_);
    std::fputs(text.c_str(), handle_);
    std::fputs(kEnd, handle_);
    empty_ = false;
    if (std::fflush(handle_) != 0 || std::ferror(handle_)) refuse(name);
  }

 private:
  static constexpr const char* kEnd = "\n]\n";
  [[noreturn]] static void refuse(const std::string& name) {
    fail("profile", "COAT_PROFILE", "COAT_PROFILE is \"", name, "\", which cannot be written: ", std::strerror(errno));
  }
  std::mutex mutex_;
  std::FILE* handle_ = nullptr;
  bool empty_ = true;
};

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return json + "\"";
}

void add_entry(std::string& object, const std::string& name, const std::string& value) {
  if (!object.empty()) object += ",";
  object += quoted(name);
  object += ":" + value;
}

}  // namespace

std::unique_ptr<Profile> Profile::wanted() {
  const char* file = std::getenv("COAT_PROFILE");
  if (!file || !*file) return nullptr;
  static std::atomic<int> threads{0};
  return std::unique_ptr<Profile>(new Profile(file, ++threads));
}

// Nobody is left to catch what goes wrong here.
Profile::~Profile() {
  const size_t count = events_.size();
  try {
    flush();
  } catch (const Error& error) {
    std::fprintf(stderr, "coat-fp8: %zu events of the profile are lost: %s\n", count, error.what());
  }
}

Profile::Time Profile::now(Device device) {
  File::shared().open(file_);
  if (device == Device::cpu) return host_time();
  int64_t mark = marks_.set();
  if (mark == 0) {
    origin_ = host_time();
    mark = marks_.set();
  }
  return static_cast<double>(mark);
}

void Profile::begin(const Op& op, Device device) {
  op_ = &op;
  device_ = device;
  sizes_.clear();
  formats_.clear();
  bytes_ = 0;
}

void Profile::size(const std::string& name, int64_t value) { add_entry(sizes_, name, std::to_string(value)); }

void Profile::argument(const Argument& argument, const Tensor& tensor) {
  if (tensor) Profile::argument(argument, std::vector<Tensor>{tensor});
}

// What is changed in place is read and written.
void Profile::argument(const Argument& argument, const std::vector<Tensor>& tensors) {
  if (tensors.empty()) return;
  add_entry(formats_, argument.name, quoted(word_of(tensors[0].format)));
  for (const auto& tensor : tensors)
    bytes_ += bytes_of(tensor.format, tensor.shape) * (is_changed(argument.mode) ? 2 : 1);
}

// Letters are among the sizes already.
void Profile::argument(const Argument& argument, int64_t number) {
  if (argument.name.size() > 1) size(argument.name, number);
}

void Profile::start() { from_ = now(device_); }

void Profile::end() {
  const Time to = now(device_);
  std::string text;
  add_entry(text, "name", quoted(op_->name));
  add_entry(text, "cat", quoted(op_->family));
  add_entry(text, "args",
            std::string("{\"device\":") + quoted(word_of(device_)) + ",\"bytes\":" + std::to_string(bytes_) +
                ",\"sizes\":{" + sizes_ + "},\"formats\":{" + formats_ + "}}");
  add(std::move(text), device_, from_, to);
}

void Profile::note(const std::string& name, Device device) {
  std::string text;
  add_entry(text, "name", quoted(name));
  add_entry(text, "cat", quoted("note"));
  add(std::move(text), device, now(device), -1);
}

void Profile::add(std::string text, Device device, Time from, Time to) {
  events_.push_back({std::move(text), device, from, to});
  if (events_.size() >= kMost) flush();
}

// Marks are told apart by their distances, which are exact over short times only: each is measured from the one before.
void Profile::flush() {
  if (events_.empty()) return;
  std::string all;
  double time = origin_;
  int64_t last = 0;
  const auto at = [&](Time mark) {
    time += 1000 * marks_.between(last, static_cast<int64_t>(mark));
    last = static_cast<int64_t>(mark);
    return time;
  };
  for (const auto& event : events_) {
    const bool host = event.device == Device::cpu, point = event.to < 0;
    const double from = host ? event.from : at(event.from), to = point ? from : host ? event.to : at(event.to);
    char times[96];
    std::snprintf(times, sizeof times,
                  point ? ",\"ph\":\"i\",\"s\":\"p\",\"ts\":%.3f" : ",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f", from,
                  to - from);
    all += all.empty() ? "{" : ",\n{";
    all += event.text;
    all += times;
    all += ",\"pid\":" + std::to_string(getpid()) + ",\"tid\":" + std::to_string(thread_) + "}";
  }
  events_.clear();
  marks_.forget();
  File::shared().append(file_, all);
}

}  // namespace coat
