// How many token slots a pool gets: whole pages, always rounded down, so that a budget is never exceeded.
#pragma once

#include <cstdint>

#include "shm/status.hpp"

namespace hicache {

// Slots that fit `budget_bytes`, a multiple of page_tokens. invalid_argument when a parameter is zero.
Result<std::uint64_t> slots_for_budget(std::uint64_t budget_bytes, std::uint64_t bytes_per_token,
                                       std::uint64_t page_tokens);

// Slots of a pool that is `ratio` times as large as a device pool of device_slots, a multiple of page_tokens.
// invalid_argument when the ratio is not a positive number or the product does not fit.
Result<std::uint64_t> slots_for_ratio(std::uint64_t device_slots, double ratio, std::uint64_t page_tokens);

}  // namespace hicache
