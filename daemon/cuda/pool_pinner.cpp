#include "daemon/cuda/pool_pinner.hpp"

#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "shm/clock.hpp"

namespace hicache::daemon {
namespace {

constexpr std::size_t kMaxThreads = 8;

std::string memlock_text() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur) + " bytes";
}

}  // namespace

PoolPinner::PoolPinner(std::uint8_t* pool, std::uint64_t bytes, std::function<void(std::uint64_t)> progress)
    : pool_(pool),
      bytes_(bytes),
      progress_(std::move(progress)),
      pieces_((bytes + kPieceBytes - 1) / kPieceBytes) {}

PoolPinner::~PoolPinner() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
  if (gpu_ == nullptr || !gpu_->use()) return;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i]) gpu_->driver().cuMemHostUnregister(pool_ + i * kPieceBytes);
  }
}

void PoolPinner::start(std::shared_ptr<Gpu> gpu) {
  const std::lock_guard lock(mutex_);
  if (gpu_ != nullptr) return;
  gpu_ = std::move(gpu);
  state_.store(State::running, std::memory_order_release);
  started_ns_ = monotonic_ns();
  progress_(0);
  const std::size_t cores = std::max(std::thread::hardware_concurrency(), 1u);
  running_ = std::clamp<std::size_t>(std::min(cores / 2, pieces_.size()), 1, kMaxThreads);
  for (std::size_t i = 0; i < running_; ++i) threads_.emplace_back([this] { thread_body(); });
}

std::uint64_t PoolPinner::end_of(std::size_t piece) const {
  return std::min(bytes_, (piece + 1) * kPieceBytes);
}

Outcome PoolPinner::pin(std::size_t piece) {
  const std::uint64_t begin = piece * kPieceBytes;
  const std::uint64_t size = end_of(piece) - begin;
  const CudaDriver& driver = gpu_->driver();
  const CUresult r = driver.cuMemHostRegister(pool_ + begin, size, CU_MEMHOSTREGISTER_PORTABLE);
  if (r == CUDA_SUCCESS) return success();
  return cuda_error(driver, r,
                    "cannot pin " + std::to_string(size) + " bytes of the pool at " + std::to_string(begin) +
                        " (limit of locked memory, ulimit -l: " + memlock_text() + ")");
}

void PoolPinner::piece_done(std::size_t piece, const Outcome& outcome) {
  const std::lock_guard lock(mutex_);
  if (!outcome) {
    if (error_.empty()) {
      error_ = outcome.error().message;
      spdlog::error("{}; what is pinned serves, the rest of the pool is not used for GPUs", error_);
    }
  } else {
    pieces_[piece] = true;
    const std::size_t before = prefix_;
    while (prefix_ < pieces_.size() && pieces_[prefix_]) ++prefix_;
    if (prefix_ != before) {
      const std::uint64_t bytes = end_of(prefix_ - 1);
      pinned_.store(bytes, std::memory_order_release);  // SYNC pinned
      progress_(bytes);
    }
  }
  changed_.notify_all();
}

void PoolPinner::thread_body() {
  const Outcome context = gpu_->use();
  for (;;) {
    std::size_t piece = 0;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ || !error_.empty() || next_ == pieces_.size()) break;
      piece = next_++;
    }
    piece_done(piece, context ? pin(piece) : context);
  }
  const std::lock_guard lock(mutex_);
  if (--running_ > 0) return;
  if (prefix_ == pieces_.size()) {
    state_.store(State::done, std::memory_order_release);
    const double seconds = static_cast<double>(monotonic_ns() - started_ns_) / 1e9;
    spdlog::info("pool pinned: {} bytes in {:.3f} s, {:.1f} GB/s", bytes_, seconds,
                 static_cast<double>(bytes_) / 1e9 / seconds);
  } else if (!error_.empty()) {
    state_.store(State::failed, std::memory_order_release);
    // Nothing is pinned: no GPU is served, so host ranks may have all of the pool.
    if (prefix_ == 0) progress_(bytes_);
  }
  changed_.notify_all();
}

Outcome PoolPinner::wait_for_first_piece() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock,
                [this] { return prefix_ > 0 || state_.load(std::memory_order_acquire) != State::running; });
  if (prefix_ > 0) return success();
  return Error{Status::system_error, error_.empty() ? "the pool is not pinned" : error_, 0};
}

}  // namespace hicache::daemon
