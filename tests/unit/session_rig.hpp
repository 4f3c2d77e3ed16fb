// A session attached to a fake daemon, with device buffers registered.
#pragma once

#include <memory>
#include <vector>

#include "hicache/client.hpp"
#include "tests/support/fake_daemon.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {

inline AttachOptions fake_options(const FakeDaemon& daemon, Role role = Role::rank) {
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.role = role;
  options.engine = "engine";
  options.spec = small_spec(Attention::mha, 1);
  return options;
}

class SessionRig {
 public:
  static constexpr std::uint32_t kPages = 64;

  explicit SessionRig(FakeDaemon::Options options = {}) : daemon(std::move(options)) {
    session = TestRank::take(Session::attach(fake_options(daemon)));
    const NamespaceSpec spec = small_spec(Attention::mha, 1);
    buffer = std::make_unique<HostDeviceBuffer>(
        TestRank::take(HostDeviceBuffer::create(spec.shard_bytes() * kPages)));
    DeviceGeometry g;
    g.pages = kPages;
    g.allocations.push_back({DeviceKind::host, buffer->size()});
    for (std::uint32_t i = 0; i < 2 * spec.layers; ++i) {
      g.tensors.push_back({0, i % spec.layers, i < spec.layers ? TensorKind::k : TensorKind::v,
                           i * spec.piece_bytes() * kPages, spec.piece_bytes(), spec.piece_bytes()});
    }
    const int fds[] = {buffer->fd()};
    TestRank::take(session->register_buffers(g, fds));
  }

  Ticket load(std::optional<LayerFence> fence = std::nullopt, std::uint32_t deadline_ms = 0) {
    return TestRank::take(session->load(LeaseId{9}, 0, TestRank::pages(0, 4), fence, deadline_ms));
  }
  // Polls until something comes.
  OperationResult poll() {
    std::optional<OperationResult> result;
    if (!eventually([&] { return (result = session->poll()).has_value(); }))
      throw std::runtime_error("no completion");
    return *result;
  }
  // The session has nothing more to tell, however long one asks.
  bool silent() {
    const std::uint64_t until = monotonic_ns() + 30'000'000;
    while (monotonic_ns() < until) {
      if (session->poll()) return false;
    }
    return true;
  }

  FakeDaemon daemon;
  std::unique_ptr<HostDeviceBuffer> buffer;
  std::unique_ptr<Session> session;
};

}  // namespace hicache::test
