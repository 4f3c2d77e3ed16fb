#include "daemon/kernel/kernel_link.hpp"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace hicache::daemon {

Result<std::shared_ptr<KernelLink>> KernelLink::create(const ProcessIdentity& process) {
  auto link = std::make_shared<KernelLink>();
  link->process = process;
  link->pidfd = open_pidfd(process.pid);
  // Looked at after the pidfd was opened: equal start times prove that the pidfd means this very process.
  if (process.pid == 0 || process.start_ticks == 0 || !link->pidfd.valid() || !process.alive()) {
    return Error{Status::not_permitted,
                 "process " + std::to_string(process.pid) +
                     " can't be watched by the daemon, as it must be to map the pool: it needs a kernel with "
                     "pidfd_open and a pid namespace that the daemon sees",
                 0};
  }
  link->news = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!link->news.valid())
    return Error{Status::system_error, std::string("eventfd: ") + std::strerror(errno), errno};
  auto fd = create_sealed("hicache-kernel", kKernelBlockBytes);
  if (!fd) return fd.error();
  auto mapping = Mapping::map(fd->get(), kKernelBlockBytes, Mapping::Access::read_write, true);
  if (!mapping) return mapping.error();
  link->block_fd = std::move(*fd);
  link->mapping = std::move(*mapping);
  return link;
}

}  // namespace hicache::daemon
