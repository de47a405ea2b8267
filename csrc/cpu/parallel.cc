// The pool behind parallel(): threads that sleep until run_tasks publishes a job, and that live as long as the process.
#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

#include "../tensor.h"

namespace coat::cpu {
namespace {

constexpr int kMaxThreads = 256;
thread_local bool inside_task = false;

struct Job {
  int64_t count = 0;
  void (*task)(void*, int64_t) = nullptr;
  void* context = nullptr;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;

  void work() {
    inside_task = true;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      try {
        task(context, i);
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
    inside_task = false;
  }
};

// One job at a time. A worker joins the job of the current epoch while places are left, and the publisher waits until
// all that joined have left.
struct Pool {
  std::mutex busy;  // held by the publisher of the running job
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<int> wanted;
  int started = 0;
  uint64_t epoch = 0;
  Job* job = nullptr;
  int places = 0, joined = 0;

  Pool() {
    int count = static_cast<int>(std::thread::hardware_concurrency());
    if (const char* text = std::getenv("COAT_THREADS")) count = std::atoi(text);
    wanted = count < 1 ? 1 : (count > kMaxThreads ? kMaxThreads : count);
  }

  void loop() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return epoch != seen && job && places > 0; });
      seen = epoch;
      Job* mine = job;
      --places;
      ++joined;
      lock.unlock();
      mine->work();
      lock.lock();
      if (--joined == 0) done.notify_one();
    }
  }

  void run(Job& next) {
    const int helpers = static_cast<int>(next.count < wanted ? next.count : wanted.load()) - 1;
    {
      std::lock_guard lock(mutex);
      while (started < helpers) {
        try {
          std::thread([this] { loop(); }).detach();
        } catch (const std::system_error&) {
          break;  // no more threads to be had: the work is done by those there are
        }
        ++started;
      }
      job = &next;
      places = helpers;
      ++epoch;
    }
    wake.notify_all();
    next.work();
    std::unique_lock lock(mutex);
    job = nullptr;
    done.wait(lock, [&] { return joined == 0; });
  }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: its threads outlive every static object
  return *instance;
}

}  // namespace

int threads() { return pool().wanted; }

void set_threads(int64_t count) {
  if (count < 1 || count > kMaxThreads)
    fail("value", "threads", "threads is ", count, " and must be an integer from 1 to ", kMaxThreads);
  pool().wanted = static_cast<int>(count);
}

void run_tasks(int64_t count, void (*task)(void*, int64_t), void* context) {
  Pool& shared = pool();
  std::unique_lock lock(shared.busy, std::defer_lock);
  if (count <= 1 || inside_task || shared.wanted <= 1 || !lock.try_lock()) {
    for (int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  Job job;
  job.count = count;
  job.task = task;
  job.context = context;
  shared.run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace coat::cpu
