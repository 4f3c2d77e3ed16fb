// The control region: how it is laid out, and that a damaged or foreign header is refused and named.
#include "shm/region.hpp"

#include <cstring>
#include <functional>
#include <memory>
#include <random>

#include "tests/support/catch.hpp"

namespace hicache {

namespace {

RegionShape shape() {
  RegionShape s;
  s.config_text_bytes = 100;
  s.segments = 7;
  s.index_buckets = 64;
  s.pages = 50;
  s.pin_chunks = 20;
  return s;
}

// A header as a daemon writes it, in private memory.
struct Header {
  Header() : plan(plan_region(shape())) {
    h.magic = kRegionMagic;
    h.layout_major = kLayoutMajor;
    h.layout_minor = kLayoutMinor;
    h.layout_fingerprint = layout_fingerprint();
    h.region_bytes = plan.total_bytes;
    h.pool_bytes = 1 << 20;
    h.segment_bytes = 1 << 16;
    h.instance_epoch = 5;
    h.created_unix_ns = 6;
    h.hash_seed = 7;
    h.daemon_start_ticks = 8;
    h.daemon_pid = 9;
    h.section_count = kSectionCount;
    store_text(h.boot_id, "boot");
    store_text(h.name, "test");
    store_text(h.socket_path, "/run/test.sock");
    for (std::uint32_t i = 0; i < kSectionCount; ++i) {
      h.sections[i].kind = i + 1;
      h.sections[i].entry_bytes = plan.sections[i].entry_bytes;
      h.sections[i].offset = plan.sections[i].offset;
      h.sections[i].entries = plan.sections[i].entries;
    }
    seal();
    h.state = static_cast<std::uint32_t>(RegionState::ready);
  }
  // Makes the checksum right again, as an attacker would.
  void seal() { h.header_crc = header_crc(h); }
  Section& section(SectionKind kind) { return h.sections[static_cast<std::uint32_t>(kind) - 1]; }

  RegionCheck check() const { return check(plan.total_bytes); }
  RegionCheck check(std::uint64_t available) const {
    std::vector<std::uint8_t> bytes(kHeaderBytes);
    std::memcpy(bytes.data(), static_cast<const void*>(&h), sizeof h);
    return check_header(bytes, available);
  }

  RegionPlan plan;
  RegionHeader h{};
};

void check_verdict(const RegionCheck& check, RegionVerdict verdict, const std::string& text) {
  REQUIRE(check.findings.size() == 1);
  CAPTURE(check.findings[0]);
  CHECK(check.verdict == verdict);
  CHECK(check.findings[0].find(text) != std::string::npos);
}

}  // namespace

TEST_CASE("Sections follow each other on 4 KiB lines behind the header, without overlap") {
  const RegionPlan plan = plan_region(shape());
  std::uint64_t end = kHeaderBytes;
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    const SectionPlan& s = plan.sections[i];
    CAPTURE(to_string(s.kind));
    CHECK(static_cast<std::uint32_t>(s.kind) == i + 1);
    CHECK(s.offset % 4096 == 0);
    CHECK(s.offset >= end);
    CHECK(s.offset < end + 4096);
    CHECK(s.entry_bytes == section_entry_bytes(s.kind));
    end = s.offset + s.bytes();
  }
  CHECK(plan.total_bytes >= end);
  CHECK(plan.total_bytes % 4096 == 0);
  CHECK(plan.section(SectionKind::pages).entries == 50);
  CHECK(plan.section(SectionKind::index_buckets).entries == 64);
  CHECK(plan.section(SectionKind::counters).entries == kCounterCount);
}

TEST_CASE("Tables point at their sections") {
  const RegionPlan plan = plan_region(shape());
  std::vector<std::uint64_t> memory(plan.total_bytes / 8 + 512);
  void* base = memory.data();
  std::size_t room = memory.size() * 8;
  base = std::align(4096, plan.total_bytes, base, room);
  REQUIRE(base != nullptr);
  const Tables t = make_tables(base, plan);
  const auto offset = [&](const void* p) {
    return static_cast<std::uint64_t>(static_cast<const char*>(p) - static_cast<const char*>(base));
  };
  CHECK(offset(t.header) == 0);
  CHECK(offset(t.pages.data()) == plan.section(SectionKind::pages).offset);
  CHECK(t.pages.size() == 50);
  CHECK(offset(t.index.data()) == plan.section(SectionKind::index_buckets).offset);
  CHECK(t.index.size() == 64);
  CHECK(offset(t.flight.data()) == plan.section(SectionKind::flight_recorder).offset);
  CHECK(t.flight.size() == shape().flight_records);
  CHECK(t.config_text.size() == 100);
  const ConstTables c = make_tables(static_cast<const void*>(base), plan);
  CHECK(c.leases.data() == t.leases.data());
  CHECK(c.pin_chunks.size() == 20);
}

TEST_CASE("A sound header is usable and gives its plan back") {
  const Header header;
  const RegionCheck check = header.check();
  CHECK(check.verdict == RegionVerdict::usable);
  CHECK(check.findings.empty());
  CHECK(check.plan.total_bytes == header.plan.total_bytes);
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    CHECK(check.plan.sections[i].offset == header.plan.sections[i].offset);
    CHECK(check.plan.sections[i].entries == header.plan.sections[i].entries);
  }
}

TEST_CASE("Draining and closed regions can be read") {
  Header header;
  for (const RegionState s : {RegionState::draining, RegionState::closed}) {
    header.h.state = static_cast<std::uint32_t>(s);
    CHECK(header.check().verdict == RegionVerdict::usable);
  }
}

TEST_CASE("Every damaged field of the header is caught by the checksum") {
  const std::vector<std::pair<std::string, std::function<void(RegionHeader&)>>> damages = {
      {"layout_minor", [](RegionHeader& h) { h.layout_minor ^= 1; }},
      {"region_bytes", [](RegionHeader& h) { h.region_bytes ^= 4096; }},
      {"pool_bytes", [](RegionHeader& h) { h.pool_bytes ^= 1; }},
      {"segment_bytes", [](RegionHeader& h) { h.segment_bytes ^= 1; }},
      {"instance_epoch", [](RegionHeader& h) { h.instance_epoch ^= 1; }},
      {"created_unix_ns", [](RegionHeader& h) { h.created_unix_ns ^= 1; }},
      {"hash_seed", [](RegionHeader& h) { h.hash_seed ^= 1ull << 63; }},
      {"daemon_start_ticks", [](RegionHeader& h) { h.daemon_start_ticks ^= 1; }},
      {"daemon_pid", [](RegionHeader& h) { h.daemon_pid ^= 1; }},
      {"section_count", [](RegionHeader& h) { h.section_count ^= 1; }},
      {"boot_id", [](RegionHeader& h) { h.boot_id[39] ^= 1; }},
      {"name", [](RegionHeader& h) { h.name[0] ^= 1; }},
      {"socket_path", [](RegionHeader& h) { h.socket_path[111] ^= 1; }},
      {"header_crc", [](RegionHeader& h) { h.header_crc ^= 1; }},
      {"section kind", [](RegionHeader& h) { h.sections[0].kind ^= 1; }},
      {"section entry_bytes", [](RegionHeader& h) { h.sections[3].entry_bytes ^= 1; }},
      {"section offset", [](RegionHeader& h) { h.sections[6].offset ^= 4096; }},
      {"section entries", [](RegionHeader& h) { h.sections[10].entries ^= 1; }},
      {"unused section", [](RegionHeader& h) { h.sections[kMaxSections - 1].entries ^= 1; }}};
  for (const auto& [name, damage] : damages) {
    Header header;
    damage(header.h);
    CAPTURE(name);
    check_verdict(header.check(), RegionVerdict::damaged, "checksum");
  }
}

TEST_CASE("Fields with a right checksum and wrong content are refused by name") {
  Header header;
  std::string text;
  SECTION("longer than the object") {
    header.h.region_bytes = header.plan.total_bytes + 4096;
    text = "region_bytes " + std::to_string(header.plan.total_bytes + 4096);
  }
  SECTION("shorter than its sections") {
    header.h.region_bytes = header.plan.section(SectionKind::checksums).offset;
    text = "section checksums";
  }
  SECTION("no bytes at all") {
    header.h.region_bytes = 0;
    text = "section config_text";
  }
  SECTION("section count") {
    header.h.section_count = kSectionCount + 1;
    text = std::to_string(kSectionCount + 1) + " sections";
  }
  SECTION("kinds exchanged") {
    header.section(SectionKind::pages).kind = static_cast<std::uint32_t>(SectionKind::leases);
    text = "section pages";
  }
  SECTION("entry size") {
    header.section(SectionKind::clients).entry_bytes = 128;
    text = "section clients";
  }
  SECTION("entry size zero") {
    header.section(SectionKind::clients).entry_bytes = 0;
    text = "section clients";
  }
  SECTION("unaligned offset") {
    header.section(SectionKind::pages).offset += 64;
    text = "section pages";
  }
  SECTION("offset inside the header") {
    header.section(SectionKind::config_text).offset = 0;
    text = "section config_text";
  }
  SECTION("offset inside the section before") {
    header.section(SectionKind::pages).offset = header.plan.section(SectionKind::segments).offset;
    text = "section pages";
  }
  SECTION("offset past the end") {
    header.section(SectionKind::flight_recorder).offset = 1ull << 62;
    text = "section flight_recorder";
  }
  SECTION("more entries than fit") {
    header.section(SectionKind::leases).entries = header.plan.total_bytes / sizeof(LeaseEntry);
    text = "section leases";
  }
  SECTION("entries whose bytes overflow") {
    header.section(SectionKind::pages).entries = 1ull << 57;
    text = "section pages";
  }
  SECTION("buckets not a power of two") {
    header.section(SectionKind::index_buckets).entries = 63;
    text = "63 index buckets";
  }
  SECTION("no buckets") {
    header.section(SectionKind::index_buckets).entries = 0;
    text = "0 index buckets";
  }
  SECTION("counters of another build") {
    header.section(SectionKind::counters).entries = kCounterCount - 1;
    text = "counter table";
  }
  header.seal();
  check_verdict(header.check(), RegionVerdict::damaged, text);
}

TEST_CASE("A state that does not exist is damage") {
  Header header;
  header.h.state = static_cast<std::uint32_t>(RegionState::recovering) + 1;
  check_verdict(header.check(), RegionVerdict::damaged, "state 6");
}

TEST_CASE("Another layout or fingerprint is another version, not damage") {
  Header header;
  SECTION("major") {
    header.h.layout_major = kLayoutMajor + 1;
  }
  SECTION("fingerprint") {
    header.h.layout_fingerprint ^= 1;
  }
  SECTION("both, sealed by its own build") {
    header.h.layout_major = kLayoutMajor + 1;
    header.h.layout_fingerprint ^= 1;
    header.seal();
  }
  check_verdict(header.check(), RegionVerdict::other_version, "this build reads layout 1.0");
}

TEST_CASE("A region that is being created says so") {
  Header header;
  SECTION("magic and layout are there") {
    header.h.state = static_cast<std::uint32_t>(RegionState::initialising);
    check_verdict(header.check(), RegionVerdict::initialising, "being created");
  }
  SECTION("nothing but zeros") {
    const std::vector<std::uint8_t> zeros(kHeaderBytes);
    check_verdict(check_header(zeros, 1 << 20), RegionVerdict::initialising, "being created");
  }
}

TEST_CASE("What is not a region is refused") {
  Header header;
  SECTION("wrong magic") {
    header.h.magic ^= 1;
    check_verdict(header.check(), RegionVerdict::not_a_region, "wrong magic");
  }
  SECTION("no magic but a state") {
    header.h.magic = 0;
    check_verdict(header.check(), RegionVerdict::not_a_region, "wrong magic");
  }
}

TEST_CASE("A header that is cut off is refused at every length") {
  const Header header;
  for (std::size_t n = 0; n < sizeof(RegionHeader); n += 13) {
    // A copy of exactly n bytes, so that a sanitizer sees every read past the end.
    std::vector<std::uint8_t> part(n);
    if (n > 0) std::memcpy(part.data(), static_cast<const void*>(&header.h), n);
    CHECK(check_header(part, header.plan.total_bytes).verdict == RegionVerdict::not_a_region);
  }
  check_verdict(header.check(header.plan.total_bytes - 1), RegionVerdict::damaged, "but the object has");
}

TEST_CASE("Random damage with a right checksum never gives a plan outside the object") {
  const std::uint32_t seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  std::size_t usable = 0;
  for (int i = 0; i < 20000; ++i) {
    Header header;
    Section& s = header.h.sections[random() % kSectionCount];
    const std::uint64_t value = random() >> (random() % 64);
    switch (random() % 4) {
      case 0:
        s.offset = value;
        break;
      case 1:
        s.offset = value & ~4095ull;
        break;
      case 2:
        s.entries = value;
        break;
      case 3:
        header.h.region_bytes = value;
        break;
    }
    header.seal();
    const RegionCheck check = header.check();
    if (check.verdict != RegionVerdict::usable) continue;
    ++usable;
    std::uint64_t end = kHeaderBytes;
    for (const SectionPlan& p : check.plan.sections) {
      REQUIRE(p.offset >= end);
      end = p.offset + p.bytes();
      REQUIRE(end <= header.plan.total_bytes);
    }
  }
  CHECK(usable > 0);
}

TEST_CASE("Names of regions and their objects") {
  CHECK(control_object_name("a") == "hicache.a.control");
  CHECK(pool_object_name("a", 1) == "hicache.a.pool1");
  for (const char* good : {"a", "quick-start_1.x", "A9"}) CHECK(valid_region_name(good));
  CHECK(valid_region_name(std::string(48, 'x')));
  for (const char* bad : {"", ".a", "a/b", "a b", "..", "\xc3\xa9", "a\n"})
    CHECK_FALSE(valid_region_name(bad));
  CHECK_FALSE(valid_region_name(std::string(49, 'x')));
}

TEST_CASE("Text is cut to its field, ends with a zero and can't write to a terminal") {
  A8 field[8];
  store_text(field, "abc");
  CHECK(load_text(field) == "abc");
  store_text(field, "abcdefghij");
  CHECK(load_text(field) == "abcdefg");
  store_text(field, "a\x1b[2\x7f\xff");
  CHECK(load_text(field) == "a?[2??");
  for (A8& b : field) b = 'x';
  CHECK(load_text(field) == "xxxxxxxx");
}

}  // namespace hicache
