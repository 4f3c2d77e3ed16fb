#include "shm/pool_sizing.hpp"

#include <cmath>
#include <string>

namespace hicache {
namespace {

// Beyond this a double no longer holds every whole number.
constexpr double kMaxSlots = 9007199254740992.0;

constexpr std::uint64_t whole_pages(std::uint64_t slots, std::uint64_t page_tokens) {
  return slots - slots % page_tokens;
}

}  // namespace

Result<std::uint64_t> slots_for_budget(std::uint64_t budget_bytes, std::uint64_t bytes_per_token,
                                       std::uint64_t page_tokens) {
  if (bytes_per_token == 0 || page_tokens == 0) {
    return Error{Status::invalid_argument,
                 "bytes_per_token is " + std::to_string(bytes_per_token) + " and page_tokens is " +
                     std::to_string(page_tokens) + ", expected both to be at least 1",
                 0};
  }
  return whole_pages(budget_bytes / bytes_per_token, page_tokens);
}

Result<std::uint64_t> slots_for_ratio(std::uint64_t device_slots, double ratio, std::uint64_t page_tokens) {
  const double slots = static_cast<double>(device_slots) * ratio;
  if (!std::isfinite(ratio) || ratio <= 0 || slots > kMaxSlots || page_tokens == 0) {
    return Error{Status::invalid_argument,
                 "ratio is " + std::to_string(ratio) + " for " + std::to_string(device_slots) +
                     " device slots in pages of " + std::to_string(page_tokens) +
                     " tokens, expected a positive ratio, a page of at least 1 and at most 2^53 slots",
                 0};
  }
  return whole_pages(static_cast<std::uint64_t>(slots), page_tokens);
}

}  // namespace hicache
