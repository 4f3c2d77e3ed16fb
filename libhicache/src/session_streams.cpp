// Fences in CUDA streams. The words are the same that hosts wait for, so whoever releases one releases both.
#include "session_impl.hpp"
#include "stream_fences.hpp"

namespace hicache {
namespace {

Error forked_error() {
  return Error{Status::forked, "the session belongs to the parent process: attach again in the child", 0};
}

}  // namespace

Result<StreamFences*> Session::Impl::streams_locked(Session& session, void* stream) {
  if (!stream_fences) {
    auto made = StreamFences::create(session, fences, stream);
    if (!made) return made.error();
    stream_fences = std::move(*made);
  }
  return stream_fences.get();
}

Outcome Session::stream_wait_layer(void* stream, const LayerFence& fence, std::uint32_t layer) {
  Impl& m = *impl_;
  if (m.fork.forked()) return forked_error();
  if (fence.slot >= kProducerSlots || layer >= m.spec.layers) {
    return Error{Status::invalid_argument,
                 "layer " + std::to_string(layer) + " of producer slot " + std::to_string(fence.slot) +
                     ": expected a layer below " + std::to_string(m.spec.layers) + " and a slot below " +
                     std::to_string(kProducerSlots),
                 0};
  }
  const std::lock_guard lock(m.mutex);
  if (layer_ready(fence, layer)) return success();
  if (m.ended()) return m.end_error();
  if (m.layer_loads[fence.slot].find(fence.value) == nullptr) {
    return Error{Status::invalid_argument,
                 "no load of producer slot " + std::to_string(fence.slot) + " was posted with value " +
                     std::to_string(fence.value) + ": post the load before its waits",
                 0};
  }
  const auto streams = m.streams_locked(*this, stream);
  if (!streams) return streams.error();
  if (Outcome waiting = (*streams)->wait(stream, m.fences->load[fence.slot].layer[layer], fence.value);
      !waiting)
    return waiting;
  (*streams)->watch();
  return success();
}

Outcome Session::stream_raise_write_fence(void* stream, std::uint32_t index, std::uint32_t value) {
  Impl& m = *impl_;
  if (m.fork.forked()) return forked_error();
  if (index >= kWriteFences) {
    return Error{Status::invalid_argument,
                 "write fence " + std::to_string(index) + " is not below " + std::to_string(kWriteFences), 0};
  }
  const std::lock_guard lock(m.mutex);
  if (m.ended()) return m.end_error();
  std::uint32_t& last = m.stream_raised[index];
  if (last != value && timeline_reached(last, value)) {
    return Error{Status::invalid_argument,
                 "write fence " + std::to_string(index) + " was raised to " + std::to_string(last) +
                     " in a stream before; values only grow, and " + std::to_string(value) + " does not",
                 0};
  }
  const auto streams = m.streams_locked(*this, stream);
  if (!streams) return streams.error();
  if (Outcome written = (*streams)->write(stream, m.fences->write[index].value, value); !written)
    return written;
  last = value;
  return success();
}

bool Session::look_after_loads() {
  Impl& m = *impl_;
  const std::lock_guard lock(m.mutex);
  m.look_at_daemon();
  if (m.ended()) return false;  // that has released every fence
  bool open = false;
  m.operations.for_each([&](const Operation& operation) {
    open = open || (operation.stage == Stage::open && operation.fence != Submission::kNoFence);
  });
  return open;
}

Outcome Session::load_result(const LayerFence& fence, std::uint32_t timeout_ms) {
  // Layers become ready in order, and a failed load releases all: the last one tells for all.
  return wait_layer(fence, impl_->spec.layers - 1, timeout_ms);
}

}  // namespace hicache
