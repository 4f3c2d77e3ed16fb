// Asks hicached itself what it needs, so that a doctor never judges by another idea of the configuration.
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "shm/fd.hpp"
#include "tools/ctl/doctor.hpp"

namespace hicache::ctl {
namespace {

struct Answer {
  int exit_code = 0;
  std::string text;  // standard output; standard error is this program's too
};

std::string daemon_program() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const std::string beside = (self.parent_path() / "hicached").string();
    if (::access(beside.c_str(), X_OK) == 0) return beside;
  }
  return "hicached";
}

Result<Answer> run(std::vector<std::string> words) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    return Error{Status::system_error, std::string("pipe2: ") + std::strerror(errno), errno};
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, writer.get(), STDOUT_FILENO);
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  const int rc = ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  writer.reset();
  if (rc != 0) {
    return Error{
        Status::daemon_absent,
        fmt::format("cannot run {}: {}; install hicached beside hicache-ctl, or name it with --hicached",
                    words[0], std::strerror(rc)),
        rc};
  }
  Answer answer;
  std::array<char, 4096> part{};
  for (;;) {
    const ssize_t n = ::read(reader.get(), part.data(), part.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    answer.text.append(part.data(), static_cast<std::size_t>(n));
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  answer.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return answer;
}

}  // namespace

Result<machine::Needs> ask_needs(const std::string& program, const std::string& config_path) {
  const std::string hicached = program.empty() ? daemon_program() : program;
  std::vector<std::string> words = {hicached, "--print-needs"};
  if (!config_path.empty()) words.insert(words.end(), {"--config", config_path});
  auto answer = run(std::move(words));
  if (!answer) return answer.error();
  if (answer->exit_code != 0) {
    return Error{Status::invalid_argument, fmt::format("{} does not take the configuration", hicached),
                 answer->exit_code};
  }
  auto needs = machine::parse_needs(answer->text);
  if (!needs) {
    return Error{Status::version_mismatch,
                 fmt::format("{} is of another version: {}", hicached, needs.error().message), 0};
  }
  return needs;
}

}  // namespace hicache::ctl
