// Waiting: for completions, and for layers of a load. One thread at a time sleeps on the channel's futex
// word, which has a single "waiting" flag; others of the same session follow its wake-ups on a private word.
#include <sched.h>

#include <algorithm>

#include "session_impl.hpp"
#include "shm/crash_points.hpp"
#include "shm/futex.hpp"

namespace hicache {
namespace {

// Looks at the ring before a clock is read: an answer from a spinning coordinator comes sooner than a clock
// does.
constexpr int kEagerLooks = 256;

std::uint64_t deadline_in_ms(std::uint32_t timeout_ms) {
  return monotonic_ns() + std::uint64_t{timeout_ms} * 1'000'000;
}

std::uint64_t nap_ns(std::uint64_t deadline_ns, std::uint32_t park_ms) {
  const std::uint64_t now = monotonic_ns();
  return now >= deadline_ns ? 0 : std::min(deadline_ns - now, std::uint64_t{park_ms} * 1'000'000);
}

// The ladder of one sleep: never longer than what is left until the deadline.
WaitPolicy cut_to(WaitPolicy policy, std::uint64_t deadline_ns) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t left_us = now >= deadline_ns ? 0 : (deadline_ns - now) / 1000;
  policy.spin_us = static_cast<std::uint32_t>(std::min<std::uint64_t>(policy.spin_us, left_us));
  policy.yield_us = static_cast<std::uint32_t>(std::min<std::uint64_t>(policy.yield_us, left_us));
  return policy;
}

Error forked_error() {
  return Error{Status::forked, "the session belongs to the parent process: attach again in the child", 0};
}

}  // namespace

void Session::Impl::wake_sleepers() {
  changes.fetch_add(1, std::memory_order_relaxed);
  if (followers > 0) futex_wake_all(&changes);
  if (someone_parked) {
    // The daemon adds to this word too. Should one addition swallow the other, the word still differs from
    // what the sleeper read, and both come after what it is to see.
    header->cq_wake.fetch_add(1, std::memory_order_release);
    futex_wake_all(&header->cq_wake);
  }
}

void Session::Impl::sleep_for_news(std::unique_lock<std::mutex>& lock, std::uint64_t deadline_ns,
                                   bool& idle) {
  const std::uint32_t seen =
      changes.load(std::memory_order_relaxed);  // under the mutex: no change can be missed
  if (someone_parked) {
    ++followers;
    lock.unlock();
    futex_wait(&changes, seen, nap_ns(deadline_ns, waiting.park_ms));
    lock.lock();
    --followers;
    return;
  }
  someone_parked = true;
  if (!idle) {
    lock.unlock();
    WaitLadder ladder(cut_to(waiting, deadline_ns));
    while (!ring_news() && changes.load(std::memory_order_relaxed) == seen && ladder.step()) {
    }
    lock.lock();
  }
  if (!ring_news() && changes.load(std::memory_order_relaxed) == seen) park(lock, deadline_ns, idle);
  someone_parked = false;
  if (followers > 0) wake_sleepers();  // one of them takes this place
}

void Session::Impl::park(std::unique_lock<std::mutex>& lock, std::uint64_t deadline_ns, bool& idle) {
  ++counters.parks;
  header->client_waiting.store(1, std::memory_order_relaxed);
  const std::uint32_t kicks =
      header->cq_wake.load(std::memory_order_acquire);  // pairs with the daemon's kick
  park_fence();                                         // SYNC park
  HICACHE_CRASH_POINT(wait_flagged);
  int slept = 0;
  if (!ring_news() && header->session_ended.load(std::memory_order_relaxed) == 0) {
    lock.unlock();
    slept = futex_wait(&header->cq_wake, kicks, nap_ns(deadline_ns, waiting.park_ms));
    lock.lock();
  }
  if (slept == ETIMEDOUT && ring_news() && header->cq_wake.load(std::memory_order_relaxed) == kicks) {
    // Published, and no kick: either it comes this very moment, or it was lost.
    lock.unlock();
    const std::uint64_t grace_ends_ns = monotonic_ns() + 1'000'000;
    while (header->cq_wake.load(std::memory_order_relaxed) == kicks && monotonic_ns() < grace_ends_ns)
      ::sched_yield();
    lock.lock();
    if (header->cq_wake.load(std::memory_order_relaxed) == kicks) ++counters.late_wakes;
  }
  header->client_waiting.store(0, std::memory_order_relaxed);
  idle = slept == ETIMEDOUT && !ring_news();
  if (!ring_news()) look_at_daemon();
}

Result<OperationResult> Session::wait(Ticket ticket, std::uint32_t timeout_ms) {
  follow_daemon();
  Impl& m = *impl_;
  if (m.fork.forked()) return forked_error();
  for (int looks = 0; looks < kEagerLooks && !m.news(); ++looks) {
  }
  std::unique_lock lock(m.mutex);
  std::uint64_t deadline_ns = 0;
  bool idle = false;
  for (;;) {
    m.pump();
    Operation* operation = m.operations.find(ticket.value);
    if (operation == nullptr) {
      return Error{
          Status::not_found,
          "ticket " + std::to_string(ticket.value) + " is no open operation, or its result was read already",
          0};
    }
    if (operation->event_pending()) {
      OperationResult result = m.deliver(*operation);
      m.publish_hints();
      HICACHE_CRASH_POINT(event_delivered);
      return result;
    }
    if (deadline_ns == 0) deadline_ns = deadline_in_ms(timeout_ms);
    if (monotonic_ns() >= deadline_ns) {
      return Error{Status::timed_out,
                   "no result within " + std::to_string(timeout_ms) + " ms; the operation stays open", 0};
    }
    if (m.ended()) {
      // Only the proof that no copy runs any more is still to come, and nobody will announce it.
      lock.unlock();
      const timespec nap{0, static_cast<long>(nap_ns(deadline_ns, 2))};
      ::nanosleep(&nap, nullptr);
      lock.lock();
      m.look_at_daemon();
      continue;
    }
    m.sleep_for_news(lock, deadline_ns, idle);
  }
}

Result<OperationResult> Session::wait_any(std::uint32_t timeout_ms) {
  follow_daemon();
  Impl& m = *impl_;
  if (m.fork.forked()) return forked_error();
  for (int looks = 0; looks < kEagerLooks && !m.news(); ++looks) {
  }
  std::unique_lock lock(m.mutex);
  std::uint64_t deadline_ns = 0;
  bool idle = false;
  for (;;) {
    if (auto event = m.next_event()) return std::move(*event);
    if (m.ended()) return m.end_error();
    if (deadline_ns == 0) deadline_ns = deadline_in_ms(timeout_ms);
    if (monotonic_ns() >= deadline_ns) {
      return Error{Status::timed_out, "no completion within " + std::to_string(timeout_ms) + " ms", 0};
    }
    m.sleep_for_news(lock, deadline_ns, idle);
  }
}

void Session::report_host_pages(const HostPageCounts& counts) {
  Impl& m = *impl_;
  if (m.fork.forked()) return;
  // For people: nothing depends on it. What is posted next makes it visible to the daemon (SYNC ring).
  constexpr auto relaxed = std::memory_order_relaxed;
  ChannelHeader& header = *m.header;
  for (std::size_t i = 0; i < kHostPageStates; ++i) header.host_pages[i].store(counts.pages[i], relaxed);
  for (std::size_t i = 0; i < kShownHandles; ++i) {
    header.host_handles[i][0].store(counts.handles[i].encode(), relaxed);
    header.host_handles[i][1].store(counts.handles[i].key, relaxed);
  }
  header.last_refusal.store(counts.last_refusal.encode(), relaxed);
  header.host_page_changes.store(counts.changes, relaxed);
  header.host_page_refusals.store(counts.refused, relaxed);
}

void Session::raise_write_fence(std::uint32_t index, std::uint32_t value) {
  Impl& m = *impl_;
  if (m.fork.forked() || index >= kWriteFences) return;
  A32& word = m.fences->write[index].value;
  std::uint32_t now = word.load(std::memory_order_relaxed);
  // Release: the bytes of the device pages come before the word that lets the daemon read them.
  while (!timeline_reached(now, value) &&
         !word.compare_exchange_weak(now, value, std::memory_order_release, std::memory_order_relaxed)) {
  }
  HICACHE_CRASH_POINT(fence_raised);
}

bool Session::layer_ready(const LayerFence& fence, std::uint32_t layer) const {
  const Impl& m = *impl_;
  if (m.fork.forked() || fence.slot >= kProducerSlots || layer >= m.spec.layers) return false;
  return timeline_reached(m.fences->load[fence.slot].layer[layer].load(std::memory_order_acquire),
                          fence.value);
}

std::optional<Status> Session::Impl::load_status(const LayerFence& fence) {
  const LayerFences& words = fences->load[fence.slot];
  // A failure of a load at most a ring ahead counts: its word has overwritten the one of this load.
  const std::uint32_t failed = words.failed.load(std::memory_order_acquire);
  const bool suspicious = failed != 0 && failed - fence.value <= kMaxRingEntries;
  if (!suspicious) return Status::ok;
  const LayerLoads::Load* load = layer_loads[fence.slot].find(fence.value);
  if (load == nullptr) return Status::not_found;
  return load->ended;
}

Outcome Session::wait_layer(const LayerFence& fence, std::uint32_t layer, std::uint32_t timeout_ms) {
  Impl& m = *impl_;
  if (m.fork.forked()) return forked_error();
  if (fence.slot >= kProducerSlots || fence.value == 0 || layer >= m.spec.layers) {
    return Error{Status::invalid_argument,
                 "layer " + std::to_string(layer) + " of producer slot " + std::to_string(fence.slot) +
                     " at value " + std::to_string(fence.value) + ": expected a layer below " +
                     std::to_string(m.spec.layers) + ", a slot below " + std::to_string(kProducerSlots) +
                     " and a value above 0",
                 0};
  }
  LayerFences& words = m.fences->load[fence.slot];
  const std::uint64_t deadline_ns = deadline_in_ms(timeout_ms);
  WaitLadder ladder(cut_to(m.waiting, deadline_ns));
  bool idle = false;
  for (;;) {
    // In this order: a session that ended has released its fences before.
    const bool ended = m.ended();
    if (layer_ready(fence, layer)) break;
    if (ended) {
      const std::lock_guard lock(m.mutex);
      return m.end_error();
    }
    if (monotonic_ns() >= deadline_ns) {
      return Error{
          Status::timed_out,
          "layer " + std::to_string(layer) + " not ready within " + std::to_string(timeout_ms) + " ms", 0};
    }
    if (!idle && ladder.step()) continue;
    const std::uint32_t kicks = words.wake.load(std::memory_order_acquire);
    words.waiters.fetch_add(1, std::memory_order_relaxed);
    park_fence();  // SYNC layer park
    if (!layer_ready(fence, layer)) {
      idle = futex_wait(&words.wake, kicks, nap_ns(deadline_ns, m.waiting.park_ms)) == ETIMEDOUT;
    }
    words.waiters.fetch_sub(1, std::memory_order_relaxed);
    const std::lock_guard lock(m.mutex);
    m.look_at_daemon();
  }
  std::unique_lock lock(m.mutex);
  idle = false;
  for (;;) {
    const auto status = m.load_status(fence);
    if (status == Status::ok) return success();
    if (status) {
      return Error{
          *status,
          "the load failed: " + std::string(to_string(*status)) + "; its device pages hold no valid data", 0};
    }
    m.pump();
    if (m.load_status(fence)) continue;
    if (monotonic_ns() >= deadline_ns) {
      return Error{Status::timed_out,
                   "the load failed or is not known to have succeeded: its result has not come", 0};
    }
    m.sleep_for_news(lock, deadline_ns, idle);
  }
}

}  // namespace hicache
