// Runs a piece of a test in a child process, one machine instruction at a time, so that every state which a
// death at any instruction would leave behind can be looked at while the child stands still.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

namespace hicache::test {

// A traced child. Only its first thread is stepped; threads that it starts run as they like. Killed when this
// goes.
class SteppedProcess {
 public:
  // Why this machine can't step a process, or "": containers may forbid ptrace.
  static std::string why_not();

  // Forks. The child runs `body` and stops at each mark() in it.
  explicit SteppedProcess(const std::function<void()>& body);
  ~SteppedProcess();
  SteppedProcess(const SteppedProcess&) = delete;
  SteppedProcess& operator=(const SteppedProcess&) = delete;

  // In the child: stands still until the test lets it go on.
  static void mark();

  // Called again and again while the child sleeps without having stopped: it waits for something that the
  // test must do.
  void while_it_runs(std::function<void()> serve) { serve_ = std::move(serve); }

  // Lets the child run to its next mark. False when it ended first.
  bool run_to_mark();
  // One instruction at a time to the next mark. `look` is called after each; false from it ends the walk
  // there.
  enum class Walk { at_mark, stopped_by_look, ended };
  Walk step_to_mark(const std::function<bool()>& look);

  void kill9();
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] std::uint64_t instructions() const { return instructions_; }
  // How it ended, for messages.
  [[nodiscard]] std::string end() const;

 private:
  // False when the child has ended; else `signal_` is what stopped it.
  bool await_stop();
  [[nodiscard]] bool asleep() const;
  void go_on(int request, int signal);

  pid_t pid_ = -1;
  bool reaped_ = false;
  int status_ = 0;
  int signal_ = 0;
  std::uint64_t instructions_ = 0;
  std::function<void()> serve_;
};

}  // namespace hicache::test
