// What other threads of the daemon ask of the coordinator, and what it answers. Answers are callbacks that
// run on the coordinator's thread: they must only hand the answer on (push it to a queue) and never block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "daemon/config.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "daemon/transfer/transfers.hpp"
#include "shm/channel_layout.hpp"
#include "shm/fd.hpp"
#include "shm/messages.hpp"
#include "shm/shared_memory.hpp"

namespace hicache::daemon {

// A client said Hello and its channel has been made. The spec has been validated.
struct AttachAnswer {
  Status status = Status::ok;
  std::string text;  // why not, for the client
  ClientSlot client;
  Generation client_generation;
  GroupSlot group;
  NamespaceId namespace_id;
  std::uint64_t weights_epoch = 0;
  NamespaceSpec spec;  // with the weights epoch in force
};
struct AttachRequest {
  Hello hello;
  std::uint32_t uid = 0;
  std::uint32_t pid = 0;   // as the kernel says
  bool read_only = false;  // by socket.read_only_uids
  std::uint64_t start_ticks = 0;
  std::shared_ptr<Mapping> channel;  // zeroed memfd of geometry.total_bytes
  ChannelGeometry geometry;
  std::shared_ptr<UniqueFd> kick;  // eventfd that the client writes to wake the coordinator
  bool maps_pool = false;          // io_backend kernel, and allowed
  std::function<void(AttachAnswer)> answer;
};

// The rank's device memory has been mapped and validated.
struct BuffersRequest {
  std::shared_ptr<const RankMemory> memory;
  std::function<void(Status, std::string)> answer;
};

// A client is gone: its socket closed (orderly = it said Goodbye) or its process died.
struct GoneRequest {
  ClientSlot client;
  Generation client_generation;
  bool orderly = false;
};

// A rank in io_backend kernel reported what can't be: it is cut off.
struct BreachRequest {
  ClientSlot client;
  Generation client_generation;
};

// A process that mapped the pool under an earlier daemon has ended.
struct MapperGoneRequest {
  ClientSlot client;
};

// hicache-ctl. `answer` gets a status and JSON text.
struct ControlRequest {
  std::vector<std::string> arguments;
  std::function<void(Status, std::string)> answer;
};

// New values of the keys that may change.
struct ReloadRequest {
  Config config;
};

// A connection was refused by a limit or the allow-list.
struct ConnectionRefused {};

// A user who may only read asked for a command that changes something.
struct ReadOnlyRefused {};

// New slots may only be taken from this many bytes at the pool's start: the rest is not pinned yet.
struct UsablePoolRequest {
  std::uint64_t bytes = 0;
};

// The storage tier has events to give.
struct StorageNews {};
// What storage holds is no longer what it was: another backend, or none, or an empty one.
struct StorageChanged {};

using CoordinatorRequest =
    std::variant<AttachRequest, BuffersRequest, GoneRequest, ControlRequest, ReloadRequest, ConnectionRefused,
                 UsablePoolRequest, StorageNews, StorageChanged, BreachRequest, MapperGoneRequest,
                 ReadOnlyRefused, TransferDone>;

}  // namespace hicache::daemon
