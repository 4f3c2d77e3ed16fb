// Deletes every key of ours on a set of servers: SCAN and DEL in turns, one server after the other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/storage/redis/connection.hpp"
#include "daemon/storage/redis/node.hpp"

namespace hicache::daemon::redis {

// Used by one thread only.
class ClearRun {
 public:
  explicit ClearRun(std::string key_prefix) : prefix_(std::move(key_prefix) + ":") {}

  // Precondition: not running.
  void start(std::vector<Node*> nodes, std::uint64_t now);
  [[nodiscard]] bool running() const { return running_; }
  // Why the last one did not delete everything; "" = it did.
  [[nodiscard]] const std::string& fault() const { return fault_; }
  [[nodiscard]] std::uint64_t deleted() const { return deleted_; }

  // Sends the next command when it is time for one.
  void pump(std::uint64_t now);
  // An answer to a scan or forget. False when no server answers so.
  bool answered(const Pending& pending, const Reply& reply);
  void lost(const Connection& connection);
  void stop(std::string why);

 private:
  bool scanned(const Reply& reply);

  std::string prefix_;
  std::vector<Node*> left_;  // the last one is in work
  Connection* connection_ = nullptr;
  std::string cursor_ = "0";
  bool begun_ = false;              // a SCAN of this node was answered
  bool scanning_ = false;           // a SCAN is on its way
  std::vector<std::string> found_;  // to be deleted
  std::uint64_t unanswered_ = 0;    // DEL commands
  std::uint64_t deleted_ = 0;
  std::uint64_t end_ns_ = 0;
  bool running_ = false;
  std::string fault_;
};

}  // namespace hicache::daemon::redis
