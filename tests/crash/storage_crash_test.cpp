// A daemon dies at each named point of its backups, prefetches and storage files (shm/crash_points.hpp). The
// next one loses nothing that storage had kept, and leaves no half-made file behind.
#include <filesystem>
#include <string>
#include <vector>

#include "tests/crash/storage_death.hpp"

namespace hicache::test {
namespace {

// Points that come only where segments must make room: there, old pages may go.
bool makes_room(const std::string& point) {
  return point == "segment_evicted" || point == "segment_begun_again" || point == "segment_hot_moved";
}

std::string storage_at(const std::string& point, const std::string& directory) {
  nlohmann::json file = {{"directories", {directory}}, {"min_free", 0}};
  if (point.starts_with("sglang_")) {
    file["format"] = "sglang";
    file["sglang"] = {{"model", stored_spec().model},
                      {"dtype", stored_spec().dtype},
                      {"page_tokens", 4},
                      {"layout", "page_first"}};
  } else {
    file["segment_bytes"] = "256KiB";
    if (makes_room(point)) file["capacity"] = "1MiB";
  }
  return nlohmann::json{{"backend", "file"}, {"file", file}}.dump();
}

// Files of the directory that no reader of it knows.
std::vector<std::string> half_made_files(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".new")) names.push_back(name);
  }
  return names;
}

}  // namespace

TEST_CASE("the daemon may die at every named point of its storage: nothing is wrong, nothing kept is lost") {
  for (const CrashPoint& point : storage_crash_points()) {
    const TempDir dir;
    StorageDeath death;
    death.point = point;
    death.storage = storage_at(point.name, dir.file("pages"));
    if (makes_room(point.name)) death.may_lose = kStoredPages;
    death.look = [&] { CHECK(half_made_files(dir.file("pages")).empty()); };
    die_and_come_back(death);
  }
}

}  // namespace hicache::test
