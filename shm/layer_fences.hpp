// How whoever copies a load announces its layers: the daemon, or in io_backend kernel the rank itself.
//
// SYNC layer: the copier stores a layer's value with release after the layer's last byte; whoever loads it
// with acquire
//   and sees the value (or a later one) sees the bytes. `failed` is stored before the words of a failed load,
//   so that whoever sees a word sees it too.
// SYNC layer park: a host thread counts itself in `waiters`, fences (sequentially consistent), looks at the
// word again
//   and sleeps on `wake`. The copier stores the word, fences (sequentially consistent) and looks at
//   `waiters`: one of the two sees the other.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/channel_layout.hpp"
#include "shm/futex.hpp"
#include "shm/waiting.hpp"

namespace hicache {

inline void wake_layer_waiters(LayerFences& fences) {
  park_fence();  // SYNC layer park
  if (fences.waiters.load(std::memory_order_relaxed) == 0) return;
  fences.wake.fetch_add(1, std::memory_order_release);
  futex_wake_all(&fences.wake);
}

// Values only grow: the late end of an old load must not move a word back that a later load has raised.
// Several threads may raise the words of a rank whose loads are done together with other ranks'.
inline void raise_layer_word(A32& word, std::uint32_t value) {
  std::uint32_t now = word.load(std::memory_order_relaxed);
  while (!timeline_reached(now, value) &&
         !word.compare_exchange_weak(now, value, std::memory_order_release,  // SYNC layer
                                     std::memory_order_relaxed)) {
  }
}

// `layer` has landed.
inline void raise_layer(LayerFences& fences, std::uint32_t layer, std::uint32_t value) {
  raise_layer_word(fences.layer[layer], value);
  wake_layer_waiters(fences);
}

// The load is given up: marks it failed, then releases everybody who waits for a layer of it. A released wait
// means failed: waiters ask `failed` before they use the bytes.
inline void fail_layers(LayerFences& fences, std::uint32_t layers, std::uint32_t value) {
  // A newer load of the slot may have been marked already, by its rank: waiters take a mark that is at most a
  // ring ahead for theirs as well, but not an older one.
  std::uint32_t marked = fences.failed.load(std::memory_order_relaxed);
  while ((marked == 0 || marked - value > kMaxRingEntries) &&
         !fences.failed.compare_exchange_weak(marked, value, std::memory_order_release,  // SYNC layer
                                              std::memory_order_relaxed)) {
  }
  for (std::uint32_t layer = 0; layer < layers; ++layer) raise_layer_word(fences.layer[layer], value);
  wake_layer_waiters(fences);
}

}  // namespace hicache
