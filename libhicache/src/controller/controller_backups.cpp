// Acks of backups: asked for behind a write, while this rank still holds its lease, and read when storage has
// answered. They are bounded, so that a slow storage can't use up what copies need to end.
#include <algorithm>
#include <utility>

#include "hicache/controller/controller.hpp"

namespace hicache {

void HiCacheController::ask_about_backup(const InFlight& flight, std::uint32_t first, std::uint32_t count) {
  BackingUp one;
  one.ack.kind = OperationKind::backup;
  one.ack.epoch = epoch_;
  one.ack.sequence = flight.sequence;
  one.ack.node_ids = flight.operation->node_ids;
  one.ack.tokens = flight.operation->device_slots.size();
  // Not through post(): an ack is not worth waiting for room.
  if (backups_.size() < options_.backup_acks) {
    const auto ticket = session_.backup(flight.lease, first, count, options_.deadline_ms);
    if (ticket) {
      one.ticket = *ticket;
      backups_.push_back(std::move(one));
      return;
    }
    one.ack.status = one.ack.local = ticket.status();
  } else {
    one.ack.status = one.ack.local = Status::again;
  }
  // Nor is there an end to those that nobody takes.
  if (backup_acks_.size() < kMaxUntakenAcks) backup_acks_.push_back(std::move(one.ack));
}

Result<std::vector<HiCacheAck>> HiCacheController::take_backup_acks() {
  while (auto result = session_.poll()) route(std::move(*result));
  std::vector<HiCacheAck> acks = std::exchange(backup_acks_, {});
  std::erase_if(backups_, [&](BackingUp& one) {
    const auto at = results_.find(one.ticket.value);
    if (at == results_.end()) return false;
    const OperationResult result = std::move(at->second);
    results_.erase(at);
    HiCacheAck& ack = one.ack;
    ack.local = result.status;
    ack.host_tokens = std::uint64_t{result.written} * options_.spec.page_tokens;
    ack.status = result.status != Status::ok     ? result.status
                 : ack.host_tokens == ack.tokens ? Status::ok
                                                 : Status::dropped;
    if (!one.forgotten) acks.push_back(std::move(ack));
    return true;
  });
  if (acks.empty() && failure_) return *failure_;
  if (acks.empty() && session_.state() != Status::ok) {
    return fail(Error{session_.state(), "the session has ended", 0});
  }
  return acks;
}

// Before a reset: what is still open ends without anybody who is told.
void HiCacheController::forget_backups() {
  backup_acks_.clear();
  for (BackingUp& one : backups_) one.forgotten = true;
}

}  // namespace hicache
