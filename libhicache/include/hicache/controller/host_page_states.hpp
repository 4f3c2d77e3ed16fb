// What one engine knows about the host pages it uses: the states of SGLang's host pool, made real. A handle
// is a page of the engine's host token slots; several engines may hold one page of the daemon's pool, each
// through a handle of its own.
//
//   idle -alloc-> reserved -protect_write-> protected -complete_io-> synced -update_backup-> backup
//                 reserved -update_prefetch-> backup -protect_load-> protected -complete_io-> synced
//                 any but protected -free-> idle
//
// A call names whole pages by their token slots and changes all of them or none. A transition that is not
// in the picture is refused, counted, and kept as the last refusal.
//
// Thread safety: none; it belongs to the scheduler's thread. Blocking: none. Errors: values.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hicache/export.h"
#include "hicache/token_slots.hpp"
#include "shm/host_page_state.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache {

class HICACHE_EXPORT HostPageStates {
 public:
  // invalid_argument when `slots` is not a positive multiple of page_tokens.
  static Result<std::unique_ptr<HostPageStates>> create(std::uint64_t slots, std::uint32_t page_tokens);

  // Slots for pages of these hashes, first in first out. no_space when there are too few; nothing is taken
  // then.
  Result<std::vector<std::uint64_t>> alloc(std::span<const PrefixHash> hashes);
  // Gives the handles up. busy while a copy is in flight on one of them, already_released for an idle one.
  Outcome free(std::span<const std::uint64_t> slots);
  // The same for backups only: any other state is a wrong transition.
  Outcome free_backup(std::span<const std::uint64_t> slots);
  // Everything idle. busy while a copy is in flight.
  Outcome clear();

  Outcome protect_write(std::span<const std::uint64_t> slots);
  Outcome protect_load(std::span<const std::uint64_t> slots);
  Outcome complete_io(std::span<const std::uint64_t> slots);
  // The copy failed: back to where it came from (reserved for a write, backup for a load).
  Outcome abort_io(std::span<const std::uint64_t> slots);
  Outcome update_backup(std::span<const std::uint64_t> slots);
  // The device's copies are all gone: every synced page becomes a backup.
  void forget_device();
  // The device holds the page again without a copy from the host: backup becomes synced.
  Outcome update_synced(std::span<const std::uint64_t> slots);
  Outcome update_prefetch(std::span<const std::uint64_t> slots);

  // The one state of all these slots. invalid_argument for an empty list, busy when they differ.
  [[nodiscard]] Result<HostPageState> state(std::span<const std::uint64_t> slots) const;
  // Hashes of the pages, in order. invalid_argument for slots that are not whole pages in use.
  [[nodiscard]] Result<std::vector<PrefixHash>> hashes(std::span<const std::uint64_t> slots) const;

  [[nodiscard]] std::uint64_t available() const { return slots_->available(); }
  [[nodiscard]] std::uint64_t size() const { return slots_->size(); }
  [[nodiscard]] std::uint64_t pages_in(HostPageState state) const {
    return counts_[static_cast<std::size_t>(state)];
  }
  [[nodiscard]] std::uint64_t refused() const { return refused_; }
  [[nodiscard]] HostPageCounts counts() const;
  [[nodiscard]] const std::string& last_refusal() const { return last_refusal_; }

 private:
  struct Page {
    HostPageState state = HostPageState::idle;
    HostPageState before = HostPageState::idle;  // protected: where it came from
    PrefixHash hash;
  };
  explicit HostPageStates(std::unique_ptr<TokenSlots> slots);
  // Page numbers of whole pages; refused otherwise.
  Result<std::vector<std::uint64_t>> pages_of(std::span<const std::uint64_t> slots) const;
  Outcome change(HostPageCall call, std::span<const std::uint64_t> slots, HostPageState from,
                 HostPageState to);
  Error refuse(Status status, HostPageCall call, const std::string& text);
  Error refuse(HostPageCall call, std::uint64_t page, HostPageState expected);
  void set(Page& page, HostPageState state);

  std::unique_ptr<TokenSlots> slots_;
  std::vector<Page> pages_;
  std::array<std::uint64_t, kHostPageStates> counts_{};
  std::uint64_t refused_ = 0;
  std::string last_refusal_;
  RefusedTransition refusal_;
  static constexpr std::uint32_t kRecent = 64;
  std::array<std::uint32_t, kRecent>
      recent_{};  // pages that changed; number n of changes_ lies at n modulo kRecent
  std::uint32_t changes_ = 0;
};

}  // namespace hicache
