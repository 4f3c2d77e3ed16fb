#include "daemon/storage/storage_tier.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "daemon/storage/backend_factory.hpp"
#include "daemon/storage/circuit_breaker.hpp"
#include "daemon/storage/fair_queue.hpp"
#include "daemon/storage/operation_meter.hpp"
#include "shm/clock.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kProbeBit = 1ull << 63;  // in the id: the tier's own request
constexpr std::uint64_t kNever = ~0ull;
constexpr std::uint64_t kMs = 1'000'000;

}  // namespace

// Two threads: the dispatcher sends what is queued and watches the clock, the steward makes, ends and clears
// backends, which may take long. Backends report on threads of their own.
//
// `mutex_` guards all state and is never held while a backend is called, because a backend may report from
// inside a call, and may hold locks of its own when it reports. Who calls a backend holds a reference; a
// detach waits until its own is the last, so that the backend ends on the steward's thread.
class StorageTier::Impl : public StorageSink {
 public:
  Impl(const Config::Storage& config, const StoragePool& pool, const ShardChecksums* checksums,
       std::function<void()> notify)
      : pool_(pool), checksums_(checksums), notify_(std::move(notify)), config_(config) {
    breaker_ = new_breaker();
    dispatcher_ = std::thread([this] { dispatch_until_stopped(); });
    steward_ = std::thread([this] { serve_errands(); });
  }
  ~Impl() override { stop(); }

  [[nodiscard]] StorageState state() const { return state_.load(std::memory_order_relaxed); }

  void submit(StorageRequest request) {
    assert(!request.hashes.empty() && request.hashes.size() <= kStorageBatchPages);
    const std::lock_guard lock(mutex_);
    if (backend_ == nullptr || !breaker_.closed() || stopping_) {
      ++(breaker_.closed() ? refused_detached_ : refused_suspended_);
      return end_unsent(request, Status::closed);
    }
    auto& queue = request.operation == StorageOperation::put ? writes_ : reads_;
    const std::uint32_t owner = request.owner;
    queue.push(owner, std::move(request));
    wake_.notify_one();
  }

  void cancel(StorageBatchId id) {
    const std::lock_guard lock(mutex_);
    const auto mine = [&](const StorageRequest& request) { return request.id == id; };
    const auto end = [&](StorageRequest request) {
      ++cancelled_;
      end_unsent(request, Status::closed);
    };
    reads_.extract(mine, end);
    writes_.extract(mine, end);
    if (!in_flight_.contains(id.value)) return;
    cancels_.push_back(id);
    wake_.notify_one();
  }

  void take_events(std::vector<StorageEvent>& out) {
    const std::lock_guard lock(mutex_);
    out.insert(out.end(), events_.begin(), events_.end());
    events_.clear();
  }

  Outcome attach(const std::string& name, const Settings& settings) {
    {
      const std::lock_guard lock(mutex_);
      if (backend_ != nullptr) {
        return Error{Status::exists,
                     "storage backend '" + std::string(backend_->name()) + "' is attached: detach it first",
                     0};
      }
    }
    auto made = make_storage_backend(name, settings, pool_, *this);
    if (!made) return made.error();
    const StorageHealth health = (*made)->health();
    const std::lock_guard lock(mutex_);
    backend_ = std::move(*made);
    breaker_ = new_breaker();
    publish_state();
    spdlog::info("storage backend '{}' attached: {}", name, health.text);
    return success();
  }

  Outcome detach() {
    std::shared_ptr<StorageBackend> gone;
    {
      const std::lock_guard lock(mutex_);
      if (backend_ == nullptr) return nothing_attached();
      gone = std::exchange(backend_, nullptr);
      end_queued();
      publish_state();
    }
    while (gone.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::string name(gone->name());
    gone.reset();  // tells of everything in flight first
    spdlog::info("storage backend '{}' detached", name);
    return success();
  }

  Outcome clear() {
    const auto backend = attached();
    return backend != nullptr ? backend->clear() : Outcome(nothing_attached());
  }

  void later(std::function<Outcome()> errand, Answer answer) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      errands_.push_back({std::move(errand), std::move(answer)});
    }
    errand_waits_.notify_one();
  }

  void reload(const Config::Storage& config) {
    const std::lock_guard lock(mutex_);
    const bool other_breaker = config.breaker_failures != config_.breaker_failures ||
                               config.breaker_suspend_ms != config_.breaker_suspend_ms;
    config_ = config;
    if (other_breaker) breaker_ = new_breaker();
    publish_state();
    wake_.notify_one();
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      stopping_ = true;
    }
    wake_.notify_one();
    errand_waits_.notify_one();
    dispatcher_.join();
    steward_.join();
    static_cast<void>(detach());
    const std::lock_guard lock(mutex_);
    end_queued();
  }

  [[nodiscard]] nlohmann::json status() const;

  // StorageSink, on threads of the backend.
  void page(StorageBatchId id, std::uint32_t page, Status outcome) override {
    if (outcome == Status::ok && checksums_ != nullptr && checksums_->recording()) {
      record_checksums(fetched(id, page));
    }
    const std::lock_guard lock(mutex_);
    InFlight* batch = open_page(id, page);
    if (batch == nullptr) {
      return complain("told of page " + std::to_string(page) + " of a batch that has no such open page");
    }
    tell_page(*batch, page, outcome);
  }
  void ended(StorageBatchId id) override {
    const std::lock_guard lock(mutex_);
    const auto found = in_flight_.find(id.value);
    if (found == in_flight_.end()) return complain("ended a batch that is not in flight");
    InFlight& batch = found->second;
    for (std::uint32_t page = 0; page < batch.batch.pages(); ++page) {
      if (batch.told[page]) continue;
      complain("ended a batch without telling how all its pages ended");
      tell_page(batch, page, Status::internal);
    }
    const std::uint64_t now = monotonic_ns();
    meter(batch.batch.operation).end(now, batch.sent_ns);
    if (id.value & kProbeBit) {
      // Late or not: it has come back.
      probe_id_ = 0;
      if (batch.failed_pages == 0) {
        breaker_.probe_succeeded();
        spdlog::info("storage answers again");
      } else if (!batch.late) {
        breaker_.probe_failed(now);
      }
    } else {
      if (!batch.late) --running_of(batch.batch.operation);
      if (batch.failed_pages == batch.batch.pages()) {
        if (!batch.late) count_failure(now);
      } else if (!batch.late && batch.sent_pages > 0 && batch.batch.operation != StorageOperation::exists) {
        // Bytes have moved. What there is a backend may know by heart while its disk does not answer.
        breaker_.succeeded();
      }
      const std::uint64_t us = batch.sent_pages == 0 ? 0 : (now - batch.sent_ns) / 1000;
      push_event({id, StorageEvent::Kind::ended, 0, Status::ok, us});
    }
    in_flight_.erase(found);
    publish_state();
    wake_.notify_one();
  }

 private:
  struct InFlight {
    StorageBatch batch;
    std::vector<bool> told;        // by page
    std::uint32_t sent_pages = 0;  // the leading ones: the backend does not know of more
    std::uint32_t failed_pages = 0;
    std::uint64_t sent_ns = 0;
    std::uint64_t deadline_ns = 0;
    bool late = false;
  };
  struct Errand {
    std::function<Outcome()> run;
    Answer answer;
  };

  [[nodiscard]] std::shared_ptr<StorageBackend> attached() const {
    const std::lock_guard lock(mutex_);
    return backend_;
  }
  static Error nothing_attached() { return Error{Status::not_found, "no storage backend is attached", 0}; }
  [[nodiscard]] CircuitBreaker new_breaker() const {
    return {config_.breaker_failures, config_.breaker_suspend_ms * kMs};
  }
  // A backend that breaks its contract is a bug worth a line, not the daemon's end.
  static void complain(const std::string& what) { spdlog::error("the storage backend {}", what); }

  // --- with mutex_ held

  void publish_state() {
    const StorageState now = backend_ == nullptr ? StorageState::detached
                             : breaker_.closed() ? StorageState::attached
                                                 : StorageState::suspended;
    state_.store(now, std::memory_order_relaxed);
  }
  OperationMeter& meter(StorageOperation operation) { return meters_[static_cast<std::size_t>(operation)]; }
  std::uint32_t& running_of(StorageOperation operation) {
    return operation == StorageOperation::put ? writes_running_ : reads_running_;
  }
  void push_event(const StorageEvent& event) {
    const bool first = events_.empty();
    events_.push_back(event);
    if (first) notify_();
  }
  void end_unsent(const StorageRequest& request, Status status) {
    for (std::uint32_t page = 0; page < request.hashes.size(); ++page) {
      push_event({request.id, StorageEvent::Kind::page, page, status, 0});
    }
    push_event({request.id, StorageEvent::Kind::ended, 0, Status::ok, 0});
  }
  void end_queued() {
    const auto all = [](const StorageRequest&) { return true; };
    const auto end = [&](const StorageRequest& request) { end_unsent(request, Status::closed); };
    reads_.extract(all, end);
    writes_.extract(all, end);
  }
  void count_failure(std::uint64_t now) {
    if (!breaker_.failed(now)) return;
    spdlog::warn("storage suspended for {} ms: {} batches in a row failed or timed out",
                 config_.breaker_suspend_ms, breaker_.failures());
    end_queued();
    publish_state();
  }
  void tell_page(InFlight& batch, std::uint32_t page, Status outcome) {
    batch.told[page] = true;
    if (outcome == Status::timed_out || outcome == Status::system_error) ++batch.failed_pages;
    const StorageBatch& b = batch.batch;
    const bool good = outcome == Status::ok;
    const NamespaceSpec& spec = b.ns->spec;
    const std::uint64_t bytes =
        b.operation == StorageOperation::exists ? 0 : spec.shard_bytes() * spec.shards();
    meter(b.operation).add_page(good, bytes);
    if (b.id.value & kProbeBit) return;
    push_event({b.id, StorageEvent::Kind::page, page, outcome, 0});
  }
  InFlight* open_page(StorageBatchId id, std::uint32_t page) {
    const auto found = in_flight_.find(id.value);
    if (found == in_flight_.end()) return nullptr;
    InFlight& batch = found->second;
    return page < batch.sent_pages && !batch.told[page] ? &batch : nullptr;
  }

  // --- checksums, without mutex_: summing up a page takes time

  struct FetchedPage {
    std::shared_ptr<const StorageNamespace> ns;  // null: no page that has been read
    std::vector<PoolExtent> buffers;
  };
  FetchedPage fetched(StorageBatchId id, std::uint32_t page) {
    const std::lock_guard lock(mutex_);
    const InFlight* batch = open_page(id, page);
    if (batch == nullptr || batch->batch.operation != StorageOperation::get) return {};
    const auto buffers = batch->batch.buffers_of(page);
    return {batch->batch.ns, {buffers.begin(), buffers.end()}};
  }
  void record_checksums(const FetchedPage& page) const {
    for (const PoolExtent& buffer : page.buffers) {
      checksums_->record_fetched(buffer.offset, page.ns->spec.shard_bytes());
    }
  }
  // How many leading pages of a batch are what was written. Nothing behind a spoilt page is kept in storage:
  // it could only be found through it.
  [[nodiscard]] std::uint32_t fit_pages(const StorageBatch& batch) const {
    const auto pages = static_cast<std::uint32_t>(batch.pages());
    if (batch.operation != StorageOperation::put || checksums_ == nullptr) return pages;
    for (std::uint32_t page = 0; page < pages; ++page) {
      for (const PoolExtent& buffer : batch.buffers_of(page)) {
        if (!checksums_->fit_for_storage(buffer.offset, batch.ns->spec.shard_bytes())) return page;
      }
    }
    return pages;
  }

  // --- the dispatcher's thread

  void dispatch_until_stopped() {
    for (;;) {
      try {
        if (!dispatch_once()) return;
      } catch (const std::exception& e) {
        spdlog::error("the storage dispatcher goes on after: {}", e.what());
      }
    }
  }

  // One turn: sleep until there is something to do, then do all of it. False when the tier stops.
  bool dispatch_once() {
    std::unique_lock lock(mutex_);
    const std::uint64_t now = monotonic_ns();
    const std::uint64_t next = expire(now);
    if (stopping_) return false;
    if (!sendable(now) && cancels_.empty()) {
      if (next == kNever) {
        wake_.wait(lock);
      } else if (next > now) {
        wake_.wait_for(lock, std::chrono::nanoseconds(next - now));
      }
      return true;
    }
    const auto backend = backend_;
    const auto cancels = std::exchange(cancels_, {});
    if (backend == nullptr) return true;
    std::vector<StorageBatch> batches;
    while (auto batch = next_batch(now)) batches.push_back(std::move(*batch));
    lock.unlock();
    for (const StorageBatchId id : cancels) backend->cancel(id);
    for (StorageBatch& batch : batches) {
      const StorageBatchId id = batch.id;
      if (const std::uint32_t fit = fit_pages(batch); fit < batch.pages()) {
        withhold(id, fit);
        if (fit == 0) {
          ended(id);
          continue;
        }
        const std::size_t shards = batch.buffers.size() / batch.pages();
        batch.hashes.resize(fit);
        batch.buffers.resize(fit * shards);
      }
      try {
        backend->submit(std::move(batch));
      } catch (const std::exception& e) {
        complain(std::string("threw when it was given a batch: ") + e.what());
        disown(id);
      }
    }
    return true;
  }

  // Ends the pages of a batch from `first` on, which is spoilt: the backend never hears of them.
  void withhold(StorageBatchId id, std::uint32_t first) {
    const std::lock_guard lock(mutex_);
    InFlight& batch = in_flight_.at(id.value);
    batch.sent_pages = first;
    for (std::uint32_t page = first; page < batch.batch.pages(); ++page) {
      tell_page(batch, page, page == first ? Status::corrupt : Status::dropped);
    }
  }

  // Ends a batch that the backend did not take.
  void disown(StorageBatchId id) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = in_flight_.find(id.value);
      if (found == in_flight_.end()) return;
      InFlight& batch = found->second;
      for (std::uint32_t page = 0; page < batch.batch.pages(); ++page) {
        if (!batch.told[page]) tell_page(batch, page, Status::system_error);
      }
    }
    ended(id);
  }

  // Counts what has not ended by its deadline as timed out. When to look again.
  std::uint64_t expire(std::uint64_t now) {
    std::uint64_t next = kNever;
    for (auto& [id, batch] : in_flight_) {
      if (batch.late) continue;
      if (batch.deadline_ns > now) {
        next = std::min(next, batch.deadline_ns);
        continue;
      }
      batch.late = true;
      if (id & kProbeBit) {
        breaker_.probe_failed(now);
        continue;
      }
      // It keeps its buffers, not its place: others may be sent.
      --running_of(batch.batch.operation);
      push_event({StorageBatchId{id}, StorageEvent::Kind::late, 0, Status::timed_out, 0});
      count_failure(now);
    }
    if (breaker_.state() == CircuitBreaker::State::open && backend_ != nullptr && probe_id_ == 0) {
      next = std::min(next, breaker_.probe_at_ns());
    }
    return next;
  }

  [[nodiscard]] bool probe_due(std::uint64_t now) const {
    return breaker_.state() == CircuitBreaker::State::open && probe_id_ == 0 && last_namespace_ != nullptr &&
           now >= breaker_.probe_at_ns();
  }
  [[nodiscard]] bool read_may_go() const { return !reads_.empty() && reads_running_ < config_.read_batches; }
  [[nodiscard]] bool write_may_go() const {
    return !writes_.empty() && writes_running_ < config_.write_batches;
  }
  [[nodiscard]] bool sendable(std::uint64_t now) const {
    if (backend_ == nullptr) return false;
    return breaker_.closed() ? read_may_go() || write_may_go() : probe_due(now);
  }

  // What goes to the backend next: reads before writes.
  std::optional<StorageBatch> next_batch(std::uint64_t now) {
    StorageBatch batch;
    if (breaker_.closed() && (read_may_go() || write_may_go())) {
      StorageRequest request = read_may_go() ? reads_.pop() : writes_.pop();
      ++running_of(request.operation);
      last_namespace_ = request.ns;
      batch = StorageBatch{request.id,
                           request.operation,
                           std::move(request.ns),
                           std::move(request.hashes),
                           std::move(request.buffers),
                           0};
    } else if (!breaker_.closed() && probe_due(now)) {
      breaker_.probe_sent();
      probe_id_ = kProbeBit | ++probes_;
      // Whether the page is there is of no interest.
      batch = StorageBatch{
          StorageBatchId{probe_id_}, StorageOperation::exists, last_namespace_, {PrefixHash{}}, {}, 0};
    } else {
      return std::nullopt;
    }
    batch.deadline_ns = now + config_.batch_deadline_ms * kMs;
    meter(batch.operation).begin(now);
    InFlight flight;
    flight.batch = batch;
    flight.told.resize(batch.pages());
    flight.sent_pages = static_cast<std::uint32_t>(batch.pages());
    flight.sent_ns = now;
    flight.deadline_ns = batch.deadline_ns;
    in_flight_.emplace(batch.id.value, std::move(flight));
    return batch;
  }

  // --- the steward's thread

  void serve_errands() {
    for (;;) {
      std::unique_lock lock(mutex_);
      errand_waits_.wait(lock, [&] { return stopping_ || !errands_.empty(); });
      if (stopping_) return;
      Errand errand = std::move(errands_.front());
      errands_.pop_front();
      lock.unlock();
      try {
        errand.answer(errand.run());
      } catch (const std::exception& e) {
        spdlog::error("a storage command failed: {}", e.what());
        errand.answer(Error{Status::internal, std::string("the command failed: ") + e.what(), 0});
      }
    }
  }

  const StoragePool pool_;
  const ShardChecksums* const checksums_;
  const std::function<void()> notify_;
  std::atomic<StorageState> state_{StorageState::detached};  // a hint: submit looks under the mutex

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable errand_waits_;
  bool stopping_ = false;
  Config::Storage config_;
  std::shared_ptr<StorageBackend> backend_;
  CircuitBreaker breaker_;
  FairQueue<StorageRequest> reads_;
  FairQueue<StorageRequest> writes_;
  std::unordered_map<std::uint64_t, InFlight> in_flight_;  // by id
  std::uint32_t reads_running_ = 0;                        // at the backend and not late
  std::uint32_t writes_running_ = 0;
  std::vector<StorageBatchId> cancels_;
  std::vector<StorageEvent> events_;
  std::shared_ptr<const StorageNamespace> last_namespace_;  // for probes
  std::uint64_t probe_id_ = 0;                              // 0 = none at the backend
  std::uint64_t probes_ = 0;
  std::array<OperationMeter, 3> meters_;
  std::uint64_t cancelled_ = 0;
  std::uint64_t refused_detached_ = 0;
  std::uint64_t refused_suspended_ = 0;
  std::deque<Errand> errands_;
  std::thread dispatcher_;
  std::thread steward_;
};

nlohmann::json StorageTier::Impl::status() const {
  using nlohmann::json;
  std::unique_lock lock(mutex_);
  const std::uint64_t now = monotonic_ns();
  json operations = json::object();
  for (const auto operation : {StorageOperation::exists, StorageOperation::get, StorageOperation::put}) {
    const OperationMeter& m = meters_[static_cast<std::size_t>(operation)];
    operations[std::string(to_string(operation))] = {
        {"batches", m.batches()},       {"in_flight", m.running()}, {"pages", m.pages()},
        {"good_pages", m.good_pages()}, {"bytes", m.bytes()},       {"mean_us", m.mean_us()},
        {"p99_us", m.p99_us()},         {"max_us", m.max_us()},     {"gb_per_second", m.gb_per_second(now)}};
  }
  std::uint64_t late = 0;
  for (const auto& [id, batch] : in_flight_) late += batch.late ? 1 : 0;
  json answer = {{"state", to_string(state())},
                 {"read_queue", reads_.size()},
                 {"write_queue", writes_.size()},
                 {"late_batches", late},
                 {"cancelled", cancelled_},
                 {"refused_detached", refused_detached_},
                 {"refused_suspended", refused_suspended_},
                 {"breaker",
                  {{"state", to_string(breaker_.state())},
                   {"failures_in_a_row", breaker_.failures()},
                   {"openings", breaker_.openings()},
                   {"probes", probes_}}},
                 {"operations", operations}};
  const auto backend = backend_;
  lock.unlock();
  if (backend == nullptr) return answer;
  const StorageHealth health = backend->health();
  const StorageStats stats = backend->stats();
  answer["backend"] = {{"name", backend->name()},
                       {"usable", health.usable},
                       {"health", health.text},
                       {"pages", stats.pages},
                       {"bytes", stats.bytes},
                       {"capacity_bytes", stats.capacity_bytes},
                       {"evicted_pages", stats.evicted_pages},
                       {"corrupt_pages", stats.corrupt_pages},
                       {"failed_operations", stats.failed_operations}};
  return answer;
}

StorageTier::StorageTier(const Config::Storage& config, const StoragePool& pool,
                         const ShardChecksums* checksums, std::function<void()> notify)
    : impl_(std::make_unique<Impl>(config, pool, checksums, std::move(notify))) {}
StorageTier::~StorageTier() = default;
StorageState StorageTier::state() const {
  return impl_->state();
}
void StorageTier::submit(StorageRequest request) {
  impl_->submit(std::move(request));
}
void StorageTier::cancel(StorageBatchId id) {
  impl_->cancel(id);
}
void StorageTier::take_events(std::vector<StorageEvent>& out) {
  impl_->take_events(out);
}
Outcome StorageTier::attach(const std::string& name, const Settings& settings) {
  return impl_->attach(name, settings);
}
void StorageTier::attach_later(std::string name, Settings settings, Answer answer) {
  impl_->later([this, name = std::move(name),
                settings = std::move(settings)] { return impl_->attach(name, settings); },
               std::move(answer));
}
void StorageTier::detach_later(Answer answer) {
  impl_->later([this] { return impl_->detach(); }, std::move(answer));
}
void StorageTier::clear_later(Answer answer) {
  impl_->later([this] { return impl_->clear(); }, std::move(answer));
}
void StorageTier::reload(const Config::Storage& config) {
  impl_->reload(config);
}
void StorageTier::stop() {
  impl_->stop();
}
nlohmann::json StorageTier::status() const {
  return impl_->status();
}

}  // namespace hicache::daemon
