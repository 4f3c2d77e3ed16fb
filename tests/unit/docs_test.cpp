// The pages in docs/ say what the code says: structure sizes, section names, statuses, operations and
// counters.
#include <fstream>
#include <sstream>
#include <string>

#include "shm/channel_layout.hpp"
#include "shm/counters.hpp"
#include "shm/protocol.hpp"
#include "shm/region.hpp"
#include "shm/status.hpp"
#include "tests/support/catch.hpp"

namespace {

// CTest runs the tests in the root of the source tree.
std::string read_file(const std::string& path) {
  std::ifstream in(path);
  INFO(path << " must be readable from the working directory");
  REQUIRE(in.good());
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}
std::string read_page(const std::string& name) {
  return read_file("docs/" + name);
}

void require_row(const std::string& page, const std::string& row) {
  INFO("expected a table row that begins with: " << row);
  CHECK(page.find("\n" + row) != std::string::npos);
}

std::string code(std::string_view name) {
  return "`" + std::string(name) + "`";
}

}  // namespace

TEST_CASE("docs/shared-memory.md gives the size of every shared structure") {
  const std::string page = read_page("shared-memory.md");
  using namespace hicache;
#define HICACHE_EXPECT_ROW(T) require_row(page, "| `" #T "` | " + std::to_string(sizeof(T)) + " |")
  HICACHE_EXPECT_ROW(RegionHeader);
  HICACHE_EXPECT_ROW(Section);
  HICACHE_EXPECT_ROW(NamespaceEntry);
  HICACHE_EXPECT_ROW(ClientEntry);
  HICACHE_EXPECT_ROW(GroupEntry);
  HICACHE_EXPECT_ROW(SegmentEntry);
  HICACHE_EXPECT_ROW(IndexBucket);
  HICACHE_EXPECT_ROW(PageEntry);
  HICACHE_EXPECT_ROW(LeaseEntry);
  HICACHE_EXPECT_ROW(PinChunk);
  HICACHE_EXPECT_ROW(FlightRecord);
  HICACHE_EXPECT_ROW(ChannelHeader);
  HICACHE_EXPECT_ROW(RingEntry);
  HICACHE_EXPECT_ROW(WriteFenceWord);
  HICACHE_EXPECT_ROW(LayerFences);
  HICACHE_EXPECT_ROW(FenceBlock);
  HICACHE_EXPECT_ROW(Submission);
  HICACHE_EXPECT_ROW(Completion);
#undef HICACHE_EXPECT_ROW
}

TEST_CASE("docs/shared-memory.md lists every section with its number and entry size") {
  const std::string page = read_page("shared-memory.md");
  for (std::uint32_t i = 1; i <= hicache::kSectionCount; ++i) {
    const auto kind = static_cast<hicache::SectionKind>(i);
    const std::string row = "| " + std::to_string(i) + " | " + code(hicache::to_string(kind)) + " | ";
    require_row(page, row);
    const auto at = page.find("\n" + row);
    if (at == std::string::npos) continue;
    const std::string line = page.substr(at + 1, page.find('\n', at + 1) - at - 1);
    CHECK(line.find("| " + std::to_string(hicache::section_entry_bytes(kind)) + " |") != std::string::npos);
  }
}

TEST_CASE("docs/shared-memory.md gives the offsets of the header's fields") {
  const std::string page = read_page("shared-memory.md");
  using hicache::RegionHeader;
#define HICACHE_EXPECT_OFFSET(field) \
  require_row(page, "| " + std::to_string(offsetof(RegionHeader, field)) + " | `" #field "`")
  HICACHE_EXPECT_OFFSET(magic);
  HICACHE_EXPECT_OFFSET(layout_fingerprint);
  HICACHE_EXPECT_OFFSET(region_bytes);
  HICACHE_EXPECT_OFFSET(instance_epoch);
  HICACHE_EXPECT_OFFSET(hash_seed);
  HICACHE_EXPECT_OFFSET(daemon_start_ticks);
  HICACHE_EXPECT_OFFSET(header_crc);
  HICACHE_EXPECT_OFFSET(sections);
  HICACHE_EXPECT_OFFSET(state);
  HICACHE_EXPECT_OFFSET(commit_sequence);
#undef HICACHE_EXPECT_OFFSET
}

TEST_CASE("docs/protocol.md lists every status and every operation with its number") {
  const std::string page = read_page("protocol.md");
  for (std::uint16_t i = 0; i < hicache::kStatusCount; ++i) {
    require_row(page,
                "| " + std::to_string(i) + " | " + code(to_string(static_cast<hicache::Status>(i))) + " |");
  }
  for (std::uint8_t i = 0; i < hicache::kOpcodeCount; ++i) {
    require_row(page,
                "| " + std::to_string(i) + " | " + code(to_string(static_cast<hicache::Opcode>(i))) + " |");
  }
}

TEST_CASE("docs/operations.md explains every counter in the words of the code") {
  const std::string page = read_page("operations.md");
  for (std::uint32_t i = 0; i < hicache::kCounterCount; ++i) {
    const auto counter = static_cast<hicache::Counter>(i);
    require_row(page, "| " + code(counter_name(counter)) + " | " + std::string(counter_help(counter)) + " |");
  }
  // And no others: the page's only rows that begin with code are those of the counters.
  std::uint32_t rows = 0;
  for (auto at = page.find("\n| `"); at != std::string::npos; at = page.find("\n| `", at + 1)) ++rows;
  CHECK(rows == hicache::kCounterCount);
}

TEST_CASE("docs/behaviour.md names for each acceptance case a test that holds its number") {
  const std::string page = read_page("behaviour.md");
  std::istringstream lines(page);
  std::string line;
  std::size_t cases = 0;
  while (std::getline(lines, line)) {
    if (line.rfind("| AC-", 0) != 0) continue;
    ++cases;
    const std::string number = line.substr(2, 5);
    const std::string tests = line.substr(0, line.find(" |", 9));
    std::size_t named = 0;
    for (auto at = tests.find('`'); at != std::string::npos; at = tests.find('`', at + 1)) {
      const auto end = tests.find('`', at + 1);
      const std::string file = tests.substr(at + 1, end - at - 1);
      INFO(number << " in " << file);
      CHECK(read_file(file).find(number) != std::string::npos);
      ++named;
      at = end;
    }
    INFO(line);
    CHECK(named > 0);
  }
  CHECK(cases == 74);
}

TEST_CASE("README.md shows the example programs as they are") {
  const std::string readme = read_file("README.md");
  for (const std::string path : {"tests/examples/attach.cpp", "tests/examples/ask.c"}) {
    INFO(path);
    const std::string program = read_file(path);
    const auto begin = program.find('\n', program.find("README begin")) + 1;
    const auto end = program.rfind('\n', program.find("README end"));
    const std::string shown = program.substr(begin, end - begin);
    REQUIRE(shown.size() > 200);
    CHECK(readme.find(shown) != std::string::npos);
  }
}
