// A rank that does everything a rank does, once, built with crash points: crash_matrix_test tells it where to
// die.
//
//   crash_client SOCKET direct|kernel     rank 0 of the two ranks of engine "pair", with that io_backend
#include <cstdio>
#include <exception>

#include "tests/crash/pair.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

void live(const std::string& socket, IoBackend io_backend) {
  TestRank rank(socket, kPairEngine, 0, pair_spec(), false, io_backend);
  const auto hashes = pair_prompt();
  OperationResult reserved;
  // The other rank may still be on its way.
  while ((reserved = rank.run(rank.session().reserve(1, hashes))).status == Status::again) {
  }
  const auto pages = TestRank::pages(0, 4);
  for (std::uint32_t i = 0; i < 4; ++i) rank.fill(pages[i], hashes[i]);
  auto written = rank.session().write(reserved.lease, 0, pages, WriteFence{0, 1});
  rank.session().raise_write_fence(0, 1);
  rank.run(std::move(written));
  rank.run(rank.session().load(reserved.lease, 0, pages, LayerFence{0, 1}));
  rank.run(rank.session().release(reserved.lease));
  rank.session().close();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    live(argv[1], std::string(argv[2]) == "kernel" ? IoBackend::kernel : IoBackend::direct);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "crash_client: %s\n", e.what());
    return 1;
  }
  return 0;
}
