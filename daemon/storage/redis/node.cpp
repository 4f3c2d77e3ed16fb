#include "daemon/storage/redis/node.hpp"

#include <algorithm>
#include <utility>

#include "daemon/storage/redis/page_steps.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon::redis {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint64_t kFirstPauseMs = 50;
constexpr std::uint32_t kMaxDoublings = 10;
// A connection that lasted this long was a good one: the next attempt needs no pause.
constexpr std::uint64_t kGoodLifeNs = 1'000 * kNsPerMs;
constexpr std::size_t kShownBytes = 160;

std::uint64_t sooner(std::uint64_t a, std::uint64_t b) {
  if (a == 0 || b == 0) return a + b;
  return std::min(a, b);
}

}  // namespace

std::string shown_text(const std::string& text, const std::string& password) {
  std::string shown = text.substr(0, 4 * kShownBytes);
  if (!password.empty()) {
    for (auto at = shown.find(password); at != std::string::npos; at = shown.find(password, at + 3)) {
      shown.replace(at, password.size(), "***");
    }
  }
  for (char& c : shown) c = c >= ' ' && c <= '~' ? c : '?';
  if (shown.size() > kShownBytes) shown = shown.substr(0, kShownBytes) + "...";
  return shown;
}

Node::Node(Endpoint endpoint, int epoll, const StoragePool& pool, const Settings& settings, NodeOwner& owner)
    : endpoint_(std::move(endpoint)), pool_(pool), settings_(settings), owner_(owner) {
  const std::uint32_t share = std::max(1u, settings.connections / settings.threads);
  for (std::uint32_t i = 0; i < share; ++i) {
    connections_.push_back(std::make_unique<Connection>(
        epoll, pool, settings, [this](Connection& connection, Pending pending, Reply reply) {
          if (connection.state() == Connection::State::greeting) {
            greeting_answered(connection, pending, reply);
          } else {
            owner_.answered(*this, connection, std::move(pending), std::move(reply));
          }
        }));
  }
}

Node::~Node() = default;

Connection* Node::ready_connection() const {
  for (const auto& connection : connections_) {
    if (connection->ready()) return connection.get();
  }
  return nullptr;
}

bool Node::idle() const {
  return queue_.empty() && std::all_of(connections_.begin(), connections_.end(), [](const auto& connection) {
           return connection->unanswered() == 0 || !connection->ready();
         });
}

bool Node::owns(const Connection& connection) const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [&](const auto& mine) { return mine.get() == &connection; });
}

std::uint64_t Node::pump(std::uint64_t now, bool wanted) {
  const auto late = [now](const auto& connection) {
    return connection->due_ns() != 0 && now >= connection->due_ns();
  };
  if (const auto first = std::find_if(connections_.begin(), connections_.end(), late);
      first != connections_.end()) {
    // One thread of the server answers all connections: what comes next must not wait for each of them in
    // turn.
    drop_all((*first)->ready() ? "no answer in time" : "connect: no answer in time", Status::timed_out);
  }
  if (wanted) open(now);
  if (down()) {
    queue_.fail_all(Status::system_error);
  } else {
    hand_out(now);
  }
  std::uint64_t next = 0;
  bool closed = false;
  for (const auto& connection : connections_) {
    if (auto flushed = connection->flush(); !flushed) {
      drop(*connection, flushed.error().message, Status::system_error);
    }
    closed = closed || connection->state() == Connection::State::closed;
    next = sooner(next, connection->due_ns());
  }
  if (wanted && closed) next = sooner(next, std::max(retry_ns_, now + kNsPerMs));
  return next;
}

// After a failure one connection tries the server out, at growing intervals; the others follow when it is
// ready.
void Node::open(std::uint64_t now) {
  if (failures_ > 0 && now < retry_ns_) return;
  const bool trying = std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
    return connection->state() == Connection::State::connecting ||
           connection->state() == Connection::State::greeting;
  });
  if (failures_ > 0 && trying) return;
  for (const auto& connection : connections_) {
    if (connection->state() != Connection::State::closed) continue;
    if (auto opened = connection->open(endpoint_, now); !opened) {
      drop(*connection, opened.error().message, Status::system_error);
      return;
    }
    if (failures_ > 0) return;
  }
}

void Node::greeting_answered(Connection& connection, const Pending& pending, const Reply& reply) {
  if (reply.kind == ReplyKind::error) {
    // Of a refused AUTH the code only: some servers repeat the command.
    const std::string words = pending.kind == CommandKind::auth ? std::string(error_code(reply)) : reply.text;
    return drop(connection, "the server refuses the connection: " + words, Status::system_error);
  }
  const char* expected = pending.kind == CommandKind::ping ? "PONG" : "OK";
  if (reply.kind != ReplyKind::status || reply.text != expected) {
    return drop(connection, "the server does not speak RESP2: a wrong greeting", Status::corrupt);
  }
  if (pending.kind != CommandKind::ping) return;
  const bool was_up = up();
  connection.greeted();
  HICACHE_CRASH_POINT(redis_greeted);
  if (was_up) return;
  problem_.clear();
  owner_.changed(*this);
}

void Node::hand_out(std::uint64_t now) {
  while (!queue_.empty()) {
    Connection* best = nullptr;
    for (const auto& connection : connections_) {
      if (!connection->ready() || connection->unanswered() >= settings_.depth) continue;
      if (best == nullptr || connection->unanswered() < best->unanswered()) best = connection.get();
    }
    if (best == nullptr) return;
    PageOperationPtr operation = queue_.pop();
    if (operation->cancelled()) {
      operation->finish(Status::closed);
    } else if (operation->expired(now)) {
      operation->finish(Status::timed_out);
    } else {
      begin(*best, std::move(operation), now);
    }
  }
}

void Node::begin(Connection& connection, PageOperationPtr operation, std::uint64_t now) {
  if (operation->asked_at) {
    operation->asked_at.reset();
    connection.send({CommandKind::asking, nullptr}, make_command({"ASKING"}), now);
  }
  WireCommand command = make_page_command(*operation, pool_, settings_.ttl_ms);
  connection.send({CommandKind::page, std::move(operation)}, std::move(command), now);
}

void Node::on_event(Connection& connection, std::uint32_t events, std::uint64_t now) {
  if (auto outcome = connection.on_event(events, now); !outcome) {
    drop(connection, outcome.error().message, outcome.status());
  }
}

void Node::drop(Connection& connection, const std::string& why, Status outcome) {
  const std::uint64_t now = monotonic_ns();
  const bool good = connection.ready() && failures_ == 0 && outcome != Status::timed_out &&
                    now - connection.opened_ns() >= kGoodLifeNs;
  const bool was_up = up();
  auto unanswered = connection.close();
  if (!good && now >= retry_ns_) {  // connections that fail together are one failure
    const std::uint64_t pause = kFirstPauseMs << std::min(failures_, kMaxDoublings);
    retry_ns_ = now + std::min<std::uint64_t>(pause, settings_.reconnect_max_ms) * kNsPerMs;
    ++failures_;
  }
  if (std::string problem = shown_text(why, settings_.password); !up() && (was_up || problem != problem_)) {
    problem_ = std::move(problem);
    owner_.changed(*this);
  }
  const bool nonsense = outcome == Status::corrupt;
  if (nonsense) owner_.distrusted(*this, why);
  owner_.lost(*this, connection, std::move(unanswered), nonsense ? Status::system_error : outcome);
}

void Node::drop_all(const std::string& why, Status outcome) {
  for (const auto& connection : connections_) {
    if (connection->state() != Connection::State::closed) drop(*connection, why, outcome);
  }
}

}  // namespace hicache::daemon::redis
