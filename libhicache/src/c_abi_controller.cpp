// hicache_controller.h over the classes of hicache/controller/.
#include <algorithm>
#include <utility>

#include "c_abi_controller.hpp"
#include "c_abi_convert.hpp"

namespace {

using hicache::Status;
using namespace hicache::c_abi;  // NOLINT(google-build-using-namespace): the interface's own helpers

// Sizes of the structs in their first version.
constexpr std::uint32_t kOptionsBytes = 64;
constexpr std::uint32_t kMatchBytes = 40;
static_assert(sizeof(hicache_controller_options) == kOptionsBytes && sizeof(hicache_match) == kMatchBytes);

hicache::Result<hicache::PrefixTreeOptions> tree_options(const hicache_controller_options& from,
                                                         std::uint32_t page_tokens) {
  hicache::PrefixTreeOptions options;
  options.page_tokens = page_tokens;
  options.pinnable_tokens = from.pinnable_tokens;
  if (from.selective_threshold != 0) options.selective_threshold = from.selective_threshold;
  if (from.load_back_threshold != 0) options.load_back_threshold = from.load_back_threshold;
  if (from.write_policy != nullptr) {
    const auto policy = hicache::parse_write_policy(from.write_policy);
    if (!policy) return policy.error();
    options.write_policy = *policy;
  }
  if (from.eviction_policy != nullptr) {
    const auto policy = hicache::parse_tree_policy(from.eviction_policy);
    if (!policy) return policy.error();
    options.eviction = *policy;
  }
  return options;
}

// What a prefetch has brought belongs to the tree as soon as the request may run.
hicache_status take_over(hicache_controller& c, const hicache::Result<hicache::PrefetchProgress>& progress,
                         int* ended, std::uint64_t* tokens) {
  if (!progress) return fail(progress.error());
  std::uint64_t added = 0;
  if (!progress->ready.empty()) {
    const auto adopted = c.tree->adopt(progress->ready);
    if (!adopted) return fail(adopted.error());
    added = *adopted;
  }
  if (ended != nullptr) *ended = progress->ended ? 1 : 0;
  if (tokens != nullptr) *tokens = added;
  return HICACHE_OK;
}

}  // namespace

extern "C" {

hicache_status hicache_controller_create(hicache_session* session, const hicache_namespace* spec,
                                         const hicache_controller_options* options,
                                         hicache_controller** controller) {
  return guarded([&]() -> hicache_status {
    if (controller == nullptr) return null_argument("controller");
    *controller = nullptr;
    if (session == nullptr) return null_argument("session");
    if (spec == nullptr) return null_argument("spec");
    if (options == nullptr) return null_argument("options");
    const auto from = read_struct(options, kOptionsBytes, "hicache_controller_options");
    if (!from) return fail(from.error());
    const auto converted = to_spec(spec);
    if (!converted) return fail(converted.error());
    const auto for_tree = tree_options(*from, converted->page_tokens);
    if (!for_tree) return fail(for_tree.error());
    auto made = std::make_unique<hicache_controller>();
    auto device = hicache::TokenSlots::create(from->device_tokens, converted->page_tokens);
    if (!device) return fail(device.error());
    made->device = std::move(*device);
    hicache::ControllerOptions for_controller;
    for_controller.spec = *converted;
    for_controller.host_tokens = from->host_tokens;
    for_controller.deadline_ms = from->deadline_ms;
    for_controller.backup_acks = from->backup_acks;
    if (from->answer_timeout_ms != 0) for_controller.answer_timeout_ms = from->answer_timeout_ms;
    auto inner = hicache::HiCacheController::create(*session->session, *made->device, for_controller);
    if (!inner) return fail(inner.error());
    made->controller = std::move(*inner);
    made->tree = std::make_unique<hicache::PrefixTree>(*for_tree, *made->controller);
    *controller = made.release();
    return HICACHE_OK;
  });
}

void hicache_controller_destroy(hicache_controller* controller) {
  delete controller;
}

hicache_status hicache_controller_alloc(hicache_controller* controller, size_t tokens, uint64_t* slots) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (slots == nullptr && tokens > 0) return null_argument("slots");
    const std::uint64_t available = c.device->available();
    if (available < tokens) c.tree->evict(tokens - available);
    const auto taken = c.device->alloc(tokens);
    if (!taken) return fail(taken.error());
    std::copy(taken->begin(), taken->end(), slots);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_free(hicache_controller* controller, const uint64_t* slots, size_t count) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (slots == nullptr && count > 0) return null_argument("slots");
    return status_of(c.device->free({slots, count}));
  });
}

hicache_status hicache_controller_match(hicache_controller* controller, const hicache_hash* hashes,
                                        size_t count, hicache_match* match, uint64_t* slots,
                                        size_t capacity) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (hashes == nullptr && count > 0) return null_argument("hashes");
    if (match == nullptr) return null_argument("match");
    if (const auto checked = check_size(match, kMatchBytes, "hicache_match"); !checked) {
      return fail(checked.error());
    }
    const auto found = c.tree->match(to_hashes(hashes, count));
    hicache_match filled{};
    filled.device_tokens = found.device_slots.size();
    filled.host_tokens = found.host_tokens;
    filled.device_node = found.device_node;
    filled.host_node = found.host_node;
    write_struct(filled, match);
    if (slots == nullptr) return HICACHE_OK;
    if (found.device_slots.size() > capacity) {
      return fail(Status::too_large, std::to_string(found.device_slots.size()) +
                                         " slots; there is room for " + std::to_string(capacity));
    }
    std::copy(found.device_slots.begin(), found.device_slots.end(), slots);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_adopt(hicache_controller* controller, const hicache_hash* hashes,
                                        size_t count, uint64_t* tokens) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (hashes == nullptr && count > 0) return null_argument("hashes");
    if (tokens == nullptr) return null_argument("tokens");
    const auto adopted = c.tree->adopt(to_hashes(hashes, count));
    if (!adopted) return fail(adopted.error());
    *tokens = *adopted;
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_insert(hicache_controller* controller, const hicache_hash* hashes,
                                         size_t count, const uint64_t* slots, size_t slot_count, int chunked,
                                         int64_t* node, uint64_t* duplicates, size_t* duplicate_count) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (hashes == nullptr && count > 0) return null_argument("hashes");
    if (slots == nullptr && slot_count > 0) return null_argument("slots");
    if (node == nullptr) return null_argument("node");
    if (duplicates == nullptr && slot_count > 0) return null_argument("duplicates");
    if (duplicate_count == nullptr) return null_argument("duplicate_count");
    const auto inserted = c.tree->insert(to_hashes(hashes, count), {slots, slot_count}, chunked != 0);
    if (!inserted) return fail(inserted.error());
    *node = inserted->node;
    *duplicate_count = inserted->duplicates.size();
    std::copy(inserted->duplicates.begin(), inserted->duplicates.end(), duplicates);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_load_back(hicache_controller* controller, int64_t node, uint64_t quota,
                                            uint64_t* slots, size_t* count, int64_t* end_node) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (slots == nullptr) return null_argument("slots");
    if (count == nullptr) return null_argument("count");
    if (end_node == nullptr) return null_argument("end_node");
    const auto loaded = c.tree->load_back(node, quota);
    if (!loaded) return fail(loaded.error());
    std::copy(loaded->device_slots.begin(), loaded->device_slots.end(), slots);
    *count = loaded->device_slots.size();
    *end_node = loaded->node;
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_lock(hicache_controller* controller, int64_t node) {
  return on(controller, [&](hicache_controller& c) { return status_of(c.tree->lock(node)); });
}
hicache_status hicache_controller_unlock(hicache_controller* controller, int64_t node) {
  return on(controller, [&](hicache_controller& c) { return status_of(c.tree->unlock(node)); });
}

hicache_status hicache_controller_evict(hicache_controller* controller, uint64_t tokens, uint64_t* freed) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (freed == nullptr) return null_argument("freed");
    *freed = c.tree->evict(tokens);
    return HICACHE_OK;
  });
}
hicache_status hicache_controller_evict_host(hicache_controller* controller, uint64_t tokens,
                                             uint64_t* freed) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (freed == nullptr) return null_argument("freed");
    *freed = c.tree->evict_host(tokens);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_pin(hicache_controller* controller, const hicache_hash* hashes,
                                      size_t count, uint64_t until) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (hashes == nullptr && count > 0) return null_argument("hashes");
    return status_of(c.tree->pin(to_hashes(hashes, count), until));
  });
}
hicache_status hicache_controller_expire_pins(hicache_controller* controller, uint64_t now) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    c.tree->expire_pins(now);
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_prefetch(hicache_controller* controller, const char* request,
                                           const hicache_hash* hashes, size_t count, uint32_t policy) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (request == nullptr) return null_argument("request");
    if (hashes == nullptr && count > 0) return null_argument("hashes");
    const auto named = to_prefetch_policy(policy);
    if (!named) return fail(named.error());
    return status_of(c.controller->prefetch(request, to_hashes(hashes, count), *named));
  });
}

hicache_status hicache_controller_check_prefetch_progress(hicache_controller* controller, const char* request,
                                                          int* ended, uint64_t* tokens) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (request == nullptr) return null_argument("request");
    if (ended == nullptr) return null_argument("ended");
    return take_over(c, c.controller->check_prefetch_progress(request), ended, tokens);
  });
}

hicache_status hicache_controller_terminate_prefetch(hicache_controller* controller, const char* request,
                                                     uint64_t* tokens) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (request == nullptr) return null_argument("request");
    return take_over(c, c.controller->terminate_prefetch(request), nullptr, tokens);
  });
}

hicache_status hicache_controller_release_aborted_request(hicache_controller* controller,
                                                          const char* request) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (request == nullptr) return null_argument("request");
    return status_of(c.controller->release_aborted_request(request));
  });
}

hicache_status hicache_controller_set_start_fence(hicache_controller* controller, uint32_t fence,
                                                  uint32_t value) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (fence == HICACHE_NO_FENCE) {
      c.controller->set_start_fence(std::nullopt);
      return HICACHE_OK;
    }
    if (fence >= hicache::kWriteFences) {
      return fail(Status::invalid_argument, "write fence " + std::to_string(fence) + " is not below " +
                                                std::to_string(hicache::kWriteFences));
    }
    c.controller->set_start_fence(hicache::WriteFence{fence, value});
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_start_loading(hicache_controller* controller, int32_t* producer) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (producer == nullptr) return null_argument("producer");
    const auto started = c.controller->start_loading();
    if (!started) return fail(started.error());
    *producer = *started;
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_wait_layer(hicache_controller* controller, int32_t consumer, uint32_t layer,
                                             uint32_t timeout_ms) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (consumer < -1 || consumer >= static_cast<int32_t>(hicache::kProducerSlots)) {
      return fail(Status::invalid_argument, "consumer " + std::to_string(consumer) + ", expected -1 to " +
                                                std::to_string(hicache::kProducerSlots - 1));
    }
    if (consumer < 0) return HICACHE_OK;
    return status_of(c.controller->layer_counter().event(consumer).wait(layer, timeout_ms));
  });
}

hicache_status hicache_controller_check_events(hicache_controller* controller, uint32_t* ended) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    const auto acks = c.controller->check_events();
    if (!acks) return fail(acks.error());
    c.tree->apply(*acks);
    if (ended != nullptr) *ended = static_cast<uint32_t>(acks->size());
    return HICACHE_OK;
  });
}

hicache_status hicache_controller_reset(hicache_controller* controller) {
  return hicache_controller_reset_tiers(controller, HICACHE_RESET_BOTH);
}

hicache_status hicache_controller_reset_tiers(hicache_controller* controller, uint32_t tiers) {
  return on(controller, [&](hicache_controller& c) -> hicache_status {
    if (tiers > HICACHE_RESET_HOST) {
      return fail(Status::invalid_argument, "tiers is " + std::to_string(tiers) + ", expected 0 to 2");
    }
    // A lost session takes both tiers with it.
    const bool lost = c.controller->state() != Status::ok;
    const auto which = lost ? hicache::ResetTiers::both : static_cast<hicache::ResetTiers>(tiers);
    if (const auto reset = c.controller->reset(which); !reset) return fail(reset.error());
    c.tree->reset(which);
    c.acks.clear();
    return HICACHE_OK;
  });
}

}  // extern "C"
