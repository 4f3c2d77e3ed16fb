#include "daemon/storage/redis/connection.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

#include "shm/crash_points.hpp"

namespace hicache::daemon::redis {
namespace {

constexpr std::size_t kMaxPieces = 64;  // of one system call
constexpr int kReadsAnEvent = 16;       // then other connections have a turn
// What a record begins with: "$536870912\r\n" and its header. Reading no further, the payload that follows
// can go to the pool directly.
constexpr std::size_t kRecordPrefix = 12 + sizeof(RecordHeader);
// A command's answer may take response_timeout_ms and this much for each byte that goes or comes with it:
// slower than 10 MB/s is taken for dead.
constexpr std::uint64_t kNsPerByte = 100;

Error failed(const std::string& what, int code) {
  return {Status::system_error, what + ": " + std::strerror(code), code};
}

}  // namespace

std::uint64_t Connection::due_ns() const {
  if (state_ == State::closed) return 0;
  if (state_ != State::ready) return opened_ns_ + settings_.connect_timeout_ms * 1'000'000ull;
  if (pending_.empty()) return 0;
  // What lies under a page's key may be larger than the page: it must come before it can be dropped.
  const std::uint64_t bytes = std::max(pending_.front().bytes, reader_.announced_bytes());
  return head_since_ns_ + settings_.response_timeout_ms * 1'000'000ull + bytes * kNsPerByte;
}

Outcome Connection::open(const Endpoint& endpoint, std::uint64_t now) {
  assert(state_ == State::closed);
  auto fd = begin_connect(endpoint);
  if (!fd) return Error{fd.status(), "connect: " + fd.error().message, fd.error().system_errno};
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT;
  event.data.ptr = this;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd->get(), &event) != 0) return failed("epoll_ctl", errno);
  fd_ = std::move(*fd);
  watching_writable_ = true;
  opened_ns_ = now;
  state_ = State::connecting;
  return success();
}

std::deque<Pending> Connection::close() {
  fd_.reset();  // leaves epoll with it
  state_ = State::closed;
  outgoing_.clear();
  front_sent_ = 0;
  reading_ = false;
  reader_.expect(nullptr);
  return std::exchange(pending_, {});
}

void Connection::send(Pending pending, WireCommand command, std::uint64_t now) {
  assert(state_ == State::greeting || state_ == State::ready);
  pending.bytes = command.head.size() + command.tail.size();
  for (const auto& piece : command.pieces) pending.bytes += piece.size();
  if (pending.operation != nullptr && pending.operation->step == Step::read) {
    pending.bytes += pending.operation->identity().record_bytes();
  }
  outgoing_.push_back(std::move(command));
  try {
    pending_.push_back(std::move(pending));
  } catch (...) {
    outgoing_.pop_back();
    throw;
  }
  begin_reply(now);
}

// Tells the reader what the oldest command expects, before a byte of the answer is read.
void Connection::begin_reply(std::uint64_t now) {
  if (reading_ || pending_.empty()) return;
  const Pending& oldest = pending_.front();
  const bool page = oldest.operation != nullptr && oldest.operation->step == Step::read;
  if (page) landing_.aim(oldest.operation->identity(), oldest.operation->payload(pool_));
  reader_.expect(page ? &landing_ : nullptr);
  reading_ = true;
  head_since_ns_ = now;
  if (page) HICACHE_CRASH_POINT(redis_read_asked);
}

Outcome Connection::flush() {
  if (state_ != State::greeting && state_ != State::ready) return success();
  while (!outgoing_.empty()) {
    std::array<iovec, kMaxPieces> places{};
    std::size_t count = 0;
    std::size_t skip = front_sent_;
    const auto add = [&](const void* bytes, std::size_t size) {
      if (skip >= size) {
        skip -= size;
      } else if (count < places.size()) {
        places[count++] = {static_cast<char*>(const_cast<void*>(bytes)) + skip, size - skip};
        skip = 0;
      }
    };
    for (const WireCommand& command : outgoing_) {
      if (count == places.size()) break;
      add(command.head.data(), command.head.size());
      for (const auto& piece : command.pieces) add(piece.data(), piece.size());
      add(command.tail.data(), command.tail.size());
    }
    msghdr message{};
    message.msg_iov = places.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return watch(true);
      return failed("send", errno);
    }
    for (front_sent_ += static_cast<std::size_t>(sent); !outgoing_.empty();) {
      const WireCommand& front = outgoing_.front();
      std::size_t size = front.head.size() + front.tail.size();
      for (const auto& piece : front.pieces) size += piece.size();
      if (front_sent_ < size) break;
      if (!front.pieces.empty()) HICACHE_CRASH_POINT(redis_write_sent);
      front_sent_ -= size;
      outgoing_.pop_front();
    }
  }
  return watch(false);
}

Outcome Connection::watch(bool writable) {
  if (writable == watching_writable_) return success();
  epoll_event event{};
  event.events = EPOLLIN | (writable ? EPOLLOUT : 0u);
  event.data.ptr = this;
  if (::epoll_ctl(epoll_, EPOLL_CTL_MOD, fd_.get(), &event) != 0) return failed("epoll_ctl", errno);
  watching_writable_ = writable;
  return success();
}

Outcome Connection::on_event(std::uint32_t events, std::uint64_t now) {
  if (state_ == State::closed) return success();  // an event of its last socket
  if (state_ == State::connecting) {
    if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) == 0) return success();
    if (auto connected = end_connect(now); !connected) return connected;
  }
  if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) {
    if (auto received = receive(now); !received) return received;
  }
  return flush();
}

Outcome Connection::end_connect(std::uint64_t now) {
  int code = 0;
  socklen_t size = sizeof code;
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &code, &size) != 0) code = errno;
  if (code != 0) return failed("connect", code);
  state_ = State::greeting;
  if (!settings_.password.empty()) {
    send({CommandKind::auth, nullptr},
         settings_.user.empty() ? make_command({"AUTH", settings_.password})
                                : make_command({"AUTH", settings_.user, settings_.password}),
         now);
  }
  if (settings_.database != 0) {
    send({CommandKind::select, nullptr}, make_command({"SELECT", std::to_string(settings_.database)}), now);
  }
  send({CommandKind::ping, nullptr}, make_command({"PING"}), now);
  return success();
}

// How many bytes behind the current payload, or of the current reply, may be read to this side: no payload of
// a page among them.
std::size_t Connection::staging_wanted() const {
  if (reader_.skipping() >= staging_.size()) return staging_.size();
  const auto skipping = static_cast<std::size_t>(reader_.skipping());
  const std::size_t next = reader_.landing_now() || skipping > 0 ? 1 : 0;
  const bool page = pending_.size() > next && pending_[next].operation != nullptr &&
                    pending_[next].operation->step == Step::read;
  return page ? std::min(skipping + kRecordPrefix, staging_.size()) : staging_.size();
}

Outcome Connection::receive(std::uint64_t now) {
  for (int reads = 0; reads < kReadsAnEvent && state_ != State::closed; ++reads) {
    std::array<iovec, kMaxPieces + 1> places{};
    std::size_t count = 0;
    std::size_t direct = 0;
    if (reader_.landing_now()) {
      count = landing_.targets(std::span(places).first(kMaxPieces));
      for (const iovec& place : std::span(places).first(count)) direct += place.iov_len;
    }
    std::size_t wanted = direct;
    if (direct == landing_.missing() || count == 0) {  // no gap between the payload and what follows it
      places[count++] = {staging_.data(), staging_wanted()};
      wanted += staging_wanted();
    }
    const ssize_t got = ::readv(fd_.get(), places.data(), static_cast<int>(count));
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return success();
      return failed("receive", errno);
    }
    if (got == 0) return Error{Status::system_error, "the server closed the connection", 0};
    const auto bytes = static_cast<std::size_t>(got);
    const std::size_t landed = std::min(bytes, direct);
    if (landed > 0) reader_.landed(landed);
    if (auto understood = digest(std::span(staging_).first(bytes - landed), now); !understood) {
      return understood;
    }
    if (bytes < wanted) return success();  // there was no more
  }
  return success();
}

Outcome Connection::digest(std::span<const std::byte> bytes, std::uint64_t now) {
  while (!bytes.empty()) {
    if (pending_.empty()) return Error{Status::corrupt, "the server answers what was not asked", 0};
    bytes = bytes.subspan(reader_.feed(bytes));
    if (reader_.broken()) {
      return Error{Status::corrupt, "the server does not speak RESP2: " + reader_.fault(), 0};
    }
    if (!reader_.done()) continue;
    // Each pending command has one in outgoing_ until its last byte is sent. Its buffers must not be given
    // back before that.
    if (pending_.size() <= outgoing_.size()) {
      return Error{Status::corrupt, "the server answers what was not sent yet: " + reader_.take().text, 0};
    }
    Pending answered = std::move(pending_.front());
    pending_.pop_front();
    Reply reply = reader_.take();
    reading_ = false;
    begin_reply(now);
    answered_(*this, std::move(answered), std::move(reply));
    if (state_ == State::closed) return success();
  }
  return success();
}

}  // namespace hicache::daemon::redis
