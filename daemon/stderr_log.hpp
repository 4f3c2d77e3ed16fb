// The log on standard error. It may be a pipe whose reader has stopped reading: then lines are lost, and
// counted, but no thread of the daemon ever waits for that reader.
#pragma once

#include <spdlog/sinks/base_sink.h>

#include <cstdint>
#include <mutex>
#include <string_view>

namespace hicache::daemon {

// Thread safety: any thread, as with every sink whose base has a mutex.
class StderrLog final : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override;
  void flush_() override {}  // nothing is kept

 private:
  // False when there was no room for the whole line.
  static bool write_if_room(std::string_view line);

  std::uint64_t lost_ = 0;  // lines since the last one that was written
};

}  // namespace hicache::daemon
