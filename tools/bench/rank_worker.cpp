#include "tools/bench/rank_worker.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <memory>

#include "libhicache/include/hicache/client.hpp"
#include "shm/clock.hpp"
#include "shm/waiting.hpp"
#include "tools/bench/rank_memory.hpp"
#include "tools/bench/replay_rank.hpp"
#include "tools/bench/visible_gpu.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint32_t kWaitMs = 200;
constexpr std::uint32_t kSyncMs = 60'000;
constexpr std::uint32_t kTurnYieldUs = 30;  // a peer that is nearly done is met without a sleep

// A request in work. What it waits for is `step`; the operation it posts next is decided there.
enum class Step { idle, reserve, prefetch, load, write, release };

struct Lane {
  Step step = Step::idle;
  std::size_t request = 0;
  LeaseId lease;
  std::uint32_t hits = 0;
  std::uint32_t probed = 0;
  Ticket ticket;  // none while the step's operation has not been accepted
  std::uint64_t request_start_ns = 0;
  std::uint64_t posted_ns = 0;
};

// Time during which at least one operation of a kind was in flight.
class BusyClock {
 public:
  void begin() {
    if (running_++ == 0) since_ = monotonic_ns();
  }
  void end() {
    if (--running_ == 0) total_ += monotonic_ns() - since_;
  }
  [[nodiscard]] std::uint64_t total_ns() const { return total_; }

 private:
  std::uint32_t running_ = 0;
  std::uint64_t since_ = 0;
  std::uint64_t total_ = 0;
};

class RankWorker : public ReplayRank {
 public:
  RankWorker(const ReplayPlan& plan, const GroupPlan& group, std::uint32_t tp_rank, const Workload& workload,
             Board& board)
      : ReplayRank(plan, group, tp_rank, workload, board),
        lanes_(plan.concurrency),
        ended_(workload.size(), false) {}

  // The memory outlives the session that registered it.
  ~RankWorker() { session_.reset(); }
  RankWorker(const RankWorker&) = delete;
  RankWorker& operator=(const RankWorker&) = delete;

  Outcome run() {
    if (Outcome attached = attach(); !attached) return attached;
    if (!board_.wait_for_start(mine_)) return success();
    // A rank that leaves ends its group: nobody goes before all have finished.
    while (!board_.aborted() && group_done() < workload_.size()) {
      start_requests();
      if (Outcome turn = work_turn(); !turn) return turn;
    }
    mine_.write_busy_ns = write_clock_.total_ns();
    mine_.load_busy_ns = load_clock_.total_ns();
    session_->close();
    return success();
  }

 private:
  Outcome attach() {
    if (Outcome attached = attach_session(); !attached) return attached;
    if (plan_.device == DeviceKind::cuda && plan_.gpus > 1) see_only_gpu(tp_rank_ % plan_.gpus);
    // Each lane has pages to write from and others to load to.
    auto memory = RankMemory::create(plan_.device, group_.spec, lane_pages() * plan_.concurrency);
    if (!memory) return memory.error();
    memory_ = std::move(*memory);
    return memory_->register_with(*session_);
  }

  [[nodiscard]] std::uint32_t lane_pages() const { return 2 * workload_.longest(); }
  [[nodiscard]] std::uint32_t lane_base(const Lane& lane) const {
    return static_cast<std::uint32_t>(&lane - lanes_.data()) * lane_pages();
  }
  [[nodiscard]] DevicePage write_page(const Lane& lane, std::uint32_t page) const {
    return DevicePage{lane_base(lane) + page};
  }
  // Pages come back to a place of their own that moves from request to request, so that a load that did
  // nothing or went where the last one went is seen.
  [[nodiscard]] DevicePage load_page(const Lane& lane, std::uint32_t page) const {
    const auto turn = static_cast<std::uint32_t>(lane.request % workload_.longest());
    return DevicePage{lane_base(lane) + workload_.longest() + (page + turn) % workload_.longest()};
  }

  // Requests that may begin: the slowest rank has ended all up to `concurrency` before it.
  void start_requests() {
    while (next_ < workload_.size() && group_done() + plan_.concurrency > next_) {
      Lane& lane = lanes_[next_ % lanes_.size()];
      lane = Lane{};
      lane.request = next_++;
      lane.request_start_ns = monotonic_ns();
      const auto keys = workload_.keys(lane.request);
      lane.probed = session_->probe(keys).leading;
      latency(Timed::probe).record(monotonic_ns() - lane.request_start_ns);
      begin_step(lane, Step::reserve);
    }
  }

  // Posts what was refused for lack of room, then takes completions or sleeps until the group has moved.
  Outcome work_turn() {
    std::size_t refused = refused_.size();
    while (refused-- > 0) {
      Lane* lane = refused_.front();
      refused_.pop_front();
      if (Outcome posted = post(*lane); !posted) return posted;
    }
    bool worked = false;
    while (auto result = session_->poll()) {
      worked = true;
      if (Outcome taken = take(*result); !taken) return taken;
    }
    if (worked) return success();
    if (open_ > 0) {
      const auto result = session_->wait_any(kWaitMs);
      if (result) return take(*result);
      if (result.status() == Status::timed_out) return success();
      return result.error();
    }
    if (!refused_.empty())
      return Error{Status::again, "the session has no room although nothing is in flight", 0};
    return wait_for_group();
  }

  Outcome wait_for_group() {
    WaitLadder ladder(WaitPolicy{0, kTurnYieldUs, 0});
    const auto may_go = [&] {
      const std::uint64_t done = group_done();
      return board_.aborted() || done == workload_.size() ||
             (next_ < workload_.size() && done + plan_.concurrency > next_);
    };
    while (!may_go() && ladder.step()) {
    }
    const std::uint32_t seen = board_.turn.load(std::memory_order_seq_cst);  // SYNC board-turn
    if (!may_go()) board_.sleep(seen, kWaitMs);
    const Status state = session_->state();
    if (state != Status::ok) return Error{state, "the session ended", 0};
    return success();
  }

  void begin_step(Lane& lane, Step step) {
    lane.step = step;
    lane.ticket = Ticket{};
    prepare(lane);
    refused_.push_back(&lane);  // posted in the next turn
  }

  // What the device does before the operation is posted.
  void prepare(Lane& lane) {
    const auto keys = workload_.keys(lane.request);
    keyed_.clear();
    Outcome done = success();
    if (lane.step == Step::load) {
      for (std::uint32_t page = 0; page < lane.hits; ++page)
        keyed_.push_back({keys[page], load_page(lane, page)});
      done = memory_->poison(keyed_);
    }
    if (lane.step == Step::write) {
      for (std::uint32_t page = lane.hits; page < keys.size(); ++page)
        keyed_.push_back({keys[page], write_page(lane, page)});
      done = memory_->fill(keyed_, shard_);
    }
    if (!done) device_failed(done.error());
  }
  void device_failed(const Error& error) {
    add(mine_.counts.failed_operations, 1);
    mine_.fail(error.message);
  }

  Outcome post(Lane& lane) {
    const auto keys = workload_.keys(lane.request);
    Result<Ticket> ticket = Ticket{};
    switch (lane.step) {
      case Step::idle:
        return success();
      case Step::reserve:
        ticket = session_->reserve(lane.request + 1, keys);
        break;
      case Step::prefetch:
        ticket =
            session_->prefetch(lane.lease, lane.hits, static_cast<std::uint32_t>(keys.size()) - lane.hits);
        break;
      case Step::load: {
        pages_.clear();
        for (std::uint32_t page = 0; page < lane.hits; ++page) pages_.push_back(load_page(lane, page));
        ticket = session_->load(lane.lease, 0, pages_);
        break;
      }
      case Step::write: {
        pages_.clear();
        for (std::uint32_t page = lane.hits; page < keys.size(); ++page)
          pages_.push_back(write_page(lane, page));
        ticket = session_->write(lane.lease, lane.hits, pages_);
        break;
      }
      case Step::release:
        ticket = session_->release(lane.lease);
        break;
    }
    if (!ticket) {
      if (ticket.status() != Status::again) return ticket.error();
      refused_.push_back(&lane);
      return success();
    }
    lane.ticket = *ticket;
    lane.posted_ns = monotonic_ns();
    ++open_;
    if (lane.step == Step::load) load_clock_.begin();
    if (lane.step == Step::write) write_clock_.begin();
    return success();
  }

  Outcome take(const OperationResult& result) {
    if (result.pages_returned) return success();
    const auto at = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
      return lane.step != Step::idle && lane.ticket == result.ticket;
    });
    if (at == lanes_.end())
      return Error{Status::corrupt, "a completion for an operation that was never posted", 0};
    Lane& lane = *at;
    --open_;
    lane.ticket = Ticket{};
    record(lane, result);
    if (result.status == Status::daemon_lost || result.status == Status::peer_lost) {
      return Error{result.status,
                   fmt::format("request {}: {} ended with {}", lane.request, to_string(result.opcode),
                               to_string(result.status)),
                   0};
    }
    const bool failed = result.status != Status::ok;
    if (failed) {
      add(mine_.counts.failed_operations, 1);
      mine_.fail(fmt::format("request {}: {} ended with {}", lane.request, to_string(result.opcode),
                             to_string(result.status)));
      // Its device pages may still be written to: the run's outcome is settled, so it ends here.
      if (result.pages_busy) return Error{result.status, "an operation ended while its copies still ran", 0};
    }
    advance(lane, result, failed);
    return success();
  }

  void record(const Lane& lane, const OperationResult& result) {
    const std::uint64_t ns = monotonic_ns() - lane.posted_ns;
    auto timed = Timed::release;
    switch (lane.step) {
      case Step::reserve:
        timed = Timed::reserve;
        break;
      case Step::prefetch:
        timed = Timed::prefetch;
        break;
      case Step::load:
        timed = Timed::load;
        load_clock_.end();
        add(mine_.counts.bytes_loaded, result.bytes);
        break;
      case Step::write:
        timed = Timed::write;
        write_clock_.end();
        add(mine_.counts.bytes_written, result.bytes);
        break;
      case Step::release:
      case Step::idle:
        break;
    }
    latency(timed).record(ns);
  }

  void advance(Lane& lane, const OperationResult& result, bool failed) {
    const auto pages = static_cast<std::uint32_t>(workload_.keys(lane.request).size());
    switch (lane.step) {
      case Step::reserve:
        if (failed) return end_request(lane);
        lane.lease = result.lease;
        lane.hits = result.hits;
        add(mine_.counts.hits, lane.hits);
        if (lane.hits == pages) add(mine_.counts.full_hits, 1);
        if (lane.hits != lane.probed) add(mine_.counts.probe_differences, 1);
        if (plan_.storage && lane.hits < pages) return begin_step(lane, Step::prefetch);
        return begin_step(lane, lane.hits > 0 ? Step::load : Step::write);
      case Step::prefetch: {
        // One that failed has brought nothing that counts: what is missing is written.
        const std::uint32_t came = failed ? 0 : result.present + result.written;
        lane.hits += came;
        add(mine_.counts.hits, came);
        add(mine_.counts.fetched, came);
        return begin_step(lane, lane.hits > 0 ? Step::load : Step::write);
      }
      case Step::load:
        if (!failed) verify(lane);
        return begin_step(lane, lane.hits < pages ? Step::write : Step::release);
      case Step::write:
        add(mine_.counts.written, result.written);
        add(mine_.counts.present, result.present);
        add(mine_.counts.filling, result.filling);
        add(mine_.counts.dropped, result.dropped);
        return begin_step(lane, Step::release);
      case Step::release:
        if (plan_.storage_sync && tp_rank_ == 0) await_backup();
        return end_request(lane);
      case Step::idle:
        return;
    }
  }

  // One rank for all: the others begin no request before this one has ended its own.
  void await_backup() {
    const auto answer = control(plan_.socket_path, {"storage", "sync"}, kSyncMs);
    if (answer) return;
    add(mine_.counts.failed_operations, 1);
    mine_.fail("waiting for the backup: " + answer.error().message);
  }

  void verify(const Lane& lane) {
    const auto keys = workload_.keys(lane.request);
    keyed_.clear();
    for (std::uint32_t page = 0; page < lane.hits; ++page)
      keyed_.push_back({keys[page], load_page(lane, page)});
    const auto found = memory_->verify(keyed_, shard_);
    if (!found) return device_failed(found.error());
    add(mine_.counts.verified_words, found->words);
    add(mine_.counts.verify_errors, found->wrong);
    if (found->wrong > 0) {
      mine_.fail(
          fmt::format("request {}: {} words are wrong, one at {}", lane.request, found->wrong, found->first));
    }
  }

  void end_request(Lane& lane) {
    lane.step = Step::idle;
    add(mine_.counts.requests, 1);
    add(mine_.counts.pages, workload_.keys(lane.request).size());
    latency(Timed::request).record(monotonic_ns() - lane.request_start_ns);
    ended_[lane.request] = true;
    const std::size_t before = done_;
    while (done_ < ended_.size() && ended_[done_]) ++done_;
    if (done_ == before) return;
    mine_.done.store(done_, std::memory_order_release);  // SYNC board-done
    board_.announce();
  }

  std::unique_ptr<RankMemory> memory_;
  std::vector<Lane> lanes_;
  std::deque<Lane*> refused_;      // lanes whose operation has yet to be accepted
  std::vector<DevicePage> pages_;  // scratch
  std::vector<KeyedPage> keyed_;   // scratch
  std::vector<bool> ended_;        // by request
  std::size_t next_ = 0;           // request to start next
  std::size_t done_ = 0;           // requests before this one have all ended
  std::uint32_t open_ = 0;
  BusyClock write_clock_;
  BusyClock load_clock_;
};

}  // namespace

int run_rank(const ReplayPlan& plan, const GroupPlan& group, std::uint32_t tp_rank, const Workload& workload,
             Board& board) {
  RankWorker worker(plan, group, tp_rank, workload, board);
  return worker.report(worker.run());
}

}  // namespace hicache::bench
