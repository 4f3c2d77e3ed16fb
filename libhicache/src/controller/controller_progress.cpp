// How the controller learns what became of its operations, in the group's order.
#include <time.h>

#include <algorithm>
#include <string>
#include <utility>

#include "hicache/controller/controller.hpp"
#include "shm/clock.hpp"

namespace hicache {
namespace {

void nap(long ns) {
  const timespec time{0, ns};
  ::nanosleep(&time, nullptr);
}

constexpr long kAgainNapNs = 200'000;  // others have to move before the daemon can say yes
constexpr long kAgreeNapNs = 50'000;

}  // namespace

// The ranks' common ground is gone with the daemon: from here on every call says so.
Error HiCacheController::fail(Error error) {
  if (!failure_) failure_ = std::move(error);
  return *failure_;
}

void HiCacheController::route(OperationResult result) {
  if (result.pages_returned) {
    busy_.erase(result.ticket.value);
    return;
  }
  if (result.pages_busy) busy_.insert(result.ticket.value);
  const std::uint64_t ticket = result.ticket.value;
  results_.emplace(ticket, std::move(result));
}

Outcome HiCacheController::wait_for_news() {
  auto result = session_.wait_any(options_.answer_timeout_ms);
  if (!result) return fail(result.error());
  route(std::move(*result));
  return success();
}

// Posts one operation. A session that is full has results that can be read.
Result<Ticket> HiCacheController::post(const std::function<Result<Ticket>()>& post_one) {
  for (;;) {
    auto ticket = post_one();
    if (ticket) return ticket;
    if (ticket.status() == Status::again) {
      if (const auto news = wait_for_news(); !news) return news.error();
      continue;
    }
    const bool argument = ticket.status() == Status::invalid_argument || ticket.status() == Status::too_large;
    return argument ? ticket.error() : fail(ticket.error());
  }
}

Result<OperationResult> HiCacheController::result_of(Ticket ticket) {
  for (;;) {
    const auto at = results_.find(ticket.value);
    if (at != results_.end()) {
      OperationResult result = std::move(at->second);
      results_.erase(at);
      return result;
    }
    if (const auto news = wait_for_news(); !news) return news.error();
  }
}

HiCacheController::InFlight& HiCacheController::open_flight() {
  in_flight_.emplace_back();
  in_flight_.back().sequence = next_sequence_++;
  return in_flight_.back();
}

// Opens the lease of a flight's sequence: the group's decision. Not ok: this rank has no lease.
Status HiCacheController::open_lease(InFlight& flight, std::span<const PrefixHash> hashes, Found& found,
                                     SequenceOrder order) {
  const std::uint64_t end_ns = monotonic_ns() + std::uint64_t{options_.answer_timeout_ms} * 1'000'000;
  for (;;) {
    const auto ticket =
        post([&] { return session_.reserve(flight.sequence, hashes, options_.deadline_ms, order); });
    if (!ticket) return ticket.status();
    const auto result = result_of(*ticket);
    if (!result) return result.status();
    if (result->status == Status::ok) {
      flight.lease = result->lease;
      found = {result->hits, result->present};
      return Status::ok;
    }
    if (result->status == Status::again && monotonic_ns() < end_ns) {
      nap(kAgainNapNs);
      continue;
    }
    const bool decided = result->status == Status::diverged || result->status == Status::poisoned;
    // Anything else leaves this rank without the answer that the others have.
    if (!decided) {
      fail(Error{result->status,
                 "sequence " + std::to_string(flight.sequence) +
                     " could not be opened: " + std::string(to_string(result->status)),
                 0});
    }
    return result->status;
  }
}

void HiCacheController::release(InFlight& flight) {
  if (!flight.lease || flight.release) return;
  if (const auto ticket = post([&] { return session_.release(flight.lease, options_.deadline_ms); })) {
    flight.release = *ticket;
  }
}

Result<std::vector<HiCacheAck>> HiCacheController::check_events() {
  std::vector<HiCacheAck> acks;
  if (failure_) return *failure_;
  if (agreement_ticket_) {
    if (const auto agreed = agree(acks); !agreed) return agreed.error();
  }
  session_.report_host_pages(host_->counts());
  // The answer is read at the next call: it has come by then, and nobody waits.
  const auto ticket = post([&] { return session_.agree(agreement_ + 1, options_.deadline_ms); });
  if (!ticket) return ticket.error();
  ++agreement_;
  agreement_ticket_ = *ticket;
  return acks;
}

// Reads the answer to the last agreement, which was asked for unless there is a ticket already, and retires
// what it covers.
Outcome HiCacheController::agree(std::vector<HiCacheAck>& acks) {
  const std::uint64_t end_ns = monotonic_ns() + std::uint64_t{options_.answer_timeout_ms} * 1'000'000;
  if (!agreement_ticket_) ++agreement_;
  for (;;) {
    if (!agreement_ticket_) {
      const auto ticket = post([&] { return session_.agree(agreement_, options_.deadline_ms); });
      if (!ticket) return ticket.error();
      agreement_ticket_ = *ticket;
    }
    const auto result = result_of(std::exchange(agreement_ticket_, Ticket{}));
    if (!result) return result.error();
    if (result->status == Status::again && monotonic_ns() < end_ns) {
      nap(kAgainNapNs);
      continue;
    }
    if (result->status != Status::ok) {
      return fail(Error{
          result->status,
          "agreement " + std::to_string(agreement_) + " ended with " + std::string(to_string(result->status)),
          0});
    }
    while (!in_flight_.empty() && in_flight_.front().sequence <= result->agreed) {
      InFlight flight = std::move(in_flight_.front());
      in_flight_.pop_front();
      const bool failed = result->agreed_failed && flight.sequence == result->agreed;
      if (const auto retired = retire(flight, failed, acks); !retired) return retired;
    }
    return success();
  }
}

Outcome HiCacheController::retire(InFlight& flight, bool load_failed, std::vector<HiCacheAck>& acks) {
  HiCacheAck ack;
  ack.local = flight.refused;
  std::vector<Status> pages;
  if (flight.copy) {
    const auto result = result_of(flight.copy);
    if (!result) return result.error();
    while (busy_.contains(flight.copy.value)) {
      if (const auto news = wait_for_news(); !news) return news;
    }
    ack.local = result->status;
    ack.bytes = result->bytes;
    pages = result->page_status;
  }
  if (flight.release) {
    if (const auto released = result_of(flight.release); !released) return released.error();
  }
  if (!flight.operation) return success();
  const CacheOperation& operation = *flight.operation;
  const std::span<const std::uint64_t> host(operation.host_slots);
  ack.kind = operation.kind;
  ack.epoch = epoch_;
  ack.sequence = flight.sequence;
  ack.start = flight.start;
  ack.finish = flight.finish;
  ack.node_ids = operation.node_ids;
  ack.tokens = operation.device_slots.size();
  if (operation.kind == OperationKind::load) {
    const bool refused = flight.refused != Status::ok;  // a decision of the group's
    ack.status = load_failed || refused ? Status::dropped : Status::ok;
    static_cast<void>(ack.status == Status::ok ? host_->complete_io(host) : host_->abort_io(host));
    acks.push_back(ack);
    if (ack.status == Status::ok && ack.local != Status::ok) {
      return fail(Error{ack.local,
                        "load " + std::to_string(flight.sequence) + " ended well for the group, but with " +
                            std::string(to_string(ack.local)) + " for this rank",
                        0});
    }
    return success();
  }
  // Pages that another engine is filling count as there: if they never come, a hold finds out.
  const auto kept = std::find(pages.begin(), pages.end(), Status::dropped) - pages.begin();
  ack.host_tokens = static_cast<std::uint64_t>(kept) * options_.spec.page_tokens;
  ack.status = ack.host_tokens == ack.tokens ? Status::ok : Status::dropped;
  static_cast<void>(host_->complete_io(host.first(ack.host_tokens)));
  static_cast<void>(host_->abort_io(host.subspan(ack.host_tokens)));
  acks.push_back(std::move(ack));
  return success();
}

Outcome HiCacheController::agree_until(std::uint64_t sequence, std::vector<HiCacheAck>& acks) {
  const std::uint64_t end_ns = monotonic_ns() + std::uint64_t{options_.answer_timeout_ms} * 1'000'000;
  while (!in_flight_.empty() && in_flight_.front().sequence <= sequence) {
    if (const auto agreed = agree(acks); !agreed) return agreed;
    if (in_flight_.empty() || in_flight_.front().sequence > sequence) break;
    if (monotonic_ns() >= end_ns) {
      return fail(Error{Status::timed_out,
                        "sequence " + std::to_string(in_flight_.front().sequence) +
                            " has not ended on all ranks within " +
                            std::to_string(options_.answer_timeout_ms) + " ms",
                        0});
    }
    nap(kAgreeNapNs);
  }
  return success();
}

// Needs no agreement: a write's result is the group's, and every rank waits for it at this very call. Nor may
// it wait in the order: a load that is queued keeps its sequence open, and may be waiting for this eviction.
Result<std::vector<HiCacheAck>> HiCacheController::finish_writes() {
  if (failure_) return *failure_;
  std::vector<HiCacheAck> acks;
  for (InFlight& flight : in_flight_) {
    if (!flight.operation || flight.operation->kind != OperationKind::write) continue;
    if (const auto retired = retire(flight, false, acks); !retired) return retired.error();
    flight.operation.reset();
    flight.copy = flight.release = Ticket{};
  }
  return acks;
}

Result<std::vector<HiCacheAck>> HiCacheController::drain() {
  if (failure_) return *failure_;
  std::vector<HiCacheAck> acks;
  // A queued load keeps its hold open, and everything behind it waits in the order.
  const std::uint64_t end = queued_loads_.empty() ? next_sequence_ : queued_loads_.front().sequence;
  if (const auto done = agree_until(end - 1, acks); !done) return done.error();
  return acks;
}

// The session is over: what is left is to know that no copy touches device pages any more.
Outcome HiCacheController::end_without_daemon() {
  for (const InFlight& flight : in_flight_) {
    for (const Ticket ticket : {flight.copy, flight.release}) {
      if (!ticket || results_.contains(ticket.value)) continue;
      // not_found: read before, as an answer that somebody waited for.
      while (true) {
        auto result = session_.wait(ticket, options_.answer_timeout_ms);
        if (!result && result.status() == Status::not_found) break;
        if (!result) return Error{Status::busy, "a copy may still run: " + result.error().message, 0};
        const bool last = !result->pages_busy;
        route(std::move(*result));
        if (last) break;
      }
    }
  }
  while (!busy_.empty()) {
    const auto returned = session_.wait(Ticket{*busy_.begin()}, options_.answer_timeout_ms);
    if (!returned && returned.status() != Status::not_found) {
      return Error{Status::busy, "a copy may still run: " + returned.error().message, 0};
    }
    busy_.erase(busy_.begin());
  }
  results_.clear();
  in_flight_.clear();
  backups_.clear();  // they have ended with the session, and nobody is told
  return success();
}

Outcome HiCacheController::reset(ResetTiers tiers) {
  for (QueuedLoad& queued : std::exchange(queued_loads_, {})) {
    static_cast<void>(host_->abort_io(queued.operation->host_slots));
    static_cast<void>(device_.free(queued.operation->device_slots));
    if (InFlight* flight = find(queued.sequence)) release(*flight);
  }
  end_prefetches();
  forget_backups();
  // Their acks belong to the old epoch: nobody gets them.
  if (!failure_) static_cast<void>(drain());
  if (failure_) {
    if (const auto ended = end_without_daemon(); !ended) return ended;
    // No copy runs, so no page is in one, whatever its state was when the daemon went.
    host_ = std::move(*HostPageStates::create(options_.host_tokens, options_.spec.page_tokens));
    tiers = ResetTiers::both;
  } else if (tiers == ResetTiers::device) {
    host_->forget_device();
  } else if (const auto cleared = host_->clear(); !cleared) {
    return cleared;
  }
  if (tiers != ResetTiers::host) device_.clear();
  queued_writes_.clear();
  counter_.reset();
  ++epoch_;
  return success();
}

}  // namespace hicache
