#include "tools/bench/gpu/gpu_group.hpp"

#include <sched.h>

#include <algorithm>

#include "shm/clock.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint64_t kMeetNs = 120'000'000'000;
constexpr double kStartDelayNs = 100'000;  // between a meeting and what is timed
constexpr int kCopyRepeats = 7;

}  // namespace

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

Outcome GroupMember::meet() {
  const std::uint32_t phase = board_.phase.load(std::memory_order_acquire);
  if (board_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    board_.arrived.store(0, std::memory_order_relaxed);
    board_.phase.store(phase + 1, std::memory_order_release);  // SYNC board
    return success();
  }
  const std::uint64_t end = monotonic_ns() + kMeetNs;
  while (board_.phase.load(std::memory_order_acquire) == phase) {
    if (board_.abort.load(std::memory_order_relaxed) != 0)
      return Error{Status::peer_lost, "another rank has failed", 0};
    if (monotonic_ns() > end) return Error{Status::timed_out, "another rank does not come", 0};
    ::sched_yield();
  }
  return success();
}

Result<std::vector<double>> GroupMember::share(double own) {
  board_.values[rank_] = own;
  if (Outcome met = meet(); !met) return met.error();
  std::vector<double> all(board_.values.begin(), board_.values.begin() + size_);
  if (Outcome met = meet(); !met) return met.error();
  return all;
}

Result<GroupTimes> GroupMember::timed(const std::function<Outcome()>& body) {
  // A moment that all have agreed on: leaving a meeting takes some longer than others.
  const auto clocks = share(static_cast<double>(monotonic_ns()));
  if (!clocks) return clocks.error();
  const double start = *std::max_element(clocks->begin(), clocks->end()) + kStartDelayNs;
  while (static_cast<double>(monotonic_ns()) < start) {
  }
  if (Outcome done = body(); !done) return done.error();
  const auto end = static_cast<double>(monotonic_ns());
  const auto ends = share(end);
  if (!ends) return ends.error();
  GroupTimes times;
  times.makespan_ns = *std::max_element(ends->begin(), ends->end()) - start;
  for (const double own_end : *ends) times.own_ns.push_back(own_end - start);
  return times;
}

Outcome GroupMember::on_first(const std::function<Outcome()>& body) {
  if (Outcome met = meet(); !met) return met;
  if (first()) {
    if (Outcome done = body(); !done) return done;
  }
  return meet();
}

Result<GroupCopyRates> measure_copies_at_once(GroupMember& member, const Gpu& gpu, std::uint64_t bytes) {
  const Driver& d = gpu.driver();
  auto memory = GpuBytes::allocate(gpu, bytes);
  if (!memory) return memory.error();
  auto stream = GpuStream::create(gpu);
  if (!stream) return stream.error();
  void* host = nullptr;
  if (const Outcome done = check(d, d.cuMemHostAlloc(&host, bytes, 0), "cuMemHostAlloc"); !done)
    return done.error();
  const auto rate = [&](bool load) -> Result<double> {
    std::vector<double> rates;
    for (int i = 0; i <= kCopyRepeats; ++i) {
      const auto times = member.timed([&]() -> Outcome {
        const CUresult result = load ? d.cuMemcpyHtoDAsync(memory->address(), host, bytes, stream->get())
                                     : d.cuMemcpyDtoHAsync(host, memory->address(), bytes, stream->get());
        if (Outcome put = check(d, result, "a single large copy"); !put) return put;
        return stream->synchronize();
      });
      if (!times) return times.error();
      if (i > 0)  // the first warms up
        rates.push_back(static_cast<double>(bytes) * member.size() / times->makespan_ns);
    }
    return median_of(std::move(rates));
  };
  const auto to_device = rate(true);
  const auto to_host = to_device ? rate(false) : to_device;
  d.cuMemFreeHost(host);
  if (!to_host) return to_host.error();
  return GroupCopyRates{*to_device, *to_host};
}

}  // namespace hicache::bench
