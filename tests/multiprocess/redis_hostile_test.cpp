// The redis backend against servers that are none: garbage, huge lengths, answers too early, too many, too
// slow.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <csignal>
#include <random>
#include <thread>

#include "daemon/storage/redis/page_operation.hpp"
#include "daemon/storage/redis/record.hpp"
#include "tests/support/backend_rig.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;
using daemon::StorageOperation;
using Json = nlohmann::ordered_json;

namespace {

// What a hostile server does once it has greeted; `request` is all it has read since.
struct Behaviour {
  std::string answer;            // to every command after the greeting
  std::size_t slice = 1u << 20;  // bytes of it at once
  int pause_ms = 0;              // between slices
  bool close_after = false;
  std::string greeting = "+PONG\r\n";
};

// A child process that listens on a loopback port and answers as it is told.
class HostileServer {
 public:
  explicit HostileServer(const Behaviour& behaviour)
      : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::listen(listener_.get(), 64) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no listener");
    }
    port_ = ntohs(address.sin_port);
    child_ = Child::run([this, behaviour] { return serve(behaviour); });
  }
  [[nodiscard]] std::string tcp() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int serve(const Behaviour& behaviour) {
    for (;;) {
      const int fd = ::accept(listener_.get(), nullptr, nullptr);
      if (fd >= 0) std::thread([fd, behaviour] { talk(UniqueFd(fd), behaviour); }).detach();
    }
  }
  static void talk(const UniqueFd fd, const Behaviour& behaviour) {
    std::string request;
    bool greeted = false;
    for (;;) {
      char chunk[65536];
      const ssize_t n = ::recv(fd.get(), chunk, sizeof chunk, 0);
      if (n <= 0) return;
      request.append(chunk, static_cast<std::size_t>(n));
      if (!greeted) {
        if (request.find("PING\r\n") == std::string::npos) continue;
        request.erase(0, request.find("PING\r\n") + 6);
        greeted = true;
        if (!say(fd, behaviour.greeting, behaviour)) return;
        if (request.empty()) continue;
      }
      request.clear();
      if (!say(fd, behaviour.answer, behaviour) || behaviour.close_after) return;
    }
  }
  static bool say(const UniqueFd& fd, const std::string& text, const Behaviour& behaviour) {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t count = std::min(behaviour.slice, text.size() - at);
      const ssize_t n = ::send(fd.get(), text.data() + at, count, MSG_NOSIGNAL);
      if (n <= 0) return false;
      at += static_cast<std::size_t>(n);
      if (behaviour.pause_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(behaviour.pause_ms));
    }
    return true;
  }

  UniqueFd listener_;
  std::uint16_t port_ = 0;
  Child child_;
};

Json settings_for(const HostileServer& server) {
  return {{"endpoints", {server.tcp()}},
          {"connections", 2},
          {"connect_timeout_ms", 300},
          {"response_timeout_ms", 300},
          {"reconnect_max_ms", 100}};
}

// Every page gets an outcome that is not ok, nothing is written outside the pages that were asked for, and
// the backend is still alive afterwards.
void expect_refusal(const Behaviour& behaviour) {
  const HostileServer server(behaviour);
  BackendRig rig;
  rig.attach("redis", settings_for(server));
  for (const StorageOperation operation :
       {StorageOperation::get, StorageOperation::exists, StorageOperation::put}) {
    const auto outcomes = rig.run(operation, 0, 6);
    REQUIRE(outcomes.size() == 6);
    for (const Status outcome : outcomes) {
      INFO(to_string(operation) << ": " << to_string(outcome));
      // A liar may begin with an answer that an honest server would give.
      const bool missing = operation == StorageOperation::exists && outcome == Status::not_found;
      CHECK((missing || outcome == Status::system_error || outcome == Status::timed_out ||
             outcome == Status::corrupt));
    }
  }
  CHECK(rig.untouched(6, 122));
  CHECK(rig.padding_intact());
  CHECK(eventually([&] { return rig.backend().health().text.find("; ") != std::string::npos; }));
  CHECK(rig.sink().breaches().empty());
}

std::string bulk(const std::string& bytes) {
  return "$" + std::to_string(bytes.size()) + "\r\n" + bytes + "\r\n";
}

// The true record of page n, as a server would keep it.
std::string record_of(BackendRig& rig, std::uint32_t n) {
  rig.fill(n);
  const daemon::redis::RecordIdentity identity(rig.ns(), BackendRig::hash(n));
  std::vector<std::span<const std::byte>> payload;
  const NamespaceSpec& spec = rig.ns().spec;
  for (std::uint64_t shard = 0; shard < spec.shards(); ++shard) {
    payload.push_back(
        {rig.pool().base + n * spec.slot_bytes() + shard * spec.shard_stride(), spec.shard_bytes()});
  }
  const auto header = daemon::redis::make_record_header(identity, payload);
  std::string record(reinterpret_cast<const char*>(&header), sizeof header);
  for (const auto& piece : payload) record.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  return record;
}

}  // namespace

TEST_CASE("redis: no answer that a hostile server gives harms more than its page") {
  const std::vector<std::pair<const char*, std::string>> answers = {
      {"garbage", "\x00\xff garbage \r\n\r\n"},
      {"HTTP", "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"},
      {"a huge string", "$99999999999999999999\r\n"},
      {"a string of 2^63 - 1 bytes", "$9223372036854775807\r\n"},
      {"a string of more than 512 MiB", "$536870913\r\nxxxx"},
      {"a negative string", "$-2\r\n"},
      {"a huge array", "*2147483647\r\n"},
      {"an array in an array in an array", "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n"},
      {"a number that is none", ":12x\r\n"},
      {"a number that is too large", ":99999999999999999999\r\n"},
      {"a line without an end", std::string(5000, '+')},
      {"line feeds only", "\n\n\n\n"},
      {"a carriage return too few", ":1\n"},
      {"RESP3", "%1\r\n+a\r\n:1\r\n"},
      {"a wrong type", "*2\r\n:1\r\n$1\r\nx\r\n"},
      {"a status", "+OK is not a number\r\n"},
      {"an error", "-ERR I do not want to\r\n-ERR I do not want to\r\n"},
      {"a long error", "-" + std::string(900, 'x') + "\r\n"},
      {"a string with a wrong end", "$2\r\nabcd"},
      {"more answers than questions",
       ":0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n"},
      {"a redirect without an address", "-MOVED 1 nowhere\r\n"},
  };
  for (const auto& [what, answer] : answers) {
    INFO(what);
    Behaviour behaviour;
    behaviour.answer = answer;
    expect_refusal(behaviour);
    behaviour.close_after = true;
    expect_refusal(behaviour);
  }
}

TEST_CASE("redis: servers that greet wrongly, or never, are not used") {
  for (const std::string greeting :
       {"", "+PONG", "+PING\r\n", "$4\r\nPONG\r\n", ":1\r\n", "-LOADING reading\r\n", "+PONG\r\n+PONG\r\n",
        "SSH-2.0-OpenSSH_9.2\r\n"}) {
    INFO("'" << greeting << "'");
    Behaviour behaviour;
    behaviour.greeting = greeting;
    behaviour.answer = ":0\r\n";
    const HostileServer server(behaviour);
    BackendRig rig;
    rig.attach("redis", settings_for(server));
    const auto outcomes = rig.get(0, 4);
    REQUIRE(outcomes.size() == 4);
    for (const Status outcome : outcomes) CHECK(outcome == Status::system_error);
    CHECK(rig.untouched(0, 128));
  }
}

TEST_CASE("redis: a page that does not come whole is never ok") {
  BackendRig maker;
  const std::string record = record_of(maker, 0);
  const std::string whole = bulk(record);
  bool right = false;
  const auto outcome_of = [&right](const Behaviour& behaviour, int response_timeout_ms) {
    const HostileServer server(behaviour);
    BackendRig rig;
    auto settings = settings_for(server);
    settings.update(
        {{"connections", 1}, {"connect_timeout_ms", 30'000}, {"response_timeout_ms", response_timeout_ms}});
    rig.attach("redis", settings);
    const auto outcomes = rig.get(0, 1);
    right = rig.holds(0, 0);
    CHECK(rig.untouched(1, 127));
    CHECK(rig.padding_intact());
    return outcomes.size() == 1 ? outcomes[0] : Status::internal;
  };
  constexpr int kPatient = 60'000;
  constexpr int kHasty = 300;
  CHECK(outcome_of({whole}, kPatient) == Status::ok);  // the same server can also be honest
  CHECK(right);
  // In many small pieces.
  CHECK(outcome_of({whole, 100}, kPatient) == Status::ok);
  CHECK(right);
  // Cut anywhere: closed, or silent for ever.
  for (const std::size_t cut : {std::size_t{1}, std::size_t{5}, std::size_t{60}, std::size_t{118},
                                std::size_t{119}, std::size_t{2000}, whole.size() - 2, whole.size() - 1}) {
    INFO("cut at " << cut);
    Behaviour behaviour{whole.substr(0, cut)};
    CHECK(outcome_of(behaviour, kHasty) == Status::timed_out);
    behaviour.close_after = true;
    CHECK(outcome_of(behaviour, kPatient) == Status::system_error);
  }
  // A drop at a time: more than the response time allows, however lively it looks.
  CHECK(outcome_of({whole, 16, 10}, kHasty) == Status::timed_out);
  // Another page's record, and one with a false length.
  CHECK(outcome_of({bulk(record_of(maker, 1)) + ":1\r\n"}, kPatient) != Status::ok);
  CHECK(outcome_of({"$" + std::to_string(record.size()) + "\r\n" + record + "XX"}, kPatient) ==
        Status::system_error);
  CHECK(outcome_of({"$" + std::to_string(record.size() + 2) + "\r\n" + record + "\r\n\r\n"}, kHasty) !=
        Status::ok);
}

TEST_CASE("redis: an answer before the page was sent ends the connection, not the daemon's trust") {
  // The server answers the probe, and the SET as well before it can have read it.
  Behaviour behaviour;
  behaviour.answer = ":0\r\n+OK\r\n";
  const HostileServer server(behaviour);
  BackendRig rig(BackendRig::spec_of(2000), 4);  // 4 MiB a page
  rig.attach("redis", settings_for(server));
  const auto outcomes = rig.put(0, 4);
  REQUIRE(outcomes.size() == 4);
  for (const Status outcome : outcomes) CHECK(outcome != Status::ok);
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis: random bytes from a server never reach beyond the page") {
  std::mt19937_64 random(20260101);
  BackendRig maker;
  const std::string whole = bulk(record_of(maker, 0));
  for (int round = 0; round < 20; ++round) {
    std::string answer = whole;
    for (int i = 0; i < 1 + round % 4; ++i) answer[random() % 140] = static_cast<char>(random());
    if (round % 3 == 0) answer.insert(random() % answer.size(), std::string(random() % 50, '\r'));
    Behaviour behaviour{answer, 1 + random() % 3000};
    const HostileServer server(behaviour);
    BackendRig rig;
    rig.attach("redis", settings_for(server));
    const auto outcomes = rig.get(0, 4);
    REQUIRE(outcomes.size() == 4);
    for (std::uint32_t n = 0; n < 4; ++n) {
      if (outcomes[n] == Status::ok) CHECK(rig.holds(n, n));
    }
    CHECK(rig.untouched(4, 124));
    CHECK(rig.padding_intact());
    CHECK(rig.sink().breaches().empty());
  }
}
