// A rank without the library: it speaks the protocol by hand, so that a test may break it in any way.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shm/kernel_layout.hpp"
#include "shm/messages.hpp"
#include "shm/ring.hpp"
#include "shm/shared_memory.hpp"
#include "shm/unix_socket.hpp"
#include "tests/support/processes.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {

// Moving it would leave the rings pointing at the old words, so it stays where it is. Not thread-safe.
class RawRank {
 public:
  // Attaches; registers buffers too unless told not to. Throws when the daemon refuses.
  RawRank(const TestDaemon& daemon, const std::string& engine, std::uint32_t tp_rank,
          const NamespaceSpec& spec, bool with_buffers = true, std::uint64_t features = 0)
      : RawRank(daemon.socket_path(), engine, tp_rank, spec, with_buffers, features) {}
  RawRank(const std::string& socket_path, const std::string& engine, std::uint32_t tp_rank,
          const NamespaceSpec& spec, bool with_buffers = true, std::uint64_t features = 0)
      : socket_(TestRank::take(connect_unix(socket_path))) {
    Hello hello;
    hello.engine = engine;
    hello.tp_rank = tp_rank;
    hello.spec = spec;
    hello.features = features;
    Message message = ask(encode_message(hello), {});
    const auto answer = TestRank::take(decode_message(message.bytes));
    if (const auto* refused = std::get_if<Reply>(&answer)) throw std::runtime_error(refused->text);
    welcome_ = std::get<Welcome>(answer);
    fds_ = std::move(message.fds);
    channel_ = TestRank::take(
        Mapping::map(fds_.at(1).get(), welcome_.channel.total_bytes, Mapping::Access::read_write));
    submissions_ = RingProducer<Submission>(entries(welcome_.channel.sq_offset), welcome_.channel.sq_entries,
                                            &header().sq_head, &header().sq_tail);
    completions_ = RingConsumer<Completion>(entries(welcome_.channel.cq_offset), welcome_.channel.cq_entries,
                                            &header().cq_head);
    if (by_kernel()) {
      block_ = TestRank::take(Mapping::map(fds_.at(4).get(), kKernelBlockBytes, Mapping::Access::read_write));
      pool_ = TestRank::take(Mapping::map(fds_.at(3).get(), TestRank::take(object_size(fds_.at(3).get())),
                                          Mapping::Access::read_write));
    }
    if (with_buffers) register_buffers(spec);
  }
  RawRank(const RawRank&) = delete;
  RawRank& operator=(const RawRank&) = delete;

  [[nodiscard]] ChannelHeader& header() { return *reinterpret_cast<ChannelHeader*>(bytes()); }
  [[nodiscard]] RingEntry* submission_entries() { return entries(welcome_.channel.sq_offset); }
  [[nodiscard]] FenceBlock& fences() {
    return *reinterpret_cast<FenceBlock*>(bytes() + welcome_.channel.fence_offset);
  }
  [[nodiscard]] std::uint8_t* arena() { return bytes() + welcome_.channel.arena_offset; }
  // io_backend kernel: what the daemon leases to this rank, and the pool.
  [[nodiscard]] bool by_kernel() const { return (welcome_.features & kFeatureKernel) != 0; }
  [[nodiscard]] KernelSlot& kernel_slot(std::size_t i) {
    return static_cast<KernelBlock*>(block_.data())->slots[i];
  }
  [[nodiscard]] std::uint8_t* pool() { return static_cast<std::uint8_t*>(pool_.data()); }
  // Takes the next request of a direction; its slot. Throws when none comes in time.
  std::size_t take_request(bool loads) {
    std::size_t taken = kKernelSlots;
    const bool came = eventually([&] {
      for (std::size_t i = first_kernel_slot(loads); i < first_kernel_slot(loads) + kKernelSlotsPerDirection;
           ++i) {
        std::uint64_t turn = kernel_slot(i).turn.load();
        if ((turn & 3) != static_cast<std::uint64_t>(KernelTurn::posted)) continue;
        if (kernel_slot(i).turn.compare_exchange_strong(turn, kernel_turn(turn >> 2, KernelTurn::taken))) {
          taken = i;
          return true;
        }
      }
      return false;
    });
    if (!came) throw std::runtime_error("no request came");
    return taken;
  }
  // Reports an end, of whatever request.
  void end_request(std::size_t slot, std::uint64_t number, Status status = Status::ok,
                   std::uint64_t bytes = 0) {
    kernel_slot(slot).status.store(static_cast<std::uint32_t>(status));
    kernel_slot(slot).bytes.store(bytes);
    kernel_slot(slot).ended.store(number);
    const std::uint64_t one = 1;
    static_cast<void>(!::write(fds_.at(5).get(), &one, sizeof one));
  }
  [[nodiscard]] std::uint64_t request_number(std::size_t slot) { return kernel_slot(slot).turn.load() >> 2; }

  [[nodiscard]] const Welcome& welcome() const { return welcome_; }
  // That came with the welcome.
  [[nodiscard]] std::size_t descriptors() const { return fds_.size(); }
  [[nodiscard]] bool ended() { return header().session_ended.load(std::memory_order_acquire) != 0; }

  // Publishes an entry as it is and wakes the daemon. False when the ring is full.
  bool post(const Submission& submission) {
    if (!submissions_.has_space()) return false;
    submissions_.push(submission);
    kick();
    return true;
  }
  void kick() {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(fds_.at(2).get(), &one, sizeof one));
  }
  std::optional<Completion> next() {
    auto completion = completions_.pop();
    if (completion) kick();  // the daemon may have waited for room
    return completion;
  }
  // The next completion; throws when none comes in time.
  Completion wait() {
    std::optional<Completion> completion;
    if (!eventually([&] { return (completion = next()).has_value(); }))
      throw std::runtime_error("no completion");
    return *completion;
  }
  Completion run(const Submission& submission) {
    if (!post(submission)) throw std::runtime_error("the submission ring is full");
    return wait();
  }

  [[nodiscard]] Submission reserve(std::uint64_t sequence, const std::vector<PrefixHash>& hashes,
                                   std::uint32_t arena_offset = 0) {
    std::memcpy(arena() + arena_offset, hashes.data(), hashes.size() * sizeof(PrefixHash));
    Submission s;
    s.opcode = Opcode::reserve;
    s.sequence_or_lease = sequence;
    s.arena_offset = arena_offset;
    s.count = static_cast<std::uint32_t>(hashes.size());
    return s;
  }
  // Pages 0..count-1 of the device.
  [[nodiscard]] Submission transfer(Opcode opcode, std::uint64_t lease, std::uint32_t first,
                                    std::uint32_t count, std::uint32_t arena_offset = 0) {
    for (std::uint32_t i = 0; i < count; ++i)
      std::memcpy(arena() + arena_offset + i * sizeof i, &i, sizeof i);
    Submission s;
    s.opcode = opcode;
    s.sequence_or_lease = lease;
    s.arena_offset = arena_offset;
    s.first = first;
    s.count = count;
    return s;
  }
  [[nodiscard]] static Submission release(std::uint64_t lease) {
    Submission s;
    s.opcode = Opcode::release;
    s.sequence_or_lease = lease;
    return s;
  }

 private:
  std::uint8_t* bytes() { return static_cast<std::uint8_t*>(channel_.data()); }
  RingEntry* entries(std::uint64_t offset) { return reinterpret_cast<RingEntry*>(bytes() + offset); }
  Message ask(const std::vector<std::uint8_t>& bytes, const std::vector<int>& fds) {
    const auto sent = send_message(socket_.get(), bytes, fds, kPatienceMs);
    if (!sent) throw std::runtime_error(sent.error().message);
    return TestRank::take(receive_message(socket_.get(), kPatienceMs));
  }
  void register_buffers(const NamespaceSpec& spec) {
    RegisterBuffers message;
    message.geometry = device_geometry(spec, TestRank::kDevicePages);
    const UniqueFd memory = TestRank::take(create_sealed("raw-rank", message.geometry.allocations[0].bytes));
    std::vector<int> fds;
    if (!by_kernel()) fds.push_back(memory.get());
    const auto reply = TestRank::take(decode_message(ask(encode_message(message), fds).bytes));
    if (std::get<Reply>(reply).status != Status::ok) throw std::runtime_error(std::get<Reply>(reply).text);
  }

  UniqueFd socket_;
  std::vector<UniqueFd> fds_;
  Welcome welcome_;
  Mapping channel_;
  Mapping block_;
  Mapping pool_;
  RingProducer<Submission> submissions_;
  RingConsumer<Completion> completions_;
};

}  // namespace hicache::test
