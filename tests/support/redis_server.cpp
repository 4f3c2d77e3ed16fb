#include "tests/support/redis_server.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <csignal>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace hicache::test {
namespace {

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

constexpr int kStartAttempts = 5;  // a port that was free may be taken when the server gets there

}  // namespace

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/bin" : path);
  std::string folder;
  while (std::getline(folders, folder, ':')) {
    const std::string candidate = folder + "/" + name;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

std::uint16_t free_port() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::runtime_error("no free port");
  }
  return ntohs(address.sin_port);
}

RedisClient::RedisClient(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const timeval patience{kPatienceMs / 1000, 0};
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const sockaddr_in address = loopback(port);
  if (::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    throw std::runtime_error("can't connect to the test's redis-server");
  }
}

std::string RedisClient::ask(const std::vector<std::string>& words) {
  std::string request = "*" + std::to_string(words.size()) + "\r\n";
  for (const std::string& word : words) request += "$" + std::to_string(word.size()) + "\r\n" + word + "\r\n";
  for (std::size_t sent = 0; sent < request.size();) {
    const ssize_t n = ::send(fd_.get(), request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) throw std::runtime_error("the test's redis-server is gone");
    sent += static_cast<std::size_t>(n);
  }
  return answer();
}

std::string RedisClient::bytes(std::size_t count) {
  while (buffer_.size() < count) {
    char chunk[16384];
    const ssize_t n = ::recv(fd_.get(), chunk, sizeof chunk, 0);
    if (n <= 0) throw std::runtime_error("the test's redis-server is gone");
    buffer_.append(chunk, static_cast<std::size_t>(n));
  }
  std::string text = buffer_.substr(0, count);
  buffer_.erase(0, count);
  return text;
}

std::string RedisClient::line() {
  std::string text;
  while (!text.ends_with("\r\n")) text += bytes(1);
  return text.substr(0, text.size() - 2);
}

std::string RedisClient::answer() {
  const std::string head = line();
  const std::string rest = head.substr(1);
  if (head[0] == '-') return head;
  if (head[0] != '$' && head[0] != '*') return rest;
  const long count = std::stol(rest);
  if (count < 0) return "(nil)";
  if (head[0] == '$') {
    std::string text = bytes(static_cast<std::size_t>(count));
    bytes(2);
    return text;
  }
  std::string list;
  for (long i = 0; i < count; ++i) list += (i == 0 ? "" : "\n") + answer();
  return list;
}

RedisServer::RedisServer(std::vector<std::string> options)
    : dir_(std::make_unique<TempDir>()), options_(std::move(options)) {
  for (int attempt = 1;; ++attempt) {
    port_ = free_port();
    try {
      start();
      break;
    } catch (const std::runtime_error&) {
      if (attempt == kStartAttempts) throw;
    }
  }
}

void RedisServer::start() {
  std::vector<std::string> argv = {find_program("redis-server"),
                                   "--port",
                                   std::to_string(port_),
                                   "--bind",
                                   "127.0.0.1",
                                   "--unixsocket",
                                   dir_->file("redis.sock"),
                                   "--dir",
                                   dir_->path(),
                                   "--save",
                                   "",
                                   "--appendonly",
                                   "no"};
  argv.insert(argv.end(), options_.begin(), options_.end());
  child_ = Child::spawn(argv);
  const bool up = eventually([&] {
    if (child_.wait(0)) return true;  // it has ended
    try {
      const std::string answer = ask({"PING"});
      return answer == "PONG" || answer.starts_with("-NOAUTH");
    } catch (const std::runtime_error&) {
      return false;
    }
  });
  if (!up || child_.wait(0))
    throw std::runtime_error("redis-server does not start: " + child_.read_all(1000));
}

void RedisServer::kill9() {
  child_.kill(SIGKILL);
  child_.wait();
}

RedisCluster::RedisCluster() {
  const std::vector<std::string> options = {
      "--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "2000"};
  for (int i = 0; i < 3; ++i) {
    // The bus of a node has its port and 10,000 more.
    for (int attempt = 1; nodes_.size() <= static_cast<std::size_t>(i); ++attempt) {
      const std::string bus = std::to_string(free_port());
      auto with_bus = options;
      with_bus.insert(with_bus.end(), {"--cluster-port", bus});
      try {
        nodes_.emplace_back(with_bus);
      } catch (const std::runtime_error&) {
        if (attempt == kStartAttempts) throw;
        continue;
      }
      // Different from the start, as redis-cli makes them: equal ones are told apart later, by taking slots
      // back.
      nodes_.back().ask({"CLUSTER", "SET-CONFIG-EPOCH", std::to_string(i + 1)});
      if (i == 0) continue;
      nodes_[0].ask({"CLUSTER", "MEET", "127.0.0.1", std::to_string(nodes_.back().port()), bus});
    }
  }
  const char* ranges[] = {"0 5460", "5461 10922", "10923 16383"};
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    std::istringstream range(ranges[i]);
    std::string first, last;
    range >> first >> last;
    if (nodes_[i].ask({"CLUSTER", "ADDSLOTSRANGE", first, last}) != "OK") {
      throw std::runtime_error("a node of the cluster takes no slots");
    }
  }
  const bool whole = eventually([&] {
    for (RedisServer& node : nodes_) {
      const std::string info = node.ask({"CLUSTER", "INFO"});
      if (info.find("cluster_state:ok") == std::string::npos ||
          info.find("cluster_slots_ok:16384") == std::string::npos) {
        return false;
      }
    }
    return true;
  });
  if (!whole) throw std::runtime_error("the cluster does not come together");
}

void RedisCluster::migrate(std::uint16_t slot, std::size_t from, std::size_t to,
                           const std::function<void()>& between) {
  const std::string number = std::to_string(slot);
  const std::string source = nodes_[from].ask({"CLUSTER", "MYID"});
  const std::string target = nodes_[to].ask({"CLUSTER", "MYID"});
  const auto demand = [](RedisServer& node, const std::vector<std::string>& words) {
    const std::string answer = node.ask(words);
    if (answer != "OK") throw std::runtime_error("migrating a slot: " + answer);
  };
  demand(nodes_[to], {"CLUSTER", "SETSLOT", number, "IMPORTING", source});
  demand(nodes_[from], {"CLUSTER", "SETSLOT", number, "MIGRATING", target});
  std::istringstream keys(nodes_[from].ask({"CLUSTER", "GETKEYSINSLOT", number, "10000"}));
  std::string key;
  while (std::getline(keys, key)) {
    demand(nodes_[from], {"MIGRATE", "127.0.0.1", std::to_string(nodes_[to].port()), key, "0", "5000"});
  }
  if (between) between();
  demand(nodes_[to], {"CLUSTER", "SETSLOT", number, "NODE", target});
  demand(nodes_[from], {"CLUSTER", "SETSLOT", number, "NODE", target});
}

}  // namespace hicache::test
