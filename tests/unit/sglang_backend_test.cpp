// The backend `file` with format `sglang`: names and bytes are those of SGLang's HiCacheFile, computed here
// from its rules alone, in both directions.
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "daemon/storage/file/sglang_space.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/storage_rig.hpp"

namespace hicache::test {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kModel = "meta-llama/Llama-3.1-8B-Instruct";
constexpr std::uint32_t kLayers = 3;
constexpr std::uint32_t kTokens = 4;
constexpr std::uint32_t kHeads = 2;
constexpr std::uint32_t kDim = 8;

NamespaceSpec spec_of(Attention attention, std::uint32_t tp_size) {
  NamespaceSpec spec;
  spec.model = kModel;
  spec.dtype = "bfloat16";
  spec.attention = attention;
  spec.tp_size = tp_size;
  spec.page_tokens = kTokens;
  spec.layers = kLayers;
  spec.heads_per_shard = attention == Attention::mha ? kHeads : 1;
  spec.head_dim = kDim;
  spec.element_bytes = 2;
  return spec;
}
std::shared_ptr<const StorageNamespace> with(const NamespaceSpec& spec) {
  return std::make_shared<StorageNamespace>(StorageNamespace{spec.digest(), spec});
}

Json settings(const std::string& directory, const std::string& layout) {
  return {
      {"format", "sglang"},
      {"directories", Json::array({directory})},
      {"min_free", 0},
      {"sglang", {{"model", kModel}, {"dtype", "bfloat16"}, {"page_tokens", kTokens}, {"layout", layout}}}};
}

// The element at these coordinates of rank `rank`'s shard of a page: different for all of them.
std::uint16_t element(std::uint64_t page, std::uint32_t rank, std::uint32_t kv, std::uint32_t layer,
                      std::uint32_t token, std::uint32_t head, std::uint32_t dim) {
  return static_cast<std::uint16_t>(
      (((((page * 4 + rank) * 2 + kv) * kLayers + layer) * kTokens + token) * kHeads + head) * kDim + dim);
}

// What SGLang's file of a rank holds: its flat page, index by index in the order of its host pool.
std::string sglang_bytes(const NamespaceSpec& spec, const std::string& layout, std::uint64_t page,
                         std::uint32_t rank) {
  std::vector<std::uint16_t> flat;
  const bool tokens_first = layout == "page_first";
  for (std::uint32_t kv = 0; kv < spec.kinds(); ++kv) {
    for (std::uint32_t a = 0; a < (tokens_first ? kTokens : kLayers); ++a) {
      for (std::uint32_t b = 0; b < (tokens_first ? kLayers : kTokens); ++b) {
        for (std::uint32_t head = 0; head < spec.heads_per_shard; ++head) {
          for (std::uint32_t dim = 0; dim < kDim; ++dim) {
            flat.push_back(element(page, rank, kv, tokens_first ? b : a, tokens_first ? a : b, head, dim));
          }
        }
      }
    }
  }
  return {reinterpret_cast<const char*>(flat.data()), flat.size() * 2};
}

std::string hex(std::uint64_t page) {
  return to_hex(storage_hash(page));
}
std::string file_name(Attention attention, std::uint64_t page, std::uint32_t rank, std::uint32_t tp_size) {
  const std::string stem = hex(page) + "_meta-llama-Llama-3.1-8B-Instruct";
  if (attention == Attention::mla) return stem + ".bin";
  return stem + "_" + std::to_string(rank) + "_" + std::to_string(tp_size) + ".bin";
}

class SglangRig : public StorageRig {
 public:
  explicit SglangRig(std::shared_ptr<const StorageNamespace> ns) : ns_(std::move(ns)) {}

  // hicache's own order in the pool: [K, V][layer][token][head][dim].
  void fill_elements(std::uint64_t page, std::uint64_t slot) { each(page, slot, true); }
  bool holds_elements(std::uint64_t page, std::uint64_t slot) { return each(page, slot, false); }

  Status one(StorageOperation operation, std::uint64_t page) {
    StorageBatch batch;
    batch.id = StorageBatchId{++id_};
    batch.operation = operation;
    batch.ns = ns_;
    batch.hashes.push_back(storage_hash(page));
    if (operation != StorageOperation::exists) batch.buffers = extents(*ns_, 0);
    if (operation == StorageOperation::put) fill_elements(page, 0);
    sink().expect(batch.id, 1);
    const StorageBatchId id = batch.id;
    backend().submit(std::move(batch));
    return sink().wait(id).front();
  }
  void use(std::shared_ptr<const StorageNamespace> ns) { ns_ = std::move(ns); }

 private:
  bool each(std::uint64_t page, std::uint64_t slot, bool write) {
    const NamespaceSpec& spec = ns_->spec;
    const auto at = extents(*ns_, slot);
    bool same = true;
    for (std::uint32_t rank = 0; rank < spec.shards(); ++rank) {
      auto* bytes = reinterpret_cast<std::uint16_t*>(pool().at(at[rank]).data());
      for (std::uint32_t kv = 0; kv < spec.kinds(); ++kv)
        for (std::uint32_t layer = 0; layer < kLayers; ++layer)
          for (std::uint32_t token = 0; token < kTokens; ++token)
            for (std::uint32_t head = 0; head < spec.heads_per_shard; ++head)
              for (std::uint32_t dim = 0; dim < kDim; ++dim) {
                const std::uint16_t value = element(page, rank, kv, layer, token, head, dim);
                if (write) *bytes = value;
                same = same && *bytes == value;
                ++bytes;
              }
    }
    return same;
  }

  std::shared_ptr<const StorageNamespace> ns_;
  std::uint64_t id_ = 1u << 20;
};

constexpr const char* kLayouts[] = {"page_first", "page_first_direct", "layer_first"};
constexpr Attention kAttentions[] = {Attention::mha, Attention::mla};

}  // namespace

TEST_CASE("AC-14 AC-15 sglang: what hicache puts is what SGLang would have written, name and bytes") {
  for (const char* layout : kLayouts) {
    for (const Attention attention : kAttentions) {
      INFO(layout << (attention == Attention::mha ? " MHA" : " MLA"));
      const TempDir dir;
      const auto ns = with(spec_of(attention, 2));
      SglangRig rig(ns);
      REQUIRE(rig.make("file", settings(dir.path(), layout)) == "");
      CHECK(rig.one(StorageOperation::exists, 7) == Status::not_found);
      CHECK(rig.one(StorageOperation::put, 7) == Status::ok);
      CHECK(rig.one(StorageOperation::exists, 7) == Status::ok);
      for (std::uint32_t rank = 0; rank < ns->spec.shards(); ++rank) {
        const std::string path = dir.file(file_name(attention, 7, rank, 2));
        REQUIRE(fs::exists(path));
        CHECK(read_text(path) == sglang_bytes(ns->spec, layout, 7, rank));
      }
      // One file a shard and the note of the binding, nothing temporary.
      CHECK(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) ==
            ns->spec.shards() + 1);
    }
  }
}

TEST_CASE("AC-14 AC-15 sglang: what SGLang has written comes into the pool in hicache's order") {
  for (const char* layout : kLayouts) {
    for (const Attention attention : kAttentions) {
      INFO(layout << (attention == Attention::mha ? " MHA" : " MLA"));
      const TempDir dir;
      const auto ns = with(spec_of(attention, 2));
      SglangRig rig(ns);
      REQUIRE(rig.make("file", settings(dir.path(), layout)) == "");
      for (std::uint32_t rank = 0; rank < ns->spec.shards(); ++rank) {
        CHECK(rig.one(StorageOperation::exists, 9) == Status::not_found);  // before its last rank has written
        write_text(dir.file(file_name(attention, 9, rank, 2)), sglang_bytes(ns->spec, layout, 9, rank));
      }
      CHECK(rig.one(StorageOperation::exists, 9) == Status::ok);
      CHECK(rig.one(StorageOperation::get, 9) == Status::ok);
      CHECK(rig.holds_elements(9, 0));
      CHECK(rig.one(StorageOperation::get, 10) == Status::not_found);
    }
  }
}

TEST_CASE("sglang: pages of whole blocks, which bypass the page cache, in batches, restarts included") {
  for (const char* layout : {"page_first", "layer_first"}) {
    const TempDir dir;
    NamespaceSpec spec = spec_of(Attention::mha, 2);
    spec.head_dim = 1024;  // 96 KiB a shard
    const auto ns = with(spec);
    StorageRig rig;
    REQUIRE(rig.make("file", settings(dir.path(), layout)) == "");
    CHECK(rig.put(ns, 0, 48) == 48);
    const auto got = rig.get(ns, numbers(0, 64));
    CHECK(got.ok == 48);
    CHECK(got.missing == 16);
    CHECK(got.wrong == 0);
    REQUIRE(rig.make("file", settings(dir.path(), layout)) == "");
    const auto again = rig.get(ns, numbers(0, 64));
    CHECK(again.ok == 48);
    CHECK(again.wrong == 0);
    for (const Status s : rig.sink().wait(rig.submit(StorageOperation::get, ns, numbers(0, 32), 1))) {
      CHECK(s == Status::timed_out);
    }
    rig.close();
    CHECK(rig.sink().faults() == "");
  }
}

TEST_CASE("sglang: files of another size are no pages, and a put makes them right") {
  const TempDir dir;
  const auto ns = with(spec_of(Attention::mha, 2));
  SglangRig rig(ns);
  REQUIRE(rig.make("file", settings(dir.path(), "page_first")) == "");
  const std::string whole = sglang_bytes(ns->spec, "page_first", 1, 1);
  CHECK(rig.one(StorageOperation::put, 1) == Status::ok);
  const std::string path = dir.file(file_name(Attention::mha, 1, 1, 2));
  for (const std::string& text : {std::string(), whole.substr(0, whole.size() / 2), whole + "x"}) {
    write_text(path, text);
    CHECK(rig.one(StorageOperation::exists, 1) == Status::not_found);
    CHECK(rig.one(StorageOperation::get, 1) == Status::corrupt);
    CHECK(rig.one(StorageOperation::put, 1) == Status::ok);
    CHECK(read_text(path) == whole);
  }
  CHECK(rig.backend().stats().corrupt_pages == 3);
  // Neither a directory, nor a link, nor a pipe of that name is a page, and none of them hangs anybody.
  fs::remove(path);
  fs::create_directory(path);
  CHECK(rig.one(StorageOperation::get, 1) == Status::corrupt);
  fs::remove(path);
  fs::create_symlink("/dev/zero", path);
  CHECK(rig.one(StorageOperation::get, 1) == Status::corrupt);
  fs::remove(path);
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(rig.one(StorageOperation::get, 1) == Status::corrupt);
  CHECK(rig.one(StorageOperation::put, 1) == Status::ok);
  CHECK(read_text(path) == whole);
}

TEST_CASE("sglang: a reader never sees a file that is not complete, also when the writer is killed") {
  const TempDir dir;
  const auto ns = with(spec_of(Attention::mla, 1));
  for (int round = 0; round < 5; ++round) {
    Child writer = Child::run([&] {
      SglangRig rig(ns);
      if (!rig.make("file", settings(dir.path(), "page_first")).empty()) return 1;
      ::dprintf(STDOUT_FILENO, "writes\n");
      for (std::uint64_t page = 0;; ++page)
        rig.one(StorageOperation::put, static_cast<std::uint64_t>(round) * 100'000 + page);
    });
    REQUIRE(writer.read_line() == "writes");
    CHECK(eventually([&] {
      return std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) > (round + 1) * 20;
    }));
    writer.kill(SIGKILL);
    REQUIRE(writer.wait());
    for (const auto& entry : fs::directory_iterator(dir.path())) {
      if (entry.path().extension() == ".bin") CHECK(entry.file_size() == ns->spec.shard_bytes());
    }
  }
}

TEST_CASE("sglang: two daemons share one directory") {
  const TempDir dir;
  const auto ns = with(spec_of(Attention::mha, 2));
  SglangRig a(ns);
  SglangRig b(ns);
  REQUIRE(a.make("file", settings(dir.path(), "page_first")) == "");
  REQUIRE(b.make("file", settings(dir.path(), "page_first")) == "");
  for (std::uint64_t page = 0; page < 20; ++page)
    CHECK((page % 2 == 0 ? a : b).one(StorageOperation::put, page) == Status::ok);
  for (std::uint64_t page = 0; page < 20; ++page) {
    SglangRig& other = page % 2 == 0 ? b : a;
    CHECK(other.one(StorageOperation::get, page) == Status::ok);
    CHECK(other.holds_elements(page, 0));
  }
}

TEST_CASE("sglang: a directory serves one kind of namespace, the names could not tell two apart") {
  const TempDir dir;
  const NamespaceSpec first = spec_of(Attention::mha, 2);
  SglangRig rig(with(first));
  REQUIRE(rig.make("file", settings(dir.path(), "page_first")) == "");
  CHECK(rig.one(StorageOperation::put, 1) == Status::ok);
  // LoRA id and salt are in the hashes: welcome.
  NamespaceSpec lora = first;
  lora.lora_id = "adapter";
  rig.use(with(lora));
  CHECK(rig.one(StorageOperation::get, 1) == Status::ok);
  const auto refused = [&](NamespaceSpec spec, const std::string& why) {
    INFO(why);
    rig.use(with(spec));
    CHECK(rig.one(StorageOperation::exists, 1) == Status::not_found);
    CHECK(rig.one(StorageOperation::get, 1) == Status::not_found);
    CHECK(rig.one(StorageOperation::put, 2) == Status::dropped);
    CHECK(rig.backend().health().text.find(why) != std::string::npos);
  };
  NamespaceSpec other = first;
  other.dtype = "fp8_e4m3";
  refused(other, "its dtype is 'fp8_e4m3', not 'bfloat16'");
  other = first;
  other.model = "somebody/else";
  refused(other, "its model is 'somebody/else', not 'meta-llama/Llama-3.1-8B-Instruct'");
  other = first;
  other.page_tokens = 2;
  other.head_dim = 2 * kDim;
  refused(other, "its pages have 2 tokens, not 4");
  // What the settings don't say is bound by the first that came, also after a restart, until a clear.
  other = first;
  other.revision = "v2";
  refused(other, "the directory is bound to another namespace of that model");
  REQUIRE(rig.make("file", settings(dir.path(), "page_first")) == "");
  refused(other, "the directory is bound to another namespace of that model");
  REQUIRE(rig.backend().clear());
  CHECK(eventually([&] { return rig.one(StorageOperation::put, 3) == Status::ok; }));
  rig.use(with(first));
  CHECK(rig.one(StorageOperation::get, 1) == Status::not_found);
}

TEST_CASE("sglang: clear removes the model's pages and nothing else") {
  const TempDir dir;
  SglangRig rig(with(spec_of(Attention::mha, 2)));
  REQUIRE(rig.make("file", settings(dir.path(), "page_first")) == "");
  for (std::uint64_t page = 0; page < 10; ++page) CHECK(rig.one(StorageOperation::put, page) == Status::ok);
  write_text(dir.file(hex(1) + "_other-model_0_2.bin"), "x");
  write_text(dir.file("notes.txt"), "x");
  REQUIRE(rig.backend().clear());
  for (std::uint64_t page = 0; page < 10; ++page)
    CHECK(rig.one(StorageOperation::get, page) == Status::not_found);
  CHECK(eventually(
      [&] { return std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 2; }));
}

TEST_CASE("sglang: capacity is held, and what was used last stays") {
  const TempDir dir;
  SglangRig rig(with(spec_of(Attention::mla, 1)));  // a block of 4 KiB on the disk each
  Json small = settings(dir.path(), "page_first");
  small["capacity"] = "400KiB";
  REQUIRE(rig.make("file", small) == "");
  CHECK(rig.one(StorageOperation::put, 0) == Status::ok);
  std::size_t kept = 0;
  for (std::uint64_t page = 1; page < 400; ++page) {
    kept += rig.one(StorageOperation::put, page) == Status::ok;
    CHECK(rig.one(StorageOperation::get, 0) == Status::ok);
    std::uint64_t used = 0;
    for (const auto& entry : fs::directory_iterator(dir.path())) {
      struct stat info {};
      if (::stat(entry.path().c_str(), &info) == 0 && entry.path().extension() == ".bin") {
        used += static_cast<std::uint64_t>(info.st_blocks) * 512;
      }
    }
    if (used > 400 * kKiB) FAIL("capacity exceeded: " << used);
    if (page % 60 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  CHECK(kept > 100);
  CHECK(eventually([&] { return rig.one(StorageOperation::put, 1000) == Status::ok; }));
  CHECK(rig.backend().stats().evicted_pages > 0);
}

TEST_CASE("sglang: a page that is being written while the directory is looked through keeps its room") {
  const TempDir dir;
  daemon::FileSettings settings;
  settings.capacity_bytes = 4 * 4096;
  settings.min_free_bytes = 0;
  auto files = daemon::SglangFiles::open(dir.path(), PageLayout::page_first);
  REQUIRE(files.ok());
  daemon::SglangSpace space(settings, **files);
  for (int page = 0; page < 3; ++page) CHECK(space.take(4000));
  space.keep();  // finds no file: none has its name yet
  CHECK(space.used_bytes() == 3 * 4096);
  CHECK(space.take(4000));
  CHECK_FALSE(space.take(4000));
  // Three failed, so there is room again once somebody has looked.
  for (int page = 0; page < 3; ++page) space.settle(4000);
  space.keep();
  CHECK(space.used_bytes() == 4096);
  space.clear();
  CHECK(space.used_bytes() == 4096);
  space.settle(4000);
}

TEST_CASE("sglang: a full disk refuses pages and leaves nothing half written") {
  const TempDir dir;
  if (::mount("hicache-test", dir.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
    WARN("no small file system: mounting needs root; not tested");
    return;
  }
  {
    SglangRig rig(with(spec_of(Attention::mla, 1)));
    REQUIRE(rig.make("file", settings(dir.path(), "page_first")) == "");
    std::size_t full = 0;
    for (std::uint64_t page = 0; page < 400; ++page)
      full += rig.one(StorageOperation::put, page) == Status::no_space;
    CHECK(full > 50);
    std::size_t ok = 0;
    for (std::uint64_t page = 0; page < 400; ++page) {
      const bool hit = rig.one(StorageOperation::get, page) == Status::ok;
      if (hit) CHECK(rig.holds_elements(page, 0));
      ok += hit;
    }
    CHECK(ok == 400 - full);
    for (const auto& entry : fs::directory_iterator(dir.path())) {
      CHECK(entry.path().string().find("tmp.") == std::string::npos);
    }
    rig.close();
  }
  CHECK(::umount2(dir.path().c_str(), MNT_DETACH) == 0);
}

TEST_CASE("sglang: settings that the names of its files need are asked for") {
  const TempDir dir;
  StorageRig rig(kMiB);
  for (const std::string key : {"model", "dtype", "page_tokens"}) {
    Json json = settings(dir.path(), "page_first");
    json["sglang"].erase(key);
    CHECK(rig.make("file", json).find("storage.file.sglang." + key + " is missing") != std::string::npos);
  }
  Json json = settings(dir.path(), "page_head");
  CHECK(rig.make("file", json).find("storage.file.sglang.layout is \"page_head\"") != std::string::npos);
  json = settings(dir.path(), "page_first");
  json["directories"] = {dir.path(), dir.path()};
  CHECK(rig.make("file", json).find("expected one directory with format \"sglang\"") != std::string::npos);
  json = settings(dir.path(), "page_first");
  json["sglang"]["pp_rank"] = 3;
  CHECK(rig.make("file", json).find("sglang.pp_rank is 3, expected less than sglang.pp_size, 1") !=
        std::string::npos);
}

}  // namespace hicache::test
