#include "daemon/storage/backend_factory.hpp"

#include <array>
#include <string_view>

#include "daemon/storage/file/file_backend.hpp"
#include "daemon/storage/memory_backend.hpp"
#include "daemon/storage/redis/redis_backend.hpp"

namespace hicache::daemon {
namespace {

using Settings = nlohmann::ordered_json;
using Maker = Result<std::unique_ptr<StorageBackend>> (*)(const Settings&, const StoragePool&, StorageSink&);

struct Row {
  std::string_view name;
  Maker make;
};

// In the order in which they are listed to people.
constexpr std::array kBackends = {
    Row{"file", make_file_backend},
    Row{"memory", make_memory_backend},
    Row{"redis", make_redis_backend},
};

}  // namespace

std::vector<std::string_view> storage_backend_names() {
  std::vector<std::string_view> names;
  names.reserve(kBackends.size());
  for (const Row& row : kBackends) names.push_back(row.name);
  return names;
}

Result<std::unique_ptr<StorageBackend>> make_storage_backend(const std::string& name,
                                                             const Settings& settings,
                                                             const StoragePool& pool, StorageSink& sink) {
  std::string known;
  for (const Row& row : kBackends) {
    if (row.name == name) {
      auto made = row.make(settings, pool, sink);
      if (made) return made;
      return Error{made.status(), "Failed to create storage backend: " + made.error().message,
                   made.error().system_errno};
    }
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  return Error{
      Status::invalid_argument,
      "Failed to create storage backend: Unknown storage backend '" + name + "', known are: " + known, 0};
}

}  // namespace hicache::daemon
