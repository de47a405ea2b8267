// Reads that end while the event loop runs on: promises, and the thread that waits for the device.
#pragma once
#include <napi.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "cuda/device.h"

namespace coat {

// Resolves reads when the device has done them: one thread an environment, started by the first read.
class Reader {
 public:
  explicit Reader(Napi::Env env) : env_(env) {}
  Reader(const Reader&) = delete;

  // A promise of an ArrayBuffer with `bytes` bytes from `data`.
  Napi::Value read(const uint8_t* data, int64_t bytes) {
    auto job = std::make_unique<Job>(
        Job{std::make_unique<cuda::Reading>(data, bytes), bytes, Napi::Promise::Deferred::New(env_), nullptr});
    const Napi::Value promise = job->deferred.Promise();
    if (!thread_.joinable()) start();
    if (pending_++ == 0) settle_.Ref(env_);
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
    return promise;
  }

  // Waits for what is under way; its promises stay open, for the environment is ending.
  void stop() {
    if (!thread_.joinable()) return;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
    settle_.Release();
  }

  std::function<Napi::Value(const Error&)> make_error;

 private:
  struct Job {
    std::unique_ptr<cuda::Reading> reading;
    int64_t bytes;
    Napi::Promise::Deferred deferred;
    std::unique_ptr<Error> error;
  };

  void start() {
    settle_ = Napi::ThreadSafeFunction::New(env_, Napi::Function(), "coat-fp8 read", 0, 1);
    settle_.Unref(env_);
    napi_add_env_cleanup_hook(
        env_, [](void* reader) { static_cast<Reader*>(reader)->stop(); }, this);
    thread_ = std::thread([this] { loop(); });
  }

  void loop() {
    for (;;) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      std::unique_ptr<Job> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      try {
        job->reading->wait();
      } catch (const Error& error) {
        job->error = std::make_unique<Error>(error);
      }
      Job* done = job.release();
      const napi_status status = settle_.NonBlockingCall(done, [this](Napi::Env env, Napi::Function, Job* settled) {
        const std::unique_ptr<Job> owner(settled);
        if (env != nullptr) finish(env, *settled);
      });
      if (status != napi_ok) delete done;
    }
  }

  void finish(Napi::Env env, Job& job) {
    if (--pending_ == 0) settle_.Unref(env);
    if (job.error) {
      job.deferred.Reject(make_error(*job.error));
      return;
    }
    auto buffer = Napi::ArrayBuffer::New(env, job.bytes);
    if (job.bytes) std::memcpy(buffer.Data(), job.reading->host(), job.bytes);
    job.deferred.Resolve(buffer);
  }

  Napi::Env env_;
  Napi::ThreadSafeFunction settle_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::unique_ptr<Job>> jobs_;
  bool stopping_ = false;
  int64_t pending_ = 0;
};

}  // namespace coat
