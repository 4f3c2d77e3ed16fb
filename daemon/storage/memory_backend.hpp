// A storage backend that keeps pages in the daemon's own memory: the smallest complete one, for tests and for
// trying the storage tier out. It can be told to be slow, to fail, and to stall. docs/storage.md lists its
// settings.
#pragma once

#include <memory>

#include "daemon/storage/backend_factory.hpp"

namespace hicache::daemon {

Result<std::unique_ptr<StorageBackend>> make_memory_backend(const nlohmann::ordered_json& settings,
                                                            const StoragePool& pool, StorageSink& sink);

}  // namespace hicache::daemon
