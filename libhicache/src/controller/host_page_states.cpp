#include "hicache/controller/host_page_states.hpp"

#include <algorithm>
#include <utility>

namespace hicache {

Result<std::unique_ptr<HostPageStates>> HostPageStates::create(std::uint64_t slots,
                                                               std::uint32_t page_tokens) {
  auto made = TokenSlots::create(slots, page_tokens);
  if (!made) return made.error();
  return std::unique_ptr<HostPageStates>(new HostPageStates(std::move(*made)));
}

HostPageStates::HostPageStates(std::unique_ptr<TokenSlots> slots)
    : slots_(std::move(slots)), pages_(slots_->size() / slots_->page_tokens()) {
  counts_[0] = pages_.size();
}

HostPageCounts HostPageStates::counts() const {
  constexpr std::uint64_t kMost = 0xffffffffu;
  HostPageCounts counts;
  for (std::size_t i = 0; i < kHostPageStates; ++i) {
    counts.pages[i] = static_cast<std::uint32_t>(std::min(counts_[i], kMost));
  }
  counts.refused = static_cast<std::uint32_t>(std::min(refused_, kMost));
  counts.last_refusal = refusal_;
  counts.changes = changes_;
  std::size_t shown = 0;
  const std::uint32_t known = std::min(changes_, kRecent);
  for (std::uint32_t back = 1; back <= known && shown < kShownHandles; ++back) {
    const std::uint32_t number = recent_[(changes_ - back) % kRecent];
    const Page& page = pages_[number];
    if (page.state == HostPageState::idle) continue;
    const auto end = counts.handles.begin() + static_cast<std::ptrdiff_t>(shown);
    const bool twice = std::any_of(counts.handles.begin(), end,
                                   [&](const HostHandle& other) { return other.page == number; });
    if (!twice) counts.handles[shown++] = {number, page.state, page.hash.words[0]};
  }
  return counts;
}

Error HostPageStates::refuse(Status status, HostPageCall call, const std::string& text) {
  ++refused_;
  refusal_ = RefusedTransition{};
  refusal_.call = call;
  last_refusal_ = std::string(to_string(call)) + ": " + text;
  return Error{status, last_refusal_, 0};
}

// A handle that is in another state than the call needs.
Error HostPageStates::refuse(HostPageCall call, std::uint64_t page, HostPageState expected) {
  ++refused_;
  const HostPageState state = pages_[page].state;
  refusal_ = {call, state, static_cast<std::uint32_t>(page)};
  last_refusal_ = "Inconsistent states: " + std::string(to_string(call)) + " of host page " +
                  std::to_string(page) + " that is " + std::string(to_string(state)) + ", expected " +
                  std::string(to_string(expected));
  return Error{Status::invalid_argument, last_refusal_, 0};
}

void HostPageStates::set(Page& page, HostPageState state) {
  --counts_[static_cast<std::size_t>(page.state)];
  page.state = state;
  ++counts_[static_cast<std::size_t>(state)];
  recent_[changes_++ % kRecent] = static_cast<std::uint32_t>(&page - pages_.data());
}

Result<std::vector<std::uint64_t>> HostPageStates::pages_of(std::span<const std::uint64_t> slots) const {
  const std::uint32_t page_tokens = slots_->page_tokens();
  bool whole = slots.size() % page_tokens == 0;
  for (std::size_t i = 0; whole && i < slots.size(); ++i) {
    const std::uint64_t in_page = i % page_tokens;
    whole = slots[i] < size() && slots[i] % page_tokens == in_page &&
            (in_page == 0 || slots[i] == slots[i - 1] + 1);
  }
  if (!whole) {
    return Error{Status::invalid_argument,
                 std::to_string(slots.size()) + " host slots that are not whole pages of " +
                     std::to_string(page_tokens) + " ascending slots below " + std::to_string(size()),
                 0};
  }
  std::vector<std::uint64_t> pages;
  for (std::size_t i = 0; i < slots.size(); i += page_tokens) pages.push_back(slots[i] / page_tokens);
  return pages;
}

Result<std::vector<std::uint64_t>> HostPageStates::alloc(std::span<const PrefixHash> hashes) {
  auto taken = slots_->alloc(hashes.size() * slots_->page_tokens());
  if (!taken) return taken;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    Page& page = pages_[(*taken)[i * slots_->page_tokens()] / slots_->page_tokens()];
    page.hash = hashes[i];
    set(page, HostPageState::reserved);
  }
  return taken;
}

Outcome HostPageStates::free(std::span<const std::uint64_t> slots) {
  constexpr HostPageCall call = HostPageCall::free;
  const auto pages = pages_of(slots);
  if (!pages) return refuse(pages.status(), call, pages.error().message);
  for (const std::uint64_t page : *pages) {
    if (pages_[page].state != HostPageState::protected_io) continue;
    const auto refused = refuse(Status::busy, call, "host page " + std::to_string(page) + " is in a copy");
    refusal_.state = HostPageState::protected_io;
    refusal_.page = static_cast<std::uint32_t>(page);
    return refused;
  }
  if (const auto freed = slots_->free(slots); !freed) {
    return refuse(freed.status(), call, freed.error().message);
  }
  for (const std::uint64_t page : *pages) set(pages_[page], HostPageState::idle);
  return success();
}

Outcome HostPageStates::free_backup(std::span<const std::uint64_t> slots) {
  constexpr HostPageCall call = HostPageCall::evict_host;
  const auto pages = pages_of(slots);
  if (!pages) return refuse(pages.status(), call, pages.error().message);
  for (const std::uint64_t page : *pages) {
    if (pages_[page].state != HostPageState::backup) return refuse(call, page, HostPageState::backup);
  }
  return free(slots);
}

Outcome HostPageStates::clear() {
  if (pages_in(HostPageState::protected_io) > 0) {
    return refuse(Status::busy, HostPageCall::clear,
                  std::to_string(pages_in(HostPageState::protected_io)) + " host pages are in copies");
  }
  slots_->clear();
  for (Page& page : pages_) set(page, HostPageState::idle);
  return success();
}

Outcome HostPageStates::change(HostPageCall call, std::span<const std::uint64_t> slots, HostPageState from,
                               HostPageState to) {
  const auto pages = pages_of(slots);
  if (!pages) return refuse(pages.status(), call, pages.error().message);
  for (const std::uint64_t page : *pages) {
    if (pages_[page].state != from) return refuse(call, page, from);
  }
  for (const std::uint64_t page : *pages) {
    if (to == HostPageState::protected_io) pages_[page].before = from;
    set(pages_[page], to);
  }
  return success();
}

Outcome HostPageStates::protect_write(std::span<const std::uint64_t> slots) {
  return change(HostPageCall::protect_write, slots, HostPageState::reserved, HostPageState::protected_io);
}
Outcome HostPageStates::protect_load(std::span<const std::uint64_t> slots) {
  return change(HostPageCall::protect_load, slots, HostPageState::backup, HostPageState::protected_io);
}
Outcome HostPageStates::complete_io(std::span<const std::uint64_t> slots) {
  return change(HostPageCall::complete_io, slots, HostPageState::protected_io, HostPageState::synced);
}
Outcome HostPageStates::update_backup(std::span<const std::uint64_t> slots) {
  return change(HostPageCall::update_backup, slots, HostPageState::synced, HostPageState::backup);
}
Outcome HostPageStates::update_synced(std::span<const std::uint64_t> slots) {
  return change(HostPageCall::update_synced, slots, HostPageState::backup, HostPageState::synced);
}
Outcome HostPageStates::update_prefetch(std::span<const std::uint64_t> slots) {
  return change(HostPageCall::update_prefetch, slots, HostPageState::reserved, HostPageState::backup);
}

void HostPageStates::forget_device() {
  for (Page& page : pages_) {
    if (page.state == HostPageState::synced) set(page, HostPageState::backup);
  }
}

Outcome HostPageStates::abort_io(std::span<const std::uint64_t> slots) {
  constexpr HostPageCall call = HostPageCall::abort_io;
  const auto pages = pages_of(slots);
  if (!pages) return refuse(pages.status(), call, pages.error().message);
  for (const std::uint64_t page : *pages) {
    if (pages_[page].state != HostPageState::protected_io) {
      return refuse(call, page, HostPageState::protected_io);
    }
  }
  for (const std::uint64_t page : *pages) set(pages_[page], pages_[page].before);
  return success();
}

Result<HostPageState> HostPageStates::state(std::span<const std::uint64_t> slots) const {
  const auto pages = pages_of(slots);
  if (!pages) return pages.error();
  if (pages->empty()) return Error{Status::invalid_argument, "state of no host slots", 0};
  const HostPageState first = pages_[pages->front()].state;
  for (const std::uint64_t page : *pages) {
    if (pages_[page].state != first) {
      return Error{Status::busy,
                   "host pages in the states " + std::string(to_string(first)) + " and " +
                       std::string(to_string(pages_[page].state)) + ", expected one state",
                   0};
    }
  }
  return first;
}

Result<std::vector<PrefixHash>> HostPageStates::hashes(std::span<const std::uint64_t> slots) const {
  const auto pages = pages_of(slots);
  if (!pages) return pages.error();
  std::vector<PrefixHash> out;
  for (const std::uint64_t page : *pages) {
    if (pages_[page].state == HostPageState::idle) {
      return Error{Status::invalid_argument, "host page " + std::to_string(page) + " is idle", 0};
    }
    out.push_back(pages_[page].hash);
  }
  return out;
}

}  // namespace hicache
