// The socket that clients connect to, and its name in the file system: a name that somebody removes is made
// again.
#pragma once

#include <sys/types.h>

#include <string>

#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Thread safety: none.
class ListeningSocket {
 public:
  ListeningSocket() = default;
  // Removes the name if it still leads here.
  ~ListeningSocket();
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;

  // exists when another process listens at the path or another file lies there.
  Outcome open(std::string path, bool open_to_others);
  [[nodiscard]] int fd() const { return fd_.get(); }
  // Does the path still lead to this socket? An error that lasts (a directory that is gone) counts as no.
  [[nodiscard]] bool named() const;
  // Takes the path again with a new socket, when nothing lies there. Who has connected to the old one and was
  // not accepted is cut off. After a failure the old socket stays.
  Outcome reopen(bool open_to_others);

 private:
  UniqueFd fd_;
  std::string path_;
  dev_t device_ = 0;  // of the name, as it was made
  ino_t inode_ = 0;
};

}  // namespace hicache::daemon
