#include "tools/dump/json_report.hpp"

#include "shm/counters.hpp"
#include "tools/dump/config_view.hpp"
#include "tools/dump/decode.hpp"
#include "tools/dump/summary.hpp"

namespace hicache::inspect {
namespace {

using Json = nlohmann::ordered_json;

Json id_json(const std::optional<std::uint32_t>& id) {
  return id ? Json(*id) : Json(nullptr);
}

Json header_json(const Snapshot& snapshot) {
  const HeaderRow h = decode_header(*snapshot.tables().header);
  return {{"name", h.name},
          {"layout_major", h.layout_major},
          {"layout_minor", h.layout_minor},
          {"layout_fingerprint", h.fingerprint},
          {"instance_epoch", h.instance_epoch},
          {"state", h.state},
          {"created_unix_ns", h.created_unix_ns},
          {"region_bytes", h.region_bytes},
          {"object_bytes", snapshot.object_bytes()},
          {"pool_bytes", h.pool_bytes},
          {"segment_bytes", h.segment_bytes},
          {"daemon_pid", h.daemon_pid},
          {"daemon_start_ticks", h.daemon_start_ticks},
          {"boot_id", h.boot_id},
          {"socket_path", h.socket_path},
          {"commit_sequence", h.commit_sequence},
          {"operation_sequence", h.operation_sequence},
          {"heartbeat_ns", h.heartbeat_ns},
          {"use_clock", h.use_clock}};
}

Json namespaces_json(const ConstTables& t, const Summary& s) {
  Json list = Json::array();
  for (const NamespaceRow& ns : decode_namespaces(t)) {
    const NamespaceUse& use = s.namespaces[ns.id];
    list.push_back({{"id", ns.id},
                    {"state", ns.state},
                    {"digest", ns.digest},
                    {"base_digest", ns.base_digest},
                    {"label", ns.label},
                    {"successor", id_json(ns.successor)},
                    {"weights_epoch", ns.weights_epoch},
                    {"shards", ns.shards},
                    {"shard_bytes", ns.shard_bytes},
                    {"shard_stride", ns.shard_stride},
                    {"slot_bytes", ns.slot_bytes},
                    {"size_class", ns.size_class},
                    {"page_tokens", ns.page_tokens},
                    {"layers", ns.layers},
                    {"attached_clients", ns.attached_clients},
                    {"pages", use.pages},
                    {"ready_pages", use.ready},
                    {"pool_bytes", use.bytes},
                    {"resident_pages", ns.resident_pages},
                    {"hits", ns.hits},
                    {"written", ns.written},
                    {"evicted", ns.evicted}});
  }
  return list;
}

Json page_states_json(const ConstTables& t, const Summary& s) {
  Json states;
  for (std::size_t i = 0; i < kPageStateCount; ++i) {
    states[std::string(to_string(static_cast<PageState>(i)))] = s.page_states[i];
  }
  states["invalid"] = s.page_states[kPageStateCount];
  return {{"entries", t.pages.size()}, {"states", states}, {"pins", s.pins}, {"dirty", s.dirty}};
}

Json index_json(const ConstTables& t, const Summary& s) {
  return {{"buckets", t.index.size()},        {"buckets_used", s.buckets_used},
          {"pages", s.indexed_pages},         {"longest_chain", s.longest_chain},
          {"chain_lengths", s.chain_lengths}, {"broken_chains", s.broken_chains}};
}

Json counters_json(const ConstTables& t) {
  Json counters = Json::object();
  for (std::uint32_t i = 0; i < t.counters.size(); ++i) {
    counters[std::string(counter_name(static_cast<Counter>(i)))] = get(t.counters[i]);
  }
  return counters;
}

Json groups_json(const ConstTables& t) {
  Json list = Json::array();
  for (const GroupRow& g : decode_groups(t)) {
    list.push_back({{"slot", g.slot},
                    {"generation", g.generation},
                    {"state", g.state},
                    {"engine", g.engine},
                    {"namespace", id_json(g.namespace_id)},
                    {"tp_size", g.tp_size},
                    {"members_attached", g.members_attached},
                    {"scheduler", id_json(g.scheduler)},
                    {"leases", g.leases},
                    {"operations", g.operations},
                    {"divergences", g.divergences}});
  }
  return list;
}

Json host_pages_json(const ClientRow& client) {
  Json json = Json::object();
  for (std::size_t i = 0; i < kHostPageStates; ++i) {
    json[std::string(to_string(static_cast<HostPageState>(i)))] = client.host_pages.pages[i];
  }
  json["refused_transitions"] = client.host_pages.refused;
  json["changed_last"] = Json::array();
  for (const HostHandle& handle : client.host_pages.handles) {
    if (handle.state == HostPageState::idle) continue;
    json["changed_last"].push_back(
        {{"host_page", handle.page}, {"state", to_string(handle.state)}, {"key", key_start(handle.key)}});
  }
  return json;
}

Json clients_json(const ConstTables& t) {
  Json list = Json::array();
  for (const ClientRow& c : decode_clients(t)) {
    list.push_back({{"slot", c.slot},
                    {"generation", c.generation},
                    {"state", c.state},
                    {"role", c.role},
                    {"tp_rank", c.tp_rank},
                    {"group", id_json(c.group)},
                    {"namespace", id_json(c.namespace_id)},
                    {"engine", c.engine},
                    {"pid", c.pid},
                    {"uid", c.uid},
                    {"attached_unix_ns", c.attached_unix_ns},
                    {"device_pages", c.device_pages},
                    {"operations", c.operations},
                    {"errors", c.errors},
                    {"over_quota", c.over_quota},
                    {"bytes_written", c.bytes_written},
                    {"bytes_loaded", c.bytes_loaded},
                    {"last_operation_ns", c.last_operation_ns},
                    {"maps_pool", c.maps_pool},
                    {"host_pages", host_pages_json(c)}});
  }
  return list;
}

Json leases_json(const ConstTables& t) {
  Json list = Json::array();
  for (const LeaseRow& l : decode_leases(t)) {
    list.push_back({{"slot", l.slot},
                    {"generation", l.generation},
                    {"state", l.state},
                    {"group", id_json(l.group)},
                    {"namespace", id_json(l.namespace_id)},
                    {"sequence", l.sequence},
                    {"holders", l.holders},
                    {"pages", l.pages},
                    {"hits", l.hits},
                    {"pins", l.pins}});
  }
  return list;
}

Json rings_json(const ConstTables& t) {
  Json list = Json::array();
  for (const ClientRow& c : decode_clients(t)) {
    list.push_back({{"client", c.slot},
                    {"sq_head", c.sq_head},
                    {"sq_tail_seen", c.sq_tail_seen},
                    {"cq_head_seen", c.cq_head_seen},
                    {"cq_tail", c.cq_tail},
                    {"operations_in_flight", c.operations_in_flight},
                    {"copies_in_flight", c.copies_in_flight}});
  }
  return list;
}

Json page_list_json(const ConstTables& t) {
  Json list = Json::array();
  for (std::uint32_t i = 0; i < t.pages.size(); ++i) {
    const auto p = decode_page(t, i);
    if (!p) continue;
    list.push_back({{"id", p->id},
                    {"key", p->key},
                    {"namespace", id_json(p->namespace_id)},
                    {"state", p->state},
                    {"flags", p->flags},
                    {"generation", p->generation},
                    {"pins", p->pins},
                    {"slot_bytes", p->slot_bytes},
                    {"pool_offset", p->pool_offset},
                    {"last_use", p->last_use},
                    {"uses", p->uses},
                    {"parent", id_json(p->parent)},
                    {"children", p->children},
                    {"depth", p->depth},
                    {"shards_done", p->shards_done},
                    {"filler_lease", id_json(p->filler_lease)},
                    {"leased", p->leased}});
  }
  return list;
}

Json buckets_json(const ConstTables& t, const IndexWalk& walk) {
  static constexpr const char* kEnds[] = {"whole", "out_of_range", "cycle", "shared"};
  Json list = Json::array();
  for (std::uint32_t bucket = 0; bucket < walk.chains().size(); ++bucket) {
    const IndexWalk::Chain& chain = walk.chains()[bucket];
    if (chain.length == 0 && chain.end == ChainEnd::whole) continue;
    list.push_back({{"bucket", bucket},
                    {"version", get(t.index[bucket].head) >> 32},
                    {"end", kEnds[static_cast<std::size_t>(chain.end)]},
                    {"pages", walk.pages_of(chain)}});
  }
  return list;
}

Json operations_json(const ConstTables& t) {
  const Operations operations = decode_operations(t);
  Json list = Json::array();
  for (const OperationRow& o : operations.rows) {
    list.push_back({{"sequence", o.sequence},
                    {"time_ns", o.time_ns},
                    {"event", o.event},
                    {"opcode", o.opcode},
                    {"status", o.status},
                    {"client", o.client},
                    {"client_generation", o.client_generation},
                    {"lease", o.lease},
                    {"count", o.count},
                    {"detail", o.detail},
                    {"user_data", o.user_data}});
  }
  return {{"skipped", operations.skipped}, {"records", list}};
}

Json check_json(const CheckReport& report) {
  Json findings = Json::array();
  for (const Finding& f : report.findings) {
    findings.push_back({{"kind", to_string(f.id.kind)},
                        {"table", to_string(f.id.table)},
                        {"index", f.id.index},
                        {"generation", f.id.generation},
                        {"text", f.text}});
  }
  return {{"clean", report.findings.empty()},
          {"findings", findings},
          {"left_out", report.left_out},
          {"snapshots", report.snapshots},
          {"exact", report.exact},
          {"gauges_compared", report.gauges_compared},
          {"notes", report.notes}};
}

}  // namespace

Json to_json(const Snapshot& snapshot, const std::string& what, const ReportOptions& options,
             const CheckReport* check) {
  Json doc;
  doc["region"] = what;
  doc["verdict"] = {{"condition", to_string(snapshot.verdict().condition)},
                    {"why", printable(snapshot.verdict().why)},
                    {"daemon_alive", snapshot.daemon_alive()}};
  if (snapshot.readable()) {
    const ConstTables& t = snapshot.tables();
    const IndexWalk walk(t);
    const Summary summary = summarise(t, walk);
    const ConfigView config = view_config(t);
    doc["header"] = header_json(snapshot);
    doc["config"] = config.json.is_null() ? Json(printable(config.text)) : config.json;
    doc["pool"] = {{"bytes", get(t.header->pool_bytes)},
                   {"used_bytes", summary.used_bytes},
                   {"segments", t.segments.size()},
                   {"segments_assigned", summary.segments_assigned},
                   {"slots", summary.slots},
                   {"used_slots", summary.used_slots}};
    if (summary.segments_by_node.size() > 1) {
      for (const auto& [node, segments] : summary.segments_by_node) {
        doc["pool"]["numa_nodes"].push_back({{"node", node == kNone32 ? Json(nullptr) : Json(node)},
                                             {"segments", segments.second},
                                             {"segments_assigned", segments.first}});
      }
    }
    doc["namespaces"] = namespaces_json(t, summary);
    doc["pages"] = page_states_json(t, summary);
    doc["index"] = index_json(t, summary);
    doc["counters"] = counters_json(t);
    if (options.ranks) {
      doc["groups"] = groups_json(t);
      doc["clients"] = clients_json(t);
      doc["leases"] = leases_json(t);
    }
    if (options.rings) doc["rings"] = rings_json(t);
    if (options.index) doc["buckets"] = buckets_json(t, walk);
    if (options.pages) doc["page_list"] = page_list_json(t);
    if (options.operations) doc["operations"] = operations_json(t);
  }
  if (check != nullptr) doc["check"] = check_json(*check);
  return doc;
}

}  // namespace hicache::inspect
