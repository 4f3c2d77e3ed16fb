// A rank's staging memory and the thread that packs and unpacks pages for the daemon.
//
// Short pieces of pages are slow for the copy engines that the daemon uses. So the rank packs them into
// staging memory, on its own GPU and with a few multiprocessors of it, and the daemon moves long rows
// (writes); or the other way round (loads). The daemon decides which transfers go this way.
//
// No stream ever waits for the daemon: a request is posted when everything that its kernel reads is there.
// What a kernel writes is the daemon's until the request has ended, so pages of an operation stay busy until
// then; when the session ends they stay busy until `idle`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>

#include "hicache/client.hpp"
#include "shm/channel_layout.hpp"
#include "shm/messages.hpp"
#include "shm/waiting.hpp"

namespace hicache {

struct CudaRange;

class HICACHE_LOCAL Staging {
 public:
  // `ranges` are the geometry's allocations in this process. `bytes` are the slots' together. `channel` is
  // the session's and outlives this. Fails where the GPU can't do it; the session then goes on without.
  static Result<std::unique_ptr<Staging>> create(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                                 std::span<const CudaRange> ranges, std::uint64_t bytes,
                                                 const ChannelHeader& channel, const WaitPolicy& waiting);
  // Ends, waits for kernels, and frees the memory if the daemon is known to have let go of it; otherwise the
  // memory is never freed: a late copy of a dying daemon would land in whatever came after it.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  [[nodiscard]] const StagingOffer& offer() const;
  [[nodiscard]] int block_fd() const;
  // The daemon hears of the memory now: it is freed only after let_go().
  void offered();
  // The daemon has taken it: begins to serve.
  void start();
  // No request is run any more. Returns at once.
  void end();
  // No kernel of it runs and none will.
  [[nodiscard]] bool idle() const;
  // Nobody but this process can touch the memory from now on.
  void let_go();

 private:
  struct Impl;
  explicit Staging(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hicache
