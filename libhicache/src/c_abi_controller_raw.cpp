// The part of hicache_controller.h that works without the tree.
#include <algorithm>

#include "c_abi_controller.hpp"
#include "c_abi_convert.hpp"

namespace {

using namespace hicache::c_abi;  // NOLINT(google-build-using-namespace): the interface's own helpers

constexpr std::uint32_t kHoldBytes = 40;  // in its first version
static_assert(sizeof(hicache_hold) == kHoldBytes && sizeof(hicache_ack) == 48);

hicache::Result<hicache::HostHold> to_hold(const hicache_hold* from) {
  const auto read = read_struct(from, kHoldBytes, "hicache_hold");
  if (!read) return read.error();
  hicache::HostHold hold;
  hold.lease = hicache::LeaseId{read->lease};
  hold.sequence = read->sequence;
  hold.tokens = read->tokens;
  hold.present_tokens = read->present_tokens;
  return hold;
}

static_assert(HICACHE_ACK_LOAD == static_cast<int>(hicache::OperationKind::load) &&
              HICACHE_ACK_WRITE == static_cast<int>(hicache::OperationKind::write) &&
              HICACHE_ACK_BACKUP == static_cast<int>(hicache::OperationKind::backup));

void keep(std::deque<hicache_ack>& acks, const hicache::HiCacheAck& ack) {
  for (const std::int64_t node : ack.node_ids) {
    hicache_ack c{};
    c.kind = static_cast<uint32_t>(ack.kind);
    c.status = static_cast<int32_t>(ack.status);
    c.node = node;
    c.sequence = ack.sequence;
    c.epoch = ack.epoch;
    c.tokens = ack.tokens;
    c.host_tokens = ack.host_tokens;
    acks.push_back(c);
  }
}

void give(std::deque<hicache_ack>& kept, hicache_ack* acks, size_t capacity, size_t* count) {
  *count = std::min(capacity, kept.size());
  std::copy_n(kept.begin(), *count, acks);
  kept.erase(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(*count));
}

}  // namespace

extern "C" {

hicache_status hicache_controller_write(hicache_controller* controller, const uint64_t* device_slots,
                                        size_t slot_count, const hicache_hash* chain, size_t chain_count,
                                        int64_t node, uint64_t* host_slots) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (device_slots == nullptr) return null_argument("device_slots");
    if (chain == nullptr) return null_argument("chain");
    if (host_slots == nullptr) return null_argument("host_slots");
    const auto hashes = to_hashes(chain, chain_count);
    const auto host = c.controller->write({device_slots, slot_count}, hashes, node);
    if (!host) return fail(host.error());
    std::copy(host->begin(), host->end(), host_slots);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_hold(hicache_controller* controller, const uint64_t* host_slots,
                                       size_t count, hicache_hold* hold) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (host_slots == nullptr) return null_argument("host_slots");
    if (const auto checked = check_size(hold, kHoldBytes, "hicache_hold"); !checked) {
      return fail(checked.error());
    }
    const auto held = c.controller->hold({host_slots, count});
    if (!held) return fail(held.error());
    hicache_hold filled{};
    filled.lease = held->lease.value;
    filled.sequence = held->sequence;
    filled.tokens = held->tokens;
    filled.present_tokens = held->present_tokens;
    write_struct(filled, hold);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_let_go(hicache_controller* controller, const hicache_hold* hold) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    const auto held = to_hold(hold);
    if (!held) return fail(held.error());
    c.controller->let_go(*held);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_load(hicache_controller* controller, const hicache_hold* hold,
                                       const uint64_t* host_slots, size_t count, int64_t node,
                                       uint64_t* device_slots) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (host_slots == nullptr) return null_argument("host_slots");
    if (device_slots == nullptr) return null_argument("device_slots");
    const auto held = to_hold(hold);
    if (!held) return fail(held.error());
    const auto device = c.controller->load(*held, {host_slots, count}, node);
    if (!device) return fail(device.error());
    std::copy(device->begin(), device->end(), device_slots);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_evict_device_slots(hicache_controller* controller,
                                                     const uint64_t* device_slots, size_t device_count,
                                                     const uint64_t* host_slots, size_t host_count) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (device_slots == nullptr && device_count > 0) return null_argument("device_slots");
    if (host_slots == nullptr && host_count > 0) return null_argument("host_slots");
    return status_of(c.controller->evict_device({device_slots, device_count}, {host_slots, host_count}));
  });
}

hicache_status hicache_controller_evict_host_slots(hicache_controller* controller, const uint64_t* host_slots,
                                                   size_t count) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (host_slots == nullptr) return null_argument("host_slots");
    const auto evicted = c.controller->evict_host({host_slots, count}, true);
    return evicted ? HICACHE_OK : fail(evicted.error());
  });
}

hicache_status hicache_controller_take_acks(hicache_controller* controller, hicache_ack* acks,
                                            size_t capacity, size_t* count) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (acks == nullptr && capacity > 0) return null_argument("acks");
    if (count == nullptr) return null_argument("count");
    *count = 0;
    const auto ended = c.controller->check_events();
    if (!ended) return fail(ended.error());
    c.tree->apply(*ended);
    for (const hicache::HiCacheAck& ack : *ended) keep(c.acks, ack);
    give(c.acks, acks, capacity, count);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_take_backup_acks(hicache_controller* controller, hicache_ack* acks,
                                                   size_t capacity, size_t* count) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (acks == nullptr && capacity > 0) return null_argument("acks");
    if (count == nullptr) return null_argument("count");
    *count = 0;
    if (c.backup_acks.empty()) {
      const auto ended = c.controller->take_backup_acks();
      if (!ended) return fail(ended.error());
      for (const hicache::HiCacheAck& ack : *ended) keep(c.backup_acks, ack);
    }
    give(c.backup_acks, acks, capacity, count);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_host_page_state(hicache_controller* controller, const uint64_t* host_slots,
                                                  size_t count, uint32_t* state) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (host_slots == nullptr) return null_argument("host_slots");
    if (state == nullptr) return null_argument("state");
    const auto found = c.controller->host_pages().state({host_slots, count});
    if (!found) return fail(found.error());
    *state = static_cast<uint32_t>(*found);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_host_pages(hicache_controller* controller, uint64_t* pages,
                                             uint64_t* refused) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    const auto& states = c.controller->host_pages();
    for (std::size_t i = 0; pages != nullptr && i < hicache::kHostPageStates; ++i) {
      pages[i] = states.pages_in(static_cast<hicache::HostPageState>(i));
    }
    if (refused != nullptr) *refused = states.refused();
    return HICACHE_OK;
  });
}

}  // extern "C"
