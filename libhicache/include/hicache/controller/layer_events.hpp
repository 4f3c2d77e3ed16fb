// Layer by layer loading: which batch of loads a forward pass has to wait for, and where its layers announce
// themselves.
//
// Thread safety: LocalLayerWords may be used from any thread; the counter belongs to the scheduler's thread,
// except wait_until, which may run beside update_producer of another slot.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "hicache/client.hpp"
#include "hicache/export.h"

namespace hicache {

// The words in which layers are announced: a session's, written by the daemon, or this process's own.
class HICACHE_EXPORT LayerWords {
 public:
  virtual ~LayerWords() = default;
  [[nodiscard]] virtual bool ready(const LayerFence& fence, std::uint32_t layer) const = 0;
  virtual Outcome wait(const LayerFence& fence, std::uint32_t layer, std::uint32_t timeout_ms) = 0;
  // Announces a layer; not_permitted where the daemon does that.
  virtual Outcome complete(const LayerFence& fence, std::uint32_t layer) = 0;
};

// Words that the daemon writes. The session must outlive them.
class HICACHE_EXPORT SessionLayerWords : public LayerWords {
 public:
  explicit SessionLayerWords(Session& session) : session_(session) {}
  [[nodiscard]] bool ready(const LayerFence& fence, std::uint32_t layer) const override;
  Outcome wait(const LayerFence& fence, std::uint32_t layer, std::uint32_t timeout_ms) override;
  Outcome complete(const LayerFence& fence, std::uint32_t layer) override;

 private:
  Session& session_;
};

// Words of this process, for engines that copy on their own.
class HICACHE_EXPORT LocalLayerWords : public LayerWords {
 public:
  explicit LocalLayerWords(std::uint32_t layers);
  [[nodiscard]] bool ready(const LayerFence& fence, std::uint32_t layer) const override;
  Outcome wait(const LayerFence& fence, std::uint32_t layer, std::uint32_t timeout_ms) override;
  Outcome complete(const LayerFence& fence, std::uint32_t layer) override;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::vector<std::uint32_t>, kProducerSlots> words_;
};

// The events of one batch in one producer slot: one for each layer. The last layer's is the batch's end.
class HICACHE_EXPORT LayerLoadingEvent {
 public:
  LayerLoadingEvent(LayerWords& words, std::uint32_t slot, std::uint32_t layers);

  // Announces a layer. invalid_argument outside 0 ... layers-1.
  Outcome complete(std::int64_t layer);
  Outcome wait(std::int64_t layer, std::uint32_t timeout_ms);
  // True when the last layer was announced, or no batch ever used the slot.
  [[nodiscard]] bool finished() const;
  // The batch's value; 0 before the first. next() begins a new batch.
  [[nodiscard]] LayerFence fence() const { return {slot_, value_}; }
  void next();
  // Undoes next() when the batch could not be posted: its value was never given away.
  void undo_next() { value_ = previous_; }

 private:
  [[nodiscard]] Outcome check(std::int64_t layer) const;
  LayerWords* words_;
  std::uint32_t slot_;
  std::uint32_t layers_;
  std::uint32_t value_ = 0;
  std::uint32_t previous_ = 0;
};

// Three batches may be in flight: enough for a scheduler that prepares a step while another runs.
class HICACHE_EXPORT LayerDoneCounter {
 public:
  LayerDoneCounter(LayerWords& words, std::uint32_t layers);

  // Takes the next slot and begins a batch in it; the slot's index. busy when its last batch has not
  // finished: nothing has changed then.
  Result<std::int32_t> update_producer();
  // Gives back the slot that update_producer took, when its batch could not be posted.
  void cancel_producer();
  // The batch that the next forward pass waits for; -1 = none. invalid_argument for any other number.
  Outcome set_consumer(std::int32_t index);
  // Waits for a layer of the consumer's batch. At once without a consumer.
  Outcome wait_until(std::int64_t layer, std::uint32_t timeout_ms);
  // Forgets producer and consumer. Batches in flight go on.
  void reset();

  [[nodiscard]] std::int32_t producer_index() const { return producer_; }
  [[nodiscard]] std::int32_t consumer_index() const { return consumer_; }
  [[nodiscard]] LayerLoadingEvent& event(std::int32_t index) {
    return events_[static_cast<std::size_t>(index)];
  }

 private:
  std::vector<LayerLoadingEvent> events_;
  std::int32_t producer_ = -1;
  std::int32_t consumer_ = -1;
};

}  // namespace hicache
