// The backend `file`: pages in files of local disks or of a shared file system.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/storage/backend.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// By storage.file.format. Errors as make_storage_backend() says.
Result<std::unique_ptr<StorageBackend>> make_file_backend(const nlohmann::ordered_json& settings,
                                                          const StoragePool& pool, StorageSink& sink);

}  // namespace hicache::daemon
