// The socket's messages: session set-up and control. Each is a type byte sequence made by encode() and read
// by decode(), which refuses anything that is not exactly one well-formed message. docs/protocol.md lists the
// fields.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "shm/channel_layout.hpp"
#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/protocol.hpp"
#include "shm/status.hpp"

namespace hicache {

// Longest strings and lists that decode() accepts; a sender that goes past them is refused.
constexpr std::size_t kMaxEngineBytes = 63;  // fits ClientEntry::engine with its zero
constexpr std::uint32_t kMaxControlArguments = 32;
constexpr std::size_t kMaxArgumentBytes = 1024;
constexpr std::size_t kMaxReplyBytes = 128 * 1024;

// First message of a client.
struct Hello {
  std::uint32_t protocol_min = kProtocolMin;
  std::uint32_t protocol_max = kProtocolMax;
  std::uint64_t features = 0;  // bits the client wants; unknown ones are left out of Welcome
  Role role = Role::rank;
  std::uint32_t pid = 0;  // in the client's own pid namespace, for people
  std::string engine;     // instance of the engine: ranks with the same engine and namespace are one TP group
  std::uint32_t tp_rank = 0;
  NamespaceSpec spec;  // ignored for tools
};

// Answer to Hello of a rank or scheduler. Descriptors: control region (read-only), channel memfd, coordinator
// eventfd.
struct Welcome {
  std::uint32_t protocol = 0;
  std::uint64_t features = 0;
  std::uint64_t instance_epoch = 0;
  std::uint64_t region_bytes = 0;
  std::uint32_t client_slot = 0;
  std::uint32_t client_generation = 0;
  std::uint32_t group_slot = 0;
  std::uint32_t namespace_id = 0;
  std::uint64_t weights_epoch = 0;  // in force, bumps included
  std::uint32_t daemon_pid = 0;
  std::uint64_t daemon_start_ticks = 0;
  std::uint32_t default_deadline_ms = 0;
  std::uint32_t wait_spin_us = 0;  // the client's waiting ladder (docs/configuration.md)
  std::uint32_t wait_yield_us = 0;
  std::uint32_t wait_park_ms = 0;
  ChannelGeometry channel;
};

// Staging memory that a rank offers beside its buffers: kStagingSlots slots behind each other in an
// allocation of cuMemAlloc on the buffers' GPU (shm/staging_layout.hpp).
struct StagingOffer {
  std::array<std::uint8_t, 64> ipc_handle{};
  std::uint64_t base_bytes = 0;   // size of the driver's allocation
  std::uint64_t base_offset = 0;  // where the slots begin in it
  std::uint64_t slot_bytes = 0;
  friend bool operator==(const StagingOffer&, const StagingOffer&) = default;
};

// Device buffers of a rank, once per session. Descriptors: one sealed memfd per host allocation, in order;
// behind them the staging block where staging is offered, which needs kFeatureStaging in force.
struct RegisterBuffers {
  DeviceGeometry geometry;
  std::optional<StagingOffer> staging{};
};

// Polite end of a session.
struct Goodbye {};

// Command of hicache-ctl; the answer is JSON text in a Reply.
struct Control {
  std::vector<std::string> arguments;
};

// Answer to RegisterBuffers and Control, and to a Hello that is refused or came from a tool.
struct Reply {
  Status status = Status::ok;
  std::string text;
};

using SocketMessage = std::variant<Hello, Welcome, RegisterBuffers, Goodbye, Control, Reply>;

// Never fails; limits are the receiver's to check. Thread-safe.
std::vector<std::uint8_t> encode_message(const SocketMessage& message);
// invalid_argument for anything that is not exactly one well-formed message: truncated, trailing bytes, an
// unknown type or enum value, an over-long string or list. A Hello whose version range does not meet this
// build's and that can't be read gives version_mismatch and names both ranges: later versions may add fields
// behind the range. Thread-safe.
Result<SocketMessage> decode_message(std::span<const std::uint8_t> bytes);

}  // namespace hicache
