// A daemon in a thread that serves one client's socket and lets the test play the coordinator: every
// submission is read and every completion is written by hand, the wrong ones included.
//
// Thread safety: one test thread plays the coordinator; the socket thread only answers Hello and
// RegisterBuffers.
#pragma once

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "shm/channel_layout.hpp"
#include "shm/clock.hpp"
#include "shm/futex.hpp"
#include "shm/messages.hpp"
#include "shm/process.hpp"
#include "shm/region.hpp"
#include "shm/ring.hpp"
#include "shm/shared_memory.hpp"
#include "shm/unix_socket.hpp"
#include "shm/waiting.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

class FakeDaemon {
 public:
  static constexpr std::uint64_t kEpoch = 0xe90c4;
  static constexpr std::uint32_t kSlot = 3;
  static constexpr std::uint32_t kGeneration = 7;

  struct Options {
    std::uint32_t sq_entries = 8;
    std::uint32_t cq_entries = 16;
    std::uint64_t arena_bytes = 4096;
    std::uint32_t default_deadline_ms = 60'000;
    std::function<void(Welcome&)> spoil_welcome;    // changes it before it is sent
    std::function<void(FakeDaemon&)> spoil_memory;  // changes region or channel before they are handed out
    bool seal_channel = true;
    std::size_t descriptors = 3;
  };

  FakeDaemon() : FakeDaemon(Options{}) {}
  explicit FakeDaemon(Options options) : options_(std::move(options)) {
    make_region();
    make_channel();
    if (options_.spoil_memory) options_.spoil_memory(*this);
    listener_ = take(listen_unix(socket_path(), false));
    server_ = std::thread([this] { serve_socket(); });
  }
  ~FakeDaemon() {
    stop_.store(true);
    server_.join();
  }
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  [[nodiscard]] std::string socket_path() const { return dir_.file("fake.sock"); }
  [[nodiscard]] Tables& tables() { return tables_; }
  [[nodiscard]] ChannelHeader& header() { return *static_cast<ChannelHeader*>(channel_.data()); }
  [[nodiscard]] FenceBlock& fences() { return *at<FenceBlock>(geometry_.fence_offset); }
  [[nodiscard]] std::uint8_t* arena() { return at<std::uint8_t>(geometry_.arena_offset); }
  [[nodiscard]] int kick_fd() const { return kick_.get(); }
  [[nodiscard]] bool said_goodbye() const { return goodbye_.load(); }

  // Next submission, waiting for it; throws when none comes.
  Submission next() {
    std::optional<Submission> s;
    if (!eventually([&] { return (s = submissions_.pop()).has_value(); }))
      throw std::runtime_error("no submission");
    return *s;
  }
  std::optional<Submission> try_next() { return submissions_.pop(); }
  // Publishes a completion and wakes a waiting client, as the coordinator does.
  void complete(const Completion& c) {
    publish(c);
    park_fence();  // SYNC park
    if (header().client_waiting.load(std::memory_order_relaxed) != 0) {
      header().cq_wake.fetch_add(1, std::memory_order_release);
      futex_wake_all(&header().cq_wake);
    }
  }
  // Publishes it without the wake-up.
  void publish(const Completion& c) { completions_.push(c); }
  static Completion answer(const Submission& s, Status status = Status::ok) {
    Completion c;
    c.user_data = s.user_data;
    c.opcode = s.opcode;
    c.status = status;
    return c;
  }
  void end_session() {
    header().session_ended.store(1, std::memory_order_release);
    header().cq_wake.fetch_add(1, std::memory_order_release);
    futex_wake_all(&header().cq_wake);
  }
  void hang_up() { hang_up_.store(true); }
  // What the coordinator does with a client whose last copy has ended.
  void forget_client() {
    tables_.clients[kSlot].state.store(static_cast<std::uint32_t>(ClientState::free),
                                       std::memory_order_release);
  }

 private:
  template <class T>
  static T take(Result<T> result) {
    if (!result) throw std::runtime_error(result.error().message);
    return std::move(result.value());
  }
  template <class T>
  T* at(std::uint64_t offset) {
    return reinterpret_cast<T*>(static_cast<std::uint8_t*>(channel_.data()) + offset);
  }

  void make_region() {
    RegionShape shape;
    shape.segments = 4;
    shape.index_buckets = 64;
    shape.pages = 32;
    shape.pin_chunks = 32;
    shape.flight_records = 64;
    const RegionPlan plan = plan_region(shape);
    control_fd_ = take(create_sealed("fake-control", plan.total_bytes));
    control_ = take(Mapping::map(control_fd_.get(), plan.total_bytes, Mapping::Access::read_write));
    tables_ = make_tables(control_.data(), plan);
    constexpr auto relaxed = std::memory_order_relaxed;
    RegionHeader& h = *tables_.header;
    h.magic.store(kRegionMagic, relaxed);
    h.layout_major.store(kLayoutMajor, relaxed);
    h.layout_minor.store(kLayoutMinor, relaxed);
    h.layout_fingerprint.store(layout_fingerprint(), relaxed);
    h.region_bytes.store(plan.total_bytes, relaxed);
    h.instance_epoch.store(kEpoch, relaxed);
    h.hash_seed.store(0x5eed, relaxed);
    h.section_count.store(kSectionCount, relaxed);
    for (std::uint32_t i = 0; i < kSectionCount; ++i) {
      h.sections[i].kind.store(i + 1, relaxed);
      h.sections[i].entry_bytes.store(plan.sections[i].entry_bytes, relaxed);
      h.sections[i].offset.store(plan.sections[i].offset, relaxed);
      h.sections[i].entries.store(plan.sections[i].entries, relaxed);
    }
    h.header_crc.store(header_crc(h), relaxed);
    h.state.store(static_cast<std::uint32_t>(RegionState::ready), std::memory_order_release);
    for (IndexBucket& bucket : tables_.index) bucket.head.store(kNone32, relaxed);
    tables_.clients[kSlot].generation.store(kGeneration, relaxed);
    tables_.clients[kSlot].state.store(static_cast<std::uint32_t>(ClientState::attached), relaxed);
    tables_.namespaces[0].state.store(static_cast<std::uint32_t>(NamespaceState::active), relaxed);
    tables_.namespaces[0].successor.store(kNone32, relaxed);
  }

  void make_channel() {
    geometry_ = ChannelGeometry::plan(options_.sq_entries, options_.cq_entries, options_.arena_bytes);
    if (options_.seal_channel) {
      channel_fd_ = take(create_sealed("fake-channel", geometry_.total_bytes));
    } else {
      channel_fd_ = UniqueFd(::memfd_create("fake-channel", MFD_CLOEXEC));
      if (::ftruncate(channel_fd_.get(), static_cast<off_t>(geometry_.total_bytes)) != 0)
        throw std::runtime_error("ftruncate");
    }
    channel_ = take(Mapping::map(channel_fd_.get(), geometry_.total_bytes, Mapping::Access::read_write));
    header().magic.store(kChannelMagic);
    header().instance_epoch.store(kEpoch);
    header().client_slot.store(kSlot);
    header().client_generation.store(kGeneration);
    submissions_ =
        RingConsumer<Submission>(at<RingEntry>(geometry_.sq_offset), geometry_.sq_entries, &header().sq_head);
    completions_ = RingProducer<Completion>(at<RingEntry>(geometry_.cq_offset), geometry_.cq_entries,
                                            &header().cq_head, &header().cq_tail);
    kick_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  }

  [[nodiscard]] Welcome welcome() const {
    Welcome w;
    w.protocol = kProtocolMax;
    w.instance_epoch = kEpoch;
    w.region_bytes = control_.size();
    w.client_slot = kSlot;
    w.client_generation = kGeneration;
    w.namespace_id = 0;
    w.daemon_pid = ProcessIdentity::self().pid;
    w.daemon_start_ticks = ProcessIdentity::self().start_ticks;
    w.default_deadline_ms = options_.default_deadline_ms;
    w.wait_yield_us = 200;
    w.wait_park_ms = 20;
    w.channel = geometry_;
    return w;
  }

  void serve_socket() {
    UniqueFd client;
    while (!stop_.load()) {
      if (hang_up_.load()) client.reset();
      if (!client.valid()) {
        client = UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!client.valid()) pause();
        continue;
      }
      auto message = receive_message(client.get(), 5);
      if (!message) {
        if (message.status() != Status::timed_out) client.reset();
        continue;
      }
      const auto decoded = decode_message(message->bytes);
      if (!decoded) continue;
      if (std::holds_alternative<Hello>(*decoded)) {
        Welcome w = welcome();
        if (options_.spoil_welcome) options_.spoil_welcome(w);
        const int fds[] = {control_fd_.get(), channel_fd_.get(), kick_.get()};
        static_cast<void>(
            send_message(client.get(), encode_message(w), std::span(fds).first(options_.descriptors), 1000));
      } else if (std::holds_alternative<Goodbye>(*decoded)) {
        goodbye_.store(true);
      } else {
        static_cast<void>(send_message(client.get(), encode_message(Reply{Status::ok, "{}"}), {}, 1000));
      }
    }
  }
  static void pause() {
    const timespec nap{0, 1'000'000};
    ::nanosleep(&nap, nullptr);
  }

  Options options_;
  TempDir dir_;
  UniqueFd control_fd_;
  UniqueFd channel_fd_;
  UniqueFd kick_;
  UniqueFd listener_;
  Mapping control_;
  Mapping channel_;
  Tables tables_;
  ChannelGeometry geometry_;
  RingConsumer<Submission> submissions_;
  RingProducer<Completion> completions_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> hang_up_{false};
  std::atomic<bool> goodbye_{false};
  std::thread server_;
};

}  // namespace hicache::test
