#include "daemon/storage/redis/reply_reader.hpp"

#include <algorithm>
#include <cassert>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

namespace hicache::daemon::redis {
namespace {

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A whole number and nothing else: no sign but '-', no blanks.
std::optional<std::int64_t> number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

void ReplyReader::expect(PageLanding* landing) {
  stage_ = Stage::line;
  landing_ = landing;
  line_.clear();
  left_ = 0;
  announced_ = 0;
  total_ = 0;
  elements_ = 0;
  ending_ = 0;
  value_ = Reply{};
  open_.clear();
}

std::size_t ReplyReader::feed(std::span<const std::byte> bytes) {
  std::size_t used = 0;
  while (used < bytes.size() && !done() && !broken()) {
    const auto rest = bytes.subspan(used);
    switch (stage_) {
      case Stage::line:
        used += take_line(rest);
        break;
      case Stage::bulk:
        used += take_bulk(rest);
        break;
      case Stage::page_header:
        used += take_page_header(rest);
        break;
      case Stage::page_payload:
        used += landing_->take_payload(rest);
        if (landing_->missing() == 0) end_payload();
        break;
      case Stage::page_skip: {
        const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(rest.size(), left_));
        left_ -= count;
        used += count;
        if (left_ == 0) stage_ = Stage::ending;
        break;
      }
      case Stage::ending:
        used += take_ending(rest);
        break;
      case Stage::done:
      case Stage::broken:
        break;
    }
  }
  return used;
}

Reply ReplyReader::take() {
  assert(done());
  return std::move(value_);
}

void ReplyReader::landed(std::size_t bytes) {
  assert(landing_now());
  landing_->landed(bytes);
  if (landing_->missing() == 0) end_payload();
}

std::size_t ReplyReader::take_line(std::span<const std::byte> bytes) {
  const std::string_view text = text_of(bytes);
  const std::size_t newline = text.find('\n');
  const std::size_t count = newline == std::string_view::npos ? text.size() : newline + 1;
  if (line_.size() + count > kMaxLineBytes) {
    fail("a line of more than " + std::to_string(kMaxLineBytes) + " bytes");
    return count;
  }
  line_.append(text.substr(0, count));
  if (newline != std::string_view::npos) understand_line();
  return count;
}

void ReplyReader::understand_line() {
  if (line_.size() < 3 || line_[line_.size() - 2] != '\r') return fail("a line without a type or an end");
  const std::string line = std::exchange(line_, {});
  const std::string_view rest = std::string_view(line).substr(1, line.size() - 3);
  total_ += line.size();
  if (total_ > kMaxReplyBytes)
    return fail("a reply of more than " + std::to_string(kMaxReplyBytes) + " bytes");

  if (line[0] == '+' || line[0] == '-') {
    Reply reply;
    reply.kind = line[0] == '+' ? ReplyKind::status : ReplyKind::error;
    reply.text = rest;
    return end_value(std::move(reply));
  }
  if (line[0] != ':' && line[0] != '$' && line[0] != '*') return fail("an unknown type of reply");
  const auto value = number(rest);
  if (!value) return fail("a number that is none");
  if (line[0] == '$') return begin_bulk(*value);
  if (line[0] == '*') return begin_array(*value);
  Reply reply;
  reply.kind = ReplyKind::integer;
  reply.integer = *value;
  end_value(std::move(reply));
}

void ReplyReader::begin_bulk(std::int64_t length) {
  if (length == -1) return end_value(Reply{});
  if (length < 0 || static_cast<std::uint64_t>(length) > kMaxValueBytes) {
    return fail("a string of " + std::to_string(length) + " bytes");
  }
  left_ = static_cast<std::uint64_t>(length);
  if (open_.empty()) announced_ = left_;
  value_ = Reply{};
  if (landing_ != nullptr && open_.empty()) {
    value_.kind = ReplyKind::page;
    // Another length is another thing: its bytes are read and forgotten.
    stage_ = left_ == landing_->record_bytes() ? Stage::page_header
             : left_ > 0                       ? Stage::page_skip
                                               : Stage::ending;
    return;
  }
  total_ += left_;
  if (total_ > kMaxReplyBytes)
    return fail("a reply of more than " + std::to_string(kMaxReplyBytes) + " bytes");
  value_.kind = ReplyKind::bulk;
  stage_ = left_ > 0 ? Stage::bulk : Stage::ending;
}

void ReplyReader::begin_array(std::int64_t length) {
  if (length == -1) return end_value(Reply{});
  if (length < 0 || elements_ + static_cast<std::uint64_t>(length) > kMaxElements) {
    return fail("an array of " + std::to_string(length) + " elements");
  }
  if (open_.size() == kMaxDepth) return fail("arrays nested deeper than " + std::to_string(kMaxDepth));
  elements_ += static_cast<std::uint64_t>(length);
  Reply array;
  array.kind = ReplyKind::array;
  if (length == 0) return end_value(std::move(array));
  // No room is made for what is only announced.
  open_.push_back({std::move(array), static_cast<std::uint64_t>(length)});
}

std::size_t ReplyReader::take_bulk(std::span<const std::byte> bytes) {
  const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(bytes.size(), left_));
  value_.text.append(text_of(bytes.first(count)));
  left_ -= count;
  if (left_ == 0) stage_ = Stage::ending;
  return count;
}

std::size_t ReplyReader::take_page_header(std::span<const std::byte> bytes) {
  const std::size_t count = landing_->take_header(bytes);
  left_ -= count;
  if (!landing_->header_whole()) return count;
  if (landing_->header_good()) {
    stage_ = Stage::page_payload;
    if (landing_->missing() == 0) end_payload();
  } else {
    stage_ = left_ > 0 ? Stage::page_skip : Stage::ending;
  }
  return count;
}

void ReplyReader::end_payload() {
  value_.fate = landing_->payload_good() ? PageFate::whole : PageFate::damaged;
  stage_ = Stage::ending;
}

std::size_t ReplyReader::take_ending(std::span<const std::byte> bytes) {
  if (static_cast<char>(bytes[0]) != "\r\n"[ending_]) {
    fail("a string that does not end where it should");
    return 1;
  }
  if (++ending_ == 2) {
    ending_ = 0;
    end_value(std::move(value_));
  }
  return 1;
}

// `value` is whole: it is the reply, or the next element of the innermost open array, which may end with it.
void ReplyReader::end_value(Reply value) {
  while (!open_.empty()) {
    Open& innermost = open_.back();
    innermost.array.items.push_back(std::move(value));
    if (--innermost.missing > 0) {
      stage_ = Stage::line;
      return;
    }
    value = std::move(innermost.array);
    open_.pop_back();
  }
  value_ = std::move(value);
  stage_ = Stage::done;
}

void ReplyReader::fail(std::string why) {
  fault_ = std::move(why);
  stage_ = Stage::broken;
}

std::string_view error_code(const Reply& error) {
  const std::string_view text = error.text;
  return text.substr(0, text.find(' '));
}

}  // namespace hicache::daemon::redis
