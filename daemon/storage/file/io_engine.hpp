// Moves bytes between memory and files without making its caller wait: by io_uring, or by threads that block
// where io_uring is not built in, switched off or forbidden. What is above it is the same for both.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/storage/backend.hpp"
#include "daemon/storage/file/file_settings.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// One transfer of consecutive bytes of a file. Where the file is open with O_DIRECT, offset, addresses and
// sizes are multiples of 4 KiB. The request and its memory live until wait() has returned it.
struct IoRequest {
  bool write = false;
  int fd = -1;
  std::uint64_t offset = 0;
  std::vector<iovec> parts;  // taken apart as the transfer goes on
  int error = 0;             // result: 0 = every byte was moved; ENODATA = the file ended before
  void* owner = nullptr;     // the caller's
};

// Not thread-safe but for wake(): an engine belongs to the thread that makes it. With nothing in flight, and
// that thread at its end, another may destroy it.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  // `depth` requests in flight, or a few more, are what the engine is made for. One begins at the latest with
  // the next flush() or wait().
  virtual void start(IoRequest& request) = 0;
  virtual void flush() {}
  // Appends what has ended. Returns when something has, after wake(), or after timeout_ns.
  virtual void wait(std::vector<IoRequest*>& done, std::uint64_t timeout_ns) = 0;
  // Makes the current or the next wait() return. From any thread.
  virtual void wake() = 0;
  // Registers some more of the pool, if there is more to do. True while there is.
  virtual bool register_more() { return false; }
  // For people: "io_uring, registered buffers".
  [[nodiscard]] virtual std::string description() const = 0;
};

// Removes the first `bytes` of what `parts` describe.
void advance(std::vector<iovec>& parts, std::uint64_t bytes);

// system_error where io_uring is asked for by name and can't be had, with the reason. With `automatic` the
// engine of threads takes its place and its description says why.
Result<std::unique_ptr<IoEngine>> make_io_engine(IoEngineChoice choice, std::uint32_t depth,
                                                 const StoragePool& pool, bool register_pool);

Result<std::unique_ptr<IoEngine>> make_uring_engine(std::uint32_t depth, const StoragePool& pool,
                                                    bool register_pool);
std::unique_ptr<IoEngine> make_thread_engine(std::uint32_t depth, std::string why);

}  // namespace hicache::daemon
