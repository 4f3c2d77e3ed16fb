// What a Redis server sends: whatever it is and however it is cut, the reader takes the same from it, keeps
// to its bounds, writes only into the page's buffers, and calls a page whole only when it is.
//
// Input: a control byte, then the server's bytes, in which '@' stands for the true reply with the page's
// record. Control: bits 0-5 size of the pieces less one, bit 7 whether the replies are expected to hold the
// page.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/storage/redis/cluster.hpp"
#include "daemon/storage/redis/page_landing.hpp"
#include "daemon/storage/redis/reply_reader.hpp"
#include "shm/prefix_hash.hpp"

using namespace hicache;
using namespace hicache::daemon;
using namespace hicache::daemon::redis;

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

struct Page {
  StorageNamespace ns;
  RecordIdentity identity{StorageNamespace{}, PrefixHash{}};
  std::string payload;
  std::string reply;

  Page() {
    ns.spec.page_tokens = 1;
    ns.spec.layers = 1;
    ns.spec.heads_per_shard = 1;
    ns.spec.head_dim = 16;
    ns.spec.element_bytes = 2;
    ns.spec.tp_size = 2;
    ns.digest = ns.spec.digest();
    const std::vector<std::uint32_t> tokens = {7};
    identity = RecordIdentity(ns, hash_page(tokens, std::nullopt));
    for (std::size_t i = 0; i < identity.payload_bytes; ++i) payload += static_cast<char>(i * 5 + 1);
    const auto bytes = std::as_bytes(std::span(payload.data(), payload.size()));
    const std::vector<std::span<const std::byte>> shards = {bytes.first(64), bytes.subspan(64)};
    const RecordHeader header = make_record_header(identity, shards);
    reply = "$" + std::to_string(identity.record_bytes()) + "\r\n" +
            std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload + "\r\n";
  }
};

void describe(const Reply& reply, std::size_t depth, std::string& out) {
  require(depth <= ReplyReader::kMaxDepth);
  out += std::to_string(static_cast<int>(reply.kind)) + ":" + std::to_string(reply.integer) + ":" +
         reply.text + ":" + std::to_string(static_cast<int>(reply.fate)) + "(";
  for (const Reply& item : reply.items) describe(item, depth + 1, out);
  out += ")";
}

// What the bytes mean when they come in pieces. With `direct` payload is written to the buffers by the
// caller.
std::string meaning(const Page& page, const std::string& bytes, std::size_t step, bool expect_page,
                    bool direct) {
  // Buffers of exactly the payload's size: the address sanitizer sees every byte beyond.
  std::vector<std::byte> first(64);
  std::vector<std::byte> second(64);
  static const Endpoint asked = *make_endpoint("10.0.0.1:7000", Names::refuse);
  PageLanding landing;
  ReplyReader reader;
  std::string out;
  const auto begin = [&] {
    landing.aim(page.identity, {first, second});
    reader.expect(expect_page ? &landing : nullptr);
  };
  begin();
  for (std::size_t at = 0; at < bytes.size() && !reader.broken();) {
    if (direct && reader.landing_now()) {
      iovec place{};
      require(landing.targets({&place, 1}) == 1);
      const std::size_t count = std::min({place.iov_len, step, bytes.size() - at});
      std::memcpy(place.iov_base, bytes.data() + at, count);
      reader.landed(count);
      at += count;
    } else {
      const std::string piece = bytes.substr(at, step);  // its own memory
      const std::size_t used = reader.feed(std::as_bytes(std::span(piece.data(), piece.size())));
      require(used > 0 || reader.done());
      at += used;
    }
    if (!reader.done()) continue;
    const Reply reply = reader.take();
    describe(reply, 0, out);
    if (reply.kind == ReplyKind::page && reply.fate == PageFate::whole) {
      require(std::memcmp(first.data(), page.payload.data(), 64) == 0 &&
              std::memcmp(second.data(), page.payload.data() + 64, 64) == 0);
    }
    if (const auto ranges = parse_slots(reply, asked)) {
      for (const SlotRange& range : *ranges) require(range.first <= range.last && range.last < kClusterSlots);
    }
    if (const auto redirect = parse_redirect(reply, asked)) require(redirect->node.address_bytes > 0);
    begin();
  }
  return out + (reader.broken() ? "broken: " + reader.fault() : "");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Page page;
  if (size == 0) return 0;
  std::string bytes;
  for (std::size_t i = 1; i < size; ++i) {
    if (data[i] == '@') {
      bytes += page.reply;
    } else {
      bytes += static_cast<char>(data[i]);
    }
  }
  const bool expect_page = (data[0] & 0x80) != 0;
  const std::size_t step = (data[0] & 0x3f) + 1u;
  const std::string whole = meaning(page, bytes, bytes.size() + 1, expect_page, false);
  require(meaning(page, bytes, step, expect_page, false) == whole);
  require(meaning(page, bytes, step, expect_page, true) == whole);
  return 0;
}
