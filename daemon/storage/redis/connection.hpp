// One socket to a server: commands go out in order, replies come back in order, neither is waited for.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "daemon/storage/redis/command.hpp"
#include "daemon/storage/redis/endpoint.hpp"
#include "daemon/storage/redis/page_operation.hpp"
#include "daemon/storage/redis/reply_reader.hpp"
#include "daemon/storage/redis/settings.hpp"
#include "shm/fd.hpp"

namespace hicache::daemon::redis {

enum class CommandKind : std::uint8_t { auth, select, ping, slots, scan, forget, asking, page };

// A command that was sent and has no answer.
struct Pending {
  CommandKind kind = CommandKind::ping;
  PageOperationPtr operation;  // of page
  std::uint64_t bytes = 0;     // that go or come with it, for the time it may take
};

// Used by one thread only. Registered with that thread's epoll, its own address as the event's data.
class Connection {
 public:
  enum class State : std::uint8_t { closed, connecting, greeting, ready };
  // Gets every answer, in order. May send; may close the connection.
  using Answered = std::function<void(Connection&, Pending, Reply)>;

  Connection(int epoll, const StoragePool& pool, const Settings& settings, Answered answered)
      : epoll_(epoll), pool_(pool), settings_(settings), answered_(std::move(answered)) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool ready() const { return state_ == State::ready; }
  [[nodiscard]] std::size_t unanswered() const { return pending_.size(); }
  [[nodiscard]] std::uint64_t opened_ns() const { return opened_ns_; }
  // When the peer is taken for dead; 0 = nothing is expected of it.
  [[nodiscard]] std::uint64_t due_ns() const;

  // Begins to connect and to greet: AUTH, SELECT, PING. Precondition: closed.
  Outcome open(const Endpoint& endpoint, std::uint64_t now);
  // The greeting was answered well.
  void greeted() { state_ = State::ready; }
  // Commands without an answer are returned: they get none. Their buffers are not touched again.
  std::deque<Pending> close();

  void send(Pending pending, WireCommand command, std::uint64_t now);
  // Writes what the socket takes. On an error the connection is to be closed, likewise below.
  Outcome flush();
  // The socket is readable, writable or has failed.
  Outcome on_event(std::uint32_t events, std::uint64_t now);

 private:
  Outcome end_connect(std::uint64_t now);
  Outcome receive(std::uint64_t now);
  Outcome digest(std::span<const std::byte> bytes, std::uint64_t now);
  void begin_reply(std::uint64_t now);
  [[nodiscard]] std::size_t staging_wanted() const;
  Outcome watch(bool writable);

  int epoll_;
  const StoragePool& pool_;
  const Settings& settings_;
  Answered answered_;
  UniqueFd fd_;
  State state_ = State::closed;
  bool watching_writable_ = false;
  std::uint64_t opened_ns_ = 0;
  std::uint64_t head_since_ns_ = 0;  // when the oldest command became the oldest
  std::deque<Pending> pending_;
  std::deque<WireCommand> outgoing_;
  std::size_t front_sent_ = 0;  // bytes of outgoing_.front()
  bool reading_ = false;        // the reader has been told what the oldest command expects
  PageLanding landing_;
  ReplyReader reader_;
  std::array<std::byte, 16 * kKiB> staging_;
};

}  // namespace hicache::daemon::redis
