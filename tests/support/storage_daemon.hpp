// A daemon with storage, and the steps that tests of it take again and again.
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {

class StorageDaemon {
 public:
  // `storage`: keys of the section "storage" as JSON, beside backend memory and threshold 0.
  explicit StorageDaemon(const std::string& storage = "{}", const std::string& more = "{}")
      : daemon_(overrides(storage, more)) {}

  TestDaemon& daemon() { return daemon_; }
  nlohmann::json ask(const std::vector<std::string>& words) {
    auto text = control(daemon_.socket_path(), words, kPatienceMs);
    INFO((text ? std::string("ok") : text.error().message));
    REQUIRE(text.ok());
    return nlohmann::json::parse(*text);
  }
  std::uint64_t counter(const std::string& name) {
    return ask({"status"}).at("counters").at(name).get<std::uint64_t>();
  }
  void sync() { ask({"storage", "sync"}); }
  // Every page that can leave the pool leaves it.
  void empty_pool() { ask({"clear"}); }
  void require_clean() {
    const auto run = run_program({program("hicache-dump"), daemon_.name(), "--check"});
    INFO(run.out + run.err);
    REQUIRE(run.status.exited_with(0));
  }
  // Writes a prompt, waits for its backup and empties the pool: afterwards only storage has it.
  void store(TestRank& rank, std::uint64_t sequence, const std::vector<PrefixHash>& hashes) {
    REQUIRE(write_prompt(rank, sequence, hashes) == hashes.size());
    sync();
    empty_pool();
  }

 private:
  static std::string overrides(const std::string& storage, const std::string& more) {
    nlohmann::json config = nlohmann::json::parse(more);
    nlohmann::json section = {{"backend", "memory"}, {"prefetch_threshold_tokens", 0}};
    section.merge_patch(nlohmann::json::parse(storage));
    config["storage"] = section;
    return config.dump();
  }
  TestDaemon daemon_;
};

// Loads pages [0, count) of a lease and says whether each holds what belongs to it.
inline bool loads_right(TestRank& rank, LeaseId lease, const std::vector<PrefixHash>& hashes,
                        std::uint32_t count) {
  const auto pages = TestRank::pages(0, count);
  for (const DevicePage page : pages) rank.spoil(page);
  if (rank.run(rank.session().load(lease, 0, pages)).status != Status::ok) return false;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!rank.holds(pages[i], hashes[i])) return false;
  }
  return true;
}

// A file whose existence stops a memory backend that was told of it.
class StallFile {
 public:
  StallFile() : path_(dir_.file("stall")) {}
  void begin() const { std::ofstream(path_) << "x"; }
  void end() const { std::filesystem::remove(path_); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  TempDir dir_;
  std::string path_;
};

}  // namespace hicache::test
