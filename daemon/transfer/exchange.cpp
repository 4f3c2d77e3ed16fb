#include "daemon/transfer/exchange.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cassert>

#include "shm/clock.hpp"
#include "shm/layer_fences.hpp"

namespace hicache::daemon {
namespace {

// A given-up exchange is forgotten after this, although not every rank has asked for it: a rank that comes
// later waits for the others' next load instead, which has the same bytes.
constexpr std::uint64_t kRememberNs = 10'000'000'000;

}  // namespace

const char* name_of(GoDirect cause) {
  switch (cause) {
    case GoDirect::late:
      return "late";
    case GoDirect::unreachable:
      return "unreachable";
    case GoDirect::different_pages:
      return "different_pages";
    case GoDirect::ended:
      return "ended";
    case GoDirect::count_:
      break;
  }
  return "unknown";
}

bool Exchange::matches(const GroupLoad& load, std::size_t count) const {
  return load_.lease == load.lease && load_.first == load.first && load_.ranks == load.ranks &&
         count_ == count && !members_[load.rank].joined;
}

void Exchange::ring_all() {
  for (const Member& member : members_) {
    if (member.bell != nullptr) member.bell->ring();
  }
}

void Exchange::landed(std::uint32_t rank, std::uint32_t layers) {
  const std::lock_guard lock(mutex_);
  Member& own = members_[rank];
  own.landed_layers = std::max(own.landed_layers, layers);
  std::uint32_t ready = own.landed_layers;
  for (const Member& member : members_) ready = std::min(ready, member.landed_layers);
  if (ready <= ready_layers_) return;
  for (const Member& member : members_) {
    if (member.fences == nullptr) continue;
    for (std::uint32_t layer = ready_layers_; layer < ready; ++layer)
      raise_layer_word(member.fences->layer[layer], member.fence_value);
    wake_layer_waiters(*member.fences);
  }
  ready_layers_ = ready;
}

void Exchange::fail(Status status) {
  Status expected = Status::ok;
  // Release pairs with the acquire of verdict(); nothing else is published with it.
  if (verdict_.compare_exchange_strong(expected, status, std::memory_order_acq_rel)) ring_all();
}

std::vector<TransferDone> Exchange::part_ended(std::uint32_t rank, TransferJobPtr job) {
  if (job->verdict != Status::ok) fail(job->verdict);
  const std::lock_guard lock(mutex_);
  assert(members_[rank].ended == nullptr);
  members_[rank].ended = std::move(job);
  std::vector<TransferDone> done;
  if (++ended_parts_ < members_.size()) return done;
  // No copy of any part is left.
  const Status status = verdict();
  done.reserve(members_.size());
  for (Member& member : members_) {
    const std::shared_ptr<const RankMemory> memory = member.ended->transfer.memory;
    assert(status != Status::ok || ready_layers_ == memory->spec.layers);
    member.ended->verdict = status;
    if (status == Status::ok) member.ended->bytes = member.pages.size() * memory->spec.shard_bytes();
    done.push_back(member.ended->finish(TransferOptions{}));
    if (member.fences != nullptr) {
      memory->device->exchanging[member.slot].store(false, std::memory_order_release);
      member.bell->ring();
    }
    member.ended.reset();
  }
  return done;
}

bool ExchangeTable::wants(const Transfer& transfer) const {
  if (!transfer.group || !off_because_.empty() || transfer.memory == nullptr ||
      transfer.memory->device == nullptr)
    return false;
  return policy_.wants(transfer.pages.size() * transfer.memory->spec.shard_bytes(), transfer.group->devices);
}

std::uint64_t ExchangeTable::patience_ns(const Transfer& transfer) const {
  return policy_.patience_ns(transfer.pages.size() * transfer.memory->spec.shard_bytes(),
                             transfer.group->devices);
}

// The oldest exchange of the load that the rank has not joined: ranks may post a load of the same pages again
// before the others have posted their first.
std::shared_ptr<Exchange> ExchangeTable::find_or_open(const Transfer& transfer) {
  const std::uint64_t now = monotonic_ns();
  std::erase_if(gathering_, [&](const auto& exchange) {
    return exchange->state() == Exchange::State::given_up && now - exchange->opened_ns_ > kRememberNs;
  });
  for (const auto& exchange : gathering_) {
    if (exchange->matches(*transfer.group, transfer.pages.size())) return exchange;
  }
  std::shared_ptr<Exchange> opened(new Exchange(*transfer.group));
  opened->count_ = transfer.pages.size();
  opened->opened_ns_ = now;
  gathering_.push_back(opened);
  return opened;
}

// The last one to join takes it off the list.
void ExchangeTable::note_joined(const std::shared_ptr<Exchange>& exchange) {
  if (++exchange->joined_ == exchange->members_.size()) gathering_.remove(exchange);
}

std::shared_ptr<Exchange> ExchangeTable::join(const Transfer& transfer, std::shared_ptr<Doorbell> bell) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Exchange> exchange = find_or_open(transfer);
  Exchange::Member& member = exchange->members_[transfer.group->rank];
  member.joined = true;
  note_joined(exchange);
  if (exchange->state() == Exchange::State::given_up) return nullptr;
  member.memory = transfer.memory.get();
  member.pages = transfer.pages;
  member.bell = std::move(bell);
  if (transfer.fence != Submission::kNoFence) {
    member.fences = &transfer.memory->fences->load[transfer.fence];
    member.fence_value = transfer.fence_value;
    member.slot = transfer.fence;
    transfer.memory->device->exchanging[member.slot].store(true, std::memory_order_relaxed);
  }
  if (exchange->joined_ == exchange->members_.size()) agree(*exchange);
  return exchange;
}

void ExchangeTable::agree(Exchange& exchange) {
  std::vector<ExchangeLoad> loads;
  for (const Exchange::Member& member : exchange.members_) {
    loads.push_back({member.memory->device->device_index, member.pages});
    exchange.announces_ = exchange.announces_ || member.fences != nullptr;
  }
  if (!same_pages(loads)) return end_gathering(exchange, GoDirect::different_pages);
  for (const Exchange::Member& from : exchange.members_) {
    for (const Exchange::Member& to : exchange.members_) {
      const std::uint32_t device = from.memory->device->device_index;
      if (device != to.memory->device->device_index && !to.memory->device->reachable_from(device))
        return end_gathering(exchange, GoDirect::unreachable);
    }
  }
  auto parts = plan_exchange(exchange.load_.first, loads);
  for (std::size_t rank = 0; rank < parts.size(); ++rank)
    exchange.members_[rank].part = std::move(parts[rank]);
  exchange.state_.store(Exchange::State::agreed, std::memory_order_release);  // SYNC agreed
  exchange.ring_all();
}

void ExchangeTable::end_gathering(Exchange& exchange, GoDirect cause) {
  std::uint64_t& times = direct_[static_cast<std::size_t>(cause)];
  if (++times == 1) {
    spdlog::warn("a group of {} ranks loads {} pages directly: {}; further cases are counted in the status",
                 exchange.members_.size(), exchange.count_, name_of(cause));
  }
  exchange.state_.store(Exchange::State::given_up, std::memory_order_release);
  exchange.ring_all();
}

bool ExchangeTable::give_up(Exchange& exchange, GoDirect cause) {
  const std::lock_guard lock(mutex_);
  if (exchange.state() == Exchange::State::agreed) return false;
  if (exchange.state() == Exchange::State::gathering) end_gathering(exchange, cause);
  return true;
}

void ExchangeTable::leave(const Transfer& transfer) {
  if (transfer.fence == Submission::kNoFence) return;
  transfer.memory->device->exchanging[transfer.fence].store(false, std::memory_order_release);
}

void ExchangeTable::count_end(Status status) {
  const std::lock_guard lock(mutex_);
  ++exchanged_;
  if (status != Status::ok) ++failed_;
}

ExchangeStatus ExchangeTable::status() const {
  const std::lock_guard lock(mutex_);
  ExchangeStatus out;
  out.mode = policy_.mode;
  out.off_because = off_because_;
  out.exchanged = exchanged_;
  out.failed = failed_;
  out.direct = direct_;
  return out;
}

}  // namespace hicache::daemon
