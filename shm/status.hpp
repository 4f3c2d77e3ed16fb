// Errors as values: one enum for the whole project, and a Result that carries a value or a status with its
// detail.
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace hicache {

// Numeric values are part of the protocol and of the C ABI (hicache.h mirrors them): append, never renumber.
enum class Status : std::uint16_t {
  ok = 0,
  again = 1,              // ring, arena, table or quota full for now: poll, then try again
  busy = 2,               // a lookup met too many changes in a row, or the thing is in use
  timed_out = 3,          // the deadline passed; the operation has ended and will never publish
  invalid_argument = 4,   // a field is out of its range; nothing was done
  not_found = 5,          // no such thing
  unknown_lease = 6,      // the lease never was, or is not this group's
  stale_generation = 7,   // the lease, client or page has been reused since
  already_released = 8,   // a second release of the same thing by the same rank
  not_permitted = 9,      // the role, user or configuration forbids it
  diverged = 10,          // this rank posted something else than its group for one sequence
  poisoned = 11,          // a rank of the group diverged; everything on this lease fails
  peer_lost = 12,         // a rank of the group is gone; the group has ended
  daemon_lost = 13,       // the daemon died or dropped this session
  daemon_absent = 14,     // nothing listens at the socket
  version_mismatch = 15,  // protocol or layout versions do not overlap
  no_space = 16,          // no page or pool slot could be freed
  too_large = 17,         // more pages or bytes than one operation or the configuration allows
  forked = 18,            // the session belongs to the parent process
  closed = 19,            // the session was closed by this side
  corrupt = 20,           // shared memory does not hold what it must hold
  system_error = 21,      // a system call failed; detail is errno
  shutting_down = 22,     // the daemon drains
  exists = 23,            // it is already there
  dropped = 24,           // page: not kept (no room, parent lost, or aborted)
  internal = 25,          // a bug of hicache
};
constexpr std::uint16_t kStatusCount = 26;

constexpr std::string_view to_string(Status s) {
  switch (s) {
    case Status::ok:
      return "ok";
    case Status::again:
      return "again";
    case Status::busy:
      return "busy";
    case Status::timed_out:
      return "timed_out";
    case Status::invalid_argument:
      return "invalid_argument";
    case Status::not_found:
      return "not_found";
    case Status::unknown_lease:
      return "unknown_lease";
    case Status::stale_generation:
      return "stale_generation";
    case Status::already_released:
      return "already_released";
    case Status::not_permitted:
      return "not_permitted";
    case Status::diverged:
      return "diverged";
    case Status::poisoned:
      return "poisoned";
    case Status::peer_lost:
      return "peer_lost";
    case Status::daemon_lost:
      return "daemon_lost";
    case Status::daemon_absent:
      return "daemon_absent";
    case Status::version_mismatch:
      return "version_mismatch";
    case Status::no_space:
      return "no_space";
    case Status::too_large:
      return "too_large";
    case Status::forked:
      return "forked";
    case Status::closed:
      return "closed";
    case Status::corrupt:
      return "corrupt";
    case Status::system_error:
      return "system_error";
    case Status::shutting_down:
      return "shutting_down";
    case Status::exists:
      return "exists";
    case Status::dropped:
      return "dropped";
    case Status::internal:
      return "internal";
  }
  return "unknown_status";
}

// What went wrong, in a form that can be shown to a person: status, sentence, errno where there is one.
struct Error {
  Status status = Status::internal;
  std::string message;
  int system_errno = 0;
};

// A value or an Error. Never both, never neither.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  Result(Status status, std::string message, int system_errno = 0)
      : error_{status, std::move(message), system_errno} {}

  [[nodiscard]] bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] Status status() const { return ok() ? Status::ok : error_.status; }
  [[nodiscard]] const Error& error() const { return error_; }
  T& value() {
    assert(value_.has_value());
    return *value_;
  }
  const T& value() const {
    assert(value_.has_value());
    return *value_;
  }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::optional<T> value_;
  Error error_;
};

struct Unit {};
using Outcome = Result<Unit>;
inline Outcome success() {
  return Outcome{Unit{}};
}

}  // namespace hicache
