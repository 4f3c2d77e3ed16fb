// The C++ example of README.md as a program: attaches to the daemon whose socket is given, runs one request
// twice, and checks the bytes. Exit status 0 when they are right.
// README begin
#include <cstdio>
#include <cstring>
#include <numeric>

#include "hicache/client.hpp"
#include "shm/prefix_hash.hpp"

using namespace hicache;

// One rank of an engine: 2 layers, 8 heads of 64 bfloat16 elements, pages of 16 tokens, TP size 1.
int run_rank(const std::string& socket_path) {
  AttachOptions options;
  options.socket_path = socket_path;  // or options.name, for a daemon at its default socket
  options.engine = "example";
  options.spec.model = "example/model";
  options.spec.dtype = "bfloat16";
  options.spec.page_tokens = 16;
  options.spec.layers = 2;
  options.spec.heads_per_shard = 8;
  options.spec.head_dim = 64;
  options.spec.element_bytes = 2;
  auto attached = Session::attach(options);
  if (!attached) return std::fprintf(stderr, "%s\n", attached.error().message.c_str()), 1;
  Session& session = **attached;

  // Device buffers: one tensor per layer for K and for V, 64 pages each, in one allocation. Handed over once.
  const std::uint64_t piece = options.spec.piece_bytes();
  DeviceGeometry geometry;
  geometry.pages = 64;
  for (std::uint32_t layer = 0; layer < options.spec.layers; ++layer) {
    for (const TensorKind kind : {TensorKind::k, TensorKind::v}) {
      const std::uint64_t offset = geometry.tensors.size() * geometry.pages * piece;
      geometry.tensors.push_back({0, layer, kind, offset, piece, piece});
    }
  }
  geometry.allocations.push_back({DeviceKind::host, geometry.tensors.size() * geometry.pages * piece});
  auto buffer = HostDeviceBuffer::create(geometry.allocations[0].bytes);
  if (!buffer) return 1;
  const int fd = buffer->fd();
  if (!session.register_buffers(geometry, {&fd, 1})) return 1;

  // A request of 4 pages: which of them are cached?
  std::vector<std::uint32_t> tokens(64);
  std::iota(tokens.begin(), tokens.end(), 1000u);
  const std::vector<PrefixHash> hashes = hash_chain(tokens, options.spec.page_tokens);
  std::vector<DevicePage> pages;  // where this rank keeps them
  for (std::uint32_t i = 0; i < hashes.size(); ++i) pages.push_back(DevicePage{i});
  constexpr std::uint32_t kPatienceMs = 5000;

  for (std::uint64_t sequence = 1; sequence <= 2; ++sequence) {
    auto reserve = session.reserve(sequence, hashes);
    if (!reserve) return 1;
    auto reserved = session.wait(*reserve, kPatienceMs);
    if (!reserved || reserved->status != Status::ok) return 1;
    const LeaseId lease = reserved->lease;
    const std::uint32_t hits = reserved->hits;
    std::printf("request %d: %u of %zu pages cached\n", static_cast<int>(sequence), hits, hashes.size());

    if (hits > 0) {
      auto load = session.load(lease, 0, std::span(pages).first(hits));
      if (!load) return 1;
      auto loaded = session.wait(*load, kPatienceMs);
      if (!loaded || loaded->status != Status::ok) return 1;  // failed: compute the pages instead
    }
    if (hits < hashes.size()) {
      std::memset(buffer->data(), 42, buffer->size());  // stands for the model's forward pass
      auto write = session.write(lease, hits, std::span(pages).subspan(hits));
      if (!write) return 1;
      auto written = session.wait(*write, kPatienceMs);
      if (!written || written->status != Status::ok) return 1;
      std::memset(buffer->data(), 0, buffer->size());  // what the next request finds comes from the cache
    }
    auto release = session.release(lease);
    if (!release || !session.wait(*release, kPatienceMs)) return 1;
  }
  return buffer->data()[0] == 42 && buffer->data()[4 * piece - 1] == 42 ? 0 : 1;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s SOCKET\n", argv[0]);
    return 2;
  }
  return run_rank(argv[1]);
}
// README end
