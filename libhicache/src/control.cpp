// One question to a daemon over its socket: what hicache-ctl does.
#include <algorithm>

#include "hicache/client.hpp"
#include "shm/clock.hpp"
#include "shm/messages.hpp"
#include "shm/unix_socket.hpp"

namespace hicache {

Result<std::string> control(const std::string& socket_path, const std::vector<std::string>& arguments,
                            std::uint32_t timeout_ms) {
  if (arguments.empty() || arguments.size() > kMaxControlArguments) {
    return Error{Status::invalid_argument,
                 std::to_string(arguments.size()) + " arguments; expected 1 to " +
                     std::to_string(kMaxControlArguments),
                 0};
  }
  for (const std::string& argument : arguments) {
    if (argument.size() > kMaxArgumentBytes) {
      return Error{Status::invalid_argument,
                   "an argument of " + std::to_string(argument.size()) + " bytes; at most " +
                       std::to_string(kMaxArgumentBytes),
                   0};
    }
  }
  const auto socket = connect_unix(socket_path);
  if (!socket) return socket.error();
  const int limit_ms = static_cast<int>(std::min<std::uint32_t>(timeout_ms, 1u << 30));
  const std::uint64_t start_ns = monotonic_ns();
  if (auto sent = send_message(socket->get(), encode_message(Control{arguments}), {}, limit_ms); !sent) {
    return sent.error();
  }
  const auto spent_ms = static_cast<int>((monotonic_ns() - start_ns) / 1'000'000);
  const auto message = receive_message(socket->get(), std::max(limit_ms - spent_ms, 0));
  if (!message) return message.error();
  const auto answer = decode_message(message->bytes);
  if (!answer) return Error{Status::corrupt, "the daemon's answer is unusable: " + answer.error().message, 0};
  const auto* reply = std::get_if<Reply>(&*answer);
  if (reply == nullptr) return Error{Status::corrupt, "the daemon answered with another message", 0};
  if (reply->status != Status::ok) return Error{reply->status, reply->text, 0};
  return reply->text;
}

}  // namespace hicache
