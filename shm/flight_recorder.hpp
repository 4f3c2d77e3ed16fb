// The flight recorder: the last operations, kept in the control region so that they survive the daemon.
//
// Thread safety: one writer (the coordinator); readers in any process.
// SYNC flight-record: the writer stores sequence 0, fences (release), fills the record, stores the sequence
// (release).
//   A reader loads the sequence (acquire), copies, fences (acquire), loads it again. Weaker: a torn record
//   could pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "shm/region_layout.hpp"

namespace hicache {

// A record in private memory.
struct FlightNote {
  std::uint64_t time_ns = 0;
  std::uint32_t client = kNone32;
  std::uint32_t client_generation = 0;
  std::uint16_t opcode = 0;
  std::uint16_t status = 0;
  std::uint32_t detail = 0;
  std::uint64_t lease = 0;
  std::uint64_t user_data = 0;
  std::uint32_t count = 0;
  FlightEvent event = FlightEvent::submit;
};

class FlightRecorder {
 public:
  FlightRecorder() = default;
  explicit FlightRecorder(std::span<FlightRecord> records) : records_(records), mask_(records.size() - 1) {}

  // `sequence` grows by one with every call.
  void record(std::uint64_t sequence, const FlightNote& note) {
    FlightRecord& r = records_[sequence & mask_];
    constexpr auto relaxed = std::memory_order_relaxed;
    r.sequence.store(0, relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // SYNC flight-record
    r.time_ns.store(note.time_ns, relaxed);
    r.client.store(note.client, relaxed);
    r.client_generation.store(note.client_generation, relaxed);
    r.opcode.store(note.opcode, relaxed);
    r.status.store(note.status, relaxed);
    r.detail.store(note.detail, relaxed);
    r.lease.store(note.lease, relaxed);
    r.user_data.store(note.user_data, relaxed);
    r.count.store(note.count, relaxed);
    r.event.store(static_cast<std::uint32_t>(note.event), relaxed);
    r.sequence.store(sequence, std::memory_order_release);  // SYNC flight-record
  }

 private:
  std::span<FlightRecord> records_;
  std::uint64_t mask_ = 0;
};

}  // namespace hicache
