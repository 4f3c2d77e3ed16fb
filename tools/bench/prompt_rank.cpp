#include "tools/bench/prompt_rank.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "shm/clock.hpp"
#include "tools/bench/page_pattern.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint32_t kWaitGraceMs = 5000;  // a session ends overdue operations by itself, long before this

std::vector<DevicePage> device_pages(std::uint32_t first, std::uint32_t count) {
  std::vector<DevicePage> pages(count);
  for (std::uint32_t i = 0; i < count; ++i) pages[i] = DevicePage{first + i};
  return pages;
}

}  // namespace

std::vector<PrefixHash> prompt_keys(std::uint32_t n, std::uint32_t pages) {
  std::vector<PrefixHash> keys(pages);
  for (std::uint32_t i = 0; i < pages; ++i) {
    keys[i] = PrefixHash{{pattern_word(n, i), pattern_word(n + 1, i), n, i}};
  }
  return keys;
}

Result<std::unique_ptr<PromptRank>> PromptRank::attach(const PromptRankOptions& options,
                                                       const NamespaceSpec& spec,
                                                       const DeviceMemory& memory) {
  AttachOptions attach;
  attach.socket_path = options.socket_path;
  attach.engine = options.engine;
  attach.tp_rank = options.tp_rank;
  attach.spec = spec;
  attach.timeout_ms = options.attach_ms;
  auto session = Session::attach(attach);
  if (!session) return session.error();
  if (Outcome registered = memory.register_with(**session); !registered) return registered.error();
  return std::unique_ptr<PromptRank>(new PromptRank(std::move(*session), options, spec, memory));
}

std::uint64_t PromptRank::base_of(const DeviceTensor& tensor, const PrefixHash& key) const {
  return piece_base({digest_, key, shard_, tensor.layer, tensor.kind});
}

Result<OperationResult> PromptRank::run(const Result<Ticket>& ticket) {
  if (!ticket) return ticket.error();
  const std::uint64_t start = monotonic_ns();
  auto result = session_->wait(*ticket, deadline_ms_ + kWaitGraceMs);
  longest_wait_ns_ = std::max(longest_wait_ns_, monotonic_ns() - start);
  if (!result) return result.error();
  if (result->status != Status::ok) {
    return Error{result->status,
                 fmt::format("{} ended with {}", to_string(result->opcode), to_string(result->status)), 0};
  }
  return result;
}

Result<PromptRank::Reading> PromptRank::request(const std::vector<PrefixHash>& keys,
                                                std::uint32_t load_at_most, bool write) {
  const auto reserved = run(session_->reserve(sequence_ + 1, keys, deadline_ms_));
  if (!reserved) return reserved.error();
  ++sequence_;
  Reading reading;
  reading.hits = std::min(reserved->hits, load_at_most);
  reading.operations = 2;
  const auto& tensors = memory_.geometry().tensors;
  if (reading.hits > 0) {
    const auto pages = device_pages(0, reading.hits);
    for (const DevicePage page : pages) {
      for (const DeviceTensor& tensor : tensors) poison(memory_.piece(tensor, page));
    }
    const auto loaded = run(session_->load(reserved->lease, 0, pages, std::nullopt, deadline_ms_));
    if (!loaded) return loaded.error();
    ++reading.operations;
    for (std::uint32_t i = 0; i < reading.hits; ++i) {
      for (const DeviceTensor& tensor : tensors) {
        reading.wrong_words += count_wrong_words(memory_.piece(tensor, pages[i]), base_of(tensor, keys[i]));
      }
    }
  }
  const auto missing = static_cast<std::uint32_t>(keys.size()) - reserved->hits;
  if (write && missing > 0) {
    const auto pages = device_pages(reserved->hits, missing);
    for (std::uint32_t i = 0; i < missing; ++i) {
      for (const DeviceTensor& tensor : tensors) {
        fill_piece(memory_.piece(tensor, pages[i]), base_of(tensor, keys[reserved->hits + i]));
      }
    }
    const auto written =
        run(session_->write(reserved->lease, reserved->hits, pages, std::nullopt, deadline_ms_));
    if (!written) return written.error();
    ++reading.operations;
    reading.written = written->written;
  }
  const auto released = run(session_->release(reserved->lease, deadline_ms_));
  if (!released) return released.error();
  return reading;
}

}  // namespace hicache::bench
