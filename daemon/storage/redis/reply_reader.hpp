// Reads RESP2, the replies of a Redis server, as the bytes come. The server is a stranger: every length,
// type, number and nesting is checked and bounded before it is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/storage/redis/page_landing.hpp"

namespace hicache::daemon::redis {

enum class ReplyKind : std::uint8_t { status, error, integer, nil, bulk, array, page };

// What came of a page that a reply was expected to hold.
enum class PageFate : std::uint8_t {
  whole,    // the buffers hold it
  foreign,  // another length, or a header that is not this page's
  damaged,  // the payload has another checksum
};

struct Reply {
  ReplyKind kind = ReplyKind::nil;
  std::int64_t integer = 0;           // of an integer
  std::string text;                   // of a status, error or bulk
  std::vector<Reply> items;           // of an array
  PageFate fate = PageFate::foreign;  // of a page
};

// One reply at a time. Not thread-safe.
class ReplyReader {
 public:
  static constexpr std::size_t kMaxLineBytes = 1024;
  static constexpr std::size_t kMaxDepth = 6;                // CLUSTER SLOTS has 4
  static constexpr std::size_t kMaxElements = 1u << 18;      // of a reply, in all its arrays
  static constexpr std::uint64_t kMaxReplyBytes = 8 * kMiB;  // of a reply that is not a page

  // Begins the next reply. With a landing, a bulk string at its top is a record of that page.
  void expect(PageLanding* landing);

  // Takes bytes up to the end of the reply; returns how many. Takes none when done or broken.
  std::size_t feed(std::span<const std::byte> bytes);
  [[nodiscard]] bool done() const { return stage_ == Stage::done; }
  // The server speaks nonsense: nothing that comes after can be understood.
  [[nodiscard]] bool broken() const { return stage_ == Stage::broken; }
  [[nodiscard]] const std::string& fault() const { return fault_; }
  // Bytes of the string at the reply's top, once the server has said how many; 0 before.
  [[nodiscard]] std::uint64_t announced_bytes() const { return announced_; }
  // Precondition: done().
  Reply take();

  // True while the payload of a page comes next: the caller may write to the landing's targets itself, and
  // then says so with landed().
  [[nodiscard]] bool landing_now() const { return stage_ == Stage::page_payload; }
  // Bytes that come next and mean nothing: of a value that is not the page.
  [[nodiscard]] std::uint64_t skipping() const { return stage_ == Stage::page_skip ? left_ : 0; }
  // Precondition: landing_now(), bytes at most the landing's missing().
  void landed(std::size_t bytes);

 private:
  enum class Stage : std::uint8_t { line, bulk, page_header, page_payload, page_skip, ending, done, broken };
  // An array that has not got all its elements.
  struct Open {
    Reply array;
    std::uint64_t missing;
  };

  std::size_t take_line(std::span<const std::byte> bytes);
  std::size_t take_bulk(std::span<const std::byte> bytes);
  std::size_t take_page_header(std::span<const std::byte> bytes);
  std::size_t take_ending(std::span<const std::byte> bytes);
  void understand_line();
  void begin_bulk(std::int64_t length);
  void begin_array(std::int64_t length);
  void end_value(Reply value);
  void end_payload();
  void fail(std::string why);

  Stage stage_ = Stage::done;
  PageLanding* landing_ = nullptr;
  std::string line_;
  std::uint64_t left_ = 0;  // bytes of the bulk, or to skip
  std::uint64_t announced_ = 0;
  std::uint64_t total_ = 0;  // bytes of this reply that were kept
  std::uint64_t elements_ = 0;
  std::uint8_t ending_ = 0;  // bytes of CR LF taken
  Reply value_;              // the bulk or page that ends after CR LF; the reply when done
  std::vector<Open> open_;
  std::string fault_;
};

// "OOM" of "OOM command not allowed ...": the code of an error's text.
std::string_view error_code(const Reply& error);

}  // namespace hicache::daemon::redis
