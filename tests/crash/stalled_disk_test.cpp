// A disk that does not answer, under the real file backend: reads and writes of the daemon block in the
// middle, and nobody waits longer than a deadline for them.
#include <cstdlib>

#include "tests/support/storage_group.hpp"

namespace hicache::test {
namespace {

// In the environment of the daemon that is started next.
class Preloaded {
 public:
  explicit Preloaded(const StallFile& stall) {
    ::setenv("HICACHE_TEST_STALL", stall.path().c_str(), 1);
    ::setenv("LD_PRELOAD", HICACHE_STALLED_DISK, 1);
  }
  ~Preloaded() {
    ::unsetenv("LD_PRELOAD");
    ::unsetenv("HICACHE_TEST_STALL");
  }
  Preloaded(const Preloaded&) = delete;
  Preloaded& operator=(const Preloaded&) = delete;
};

// Blocking calls of threads: what io_uring has begun is in the kernel, where nothing can be made to wait.
std::string file_storage(const TempDir& directory, const std::string& format, const NamespaceSpec& spec) {
  nlohmann::json file = {
      {"format", format}, {"directories", {directory.file("cache")}}, {"min_free", 0}, {"retry_ms", 50}};
  if (format == "segment") {
    file["segment_bytes"] = "1MiB";
    file["engine"] = "threads";
    file["workers"] = 2;
  } else {
    file["sglang"] = {
        {"model", spec.model}, {"dtype", spec.dtype}, {"page_tokens", spec.page_tokens}, {"threads", 4}};
  }
  return nlohmann::json{{"backend", "file"},        {"file", file},
                        {"batch_deadline_ms", 60},  {"breaker_failures", 3},
                        {"breaker_suspend_ms", 60}, {"write_batches", 1}}
      .dump();
}

}  // namespace

TEST_CASE(
    "a disk that stalls shortens loads, is suspended and comes back; deadlines hold, the daemon stays") {
  const std::string format = GENERATE("segment", "sglang");
  const TempDir directory;
  const StallFile stall;
  const NamespaceSpec spec = spec_with(4);
  std::unique_ptr<StorageDaemon> rig;
  {
    const Preloaded preloaded(stall);
    rig = std::make_unique<StorageDaemon>(file_storage(directory, format, spec));
  }
  TestRank rank(rig->daemon(), "engine", 0, spec);
  std::vector<std::vector<PrefixHash>> prompts;
  std::uint64_t sequence = 0;
  for (std::uint32_t i = 0; i < 8; ++i) {
    prompts.push_back(prompt(1 + i, 6));
    rig->store(rank, ++sequence, prompts.back());
  }
  REQUIRE(rig->counter("backed_up") == 48);

  stall.begin();
  // Reads: a miss by the deadline of the batch or of the operation, whichever is first; never a wrong byte.
  auto lease = reserve(rank, ++sequence, prompts[0]).lease;
  const auto hasty = rank.run(rank.session().prefetch(lease, 0, 6, kComplete, 20));
  CHECK(hasty.written == 0);
  CHECK((hasty.status == Status::timed_out || hasty.status == Status::ok));
  rank.run(rank.session().release(lease));
  for (std::size_t i = 1; i < 6; ++i) {
    lease = reserve(rank, ++sequence, prompts[i]).lease;
    const auto result = rank.run(rank.session().prefetch(lease, 0, 6, kComplete));
    CHECK(result.status == Status::ok);
    CHECK(result.written == 0);
    rank.run(rank.session().release(lease));
  }
  REQUIRE(eventually([&] { return rig->counter("storage_suspensions") >= 1; }));
  // A batch counts as late when the coordinator hears of it, which may be after the suspension.
  CHECK(eventually([&] { return rig->counter("storage_late") >= 1; }));
  // Writes: the pages are kept in the pool, whoever asks about their backup is told that it is not known to
  // be there, and an orderly end of what waits does not take the disk's time.
  const auto computed = prompt(50, 6);
  lease = reserve(rank, ++sequence, computed).lease;
  for (std::uint32_t i = 0; i < 6; ++i) rank.fill(DevicePage{i}, computed[i]);
  CHECK(rank.run(rank.session().write(lease, 0, TestRank::pages(0, 6))).written == 6);
  const auto ack = rank.run(rank.session().backup(lease, 0, 6));
  CHECK(ack.status == Status::ok);
  CHECK((ack.written == 0 && ack.dropped == 6));
  CHECK(loads_right(rank, lease, computed, 6));
  rank.run(rank.session().release(lease));
  rig->sync();
  CHECK(rig->counter("backups") == rig->counter("backups_ended"));
  rig->require_clean();

  stall.end();
  REQUIRE(eventually([&] { return rig->ask({"storage", "status"}).at("state") == "attached"; }));
  for (const std::size_t i : {6u, 7u, 0u}) {
    lease = reserve(rank, ++sequence, prompts[i]).lease;
    CHECK(rank.run(rank.session().prefetch(lease, 0, 6, kComplete)).written == 6);
    CHECK(loads_right(rank, lease, prompts[i], 6));
    rank.run(rank.session().release(lease));
  }
  // What was not stored then goes at its next use.
  REQUIRE(eventually([&] {
    lease = reserve(rank, ++sequence, computed).lease;
    const auto kept = rank.run(rank.session().backup(lease, 0, 6)).written;
    rank.run(rank.session().release(lease));
    return kept == 6;
  }));
  rig->require_clean();
}

}  // namespace hicache::test
