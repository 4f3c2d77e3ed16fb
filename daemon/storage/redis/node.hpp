// A server as one worker sees it: its connections, what waits for them, and how often it is tried again when
// it is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/storage/redis/connection.hpp"
#include "daemon/storage/redis/op_queue.hpp"

namespace hicache::daemon::redis {

class Node;

// Who owns the nodes. Called on the worker's thread.
class NodeOwner {
 public:
  virtual ~NodeOwner() = default;
  // An answer to anything but the greeting. The connection is still open.
  virtual void answered(Node& node, Connection& connection, Pending pending, Reply reply) = 0;
  // A connection has ended; these commands get no answer. `outcome` is for their pages.
  virtual void lost(Node& node, Connection& connection, std::deque<Pending> unanswered, Status outcome) = 0;
  // The server said what no server says.
  virtual void distrusted(Node& node, const std::string& why) = 0;
  // Connected, or not any more: see problem().
  virtual void changed(Node& node) = 0;
};

class Node {
 public:
  Node(Endpoint endpoint, int epoll, const StoragePool& pool, const Settings& settings, NodeOwner& owner);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  [[nodiscard]] const Endpoint& endpoint() const { return endpoint_; }
  // A connection that can take commands.
  [[nodiscard]] Connection* ready_connection() const;
  [[nodiscard]] bool up() const { return ready_connection() != nullptr; }
  // It is not up and the last attempt failed: nothing should wait for it.
  [[nodiscard]] bool down() const { return failures_ > 0 && !up(); }
  [[nodiscard]] const std::string& problem() const { return problem_; }  // "" = none
  [[nodiscard]] bool idle() const;
  [[nodiscard]] OperationQueue& queue() { return queue_; }

  // Opens connections that should be, ends those that are late, ends what waits when the node is down, and
  // hands out what waits otherwise. `wanted`: keep connections. Returns when to be called again at the
  // latest, 0 = never.
  std::uint64_t pump(std::uint64_t now, bool wanted);
  void on_event(Connection& connection, std::uint32_t events, std::uint64_t now);
  [[nodiscard]] bool owns(const Connection& connection) const;
  // Sends a page's command on this connection.
  void begin(Connection& connection, PageOperationPtr operation, std::uint64_t now);
  // A page was answered well: the server works.
  void works() { failures_ = 0; }
  // Ends a connection. `outcome` is for its pages; corrupt: the server speaks nonsense, they get
  // system_error.
  void drop(Connection& connection, const std::string& why, Status outcome);
  void drop_all(const std::string& why, Status outcome);

 private:
  void open(std::uint64_t now);
  void greeting_answered(Connection& connection, const Pending& pending, const Reply& reply);
  void hand_out(std::uint64_t now);
  [[nodiscard]] std::string cleaned(const std::string& text) const;

  Endpoint endpoint_;
  const StoragePool& pool_;
  const Settings& settings_;
  NodeOwner& owner_;
  std::vector<std::unique_ptr<Connection>> connections_;
  OperationQueue queue_;
  std::uint32_t failures_ = 0;  // since the server last did what it should
  std::uint64_t retry_ns_ = 0;
  std::string problem_;
};

// The server's words as they can be shown: printable, short, without the password, should it repeat it.
std::string shown_text(const std::string& text, const std::string& password);

}  // namespace hicache::daemon::redis
