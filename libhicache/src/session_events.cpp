// Completions, and how a session ends. What comes out of the ring is matched against the session's own table:
// a completion that is wrong, late or doubled changes nothing but a counter.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "session_impl.hpp"
#include "shm/crash_points.hpp"
#include "shm/futex.hpp"

namespace hicache {

std::optional<OperationResult> Session::poll() {
  follow_daemon();
  Impl& m = *impl_;
  if (m.fork.forked()) return std::nullopt;
  const bool look = !m.news() && m.look_due();
  if (!look && !m.news()) return std::nullopt;
  const std::lock_guard lock(m.mutex);
  if (look) m.look_at_daemon();
  return m.next_event();
}

bool Session::Impl::look_due() const {
  if ((header->session_ended.load(std::memory_order_relaxed) != 0 || daemon_died()) && !ended()) return true;
  // Reading a clock costs as much as several looks at the ring. Lost counts of racing threads do no harm.
  const std::uint32_t polls = idle_polls.load(std::memory_order_relaxed);
  idle_polls.store(polls + 1, std::memory_order_relaxed);
  return polls % 16 == 0 && coarse_ns() - last_look_ns.load(std::memory_order_relaxed) >= kLookEveryNs;
}

bool Session::Impl::plausible(const Operation& operation, const Completion& c) const {
  if (c.opcode != operation.opcode || static_cast<std::uint16_t>(c.status) >= kStatusCount) return false;
  if (c.flags == Completion::kPagesReturned) return operation.stage == Stage::busy;
  if (c.flags == Completion::kPagesBusy && !operation.touches_pages()) return false;
  if (c.flags != 0 && c.flags != Completion::kPagesBusy) return false;
  const std::uint64_t pages = std::uint64_t{c.written} + c.present + c.filling + c.dropped;
  // What an answer about a prefetch counts is another operation's.
  const bool about_prefetch = c.opcode == Opcode::check_prefetch || c.opcode == Opcode::end_prefetch;
  const std::uint32_t most_pages = about_prefetch ? kMaxPagesPerOperation : operation.count;
  const std::uint32_t most_hits = c.opcode == Opcode::agree ? 1 : most_pages;
  if (c.hits > most_hits || pages > most_pages) return false;
  return operation.stage == Stage::open || operation.stage == Stage::expired;
}

Operation* Session::Impl::accept(const Completion& c) {
  Operation* operation = operations.find(c.user_data);
  if (operation == nullptr || !plausible(*operation, c)) {
    ++counters.ignored_completions;
    return nullptr;
  }
  if (c.flags == Completion::kPagesReturned) {
    operation->stage = Stage::finished;
    operation->returned_pending = true;
    return operation;
  }
  const bool expired = operation->stage == Stage::expired;
  operation->stage = c.flags == Completion::kPagesBusy ? Stage::busy : Stage::finished;
  if (expired) {
    // Its end has been told already. What is left to tell is that the device pages are free again.
    operation->returned_pending = operation->touches_pages() && operation->stage == Stage::finished;
    if (c.opcode == Opcode::reserve && c.status == Status::ok && c.lease != 0)
      orphan_leases.push_back(c.lease);
  } else {
    operation->terminal = c;
    operation->terminal_pending = !operation->internal;
    if (operation->fence != Submission::kNoFence) {
      if (c.status != Status::ok)
        release_fence_as_failed(*operation);  // where a load ended before its transfer began
      layer_loads[operation->fence].end(operation->fence_value, c.status);
    }
  }
  if (operation->event_pending()) return operation;
  settle(*operation);
  return nullptr;
}

void Session::Impl::settle(Operation& operation) {
  if (operation.event_pending()) {
    operations.enqueue(operation);
  } else if (operation.stage == Stage::finished) {
    if (operation.arena_bytes > 0) arena.release(operation.arena_offset, operation.arena_bytes);
    operations.close(operation);
  } else if (operation.queued) {
    operations.dequeue(operation);
  }
}

void Session::Impl::publish_hints() {
  cq_head_hint.store(cq.head(), std::memory_order_relaxed);
  const std::uint32_t before = events_hint.load(std::memory_order_relaxed);
  if (before == operations.queued()) return;
  events_hint.store(operations.queued(), std::memory_order_relaxed);
  if (operations.queued() > before) wake_sleepers();
}

std::optional<OperationResult> Session::Impl::next_event() {
  const std::uint32_t operations_before = operations.in_use();
  const std::uint32_t head_before = cq.head();
  Operation* operation = operations.front();
  while (operation == nullptr) {
    const auto completion = cq.pop();
    if (!completion) break;
    operation = accept(*completion);
  }
  if (cq.head() != head_before) kick_stalled_daemon(operations_before);
  std::optional<OperationResult> result;
  if (operation != nullptr) result = deliver(*operation);
  publish_hints();
  return result;
}

OperationResult Session::Impl::deliver(Operation& operation) {
  const Completion& c = operation.terminal;
  OperationResult r;
  r.ticket = Ticket{operation.ticket};
  r.opcode = operation.opcode;
  r.status = c.status;
  r.lease = LeaseId{operation.opcode == Opcode::reserve ? c.lease : operation.lease};
  if (!operation.terminal_pending) {
    r.pages_returned = true;
    operation.returned_pending = false;
    settle(operation);
    return r;
  }
  r.written = c.written;
  r.present = c.present;
  r.filling = c.filling;
  r.dropped = c.dropped;
  if (operation.opcode == Opcode::agree) {
    r.agreed = c.bytes;
    r.agreed_failed = c.hits != 0;
  } else {
    r.hits = c.hits;
    r.bytes = c.bytes;
  }
  r.operation_sequence = c.operation_sequence;
  r.pages_busy = c.flags == Completion::kPagesBusy;
  if (operation.opcode == Opcode::write) {
    r.page_status.resize(operation.count, Status::dropped);
    const std::uint8_t* results = arena_base + operation.arena_offset + operation.list_bytes;
    for (std::uint32_t i = 0; i < operation.count; ++i) {
      std::uint32_t status = 0;
      std::memcpy(&status, results + i * sizeof status, sizeof status);
      r.page_status[i] = status < kStatusCount ? static_cast<Status>(status) : Status::corrupt;
    }
  }
  operation.terminal_pending = false;
  settle(operation);
  return r;
}

void Session::Impl::kick_sleeping_daemon() {
  park_fence();  // SYNC park
  if (header->daemon_sleeping.load(std::memory_order_relaxed) == 0) return;
  // A full counter (EAGAIN) has been kicked already; nothing else can fail on an eventfd.
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(attached.kick.get(), &one, sizeof one);
}

void Session::Impl::kick_stalled_daemon(std::uint32_t operations_before) {
  // It keeps at most two completion slots for an operation: fewer operations than that can't have stalled it.
  // The test spares the usual poll a look at a line that the daemon writes all the time.
  if (2 * operations_before + 2 <= cq_mask + 1) return;
  if (header->sq_head.load(std::memory_order_relaxed) != sq.tail()) kick_sleeping_daemon();
}

void Session::Impl::pump() {
  const std::uint32_t operations_before = operations.in_use();
  const std::uint32_t head_before = cq.head();
  while (const auto completion = cq.pop()) {
    HICACHE_CRASH_POINT(event_taken);
    if (Operation* operation = accept(*completion)) operations.enqueue(*operation);
  }
  if (cq.head() != head_before) kick_stalled_daemon(operations_before);
  publish_hints();
}

void Session::Impl::look_at_daemon() {
  const std::uint64_t now = coarse_ns();
  last_look_ns.store(now, std::memory_order_relaxed);
  pump();
  if (!ended()) {
    if (header->session_ended.load(std::memory_order_acquire) != 0) {
      end(Status::daemon_lost, "the daemon has ended this session");
    } else if (attached.tables.header->instance_epoch.load(std::memory_order_acquire) !=
               attached.welcome.instance_epoch) {
      end(Status::daemon_lost, "another daemon has taken the region over");
    } else if (daemon_died() || watch.hung_up()) {
      end(Status::daemon_lost, "the daemon is gone");
    } else {
      expire_overdue(now);
      release_orphans();
    }
  }
  if (ended()) prove_copies_over();
  publish_hints();
}

void Session::Impl::end(Status reason, const std::string& text) {
  if (ended()) return;
  pump();  // what the daemon had answered counts
  end_text = text;
  if (staging != nullptr) staging->end();
  if (kernel != nullptr) kernel->end();
  operations.for_each([&](Operation& operation) {
    if (operation.stage == Stage::open) {
      operation.terminal = Completion{};
      operation.terminal.status = reason;
      operation.terminal_pending = !operation.internal;
      if (operation.touches_pages()) operation.terminal.flags = Completion::kPagesBusy;
      release_fence_as_failed(operation);
    }
    if (operation.stage == Stage::open || operation.stage == Stage::expired) {
      operation.stage = operation.touches_pages() ? Stage::busy : Stage::finished;
    }
    settle(operation);
  });
  end_reason.store(reason, std::memory_order_release);
  end_signal.store(1, std::memory_order_release);
  futex_wake_all(&end_signal);
  prove_copies_over();
  publish_hints();
  wake_sleepers();
}

void Session::Impl::prove_copies_over() {
  if (operations.in_use() == 0) return;
  const ClientEntry& entry = attached.tables.clients[attached.welcome.client_slot];
  const bool left =
      entry.generation.load(std::memory_order_acquire) != attached.welcome.client_generation ||
      entry.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(ClientState::free);
  // In io_backend kernel nobody but this process touches device pages.
  if (kernel != nullptr ? !kernel->idle() : !left && !watch.process_gone()) return;
  if (staging != nullptr && !staging->idle()) return;  // its kernels read and write the pages too
  operations.for_each([&](Operation& operation) {
    if (operation.stage != Stage::busy) return;
    operation.stage = Stage::finished;
    if (operation.terminal_pending) {
      operation.terminal.flags = 0;  // nobody has read it yet: it simply ends
    } else {
      operation.returned_pending = true;
    }
    settle(operation);
  });
}

void Session::Impl::expire_overdue(std::uint64_t now_ns) {
  if (now_ns < earliest_expiry_ns) return;
  earliest_expiry_ns = ~0ull;
  operations.for_each([&](Operation& operation) {
    if (operation.stage != Stage::open) return;
    if (operation.expires_ns > now_ns) {
      earliest_expiry_ns = std::min(earliest_expiry_ns, operation.expires_ns);
      return;
    }
    ++counters.expired;
    operation.terminal = Completion{};
    operation.terminal.status = Status::timed_out;
    if (operation.touches_pages()) operation.terminal.flags = Completion::kPagesBusy;
    operation.terminal_pending = !operation.internal;
    operation.stage = Stage::expired;
    release_fence_as_failed(operation);
    if (operation.terminal_pending) operations.enqueue(operation);
  });
}

void Session::Impl::release_orphans() {
  while (!orphan_leases.empty()) {
    Submission s;
    s.opcode = Opcode::release;
    s.sequence_or_lease = orphan_leases.back();
    const auto posted = post_locked(s, {}, 0);
    if (!posted) return;  // no room now: the next look tries again
    operations.find(posted->value)->internal = true;
    orphan_leases.pop_back();
  }
}

void Session::Impl::release_fence_as_failed(const Operation& operation) {
  if (operation.fence == Submission::kNoFence) return;
  layer_loads[operation.fence].end(operation.fence_value, operation.terminal.status);
  LayerFences& fences_of_slot = fences->load[operation.fence];
  const std::uint32_t value = operation.fence_value;
  // `failed` before the layers, as the daemon does it: whoever sees the layer sees the failure. Neither moves
  // back.
  if (!timeline_reached(fences_of_slot.failed.load(std::memory_order_relaxed), value)) {
    fences_of_slot.failed.store(value, std::memory_order_release);
  }
  for (A32& layer : fences_of_slot.layer) {
    if (!timeline_reached(layer.load(std::memory_order_relaxed), value)) {
      layer.store(value, std::memory_order_release);
    }
  }
  fences_of_slot.wake.fetch_add(1, std::memory_order_release);
  futex_wake_all(&fences_of_slot.wake);
}

}  // namespace hicache
