// hicache-dump on arbitrary bytes. First byte of an input: 0 = the rest is the region; else the rest is a
// list of changes to a good region, six bytes each (offset, value), and an odd first byte makes the header's
// check sum fit.
#include <fcntl.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/support/region_builder.hpp"
#include "tools/dump/json_report.hpp"
#include "tools/dump/region_check.hpp"
#include "tools/dump/text_report.hpp"

using namespace hicache;
using namespace hicache::inspect;

namespace {

void use_everything(std::span<const std::uint8_t> bytes) {
  static const int null = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  MemorySource source(bytes);
  const Snapshot snapshot = Snapshot::take(source);
  const ReportOptions all{true, true, true, true, true};
  const CheckReport report = check_region(source, snapshot);
  Output out(null);
  write_text(out, snapshot, "fuzz", all);
  write_check(out, report);
  const auto doc = to_json(snapshot, "fuzz", all, &report);
  const std::string text = doc.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.empty()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::uint8_t> rest(data + 1, size - 1);
  if (data[0] == 0) {
    use_everything(rest);
    return 0;
  }
  static const test::RegionBuilder original = test::standard_region();
  static test::RegionBuilder region;
  const auto bytes = region.bytes();
  std::memcpy(bytes.data(), original.bytes().data(), bytes.size());
  for (std::size_t at = 0; at + 6 <= rest.size(); at += 6) {
    std::uint16_t offset = 0;
    std::uint32_t value = 0;
    std::memcpy(&offset, rest.data() + at, sizeof offset);
    std::memcpy(&value, rest.data() + at + 2, sizeof value);
    const std::size_t word = std::size_t{offset} * sizeof value % bytes.size();
    std::memcpy(bytes.data() + word, &value, sizeof value);
  }
  if (data[0] % 2 != 0) region.seal_header();
  use_everything(bytes);
  return 0;
}
