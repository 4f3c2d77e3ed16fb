// A rank for tests: attached to a daemon, with host device buffers whose pages it can fill and check.
#pragma once

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "hicache/client.hpp"
#include "shm/prefix_hash.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

inline NamespaceSpec small_spec(Attention attention, std::uint32_t tp_size) {
  NamespaceSpec spec;
  spec.model = "test-model";
  spec.dtype = "bfloat16";
  spec.attention = attention;
  spec.page_tokens = 4;
  spec.layers = 2;
  spec.heads_per_shard = 1;
  spec.head_dim = 16;
  spec.element_bytes = 2;
  spec.tp_size = tp_size;
  return spec;
}

// Prefix hashes of a made-up prompt: pages 0..count-1 of conversation `id`.
inline std::vector<PrefixHash> prompt(std::uint32_t id, std::uint32_t count) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t page = 0; page < count; ++page) tokens.insert(tokens.end(), {id, page, id ^ page, 7});
  return hash_chain(tokens, 4);
}

// Word n of the bytes that belong to a shard of the page with this key, in the pool and on the device.
inline std::uint64_t page_content(const PrefixHash& key, std::uint32_t shard, std::uint64_t n) {
  return key.words[0] ^ (key.words[1] + n * 0x9e3779b97f4a7c15ull) ^ (std::uint64_t{shard} << 56);
}

// One allocation that holds every tensor, one after the other. There are as many state slots as pages.
inline DeviceGeometry device_geometry(const NamespaceSpec& spec, std::uint32_t pages) {
  DeviceGeometry g;
  g.pages = pages;
  if (spec.has_states()) g.states = pages;
  g.allocations.push_back({DeviceKind::host, spec.shard_bytes() * pages});
  std::uint64_t offset = 0;
  for (std::uint32_t kind = 0; kind < spec.kinds(); ++kind) {
    for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
      const TensorKind k =
          spec.attention == Attention::mla ? TensorKind::latent : static_cast<TensorKind>(kind);
      g.tensors.push_back({0, layer, k, offset, spec.piece_bytes(), spec.piece_bytes()});
      offset += spec.piece_bytes() * pages;
    }
  }
  for (std::uint32_t pool = 0; pool < spec.side_pools.size(); ++pool) {
    const std::uint64_t piece = spec.side_pools[pool].piece_bytes;
    for (std::uint32_t layer = 0; layer < spec.side_pools[pool].layers; ++layer) {
      g.tensors.push_back({0, layer, TensorKind::side, offset, piece, piece, pool});
      offset += piece * pages;
    }
  }
  return g;
}

class TestRank {
 public:
  static constexpr std::uint32_t kDevicePages = 64;

  // Attaches and registers. Throws when the daemon refuses.
  TestRank(const TestDaemon& daemon, const std::string& engine, std::uint32_t tp_rank, NamespaceSpec spec,
           bool reattach = false, IoBackend io_backend = IoBackend::direct)
      : TestRank(daemon.socket_path(), engine, tp_rank, std::move(spec), reattach, io_backend) {}
  TestRank(const std::string& socket_path, const std::string& engine, std::uint32_t tp_rank,
           NamespaceSpec spec, bool reattach = false, IoBackend io_backend = IoBackend::direct)
      : spec_(std::move(spec)),
        tp_rank_(tp_rank),
        buffer_(take(HostDeviceBuffer::create(bytes_needed(spec_)))) {
    AttachOptions options;
    options.socket_path = socket_path;
    options.engine = engine;
    options.tp_rank = tp_rank;
    options.spec = spec_;
    options.reattach = reattach;
    options.io_backend = io_backend;
    session_ = take(Session::attach(options));
    const auto g = geometry();
    const int fds[] = {buffer_.fd()};
    auto registered = session_->register_buffers(g, fds);
    if (!registered) throw std::runtime_error(registered.error().message);
  }

  [[nodiscard]] Session& session() { return *session_; }
  void detach() { session_.reset(); }

  // Fills a device page with what belongs to (key, shard) and spoils one with a value that belongs nowhere.
  void fill(DevicePage page, const PrefixHash& key) {
    for_each_word(page, [&](std::uint64_t& word, std::uint64_t n) { word = expected(key, n); });
  }
  void spoil(DevicePage page) {
    for_each_word(page, [](std::uint64_t& word, std::uint64_t) { word = 0xdeadbeefdeadbeefull; });
  }
  [[nodiscard]] bool holds(DevicePage page, const PrefixHash& key) {
    bool right = true;
    for_each_word(page,
                  [&](std::uint64_t& word, std::uint64_t n) { right = right && word == expected(key, n); });
    return right;
  }
  // The same for a state slot.
  void fill_state(DevicePage slot, const PrefixHash& key) {
    for_each_word(
        slot, [&](std::uint64_t& word, std::uint64_t n) { word = ~expected(key, n); }, true);
  }
  void spoil_state(DevicePage slot) {
    for_each_word(
        slot, [](std::uint64_t& word, std::uint64_t) { word = 0xdeadbeefdeadbeefull; }, true);
  }
  [[nodiscard]] bool holds_state(DevicePage slot, const PrefixHash& key) {
    bool right = true;
    for_each_word(
        slot, [&](std::uint64_t& word, std::uint64_t n) { right = right && word == ~expected(key, n); },
        true);
    return right;
  }

  // One operation from post to end.
  OperationResult run(Result<Ticket> ticket) {
    OperationResult failed;
    if (!ticket) {
      failed.status = ticket.status();
      return failed;
    }
    auto result = session_->wait(*ticket, kPatienceMs);
    if (!result) {
      failed.status = result.status();
      return failed;
    }
    return *result;
  }
  static std::vector<DevicePage> pages(std::uint32_t first, std::uint32_t count) {
    std::vector<DevicePage> out;
    for (std::uint32_t i = 0; i < count; ++i) out.push_back(DevicePage{first + i});
    return out;
  }

  [[nodiscard]] DeviceGeometry geometry() const { return device_geometry(spec_, kDevicePages); }

  template <class T>
  static T take(Result<T> result) {
    if (!result)
      throw std::runtime_error(std::string(to_string(result.status())) + ": " + result.error().message);
    return std::move(*result);
  }

 private:
  static std::uint64_t bytes_needed(const NamespaceSpec& spec) { return spec.shard_bytes() * kDevicePages; }
  [[nodiscard]] std::uint64_t expected(const PrefixHash& key, std::uint64_t n) const {
    return page_content(key, spec_.attention == Attention::mha ? tp_rank_ : 0, n);
  }
  template <class Visit>
  void for_each_word(DevicePage page, Visit&& visit, bool states = false) {
    std::uint64_t n = 0;
    for (const DeviceTensor& tensor : geometry().tensors) {
      if (hicache::holds_states(spec_, tensor) != states) continue;
      auto* words =
          reinterpret_cast<std::uint64_t*>(buffer_.data() + tensor.offset + page.value * tensor.page_stride);
      for (std::uint64_t i = 0; i < tensor.page_bytes / 8; ++i) visit(words[i], n++);
    }
  }

  NamespaceSpec spec_;
  std::uint32_t tp_rank_;
  HostDeviceBuffer buffer_;
  std::unique_ptr<Session> session_;
};

// Reserve, write and release of a whole prompt by a group of one rank. Returns pages published.
inline std::uint32_t write_prompt(TestRank& rank, std::uint64_t sequence,
                                  const std::vector<PrefixHash>& hashes) {
  const auto reserved = rank.run(rank.session().reserve(sequence, hashes));
  if (reserved.status != Status::ok)
    throw std::runtime_error("reserve: " + std::string(to_string(reserved.status)));
  std::uint32_t written = 0;
  const auto missing = static_cast<std::uint32_t>(hashes.size()) - reserved.hits;
  if (missing > 0) {
    const auto pages = TestRank::pages(0, missing);
    for (std::uint32_t i = 0; i < missing; ++i) rank.fill(pages[i], hashes[reserved.hits + i]);
    written = rank.run(rank.session().write(reserved.lease, reserved.hits, pages)).written;
  }
  rank.run(rank.session().release(reserved.lease));
  return written;
}

}  // namespace hicache::test
