// Who belongs: attach, device buffers, and what the loss of a client means for its group.
#include <spdlog/spdlog.h>
#include <sys/epoll.h>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "shm/crash_points.hpp"
#include "shm/futex.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
}

// Models and adapters come and go, and each leaves pages behind: where the table is full, the namespace that
// was used longest ago makes room. One that an engine is attached to, or a lease is open in, never does.
Result<NamespaceId> Coordinator::Impl::namespace_for(const NamespaceSpec& spec, bool may_evict) {
  auto ns = namespaces.find_or_create(spec);
  while (may_evict && ns.status() == Status::again) {
    const auto idle = namespaces.longest_idle();
    if (!idle) break;
    namespaces.retire(*idle);
    const std::uint32_t evicted = evict_namespace(*idle);
    spdlog::info(
        "namespace {} makes room for another one, all {} of limits.namespaces are in use: {} pages evicted",
        to_hex(namespaces.get(*idle).base_digest).substr(0, 16), tables.namespaces.size(), evicted);
    ns = namespaces.find_or_create(spec);
  }
  return ns;
}

void Coordinator::Impl::attach(AttachRequest& request) {
  const auto refuse = [&](Status status, std::string text) {
    stats.add(Counter::attach_refused);
    AttachAnswer no;
    no.status = status;
    no.text = std::move(text);
    request.answer(std::move(no));
  };
  const Hello& hello = request.hello;
  if (stopping.load(kRelaxed)) return refuse(Status::shutting_down, "the daemon is stopping");
  if (hello.role != Role::rank && hello.role != Role::scheduler) {
    return refuse(Status::invalid_argument, "role " + std::to_string(static_cast<std::uint32_t>(hello.role)) +
                                                ": a channel is for ranks and schedulers");
  }
  if (hello.engine.empty() || hello.engine.size() > 63) {
    return refuse(Status::invalid_argument,
                  "engine has " + std::to_string(hello.engine.size()) + " bytes, expected 1 to 63");
  }
  if (hello.role == Role::rank && hello.tp_rank >= hello.spec.tp_size) {
    return refuse(Status::invalid_argument, "tp_rank " + std::to_string(hello.tp_rank) + " of tp_size " +
                                                std::to_string(hello.spec.tp_size));
  }
  const auto scope = commit();
  auto ns = namespace_for(hello.spec, !request.read_only);
  if (!ns) return refuse(ns.status(), ns.error().message);
  Group* group = groups.find_or_create(hello.engine, hello.spec.base_digest(), hello.spec.weights_epoch, *ns,
                                       hello.spec.tp_size, request.read_only);
  if (group == nullptr) return refuse(Status::again, "all groups are in use: raise limits.clients");
  const ClientSlot place = hello.role == Role::scheduler ? group->scheduler : group->members[hello.tp_rank];
  if (place) {
    return refuse(Status::exists, std::string(to_string(hello.role)) + " " + std::to_string(hello.tp_rank) +
                                      " of engine '" + hello.engine + "' is attached already");
  }
  Client* client = clients.admit(request, tables.header->instance_epoch.load(kRelaxed));
  if (client == nullptr) {
    groups.collect(*group);
    return refuse(Status::again, "all " + std::to_string(clients.capacity()) +
                                     " client slots are in use: raise limits.clients");
  }
  HICACHE_CRASH_POINT(attach_admitted);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = client->slot.value;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, client->kick->get(), &event) != 0) {
    clients.remove(*client);
    groups.collect(*group);
    return refuse(Status::system_error, "epoll_ctl failed for the client's eventfd");
  }
  groups.join(*group, hello.role, hello.tp_rank, client->slot);
  client->group = group->slot;
  client->attached_namespace = *ns;
  bump(namespaces.entry(*ns).attached_clients);
  clients.publish(*client, group->slot, *ns);
  // Before the pool's descriptor leaves: a daemon that comes after this one must know of the process.
  if (request.maps_pool) clients.set_pool_tag(*client, pool_tag_of(*client));
  stats.add(Counter::attaches);
  stats.add(Counter::attached_clients);
  note(FlightEvent::attach, client, Opcode::none, Status::ok, 0, 0, 0);

  HICACHE_CRASH_POINT(attach_joined);
  AttachAnswer yes;
  yes.client = client->slot;
  yes.client_generation = client->generation;
  yes.group = group->slot;
  yes.namespace_id = *ns;
  yes.spec = namespaces.get(*ns).spec;
  yes.weights_epoch = yes.spec.weights_epoch;
  request.answer(std::move(yes));
}

void Coordinator::Impl::buffers(BuffersRequest& request) {
  Client* client = clients.find(request.memory->client, request.memory->client_generation);
  if (client == nullptr || client->state != ClientState::attached) {
    return request.answer(Status::stale_generation, "the session has ended");
  }
  if (client->role != Role::rank)
    return request.answer(Status::not_permitted, "only ranks have device buffers");
  if (client->memory != nullptr)
    return request.answer(Status::exists, "device buffers are registered already");
  client->memory = request.memory;
  clients.entry(*client).device_pages.store(request.memory->geometry.pages, kRelaxed);
  Group& group = groups.get(client->group);
  group.node = node_of(group);
  HICACHE_CRASH_POINT(register_adopted);
  request.answer(Status::ok, "");
}

// The NUMA node of the devices of all ranks that have registered, or none: a page of a group has one slot, so
// where they differ no node is better than another.
NumaNode Coordinator::Impl::node_of(const Group& group) {
  NumaNode common;
  for (const ClientSlot member : group.members) {
    if (!member) continue;
    const auto& memory = clients.get(member).memory;
    if (memory == nullptr) continue;
    const NumaNode node = memory->device == nullptr ? NumaNode::none() : memory->device->node;
    if (!node || (common && common != node)) return NumaNode::none();
    common = node;
  }
  return common;
}

void Coordinator::Impl::gone(const GoneRequest& request) {
  Client* client = clients.find(request.client, request.client_generation);
  if (client == nullptr || client->state != ClientState::attached) return;
  lose(*client, request.orderly);
}

// A client that breaks the ring protocol hurts only itself: it is cut off as if it had died.
void Coordinator::Impl::fence(Client& client) {
  spdlog::warn("client {} generation {} broke the ring protocol: completion head {} against tail {}; fenced",
               client.slot.value, client.generation.value, client.completions.head_seen(),
               client.completions.tail());
  stats.add(Counter::fenced_clients);
  lose(client, false);
}

void Coordinator::Impl::lose(Client& client, bool orderly) {
  const auto scope = commit();
  Group& group = groups.get(client.group);
  note_refusals(client);
  note(orderly ? FlightEvent::detach : FlightEvent::lost, &client, Opcode::none, Status::ok, 0, 0, 0);
  if (!orderly) stats.add(Counter::lost_clients);
  stats.sub(Counter::attached_clients);
  // Fence first: from here on nothing of this client is executed, and its late messages carry an old
  // generation.
  clients.set_state(client, ClientState::dying);
  HICACHE_CRASH_POINT(lose_fenced);
  ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, client.kick->get(), nullptr);
  client.header->session_ended.store(
      1, std::memory_order_release);  // pairs with the client's acquire in state()
  bump(client.header->cq_wake);
  futex_wake_all(&client.header->cq_wake);
  transfers->cancel_client(client.slot, client.generation);
  lower(namespaces.entry(client.attached_namespace).attached_clients);
  groups.leave(group, client.slot);
  HICACHE_CRASH_POINT(lose_left);
  if (group.state == GroupState::active) {
    groups.break_up(group);
    end_backup_asks(group.slot);
    leases.for_each_live([&](Lease& lease) {
      if (lease.group != group.slot) return;
      lease.counts_as_use = false;
      for (auto& write : lease.writes) {
        if (write->ended) continue;
        stats.add(Counter::peer_lost);
        end_write(*write, Status::peer_lost);
      }
      if (lease.prefetch && !lease.prefetch->ended) end_prefetch(*lease.prefetch, Status::peer_lost);
      leases.set_holders(lease, 0);
      if (!lease.poisoned()) leases.set_state(lease, LeaseState::closing);
      maybe_finished.push_back(lease.id());
    });
  }
  remove_if_drained(client);
  groups.collect(group);
}

// The group's namespace was replaced: its clients count there from now on.
void Coordinator::Impl::move_clients(const Group& group, NamespaceId ns) {
  for (const ClientSlot slot : clients.attached()) {
    Client& client = clients.get(slot);
    if (client.group != group.slot) continue;
    lower(namespaces.entry(client.attached_namespace).attached_clients);
    bump(namespaces.entry(ns).attached_clients);
    client.attached_namespace = ns;
    clients.publish(client, group.slot, ns);
  }
}

void Coordinator::Impl::remove_if_drained(Client& client) {
  if (client.state != ClientState::dying || client.copies_in_flight != 0) return;
  clients.remove(client);
}

}  // namespace hicache::daemon
