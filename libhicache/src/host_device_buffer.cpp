#include <utility>

#include "hicache/client.hpp"
#include "shm/shared_memory.hpp"

namespace hicache {

struct HICACHE_LOCAL HostDeviceBuffer::Impl {
  UniqueFd fd;
  Mapping mapping;
};

HostDeviceBuffer::HostDeviceBuffer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HostDeviceBuffer::HostDeviceBuffer(HostDeviceBuffer&&) noexcept = default;
HostDeviceBuffer& HostDeviceBuffer::operator=(HostDeviceBuffer&&) noexcept = default;
HostDeviceBuffer::~HostDeviceBuffer() = default;

Result<HostDeviceBuffer> HostDeviceBuffer::create(std::uint64_t bytes) {
  if (bytes == 0)
    return Error{Status::invalid_argument, "a device buffer of 0 bytes; at least 1 expected", 0};
  auto fd = create_sealed("hicache.device", bytes);
  if (!fd) return fd.error();
  auto mapping = Mapping::map(fd->get(), bytes, Mapping::Access::read_write);
  if (!mapping) return mapping.error();
  return HostDeviceBuffer(std::make_unique<Impl>(Impl{std::move(*fd), std::move(*mapping)}));
}

std::uint8_t* HostDeviceBuffer::data() const {
  return static_cast<std::uint8_t*>(impl_->mapping.data());
}
std::uint64_t HostDeviceBuffer::size() const {
  return impl_->mapping.size();
}
int HostDeviceBuffer::fd() const {
  return impl_->fd.get();
}

}  // namespace hicache
