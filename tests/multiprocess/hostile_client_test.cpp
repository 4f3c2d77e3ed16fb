// Clients that break the rules at the socket. Whatever they do, the daemon goes on, a well-behaved client
// notices nothing, and every descriptor comes back.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "hicache/client.hpp"
#include "shm/messages.hpp"
#include "shm/shared_memory.hpp"
#include "shm/unix_socket.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr const char* kShortHello = R"({"limits": {"hello_deadline_ms": 200}})";

NamespaceSpec small_spec() {
  NamespaceSpec spec;
  spec.model = "hostile-test";
  spec.dtype = "bfloat16";
  spec.page_tokens = 16;
  spec.layers = 2;
  spec.heads_per_shard = 2;
  spec.head_dim = 32;
  spec.element_bytes = 2;
  spec.tp_size = 1;
  return spec;
}

constexpr std::uint32_t kDevicePages = 4;

// One allocation that holds every tensor, one after the other.
DeviceGeometry small_geometry(const NamespaceSpec& spec) {
  DeviceGeometry g;
  g.pages = kDevicePages;
  std::uint64_t offset = 0;
  for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
    for (const TensorKind kind : {TensorKind::k, TensorKind::v}) {
      g.tensors.push_back({0, layer, kind, offset, spec.piece_bytes(), spec.piece_bytes()});
      offset += spec.piece_bytes() * kDevicePages;
    }
  }
  g.allocations.push_back({DeviceKind::host, offset});
  return g;
}

Hello hello_of(const std::string& engine) {
  Hello hello;
  hello.pid = static_cast<std::uint32_t>(::getpid());
  hello.engine = engine;
  hello.spec = small_spec();
  return hello;
}

UniqueFd connect_to(const TestDaemon& daemon) {
  auto socket = connect_unix(daemon.socket_path());
  REQUIRE(socket.ok());
  return std::move(*socket);
}

void send_bytes(const UniqueFd& socket, const std::vector<std::uint8_t>& bytes,
                const std::vector<int>& fds = {}) {
  REQUIRE(send_message(socket.get(), bytes, fds, 1000).ok());
}

Result<SocketMessage> next_message(const UniqueFd& socket) {
  auto message = receive_message(socket.get(), kPatienceMs);
  if (!message) return message.error();
  return decode_message(message->bytes);
}

Reply next_reply(const UniqueFd& socket) {
  auto message = next_message(socket);
  REQUIRE(message.ok());
  REQUIRE(std::holds_alternative<Reply>(*message));
  return std::get<Reply>(*message);
}

bool closed_by_daemon(const UniqueFd& socket) {
  for (;;) {
    const auto message = receive_message(socket.get(), kPatienceMs);
    if (!message) return message.status() == Status::daemon_lost;
  }
}

// Says Hello and keeps the Welcome's descriptors open as long as it lives.
struct RawRank {
  UniqueFd socket;
  std::vector<UniqueFd> fds;
  explicit RawRank(const TestDaemon& daemon, const std::string& engine) : socket(connect_to(daemon)) {
    send_bytes(socket, encode_message(hello_of(engine)));
    auto message = receive_message(socket.get(), kPatienceMs);
    REQUIRE(message.ok());
    const auto welcome = decode_message(message->bytes);
    REQUIRE(welcome.ok());
    REQUIRE(std::holds_alternative<Welcome>(*welcome));
    fds = std::move(message->fds);
  }
};

// An engine that minds its own business: attaches before the trouble, and must still be served after it.
class GoodRank {
 public:
  explicit GoodRank(const TestDaemon& daemon) : daemon_(daemon) {
    AttachOptions options;
    options.socket_path = daemon.socket_path();
    options.engine = "good";
    options.spec = small_spec();
    options.timeout_ms = kPatienceMs;
    auto attached = Session::attach(options);
    if (!attached) FAIL(attached.error().message);
    session_ = std::move(*attached);
    const DeviceGeometry geometry = small_geometry(options.spec);
    auto buffer = HostDeviceBuffer::create(geometry.allocations[0].bytes);
    REQUIRE(buffer.ok());
    buffer_ = std::make_unique<HostDeviceBuffer>(std::move(*buffer));
    const int fds[] = {buffer_->fd()};
    const auto registered = session_->register_buffers(geometry, fds, kPatienceMs);
    if (!registered) FAIL(registered.error().message);
    descriptors_ = descriptor_count(daemon.pid());
  }

  // It is still served, and the daemon holds what it held before the trouble.
  void check_served() {
    const auto ticket = session_->nop();
    REQUIRE(ticket.ok());
    const auto result = session_->wait(*ticket, kPatienceMs);
    REQUIRE(result.ok());
    CHECK(result->status == Status::ok);
    CHECK(control(daemon_.socket_path(), {"status"}, kPatienceMs).ok());
    // Not more: when they were counted, the daemon may have been about to close those of the registration.
    eventually([&] { return descriptor_count(daemon_.pid()) <= descriptors_; }, 20'000);
    CHECK(descriptor_count(daemon_.pid()) <= descriptors_);
  }

 private:
  const TestDaemon& daemon_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<HostDeviceBuffer> buffer_;
  std::size_t descriptors_ = 0;
};

}  // namespace

TEST_CASE("garbage at the socket is answered with what is wrong and the connection is closed") {
  TestDaemon daemon;
  GoodRank good(daemon);
  std::uint32_t seed = 12345;
  for (int i = 0; i < 200; ++i) {
    std::vector<std::uint8_t> bytes(1 + i * 7 % 900);
    for (auto& b : bytes) {
      seed = seed * 1664525 + 1013904223;
      b = static_cast<std::uint8_t>(seed >> 24);
    }
    if (i % 2 == 0 && bytes.size() >= 4) {  // a known type with garbage behind it
      const std::uint32_t type = 1 + static_cast<std::uint32_t>(i / 2) % 6;
      std::memcpy(bytes.data(), &type, sizeof type);
    }
    const UniqueFd socket = connect_to(daemon);
    send_bytes(socket, bytes);
    CHECK(closed_by_daemon(socket));
  }
  good.check_served();
}

TEST_CASE("a Hello cut off at any byte is refused") {
  TestDaemon daemon;
  GoodRank good(daemon);
  const auto hello = encode_message(hello_of("cut"));
  for (std::size_t n = 1; n < hello.size(); ++n) {
    const UniqueFd socket = connect_to(daemon);
    send_bytes(socket, {hello.begin(), hello.begin() + static_cast<std::ptrdiff_t>(n)});
    const Reply reply = next_reply(socket);
    CHECK(reply.status == Status::invalid_argument);
    CHECK(closed_by_daemon(socket));
  }
  good.check_served();
}

TEST_CASE("a client of another protocol version reads both sides' versions") {
  TestDaemon daemon;
  Hello hello = hello_of("future");
  hello.protocol_min = 77;
  hello.protocol_max = 78;
  const UniqueFd socket = connect_to(daemon);
  send_bytes(socket, encode_message(hello));
  const Reply reply = next_reply(socket);
  CHECK(reply.status == Status::version_mismatch);
  INFO(reply.text);
  CHECK(reply.text.find("77 to 78") != std::string::npos);
  CHECK(reply.text.find("protocol 1 to 1") != std::string::npos);
  CHECK(reply.text.find(daemon.name()) != std::string::npos);

  // A range that contains ours is served with ours.
  hello.protocol_min = 1;
  const UniqueFd newer = connect_to(daemon);
  send_bytes(newer, encode_message(hello));
  const auto welcome = next_message(newer);
  REQUIRE(welcome.ok());
  REQUIRE(std::holds_alternative<Welcome>(*welcome));
  CHECK(std::get<Welcome>(*welcome).protocol == 1);
}

TEST_CASE("a Hello that cannot be served names the field") {
  TestDaemon daemon;
  const auto refused = [&](const Hello& hello, const std::string& field) {
    const UniqueFd socket = connect_to(daemon);
    send_bytes(socket, encode_message(hello));
    const Reply reply = next_reply(socket);
    INFO(reply.text);
    CHECK(reply.status == Status::invalid_argument);
    CHECK(reply.text.find(field) != std::string::npos);
    CHECK(closed_by_daemon(socket));
  };
  Hello hello = hello_of("");
  refused(hello, "engine");
  hello = hello_of("e");
  hello.tp_rank = 1;
  refused(hello, "tp_rank");
  hello = hello_of("e");
  hello.spec.layers = 0;
  refused(hello, "layers");
}

TEST_CASE("device memory that is not a sealed memfd is refused and the session goes on") {
  TestDaemon daemon;
  GoodRank good(daemon);
  {
    const RawRank rank(daemon, "unsealed");
    const DeviceGeometry geometry = small_geometry(small_spec());
    const auto bytes = geometry.allocations[0].bytes;
    const auto attempt = [&](int fd) {
      send_bytes(rank.socket, encode_message(RegisterBuffers{geometry}), {fd});
      return next_reply(rank.socket);
    };
    const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(unsealed.get(), static_cast<off_t>(bytes)) == 0);
    CHECK(attempt(unsealed.get()).status == Status::not_permitted);
    REQUIRE(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_GROW) == 0);
    CHECK(attempt(unsealed.get()).status == Status::not_permitted);

    TempDir dir;
    write_text(dir.file("file"), std::string(bytes, 'x'));
    const UniqueFd file(::open(dir.file("file").c_str(), O_RDWR | O_CLOEXEC));
    CHECK(attempt(file.get()).status == Status::not_permitted);

    const auto small = create_sealed("small", 4096);
    REQUIRE(small.ok());
    const Reply too_small = attempt(small->get());
    INFO(too_small.text);
    CHECK(too_small.status == Status::invalid_argument);
    CHECK(too_small.text.find("4096") != std::string::npos);
    CHECK(too_small.text.find(std::to_string(bytes)) != std::string::npos);

    const auto right = create_sealed("right", bytes);
    REQUIRE(right.ok());
    CHECK(attempt(right->get()).status == Status::ok);
    // Once is enough: a second registration ends the session.
    CHECK(attempt(right->get()).status == Status::not_permitted);
    CHECK(closed_by_daemon(rank.socket));
  }
  good.check_served();
}

TEST_CASE("staging memory that can't be is refused with the reason and the session goes on") {
  TestDaemon daemon;
  GoodRank good(daemon);
  {
    const RawRank rank(daemon, "stager");
    RegisterBuffers message{small_geometry(small_spec())};
    const auto memory = create_sealed("memory", message.geometry.allocations[0].bytes);
    REQUIRE(memory.ok());
    message.staging = StagingOffer{};
    const auto attempt = [&](const std::vector<int>& fds, const std::string& reason) {
      send_bytes(rank.socket, encode_message(message), fds);
      const Reply reply = next_reply(rank.socket);
      INFO(reply.text);
      CHECK(reply.status == Status::invalid_argument);
      CHECK(reply.text.find(reason) != std::string::npos);
    };
    attempt({memory->get()}, "1 descriptors came with 1 allocations and a staging block, expected 2");
    attempt({memory->get(), memory->get()}, "staging memory beside host memory");
    message.staging.reset();
    send_bytes(rank.socket, encode_message(message), {memory->get()});
    CHECK(next_reply(rank.socket).status == Status::ok);
  }
  good.check_served();
}

TEST_CASE("a geometry that lies about its memory is refused with the field") {
  TestDaemon daemon;
  GoodRank good(daemon);
  {
    const RawRank rank(daemon, "liar");
    const DeviceGeometry honest = small_geometry(small_spec());
    const auto memory = create_sealed("memory", honest.allocations[0].bytes);
    REQUIRE(memory.ok());
    const auto attempt = [&](const DeviceGeometry& geometry, const std::vector<int>& fds) {
      send_bytes(rank.socket, encode_message(RegisterBuffers{geometry}), fds);
      const Reply reply = next_reply(rank.socket);
      INFO(reply.text);
      CHECK(reply.status == Status::invalid_argument);
      CHECK_FALSE(reply.text.empty());
    };
    const std::vector<int> one = {memory->get()};
    DeviceGeometry g = honest;
    g.tensors[1].offset += honest.allocations[0].bytes;
    attempt(g, one);
    g = honest;
    g.tensors[1].offset = ~7ull;
    attempt(g, one);
    g = honest;
    g.pages = 0xffffffff;
    attempt(g, one);
    g = honest;
    g.tensors.pop_back();
    attempt(g, one);
    g = honest;
    g.allocations[0].bytes *= 2;
    attempt(g, one);
    attempt(honest, {});
    attempt(honest, {memory->get(), memory->get()});
  }
  good.check_served();
}

TEST_CASE("connections that never say Hello are closed by their deadline") {
  TestDaemon daemon(kShortHello);
  GoodRank good(daemon);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(connect_to(daemon));
  for (const UniqueFd& socket : silent) CHECK(closed_by_daemon(socket));
  good.check_served();
}

TEST_CASE("a thousand connections at once: those above the limit are told so, all others are served") {
  TestDaemon daemon(
      R"({"socket": {"max_connections": 100, "max_connections_per_process": 1000}, "limits": {"hello_deadline_ms": 60000}})");
  GoodRank good(daemon);
  std::vector<UniqueFd> sockets;
  for (int i = 0; i < 1000; ++i) sockets.push_back(connect_to(daemon));
  // Ask on every one. Those above the limit get a reason or find the connection closed.
  int served = 0;
  int told = 0;
  int cut = 0;
  for (const UniqueFd& socket : sockets) {
    const auto sent = send_message(socket.get(), encode_message(Control{{"status"}}), {}, 1000);
    const auto answer = sent.ok() ? next_message(socket) : Result<SocketMessage>(sent.error());
    const auto* reply = answer.ok() ? std::get_if<Reply>(&*answer) : nullptr;
    if (reply == nullptr) {
      ++cut;
    } else if (reply->status == Status::ok) {
      ++served;
    } else {
      CHECK(reply->status == Status::again);
      CHECK(reply->text.find("socket.max_connections") != std::string::npos);
      ++told;
    }
  }
  CHECK(served == 99);
  CHECK(told > 0);
  CHECK(served + told + cut == 1000);
  sockets.clear();
  good.check_served();
}

TEST_CASE("a client that asks without reading the answers is closed") {
  TestDaemon daemon;
  GoodRank good(daemon);
  const UniqueFd socket = connect_to(daemon);
  const auto question = encode_message(Control{{"status"}});
  bool closed = false;
  for (int i = 0; i < 1'000'000 && !closed; ++i)
    closed = !send_message(socket.get(), question, {}, 1000).ok();
  CHECK(closed);
  good.check_served();
}

TEST_CASE("descriptors nobody asked for are closed with the connection") {
  TestDaemon daemon;
  GoodRank good(daemon);
  const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::vector<int> many(kMaxMessageFds, null.get());
  for (int i = 0; i < 100; ++i) {
    const UniqueFd socket = connect_to(daemon);
    send_bytes(socket, encode_message(Control{{"status"}}), many);
    CHECK(next_reply(socket).status == Status::invalid_argument);
    CHECK(closed_by_daemon(socket));
  }
  // More than a message may carry: the kernel drops what does not fit, the daemon the connection.
  for (int i = 0; i < 20; ++i) {
    const UniqueFd socket = connect_to(daemon);
    std::vector<int> most(253, null.get());
    char byte = 1;
    iovec iov{&byte, 1};
    alignas(cmsghdr) char control_bytes[CMSG_SPACE(sizeof(int) * 253)] = {};
    msghdr header{};
    header.msg_iov = &iov;
    header.msg_iovlen = 1;
    header.msg_control = control_bytes;
    header.msg_controllen = sizeof control_bytes;
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * most.size());
    std::memcpy(CMSG_DATA(c), most.data(), sizeof(int) * most.size());
    REQUIRE(::sendmsg(socket.get(), &header, MSG_NOSIGNAL) == 1);
    CHECK(closed_by_daemon(socket));
  }
  good.check_served();
}

TEST_CASE("messages out of turn end the connection") {
  TestDaemon daemon;
  GoodRank good(daemon);
  const auto ended_by = [&](const SocketMessage& message) {
    const RawRank rank(daemon, "rude");
    send_bytes(rank.socket, encode_message(message));
    CHECK(next_reply(rank.socket).status == Status::invalid_argument);
    CHECK(closed_by_daemon(rank.socket));
  };
  ended_by(hello_of("rude"));
  ended_by(Welcome{});
  ended_by(Control{{"clear"}});
  ended_by(Reply{});
  const UniqueFd early = connect_to(daemon);
  send_bytes(early, encode_message(RegisterBuffers{small_geometry(small_spec())}));
  CHECK(next_reply(early).status == Status::invalid_argument);
  good.check_served();
}

TEST_CASE("ranks that hang up at any moment of the greeting leave nothing behind") {
  TestDaemon daemon;
  GoodRank good(daemon);
  for (int i = 0; i < 100; ++i) {
    const UniqueFd socket = connect_to(daemon);
    if (i % 3 > 0) send_bytes(socket, encode_message(hello_of("gone-" + std::to_string(i))));
    if (i % 3 > 1) CHECK(next_message(socket).ok());
  }
  good.check_served();
  REQUIRE(eventually([&] {
    const auto ranks = control(daemon.socket_path(), {"ranks"}, kPatienceMs);
    return ranks.ok() && ranks->find("gone-") == std::string::npos;
  }));
}

TEST_CASE("a rank killed without a word is noticed, even when a forked child still holds its socket") {
  TestDaemon daemon;
  GoodRank good(daemon);
  Child rank = Child::run([&]() -> int {
    auto socket = connect_unix(daemon.socket_path());
    if (!socket) return 1;
    if (!send_message(socket->get(), encode_message(hello_of("killed")), {}, 1000)) return 2;
    if (!receive_message(socket->get(), kPatienceMs)) return 3;
    const pid_t holder = ::fork();
    if (holder == 0) {  // inherits the socket, so no hang-up comes from it
      ::alarm(60);
      for (;;) ::pause();
    }
    const std::string line = "holder " + std::to_string(holder) + "\n";
    static_cast<void>(!::write(STDOUT_FILENO, line.data(), line.size()));
    for (;;) ::pause();
  });
  const auto line = rank.read_line();
  REQUIRE(line.has_value());
  REQUIRE(line->rfind("holder ", 0) == 0);
  const auto holder = static_cast<pid_t>(std::stol(line->substr(7)));
  rank.kill(SIGKILL);
  rank.wait();
  const bool noticed = eventually([&] {
    const auto ranks = control(daemon.socket_path(), {"ranks"}, kPatienceMs);
    return ranks.ok() && ranks->find("killed") == std::string::npos;
  });
  ::kill(holder, SIGKILL);
  CHECK(noticed);
  good.check_served();
}

TEST_CASE("only listed users may attach, and they may ask but not change") {
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can take another user's place");
    return;
  }
  constexpr uid_t kListed = 54321;
  constexpr uid_t kStranger = 54322;
  TestDaemon daemon(R"({"socket": {"allowed_uids": [54321]}})");
  REQUIRE(::chmod(daemon.socket_path().substr(0, daemon.socket_path().rfind('/')).c_str(), 0755) == 0);
  // The status that `user` gets for a question, as the child's exit code.
  const auto ask_as = [&](uid_t user, const std::string& question) {
    Child child = Child::run([&]() -> int {
      if (::setuid(user) != 0) return 98;
      return static_cast<int>(control(daemon.socket_path(), {question}, kPatienceMs).status());
    });
    const auto status = child.wait();
    REQUIRE(status.has_value());
    return static_cast<Status>(status->code);
  };
  CHECK(ask_as(kListed, "status") == Status::ok);
  CHECK(ask_as(kListed, "clear") == Status::not_permitted);
  CHECK(ask_as(kStranger, "status") == Status::not_permitted);
  CHECK(ask_as(0, "clear") == Status::ok);

  daemon.write_config(R"({"socket": {"allowed_uids": [54322]}})");
  daemon.child().kill(SIGHUP);
  REQUIRE(eventually([&] { return ask_as(kStranger, "status") == Status::ok; }));
  CHECK(ask_as(kListed, "status") == Status::not_permitted);
}
