// A rank's side of io_backend kernel, without a daemon: which requests it refuses, and that nothing is
// announced or written once the pool belongs to another daemon.
#include "libhicache/src/kernel/kernel_worker.hpp"

#include <sys/eventfd.h>

#include <cstring>
#include <vector>

#include "libhicache/src/kernel/host_page_mover.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache {
namespace {

constexpr std::uint64_t kEpoch = 77;
constexpr std::uint64_t kPoolBytes = 64 * 4096;
constexpr std::uint32_t kDevicePages = 8;

Mapping sealed(std::uint64_t bytes, UniqueFd* keep = nullptr) {
  UniqueFd fd = test::TestRank::take(create_sealed("kernel-worker-test", bytes));
  Mapping mapping = test::TestRank::take(Mapping::map(fd.get(), bytes, Mapping::Access::read_write));
  if (keep != nullptr) *keep = std::move(fd);
  return mapping;
}

// A session's memory, and the daemon's hand on the kernel block.
struct Rig {
  NamespaceSpec spec = test::small_spec(Attention::mha, 1);
  DeviceGeometry geometry = test::device_geometry(spec, kDevicePages);
  UniqueFd device_fd;
  Mapping device = sealed(geometry.allocations[0].bytes, &device_fd);
  Mapping pool = sealed(kPoolBytes);
  Mapping block_map = sealed(kKernelBlockBytes);
  Mapping channel_map = sealed(align_up(sizeof(ChannelHeader), 4096) + align_up(sizeof(FenceBlock), 4096));
  Mapping header_map = sealed(kHeaderBytes);
  UniqueFd news{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<KernelWorker> worker;

  Rig() {
    header().instance_epoch = kEpoch;
    const int fds[] = {device_fd.get()};
    auto mover = test::TestRank::take(
        HostPageMover::create(spec, geometry, fds, pool, fences(), PoolGuard(header(), kEpoch)));
    const KernelLimits limits{kPoolBytes, spec.shard_bytes(), kDevicePages, 0};
    worker = std::make_unique<KernelWorker>(std::move(mover), KernelRequests(block(), news.get(), limits),
                                            channel(), WaitPolicy{0, 100, 10});
    worker->start();
  }

  RegionHeader& header() { return *static_cast<RegionHeader*>(header_map.data()); }
  KernelBlock& block() { return *static_cast<KernelBlock*>(block_map.data()); }
  ChannelHeader& channel() { return *static_cast<ChannelHeader*>(channel_map.data()); }
  FenceBlock& fences() {
    return *reinterpret_cast<FenceBlock*>(static_cast<std::uint8_t*>(channel_map.data()) +
                                          align_up(sizeof(ChannelHeader), 4096));
  }
  std::uint8_t* shard(std::uint64_t page) { return static_cast<std::uint8_t*>(pool.data()) + page * 4096; }

  KernelSlot& request(bool loads, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& pages,
                      std::uint32_t fence = kNone32) {
    KernelSlot& slot = block().slots[first_kernel_slot(loads)];
    slot.pages = static_cast<std::uint32_t>(pages.size());
    slot.block_quota = 2;
    slot.fence = fence;
    slot.fence_value = 5;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      slot.page[i].pool_offset = pages[i].first;
      slot.page[i].device_page = pages[i].second;
      slot.page[i].state = kNone32;
    }
    return slot;
  }
  // Posts it and waits for its end.
  Status run(KernelSlot& slot, std::uint64_t number = 1) {
    slot.turn.store(kernel_turn(number, KernelTurn::posted));
    block().wake.fetch_add(1);
    REQUIRE(test::eventually([&] { return slot.ended.load() == number; }));
    CHECK(slot.turn.load() == kernel_turn(number, KernelTurn::taken));
    return static_cast<Status>(slot.status.load());
  }
};

}  // namespace

TEST_CASE("a kernel-mode rank moves what it is leased and announces layers in order") {
  Rig rig;
  std::memset(rig.device.data(), 3, rig.device.size());
  KernelSlot& write = rig.request(false, {{0, 1}, {4096, 2}});
  REQUIRE(rig.run(write) == Status::ok);
  CHECK(write.bytes == 2 * rig.spec.shard_bytes());
  CHECK(rig.shard(0)[0] == 3);
  CHECK(rig.shard(1)[rig.spec.shard_bytes() - 1] == 3);
  CHECK(rig.shard(1)[rig.spec.shard_bytes()] == 0);
  std::memset(rig.shard(1), 9, rig.spec.shard_bytes());
  REQUIRE(rig.run(rig.request(true, {{4096, 5}}, 2)) == Status::ok);
  for (std::uint32_t layer = 0; layer < rig.spec.layers; ++layer)
    CHECK(rig.fences().load[2].layer[layer] == 5);
  CHECK(rig.fences().load[2].failed == 0);
  for (const DeviceTensor& tensor : rig.geometry.tensors) {
    const auto* bytes = static_cast<const std::uint8_t*>(rig.device.data()) + tensor.offset;
    CHECK(bytes[4 * tensor.page_stride] == 3);
    CHECK(bytes[5 * tensor.page_stride] == 9);
    CHECK(bytes[6 * tensor.page_stride] == 3);
  }
}

TEST_CASE("a kernel-mode rank refuses requests for what is not there, and touches nothing") {
  Rig rig;
  std::uint64_t number = 0;
  const auto refused = [&](KernelSlot& slot) { return rig.run(slot, ++number) == Status::corrupt; };
  CHECK(refused(rig.request(false, {{kPoolBytes, 0}})));
  CHECK(refused(rig.request(false, {{kPoolBytes - 64, 0}})));
  CHECK(refused(rig.request(false, {{~0ull - 4095, 0}})));
  CHECK(refused(rig.request(false, {{64, 0}})));
  CHECK(refused(rig.request(false, {{0, kDevicePages}})));
  CHECK(refused(rig.request(false, {{0, kNone32}})));
  CHECK(refused(rig.request(false, {})));
  CHECK(refused(rig.request(false, {{0, 0}}, 1)));  // a layer fence of a write
  KernelSlot& states = rig.request(false, {{0, 0}});
  states.page[0].state = 0;
  CHECK(refused(states));
  KernelSlot& many = rig.request(false, {{0, 0}});
  many.pages = kMaxPagesPerOperation + 1;
  CHECK(refused(many));
  KernelSlot& none = rig.request(false, {{0, 0}});
  none.block_quota = 0;
  CHECK(refused(none));
  CHECK(rig.run(rig.request(true, {{0, 0}}, kProducerSlots), 1) == Status::corrupt);
  CHECK(rig.run(rig.request(false, {{0, 0}}), ++number) == Status::ok);
}

TEST_CASE("once another daemon has the region nothing of its pool is announced or written") {
  Rig rig;
  std::memset(rig.shard(0), 9, rig.spec.shard_bytes());
  std::memset(rig.device.data(), 3, rig.device.size());
  rig.header().instance_epoch = kEpoch + 1;
  CHECK(rig.run(rig.request(true, {{0, 1}}, 0)) == Status::daemon_lost);
  // Released, so that nobody hangs, and marked as failed before.
  CHECK(rig.fences().load[0].failed == 5);
  for (std::uint32_t layer = 0; layer < rig.spec.layers; ++layer)
    CHECK(rig.fences().load[0].layer[layer] == 5);
  CHECK(rig.run(rig.request(false, {{0, 1}})) == Status::daemon_lost);
  CHECK(rig.shard(0)[0] == 9);
}

TEST_CASE("a kernel-mode rank whose session has ended takes nothing more and is idle") {
  Rig rig;
  CHECK_FALSE(rig.worker->idle());
  rig.worker->end();
  REQUIRE(test::eventually([&] { return rig.worker->idle(); }));
  KernelSlot& slot = rig.request(false, {{0, 0}});
  slot.turn.store(kernel_turn(1, KernelTurn::posted));
  rig.worker.reset();
  CHECK(slot.turn.load() == kernel_turn(1, KernelTurn::posted));
}

}  // namespace hicache
