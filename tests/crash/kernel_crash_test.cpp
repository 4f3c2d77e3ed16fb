// Deaths at the named points of io_backend kernel (shm/crash_points.hpp): of the rank, which maps the pool
// and moves the bytes, and of the daemon, which leases them. On host memory.
#include "tests/crash/matrix_parts.hpp"
#include "tests/crash/scribbler.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

// Everything that a daemon does with ranks in io_backend kernel, once. `idle` maps the pool since an earlier
// daemon's life. All in processes of their own: what a daemon that died had leased is held while they live.
void exercise(const std::string& socket, const Child& idle) {
  const auto dead = [&] { return !control(socket, {"status"}, kPatienceMs).ok(); };
  std::vector<Child> pair;
  for (std::uint32_t tp_rank = 0; tp_rank < 2; ++tp_rank) {
    pair.push_back(Child::run([&, tp_rank] {
      TestRank rank(socket, kPairEngine, tp_rank, pair_spec(), false, IoBackend::kernel);
      cooperate(rank, [&] { return rank.session().state() != Status::ok; });
      return 0;
    }));
  }
  for (Child& rank : pair) {
    if (!rank.wait()) throw std::logic_error("a rank of the pair hangs");
  }
  // Takes nothing, so its request is withdrawn at its deadline.
  Child idler = Child::run([&] {
    RawRank rank(socket, "idler", 0, old_spec(), true, kFeatureKernel);
    const std::uint64_t lease = rank.run(rank.reserve(1, prompt(700, 2))).lease;
    Submission write = rank.transfer(Opcode::write, lease, 0, 2);
    write.deadline_ms = 20;
    rank.post(write);
    return eventually([&] { return rank.next().has_value() || dead(); }) ? 0 : 1;
  });
  const auto ended = idler.wait();
  if (!ended || ended->exited_with(1)) throw std::logic_error("a request that nobody takes never ends");
  // Dies with a request that it has taken.
  Child taker = Child::run([&] {
    RawRank rank(socket, "taker", 0, old_spec(), true, kFeatureKernel);
    const std::uint64_t lease = rank.run(rank.reserve(1, prompt(710, 2))).lease;
    rank.post(rank.transfer(Opcode::write, lease, 0, 2));
    rank.take_request(false);
    return std::raise(SIGKILL);
  });
  if (!taker.wait()) throw std::logic_error("the rank that takes a request hangs");
  idle.kill(SIGKILL);
  static_cast<void>(eventually(dead));
}

}  // namespace

TEST_CASE("a rank in io_backend kernel may die at every named point of it and of the library") {
  ranks_die(kernel_client_crash_points(), IoBackend::kernel);
  ranks_die(client_crash_points(), IoBackend::kernel);
}

TEST_CASE("the daemon of ranks in io_backend kernel may die at every named point of it") {
  for (const CrashPoint& point : kernel_daemon_crash_points()) {
    Child scribbling;
    DaemonDeath death;
    death.point = point;
    death.before = [&](const TestDaemon& daemon) {
      scribbling = scribbler(daemon);
      slot_of(scribbling);
    };
    death.exercise = [&](const std::string& socket) { exercise(socket, scribbling); };
    death.after = [&] { scribbling.kill(SIGKILL); };
    daemon_dies(death);
  }
}
