// A redis-server of the test's own, and a plain client to look at it and to spoil its values.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/fd.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

// Full path of a program on the PATH; "" when it is not there.
std::string find_program(const std::string& name);
// A TCP port of the loopback interface that nothing listens on now.
std::uint16_t free_port();

// A blocking connection that says one thing at a time. Throws std::runtime_error when the server is gone.
class RedisClient {
 public:
  explicit RedisClient(std::uint16_t port);
  // The answer as text: a status, a number, a string ("(nil)" for none), an error with '-' in front, and of
  // an array its elements, one a line.
  std::string ask(const std::vector<std::string>& words);

 private:
  std::string line();
  std::string bytes(std::size_t count);
  std::string answer();

  UniqueFd fd_;
  std::string buffer_;
};

// Listens on a loopback port and on a Unix socket in a directory of its own; keeps nothing on disk.
class RedisServer {
 public:
  static bool available() { return !find_program("redis-server").empty(); }

  // Ready when the constructor returns. `options` are added to the command line: {"--maxmemory", "4mb"}.
  explicit RedisServer(std::vector<std::string> options = {});
  RedisServer(RedisServer&&) = default;

  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] std::string tcp() const { return "127.0.0.1:" + std::to_string(port_); }
  [[nodiscard]] std::string unix_socket() const { return "unix:" + dir_->file("redis.sock"); }
  std::string ask(const std::vector<std::string>& words) const { return RedisClient(port_).ask(words); }
  // SIGKILL and wait.
  void kill9();
  // Again, on the same port.
  void start();
  void signal(int number) const { child_.kill(number); }

 private:
  std::unique_ptr<TempDir> dir_;
  std::uint16_t port_ = 0;
  std::vector<std::string> options_;
  Child child_;
};

// Three nodes that share the slots, without replicas.
class RedisCluster {
 public:
  RedisCluster();
  [[nodiscard]] RedisServer& node(std::size_t i) { return nodes_[i]; }
  [[nodiscard]] std::size_t size() const { return nodes_.size(); }
  // Moves a slot with its keys; `between` runs while it is on its way.
  void migrate(std::uint16_t slot, std::size_t from, std::size_t to,
               const std::function<void()>& between = {});

 private:
  std::vector<RedisServer> nodes_;
};

}  // namespace hicache::test
