// The parts of the controller that need no daemon: operations, layer events, index lists, page states, sizes.
#include "hicache/controller/cache_operation.hpp"
#include "hicache/controller/host_page_states.hpp"
#include "hicache/controller/host_pool_size.hpp"
#include "hicache/controller/layer_events.hpp"
#include "hicache/controller/move_indices.hpp"
#include "shm/prefix_hash.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

#include <filesystem>
#include <numeric>
#include <thread>

namespace hicache::test {
namespace {

using Slots = std::vector<std::uint64_t>;

Slots range(std::uint64_t first, std::uint64_t count) {
  Slots out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

CacheOperationPtr operation(std::int64_t priority, Slots host, Slots device, std::int64_t node,
                            OperationKind kind = OperationKind::write) {
  return std::make_unique<CacheOperation>(kind, std::move(host), std::move(device), node, priority);
}

HostPoolSize sized(const HostPoolRequest& request) {
  const auto size = size_host_pool(request);
  REQUIRE(size.ok());
  return *size;
}

}  // namespace

TEST_CASE("AC-19 an absolute host size is rounded down to whole pages") {
  HostPoolRequest request;
  request.bytes = 30'000'000'000;
  request.bytes_per_token = 131072;
  request.page_tokens = 64;
  CHECK(sized(request).tokens == 228864);
  CHECK(sized(request).pages == 3576);
  CHECK(sized(request).bytes <= request.bytes);
}

TEST_CASE("AC-20 a host size that is aligned already gets no extra page, and ranks share one copy") {
  HostPoolRequest request;
  request.bytes = 40'000'000'000;
  request.bytes_per_token = 70272;
  request.page_tokens = 64;
  CHECK(sized(request).tokens == 569216);
  NamespaceSpec spec;
  spec.attention = Attention::mla;
  spec.page_tokens = 64;
  spec.layers = 61;
  spec.heads_per_shard = 1;
  spec.head_dim = 576;
  spec.element_bytes = 2;
  spec.tp_size = 8;
  CHECK(bytes_per_token(spec, true) == 70272);
  CHECK(bytes_per_token(spec, true) == bytes_per_token(spec, false));
  // One copy for all ranks, and no page more than asked for (the seed system takes 40,004,444,160 bytes).
  CHECK(sized(request).bytes == 569216ull * 70272);
  CHECK(sized(request).bytes <= request.bytes);
}

TEST_CASE("AC-21 a host size by ratio is rounded down") {
  HostPoolRequest request;
  request.bytes_per_token = 1;
  request.page_tokens = 64;
  request.device_tokens = 10000;
  CHECK(sized(request).tokens == 19968);
  request.device_tokens = 6400;
  CHECK(sized(request).tokens == 12800);
  CHECK_FALSE(sized(request).smaller_than_device);
  request.ratio = 1.0;
  CHECK(sized(request).smaller_than_device);
  request.ratio = 0.001;
  CHECK(size_host_pool(request).status() == Status::invalid_argument);
}

TEST_CASE("AC-22 the memory guard keeps ten gibibytes for the system") {
  CHECK(check_host_memory(10 * kGiB, 20 * kGiB).ok());
  const auto refused = check_host_memory(10 * kGiB + 1, 20 * kGiB);
  CHECK(refused.status() == Status::no_space);
  CHECK(refused.error().message.find("Not enough host memory available. Requesting 10737418241") == 0);
  CHECK(check_host_memory(1, 10 * kGiB).status() == Status::no_space);
}

TEST_CASE("AC-23 the budget of a rank is its share of what is available") {
  CHECK(host_memory_budget(512 * kGiB, 1) == 539018395648);
  CHECK(host_memory_budget(512 * kGiB, 2) == 269509197824);
  CHECK(host_memory_budget(512 * kGiB, 8) == 67377299456);
}

TEST_CASE("available memory is what the machine has, or what the tightest control group leaves") {
  const TempDir root;
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root.path() + path).parent_path());
    write_text(root.path() + path, text);
  };
  CHECK(available_memory(root.path()).status() == Status::system_error);
  write("/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");
  CHECK(*available_memory(root.path()) == 8000 * 1024);
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  write("/sys/fs/cgroup/a/b/memory.current", "1000\n");
  CHECK(*available_memory(root.path()) == 8000 * 1024);
  write("/sys/fs/cgroup/a/memory.max", "100000\n");
  write("/sys/fs/cgroup/a/memory.current", "60000\n");
  CHECK(*available_memory(root.path()) == 40000);
  write("/sys/fs/cgroup/a/memory.stat", "anon 50000\ninactive_file 10000\n");
  CHECK(*available_memory(root.path()) == 50000);
  write("/sys/fs/cgroup/a/b/memory.max", "500\n");
  CHECK(*available_memory(root.path()) == 0);
  write("/proc/self/cgroup", "5:memory:/job\n0::/\n");
  write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000\n");
  write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000\n");
  CHECK(*available_memory(root.path()) == 6000);
}

TEST_CASE("AC-32 a rank keeps its heads under the names of as many ranks of the common size") {
  CHECK(*page_head_ranks(8, 4, 1) == std::vector<std::uint32_t>{2, 3});
  CHECK(*page_head_ranks(8, 8, 5) == std::vector<std::uint32_t>{5});
  CHECK(page_head_ranks(8, 3, 0).status() == Status::invalid_argument);
}

TEST_CASE("AC-33 kernel launch geometry") {
  const std::uint32_t items[] = {1, 32, 64, 65, 128, 1024, 8192};
  const KernelLaunch expected[] = {{1, 1, 1024}, {1, 1, 1024},  {1, 2, 1024},  {2, 2, 1024},
                                   {2, 2, 1024}, {16, 2, 1024}, {128, 2, 1024}};
  for (std::size_t i = 0; i < std::size(items); ++i) CHECK(*kernel_launch(items[i]) == expected[i]);
  CHECK(kernel_launch(0).status() == Status::invalid_argument);
}

TEST_CASE("AC-34 direct io sorts the host list, and copies whole runs") {
  const Slots host{8, 9, 10, 11, 0, 1, 2, 3};
  const auto moved = move_indices(IoBackend::direct, PageLayout::layer_first, host, range(100, 8));
  REQUIRE(moved.ok());
  CHECK(moved->host == Slots{0, 1, 2, 3, 8, 9, 10, 11});
  CHECK(moved->device == Slots{104, 105, 106, 107, 100, 101, 102, 103});
  const auto runs = coalesce_runs(moved->host, moved->device);
  CHECK(runs == std::vector<IndexRun>{{0, 104, 4}, {8, 100, 4}});
  CHECK(runs.size() * 4 * 2 == 16);  // a copy for each run, layer, K and V
}

TEST_CASE("AC-35 a run ends where the destination does not go on") {
  CHECK(coalesce_runs(range(0, 4), Slots{10, 11, 20, 21}) == std::vector<IndexRun>{{0, 10, 2}, {2, 20, 2}});
}

TEST_CASE("index lists are moved as their io backend and layout want them, or refused with both names") {
  const Slots host{5, 1};
  const auto kernel = move_indices(IoBackend::kernel, PageLayout::page_first, host, {0, 1});
  CHECK((kernel->host == host && kernel->host_list_on_device));
  const auto direct = move_indices(IoBackend::direct, PageLayout::page_first_direct, host, {0, 1});
  CHECK((direct->host == host && !direct->host_list_on_device));
  const auto refused = move_indices(IoBackend::direct, PageLayout::page_first, host, {0, 1});
  CHECK(refused.error().message.find("direct with layout page_first") != std::string::npos);
  CHECK(move_indices(IoBackend::kernel, PageLayout::page_first, host, {0}).status() ==
        Status::invalid_argument);
  CHECK(*parse_io_backend("direct") == IoBackend::direct);
  CHECK(parse_io_backend("magic").error().message.find("Unsupported io backend: magic") == 0);
  CHECK(*parse_page_layout("page_head") == PageLayout::page_head);
  CHECK_FALSE(parse_page_layout("pages").ok());
}

TEST_CASE("AC-36 producer indexes go round from 0, and a reset forgets them") {
  LocalLayerWords words(1);
  LayerDoneCounter counter(words, 1);
  CHECK(counter.producer_index() == -1);
  CHECK(counter.consumer_index() == -1);
  for (const std::int32_t expected : {0, 1, 2, 0, 1, 2, 0}) {
    CHECK(*counter.update_producer() == expected);
    REQUIRE(counter.event(expected).complete(0).ok());
  }
  counter.reset();
  CHECK(counter.producer_index() == -1);
  CHECK(counter.consumer_index() == -1);
}

TEST_CASE("AC-37 a fourth batch while three are loading is refused, and nothing has moved") {
  LocalLayerWords words(2);
  LayerDoneCounter counter(words, 2);
  for (int i = 0; i < 3; ++i) REQUIRE(counter.update_producer().ok());
  const LayerFence before = counter.event(0).fence();
  const auto refused = counter.update_producer();
  CHECK(refused.status() == Status::busy);
  CHECK(refused.error().message.find("Producer finish event should be ready before being reused.") == 0);
  CHECK(counter.producer_index() == 2);
  CHECK(counter.event(0).fence().value == before.value);
  // The first layer is not the end of a batch; the last one is.
  REQUIRE(counter.event(0).complete(0).ok());
  CHECK_FALSE(counter.update_producer().ok());
  REQUIRE(counter.event(0).complete(1).ok());
  CHECK(*counter.update_producer() == 0);
}

TEST_CASE("a batch that could not be posted gives its producer slot back") {
  LocalLayerWords words(1);
  LayerDoneCounter counter(words, 1);
  REQUIRE(counter.update_producer().ok());
  const LayerFence first = counter.event(0).fence();
  REQUIRE(counter.update_producer().ok());
  counter.cancel_producer();
  CHECK(counter.producer_index() == 0);
  CHECK(counter.event(1).finished());
  CHECK(counter.event(0).fence().value == first.value);
  CHECK(*counter.update_producer() == 1);
}

TEST_CASE("AC-38 without a consumer a wait returns at once") {
  LocalLayerWords words(8);
  LayerDoneCounter counter(words, 8);
  REQUIRE(counter.update_producer().ok());
  REQUIRE(counter.set_consumer(-1).ok());
  CHECK(counter.wait_until(5, 0).ok());
  REQUIRE(counter.set_consumer(0).ok());
  CHECK(counter.wait_until(5, 1).status() == Status::timed_out);
  std::thread loader([&] { static_cast<void>(counter.event(0).complete(5)); });
  CHECK(counter.wait_until(5, kPatienceMs).ok());
  loader.join();
  CHECK(counter.set_consumer(3).status() == Status::invalid_argument);
  CHECK(counter.consumer_index() == 0);
}

TEST_CASE("AC-40 merged operations keep list order and the smallest priority; one comes back as it is") {
  std::vector<CacheOperationPtr> list;
  list.push_back(operation(5, {10, 11}, {0, 1}, 7));
  list.push_back(operation(3, {12, 13}, {2, 3}, 9));
  list.push_back(operation(8, {14}, {4}, 11));
  const std::uint64_t last_id = list.back()->id;
  const auto merged = merge_operations(std::move(list));
  REQUIRE(merged.ok());
  CHECK((*merged)->host_slots == range(10, 5));
  CHECK((*merged)->device_slots == range(0, 5));
  CHECK((*merged)->node_ids == std::vector<std::int64_t>{7, 9, 11});
  CHECK((*merged)->priority == 3);
  CHECK((*merged)->id > last_id);

  std::vector<CacheOperationPtr> single;
  single.push_back(operation(1, {1}, {2}, 3));
  const CacheOperation* const same = single.front().get();
  CHECK(merge_operations(std::move(single))->get() == same);
  CHECK(merge_operations({}).status() == Status::invalid_argument);
  std::vector<CacheOperationPtr> mixed;
  mixed.push_back(operation(1, {1}, {2}, 3));
  mixed.push_back(operation(1, {1}, {2}, 3, OperationKind::load));
  CHECK(merge_operations(std::move(mixed)).status() == Status::invalid_argument);
}

TEST_CASE("operations run by kind, then priority, then age") {
  std::vector<CacheOperationPtr> list;
  list.push_back(operation(1, {}, {}, 0, OperationKind::backup));
  list.push_back(operation(1, {}, {}, 1, OperationKind::prefetch));
  list.push_back(operation(9, {}, {}, 2, OperationKind::write));
  list.push_back(operation(3, {}, {}, 3, OperationKind::write));
  list.push_back(operation(3, {}, {}, 4, OperationKind::write));
  list.push_back(operation(99, {}, {}, 5, OperationKind::load));
  order_operations(list);
  std::vector<std::int64_t> nodes;
  for (const auto& one : list) nodes.push_back(one->node_ids.front());
  CHECK(nodes == std::vector<std::int64_t>{5, 3, 4, 2, 1, 0});
  // Without a priority the id is it: first in, first out.
  const CacheOperation first(OperationKind::load, {}, {});
  const CacheOperation second(OperationKind::load, {}, {});
  CHECK(first.before(second));
  CHECK(first.node_ids == std::vector<std::int64_t>{kNoNode});
}

TEST_CASE("AC-41 a layer outside the range is an error, the last one is the end") {
  LocalLayerWords words(3);
  LayerLoadingEvent event(words, 0, 3);
  CHECK(event.finished());  // never used
  event.next();
  CHECK_FALSE(event.finished());
  CHECK(event.complete(3).status() == Status::invalid_argument);
  CHECK(event.complete(-1).status() == Status::invalid_argument);
  CHECK_FALSE(event.finished());
  CHECK(event.complete(2).ok());
  CHECK(event.finished());
}

TEST_CASE("AC-42 a host page goes through its states, and every other way is refused, counted and recorded") {
  auto made = HostPageStates::create(8, 4);
  REQUIRE(made.ok());
  HostPageStates& pages = **made;
  const std::vector<PrefixHash> one{hash_page(std::vector<std::uint32_t>(4, 1), std::nullopt)};
  const auto slots = pages.alloc(one);
  REQUIRE(slots.ok());
  const auto state = [&] { return static_cast<int>(*pages.state(*slots)); };
  std::vector<int> walk{state()};
  const auto step = [&](const Outcome& outcome) {
    INFO(outcome.error().message);
    REQUIRE(outcome.ok());
    walk.push_back(state());
  };
  step(pages.protect_write(*slots));
  step(pages.complete_io(*slots));
  step(pages.update_backup(*slots));
  step(pages.protect_load(*slots));
  step(pages.complete_io(*slots));
  step(pages.update_backup(*slots));
  step(pages.free(*slots));
  CHECK(walk == std::vector<int>{1, 2, 3, 4, 2, 3, 4, 0});
  CHECK(pages.refused() == 0);

  const auto fetched = pages.alloc(one);
  REQUIRE(pages.update_prefetch(*fetched).ok());
  CHECK(*pages.state(*fetched) == HostPageState::backup);
  // Silent acceptance is what the seed system does here.
  CHECK(pages.protect_write(*fetched).status() == Status::invalid_argument);
  CHECK(pages.complete_io(*fetched).status() == Status::invalid_argument);
  CHECK(pages.update_backup(*fetched).status() == Status::invalid_argument);
  CHECK(*pages.state(*fetched) == HostPageState::backup);
  CHECK(pages.refused() == 3);
  CHECK(pages.last_refusal().find("update_backup of host page 1 that is backup, expected synced") !=
        std::string::npos);
}

TEST_CASE("a host page in a copy can't be given up, and a copy that failed goes back where it came from") {
  auto made = HostPageStates::create(8, 4);
  HostPageStates& pages = **made;
  const std::vector<PrefixHash> two(2, hash_page(std::vector<std::uint32_t>(4, 2), std::nullopt));
  const auto slots = pages.alloc(two);
  CHECK(pages.alloc(two).status() == Status::no_space);
  REQUIRE(pages.protect_write(*slots).ok());
  CHECK(pages.free(*slots).status() == Status::busy);
  CHECK(pages.clear().status() == Status::busy);
  REQUIRE(pages.abort_io(*slots).ok());
  CHECK(*pages.state(*slots) == HostPageState::reserved);
  CHECK(*pages.hashes(*slots) == two);
  REQUIRE(pages.free(*slots).ok());
  CHECK(pages.free(*slots).status() == Status::already_released);
  CHECK(pages.available() == 8);
  CHECK(pages.refused() == 3);
  // All or none: one wrong page of a list changes nothing.
  const auto both = pages.alloc(two);
  REQUIRE(pages.protect_write(std::span(*both).first(4)).ok());
  CHECK_FALSE(pages.protect_write(*both).ok());
  CHECK(pages.pages_in(HostPageState::reserved) == 1);
  CHECK(pages.state(*both).status() == Status::busy);
  CHECK(pages.state({}).status() == Status::invalid_argument);
  CHECK(pages.protect_write(std::span(*both).first(3)).status() == Status::invalid_argument);
}

}  // namespace hicache::test
