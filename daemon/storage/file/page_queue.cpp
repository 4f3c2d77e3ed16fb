#include "daemon/storage/file/page_queue.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace hicache::daemon {

void PageQueue::accept(StorageBatch batch) {
  assert(batch.pages() >= 1 && batch.pages() <= kStorageBatchPages);
  assert(batch.operation == StorageOperation::exists || batch.buffers.size() % batch.pages() == 0);
  auto accepted = std::make_shared<AcceptedBatch>();
  accepted->batch = std::move(batch);
  const auto pages = static_cast<std::uint32_t>(accepted->batch.pages());
  accepted->open.store(pages, std::memory_order_relaxed);  // the lock below publishes it
  const std::lock_guard lock(mutex_);
  if (accepted->batch.operation == StorageOperation::put) {
    accepted->refused = put_pages_ + pages > max_put_pages_;
    put_pages_ += pages;
  }
  line(accepted->batch.operation).push_back(std::move(accepted));
}

void PageQueue::cancel(StorageBatchId id) {
  const std::lock_guard lock(mutex_);
  for (Line& batches : lines_) {
    for (const auto& accepted : batches) {
      if (accepted->batch.id == id) accepted->cancelled = true;
    }
  }
  for (const QueuedPage& page : put_back_) {
    if (page.batch->batch.id == id) page.batch->cancelled = true;
  }
}

void PageQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

Status PageQueue::verdict(const AcceptedBatch& b, std::uint64_t now_ns) const {
  if (closed_ || b.cancelled) return Status::closed;
  if (b.refused) return Status::dropped;
  return b.batch.deadline_ns != 0 && now_ns >= b.batch.deadline_ns ? Status::timed_out : Status::ok;
}

void PageQueue::sweep(std::uint64_t now_ns) {
  std::vector<std::pair<QueuedPage, Status>> ended;
  {
    const std::lock_guard lock(mutex_);
    for (Line& batches : lines_) {
      for (auto at = batches.begin(); at != batches.end();) {
        const std::shared_ptr<AcceptedBatch>& b = *at;
        const Status status = verdict(*b, now_ns);
        if (status == Status::ok) {
          ++at;
          continue;
        }
        const auto pages = static_cast<std::uint32_t>(b->batch.pages());
        if (b->batch.operation == StorageOperation::put) put_pages_ -= pages - b->next;
        for (; b->next < pages; ++b->next) ended.push_back({{b, b->next}, status});
        at = batches.erase(at);
      }
    }
    for (auto at = put_back_.begin(); at != put_back_.end();) {
      const Status status = verdict(*at->batch, now_ns);
      if (status == Status::ok) {
        ++at;
        continue;
      }
      ended.emplace_back(std::move(*at), status);
      at = put_back_.erase(at);
    }
  }
  for (const auto& [page, status] : ended) finish(page, status);
}

void PageQueue::put_back(QueuedPage page) {
  const std::lock_guard lock(mutex_);
  put_back_.push_front(std::move(page));
}

std::optional<QueuedPage> PageQueue::take(StorageOperation operation, std::uint64_t now_ns) {
  const std::lock_guard lock(mutex_);
  Line& batches = line(operation);
  if (closed_) return std::nullopt;
  if (operation == StorageOperation::put && !put_back_.empty() &&
      verdict(*put_back_.front().batch, now_ns) == Status::ok) {
    QueuedPage page = std::move(put_back_.front());
    put_back_.pop_front();
    return page;
  }
  // Refused, cancelled and late ones are the sweep's.
  const auto at = std::find_if(batches.begin(), batches.end(),
                               [&](const auto& b) { return verdict(*b, now_ns) == Status::ok; });
  if (at == batches.end()) return std::nullopt;
  QueuedPage page{*at, (*at)->next++};
  if (operation == StorageOperation::put) --put_pages_;
  if (page.batch->next == page.batch->batch.pages()) batches.erase(at);
  return page;
}

void PageQueue::finish(const QueuedPage& page, Status outcome) {
  sink_.page(page.batch->batch.id, page.index, outcome);
  if (page.batch->open.fetch_sub(1, std::memory_order_acq_rel) == 1) {  // SYNC batch-outcomes
    sink_.ended(page.batch->batch.id);
  }
}

bool PageQueue::waiting() const {
  const std::lock_guard lock(mutex_);
  return !put_back_.empty() ||
         std::any_of(std::begin(lines_), std::end(lines_), [](const Line& l) { return !l.empty(); });
}

}  // namespace hicache::daemon
