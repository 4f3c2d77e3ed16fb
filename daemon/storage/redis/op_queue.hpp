// Pages that wait for a connection: what is read goes before what is written, because somebody waits for it.
#pragma once

#include <deque>
#include <utility>

#include "daemon/storage/redis/page_operation.hpp"

namespace hicache::daemon::redis {

class OperationQueue {
 public:
  [[nodiscard]] bool empty() const { return reads_.empty() && writes_.empty(); }

  void push(PageOperationPtr operation) { side(*operation).push_back(std::move(operation)); }
  void push_front(PageOperationPtr operation) { side(*operation).push_front(std::move(operation)); }
  // Precondition: not empty.
  PageOperationPtr pop() {
    auto& from = reads_.empty() ? writes_ : reads_;
    PageOperationPtr operation = std::move(from.front());
    from.pop_front();
    return operation;
  }
  void fail_all(Status outcome) {
    while (!empty()) pop()->finish(outcome);
  }
  // Ends those that were cancelled, are too late, or, when `closing`, all. Returns the next deadline, 0 =
  // none.
  std::uint64_t sweep(std::uint64_t now, bool closing) {
    std::uint64_t next = 0;
    for (auto* operations : {&reads_, &writes_}) {
      std::erase_if(*operations, [&](const PageOperationPtr& operation) {
        if (closing || operation->cancelled()) {
          operation->finish(Status::closed);
        } else if (operation->expired(now)) {
          operation->finish(Status::timed_out);
        } else {
          const std::uint64_t deadline = operation->batch().deadline_ns;
          if (deadline != 0 && (next == 0 || deadline < next)) next = deadline;
          return false;
        }
        return true;
      });
    }
    return next;
  }

 private:
  std::deque<PageOperationPtr>& side(const PageOperation& operation) {
    return operation.kind() == StorageOperation::put ? writes_ : reads_;
  }

  std::deque<PageOperationPtr> reads_;
  std::deque<PageOperationPtr> writes_;
};

}  // namespace hicache::daemon::redis
