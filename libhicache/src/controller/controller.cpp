// The controller's calls: writes, loads, evictions.
#include "hicache/controller/controller.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace hicache {

Result<std::unique_ptr<HiCacheController>> HiCacheController::create(Session& session, TokenSlots& device,
                                                                     const ControllerOptions& options) {
  if (const auto valid = options.spec.validate(); !valid) return valid.error();
  if (device.page_tokens() != options.spec.page_tokens) {
    return Error{Status::invalid_argument,
                 "device slots in pages of " + std::to_string(device.page_tokens()) +
                     " tokens, expected the namespace's " + std::to_string(options.spec.page_tokens),
                 0};
  }
  if (options.spec.has_states() && options.states == nullptr) {
    return Error{Status::invalid_argument,
                 "the namespace has trailing pools: the controller needs state slots", 0};
  }
  auto host = HostPageStates::create(options.host_tokens, options.spec.page_tokens);
  if (!host) return host.error();
  return std::unique_ptr<HiCacheController>(
      new HiCacheController(session, device, options, std::move(*host)));
}

HiCacheController::HiCacheController(Session& session, TokenSlots& device, const ControllerOptions& options,
                                     std::unique_ptr<HostPageStates> host)
    : session_(session),
      device_(device),
      options_(options),
      host_(std::move(host)),
      words_(session),
      counter_(words_, options.spec.layers) {}

HiCacheController::~HiCacheController() = default;

Result<std::vector<DevicePage>> HiCacheController::device_pages(std::span<const std::uint64_t> slots) const {
  const std::uint32_t page_tokens = options_.spec.page_tokens;
  bool whole = !slots.empty() && slots.size() % page_tokens == 0;
  for (std::size_t i = 0; whole && i < slots.size(); ++i) {
    whole = slots[i] < device_.size() && slots[i] % page_tokens == i % page_tokens &&
            (i % page_tokens == 0 || slots[i] == slots[i - 1] + 1);
  }
  if (!whole) {
    return Error{Status::invalid_argument,
                 std::to_string(slots.size()) + " device slots, expected whole pages of " +
                     std::to_string(page_tokens) + " ascending slots below " + std::to_string(device_.size()),
                 0};
  }
  std::vector<DevicePage> pages;
  for (std::size_t i = 0; i < slots.size(); i += page_tokens) {
    pages.push_back(DevicePage{static_cast<std::uint32_t>(slots[i] / page_tokens)});
  }
  return pages;
}

HiCacheController::InFlight* HiCacheController::find(std::uint64_t sequence) {
  const auto at =
      std::lower_bound(in_flight_.begin(), in_flight_.end(), sequence,
                       [](const InFlight& flight, std::uint64_t wanted) { return flight.sequence < wanted; });
  return at != in_flight_.end() && at->sequence == sequence ? &*at : nullptr;
}

Result<std::vector<std::uint64_t>> HiCacheController::write(std::span<const std::uint64_t> device_slots,
                                                            std::span<const PrefixHash> chain,
                                                            std::int64_t node_id,
                                                            std::optional<std::int64_t> priority) {
  if (failure_) return *failure_;
  auto pages = device_pages(device_slots);
  if (!pages) return pages.error();
  if (chain.size() < pages->size() || chain.size() > kMaxPagesPerOperation) {
    return Error{Status::invalid_argument,
                 "a chain of " + std::to_string(chain.size()) + " hashes for " +
                     std::to_string(pages->size()) + " pages, expected at least as many and at most " +
                     std::to_string(kMaxPagesPerOperation),
                 0};
  }
  auto host = host_->alloc(chain.last(pages->size()));
  if (!host) return host;
  if (const auto held = host_->protect_write(*host); !held) return held.error();
  QueuedWrite queued;
  queued.operation = std::make_unique<CacheOperation>(
      OperationKind::write, *host, std::vector<std::uint64_t>(device_slots.begin(), device_slots.end()),
      node_id, priority);
  queued.chain.assign(chain.begin(), chain.end());
  queued.pages = std::move(*pages);
  if (options_.spec.has_states()) {
    for (const PrefixHash& page : chain.last(queued.pages.size())) {
      queued.states.push_back(options_.states->source(page));
    }
  }
  queued_writes_.push_back(std::move(queued));
  if (const auto started = start_writing(); !started) return started.error();
  return host;
}

Outcome HiCacheController::start_writing() {
  if (failure_) return *failure_;
  std::sort(queued_writes_.begin(), queued_writes_.end(),
            [](const QueuedWrite& a, const QueuedWrite& b) { return a.operation->before(*b.operation); });
  for (QueuedWrite& queued : std::exchange(queued_writes_, {})) {
    if (const auto started = start_write(std::move(queued)); !started) return started;
  }
  return success();
}

Outcome HiCacheController::start_write(QueuedWrite queued) {
  InFlight& flight = open_flight();
  flight.operation = std::move(queued.operation);
  flight.start = start_fence_;
  Found found;
  flight.refused = open_lease(flight, queued.chain, found);
  if (failure_) return *failure_;
  if (flight.refused != Status::ok) return success();  // its ack tells
  const auto first = static_cast<std::uint32_t>(queued.chain.size() - queued.pages.size());
  const auto copy = post([&] {
    return session_.write(flight.lease, first, queued.pages, start_fence_, options_.deadline_ms,
                          queued.states);
  });
  if (copy) {
    flight.copy = *copy;
  } else {
    flight.refused = copy.status();
  }
  if (copy && options_.backup_acks > 0) {
    ask_about_backup(flight, first, static_cast<std::uint32_t>(queued.pages.size()));
  }
  release(flight);
  return failure_ ? Outcome(*failure_) : success();
}

Result<HostHold> HiCacheController::hold(std::span<const std::uint64_t> host_slots) {
  if (failure_) return *failure_;
  const auto hashes = host_->hashes(host_slots);
  if (!hashes) return hashes.error();
  if (hashes->empty()) return Error{Status::invalid_argument, "no host slots to hold", 0};
  InFlight& flight = open_flight();
  Found found;
  flight.refused = open_lease(flight, *hashes, found);
  if (failure_) return *failure_;
  if (flight.refused != Status::ok) {
    return Error{flight.refused, "the daemon refused to hold the pages of this prefix", 0};
  }
  const std::uint64_t page_tokens = options_.spec.page_tokens;
  return HostHold{flight.lease, flight.sequence, found.hits * page_tokens, found.present * page_tokens};
}

void HiCacheController::let_go(const HostHold& hold) {
  if (InFlight* flight = find(hold.sequence)) release(*flight);
}

Result<std::vector<std::uint64_t>> HiCacheController::adopt(std::span<const PrefixHash> pages) {
  if (failure_) return *failure_;
  if (pages.empty() || pages.size() > kMaxPagesPerOperation) {
    return Error{Status::invalid_argument,
                 std::to_string(pages.size()) + " pages to look for, expected 1 to " +
                     std::to_string(kMaxPagesPerOperation),
                 0};
  }
  InFlight& flight = open_flight();
  Found found;
  flight.refused = open_lease(flight, pages, found);
  if (failure_) return *failure_;
  // A hint like every handle: what the pool evicts before a hold is lost then.
  release(flight);
  if (found.present == 0) return std::vector<std::uint64_t>{};
  auto slots = host_->alloc(pages.first(found.present));
  if (!slots) return slots;
  if (const auto known = host_->update_prefetch(*slots); !known) return known.error();
  return slots;
}

Result<std::vector<std::uint64_t>> HiCacheController::load(const HostHold& hold,
                                                           std::span<const std::uint64_t> host_slots,
                                                           std::int64_t node_id) {
  if (failure_) return *failure_;
  if (host_slots.empty() || host_slots.size() > hold.tokens || find(hold.sequence) == nullptr) {
    return Error{Status::invalid_argument,
                 std::to_string(host_slots.size()) + " host slots to load from a hold of " +
                     std::to_string(hold.tokens) + " tokens",
                 0};
  }
  auto device = device_.alloc(host_slots.size());
  if (!device) return device;
  if (const auto held = host_->protect_load(host_slots); !held) {
    static_cast<void>(device_.free(*device));
    return held.error();
  }
  DevicePage state;
  if (options_.spec.has_states()) {
    const auto hashes = host_->hashes(host_slots);
    state = options_.states->target(hashes->back());
  }
  queued_loads_.push_back(
      {std::make_unique<CacheOperation>(OperationKind::load,
                                        std::vector<std::uint64_t>(host_slots.begin(), host_slots.end()),
                                        *device, node_id),
       hold.sequence, state});
  return device;
}

Result<std::vector<std::uint64_t>> HiCacheController::load(std::span<const std::uint64_t> host_slots,
                                                           std::optional<std::int64_t> priority,
                                                           std::int64_t node_id) {
  const auto held = hold(host_slots);
  if (!held) return held.error();
  if (held->tokens < host_slots.size()) {
    let_go(*held);
    return Error{Status::not_found,
                 "the pool holds " + std::to_string(held->tokens) + " of " +
                     std::to_string(host_slots.size()) + " tokens by now",
                 0};
  }
  auto device = load(*held, host_slots, node_id);
  if (!device) {
    let_go(*held);
  } else if (priority) {
    queued_loads_.back().operation->priority = *priority;
  }
  return device;
}

void HiCacheController::start_load(InFlight& flight, LayerFence fence) {
  flight.finish = fence;
  const auto pages = device_pages(flight.operation->device_slots);
  const auto copy = post(
      [&] { return session_.load(flight.lease, 0, *pages, fence, options_.deadline_ms, flight.states); });
  if (copy) {
    flight.copy = *copy;
  } else {
    flight.refused = copy.status();
  }
  release(flight);
}

// The states that a batch loads: those of each load's last page.
std::vector<DevicePage> HiCacheController::states_of(const std::vector<QueuedLoad>& queue) const {
  std::vector<DevicePage> states;
  if (!options_.spec.has_states()) return states;
  for (const QueuedLoad& queued : queue) {
    states.resize(states.size() + queued.operation->device_slots.size() / options_.spec.page_tokens);
    states.back() = queued.state;
  }
  return states;
}

Result<std::int32_t> HiCacheController::start_loading() {
  if (failure_) return *failure_;
  if (queued_loads_.empty()) return -1;
  // Whether a slot is free is a matter of this rank's copies. All ranks must make the same batches, so a full
  // house is waited out; loads end by their deadlines.
  auto producer = counter_.update_producer();
  if (!producer) {
    const std::int32_t next = (counter_.producer_index() + 1) % static_cast<std::int32_t>(kProducerSlots);
    // A failed load releases its layers too: how it ended is its ack's matter.
    static_cast<void>(counter_.event(next).wait(options_.spec.layers - 1, options_.answer_timeout_ms));
    producer = counter_.update_producer();
    if (!producer) return fail(producer.error());
  }
  const LayerFence fence = counter_.event(*producer).fence();
  auto queue = std::exchange(queued_loads_, {});
  std::sort(queue.begin(), queue.end(),
            [](const QueuedLoad& a, const QueuedLoad& b) { return a.operation->before(*b.operation); });
  auto states = states_of(queue);
  if (queue.size() == 1) {
    InFlight& flight = *find(queue.front().sequence);
    flight.states = std::move(states);
    flight.operation = std::move(queue.front().operation);
    start_load(flight, fence);
  } else {
    // One fence for the batch takes one load, and one load takes one lease: on the pages of all of them,
    // which their holds keep in the pool until it is there.
    std::vector<CacheOperationPtr> operations;
    operations.reserve(queue.size());
    for (QueuedLoad& queued : queue) operations.push_back(std::move(queued.operation));
    auto merged = merge_operations(std::move(operations));
    const auto hashes = host_->hashes((*merged)->host_slots);
    InFlight& flight = open_flight();
    flight.operation = std::move(*merged);
    flight.states = std::move(states);
    Found found;
    flight.refused = open_lease(flight, *hashes, found);
    if (flight.refused == Status::ok && found.hits == hashes->size()) {
      start_load(flight, fence);
    } else {
      if (flight.refused == Status::ok) flight.refused = Status::not_found;
      release(flight);
    }
    for (const QueuedLoad& queued : queue) release(*find(queued.sequence));
    if (!flight.copy) counter_.cancel_producer();
  }
  if (failure_) return *failure_;
  return *producer;
}

Outcome HiCacheController::evict_device(std::span<const std::uint64_t> device_slots,
                                        std::span<const std::uint64_t> host_slots) {
  if (!host_slots.empty()) {
    if (const auto backup = host_->update_backup(host_slots); !backup) return backup;
  }
  auto freed = device_.free(device_slots);
  if (!freed && !host_slots.empty()) static_cast<void>(host_->update_synced(host_slots));
  return freed;
}

Outcome HiCacheController::evict_host(std::span<const std::uint64_t> host_slots) {
  return host_->free(host_slots);
}

Result<std::uint64_t> HiCacheController::evict_host(std::span<const std::uint64_t> host_slots,
                                                    bool backup_only) {
  if (!backup_only) {
    return Error{Status::invalid_argument, "Other eviction policies are not supported yet.", 0};
  }
  if (const auto freed = host_->free_backup(host_slots); !freed) return freed.error();
  return std::uint64_t{host_slots.size()};
}

Outcome HiCacheController::revive(std::span<const std::uint64_t> host_slots) {
  return host_->update_synced(host_slots);
}

}  // namespace hicache
