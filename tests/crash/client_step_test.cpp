// A real client dies at every instruction of everything that it does in its channel. Whatever it leaves
// there, and whether the daemon takes what it finds before it hears of the death or not: everything of the
// client comes back, the tables stay sound, and another engine goes on.
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <optional>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/stepping/local_rank.hpp"
#include "tests/crash/stepping/recovery.hpp"
#include "tests/crash/stepping/serving_daemon.hpp"
#include "tests/crash/stepping/single_step.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

const NamespaceSpec kSpec = small_spec(Attention::mha, 1);

// The client's side, in the stepped process.
struct Player {
  explicit Player(const daemon::Config& c) : config(c) {}

  void attach() {
    AttachOptions options;
    options.socket_path = config.socket.path;
    options.engine = "stepped-client";
    options.spec = kSpec;
    session = TestRank::take(Session::attach(options));
  }
  void register_buffers() {
    const auto geometry = device_geometry(kSpec, LocalRank::kDevicePages);
    buffer.emplace(TestRank::take(HostDeviceBuffer::create(geometry.allocations[0].bytes)));
    const int fds[] = {buffer->fd()};
    if (!session->register_buffers(geometry, fds)) throw std::runtime_error("register_buffers");
  }
  void post(Result<Ticket> posted) { ticket = TestRank::take(std::move(posted)); }
  void wait() {
    result = TestRank::take(session->wait(ticket, kPatienceMs));
    if (result.status != Status::ok)
      throw std::runtime_error("result: " + std::string(to_string(result.status)));
  }

  const daemon::Config& config;
  std::optional<HostDeviceBuffer> buffer;
  std::unique_ptr<Session> session;
  Ticket ticket;
  OperationResult result;
  LeaseId lease;
};

struct Operation {
  const char* name;
  std::function<void(Player&)> prepare;
  std::function<void(Player&)> act;
};

void nothing(Player&) {}

const std::vector<Operation>& operations() {
  static const auto hashes = prompt(9, 5);
  static const std::vector<Operation> all = {
      {"attach", nothing, [](Player& p) { p.attach(); }},
      {"submit", [](Player& p) { p.register_buffers(); }, [](Player& p) { p.post(p.session->nop()); }},
      {"wait", nothing, [](Player& p) { p.wait(); }},
      {"reserve", nothing, [](Player& p) { p.post(p.session->reserve(1, hashes)); }},
      {"write",
       [](Player& p) {
         p.wait();
         p.lease = p.result.lease;
       },
       [](Player& p) { p.post(p.session->write(p.lease, 3, TestRank::pages(0, 2))); }},
      {"load", [](Player& p) { p.wait(); },
       [](Player& p) {
         p.post(p.session->load(p.lease, 0, TestRank::pages(2, 3), LayerFence{0, 1}));
       }},
      {"agree", [](Player& p) { p.wait(); }, [](Player& p) { p.post(p.session->agree(1)); }},
      {"release", nothing, [](Player& p) { p.post(p.session->release(p.lease)); }},
      {"submit to a ring that becomes full", [](Player& p) { p.wait(); },
       [](Player& p) {
         // Nobody serves while this process does not wait.
         while (p.session->nop().ok()) {
         }
       }},
      {"detach", nothing, [](Player& p) { p.session->close(); }},
  };
  return all;
}

void play(const daemon::Config& config) {
  Player player(config);
  for (const Operation& operation : operations()) {
    operation.prepare(player);
    SteppedProcess::mark();
    operation.act(player);
    SteppedProcess::mark();
  }
}

// In a forked copy of the daemon: the client is dead. Returns what is wrong afterwards.
std::string live_through_death(ServingDaemon& daemon, daemon::Client& client, LocalRank& other,
                               bool serve_first) {
  DaemonInside& inside = daemon.inside();
  daemon.part_from_parent(client);
  if (serve_first) inside.settle();
  inside.coordinator().inbox.post(daemon::GoneRequest{client.slot, client.generation, false});
  inside.settle();
  std::string faults;
  const Tables& t = inside.tables();
  const auto complain = [&](const std::string& what) { faults += what + "; "; };
  if (client.state != ClientState::free) complain("the client is still there");
  if (inside.coordinator().stats.get(Counter::live_leases) != 0) complain("a lease is left");
  if (inside.coordinator().stats.get(Counter::pinned_pages) != 0) complain("a pin is left");
  for (const PageEntry& page : t.pages) {
    const PageState state = PageWord::decode(page.word.load()).state;
    if (state != PageState::free && state != PageState::ready) complain("a page is neither free nor ready");
  }
  inspect::MemorySource source(
      {reinterpret_cast<const std::uint8_t*>(t.header), inside.region().region_bytes()});
  const auto snapshot = inspect::Snapshot::take(source);
  const inspect::Findings findings = inspect::check_snapshot(snapshot, true);
  for (const auto& finding : findings.list()) complain(finding.text);
  // The other engine goes on, and its pages are there.
  other.post_reserve(7, prompt(9, 3));
  inside.settle();
  const Completion reserved = other.next();
  if (reserved.status != Status::ok || reserved.hits != 3) complain("the other engine's pages are gone");
  other.post_release(reserved.lease);
  inside.settle();
  if (other.next().status != Status::ok) complain("the other engine can't release");
  return faults;
}

bool survives(ServingDaemon& daemon, daemon::Client& client, LocalRank& other, bool serve_first) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    std::string faults = "threw";
    try {
      faults = live_through_death(daemon, client, other, serve_first);
    } catch (const std::exception& e) {
      faults = e.what();
    }
    if (!faults.empty()) std::fprintf(stderr, "served first %d: %s\n", serve_first, faults.c_str());
    ::_exit(faults.empty() ? 0 : 1);
  }
  int status = 0;
  return ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void store(DaemonInside& daemon, LocalRank& rank, const std::vector<PrefixHash>& hashes) {
  rank.post_reserve(1, hashes);
  daemon.settle();
  const Completion reserved = rank.next();
  for (std::uint32_t i = 0; i < hashes.size(); ++i) rank.fill(i, hashes[i]);
  rank.post_copy(Opcode::write, reserved.lease, 0, static_cast<std::uint32_t>(hashes.size()));
  daemon.settle();
  REQUIRE(rank.next().written == hashes.size());
  rank.post_release(reserved.lease);
  daemon.settle();
  REQUIRE(rank.next().status == Status::ok);
}

void step_client(std::uint32_t first_position) {
  if (const std::string why = SteppedProcess::why_not(); !why.empty()) {
    WARN("SKIPPED: " << why);
    return;
  }
  spdlog::set_level(spdlog::level::off);
  TestDaemon named(kSmallDaemon);
  REQUIRE(named.stop() == 0);
  auto loaded = daemon::load_config(named.config_path());
  REQUIRE(loaded.ok());
  const daemon::Config config = *loaded;

  // Forked before the daemon has threads.
  SteppedProcess process([&] { play(config); });
  ServingDaemon daemon(config, first_position);
  process.while_it_runs([&] { daemon.inside().coordinator().turn(); });
  LocalRank other(config, kSpec, 0);
  other.post_attach(daemon.inside());
  daemon.inside().settle();
  other.post_buffers(daemon.inside());
  daemon.inside().settle();
  store(daemon.inside(), other, prompt(9, 3));

  daemon::Client* client = nullptr;
  std::vector<std::uint8_t> seen;
  const auto changed = [&] {
    if (client == nullptr) {
      client = daemon.client_of(process.pid());
      if (client == nullptr) return false;
      daemon.share_with_forks(*client);
      seen.assign(client->channel->size(), 0);
    }
    if (client->channel == nullptr || std::memcmp(client->channel->data(), seen.data(), seen.size()) == 0)
      return false;
    std::memcpy(seen.data(), client->channel->data(), seen.size());
    return true;
  };
  for (const Operation& operation : operations()) {
    INFO(operation.name);
    REQUIRE(process.run_to_mark());
    if (client != nullptr) daemon.share_with_forks(*client);
    changed();
    std::size_t states = 0;
    std::size_t failed = 0;
    const std::uint64_t started = process.instructions();
    const auto end = process.step_to_mark([&] {
      if (!changed()) return true;
      ++states;
      for (const bool serve_first : {false, true})
        failed += survives(daemon, *client, other, serve_first) ? 0 : 1;
      return failed < 10;
    });
    INFO(process.end());
    CHECK(failed == 0);
    REQUIRE(end == SteppedProcess::Walk::at_mark);
    std::printf("%s: %lu instructions, %zu states, two fates each\n", operation.name,
                static_cast<unsigned long>(process.instructions() - started), states);
    if (std::string(operation.name) != "detach") CHECK(states > 0);
  }
  REQUIRE_FALSE(process.run_to_mark());
  CHECK(process.end() == "exit status 0");
}

}  // namespace

TEST_CASE("a client may die at any instruction: everything of it comes back and others go on") {
  step_client(0);
}

TEST_CASE("a client may die at any instruction where the ring counters wrap") {
  step_client(0xfffffffdu);
}
