// io_backend kernel on host memory: ranks that map the pool and move their pages themselves. Who may, that
// every byte is right, and that a rank which reports what can't be costs nobody but itself.
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "daemon/config.hpp"
#include "daemon/sessions/greeting.hpp"
#include "hicache/hicache.h"
#include "tests/support/catch.hpp"
#include "tests/support/controller_rank.hpp"
#include "tests/support/rank_group.hpp"
#include "tests/support/raw_rank.hpp"

namespace hicache::test {
namespace {

constexpr const char* kMapEngine = R"({"pool": {"map_engines": ["engine"]}})";
constexpr std::uint32_t kPages = 12;

nlohmann::json counters(const TestDaemon& daemon) {
  return nlohmann::json::parse(*control(daemon.socket_path(), {"status"})).at("counters");
}

// A rank's part of a group that writes a prompt, then loads it over spoilt pages layer by layer. "" = right.
std::string write_and_load(TestRank& rank, std::uint32_t layers) {
  const auto hashes = prompt(42, kPages);
  OperationResult reserved;
  // The group decides once all of its ranks have attached.
  if (!eventually([&] {
        reserved = rank.run(rank.session().reserve(1, hashes));
        return reserved.status != Status::again;
      }))
    return "never reserved";
  if (reserved.status != Status::ok || reserved.hits != 0) return "first reserve";
  const auto from = TestRank::pages(0, kPages);
  for (std::uint32_t i = 0; i < kPages; ++i) rank.fill(from[i], hashes[i]);
  const auto write = rank.session().write(reserved.lease, 0, from, WriteFence{3, 7});
  rank.session().raise_write_fence(3, 7);
  const auto written = rank.run(write);
  if (written.status != Status::ok || written.written != kPages)
    return "wrote " + std::to_string(written.written) + ": " + std::string(to_string(written.status));
  for (std::uint32_t i = 0; i < kPages; ++i) rank.spoil(from[i]);
  rank.run(rank.session().release(reserved.lease));

  reserved = rank.run(rank.session().reserve(2, hashes));
  if (reserved.hits != kPages) return "hits " + std::to_string(reserved.hits);
  const auto to = TestRank::pages(20, kPages);
  for (std::uint32_t i = 0; i < kPages; ++i) rank.spoil(to[i]);
  const LayerFence fence{1, 5};
  const auto load = rank.session().load(reserved.lease, 0, to, fence);
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    if (const auto ready = rank.session().wait_layer(fence, layer, kPatienceMs); !ready)
      return "layer " + std::to_string(layer) + ": " + ready.error().message;
  }
  const auto loaded = rank.run(load);
  if (loaded.status != Status::ok || loaded.bytes == 0)
    return "load " + std::string(to_string(loaded.status));
  if (!rank.session().load_result(fence, kPatienceMs)) return "load_result";
  for (std::uint32_t i = 0; i < kPages; ++i) {
    if (!rank.holds(to[i], hashes[i])) return "wrong bytes in page " + std::to_string(i);
  }
  rank.run(rank.session().release(reserved.lease));
  return "";
}

}  // namespace

TEST_CASE(
    "io_backend kernel: groups write and load every byte themselves, MHA and MLA, beside direct ranks") {
  const Attention attention = GENERATE(Attention::mha, Attention::mla);
  const std::uint32_t ranks = GENERATE(1u, 2u, 4u);
  const bool mixed = GENERATE(false, true);  // every other rank is direct
  if (mixed && ranks == 1) return;
  const TestDaemon daemon(kMapEngine);
  auto spec = small_spec(attention, ranks);
  spec.layers = 5;
  const Shared<Gate> gate;
  const auto said = run_ranks(ranks, [&](std::uint32_t r) {
    const bool direct = mixed && r % 2 == 1;
    TestRank rank(daemon, "engine", r, spec, false, direct ? IoBackend::direct : IoBackend::kernel);
    const LeaveTogether leave(*gate, ranks);
    return write_and_load(rank, spec.layers);
  });
  INFO(daemon.log());
  CHECK(said == std::vector<std::string>(ranks));
  REQUIRE(eventually([&] { return counters(daemon).at("attached_clients") == 0; }));
  const auto now = counters(daemon);
  CHECK(now.at("pinned_pages") == 0);
  CHECK(now.at("ready_pages") == kPages);
  CHECK(now.at("resident_pages") == kPages);
  require_clean(daemon);
}

TEST_CASE("io_backend kernel: states of a hybrid model go with the pages that carry them") {
  const TestDaemon daemon(kMapEngine);
  auto spec = small_spec(Attention::mha, 1);
  spec.side_pools = {{"indexer", HitRule::all_pages, 2, 64}, {"state", HitRule::trailing_pages, 3, 128}};
  TestRank rank(daemon, "engine", 0, spec, false, IoBackend::kernel);
  const auto hashes = prompt(7, 4);
  auto reserved = rank.run(rank.session().reserve(1, hashes));
  const auto pages = TestRank::pages(0, 4);
  const std::vector<DevicePage> states = {DevicePage::none(), DevicePage{9}, DevicePage::none(),
                                          DevicePage{11}};
  for (std::uint32_t i = 0; i < 4; ++i) {
    rank.fill(pages[i], hashes[i]);
    if (states[i]) rank.fill_state(states[i], hashes[i]);
  }
  REQUIRE(rank.run(rank.session().write(reserved.lease, 0, pages, std::nullopt, 0, states)).written == 4);
  rank.run(rank.session().release(reserved.lease));
  for (std::uint32_t i = 0; i < 4; ++i) rank.spoil(pages[i]);
  rank.spoil_state(DevicePage{20});
  reserved = rank.run(rank.session().reserve(2, hashes));
  REQUIRE(reserved.hits == 4);
  const std::vector<DevicePage> last = {DevicePage::none(), DevicePage::none(), DevicePage::none(),
                                        DevicePage{20}};
  REQUIRE(rank.run(rank.session().load(reserved.lease, 0, pages, std::nullopt, 0, last)).status ==
          Status::ok);
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(rank.holds(pages[i], hashes[i]));
  CHECK(rank.holds_state(DevicePage{20}, hashes[3]));
}

TEST_CASE("io_backend kernel is refused, naming the engine, unless the configuration lists it") {
  TestDaemon daemon;
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.engine = "engine";
  options.spec = small_spec(Attention::mha, 1);
  options.io_backend = IoBackend::kernel;
  const auto refused = Session::attach(options);
  REQUIRE(refused.status() == Status::not_permitted);
  CHECK(refused.error().message.find("engine 'engine' may not map the pool") != std::string::npos);
  CHECK(refused.error().message.find("pool.map_engines") != std::string::npos);
  options.io_backend = IoBackend::direct;
  CHECK(Session::attach(options).ok());
  options.io_backend = IoBackend::kernel;
  // The list may change while the daemon runs; who maps the pool already goes on.
  daemon.write_config(kMapEngine);
  daemon.child().kill(SIGHUP);
  REQUIRE(eventually([&] { return Session::attach(options).ok(); }));
  auto spec = small_spec(Attention::mha, 1);
  spec.model = "a group of its own";
  TestRank rank(daemon, "engine", 0, spec, false, IoBackend::kernel);
  daemon.write_config(R"({"pool": {"map_engines": []}})");
  daemon.child().kill(SIGHUP);
  AttachOptions other = options;
  other.spec.model = "another";
  REQUIRE(eventually([&] { return Session::attach(other).status() == Status::not_permitted; }));
  CHECK(write_prompt(rank, 1, prompt(1, 4)) == 4);
}

TEST_CASE("io_backend kernel through the C interface: allowed, refused, and a number that is no backend") {
  const TestDaemon daemon(kMapEngine);
  hicache_namespace spec{};
  spec.struct_size = sizeof spec;
  spec.attention = HICACHE_ATTENTION_MHA;
  spec.model = "test-model";
  spec.dtype = "bfloat16";
  spec.page_tokens = 4;
  spec.layers = 2;
  spec.heads_per_shard = 1;
  spec.head_dim = 16;
  spec.element_bytes = 2;
  spec.tp_size = 1;
  hicache_attach_options options{};
  options.struct_size = sizeof options;
  options.role = HICACHE_ROLE_RANK;
  options.socket_path = daemon.socket_path().c_str();
  options.engine = "stranger";
  options.spec = &spec;
  options.io_backend = HICACHE_IO_KERNEL;
  hicache_session* session = nullptr;
  CHECK(hicache_attach(&options, &session) == HICACHE_NOT_PERMITTED);
  CHECK(std::string(hicache_last_error()).find("stranger") != std::string::npos);
  CHECK(session == nullptr);
  options.io_backend = HICACHE_IO_KERNEL + 1;
  CHECK(hicache_attach(&options, &session) == HICACHE_INVALID_ARGUMENT);
  options.io_backend = HICACHE_IO_KERNEL;
  options.engine = "engine";
  REQUIRE(hicache_attach(&options, &session) == HICACHE_OK);
  hicache_session_destroy(session);
}

TEST_CASE("a user of another uid may map the pool only where pool.map_uids lists it") {
  daemon::Config config;
  config.pool.map_engines = {"engine"};
  Hello hello;
  hello.engine = "engine";
  const std::uint32_t stranger = ::geteuid() + 12345;
  CHECK(daemon::may_map_pool(hello, ::geteuid(), config).ok());
  CHECK(daemon::may_map_pool(hello, 0, config).ok());
  const auto refused = daemon::may_map_pool(hello, stranger, config);
  REQUIRE(refused.status() == Status::not_permitted);
  CHECK(refused.error().message.find("pool.map_uids") != std::string::npos);
  CHECK(refused.error().message.find(std::to_string(stranger)) != std::string::npos);
  config.pool.map_uids = {stranger};
  CHECK(daemon::may_map_pool(hello, stranger, config).ok());
  hello.engine = "engin";
  CHECK(daemon::may_map_pool(hello, 0, config).status() == Status::not_permitted);
}

TEST_CASE("a rank that was not asked for the pool gets none of it") {
  const TestDaemon daemon(kMapEngine);
  const RawRank direct(daemon, "engine", 0, small_spec(Attention::mha, 1));
  CHECK_FALSE(direct.by_kernel());
}

namespace {

// What a rank reports that can't be. Each costs it its session and nobody anything else.
enum class Lie { other_slot, old_number, future_number, not_taken, status, bytes, part, turn };

void tell(RawRank& rank, Lie lie, std::size_t slot, std::uint64_t number) {
  switch (lie) {
    case Lie::other_slot:
      return rank.end_request((slot + 1) % kKernelSlots, number);
    case Lie::old_number:
      return rank.end_request(slot, 1);
    case Lie::future_number:
      return rank.end_request(slot, number + 1);
    case Lie::not_taken:
      rank.kernel_slot(slot).turn.store(kernel_turn(number, KernelTurn::posted));
      return rank.end_request(slot, number);
    case Lie::status:
      return rank.end_request(slot, number, static_cast<Status>(4711));
    case Lie::bytes:
      return rank.end_request(slot, number, Status::ok, ~0ull);
    case Lie::part:
      return rank.end_request(slot, number, Status::ok, 4096);  // all is well, of less than all
    case Lie::turn:
      rank.kernel_slot(slot).turn.store(kernel_turn(number, KernelTurn::withdrawn));
      return rank.end_request(slot, number - 1);  // which is no news
  }
}

}  // namespace

TEST_CASE("hostile: a rank that reports another request than the one it has taken is cut off") {
  const Lie lie = GENERATE(Lie::other_slot, Lie::old_number, Lie::future_number, Lie::not_taken, Lie::status,
                           Lie::bytes, Lie::part, Lie::turn);
  const TestDaemon daemon(R"({"pool": {"map_engines": ["liar", "engine"]}})");
  const auto spec = small_spec(Attention::mha, 1);
  TestRank honest(daemon, "engine", 0, spec, false, IoBackend::kernel);
  const auto hashes = prompt(5, 4);
  auto liar = Child::run([&] {
    RawRank rank(daemon, "liar", 0, spec, true, kFeatureKernel);
    const std::uint64_t lease = rank.run(rank.reserve(1, hashes)).lease;
    // Two honest pages first, so that there is an old number.
    for (std::uint32_t page = 0; page < 2; ++page) {
      rank.post(rank.transfer(Opcode::write, lease, page, 1));
      const std::size_t slot = rank.take_request(false);
      rank.end_request(slot, rank.request_number(slot), Status::ok, spec.shard_bytes());
      if (rank.wait().written != 1) return 3;
    }
    rank.post(rank.transfer(Opcode::write, lease, 2, 2));
    const std::size_t slot = rank.take_request(false);
    const std::uint64_t number = rank.request_number(slot);
    if (number != 3) return 4;
    tell(rank, lie, slot, number);
    const bool cut_off = eventually([&] { return rank.ended(); });
    std::printf("%s\n", cut_off ? "cut off" : "served");
    std::fflush(stdout);
    ::pause();
    return 0;
  });
  INFO(daemon.log());
  REQUIRE(liar.read_line() == "cut off");
  CHECK(counters(daemon).at("fenced_clients") == 1);
  // It lives and maps the pool: what it has taken stays leased to it. What was published before stays.
  CHECK(counters(daemon).at("resident_pages") == 4);
  CHECK(counters(daemon).at("ready_pages") == 2);
  CHECK(write_prompt(honest, 1, prompt(6, 8)) == 8);
  require_clean(daemon);
  liar.kill(SIGKILL);
  REQUIRE(eventually([&] { return counters(daemon).at("resident_pages") == 2 + 8; }));
  CHECK(counters(daemon).at("attached_clients") == 1);
  require_clean(daemon);
}

TEST_CASE("an end that a rank reports twice counts once") {
  const TestDaemon daemon(kMapEngine);
  const auto spec = small_spec(Attention::mha, 1);
  RawRank rank(daemon, "engine", 0, spec, true, kFeatureKernel);
  const std::uint64_t lease = rank.run(rank.reserve(1, prompt(3, 3))).lease;
  for (std::uint32_t page = 0; page < 3; ++page) {
    rank.post(rank.transfer(Opcode::write, lease, page, 1));
    const std::size_t slot = rank.take_request(false);
    const std::uint64_t number = rank.request_number(slot);
    if (page > 0) rank.end_request(slot, number - 1, Status::ok, spec.shard_bytes());  // once more
    rank.end_request(slot, number, Status::ok, spec.shard_bytes());
    rank.end_request(slot, number, Status::ok, spec.shard_bytes());
    CHECK(rank.wait().written == 1);
  }
  CHECK_FALSE(rank.ended());
  CHECK(counters(daemon).at("ready_pages") == 3);
  require_clean(daemon);
}

TEST_CASE("a request that the rank has not taken ends at its deadline and is withdrawn") {
  const TestDaemon daemon(kMapEngine);
  const auto spec = small_spec(Attention::mha, 1);
  RawRank rank(daemon, "engine", 0, spec, true, kFeatureKernel);
  const std::uint64_t lease = rank.run(rank.reserve(1, prompt(3, 4))).lease;
  auto write = rank.transfer(Opcode::write, lease, 0, 4);
  write.deadline_ms = 50;
  CHECK(rank.run(write).status == Status::timed_out);
  const std::size_t slot = first_kernel_slot(false);
  REQUIRE(eventually(
      [&] { return rank.kernel_slot(slot).turn.load() == kernel_turn(1, KernelTurn::withdrawn); }));
  REQUIRE(eventually([&] { return counters(daemon).at("resident_pages") == 0; }));
  require_clean(daemon);
}

TEST_CASE("a request that the rank has taken keeps its pages past the deadline, until its end comes") {
  const TestDaemon daemon(kMapEngine);
  const auto spec = small_spec(Attention::mha, 1);
  RawRank rank(daemon, "engine", 0, spec, true, kFeatureKernel);
  const std::uint64_t lease = rank.run(rank.reserve(1, prompt(3, 4))).lease;
  auto write = rank.transfer(Opcode::write, lease, 0, 4);
  write.deadline_ms = 2000;
  REQUIRE(rank.post(write));
  const std::size_t slot = rank.take_request(false);
  const Completion late = rank.wait();
  CHECK(late.status == Status::timed_out);
  CHECK(late.flags == Completion::kPagesBusy);
  CHECK(counters(daemon).at("resident_pages") == 4);
  rank.end_request(slot, rank.request_number(slot), Status::ok, 4 * spec.shard_bytes());
  CHECK(rank.wait().flags == Completion::kPagesReturned);
  // It ended in error, so nothing of it is published.
  REQUIRE(eventually([&] { return counters(daemon).at("resident_pages") == 0; }));
  require_clean(daemon);
}

TEST_CASE("conversations with io_backend kernel: every byte of two engines of four ranks is right") {
  const TempDir dir;
  auto config = nlohmann::json::parse(read_text("config/quickstart.json"));
  config["name"] = unique_region_name();
  config["socket"]["path"] = dir.file("sock");
  write_text(dir.file("config.json"), config.dump());
  const auto run =
      run_program({program("hicache-bench"), "conversations", "--config", dir.file("config.json"),
                   "--io-backend", "kernel", "--limit", "40", "--dump-check", "--json", "-"});
  INFO(run.out + run.err);
  CHECK(run.status.exited_with(0));
}

}  // namespace hicache::test
