#include "daemon/storage/redis/worker.hpp"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

#include "daemon/storage/redis/page_steps.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon::redis {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr int kLongestWaitMs = 1'000;
constexpr std::size_t kEventsATurn = 64;
// What a server refused is shown this long at least, also when other pages go well.
constexpr std::uint64_t kProblemShownNs = 1'000 * kNsPerMs;

std::uint64_t sooner(std::uint64_t a, std::uint64_t b) {
  if (a == 0 || b == 0) return a + b;
  return std::min(a, b);
}

}  // namespace

Result<std::unique_ptr<Worker>> Worker::start(Shared& shared) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  UniqueFd event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  epoll_event wish{};
  wish.events = EPOLLIN;
  wish.data.ptr = nullptr;  // the others carry their connection
  if (!epoll.valid() || !event.valid() || ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, event.get(), &wish) != 0) {
    return Error{Status::system_error, std::string("epoll or eventfd: ") + std::strerror(errno), errno};
  }
  std::unique_ptr<Worker> worker(new Worker(shared, std::move(epoll), std::move(event)));
  try {
    worker->thread_ = std::thread([w = worker.get()] { w->run(); });
  } catch (const std::system_error& e) {
    return Error{Status::system_error, std::string("thread: ") + e.what(), e.code().value()};
  }
  return worker;
}

Worker::Worker(Shared& shared, UniqueFd epoll, UniqueFd event)
    : shared_(shared),
      epoll_(std::move(epoll)),
      event_(std::move(event)),
      clear_(shared.settings.key_prefix) {
  for (const Endpoint& endpoint : shared_.settings.endpoints) {
    Node* node = node_at(endpoint);
    for (Member& member : members_) member.seed = member.seed || member.node.get() == node;
  }
  if (shared_.settings.cluster) {
    slots_.assign(kClusterSlots, nullptr);
    map_wanted_ = true;
  }
}

Worker::~Worker() {
  {
    const std::lock_guard lock(inbox_mutex_);
    stop_wanted_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void Worker::submit(std::vector<PageOperationPtr> operations) {
  bool first = false;
  {
    const std::lock_guard lock(inbox_mutex_);
    first = inbox_.empty();
    if (first) {
      inbox_ = std::move(operations);
    } else {
      for (auto& operation : operations) inbox_.push_back(std::move(operation));
    }
  }
  if (first) wake();
}

void Worker::wake() {
  {
    const std::lock_guard lock(inbox_mutex_);
    look_wanted_ = true;
  }
  const std::uint64_t one = 1;
  // Fails only when it is raised already.
  [[maybe_unused]] const auto ignored = ::write(event_.get(), &one, sizeof one);
}

void Worker::clear() {
  {
    const std::lock_guard lock(inbox_mutex_);
    clear_wanted_ = true;
  }
  wake();
}

WorkerHealth Worker::health() const {
  const std::lock_guard lock(health_mutex_);
  return health_;
}

void Worker::run() {
  for (;;) {
    try {
      turn();
      const bool idle = std::all_of(members_.begin(), members_.end(),
                                    [](const Member& member) { return member.node->idle(); });
      if (stopping_ && idle) return;
    } catch (const std::exception& e) {
      recover(e.what());
    }
  }
}

// Out of memory, most likely. What was in work may be half done: begin again with new connections.
void Worker::recover(const char* what) noexcept {
  try {
    if (log_budget_.take()) spdlog::error("storage: redis: {}; connections are closed", what);
    for (const Member& member : members_) member.node->drop_all("internal error", Status::system_error);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } catch (const std::exception&) {  // the next turn ends here again
  }
}

void Worker::turn() {
  const std::uint64_t now = monotonic_ns();
  prune();
  take_inbox(now);
  if (stopping_ || sweep_wanted_ || (next_sweep_ns_ != 0 && now >= next_sweep_ns_)) {
    sweep_wanted_ = false;
    next_sweep_ns_ = unrouted_.sweep(now, stopping_);
    for (const Member& member : members_) {
      next_sweep_ns_ = sooner(next_sweep_ns_, member.node->queue().sweep(now, stopping_));
    }
  }
  if (map_wanted_ && !stopping_) ask_for_map(now);
  if (clear_.running()) {
    clear_.pump(now);
    if (!clear_.running()) end_clear();
  }

  std::uint64_t until = next_sweep_ns_;
  bool all_down = true;
  for (std::size_t i = 0; i < members_.size(); ++i) {  // pump may add members
    const bool wanted = !stopping_ && (members_[i].seed || members_[i].serves);
    until = sooner(until, members_[i].node->pump(now, wanted));
    all_down = all_down && members_[i].node->down();
  }
  if (all_down) unrouted_.fail_all(Status::system_error);
  if (map_wanted_ && !map_asked_) until = sooner(until, std::max(next_map_ns_, now + kNsPerMs));
  if (health_changed_) publish();
  wait_for_events(until);
}

void Worker::take_inbox(std::uint64_t now) {
  std::vector<PageOperationPtr> operations;
  bool clear_wanted = false;
  {
    const std::lock_guard lock(inbox_mutex_);
    operations = std::exchange(inbox_, {});
    clear_wanted = std::exchange(clear_wanted_, false);
    sweep_wanted_ = std::exchange(look_wanted_, false) || sweep_wanted_;
    stopping_ = stop_wanted_;
  }
  const bool clearing = shared_.clearing.load(std::memory_order_relaxed);
  for (auto& operation : operations) {
    if (stopping_) {
      operation->finish(Status::closed);
    } else if (clearing || operation->identity().record_bytes() > kMaxValueBytes) {
      operation->finish(operation->kind() == StorageOperation::put ? Status::dropped : Status::not_found);
    } else {
      place(std::move(operation));
    }
  }
  if (!clear_wanted) return;
  std::vector<Node*> servers;
  for (const Member& member : members_) {
    if (!shared_.settings.cluster || member.serves) servers.push_back(member.node.get());
  }
  clear_.start(std::move(servers), now);
  if (stopping_) clear_.stop("the backend is being detached");
  if (!clear_.running()) end_clear();
}

void Worker::wait_for_events(std::uint64_t until) {
  int wait_ms = stopping_ ? 10 : kLongestWaitMs;
  if (until != 0) {
    const std::uint64_t now = monotonic_ns();
    const std::uint64_t left_ms = until > now ? (until - now + kNsPerMs - 1) / kNsPerMs : 0;
    wait_ms = static_cast<int>(std::min<std::uint64_t>(left_ms, static_cast<std::uint64_t>(wait_ms)));
  }
  std::array<epoll_event, kEventsATurn> events{};
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms);
  const std::uint64_t now = monotonic_ns();
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.ptr == nullptr) {
      std::uint64_t raised = 0;
      [[maybe_unused]] const auto ignored = ::read(event_.get(), &raised, sizeof raised);
      continue;
    }
    auto& connection = *static_cast<Connection*>(event.data.ptr);
    for (std::size_t m = 0; m < members_.size(); ++m) {  // an answer may add members
      if (!members_[m].node->owns(connection)) continue;
      members_[m].node->on_event(connection, event.events, now);
      break;
    }
  }
}

// Servers that have left the cluster go once nothing is open with them.
void Worker::prune() {
  std::erase_if(members_, [&](Member& member) {
    if (member.seed || member.serves || !member.node->idle() || clear_.running()) return false;
    health_changed_ = true;
    return true;
  });
}

void Worker::answered(Node& node, Connection& connection, Pending pending, Reply reply) {
  switch (pending.kind) {
    case CommandKind::page:
      return page_answered(node, connection, std::move(pending.operation), reply);
    case CommandKind::slots:
      map_asked_ = false;
      return apply_map(node, reply);
    case CommandKind::scan:
    case CommandKind::forget:
      if (!clear_.answered(pending, reply)) {
        node.drop(connection, "the server does not speak RESP2: a wrong answer", Status::corrupt);
      }
      if (shared_.clearing.load(std::memory_order_relaxed) && !clear_.running()) end_clear();
      return;
    case CommandKind::asking:  // should it be refused, the command behind it says so
    case CommandKind::auth:
    case CommandKind::select:
    case CommandKind::ping:
      return;
  }
}

void Worker::page_answered(Node& node, Connection& connection, PageOperationPtr operation,
                           const Reply& reply) {
  if (reply.kind == ReplyKind::error && follow_redirect(node, operation, reply)) return;
  const Step step = operation->step;
  const Verdict verdict = judge(*operation, reply, shared_.settings.ttl_ms > 0);
  if (verdict.then == Verdict::Then::nonsense) {
    operation->finish(Status::system_error);
    return node.drop(connection, "the server does not speak RESP2: a wrong answer", Status::corrupt);
  }
  if (reply.kind != ReplyKind::error) {
    node.works();
    if (!problem_.empty() && step == problem_step_.value_or(step) &&
        monotonic_ns() >= problem_ns_ + kProblemShownNs) {
      problem_.clear();
      health_changed_ = true;
    }
  }
  if (verdict.then == Verdict::Then::finish) {
    if (verdict.outcome == Status::system_error || verdict.outcome == Status::no_space) {
      note_problem(node, step, reply.text);
    }
    if (step == Step::write) HICACHE_CRASH_POINT(redis_write_answered);
    if (step == Step::read && verdict.outcome == Status::ok) HICACHE_CRASH_POINT(redis_read_whole);
    if (step == Step::drop) HICACHE_CRASH_POINT(redis_corrupt_deleted);
    return operation->finish(verdict.outcome);
  }
  operation->step = verdict.next;
  if (verdict.next == Step::drop) HICACHE_CRASH_POINT(redis_corrupt_found);
  if (verdict.next == Step::write) {
    HICACHE_CRASH_POINT(redis_probe_answered);
    // The page's bytes have not begun to go: it can still be called off.
    if (stopping_ || operation->cancelled()) return operation->finish(Status::closed);
    if (operation->expired(monotonic_ns())) return operation->finish(Status::timed_out);
  }
  node.begin(connection, std::move(operation), monotonic_ns());
}

void Worker::lost(Node&, Connection& connection, std::deque<Pending> unanswered, Status outcome) {
  for (Pending& pending : unanswered) {
    if (pending.kind == CommandKind::slots) map_asked_ = false;
    if (pending.operation == nullptr) continue;
    pending.operation->finish(pending.operation->step == Step::drop ? Status::corrupt : outcome);
  }
  if (shared_.settings.cluster) map_wanted_ = true;
  if (clear_.running()) {
    clear_.lost(connection);
    if (!clear_.running()) end_clear();
  }
}

void Worker::changed(Node& node) {
  health_changed_ = true;
  if (!log_budget_.take()) return;
  if (node.problem().empty()) {
    spdlog::info("storage: redis at {}: connected", node.endpoint().text);
  } else {
    spdlog::warn("storage: redis at {}: {}", node.endpoint().text, node.problem());
  }
}

void Worker::distrusted(Node& node, const std::string& why) {
  note_problem(node, std::nullopt, why);
}

void Worker::note_problem(const Node& node, std::optional<Step> step, const std::string& text) {
  std::string problem = node.endpoint().text + ": " + shown_text(text, shared_.settings.password);
  problem_step_ = step;
  problem_ns_ = monotonic_ns();
  if (problem == problem_) return;
  if (log_budget_.take()) spdlog::warn("storage: redis at {}", problem);
  problem_ = std::move(problem);
  health_changed_ = true;
}

void Worker::publish() {
  WorkerHealth health;
  for (const Member& member : members_) {
    if (shared_.settings.cluster && map_known_ && !member.serves) continue;
    ++health.servers;
    if (member.node->up()) ++health.up;
    if (!member.node->problem().empty()) {
      health.problem = member.node->endpoint().text + ": " + member.node->problem();
    }
  }
  if (health.problem.empty()) health.problem = problem_;
  if (health.problem.empty() && !clear_.fault().empty()) health.problem = "clear: " + clear_.fault();
  health_changed_ = false;
  const std::lock_guard lock(health_mutex_);
  health_ = std::move(health);
}

void Worker::end_clear() {
  const std::string fault = shown_text(clear_.fault(), shared_.settings.password);
  if (fault.empty()) {
    spdlog::info("storage: redis: cleared, {} pages deleted", clear_.deleted());
  } else {
    spdlog::warn("storage: redis: not cleared, {} pages deleted: {}", clear_.deleted(), fault);
  }
  health_changed_ = true;
  shared_.clearing.store(false, std::memory_order_relaxed);
}

}  // namespace hicache::daemon::redis
