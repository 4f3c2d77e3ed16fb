// The parts of the redis backend that need no server: RESP2, slots, redirects, records.
#include <cstring>

#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/storage/redis/cluster.hpp"
#include "daemon/storage/redis/command.hpp"
#include "daemon/storage/redis/node.hpp"
#include "daemon/storage/redis/page_landing.hpp"
#include "daemon/storage/redis/page_operation.hpp"
#include "daemon/storage/redis/reply_reader.hpp"
#include "shm/prefix_hash.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::daemon;
using namespace hicache::daemon::redis;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

struct Read {
  bool done = false;
  bool broken = false;
  std::size_t used = 0;
  Reply reply;
};

// Feeds `text` in pieces of `step` bytes.
Read read(std::string_view text, std::size_t step, PageLanding* landing = nullptr) {
  ReplyReader reader;
  reader.expect(landing);
  Read result;
  while (result.used < text.size() && !reader.done() && !reader.broken()) {
    result.used += reader.feed(bytes_of(text.substr(result.used, step)));
  }
  result.done = reader.done();
  result.broken = reader.broken();
  CHECK(result.broken == !reader.fault().empty());
  if (result.done) result.reply = reader.take();
  return result;
}

// "[1,[a,nil]]": a reply as text.
std::string show(const Reply& reply) {
  switch (reply.kind) {
    case ReplyKind::status:
      return "+" + reply.text;
    case ReplyKind::error:
      return "-" + reply.text;
    case ReplyKind::integer:
      return std::to_string(reply.integer);
    case ReplyKind::nil:
      return "nil";
    case ReplyKind::bulk:
      return "'" + reply.text + "'";
    case ReplyKind::page:
      return "page";
    case ReplyKind::array:
      break;
  }
  std::string text;
  for (const Reply& item : reply.items) text += (text.empty() ? "" : ",") + show(item);
  return "[" + text + "]";
}

const StorageNamespace& some_namespace() {
  static const StorageNamespace ns = [] {
    NamespaceSpec spec;
    spec.model = "model";
    spec.page_tokens = 4;
    spec.layers = 2;
    spec.heads_per_shard = 1;
    spec.head_dim = 8;
    spec.element_bytes = 2;
    spec.tp_size = 2;
    return StorageNamespace{spec.digest(), spec};
  }();
  return ns;
}

PrefixHash some_hash() {
  const std::vector<std::uint32_t> tokens = {1, 2, 3, 4};
  return hash_page(tokens, std::nullopt);
}

}  // namespace

TEST_CASE("RESP2 replies are understood however they are cut, and no byte behind them is taken") {
  const std::vector<std::pair<std::string, std::string>> replies = {
      {"+OK\r\n", "+OK"},
      {"-ERR no\r\n", "-ERR no"},
      {":0\r\n", "0"},
      {":-12\r\n", "-12"},
      {":9223372036854775807\r\n", "9223372036854775807"},
      {"$-1\r\n", "nil"},
      {"*-1\r\n", "nil"},
      {"$0\r\n\r\n", "''"},
      {"$5\r\na\r\nbc\r\n", "'a\r\nbc'"},
      {"*0\r\n", "[]"},
      {"*2\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n", "[1,['a',nil]]"},
      {"*2\r\n*0\r\n*1\r\n*0\r\n", "[[],[[]]]"},
      {"*3\r\n+a\r\n-b\r\n:3\r\n", "[+a,-b,3]"},
  };
  for (const auto& [text, meaning] : replies) {
    for (std::size_t step = 1; step <= text.size() + 4; ++step) {
      INFO(meaning << " in pieces of " << step);
      const Read result = read(text + "+OK\r\n", step);
      REQUIRE(result.done);
      CHECK(result.used == text.size());
      CHECK(show(result.reply) == meaning);
      for (std::size_t cut = 0; cut < text.size(); ++cut) {
        const Read part = read(text.substr(0, cut), step);
        CHECK_FALSE(part.done);
        CHECK_FALSE(part.broken);
      }
    }
  }
}

TEST_CASE("RESP2 that is none, too long, too deep or too large is refused at once") {
  std::string deep;
  for (std::size_t i = 0; i <= ReplyReader::kMaxDepth; ++i) deep += "*1\r\n";
  std::string wide = "*200000\r\n*100000\r\n";
  std::string large = "*9\r\n";
  for (int i = 0; i < 9; ++i) large += "$1048576\r\n" + std::string(1048576, 'x') + "\r\n";
  for (const std::string& text : {std::string("x\r\n"),
                                  std::string("\r\n"),
                                  std::string("\n"),
                                  std::string("+OK\n"),
                                  std::string("$1\r\nab\r\n"),
                                  std::string("$1\r\na\n\n"),
                                  std::string(":\r\n"),
                                  std::string(":+1\r\n"),
                                  std::string(": 1\r\n"),
                                  std::string(":1 \r\n"),
                                  std::string(":1\r1\r\n"),
                                  std::string(":9223372036854775808\r\n"),
                                  std::string("$-2\r\n"),
                                  std::string("*-2\r\n"),
                                  std::string("$536870913\r\n"),
                                  std::string("$8388609\r\n"),
                                  std::string("*262145\r\n"),
                                  "+" + std::string(ReplyReader::kMaxLineBytes, 'x') + "\r\n",
                                  deep,
                                  wide,
                                  large,
                                  std::string("%1\r\n"),
                                  std::string("_\r\n"),
                                  std::string("#t\r\n"),
                                  std::string(",1.5\r\n"),
                                  std::string(">1\r\n+x\r\n")}) {
    for (const std::size_t step : {std::size_t{1}, std::size_t{7}, text.size()}) {
      if (text.size() > 100'000 && step == 1) continue;
      INFO(text.substr(0, 40) << " in pieces of " << step);
      CHECK(read(text, step).broken);
    }
  }
}

TEST_CASE(
    "a record lands in its buffers only when header and length are its page's, and is whole only by "
    "checksum") {
  if (!checksums_available()) {
    WARN("SKIPPED: records need xxHash at build time");
    return;
  }
  const RecordIdentity identity(some_namespace(), some_hash());
  REQUIRE(identity.payload_bytes == 512);
  std::string payload(512, 'p');
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>(i * 7);
  const std::vector<std::span<const std::byte>> shards = {bytes_of(payload).first(256),
                                                          bytes_of(payload).subspan(256)};
  const RecordHeader header = make_record_header(identity, shards);
  CHECK(names_record(header, identity));
  const std::string record = std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
  const std::string reply = "$" + std::to_string(record.size()) + "\r\n" + record + "\r\n";

  std::vector<std::byte> buffers(512);
  PageLanding landing;
  const auto land = [&](const std::string& text, std::size_t step) {
    std::fill(buffers.begin(), buffers.end(), std::byte{0});
    landing.aim(identity, {std::span(buffers).first(256), std::span(buffers).subspan(256)});
    return read(text, step, &landing);
  };
  for (std::size_t step = 1; step <= reply.size(); step += 1 + step / 3) {
    const Read result = land(reply + ":1\r\n", step);
    REQUIRE(result.done);
    CHECK(result.used == reply.size());
    CHECK(result.reply.kind == ReplyKind::page);
    CHECK(result.reply.fate == PageFate::whole);
    CHECK(std::memcmp(buffers.data(), payload.data(), payload.size()) == 0);
  }
  for (std::size_t at = 0; at < record.size(); ++at) {
    std::string bad = record;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    const Read result = land("$" + std::to_string(bad.size()) + "\r\n" + bad + "\r\n", 97);
    REQUIRE(result.done);
    const bool in_header = at < sizeof header;
    CHECK(result.reply.fate == (in_header ? PageFate::foreign : PageFate::damaged));
    if (in_header) CHECK(buffers[5] == std::byte{0});  // nothing landed
  }
  for (const std::size_t length : {std::size_t{0}, std::size_t{1}, record.size() - 1, record.size() + 1}) {
    const std::string other = (record + "x").substr(0, length);
    const Read result = land("$" + std::to_string(length) + "\r\n" + other + "\r\n", 50);
    REQUIRE(result.done);
    CHECK(result.reply.fate == PageFate::foreign);
    CHECK(buffers[5] == std::byte{0});
  }
  // Where the reply is another thing than a string, it is that.
  CHECK(show(land("$-1\r\n", 1).reply) == "nil");
  CHECK(show(land("-ERR x\r\n", 1).reply) == "-ERR x");
  CHECK(show(land("*1\r\n$3\r\nabc\r\n", 1).reply) == "['abc']");
}

TEST_CASE("cluster: a key's slot is CRC16 modulo 16384") {
  CHECK(cluster_slot("123456789") == 12739);  // the check value of CRC16/XMODEM, 0x31c3
  CHECK(cluster_slot("foo") == 12182);
  CHECK(cluster_slot("") == 0);
  CHECK(page_key("hicache", some_namespace(), some_hash()) ==
        "hicache:" + to_hex(some_namespace().digest) + ":" + to_hex(some_hash()));
}

TEST_CASE("cluster: redirects and maps are read, and refused when they make no sense") {
  const Endpoint asked = *make_endpoint("10.0.0.1:7000", Names::refuse);
  const auto redirect = [&](const std::string& text) {
    Reply error;
    error.kind = ReplyKind::error;
    error.text = text;
    const auto found = parse_redirect(error, asked);
    return found ? (found->ask ? "ask " : "moved ") + found->node.text : std::string("none");
  };
  CHECK(redirect("MOVED 3999 127.0.0.1:6381") == "moved 127.0.0.1:6381");
  CHECK(redirect("ASK 3999 127.0.0.1:6381") == "ask 127.0.0.1:6381");
  CHECK(redirect("MOVED 1 :6381") == "moved 10.0.0.1:6381");
  CHECK(redirect("MOVED 1 ::1:6381") == "moved [::1]:6381");
  CHECK(redirect("MOVED 1 [::1]:6381") == "moved [::1]:6381");
  for (const std::string text :
       {"MOVED", "MOVED 1", "MOVED 1 host.example:6381", "MOVED 1 127.0.0.1", "MOVED 1 127.0.0.1:0",
        "MOVED 1 127.0.0.1:65536", "MOVED 1 127.0.0.1:x", "MOVED  ", "ERR MOVED 1 127.0.0.1:1", ""}) {
    INFO(text);
    CHECK(redirect(text) == "none");
  }

  const auto map = [&](const std::string& text) -> std::string {
    const Read result = read(text, text.size());
    if (!result.done) return "no reply";
    const auto ranges = parse_slots(result.reply, asked);
    if (!ranges) return "refused";
    std::string shown;
    for (const SlotRange& range : *ranges) {
      shown += std::to_string(range.first) + "-" + std::to_string(range.last) + "@" + range.node.text + " ";
    }
    return shown;
  };
  const std::string node = "*3\r\n$9\r\n127.0.0.1\r\n:7001\r\n$1\r\nx\r\n";
  CHECK(map("*0\r\n") == "");
  CHECK(map("*2\r\n*3\r\n:0\r\n:9\r\n" + node + "*4\r\n:10\r\n:16383\r\n" + node + node) ==
        "0-9@127.0.0.1:7001 10-16383@127.0.0.1:7001 ");
  CHECK(map("*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$-1\r\n:7001\r\n") == "0-9@10.0.0.1:7001 ");
  CHECK(map("*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$1\r\n?\r\n:7001\r\n") == "0-9@10.0.0.1:7001 ");
  for (const std::string& text :
       {std::string("+OK\r\n"), std::string("*1\r\n:1\r\n"), std::string("*1\r\n*2\r\n:0\r\n:1\r\n"),
        "*1\r\n*3\r\n:-1\r\n:9\r\n" + node, "*1\r\n*3\r\n:0\r\n:16384\r\n" + node,
        "*1\r\n*3\r\n:9\r\n:0\r\n" + node, "*1\r\n*3\r\n$1\r\n0\r\n:9\r\n" + node,
        std::string("*1\r\n*3\r\n:0\r\n:9\r\n:1\r\n"),
        std::string("*1\r\n*3\r\n:0\r\n:9\r\n*1\r\n$1\r\nx\r\n"),
        std::string("*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$9\r\n127.0.0.1\r\n:65536\r\n"),
        std::string("*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$4\r\nhost\r\n:7001\r\n")}) {
    INFO(text);
    CHECK(map(text) == "refused");
  }
}

TEST_CASE("a server's words are shown short, printable and without the password") {
  CHECK(shown_text("ERR plain", "") == "ERR plain");
  CHECK(shown_text("a\r\n\x1b[31mb\xff", "") == "a???[31mb?");
  CHECK(shown_text("ERR unknown command 'AUTH', with args: 'hunter2' 'hunter2'", "hunter2") ==
        "ERR unknown command 'AUTH', with args: '***' '***'");
  CHECK(shown_text(std::string(1000, 'x'), "").size() == 163);
}
