// The transfers of one rank in io_backend kernel: which of them wait, which are posted, and what the rank
// says about those. Knows nothing of threads: the thread of KernelTransfers calls it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "daemon/kernel/kernel_job.hpp"
#include "daemon/kernel/kernel_link.hpp"

namespace hicache::daemon {

class KernelRank {
 public:
  using Finish = std::function<void(KernelJob&)>;

  explicit KernelRank(std::shared_ptr<const RankMemory> memory);

  [[nodiscard]] KernelLink& link() { return *link_; }
  [[nodiscard]] const RankMemory& memory() const { return *memory_; }
  [[nodiscard]] bool idle() const;
  // The rank has something that it has not ended yet.
  [[nodiscard]] bool running() const;

  void add(KernelJobPtr job) { waiting_.push_back(std::move(job)); }
  // Takes what the rank has ended. What it says that can't be is returned as a sentence, once; from then on
  // only the end of its process ends what it has taken.
  std::string take_ends(const Finish& finish);
  // Ends what is overdue and has not been taken, and posts what may start. `next_ns` is lowered to the time
  // at which it has to look again.
  void advance(std::uint64_t now_ns, std::uint32_t block_quota, const ShardChecksums* checksums,
               std::uint64_t& next_ns, const Finish& finish);
  // Ends every transfer that the rank has not taken and for which `fits` holds.
  void end(Status status, const std::function<bool(const KernelJob&)>& fits, const Finish& finish);
  // The process is gone: ends everything.
  void end_gone(const Finish& finish);

 private:
  [[nodiscard]] KernelSlot& slot(std::size_t i) { return link_->block().slots[i]; }
  bool withdraw(std::size_t i);
  void post(std::size_t i, KernelJobPtr job, std::uint32_t block_quota);
  // What the rank's words of a slot say, each of them read once.
  struct Report {
    bool ended = false;  // its request has, as the job's verdict and bytes say
    std::string wrong;   // what can't be, or empty
  };
  Report read_report(std::size_t i);
  [[nodiscard]] std::size_t free_slot(bool loads) const;

  std::shared_ptr<const RankMemory> memory_;
  std::shared_ptr<KernelLink> link_;
  std::list<KernelJobPtr> waiting_;                 // in the order in which they came
  std::array<KernelJobPtr, kKernelSlots> running_;  // posted or taken
};

}  // namespace hicache::daemon
