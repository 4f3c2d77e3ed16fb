// Configuration text: refused with a reason, or a configuration that survives being written and read again.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "daemon/config.hpp"

using namespace hicache::daemon;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto config = parse_config(std::string(reinterpret_cast<const char*>(data), size));
  if (!config) {
    if (config.error().message.empty()) std::abort();
    return 0;
  }
  const std::string text = config_to_json(*config);
  const auto again = parse_config(text);
  if (!again || config_to_json(*again) != text) std::abort();
  Config running = *config;
  if (!apply_reload(running, *again)) std::abort();
  if (config->page_table_entries() == 0) std::abort();
  return 0;
}
