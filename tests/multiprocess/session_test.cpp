// Sessions against a real daemon: attach and detach, roles, forks, limits, lookups, the C interface, and
// daemons that die or hang.
#include <dlfcn.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "hicache/hicache.h"
#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

AttachOptions options_for(const TestDaemon& daemon, const std::string& engine, std::uint32_t tp_size = 1) {
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.engine = engine;
  options.spec = small_spec(Attention::mha, tp_size);
  return options;
}

// SIGSTOP takes effect some time after kill() has returned.
bool is_stopped(pid_t pid) {
  const std::string stat = read_text("/proc/" + std::to_string(pid) + "/stat");
  const auto end = stat.rfind(')');
  return end != std::string::npos && stat.substr(end + 2, 1) == "T";
}

// libhicache.so, as any other language would load it.
class Library {
 public:
  Library() {
    const char* directory = std::getenv("HICACHE_LIB");
    const std::string path = std::string(directory == nullptr ? "build/lib" : directory) + "/libhicache.so";
    handle_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) throw std::runtime_error(::dlerror());
  }
  // Never closed: its thread-local error texts live as long as the threads.
  template <class F>
  F* find(const char* name) {
    void* symbol = ::dlsym(handle_, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("no symbol ") + name);
    return reinterpret_cast<F*>(symbol);
  }

 private:
  void* handle_ = nullptr;
};
#define HICACHE_FIND(name) const auto name = library.find<decltype(::name)>(#name)

}  // namespace

TEST_CASE("an absent daemon is an error that names the socket, at once") {
  AttachOptions options;
  options.socket_path = "/nonexistent/hicache.sock";
  options.engine = "engine";
  options.spec = small_spec(Attention::mha, 1);
  const auto session = Session::attach(options);
  REQUIRE(session.status() == Status::daemon_absent);
  REQUIRE(session.error().message.find("/nonexistent/hicache.sock") != std::string::npos);
  REQUIRE(control("/nonexistent/hicache.sock", {"status"}).status() == Status::daemon_absent);
}

TEST_CASE("attach and detach leave nothing behind on either side") {
  TestDaemon daemon;
  const std::size_t ours = descriptor_count(::getpid());
  const std::size_t theirs = descriptor_count(daemon.pid());
  for (int i = 0; i < 20; ++i) {
    TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
    REQUIRE(rank.run(rank.session().nop()).status == Status::ok);
  }
  const bool clean = eventually(
      [&] { return descriptor_count(::getpid()) == ours && descriptor_count(daemon.pid()) == theirs; });
  INFO(ours << " and " << theirs << " before, " << descriptor_count(::getpid()) << " and "
            << descriptor_count(daemon.pid()) << " now");
  REQUIRE(clean);
}

TEST_CASE("a rank's place is its own while it lives, and free when it has gone") {
  TestDaemon daemon;
  auto first = Session::attach(options_for(daemon, "engine"));
  REQUIRE(first.ok());
  REQUIRE(Session::attach(options_for(daemon, "engine")).status() == Status::exists);
  REQUIRE(Session::attach(options_for(daemon, "other")).ok());
  (*first)->close();
  REQUIRE(eventually([&] { return Session::attach(options_for(daemon, "engine")).ok(); }));
}

TEST_CASE("a scheduler reserves but moves no pages; a rank without buffers neither") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  AttachOptions options = options_for(daemon, "engine");
  options.role = Role::scheduler;
  auto scheduler = TestRank::take(Session::attach(options));
  const auto hashes = prompt(1, 3);
  const auto reserved =
      TestRank::take(scheduler->wait(TestRank::take(scheduler->reserve(1, hashes)), kPatienceMs));
  REQUIRE(reserved.status == Status::ok);
  REQUIRE(reserved.lease);
  REQUIRE(scheduler->write(reserved.lease, 0, TestRank::pages(0, 3)).status() == Status::not_permitted);
  REQUIRE(scheduler->register_buffers({}, {}).status() == Status::not_permitted);
  // The rank works with the scheduler's lease.
  for (std::uint32_t i = 0; i < 3; ++i) rank.fill(DevicePage{i}, hashes[i]);
  REQUIRE(rank.run(rank.session().write(reserved.lease, 0, TestRank::pages(0, 3))).written == 3);
  REQUIRE(TestRank::take(scheduler->wait(TestRank::take(scheduler->release(reserved.lease)), kPatienceMs))
              .status == Status::ok);

  auto bare = TestRank::take(Session::attach(options_for(daemon, "bare")));
  REQUIRE(bare->load(LeaseId{1}, 0, TestRank::pages(0, 1)).status() == Status::invalid_argument);
}

TEST_CASE("device buffers are registered once, and refused with the reason when they do not fit") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const DeviceGeometry geometry = rank.geometry();
  auto buffer = TestRank::take(HostDeviceBuffer::create(geometry.allocations[0].bytes));
  const int fds[] = {buffer.fd()};
  REQUIRE(rank.session().register_buffers(geometry, fds).status() == Status::exists);

  auto other = TestRank::take(Session::attach(options_for(daemon, "other")));
  DeviceGeometry outside = geometry;
  outside.tensors[0].offset = geometry.allocations[0].bytes;
  REQUIRE(other->register_buffers(outside, fds).status() == Status::invalid_argument);
  REQUIRE(other->register_buffers(geometry, {}).status() == Status::invalid_argument);
  auto small = TestRank::take(HostDeviceBuffer::create(4096));
  const int too_small[] = {small.fd()};
  REQUIRE(other->register_buffers(geometry, too_small).status() == Status::invalid_argument);
  REQUIRE(other->register_buffers(geometry, fds).ok());
}

TEST_CASE("a forked child gets forked, the parent's session lives on after the child is gone") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  Child child = Child::run([&] {
    int wrong = rank.session().nop().status() != Status::forked;
    wrong += rank.session().state() != Status::forked;
    rank.detach();
    // The child may attach for itself.
    wrong += !Session::attach(options_for(daemon, "child")).ok();
    return wrong;
  });
  const auto status = child.wait();
  REQUIRE(status.has_value());
  REQUIRE(status->exited_with(0));
  REQUIRE(write_prompt(rank, 1, prompt(3, 4)) == 4);
  REQUIRE(rank.session().state() == Status::ok);
}

TEST_CASE("requests larger than the protocol or the arena are refused before they are posted") {
  TestDaemon daemon(R"({"limits": {"arena_bytes": "64KiB"}})");
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  REQUIRE(rank.session().reserve(1, std::vector<PrefixHash>(kMaxPagesPerOperation + 1)).status() ==
          Status::too_large);
  REQUIRE(rank.session().reserve(1, prompt(1, 2049)).status() == Status::too_large);
  REQUIRE(rank.run(rank.session().reserve(1, prompt(1, 2048))).status == Status::ok);
}

TEST_CASE("a client that floods is told to try again and loses nothing") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  std::uint64_t posted = 0;
  std::uint64_t completed = 0;
  std::uint64_t refused = 0;
  while (posted < 50'000 || completed < posted) {
    if (posted < 50'000) {
      const auto ticket = rank.session().nop();
      if (ticket) {
        ++posted;
        continue;
      }
      REQUIRE(ticket.status() == Status::again);
      ++refused;
    }
    const auto result = rank.session().wait_any(kPatienceMs);
    REQUIRE(result.ok());
    REQUIRE(result->status == Status::ok);
    ++completed;
  }
  REQUIRE(refused > 0);
  REQUIRE(completed == 50'000);
}

TEST_CASE("probe sees pages when they are published and follows a bump of the weights epoch") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(9, 6);
  REQUIRE(rank.session().probe(hashes).leading == 0);
  REQUIRE(write_prompt(rank, 1, hashes) == 6);
  REQUIRE(rank.session().probe(hashes).leading == 6);
  REQUIRE(rank.session().probe(std::span(hashes).subspan(1, 2)).leading == 2);
  REQUIRE(rank.session().probe(prompt(10, 6)).leading == 0);
  const NamespaceId before = rank.session().namespace_id();
  const std::string digest = to_hex(small_spec(Attention::mha, 1).base_digest());
  const auto answer = control(daemon.socket_path(), {"namespace", "bump", digest.substr(0, 16)});
  INFO((answer.ok() ? *answer : answer.error().message));
  REQUIRE(answer.ok());
  REQUIRE_FALSE(rank.session().namespace_id() == before);
  REQUIRE(rank.session().probe(hashes).leading == 0);
  REQUIRE(write_prompt(rank, 2, hashes) == 6);
  REQUIRE(rank.session().probe(hashes).leading == 6);
}

TEST_CASE("layers of a load become ready one by one, and the bytes are right when the last is") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(4, 8);
  write_prompt(rank, 1, hashes);
  const auto reserved = rank.run(rank.session().reserve(2, hashes));
  REQUIRE(reserved.hits == 8);
  for (std::uint32_t round = 1; round <= 5; ++round) {
    const LayerFence fence{round % kProducerSlots, round};
    for (std::uint32_t i = 0; i < 8; ++i) rank.spoil(DevicePage{20 + i});
    const Ticket ticket =
        TestRank::take(rank.session().load(reserved.lease, 0, TestRank::pages(20, 8), fence));
    for (std::uint32_t layer = 0; layer < 2; ++layer)
      REQUIRE(rank.session().wait_layer(fence, layer, kPatienceMs).ok());
    for (std::uint32_t i = 0; i < 8; ++i) REQUIRE(rank.holds(DevicePage{20 + i}, hashes[i]));
    REQUIRE(TestRank::take(rank.session().wait(ticket, kPatienceMs)).status == Status::ok);
  }
}

TEST_CASE("a killed daemon ends every operation with daemon_lost, and its death returns the pages") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(5, 4);
  const auto reserved = rank.run(rank.session().reserve(1, hashes));
  // Waits for a fence that nobody raises.
  const Ticket write =
      TestRank::take(rank.session().write(reserved.lease, 0, TestRank::pages(0, 4), WriteFence{0, 1}));
  daemon.kill9();
  const auto lost = rank.session().wait(write, kPatienceMs);
  REQUIRE(lost.ok());
  REQUIRE(lost->status == Status::daemon_lost);
  if (lost->pages_busy) REQUIRE(TestRank::take(rank.session().wait(write, kPatienceMs)).pages_returned);
  REQUIRE(rank.session().state() == Status::daemon_lost);
  REQUIRE(rank.session().nop().status() == Status::daemon_lost);
  REQUIRE(rank.session().probe(hashes).leading == 0);
}

TEST_CASE("a stopped daemon is not declared dead: deadlines end the operations, and it goes on afterwards") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  daemon.child().kill(SIGSTOP);
  REQUIRE(eventually([&] { return is_stopped(daemon.pid()); }));
  const auto stopped = rank.run(rank.session().nop(50));
  const Status state = rank.session().state();
  daemon.child().kill(SIGCONT);
  REQUIRE(stopped.status == Status::timed_out);
  REQUIRE(state == Status::ok);
  REQUIRE(write_prompt(rank, 1, prompt(6, 4)) == 4);
}

TEST_CASE("the C interface carries a page there and back through dlopen") {
  TestDaemon daemon;
  Library library;
  HICACHE_FIND(hicache_attach);
  HICACHE_FIND(hicache_last_error);
  HICACHE_FIND(hicache_buffer_create);
  HICACHE_FIND(hicache_buffer_data);
  HICACHE_FIND(hicache_buffer_fd);
  HICACHE_FIND(hicache_buffer_destroy);
  HICACHE_FIND(hicache_register_buffers);
  HICACHE_FIND(hicache_hash_chain);
  HICACHE_FIND(hicache_probe);
  HICACHE_FIND(hicache_reserve);
  HICACHE_FIND(hicache_write);
  HICACHE_FIND(hicache_load);
  HICACHE_FIND(hicache_release);
  HICACHE_FIND(hicache_wait);
  HICACHE_FIND(hicache_wait_layer);
  HICACHE_FIND(hicache_raise_write_fence);
  HICACHE_FIND(hicache_session_get_info);
  HICACHE_FIND(hicache_state);
  HICACHE_FIND(hicache_control);
  HICACHE_FIND(hicache_session_destroy);

  hicache_namespace spec{};
  spec.struct_size = sizeof spec;
  spec.attention = HICACHE_ATTENTION_MLA;
  spec.model = "model";
  spec.dtype = "bfloat16";
  spec.page_tokens = 4;
  spec.layers = 2;
  spec.heads_per_shard = 1;
  spec.head_dim = 16;
  spec.element_bytes = 2;
  spec.tp_size = 1;
  const std::uint64_t piece = 4 * 16 * 2;
  const std::string socket = daemon.socket_path();
  hicache_attach_options options{};
  options.struct_size = sizeof options;
  options.role = HICACHE_ROLE_RANK;
  options.socket_path = socket.c_str();
  options.engine = "engine";
  options.spec = &spec;
  options.reattach = 1;
  hicache_session* session = nullptr;
  const hicache_status attached = hicache_attach(&options, &session);
  INFO(hicache_last_error());
  REQUIRE(attached == HICACHE_OK);

  constexpr std::uint32_t kPages = 8;
  hicache_buffer* buffer = nullptr;
  REQUIRE(hicache_buffer_create(2 * kPages * piece, &buffer) == HICACHE_OK);
  auto* bytes = static_cast<std::uint8_t*>(hicache_buffer_data(buffer));
  const hicache_allocation allocation{hicache_buffer_fd(buffer), 0, 2 * kPages * piece};
  hicache_tensor tensors[2] = {};
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    tensors[layer] = {0, layer, HICACHE_TENSOR_LATENT, 0, layer * kPages * piece, piece, piece};
  }
  REQUIRE(hicache_register_buffers(session, &allocation, 1, tensors, 2, kPages, 10'000) == HICACHE_OK);

  std::vector<std::uint32_t> tokens(12);
  for (std::uint32_t i = 0; i < 12; ++i) tokens[i] = 100 + i;
  hicache_hash hashes[3];
  REQUIRE(hicache_hash_chain(tokens.data(), tokens.size(), 4, nullptr, hashes) == HICACHE_OK);

  const auto finish = [&](hicache_status posted, hicache_ticket ticket,
                          hicache_status* page_status = nullptr) {
    hicache_result result{};
    result.struct_size = sizeof result;
    result.page_status = page_status;
    result.page_status_capacity = page_status == nullptr ? 0 : 3;
    INFO(hicache_last_error());
    REQUIRE(posted == HICACHE_OK);
    REQUIRE(hicache_wait(session, ticket, kPatienceMs, &result) == HICACHE_OK);
    REQUIRE(result.ticket == ticket);
    REQUIRE(result.status == HICACHE_OK);
    return result;
  };
  const auto piece_of = [&](std::uint32_t layer, std::uint32_t page) {
    return bytes + (layer * kPages + page) * piece;
  };
  hicache_ticket ticket = 0;
  hicache_status posted = hicache_reserve(session, 1, hashes, 3, 0, &ticket);
  hicache_result result = finish(posted, ticket);
  REQUIRE(result.hits == 0);
  const hicache_lease lease = result.lease;
  for (std::uint32_t page = 0; page < 3; ++page) {
    for (std::uint32_t layer = 0; layer < 2; ++layer)
      std::memset(piece_of(layer, page), static_cast<int>(16 * page + layer + 1), piece);
  }
  const std::uint32_t from[3] = {0, 1, 2};
  posted = hicache_write(session, lease, 0, from, 3, 0, 1, 0, &ticket);
  REQUIRE(hicache_raise_write_fence(session, 0, 1) == HICACHE_OK);
  hicache_status page_status[3] = {-1, -1, -1};
  result = finish(posted, ticket, page_status);
  REQUIRE(result.written == 3);
  REQUIRE(result.page_status_count == 3);
  for (const hicache_status status : page_status) REQUIRE(status == HICACHE_OK);
  REQUIRE(result.bytes == 3 * 2 * piece);

  std::uint32_t leading = 0;
  REQUIRE(hicache_probe(session, hashes, 3, &leading, nullptr) == HICACHE_OK);
  REQUIRE(leading == 3);
  const std::uint32_t to[3] = {7, 3, 5};
  posted = hicache_load(session, lease, 0, to, 3, 2, 1, 0, &ticket);
  REQUIRE(posted == HICACHE_OK);
  for (std::uint32_t layer = 0; layer < 2; ++layer)
    REQUIRE(hicache_wait_layer(session, 2, 1, layer, kPatienceMs) == HICACHE_OK);
  finish(posted, ticket);
  for (std::uint32_t page = 0; page < 3; ++page) {
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      REQUIRE(std::memcmp(piece_of(layer, to[page]), piece_of(layer, page), piece) == 0);
      REQUIRE(piece_of(layer, to[page])[0] == 16 * page + layer + 1);
    }
  }
  posted = hicache_release(session, lease, 0, &ticket);
  finish(posted, ticket);

  hicache_session_info info{};
  info.struct_size = sizeof info;
  REQUIRE(hicache_session_get_info(session, &info) == HICACHE_OK);
  REQUIRE(info.tp_size == 1);
  REQUIRE(info.ignored_completions == 0);
  REQUIRE(info.expired == 0);
  std::vector<char> answer(128 * 1024);
  const char* arguments[] = {"status"};
  REQUIRE(hicache_control(socket.c_str(), arguments, 1, 10'000, answer.data(), answer.size(), nullptr) ==
          HICACHE_OK);
  REQUIRE(answer[0] == '{');
  REQUIRE(hicache_state(session) == HICACHE_OK);

  // With `reattach` the session goes on with the next daemon, and finds its pages there.
  const std::uint64_t first_life = info.instance_epoch;
  daemon.kill9();
  REQUIRE(eventually([&] { return hicache_state(session) == HICACHE_DAEMON_LOST; }));
  daemon.start();
  REQUIRE(eventually([&] { return hicache_state(session) == HICACHE_OK; }));
  REQUIRE(hicache_session_get_info(session, &info) == HICACHE_OK);
  REQUIRE(info.instance_epoch != first_life);
  posted = hicache_reserve(session, 1, hashes, 3, 0, &ticket);
  result = finish(posted, ticket);
  REQUIRE(result.hits == 3);
  std::memset(bytes, 0, 2 * kPages * piece);
  posted = hicache_load(session, result.lease, 0, to, 3, 2, 2, 0, &ticket);
  finish(posted, ticket);
  REQUIRE(piece_of(1, to[2])[0] == 16 * 2 + 1 + 1);
  hicache_session_destroy(session);
  hicache_buffer_destroy(buffer);
}
