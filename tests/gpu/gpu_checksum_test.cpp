// Checksums of pages that GPUs write and load.
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "shm/region.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/gpu/gpu_cases.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPages = 96;

std::string checksum_config(const std::string& method) {
  nlohmann::json config = nlohmann::json::parse(cuda_config("256MiB", "at_start", method));
  config["transfer"]["threads"] = 3;
  config["integrity"] = {{"checksums", "always"}, {"verify", "lazy"}};
  return config.dump();
}

// Flips one bit of a ready page's bytes in the pool.
void flip_a_bit(const std::string& name) {
  const RegionSurgeon region(name);
  const auto ready = region.ready_pages();
  REQUIRE_FALSE(ready.empty());
  const auto fd = must(open_named(pool_object_name(name, 0), Mapping::Access::read_write));
  const auto pool = must(Mapping::map(fd.get(), must(object_size(fd.get())), Mapping::Access::read_write));
  static_cast<std::uint8_t*>(pool.data())[region.tables().pages[ready[0]].pool_offset + 77] ^= 4;
}

}  // namespace

TEST_CASE("With checksums a GPU page that changed in the pool is never served, and the others are") {
  const std::string method = GENERATE("auto", "staged");
  INFO("transfer.method " << method);
  TestDaemon daemon(checksum_config(method));
  await_pinned(daemon);
  const std::string signal = daemon.socket_path() + ".spoilt";
  Child child = start_rank([&](const Gpu& gpu) {
    auto rank = must(
        GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), kPages, BufferLayout::together));
    const auto keys = bench::made_up_keys(1, kPages);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    must(rank->memory().poison(pages));
    must(rank->memory().synchronize());
    LeaseId lease = must(rank->reserve(keys, kPages));
    must(rank->wait(rank->session().load(lease, 0, places(pages)), kPages));
    expect_right(*rank, pages);
    say("loaded");
    while (::access(signal.c_str(), F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    must(rank->memory().poison(pages));
    must(rank->memory().synchronize());
    const LayerFence fence{0, rank->next_fence()};
    const auto load = must(rank->session().load(lease, 0, places(pages), fence));
    const auto result = must(rank->session().wait(load, kPatienceMs));
    expect(result.status == Status::corrupt, fmt::format("the load ended with {}", to_string(result.status)));
    expect(rank->session().load_result(fence, kPatienceMs).status() == Status::corrupt, "load_result");
    must(rank->release(lease));
    // What is left of the prefix is right.
    const auto reserved = must(rank->reserve_any(keys));
    expect(reserved.hits < kPages, "the damaged page is still there");
    if (reserved.hits > 0) {
      const std::vector<KeyedPage> there(pages.begin(), pages.begin() + reserved.hits);
      must(rank->wait(rank->session().load(reserved.lease, 0, places(there)), reserved.hits));
      expect_right(*rank, there);
    }
    must(rank->release(reserved.lease));
  });
  const auto line = child.read_line();
  INFO(child.error_text());
  REQUIRE(line == "loaded");
  flip_a_bit(daemon.name());
  write_text(signal, "");
  require_success(child);
  CHECK(daemon.stop() == 0);
}

}  // namespace hicache::test
