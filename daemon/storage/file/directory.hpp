// A directory that holds segments: locked for this process, with a superblock, and as large as it may be.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// The calls block on the file system: not for threads that serve pages. Thread-safe, being constant.
class Directory {
 public:
  // Makes the directory where only its last part is missing, takes its lock and checks its superblock, or
  // writes one where there is none.
  //   busy              another process, or another entry of `directories`, has it
  //   version_mismatch  it was written by a build with another format
  //   corrupt           its superblock is damaged; nothing in it is touched
  //   system_error      the file system refuses
  static Result<std::unique_ptr<Directory>> open(const std::string& path);

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] int fd() const { return fd_.get(); }

  // Bytes that the file system can still give to this process.
  [[nodiscard]] Result<std::uint64_t> free_bytes() const;
  // Names of the files that look like segments; what an interrupted creation left behind is removed.
  [[nodiscard]] Result<std::vector<std::string>> segment_names() const;
  // Whether `path` still leads to this directory: not when it was removed or something was mounted over it.
  [[nodiscard]] bool present() const;
  // Whether bytes can be written and synced there: a small file is. The errno, 0 = yes.
  [[nodiscard]] int try_write() const;

 private:
  Directory(std::string path, UniqueFd fd, UniqueFd lock)
      : path_(std::move(path)), fd_(std::move(fd)), lock_(std::move(lock)) {}
  Outcome check_or_make_superblock() const;

  std::string path_;
  UniqueFd fd_;
  UniqueFd lock_;
};

// "segment-0000000000000001.hicache" and back; 0 = not such a name.
std::string segment_name(std::uint64_t sequence);
std::uint64_t segment_number(const std::string& name);

}  // namespace hicache::daemon
