// Named POSIX shared memory (through Boost.Interprocess), sealed memfds, and their mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache {

// A mapping that unmaps itself. Move-only. With `dont_fork` a forked child does not inherit it.
class Mapping {
 public:
  enum class Access { read_only, read_write };
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Maps bytes [0, bytes) of fd. The caller has checked that the object is that long and can't shrink.
  static Result<Mapping> map(int fd, std::uint64_t bytes, Access access, bool dont_fork = false);

  // Lets go without unmapping: in a forked child the range is not there, or already something else.
  void forget() {
    data_ = nullptr;
    size_ = 0;
  }

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] bool valid() const { return data_ != nullptr; }

 private:
  void* data_ = nullptr;
  std::uint64_t size_ = 0;
};

// Creates the named object (mode 0600) with all its memory reserved, so that touching it later can't raise
// SIGBUS. Fails with exists when the name is taken, with no_space when /dev/shm has too little room. `fill`,
// where given, is called with the empty object before its memory is reserved; its error is the call's.
Result<UniqueFd> create_named(const std::string& name, std::uint64_t bytes,
                              const std::function<Outcome(int fd)>& fill = {});
// Opens an existing object. Fails with not_found.
Result<UniqueFd> open_named(const std::string& name, Mapping::Access access);
// Removes the name; mappings and descriptors live on. Missing names are fine.
void remove_named(const std::string& name);
// A second, read-only open of the same object, to be handed to a client.
Result<UniqueFd> reopen_read_only(int fd);

// A memfd of `bytes`, reserved, and sealed against growing, shrinking and unsealing. `label` shows in /proc.
Result<UniqueFd> create_sealed(const std::string& label, std::uint64_t bytes);
// Checks that fd is a memfd with exactly those seals and returns its size. Anything else is refused: a peer
// could truncate it under our feet.
Result<std::uint64_t> sealed_size(int fd);

Result<std::uint64_t> object_size(int fd);

}  // namespace hicache
