// hicache_pool_pins_* of hicache_controller.h over hicache/controller/pool_pins.hpp.
#include "c_abi_error.hpp"
#include "hicache/controller/pool_pins.hpp"
#include "hicache/hicache_controller.h"

struct hicache_pool_pins {
  hicache::PoolPins pins;
};

namespace {

using namespace hicache::c_abi;  // NOLINT(google-build-using-namespace): the interface's own helpers

constexpr std::uint32_t kDefaultTimeoutMs = 10'000;

}  // namespace

extern "C" {

hicache_status hicache_pool_pins_create(hicache_session* session, uint64_t max_pages, uint32_t timeout_ms,
                                        hicache_pool_pins** pins) {
  return guarded([&]() -> hicache_status {
    if (pins == nullptr) return null_argument("pins");
    *pins = nullptr;
    if (session == nullptr) return null_argument("session");
    const std::uint32_t timeout = timeout_ms == 0 ? kDefaultTimeoutMs : timeout_ms;
    *pins = new hicache_pool_pins{{*session->session, max_pages, timeout}};
    return HICACHE_OK;
  });
}

void hicache_pool_pins_destroy(hicache_pool_pins* pins) {
  delete pins;
}

hicache_status hicache_pool_pins_pin(hicache_pool_pins* pins, const hicache_hash* hashes, size_t count,
                                     uint64_t until, uint32_t* pages) {
  return guarded([&]() -> hicache_status {
    if (pins == nullptr) return null_argument("pins");
    if (hashes == nullptr && count > 0) return null_argument("hashes");
    const auto pinned = pins->pins.pin(to_hashes(hashes, count), until);
    if (!pinned) return fail(pinned.error());
    if (pages != nullptr) *pages = *pinned;
    return HICACHE_OK;
  });
}

hicache_status hicache_pool_pins_expire(hicache_pool_pins* pins, uint64_t now, uint64_t* pages) {
  return guarded([&]() -> hicache_status {
    if (pins == nullptr) return null_argument("pins");
    pins->pins.expire(now);
    if (pages != nullptr) *pages = pins->pins.pages();
    return HICACHE_OK;
  });
}

}  // extern "C"
