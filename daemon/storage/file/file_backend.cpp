#include "daemon/storage/file/file_backend.hpp"

#include "daemon/storage/file/file_settings.hpp"
#include "daemon/storage/file/segment_backend.hpp"
#include "daemon/storage/file/sglang_backend.hpp"

namespace hicache::daemon {

Result<std::unique_ptr<StorageBackend>> make_file_backend(const nlohmann::ordered_json& json,
                                                          const StoragePool& pool, StorageSink& sink) {
  const auto settings = parse_file_settings(json);
  if (!settings) return settings.error();
  return settings->format == FileFormat::sglang ? make_sglang_backend(*settings, pool, sink)
                                                : make_segment_backend(*settings, pool, sink);
}

}  // namespace hicache::daemon
