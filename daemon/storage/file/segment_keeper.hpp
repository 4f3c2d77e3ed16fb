// The thread that does for one directory what takes long: makes segments, seals, evicts and removes them,
// holds the limits of space, and looks whether a directory that failed works again. One a directory, so that
// a disk that stalls holds up its own only.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "daemon/storage/file/segment_store.hpp"

namespace hicache::daemon {

class SegmentKeeper {
 public:
  SegmentKeeper(SegmentStore& store, const FileSettings& settings, std::uint32_t directory);
  ~SegmentKeeper();
  SegmentKeeper(const SegmentKeeper&) = delete;
  SegmentKeeper& operator=(const SegmentKeeper&) = delete;

  void start();
  // Seals what is to be sealed and ends the thread.
  void stop();
  // There may be work. From any thread, also with the store's lock held.
  void poke();

 private:
  void run();
  void turn();
  void probe();
  void remove_condemned();
  void seal();
  void make_spare();
  void hold_limits();
  // Whether the segment is empty and unused now; not when the keeper has to end before.
  bool evict(Segment& segment, bool keep_hot);
  void move_hot(const Segment& from, const RecordInfo& record);
  void remove(Segment& segment);
  [[nodiscard]] bool stopping();

  SegmentStore& store_;
  const FileSettings& settings_;
  const std::uint32_t directory_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool poked_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace hicache::daemon
