// The engine of threads that block in preadv and pwritev.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "daemon/storage/file/io_engine.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint32_t kMaxThreads = 16;
constexpr int kMaxParts = 1024;  // IOV_MAX

void transfer(IoRequest& request) {
  while (!request.parts.empty()) {
    const int parts = static_cast<int>(std::min<std::size_t>(request.parts.size(), kMaxParts));
    const auto at = static_cast<off_t>(request.offset);
    const ssize_t n = request.write ? ::pwritev(request.fd, request.parts.data(), parts, at)
                                    : ::preadv(request.fd, request.parts.data(), parts, at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      request.error = n < 0 ? errno : ENODATA;
      return;
    }
    request.offset += static_cast<std::uint64_t>(n);
    advance(request.parts, static_cast<std::uint64_t>(n));
  }
}

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(std::uint32_t depth, std::string why) : why_(std::move(why)) {
    for (std::uint32_t i = 0; i < std::min(depth, kMaxThreads); ++i) threads_.emplace_back([this] { run(); });
  }
  ~ThreadEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  void start(IoRequest& request) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(&request);
    }
    work_.notify_one();
  }

  void wait(std::vector<IoRequest*>& done, std::uint64_t timeout_ns) override {
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return woken_ || !done_.empty(); });
    woken_ = false;
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    ended_.notify_one();
  }

  [[nodiscard]] std::string description() const override {
    return std::to_string(threads_.size()) + " threads" + (why_.empty() ? "" : " (" + why_ + ")");
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      IoRequest* request = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      transfer(*request);
      lock.lock();
      done_.push_back(request);
      ended_.notify_one();
    }
  }

  const std::string why_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ended_;
  std::deque<IoRequest*> waiting_;
  std::vector<IoRequest*> done_;
  bool woken_ = false;
  bool stop_ = false;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(std::uint32_t depth, std::string why) {
  return std::make_unique<ThreadEngine>(depth, std::move(why));
}

}  // namespace hicache::daemon
