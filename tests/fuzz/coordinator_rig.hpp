// A real coordinator with real transfers in this process, over a small region in memory, and clients whose
// channels the fuzzer writes as a hostile process would.
#pragma once

#include <sys/eventfd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/coordinator/coordinator.hpp"
#include "daemon/storage/storage_tier.hpp"
#include "daemon/transfer/transfer_engine.hpp"
#include "shm/page_word.hpp"
#include "shm/ring.hpp"
#include "tests/support/memory_region.hpp"
#include "tools/dump/region_check.hpp"

namespace hicache::fuzz {

constexpr std::uint32_t kTpSize = 2;
constexpr std::uint32_t kClients = 3;  // ranks 0 and 1, and a scheduler
constexpr std::uint32_t kDevicePages = 16;
constexpr std::uint32_t kHashes = 16;          // at the start of every arena
constexpr std::uint32_t kDeviceListAt = 1024;  // then a list of device pages
constexpr std::uint64_t kPoolBytes =
    256 * kKiB;  // 32 slots of two shards: less than the page table, so evictions

[[noreturn]] inline void fail(const std::string& why) {
  std::fprintf(stderr, "coordinator fuzzer: %s\n", why.c_str());
  std::abort();
}

inline daemon::Config small_config() {
  daemon::Config c;
  c.name = "fuzz";
  c.pool.bytes = kPoolBytes;
  c.pool.segment_bytes = 64 * kKiB;
  c.pool.max_pages = 48;
  c.waiting = c.client_waiting = WaitPolicy{0, 0, 5};
  c.limits.clients = 8;
  c.limits.namespaces = 8;
  c.limits.leases = 64;
  c.limits.leases_per_group = 6;
  c.limits.submission_entries = 16;
  c.limits.completion_entries = 64;
  c.limits.arena_bytes = 4096;
  c.limits.operation_deadline_ms = c.limits.max_deadline_ms = 20;
  c.storage.prefetch_threshold_tokens = 0;
  return c;
}

inline NamespaceSpec small_spec() {
  NamespaceSpec spec;
  spec.model = "fuzz";
  spec.dtype = "fp8";
  spec.page_tokens = 1;
  spec.layers = 2;
  spec.heads_per_shard = 1;
  spec.head_dim = 64;
  spec.element_bytes = 1;
  spec.tp_size = kTpSize;
  return spec;
}

inline std::pair<UniqueFd, Mapping> map_sealed(std::uint64_t bytes) {
  auto fd = create_sealed("hicache-fuzz", bytes);
  if (!fd) fail(fd.error().message);
  auto mapping = Mapping::map(fd->get(), bytes, Mapping::Access::read_write);
  if (!mapping) fail(mapping.error().message);
  return {std::move(*fd), std::move(*mapping)};
}

// One attached process as the fuzzer plays it: it owns the client's side of a channel and respects nothing.
struct HostileClient {
  bool attached = false;
  ClientSlot slot;
  Generation generation;
  GroupSlot group;
  NamespaceSpec spec;
  ChannelGeometry geometry;
  std::shared_ptr<Mapping> channel;
  std::shared_ptr<UniqueFd> kick;
  std::uint32_t tail = 0;
  RingConsumer<Completion> completions;

  [[nodiscard]] std::uint8_t* base() const { return static_cast<std::uint8_t*>(channel->data()); }
  [[nodiscard]] ChannelHeader& header() const { return *reinterpret_cast<ChannelHeader*>(base()); }
  [[nodiscard]] FenceBlock& fences() const {
    return *reinterpret_cast<FenceBlock*>(base() + geometry.fence_offset);
  }

  void wake_daemon() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t rc = ::write(kick->get(), &one, sizeof one);
  }
  // Overwrites the next slot whether there is room or not.
  void submit(const Submission& submission) {
    auto& entry = reinterpret_cast<RingEntry*>(base() + geometry.sq_offset)[tail & (geometry.sq_entries - 1)];
    std::array<std::uint64_t, 7> words;
    std::memcpy(words.data(), &submission, sizeof submission);
    for (std::size_t i = 0; i < 7; ++i) entry.payload[i].store(words[i], std::memory_order_relaxed);
    entry.sequence.store(++tail, std::memory_order_release);  // SYNC ring-publish
    header().sq_tail.store(tail, std::memory_order_relaxed);
    wake_daemon();
  }
  void scribble(std::uint64_t at, std::uint8_t value) const {
    reinterpret_cast<A8*>(base())[at % geometry.total_bytes].store(value, std::memory_order_relaxed);
  }
};

// On which NUMA nodes the pool's segments and the ranks' devices are; as they are made, on none.
struct RigNodes {
  std::vector<NumaNode> segments;
  std::array<NumaNode, kTpSize> ranks{};
};

constexpr std::uint32_t kWriteBlock = 3;  // so that writes of a few pages are several copies

class CoordinatorRig {
 public:
  // `storage`: with a tier below, whose backend keeps pages in memory.
  explicit CoordinatorRig(const RigNodes& nodes = {}, bool storage = false)
      : config_(small_config()),
        region_(shape()),
        pool_(map_sealed(kPoolBytes).second),
        rank_nodes_(nodes.ranks) {
    fill_header();
    coordinator_.emplace(daemon::CoordinatorOptions{config_, region_.tables(), false, kPoolBytes, nullptr,
                                                    nodes.segments, kWriteBlock});
    daemon::TransferOptions options;
    options.border_bytes = config_.pool.segment_bytes;
    options.pool_bytes = kPoolBytes;
    transfers_.emplace(options,
                       daemon::make_host_backend(static_cast<std::uint8_t*>(pool_.data()), kPoolBytes),
                       [this](const daemon::TransferDone& done) { coordinator_->post(done); });
    coordinator_->set_transfers(&*transfers_);
    if (storage) attach_storage();
    thread_ = std::thread([this] { coordinator_->run(); });
    region_.tables().header->state.store(static_cast<std::uint32_t>(RegionState::ready),
                                         std::memory_order_release);
    for (std::uint32_t i = 0; i < kClients; ++i) attach(i);
    for (std::uint32_t i = 0; i < kTpSize; ++i) register_buffers(clients_[i]);
  }
  ~CoordinatorRig() { halt(); }
  CoordinatorRig(const CoordinatorRig&) = delete;
  CoordinatorRig& operator=(const CoordinatorRig&) = delete;

  // As the daemon's other threads do.
  void post(daemon::CoordinatorRequest request) { coordinator_->post(std::move(request)); }
  [[nodiscard]] const daemon::Config& config() const { return config_; }

  HostileClient& client(std::uint32_t i) { return clients_[i % kClients]; }

  void attach(std::uint32_t i, const NamespaceSpec& spec = small_spec()) {
    HostileClient& c = clients_[i];
    c = HostileClient{};
    c.geometry = ChannelGeometry::plan(config_.limits.submission_entries, config_.limits.completion_entries,
                                       config_.limits.arena_bytes);
    c.channel = std::make_shared<Mapping>(map_sealed(c.geometry.total_bytes).second);
    c.kick = std::make_shared<UniqueFd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    for (std::uint32_t h = 0; h < kHashes; ++h) {
      const PrefixHash hash{{h + 1, ~std::uint64_t{h}, 3, 4}};
      std::memcpy(c.base() + c.geometry.arena_offset + h * sizeof hash, &hash, sizeof hash);
    }
    for (std::uint32_t p = 0; p < kDevicePages; ++p) {
      std::memcpy(c.base() + c.geometry.arena_offset + kDeviceListAt + p * sizeof p, &p, sizeof p);
    }
    daemon::AttachRequest request;
    request.hello.role = i < kTpSize ? Role::rank : Role::scheduler;
    request.hello.engine = "fuzz";
    request.hello.tp_rank = i < kTpSize ? i : 0;
    request.hello.spec = spec;
    request.channel = c.channel;
    request.geometry = c.geometry;
    request.kick = c.kick;
    auto promise = std::make_shared<std::promise<daemon::AttachAnswer>>();
    request.answer = [promise](daemon::AttachAnswer answer) { promise->set_value(std::move(answer)); };
    coordinator_->post(std::move(request));
    const daemon::AttachAnswer answer = wait_for(promise->get_future(), "an attach");
    if (answer.status != Status::ok) return;
    c.attached = true;
    c.slot = answer.client;
    c.generation = answer.client_generation;
    c.group = answer.group;
    c.spec = answer.spec;
    c.completions =
        RingConsumer<Completion>(reinterpret_cast<const RingEntry*>(c.base() + c.geometry.cq_offset),
                                 c.geometry.cq_entries, &c.header().cq_head);
  }

  void register_buffers(const HostileClient& c) {
    auto memory = std::make_shared<daemon::RankMemory>();
    memory->client = c.slot;
    memory->client_generation = c.generation;
    memory->spec = c.spec;
    memory->geometry.pages = kDevicePages;
    const std::uint64_t piece = c.spec.piece_bytes();
    for (std::uint32_t kind = 0; kind < c.spec.kinds(); ++kind) {
      for (std::uint32_t layer = 0; layer < c.spec.layers; ++layer) {
        const std::uint64_t offset = (std::uint64_t{kind} * c.spec.layers + layer) * kDevicePages * piece;
        memory->geometry.tensors.push_back({0, layer, static_cast<TensorKind>(kind), offset, piece, piece});
      }
    }
    DeviceAllocation allocation;
    allocation.bytes = align_up(c.spec.shard_bytes() * kDevicePages, 4096);
    memory->geometry.allocations.push_back(allocation);
    memory->allocations.push_back(map_sealed(allocation.bytes).second);
    memory->channel = c.channel;
    memory->fences = &c.fences();
    memory->shard = &c == &clients_[1] ? 1 : 0;
    if (rank_nodes_[memory->shard])
      memory->device = std::make_unique<PlacedDevice>(*transfers_, rank_nodes_[memory->shard]);
    auto promise = std::make_shared<std::promise<void>>();
    coordinator_->post(
        daemon::BuffersRequest{memory, [promise](Status, std::string) { promise->set_value(); }});
    wait_for(promise->get_future(), "a registration");
  }

  void lose(HostileClient& c, bool orderly) {
    coordinator_->post(daemon::GoneRequest{c.slot, c.generation, orderly});
    c.attached = false;
  }

  std::string control(std::vector<std::string> arguments) {
    auto promise = std::make_shared<std::promise<std::string>>();
    coordinator_->post(daemon::ControlRequest{
        std::move(arguments), [promise](Status, std::string text) { promise->set_value(std::move(text)); }});
    return wait_for(promise->get_future(), "a control command");
  }

  // Two answers from the inbox have a whole turn over the rings between them.
  void settle() {
    for (int i = 0; i < 2; ++i) control({"status"});
  }

  // Everybody leaves; everything that was open must end.
  void lose_everybody() {
    for (HostileClient& c : clients_) {
      if (c.attached) lose(c, false);
    }
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (gauge(Counter::live_leases) != 0 || gauge(Counter::pinned_pages) != 0 || !clients_free()) {
      if (std::chrono::steady_clock::now() > limit) {
        fail("20 s after the last client left there are " + std::to_string(gauge(Counter::live_leases)) +
             " leases and " + std::to_string(gauge(Counter::pinned_pages)) + " pins");
      }
      control({"status"});
    }
  }

  // The NUMA node of the slot of every page that is ready.
  [[nodiscard]] std::vector<NumaNode> nodes_of_ready_pages() {
    std::vector<NumaNode> nodes;
    for (const PageEntry& page : region_.tables().pages) {
      if (PageWord::decode(page.word.load(std::memory_order_acquire)).state != PageState::ready) continue;
      const std::uint64_t segment =
          page.pool_offset.load(std::memory_order_relaxed) / config_.pool.segment_bytes;
      nodes.emplace_back(region_.tables().segments[segment].numa_node.load(std::memory_order_relaxed));
    }
    return nodes;
  }

  // Ends the coordinator's thread where it is and proves the invariants over its tables.
  void halt_and_check() {
    halt();
    region_.tables().header->state.store(static_cast<std::uint32_t>(RegionState::ready),
                                         std::memory_order_relaxed);
    const auto* base = reinterpret_cast<const std::uint8_t*>(region_.tables().header);
    inspect::MemorySource source({base, plan_region(shape()).total_bytes});
    const auto snapshot = inspect::Snapshot::take(source);
    if (!snapshot.usable()) fail("the region is " + snapshot.verdict().why);
    if (snapshot.commit_sequence() % 2 != 0) fail("the commit sequence is odd between two turns");
    const auto report = inspect::check_region(source, snapshot);
    for (const auto& finding : report.findings) std::fprintf(stderr, "finding: %s\n", finding.text.c_str());
    if (!report.findings.empty())
      fail("the checker found " + std::to_string(report.findings.size()) + " faults");
  }

 private:
  // Says where a device is; its memory is the rig's.
  struct PlacedDevice final : daemon::DeviceImport {
    PlacedDevice(daemon::Transfers& t, NumaNode n) : DeviceImport(t, 0, n) {}
    [[nodiscard]] bool reachable_from(std::uint32_t) const override { return false; }
  };

  template <class T>
  static T wait_for(std::future<T> future, const char* what) {
    if (future.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      fail(std::string("the coordinator did not answer ") + what + " in 20 s");
    }
    return future.get();
  }
  [[nodiscard]] RegionShape shape() const {
    auto s = test::MemoryRegion::small(config_.page_table_entries(), 4);
    s.config_text_bytes = daemon::config_to_json(config_).size();
    return s;
  }
  void attach_storage() {
    storage_.emplace(
        config_.storage,
        daemon::StoragePool{static_cast<std::byte*>(pool_.data()), kPoolBytes, config_.pool.segment_bytes},
        nullptr, [this] { coordinator_->post(daemon::StorageNews{}); });
    const auto attached = storage_->attach("memory", daemon::StorageTier::Settings::object());
    if (!attached) fail(attached.error().message);
    coordinator_->set_storage(&*storage_);
  }
  void fill_header() {
    constexpr auto relaxed = std::memory_order_relaxed;
    const RegionPlan plan = plan_region(shape());
    RegionHeader& h = *region_.tables().header;
    h.magic.store(kRegionMagic, relaxed);
    h.layout_major.store(kLayoutMajor, relaxed);
    h.layout_minor.store(kLayoutMinor, relaxed);
    h.layout_fingerprint.store(layout_fingerprint(), relaxed);
    h.region_bytes.store(plan.total_bytes, relaxed);
    h.pool_bytes.store(kPoolBytes, relaxed);
    h.segment_bytes.store(config_.pool.segment_bytes, relaxed);
    h.instance_epoch.store(1, relaxed);
    h.section_count.store(kSectionCount, relaxed);
    store_text(h.name, config_.name);
    store_text(h.socket_path, "/none");
    for (std::uint32_t i = 0; i < kSectionCount; ++i) {
      h.sections[i].kind.store(static_cast<std::uint32_t>(plan.sections[i].kind), relaxed);
      h.sections[i].entry_bytes.store(plan.sections[i].entry_bytes, relaxed);
      h.sections[i].offset.store(plan.sections[i].offset, relaxed);
      h.sections[i].entries.store(plan.sections[i].entries, relaxed);
    }
    const std::string text = daemon::config_to_json(config_);
    for (std::size_t i = 0; i < text.size(); ++i) {
      region_.tables().config_text[i].store(static_cast<std::uint8_t>(text[i]), relaxed);
    }
    h.header_crc.store(header_crc(h), relaxed);
  }
  [[nodiscard]] std::uint64_t gauge(Counter c) {
    return region_.tables().counters[static_cast<std::size_t>(c)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] bool clients_free() {
    for (const ClientEntry& e : region_.tables().clients) {
      if (e.state.load(std::memory_order_relaxed) != static_cast<std::uint32_t>(ClientState::free))
        return false;
    }
    return true;
  }
  void halt() {
    if (!thread_.joinable()) return;
    coordinator_->stop(0);
    thread_.join();
    if (storage_) storage_->stop();
    transfers_.reset();  // before the coordinator that its threads report to
  }

  daemon::Config config_;
  test::MemoryRegion region_;
  Mapping pool_;
  std::array<NumaNode, kTpSize> rank_nodes_;
  std::optional<daemon::Coordinator> coordinator_;
  std::optional<daemon::TransferEngine> transfers_;
  std::optional<daemon::StorageTier> storage_;  // posts to the coordinator until it is stopped
  std::thread thread_;
  std::array<HostileClient, kClients> clients_;
};

}  // namespace hicache::fuzz
