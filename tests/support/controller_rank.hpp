// A rank with a controller and a prefix tree on it, and memory that several rank processes share.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "hicache/controller/controller.hpp"
#include "hicache/controller/prefix_tree.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {

struct ControllerRank {
  ControllerRank(const TestDaemon& daemon, std::uint32_t tp_rank, const NamespaceSpec& spec,
                 PrefixTreeOptions tree_options = {}, std::uint32_t deadline_ms = 0,
                 std::uint64_t host_tokens = 4096, const std::string& engine = "engine",
                 std::uint32_t backup_acks = 0)
      : rank(daemon, engine, tp_rank, spec),
        device(TestRank::take(
            TokenSlots::create(std::uint64_t{TestRank::kDevicePages} * spec.page_tokens, spec.page_tokens))) {
    ControllerOptions options;
    options.spec = spec;
    options.host_tokens = host_tokens;
    options.deadline_ms = deadline_ms;
    options.answer_timeout_ms = kPatienceMs;
    options.backup_acks = backup_acks;
    controller = TestRank::take(HiCacheController::create(rank.session(), *device, options));
    tree_options.page_tokens = spec.page_tokens;
    tree = std::make_unique<PrefixTree>(tree_options, *controller);
    page_tokens = spec.page_tokens;
  }

  // Device slots with the KV data of these pages in them.
  std::vector<std::uint64_t> compute(std::span<const PrefixHash> hashes) {
    auto slots = TestRank::take(device->alloc(hashes.size() * page_tokens));
    for (std::size_t i = 0; i < hashes.size(); ++i) rank.fill(page_of(slots, i), hashes[i]);
    return slots;
  }
  bool holds(const std::vector<std::uint64_t>& slots, std::span<const PrefixHash> hashes) {
    for (std::size_t i = 0; i * page_tokens < slots.size(); ++i) {
      if (!rank.holds(page_of(slots, i), hashes[i])) return false;
    }
    return true;
  }
  void spoil(const std::vector<std::uint64_t>& slots) {
    for (std::size_t i = 0; i * page_tokens < slots.size(); ++i) rank.spoil(page_of(slots, i));
  }
  DevicePage page_of(const std::vector<std::uint64_t>& slots, std::size_t page) const {
    return DevicePage{static_cast<std::uint32_t>(slots[page * page_tokens] / page_tokens)};
  }
  // Calls check_events until `count` acks have come; throws on an error.
  std::vector<HiCacheAck> acks(std::size_t count) {
    std::vector<HiCacheAck> all;
    while (all.size() < count) {
      for (HiCacheAck& ack : TestRank::take(controller->check_events())) all.push_back(std::move(ack));
      ++checks;
    }
    return all;
  }

  TestRank rank;
  std::unique_ptr<TokenSlots> device;
  std::unique_ptr<HiCacheController> controller;
  std::unique_ptr<PrefixTree> tree;
  std::uint32_t page_tokens = 0;
  std::uint64_t checks = 0;
};

// An object that forked children share with their parent.
template <class T>
class Shared {
 public:
  Shared() {
    void* place = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) throw std::runtime_error("mmap");
    object_ = new (place) T();
  }
  ~Shared() { ::munmap(object_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }

 private:
  T* object_;
};

}  // namespace hicache::test
