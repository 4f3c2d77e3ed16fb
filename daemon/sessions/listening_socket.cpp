#include "daemon/sessions/listening_socket.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "shm/unix_socket.hpp"

namespace hicache::daemon {

ListeningSocket::~ListeningSocket() {
  if (fd_.valid() && named()) ::unlink(path_.c_str());
}

Outcome ListeningSocket::open(std::string path, bool open_to_others) {
  path_ = std::move(path);
  return reopen(open_to_others);
}

bool ListeningSocket::named() const {
  struct stat info {};
  return ::lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_;
}

Outcome ListeningSocket::reopen(bool open_to_others) {
  auto made = listen_unix(path_, open_to_others);
  if (!made) return made.error();
  struct stat info {};
  if (::lstat(path_.c_str(), &info) != 0) {
    return Error{Status::system_error, "the socket " + path_ + " went at once: " + std::strerror(errno),
                 errno};
  }
  fd_ = std::move(*made);
  device_ = info.st_dev;
  inode_ = info.st_ino;
  return success();
}

}  // namespace hicache::daemon
