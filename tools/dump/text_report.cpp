#include "tools/dump/text_report.hpp"

#include <fmt/format.h>

#include <ctime>
#include <optional>

#include "shm/clock.hpp"
#include "shm/counters.hpp"
#include "tools/dump/config_view.hpp"
#include "tools/dump/decode.hpp"
#include "tools/dump/summary.hpp"

namespace hicache::inspect {
namespace {

constexpr std::size_t kConfigTextShown = 200;

std::string bytes_text(std::uint64_t bytes) {
  if (bytes >= kGiB) return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / static_cast<double>(kGiB));
  if (bytes >= kMiB) return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / static_cast<double>(kMiB));
  return fmt::format("{} B", bytes);
}

std::string id_text(const std::optional<std::uint32_t>& id) {
  return id ? std::to_string(*id) : "-";
}

double percent(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

std::string utc(std::uint64_t unix_nanoseconds) {
  const auto seconds = static_cast<std::time_t>(unix_nanoseconds / 1'000'000'000);
  std::tm tm{};
  char text[32];
  if (::gmtime_r(&seconds, &tm) == nullptr ||
      std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &tm) == 0) {
    return "?";
  }
  return text;
}

void write_header(Output& out, const Snapshot& snapshot) {
  const HeaderRow h = decode_header(*snapshot.tables().header);
  out.line("header      layout {}.{}, fingerprint {:016x}, epoch {:016x}, state {}, name '{}'",
           h.layout_major, h.layout_minor, h.fingerprint, h.instance_epoch, h.state, h.name);
  out.line("            created {}, region {}, commit {}, operations {}, use clock {}",
           utc(h.created_unix_ns), bytes_text(h.region_bytes), h.commit_sequence, h.operation_sequence,
           h.use_clock);
  const std::uint64_t now = monotonic_ns();
  const std::string beat = snapshot.daemon_alive() && h.heartbeat_ns != 0 && h.heartbeat_ns <= now
                               ? fmt::format(", last turn {} ms ago", (now - h.heartbeat_ns) / 1'000'000)
                               : "";
  out.line("daemon      pid {} ({}), start ticks {}{}, socket {}", h.daemon_pid,
           snapshot.daemon_alive() ? "runs" : "gone", h.daemon_start_ticks, beat, h.socket_path);
  for (const std::string& finding : snapshot.header_findings())
    out.line("warning     {}", printable(finding));
}

void write_config(Output& out, const ConstTables& t) {
  const ConfigView config = view_config(t);
  if (!config.json.is_object()) {
    out.line("config      {}", printable(config.text.substr(0, kConfigTextShown)));
    return;
  }
  std::string_view title = "config";
  for (const auto& [key, value] : config.json.items()) {
    out.line("{:<12}{} {}", title, printable(key), compact(value));
    title = "";
  }
}

void write_pool(Output& out, const ConstTables& t, const Summary& s) {
  const std::uint64_t pool = get(t.header->pool_bytes);
  out.line(
      "pool        {} of {} used ({:.1f} %), {} of {} segments of {} assigned, {} of {} slots in them used",
      bytes_text(s.used_bytes), bytes_text(pool), percent(s.used_bytes, pool), s.segments_assigned,
      t.segments.size(), bytes_text(get(t.header->segment_bytes)), s.used_slots, s.slots);
  if (s.segments_by_node.size() > 1) {
    for (const auto& [node, segments] : s.segments_by_node) {
      out.line("            NUMA node {}: {} of {} segments assigned",
               node == kNone32 ? "unknown" : std::to_string(node), segments.first, segments.second);
    }
  }
  for (const NamespaceRow& ns : decode_namespaces(t)) {
    const NamespaceUse& use = s.namespaces[ns.id];
    out.line("namespace   {} {} {} (base {}) '{}' epoch {}, {} clients{}", ns.id, ns.state,
             ns.digest.substr(0, 16), ns.base_digest.substr(0, 16), ns.label, ns.weights_epoch,
             ns.attached_clients,
             ns.successor ? fmt::format(", followed by namespace {}", *ns.successor) : "");
    out.line(
        "            {} pages ({} ready) x {} shards x {} = {} in the pool, slot {} B, {} tokens a page, {} "
        "layers",
        use.pages, use.ready, ns.shards, bytes_text(ns.shard_stride), bytes_text(use.bytes), ns.slot_bytes,
        ns.page_tokens, ns.layers);
    out.line("            hits {}, written {}, evicted {}", ns.hits, ns.written, ns.evicted);
  }
}

void write_summary(Output& out, const ConstTables& t, const Summary& s) {
  std::string states;
  for (std::size_t i = 0; i < s.page_states.size(); ++i) {
    if (i == kPageStateCount && s.page_states[i] == 0) continue;
    const std::string_view name = i < kPageStateCount ? to_string(static_cast<PageState>(i)) : "invalid";
    states += fmt::format("{}{} {}", states.empty() ? "" : ", ", name, s.page_states[i]);
  }
  out.line("pages       {} of {}; {} pins, {} dirty", states, t.pages.size(), s.pins, s.dirty);
  out.line("index       {} of {} buckets used ({:.1f} %), {} pages, longest chain {}{}", s.buckets_used,
           t.index.size(), percent(s.buckets_used, t.index.size()), s.indexed_pages, s.longest_chain,
           s.broken_chains == 0 ? "" : fmt::format(", {} broken chains", s.broken_chains));
  std::string lengths;
  for (std::size_t i = 0; i < s.chain_lengths.size(); ++i) {
    if (s.chain_lengths[i] == 0) continue;
    lengths += fmt::format(" {}{}:{}", i, i + 1 == s.chain_lengths.size() ? "+" : "", s.chain_lengths[i]);
  }
  out.line("            chain lengths{}", lengths);
  std::string_view title = "counters";
  for (std::uint32_t i = 0; i < t.counters.size(); ++i) {
    out.line("{:<12}{:<22}{:>16}  {}", title, counter_name(static_cast<Counter>(i)), get(t.counters[i]),
             counter_help(static_cast<Counter>(i)));
    title = "";
  }
}

// A client with a controller has handles, if only idle ones.
void write_host_pages(Output& out, const ClientRow& client) {
  std::string states;
  std::uint64_t handles = 0;
  for (std::size_t i = 0; i < kHostPageStates; ++i) {
    handles += client.host_pages.pages[i];
    states += fmt::format(" {} {}", to_string(static_cast<HostPageState>(i)), client.host_pages.pages[i]);
  }
  if (handles == 0) return;
  out.line("host pages  client {}{} refused transitions {}", client.slot, states, client.host_pages.refused);
  for (const HostHandle& handle : client.host_pages.handles) {
    if (handle.state == HostPageState::idle) continue;
    out.line("handle      client {} '{}' host page {} {} key {}", client.slot, client.engine, handle.page,
             to_string(handle.state), key_start(handle.key));
  }
}

void write_ranks(Output& out, const ConstTables& t) {
  const auto groups = decode_groups(t);
  const auto clients = decode_clients(t);
  const auto leases = decode_leases(t);
  if (groups.empty() && clients.empty() && leases.empty()) out.line("ranks       no group, client or lease");
  for (const GroupRow& g : groups) {
    out.line(
        "group       {} gen {} {} '{}' namespace {} ranks {} attached {:#x} scheduler {} leases {} "
        "operations {} "
        "divergences {}",
        g.slot, g.generation, g.state, g.engine, id_text(g.namespace_id), g.tp_size, g.members_attached,
        id_text(g.scheduler), g.leases, g.operations, g.divergences);
  }
  for (const ClientRow& c : clients) {
    out.line(
        "client      {} gen {} {} {} {} of group {} namespace {} '{}' pid {} uid {} since {} device pages {} "
        "operations {} errors {} over quota {} written {} loaded {}{}",
        c.slot, c.generation, c.state, c.role, c.tp_rank, id_text(c.group), id_text(c.namespace_id), c.engine,
        c.pid, c.uid, utc(c.attached_unix_ns), c.device_pages, c.operations, c.errors, c.over_quota,
        bytes_text(c.bytes_written), bytes_text(c.bytes_loaded), c.maps_pool ? ", maps the pool" : "");
    write_host_pages(out, c);
  }
  for (const LeaseRow& l : leases) {
    if (out.closed()) return;
    out.line(
        "lease       {} gen {} {} group {} namespace {} sequence {} holders {:#x} pages {} hits {} pins {}",
        l.slot, l.generation, l.state, id_text(l.group), id_text(l.namespace_id), l.sequence, l.holders,
        l.pages, l.hits, l.pins);
  }
}

void write_rings(Output& out, const ConstTables& t) {
  const auto clients = decode_clients(t);
  if (clients.empty()) out.line("rings       no client");
  for (const ClientRow& c : clients) {
    out.line(
        "ring        client {} submissions head {} tail {} ({} waiting), completions head {} tail {} ({} "
        "unread), "
        "{} operations and {} copies in flight",
        c.slot, c.sq_head, c.sq_tail_seen, static_cast<std::int32_t>(c.sq_tail_seen - c.sq_head),
        c.cq_head_seen, c.cq_tail, static_cast<std::int32_t>(c.cq_tail - c.cq_head_seen),
        c.operations_in_flight, c.copies_in_flight);
  }
}

void write_index(Output& out, const ConstTables& t, const IndexWalk& walk) {
  for (std::uint32_t bucket = 0; bucket < walk.chains().size() && !out.closed(); ++bucket) {
    const IndexWalk::Chain& chain = walk.chains()[bucket];
    if (chain.length == 0 && chain.end == ChainEnd::whole) continue;
    std::string pages;
    for (const std::uint32_t page : walk.pages_of(chain)) pages += fmt::format(" {}", page);
    if (chain.end != ChainEnd::whole) pages += fmt::format(" ... broken at {}", chain.bad_link);
    out.line("bucket      {} version {} length {}:{}", bucket, get(t.index[bucket].head) >> 32, chain.length,
             pages);
  }
}

void write_pages(Output& out, const ConstTables& t) {
  for (std::uint32_t i = 0; i < t.pages.size() && !out.closed(); ++i) {
    const auto p = decode_page(t, i);
    if (!p) continue;
    out.line(
        "page        {} key {} namespace {} {}{} gen {} pins {} size {} offset {:#x} last use {} uses {} "
        "parent {} "
        "children {} depth {} shards {:#x} filler {}{}",
        p->id, p->key, id_text(p->namespace_id), p->state, p->flags.empty() ? "" : " " + p->flags,
        p->generation, p->pins, p->slot_bytes, p->pool_offset, p->last_use, p->uses, id_text(p->parent),
        p->children, p->depth, p->shards_done, id_text(p->filler_lease), p->leased ? ", leased" : "");
  }
}

void write_operations(Output& out, const ConstTables& t) {
  const Operations operations = decode_operations(t);
  const std::uint64_t newest = get(t.header->heartbeat_ns);
  for (const OperationRow& o : operations.rows) {
    if (out.closed()) return;
    const auto age_ms = static_cast<double>(static_cast<std::int64_t>(newest - o.time_ns)) / 1e6;
    if (o.event == "refused_transition") {
      out.line(
          "op          {} {:.3f} ms before the last turn: {} {} of host page {} that is {}, client {} gen {} "
          "count {}",
          o.sequence, age_ms, o.event, o.opcode, static_cast<std::int32_t>(o.detail), o.status,
          static_cast<std::int32_t>(o.client), o.client_generation, o.count);
      continue;
    }
    out.line(
        "op          {} {:.3f} ms before the last turn: {} {} {} client {} gen {} lease {:#x} count {} "
        "detail {} "
        "user data {:#x}",
        o.sequence, age_ms, o.event, o.opcode, o.status, static_cast<std::int32_t>(o.client),
        o.client_generation, o.lease, o.count, o.detail, o.user_data);
  }
  if (operations.skipped != 0)
    out.line("op          {} records skipped: being written or misplaced", operations.skipped);
}

}  // namespace

void write_text(Output& out, const Snapshot& snapshot, const std::string& what,
                const ReportOptions& options) {
  out.line("{}: {}: {}", what, to_string(snapshot.verdict().condition), printable(snapshot.verdict().why));
  if (!snapshot.readable()) return;
  const ConstTables& t = snapshot.tables();
  write_header(out, snapshot);
  write_config(out, t);
  const IndexWalk walk(t);
  const Summary summary = summarise(t, walk);
  write_pool(out, t, summary);
  write_summary(out, t, summary);
  if (options.ranks) write_ranks(out, t);
  if (options.rings) write_rings(out, t);
  if (options.index) write_index(out, t, walk);
  if (options.pages) write_pages(out, t);
  if (options.operations) write_operations(out, t);
}

void write_check(Output& out, const CheckReport& report) {
  for (const Finding& finding : report.findings)
    out.line("FINDING     {}: {}", to_string(finding.id.kind), finding.text);
  if (report.left_out != 0) out.line("FINDING     and {} more of the kinds above", report.left_out);
  for (const std::string& note : report.notes) out.line("note        {}", note);
  out.line("check       {}: {} findings in {} {}{}", report.findings.empty() ? "clean" : "FAILED",
           report.findings.size() + report.left_out, report.snapshots,
           report.snapshots == 1 ? "snapshot" : "snapshots", report.exact ? " (exact)" : "");
}

}  // namespace hicache::inspect
