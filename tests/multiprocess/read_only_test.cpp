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

// What `body` prints, run as that user. Its exit code must be 0.
template <class Body>
std::string as_user(uid_t user, Body&& body) {
  Child child = Child::run([&]() -> int {
    if (::setgid(user) != 0 || ::setuid(user) != 0) return 98;
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

// Lets other users reach the socket: its directory is the test's own.
void open_directory(const TestDaemon& daemon) {
  REQUIRE(::chmod(daemon.socket_path().substr(0, daemon.socket_path().rfind('/')).c_str(), 0755) == 0);
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
  // Storage takes a page when somebody asks for its backup, and never by itself.
  TestDaemon daemon(R"({"socket": {"read_only_uids": [54321]},
                        "storage": {"backend": "memory", "backup_policy": "write_back"}})");
  open_directory(daemon);
  const auto hashes = prompt(1, 8);
  TestRank writer(daemon, "engine", 0, kSpec);
  REQUIRE(write_prompt(writer, 1, hashes) == 8);

  // It says the same engine, and does not get into that engine's group.
  const std::string told = as_user(kReader, [&]() -> std::string {
    TestRank reader(daemon, "engine", 0, kSpec);
    if (reader.session().probe(hashes).leading != 8) return "the probe is wrong";
    const ReadBack read = read_back(reader, 1, hashes);
    if (read.hits != 8 || read.wrong != 0) return "the pages are wrong";
    const auto reserved = reader.run(reader.session().reserve(2, prompt(2, 4)));
    const auto write = reader.session().write(reserved.lease, 0, TestRank::pages(0, 4));
    if (write.ok()) return "the write was accepted";
    const auto prefetch = reader.session().prefetch(reserved.lease, 0, 4);
    if (prefetch.ok()) return "the prefetch was accepted";
    const auto backup = reader.session().backup(reserved.lease, 0, 4);
    if (backup.ok()) return "the backup was accepted";
    return std::string(to_string(write.status())) + ": " + write.error().message + "; " +
           prefetch.error().message + "; " + backup.error().message;
  });
  CHECK(contains(told, "not_permitted: user 54321 is attached only for reading"));
  CHECK(contains(told, "socket.read_only_uids"));
  CHECK(contains(told, "may not write"));
  CHECK(contains(told, "may not prefetch"));
  CHECK(contains(told, "may not back up"));
  CHECK(contains(daemon.log(), "uid 54321, rank 0, only for reading"));
  CHECK(counter(daemon, "read_only_refused") == 0);  // the library asked for nothing

  // A client without the library's manners is refused by the daemon.
  const std::string raw = as_user(kReader, [&]() -> std::string {
    RawRank rank(daemon, "raw", 0, kSpec);
    const auto reserved = rank.run(rank.reserve(1, prompt(3, 2)));
    const auto write = rank.run(rank.transfer(Opcode::write, reserved.lease, 0, 2, 1024));
    Submission fetch;
    fetch.opcode = Opcode::prefetch;
    fetch.sequence_or_lease = reserved.lease;
    fetch.count = 2;
    fetch.fence = Submission::kNoFence;
    const auto prefetch = rank.run(fetch);
    // Of pages that it can find, and that storage does not have.
    const auto found = rank.run(rank.reserve(2, hashes));
    Submission back_up = fetch;
    back_up.opcode = Opcode::backup;
    back_up.sequence_or_lease = found.lease;
    const auto backup = rank.run(back_up);
    std::string said;
    for (const Status s : {reserved.status, write.status, prefetch.status, found.status, backup.status})
      said += std::string(to_string(s)) + " ";
    return said + std::to_string(found.hits) + " hits";
  });
  CHECK(raw == "ok not_permitted not_permitted ok not_permitted 8 hits\n");
  CHECK(counter(daemon, "read_only_refused") == 3);
  CHECK(counter(daemon, "backups") == 0);
  CHECK(counter(daemon, "written") == 8);

  // The one that may write goes on as before.
  CHECK(write_prompt(writer, 2, prompt(4, 8)) == 8);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("a user who may only read does not get to map the pool, whose bytes it could then change") {
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can take another user's place");
    return;
  }
  // Its engine may, and so may a stranger who is on that list.
  TestDaemon daemon(R"({"socket": {"read_only_uids": [54321], "allowed_uids": [54322]},
                        "pool": {"map_engines": ["engine"], "map_uids": [54322]}})");
  open_directory(daemon);
  const auto hashes = prompt(1, 8);
  TestRank writer(daemon, "writer", 0, kSpec);
  REQUIRE(write_prompt(writer, 1, hashes) == 8);
  const std::size_t descriptors = descriptor_count(daemon.pid());

  const std::string told = as_user(kReader, [&]() -> std::string {
    AttachOptions options;
    options.socket_path = daemon.socket_path();
    options.engine = "engine";
    options.spec = kSpec;
    options.io_backend = IoBackend::kernel;
    const std::size_t mapped = mapping_count(::getpid());  // the writer's, of the parent
    const auto refused = Session::attach(options);
    if (refused.ok()) return "attached";
    if (mapping_count(::getpid()) != mapped) return "something is mapped";
    return std::string(to_string(refused.status())) + ": " + refused.error().message;
  });
  CHECK(contains(told, "not_permitted: "));
  CHECK(
      contains(told, "user 54321 is read-only, by socket.read_only_uids of daemon '" + daemon.name() + "'"));
  CHECK(contains(told, "may not map the pool, as io_backend kernel does"));

  // Without the library it is handed no descriptor of the pool either, whether it asks for one or not.
  const std::string raw = as_user(kReader, [&]() -> std::string {
    std::string out;
    try {
      const RawRank rank(daemon, "engine", 0, kSpec, false, kFeatureKernel);
      out = "attached";
    } catch (const std::runtime_error& e) {
      out = e.what();
    }
    const RawRank direct(daemon, "engine", 0, kSpec);
    return out + (direct.by_kernel() || direct.descriptors() != 3 ? "; it has the pool" : "; it has no pool");
  });
  CHECK(contains(raw, "user 54321 is read-only"));
  CHECK(contains(raw, "; it has no pool"));

  // In io_backend direct the same user reads.
  CHECK(as_user(kReader, [&]() -> std::string {
          TestRank reader(daemon, "engine", 0, kSpec);
          const ReadBack read = read_back(reader, 1, hashes);
          return read.hits == 8 && read.wrong == 0 ? "read" : "wrong";
        }) == "read\n");
  CHECK(as_user(54322, [&]() -> std::string {
          TestRank rank(daemon, "engine", 0, kSpec, false, IoBackend::kernel);
          return write_prompt(rank, 1, prompt(9, 4)) == 4 ? "wrote" : "did not write";
        }) == "wrote\n");
  CHECK(eventually([&] { return descriptor_count(daemon.pid()) == descriptors; }));
  CHECK(counter(daemon, "written") == 8 + 4);
  CHECK(read_back(writer, 2, hashes).wrong == 0);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("a user who may only read makes no other model's pages go to have its own") {
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can take another user's place");
    return;
  }
  TestDaemon daemon(R"({"socket": {"read_only_uids": [54321]}, "limits": {"namespaces": 1}})");
  open_directory(daemon);
  {
    TestRank writer(daemon, "engine", 0, kSpec);
    REQUIRE(write_prompt(writer, 1, prompt(1, 8)) == 8);
  }
  // Nobody uses that model now: one who may write could have its place.
  REQUIRE(eventually([&] { return counter(daemon, "attached_clients") == 0; }));
  const std::string told = as_user(kReader, [&]() -> std::string {
    AttachOptions options;
    options.socket_path = daemon.socket_path();
    options.engine = "engine";
    options.spec = kSpec;
    options.spec.model = "another";
    const auto refused = Session::attach(options);
    return refused.ok() ? "attached" : refused.error().message;
  });
  INFO(told);
  CHECK(contains(told, "raise limits.namespaces"));
  CHECK(counter(daemon, "ready_pages") == 8);
  TestRank writer(daemon, "engine", 0, kSpec);
  CHECK(read_back(writer, 1, prompt(1, 8)).hits == 8);
}

TEST_CASE("a user who may only read may ask the daemon, not change it") {
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can take another user's place");
    return;
  }
  TestDaemon daemon(R"({"socket": {"read_only_uids": [54321]}})");
  open_directory(daemon);
  TestRank writer(daemon, "engine", 0, kSpec);
  REQUIRE(write_prompt(writer, 1, prompt(1, 8)) == 8);
  const std::string answers = as_user(kReader, [&]() -> std::string {
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
    last = as_user(kReader, [&]() -> std::string {
      const auto answer = control(daemon.socket_path(), {"status"}, kPatienceMs);
      return answer ? "served" : std::string(to_string(answer.status())) + ": " + answer.error().message;
    });
    return last != "served\n";
  };
  const bool refused = eventually(stranger);
  INFO(last);
  CHECK(refused);
}
