// hicache-dump against hostile bytes: no mutation or truncation of a region crashes it or makes it hang.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/region_builder.hpp"
#include "tools/dump/json_report.hpp"
#include "tools/dump/region_check.hpp"
#include "tools/dump/text_report.hpp"

using namespace hicache;
using namespace hicache::inspect;
using hicache::test::RegionBuilder;
using hicache::test::standard_region;

namespace {

std::uint64_t seed_of_this_run() {
  const char* given = std::getenv("HICACHE_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
}

// Everything the tool can do with a region.
void use_everything(std::span<const std::uint8_t> bytes, Output& out) {
  MemorySource source(bytes);
  const Snapshot snapshot = Snapshot::take(source);
  const ReportOptions all{true, true, true, true, true};
  const CheckReport report = check_region(source, snapshot);
  write_text(out, snapshot, "test", all);
  write_check(out, report);
  const auto doc = to_json(snapshot, "test", all, &report);
  const std::string text = doc.dump(2, ' ', true, nlohmann::json::error_handler_t::replace);
  CHECK(nlohmann::json::accept(text));
}

std::uint64_t interesting(std::mt19937_64& random) {
  static constexpr std::uint64_t kValues[] = {
      0,    1,          2,          0x7f,       0xff,       63,          64,    65,         4095,
      4096, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff, 0x100000000, ~0ull, ~0ull >> 1, 1ull << 63};
  const std::uint64_t pick = random();
  return pick % 3 == 0 ? random() : kValues[pick / 3 % std::size(kValues)];
}

// Changes one aligned word of 1, 4 or 8 bytes.
void mutate(std::span<std::uint8_t> bytes, std::mt19937_64& random) {
  static constexpr std::size_t kSizes[] = {1, 4, 8};
  const std::size_t size = kSizes[random() % 3];
  const std::size_t at = random() % (bytes.size() / size) * size;
  const std::uint64_t value = interesting(random);
  std::memcpy(bytes.data() + at, &value, size);
}

class Sink {
 public:
  Sink() : fd_(::open("/dev/null", O_WRONLY | O_CLOEXEC)) {}
  ~Sink() { ::close(fd_); }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

TEST_CASE("Thousands of mutated regions neither crash nor hang the tool") {
  const std::uint64_t seed = seed_of_this_run();
  INFO("HICACHE_TEST_SEED=" << seed);
  std::fprintf(stderr, "HICACHE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const RegionBuilder original = standard_region();
  const Sink sink;
  Output out(sink.fd());
  for (int round = 0; round < 3000; ++round) {
    RegionBuilder region;
    std::memcpy(region.bytes().data(), original.bytes().data(), original.bytes().size());
    const int changes = 1 << (random() % 8);
    for (int i = 0; i < changes; ++i) {
      // Any word, or one of a table picked at random: big tables would hide the small ones.
      if (random() % 2 == 0) {
        mutate(region.bytes(), random);
        continue;
      }
      const SectionPlan& section = region.plan().sections[random() % kSectionCount];
      if (section.bytes() >= 8) mutate(region.bytes().subspan(section.offset, section.bytes()), random);
    }
    // A hostile writer can make the check sum fit.
    if (random() % 2 == 0) region.seal_header();
    use_everything(region.bytes(), out);
  }
}

TEST_CASE("A mutated header alone neither crashes nor hangs the tool") {
  const std::uint64_t seed = seed_of_this_run();
  INFO("HICACHE_TEST_SEED=" << seed);
  std::mt19937_64 random(seed);
  const RegionBuilder original = standard_region();
  const Sink sink;
  Output out(sink.fd());
  for (int round = 0; round < 3000; ++round) {
    RegionBuilder region;
    std::memcpy(region.bytes().data(), original.bytes().data(), original.bytes().size());
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i) mutate(region.bytes().first(sizeof(RegionHeader)), random);
    region.tables().header->layout_fingerprint.store(layout_fingerprint());
    region.tables().header->layout_major.store(kLayoutMajor);
    region.seal_header();
    use_everything(region.bytes(), out);
  }
}

TEST_CASE("Regions cut at any place are read as far as they go") {
  const std::uint64_t seed = seed_of_this_run();
  INFO("HICACHE_TEST_SEED=" << seed);
  std::mt19937_64 random(seed);
  const RegionBuilder region = standard_region();
  const Sink sink;
  Output out(sink.fd());
  std::vector<std::size_t> lengths{0, 1, 8, 703, 704, 799, 800, 4095, 4096, 4097, region.bytes().size() - 1};
  for (int i = 0; i < 1000; ++i) lengths.push_back(random() % region.bytes().size());
  for (const std::size_t length : lengths) {
    // A copy of its own: reading past its end is caught by the sanitizers.
    const std::vector<std::uint8_t> cut(region.bytes().begin(),
                                        region.bytes().begin() + static_cast<std::ptrdiff_t>(length));
    use_everything(cut, out);
    MemorySource source(cut);
    const Condition condition = Snapshot::take(source).verdict().condition;
    CHECK((condition == Condition::damaged || condition == Condition::not_a_region));
  }
}

TEST_CASE("Random bytes and deeply nested configuration are harmless") {
  const std::uint64_t seed = seed_of_this_run();
  INFO("HICACHE_TEST_SEED=" << seed);
  std::mt19937_64 random(seed);
  const Sink sink;
  Output out(sink.fd());
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint8_t> noise(random() % 20'000);
    for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
    use_everything(noise, out);
  }
  std::string deep;
  for (int i = 0; i < 200'000; ++i) deep += R"(["]",)";
  deep += "1" + std::string(200'000, ']');
  use_everything(RegionBuilder(deep).bytes(), out);
  use_everything(RegionBuilder("\x1b[2J\xff\xfe{\"a\":").bytes(), out);
}

TEST_CASE("A region that claims to be huge is refused before memory is taken for it") {
  class Huge final : public RegionSource {
   public:
    [[nodiscard]] std::uint64_t size() const override { return 1ull << 45; }
    std::size_t read(std::uint64_t offset, std::span<std::uint8_t> out) override {
      MemorySource real(std::as_const(region).bytes());
      const std::size_t n = real.read(offset, out);
      std::fill(out.begin() + static_cast<std::ptrdiff_t>(n), out.end(), std::uint8_t{0});
      return out.size();
    }
    [[nodiscard]] bool may_change() const override { return false; }
    RegionBuilder region = standard_region();
  } huge;
  Tables& t = huge.region.tables();
  t.header->region_bytes.store(1ull << 45);
  t.header->sections[static_cast<std::size_t>(SectionKind::checksums) - 1].entries.store(0xfffffff0u);
  huge.region.seal_header();
  const Snapshot snapshot = Snapshot::take(huge);
  CHECK(snapshot.verdict().condition == Condition::damaged);
  CHECK(snapshot.verdict().why.find("expected at most") != std::string::npos);
}

TEST_CASE("What a region shows never holds control characters") {
  RegionBuilder region("\x1b[31m not json \x07");
  region.add_namespace(1, 4096, "label\x1b[2J\n");
  store_text(region.tables().header->name, "\x1b]0;title\x07");
  region.seal_header();
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  {
    Output out(ends[1]);
    MemorySource source(std::as_const(region).bytes());
    write_text(out, Snapshot::take(source), "test", {true, true, true, true, true});
  }
  ::close(ends[1]);
  char buffer[32768];
  const ssize_t n = ::read(ends[0], buffer, sizeof buffer);
  ::close(ends[0]);
  REQUIRE(n > 0);
  for (ssize_t i = 0; i < n; ++i) {
    const char c = buffer[i];
    REQUIRE((c == '\n' || (c >= 0x20 && c < 0x7f)));
  }
}
