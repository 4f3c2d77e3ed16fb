// Ranks that map the pool (io_backend kernel): what marks the pages that are leased to them, what happens
// when one of them breaks the protocol, and the pages that an earlier daemon leased to processes that still
// live.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "daemon/coordinator/coordinator_impl.hpp"

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
}

// One for a group and a life of the daemon: a page is filled by ranks of one group. Two that are equal by
// accident would only keep pages back for longer.
std::uint64_t Coordinator::Impl::pool_tag_of(const Client& client) const {
  const GroupEntry& group = tables.groups[client.group.value];
  const std::uint64_t place = std::uint64_t{group.generation.load(kRelaxed)} << 32 | (client.group.value + 1);
  return (tables.header->instance_epoch.load(kRelaxed) ^ (place * 0x9e3779b97f4a7c15ull)) | 1;
}

void Coordinator::Impl::breach(const BreachRequest& request) {
  Client* client = clients.find(request.client, request.client_generation);
  if (client == nullptr || client->state != ClientState::attached) return;
  stats.add(Counter::fenced_clients);
  lose(*client, false);
}

void Coordinator::Impl::mapper_gone(ClientSlot slot) {
  const auto scope = commit();
  const std::uint64_t tag = clients.forget_mapper(slot);
  if (clients.mapper_with(tag)) return;  // another rank of the group lives, and may write to the same pages
  std::size_t freed = 0;
  std::erase_if(held, [&](const HeldPage& page) {
    if (page.tag != tag) return false;
    pages.finish_abort(page.page);
    ++freed;
    return true;
  });
  stats.set(Counter::held_pages, held.size());
  spdlog::info("the processes that an earlier daemon had leased {} pages to have ended: the pages are free",
               freed);
}

std::vector<PoolMapper> Coordinator::pool_mappers() const {
  std::vector<PoolMapper> mappers;
  for (const ClientSlot slot : impl_->clients.mappers()) {
    const ClientEntry& e = impl_->tables.clients[slot.value];
    mappers.push_back({slot, ProcessIdentity{e.pid.load(kRelaxed), e.start_ticks.load(kRelaxed)}});
  }
  return mappers;
}

}  // namespace hicache::daemon
