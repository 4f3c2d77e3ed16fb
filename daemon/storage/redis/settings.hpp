// The keys of storage.redis.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/storage/redis/endpoint.hpp"
#include "shm/status.hpp"

namespace hicache::daemon::redis {

struct Settings {
  std::vector<Endpoint> endpoints;  // one server, or some nodes of a cluster
  bool cluster = false;
  std::string user;      // "" = the server's default user
  std::string password;  // "" = no AUTH. Never printed.
  std::uint32_t database = 0;
  std::string key_prefix = "hicache";
  std::uint64_t ttl_ms = 0;       // 0 = pages stay until the server evicts them
  std::uint32_t threads = 1;      // each with its own share of the connections
  std::uint32_t connections = 4;  // to each server, of all threads
  std::uint32_t depth = 8;        // commands of a connection without an answer
  std::uint32_t connect_timeout_ms = 1000;
  std::uint32_t response_timeout_ms = 2000;
  std::uint32_t reconnect_max_ms = 2000;  // longest pause between attempts
};

// invalid_argument naming each key that is unknown or has a value it can't take. Reads the password file and
// looks up host names, so it may take seconds.
Result<Settings> parse_settings(const nlohmann::ordered_json& settings);

}  // namespace hicache::daemon::redis
