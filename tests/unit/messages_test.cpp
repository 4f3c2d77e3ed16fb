// The socket's messages: what encode() makes decode() reads, and it refuses everything else.
#include "shm/messages.hpp"

#include <algorithm>
#include <random>

#include "tests/support/catch.hpp"

namespace hicache {

namespace {

NamespaceSpec spec() {
  NamespaceSpec s;
  s.model = "org/model";
  s.lora_id = "lora";
  s.page_tokens = 16;
  s.layers = 2;
  s.heads_per_shard = 4;
  s.head_dim = 64;
  s.element_bytes = 2;
  s.tp_size = 4;
  return s;
}

Hello hello() {
  Hello m;
  m.features = 0x1122334455667788ull;
  m.role = Role::scheduler;
  m.pid = 77;
  m.engine = "engine-1";
  m.tp_rank = 3;
  m.spec = spec();
  return m;
}

Welcome welcome() {
  Welcome m;
  m.protocol = 1;
  m.features = 2;
  m.instance_epoch = 3;
  m.region_bytes = 4;
  m.client_slot = 5;
  m.client_generation = 6;
  m.group_slot = 7;
  m.namespace_id = 8;
  m.weights_epoch = 9;
  m.daemon_pid = 10;
  m.daemon_start_ticks = 11;
  m.default_deadline_ms = 12;
  m.wait_spin_us = 13;
  m.wait_yield_us = 14;
  m.wait_park_ms = 15;
  m.channel = ChannelGeometry::plan(64, 128, 1 << 20);
  return m;
}

RegisterBuffers buffers() {
  RegisterBuffers m;
  m.geometry.pages = 5;
  m.geometry.allocations = {{DeviceKind::host, 4096}, {DeviceKind::cuda, 1ull << 40}};
  DeviceAllocation& cuda = m.geometry.allocations[1];
  for (std::uint8_t i = 0; i < cuda.gpu_uuid.size(); ++i) cuda.gpu_uuid[i] = static_cast<std::uint8_t>(i + 1);
  for (std::uint8_t i = 0; i < cuda.ipc_handle.size(); ++i)
    cuda.ipc_handle[i] = static_cast<std::uint8_t>(i + 99);
  cuda.export_kind = CudaExport::posix_fd;
  cuda.base_bytes = 1ull << 42;
  cuda.base_offset = 1ull << 41;
  m.geometry.tensors = {{0, 1, TensorKind::k, 8, 16, 24}, {1, 0, TensorKind::latent, 1ull << 33, 32, 40}};
  return m;
}

std::vector<SocketMessage> examples() {
  return {
      hello(), welcome(), buffers(), Goodbye{}, Control{{"evict", "12", ""}}, Reply{Status::exists, "taken"}};
}

template <class T>
T round_trip(const T& message) {
  const auto bytes = encode_message(message);
  auto decoded = decode_message(bytes);
  REQUIRE(decoded.ok());
  REQUIRE(std::holds_alternative<T>(*decoded));
  // Every field is in the bytes, so equal bytes mean equal fields.
  CHECK(encode_message(*decoded) == bytes);
  return std::get<T>(*decoded);
}

void check_refused(const SocketMessage& message) {
  CHECK(decode_message(encode_message(message)).status() == Status::invalid_argument);
}

}  // namespace

TEST_CASE("Hello survives the wire") {
  const Hello m = round_trip(hello());
  CHECK(m.protocol_min == kProtocolMin);
  CHECK(m.protocol_max == kProtocolMax);
  CHECK(m.features == hello().features);
  CHECK(m.role == Role::scheduler);
  CHECK(m.pid == 77);
  CHECK(m.engine == "engine-1");
  CHECK(m.tp_rank == 3);
  CHECK(m.spec == spec());
}

TEST_CASE("Welcome survives the wire") {
  const Welcome m = round_trip(welcome());
  CHECK(m.protocol == 1);
  CHECK(m.features == 2);
  CHECK(m.instance_epoch == 3);
  CHECK(m.region_bytes == 4);
  CHECK(m.client_slot == 5);
  CHECK(m.client_generation == 6);
  CHECK(m.group_slot == 7);
  CHECK(m.namespace_id == 8);
  CHECK(m.weights_epoch == 9);
  CHECK(m.daemon_pid == 10);
  CHECK(m.daemon_start_ticks == 11);
  CHECK(m.default_deadline_ms == 12);
  CHECK(m.wait_spin_us == 13);
  CHECK(m.wait_yield_us == 14);
  CHECK(m.wait_park_ms == 15);
  CHECK(m.channel == welcome().channel);
  CHECK(m.channel.valid());
}

TEST_CASE("RegisterBuffers survives the wire") {
  const DeviceGeometry g = round_trip(buffers()).geometry;
  CHECK(g.pages == 5);
  REQUIRE(g.allocations.size() == 2);
  CHECK(g.allocations[1].kind == DeviceKind::cuda);
  CHECK(g.allocations[1].bytes == 1ull << 40);
  CHECK(g.allocations[1].gpu_uuid[15] == 16);
  CHECK(g.allocations[1].ipc_handle[63] == 162);
  CHECK(g.allocations[1].export_kind == CudaExport::posix_fd);
  CHECK(g.allocations[1].base_bytes == 1ull << 42);
  CHECK(g.allocations[1].base_offset == 1ull << 41);
  REQUIRE(g.tensors.size() == 2);
  CHECK(g.tensors[0].layer == 1);
  CHECK(g.tensors[0].kind == TensorKind::k);
  CHECK(g.tensors[1].allocation == 1);
  CHECK(g.tensors[1].kind == TensorKind::latent);
  CHECK(g.tensors[1].offset == 1ull << 33);
  CHECK(g.tensors[1].page_stride == 32);
  CHECK(g.tensors[1].page_bytes == 40);
}

TEST_CASE("Staging memory survives the wire, and a message without it has none") {
  CHECK_FALSE(round_trip(buffers()).staging);
  RegisterBuffers m = buffers();
  StagingOffer offer;
  for (std::uint8_t i = 0; i < offer.ipc_handle.size(); ++i)
    offer.ipc_handle[i] = static_cast<std::uint8_t>(i + 7);
  offer.base_bytes = 1ull << 40;
  offer.base_offset = 1ull << 39;
  offer.slot_bytes = 1ull << 23;
  m.staging = offer;
  CHECK(round_trip(m).staging == offer);
  // Cut anywhere behind the geometry it is malformed.
  const auto bytes = encode_message(m);
  const std::size_t whole = encode_message(buffers()).size();
  for (std::size_t size = whole + 1; size < bytes.size(); ++size)
    CHECK(decode_message(std::span(bytes).first(size)).status() == Status::invalid_argument);
}

TEST_CASE("Goodbye, Control and Reply survive the wire") {
  round_trip(Goodbye{});
  CHECK(round_trip(Control{{"evict", "12", ""}}).arguments == std::vector<std::string>{"evict", "12", ""});
  CHECK(round_trip(Control{}).arguments.empty());
  const Reply reply = round_trip(Reply{Status::exists, "taken"});
  CHECK(reply.status == Status::exists);
  CHECK(reply.text == "taken");
  CHECK(round_trip(Reply{Status::ok, std::string(kMaxReplyBytes, 'x')}).text.size() == kMaxReplyBytes);
}

TEST_CASE("The largest geometry that is allowed fits a socket message") {
  RegisterBuffers m;
  m.geometry.allocations.resize(kMaxAllocations);
  m.geometry.tensors.resize(kMaxTensors);
  CHECK(round_trip(m).geometry.tensors.size() == kMaxTensors);
  CHECK(encode_message(m).size() <= 160 * 1024);
  // On a GPU every tensor is one of a layer, so there are never more than two a layer.
  for (DeviceAllocation& a : m.geometry.allocations) a.kind = DeviceKind::cuda;
  m.geometry.tensors.resize(2 * kMaxLayers);
  CHECK(encode_message(m).size() <= 160 * 1024);
}

TEST_CASE("Every truncation of every message is refused") {
  for (const SocketMessage& message : examples()) {
    const auto bytes = encode_message(message);
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      // A copy of exactly n bytes, so that a sanitizer sees every read past the end.
      const std::vector<std::uint8_t> part(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
      CAPTURE(message.index(), n);
      REQUIRE(decode_message(part).status() == Status::invalid_argument);
    }
  }
}

TEST_CASE("A byte behind the end of any message is refused") {
  for (const SocketMessage& message : examples()) {
    auto bytes = encode_message(message);
    bytes.push_back(0);
    CAPTURE(message.index());
    CHECK(decode_message(bytes).status() == Status::invalid_argument);
  }
}

TEST_CASE("Unknown message types are refused") {
  for (const std::uint32_t type : {0u, 7u, 0xffffffffu}) {
    WireWriter out;
    out.integer(type);
    CHECK(decode_message(out.bytes()).status() == Status::invalid_argument);
  }
}

TEST_CASE("Unknown enum values, over-long texts and absurd counts are refused") {
  SECTION("role") {
    for (const std::uint32_t role : {0u, 4u}) {
      Hello m = hello();
      m.role = static_cast<Role>(role);
      check_refused(m);
    }
  }
  SECTION("attention") {
    Hello m = hello();
    m.spec.attention = static_cast<Attention>(3);
    check_refused(m);
  }
  SECTION("status") {
    check_refused(Reply{static_cast<Status>(kStatusCount), ""});
  }
  SECTION("device kind") {
    RegisterBuffers m = buffers();
    m.geometry.allocations[0].kind = static_cast<DeviceKind>(0);
    check_refused(m);
  }
  SECTION("export kind") {
    RegisterBuffers m = buffers();
    m.geometry.allocations[1].export_kind = static_cast<CudaExport>(0);
    check_refused(m);
  }
  SECTION("tensor kind") {
    RegisterBuffers m = buffers();
    m.geometry.tensors[0].kind = static_cast<TensorKind>(4);
    check_refused(m);
  }
  SECTION("engine") {
    Hello m = hello();
    m.engine = std::string(kMaxEngineBytes + 1, 'e');
    check_refused(m);
  }
  SECTION("ingredient") {
    Hello m = hello();
    m.spec.model = std::string(NamespaceSpec::kMaxIngredientBytes + 1, 'm');
    check_refused(m);
  }
  SECTION("reply text") {
    check_refused(Reply{Status::ok, std::string(kMaxReplyBytes + 1, 'x')});
  }
  SECTION("argument") {
    check_refused(Control{{std::string(kMaxArgumentBytes + 1, 'a')}});
  }
  SECTION("arguments") {
    check_refused(Control{std::vector<std::string>(kMaxControlArguments + 1)});
  }
  SECTION("allocations") {
    RegisterBuffers m = buffers();
    m.geometry.allocations.resize(kMaxAllocations + 1);
    check_refused(m);
  }
  SECTION("tensors") {
    RegisterBuffers m = buffers();
    m.geometry.tensors.resize(kMaxTensors + 1);
    check_refused(m);
  }
  SECTION("a count that the message can't hold") {
    WireWriter out;
    out.integer(std::uint32_t{3});           // RegisterBuffers
    out.integer(std::uint32_t{1});           // pages
    out.integer(std::uint32_t{0xffffffff});  // allocations
    CHECK(decode_message(out.bytes()).status() == Status::invalid_argument);
  }
  SECTION("an optional that is neither absent nor present") {
    auto bytes = encode_message(hello());
    const std::string lora = "lora";
    const auto at = std::search(bytes.begin(), bytes.end(), lora.begin(), lora.end());
    REQUIRE(at != bytes.end());
    *(at - 5) = 2;  // the presence byte is in front of the length
    CHECK(decode_message(bytes).status() == Status::invalid_argument);
  }
}

TEST_CASE("A Hello of another protocol version is told apart from garbage, whatever follows the range") {
  Hello m = hello();
  m.protocol_min = kProtocolMax + 1;
  m.protocol_max = kProtocolMax + 4;
  auto bytes = encode_message(m);
  CHECK(decode_message(bytes).ok());  // readable: the receiver compares the ranges
  bytes.resize(bytes.size() + 12);    // fields of a later version
  const auto refused = decode_message(bytes);
  REQUIRE(refused.status() == Status::version_mismatch);
  CHECK(refused.error().message.find("2 to 5") != std::string::npos);
  CHECK(refused.error().message.find("1 to 1") != std::string::npos);
}

TEST_CASE("Random damage of messages never crashes, and what is accepted is canonical") {
  const std::uint32_t seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  std::size_t accepted = 0;
  for (const SocketMessage& message : examples()) {
    const auto good = encode_message(message);
    for (int i = 0; i < 20000; ++i) {
      auto bytes = good;
      const int changes = 1 + static_cast<int>(random() % 4);
      for (int c = 0; c < changes; ++c) {
        switch (random() % 4) {
          case 0:
            bytes[random() % bytes.size()] ^= static_cast<std::uint8_t>(1u << random() % 8);
            break;
          case 1:
            bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
            break;
          case 2:
            bytes.resize(1 + random() % bytes.size());
            break;
          case 3:
            bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(random() % bytes.size()), 0xff);
            break;
        }
      }
      bytes.shrink_to_fit();
      const auto decoded = decode_message(bytes);
      if (!decoded.ok()) continue;
      ++accepted;
      REQUIRE(encode_message(*decoded) == bytes);
    }
  }
  CHECK(accepted > 0);
}

TEST_CASE("Random bytes behind every message type never crash") {
  const std::uint32_t seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 50000; ++i) {
    std::vector<std::uint8_t> bytes(4 + random() % 200);
    for (auto& b : bytes) b = static_cast<std::uint8_t>(random() % 3 == 0 ? random() : 0);
    bytes[0] = static_cast<std::uint8_t>(random() % 8);
    bytes[1] = bytes[2] = bytes[3] = 0;
    const auto decoded = decode_message(bytes);
    if (decoded.ok()) REQUIRE(encode_message(*decoded) == bytes);
  }
}

}  // namespace hicache
