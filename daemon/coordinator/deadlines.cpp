// Ends of operations whose time is up. Silence is not death: nothing is declared dead here.
#include "daemon/coordinator/coordinator_impl.hpp"

namespace hicache::daemon {

void Coordinator::Impl::set_deadline(const Deadline& deadline) {
  const std::size_t open = transfers_in_flight.size() + writes_in_flight.size() +
                           prefetches_in_flight.size() + backup_asks.open.size();
  deadlines.push(deadline, open, [this](const Deadline& d) {
    if (d.backup != 0) return backup_asks.open.contains(d.backup);
    if (d.prefetch != 0) return prefetches_in_flight.contains(d.prefetch);
    return d.write_number != 0 ? writes_in_flight.contains(d.write_number)
                               : transfers_in_flight.contains(d.transfer);
  });
}

void Coordinator::Impl::expire(std::uint64_t at_ns) {
  const auto scope = commit();
  while (!deadlines.empty() && deadlines.top().at_ns <= at_ns) {
    const Deadline due = deadlines.top();
    deadlines.pop();
    if (due.prefetch != 0) {
      expire_prefetch(due);
      continue;
    }
    if (due.backup != 0) {
      expire_backup_ask(due.backup);
      continue;
    }
    if (due.write_number == 0) {
      expire_load(due.transfer);
      continue;
    }
    const auto found = writes_in_flight.find(due.write_number);
    if (found == writes_in_flight.end() || found->second->ended) continue;
    stats.add(Counter::timed_out);
    end_write(*found->second, Status::timed_out);
  }
}

// The transfer engine ends loads that have not started by themselves; here end those whose copy is still
// running.
void Coordinator::Impl::expire_load(std::uint64_t transfer) {
  const auto found = transfers_in_flight.find(transfer);
  if (found == transfers_in_flight.end() || found->second.load.answered) return;
  PendingLoad& load = found->second.load;
  load.answered = true;
  Client* client = clients.find(load.client, load.client_generation);
  if (client == nullptr || client->state != ClientState::attached) return;
  stats.add(Counter::timed_out);
  load.owes_pages = true;
  ++client->owed_returns;
  Completion c;
  c.user_data = load.user_data;
  c.opcode = Opcode::load;
  c.status = Status::timed_out;
  c.flags = Completion::kPagesBusy;
  c.lease = load.lease.value;
  c.operation_sequence = load.operation_sequence;
  complete(*client, c);
  transfers->cancel(TransferId{transfer});
}

}  // namespace hicache::daemon
