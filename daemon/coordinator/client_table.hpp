// Attached ranks and schedulers: their channels, their place in a group, and what they have in flight.
//
// Thread safety: none; the coordinator's own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/coordinator/open_lists.hpp"
#include "daemon/coordinator/requests.hpp"
#include "shm/ring.hpp"

namespace hicache::daemon {

struct Client {
  ClientSlot slot;
  Generation generation;
  ClientState state = ClientState::free;
  Role role = Role::rank;
  std::uint32_t tp_rank = 0;
  bool read_only = false;  // its user may not change what is cached
  GroupSlot group;
  NamespaceId attached_namespace;  // the one it was counted in
  std::shared_ptr<Mapping> channel;
  std::shared_ptr<UniqueFd> kick;
  std::shared_ptr<const RankMemory> memory;
  std::uint64_t pool_tag = 0;  // it maps the pool: what its leased pages are marked with
  ChannelHeader* header = nullptr;
  std::uint8_t* arena = nullptr;  // untrusted content
  ChannelGeometry geometry;
  RingConsumer<Submission> submissions;
  RingProducer<Completion> completions;
  std::uint32_t open_operations = 0;   // accepted, terminal completion not sent
  std::uint32_t owed_returns = 0;      // kPagesReturned completions to come
  std::uint32_t copies_in_flight = 0;  // transfers that have not ended
  bool has_new_completions = false;    // since the last kick round
  std::uint32_t handle_changes = 0;    // of its controller's handles, as of its last agreement
  std::uint32_t refusals = 0;          // wrong transitions of them, as of then
  OpenLists lists;                     // of the open operations

  // Completion slots that may become needed: nothing is read from the ring while they could run out.
  [[nodiscard]] std::uint32_t slots_spoken_for() const { return open_operations * 2 + owed_returns; }
};

class ClientTable {
 public:
  // `mappers`: entries of an earlier daemon whose processes map the pool and live. They keep their places,
  // as dying, until forget_mapper.
  explicit ClientTable(std::span<ClientEntry> entries, std::span<const ClientSlot> mappers = {});

  // Takes a free slot for an attach, or nullptr. The channel's header is filled.
  Client* admit(const AttachRequest& request, std::uint64_t instance_epoch);
  // The attached or dying client of this slot and generation, or nullptr.
  Client* find(ClientSlot slot, Generation generation);
  [[nodiscard]] Client& get(ClientSlot slot) { return clients_[slot.value]; }
  [[nodiscard]] ClientEntry& entry(const Client& client) { return entries_[client.slot.value]; }
  // Shows group, namespace and state in the control region.
  void publish(const Client& client, GroupSlot group, NamespaceId ns);
  // Shows that the client maps the pool.
  void set_pool_tag(Client& client, std::uint64_t tag);
  // The process of an earlier daemon's mapper has ended: gives its place back and returns its tag.
  std::uint64_t forget_mapper(ClientSlot slot);
  // Whether an earlier daemon's mapper with this tag is left.
  [[nodiscard]] bool mapper_with(std::uint64_t tag) const;
  [[nodiscard]] const std::vector<ClientSlot>& mappers() const { return mappers_; }
  // Copies ring positions to the control region.
  void mirror_rings(const Client& client);
  // Copies what the client's controller says about its handles, when that has changed.
  void mirror_handles(Client& client);
  void set_state(Client& client, ClientState state);
  // Gives the slot back. Precondition: no copy in flight.
  void remove(Client& client);

  // Slots of attached clients, for the serving loop. Changes only in admit, set_state and remove.
  [[nodiscard]] const std::vector<ClientSlot>& attached() const { return attached_; }
  [[nodiscard]] std::uint32_t capacity() const { return static_cast<std::uint32_t>(clients_.size()); }

 private:
  std::span<ClientEntry> entries_;
  std::vector<Client> clients_;
  std::vector<ClientSlot> attached_;
  std::vector<ClientSlot> mappers_;  // of an earlier daemon
};

}  // namespace hicache::daemon
