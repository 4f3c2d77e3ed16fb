// The operations of a session that are open or whose results nobody has read yet.
//
// Every operation holds its places in the completion ring from the moment it is posted until its last event
// has been handed out, so that a completion always finds a free slot. A ticket names table place and
// generation: what a damaged daemon sends for another generation, or twice, finds nothing here.
//
// Not thread-safe; the session's mutex guards it.
#pragma once

#include <cstdint>
#include <vector>

#include "shm/protocol.hpp"
#include "shm/region_layout.hpp"

namespace hicache {

// Where an operation stands with the daemon.
enum class Stage : std::uint8_t {
  free,     // table place not in use
  open,     // no terminal completion yet
  expired,  // ended by the client because the daemon let the deadline pass; its own completion may still come
  busy,     // ended, but a copy may still touch the device pages
  finished,  // the daemon will say nothing more
};

struct Operation {
  std::uint64_t ticket = 0;
  std::uint64_t expires_ns = 0;  // coarse monotonic time at which the client ends it itself
  std::uint64_t lease = 0;
  std::uint64_t arena_bytes = 0;  // 0 = no piece
  std::uint64_t list_bytes = 0;   // of it, before the results
  std::uint32_t arena_offset = 0;
  std::uint32_t count = 0;
  std::uint32_t fence = Submission::kNoFence;  // load: producer slot of the layer fences
  std::uint32_t fence_value = 0;
  Opcode opcode = Opcode::none;
  Stage stage = Stage::free;
  bool terminal_pending = false;  // `terminal` waits to be read
  bool returned_pending = false;  // "pages returned" waits to be read, after the terminal
  bool internal = false;          // posted by the session itself: nobody reads its result
  bool queued = false;
  std::uint32_t previous = kNone32;  // neighbours in the queue of events
  std::uint32_t next = kNone32;
  Completion terminal;

  [[nodiscard]] bool touches_pages() const { return opcode == Opcode::write || opcode == Opcode::load; }
  [[nodiscard]] bool event_pending() const { return terminal_pending || returned_pending; }
};

class OperationTable {
 public:
  OperationTable() = default;
  explicit OperationTable(std::uint32_t completion_entries);

  // Makes every ticket from here on differ from those of `earlier`. Nothing has been opened yet.
  void continue_after(const OperationTable& earlier);
  // Takes a place and its completion slots: two for an operation that may be followed by "pages returned",
  // one for any other. nullptr when there are too few.
  Operation* open(Opcode opcode);
  // The operation of this ticket, or nullptr for any number that is none.
  Operation* find(std::uint64_t ticket);
  // Gives the place back. The ticket is never used again.
  void close(Operation& operation);

  // Events in the order in which they came. An operation is queued once, whatever it has pending.
  void enqueue(Operation& operation);
  void dequeue(Operation& operation);
  Operation* front() { return first_ == kNone32 ? nullptr : &places_[first_]; }
  [[nodiscard]] std::uint32_t queued() const { return queued_; }
  [[nodiscard]] std::uint32_t in_use() const { return in_use_; }

  // Calls f(Operation&) for every place in use. f may close the operation that it is given.
  template <class F>
  void for_each(F&& f) {
    for (Operation& operation : places_) {
      if (operation.stage != Stage::free) f(operation);
    }
  }

 private:
  static constexpr unsigned kIndexBits = 16;
  static_assert(kMaxRingEntries <= 1u << kIndexBits);
  static std::uint32_t slots_of(Opcode opcode);

  std::vector<Operation> places_;
  std::vector<std::uint32_t> unused_;
  std::uint32_t slots_left_ = 0;
  std::uint32_t in_use_ = 0;
  std::uint32_t queued_ = 0;
  std::uint32_t first_ = kNone32;
  std::uint32_t last_ = kNone32;
};

}  // namespace hicache
