#include "shm/messages.hpp"

#include <string_view>

namespace hicache {
namespace {

// Numbers on the wire: append, never renumber.
enum class Type : std::uint32_t {
  hello = 1,
  welcome = 2,
  register_buffers = 3,
  goodbye = 4,
  control = 5,
  reply = 6
};

void put_type(WireWriter& out, Type type) {
  out.integer(static_cast<std::uint32_t>(type));
}

void encode(WireWriter& out, const Hello& m) {
  put_type(out, Type::hello);
  // The range comes first and stays first: a build of any version can read it.
  out.integer(m.protocol_min);
  out.integer(m.protocol_max);
  out.integer(m.features);
  out.integer(static_cast<std::uint32_t>(m.role));
  out.integer(m.pid);
  out.text(m.engine);
  out.integer(m.tp_rank);
  m.spec.encode(out);
}

void encode(WireWriter& out, const Welcome& m) {
  put_type(out, Type::welcome);
  out.integer(m.protocol);
  out.integer(m.features);
  out.integer(m.instance_epoch);
  out.integer(m.region_bytes);
  out.integer(m.client_slot);
  out.integer(m.client_generation);
  out.integer(m.group_slot);
  out.integer(m.namespace_id);
  out.integer(m.weights_epoch);
  out.integer(m.daemon_pid);
  out.integer(m.daemon_start_ticks);
  out.integer(m.default_deadline_ms);
  out.integer(m.wait_spin_us);
  out.integer(m.wait_yield_us);
  out.integer(m.wait_park_ms);
  out.integer(m.channel.sq_entries);
  out.integer(m.channel.cq_entries);
  out.integer(m.channel.sq_offset);
  out.integer(m.channel.cq_offset);
  out.integer(m.channel.fence_offset);
  out.integer(m.channel.arena_offset);
  out.integer(m.channel.arena_bytes);
  out.integer(m.channel.total_bytes);
}

void encode(WireWriter& out, const RegisterBuffers& m) {
  put_type(out, Type::register_buffers);
  m.geometry.encode(out);
  if (!m.staging) return;
  out.raw(m.staging->ipc_handle);
  out.integer(m.staging->base_bytes);
  out.integer(m.staging->base_offset);
  out.integer(m.staging->slot_bytes);
}

void encode(WireWriter& out, const Goodbye&) {
  put_type(out, Type::goodbye);
}

void encode(WireWriter& out, const Control& m) {
  put_type(out, Type::control);
  out.integer(static_cast<std::uint32_t>(m.arguments.size()));
  for (const std::string& argument : m.arguments) out.text(argument);
}

void encode(WireWriter& out, const Reply& m) {
  put_type(out, Type::reply);
  out.integer(static_cast<std::uint16_t>(m.status));
  out.text(m.text);
}

StagingOffer decode_staging(WireReader& in) {
  StagingOffer offer;
  in.raw(offer.ipc_handle);
  offer.base_bytes = in.integer<std::uint64_t>();
  offer.base_offset = in.integer<std::uint64_t>();
  offer.slot_bytes = in.integer<std::uint64_t>();
  return offer;
}

Hello decode_hello(WireReader& in) {
  Hello m;
  m.protocol_min = in.integer<std::uint32_t>();
  m.protocol_max = in.integer<std::uint32_t>();
  m.features = in.integer<std::uint64_t>();
  m.role = static_cast<Role>(in.integer<std::uint32_t>());
  if (m.role != Role::rank && m.role != Role::scheduler && m.role != Role::tool) in.fail();
  m.pid = in.integer<std::uint32_t>();
  m.engine = in.text(kMaxEngineBytes);
  m.tp_rank = in.integer<std::uint32_t>();
  m.spec = NamespaceSpec::decode(in);
  return m;
}

Welcome decode_welcome(WireReader& in) {
  Welcome m;
  m.protocol = in.integer<std::uint32_t>();
  m.features = in.integer<std::uint64_t>();
  m.instance_epoch = in.integer<std::uint64_t>();
  m.region_bytes = in.integer<std::uint64_t>();
  m.client_slot = in.integer<std::uint32_t>();
  m.client_generation = in.integer<std::uint32_t>();
  m.group_slot = in.integer<std::uint32_t>();
  m.namespace_id = in.integer<std::uint32_t>();
  m.weights_epoch = in.integer<std::uint64_t>();
  m.daemon_pid = in.integer<std::uint32_t>();
  m.daemon_start_ticks = in.integer<std::uint64_t>();
  m.default_deadline_ms = in.integer<std::uint32_t>();
  m.wait_spin_us = in.integer<std::uint32_t>();
  m.wait_yield_us = in.integer<std::uint32_t>();
  m.wait_park_ms = in.integer<std::uint32_t>();
  m.channel.sq_entries = in.integer<std::uint32_t>();
  m.channel.cq_entries = in.integer<std::uint32_t>();
  m.channel.sq_offset = in.integer<std::uint64_t>();
  m.channel.cq_offset = in.integer<std::uint64_t>();
  m.channel.fence_offset = in.integer<std::uint64_t>();
  m.channel.arena_offset = in.integer<std::uint64_t>();
  m.channel.arena_bytes = in.integer<std::uint64_t>();
  m.channel.total_bytes = in.integer<std::uint64_t>();
  return m;
}

Control decode_control(WireReader& in) {
  Control m;
  m.arguments.resize(in.count(kMaxControlArguments, sizeof(std::uint32_t)));
  for (std::string& argument : m.arguments) argument = in.text(kMaxArgumentBytes);
  return m;
}

Reply decode_reply(WireReader& in) {
  Reply m;
  const auto status = in.integer<std::uint16_t>();
  if (status >= kStatusCount) in.fail();
  m.status = in.failed() ? Status::internal : static_cast<Status>(status);
  m.text = in.text(kMaxReplyBytes);
  return m;
}

// The message, or why a Hello that can't be read is no accident: its sender speaks other versions.
Result<SocketMessage> finish(const WireReader& in, SocketMessage message, std::string_view name) {
  if (in.finished()) return message;
  if (const auto* hello = std::get_if<Hello>(&message);
      hello != nullptr && (hello->protocol_min > kProtocolMax || hello->protocol_max < kProtocolMin) &&
      hello->protocol_max != 0) {
    return Error{Status::version_mismatch,
                 "the client speaks protocol " + std::to_string(hello->protocol_min) + " to " +
                     std::to_string(hello->protocol_max) + ", this build speaks " +
                     std::to_string(kProtocolMin) + " to " + std::to_string(kProtocolMax),
                 0};
  }
  return Error{Status::invalid_argument,
               "malformed " + std::string(name) + " message: " +
                   (in.failed() ? "a field is cut off or out of its range" : "bytes left behind its end"),
               0};
}

}  // namespace

std::vector<std::uint8_t> encode_message(const SocketMessage& message) {
  WireWriter out;
  std::visit([&](const auto& m) { encode(out, m); }, message);
  return out.take();
}

Result<SocketMessage> decode_message(std::span<const std::uint8_t> bytes) {
  WireReader in(bytes);
  const auto type = in.integer<std::uint32_t>();
  if (in.failed()) {
    return Error{Status::invalid_argument,
                 "malformed message: " + std::to_string(bytes.size()) + " bytes, expected at least 4", 0};
  }
  switch (static_cast<Type>(type)) {
    case Type::hello: {
      Hello m = decode_hello(in);
      return finish(in, std::move(m), "Hello");
    }
    case Type::welcome: {
      Welcome m = decode_welcome(in);
      return finish(in, m, "Welcome");
    }
    case Type::register_buffers: {
      RegisterBuffers m{DeviceGeometry::decode(in), std::nullopt};
      if (!in.failed() && !in.finished()) m.staging = decode_staging(in);
      return finish(in, std::move(m), "RegisterBuffers");
    }
    case Type::goodbye:
      return finish(in, Goodbye{}, "Goodbye");
    case Type::control: {
      Control m = decode_control(in);
      return finish(in, std::move(m), "Control");
    }
    case Type::reply: {
      Reply m = decode_reply(in);
      return finish(in, std::move(m), "Reply");
    }
  }
  return Error{Status::invalid_argument, "unknown message type " + std::to_string(type) + ", expected 1 to 6",
               0};
}

}  // namespace hicache
