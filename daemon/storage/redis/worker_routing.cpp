// Which server a page goes to: the one of the configuration, or the one that serves the slot of its key.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "daemon/storage/redis/worker.hpp"
#include "shm/clock.hpp"

namespace hicache::daemon::redis {
namespace {

constexpr std::uint64_t kMapPauseNs = 250'000'000;
constexpr std::uint8_t kMaxRedirects = 5;

}  // namespace

// The node of an endpoint, made when there is none; nullptr when there are too many.
Node* Worker::node_at(const Endpoint& endpoint) {
  for (const Member& member : members_) {
    if (member.node->endpoint().text == endpoint.text) return member.node.get();
  }
  if (members_.size() >= kMaxNodes) return nullptr;
  members_.push_back(
      {std::make_unique<Node>(endpoint, epoll_.get(), shared_.pool, shared_.settings, *this), false, false});
  health_changed_ = true;
  return members_.back().node.get();
}

void Worker::place(PageOperationPtr operation) {
  const std::uint64_t deadline = operation->batch().deadline_ns;
  if (deadline != 0 && (next_sweep_ns_ == 0 || deadline < next_sweep_ns_)) next_sweep_ns_ = deadline;
  if (!shared_.settings.cluster) return members_.front().node->queue().push(std::move(operation));
  if (!map_known_) return unrouted_.push(std::move(operation));
  Node* node = slots_[operation->slot()];
  if (node != nullptr) return node->queue().push(std::move(operation));
  map_wanted_ = true;
  note_problem(*members_.front().node, operation->step,
               "no node of the cluster serves slot " + std::to_string(operation->slot()));
  operation->finish(Status::system_error);
}

bool Worker::follow_redirect(Node& node, PageOperationPtr& operation, const Reply& reply) {
  const std::string_view code = error_code(reply);
  if (code == "CLUSTERDOWN") map_wanted_ = shared_.settings.cluster;
  if (code != "MOVED" && code != "ASK") return false;
  if (!shared_.settings.cluster) {
    note_problem(node, std::nullopt, "it is a node of a cluster, which needs storage.redis.cluster true");
    operation->finish(Status::system_error);
    return true;
  }
  const auto redirect = parse_redirect(reply, node.endpoint());
  Node* target = redirect ? node_at(redirect->node) : nullptr;
  if (target == nullptr || ++operation->redirects > kMaxRedirects) {
    note_problem(node, operation->step, "a redirect that leads nowhere: " + reply.text);
    operation->finish(Status::system_error);
    return true;
  }
  for (Member& member : members_) member.serves = member.serves || member.node.get() == target;
  if (redirect->ask) {
    operation->asked_at = redirect->node;
  } else {
    slots_[operation->slot()] = target;
    map_wanted_ = true;
  }
  const std::uint64_t deadline = operation->batch().deadline_ns;
  if (deadline != 0) next_sweep_ns_ = next_sweep_ns_ == 0 ? deadline : std::min(next_sweep_ns_, deadline);
  target->queue().push_front(std::move(operation));
  return true;
}

void Worker::ask_for_map(std::uint64_t now) {
  if (map_asked_ || now < next_map_ns_) return;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Node& node =
        *members_[map_turn_++ % members_.size()].node;  // not always the same: it may be the one that errs
    Connection* connection = node.ready_connection();
    if (connection == nullptr) continue;
    next_map_ns_ = now + kMapPauseNs;
    map_asked_ = true;
    map_wanted_ = false;
    return connection->send({CommandKind::slots, nullptr}, make_command({"CLUSTER", "SLOTS"}), now);
  }
}

void Worker::apply_map(Node& node, const Reply& reply) {
  std::string fault;
  if (reply.kind == ReplyKind::error) {
    fault = reply.text;
  } else if (const auto ranges = parse_slots(reply, node.endpoint()); !ranges) {
    fault = ranges.error().message;
  } else {
    std::vector<Node*> slots(kClusterSlots, nullptr);
    std::vector<const Node*> serving;
    for (const SlotRange& range : *ranges) {
      Node* server = node_at(range.node);
      if (server == nullptr) continue;
      if (std::find(serving.begin(), serving.end(), server) == serving.end()) serving.push_back(server);
      for (std::uint32_t slot = range.first; slot <= range.last; ++slot) slots[slot] = server;
    }
    slots_ = std::move(slots);
    map_known_ = true;
    health_changed_ = true;
    for (Member& member : members_) {
      member.serves = std::find(serving.begin(), serving.end(), member.node.get()) != serving.end();
    }
  }
  if (!fault.empty()) {
    map_wanted_ = true;
    note_problem(node, std::nullopt, "no map of the cluster: " + fault);
    if (!map_known_) unrouted_.fail_all(Status::system_error);
    return;
  }
  OperationQueue waiting;
  std::swap(waiting, unrouted_);
  while (!waiting.empty()) place(waiting.pop());
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].serves || members_[i].seed) continue;
    std::swap(waiting,
              members_[i].node->queue());  // it has left the cluster, perhaps with pages in its queue
    while (!waiting.empty()) place(waiting.pop());
  }
}

}  // namespace hicache::daemon::redis
