// Where the bytes of a region come from: the named shared memory object, a copied file, or memory (tests,
// fuzzers).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache::inspect {

// Random access to a region's bytes. Not thread-safe.
class RegionSource {
 public:
  virtual ~RegionSource() = default;
  // Size of the object now, in bytes. It may change between calls: nothing here trusts it for long.
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  // Copies up to out.size() bytes from `offset` and returns how many there were: fewer at the end of the
  // object.
  virtual std::size_t read(std::uint64_t offset, std::span<std::uint8_t> out) = 0;
  // True when a daemon may be changing the bytes while they are read.
  [[nodiscard]] virtual bool may_change() const = 0;
};

// Reads through pread and never maps: an object that shrinks meanwhile gives a short read, not SIGBUS.
class FileSource final : public RegionSource {
 public:
  // The control region of the daemon called `name`. not_found, or not_permitted for another user's.
  static Result<FileSource> open_region(const std::string& name);
  // A copy of a region in a regular file.
  static Result<FileSource> open_file(const std::string& path);

  [[nodiscard]] std::uint64_t size() const override;
  std::size_t read(std::uint64_t offset, std::span<std::uint8_t> out) override;
  [[nodiscard]] bool may_change() const override { return may_change_; }

 private:
  FileSource(UniqueFd fd, bool may_change) : fd_(std::move(fd)), may_change_(may_change) {}
  static Result<FileSource> checked(UniqueFd fd, bool may_change, const std::string& what);

  UniqueFd fd_;
  bool may_change_ = false;
};

// Bytes in memory that the caller keeps alive.
class MemorySource final : public RegionSource {
 public:
  explicit MemorySource(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  [[nodiscard]] std::uint64_t size() const override { return bytes_.size(); }
  std::size_t read(std::uint64_t offset, std::span<std::uint8_t> out) override;
  [[nodiscard]] bool may_change() const override { return false; }

 private:
  std::span<const std::uint8_t> bytes_;
};

}  // namespace hicache::inspect
