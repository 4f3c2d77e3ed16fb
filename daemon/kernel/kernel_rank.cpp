#include "daemon/kernel/kernel_rank.hpp"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <utility>

#include "shm/crash_points.hpp"
#include "shm/futex.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// A write fence is looked at again after an eighth of its age: a word of the rank's can wake nobody.
constexpr std::uint64_t kMinPollNs = 20'000;
constexpr std::uint64_t kMaxPollNs = 1'000'000;

}  // namespace

KernelRank::KernelRank(std::shared_ptr<const RankMemory> memory)
    : memory_(std::move(memory)), link_(memory_->kernel) {}

bool KernelRank::idle() const {
  return waiting_.empty() && !running();
}

bool KernelRank::running() const {
  return std::any_of(running_.begin(), running_.end(),
                     [](const KernelJobPtr& job) { return job != nullptr; });
}

std::size_t KernelRank::free_slot(bool loads) const {
  const std::size_t first = first_kernel_slot(loads);
  for (std::size_t i = first; i < first + kKernelSlotsPerDirection; ++i) {
    if (running_[i] == nullptr) return i;
  }
  return kKernelSlots;
}

KernelRank::Report KernelRank::read_report(std::size_t i) {
  const KernelJobPtr& job = running_[i];
  const std::uint64_t ended = slot(i).ended.load(std::memory_order_acquire);  // SYNC kernel block
  if (job == nullptr) {
    if (ended == link_->ended[i]) return {};
    return {false, fmt::format("request {} in slot {} as ended, which has none", ended, i)};
  }
  const std::uint64_t turn = slot(i).turn.load(kRelaxed);
  const bool taken = turn == kernel_turn(job->number, KernelTurn::taken);
  if (!taken && turn != kernel_turn(job->number, KernelTurn::posted))
    return {false, fmt::format("turn {:#x} in slot {}, which holds request {}", turn, i, job->number)};
  if (ended == link_->ended[i]) return {};
  if (ended != job->number || !taken) {
    return {false, fmt::format("request {} in slot {} as ended, which holds request {}{}", ended, i,
                               job->number, taken ? "" : ", not taken")};
  }
  const std::uint32_t status = slot(i).status.load(kRelaxed);
  const std::uint64_t bytes = slot(i).bytes.load(kRelaxed);
  const std::uint64_t whole = job->whole_bytes();
  if (status >= kStatusCount) return {false, fmt::format("status {} of request {}", status, ended)};
  // A page that was moved in part must not become visible.
  if (bytes > whole || (bytes < whole && static_cast<Status>(status) == Status::ok))
    return {false, fmt::format("{} bytes for request {}, which has {}", bytes, ended, whole)};
  job->verdict = static_cast<Status>(status);
  job->bytes = bytes;
  return {true, {}};
}

std::string KernelRank::take_ends(const Finish& finish) {
  if (link_->broken) return {};
  for (std::size_t i = 0; i < kKernelSlots; ++i) {
    Report report = read_report(i);
    if (!report.wrong.empty()) {
      link_->broken = true;
      return std::move(report.wrong);
    }
    if (!report.ended) continue;
    link_->ended[i] = running_[i]->number;
    const KernelJobPtr job = std::move(running_[i]);
    HICACHE_CRASH_POINT(kernel_end_believed);
    finish(*job);
  }
  return {};
}

bool KernelRank::withdraw(std::size_t i) {
  std::uint64_t posted = kernel_turn(running_[i]->number, KernelTurn::posted);
  return slot(i).turn.compare_exchange_strong(posted, kernel_turn(running_[i]->number, KernelTurn::withdrawn),
                                              std::memory_order_acq_rel, kRelaxed);  // SYNC kernel block
}

void KernelRank::post(std::size_t i, KernelJobPtr job, std::uint32_t block_quota) {
  KernelBlock& block = link_->block();
  job->number = ++link_->next_number;
  job->describe(block.slots[i], block_quota);
  block.slots[i].turn.store(kernel_turn(job->number, KernelTurn::posted),
                            std::memory_order_release);  // SYNC kernel block
  running_[i] = std::move(job);
  HICACHE_CRASH_POINT(kernel_posted);
  park_fence();  // SYNC kernel park
  if (block.asleep.load(kRelaxed) == 0) return;
  block.wake.fetch_add(1, std::memory_order_release);
  futex_wake_all(&block.wake);
  HICACHE_CRASH_POINT(kernel_woken);
}

void KernelRank::advance(std::uint64_t now_ns, std::uint32_t block_quota, const ShardChecksums* checksums,
                         std::uint64_t& next_ns, const Finish& finish) {
  end(
      Status::timed_out, [now_ns](const KernelJob& job) { return job.expired(now_ns); }, finish);
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    KernelJob& job = **at;
    if (job.transfer.deadline_ns != 0) next_ns = std::min(next_ns, job.transfer.deadline_ns);
    const bool ended = job.verdict != Status::ok || job.transfer.pages.empty();
    if (!ended && !job.may_start()) {
      const std::uint64_t age = now_ns - std::min(now_ns, job.arrived_ns);
      next_ns = std::min(next_ns, now_ns + std::clamp(age / 8, kMinPollNs, kMaxPollNs));
      ++at;
      continue;
    }
    const std::size_t i = ended ? kKernelSlots : free_slot(job.loads());
    if (!ended && i == kKernelSlots) {
      ++at;
      continue;
    }
    KernelJobPtr taken = std::move(*at);
    at = waiting_.erase(at);
    if (!ended) taken->verify(checksums);
    if (ended || taken->verdict != Status::ok) {
      finish(*taken);
    } else {
      post(i, std::move(taken), block_quota);
    }
  }
  for (const KernelJobPtr& job : running_) {
    // Only to withdraw it: what the rank has taken has no deadline here.
    if (job != nullptr && job->transfer.deadline_ns > now_ns)
      next_ns = std::min(next_ns, job->transfer.deadline_ns);
  }
}

void KernelRank::end(Status status, const std::function<bool(const KernelJob&)>& fits, const Finish& finish) {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    if (!fits(**at)) {
      ++at;
      continue;
    }
    const KernelJobPtr job = std::move(*at);
    at = waiting_.erase(at);
    if (job->verdict == Status::ok) job->verdict = status;
    finish(*job);
  }
  for (std::size_t i = 0; i < kKernelSlots; ++i) {
    // What a rank that broke the protocol has not taken can't be told from what it has.
    if (running_[i] == nullptr || link_->broken || !fits(*running_[i]) || !withdraw(i)) continue;
    const KernelJobPtr job = std::move(running_[i]);
    HICACHE_CRASH_POINT(kernel_withdrawn);
    job->verdict = status;
    finish(*job);
  }
}

void KernelRank::end_gone(const Finish& finish) {
  end(
      Status::peer_lost, [](const KernelJob&) { return true; }, finish);
  for (KernelJobPtr& running : running_) {
    if (running == nullptr) continue;
    const KernelJobPtr job = std::move(running);
    HICACHE_CRASH_POINT(kernel_gone);
    job->verdict = Status::peer_lost;
    finish(*job);
  }
}

}  // namespace hicache::daemon
