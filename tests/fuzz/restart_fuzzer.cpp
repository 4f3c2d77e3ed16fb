// A daemon that starts on a damaged region. First byte of an input: bit 0 seals every ready page again after
// the changes, as a faulty daemon would have left them. The rest is a list of changes to the tables of a
// region that holds something of everything, six bytes each (place, value). Whatever they are, the takeover
// ends with tables that pass every check and give every page back.
#include <spdlog/spdlog.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "shm/page_seal.hpp"
#include "tests/support/region_builder.hpp"
#include "tools/dump/checker.hpp"

using namespace hicache;

namespace {

constexpr std::uint64_t kSegmentBytes = 64 * kKiB;  // of RegionBuilder

void seal_ready_pages(const Tables& t) {
  for (PageEntry& page : t.pages) {
    if (PageWord::decode(page.word.load()).readable()) page.seal.store(page_seal(page));
  }
}

test::RegionBuilder sealed_region() {
  auto region = test::standard_region();
  seal_ready_pages(region.tables());
  return region;
}

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "restart fuzzer: %s\n", why);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spdlog::set_level(spdlog::level::off);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static const test::RegionBuilder original = sealed_region();
  static test::RegionBuilder region;
  const auto bytes = region.bytes();
  std::memcpy(bytes.data(), original.bytes().data(), bytes.size());
  // The header is not part of it: a region with a damaged one is not taken over (region_fuzzer reads those).
  for (std::size_t at = 1; at + 6 <= size; at += 6) {
    std::uint16_t place = 0;
    std::uint32_t value = 0;
    std::memcpy(&place, data + at, sizeof place);
    std::memcpy(&value, data + at + 2, sizeof value);
    const std::size_t word = kHeaderBytes + std::size_t{place} * sizeof value % (bytes.size() - kHeaderBytes);
    std::memcpy(bytes.data() + word, &value, sizeof value);
  }
  const Tables& tables = region.tables();
  if (data[0] % 2 != 0) seal_ready_pages(tables);

  daemon::Config config;
  config.pool.segment_bytes = kSegmentBytes;
  config.pool.bytes = tables.segments.size() * kSegmentBytes;
  daemon::Coordinator::Impl coordinator(
      daemon::CoordinatorOptions{config, tables, true, config.pool.bytes, nullptr});
  inspect::MemorySource source(region.bytes());
  const auto snapshot = inspect::Snapshot::take(source);
  const inspect::Findings findings = inspect::check_snapshot(snapshot, true);
  for (const auto& finding : findings.list()) std::fprintf(stderr, "finding: %s\n", finding.text.c_str());
  if (!findings.list().empty()) fail("the tables are not sound after a takeover");
  coordinator.evict_pages(~0u);
  if (coordinator.pages.resident() != 0 || coordinator.pages.slots().used_bytes() != 0)
    fail("something is left after everything was evicted");
  return 0;
}
