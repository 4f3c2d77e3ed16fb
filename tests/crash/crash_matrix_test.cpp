// A process dies at each named point of daemon and client library (shm/crash_points.hpp). Then: nobody hangs,
// the region is sound, what was ready is there with its bytes, everything adds up, and nothing is left over.
#include "tests/crash/matrix_parts.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint32_t kEvicted = 2;  // by the daemon's scenario

NamespaceSpec bumped_spec() {
  auto spec = small_spec(Attention::mha, 1);
  spec.model = "bumped-model";
  return spec;
}

// Everything that a daemon does, once. Ends early, by an exception or by results, when it dies on the way.
void exercise(const std::string& socket) {
  {
    TestRank rank0(socket, kPairEngine, 0, pair_spec());
    Child peer = Child::run([&] {
      TestRank rank1(socket, kPairEngine, 1, pair_spec());
      cooperate(rank1, [&] { return rank1.session().state() != Status::ok; });
      return 0;
    });
    cooperate(rank0, [&] { return rank0.session().state() != Status::ok; });
    if (!peer.wait()) throw std::logic_error("the other rank hangs");
  }
  {
    TestRank engine(socket, "bumped", 0, bumped_spec());
    write_prompt(engine, 1, prompt(600, 2));
  }
  // Dies while its pages are being filled: the fence of its write is never raised.
  Child lonely = Child::run([&] {
    TestRank rank(socket, "lonely", 0, old_spec());
    const auto reserved = rank.run(rank.session().reserve(1, prompt(700, 2)));
    static_cast<void>(rank.session().write(reserved.lease, 0, TestRank::pages(0, 2), WriteFence{0, 1}));
    rank.run(rank.session().nop());
    return std::raise(SIGKILL);
  });
  if (!lonely.wait()) throw std::logic_error("the lonely rank hangs");
  if (!control(socket, {"evict", std::to_string(kEvicted)})) return;
  static_cast<void>(
      control(socket, {"namespace", "bump", to_hex(bumped_spec().base_digest()).substr(0, 16)}));
}

}  // namespace

TEST_CASE("the daemon may die at every named point: survivors finish and the next daemon has every page") {
  for (const CrashPoint& point : daemon_crash_points()) {
    DaemonDeath death;
    death.point = point;
    death.fresh = point.name.starts_with("region_");
    death.may_lose = kEvicted;
    death.exercise = exercise;
    daemon_dies(death);
  }
}

TEST_CASE("a rank may die at every named point: its peer finishes and the daemon takes everything back") {
  ranks_die(client_crash_points(), IoBackend::direct);
}
