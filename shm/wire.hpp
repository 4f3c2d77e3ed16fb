// Bounded reading and writing of the socket's messages: little-endian integers and length-prefixed strings.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace hicache {

class WireWriter {
 public:
  template <class T>
  requires std::is_integral_v<T>
  void integer(T v) { append(&v, sizeof v); }
  void text(std::string_view s) {
    integer(static_cast<std::uint32_t>(s.size()));
    append(s.data(), s.size());
  }
  void raw(std::span<const std::uint8_t> b) { append(b.data(), b.size()); }
  [[nodiscard]] const std::vector<std::uint8_t>& bytes() const { return bytes_; }
  [[nodiscard]] std::vector<std::uint8_t> take() { return std::move(bytes_); }

 private:
  void append(const void* from, std::size_t n) {
    const auto at = bytes_.size();
    bytes_.resize(at + n);
    if (n > 0) std::memcpy(bytes_.data() + at, from, n);
  }
  std::vector<std::uint8_t> bytes_;
};

// Reads never pass the end: the first one that would sets failed() and gives zero or an empty string from
// then on.
class WireReader {
 public:
  explicit WireReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
  requires std::is_integral_v<T> T integer() {
    T v{};
    if (!take(sizeof v)) return T{};
    std::memcpy(&v, bytes_.data() + at_ - sizeof v, sizeof v);
    return v;
  }
  std::string text(std::size_t limit) {
    const auto n = integer<std::uint32_t>();
    if (n > limit || !take(n)) {
      failed_ = true;
      return {};
    }
    return std::string(reinterpret_cast<const char*>(bytes_.data() + at_ - n), n);
  }
  // Fills `out`, with zeroes once failed.
  void raw(std::span<std::uint8_t> out) {
    if (take(out.size())) {
      std::memcpy(out.data(), bytes_.data() + at_ - out.size(), out.size());
    } else {
      std::memset(out.data(), 0, out.size());
    }
  }
  // A count of elements that need at least `element_bytes` each: refused when the rest can't hold them.
  std::uint32_t count(std::uint32_t limit, std::size_t element_bytes) {
    const auto n = integer<std::uint32_t>();
    if (n > limit || n * element_bytes > bytes_.size() - at_) failed_ = true;
    return failed_ ? 0 : n;
  }
  // For a value that was read but is not allowed: the message counts as malformed from here on.
  void fail() { failed_ = true; }
  [[nodiscard]] bool failed() const { return failed_; }
  // Everything was read and nothing is left.
  [[nodiscard]] bool finished() const { return !failed_ && at_ == bytes_.size(); }

 private:
  bool take(std::size_t n) {
    if (failed_ || n > bytes_.size() - at_) {
      failed_ = true;
      return false;
    }
    at_ += n;
    return true;
  }
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
  bool failed_ = false;
};

}  // namespace hicache
