#include "daemon/coordinator/deadline_queue.hpp"

#include <set>

#include "tests/support/catch.hpp"

namespace hicache::daemon {

TEST_CASE("deadlines come in the order of their time, and those of ended operations do not pile up") {
  DeadlineQueue queue;
  std::set<std::uint64_t> open;
  const auto is_open = [&](const Deadline& d) { return open.contains(d.transfer); };
  for (std::uint64_t n = 1; n <= 100'000; ++n) {
    open.insert(n);
    queue.push(Deadline{1'000'000 - n % 1000, n, 0}, open.size(), is_open);
    REQUIRE(queue.size() <= DeadlineQueue::kSpare + 2 * open.size());
    if (n % 100 != 0) open.erase(n);  // ends long before its time
  }
  std::uint64_t last = 0;
  while (!queue.empty()) {
    REQUIRE(queue.top().at_ns >= last);
    last = queue.top().at_ns;
    open.erase(queue.top().transfer);
    queue.pop();
  }
  CHECK(open.empty());
}

}  // namespace hicache::daemon
