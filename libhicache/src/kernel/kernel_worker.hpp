// The thread of a rank in io_backend kernel: takes the daemon's requests, has its mover run them, and reports
// their ends.
//
// When the session ends, nothing more is taken; what has begun runs to its end and is reported, and the
// device pages of open operations stay busy until `idle`.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "hicache/export.h"
#include "page_mover.hpp"
#include "shm/channel_layout.hpp"
#include "shm/waiting.hpp"

namespace hicache {

class HICACHE_LOCAL KernelWorker {
 public:
  // `channel` is the session's; it and the block outlive this.
  KernelWorker(std::unique_ptr<PageMover> mover, const KernelRequests& requests, const ChannelHeader& channel,
               const WaitPolicy& waiting)
      : mover_(std::move(mover)), requests_(requests), channel_(channel), waiting_(waiting) {}
  // Ends, and waits for what has begun.
  ~KernelWorker();
  KernelWorker(const KernelWorker&) = delete;
  KernelWorker& operator=(const KernelWorker&) = delete;

  // The daemon has taken the registration: begins to serve.
  void start();
  // No request is taken any more. Returns at once.
  void end();
  // Nothing of it touches device or pool, and nothing will.
  [[nodiscard]] bool idle() const { return quiet_.load(std::memory_order_acquire); }

 private:
  void run();
  bool serve();
  bool report();
  [[nodiscard]] bool open() const;

  const std::unique_ptr<PageMover> mover_;
  KernelRequests requests_;
  const ChannelHeader& channel_;
  const WaitPolicy waiting_;
  KernelWork work_;                  // reused
  std::atomic<bool> ending_{false};  // release in end(), acquire in open()
  std::atomic<bool> quiet_{
      true};  // release when the thread has ended, acquire in idle(): its copies are over
  std::thread thread_;
};

}  // namespace hicache
