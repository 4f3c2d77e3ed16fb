// Submissions: arguments are checked, lists copied into the arena, the entry published.
#include <algorithm>
#include <cstring>
#include <vector>

#include "session_impl.hpp"
#include "shm/crash_points.hpp"

namespace hicache {
namespace {

template <class T>
std::span<const std::uint8_t> bytes_of(std::span<const T> items) {
  return {reinterpret_cast<const std::uint8_t*>(items.data()), items.size_bytes()};
}

// The list that goes to the daemon: device pages, and behind them their state slots where there are any.
std::span<const DevicePage> both_lists(std::span<const DevicePage> pages, std::span<const DevicePage> states,
                                       std::vector<DevicePage>& storage) {
  if (states.empty()) return pages;
  storage.assign(pages.begin(), pages.end());
  storage.insert(storage.end(), states.begin(), states.end());
  return storage;
}

Error forked_error() {
  return Error{Status::forked, "the session belongs to the parent process: attach again in the child", 0};
}

// A range of a lease's pages that needs no list.
Outcome check_range(const char* what, std::uint32_t count) {
  if (count == 0) {
    return Error{Status::invalid_argument, "no pages to " + std::string(what) + "; at least 1 expected", 0};
  }
  if (count > kMaxPagesPerOperation) {
    return Error{
        Status::too_large,
        std::to_string(count) + " pages in one operation; at most " + std::to_string(kMaxPagesPerOperation),
        0};
  }
  return success();
}

// Lists are copied to shared memory as they lie.
static_assert(sizeof(PrefixHash) == 32 && std::is_trivially_copyable_v<PrefixHash>);
static_assert(sizeof(DevicePage) == 4 && std::is_trivially_copyable_v<DevicePage>);

}  // namespace

Error Session::Impl::end_error() const {
  return Error{end_reason.load(std::memory_order_relaxed), end_text, 0};
}

Result<Ticket> Session::Impl::post(Submission& submission, std::span<const std::uint8_t> lists,
                                   std::uint64_t result_bytes) {
  if (fork.forked()) return forked_error();
  const std::lock_guard lock(mutex);
  return post_locked(submission, lists, result_bytes);
}

Result<Ticket> Session::Impl::post_locked(Submission& submission, std::span<const std::uint8_t> lists,
                                          std::uint64_t result_bytes) {
  if (!ended() && header->session_ended.load(std::memory_order_relaxed) != 0) look_at_daemon();
  if (ended()) return end_error();
  if (!sq.has_space()) {
    if (sq.broken()) {
      end(Status::corrupt, "the daemon's position in the submission ring can't be true");
      return end_error();
    }
    return Error{Status::again, "the submission ring is full", 0};
  }
  const std::uint64_t bytes = lists.size() + result_bytes;
  if (bytes > arena.size()) {
    return Error{Status::too_large,
                 "the operation's lists need " + std::to_string(bytes) + " bytes; the arena has " +
                     std::to_string(arena.size()) + " (limits.arena_bytes of the daemon)",
                 0};
  }
  Operation* operation = operations.open(submission.opcode);
  if (operation == nullptr) {
    return Error{Status::again, "every completion slot is taken: read results first", 0};
  }
  if (bytes > 0) {
    const auto offset = arena.allocate(bytes);
    if (!offset) {
      operations.close(*operation);
      return Error{Status::again, "the arena is full: read results first", 0};
    }
    std::memcpy(arena_base + *offset, lists.data(), lists.size());
    // A result that the daemon never writes reads as "not kept".
    for (std::uint64_t at = lists.size(); at < bytes; at += sizeof(std::uint32_t)) {
      constexpr std::uint32_t kNotKept = static_cast<std::uint32_t>(Status::dropped);
      std::memcpy(arena_base + *offset + at, &kNotKept, sizeof kNotKept);
    }
    operation->arena_offset = submission.arena_offset = *offset;
    operation->arena_bytes = bytes;
    operation->list_bytes = lists.size();
  }
  operation->count = submission.count;
  if (submission.opcode != Opcode::reserve) operation->lease = submission.sequence_or_lease;
  if (submission.opcode == Opcode::load && submission.fence != Submission::kNoFence) {
    operation->fence = submission.fence;
    operation->fence_value = submission.fence_value;
    layer_loads[submission.fence].post(submission.fence_value);
  }
  const std::uint64_t deadline_ms =
      submission.deadline_ms != 0 ? submission.deadline_ms : attached.welcome.default_deadline_ms;
  operation->expires_ns = coarse_ns() + deadline_ms * 1'000'000 + kDeadlineGraceNs;
  earliest_expiry_ns = std::min(earliest_expiry_ns, operation->expires_ns);

  submission.user_data = operation->ticket;
  HICACHE_CRASH_POINT(post_listed);
  sq.push(submission);
  HICACHE_CRASH_POINT(post_pushed);
  kick_sleeping_daemon();
  HICACHE_CRASH_POINT(post_kicked);
  return Ticket{operation->ticket};
}

Outcome Session::Impl::check_states(std::span<const DevicePage> pages,
                                    std::span<const DevicePage> states) const {
  if (states.empty()) return success();
  if (states.size() != pages.size()) {
    return Error{Status::invalid_argument,
                 std::to_string(states.size()) + " state slots for " + std::to_string(pages.size()) +
                     " pages; one for each expected, or nothing",
                 0};
  }
  const std::uint32_t known = device_states.load(std::memory_order_acquire);  // pairs with register_buffers
  for (const DevicePage slot : states) {
    if (slot && slot.value >= known) {
      return Error{Status::invalid_argument,
                   "state slot " + std::to_string(slot.value) + " is not below the registered " +
                       std::to_string(known) + " slots",
                   0};
    }
  }
  return success();
}

Outcome Session::Impl::may_change(const char* what) const {
  if ((attached.welcome.features & kFeatureReadOnly) == 0) return success();
  return Error{Status::not_permitted,
               "user " + std::to_string(::geteuid()) +
                   " is attached only for reading (socket.read_only_uids of the daemon) and may not " + what,
               0};
}

Outcome Session::Impl::check_pages(std::span<const DevicePage> pages) const {
  if (role != Role::rank) {
    return Error{Status::not_permitted, "a " + std::string(to_string(role)) + " has no device pages to copy",
                 0};
  }
  const std::uint32_t known = device_pages.load(std::memory_order_acquire);  // pairs with register_buffers
  if (known == 0) {
    return Error{Status::invalid_argument, "no device buffers are registered: call register_buffers first",
                 0};
  }
  if (pages.empty()) return Error{Status::invalid_argument, "no device pages; at least 1 expected", 0};
  if (pages.size() > kMaxPagesPerOperation) {
    return Error{Status::too_large,
                 std::to_string(pages.size()) + " pages in one operation; at most " +
                     std::to_string(kMaxPagesPerOperation),
                 0};
  }
  for (const DevicePage page : pages) {
    if (page.value >= known) {
      return Error{Status::invalid_argument,
                   "device page " + std::to_string(page.value) + " is not below the registered " +
                       std::to_string(known) + " pages",
                   0};
    }
  }
  return success();
}

Result<Ticket> Session::nop(std::uint32_t deadline_ms) {
  follow_daemon();
  Submission s;
  s.opcode = Opcode::nop;
  s.deadline_ms = deadline_ms;
  return impl_->post(s, {}, 0);
}

Result<Ticket> Session::reserve(std::uint64_t sequence, std::span<const PrefixHash> hashes,
                                std::uint32_t deadline_ms, SequenceOrder order) {
  follow_daemon();
  if (impl_->fork.forked()) return forked_error();
  if (sequence == 0) return Error{Status::invalid_argument, "sequence is 0; sequences start at 1", 0};
  if (hashes.empty()) return Error{Status::invalid_argument, "no hashes; at least 1 expected", 0};
  if (hashes.size() > kMaxPagesPerOperation) {
    return Error{Status::too_large,
                 std::to_string(hashes.size()) + " hashes in one operation; at most " +
                     std::to_string(kMaxPagesPerOperation),
                 0};
  }
  Submission s;
  s.opcode = Opcode::reserve;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = sequence;
  s.first = static_cast<std::uint32_t>(order);
  s.count = static_cast<std::uint32_t>(hashes.size());
  return impl_->post(s, bytes_of(hashes), 0);
}

Result<Ticket> Session::write(LeaseId lease, std::uint32_t first, std::span<const DevicePage> pages,
                              std::optional<WriteFence> fence, std::uint32_t deadline_ms,
                              std::span<const DevicePage> states) {
  follow_daemon();
  if (impl_->fork.forked()) return forked_error();
  if (const auto allowed = impl_->may_change("write"); !allowed) return allowed.error();
  if (const auto checked = impl_->check_pages(pages); !checked) return checked.error();
  if (const auto checked = impl_->check_states(pages, states); !checked) return checked.error();
  if (fence && fence->index >= kWriteFences) {
    return Error{
        Status::invalid_argument,
        "write fence " + std::to_string(fence->index) + " is not below " + std::to_string(kWriteFences), 0};
  }
  Submission s;
  s.opcode = Opcode::write;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = lease.value;
  s.first = first;
  s.count = static_cast<std::uint32_t>(pages.size());
  if (fence) {
    s.fence = fence->index;
    s.fence_value = fence->value;
  }
  if (!states.empty()) s.flags = Submission::kWithStates;
  std::vector<DevicePage> storage;
  return impl_->post(s, bytes_of(both_lists(pages, states, storage)), pages.size() * sizeof(std::uint32_t));
}

Result<Ticket> Session::load(LeaseId lease, std::uint32_t first, std::span<const DevicePage> pages,
                             std::optional<LayerFence> fence, std::uint32_t deadline_ms,
                             std::span<const DevicePage> states) {
  follow_daemon();
  Impl& m = *impl_;
  if (m.fork.forked()) return forked_error();
  if (const auto checked = m.check_pages(pages); !checked) return checked.error();
  if (const auto checked = m.check_states(pages, states); !checked) return checked.error();
  if (fence && fence->slot >= kProducerSlots) {
    return Error{
        Status::invalid_argument,
        "producer slot " + std::to_string(fence->slot) + " is not below " + std::to_string(kProducerSlots),
        0};
  }
  Submission s;
  s.opcode = Opcode::load;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = lease.value;
  s.first = first;
  s.count = static_cast<std::uint32_t>(pages.size());
  if (fence) {
    s.fence = fence->slot;
    s.fence_value = fence->value;
  }
  const std::lock_guard lock(m.mutex);
  if (fence && !m.layer_loads[fence->slot].may_post(fence->value)) {
    return Error{Status::invalid_argument,
                 "layer fence value " + std::to_string(fence->value) +
                     " is not ahead of the earlier loads of producer slot " + std::to_string(fence->slot),
                 0};
  }
  if (!states.empty()) s.flags = Submission::kWithStates;
  std::vector<DevicePage> storage;
  return m.post_locked(s, bytes_of(both_lists(pages, states, storage)), 0);
}

Result<Ticket> Session::release(LeaseId lease, std::uint32_t deadline_ms) {
  follow_daemon();
  Submission s;
  s.opcode = Opcode::release;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = lease.value;
  return impl_->post(s, {}, 0);
}

Result<Ticket> Session::agree(std::uint64_t number, std::uint32_t deadline_ms) {
  if (number == 0) {
    return Error{Status::invalid_argument, "agreement 0; agreements are numbered from 1", 0};
  }
  Submission s;
  s.opcode = Opcode::agree;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = number;
  return impl_->post(s, {}, 0);
}

Result<Ticket> Session::prefetch(LeaseId lease, std::uint32_t first, std::uint32_t count,
                                 std::optional<PrefetchPolicy> policy, std::uint32_t deadline_ms) {
  follow_daemon();
  if (const auto allowed = impl_->may_change("prefetch"); !allowed) return allowed.error();
  if (const auto checked = check_range("prefetch", count); !checked) return checked.error();
  Submission s;
  s.opcode = Opcode::prefetch;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = lease.value;
  s.first = first;
  s.count = count;
  if (policy) s.fence = static_cast<std::uint32_t>(*policy);
  return impl_->post(s, {}, 0);
}

Result<Ticket> Session::backup(LeaseId lease, std::uint32_t first, std::uint32_t count,
                               std::uint32_t deadline_ms) {
  follow_daemon();
  if (const auto allowed = impl_->may_change("back up"); !allowed) return allowed.error();
  if (const auto checked = check_range("back up", count); !checked) return checked.error();
  Submission s;
  s.opcode = Opcode::backup;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = lease.value;
  s.first = first;
  s.count = count;
  return impl_->post(s, {}, 0);
}

Result<Ticket> Session::check_prefetch(LeaseId lease, std::uint32_t number, std::uint32_t deadline_ms) {
  return ask_about_prefetch(Opcode::check_prefetch, lease, number, deadline_ms);
}

Result<Ticket> Session::end_prefetch(LeaseId lease, std::uint32_t number, std::uint32_t deadline_ms) {
  return ask_about_prefetch(Opcode::end_prefetch, lease, number, deadline_ms);
}

Result<Ticket> Session::ask_about_prefetch(Opcode opcode, LeaseId lease, std::uint32_t number,
                                           std::uint32_t deadline_ms) {
  follow_daemon();
  if (number == 0) {
    return Error{Status::invalid_argument, "question 0; questions about a prefetch are numbered from 1", 0};
  }
  Submission s;
  s.opcode = opcode;
  s.deadline_ms = deadline_ms;
  s.sequence_or_lease = lease.value;
  s.first = number;
  return impl_->post(s, {}, 0);
}

}  // namespace hicache
