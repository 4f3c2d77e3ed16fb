// The arithmetic of the storage tier: thresholds, capacity, time limits, the hit query, queues and the
// circuit breaker.
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "daemon/config_keys.hpp"
#include "daemon/storage/backend_factory.hpp"
#include "daemon/storage/circuit_breaker.hpp"
#include "daemon/storage/fair_queue.hpp"
#include "daemon/storage/leading_hits.hpp"
#include "daemon/storage/operation_meter.hpp"
#include "daemon/storage/prefetch_rules.hpp"
#include "tests/support/catch.hpp"

namespace hicache::daemon {
namespace {

using Calls = std::vector<std::pair<std::size_t, std::size_t>>;  // asked, found

Calls query(std::size_t pages, std::size_t stored) {
  Calls calls;
  LeadingHits hits(pages);
  while (!hits.done()) {
    const auto batch = hits.next();
    const std::size_t left = stored > batch.first ? stored - batch.first : 0;
    const std::size_t found = std::min(batch.count, left);
    calls.emplace_back(batch.count, found);
    hits.answer(found);
  }
  CHECK(hits.hits() == std::min(pages, stored));
  return calls;
}

}  // namespace

TEST_CASE("AC-46 the prefetch threshold is the configured one, and never less than a page") {
  CHECK(prefetch_threshold(256, 1) == 256);
  CHECK(prefetch_threshold(256, 64) == 256);
  CHECK(prefetch_threshold(256, 256) == 256);
  CHECK(prefetch_threshold(256, 512) == 512);
  CHECK(prefetch_threshold(0, 64) == 64);
}

TEST_CASE("AC-47 a prefetch begins when the whole pages of a request reach the threshold") {
  CHECK_FALSE(worth_prefetching(255, 256, 64));
  CHECK(whole_page_tokens(255, 64) == 192);
  for (const auto& [tokens, aligned] :
       {std::pair{300u, 256u}, std::pair{319u, 256u}, std::pair{320u, 320u}, std::pair{1000u, 960u}}) {
    CHECK(worth_prefetching(tokens, 256, 64));
    CHECK(whole_page_tokens(tokens, 64) == aligned);
  }
}

TEST_CASE("AC-48 the capacity of prefetches is a share of the host pool alone") {
  CHECK(prefetch_capacity(20032, 0.5) == 10016);
  CHECK(prefetch_capacity(20032, 0.9) == 18028);
  // The seed system's older formula takes the device pool off first: 8025 and 5171 of the same pools.
  const auto older = [](double host, double device) {
    return static_cast<std::uint64_t>(0.8 * (host - device));
  };
  CHECK(older(20032, 10000) == 8025);
  CHECK(older(12864, 6400) == 5171);
  CHECK(prefetch_capacity(12864, 0.5) == 6432);
}

TEST_CASE("AC-49 the capacity is looked at before a prefetch begins and may be passed by one") {
  CHECK(prefetch_allowed(5170, 5171));  // with 4096 more there are 9266
  CHECK_FALSE(prefetch_allowed(5171, 5171));
  CHECK_FALSE(prefetch_allowed(9266, 5171));
}

TEST_CASE("AC-50 a host pool no larger than the device pool still prefetches") {
  // The seed system's limit is 0.8 * (6400 - 6400) = 0: every prefetch is refused, with nothing in flight.
  CHECK(prefetch_capacity(6400, 0.5) == 3200);
  CHECK(prefetch_allowed(0, prefetch_capacity(6400, 0.5)));
  CHECK(prefetch_allowed(0, prefetch_capacity(1, 0.5)));
  CHECK(prefetch_allowed(0, prefetch_capacity(6400, 0.0)));
}

TEST_CASE("AC-51 the hit query asks in batches of 128 and stops at the first incomplete one") {
  CHECK(query(300, 300) == Calls{{128, 128}, {128, 128}, {44, 44}});
  CHECK(query(300, 200) == Calls{{128, 128}, {128, 72}});
  CHECK(query(300, 128) == Calls{{128, 128}, {128, 0}});
  CHECK(query(300, 0) == Calls{{128, 0}});
  CHECK(query(128, 128) == Calls{{128, 128}});
  CHECK(query(1, 1) == Calls{{1, 1}});
}

TEST_CASE("AC-59 time limits of the policy timeout, both generations of the formula") {
  const PrefetchTimeLimit older{1'000'000, 250'000, 0};
  CHECK(older.us_for(256) == 1'062'500);
  CHECK(older.us_for(1024) == 1'250'000);
  CHECK(older.us_for(4096) == 2'000'000);
  CHECK(older.us_for(131072) == 33'000'000);
  const PrefetchTimeLimit newer{2'000'000, 100'000, 30'000'000};
  CHECK(newer.us_for(256) == 2'025'000);
  CHECK(newer.us_for(1024) == 2'100'000);
  CHECK(newer.us_for(8192) == 2'800'000);
  CHECK(newer.us_for(286720) == 30'000'000);
  CHECK(newer.us_for(400000) == 30'000'000);
  // The newer one is the default.
  const Config::Storage config;
  CHECK(config.prefetch_timeout_base_ms == 2000);
  CHECK(config.prefetch_timeout_per_ki_token_ms == 100);
  CHECK(config.prefetch_timeout_max_ms == 30'000);
}

TEST_CASE("a fair queue serves owners in turn, each in its own order") {
  FairQueue<int> queue;
  for (int i = 0; i < 3; ++i) queue.push(1, 10 + i);
  queue.push(2, 20);
  queue.push(3, 30);
  std::vector<int> order;
  queue.push(2, 21);
  while (!queue.empty()) order.push_back(queue.pop());
  CHECK(order == std::vector<int>{10, 20, 30, 11, 21, 12});

  for (int i = 0; i < 6; ++i) queue.push(static_cast<std::uint32_t>(i % 2), i);
  std::vector<int> taken;
  queue.extract([](int i) { return i % 3 == 0; }, [&](int i) { taken.push_back(i); });
  CHECK(taken == std::vector<int>{0, 3});
  CHECK(queue.size() == 4);
  order.clear();
  while (!queue.empty()) order.push_back(queue.pop());
  CHECK(order == std::vector<int>{2, 1, 4, 5});
}

TEST_CASE("the circuit breaker opens after failures in a row, probes, and closes when a probe comes back") {
  CircuitBreaker breaker(3, 1000);
  CHECK_FALSE(breaker.failed(1));
  CHECK_FALSE(breaker.failed(2));
  breaker.succeeded();
  CHECK_FALSE(breaker.failed(3));
  CHECK_FALSE(breaker.failed(4));
  CHECK(breaker.failed(5));
  CHECK(breaker.state() == CircuitBreaker::State::open);
  CHECK(breaker.probe_at_ns() == 1005);
  CHECK_FALSE(breaker.failed(6));  // what was still on its way
  breaker.probe_sent();
  breaker.probe_failed(2000);
  CHECK(breaker.state() == CircuitBreaker::State::open);
  CHECK(breaker.probe_at_ns() == 3000);
  breaker.probe_sent();
  breaker.probe_succeeded();
  CHECK(breaker.closed());
  CHECK(breaker.failures() == 0);
  CHECK(breaker.openings() == 1);

  CircuitBreaker never(0, 1000);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK_FALSE(never.failed(i));
  CHECK(never.closed());
}

TEST_CASE("a meter counts busy time once however many batches overlap") {
  OperationMeter meter;
  meter.begin(1'000'000);
  meter.begin(2'000'000);
  meter.add_page(true, 3'000'000);
  meter.add_page(false, 3'000'000);
  meter.end(3'000'000, 1'000'000);
  meter.end(4'000'000, 2'000'000);
  CHECK(meter.batches() == 2);
  CHECK(meter.pages() == 2);
  CHECK(meter.good_pages() == 1);
  CHECK(meter.mean_us() == 2000);
  CHECK(meter.max_us() == 2000);
  CHECK(meter.p99_us() >= 2000);
  CHECK(meter.p99_us() <= 4096);
  CHECK(meter.gb_per_second(9'000'000) == 1.0);  // 3 MB in 3 ms
}

TEST_CASE("the configuration has an object of settings for every backend, and shows no password") {
  for (const std::string_view name : storage_backend_names()) {
    const std::string key(name);
    auto config = parse_config(R"({"storage": {")" + key + R"(": {"password": "secret"}}})");
    REQUIRE(config.ok());
    CHECK(config->storage.settings.at(key).at("password") == "secret");
    CHECK(config_to_json(*config).find("secret") == std::string::npos);
    const auto wrong = parse_config(R"({"storage": {")" + key + R"(": 7}})");
    REQUIRE_FALSE(wrong.ok());
    CHECK(wrong.error().message == "storage." + key + ": found 7, expected an object");
  }
}

}  // namespace hicache::daemon
