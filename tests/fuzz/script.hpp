// An input as a list of steps: bytes that are taken one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hicache::fuzz {

// Reads an input to its end, then gives zeros.
class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  [[nodiscard]] bool more() const { return at_ < size_; }
  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  template <class T>
  T raw() {
    T value{};
    std::uint8_t bytes[sizeof(T)] = {};
    for (auto& b : bytes) b = byte();
    std::memcpy(static_cast<void*>(&value), bytes, sizeof value);
    return value;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

}  // namespace hicache::fuzz
