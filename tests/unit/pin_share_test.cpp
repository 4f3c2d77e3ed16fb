#include "daemon/coordinator/pin_share.hpp"

#include "tests/support/catch.hpp"

namespace hicache::daemon {

TEST_CASE("a group finds the room that others have not used of theirs untouched") {
  PinShare share(16, 3);
  const GroupSlot heavy{0};
  const GroupSlot light{1};
  const std::vector<GroupSlot> both = {heavy, light};
  // 100 bytes, 25 guaranteed to each.
  CHECK(share.room(heavy, both, 100, 25) == 75);
  for (std::uint32_t page = 0; page < 7; ++page) share.pin(PageId{page}, heavy, 10);
  CHECK(share.pinned_bytes(heavy) == 70);
  CHECK(share.room(heavy, both, 100, 25) == 5);
  CHECK(share.room(light, both, 100, 25) == 30);
  share.pin(PageId{10}, light, 20);
  CHECK(share.room(heavy, both, 100, 25) == 5);
  CHECK(share.room(light, both, 100, 25) == 10);
  share.unpin(PageId{10});
  share.unpin(PageId{0});
  share.unpin(PageId{0});  // it has no pins: nothing changes
  CHECK(share.total_bytes() == 60);
  CHECK(share.room(heavy, both, 100, 25) == 15);
}

TEST_CASE("a group that comes when everything is pinned is still told the room it is guaranteed") {
  PinShare share(16, 3);
  for (std::uint32_t page = 0; page < 10; ++page) share.pin(PageId{page}, GroupSlot{0}, 10);
  const std::vector<GroupSlot> both = {GroupSlot{0}, GroupSlot{1}};
  CHECK(share.room(GroupSlot{1}, both, 100, 25) == 25);
  CHECK(share.room(GroupSlot{0}, both, 100, 25) == 0);
}

}  // namespace hicache::daemon
