// The configuration: what is accepted, what is refused and how the refusal reads, what SIGHUP may change.
#include "daemon/config.hpp"

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "daemon/config_keys.hpp"
#include "daemon/region_owner.hpp"
#include "daemon/storage/backend_factory.hpp"
#include "shm/page_word.hpp"
#include "shm/protocol.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

using namespace hicache;
using namespace hicache::daemon;

namespace {

std::vector<std::string> faults_of(const std::string& text) {
  const auto config = parse_config(text);
  REQUIRE_FALSE(config.ok());
  CHECK(config.status() == Status::invalid_argument);
  std::vector<std::string> lines;
  std::istringstream in(config.error().message);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The only fault begins with `start` and names what was found and expected.
void check_one_fault(const std::string& text, const std::string& start) {
  const auto faults = faults_of(text);
  INFO(text);
  REQUIRE(faults.size() == 1);
  INFO(faults[0]);
  CHECK(faults[0].rfind(start, 0) == 0);
  CHECK(faults[0].find("expected") != std::string::npos);
}

}  // namespace

TEST_CASE("an empty configuration is the default one and prints every key") {
  const auto config = parse_config("{}");
  REQUIRE(config.ok());
  CHECK(config_to_json(*config) == config_to_json(Config{}));
  const auto json = nlohmann::json::parse(config_to_json(*config));
  for (const ConfigKey& key : config_keys()) {
    INFO(key.path);
    const auto& home = key.section().empty() ? json : json.at(key.section());
    CHECK(home.contains(key.leaf()));
  }
}

TEST_CASE("a configuration in which every key differs from its default survives printing and parsing") {
  auto json = nlohmann::ordered_json::parse(R"({
    "name": "other", "socket": {"path": "/tmp/x.sock", "allowed_uids": [1000, 1001], "read_only_uids": [1003], "max_connections": 7,
               "max_connections_per_process": 6},
    "pool": {"bytes": "96MiB", "segment_bytes": 65536, "max_pages": 12345, "memory_reserve": "2GiB", "huge_pages": "prefer",
             "numa": "off", "map_engines": ["sglang-0"], "map_uids": [1002]},
    "region": {"keep_on_exit": true, "flight_records": 64},
    "eviction": {"policy": "lfu", "high_watermark": 0.5, "low_watermark": 0.25},
    "integrity": {"checksums": "always", "verify": "full"},
    "waiting": {"spin_us": 1, "yield_us": 2, "park_ms": 3},
    "client_waiting": {"spin_us": 4, "yield_us": 5, "park_ms": 6},
    "transfer": {"threads": 3, "method": "layer_major", "streams": 2, "block_quota": 8, "staging_blocks": 8}, "cuda": {"mode": "off"},
    "mla": {"load": "direct", "wait_us": 16},
    "limits": {"clients": 9, "namespaces": 10, "leases": 11, "leases_per_group": 12, "guaranteed_share": 0.25,
               "operations_per_client": 17, "arena_in_flight_bytes": "32KiB",
               "submission_entries": 32, "completion_entries": 128, "arena_bytes": "64KiB", "operation_deadline_ms": 13,
               "max_deadline_ms": 14, "hello_deadline_ms": 15},
    "storage": {"backend": "memory", "prefetch_threshold_tokens": 1, "prefetch_policy": "best_effort",
                "prefetch_timeout_base_ms": 2, "prefetch_timeout_per_ki_token_ms": 3,
                "prefetch_timeout_max_ms": 4, "prefetch_capacity": 0.25, "backup_policy": "write_back",
                "backup_uses": 5, "backup_queue_pages": 6, "dirty_eviction": "write_back", "read_batches": 7, "write_batches": 8,
                "batch_deadline_ms": 9, "breaker_failures": 10, "breaker_suspend_ms": 11},
    "log": {"level": "debug", "file": "/tmp/log"}})");
  // What a backend's settings may hold is known when it is made.
  for (const auto name : storage_backend_names()) json["storage"][std::string(name)] = {{"anything", 1}};
  const auto config = parse_config(json.dump());
  if (!config.ok() && config.error().message.find("built without xxHash") != std::string::npos) {
    WARN("SKIPPED: checksums need xxHash at build time");
    return;
  }
  REQUIRE(config.ok());
  CHECK(config->pool.bytes == 96 * kMiB);
  CHECK(config->waiting.park_ms == 3);
  CHECK(config->client_waiting.spin_us == 4);
  CHECK(config->eviction.policy == EvictionPolicyName::lfu);
  for (const ConfigKey& key : config_keys()) {
    INFO(key.path);
    CHECK(key.get(*config) != key.get(Config{}));
  }
  const auto again = parse_config(config_to_json(*config));
  REQUIRE(again.ok());
  CHECK(config_to_json(*again) == config_to_json(*config));
}

TEST_CASE("an unknown key is refused with its path and the keys that exist there") {
  check_one_fault(R"({"pool": {"byts": 1}})",
                  "pool.byts: unknown key, expected one of bytes, memory_reserve");
  check_one_fault(R"({"pol": {}})", "pol: unknown key, expected one of name, socket, pool");
  check_one_fault(R"({"": 1})", ": unknown key");
  check_one_fault(R"({"pool.bytes": "1GiB"})", "pool.bytes: unknown key");
}

TEST_CASE("a value of the wrong type is refused with what was found and what was expected") {
  check_one_fault(R"({"name": 7})", "name: found 7");
  check_one_fault(R"({"socket": {"allowed_uids": "root"}})", "socket.allowed_uids: found \"root\"");
  check_one_fault(R"({"socket": {"allowed_uids": [1, -1]}})", "socket.allowed_uids: found [1,-1]");
  check_one_fault(R"({"socket": {"read_only_uids": [1.5]}})", "socket.read_only_uids: found [1.5]");
  check_one_fault(R"({"pool": 5})", "pool: found 5, expected an object");
  check_one_fault(R"({"pool": {"max_pages": 1.5}})", "pool.max_pages: found 1.5");
  check_one_fault(R"({"pool": {"max_pages": "1000"}})", "pool.max_pages: found \"1000\"");
  check_one_fault(R"({"region": {"keep_on_exit": 1}})", "region.keep_on_exit: found 1");
  check_one_fault(R"({"eviction": {"policy": "fifo"}})", "eviction.policy: found \"fifo\"");
  check_one_fault(R"({"eviction": {"high_watermark": "0.9"}})", "eviction.high_watermark: found \"0.9\"");
  check_one_fault(R"({"log": {"level": null}})", "log.level: found null");
  check_one_fault("[]", "the configuration: found []");
}

TEST_CASE("a number out of its range is refused with the range") {
  check_one_fault(R"({"limits": {"clients": 0}})",
                  "limits.clients: found 0, expected an integer from 1 to 1024");
  check_one_fault(R"({"limits": {"clients": 1025}})", "limits.clients: found 1025");
  check_one_fault(R"({"limits": {"clients": 18446744073709551615}})",
                  "limits.clients: found 18446744073709551615");
  check_one_fault(R"({"transfer": {"threads": -1}})", "transfer.threads: found -1");
  check_one_fault(R"({"pool": {"segment_bytes": "3MiB"}})", "pool.segment_bytes: found \"3MiB\"");
  check_one_fault(R"({"limits": {"submission_entries": 100}})",
                  "limits.submission_entries: found 100, expected a power of two from 2 to 16384");
  check_one_fault(R"({"eviction": {"high_watermark": 1.01}})", "eviction.high_watermark: found 1.01");
  check_one_fault(R"({"name": "../etc"})", "name: found \"../etc\"");
  check_one_fault(R"({"socket": {"path": "relative.sock"}})", "socket.path: found \"relative.sock\"");
  check_one_fault("{\"socket\": {\"path\": \"/" + std::string(107, 'x') + "\"}}", "socket.path: found");
}

TEST_CASE("keys that contradict each other are refused and both are named") {
  check_one_fault(
      R"({"limits": {"submission_entries": 1024}})",
      "limits.completion_entries: found 1024, expected at least twice limits.submission_entries (1024)");
  check_one_fault(R"({"limits": {"operation_deadline_ms": 700000}})", "limits.max_deadline_ms: found 600000");
  check_one_fault(R"({"pool": {"bytes": "1MiB"}})",
                  "pool.bytes: found 1MiB, expected at least pool.segment_bytes");
  check_one_fault(R"({"eviction": {"low_watermark": 0.99}})", "eviction.low_watermark: found 0.99");
  CHECK(parse_config(R"({"eviction": {"high_watermark": 0, "low_watermark": 0.5}})").ok());
}

TEST_CASE("segments that nobody asked for grow with the pool, and never beyond it") {
  const auto segment = [](const std::string& pool) {
    const auto config = parse_config(R"({"pool": {)" + pool + "}}");
    REQUIRE(config.ok());
    return config->pool.segment_bytes;
  };
  CHECK(segment("") == Config().pool.segment_bytes);
  CHECK(segment(R"("bytes": "5MiB")") == 4 * kMiB);
  CHECK(segment(R"("bytes": "16GiB")") == 64 * kMiB);
  CHECK(segment(R"("bytes": "17GiB")") == 128 * kMiB);
  CHECK(segment(R"("bytes": "2TiB")") == 256 * kMiB);
  CHECK(segment(R"("bytes": "2TiB", "segment_bytes": "4MiB")") == 4 * kMiB);
}

TEST_CASE("every fault of a file is listed, not only the first") {
  const auto faults =
      faults_of(R"({"name": 1, "pool": {"x": 1, "bytes": "?"}, "y": 2, "log": {"level": "loud"}})");
  CHECK(faults.size() == 5);
}

TEST_CASE("a key given twice is refused") {
  check_one_fault(R"({"pool": {"max_pages": 1, "max_pages": 2}})", "max_pages: found twice");
  CHECK(parse_config(R"({"waiting": {"park_ms": 1}, "client_waiting": {"park_ms": 1}})").ok());
}

TEST_CASE("text that is not JSON is refused with the place") {
  const auto config = parse_config("{\"name\": \"a\",\n  \"pool\": }");
  REQUIRE_FALSE(config.ok());
  CHECK(config.error().message.find("line 2") != std::string::npos);
  CHECK(config.error().message.find("json.exception") == std::string::npos);
}

TEST_CASE("sizes take units, and nothing that is no size") {
  CHECK(parse_bytes("0") == 0u);
  CHECK(parse_bytes("12B") == 12u);
  CHECK(parse_bytes("64KiB") == 64 * kKiB);
  CHECK(parse_bytes("512 MiB") == 512 * kMiB);
  CHECK(parse_bytes("200GiB") == 200 * kGiB);
  CHECK(parse_bytes("1TiB") == 1024 * kGiB);
  for (const char* wrong :
       {"", "GiB", "-1", "1.5GiB", "1GB", "1gib", "1 GiB ", "99999999999999999999", "17000000TiB"}) {
    INFO(wrong);
    CHECK_FALSE(parse_bytes(wrong).has_value());
  }
  CHECK(format_bytes(3 * kGiB) == "3GiB");
  CHECK(format_bytes(kGiB + kKiB) == "1048577KiB");
  CHECK(format_bytes(1001) == "1001");
}

TEST_CASE("engines that may map the pool are named one by one") {
  check_one_fault(R"({"pool": {"map_engines": "sglang"}})", "pool.map_engines: found \"sglang\"");
  check_one_fault(R"({"pool": {"map_engines": ["a", ""]}})", "pool.map_engines: found [\"a\",\"\"]");
  check_one_fault(R"({"pool": {"map_uids": [-1]}})", "pool.map_uids: found [-1]");
}

TEST_CASE("a user may be listed to change things or only to read, not both") {
  check_one_fault(R"({"socket": {"allowed_uids": [7, 8], "read_only_uids": [8]}})",
                  "socket.read_only_uids: found 8, which socket.allowed_uids has too");
  check_one_fault(R"({"socket": {"read_only_uids": [8]}, "pool": {"map_uids": [8]}})",
                  "socket.read_only_uids: found 8, which pool.map_uids has too");
}

TEST_CASE("verify full is refused where some pages would have no checksum") {
  for (const char* policy : {"off", "storage", "sampled"}) {
    const auto faults =
        faults_of(R"({"integrity": {"verify": "full", "checksums": ")" + std::string(policy) + "\"}}");
    INFO(policy);
    CHECK(faults[0].rfind("integrity.verify: found \"full\", which needs integrity.checksums \"always\"",
                          0) == 0);
  }
}

TEST_CASE("a reload takes the keys that may change") {
  Config current;
  const auto next = parse_config(
      R"({"socket": {"allowed_uids": [5]}, "eviction": {"high_watermark": 0.5, "low_watermark": 0.4},
    "waiting": {"park_ms": 9}, "limits": {"hello_deadline_ms": 77}, "log": {"level": "warn"}})");
  REQUIRE(next.ok());
  REQUIRE(apply_reload(current, *next).ok());
  CHECK(config_to_json(current) == config_to_json(*next));
}

TEST_CASE("a reload that changes a fixed key is refused as a whole and names every such key") {
  Config current;
  const auto next =
      parse_config(R"({"pool": {"bytes": "2GiB"}, "transfer": {"threads": 2}, "log": {"level": "warn"}})");
  REQUIRE(next.ok());
  const auto refused = apply_reload(current, *next);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status() == Status::invalid_argument);
  CHECK(refused.error().message.find("pool.bytes: \"1GiB\" can't become \"2GiB\"") != std::string::npos);
  CHECK(refused.error().message.find("transfer.threads") != std::string::npos);
  CHECK(refused.error().message.find("log.level") == std::string::npos);
  CHECK(config_to_json(current) == config_to_json(Config{}));
}

TEST_CASE("docs/configuration.md has a row for every key with its default and whether it reloads") {
  const std::string docs = test::read_text("docs/configuration.md");
  REQUIRE_FALSE(docs.empty());
  for (const ConfigKey& key : config_keys()) {
    INFO(key.path);
    const auto start = docs.find("| `" + key.path + "` |");
    REQUIRE(start != std::string::npos);
    const std::string row = docs.substr(start, docs.find('\n', start) - start);
    CHECK(row.find("| `" + key.get(Config{}).dump() + "` |") != std::string::npos);
    CHECK(row.find(key.reload ? "| yes |" : "| no |") != std::string::npos);
  }
}

TEST_CASE("the shipped configurations are valid") {
  CHECK(load_config("config/quickstart.json").ok());
  CHECK(load_config("config/production.json").ok());
  CHECK(load_config("config/no-such-file.json").status() == Status::not_found);
  const auto directory = load_config("config");
  REQUIRE_FALSE(directory.ok());
  CHECK(directory.error().message.find("cannot read configuration config: it is a directory") == 0);
}

TEST_CASE("the region's tables are sized from the configuration") {
  Config config;
  config.pool.bytes = 10 * kMiB + 1;
  config.pool.segment_bytes = 4 * kMiB;
  config.pool.max_pages = 1000;
  const RegionShape shape = shape_for(config);
  CHECK(shape.pages == 1000);
  CHECK(shape.index_buckets == 2048);
  CHECK(shape.segments == 2);
  CHECK(usable_pool_bytes(config) == 8 * kMiB);
  CHECK(shape.pin_chunks >= 65536u * 2 / PinChunk::kPages + config.limits.leases);
  config.pool.max_pages = 0;
  CHECK(shape_for(config).pages == 640);
  config.pool.bytes = 1024 * kGiB;
  CHECK(shape_for(config).pages == 4u << 20);
}

TEST_CASE("no page can be pinned more often than its word can count") {
  Config config;
  config.pool.max_pages = 64u << 20;
  for (const std::uint32_t leases : {1u, 4096u, 1u << 20}) {
    config.limits.leases = leases;
    const std::uint64_t pins = std::uint64_t{shape_for(config).pin_chunks} * PinChunk::kPages;
    CHECK(pins < PageWord::kMaxPins);
    CHECK(pins > kMaxPagesPerOperation);
  }
}
