// The socket protocol against a live session server with a coordinator behind it: connections that say
// anything in any order, with and without descriptors, and leave when they like. After every input the daemon
// answers a newcomer, and when all have gone nobody is attached.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "daemon/cuda/cuda_path.hpp"
#include "daemon/sessions/session_server.hpp"
#include "shm/unix_socket.hpp"
#include "tests/fuzz/coordinator_rig.hpp"
#include "tests/fuzz/script.hpp"

using namespace hicache;
using namespace hicache::fuzz;

namespace {

constexpr int kMaxSteps = 64;
constexpr std::size_t kConnections = 4;

// What an answer to "status" says.
std::uint64_t attached_clients(const std::string& status) {
  return nlohmann::json::parse(status).at("counters").at("attached_clients").get<std::uint64_t>();
}

std::string socket_path() {
  return "/tmp/hicache-fuzz-" + std::to_string(::getpid()) + ".sock";
}

// One daemon for all inputs: starting one costs more than most inputs do.
class Server {
 public:
  Server() {
    for (std::uint32_t i = 0; i < kClients; ++i) rig_.lose(rig_.client(i), true);
    const auto post = [this](daemon::CoordinatorRequest request) { rig_.post(std::move(request)); };
    daemon::CudaOptions cuda;
    cuda.mode = daemon::CudaMode::off;
    cuda_ = daemon::make_cuda_path(cuda);
    registration_.emplace(post, *cuda_);
    control_ = map_sealed(4096).first;
    daemon::SessionServerOptions options;
    options.config = rig_.config();
    options.config.socket.max_connections = 2 * kConnections;
    options.socket_path = socket_path();
    options.control_fd = control_.get();
    options.region_bytes = 4096;
    options.instance_epoch = 1;
    auto sessions = daemon::SessionServer::start(options, post, *registration_);
    if (!sessions) fail(sessions.error().message);
    sessions_ = std::move(*sessions);
  }

  [[nodiscard]] UniqueFd connect() const {
    auto socket = connect_unix(socket_path());
    return socket ? std::move(*socket) : UniqueFd();
  }
  // Asks as a newcomer, until it is let in: the connections of the input may take a moment to go.
  void must_answer() const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < limit) {
      const UniqueFd socket = connect();
      if (!socket.valid() || !send_message(socket.get(), encode_message(Control{{"status"}}), {}, 1000))
        continue;
      const auto answer = receive_message(socket.get(), 20'000);
      const auto decoded = answer ? decode_message(answer->bytes) : decode_message({});
      const auto* reply = decoded ? std::get_if<Reply>(&*decoded) : nullptr;
      if (reply != nullptr && reply->status == Status::ok && attached_clients(reply->text) == 0) return;
      ::usleep(500);
    }
    fail("20 s after the last connection closed the daemon does not answer, or somebody is still attached");
  }

 private:
  CoordinatorRig rig_;
  std::unique_ptr<daemon::CudaPath> cuda_;
  std::optional<daemon::Registration> registration_;
  UniqueFd control_;
  std::unique_ptr<daemon::SessionServer> sessions_;
};

// Made with the first input. Its threads end with the process; the name of its socket would not.
Server& only_server() {
  static Server& server = *new Server;
  static const int registered = std::atexit([] { ::unlink(socket_path().c_str()); });
  if (registered != 0) fail("no place for another handler at exit");
  return server;
}

enum Step : std::uint8_t { open_one, raw, hello, buffers, control, goodbye, close_one, read_answer };
constexpr std::uint8_t kSteps = 8;

// A message, with up to three bytes changed as the script says.
void send(const UniqueFd& socket, const SocketMessage& message, Script& script,
          std::span<const int> fds = {}) {
  auto bytes = encode_message(message);
  for (std::uint8_t changes = script.byte() % 4; changes > 0; --changes) {
    const std::size_t at = script.raw<std::uint16_t>() % bytes.size();
    bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ script.byte());
  }
  static_cast<void>(send_message(socket.get(), bytes, fds, 0));
}

void play(Script& script, Server& server) {
  std::array<UniqueFd, kConnections> sockets;
  for (int i = 0; i < kMaxSteps && script.more(); ++i) {
    const auto step = static_cast<Step>(script.byte() % kSteps);
    UniqueFd& socket = sockets[script.byte() % kConnections];
    if (step == open_one) {
      socket = server.connect();
      continue;
    }
    if (!socket.valid()) continue;
    switch (step) {
      case raw: {
        std::vector<std::uint8_t> bytes(1 + script.byte());
        for (auto& b : bytes) b = script.byte();
        static_cast<void>(send_message(socket.get(), bytes, {}, 0));
        break;
      }
      case hello: {
        Hello message;
        const std::uint8_t kind = script.byte();
        message.role = static_cast<Role>(1 + kind % 3);
        message.tp_rank = kind / 4 % 2;
        message.engine = kind / 8 % 2 == 0 ? "a" : "b";
        message.spec = small_spec();
        message.spec.layers += kind / 16 % 2;
        send(socket, message, script);
        break;
      }
      case buffers: {
        RegisterBuffers message;
        const NamespaceSpec spec = small_spec();
        const std::uint64_t piece = spec.piece_bytes();
        message.geometry.pages = kDevicePages;
        for (std::uint32_t kind = 0; kind < spec.kinds(); ++kind) {
          for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
            const std::uint64_t offset = (std::uint64_t{kind} * spec.layers + layer) * kDevicePages * piece;
            message.geometry.tensors.push_back(
                {0, layer, static_cast<TensorKind>(kind), offset, piece, piece});
          }
        }
        DeviceAllocation allocation;
        allocation.bytes = align_up(spec.shard_bytes() * kDevicePages, 4096);
        message.geometry.allocations.push_back(allocation);
        const UniqueFd memory = map_sealed(4096ull << script.byte() % 4).first;
        const std::array<int, 3> fds = {memory.get(), STDERR_FILENO, memory.get()};
        send(socket, message, script, std::span(fds).first(script.byte() % 4));
        break;
      }
      case control: {
        static constexpr const char* kWords[] = {"status",     "ranks",  "evict", "1",
                                                 "namespaces", "config", "",      "bump"};
        Control message;
        for (std::uint8_t n = script.byte() % 4; n > 0; --n)
          message.arguments.emplace_back(kWords[script.byte() % 8]);
        send(socket, message, script);
        break;
      }
      case goodbye:
        send(socket, Goodbye{}, script);
        break;
      case close_one:
        socket.reset();
        break;
      default:
        static_cast<void>(receive_message(socket.get(), script.byte() % 2 == 0 ? 0 : 20));
        break;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spdlog::set_level(spdlog::level::off);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Server& server = only_server();
  Script script(data, size);
  play(script, server);
  server.must_answer();
  return 0;
}
