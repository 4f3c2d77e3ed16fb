// One line that tells how far a run is: redrawn on a terminal, else printed every few seconds.
#pragma once

#include <cstdint>
#include <string>

namespace hicache::bench {

class ProgressLine {
 public:
  ProgressLine();
  // Shows `text` on standard error when it is time to.
  void show(const std::string& text);
  // Ends the line on a terminal.
  void finish();

 private:
  bool terminal_ = false;
  std::uint64_t next_ns_ = 0;
  std::size_t width_ = 0;
};

// Ctrl-C and SIGTERM ask a run to end in order. Installed once, by main.
void install_interrupt_handler();
bool interrupted();

}  // namespace hicache::bench
