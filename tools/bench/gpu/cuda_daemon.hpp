// A daemon for the GPU benchmarks, with its pool pinned, and the rank process that runs beside it.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "shm/status.hpp"
#include "tools/bench/daemon_process.hpp"
#include "tools/bench/gpu/gpu.hpp"

namespace hicache::bench {

// Starts a daemon with a pool of at least `pool_bytes` bytes; returns when all of it is pinned. not_permitted
// when the daemon has no CUDA or refuses the method, with its reason. `patch` is JSON text merged into its
// configuration.
Result<std::unique_ptr<DaemonProcess>> start_cuda_daemon(std::uint64_t pool_bytes, const std::string& method,
                                                         const std::string& patch);

// Receives results of a rank as they come.
using ResultSink = std::function<void(const nlohmann::json&)>;
// Runs `body` in a process of its own, because the daemon's GPU handles can't be opened where they were made,
// and hands over what it sends. Returns what went wrong in there. With `only_gpu` it sees no other GPU.
Outcome run_in_rank_process(const std::function<Outcome(const Gpu&, const ResultSink&)>& body,
                            const ResultSink& sink, std::optional<std::uint32_t> only_gpu = std::nullopt);

}  // namespace hicache::bench
