// Notices, without a system call, that this process is a forked child of the one that made an object.
#pragma once

#include <cstdint>

namespace hicache {

class ForkGuard {
 public:
  ForkGuard();
  // True in a child of the process that made the guard, whatever thread forked it.
  [[nodiscard]] bool forked() const;

 private:
  std::uint64_t generation_;
};

}  // namespace hicache
