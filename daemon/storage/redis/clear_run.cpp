#include "daemon/storage/redis/clear_run.hpp"

#include <utility>

#include "shm/crash_points.hpp"

namespace hicache::daemon::redis {
namespace {

// A server that always has another cursor must not keep us for ever.
constexpr std::uint64_t kLongestNs = 600'000'000'000;
constexpr std::size_t kMaxCursorBytes = 20;

bool is_cursor(const Reply& reply) {
  return reply.kind == ReplyKind::bulk && !reply.text.empty() && reply.text.size() <= kMaxCursorBytes &&
         reply.text.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

void ClearRun::start(std::vector<Node*> nodes, std::uint64_t now) {
  left_ = std::move(nodes);
  connection_ = nullptr;
  cursor_ = "0";
  begun_ = false;
  scanning_ = false;
  found_.clear();
  unanswered_ = 0;
  deleted_ = 0;
  end_ns_ = now + kLongestNs;
  running_ = true;
  fault_.clear();
  if (left_.empty()) stop("no server is known");
}

void ClearRun::pump(std::uint64_t now) {
  if (!running_) return;
  if (now >= end_ns_) return stop("it took too long");
  if (scanning_ || unanswered_ > 0) return;
  if (begun_ && cursor_ == "0" && found_.empty()) {  // this server is done
    left_.pop_back();
    connection_ = nullptr;
    begun_ = false;
    if (left_.empty()) {
      running_ = false;
      return;
    }
  }
  if (connection_ == nullptr) connection_ = left_.back()->ready_connection();
  if (connection_ == nullptr) return stop(left_.back()->endpoint().text + " can't be reached");
  if (found_.empty()) {
    scanning_ = true;
    connection_->send({CommandKind::scan, nullptr},
                      make_command({"SCAN", cursor_, "MATCH", prefix_ + "*", "COUNT", "1000"}), now);
    return;
  }
  // One key each: a cluster refuses commands whose keys are in several slots.
  for (const std::string& key : std::exchange(found_, {})) {
    ++unanswered_;
    connection_->send({CommandKind::forget, nullptr}, make_command({"DEL", key}), now);
  }
}

bool ClearRun::answered(const Pending& pending, const Reply& reply) {
  if (!running_) return true;
  if (reply.kind == ReplyKind::error) {
    stop(left_.back()->endpoint().text + " refuses: " + reply.text);
    return true;
  }
  if (pending.kind == CommandKind::scan) return scanned(reply);
  if (reply.kind != ReplyKind::integer || unanswered_ == 0) return false;
  --unanswered_;
  if (reply.integer > 0) ++deleted_;
  HICACHE_CRASH_POINT(redis_clear_deleted);
  return true;
}

bool ClearRun::scanned(const Reply& reply) {
  if (reply.kind != ReplyKind::array || reply.items.size() != 2 || !is_cursor(reply.items[0]) ||
      reply.items[1].kind != ReplyKind::array) {
    return false;
  }
  scanning_ = false;
  begun_ = true;
  cursor_ = reply.items[0].text;
  for (const Reply& key : reply.items[1].items) {
    // Whatever the server says: nothing is deleted but what has our prefix.
    if (key.kind == ReplyKind::bulk && key.text.starts_with(prefix_)) found_.push_back(key.text);
  }
  if (!found_.empty()) HICACHE_CRASH_POINT(redis_clear_scanned);
  return true;
}

void ClearRun::lost(const Connection& connection) {
  if (running_ && connection_ == &connection) stop(left_.back()->endpoint().text + " was lost");
}

void ClearRun::stop(std::string why) {
  running_ = false;
  connection_ = nullptr;
  fault_ = std::move(why);
}

}  // namespace hicache::daemon::redis
