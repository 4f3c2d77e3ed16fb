// Socket messages: whatever a peer sends is refused, or means exactly what encoding it again says.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <variant>

#include "shm/messages.hpp"

using namespace hicache;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto message = decode_message({data, size});
  if (!message) return 0;
  const auto again = encode_message(*message);
  if (again.size() != size || std::memcmp(again.data(), data, size) != 0) std::abort();

  if (const auto* hello = std::get_if<Hello>(&*message)) {
    if (hello->spec.validate()) {
      // Sizes that the daemon computes with once a namespace was accepted.
      if (hello->spec.shard_bytes() > kMaxShardBytes) std::abort();
      if (hello->spec.slot_bytes() < hello->spec.shard_bytes()) std::abort();
      if (hello->spec.digest() == PrefixHash{}) std::abort();
    }
  } else if (const auto* buffers = std::get_if<RegisterBuffers>(&*message)) {
    NamespaceSpec spec;
    spec.page_tokens = 16;
    spec.layers = 2;
    spec.heads_per_shard = 1;
    spec.head_dim = 8;
    spec.element_bytes = 2;
    if (buffers->geometry.validate(spec)) {
      // A geometry that passed must keep every copy inside its allocation.
      for (const DeviceTensor& t : buffers->geometry.tensors) {
        if (t.allocation >= buffers->geometry.allocations.size()) std::abort();
        const auto last = static_cast<unsigned __int128>(t.page_stride) * (buffers->geometry.pages - 1);
        if (t.offset + last + t.page_bytes > buffers->geometry.allocations[t.allocation].bytes) std::abort();
      }
    }
  } else if (const auto* welcome = std::get_if<Welcome>(&*message)) {
    if (welcome->channel.valid() && welcome->channel.total_bytes < welcome->channel.arena_offset)
      std::abort();
  }
  return 0;
}
