#include "tools/bench/gpu/gpu_rank.hpp"

#include <fmt/format.h>

#include "shm/clock.hpp"
#include "tools/bench/pattern_math.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint32_t kWaitMs = 60'000;

}  // namespace

Result<std::unique_ptr<GpuRank>> GpuRank::attach(const Gpu& gpu, const std::string& socket_path,
                                                 const NamespaceSpec& spec, std::uint32_t pages,
                                                 BufferLayout layout, const GroupPlace& place,
                                                 std::uint64_t staging_bytes, IoBackend io_backend) {
  auto rank = std::make_unique<GpuRank>();
  rank->socket_path_ = socket_path;
  auto memory = GpuPages::create(gpu, spec, pages, layout);
  if (!memory) return memory.error();
  rank->memory_ = std::move(*memory);
  AttachOptions options;
  options.staging_bytes = staging_bytes;
  options.io_backend = io_backend;
  options.socket_path = socket_path;
  options.engine = place.engine.empty() ? fmt::format("bench-{}", monotonic_ns()) : place.engine;
  options.tp_rank = place.tp_rank;
  options.spec = spec;
  auto session = Session::attach(options);
  if (!session) return session.error();
  rank->session_ = std::move(*session);
  const std::uint64_t start = monotonic_ns();
  if (const Outcome registered = rank->memory_->register_with(*rank->session_); !registered)
    return registered.error();
  rank->register_ms_ = static_cast<double>(monotonic_ns() - start) / 1e6;
  return rank;
}

Result<GpuRank::Reserved> GpuRank::reserve_any(std::span<const PrefixHash> keys) {
  const auto ticket = session_->reserve(++sequence_, keys);
  if (!ticket) return ticket.error();
  const auto result = session_->wait(*ticket, kWaitMs);
  if (!result) return result.error();
  if (result->status != Status::ok)
    return Error{result->status, fmt::format("reserve ended with {}", to_string(result->status)), 0};
  return Reserved{result->lease, result->hits};
}

Result<LeaseId> GpuRank::reserve(std::span<const PrefixHash> keys, std::uint32_t expected_hits) {
  const auto reserved = reserve_any(keys);
  if (!reserved) return reserved.error();
  if (reserved->hits == expected_hits) return reserved->lease;
  return Error{
      Status::internal,
      fmt::format("reserve found {} of {} pages, expected {}", reserved->hits, keys.size(), expected_hits),
      0};
}

Outcome GpuRank::release(LeaseId lease) {
  const auto ticket = session_->release(lease);
  if (!ticket) return ticket.error();
  const auto result = session_->wait(*ticket, kWaitMs);
  if (!result) return result.error();
  return result->status == Status::ok ? success() : Outcome(result->status, "release failed");
}

Outcome GpuRank::wait(const Result<Ticket>& ticket, std::uint32_t pages) {
  if (!ticket) return ticket.error();
  const auto result = session_->wait(*ticket, kWaitMs);
  if (!result) return result.error();
  const char* what = result->opcode == Opcode::write ? "write" : "load";
  if (result->status != Status::ok)
    return Error{result->status, fmt::format("{} ended with {}", what, to_string(result->status)), 0};
  if (result->opcode == Opcode::write && result->written != pages) {
    return Error{Status::dropped,
                 fmt::format("write of {} pages kept {}: {} dropped, {} present", pages, result->written,
                             result->dropped, result->present),
                 0};
  }
  return success();
}

Outcome GpuRank::clear() const {
  const auto answer = control(socket_path_, {"clear"});
  return answer ? success() : Outcome(answer.error());
}

std::vector<PrefixHash> made_up_keys(std::uint64_t id, std::uint32_t count) {
  std::vector<PrefixHash> keys(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint64_t x = pattern_mix(id * 0x9e3779b97f4a7c15ull + i + 1);
    for (std::uint64_t& word : keys[i].words) word = x = pattern_mix(x + 0x9e3779b97f4a7c15ull);
  }
  return keys;
}

}  // namespace hicache::bench
