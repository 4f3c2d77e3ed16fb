// A real client that is stepped through everything that it does in its channel, beside a daemon in the test's
// process that lives, in forked copies, through its death in every state.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/crash/stepping/local_rank.hpp"
#include "tests/crash/stepping/serving_daemon.hpp"
#include "tests/crash/stepping/single_step.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::test {

inline NamespaceSpec client_spec() {
  return small_spec(Attention::mha, 1);
}

// The client's side, in the stepped process.
struct Player {
  explicit Player(const daemon::Config& c) : config(c) {}

  void attach() {
    AttachOptions options;
    options.socket_path = config.socket.path;
    options.engine = "stepped-client";
    options.spec = client_spec();
    session = TestRank::take(Session::attach(options));
  }
  void register_buffers() {
    const auto geometry = device_geometry(client_spec(), LocalRank::kDevicePages);
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

// What the client does: made ready, then stepped through.
struct ClientOperation {
  const char* name;
  std::function<void(Player&)> prepare;
  std::function<void(Player&)> act;
};

inline const std::vector<ClientOperation>& client_operations() {
  static const auto hashes = prompt(9, 5);
  static const std::vector<ClientOperation> all = {
      {"attach", [](Player&) {}, [](Player& p) { p.attach(); }},
      {"submit", [](Player& p) { p.register_buffers(); }, [](Player& p) { p.post(p.session->nop()); }},
      {"wait", [](Player&) {}, [](Player& p) { p.wait(); }},
      {"reserve", [](Player&) {}, [](Player& p) { p.post(p.session->reserve(1, hashes)); }},
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
      {"release", [](Player&) {}, [](Player& p) { p.post(p.session->release(p.lease)); }},
      {"submit to a ring that becomes full", [](Player& p) { p.wait(); },
       [](Player& p) {
         // Nobody serves while this process does not wait.
         while (p.session->nop().ok()) {
         }
       }},
      {"detach", [](Player&) {}, [](Player& p) { p.session->close(); }},
  };
  return all;
}

inline void play_client(const daemon::Config& config) {
  Player player(config);
  for (const ClientOperation& operation : client_operations()) {
    operation.prepare(player);
    SteppedProcess::mark();
    operation.act(player);
    SteppedProcess::mark();
  }
}

// What the daemon had done with what lay in the ring when it heard of the death.
enum class Fate { not_served, served, copies_wait };
constexpr Fate kFates[] = {Fate::not_served, Fate::served, Fate::copies_wait};

constexpr const char* to_string(Fate fate) {
  switch (fate) {
    case Fate::not_served:
      return "nothing served";
    case Fate::served:
      return "everything served";
    default:
      return "everything served, copies on their way";
  }
}

// In a forked copy of the daemon: the client is dead. Returns what is wrong afterwards.
inline std::string live_through_death(ServingDaemon& daemon, daemon::Client& client, LocalRank& other,
                                      Fate fate) {
  DaemonInside& inside = daemon.inside();
  daemon.part_from_parent(client);
  if (fate == Fate::copies_wait) inside.transfers().hold();
  if (fate != Fate::not_served) inside.settle();
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

// Lets a forked copy of the daemon live through the client's death. Returns what is wrong afterwards.
inline std::string after_death(ServingDaemon& daemon, daemon::Client& client, LocalRank& other, Fate fate) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    std::string faults;
    try {
      faults = live_through_death(daemon, client, other, fate);
    } catch (const std::exception& e) {
      faults = e.what();
    }
    const bool told = ::write(writer.get(), faults.data(), faults.size()) >= 0;
    ::_exit(told && faults.empty() ? 0 : 1);
  }
  writer.reset();
  std::string faults;
  char bytes[256];
  for (ssize_t n = 0; (n = ::read(reader.get(), bytes, sizeof bytes)) > 0;)
    faults.append(bytes, static_cast<std::size_t>(n));
  int status = 0;
  if (::waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  return std::string(to_string(fate)) + ": " + (faults.empty() ? "the daemon died" : faults);
}

inline void store(DaemonInside& daemon, LocalRank& rank, const std::vector<PrefixHash>& hashes) {
  rank.post_reserve(1, hashes);
  daemon.settle();
  const Completion reserved = rank.next();
  for (std::uint32_t i = 0; i < hashes.size(); ++i) rank.fill(i, hashes[i]);
  rank.post_copy(Opcode::write, reserved.lease, 0, static_cast<std::uint32_t>(hashes.size()));
  daemon.settle();
  if (rank.next().written != hashes.size()) throw std::runtime_error("pages were not written");
  rank.post_release(reserved.lease);
  daemon.settle();
  if (rank.next().status != Status::ok) throw std::runtime_error("a lease was not released");
}

struct ClientWalk {
  const char* operation = "";
  std::uint64_t instructions = 0;
  std::size_t states = 0;  // distinct ones of the channel, each with every fate
  std::vector<std::string> faults;
};

// Steps the operations that are `chosen`; the others run. Ends with the first operation that has `enough`
// faults. Rings begin at `first_position`.
inline std::vector<ClientWalk> step_client(const daemon::Config& config, std::uint32_t first_position,
                                           const std::function<bool(const std::string&)>& chosen,
                                           std::size_t enough) {
  // Forked before the daemon has threads.
  SteppedProcess process([&] { play_client(config); });
  ServingDaemon daemon(config, first_position);
  process.while_it_runs([&] { daemon.inside().coordinator().turn(); });
  LocalRank other(config, client_spec(), 0);
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
  std::vector<ClientWalk> walks;
  for (const ClientOperation& operation : client_operations()) {
    if (!process.run_to_mark()) throw std::runtime_error("the stepped client ended: " + process.end());
    if (client != nullptr) daemon.share_with_forks(*client);
    changed();
    if (!chosen(operation.name)) {
      if (!process.run_to_mark()) throw std::runtime_error("the stepped client ended: " + process.end());
      continue;
    }
    ClientWalk& walk = walks.emplace_back();
    walk.operation = operation.name;
    const std::uint64_t started = process.instructions();
    const auto end = process.step_to_mark([&] {
      if (!changed()) return true;
      ++walk.states;
      for (const Fate fate : kFates) {
        std::string fault = after_death(daemon, *client, other, fate);
        if (!fault.empty()) walk.faults.push_back(std::move(fault));
      }
      return walk.faults.size() < enough;
    });
    walk.instructions = process.instructions() - started;
    if (end == SteppedProcess::Walk::stopped_by_look) return walks;
    if (end == SteppedProcess::Walk::ended)
      throw std::runtime_error("the stepped client ended: " + process.end());
  }
  if (process.run_to_mark() || process.end() != "exit status 0")
    throw std::runtime_error("the stepped client ended otherwise than it should: " + process.end());
  return walks;
}

}  // namespace hicache::test
