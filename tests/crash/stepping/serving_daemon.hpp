// A daemon in the test's own process with a real socket, whose coordinator turns only when the test says so.
// So the test can fork at any moment and let each copy of the daemon live through another fate of its client.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/cuda/cuda_path.hpp"
#include "daemon/sessions/session_server.hpp"
#include "tests/crash/stepping/daemon_inside.hpp"

namespace hicache::test {

// Sets both rings of a fresh channel as if `position` entries had gone through each.
inline void advance_rings(Mapping& channel, const ChannelGeometry& geometry, std::uint32_t position) {
  auto* base = static_cast<std::uint8_t*>(channel.data());
  auto& header = *reinterpret_cast<ChannelHeader*>(base);
  for (A32* word : {&header.sq_head, &header.sq_tail, &header.cq_head, &header.cq_tail})
    word->store(position);
  const auto age = [&](std::uint64_t offset, std::uint32_t size) {
    auto* entries = reinterpret_cast<RingEntry*>(base + offset);
    for (std::uint32_t n = position - size; n != position; ++n) entries[n & (size - 1)].sequence.store(n + 1);
  };
  age(geometry.sq_offset, geometry.sq_entries);
  age(geometry.cq_offset, geometry.cq_entries);
}

class ServingDaemon {
 public:
  // Channels begin at ring position `first_position`.
  ServingDaemon(const daemon::Config& config, std::uint32_t first_position)
      : inside_(config, daemon::RegionOwner::Start::fresh), cuda_(make_cuda()) {
    const auto post = [this, first_position](daemon::CoordinatorRequest request) {
      if (auto* attach = std::get_if<daemon::AttachRequest>(&request))
        advance_rings(*attach->channel, attach->geometry, first_position);
      inside_.coordinator().inbox.post(std::move(request));
    };
    registration_.emplace(post, *cuda_);
    daemon::SessionServerOptions options;
    options.config = config;
    options.socket_path = config.socket.path;
    options.control_fd = inside_.region().control_read_only_fd();
    options.region_bytes = inside_.region().region_bytes();
    options.instance_epoch = inside_.region().instance_epoch();
    auto sessions = daemon::SessionServer::start(options, post, *registration_);
    if (!sessions) throw std::runtime_error(sessions.error().message);
    sessions_ = std::move(*sessions);
  }

  [[nodiscard]] DaemonInside& inside() { return inside_; }
  // The attached client of this process, or null.
  daemon::Client* client_of(pid_t pid) {
    auto& clients = inside_.coordinator().clients;
    for (const ClientSlot slot : clients.attached()) {
      daemon::Client& c = clients.get(slot);
      if (clients.entry(c).pid.load() == static_cast<std::uint32_t>(pid)) return &c;
    }
    return nullptr;
  }

  // Lets forked children have the memory that is kept from them otherwise.
  void share_with_forks(const daemon::Client& client) {
    for (const auto& [data, size] : shared_memory(client)) ::madvise(data, size, MADV_DOFORK);
  }
  // In a forked child: its own copies of everything that the daemon shares with anybody, as they are now.
  // What one child does must be seen neither by the parent nor by the next one.
  void part_from_parent(const daemon::Client& client) {
    auto list = shared_memory(client);
    auto& clients = inside_.coordinator().clients;
    for (const ClientSlot slot : clients.attached()) {
      if (&clients.get(slot) != &client) add_memory_of(clients.get(slot), list);
    }
    for (const auto& [data, size] : list) {
      std::vector<std::uint8_t> copy(size);
      std::memcpy(copy.data(), data, size);
      if (::mmap(data, size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != data)
        throw std::runtime_error("mmap");
      std::memcpy(data, copy.data(), size);
    }
  }

 private:
  static std::unique_ptr<daemon::CudaPath> make_cuda() {
    daemon::CudaOptions options;
    options.mode = daemon::CudaMode::off;
    return daemon::make_cuda_path(options);
  }
  using MemoryList = std::vector<std::pair<void*, std::size_t>>;
  static void add_memory_of(const daemon::Client& client, MemoryList& list) {
    list.emplace_back(client.channel->data(), client.channel->size());
    if (client.memory == nullptr) return;
    for (const Mapping& m : client.memory->allocations) list.emplace_back(m.data(), m.size());
  }
  MemoryList shared_memory(const daemon::Client& client) {
    MemoryList list = {{inside_.tables().header, inside_.region().region_bytes()},
                       {inside_.region().pool(), inside_.region().pool_bytes()}};
    add_memory_of(client, list);
    return list;
  }

  DaemonInside inside_;
  std::unique_ptr<daemon::CudaPath> cuda_;
  std::optional<daemon::Registration> registration_;
  std::unique_ptr<daemon::SessionServer> sessions_;
};

}  // namespace hicache::test
