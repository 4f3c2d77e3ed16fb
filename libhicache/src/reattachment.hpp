// Attaching again after the daemon was lost, in a thread of its own: no engine thread ever waits for it.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "hicache/cuda.hpp"
#include "session_impl.hpp"

namespace hicache {

// Thread safety: all calls may come from any thread.
class HICACHE_LOCAL Session::Reattachment {
 public:
  Reattachment(const AttachOptions& options, Impl& first);
  ~Reattachment();
  Reattachment(const Reattachment&) = delete;
  Reattachment& operator=(const Reattachment&) = delete;

  // Registered buffers, to be registered again. Keeps copies of the descriptors.
  void remember(const DeviceGeometry& geometry, std::span<const int> fds, std::span<const CudaRange> ranges);
  // Puts the new session in the lost one's place, when there is one and the lost one has nothing left to
  // tell.
  void switch_over(const Session& session);
  // No more attempts. Waits for the one that runs, at most its time-out.
  void stop();

 private:
  void run();
  std::unique_ptr<Session> attach_once();

  AttachOptions options_;
  const ForkGuard fork_;
  std::mutex mutex_;  // guards what follows
  DeviceGeometry geometry_;
  std::vector<UniqueFd> fds_;
  std::vector<CudaRange> ranges_;
  bool registered_ = false;
  std::unique_ptr<Session> successor_;
  std::atomic<Impl*> watched_;          // the session whose end is waited for
  std::atomic<std::uint32_t> stop_{0};  // futex word
  std::thread thread_;
};

}  // namespace hicache
