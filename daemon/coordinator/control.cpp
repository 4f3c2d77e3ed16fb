// hicache-ctl's commands, answered as JSON. docs/protocol.md lists them.
#include <charconv>
#include <nlohmann/json.hpp>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "daemon/cuda/cuda_path.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {

using nlohmann::json;
constexpr auto kRelaxed = std::memory_order_relaxed;

// Names come from clients and need not be UTF-8, which JSON text must be.
std::string text_of(const json& value) {
  return value.dump(-1, ' ', true, json::error_handler_t::replace);
}

template <class Atomic>
auto get(const Atomic& a) {
  return a.load(kRelaxed);
}

std::string_view name_of(GroupState state) {
  switch (state) {
    case GroupState::free:
      return "free";
    case GroupState::active:
      return "active";
    case GroupState::broken:
      return "broken";
  }
  return "unknown";
}

std::string_view name_of(MlaLoad mode) {
  switch (mode) {
    case MlaLoad::automatic:
      return "auto";
    case MlaLoad::direct:
      return "direct";
    case MlaLoad::exchange:
      return "exchange";
  }
  return "unknown";
}

json to_json(const ExchangeStatus& status) {
  json direct = json::object();
  for (std::size_t i = 0; i < status.direct.size(); ++i)
    direct[name_of(static_cast<GoDirect>(i))] = status.direct[i];
  return {{"load", name_of(status.mode)},
          {"off_because", status.off_because},
          {"exchanged", status.exchanged},
          {"failed", status.failed},
          {"direct", direct}};
}

json to_json(const CudaStatus& status, std::uint64_t pool_bytes) {
  json gpus = json::array();
  for (const GpuStatus& gpu : status.gpus) {
    gpus.push_back({{"uuid", gpu.uuid},
                    {"name", gpu.name},
                    {"state", gpu.state},
                    {"transfers", gpu.transfers},
                    {"failed", gpu.failed},
                    {"copies", gpu.copies},
                    {"enqueue_ns", gpu.enqueue_ns},
                    {"staged_chunks", gpu.staged_chunks},
                    {"bytes_written", gpu.bytes_written},
                    {"bytes_loaded", gpu.bytes_loaded},
                    {"bytes_passed", gpu.bytes_passed}});
  }
  return {{"state", status.on ? "on" : "off"},   {"reason", status.reason},  {"pinning", status.pinning},
          {"pinned_bytes", status.pinned_bytes}, {"pool_bytes", pool_bytes}, {"gpus", gpus},
          {"mla", to_json(status.exchange)}};
}

}  // namespace

std::uint32_t Coordinator::Impl::evict_pages(std::uint32_t count) {
  std::uint32_t evicted = 0;
  while (evicted < count && pages.evict_one(EvictReason::request)) ++evicted;
  return evicted;
}

// Evicts every page of a namespace that can go now: leaves first, then the parents they uncover.
std::uint32_t Coordinator::Impl::evict_namespace(NamespaceId ns) {
  std::uint32_t evicted = 0;
  for (std::uint32_t i = 0; i < pages.capacity(); ++i) {
    PageId page{i};
    while (page && pages.evictable(page) && pages.namespace_of(page) == ns) {
      const PageId parent = pages.parent(page);
      pages.evict(page, EvictReason::request);
      ++evicted;
      page = parent;
    }
  }
  return evicted;
}

void Coordinator::Impl::reload(const Config& next) {
  config = next;
  if (storage != nullptr) storage->reload(config.storage);
}

void Coordinator::Impl::control(ControlRequest& request) {
  const auto& args = request.arguments;
  const auto fail = [&](Status status, const std::string& text) {
    request.answer(status, text_of(json{{"error", text}, {"status", to_string(status)}}));
  };
  const std::string command = args.empty() ? "" : args[0];
  note(FlightEvent::control, nullptr, Opcode::none, Status::ok, 0, 0, 0);
  if (command == "status" && args.size() == 1) {
    json counters = json::object();
    for (std::uint32_t i = 0; i < kCounterCount; ++i) {
      counters[std::string(counter_name(static_cast<Counter>(i)))] = get(tables.counters[i]);
    }
    const json answer{{"name", config.name},
                      {"state", stopping.load(kRelaxed) ? "draining" : "ready"},
                      {"pid", get(tables.header->daemon_pid)},
                      {"instance_epoch", get(tables.header->instance_epoch)},
                      {"operation_sequence", get(tables.header->operation_sequence)},
                      {"pool",
                       {{"bytes", pool_bytes},
                        {"used_bytes", pages.slots().used_bytes()},
                        {"segments", tables.segments.size()},
                        {"assigned_segments", pages.slots().assigned_segments()},
                        {"segment_bytes", config.pool.segment_bytes}}},
                      {"pages",
                       {{"capacity", pages.capacity()},
                        {"resident", pages.resident()},
                        {"evictable_leaves", pages.evictable_count()}}},
                      {"cuda", to_json(cuda == nullptr ? CudaStatus{} : cuda->status(), pool_bytes)},
                      {"storage", storage_status()},
                      {"counters", counters}};
    return request.answer(Status::ok, text_of(answer));
  }
  if (command == "ranks" && args.size() == 1) {
    json list = json::array();
    for (const ClientSlot slot : clients.attached()) {
      const Client& client = clients.get(slot);
      const ClientEntry& e = clients.entry(client);
      const Group& group = groups.get(client.group);
      list.push_back({{"client", slot.value},
                      {"generation", client.generation.value},
                      {"role", to_string(client.role)},
                      {"engine", group.engine},
                      {"group", group.slot.value},
                      {"group_state", name_of(group.state)},
                      {"group_leases", group.leases},
                      {"group_pinned_bytes", leases.share().pinned_bytes(group.slot)},
                      {"tp_rank", client.tp_rank},
                      {"tp_size", group.tp_size},
                      {"namespace", group.namespace_id.value},
                      {"pid", get(e.pid)},
                      {"uid", get(e.uid)},
                      {"device_pages", get(e.device_pages)},
                      {"operations", get(e.operations)},
                      {"errors", get(e.errors)},
                      {"over_quota", get(e.over_quota)},
                      {"read_only", client.read_only},
                      {"open_operations", client.open_operations},
                      {"copies_in_flight", client.copies_in_flight},
                      {"bytes_written", get(e.bytes_written)},
                      {"bytes_loaded", get(e.bytes_loaded)}});
    }
    return request.answer(Status::ok, text_of(json{{"ranks", list}}));
  }
  if (command == "namespaces" && args.size() == 1) {
    json list = json::array();
    for (std::uint32_t i = 0; i < tables.namespaces.size(); ++i) {
      const NamespaceId id{i};
      if (!namespaces.known(id)) continue;
      const Namespace& ns = namespaces.get(id);
      const NamespaceEntry& e = tables.namespaces[i];
      list.push_back({{"namespace", i},
                      {"state", namespaces.retired(id) ? "retired" : "active"},
                      {"model", ns.spec_known ? ns.spec.model : load_text(e.label)},
                      {"revision", ns.spec.revision},
                      {"spec_known", ns.spec_known},
                      {"digest", to_hex(ns.digest)},
                      {"base_digest", to_hex(ns.base_digest)},
                      {"weights_epoch", get(e.weights_epoch)},
                      {"shards", get(e.shards)},
                      {"shard_bytes", get(e.shard_bytes)},
                      {"slot_bytes", get(e.slot_bytes)},
                      {"page_tokens", get(e.page_tokens)},
                      {"resident_pages", get(e.resident_pages)},
                      {"resident_bytes", get(e.resident_pages) * get(e.slot_bytes)},
                      {"hits", get(e.hits)},
                      {"written", get(e.written)},
                      {"evicted", get(e.evicted)},
                      {"attached_clients", get(e.attached_clients)}});
    }
    return request.answer(Status::ok, text_of(json{{"namespaces", list}}));
  }
  if (command == "clear" && args.size() == 1) {
    const auto scope = commit();
    const std::uint32_t evicted = evict_pages(kNone32);
    return request.answer(Status::ok, text_of(json{{"evicted", evicted}, {"resident", pages.resident()}}));
  }
  if (command == "evict" && args.size() == 2) {
    std::uint32_t count = 0;
    const auto [end, error] = std::from_chars(args[1].data(), args[1].data() + args[1].size(), count);
    if (error != std::errc{} || end != args[1].data() + args[1].size()) {
      return fail(Status::invalid_argument, "evict '" + args[1] + "': expected a number of pages");
    }
    const auto scope = commit();
    const std::uint32_t evicted = evict_pages(count);
    return request.answer(Status::ok, text_of(json{{"evicted", evicted}, {"resident", pages.resident()}}));
  }
  if (command == "evict-client" && args.size() == 2) {
    std::uint32_t slot = 0;
    const auto [end, error] = std::from_chars(args[1].data(), args[1].data() + args[1].size(), slot);
    if (error != std::errc{} || end != args[1].data() + args[1].size()) {
      return fail(Status::invalid_argument,
                  "evict-client '" + args[1] + "': expected a client number, see 'ranks'");
    }
    if (slot >= clients.capacity() || clients.get(ClientSlot{slot}).state != ClientState::attached) {
      return fail(Status::not_found,
                  "evict-client " + args[1] + ": no client of that number is attached, see 'ranks'");
    }
    Client& client = clients.get(ClientSlot{slot});
    const json answer{{"evicted_client", slot},
                      {"pid", get(clients.entry(client).pid)},
                      {"engine", groups.get(client.group).engine},
                      {"tp_rank", client.tp_rank},
                      {"copies_in_flight", client.copies_in_flight}};
    // As if it had died: its copies in flight end first, then its pages and buffers are free.
    lose(client, false);
    return request.answer(Status::ok, text_of(answer));
  }
  if (command == "config" && args.size() == 1) return request.answer(Status::ok, config_to_json(config));
  if (command == "namespace" && args.size() == 3 && args[1] == "bump") {
    const auto scope = commit();
    auto retired = namespaces.bump(args[2]);
    if (!retired) return fail(retired.status(), retired.error().message);
    json list = json::array();
    for (const NamespaceId id : *retired) {
      const NamespaceId successor{get(tables.namespaces[id.value].successor)};
      groups.for_each([&](Group& group) {
        if (group.namespace_id != id || !successor) return;
        groups.set_namespace(group, successor);
        move_clients(group, successor);
      });
      list.push_back(
          {{"namespace", id.value},
           {"successor", successor.value},
           {"weights_epoch", get(tables.namespaces[(successor ? successor : id).value].weights_epoch)},
           {"evicted", evict_namespace(id)}});
    }
    return request.answer(Status::ok, text_of(json{{"bumped", list}}));
  }
  if (command == "storage") return control_storage(request);
  std::string text = "unknown command '";
  for (std::size_t i = 0; i < args.size(); ++i) text += (i ? " " : "") + args[i];
  fail(Status::invalid_argument, text +
                                     "': expected status, ranks, namespaces, clear, evict N, evict-client N, "
                                     "config, storage ... or namespace bump PREFIX");
}

}  // namespace hicache::daemon
