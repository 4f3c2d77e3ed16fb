// A rank in the coordinator's own process: channel, rings and device memory without a socket.
#pragma once

#include <sys/eventfd.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "shm/ring.hpp"
#include "tests/crash/stepping/daemon_inside.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {

class LocalRank {
 public:
  static constexpr std::uint32_t kDevicePages = 16;

  LocalRank(const daemon::Config& config, NamespaceSpec spec, std::uint32_t tp_rank)
      : spec_(std::move(spec)),
        tp_rank_(tp_rank),
        geometry_(ChannelGeometry::plan(config.limits.submission_entries, config.limits.completion_entries,
                                        config.limits.arena_bytes)),
        channel_(std::make_shared<Mapping>(map_sealed(geometry_.total_bytes))),
        kick_(std::make_shared<UniqueFd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {}

  // Hands the attach over; it is decided in the daemon's next turn.
  void post_attach(DaemonInside& daemon) {
    daemon::AttachRequest request;
    request.hello.role = Role::rank;
    request.hello.engine = "stepped";
    request.hello.tp_rank = tp_rank_;
    request.hello.spec = spec_;
    request.pid = static_cast<std::uint32_t>(::getpid());
    request.channel = channel_;
    request.geometry = geometry_;
    request.kick = kick_;
    request.answer = [this](daemon::AttachAnswer answer) { attached_ = std::move(answer); };
    daemon.coordinator().inbox.post(std::move(request));
  }
  // After the attach was answered.
  void post_buffers(DaemonInside& daemon) {
    if (attached_.status != Status::ok) throw std::runtime_error("attach refused: " + attached_.text);
    submissions_ = RingProducer<Submission>(at<RingEntry>(geometry_.sq_offset), geometry_.sq_entries,
                                            &header().sq_head, &header().sq_tail);
    completions_ =
        RingConsumer<Completion>(at<RingEntry>(geometry_.cq_offset), geometry_.cq_entries, &header().cq_head);
    auto memory = std::make_shared<daemon::RankMemory>();
    memory->client = attached_.client;
    memory->client_generation = attached_.client_generation;
    memory->spec = spec_;
    memory->geometry = device_geometry(spec_, kDevicePages);
    memory->geometry.allocations[0].bytes = align_up(memory->geometry.allocations[0].bytes, 4096);
    memory->allocations.push_back(map_sealed(memory->geometry.allocations[0].bytes));
    memory->channel = channel_;
    memory->fences = at<FenceBlock>(geometry_.fence_offset);
    memory->shard = tp_rank_;
    memory_ = memory;
    daemon.coordinator().inbox.post(daemon::BuffersRequest{std::move(memory), [](Status, std::string) {}});
  }
  void post_gone(DaemonInside& daemon, bool orderly) {
    daemon.coordinator().inbox.post(
        daemon::GoneRequest{attached_.client, attached_.client_generation, orderly});
  }

  void fill(std::uint32_t page, const PrefixHash& key) {
    std::uint64_t n = 0;
    for (const DeviceTensor& tensor : memory_->geometry.tensors) {
      auto* words =
          reinterpret_cast<std::uint64_t*>(static_cast<std::uint8_t*>(memory_->allocations[0].data()) +
                                           tensor.offset + page * tensor.page_stride);
      for (std::uint64_t i = 0; i < tensor.page_bytes / 8; ++i) words[i] = page_content(key, tp_rank_, n++);
    }
  }

  void post_reserve(std::uint64_t sequence, const std::vector<PrefixHash>& hashes) {
    std::memcpy(arena(), hashes.data(), hashes.size() * sizeof(PrefixHash));
    Submission s;
    s.opcode = Opcode::reserve;
    s.sequence_or_lease = sequence;
    s.count = static_cast<std::uint32_t>(hashes.size());
    submissions_.push(s);
  }
  // Of device pages 0 .. count - 1.
  void post_copy(Opcode opcode, std::uint64_t lease, std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) std::memcpy(arena() + 2048 + i * sizeof i, &i, sizeof i);
    Submission s;
    s.opcode = opcode;
    s.sequence_or_lease = lease;
    s.arena_offset = 2048;
    s.first = first;
    s.count = count;
    submissions_.push(s);
  }
  void post_release(std::uint64_t lease) {
    Submission s;
    s.opcode = Opcode::release;
    s.sequence_or_lease = lease;
    submissions_.push(s);
  }
  // The next completion; throws when there is none.
  Completion next() {
    auto completion = completions_.pop();
    if (!completion) throw std::runtime_error("no completion");
    return *completion;
  }

 private:
  static Mapping map_sealed(std::uint64_t bytes) {
    const UniqueFd fd = TestRank::take(create_sealed("stepped-rank", bytes));
    return TestRank::take(Mapping::map(fd.get(), bytes, Mapping::Access::read_write));
  }
  template <class T>
  T* at(std::uint64_t offset) {
    return reinterpret_cast<T*>(static_cast<std::uint8_t*>(channel_->data()) + offset);
  }
  ChannelHeader& header() { return *at<ChannelHeader>(0); }
  std::uint8_t* arena() { return at<std::uint8_t>(geometry_.arena_offset); }

  NamespaceSpec spec_;
  std::uint32_t tp_rank_;
  ChannelGeometry geometry_;
  std::shared_ptr<Mapping> channel_;
  std::shared_ptr<UniqueFd> kick_;
  std::shared_ptr<daemon::RankMemory> memory_;
  daemon::AttachAnswer attached_;
  RingProducer<Submission> submissions_;
  RingConsumer<Completion> completions_;
};

}  // namespace hicache::test
