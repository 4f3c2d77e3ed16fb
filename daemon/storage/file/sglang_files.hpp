// One directory of SGLang's page files: names, sizes and bytes as SGLang has them, made so that no reader
// ever sees a file that is not complete.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shm/fd.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/page_keys.hpp"
#include "shm/page_layout.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Blocking calls. Thread-safe. Any number of processes, SGLang's among them, may use the directory at once.
class SglangFiles {
 public:
  // Makes the directory where its last part is missing and removes temporary files that hicache left there
  // long ago.
  static Result<std::unique_ptr<SglangFiles>> open(const std::string& path, PageLayout layout);

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] int fd() const { return fd_.get(); }

  // ok where a file of that name has that size, else not_found, or corrupt for one with another size.
  [[nodiscard]] Status look(const std::string& name, std::uint64_t bytes) const;
  // Reads a shard into the pool's order. As look(), and system_error with the errno in `error`.
  Status read(const std::string& name, const NamespaceSpec& spec, std::span<std::byte> pool,
              int& error) const;
  // Writes a shard under another name, syncs it and renames it. no_space or system_error with the errno.
  Status write(const std::string& name, const NamespaceSpec& spec, std::span<const std::byte> pool,
               int& error);
  // Tells those who evict by age that it was used.
  void touch(const std::string& name) const;

  // Bytes that the file system can still give; nothing when it can't say.
  [[nodiscard]] std::uint64_t free_bytes() const;
  struct File {
    std::string name;
    std::uint64_t disk_bytes = 0;
    std::int64_t used_ns = 0;  // when it was last written or touched
  };
  // The page files of a model; "" = all files.
  [[nodiscard]] std::vector<File> list(const std::string& model) const;
  void remove(const std::string& name) const;

  // A small text in the directory, "" = not there.
  [[nodiscard]] std::string note(const std::string& name) const;
  Outcome set_note(const std::string& name, const std::string& text) const;

 private:
  SglangFiles(std::string path, UniqueFd fd, PageLayout layout)
      : path_(std::move(path)), fd_(std::move(fd)), layout_(layout) {}

  const std::string path_;
  const UniqueFd fd_;
  const PageLayout layout_;
};

}  // namespace hicache::daemon
