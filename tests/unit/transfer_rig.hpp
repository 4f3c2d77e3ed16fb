// What transfer tests share: ranks with device memory and fence words, a pool, and a sink that remembers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "daemon/transfer/transfer_engine.hpp"
#include "shm/clock.hpp"
#include "tests/support/catch.hpp"

namespace hicache::daemon {

struct RankShape {
  Attention attention = Attention::mha;
  std::uint32_t layers = 4;
  std::uint32_t piece_bytes = 2048;
  std::uint32_t device_pages = 64;
  bool separate = false;  // an allocation for each tensor, else one for all
};

// A rank's buffers and fence words, as the daemon would map them.
class TestRank {
 public:
  explicit TestRank(std::uint32_t slot, const RankShape& shape = {})
      : memory_(std::make_shared<RankMemory>()) {
    RankMemory& m = *memory_;
    m.client = ClientSlot{slot};
    m.client_generation = Generation{1};
    m.spec.attention = shape.attention;
    m.spec.layers = shape.layers;
    m.spec.page_tokens = 1;
    m.spec.heads_per_shard = 1;
    m.spec.head_dim = shape.piece_bytes;
    m.spec.element_bytes = 1;
    m.geometry.pages = shape.device_pages;
    const std::uint64_t tensor_bytes = std::uint64_t{shape.device_pages} * shape.piece_bytes;
    std::uint32_t tensors = 0;
    for (std::uint32_t kind = 0; kind < m.spec.kinds(); ++kind) {
      for (std::uint32_t layer = 0; layer < shape.layers; ++layer, ++tensors) {
        DeviceTensor t;
        t.allocation = shape.separate ? tensors : 0;
        t.offset = shape.separate ? 0 : tensors * tensor_bytes;
        t.layer = layer;
        t.kind = m.spec.kinds() == 1 ? TensorKind::latent : static_cast<TensorKind>(kind);
        t.page_stride = shape.piece_bytes;
        t.page_bytes = shape.piece_bytes;
        m.geometry.tensors.push_back(t);
      }
    }
    const std::uint32_t allocations = shape.separate ? tensors : 1;
    for (std::uint32_t i = 0; i < allocations; ++i) {
      m.geometry.allocations.push_back({DeviceKind::host, tensor_bytes * tensors / allocations});
      m.allocations.push_back(map_memory(m.geometry.allocations.back().bytes));
    }
    m.channel = std::make_shared<Mapping>(map_memory(sizeof(FenceBlock)));
    m.fences = new (m.channel->data()) FenceBlock{};
  }

  [[nodiscard]] const std::shared_ptr<RankMemory>& memory() const { return memory_; }
  [[nodiscard]] FenceBlock& fences() const { return *memory_->fences; }
  [[nodiscard]] LayerFences& layers(std::uint32_t slot) const { return memory_->fences->load[slot]; }
  [[nodiscard]] std::uint64_t shard_bytes() const { return memory_->spec.shard_bytes(); }

  // Fills a device page with bytes that depend on `key`, tensor and offset.
  void fill(std::uint32_t page, std::uint32_t key) const {
    for (const auto& t : memory_->geometry.tensors) {
      std::uint8_t* at = piece(t, page);
      for (std::uint64_t i = 0; i < t.page_bytes; ++i) at[i] = byte_of(key, t, i);
    }
  }
  void poison(std::uint32_t page) const {
    for (const auto& t : memory_->geometry.tensors) std::memset(piece(t, page), 0xee, t.page_bytes);
  }
  [[nodiscard]] bool holds(std::uint32_t page, std::uint32_t key) const {
    bool right = true;
    for (const auto& t : memory_->geometry.tensors) right = right && layer_holds(t, piece(t, page), key);
    return right;
  }
  // The same for a host page that begins at `host`.
  [[nodiscard]] bool host_holds(const std::uint8_t* host, std::uint32_t key) const {
    bool right = true;
    for (const auto& t : memory_->geometry.tensors) {
      right = right && layer_holds(t, host + shard_piece_offset(memory_->spec, t.layer, t.kind), key);
    }
    return right;
  }

 private:
  static Mapping map_memory(std::uint64_t bytes) {
    auto fd = create_sealed("transfer_test", bytes);
    REQUIRE(fd.ok());
    auto mapping = Mapping::map(fd->get(), bytes, Mapping::Access::read_write);
    REQUIRE(mapping.ok());
    return std::move(*mapping);
  }
  static std::uint8_t byte_of(std::uint32_t key, const DeviceTensor& t, std::uint64_t i) {
    return static_cast<std::uint8_t>(key * 31 + t.layer * 7 + static_cast<std::uint32_t>(t.kind) * 101 +
                                     i * 13);
  }
  static bool layer_holds(const DeviceTensor& t, const std::uint8_t* at, std::uint32_t key) {
    for (std::uint64_t i = 0; i < t.page_bytes; ++i) {
      if (at[i] != byte_of(key, t, i)) return false;
    }
    return true;
  }
  [[nodiscard]] std::uint8_t* piece(const DeviceTensor& t, std::uint32_t page) const {
    return static_cast<std::uint8_t*>(memory_->allocations[t.allocation].data()) + t.offset +
           page * t.page_stride;
  }

  std::shared_ptr<RankMemory> memory_;
};

// Remembers what the engine reported.
class Results {
 public:
  void add(const TransferDone& done) {
    const std::lock_guard lock(mutex_);
    ++count_[done.id.value];
    done_[done.id.value] = done;
    changed_.notify_all();
  }
  // Waits for a transfer's end; a generous time-out turns a hang into a failure.
  TransferDone wait(std::uint64_t id) {
    std::unique_lock lock(mutex_);
    const bool came = changed_.wait_for(lock, std::chrono::seconds(60), [&] { return done_.count(id) != 0; });
    if (!came) return TransferDone{TransferId{id}, Status::again, 0};
    return done_[id];
  }
  bool has(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    return done_.count(id) != 0;
  }
  // How often the sink was told about it.
  int times(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    return count_[id];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, TransferDone> done_;
  std::map<std::uint64_t, int> count_;
};

// A backend that asks a function before every run; the host backend copies when the answer is ok.
class AskingBackend final : public DeviceBackend {
 public:
  using Ask = std::function<Status(const RankMemory&, Direction, const CopyRun&)>;
  AskingBackend(std::unique_ptr<DeviceBackend> inner, Ask ask)
      : inner_(std::move(inner)), ask_(std::move(ask)) {}
  Status copy(const RankMemory& memory, Direction direction, const CopyRun& run) override {
    const Status status = ask_(memory, direction, run);
    return status == Status::ok ? inner_->copy(memory, direction, run) : status;
  }

 private:
  std::unique_ptr<DeviceBackend> inner_;
  Ask ask_;
};

// A door that holds callers back until it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  // Waits until somebody stands at the gate.
  void wait_for_caller() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

// A pool and an engine over it.
struct TransferRig {
  explicit TransferRig(std::uint32_t threads = 1, std::uint64_t pool_bytes = 8 * kMiB,
                       const AskingBackend::Ask& ask = nullptr)
      : pool(pool_bytes) {
    TransferOptions options;
    options.threads = threads;
    options.border_bytes = kMiB;
    options.pool_bytes = pool_bytes;
    auto backend = make_host_backend(pool.data(), pool_bytes);
    if (ask) backend = std::make_unique<AskingBackend>(std::move(backend), ask);
    engine = std::make_unique<TransferEngine>(options, std::move(backend),
                                              [this](const TransferDone& done) { results.add(done); });
  }

  std::vector<std::uint8_t> pool;
  Results results;
  std::unique_ptr<TransferEngine> engine;
};

// Device pages from `device` on, and host pages of the rank's shard from number `host` on.
inline std::vector<PagePair> page_pairs(const TestRank& rank, std::uint32_t count, std::uint32_t device,
                                        std::uint32_t host) {
  std::vector<PagePair> pages;
  const std::uint64_t slot = align_up(rank.shard_bytes(), kPoolAlignment);
  for (std::uint32_t i = 0; i < count; ++i)
    pages.push_back({DevicePage{device + i}, PoolOffset{(host + i) * slot}});
  return pages;
}

inline Transfer make_transfer(std::uint64_t id, const TestRank& rank, Direction direction,
                              std::vector<PagePair> pages) {
  Transfer t;
  t.id = TransferId{id};
  t.memory = rank.memory();
  t.direction = direction;
  t.pages = std::move(pages);
  return t;
}

// With a fence: the write waits for it, or the load announces its layers there.
inline Transfer fenced(Transfer t, std::uint32_t fence, std::uint32_t value) {
  t.fence = fence;
  t.fence_value = value;
  return t;
}

}  // namespace hicache::daemon
