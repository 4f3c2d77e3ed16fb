// What the daemon accepts as a rank's device buffers: everything inside, everything once, nothing that
// overflows.
#include "shm/device_geometry.hpp"

#include "shm/protocol.hpp"
#include "tests/support/catch.hpp"

namespace hicache {

namespace {

constexpr std::uint32_t kPages = 10;

NamespaceSpec spec(Attention attention) {
  NamespaceSpec s;
  s.attention = attention;
  s.page_tokens = 4;
  s.layers = 3;
  s.heads_per_shard = attention == Attention::mha ? 2 : 1;
  s.head_dim = 8;
  s.element_bytes = 2;
  return s;
}

// One allocation per kind, layers behind each other, pages without gaps.
DeviceGeometry geometry(const NamespaceSpec& s) {
  DeviceGeometry g;
  g.pages = kPages;
  const std::uint64_t tensor_bytes = s.piece_bytes() * kPages;
  for (std::uint32_t kind = 0; kind < s.kinds(); ++kind) {
    g.allocations.push_back({DeviceKind::host, tensor_bytes * s.layers});
    for (std::uint32_t layer = 0; layer < s.layers; ++layer) {
      const auto tensor_kind =
          s.attention == Attention::mla ? TensorKind::latent : static_cast<TensorKind>(kind);
      g.tensors.push_back({kind, layer, tensor_kind, layer * tensor_bytes, s.piece_bytes(), s.piece_bytes()});
    }
  }
  return g;
}

// The same on a GPU: all tensors in one range that begins inside an exported allocation.
DeviceGeometry cuda_geometry(const NamespaceSpec& s) {
  DeviceGeometry g = geometry(s);
  for (DeviceAllocation& a : g.allocations) {
    a.kind = DeviceKind::cuda;
    a.gpu_uuid[3] = 7;
    a.ipc_handle[63] = 9;
    a.base_offset = 512;
    a.base_bytes = 512 + a.bytes;
  }
  return g;
}

void check_refused(const DeviceGeometry& g, const NamespaceSpec& s, const std::string& text) {
  const Outcome outcome = g.validate(s);
  REQUIRE(outcome.status() == Status::invalid_argument);
  CAPTURE(outcome.error().message);
  CHECK(outcome.error().message.find(text) != std::string::npos);
}

}  // namespace

TEST_CASE("Geometries that fit exactly are accepted") {
  for (const Attention a : {Attention::mha, Attention::mla}) {
    const NamespaceSpec s = spec(a);
    CHECK(geometry(s).validate(s).ok());
  }
}

TEST_CASE("Tensors may overlap and come in any order") {
  const NamespaceSpec s = spec(Attention::mha);
  DeviceGeometry g = geometry(s);
  std::swap(g.tensors.front(), g.tensors.back());
  g.tensors[1].offset = g.tensors[2].offset;
  CHECK(g.validate(s).ok());
}

TEST_CASE("Layers of a page together, with a wide stride, are accepted up to the last byte") {
  const NamespaceSpec s = spec(Attention::mla);
  DeviceGeometry g = geometry(s);
  const std::uint64_t page = s.piece_bytes() * s.layers;
  for (std::uint32_t layer = 0; layer < s.layers; ++layer) {
    g.tensors[layer].offset = layer * s.piece_bytes();
    g.tensors[layer].page_stride = page;
  }
  CHECK(g.validate(s).ok());
  g.allocations[0].bytes -= 1;
  check_refused(g, s, "tensor 2 (layer 2, latent): end of the last page");
}

TEST_CASE("A wrong geometry is refused by tensor and field") {
  const NamespaceSpec s = spec(Attention::mha);
  DeviceGeometry g = geometry(s);
  SECTION("no pages") {
    g.pages = 0;
    check_refused(g, s, "0 device pages");
  }
  SECTION("one page too many") {
    g.pages = kPages + 1;
    check_refused(g, s, "tensor 2 (layer 2, k): end of the last page");
  }
  SECTION("no allocations") {
    g.allocations.clear();
    check_refused(g, s, "0 allocations");
  }
  SECTION("too many allocations") {
    g.allocations.resize(kMaxAllocations + 1, g.allocations[0]);
    check_refused(g, s, "1025 allocations");
  }
  SECTION("an allocation without bytes") {
    g.allocations[1].bytes = 0;
    check_refused(g, s, "allocation 1 has 0 bytes");
  }
  SECTION("an allocation of unknown kind") {
    g.allocations[1].kind = static_cast<DeviceKind>(9);
    check_refused(g, s, "allocation 1 has kind 9");
  }
  SECTION("a tensor missing") {
    g.tensors.pop_back();
    check_refused(g, s, "5 tensors, expected 6");
  }
  SECTION("a tensor too many") {
    g.tensors.push_back(g.tensors.back());
    check_refused(g, s, "7 tensors, expected 6");
  }
  SECTION("a tensor twice") {
    g.tensors[4] = g.tensors[3];
    check_refused(g, s, "tensor 4 (layer 0, v): layer is 0");
  }
  SECTION("a layer that does not exist") {
    g.tensors[4].layer = 3;
    check_refused(g, s, "tensor 4 (layer 3, v): layer is 3");
  }
  SECTION("a kind of the other attention") {
    g.tensors[0].kind = TensorKind::latent;
    check_refused(g, s, "tensor 0 (layer 0, latent): kind is 2");
  }
  SECTION("an unknown kind") {
    g.tensors[0].kind = static_cast<TensorKind>(77);
    check_refused(g, s, "kind is 77");
  }
  SECTION("an allocation that does not exist") {
    g.tensors[5].allocation = 2;
    check_refused(g, s, "tensor 5 (layer 2, v): allocation is 2");
  }
  SECTION("page bytes of another namespace") {
    g.tensors[0].page_bytes += 8;
    check_refused(g, s, "page_bytes is 136, expected 128");
  }
  SECTION("a stride below the page bytes") {
    g.tensors[0].page_stride = s.piece_bytes() - 8;
    check_refused(g, s, "page_stride is 120");
  }
  SECTION("a stride of zero") {
    g.tensors[0].page_stride = 0;
    check_refused(g, s, "page_stride is 0");
  }
  SECTION("an unaligned stride") {
    g.tensors[0].page_stride += 4;
    check_refused(g, s, "page_stride is 132, expected a multiple of 8");
  }
  SECTION("an unaligned offset") {
    g.tensors[1].offset += 4;
    check_refused(g, s, "tensor 1 (layer 1, k): offset is");
  }
  SECTION("an offset that overflows") {
    g.tensors[1].offset = ~7ull;
    check_refused(g, s, "fits 64 bits");
  }
  SECTION("a stride that overflows by itself") {
    g.tensors[1].page_stride = 1ull << 62;
    check_refused(g, s, "fits 64 bits");
  }
  SECTION("a stride that wraps round to the start of the allocation") {
    g.pages = 5;
    g.tensors[1].page_stride = 1ull << 62;
    check_refused(g, s, "fits 64 bits");
  }
  SECTION("an end one past the allocation's") {
    g.tensors[2].offset += 8;
    check_refused(g, s, "end of the last page");
  }
  SECTION("the namespace itself is wrong") {
    NamespaceSpec broken = s;
    broken.tp_size = 0;
    check_refused(g, broken, "tp_size");
  }
}

TEST_CASE("A CUDA range may lie anywhere inside the allocation that was exported") {
  const NamespaceSpec s = spec(Attention::mha);
  DeviceGeometry g = cuda_geometry(s);
  CHECK(g.validate(s).ok());
  CHECK(g.descriptors() == 0);
  g.allocations[1].export_kind = CudaExport::posix_fd;
  g.allocations[1].ipc_handle = {};
  CHECK(g.validate(s).ok());
  CHECK(g.descriptors() == 1);
  CHECK(geometry(s).descriptors() == 2);
}

TEST_CASE("A wrong CUDA allocation is refused by its number and what is wrong with it") {
  const NamespaceSpec s = spec(Attention::mha);
  DeviceGeometry g = cuda_geometry(s);
  DeviceAllocation& a = g.allocations[1];
  SECTION("host and cuda together") {
    a = geometry(s).allocations[1];
    check_refused(g, s, "allocation 1 has another kind than allocation 0");
  }
  SECTION("two GPUs") {
    a.gpu_uuid[0] = 1;
    check_refused(g, s, "allocation 1 is on another GPU");
  }
  SECTION("no GPU") {
    g.allocations[0].gpu_uuid = {};
    check_refused(g, s, "allocation 0 has no GPU UUID");
  }
  SECTION("no handle") {
    a.ipc_handle = {};
    check_refused(g, s, "allocation 1 has an empty ipc handle");
  }
  SECTION("an unknown way of export") {
    a.export_kind = static_cast<CudaExport>(3);
    check_refused(g, s, "allocation 1 has export kind 3");
  }
  SECTION("an end one word past the base") {
    a.base_offset += 8;
    check_refused(g, s, "allocation 1 has 3840 bytes at base offset 520");
  }
  SECTION("more bytes than the base") {
    a.base_bytes = a.bytes - 8;
    a.base_offset = 0;
    check_refused(g, s, "allocation 1 has 3840 bytes at base offset 0");
  }
  SECTION("an offset whose end overflows") {
    a.base_offset = ~7ull;
    check_refused(g, s, "allocation 1 has 3840 bytes at base offset 18446744073709551608");
  }
  SECTION("an offset that is not a multiple of a word") {
    a.base_offset = 4;
    check_refused(g, s, "allocation 1 has base offset 4");
  }
}

TEST_CASE("K and V are refused for MLA") {
  const NamespaceSpec s = spec(Attention::mla);
  DeviceGeometry g = geometry(s);
  g.tensors[1].kind = TensorKind::k;
  check_refused(g, s, "kind is 0, expected 2 (latent)");
}

TEST_CASE("Pieces of a shard lie behind each other, K before V") {
  const NamespaceSpec s = spec(Attention::mha);
  std::uint64_t expected = 0;
  for (const TensorKind kind : {TensorKind::k, TensorKind::v}) {
    for (std::uint32_t layer = 0; layer < s.layers; ++layer) {
      CHECK(shard_piece_offset(s, layer, kind) == expected);
      expected += s.piece_bytes();
    }
  }
  CHECK(expected == s.shard_bytes());
}

TEST_CASE("tensors of side pools are checked by their own layers, sizes and slots") {
  NamespaceSpec s = spec(Attention::mla);
  s.side_pools = {{"indexer", HitRule::all_pages, 3, 16}, {"mamba", HitRule::trailing_pages, 1, 64}};
  DeviceGeometry g = geometry(s);
  g.states = 2;
  g.allocations.push_back({DeviceKind::host, 3 * 16 * kPages + 2 * 64});
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    g.tensors.push_back({1, layer, TensorKind::side, layer * 16ull * kPages, 16, 16, 0});
  }
  g.tensors.push_back({1, 0, TensorKind::side, 3 * 16ull * kPages, 64, 64, 1});
  REQUIRE(g.validate(s).ok());
  CHECK(shard_piece_offset(s, g.tensors.back()) == s.kv_bytes() + 3 * 16);
  CHECK(announced_with(s, g.tensors[4]) == 1);      // as many layers as KV: layer by layer
  CHECK(announced_with(s, g.tensors.back()) == 0);  // else before the first
  const auto refused = [&](auto&& spoil, const std::string& text) {
    DeviceGeometry bad = g;
    spoil(bad);
    check_refused(bad, s, text);
  };
  refused([](DeviceGeometry& b) { b.tensors.back().pool = 2; }, "pool is 2, expected less than 2");
  refused([](DeviceGeometry& b) { b.tensors.back().layer = 1; }, "layer is 1, expected less than 1");
  refused([](DeviceGeometry& b) { b.tensors.back().pool = 0; }, "each layer and kind once");
  refused([](DeviceGeometry& b) { b.tensors[0].pool = 1; }, "pool is 1, expected less than 1");
  refused([](DeviceGeometry& b) { b.tensors.back().page_bytes = 16; }, "page_bytes is 16, expected 64");
  refused([](DeviceGeometry& b) { b.states = 3; }, "end of the last page is");
  refused([](DeviceGeometry& b) { b.states = 0; }, "0 state slots, expected at least 1");
  refused([](DeviceGeometry& b) { b.tensors.pop_back(); }, "6 tensors, expected 7");
  WireWriter out;
  g.encode(out);
  WireReader in(out.bytes());
  CHECK(DeviceGeometry::decode(in).validate(s).ok());
  CHECK(in.finished());
}

}  // namespace hicache
