// The backend `file` with format `segment`.
#pragma once

#include <memory>

#include "daemon/storage/backend.hpp"
#include "daemon/storage/file/file_settings.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Opens and locks the directories and takes over the pages that are in them. invalid_argument, or the status
// of a directory that can't be used, with the reason.
Result<std::unique_ptr<StorageBackend>> make_segment_backend(const FileSettings& settings,
                                                             const StoragePool& pool, StorageSink& sink);

}  // namespace hicache::daemon
