// Where transfer jobs are between threads. All lists link the jobs themselves: moving one allocates nothing.
#pragma once

#include <atomic>
#include <deque>
#include <utility>

#include "daemon/transfer/transfer_job.hpp"

namespace hicache::daemon {

// First in, first out. Owns its jobs. Not thread-safe.
class JobList {
 public:
  JobList() = default;
  JobList(JobList&& other) noexcept
      : head_(std::exchange(other.head_, nullptr)), tail_(std::exchange(other.tail_, nullptr)) {}
  JobList& operator=(JobList&& other) noexcept {
    std::swap(head_, other.head_);
    std::swap(tail_, other.tail_);
    return *this;
  }
  ~JobList() {
    while (pop_front()) {
    }
  }

  [[nodiscard]] bool empty() const { return head_ == nullptr; }
  void push_back(TransferJobPtr job) {
    job->next = nullptr;
    TransferJob* added = job.release();
    (tail_ == nullptr ? head_ : tail_->next) = added;
    tail_ = added;
  }
  void push_front(TransferJobPtr job) {
    job->next = head_;
    head_ = job.release();
    if (tail_ == nullptr) tail_ = head_;
  }
  // Null when empty.
  TransferJobPtr pop_front() {
    if (head_ == nullptr) return nullptr;
    TransferJobPtr job(std::exchange(head_, head_->next));
    if (head_ == nullptr) tail_ = nullptr;
    return job;
  }
  // Gives every job to `keep`, which returns those that stay.
  template <class Keep>
  void filter(Keep keep) {
    JobList old = std::move(*this);
    while (TransferJobPtr job = old.pop_front()) {
      if (TransferJobPtr kept = keep(std::move(job))) push_back(std::move(kept));
    }
  }

 private:
  TransferJob* head_ = nullptr;
  TransferJob* tail_ = nullptr;
};

// Many producers, never a lock: the coordinator must not wait for a transfer thread that lost its core in the
// middle.
//
// SYNC inbox: push releases the job, take_all acquires it. Only whole stacks are taken, so there is no ABA
// problem.
class JobInbox {
 public:
  ~JobInbox() { take_all(); }

  void push(TransferJobPtr job) {
    TransferJob* added = job.release();
    added->next = top_.load(std::memory_order_relaxed);
    while (!top_.compare_exchange_weak(added->next, added, std::memory_order_release,
                                       std::memory_order_relaxed)) {
    }
  }
  [[nodiscard]] bool empty() const { return top_.load(std::memory_order_relaxed) == nullptr; }
  // Everything pushed so far, oldest first.
  JobList take_all() {
    JobList jobs;
    if (empty()) return jobs;
    TransferJob* job = top_.exchange(nullptr, std::memory_order_acquire);
    while (job != nullptr) {
      TransferJob* older = job->next;
      jobs.push_front(TransferJobPtr(job));
      job = older;
    }
    return jobs;
  }

 private:
  std::atomic<TransferJob*> top_{nullptr};
};

// Clients take turns, each with its own jobs in order. Not thread-safe.
class FairQueue {
 public:
  [[nodiscard]] bool empty() const { return lanes_.empty(); }
  void push_back(TransferJobPtr job) {
    JobList& lane = lane_of(*job);
    lane.push_back(std::move(job));
  }
  // For a job that has begun: before the others of its client.
  void push_front(TransferJobPtr job) {
    JobList& lane = lane_of(*job);
    lane.push_front(std::move(job));
  }
  // The first job of the client whose turn it is. Null when empty.
  TransferJobPtr pop() {
    if (lanes_.empty()) return nullptr;
    Lane lane = std::move(lanes_.front());
    lanes_.pop_front();
    TransferJobPtr job = lane.jobs.pop_front();
    if (!lane.jobs.empty()) lanes_.push_back(std::move(lane));
    return job;
  }
  template <class Keep>
  void filter(Keep keep) {
    for (Lane& lane : lanes_) lane.jobs.filter(keep);
    std::erase_if(lanes_, [](const Lane& lane) { return lane.jobs.empty(); });
  }

 private:
  struct Lane {
    ClientSlot client;
    JobList jobs;
  };
  JobList& lane_of(const TransferJob& job) {
    const ClientSlot client = job.transfer.memory->client;
    for (Lane& lane : lanes_) {
      if (lane.client == client) return lane.jobs;
    }
    lanes_.push_back(Lane{client, JobList{}});
    return lanes_.back().jobs;
  }
  std::deque<Lane> lanes_;  // only clients that have jobs; the front one is next
};

}  // namespace hicache::daemon
