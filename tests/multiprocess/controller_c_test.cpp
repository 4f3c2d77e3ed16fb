// The controller through its C interface: what a scheduler in another language does with a request.
#include "hicache/hicache_controller.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "hicache/client.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPages = 16;
constexpr std::uint32_t kPageTokens = 4;
constexpr std::uint32_t kPieceBytes = kPageTokens * 16 * 2;

class CRank {
 public:
  explicit CRank(const TestDaemon& daemon) {
    spec_.struct_size = sizeof spec_;
    spec_.attention = HICACHE_ATTENTION_MLA;
    spec_.model = "c-model";
    spec_.dtype = "bfloat16";
    spec_.page_tokens = kPageTokens;
    spec_.layers = 2;
    spec_.heads_per_shard = 1;
    spec_.head_dim = 16;
    spec_.element_bytes = 2;
    spec_.tp_size = 1;
    session = attach(daemon, HICACHE_ROLE_RANK);
    REQUIRE(hicache_buffer_create(2ull * kPages * kPieceBytes, &buffer_) == HICACHE_OK);
    const hicache_allocation allocation{hicache_buffer_fd(buffer_), 0, hicache_buffer_size(buffer_)};
    std::vector<hicache_tensor> tensors;
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      tensors.push_back({0, layer, HICACHE_TENSOR_LATENT, 0, std::uint64_t{layer} * kPages * kPieceBytes,
                         kPieceBytes, kPieceBytes});
    }
    REQUIRE(hicache_register_buffers(session, &allocation, 1, tensors.data(), 2, kPages, 10'000) ==
            HICACHE_OK);
  }
  ~CRank() {
    hicache_controller_destroy(controller);
    hicache_session_destroy(session);
    hicache_buffer_destroy(buffer_);
  }
  CRank(const CRank&) = delete;
  CRank& operator=(const CRank&) = delete;

  hicache_session* attach_scheduler(const TestDaemon& daemon) {
    return attach(daemon, HICACHE_ROLE_SCHEDULER);
  }
  hicache_controller_options options() const {
    hicache_controller_options o{};
    o.struct_size = sizeof o;
    o.device_tokens = kPages * kPageTokens;
    o.host_tokens = 256;
    o.load_back_threshold = 4;
    o.pinnable_tokens = 8;
    return o;
  }
  hicache_status create(const hicache_controller_options& o) {
    return hicache_controller_create(session, &spec_, &o, &controller);
  }
  std::uint8_t* piece(std::uint64_t slot, std::uint32_t layer) {
    return static_cast<std::uint8_t*>(hicache_buffer_data(buffer_)) +
           (layer * kPages + slot / kPageTokens) * kPieceBytes;
  }
  void settle(std::uint32_t operations) {
    REQUIRE(eventually([&] {
      std::uint32_t ended = 0;
      REQUIRE(hicache_controller_check_events(controller, &ended) == HICACHE_OK);
      operations -= std::min(operations, ended);
      return operations == 0;
    }));
  }

  hicache_session* session = nullptr;
  hicache_controller* controller = nullptr;

 private:
  hicache_session* attach(const TestDaemon& daemon, hicache_role role) {
    hicache_attach_options options{};
    options.struct_size = sizeof options;
    options.role = role;
    options.socket_path = daemon.socket_path().c_str();
    options.engine = "c";
    options.spec = &spec_;
    hicache_session* attached = nullptr;
    REQUIRE(hicache_attach(&options, &attached) == HICACHE_OK);
    return attached;
  }

  hicache_namespace spec_{};
  hicache_buffer* buffer_ = nullptr;
};

std::string last_error() {
  return hicache_last_error();
}

}  // namespace

TEST_CASE("a request goes through the C interface: insert, evict, load back, and its bytes are there") {
  const TestDaemon daemon;
  CRank rank(daemon);
  REQUIRE(rank.create(rank.options()) == HICACHE_OK);
  hicache_controller* c = rank.controller;
  const std::uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  hicache_hash hashes[3];
  REQUIRE(hicache_hash_chain(tokens, 12, kPageTokens, nullptr, hashes) == HICACHE_OK);

  std::vector<std::uint64_t> slots(12);
  REQUIRE(hicache_controller_alloc(c, 12, slots.data()) == HICACHE_OK);
  for (std::size_t i = 0; i < 12; i += kPageTokens) {
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      std::memset(rank.piece(slots[i], layer), static_cast<int>(0x10 * (layer + 1) + i), kPieceBytes);
    }
  }
  std::int64_t node = 0;
  std::vector<std::uint64_t> duplicates(12);
  std::size_t duplicate_count = 99;
  REQUIRE(hicache_controller_insert(c, hashes, 3, slots.data(), 12, 0, &node, duplicates.data(),
                                    &duplicate_count) == HICACHE_OK);
  CHECK(duplicate_count == 0);
  rank.settle(1);
  hicache_match match{};
  match.struct_size = sizeof match;
  std::vector<std::uint64_t> found(12);
  REQUIRE(hicache_controller_match(c, hashes, 3, &match, found.data(), 12) == HICACHE_OK);
  CHECK((match.device_tokens == 12 && match.device_node == node && found == slots));
  CHECK(hicache_controller_match(c, hashes, 3, &match, found.data(), 11) == HICACHE_TOO_LARGE);

  REQUIRE(hicache_controller_lock(c, node) == HICACHE_OK);
  std::uint64_t freed = 1;
  REQUIRE(hicache_controller_evict(c, 12, &freed) == HICACHE_OK);
  CHECK(freed == 0);
  REQUIRE(hicache_controller_unlock(c, node) == HICACHE_OK);
  CHECK(hicache_controller_unlock(c, node) == HICACHE_ALREADY_RELEASED);
  REQUIRE(hicache_controller_evict(c, 12, &freed) == HICACHE_OK);
  CHECK(freed == 12);
  // Whatever was there is gone: other data lies in all device pages.
  for (std::uint64_t page = 0; page < kPages; ++page) {
    for (std::uint32_t layer = 0; layer < 2; ++layer)
      std::memset(rank.piece(page * 4, layer), 0xee, kPieceBytes);
  }
  REQUIRE(hicache_controller_match(c, hashes, 3, &match, nullptr, 0) == HICACHE_OK);
  CHECK((match.device_tokens == 0 && match.host_tokens == 12));
  std::size_t count = 0;
  std::int64_t end = 0;
  CHECK(hicache_controller_load_back(c, match.host_node, 11, slots.data(), &count, &end) ==
        HICACHE_TOO_LARGE);
  REQUIRE(hicache_controller_load_back(c, match.host_node, 12, slots.data(), &count, &end) == HICACHE_OK);
  CHECK(count == 12);
  std::int32_t producer = -2;
  REQUIRE(hicache_controller_start_loading(c, &producer) == HICACHE_OK);
  CHECK(producer == 0);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    REQUIRE(hicache_controller_wait_layer(c, producer, layer, kPatienceMs) == HICACHE_OK);
    for (std::size_t i = 0; i < 12; i += kPageTokens) {
      const std::uint8_t* bytes = rank.piece(slots[i], layer);
      CHECK(std::all_of(bytes, bytes + kPieceBytes,
                        [&](std::uint8_t b) { return b == 0x10 * (layer + 1) + i; }));
    }
  }
  rank.settle(1);
  REQUIRE(hicache_controller_start_loading(c, &producer) == HICACHE_OK);
  CHECK(producer == -1);
  CHECK(hicache_controller_wait_layer(c, -1, 5, 0) == HICACHE_OK);
  CHECK(hicache_controller_wait_layer(c, 3, 0, 0) == HICACHE_INVALID_ARGUMENT);

  REQUIRE(hicache_controller_pin(c, hashes, 2, 10) == HICACHE_OK);
  CHECK(hicache_controller_pin(c, hashes, 3, 10) == HICACHE_NO_SPACE);
  REQUIRE(hicache_controller_evict(c, 12, &freed) == HICACHE_OK);
  CHECK(freed == 4);
  REQUIRE(hicache_controller_expire_pins(c, 10) == HICACHE_OK);
  REQUIRE(hicache_controller_evict(c, 12, &freed) == HICACHE_OK);
  CHECK(freed == 8);
  REQUIRE(hicache_controller_evict_host(c, 100, &freed) == HICACHE_OK);
  CHECK(freed == 12);
  // The handles are gone, the pool's pages are not.
  std::uint64_t adopted = 0;
  REQUIRE(hicache_controller_adopt(c, hashes, 3, &adopted) == HICACHE_OK);
  CHECK(adopted == 12);
  REQUIRE(hicache_controller_reset(c) == HICACHE_OK);
  std::vector<std::uint64_t> all(kPages * kPageTokens);
  CHECK(hicache_controller_alloc(c, all.size(), all.data()) == HICACHE_OK);
  CHECK(hicache_controller_free(c, all.data(), all.size()) == HICACHE_OK);
  CHECK(hicache_controller_free(c, all.data(), 4) == HICACHE_ALREADY_RELEASED);
}

TEST_CASE("the C interface refuses what makes no sense, and says what") {
  const TestDaemon daemon;
  CRank rank(daemon);
  auto o = rank.options();
  o.write_policy = "write_around";
  CHECK(rank.create(o) == HICACHE_INVALID_ARGUMENT);
  CHECK(last_error().find("Invalid write policy: write_around") != std::string::npos);
  o = rank.options();
  o.eviction_policy = "fifo";
  CHECK(rank.create(o) == HICACHE_INVALID_ARGUMENT);
  o = rank.options();
  o.device_tokens = 5;
  CHECK(rank.create(o) == HICACHE_INVALID_ARGUMENT);
  o = rank.options();
  o.struct_size = 8;
  CHECK(rank.create(o) == HICACHE_INVALID_ARGUMENT);
  CHECK(rank.controller == nullptr);
  CHECK(hicache_controller_check_events(nullptr, nullptr) == HICACHE_INVALID_ARGUMENT);
  CHECK(last_error().find("controller is NULL") != std::string::npos);
  REQUIRE(rank.create(rank.options()) == HICACHE_OK);
  CHECK(hicache_controller_set_start_fence(rank.controller, 64, 1) == HICACHE_INVALID_ARGUMENT);
  CHECK(hicache_controller_set_start_fence(rank.controller, 63, 1) == HICACHE_OK);
  CHECK(hicache_controller_set_start_fence(rank.controller, HICACHE_NO_FENCE, 0) == HICACHE_OK);
  CHECK(hicache_controller_lock(rank.controller, 77) == HICACHE_NOT_FOUND);
  CHECK(hicache_controller_match(rank.controller, nullptr, 1, nullptr, nullptr, 0) ==
        HICACHE_INVALID_ARGUMENT);
}

TEST_CASE("pages come back from storage through the C interface") {
  const TestDaemon daemon(R"({"storage": {"backend": "memory", "prefetch_threshold_tokens": 0}})");
  const auto ask = [&](const std::vector<std::string>& words) {
    REQUIRE(control(daemon.socket_path(), words, kPatienceMs).ok());
  };
  CRank rank(daemon);
  REQUIRE(rank.create(rank.options()) == HICACHE_OK);
  hicache_controller* c = rank.controller;
  const std::uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8};
  hicache_hash hashes[2];
  REQUIRE(hicache_hash_chain(tokens, 8, kPageTokens, nullptr, hashes) == HICACHE_OK);
  std::vector<std::uint64_t> slots(8);
  REQUIRE(hicache_controller_alloc(c, 8, slots.data()) == HICACHE_OK);
  for (std::size_t i = 0; i < 8; i += kPageTokens) {
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      std::memset(rank.piece(slots[i], layer), static_cast<int>(0x10 * (layer + 1) + i), kPieceBytes);
    }
  }
  std::int64_t node = 0;
  std::vector<std::uint64_t> duplicates(8);
  std::size_t duplicate_count = 0;
  REQUIRE(hicache_controller_insert(c, hashes, 2, slots.data(), 8, 0, &node, duplicates.data(),
                                    &duplicate_count) == HICACHE_OK);
  rank.settle(1);
  ask({"storage", "sync"});
  // Nothing is left but what storage has.
  REQUIRE(hicache_controller_reset(c) == HICACHE_OK);
  ask({"clear"});

  int ended = 0;
  std::uint64_t added = 0;
  CHECK(hicache_controller_check_prefetch_progress(c, "none", &ended, nullptr) == HICACHE_OK);
  CHECK(ended == 1);
  CHECK(hicache_controller_prefetch(c, "request", hashes, 2, 7) == HICACHE_INVALID_ARGUMENT);
  CHECK(last_error().find("policy is 7") != std::string::npos);
  REQUIRE(hicache_controller_prefetch(c, "request", hashes, 2, HICACHE_PREFETCH_WAIT_COMPLETE) == HICACHE_OK);
  CHECK(hicache_controller_prefetch(c, "request", hashes, 2, HICACHE_PREFETCH_DEFAULT) == HICACHE_EXISTS);
  for (ended = 0; ended == 0;) {
    REQUIRE(hicache_controller_check_prefetch_progress(c, "request", &ended, &added) == HICACHE_OK);
  }
  CHECK(added == 8);
  hicache_match match{};
  match.struct_size = sizeof match;
  REQUIRE(hicache_controller_match(c, hashes, 2, &match, nullptr, 0) == HICACHE_OK);
  CHECK(match.host_tokens == 8);
  std::size_t count = 8;
  std::vector<std::uint64_t> loaded(64);
  REQUIRE(hicache_controller_load_back(c, match.host_node, 64, loaded.data(), &count, &node) == HICACHE_OK);
  REQUIRE(count == 8);
  std::int32_t producer = -1;
  REQUIRE(hicache_controller_start_loading(c, &producer) == HICACHE_OK);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    REQUIRE(hicache_controller_wait_layer(c, producer, layer, 10'000) == HICACHE_OK);
    for (std::size_t i = 0; i < 8; i += kPageTokens) {
      CHECK(rank.piece(loaded[i], layer)[0] == 0x10 * (layer + 1) + i);
      CHECK(rank.piece(loaded[i], layer)[kPieceBytes - 1] == 0x10 * (layer + 1) + i);
    }
  }
  rank.settle(1);
  REQUIRE(hicache_controller_prefetch(c, "other", hashes, 2, HICACHE_PREFETCH_DEFAULT) == HICACHE_OK);
  CHECK(hicache_controller_terminate_prefetch(c, "other", &added) == HICACHE_OK);
  CHECK(hicache_controller_release_aborted_request(c, "other") == HICACHE_OK);
  CHECK(hicache_controller_release_aborted_request(c, nullptr) == HICACHE_INVALID_ARGUMENT);
}

TEST_CASE("AC-61 an engine reads the acks of its backups through the C interface, each once") {
  const TestDaemon daemon(R"({"storage": {"backend": "memory"}})");
  CRank rank(daemon);
  auto o = rank.options();
  o.backup_acks = 4;
  REQUIRE(rank.create(o) == HICACHE_OK);
  hicache_controller* c = rank.controller;
  const std::uint32_t tokens[] = {5, 6, 7, 8, 5, 6, 7, 9};
  hicache_hash hashes[2];
  REQUIRE(hicache_hash_chain(tokens, 8, kPageTokens, nullptr, hashes) == HICACHE_OK);
  std::vector<std::uint64_t> device(8);
  std::vector<std::uint64_t> host(8);
  REQUIRE(hicache_controller_alloc(c, 8, device.data()) == HICACHE_OK);
  REQUIRE(hicache_controller_write(c, device.data(), 8, hashes, 2, -7, host.data()) == HICACHE_OK);
  hicache_ack ack{};
  std::size_t count = 0;
  CHECK(hicache_controller_take_backup_acks(c, nullptr, 1, &count) == HICACHE_INVALID_ARGUMENT);
  REQUIRE(eventually([&] {
    REQUIRE(hicache_controller_take_backup_acks(c, &ack, 1, &count) == HICACHE_OK);
    return count == 1;
  }));
  CHECK((ack.kind == HICACHE_ACK_BACKUP && ack.status == HICACHE_OK && ack.node == -7));
  CHECK((ack.tokens == 8 && ack.host_tokens == 8 && ack.sequence == 1));
  REQUIRE(hicache_controller_take_backup_acks(c, &ack, 1, &count) == HICACHE_OK);
  CHECK(count == 0);
}

TEST_CASE("an engine's scheduler pins prefixes in the pool through the C interface") {
  const TestDaemon daemon;
  CRank rank(daemon);
  REQUIRE(rank.create(rank.options()) == HICACHE_OK);
  const std::uint32_t tokens[] = {1, 2, 3, 4, 1, 2, 3, 5};
  hicache_hash hashes[2];
  REQUIRE(hicache_hash_chain(tokens, 8, kPageTokens, nullptr, hashes) == HICACHE_OK);
  std::vector<std::uint64_t> device(8);
  std::vector<std::uint64_t> host(8);
  REQUIRE(hicache_controller_alloc(rank.controller, 8, device.data()) == HICACHE_OK);
  REQUIRE(hicache_controller_write(rank.controller, device.data(), 8, hashes, 2, -7, host.data()) ==
          HICACHE_OK);
  rank.settle(1);
  hicache_session* scheduler = rank.attach_scheduler(daemon);
  hicache_pool_pins* pins = nullptr;
  CHECK(hicache_pool_pins_create(nullptr, 4, 0, &pins) == HICACHE_INVALID_ARGUMENT);
  CHECK(hicache_pool_pins_create(scheduler, 4, 0, nullptr) == HICACHE_INVALID_ARGUMENT);
  REQUIRE(hicache_pool_pins_create(scheduler, 2, 0, &pins) == HICACHE_OK);
  std::uint32_t pinned = 0;
  REQUIRE(hicache_pool_pins_pin(pins, hashes, 2, 100, &pinned) == HICACHE_OK);
  CHECK(pinned == 2);
  CHECK(hicache_pool_pins_pin(pins, nullptr, 2, 100, nullptr) == HICACHE_INVALID_ARGUMENT);
  CHECK(hicache_pool_pins_pin(nullptr, hashes, 2, 100, nullptr) == HICACHE_INVALID_ARGUMENT);
  // Whatever is evicted now, these two are not.
  TestRank::take(control(daemon.socket_path(), {"clear"}));
  std::uint32_t leading = 0;
  REQUIRE(hicache_probe(scheduler, hashes, 2, &leading, nullptr) == HICACHE_OK);
  CHECK(leading == 2);
  std::uint64_t left = 9;
  REQUIRE(hicache_pool_pins_expire(pins, 99, &left) == HICACHE_OK);
  CHECK(left == 2);
  REQUIRE(hicache_pool_pins_expire(pins, 100, &left) == HICACHE_OK);
  CHECK(left == 0);
  TestRank::take(control(daemon.socket_path(), {"clear"}));
  REQUIRE(hicache_probe(scheduler, hashes, 2, &leading, nullptr) == HICACHE_OK);
  CHECK(leading == 0);
  CHECK(hicache_pool_pins_pin(pins, hashes, 2, 100, nullptr) == HICACHE_NOT_FOUND);
  hicache_pool_pins_destroy(pins);
  hicache_session_destroy(scheduler);
}

TEST_CASE("an engine with a tree of its own writes, holds and loads through the C interface") {
  const TestDaemon daemon;
  CRank rank(daemon);
  REQUIRE(rank.create(rank.options()) == HICACHE_OK);
  hicache_controller* c = rank.controller;
  const std::uint32_t tokens[] = {9, 8, 7, 6, 5, 4, 3, 2};
  hicache_hash hashes[2];
  REQUIRE(hicache_hash_chain(tokens, 8, kPageTokens, nullptr, hashes) == HICACHE_OK);
  std::vector<std::uint64_t> device(8);
  std::vector<std::uint64_t> host(8);
  REQUIRE(hicache_controller_alloc(c, 8, device.data()) == HICACHE_OK);
  std::memset(rank.piece(device[0], 0), 0x11, kPieceBytes);
  std::memset(rank.piece(device[4], 1), 0x22, kPieceBytes);
  REQUIRE(hicache_controller_write(c, device.data(), 8, hashes, 2, -7, host.data()) == HICACHE_OK);
  const auto state = [&] {
    std::uint32_t found = 99;
    REQUIRE(hicache_controller_host_page_state(c, host.data(), 8, &found) == HICACHE_OK);
    return found;
  };
  CHECK(state() == HICACHE_HOST_PAGE_PROTECTED);
  const auto next_ack = [&] {
    hicache_ack ack{};
    std::size_t count = 0;
    REQUIRE(eventually([&] {
      REQUIRE(hicache_controller_take_acks(c, &ack, 1, &count) == HICACHE_OK);
      return count == 1;
    }));
    return ack;
  };
  const hicache_ack written = next_ack();
  CHECK((written.kind == HICACHE_ACK_WRITE && written.status == HICACHE_OK && written.node == -7));
  CHECK((written.host_tokens == 8 && written.sequence == 1));
  CHECK(state() == HICACHE_HOST_PAGE_SYNCED);
  // What is synced is no backup yet: refused, counted, and nothing has changed.
  CHECK(hicache_controller_evict_host_slots(c, host.data(), 8) == HICACHE_INVALID_ARGUMENT);
  CHECK(last_error().find("Inconsistent states") != std::string::npos);
  REQUIRE(hicache_controller_evict_device_slots(c, device.data(), 8, host.data(), 8) == HICACHE_OK);
  CHECK(state() == HICACHE_HOST_PAGE_BACKUP);
  CHECK(hicache_controller_evict_device_slots(c, device.data(), 8, host.data(), 8) ==
        HICACHE_INVALID_ARGUMENT);
  std::uint64_t pages[5] = {};
  std::uint64_t refused = 0;
  REQUIRE(hicache_controller_host_pages(c, pages, &refused) == HICACHE_OK);
  CHECK((pages[HICACHE_HOST_PAGE_IDLE] == 62 && pages[HICACHE_HOST_PAGE_BACKUP] == 2 && refused == 2));

  hicache_hold hold{};
  hold.struct_size = sizeof hold;
  REQUIRE(hicache_controller_hold(c, host.data(), 8, &hold) == HICACHE_OK);
  CHECK((hold.tokens == 8 && hold.present_tokens == 8 && hold.lease != 0));
  REQUIRE(hicache_controller_let_go(c, &hold) == HICACHE_OK);
  REQUIRE(hicache_controller_hold(c, host.data(), 8, &hold) == HICACHE_OK);
  std::vector<std::uint64_t> back(8);
  CHECK(hicache_controller_load(c, &hold, host.data(), 9, -8, back.data()) == HICACHE_INVALID_ARGUMENT);
  REQUIRE(hicache_controller_load(c, &hold, host.data(), 8, -8, back.data()) == HICACHE_OK);
  std::int32_t producer = -1;
  REQUIRE(hicache_controller_start_loading(c, &producer) == HICACHE_OK);
  REQUIRE(hicache_controller_wait_layer(c, producer, 1, 10'000) == HICACHE_OK);
  CHECK(rank.piece(back[0], 0)[5] == 0x11);
  CHECK(rank.piece(back[4], 1)[5] == 0x22);
  const hicache_ack loaded = next_ack();
  CHECK((loaded.kind == HICACHE_ACK_LOAD && loaded.node == -8 && loaded.tokens == 8));
  CHECK(state() == HICACHE_HOST_PAGE_SYNCED);
}

}  // namespace hicache::test
