#include "daemon/coordinator/coordinator.hpp"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <system_error>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "daemon/integrity/shard_checksums.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"
#include "shm/futex.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr std::uint32_t kEntriesPerTurn = 16;       // of one client before the next has its turn
constexpr std::uint32_t kBackgroundEvictions = 32;  // per turn, so that rings are not kept waiting
constexpr std::uint64_t kInboxTag = ~0ull;

// Compares every shard of the pages that would be kept; what differs is dropped with everything below it.
void verify_all(const ShardChecksums& checksums, const Tables& t, PageSurvey& survey) {
  std::vector<bool> dropped(t.pages.size());
  std::erase_if(survey.keep, [&](PageId page) {
    const PageEntry& e = t.pages[page.value];
    const NamespaceEntry& ns = t.namespaces[e.namespace_id.load(kRelaxed)];
    const std::uint32_t parent = e.parent.load(kRelaxed);
    if (parent != kNone32 && dropped[parent]) {
      ++survey.orphans;
      dropped[page.value] = true;
      return true;
    }
    const std::uint64_t offset = e.pool_offset.load(kRelaxed);
    for (std::uint32_t shard = 0; shard < ns.shards.load(kRelaxed); ++shard) {
      ++survey.shards_verified;
      const PoolOffset place{offset + shard * ns.shard_stride.load(kRelaxed)};
      if (checksums.matches(place, ns.shard_bytes.load(kRelaxed))) continue;
      ++survey.wrong_checksums;
      ++survey.inconsistent;
      dropped[page.value] = true;
      spdlog::error("page {} (key {}, pool offset {}) has a wrong checksum: dropped", page.value,
                    to_hex(load_key(e)), place.value);
      return true;
    }
    return false;
  });
}

std::unique_ptr<PageSurvey> survey_for(const CoordinatorOptions& options) {
  if (!options.takeover) return nullptr;
  const Tables& t = options.tables;
  const ConstTables view{t.header, t.config_text, t.namespaces, t.clients,  t.groups, t.segments, t.index,
                         t.pages,  t.leases,      t.pin_chunks, t.counters, t.flight, t.checksums};
  auto survey =
      std::make_unique<PageSurvey>(survey_pages(view, options.pool_bytes, options.config.pool.segment_bytes));
  if (options.checksums != nullptr && options.checksums->verifies_takeover())
    verify_all(*options.checksums, t, *survey);
  HICACHE_CRASH_POINT(takeover_surveyed);
  return survey;
}
}  // namespace

Coordinator::Impl::Impl(const CoordinatorOptions& options)
    : config(options.config),
      write_block(options.write_block),
      tables(options.tables),
      pool_bytes(options.pool_bytes),
      policy(make_eviction_policy(options.config.eviction.policy)),
      survey(survey_for(options)),
      stats(options.tables.counters),
      pages(options.tables, options.config.pool.segment_bytes, *policy, stats, survey.get(),
            options.segment_nodes),
      namespaces(options.tables.namespaces, pages.slots(), survey ? &survey->namespaces : nullptr),
      leases(options.tables, pages, stats),
      groups(options.tables.groups, namespaces),
      clients(options.tables.clients,
              survey ? std::span<const ClientSlot>(survey->mappers) : std::span<const ClientSlot>()),
      recorder(options.tables.flight),
      epoll(::epoll_create1(EPOLL_CLOEXEC)),
      fillers(options.tables.pages.size()) {
  backups.queued.resize(options.tables.pages.size());
  pages.set_write_back([this](PageId page) { return write_back(page, EvictReason::demand); });
  if (!epoll.valid()) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kInboxTag;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, inbox.event_fd(), &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
  now_ns = monotonic_ns();
  if (survey) finish_takeover();
}

// The tables have been rebuilt: what is left are the sequences that go on, and the account of what was kept.
void Coordinator::Impl::finish_takeover() {
  HICACHE_CRASH_POINT(takeover_rebuilt);
  stats.set(Counter::attached_clients, 0);
  stats.add(Counter::takeovers);
  stats.add(Counter::pages_kept, survey->keep.size());
  stats.add(Counter::pages_not_kept, survey->inconsistent + survey->orphans);
  stats.add(Counter::aborted, survey->half_written);
  stats.add(Counter::shards_verified, survey->shards_verified);
  stats.add(Counter::checksum_mismatches, survey->wrong_checksums);
  held = survey->held;
  stats.set(Counter::held_pages, held.size());
  operation_sequence = tables.header->operation_sequence.load(kRelaxed);
  for (const FlightRecord& r : tables.flight)
    record_sequence = std::max(record_sequence, r.sequence.load(kRelaxed));
  for (const std::string& finding : survey->findings) spdlog::warn("not kept: {}", finding);
  spdlog::info(
      "took the region over: {} of {} ready pages kept, {} inconsistent, {} without their prefix; {} "
      "half-written "
      "pages dropped",
      survey->keep.size(), survey->ready, survey->inconsistent, survey->orphans, survey->half_written);
  if (!survey->mappers.empty()) {
    spdlog::info("{} pages are held: {} processes that an earlier daemon let map the pool still live",
                 held.size(), survey->mappers.size());
  }
  survey.reset();
}

void Coordinator::Impl::note(FlightEvent event, const Client* client, Opcode opcode, Status status,
                             std::uint64_t lease, std::uint64_t user_data, std::uint32_t count) {
  FlightNote n;
  n.time_ns = now_ns;
  n.client = client == nullptr ? kNone32 : client->slot.value;
  n.client_generation = client == nullptr ? 0 : client->generation.value;
  n.opcode = static_cast<std::uint16_t>(opcode);
  n.status = static_cast<std::uint16_t>(status);
  n.lease = lease;
  n.user_data = user_data;
  n.count = count;
  n.event = event;
  recorder.record(++record_sequence, n);
}

void Coordinator::Impl::complete(Client& client, const Completion& completion) {
  if ((completion.flags & Completion::kPagesReturned) == 0) {
    assert(client.open_operations > 0);
    --client.open_operations;
    client.lists.drop(completion.operation_sequence);
    note(FlightEvent::complete, &client, completion.opcode, completion.status, completion.lease,
         completion.user_data, completion.written + completion.hits);
    if (completion.status != Status::ok) {
      stats.add(Counter::operations_failed);
      bump(clients.entry(client).errors);
    }
  }
  // A dying client's channel is no longer served: nobody reads there.
  if (client.state != ClientState::attached) return;
  client.completions.push(completion);
  HICACHE_CRASH_POINT(completion_made);
  if (!client.has_new_completions) {
    client.has_new_completions = true;
    new_completions.push_back(client.slot);
  }
}

void Coordinator::Impl::kick_waiting_clients() {
  if (new_completions.empty()) return;
  park_fence();  // SYNC park: the client stores client_waiting, fences, looks at its completions
  for (const ClientSlot slot : new_completions) {
    Client& client = clients.get(slot);
    client.has_new_completions = false;
    if (client.state != ClientState::attached) continue;
    clients.mirror_rings(client);
    if (client.header->client_waiting.load(kRelaxed) != 0) {
      bump(client.header->cq_wake);
      futex_wake_all(&client.header->cq_wake);
    }
  }
  new_completions.clear();
}

std::uint32_t Coordinator::Impl::serve(Client& client) {
  std::uint32_t served = 0;
  while (served < kEntriesPerTurn && client.submissions.ready()) {
    const std::uint32_t unread = client.geometry.cq_entries - client.completions.space();
    if (unread + client.slots_spoken_for() + 2 > client.geometry.cq_entries) {
      if (client.completions.broken()) {
        fence(client);
      } else {
        stats.add(Counter::completion_ring_full);
      }
      break;
    }
    const auto submission = client.submissions.pop();
    if (!submission) break;
    HICACHE_CRASH_POINT(submission_taken);
    ++served;
    execute(client, *submission);
    if (client.state != ClientState::attached) break;
  }
  return served;
}

bool Coordinator::Impl::serve_clients() {
  const std::size_t n = clients.attached().size();
  if (n == 0) return false;
  bool any = false;
  // Each turn starts one client further: none is always first.
  if (++next_client >= n) next_client = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto& attached = clients.attached();
    if (attached.size() != n) break;  // somebody was fenced: the next turn sees the new list
    std::size_t at = next_client + i;
    if (at >= n) at -= n;
    Client& client = clients.get(attached[at]);
    if (!client.submissions.ready()) continue;
    if (!any) now_ns = monotonic_ns();
    if (serve(client) > 0) any = true;
  }
  return any;
}

bool Coordinator::Impl::serve_inbox() {
  if (!inbox.filled()) return false;
  inbox.take(taken);
  now_ns = monotonic_ns();
  for (CoordinatorRequest& request : taken) handle(request);
  taken.clear();
  return true;
}

void Coordinator::Impl::handle(CoordinatorRequest& request) {
  std::visit(
      [this](auto& r) {
        using T = std::decay_t<decltype(r)>;
        if constexpr (std::is_same_v<T, AttachRequest>) {
          attach(r);
        } else if constexpr (std::is_same_v<T, BuffersRequest>) {
          buffers(r);
        } else if constexpr (std::is_same_v<T, GoneRequest>) {
          gone(r);
        } else if constexpr (std::is_same_v<T, ControlRequest>) {
          control(r);
        } else if constexpr (std::is_same_v<T, ReloadRequest>) {
          reload(r.config);
        } else if constexpr (std::is_same_v<T, ConnectionRefused>) {
          stats.add(Counter::connections_refused);
        } else if constexpr (std::is_same_v<T, ReadOnlyRefused>) {
          stats.add(Counter::read_only_refused);
        } else if constexpr (std::is_same_v<T, UsablePoolRequest>) {
          pages.slots().set_usable_bytes(r.bytes);
          stats.set(Counter::usable_pool_bytes, pages.slots().usable_bytes());
        } else if constexpr (std::is_same_v<T, StorageNews>) {
          take_storage_events();
        } else if constexpr (std::is_same_v<T, StorageChanged>) {
          storage_changed();
        } else if constexpr (std::is_same_v<T, BreachRequest>) {
          breach(r);
        } else if constexpr (std::is_same_v<T, MapperGoneRequest>) {
          mapper_gone(r.client);
        } else {
          const auto found = transfers_in_flight.find(r.id.value);
          assert(found != transfers_in_flight.end());
          TransferOwner owner = found->second;
          transfers_in_flight.erase(found);
          if (owner.write_number == 0) {
            finish_load(r, owner);
          } else {
            finish_rank_copy(r, owner);
          }
        }
      },
      request);
}

bool Coordinator::Impl::evict_in_background() {
  const double high = config.eviction.high_watermark;
  if (high <= 0.0) return false;
  const double low = std::min(config.eviction.low_watermark, high);
  const auto above = [&](double mark) {
    return static_cast<double>(pages.resident()) > mark * pages.capacity() ||
           static_cast<double>(pages.slots().used_bytes()) > mark * static_cast<double>(pool_bytes);
  };
  if (!evicting_in_background && !above(high)) return false;
  evicting_in_background = above(low);
  if (!evicting_in_background) return false;
  const auto scope = commit();
  bool any = false;
  for (std::uint32_t i = 0; i < kBackgroundEvictions; ++i) {
    evicting_in_background = above(low);
    if (!evicting_in_background) break;
    const PageId victim = pages.next_victim();
    if (!victim) {
      // What is being written back can go later.
      evicting_in_background = stats.get(Counter::storing_pages) != 0;
      break;
    }
    // A page that is written back goes when storage has it.
    if (!write_back(victim, EvictReason::watermark)) pages.evict(victim, EvictReason::watermark);
    any = true;
  }
  return any;
}

bool Coordinator::Impl::work_waiting() {
  if (inbox.filled()) return true;
  for (const ClientSlot slot : clients.attached()) {
    Client& client = clients.get(slot);
    if (!client.submissions.ready()) continue;
    // A client that does not read its completions is not served: its submissions are no work yet.
    const std::uint32_t unread = client.geometry.cq_entries - client.completions.space();
    if (unread + client.slots_spoken_for() + 2 <= client.geometry.cq_entries) return true;
  }
  return false;
}

void Coordinator::Impl::sleep_until_kicked() {
  inbox.set_sleeping(true);
  for (const ClientSlot slot : clients.attached())
    clients.get(slot).header->daemon_sleeping.store(1, kRelaxed);
  park_fence();  // SYNC park
  if (!work_waiting()) {
    std::uint64_t timeout_ns = std::uint64_t{config.waiting.park_ms} * 1'000'000;
    if (!deadlines.empty()) {
      const std::uint64_t now = monotonic_ns();
      const std::uint64_t until = deadlines.top().at_ns > now ? deadlines.top().at_ns - now : 0;
      timeout_ns = std::min(timeout_ns, until);
    }
    if (stopping.load(kRelaxed)) timeout_ns = std::min<std::uint64_t>(timeout_ns, 1'000'000);
    stats.add(Counter::parks);
    epoll_event events[16];
    const std::uint64_t slept_at = monotonic_ns();
    const int n = ::epoll_wait(epoll.get(), events, 16, static_cast<int>((timeout_ns + 999'999) / 1'000'000));
    now_ns = monotonic_ns();
    // Work without a kick after a whole park: the handshake failed. A kick in the last millisecond may just
    // be late.
    if (n == 0 && now_ns - slept_at > 2'000'000 && work_waiting()) {
      ::sched_yield();
      if (::epoll_wait(epoll.get(), events, 16, 1) == 0 && work_waiting()) stats.add(Counter::late_wakes);
    }
    tables.header->heartbeat_ns.store(now_ns, kRelaxed);
  }
  inbox.set_sleeping(false);
  for (const ClientSlot slot : clients.attached())
    clients.get(slot).header->daemon_sleeping.store(0, kRelaxed);
}

bool Coordinator::Impl::drained() const {
  return transfers_in_flight.empty() && writes_in_flight.empty() && prefetches_in_flight.empty() &&
         backups.idle();
}

bool Coordinator::Impl::turn() {
  bool worked = serve_inbox();
  worked |= serve_clients();
  if (!deadlines.empty()) {
    // The clock is fresh after work, and after a park; between spins a deadline may wait for the next look.
    if (!worked) now_ns = monotonic_ns();
    if (deadlines.top().at_ns <= now_ns) expire(now_ns);
  }
  end_finished_prefetches();
  close_finished_leases();
  worked |= evict_in_background();
  start_backups();
  kick_waiting_clients();
  return worked;
}

void Coordinator::Impl::run() {
  WaitLadder ladder(config.waiting);
  bool idle = false;  // the last park was in vain: no reason to climb the ladder again
  for (;;) {
    const bool worked = turn();
    if (stopping.load(kRelaxed)) {
      if (tables.header->state.load(kRelaxed) == static_cast<std::uint32_t>(RegionState::ready)) {
        tables.header->state.store(static_cast<std::uint32_t>(RegionState::draining),
                                   std::memory_order_release);
      }
      if (drained() || monotonic_ns() >= stop_deadline_ns.load(kRelaxed)) break;
    }
    if (worked) {
      tables.header->heartbeat_ns.store(now_ns, kRelaxed);
      ladder.reset();
      idle = false;
    } else if (idle || !ladder.step()) {
      sleep_until_kicked();
      ladder = WaitLadder(config.waiting);  // a reload may have changed it
      idle = true;
    }
  }
  for (const ClientSlot slot : clients.attached()) {
    Client& client = clients.get(slot);
    client.header->session_ended.store(
        1, std::memory_order_release);  // pairs with the client's acquire in state()
    bump(client.header->cq_wake);
    futex_wake_all(&client.header->cq_wake);
  }
  tables.header->state.store(static_cast<std::uint32_t>(RegionState::closed), std::memory_order_release);
}

Coordinator::Coordinator(const CoordinatorOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Coordinator::~Coordinator() = default;
void Coordinator::set_transfers(Transfers* transfers) {
  impl_->transfers = transfers;
}
void Coordinator::set_cuda(const CudaPath* cuda) {
  impl_->cuda = cuda;
}
void Coordinator::set_storage(StorageTier* storage) {
  impl_->storage = storage;
}
void Coordinator::post(CoordinatorRequest request) {
  impl_->inbox.post(std::move(request));
}
void Coordinator::run() {
  impl_->run();
}
void Coordinator::stop(std::uint32_t drain_ms) {
  impl_->stop_deadline_ns.store(monotonic_ns() + std::uint64_t{drain_ms} * 1'000'000, kRelaxed);
  impl_->stopping.store(true, std::memory_order_release);
  impl_->inbox.kick();
}

}  // namespace hicache::daemon
