// From a page's step to its command, and from the server's reply to the next step or the outcome.
#pragma once

#include "daemon/storage/redis/command.hpp"
#include "daemon/storage/redis/page_operation.hpp"
#include "daemon/storage/redis/reply_reader.hpp"

namespace hicache::daemon::redis {

// The command of operation.step. For write the payload's checksum is computed here.
WireCommand make_page_command(const PageOperation& operation, const StoragePool& pool, std::uint64_t ttl_ms);

struct Verdict {
  enum class Then : std::uint8_t { finish, go_on, nonsense };
  Then then = Then::nonsense;             // nonsense: no server answers this step so
  Status outcome = Status::system_error;  // of finish
  Step next = Step::probe;                // of go_on
};
// Precondition: the reply is not a redirect.
Verdict judge(const PageOperation& operation, const Reply& reply, bool has_ttl);

}  // namespace hicache::daemon::redis
