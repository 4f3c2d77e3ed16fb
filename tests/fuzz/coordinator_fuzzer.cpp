// Ring entries, arena bytes, deaths and control commands against a real coordinator. An input is a list of
// steps; after the last one the tables must pass every check of hicache-dump, and when everybody has left
// nothing may be open.
#include <spdlog/spdlog.h>

#include <cstdint>
#include <cstring>

#include "tests/fuzz/coordinator_rig.hpp"
#include "tests/fuzz/coordinator_steps.hpp"
#include "tests/fuzz/script.hpp"

using namespace hicache;
using namespace hicache::fuzz;

namespace {

constexpr int kMaxSteps = 200;  // of one input: longer ones only repeat

class Play {
 public:
  Play(CoordinatorRig& rig, Script& script) : rig_(rig), script_(script) {}

  void step() {
    const std::uint8_t what = script_.byte() % kSteps;
    const std::uint32_t who = script_.byte() % kClients;
    HostileClient& client = rig_.client(who);
    if (what == number_of(Step::settle)) return rig_.settle();
    if (what == number_of(Step::control)) return run_control();
    if (what == number_of(Step::die)) {
      if (client.attached) rig_.lose(client, script_.byte() % 2 != 0);
      NamespaceSpec spec = small_spec();
      // Now and then another namespace, under any name.
      if (const std::uint8_t name = script_.byte(); name >= 192) spec.model = static_cast<char>(name);
      rig_.attach(who, spec);
      if (client.attached && script_.byte() % 2 == 0) rig_.register_buffers(client);
      return;
    }
    if (!client.attached) return;
    if (what < kOpcodeCount) return client.submit(plausible(static_cast<Opcode>(what)));
    switch (static_cast<Step>(what)) {
      case Step::raw_entry:
        return client.submit(script_.raw<Submission>());
      case Step::scribble: {
        const auto at = script_.raw<std::uint16_t>();
        const std::uint32_t n = script_.byte() % 8u + 1;
        for (std::uint32_t i = 0; i < n; ++i) client.scribble(at + i, script_.byte());
        return client.wake_daemon();
      }
      case Step::read:
        return read_completions(client);
      case Step::fence:
        client.fences().write[script_.byte() % 4].value.store(script_.byte(), std::memory_order_release);
        return;
      case Step::buffers:
        return rig_.register_buffers(client);
      case Step::settle:
      case Step::die:
      case Step::control:
      case Step::end:
        return;
    }
  }

 private:
  std::uint64_t lease() {
    const std::uint8_t pick = script_.byte();
    if (pick < 128) return last_lease_;
    if (pick < 240) return LeaseId(LeaseSlot{pick % 4u}, Generation{pick / 4u % 3 + 1}).value;
    return script_.raw<std::uint64_t>();
  }
  // An entry that gets past the first checks more often than not.
  Submission plausible(Opcode opcode) {
    Submission s;
    s.user_data = ++user_data_;
    s.opcode = opcode;
    switch (opcode) {
      case Opcode::none:
      case Opcode::nop:
        return s;
      case Opcode::reserve:
        s.deadline_ms = script_.byte() % 8;
        s.count = script_.byte() % 17;
        s.sequence_or_lease = script_.byte() % 16u;
        s.arena_offset = script_.byte() % 4u * 32;
        return s;
      case Opcode::write:
      case Opcode::load: {
        range(s);
        s.arena_offset = kDeviceListAt + script_.byte() % 8u * 8;
        const std::uint8_t fence = script_.byte();
        if (fence >= 128) {
          s.fence = fence % 4;
          s.fence_value = script_.byte();
        }
        return s;
      }
      case Opcode::release:
        s.sequence_or_lease = lease();
        return s;
      case Opcode::agree:
        s.sequence_or_lease = script_.byte() % 80u;
        return s;
      case Opcode::prefetch: {
        range(s);
        const std::uint8_t policy = script_.byte() % 5;
        if (policy < 4) s.fence = policy;  // one of them is no policy
        return s;
      }
      case Opcode::check_prefetch:
      case Opcode::end_prefetch:
        s.sequence_or_lease = lease();
        s.first = script_.byte() % 4;
        return s;
      case Opcode::backup:
        range(s);
        return s;
    }
    fail("an operation that this fuzzer does not know");
  }
  // Pages of a lease.
  void range(Submission& s) {
    s.deadline_ms = script_.byte() % 8;
    s.count = script_.byte() % 17;
    s.sequence_or_lease = lease();
    s.first = script_.byte() % 17;
  }
  void read_completions(HostileClient& client) {
    for (std::uint32_t n = script_.byte() % 64u; n > 0; --n) {
      const auto completion = client.completions.pop();
      if (!completion) return;
      if (static_cast<std::uint16_t>(completion->status) >= kStatusCount)
        fail("a completion without a valid status");
      if (completion->opcode == Opcode::reserve && completion->lease != 0) last_lease_ = completion->lease;
    }
  }
  void run_control() {
    switch (script_.byte() % 6) {
      case 0:
        rig_.control({"clear"});
        return;
      case 4:
        rig_.control({"storage", "clear"});
        return;
      case 1:
        rig_.control({"evict", std::to_string(script_.byte())});
        return;
      case 2:
        rig_.control({"namespace", "bump", ""});
        return;
      case 3:
        rig_.control({"ranks"});
        return;
      default:
        rig_.control({std::string(1, static_cast<char>(script_.byte())), "namespaces"});
        return;
    }
  }

  CoordinatorRig& rig_;
  Script& script_;
  std::uint64_t last_lease_ = LeaseId(LeaseSlot{0}, Generation{1}).value;
  std::uint64_t user_data_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spdlog::set_level(spdlog::level::off);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Script script(data, size);
  const bool all_leave = script.byte() % 2 != 0;
  CoordinatorRig rig({}, true);
  Play play(rig, script);
  for (int i = 0; i < kMaxSteps && script.more(); ++i) play.step();
  rig.settle();
  if (all_leave) rig.lose_everybody();
  rig.halt_and_check();
  return 0;
}
