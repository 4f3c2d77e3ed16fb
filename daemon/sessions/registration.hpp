// Registration of device buffers: checks what a rank claims about its memory, maps it, and hands it to the
// coordinator. Mapping (and later pinning) is slow, so it has a thread of its own: a rank that registers
// terabytes delays other registrations, but no session and no operation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/coordinator/requests.hpp"
#include "daemon/cuda/cuda_path.hpp"
#include "shm/fd.hpp"
#include "shm/messages.hpp"

namespace hicache::daemon {

// What a rank sent, together with what the daemon knows about it.
struct RegistrationJob {
  ClientSlot client;
  Generation client_generation;
  NamespaceSpec spec;
  std::uint32_t tp_rank = 0;
  std::shared_ptr<Mapping> channel;
  ChannelGeometry channel_geometry;
  DeviceGeometry geometry;
  std::optional<StagingOffer> staging;
  std::shared_ptr<KernelLink> kernel;  // io_backend kernel: nothing is mapped, no descriptor comes
  std::vector<UniqueFd> fds;
  UniqueFd socket;  // a second descriptor of the session's
  // Called once, on the registration's or the coordinator's thread; must only hand the answer on.
  std::function<void(Status, std::string)> answer;
};

class Registration {
 public:
  // `post` hands a request to the coordinator. `cuda` outlives the registration.
  Registration(std::function<void(CoordinatorRequest)> post, CudaPath& cuda);
  // Finishes the job at hand, refuses the waiting ones with shutting_down, and joins the thread.
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // Queues a job; never blocks. From any thread.
  void submit(RegistrationJob job);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// The check and mapping of one job, without a thread: the client's memory, or the first thing that is wrong
// with it.
Result<std::unique_ptr<RankMemory>> map_rank_memory(RegistrationJob& job, CudaPath& cuda);

}  // namespace hicache::daemon
