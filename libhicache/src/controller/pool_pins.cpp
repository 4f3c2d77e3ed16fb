#include "hicache/controller/pool_pins.hpp"

#include <time.h>

#include <algorithm>
#include <string>

#include "shm/clock.hpp"

namespace hicache {
namespace {

constexpr long kAgainNapNs = 1'000'000;

}  // namespace

PoolPins::PoolPins(Session& session, std::uint64_t max_pages, std::uint32_t timeout_ms)
    : session_(session), max_pages_(max_pages), timeout_ms_(timeout_ms) {}

PoolPins::~PoolPins() {
  for (const Pin& pin : pins_) give_back(pin.lease);
}

// A group that is not complete yet, or has too many leases, says again.
Result<OperationResult> PoolPins::reserve(std::span<const PrefixHash> hashes) {
  const std::uint64_t end_ns = monotonic_ns() + std::uint64_t{timeout_ms_} * 1'000'000;
  for (;;) {
    const auto ticket = session_.reserve(next_sequence_, hashes);
    if (!ticket && ticket.status() != Status::again) return ticket.error();
    if (ticket) {
      auto result = session_.wait(*ticket, timeout_ms_);
      if (!result) return result;
      if (result->status == Status::ok) ++next_sequence_;
      if (result->status != Status::again) return result;
    }
    if (monotonic_ns() >= end_ns) return Error{Status::again, "the group can't open a lease now", 0};
    const timespec nap{0, kAgainNapNs};
    ::nanosleep(&nap, nullptr);
  }
}

void PoolPins::give_back(LeaseId lease) {
  // When the session has ended the daemon has it already.
  if (const auto ticket = session_.release(lease)) static_cast<void>(session_.wait(*ticket, timeout_ms_));
}

Result<std::uint32_t> PoolPins::pin(std::span<const PrefixHash> hashes, std::uint64_t until) {
  if (hashes.empty()) return Error{Status::invalid_argument, "no pages to pin", 0};
  const auto result = reserve(hashes);
  if (!result) return result.error();
  if (result->status != Status::ok) {
    return Error{result->status, "the daemon refused to pin: " + std::string(to_string(result->status)), 0};
  }
  const auto known =
      std::find_if(pins_.begin(), pins_.end(), [&](const Pin& pin) { return pin.last == hashes.back(); });
  const std::uint32_t before = known == pins_.end() ? 0 : known->pages;
  if (result->hits == 0 || pages_ - before + result->hits > max_pages_) {
    give_back(result->lease);
    if (result->hits == 0) return Error{Status::not_found, "the pool has none of these pages", 0};
    return Error{Status::no_space,
                 "pinning " + std::to_string(result->hits) + " pages beside the " +
                     std::to_string(pages_ - before) + " pinned now; at most " + std::to_string(max_pages_),
                 0};
  }
  if (known == pins_.end()) {
    pins_.push_back({hashes.back(), result->lease, result->hits, until});
  } else {
    // The new lease first: the pages are held all the time.
    give_back(known->lease);
    *known = {hashes.back(), result->lease, result->hits, std::max(known->until, until)};
  }
  pages_ = pages_ - before + result->hits;
  return result->hits;
}

void PoolPins::expire(std::uint64_t now) {
  std::erase_if(pins_, [&](const Pin& pin) {
    if (pin.until > now) return false;
    give_back(pin.lease);
    pages_ -= pin.pages;
    return true;
  });
}

}  // namespace hicache
