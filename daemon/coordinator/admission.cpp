// What a client's role and quotas allow. A refusal concerns this client alone and changes nothing of its
// group.
#include "daemon/coordinator/coordinator_impl.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {

// What an operation reads from the arena, of the daemon's own copy of the submission, which has been checked.
std::uint64_t list_bytes(const Submission& s) {
  if (s.opcode == Opcode::reserve) return std::uint64_t{s.count} * sizeof(PrefixHash);
  if (s.opcode != Opcode::write && s.opcode != Opcode::load) return 0;
  const std::uint64_t words =
      (s.opcode == Opcode::write ? 2 : 1) + ((s.flags & Submission::kWithStates) != 0 ? 1 : 0);
  return s.count * words * sizeof(std::uint32_t);
}

}  // namespace

Status Coordinator::Impl::admit(Client& client, const Submission& submission, std::uint64_t sequence) {
  // A prefetch makes pages and may evict others for them; a backup fills storage, where others may have to
  // go.
  const bool makes_pages = submission.opcode == Opcode::write || submission.opcode == Opcode::prefetch;
  const bool changes = makes_pages || submission.opcode == Opcode::backup;
  if (client.read_only && changes) {
    stats.add(Counter::read_only_refused);
    return Status::not_permitted;
  }
  // What gives something back, or only asks, is never refused: a client at its limit must be able to leave
  // it.
  const bool takes = makes_pages || submission.opcode == Opcode::reserve || submission.opcode == Opcode::load;
  if (!takes) return Status::ok;
  const auto over = [&](Counter which) {
    stats.add(which);
    bump(clients.entry(client).over_quota);
    return Status::again;
  };
  // This one is counted already.
  if (client.open_operations > config.limits.operations_per_client) return over(Counter::quota_operations);
  const std::uint64_t bytes = list_bytes(submission);
  const std::uint64_t allowed = config.limits.arena_in_flight_bytes == 0
                                    ? client.geometry.arena_bytes
                                    : config.limits.arena_in_flight_bytes;
  if (bytes > allowed || client.lists.bytes() > allowed - bytes) {
    const Status again = over(Counter::quota_arena);
    return bytes > allowed ? Status::too_large : again;  // waiting would not help
  }
  if (bytes > 0) client.lists.add(sequence, bytes);
  return Status::ok;
}

}  // namespace hicache::daemon
