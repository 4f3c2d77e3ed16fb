// Ranks that break the rules inside their channel, and engines that mean no harm but share a namespace with
// them. Whatever they write, the daemon lives, its tables stay whole and others are served.
#include <atomic>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/support/catch.hpp"
#include "tests/support/raw_rank.hpp"

namespace hicache::test {
namespace {

nlohmann::json counters(const TestDaemon& daemon) {
  return nlohmann::json::parse(*control(daemon.socket_path(), {"status"})).at("counters");
}

void require_clean(const TestDaemon& daemon) {
  const auto check = run_program({program("hicache-dump"), daemon.name(), "--check"});
  INFO(check.out << check.err);
  REQUIRE(check.status.exited_with(0));
}

void require_nothing_left(const TestDaemon& daemon) {
  REQUIRE(eventually([&] { return counters(daemon).at("attached_clients") == 0; }));
  REQUIRE(eventually([&] { return counters(daemon).at("live_leases") == 0; }));
  const auto now = counters(daemon);
  CHECK(now.at("pinned_pages") == 0);
  CHECK(now.at("ready_pages") == now.at("resident_pages"));
  require_clean(daemon);
}

// Hashes that look like digests but belong to no prompt.
PrefixHash made_up(std::uint64_t n) {
  return PrefixHash{{n * 0x9e3779b97f4a7c15ull + 1, n + 2, n ^ 0x5555, n}};
}

}  // namespace

TEST_CASE("names and commands that are no UTF-8 text are answered, and the daemon goes on") {
  const TestDaemon daemon;
  NamespaceSpec spec = small_spec(Attention::mha, 1);
  spec.model = "model-\xff\xc0";
  spec.revision = "\x80";
  TestRank rank(daemon, "engine-\xfe\xff", 0, spec);
  for (const std::string command : {"ranks", "namespaces", "\xff"}) {
    INFO(command);
    const auto answer = control(daemon.socket_path(), {command});
    INFO(daemon.log());
    REQUIRE(answer.ok() == (command != "\xff"));
    REQUIRE(rank.run(rank.session().nop()).status == Status::ok);
  }
  CHECK(control(daemon.socket_path(), {"status", "\xff"}).status() == Status::invalid_argument);
  CHECK(control(daemon.socket_path(), {"evict", "\xff"}).status() == Status::invalid_argument);
  CHECK(control(daemon.socket_path(), {"namespace", "bump", "\xff\xff\xff\xff\xff\xff\xff\xff"}).status() ==
        Status::not_found);
  REQUIRE(rank.run(rank.session().nop()).status == Status::ok);
}

TEST_CASE("a lease that was poisoned before a rank reserved it ends when the others release it") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 3);
  TestRank first(daemon, "engine", 0, spec);
  TestRank second(daemon, "engine", 1, spec);
  TestRank third(daemon, "engine", 2, spec);
  const auto reserved = first.run(first.session().reserve(1, prompt(1, 3)));
  REQUIRE(reserved.status == Status::ok);
  REQUIRE(second.run(second.session().reserve(1, prompt(2, 3))).status == Status::diverged);
  REQUIRE(third.run(third.session().reserve(1, prompt(1, 3))).status == Status::poisoned);
  REQUIRE(first.run(first.session().release(reserved.lease)).status == Status::ok);
  CHECK(counters(daemon).at("live_leases") == 0);
}

TEST_CASE("pages that two requests place at different depths are one prefix tree all the same") {
  const TestDaemon daemon;
  RawRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const PrefixHash a = made_up(1), b = made_up(2), c = made_up(3), d = made_up(4);
  std::uint64_t sequence = 0;
  for (const std::vector<PrefixHash>& hashes :
       {std::vector{a, b}, std::vector{b, c}, std::vector{c, a, a, d}}) {
    const auto lease = rank.run(rank.reserve(++sequence, hashes)).lease;
    REQUIRE(lease != 0);
    REQUIRE(
        rank.run(rank.transfer(Opcode::write, lease, 0, static_cast<std::uint32_t>(hashes.size()))).status ==
        Status::ok);
    REQUIRE(rank.run(RawRank::release(lease)).status == Status::ok);
    require_clean(daemon);
  }
  CHECK(counters(daemon).at("ready_pages") == 4);
}

TEST_CASE("a rank that lies about its rings hurts only itself") {
  const TestDaemon daemon(R"({"limits": {"submission_entries": 8, "completion_entries": 16}})");
  TestRank good(daemon, "good", 0, small_spec(Attention::mha, 1));
  for (const std::uint32_t lie : {1u, 15u, 17u, 1000u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    INFO("lie " << lie);
    RawRank liar(daemon, "liar", 0, small_spec(Attention::mha, 1));
    liar.header().cq_head.store(lie);
    liar.header().sq_tail.store(lie);
    liar.header().sq_head.store(lie);
    liar.header().cq_tail.store(lie);
    liar.header().client_waiting.store(lie);
    liar.header().daemon_sleeping.store(lie);
    liar.header().magic.store(lie);
    // Every entry claims to be some entry: those that come out true are executed.
    for (std::uint32_t i = 0; i < 8; ++i) liar.submission_entries()[i].sequence.store(i + 1);
    liar.kick();
    for (int i = 0; i < 20; ++i) REQUIRE(good.run(good.session().nop()).status == Status::ok);
  }
  good.detach();
  require_nothing_left(daemon);
}

TEST_CASE("entries with arbitrary fields change nothing that they may not change") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const TestDaemon daemon(R"({"pool": {"max_pages": 20}})");
  TestRank good(daemon, "good", 0, small_spec(Attention::mha, 1));
  {
    RawRank rank(daemon, "hostile", 0, small_spec(Attention::mha, 1));
    const std::uint64_t arena_bytes = rank.welcome().channel.arena_bytes;
    // Its arena changes all the time, so that what the daemon reads twice differs.
    std::atomic<bool> done{false};
    std::thread changer([&] {
      std::mt19937_64 noise(seed);
      while (!done) {
        const std::uint32_t page = static_cast<std::uint32_t>(noise() % 80);
        std::memcpy(rank.arena() + noise() % 1024 * 4, &page, sizeof page);
        std::memcpy(rank.arena() + arena_bytes - 4 - noise() % 64 * 4, &page, sizeof page);
      }
    });
    const auto pick = [&](std::initializer_list<std::uint64_t> values) {
      return values.begin()[random() % values.size()];
    };
    std::vector<std::uint64_t> leases{0, ~0ull, 1ull << 32, (1ull << 32) | 5000};
    for (std::uint64_t n = 1; n <= 20'000; ++n) {
      Submission s;
      s.user_data = n;
      s.opcode = static_cast<Opcode>(random() % 16 == 0 ? random() : 1 + random() % 5);
      s.flags = static_cast<std::uint8_t>(random() % 32 == 0);
      s.deadline_ms = static_cast<std::uint32_t>(pick({0, 1, 5, ~0ull}));
      s.sequence_or_lease = s.opcode == Opcode::reserve ? pick({n, n, n, 0, 1, ~0ull >> 1, n + 4096})
                                                        : leases[random() % leases.size()];
      s.count = static_cast<std::uint32_t>(pick({0, 1, 2, 5, 65536, 65537, ~0ull}));
      s.first =
          static_cast<std::uint32_t>(s.opcode == Opcode::reserve ? 0 : pick({0, 0, 1, 4, 65536, ~0ull}));
      const std::uint64_t size = s.count * (s.opcode == Opcode::reserve ? 32
                                            : s.opcode == Opcode::write ? 8
                                                                        : 4);
      s.arena_offset = static_cast<std::uint32_t>(
          pick({0, 8, 4, arena_bytes, arena_bytes - size, arena_bytes - size + 8}));
      s.fence = static_cast<std::uint32_t>(pick({Submission::kNoFence, 0, 2, 3, 63, 64, 0x80000000u}));
      s.fence_value = static_cast<std::uint32_t>(s.opcode == Opcode::reserve ? 0 : pick({0, 1, ~0ull}));
      if (s.opcode == Opcode::nop || s.opcode == Opcode::release) {
        s.count = s.first = s.arena_offset = s.fence_value = 0;
        s.fence = Submission::kNoFence;
      }
      if (s.opcode == Opcode::nop) s.sequence_or_lease = 0;
      while (!rank.post(s)) std::this_thread::yield();
      while (const auto c = rank.next()) {
        if (c->opcode == Opcode::reserve && c->lease != 0) leases.push_back(c->lease);
        if (leases.size() > 40) leases.erase(leases.begin() + 4);
      }
      if (n % 4000 == 0) REQUIRE(write_prompt(good, n, prompt(static_cast<std::uint32_t>(n), 3)) <= 3);
    }
    done = true;
    changer.join();
    require_clean(daemon);
    CHECK_FALSE(rank.ended());
  }
  good.detach();
  require_nothing_left(daemon);
}

TEST_CASE("groups that share few pages and break off at any point leave the tables whole") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const TestDaemon daemon(R"({"pool": {"max_pages": 12}, "limits": {"leases": 512},
                              "eviction": {"high_watermark": 0}, "transfer": {"threads": 2}})");
  constexpr std::uint32_t kEngines = 3, kTp = 2;
  const NamespaceSpec spec = small_spec(Attention::mha, kTp);
  struct Group {
    std::unique_ptr<RawRank> ranks[kTp];
    std::uint64_t sequence = 0;
    // What the other rank has to post too.
    std::vector<std::pair<std::uint32_t, Submission>> owed;
    std::map<std::uint64_t, std::uint32_t> leases;   // and how many pages they have
    std::map<std::uint64_t, std::uint32_t> lengths;  // by sequence
  };
  std::vector<Group> groups(kEngines);
  std::uint32_t life = 0;
  std::uint64_t ended = 0;
  for (int step = 0; step < 60'000; ++step) {
    Group& group = groups[random() % kEngines];
    if (!group.ranks[0] || random() % 1500 == 0) {
      for (auto& rank : group.ranks) rank.reset();
      group = Group{};
      const std::string engine = "engine-" + std::to_string(life++);
      for (std::uint32_t i = 0; i < kTp; ++i)
        group.ranks[i] = std::make_unique<RawRank>(daemon, engine, i, spec);
      continue;
    }
    const auto r = static_cast<std::uint32_t>(random() % kTp);
    RawRank& rank = *group.ranks[r];
    for (auto& reader : group.ranks) {
      while (const auto c = reader->next()) {
        ++ended;
        if (c->opcode == Opcode::reserve && c->lease != 0)
          group.leases[c->lease] = group.lengths[c->user_data];
      }
    }
    if (random() % 4 != 0 && !group.owed.empty()) {
      const std::size_t at = random() % group.owed.size();
      auto [who, s] = group.owed[at];
      group.owed.erase(group.owed.begin() + static_cast<std::ptrdiff_t>(at));
      if (s.opcode == Opcode::write && random() % 100 == 0) ++s.first;  // diverges
      if (random() % 100 != 0) group.ranks[who]->post(s);
      continue;
    }
    Submission s;
    const auto any_lease = [&] {
      auto it = group.leases.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(random() % group.leases.size()));
      return it;
    };
    const std::uint64_t what = group.leases.empty() ? 0 : group.leases.size() > 5 ? 9 : random() % 10;
    // A list is overwritten long after it was read.
    const auto arena = static_cast<std::uint32_t>(step % 1024 * 4096);
    if (what < 3) {
      std::vector<PrefixHash> hashes;
      std::uint64_t page = random() % 6;
      for (std::uint64_t n = 1 + random() % 6; n > 0; --n) {
        hashes.push_back(made_up(page));
        page = random() % 5 == 0 ? random() % 64 : page * 2 + 6 + random() % 2;
      }
      for (auto& each : group.ranks) s = each->reserve(group.sequence + 1, hashes, arena);
      s.user_data = ++group.sequence;
      group.lengths[group.sequence] = s.count;
    } else if (what < 7) {
      const auto lease = any_lease();
      // Mostly the whole request; other ranges overlap and diverge when the request was written before.
      const auto first = static_cast<std::uint32_t>(random() % 8 == 0 ? random() % lease->second : 0);
      const std::uint32_t count = lease->second - first;
      for (auto& each : group.ranks) s = each->transfer(Opcode::write, lease->first, first, count, arena);
      if (random() % 6 == 0) {  // a fence that is raised late or never
        s.fence = static_cast<std::uint32_t>(random() % 4);
        s.fence_value = rank.fences().write[s.fence].value.load() + 1;
      }
    } else if (what < 8) {
      const auto lease = any_lease();
      s = rank.transfer(Opcode::load, lease->first, 0, lease->second, arena);
    } else {
      const auto lease = any_lease();
      s = RawRank::release(lease->first);
      group.leases.erase(lease);
    }
    if (random() % 8 == 0) s.deadline_ms = static_cast<std::uint32_t>(1 + random() % 20);
    if (random() % 40 == 0) rank.fences().write[random() % 4].value.fetch_add(1);
    rank.post(s);
    if (s.opcode != Opcode::load) group.owed.emplace_back(1 - r, s);
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (step % 300 == 0) static_cast<void>(control(daemon.socket_path(), {"evict", "2"}));
    if (step % 6000 == 0) require_clean(daemon);
  }
  // It must have been worth it.
  const auto now = counters(daemon);
  INFO(now.dump(2));
  for (const char* counter :
       {"written", "aborted", "skipped_filling", "evicted_demand", "timed_out", "poisoned", "peer_lost"}) {
    INFO(counter);
    CHECK(now.at(counter) > 0);
  }
  CHECK(ended > 10'000);
  groups.clear();
  require_nothing_left(daemon);
}

}  // namespace hicache::test
