// A transfer on its way through the engine: what is to be done and how far it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "daemon/transfer/planner.hpp"
#include "daemon/transfer/transfer_engine.hpp"

namespace hicache::daemon {

// Owned by exactly one list or thread at a time; needs no lock of its own.
struct TransferJob {
  explicit TransferJob(Transfer t) : transfer(std::move(t)) {}

  // Refuses what the channel's owner could have got wrong before anything is indexed with it. Sets verdict.
  void admit();
  // A write may start when its fence word has reached the value; a load always may.
  [[nodiscard]] bool may_start() const;
  [[nodiscard]] bool expired(std::uint64_t now_ns) const {
    return !started && transfer.deadline_ns != 0 && now_ns >= transfer.deadline_ns;
  }
  // Checks the pages and brings them into plan order. Sets verdict when a page lies outside.
  void start(const TransferOptions& options);
  // A load whose layers are announced one after the other.
  [[nodiscard]] bool announces_layers() const;
  // Copies about `slice_bytes` more. True when the job is at its end: done, or verdict says why not.
  bool advance(DeviceBackend& backend, const TransferOptions& options, std::uint64_t slice_bytes);
  // Tells the waiters of a failed load, lets go of the rank's memory, and returns what the sink is to be
  // told.
  TransferDone finish(const TransferOptions& options);

  Transfer transfer;
  Status verdict = Status::ok;  // anything else: nothing (more) is copied
  bool started = false;
  std::uint64_t arrived_ns = 0;  // when it began to wait for its fence
  std::uint64_t bytes = 0;       // copied so far
  TransferJob* next = nullptr;   // in the list that owns it
  CopyPlan plan;                 // of the part in work
  std::uint32_t verified = 0;
  std::vector<PoolOffset> corrupt;

 private:
  void verify(const ShardChecksums& checksums);
  bool plan_part(const TransferOptions& options);
  void end_part();

  std::size_t next_run_ = 0;
  // Parts keep plans small and, for loads, let layer 0 start before layer 1 is planned: a layer of a load
  // that announces its layers, else a bounded number of pages.
  std::size_t next_part_ = 0;
};

using TransferJobPtr = std::unique_ptr<TransferJob>;

}  // namespace hicache::daemon
