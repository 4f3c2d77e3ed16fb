// A thread that serves pages of the segment format: it takes them from the queue, reads first, keeps its
// engine busy, makes and checks checksums, and tells the outcomes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/storage/file/io_engine.hpp"
#include "daemon/storage/file/page_queue.hpp"
#include "daemon/storage/file/segment_store.hpp"

namespace hicache::daemon {

class SegmentWorker {
 public:
  SegmentWorker(SegmentStore& store, PageQueue& queue, const StoragePool& pool, const FileSettings& settings);
  ~SegmentWorker();
  SegmentWorker(const SegmentWorker&) = delete;
  SegmentWorker& operator=(const SegmentWorker&) = delete;

  // Starts the thread and waits for its engine. system_error where it can't have one.
  Outcome start();
  // Waits for what has begun, and ends the thread. The queue has to be closed before.
  void stop();
  // Something was queued, or there is room again. From any thread, but not during start().
  void wake();
  [[nodiscard]] std::string engine() const;

 private:
  struct Transfer;

  void run();
  void turn();
  void answer_exists();
  void start_reads();
  bool start_writes();
  void start_read(QueuedPage page);
  void add_to_write(Transfer& transfer, QueuedPage page, const WritePlace& place);
  void start(Transfer& transfer);
  void end(Transfer& transfer);
  void end_read(Transfer& transfer);
  void end_write(Transfer& transfer);
  Transfer& free_transfer();
  void append_parts(std::vector<iovec>& parts, const QueuedPage& page) const;
  [[nodiscard]] std::uint64_t checksum(const QueuedPage& page) const;

  SegmentStore& store_;
  PageQueue& queue_;
  const StoragePool pool_;
  const FileSettings& settings_;
  std::unique_ptr<IoEngine> engine_;  // made and used by the thread
  std::vector<std::unique_ptr<Transfer>> transfers_;
  std::vector<Transfer*> free_;
  std::uint32_t reads_ = 0;  // in flight
  std::uint32_t writes_ = 0;
  // Relaxed: the wake() that follows it orders the two.
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace hicache::daemon
