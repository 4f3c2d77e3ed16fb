// The engine that drives a ring of io_uring of its own.
#include "daemon/storage/file/io_engine.hpp"

#ifdef HICACHE_HAVE_LIBURING
#include <liburing.h>
#include <linux/ioprio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

#include "shm/fd.hpp"
#endif

namespace hicache::daemon {

#ifndef HICACHE_HAVE_LIBURING

Result<std::unique_ptr<IoEngine>> make_uring_engine(std::uint32_t, const StoragePool&, bool) {
  return Error{Status::system_error, "this build has no io_uring (liburing was not there)", 0};
}

#else

namespace {

constexpr std::uint64_t kPieceBytes = kGiB;  // the kernel's limit for one registered buffer
constexpr std::size_t kMaxParts = 1024;      // IOV_MAX
// Reads are waited for by somebody, writes are not.
constexpr std::uint16_t kReadPriority = IOPRIO_PRIO_VALUE(IOPRIO_CLASS_BE, 0);
constexpr std::uint16_t kWritePriority = IOPRIO_PRIO_VALUE(IOPRIO_CLASS_BE, 4);

class UringEngine final : public IoEngine {
 public:
  UringEngine(const StoragePool& pool, bool register_pool, UniqueFd event)
      : pool_(pool), event_(std::move(event)) {
    if (register_pool) pieces_ = static_cast<std::uint32_t>((pool.bytes + kPieceBytes - 1) / kPieceBytes);
  }
  ~UringEngine() override {
    assert(in_flight_ == 0);
    if (open_) ::io_uring_queue_exit(&ring_);
  }

  // Not in the constructor: it can fail.
  Outcome open(std::uint32_t depth) {
    io_uring_params params{};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    const std::uint32_t entries = 2 * depth + 2;  // headers apart, and the event
    int rc = ::io_uring_queue_init_params(entries, &ring_, &params);
    if (rc == -EINVAL) {  // a kernel before 6.1
      params = {};
      rc = ::io_uring_queue_init_params(entries, &ring_, &params);
    }
    if (rc != 0) {
      return Error{Status::system_error, "the kernel gives no io_uring: " + std::string(std::strerror(-rc)),
                   -rc};
    }
    open_ = true;
    if (pieces_ != 0) {
      rc = ::io_uring_register_buffers_sparse(&ring_, pieces_);
      if (rc != 0) unregistered(rc);
    }
    watch_event();
    return success();
  }

  void start(IoRequest& request) override {
    queue(request);
    ++in_flight_;
  }

  void flush() override { ::io_uring_submit(&ring_); }

  void wait(std::vector<IoRequest*>& done, std::uint64_t timeout_ns) override {
    if (!event_watched_) watch_event();
    __kernel_timespec timeout{};
    timeout.tv_sec = static_cast<std::int64_t>(timeout_ns / 1'000'000'000);
    timeout.tv_nsec = static_cast<long long>(timeout_ns % 1'000'000'000);
    io_uring_cqe* first = nullptr;
    ::io_uring_submit_and_wait_timeout(&ring_, &first, 1, &timeout, nullptr);
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      auto* request = static_cast<IoRequest*>(::io_uring_cqe_get_data(cqe));
      if (request == nullptr) {
        event_watched_ = false;  // woken
      } else if (ended(*request, cqe->res)) {
        done.push_back(request);
      } else {
        again_.push_back(request);
      }
    }
    ::io_uring_cq_advance(&ring_, seen);
    in_flight_ -= static_cast<std::uint32_t>(done.size());
    // Only now: the completion entries above had to be given back first.
    for (IoRequest* request : again_) queue(*request);
    again_.clear();
  }

  void wake() override {
    const std::uint64_t one = 1;
    // Can't block or fail: the counter would have to reach 2^64 - 1 first.
    [[maybe_unused]] const auto n = ::write(event_.get(), &one, sizeof one);
  }

  bool register_more() override {
    const std::uint32_t next = registered_.load(std::memory_order_relaxed);
    if (next >= pieces_) return false;
    const std::uint64_t offset = next * kPieceBytes;
    const iovec piece{pool_.base + offset, std::min(kPieceBytes, pool_.bytes - offset)};
    const __u64 tag = 0;
    const int rc = ::io_uring_register_buffers_update_tag(&ring_, next, &piece, &tag, 1);
    if (rc != 1) {
      unregistered(rc < 0 ? rc : -EINVAL);
      return false;
    }
    registered_.store(next + 1, std::memory_order_relaxed);
    return next + 1 < pieces_;
  }

  [[nodiscard]] std::string description() const override {
    const int error = register_error_.load(std::memory_order_relaxed);
    if (error != 0) {
      return "io_uring, buffers not registered (" + std::string(std::strerror(error)) +
             (error == ENOMEM ? ", raise the limit of locked memory)" : ")");
    }
    return registered_.load(std::memory_order_relaxed) == 0 ? "io_uring" : "io_uring, registered buffers";
  }

 private:
  // What is registered stays so; what is not goes the slower way.
  void unregistered(int rc) {
    register_error_.store(-rc, std::memory_order_relaxed);
    pieces_ = registered_.load(std::memory_order_relaxed);
  }

  io_uring_sqe* entry() {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      ::io_uring_submit(&ring_);
      sqe = ::io_uring_get_sqe(&ring_);
    }
    assert(sqe != nullptr);  // submitting empties the queue
    return sqe;
  }

  void watch_event() {
    io_uring_sqe* sqe = entry();
    ::io_uring_prep_read(sqe, event_.get(), &event_value_, sizeof event_value_, 0);
    ::io_uring_sqe_set_data(sqe, nullptr);
    event_watched_ = true;
  }

  // Which registered piece holds it, or none.
  [[nodiscard]] int piece_of(const iovec& part) const {
    const auto* at = static_cast<const std::byte*>(part.iov_base);
    if (at < pool_.base || at >= pool_.base + pool_.bytes) return -1;
    const auto offset = static_cast<std::uint64_t>(at - pool_.base);
    const std::uint64_t piece = offset / kPieceBytes;
    if (piece >= registered_.load(std::memory_order_relaxed)) return -1;
    return offset + part.iov_len <= (piece + 1) * kPieceBytes ? static_cast<int>(piece) : -1;
  }

  void queue(IoRequest& request) {
    io_uring_sqe* sqe = entry();
    const iovec& part = request.parts.front();
    const int piece = request.parts.size() == 1 ? piece_of(part) : -1;
    if (piece >= 0) {
      (request.write ? ::io_uring_prep_write_fixed : prep_read_fixed)(
          sqe, request.fd, part.iov_base, static_cast<unsigned>(part.iov_len), request.offset, piece);
    } else {
      const auto parts = static_cast<unsigned>(std::min(request.parts.size(), kMaxParts));
      (request.write ? ::io_uring_prep_writev : ::io_uring_prep_readv)(sqe, request.fd, request.parts.data(),
                                                                       parts, request.offset);
    }
    sqe->ioprio = request.write ? kWritePriority : kReadPriority;
    ::io_uring_sqe_set_data(sqe, &request);
  }
  // The library takes the same parameters, but for a const.
  static void prep_read_fixed(io_uring_sqe* sqe, int fd, const void* memory, unsigned bytes, __u64 offset,
                              int piece) {
    ::io_uring_prep_read_fixed(sqe, fd, const_cast<void*>(memory), bytes, offset, piece);
  }

  // False when the rest has to be asked for again.
  static bool ended(IoRequest& request, int result) {
    if (result == -EINTR || result == -EAGAIN) return false;
    if (result <= 0) {
      request.error = result < 0 ? -result : ENODATA;
      return true;
    }
    request.offset += static_cast<std::uint64_t>(result);
    advance(request.parts, static_cast<std::uint64_t>(result));
    return request.parts.empty();
  }

  const StoragePool pool_;
  UniqueFd event_;
  std::uint64_t event_value_ = 0;
  bool event_watched_ = false;
  io_uring ring_{};
  bool open_ = false;
  std::uint32_t in_flight_ = 0;
  std::uint32_t pieces_ = 0;  // of the pool, to be registered
  std::vector<IoRequest*> again_;
  // Relaxed: description() may run on another thread, and orders nothing by them.
  std::atomic<std::uint32_t> registered_{0};
  std::atomic<int> register_error_{0};
};

}  // namespace

Result<std::unique_ptr<IoEngine>> make_uring_engine(std::uint32_t depth, const StoragePool& pool,
                                                    bool register_pool) {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  if (!event.valid()) {
    return Error{Status::system_error, "eventfd: " + std::string(std::strerror(errno)), errno};
  }
  auto engine = std::make_unique<UringEngine>(pool, register_pool, std::move(event));
  if (Outcome opened = engine->open(depth); !opened) return opened.error();
  return std::unique_ptr<IoEngine>(std::move(engine));
}

#endif

}  // namespace hicache::daemon
