// What a killed daemon had backed up comes back into the empty pool of the next one.
#include <string>
#include <vector>

#include "tests/support/storage_daemon.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPromptPages = 8;

std::string file_storage(const std::string& directory) {
  const nlohmann::json storage = {
      {"backend", "file"},
      {"file", {{"directories", {directory}}, {"segment_bytes", "256KiB"}, {"min_free", 0}}}};
  return storage.dump();
}

}  // namespace

TEST_CASE("after SIGKILL in the middle of writes every page that storage had kept comes back, none wrong") {
  const TempDir dir;
  StorageDaemon rig(file_storage(dir.file("pages")));
  std::vector<std::vector<PrefixHash>> prompts;
  std::uint32_t kept = 0;
  {
    TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
    std::uint64_t sequence = 0;
    const auto write_some = [&](std::uint32_t count) {
      for (std::uint32_t i = 0; i < count; ++i) {
        prompts.push_back(prompt(static_cast<std::uint32_t>(prompts.size()) + 1, kPromptPages));
        REQUIRE(write_prompt(rank, ++sequence, prompts.back()) == kPromptPages);
      }
    };
    write_some(40);
    rig.sync();
    kept = static_cast<std::uint32_t>(prompts.size());
    REQUIRE(rig.counter("backed_up") == kept * kPromptPages);
    write_some(40);  // some of them are on their way when it dies
    rig.daemon().kill9();
  }
  remove_shm_leftovers(rig.daemon().name());
  rig.daemon().start();
  REQUIRE(rig.counter("ready_pages") == 0);
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  std::uint32_t came = 0;
  for (std::uint32_t i = 0; i < prompts.size(); ++i) {
    const auto reserved = rank.run(rank.session().reserve(i + 1, prompts[i]));
    REQUIRE(reserved.status == Status::ok);
    const auto fetched =
        rank.run(rank.session().prefetch(reserved.lease, 0, kPromptPages, PrefetchPolicy::wait_complete));
    INFO("prompt " << i);
    CHECK(fetched.status == Status::ok);
    if (i < kept) CHECK(fetched.written == kPromptPages);
    if (fetched.written > 0) CHECK(loads_right(rank, reserved.lease, prompts[i], fetched.written));
    came += fetched.written;
    rank.run(rank.session().release(reserved.lease));
  }
  CHECK(came >= kept * kPromptPages);
  rig.require_clean();
}

}  // namespace hicache::test
