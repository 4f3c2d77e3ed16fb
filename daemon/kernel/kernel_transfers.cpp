#include "daemon/kernel/kernel_transfers.hpp"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/kernel/kernel_rank.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kIdleNs = 1'000'000'000;
constexpr std::uint64_t kProcessLookNs = 100'000'000;  // where there is no pidfd

// What an epoll event is about: ids start at 1 and are never reused.
constexpr std::uint64_t kBell = 0;
enum class Watched : std::uint64_t { news = 0, process = 1, awaited = 2 };
std::uint64_t tag(std::uint64_t id, Watched what) {
  return id * 4 + static_cast<std::uint64_t>(what);
}

void drain(int eventfd) {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto n = ::read(eventfd, &count, sizeof count);
}

}  // namespace

class KernelTransfers::Impl {
 public:
  explicit Impl(KernelOptions options);
  ~Impl();

  struct Cancel {
    TransferId id;  // 0 = all of the client's
    ClientSlot client;
    Generation generation;
  };
  struct Awaited {
    ProcessIdentity process;
    std::function<void()> gone;
    UniqueFd pidfd;
  };

  void hand_over(KernelJobPtr job);
  void hand_over(const Cancel& cancel);
  void hand_over(Awaited awaited);

 private:
  struct Entry {
    std::uint64_t id = 0;
    KernelRank rank;
  };

  void run();
  void take_in();
  void admit(KernelJobPtr job);
  void apply(const Cancel& cancel);
  void await(Awaited awaited);
  void look_at_awaited();
  void serve(Entry& entry, std::uint64_t now, std::uint64_t& next_ns);
  void rest(std::uint64_t next_ns);
  void finish(KernelJob& job) { options_.sink(job.finish(options_.checksums)); }
  void watch(int fd, std::uint64_t data) const;
  void unwatch(int fd) const { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }
  void ring() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(bell_.get(), &one, sizeof one);
  }

  const KernelOptions options_;
  const KernelRank::Finish finish_;
  UniqueFd epoll_;
  UniqueFd bell_;

  std::mutex mutex_;  // guards what follows; held for moments only
  std::vector<KernelJobPtr> jobs_in_;
  std::vector<Cancel> cancels_in_;
  std::vector<Awaited> awaited_in_;
  bool stopping_ = false;

  // The thread's own. A rank is here while it has transfers.
  std::map<const KernelLink*, Entry> ranks_;
  std::map<std::uint64_t, Awaited> awaited_;
  std::uint64_t next_id_ = 0;
  std::thread thread_;
};

KernelTransfers::Impl::Impl(KernelOptions options)
    : options_(std::move(options)),
      finish_([this](KernelJob& job) { finish(job); }),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_.valid() || !bell_.valid())
    throw std::system_error(errno, std::generic_category(), "epoll or eventfd for kernel-mode ranks");
  watch(bell_.get(), kBell);
  thread_ = std::thread([this] { run(); });
}

KernelTransfers::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ring();
  thread_.join();
}

void KernelTransfers::Impl::watch(int fd, std::uint64_t data) const {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = data;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    spdlog::error("cannot watch a descriptor of a kernel-mode rank: errno {}", errno);
}

void KernelTransfers::Impl::hand_over(KernelJobPtr job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_in_.push_back(std::move(job));
  }
  ring();
}
void KernelTransfers::Impl::hand_over(const Cancel& cancel) {
  {
    const std::lock_guard lock(mutex_);
    cancels_in_.push_back(cancel);
  }
  ring();
}
void KernelTransfers::Impl::hand_over(Awaited awaited) {
  {
    const std::lock_guard lock(mutex_);
    awaited_in_.push_back(std::move(awaited));
  }
  ring();
}

void KernelTransfers::Impl::admit(KernelJobPtr job) {
  job->admit(options_.pool_bytes);
  job->arrived_ns = monotonic_ns();
  KernelLink* link = job->transfer.memory->kernel.get();
  auto found = ranks_.find(link);
  if (found == ranks_.end()) {
    found = ranks_.emplace(link, Entry{++next_id_, KernelRank(job->transfer.memory)}).first;
    watch(link->news.get(), tag(found->second.id, Watched::news));
    if (!link->gone) watch(link->pidfd.get(), tag(found->second.id, Watched::process));
  }
  found->second.rank.add(std::move(job));
}

void KernelTransfers::Impl::apply(const Cancel& cancel) {
  for (auto& [link, entry] : ranks_) {
    const RankMemory& memory = entry.rank.memory();
    if (cancel.id == TransferId{}) {
      if (memory.client != cancel.client || memory.client_generation != cancel.generation) continue;
      entry.rank.end(
          Status::peer_lost, [](const KernelJob&) { return true; }, finish_);
    } else {
      entry.rank.end(
          Status::timed_out, [&](const KernelJob& job) { return job.transfer.id == cancel.id; }, finish_);
    }
  }
}

void KernelTransfers::Impl::await(Awaited awaited) {
  awaited.pidfd = open_pidfd(awaited.process.pid);
  // Looked at after the pidfd was opened: a pid that was reused must not be waited for.
  if (await_process_end(awaited.process, 0)) return awaited.gone();
  const std::uint64_t id = ++next_id_;
  if (awaited.pidfd.valid()) watch(awaited.pidfd.get(), tag(id, Watched::awaited));
  awaited_.emplace(id, std::move(awaited));
}

void KernelTransfers::Impl::take_in() {
  std::vector<KernelJobPtr> jobs;
  std::vector<Cancel> cancels;
  std::vector<Awaited> awaited;
  {
    const std::lock_guard lock(mutex_);
    jobs.swap(jobs_in_);
    cancels.swap(cancels_in_);
    awaited.swap(awaited_in_);
  }
  for (KernelJobPtr& job : jobs) admit(std::move(job));
  for (const Cancel& cancel : cancels) apply(cancel);
  for (Awaited& one : awaited) await(std::move(one));
}

// Processes without a pidfd: nobody tells when they end.
void KernelTransfers::Impl::look_at_awaited() {
  std::erase_if(awaited_, [](auto& item) {
    if (item.second.pidfd.valid() || !await_process_end(item.second.process, 0)) return false;
    item.second.gone();
    return true;
  });
}

void KernelTransfers::Impl::serve(Entry& entry, std::uint64_t now, std::uint64_t& next_ns) {
  KernelRank& rank = entry.rank;
  KernelLink& link = rank.link();
  if (link.gone) return rank.end_gone(finish_);
  const std::string wrong = rank.take_ends(finish_);
  if (!wrong.empty()) {
    spdlog::error(
        "client {} (pid {}) reports {}: nothing it says counts any more; what it has taken stays leased "
        "until "
        "its process has ended",
        rank.memory().client.value, link.process.pid, wrong);
    options_.broken(rank.memory().client, rank.memory().client_generation, wrong);
  }
  if (link.broken) {
    rank.end(
        Status::peer_lost, [](const KernelJob&) { return true; }, finish_);
  } else {
    rank.advance(now, options_.block_quota, options_.checksums, next_ns, finish_);
  }
}

void KernelTransfers::Impl::rest(std::uint64_t next_ns) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t pause = next_ns > now ? std::min(next_ns - now, kIdleNs) : 0;
  const timespec timeout{static_cast<time_t>(pause / 1'000'000'000),
                         static_cast<long>(pause % 1'000'000'000)};
  pollfd ready{epoll_.get(), POLLIN, 0};
  ::ppoll(&ready, 1, &timeout, nullptr);
  epoll_event events[64];
  const int n = ::epoll_wait(epoll_.get(), events, static_cast<int>(std::size(events)), 0);
  for (int i = 0; i < n; ++i) {
    const std::uint64_t data = events[i].data.u64;
    if (data == kBell) {
      drain(bell_.get());
    } else if (data % 4 == static_cast<std::uint64_t>(Watched::awaited)) {
      const auto found = awaited_.find(data / 4);
      if (found == awaited_.end()) continue;
      unwatch(found->second.pidfd.get());
      HICACHE_CRASH_POINT(kernel_mapper_gone);
      found->second.gone();
      awaited_.erase(found);
    } else {
      const auto found = std::find_if(ranks_.begin(), ranks_.end(),
                                      [&](const auto& item) { return item.second.id == data / 4; });
      if (found == ranks_.end()) continue;
      KernelLink& link = found->second.rank.link();
      if (data % 4 == static_cast<std::uint64_t>(Watched::news)) {
        drain(link.news.get());
      } else {
        unwatch(link.pidfd.get());
        link.gone = true;
      }
    }
  }
}

void KernelTransfers::Impl::run() {
  for (;;) {
    take_in();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ && jobs_in_.empty()) break;
    }
    look_at_awaited();
    const std::uint64_t now = monotonic_ns();
    std::uint64_t next_ns = now + (awaited_.empty() ? kIdleNs : kProcessLookNs);
    for (auto at = ranks_.begin(); at != ranks_.end();) {
      Entry& entry = at->second;
      serve(entry, now, next_ns);
      if (!entry.rank.idle()) {
        ++at;
        continue;
      }
      unwatch(entry.rank.link().news.get());
      if (!entry.rank.link().gone) unwatch(entry.rank.link().pidfd.get());
      at = ranks_.erase(at);
    }
    rest(next_ns);
  }
  for (auto& [link, entry] : ranks_) {
    entry.rank.end(
        Status::shutting_down, [](const KernelJob&) { return true; }, finish_);
  }
}

KernelTransfers::KernelTransfers(KernelOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
KernelTransfers::~KernelTransfers() = default;

void KernelTransfers::submit(Transfer transfer) {
  impl_->hand_over(std::make_unique<KernelJob>(std::move(transfer)));
}
void KernelTransfers::cancel(TransferId id) {
  impl_->hand_over(Impl::Cancel{id, ClientSlot::none(), Generation::none()});
}
void KernelTransfers::cancel_client(ClientSlot client, Generation generation) {
  impl_->hand_over(Impl::Cancel{TransferId{}, client, generation});
}
void KernelTransfers::await_end(const ProcessIdentity& process, std::function<void()> gone) {
  impl_->hand_over(Impl::Awaited{process, std::move(gone), UniqueFd()});
}

}  // namespace hicache::daemon
