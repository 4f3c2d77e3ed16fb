// Tripwires: how one side of a channel learns within microseconds that the other side's process has died.
//
// A tripwire is a robust futex without pthread: a 32-bit word in shared memory holds the id of a thread of
// its owner, and the kernel, when that thread dies, sets FUTEX_OWNER_DIED in the word and wakes whoever waits
// on it. The list node that makes the kernel do so lies in the owner's private memory; only the word is
// shared. (A robust pthread mutex keeps its list pointers in the shared memory, where the other side could
// overwrite them and choose where the kernel writes.) The other side only waits on the word and never
// acquires it, so it may be mapped read-only there.
//
// A tripwire says that the process is dying, not that it is gone: its copies may still land until its pidfd
// fires.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>
#include <functional>

namespace hicache {

// The owner of this word has died.
inline bool tripwire_fired(std::uint32_t word) {
  return (word & FUTEX_OWNER_DIED) != 0;
}

// Asks the thread in hold_tripwire to let go.
class TripwireStop {
 public:
  [[nodiscard]] bool asked() const { return asked_.load(std::memory_order_acquire); }
  // Returns once hold_tripwire is about to return. `theirs` is the word that its thread sleeps on.
  void stop(const std::atomic<std::uint32_t>* theirs);
  void finished() { finished_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> asked_{false};
  std::atomic<bool> finished_{false};  // pairs release in finished with acquire in stop
};

// Body of a thread of its own: holds the tripwire `mine`, and calls `changed` with the value of `theirs` at
// first and whenever it has changed, until that returns false or `stop` is asked. Lets go of `mine` before it
// returns: it is the death of the process that fires it, not the orderly end of the thread. Takes over the
// thread's robust list: pthread robust mutexes must not be used in it.
void hold_tripwire(std::atomic<std::uint32_t>* mine, const std::atomic<std::uint32_t>* theirs,
                   TripwireStop& stop, const std::function<bool(std::uint32_t)>& changed);

}  // namespace hicache
