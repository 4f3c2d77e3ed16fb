// Writes small seed corpora: fuzz_seeds DIRECTORY makes DIRECTORY/TARGET/* for every target.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/config.hpp"
#include "shm/messages.hpp"

using namespace hicache;

namespace {

std::filesystem::path root;

void put(const std::string& target, const std::string& name, std::string_view bytes) {
  std::filesystem::create_directories(root / target);
  std::ofstream out(root / target / name, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) throw std::runtime_error("cannot write " + (root / target / name).string());
}

void put(const std::string& name, const SocketMessage& message) {
  const auto bytes = encode_message(message);
  put("message", name, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

void messages() {
  NamespaceSpec spec;
  spec.model = "model";
  spec.dtype = "bf16";
  spec.lora_id = "adapter";
  spec.page_tokens = 16;
  spec.layers = 2;
  spec.heads_per_shard = 1;
  spec.head_dim = 8;
  spec.element_bytes = 2;
  Hello hello;
  hello.engine = "engine";
  hello.spec = spec;
  put("hello", hello);
  Welcome welcome;
  welcome.protocol = 1;
  welcome.channel = ChannelGeometry::plan(4, 8, 4096);
  put("welcome", welcome);
  RegisterBuffers buffers;
  DeviceAllocation allocation;
  allocation.bytes = 65536;
  buffers.geometry.allocations.push_back(allocation);
  buffers.geometry.pages = 4;
  for (std::uint32_t i = 0; i < 4; ++i) {
    buffers.geometry.tensors.push_back({0, i % 2, static_cast<TensorKind>(i / 2), i * 4096, 256, 256});
  }
  put("buffers", buffers);
  buffers.staging = StagingOffer{};
  put("buffers-staging", buffers);
  put("goodbye", Goodbye{});
  put("control", Control{{"namespace", "bump", "ab"}});
  put("reply", Reply{Status::again, "text"});
}

void configs() {
  put("config", "defaults", daemon::config_to_json(daemon::Config{}));
  put("config", "units",
      R"({"name":"a","pool":{"bytes":"64MiB","segment_bytes":"64KiB"},"limits":{"clients":2}})");
  put("config", "wrong", R"({"pool":{"bytes":-1,"segment_bytes":3},"nothing":[null]})");
}

// Lists of changes to a good region, see region_fuzzer.cpp.
void regions() {
  put("region", "unchanged", "\x01");
  put("region", "state", std::string_view("\x01\xb0\x00\x04\x00\x00\x00", 7));
  put("region", "first_section", std::string_view("\x01\x4e\x00\xff\xff\xff\xff", 7));
  put("region", "raw", std::string_view("\x00HICACHE1", 9));
}

// Lists of steps, see coordinator_fuzzer.cpp: both ranks reserve, write and release, in both endings.
void steps() {
  using Bytes = std::vector<std::uint8_t>;
  Bytes request;
  const auto add = [&](std::initializer_list<std::uint8_t> bytes) { request.insert(request.end(), bytes); };
  for (std::uint8_t rank = 0; rank < 2; ++rank) add({0, rank, 0, 4, 1, 0});  // reserve sequence 1, 4 pages
  add({8, 0, 6, 0, 63});                                                     // settle, read
  for (std::uint8_t rank = 0; rank < 2; ++rank) add({1, rank, 0, 4, 0, 0, 0, 0});  // write all four
  add({8, 0, 8, 0, 6, 0, 63, 6, 1, 63});
  for (std::uint8_t rank = 0; rank < 2; ++rank) add({2, rank, 0, 4, 0, 0, 0, 0});  // load them again
  add({8, 0, 8, 0});
  for (std::uint8_t rank = 0; rank < 2; ++rank) add({3, rank, 0});  // release
  for (std::uint8_t ending = 0; ending < 2; ++ending) {
    Bytes input{ending};
    input.insert(input.end(), request.begin(), request.end());
    put("coordinator", "request" + std::to_string(ending),
        {reinterpret_cast<const char*>(input.data()), input.size()});
  }
  // A write that waits for its fence when its rank dies; a bump; a scribble over the header; the scheduler.
  Bytes death{1};
  death.insert(death.end(), request.begin(), request.begin() + 17);
  death.insert(death.end(), {1, 0, 7, 4, 0, 0, 0, 129, 9, 9, 0, 0, 1, 10, 0, 2, 5, 1, 64, 0, 7});
  death.insert(death.end(), {0, 2, 0, 3, 1, 0, 8, 0, 6, 2, 9});
  put("coordinator", "death", {reinterpret_cast<const char*>(death.data()), death.size()});
}

// Replies of a Redis server, see resp_fuzzer.cpp: the first byte says how they are cut and what is expected.
void replies() {
  const auto add = [](const std::string& name, char control, const std::string& text) {
    put("resp", name, control + text);
  };
  add("simple", 3, "+OK\r\n-ERR x\r\n:12\r\n$-1\r\n$3\r\nabc\r\n");
  add("array", 8, "*2\r\n$1\r\n0\r\n*2\r\n$3\r\nkey\r\n$3\r\nyek\r\n");
  add("slots", 40, "*1\r\n*3\r\n:0\r\n:16383\r\n*4\r\n$9\r\n127.0.0.1\r\n:7000\r\n$2\r\nid\r\n*0\r\n");
  add("redirect", 1, "-MOVED 3999 127.0.0.1:6381\r\n-ASK 1 :6381\r\n");
  // The fuzzer puts its page's true record in the place of "@".
  add("page", static_cast<char>(0x85), "@$-1\r\n@");
  add("page_cut", static_cast<char>(0xff), "$240\r\nHICHERD1\x01\r\n");
}

// Lists of changes to a region's tables, see restart_fuzzer.cpp.
void restarts() {
  put("restart", "unchanged", std::string_view("\x00", 1));
  put("restart", "unsealed", std::string_view("\x00\x00\x2c\x13\x00\x00\x00", 7));
  put("restart", "sealed", std::string_view("\x01\x10\x2c\x03\x00\x00\x00\x20\x2c\xff\xff\xff\xff", 13));
}

// Lists of steps, see session_fuzzer.cpp: attach and register as both ranks, ask as a tool, leave.
void sessions() {
  put("session", "attach",
      std::string_view("\x00\x00\x02\x00\x00\x00\x07\x00\x01\x03\x00\x02\x01\x00\x07\x00\x01\x05\x00\x00",
                       20));
  // Both ranks of a group, each with memory of the right size; one of them is cut off without a goodbye.
  put("session", "group",
      std::string_view("\x00\x00\x02\x00\x00\x00\x07\x00\x01\x03\x00\x00\x01\x00\x07\x00\x01"
                       "\x00\x01\x02\x01\x06\x00\x07\x01\x01\x03\x01\x00\x01\x00\x07\x01\x01"
                       "\x06\x01\x05\x00\x00",
                       39));
  put("session", "tool", std::string_view("\x00\x01\x04\x01\x01\x00\x00\x07\x01\x01\x06\x01", 12));
  put("session", "raw", std::string_view("\x00\x02\x01\x02\x03\x01\x02\x03\x04\x07\x02\x01", 12));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds DIRECTORY\n");
    return 2;
  }
  root = argv[1];
  messages();
  configs();
  regions();
  steps();
  replies();
  restarts();
  sessions();
}
