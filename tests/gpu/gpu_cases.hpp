// Ranks of the GPU tests. The test process itself never touches CUDA: a daemon can't open GPU memory of its
// own process, and CUDA does not survive a fork. Every rank is a forked child that says on standard error
// what went wrong.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"
#include "tools/bench/gpu/gpu_rank.hpp"

namespace hicache::test {

using bench::BufferLayout;
using bench::Gpu;
using bench::GpuPages;
using bench::GpuRank;
using bench::KeyedPage;

// Why GPU tests can't run here; "" when they can.
std::string why_no_gpu();

// A daemon with CUDA.
inline std::string cuda_config(const std::string& pool = "256MiB", const std::string& mode = "on_demand",
                               const std::string& method = "auto") {
  return R"({"pool": {"bytes": ")" + pool + R"(", "segment_bytes": "4MiB"}, "transfer": {"method": ")" +
         method + R"("}, "cuda": {"mode": ")" + mode + "\"}}";
}
// A number of the first GPU in the daemon's status.
std::uint64_t gpu_status(const TestDaemon& daemon, const std::string& key);
// Waits until the whole pool is pinned: before, it holds fewer pages.
void await_pinned(const TestDaemon& daemon);

// Values or an exception with the error's text.
template <class T>
T must(Result<T> result) {
  if (!result)
    throw std::runtime_error(fmt::format("{}: {}", to_string(result.status()), result.error().message));
  return std::move(*result);
}
inline void expect(bool good, const std::string& text) {
  if (!good) throw std::runtime_error(text);
}

// Runs a rank in a child; its exit status is 0 when the body returns. Lines that it prints can be read.
Child start_rank(const std::function<void(const Gpu&)>& body);
// Prints a line to the test process at once.
void say(const std::string& line);
// The rank ended well.
void require_success(Child& rank);

inline const void* pointer_of(CUdeviceptr address) {
  return reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address));
}
// Throws when the driver's call failed.
void cuda(const Gpu& gpu, CUresult result, const char* what);
// A physical allocation of cuMemCreate, mapped; `bytes` grows to what it has.
CUdeviceptr create_mapped(const Gpu& gpu, std::size_t& bytes, CUmemAllocationHandleType handle_type);

// Two layers, K and V, pieces of 2 KiB; or a latent of odd size.
NamespaceSpec gpu_spec(Attention attention, std::uint32_t layers = 4, std::uint32_t head_dim = 64);
// Pages 0, 2, 4, ... then 1, 3, ... with keys: nothing is consecutive.
std::vector<KeyedPage> scattered(const std::vector<PrefixHash>& keys);
std::vector<DevicePage> places(const std::vector<KeyedPage>& pages);

// The pages' bytes are right; names a wrong one otherwise.
void expect_right(GpuRank& rank, const std::vector<KeyedPage>& pages);
// Reserve, write and release of pages that are not there yet.
void write_all(GpuRank& rank, const std::vector<PrefixHash>& keys, const std::vector<KeyedPage>& pages);

}  // namespace hicache::test
