// Prefetches of the controller: begun, asked about and ended by request, the same on every rank.
#include <string>
#include <utility>

#include "hicache/controller/controller.hpp"

namespace hicache {

Outcome HiCacheController::prefetch(const std::string& request, std::span<const PrefixHash> chain,
                                    std::optional<PrefetchPolicy> policy) {
  if (failure_) return *failure_;
  if (chain.empty() || chain.size() > kMaxPagesPerOperation) {
    return Error{Status::invalid_argument,
                 std::to_string(chain.size()) + " pages to prefetch, expected 1 to " +
                     std::to_string(kMaxPagesPerOperation),
                 0};
  }
  if (prefetches_.contains(request)) {
    return Error{Status::exists, "request '" + request + "' has a prefetch already", 0};
  }
  InFlight flight;
  flight.sequence = ++prefetch_sequence_;
  Found found;
  const Status opened = open_lease(flight, chain, found, SequenceOrder::apart);
  if (failure_) return *failure_;
  if (opened != Status::ok) {
    return Error{opened, "the daemon refused to hold the pages of request '" + request + "'", 0};
  }
  Prefetching one;
  one.lease = flight.lease;
  one.chain.assign(chain.begin(), chain.end());
  const auto ticket = post([&] {
    return session_.prefetch(one.lease, 0, static_cast<std::uint32_t>(chain.size()), policy,
                             options_.deadline_ms);
  });
  if (!ticket) return ticket.error();
  one.ticket = *ticket;
  prefetches_.emplace(request, std::move(one));
  return success();
}

Result<PrefetchProgress> HiCacheController::check_prefetch_progress(const std::string& request) {
  return ask_about(request, false);
}

Result<PrefetchProgress> HiCacheController::terminate_prefetch(const std::string& request) {
  return ask_about(request, true);
}

Outcome HiCacheController::release_aborted_request(const std::string& request) {
  const auto ended = ask_about(request, true);
  return ended ? success() : Outcome(ended.error());
}

Result<PrefetchProgress> HiCacheController::ask_about(const std::string& request, bool end) {
  if (failure_) return *failure_;
  PrefetchProgress progress;
  const auto found = prefetches_.find(request);
  if (found == prefetches_.end()) return progress;
  Prefetching& one = found->second;
  const std::uint32_t number = ++one.questions;
  const auto asked = post([&] {
    return end ? session_.end_prefetch(one.lease, number, options_.deadline_ms)
               : session_.check_prefetch(one.lease, number, options_.deadline_ms);
  });
  if (!asked) return asked.error();
  const auto answer = result_of(*asked);
  if (!answer) return answer.error();
  if (answer->status == Status::ok && answer->filling > 0) {
    progress.ended = false;
    return progress;
  }
  const Prefetching ended = std::move(one);
  prefetches_.erase(found);
  // It has ended for the group, so its own end is there or comes at once; then this rank lets go.
  if (const auto own = result_of(ended.ticket); !own) return own.error();
  const auto release = post([&] { return session_.release(ended.lease, options_.deadline_ms); });
  if (!release) return release.error();
  if (const auto released = result_of(*release); !released) return released.error();
  const std::size_t ready = answer->present + answer->written;
  progress.ready.assign(ended.chain.begin(), ended.chain.begin() + static_cast<std::ptrdiff_t>(ready));
  progress.fetched_tokens = std::uint64_t{answer->written} * options_.spec.page_tokens;
  return progress;
}

// Before a reset: nothing of them may be left behind.
void HiCacheController::end_prefetches() {
  while (!failure_ && !prefetches_.empty()) {
    const std::string request = prefetches_.begin()->first;
    static_cast<void>(ask_about(request, true));
  }
  prefetches_.clear();
}

}  // namespace hicache
