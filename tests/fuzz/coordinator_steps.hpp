// The steps of an input of the coordinator fuzzer; its seeds are written with the same numbers.
#pragma once

#include <cstdint>

#include "shm/protocol.hpp"

namespace hicache::fuzz {

// A step below kOpcodeCount posts an entry of that opcode, so no operation can be left out. The others
// follow.
enum class Step : std::uint8_t {
  raw_entry = kOpcodeCount,  // any 56 bytes
  scribble,                  // anywhere in the channel
  read,                      // completions
  fence,                     // stores a value in a write fence
  settle,                    // lets the coordinator catch up
  die,                       // and come again, perhaps as somebody else
  control,                   // a command
  buffers,                   // registers device buffers
  end
};
constexpr auto kSteps = static_cast<std::uint8_t>(Step::end);

constexpr std::uint8_t number_of(Opcode opcode) {
  return static_cast<std::uint8_t>(opcode);
}
constexpr std::uint8_t number_of(Step step) {
  return static_cast<std::uint8_t>(step);
}

}  // namespace hicache::fuzz
