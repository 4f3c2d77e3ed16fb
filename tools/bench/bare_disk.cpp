#include "tools/bench/bare_disk.hpp"

#ifdef HICACHE_HAVE_LIBURING
#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "shm/fd.hpp"
#include "shm/types.hpp"
#endif

namespace hicache::bench {

#ifndef HICACHE_HAVE_LIBURING

Result<std::unique_ptr<BareDisk>> BareDisk::create(const std::string&, std::span<std::byte>, std::uint32_t) {
  return Error{Status::system_error, "this build has no io_uring to compare with (liburing-dev)", 0};
}

#else

namespace {

Error os_error(const std::string& what, int error) {
  return Error{Status::system_error, what + ": " + std::strerror(error), error};
}

class UringDisk final : public BareDisk {
 public:
  UringDisk(std::span<std::byte> memory, std::uint32_t depth) : memory_(memory), depth_(depth) {}
  ~UringDisk() override {
    if (open_) ::io_uring_queue_exit(&ring_);
  }

  Outcome open(const std::string& directory) {
    const std::string path = directory + "/bare." + std::to_string(::getpid());
    fd_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600));
    if (!fd_.valid()) return os_error(path, errno);
    ::unlink(path.c_str());
    if (::fallocate(fd_.get(), 0, 0, static_cast<off_t>(memory_.size())) != 0) return os_error(path, errno);
    io_uring_params params{};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    int rc = ::io_uring_queue_init_params(depth_, &ring_, &params);
    if (rc == -EINVAL) rc = ::io_uring_queue_init(depth_, &ring_, 0);
    if (rc != 0) return os_error("io_uring", -rc);
    open_ = true;
    std::vector<iovec> pieces;
    for (std::uint64_t at = 0; at < memory_.size(); at += kGiB) {
      pieces.push_back({memory_.data() + at, std::min<std::uint64_t>(kGiB, memory_.size() - at)});
    }
    rc = ::io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size()));
    return rc == 0 ? success() : os_error("registering buffers", -rc);
  }

  Outcome write(const std::vector<std::uint32_t>& order, std::uint64_t bytes) override {
    return move(order, bytes, true);
  }
  Outcome read(const std::vector<std::uint32_t>& order, std::uint64_t bytes) override {
    return move(order, bytes, false);
  }

 private:
  Outcome move(const std::vector<std::uint32_t>& order, std::uint64_t bytes, bool out) {
    std::size_t begun = 0;
    std::size_t ended = 0;
    while (ended < order.size()) {
      for (; begun < order.size() && begun - ended < depth_; ++begun) {
        io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
        if (sqe == nullptr) break;
        const std::uint64_t at = order[begun] * bytes;
        const auto piece = static_cast<int>(at / kGiB);
        const auto n = static_cast<unsigned>(bytes);
        if (out) {
          ::io_uring_prep_write_fixed(sqe, fd_.get(), memory_.data() + at, n, at, piece);
        } else {
          ::io_uring_prep_read_fixed(sqe, fd_.get(), memory_.data() + at, n, at, piece);
        }
      }
      const int rc = ::io_uring_submit_and_wait(&ring_, 1);
      if (rc < 0 && rc != -EINTR) return os_error("io_uring", -rc);
      unsigned head = 0;
      unsigned seen = 0;
      int error = 0;
      io_uring_cqe* cqe = nullptr;
      io_uring_for_each_cqe(&ring_, head, cqe) {
        ++seen;
        if (cqe->res != static_cast<int>(bytes)) error = cqe->res < 0 ? -cqe->res : EIO;
      }
      ::io_uring_cq_advance(&ring_, seen);
      ended += seen;
      if (error != 0) return os_error("bare transfer", error);
    }
    return success();
  }

  const std::span<std::byte> memory_;
  const std::uint32_t depth_;
  UniqueFd fd_;
  io_uring ring_{};
  bool open_ = false;
};

}  // namespace

Result<std::unique_ptr<BareDisk>> BareDisk::create(const std::string& directory, std::span<std::byte> memory,
                                                   std::uint32_t depth) {
  auto disk = std::make_unique<UringDisk>(memory, depth);
  if (Outcome opened = disk->open(directory); !opened) return opened.error();
  return std::unique_ptr<BareDisk>(std::move(disk));
}

#endif

}  // namespace hicache::bench
