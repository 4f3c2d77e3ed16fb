// The fence words of a session as the GPU sees them, and the thread that releases waiting streams when the
// daemon dies or misses a deadline while nobody calls the session.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "hicache/client.hpp"
#include "shm/channel_layout.hpp"

namespace hicache {

class HICACHE_LOCAL StreamFences {
 public:
  // Registers the words with the driver, in the context that is current or else the stream's. `session`
  // outlives the object.
  static Result<std::unique_ptr<StreamFences>> create(Session& session, FenceBlock* words, void* stream);
  // Streams must not wait for a word any more: the session has released them.
  ~StreamFences();
  StreamFences(const StreamFences&) = delete;
  StreamFences& operator=(const StreamFences&) = delete;

  // Puts a wait for, or a write of, one of the words into a stream.
  Outcome wait(void* stream, const A32& word, std::uint32_t value) const;
  Outcome write(void* stream, const A32& word, std::uint32_t value) const;
  // A stream waits from now on: the session is looked at until no load is open any more.
  void watch();

 private:
  StreamFences(Session& session, FenceBlock* words);
  void run();
  [[nodiscard]] std::uint64_t device_address(const A32& word) const;

  Session& session_;
  FenceBlock* const words_;
  std::uint64_t device_words_ = 0;  // CUdeviceptr
  void* context_ = nullptr;         // CUcontext in which the words are registered
  bool registered_ = false;

  std::mutex mutex_;  // of the two below; never taken while the session's is held by this thread
  std::condition_variable changed_;
  bool watching_ = false;
  bool stopping_ = false;
  std::thread guard_;
};

}  // namespace hicache
