// Storage backends by name. A backend adds one row to the table in backend_factory.cpp.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/storage/backend.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// The names of all backends, in the order in which they are listed to people. Each has an object of settings
// in the configuration, storage.<name>.
std::vector<std::string_view> storage_backend_names();

// Makes the backend `name` from its own settings, the object storage.<name> of the configuration. The sink
// outlives the backend.
//
// invalid_argument "Failed to create storage backend: ..." with the reason: an unknown name (the known ones
// are listed), a key it doesn't know, a value it can't take (both are named), or a medium that can't be used
// (which, why, what to do).
Result<std::unique_ptr<StorageBackend>> make_storage_backend(const std::string& name,
                                                             const nlohmann::ordered_json& settings,
                                                             const StoragePool& pool, StorageSink& sink);

}  // namespace hicache::daemon
