// The storage tier with backends that do what the test says, and the memory backend behind it.
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/storage/backend_factory.hpp"
#include "daemon/storage/storage_tier.hpp"
#include "shm/clock.hpp"
#include "tests/support/catch.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint32_t kPages = 64;  // of the pool
constexpr auto kPatience = std::chrono::seconds(60);

std::shared_ptr<const StorageNamespace> test_namespace() {
  StorageNamespace ns;
  ns.spec.model = "tier-test";
  ns.spec.dtype = "fp8";
  ns.spec.page_tokens = 1;
  ns.spec.layers = 1;
  ns.spec.heads_per_shard = 1;
  ns.spec.head_dim = 1024;
  ns.spec.element_bytes = 1;
  ns.digest = ns.spec.digest();
  return std::make_shared<const StorageNamespace>(ns);
}

PrefixHash key(std::uint64_t n) {
  return PrefixHash{{n, ~n, 7, 9}};
}

// A tier over a small pool, and what it has told.
class Rig {
 public:
  explicit Rig(const Config::Storage& config = quick())
      : pool_bytes_(kPages * kPage),
        pool_(static_cast<std::byte*>(std::aligned_alloc(kPage, pool_bytes_))),
        tier_(config, StoragePool{pool_, pool_bytes_, pool_bytes_}, nullptr, [this] {
          const std::lock_guard lock(mutex_);
          news_ = true;
          changed_.notify_all();
        }) {
    std::memset(pool_, 0, pool_bytes_);
  }
  ~Rig() {
    tier_.stop();
    std::free(pool_);
  }

  static Config::Storage quick() {
    Config::Storage config;
    config.batch_deadline_ms = 60'000;
    config.breaker_failures = 3;
    config.breaker_suspend_ms = 20;
    return config;
  }

  std::byte* page(std::uint32_t n) { return pool_ + n * kPage; }
  void fill(std::uint32_t n, unsigned char value) { std::memset(page(n), value, kPage); }
  bool holds(std::uint32_t n, unsigned char value) {
    return std::all_of(page(n), page(n) + kPage, [&](std::byte b) { return b == std::byte{value}; });
  }

  // One batch over the keys, with pool pages of the same numbers as buffers.
  std::uint64_t send(StorageOperation operation, const std::vector<std::uint32_t>& numbers,
                     std::uint32_t owner = 0) {
    StorageRequest request;
    request.id = StorageBatchId{++last_id_};
    request.operation = operation;
    request.owner = owner;
    request.ns = ns_;
    for (const std::uint32_t n : numbers) {
      request.hashes.push_back(key(n));
      if (operation != StorageOperation::exists) request.buffers.push_back({PoolOffset{n * kPage}, kPage});
    }
    tier_.submit(std::move(request));
    return last_id_;
  }

  struct Told {
    std::map<std::uint32_t, Status> pages;
    bool late = false;
    bool ended = false;
  };
  // What has been told of a request, once `enough` is true of it.
  template <class Enough>
  Told wait_for(std::uint64_t id, Enough&& enough) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      take();
      if (enough(told_[id])) return told_[id];
      std::unique_lock lock(mutex_);
      if (!changed_.wait_until(lock, until, [&] { return news_; })) {
        FAIL("nothing was told for a minute");
      }
      news_ = false;
    }
  }
  Told wait_ended(std::uint64_t id) {
    return wait_for(id, [](const Told& told) { return told.ended; });
  }
  std::vector<Status> run(StorageOperation operation, const std::vector<std::uint32_t>& numbers) {
    const Told told = wait_ended(send(operation, numbers));
    std::vector<Status> out;
    for (const auto& [page, status] : told.pages) out.push_back(status);
    return out;
  }
  Outcome later(const std::function<void(StorageTier::Answer)>& ask) {
    std::mutex mutex;
    std::condition_variable done;
    std::optional<Outcome> answer;
    ask([&](Outcome outcome) {
      const std::lock_guard lock(mutex);
      answer = std::move(outcome);
      done.notify_all();
    });
    std::unique_lock lock(mutex);
    REQUIRE(done.wait_for(lock, kPatience, [&] { return answer.has_value(); }));
    return *answer;
  }
  // Requests in the order in which their ends were told.
  [[nodiscard]] const std::vector<std::uint64_t>& ended() const { return ended_; }
  StorageTier& tier() { return tier_; }
  void attach(const char* settings = "{}") {
    const auto attached = tier_.attach("memory", nlohmann::ordered_json::parse(settings));
    REQUIRE(attached.ok());
  }
  template <class True>
  static bool eventually(True&& is_true) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!is_true()) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  void take() {
    std::vector<StorageEvent> events;
    tier_.take_events(events);
    for (const StorageEvent& event : events) {
      Told& told = told_[event.request.value];
      REQUIRE_FALSE(told.ended);  // nothing comes after the end
      if (event.kind == StorageEvent::Kind::late) told.late = true;
      if (event.kind == StorageEvent::Kind::ended) {
        told.ended = true;
        ended_.push_back(event.request.value);
      }
      if (event.kind == StorageEvent::Kind::page) {
        const bool first = told.pages.emplace(event.page, event.status).second;
        REQUIRE(first);  // each page once
      }
    }
  }

  std::uint64_t pool_bytes_;
  std::byte* pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool news_ = false;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Told> told_;
  std::vector<std::uint64_t> ended_;
  std::shared_ptr<const StorageNamespace> ns_ = test_namespace();
  StorageTier tier_;
};

// A file whose existence stops the memory backend.
class Stall {
 public:
  Stall()
      : path_((std::filesystem::temp_directory_path() / ("hicache-stall-" + std::to_string(::getpid())))
                  .string()) {}
  ~Stall() { end(); }
  void begin() const { std::ofstream(path_) << "x"; }
  void end() const { std::filesystem::remove(path_); }
  [[nodiscard]] std::string settings(const std::string& more = "") const {
    return R"({"stall_while": ")" + path_ + "\"" + more + "}";
  }

 private:
  std::string path_;
};

using Op = StorageOperation;
using Statuses = std::vector<Status>;

}  // namespace

TEST_CASE("AC-64 an unknown backend and wrong settings are refused with the name of what is wrong") {
  Rig rig;
  const auto unknown = rig.tier().attach("foo", nlohmann::ordered_json::object());
  REQUIRE_FALSE(unknown.ok());
  CHECK(unknown.status() == Status::invalid_argument);
  CHECK(unknown.error().message.find("Failed to create storage backend: Unknown storage backend 'foo'") == 0);
  CHECK(unknown.error().message.find("memory") != std::string::npos);
  for (const auto& [settings, complaint] : std::vector<std::pair<std::string, std::string>>{
           {R"({"class_name": "X"})", "storage.memory.class_name: unknown key"},
           {R"({"threads": 0})", "storage.memory.threads: found 0, expected an integer from 1 to 64"},
           {R"({"stall_while": 5})", "storage.memory.stall_while: found 5, expected a path"}}) {
    const auto refused = rig.tier().attach("memory", nlohmann::ordered_json::parse(settings));
    REQUIRE_FALSE(refused.ok());
    INFO(refused.error().message);
    CHECK(refused.error().message.find("Failed to create storage backend: " + complaint) == 0);
  }
  CHECK(rig.tier().state() == StorageState::detached);
}

TEST_CASE("AC-65 pages that are read in one batch land in places of their own") {
  Rig rig;
  rig.attach();
  for (std::uint32_t n : {1u, 2u, 3u}) rig.fill(n, static_cast<unsigned char>(n));
  CHECK(rig.run(Op::put, {1, 2, 3}) == Statuses(3, Status::ok));
  for (std::uint32_t n : {1u, 2u, 3u}) rig.fill(n, 0xee);
  CHECK(rig.run(Op::get, {1, 2, 3}) == Statuses(3, Status::ok));
  // Only the payload is written: half a slot here.
  for (std::uint32_t n : {1u, 2u, 3u}) {
    CHECK(std::to_integer<unsigned>(rig.page(n)[0]) == n);
    CHECK(std::to_integer<unsigned>(rig.page(n)[2047]) == n);
  }
}

TEST_CASE("without a backend every request ends at once, and each page and request exactly once") {
  Rig rig;
  CHECK(rig.run(Op::get, {1, 2}) == Statuses(2, Status::closed));
  CHECK(rig.later([&](auto answer) { rig.tier().detach_later(answer); }).status() == Status::not_found);
  CHECK(rig.later([&](auto answer) { rig.tier().clear_later(answer); }).status() == Status::not_found);
}

TEST_CASE("backends come, are cleared and go while requests run") {
  Rig rig;
  rig.attach();
  CHECK(rig.tier().attach("memory", nlohmann::ordered_json::object()).status() == Status::exists);
  CHECK(rig.run(Op::put, {5}) == Statuses{Status::ok});
  CHECK(rig.run(Op::exists, {5, 6}) == Statuses{Status::ok, Status::not_found});
  CHECK(rig.later([&](auto answer) { rig.tier().clear_later(answer); }).ok());
  CHECK(rig.run(Op::exists, {5}) == Statuses{Status::not_found});
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 50; ++i) ids.push_back(rig.send(i % 2 ? Op::put : Op::get, {1, 2, 3, 4}));
  CHECK(rig.later([&](auto answer) { rig.tier().detach_later(answer); }).ok());
  for (const std::uint64_t id : ids) CHECK(rig.wait_ended(id).pages.size() == 4);
  CHECK(rig.tier().state() == StorageState::detached);
  CHECK(rig.later([&](auto answer) { rig.tier().attach_later("memory", {}, answer); }).ok());
  CHECK(rig.tier().state() == StorageState::attached);
}

TEST_CASE("reads go before writes that were there first") {
  Stall stall;
  auto config = Rig::quick();
  config.read_batches = config.write_batches = 1;
  Rig rig(config);
  rig.attach(stall.settings().c_str());
  stall.begin();
  const auto first = rig.send(Op::put, {1});  // at the backend, stalled
  REQUIRE(Rig::eventually([&] { return rig.tier().status()["operations"]["put"]["in_flight"] == 1; }));
  std::vector<std::uint64_t> writes;
  for (std::uint32_t n = 2; n < 10; ++n) writes.push_back(rig.send(Op::put, {n}));
  const auto read = rig.send(Op::get, {1});
  stall.end();
  CHECK(rig.wait_ended(first).pages.at(0) == Status::ok);
  for (const std::uint64_t id : writes) CHECK(rig.wait_ended(id).pages.at(0) == Status::ok);
  // One thread serves batches in the order in which they were sent: the read was the second.
  REQUIRE(rig.ended().size() == 10);
  CHECK(rig.ended()[1] == read);
}

TEST_CASE("a batch that passes its deadline is late, keeps its buffers until it ends, and suspends storage") {
  Stall stall;
  auto config = Rig::quick();
  config.batch_deadline_ms = 20;
  Rig rig(config);
  rig.attach(stall.settings(R"(, "threads": 8)").c_str());
  rig.fill(1, 1);
  REQUIRE(rig.run(Op::put, {1}) == Statuses{Status::ok});
  rig.fill(1, 0xee);
  stall.begin();
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(rig.send(Op::get, {1}));
  for (const std::uint64_t id : ids) {
    const auto told = rig.wait_for(id, [](const Rig::Told& t) { return t.late; });
    CHECK_FALSE(told.ended);
    CHECK(told.pages.empty());
  }
  CHECK(Rig::eventually([&] { return rig.tier().state() == StorageState::suspended; }));
  CHECK(rig.run(Op::get, {1}) == Statuses{Status::closed});
  const auto status = rig.tier().status();
  CHECK(status["late_batches"].get<int>() >= 3);
  CHECK(status["breaker"]["openings"] == 1);
  CHECK(rig.holds(1, 0xee));  // nobody has written to it yet
  stall.end();
  for (const std::uint64_t id : ids) CHECK(rig.wait_ended(id).pages.at(0) == Status::ok);
  // The probe comes back and everything is sent again.
  CHECK(Rig::eventually([&] { return rig.tier().state() == StorageState::attached; }));
  CHECK(rig.run(Op::get, {1}) == Statuses{Status::ok});
}

TEST_CASE("a backend that fails every time is suspended, one that fails now and then is not") {
  Rig rig;
  rig.attach(R"({"fail_put_every": 2})");
  for (int i = 0; i < 20; ++i) rig.run(Op::put, {1, 2});
  CHECK(rig.tier().state() == StorageState::attached);
  REQUIRE(rig.later([&](auto answer) { rig.tier().detach_later(answer); }).ok());
  rig.attach(R"({"fail_put_every": 1})");
  for (int i = 0; i < 3; ++i) CHECK(rig.run(Op::put, {1, 2}) == Statuses(2, Status::system_error));
  CHECK(rig.tier().status()["breaker"]["openings"] == 1);
}

TEST_CASE("cancelling ends what has not begun") {
  Stall stall;
  auto config = Rig::quick();
  config.read_batches = 1;
  Rig rig(config);
  rig.attach(stall.settings().c_str());
  stall.begin();
  const auto running = rig.send(Op::get, {1, 2, 3});
  const auto queued = rig.send(Op::get, {4});
  rig.tier().cancel(StorageBatchId{queued});
  CHECK(rig.wait_ended(queued).pages.at(0) == Status::closed);
  REQUIRE(Rig::eventually([&] { return rig.tier().status()["operations"]["get"]["in_flight"] == 1; }));
  rig.tier().cancel(StorageBatchId{running});
  rig.tier().cancel(StorageBatchId{987654});
  stall.end();
  const auto told = rig.wait_ended(running);
  CHECK(told.pages.size() == 3);
  CHECK(told.pages.at(2) == Status::closed);
}

TEST_CASE("the memory backend keeps to its capacity and tells what it did") {
  Rig rig;
  rig.attach(R"({"capacity_bytes": 8192, "corrupt_get_every": 3})");  // four payloads of 2048 bytes
  CHECK(rig.run(Op::put, {1, 2, 3, 4, 5}) == Statuses(5, Status::ok));
  CHECK(rig.run(Op::exists, {1, 2, 3, 4, 5}) ==
        Statuses{Status::not_found, Status::ok, Status::ok, Status::ok, Status::ok});
  CHECK(rig.run(Op::get, {2, 3, 4}) == Statuses{Status::ok, Status::ok, Status::corrupt});
  CHECK(rig.run(Op::exists, {4}) == Statuses{Status::not_found});
  const auto backend = rig.tier().status()["backend"];
  CHECK(backend["pages"] == 3);
  CHECK(backend["bytes"] == 3 * 2048);
  CHECK(backend["evicted_pages"] == 1);
  CHECK(backend["corrupt_pages"] == 1);
  CHECK(backend["usable"] == true);
}

TEST_CASE("stopping ends every request, also those that a stalled backend holds") {
  Stall stall;
  auto rig = std::make_unique<Rig>();
  rig->attach(stall.settings().c_str());
  stall.begin();
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 20; ++i) ids.push_back(rig->send(Op::put, {1, 2}));
  rig->tier().stop();
  for (const std::uint64_t id : ids) CHECK(rig->wait_ended(id).pages.size() == 2);
  CHECK(rig->run(Op::get, {1}) == Statuses{Status::closed});
}

}  // namespace hicache::daemon
