#include "daemon/coordinator/client_table.hpp"

#include <algorithm>
#include <cassert>

#include "daemon/coordinator/stats.hpp"
#include "shm/clock.hpp"
#include "shm/region.hpp"

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
}

ClientTable::ClientTable(std::span<ClientEntry> entries, std::span<const ClientSlot> mappers)
    : entries_(entries), clients_(entries.size()), mappers_(mappers.begin(), mappers.end()) {
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    ClientEntry& e = entries_[i];
    clients_[i].slot = ClientSlot{i};
    clients_[i].generation = Generation{e.generation.load(kRelaxed)};
    e.group.store(kNone32, kRelaxed);
    e.namespace_id.store(kNone32, kRelaxed);
    e.operations_in_flight.store(0, kRelaxed);
    e.copies_in_flight.store(0, kRelaxed);
    if (std::find(mappers_.begin(), mappers_.end(), ClientSlot{i}) != mappers_.end()) {
      clients_[i].state = ClientState::dying;
      clients_[i].pool_tag = e.pool_tag.load(kRelaxed);
      e.state.store(static_cast<std::uint32_t>(ClientState::dying), kRelaxed);
      continue;
    }
    e.pool_tag.store(0, kRelaxed);
    // Clients of an earlier daemon that still wait for their copies take this as the proof that they are
    // over.
    e.state.store(static_cast<std::uint32_t>(ClientState::free), std::memory_order_release);
  }
}

Client* ClientTable::admit(const AttachRequest& request, std::uint64_t instance_epoch) {
  const auto free_slot = std::find_if(clients_.begin(), clients_.end(),
                                      [](const Client& c) { return c.state == ClientState::free; });
  if (free_slot == clients_.end()) return nullptr;
  Client& client = *free_slot;
  client.generation = Generation{client.generation.value + 1 == 0 ? 1 : client.generation.value + 1};
  client.role = request.hello.role;
  client.tp_rank = request.hello.tp_rank;
  client.channel = request.channel;
  client.kick = request.kick;
  client.memory.reset();
  client.pool_tag = 0;
  client.geometry = request.geometry;
  client.open_operations = client.owed_returns = client.copies_in_flight = 0;
  client.has_new_completions = false;
  client.handle_changes = client.refusals = 0;
  client.read_only = request.read_only;
  client.lists = {};

  auto* base = static_cast<std::uint8_t*>(request.channel->data());
  client.header = reinterpret_cast<ChannelHeader*>(base);
  client.arena = base + request.geometry.arena_offset;
  client.header->instance_epoch.store(instance_epoch, kRelaxed);
  client.header->client_slot.store(client.slot.value, kRelaxed);
  client.header->client_generation.store(client.generation.value, kRelaxed);
  client.header->magic.store(kChannelMagic, std::memory_order_release);
  client.submissions =
      RingConsumer<Submission>(reinterpret_cast<const RingEntry*>(base + request.geometry.sq_offset),
                               request.geometry.sq_entries, &client.header->sq_head);
  client.completions =
      RingProducer<Completion>(reinterpret_cast<RingEntry*>(base + request.geometry.cq_offset),
                               request.geometry.cq_entries, &client.header->cq_head, &client.header->cq_tail);

  ClientEntry& e = entries_[client.slot.value];
  e.generation.store(client.generation.value, kRelaxed);
  e.pid.store(request.pid, kRelaxed);
  e.uid.store(request.uid, kRelaxed);
  e.start_ticks.store(request.start_ticks, kRelaxed);
  e.role.store(static_cast<std::uint32_t>(client.role), kRelaxed);
  e.tp_rank.store(client.tp_rank, kRelaxed);
  e.attached_unix_ns.store(unix_ns(), kRelaxed);
  e.device_pages.store(0, kRelaxed);
  e.pool_tag.store(0, kRelaxed);
  e.operations.store(0, kRelaxed);
  e.errors.store(0, kRelaxed);
  e.bytes_written.store(0, kRelaxed);
  e.bytes_loaded.store(0, kRelaxed);
  e.last_operation_ns.store(0, kRelaxed);
  for (auto& handle : e.host_handles) {
    for (A64& word : handle) word.store(0, kRelaxed);
  }
  e.over_quota.store(0, kRelaxed);
  store_text(e.engine, request.hello.engine);
  set_state(client, ClientState::attached);
  mirror_rings(client);
  return &client;
}

Client* ClientTable::find(ClientSlot slot, Generation generation) {
  if (slot.value >= clients_.size()) return nullptr;
  Client& client = clients_[slot.value];
  return client.state != ClientState::free && client.generation == generation ? &client : nullptr;
}

void ClientTable::publish(const Client& client, GroupSlot group, NamespaceId ns) {
  entries_[client.slot.value].group.store(group.value, kRelaxed);
  entries_[client.slot.value].namespace_id.store(ns.value, kRelaxed);
}

void ClientTable::mirror_rings(const Client& client) {
  ClientEntry& e = entries_[client.slot.value];
  e.sq_head.store(client.submissions.head(), kRelaxed);
  // The client may write anything there; what can't be true is shown as an empty ring.
  const std::uint32_t tail = client.header->sq_tail.load(kRelaxed);
  const std::uint32_t head = client.submissions.head();
  e.sq_tail_seen.store(tail - head > client.geometry.sq_entries ? head : tail, kRelaxed);
  e.cq_tail.store(client.completions.tail(), kRelaxed);
  e.cq_head_seen.store(client.completions.head_seen(), kRelaxed);
  e.operations_in_flight.store(client.open_operations, kRelaxed);
  for (std::size_t i = 0; i < kHostPageStates; ++i) {
    e.host_pages[i].store(client.header->host_pages[i].load(kRelaxed), kRelaxed);
  }
  e.host_page_refusals.store(client.header->host_page_refusals.load(kRelaxed), kRelaxed);
  e.copies_in_flight.store(client.copies_in_flight, kRelaxed);
}

void ClientTable::mirror_handles(Client& client) {
  const std::uint32_t changes = client.header->host_page_changes.load(kRelaxed);
  if (changes == client.handle_changes) return;
  client.handle_changes = changes;
  ClientEntry& e = entries_[client.slot.value];
  for (std::size_t i = 0; i < kShownHandles; ++i) {
    for (const std::size_t word : {0, 1}) {
      e.host_handles[i][word].store(client.header->host_handles[i][word].load(kRelaxed), kRelaxed);
    }
  }
}

void ClientTable::set_state(Client& client, ClientState state) {
  client.state = state;
  entries_[client.slot.value].state.store(static_cast<std::uint32_t>(state), kRelaxed);
  attached_.clear();
  for (const Client& c : clients_) {
    if (c.state == ClientState::attached) attached_.push_back(c.slot);
  }
}

void ClientTable::set_pool_tag(Client& client, std::uint64_t tag) {
  client.pool_tag = tag;
  // Release: whoever takes the region over finds pid and start time with it.
  entries_[client.slot.value].pool_tag.store(tag, std::memory_order_release);
}

std::uint64_t ClientTable::forget_mapper(ClientSlot slot) {
  std::erase(mappers_, slot);
  Client& client = clients_[slot.value];
  assert(client.state == ClientState::dying && client.channel == nullptr);
  const std::uint64_t tag = client.pool_tag;
  remove(client);
  return tag;
}

bool ClientTable::mapper_with(std::uint64_t tag) const {
  return std::any_of(mappers_.begin(), mappers_.end(),
                     [&](ClientSlot slot) { return clients_[slot.value].pool_tag == tag; });
}

void ClientTable::remove(Client& client) {
  assert(client.copies_in_flight == 0);
  publish(client, GroupSlot::none(), NamespaceId::none());
  client.channel.reset();
  client.kick.reset();
  client.memory.reset();
  client.header = nullptr;
  client.arena = nullptr;
  client.pool_tag = 0;
  entries_[client.slot.value].pool_tag.store(0, kRelaxed);
  set_state(client, ClientState::free);
}

}  // namespace hicache::daemon
