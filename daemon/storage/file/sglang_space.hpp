// How much a shared directory of SGLang's files may take, and what goes when it has too much.
#pragma once

#include <cstdint>
#include <mutex>

#include "daemon/storage/file/file_settings.hpp"
#include "daemon/storage/file/sglang_files.hpp"

namespace hicache::daemon {

// Thread-safe. What other processes write is seen when the directory is looked through, not before.
class SglangSpace {
 public:
  SglangSpace(const FileSettings& settings, SglangFiles& files) : settings_(settings), files_(files) {}

  // Whether a file of that size may be written. True: settle() follows when it has been, or could not be.
  bool take(std::uint64_t bytes);
  void settle(std::uint64_t bytes);
  // Settles at its end, whatever ended the write.
  class Settling {
   public:
    Settling(SglangSpace& space, std::uint64_t bytes) : space_(space), bytes_(bytes) {}
    ~Settling() { space_.settle(bytes_); }
    Settling(const Settling&) = delete;
    Settling& operator=(const Settling&) = delete;

   private:
    SglangSpace& space_;
    const std::uint64_t bytes_;
  };
  // Files are used: their age counts.
  [[nodiscard]] bool limited() const { return settings_.capacity_bytes != 0; }
  // Looks through the directory where that may be needed, and removes what was not used for longest until a
  // tenth of the capacity is free. Takes long: not for threads that serve pages.
  void keep();
  // Removes every page.
  void clear();

  [[nodiscard]] std::uint64_t used_bytes() const;
  [[nodiscard]] std::uint64_t evicted_files() const;

 private:
  const FileSettings& settings_;
  SglangFiles& files_;
  mutable std::mutex mutex_;
  bool looked_ = false;
  std::uint64_t used_ = 0;     // when it was last looked through, and what was written since
  std::uint64_t written_ = 0;  // since then
  std::uint64_t pending_ = 0;  // taken and not settled: a look may find these files or not
  std::uint64_t evicted_ = 0;
};

}  // namespace hicache::daemon
