// The backend `file` with format `sglang`: a directory that is shared with SGLang.
#pragma once

#include <memory>

#include "daemon/storage/backend.hpp"
#include "daemon/storage/file/file_settings.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Precondition: settings were checked by parse_file_settings(). The directory is not locked: it is for
// sharing.
Result<std::unique_ptr<StorageBackend>> make_sglang_backend(const FileSettings& settings,
                                                            const StoragePool& pool, StorageSink& sink);

}  // namespace hicache::daemon
