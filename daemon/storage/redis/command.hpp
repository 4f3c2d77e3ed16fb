// Commands as they go to a server: text around buffers that are sent from where they lie.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hicache::daemon::redis {

// The bytes of a command in order. The pieces belong to the pool and stay valid until the command was
// answered or its connection has ended.
struct WireCommand {
  std::string head;
  std::vector<std::span<const std::byte>> pieces;
  std::string tail;
};

inline void append_bulk(std::string& out, std::string_view text) {
  out += '$';
  out += std::to_string(text.size());
  out += "\r\n";
  out += text;
  out += "\r\n";
}

inline WireCommand make_command(std::initializer_list<std::string_view> words) {
  WireCommand command;
  command.head = "*" + std::to_string(words.size()) + "\r\n";
  for (const std::string_view word : words) append_bulk(command.head, word);
  return command;
}

}  // namespace hicache::daemon::redis
