#include "hicache/controller/layer_events.hpp"

#include <chrono>
#include <string>

namespace hicache {

bool SessionLayerWords::ready(const LayerFence& fence, std::uint32_t layer) const {
  return session_.layer_ready(fence, layer);
}

Outcome SessionLayerWords::wait(const LayerFence& fence, std::uint32_t layer, std::uint32_t timeout_ms) {
  return session_.wait_layer(fence, layer, timeout_ms);
}

Outcome SessionLayerWords::complete(const LayerFence&, std::uint32_t layer) {
  return Error{Status::not_permitted,
               "layer " + std::to_string(layer) + " of a daemon's load: only the daemon announces it", 0};
}

LocalLayerWords::LocalLayerWords(std::uint32_t layers) {
  for (auto& slot : words_) slot.assign(layers, 0);
}

bool LocalLayerWords::ready(const LayerFence& fence, std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  return timeline_reached(words_[fence.slot][layer], fence.value);
}

Outcome LocalLayerWords::wait(const LayerFence& fence, std::uint32_t layer, std::uint32_t timeout_ms) {
  std::unique_lock lock(mutex_);
  const bool reached = changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] {
    return timeline_reached(words_[fence.slot][layer], fence.value);
  });
  if (reached) return success();
  return Error{Status::timed_out,
               "layer " + std::to_string(layer) + " not ready within " + std::to_string(timeout_ms) + " ms",
               0};
}

Outcome LocalLayerWords::complete(const LayerFence& fence, std::uint32_t layer) {
  const std::lock_guard lock(mutex_);
  words_[fence.slot][layer] = fence.value;
  changed_.notify_all();
  return success();
}

LayerLoadingEvent::LayerLoadingEvent(LayerWords& words, std::uint32_t slot, std::uint32_t layers)
    : words_(&words), slot_(slot), layers_(layers) {}

Outcome LayerLoadingEvent::check(std::int64_t layer) const {
  if (layer >= 0 && layer < static_cast<std::int64_t>(layers_)) return success();
  return Error{Status::invalid_argument,
               "layer " + std::to_string(layer) + ", expected 0 to " + std::to_string(layers_ - 1), 0};
}

Outcome LayerLoadingEvent::complete(std::int64_t layer) {
  if (const auto valid = check(layer); !valid) return valid;
  return words_->complete(fence(), static_cast<std::uint32_t>(layer));
}

Outcome LayerLoadingEvent::wait(std::int64_t layer, std::uint32_t timeout_ms) {
  if (const auto valid = check(layer); !valid) return valid;
  if (value_ == 0) return success();
  return words_->wait(fence(), static_cast<std::uint32_t>(layer), timeout_ms);
}

bool LayerLoadingEvent::finished() const {
  return value_ == 0 || words_->ready(fence(), layers_ - 1);
}

void LayerLoadingEvent::next() {
  previous_ = value_;
  // 0 means "never used".
  if (++value_ == 0) ++value_;
}

LayerDoneCounter::LayerDoneCounter(LayerWords& words, std::uint32_t layers) {
  for (std::uint32_t slot = 0; slot < kProducerSlots; ++slot) events_.emplace_back(words, slot, layers);
}

Result<std::int32_t> LayerDoneCounter::update_producer() {
  const std::int32_t next = (producer_ + 1) % static_cast<std::int32_t>(kProducerSlots);
  if (!event(next).finished()) {
    return Error{Status::busy,
                 "Producer finish event should be ready before being reused. Slot " + std::to_string(next) +
                     " is still loading",
                 0};
  }
  event(next).next();
  producer_ = next;
  return next;
}

void LayerDoneCounter::cancel_producer() {
  event(producer_).undo_next();
  // Slots are taken in turn, so the one before is the one that was current; at the very start it is slot 2,
  // after which slot 0 comes next just the same.
  producer_ =
      (producer_ + static_cast<std::int32_t>(kProducerSlots) - 1) % static_cast<std::int32_t>(kProducerSlots);
}

Outcome LayerDoneCounter::set_consumer(std::int32_t index) {
  if (index < -1 || index >= static_cast<std::int32_t>(kProducerSlots)) {
    return Error{
        Status::invalid_argument,
        "consumer " + std::to_string(index) + ", expected -1 to " + std::to_string(kProducerSlots - 1), 0};
  }
  consumer_ = index;
  return success();
}

Outcome LayerDoneCounter::wait_until(std::int64_t layer, std::uint32_t timeout_ms) {
  if (consumer_ < 0) return success();
  return event(consumer_).wait(layer, timeout_ms);
}

void LayerDoneCounter::reset() {
  producer_ = -1;
  consumer_ = -1;
}

}  // namespace hicache
