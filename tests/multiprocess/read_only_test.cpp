// Users who may only read: they find, load and look, and change nothing, whatever they send.
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <string>

#include "shm/unix_socket.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/raw_rank.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

const NamespaceSpec kSpec = small_spec(Attention::mha, 1);
constexpr uid_t kReader = 54321;

std::uint64_t counter(const TestDaemon& daemon, const std::string& name) {
  const auto status = TestRank::take(control(daemon.socket_path(), {"status"}, kPatienceMs));
  return nlohmann::json::parse(status).at("counters").at(name).get<std::uint64_t>();
}

// What `body` prints, run as user kReader. Its exit code must be 0.
template <class Body>
std::string as_reader(Body&& body) {
  Child child = Child::run([&]() -> int {
    if (::setgid(kReader) != 0 || ::setuid(kReader) != 0) return 98;
    const std::string text = body();
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
    return 0;
  });
  const std::string out = child.read_all();
  const auto status = child.wait();
  INFO(out + child.error_text());
  REQUIRE(status.has_value());
  CHECK(status->exited_with(0));
  return out;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a user who may only read finds and loads pages, and is told why it may not change any") {
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can take another user's place");
    return;
  }
  TestDaemon daemon(R"({"socket": {"read_only_uids": [54321]}})");
  REQUIRE(::chmod(daemon.socket_path().substr(0, daemon.socket_path().rfind('/')).c_str(), 0755) == 0);
  const auto hashes = prompt(1, 8);
  TestRank writer(daemon, "engine", 0, kSpec);
  REQUIRE(write_prompt(writer, 1, hashes) == 8);

  // It says the same engine, and does not get into that engine's group.
  const std::string told = as_reader([&]() -> std::string {
    TestRank reader(daemon, "engine", 0, kSpec);
    if (reader.session().probe(hashes).leading != 8) return "the probe is wrong";
    const ReadBack read = read_back(reader, 1, hashes);
    if (read.hits != 8 || read.wrong != 0) return "the pages are wrong";
    const auto reserved = reader.run(reader.session().reserve(2, prompt(2, 4)));
    const auto write = reader.session().write(reserved.lease, 0, TestRank::pages(0, 4));
    if (write.ok()) return "the write was accepted";
    const auto prefetch = reader.session().prefetch(reserved.lease, 0, 4);
    if (prefetch.ok()) return "the prefetch was accepted";
    return std::string(to_string(write.status())) + ": " + write.error().message + "; " +
           prefetch.error().message;
  });
  CHECK(contains(told, "not_permitted: user 54321 is attached only for reading"));
  CHECK(contains(told, "socket.read_only_uids"));
  CHECK(contains(told, "may not write"));
  CHECK(contains(told, "may not prefetch"));
  CHECK(contains(daemon.log(), "uid 54321, rank 0, only for reading"));
  CHECK(counter(daemon, "read_only_refused") == 0);  // the library asked for nothing

  // A client without the library's manners is refused by the daemon.
  const std::string raw = as_reader([&]() -> std::string {
    RawRank rank(daemon, "raw", 0, kSpec);
    const auto reserved = rank.run(rank.reserve(1, prompt(3, 2)));
    const auto write = rank.run(rank.transfer(Opcode::write, reserved.lease, 0, 2, 1024));
    Submission fetch;
    fetch.opcode = Opcode::prefetch;
    fetch.sequence_or_lease = reserved.lease;
    fetch.count = 2;
    fetch.fence = Submission::kNoFence;
    const auto prefetch = rank.run(fetch);
    return std::string(to_string(reserved.status)) + " " + std::string(to_string(write.status)) + " " +
           std::string(to_string(prefetch.status));
  });
  CHECK(raw == "ok not_permitted not_permitted\n");
  CHECK(counter(daemon, "read_only_refused") == 2);
  CHECK(counter(daemon, "written") == 8);

  // The one that may write goes on as before.
  CHECK(write_prompt(writer, 2, prompt(4, 8)) == 8);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("a user who may only read may ask the daemon, not change it") {
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can take another user's place");
    return;
  }
  TestDaemon daemon(R"({"socket": {"read_only_uids": [54321]}})");
  REQUIRE(::chmod(daemon.socket_path().substr(0, daemon.socket_path().rfind('/')).c_str(), 0755) == 0);
  TestRank writer(daemon, "engine", 0, kSpec);
  REQUIRE(write_prompt(writer, 1, prompt(1, 8)) == 8);
  const std::string answers = as_reader([&]() -> std::string {
    std::string out;
    for (const std::vector<std::string>& question :
         {std::vector<std::string>{"status"}, {"ranks"}, {"namespaces"}, {"config"}, {"storage", "status"}}) {
      const auto answer = control(daemon.socket_path(), question, kPatienceMs);
      if (!answer) out += question[0] + ": " + answer.error().message + "\n";
    }
    for (const std::vector<std::string>& command :
         {std::vector<std::string>{"clear"}, {"evict", "1"}, {"evict-client", "0"}, {"storage", "detach"}}) {
      const auto answer = control(daemon.socket_path(), command, kPatienceMs);
      out += answer ? command[0] + " was done\n" : answer.error().message + "\n";
    }
    return out;
  });
  for (const char* command : {"clear", "evict", "evict-client", "storage"}) {
    INFO(answers);
    CHECK(contains(answers,
                   "user 54321 (read-only, by socket.read_only_uids) may not " + std::string(command) + ":"));
  }
  CHECK(counter(daemon, "read_only_refused") == 4);
  CHECK(counter(daemon, "ready_pages") == 8);

  // Off the list it is a stranger.
  daemon.write_config(R"({"socket": {"read_only_uids": []}})");
  daemon.child().kill(SIGHUP);
  std::string last;
  const auto stranger = [&] {
    last = as_reader([&]() -> std::string {
      const auto answer = control(daemon.socket_path(), {"status"}, kPatienceMs);
      return answer ? "served" : std::string(to_string(answer.status())) + ": " + answer.error().message;
    });
    return last != "served\n";
  };
  const bool refused = eventually(stranger);
  INFO(last);
  CHECK(refused);
}
