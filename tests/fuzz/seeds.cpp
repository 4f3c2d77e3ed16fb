// Writes small seed corpora: fuzz_seeds DIRECTORY makes DIRECTORY/TARGET/* for every target.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/config.hpp"
#include "shm/messages.hpp"
#include "tests/fuzz/coordinator_steps.hpp"

using namespace hicache;
using namespace hicache::fuzz;

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
  const std::uint8_t settle = number_of(Step::settle), read = number_of(Step::read);
  Bytes request;
  const auto add = [](Bytes& to, std::initializer_list<std::uint8_t> bytes) { to.insert(to.end(), bytes); };
  const auto both_post = [&](Opcode opcode, std::initializer_list<std::uint8_t> arguments) {
    for (std::uint8_t rank = 0; rank < 2; ++rank) {
      add(request, {number_of(opcode), rank});
      add(request, arguments);
    }
  };
  both_post(Opcode::reserve, {0, 4, 1, 0});  // sequence 1, 4 pages
  add(request, {settle, 0, read, 0, 63});
  both_post(Opcode::write, {0, 4, 0, 0, 0, 0});  // all four
  add(request, {settle, 0, settle, 0, read, 0, 63, read, 1, 63});
  const Bytes written = request;
  both_post(Opcode::load, {0, 4, 0, 0, 0, 0});  // them again
  add(request, {settle, 0, settle, 0});
  both_post(Opcode::release, {0});
  const auto put_in_both_endings = [](const std::string& name, const Bytes& steps) {
    for (std::uint8_t ending = 0; ending < 2; ++ending) {
      Bytes input{ending};
      input.insert(input.end(), steps.begin(), steps.end());
      put("coordinator", name + std::to_string(ending),
          {reinterpret_cast<const char*>(input.data()), input.size()});
    }
  };
  put_in_both_endings("request", request);

  // The same pages to storage; then from there, by a second lease, with a question about it; an agreement.
  request = written;
  both_post(Opcode::backup, {7, 4, 0, 0});
  both_post(Opcode::release, {0});
  add(request, {settle, 0, settle, 0, number_of(Step::control), 0, 0});  // clear
  both_post(Opcode::reserve, {0, 4, 2, 0});
  add(request, {settle, 0, read, 0, 63});
  both_post(Opcode::prefetch, {7, 4, 0, 0, 1});
  both_post(Opcode::check_prefetch, {0, 1});
  add(request, {settle, 0, settle, 0});
  both_post(Opcode::end_prefetch, {0, 2});
  both_post(Opcode::release, {0});
  both_post(Opcode::agree, {1});
  add(request, {settle, 0, read, 0, 63, read, 1, 63});
  put_in_both_endings("storage", request);

  // A write that waits for its fence when its rank dies; a bump; a scribble over the header; the scheduler.
  Bytes death{1};
  const std::uint8_t reserve = number_of(Opcode::reserve), write = number_of(Opcode::write);
  for (std::uint8_t rank = 0; rank < 2; ++rank) add(death, {reserve, rank, 0, 4, 1, 0});
  add(death, {settle, 0, read, 0, 63});
  add(death, {write, 0, 7, 4, 0, 0, 0, 129, 9});
  add(death, {number_of(Step::die), 0, 0, 1, 0});
  add(death, {number_of(Step::control), 0, 2});
  add(death, {number_of(Step::scribble), 1, 64, 0, 0, 7});
  add(death, {reserve, 2, 0, 3, 1, 0, settle, 0, read, 2, 9});
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
