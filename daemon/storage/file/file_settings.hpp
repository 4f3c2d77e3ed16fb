// The settings of the backend `file`: the object storage.file of the configuration.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "shm/page_layout.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

enum class FileFormat : std::uint8_t { segment, sglang };
enum class IoEngineChoice : std::uint8_t { automatic, io_uring, threads };

// Defaults are those of the documentation (docs/storage-file.md). Sizes in bytes.
struct FileSettings {
  FileFormat format = FileFormat::segment;
  std::vector<std::string> directories;  // at least one, absolute; each a disk of its own
  std::uint64_t capacity_bytes = 0;      // of each directory, 0 = what min_free_bytes leaves
  std::uint64_t min_free_bytes = kGiB;   // of each directory's file system, left to others
  std::uint32_t max_errors = 8;          // I/O errors in a row after which a directory is left alone
  std::uint32_t retry_ms = 10'000;       // after which such a directory is tried again
  // Format segment.
  std::uint64_t segment_bytes = kGiB;
  IoEngineChoice engine = IoEngineChoice::automatic;
  std::uint32_t workers = 2;       // each with a ring of its own
  std::uint32_t queue_depth = 32;  // requests in flight of each worker
  bool registered_buffers = true;
  // Format sglang: what the names of its files don't say. One directory, one model, one shape.
  struct Sglang {
    std::string model;  // as SGLang has it, and as the namespace's `model`
    std::string dtype;  // as the namespace's `dtype`
    std::uint32_t page_tokens = 0;
    PageLayout layout = PageLayout::page_first_direct;  // of SGLang's host pool
    std::uint32_t pp_size = 1;
    std::uint32_t pp_rank = 0;
    std::uint32_t threads = 8;  // pages that are read or written at once
  } sglang;
};

// invalid_argument with the key, what was found and what was expected.
Result<FileSettings> parse_file_settings(const nlohmann::ordered_json& settings);

}  // namespace hicache::daemon
