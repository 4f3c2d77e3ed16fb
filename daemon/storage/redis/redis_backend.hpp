// The backend `redis`: pages on a Redis or Valkey server, or a cluster of them, which several machines share.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/storage/backend.hpp"

namespace hicache::daemon {

// From the settings of storage.redis (docs/storage-redis.md). Does not wait for the server: a backend whose
// server can't be reached says so in its health and connects when it can.
Result<std::unique_ptr<StorageBackend>> make_redis_backend(const nlohmann::ordered_json& settings,
                                                           const StoragePool& pool, StorageSink& sink);

}  // namespace hicache::daemon
