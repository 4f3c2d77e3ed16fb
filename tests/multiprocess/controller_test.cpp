// The controller on a real daemon: one rank for its calls, rank processes for what they must agree on.
#include <array>
#include <csignal>
#include <numeric>
#include <thread>

#include "tests/support/catch.hpp"
#include "tests/support/controller_rank.hpp"
#include "tests/support/rank_group.hpp"

namespace hicache::test {
namespace {

using Slots = std::vector<std::uint64_t>;

struct Solo {
  explicit Solo(std::uint32_t deadline_ms = 0, std::uint64_t host_tokens = 4096)
      : spec(small_spec(Attention::mha, 1)), r(daemon, 0, spec, {}, deadline_ms, host_tokens) {}
  HiCacheController& controller() { return *r.controller; }

  // Writes a prompt and evicts it from the device: its host slots.
  Slots backed(const std::vector<PrefixHash>& hashes) {
    const Slots device = r.compute(hashes);
    const auto host = controller().write(device, hashes, 1);
    REQUIRE(host.ok());
    REQUIRE(r.acks(1).front().status == Status::ok);
    REQUIRE(controller().evict_device(device, *host).ok());
    return *host;
  }

  TestDaemon daemon;
  NamespaceSpec spec;
  ControllerRank r;
};

}  // namespace

TEST_CASE("what a controller writes it loads again, layer by layer, and its acks tell") {
  Solo solo;
  const auto hashes = prompt(1, 5);
  const Slots device = solo.r.compute(hashes);
  solo.controller().set_start_fence(WriteFence{2, 1});
  const auto host = solo.controller().write(device, hashes, 7, 3);
  REQUIRE(host.ok());
  CHECK(*solo.controller().host_pages().state(*host) == HostPageState::protected_io);
  // The copy waits for the fence, and so does its ack.
  for (int i = 0; i < 20; ++i) CHECK(TestRank::take(solo.controller().check_events()).empty());
  solo.r.rank.session().raise_write_fence(2, 1);
  const auto written = solo.r.acks(1).front();
  CHECK(written.kind == OperationKind::write);
  CHECK(written.status == Status::ok);
  CHECK(written.host_tokens == 20);
  CHECK(written.node_ids == std::vector<std::int64_t>{7});
  CHECK((written.start && written.start->index == 2 && !written.finish));
  CHECK(written.bytes == 5 * solo.spec.shard_bytes());
  CHECK(*solo.controller().host_pages().state(*host) == HostPageState::synced);
  REQUIRE(solo.controller().evict_device(device, *host).ok());
  CHECK(*solo.controller().host_pages().state(*host) == HostPageState::backup);

  const auto back = solo.controller().load(*host, std::nullopt, 9);
  REQUIRE(back.ok());
  solo.r.spoil(*back);
  CHECK(solo.controller().queued_loads() == 1);
  const auto consumer = solo.controller().start_loading();
  REQUIRE(*consumer == 0);
  LayerDoneCounter& counter = solo.controller().layer_counter();
  REQUIRE(counter.set_consumer(*consumer).ok());
  for (std::uint32_t layer = 0; layer < solo.spec.layers; ++layer) {
    REQUIRE(counter.wait_until(layer, kPatienceMs).ok());
  }
  CHECK(solo.r.holds(*back, hashes));
  const auto loaded = solo.r.acks(1).front();
  CHECK(loaded.kind == OperationKind::load);
  CHECK(loaded.status == Status::ok);
  CHECK((loaded.finish && loaded.finish->slot == 0));
  CHECK(loaded.sequence == written.sequence + 1);
  CHECK(*solo.controller().host_pages().state(*host) == HostPageState::synced);
  CHECK(solo.controller().in_flight() == 0);
  require_clean(solo.daemon);
}

TEST_CASE("AC-39 starting with empty queues starts nothing") {
  Solo solo;
  CHECK(*solo.controller().start_loading() == -1);
  CHECK(solo.controller().layer_counter().producer_index() == -1);
  CHECK(solo.controller().start_writing().ok());
  for (int i = 0; i < 3; ++i) CHECK(TestRank::take(solo.controller().check_events()).empty());
}

TEST_CASE("AC-43 evict_host gives up backups only") {
  Solo solo;
  const auto hashes = prompt(2, 2);
  const Slots device = solo.r.compute(hashes);
  const auto host = solo.controller().write(device, hashes, 1);
  REQUIRE(host.ok());
  const auto refused = solo.controller().evict_host(*host, false);
  CHECK(refused.status() == Status::invalid_argument);
  CHECK(refused.error().message == "Other eviction policies are not supported yet.");
  // Neither while it is written nor while the device has it too; nor is the device copy freed then.
  CHECK_FALSE(solo.controller().evict_host(*host, true).ok());
  const auto early = solo.controller().evict_device(device, *host);
  CHECK(early.error().message.find("Inconsistent states") == 0);
  CHECK(solo.r.device->available() == solo.r.device->size() - 8);
  solo.r.acks(1);
  CHECK_FALSE(solo.controller().evict_host(*host, true).ok());
  REQUIRE(solo.controller().evict_device(device, *host).ok());
  CHECK(*solo.controller().evict_host(*host, true) == 8);
  CHECK_FALSE(solo.controller().evict_host(*host, true).ok());
  // Only the interest is gone: the pool has its pages, and another write finds them.
  CHECK(solo.r.rank.session().probe(hashes).leading == 2);
}

TEST_CASE("hicache-dump shows an engine's handles by state, and how many wrong transitions were refused") {
  Solo solo;
  solo.backed(prompt(80, 2));
  const auto hashes = prompt(81, 3);
  const auto synced = solo.controller().write(solo.r.compute(hashes), hashes, 1);
  solo.r.acks(1);
  CHECK_FALSE(solo.controller().evict_host(*synced, true).ok());
  const auto shown = [&] {
    TestRank::take(solo.controller().check_events());
    return run_program({program("hicache-dump"), solo.daemon.name(), "--ranks"}).out;
  };
  INFO(shown());
  CHECK(eventually([&] {
    return shown().find("idle 1019 reserved 0 protected 0 synced 3 backup 2 refused transitions 1") !=
           std::string::npos;
  }));
  const auto json = run_program({program("hicache-dump"), solo.daemon.name(), "--json", "--ranks"});
  CHECK(json.out.find("\"refused_transitions\": 1") != std::string::npos);
  // Which handles changed last, with the page's key, whoever else holds that page.
  const std::string text = shown();
  INFO(text);
  for (const PrefixHash& hash : hashes) {
    const std::string key = to_hex(hash).substr(0, 16);
    CHECK(text.find("synced key " + key) != std::string::npos);
    CHECK(json.out.find(key) != std::string::npos);
  }
  CHECK(text.find("backup key " + to_hex(prompt(80, 2)[1]).substr(0, 16)) != std::string::npos);
  require_clean(solo.daemon);
}

TEST_CASE("a wrong transition is in the daemon's records and counters, also when the engine is gone") {
  auto solo = std::make_unique<Solo>();
  const auto hashes = prompt(82, 2);
  const auto synced = solo->controller().write(solo->r.compute(hashes), hashes, 1);
  solo->r.acks(1);
  const auto page = (*synced)[4] / 4;
  CHECK_FALSE(solo->controller().evict_host(std::span(*synced).last(4), true).ok());
  CHECK_FALSE(solo->controller().evict_host(*synced, true).ok());
  CHECK_FALSE(solo->controller().evict_host(std::span(*synced).last(4), true).ok());
  // The rank leaves before another step tells the daemon: it looks when the rank is lost.
  solo->r.rank.session().report_host_pages(solo->controller().host_pages().counts());
  solo->r.rank.detach();
  const auto dump = [&](const char* what) {
    return run_program({program("hicache-dump"), solo->daemon.name(), what}).out;
  };
  const std::string wanted =
      "refused_transition evict_host of host page " + std::to_string(page) + " that is synced";
  REQUIRE(eventually([&] { return dump("--ops").find(wanted) != std::string::npos; }));
  INFO(dump("--ops"));
  CHECK(dump("--ops").find("count 3") != std::string::npos);
  const auto status = TestRank::take(control(solo->daemon.socket_path(), {"status"}, kPatienceMs));
  CHECK(status.find("\"refused_transitions\":3") != std::string::npos);
  require_clean(solo->daemon);
}

TEST_CASE("loads that start together are one batch with one fence, by priority, and one ack") {
  Solo solo;
  const auto a = prompt(3, 3);
  const auto b = prompt(4, 2);
  const Slots host_a = solo.backed(a);
  const Slots host_b = solo.backed(b);
  const auto back_a = solo.controller().load(host_a, 9, 1);
  const auto back_b = solo.controller().load(host_b, 2, 2);
  REQUIRE((back_a.ok() && back_b.ok()));
  solo.r.spoil(*back_a);
  solo.r.spoil(*back_b);
  const auto consumer = solo.controller().start_loading();
  REQUIRE(*consumer == 0);
  REQUIRE(solo.controller().layer_counter().set_consumer(*consumer).ok());
  REQUIRE(solo.controller().layer_counter().wait_until(solo.spec.layers - 1, kPatienceMs).ok());
  CHECK(solo.r.holds(*back_a, a));
  CHECK(solo.r.holds(*back_b, b));
  const auto ack = solo.r.acks(1).front();
  CHECK(ack.node_ids == std::vector<std::int64_t>{2, 1});
  CHECK(ack.tokens == 20);
  CHECK(TestRank::take(solo.controller().drain()).empty());
  CHECK(solo.controller().in_flight() == 0);
  require_clean(solo.daemon);
}

TEST_CASE("more batches than producer slots wait for a slot instead of failing") {
  Solo solo;
  const auto hashes = prompt(5, 2);
  const Slots host = solo.backed(hashes);
  for (int i = 0; i < 7; ++i) {
    const auto back = solo.controller().load(host);
    REQUIRE(back.ok());
    CHECK(*solo.controller().start_loading() == i % 3);
    solo.r.acks(1);
    REQUIRE(solo.controller().evict_device(*back, host).ok());
  }
}

TEST_CASE("a load of what the pool has evicted is refused and takes nothing") {
  Solo solo;
  const auto hashes = prompt(6, 3);
  const Slots host = solo.backed(hashes);
  REQUIRE(control(solo.daemon.socket_path(), {"evict", "1"}).ok());
  const auto refused = solo.controller().load(host);
  CHECK(refused.status() == Status::not_found);
  CHECK(refused.error().message.find("8 of 12 tokens") != std::string::npos);
  CHECK(solo.r.device->available() == solo.r.device->size());
  CHECK(*solo.controller().start_loading() == -1);
  const auto front = solo.controller().load(std::span(host).first(8));
  REQUIRE(front.ok());
  REQUIRE(*solo.controller().start_loading() == 0);
  CHECK(solo.r.acks(1).front().status == Status::ok);
  CHECK(solo.r.holds(*front, std::span(hashes).first(2)));
}

TEST_CASE("a write that ends at its deadline leaves its handles to be given up") {
  Solo solo(100);
  const auto hashes = prompt(7, 2);
  const Slots device = solo.r.compute(hashes);
  solo.controller().set_start_fence(WriteFence{0, 1});  // never raised
  const auto host = solo.controller().write(device, hashes, 4);
  REQUIRE(host.ok());
  const auto ack = solo.r.acks(1).front();
  CHECK(ack.status == Status::dropped);
  CHECK(ack.local == Status::timed_out);
  CHECK(ack.host_tokens == 0);
  CHECK(*solo.controller().host_pages().state(*host) == HostPageState::reserved);
  CHECK(solo.controller().evict_host(*host).ok());
  CHECK(solo.controller().host_pages().available() == 4096);
}

TEST_CASE("an engine finds the pages that another one wrote, also when that one is gone") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mla, 1);
  const auto hashes = prompt(70, 4);
  {
    ControllerRank writer(daemon, 0, spec);
    REQUIRE(writer.tree->insert(hashes, writer.compute(hashes)).ok());
    writer.tree->apply(writer.acks(1));
  }
  // The same engine in its next life: a new group, an empty tree.
  REQUIRE(eventually([&] {
    try {
      ControllerRank reader(daemon, 0, spec);
      CHECK(reader.tree->match(hashes).host_tokens == 0);
      CHECK(*reader.tree->adopt(hashes) == 16);
      const auto found = reader.tree->match(hashes);
      CHECK(found.host_tokens == 16);
      const auto back = reader.tree->load_back(found.host_node, 100);
      REQUIRE(back.ok());
      reader.spoil(back->device_slots);
      REQUIRE(*reader.controller->start_loading() == 0);
      reader.tree->apply(reader.acks(1));
      CHECK(reader.holds(back->device_slots, hashes));
      CHECK(reader.tree->check() == "");
      return true;
    } catch (const std::runtime_error&) {
      return false;  // the daemon has not seen the first one go yet
    }
  }));
  require_clean(daemon);
}

TEST_CASE("AC-45 every rank retires the writes that have ended on all of them, and no more") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 3);
  // finished[rank][write], as the flags of the case.
  constexpr bool kFinished[3][4] = {
      {true, true, false, true}, {true, true, true, true}, {true, false, true, true}};
  const Shared<Gate> gate;
  const auto said = run_ranks(3, [&](std::uint32_t rank) {
    ControllerRank r(daemon, rank, spec);
    const LeaveTogether leave(*gate, 3);
    for (std::uint32_t write = 0; write < 4; ++write) {
      const auto hashes = prompt(20 + write, 2);
      r.controller->set_start_fence(kFinished[rank][write] ? std::nullopt
                                                           : std::optional(WriteFence{write, 1}));
      TestRank::take(r.controller->write(r.compute(hashes), hashes, write));
    }
    std::string text;
    for (const HiCacheAck& ack : r.acks(1)) text += "early " + std::to_string(ack.node_ids[0]) + "\n";
    for (int i = 0; i < 100; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(rank));
      for (const HiCacheAck& ack : TestRank::take(r.controller->check_events())) {
        text += "early " + std::to_string(ack.node_ids[0]) + "\n";
      }
    }
    gate->meet(3);
    for (std::uint32_t write = 0; write < 4; ++write) r.rank.session().raise_write_fence(write, 1);
    for (const HiCacheAck& ack : r.acks(3)) {
      text += "late " + std::to_string(ack.node_ids[0]) + " " + std::string(to_string(ack.status)) + "\n";
    }
    return text;
  });
  for (const std::string& text : said) CHECK(text == "early 0\nlate 1 ok\nlate 2 ok\nlate 3 ok\n");
  require_clean(daemon);
}

TEST_CASE("AC-72 a rank without a part in a write hangs nobody, and all retire it at the same call") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mla, 4);
  const Shared<Gate> gate;
  const auto said = run_ranks(4, [&](std::uint32_t rank) {
    ControllerRank r(daemon, rank, spec);
    const LeaveTogether leave(*gate, 4);
    const auto hashes = prompt(30, 6);
    const auto front = r.compute(std::span(hashes).first(3));
    const auto back = r.compute(std::span(hashes).last(3));
    TestRank::take(r.controller->write(front, std::span(hashes).first(3), 1));
    // Pages 3, 4 and 5 are copied by the ranks 3, 0 and 1: rank 2 has nothing to wait for.
    TestRank::take(r.controller->write(back, hashes, 2));
    std::string text;
    for (std::uint32_t seen = 0; seen < 2;) {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * rank));
      const auto acks = TestRank::take(r.controller->check_events());
      ++r.checks;
      for (const HiCacheAck& ack : acks) {
        text += std::to_string(ack.node_ids[0]) + " at call " + std::to_string(r.checks) + "\n";
        ++seen;
      }
    }
    return text;
  });
  for (const std::string& text : said) {
    CHECK(text == said[0]);
    CHECK(text.find("1 at call ") == 0);
    CHECK(text.find("2 at call ") != std::string::npos);
  }
  require_clean(daemon);
}

TEST_CASE("AC-73 after a reset no slot is lost or free twice, and nothing of before is heard again") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 2);
  const Shared<Gate> gate;
  const auto said = run_ranks(2, [&](std::uint32_t rank) {
    ControllerRank r(daemon, rank, spec, {}, 300);
    const LeaveTogether leave(*gate, 2);
    std::string text;
    const auto say = [&](const std::string& name, std::uint64_t value) {
      text += name + " " + std::to_string(value) + "\n";
    };
    const auto kept = prompt(40, 4);
    const auto device = r.compute(kept);
    const auto host = TestRank::take(r.controller->write(device, kept, 1));
    r.acks(1);
    TestRank::take(r.controller->evict_device(device, host));
    // In flight: three writes of which one waits for ever. Queued: a load that holds its pages.
    for (std::uint32_t i = 0; i < 3; ++i) {
      r.controller->set_start_fence(i == 1 ? std::optional(WriteFence{5, 1}) : std::nullopt);
      const auto hashes = prompt(41 + i, 3);
      TestRank::take(r.controller->write(r.compute(hashes), hashes, 10 + i));
    }
    TestRank::take(r.controller->load(host));
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    TestRank::take(r.controller->reset());
    say("epoch", r.controller->epoch());
    say("in flight", r.controller->in_flight());
    say("device", r.device->available());
    const auto list = r.device->free_list();
    Slots all(r.device->size());
    std::iota(all.begin(), all.end(), std::uint64_t{0});
    say("whole list", list == all ? 1 : 0);
    say("host", r.controller->host_pages().available());
    say("refused", r.controller->host_pages().refused());
    std::size_t heard = 0;
    for (int i = 0; i < 50; ++i) heard += TestRank::take(r.controller->check_events()).size();
    say("heard", heard);
    // It works on.
    const auto again = TestRank::take(r.controller->write(r.compute(kept), kept, 2));
    r.controller->set_start_fence(std::nullopt);
    say("ack epoch", r.acks(1).front().epoch);
    return text;
  });
  for (const std::string& text : said) {
    CHECK(text ==
          "epoch 1\nin flight 0\ndevice 256\nwhole list 1\nhost 4096\nrefused 0\nheard 0\nack epoch 1\n");
  }
  require_clean(daemon);
}

TEST_CASE("a reset of one tier: the device alone leaves backups, the host alone leaves device slots") {
  Solo solo;
  const auto hashes = prompt(90, 3);
  const Slots device = solo.r.compute(hashes);
  const auto host = solo.controller().write(device, hashes, 1);
  solo.r.acks(1);
  REQUIRE(solo.controller().reset(ResetTiers::device).ok());
  CHECK(solo.r.device->available() == solo.r.device->size());
  CHECK(*solo.controller().host_pages().state(*host) == HostPageState::backup);
  const auto back = solo.controller().load(*host);
  REQUIRE(back.ok());
  solo.r.spoil(*back);
  REQUIRE(*solo.controller().start_loading() == 0);
  solo.r.acks(1);
  CHECK(solo.r.holds(*back, hashes));
  REQUIRE(solo.controller().reset(ResetTiers::host).ok());
  CHECK(solo.controller().host_pages().available() == 4096);
  CHECK(solo.r.device->available() == solo.r.device->size() - 12);
  CHECK(solo.controller().epoch() == 2);
  CHECK(solo.r.rank.session().probe(hashes).leading == 3);  // the pool keeps its pages
  require_clean(solo.daemon);
}

TEST_CASE("a rank that dies ends the others' operations, and a reset leaves them whole") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 2);
  const Shared<Gate> gate;
  Child doomed = Child::run([&] {
    ControllerRank r(daemon, 1, spec);
    gate->meet(2);
    const auto hashes = prompt(50, 2);
    r.controller->set_start_fence(WriteFence{0, 1});
    TestRank::take(r.controller->write(r.compute(hashes), hashes, 1));
    gate->step.store(1);
    ::pause();
    return 0;
  });
  ControllerRank r(daemon, 0, spec);
  gate->meet(2);
  const auto hashes = prompt(50, 2);
  REQUIRE(r.controller->write(r.compute(hashes), hashes, 1).ok());
  REQUIRE(eventually([&] { return gate->step.load() == 1; }));
  doomed.kill(SIGKILL);
  Status ended = Status::ok;
  REQUIRE(eventually([&] {
    const auto acks = r.controller->check_events();
    ended = acks.status();
    return !acks.ok();
  }));
  CHECK(ended == Status::peer_lost);
  CHECK(r.controller->write(r.compute(prompt(51, 1)), prompt(51, 1), 2).status() == Status::peer_lost);
  REQUIRE(r.controller->reset().ok());
  CHECK(r.device->available() == r.device->size());
  CHECK(r.controller->host_pages().available() == 4096);
  CHECK(r.rank.session().probe(hashes).leading == 0);
  require_clean(daemon);
}

TEST_CASE("a rank that is given other pages than its group is told, and so is the group") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 3);
  const Shared<Gate> gate;
  const auto said = run_ranks(3, [&](std::uint32_t rank) {
    ControllerRank r(daemon, rank, spec);
    const LeaveTogether leave(*gate, 3);
    gate->meet(3);
    const auto hashes = prompt(rank == 1 ? 61 : 60, 2);
    while (gate->step.load() < rank) std::this_thread::yield();  // in turn: the odd one second
    const auto host = TestRank::take(r.controller->write(r.compute(hashes), hashes, 1));
    gate->step.fetch_add(1);
    const auto ack = r.acks(1).front();
    TestRank::take(r.controller->evict_host(host));
    const auto good = prompt(62, 2);
    TestRank::take(r.controller->write(r.compute(good), good, 2));
    return std::string(to_string(ack.status)) + " " + std::string(to_string(ack.local)) + ", then " +
           std::string(to_string(r.acks(1).front().status));
  });
  CHECK(said[0] == "dropped poisoned, then ok");
  CHECK(said[1] == "dropped diverged, then ok");
  CHECK(said[2] == "dropped poisoned, then ok");
  require_clean(daemon);
}

}  // namespace hicache::test
