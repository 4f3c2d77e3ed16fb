// A thread that speaks to the servers: it takes pages from any thread, routes each to the server that has its
// key, and reports what came of it. Everything but the inbox and the published health is its thread's own.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/sessions/log_budget.hpp"
#include "daemon/storage/redis/clear_run.hpp"
#include "daemon/storage/redis/cluster.hpp"
#include "daemon/storage/redis/node.hpp"
#include "daemon/storage/redis/settings.hpp"
#include "shm/fd.hpp"

namespace hicache::daemon::redis {

// What all workers of a backend share. Outlives them.
struct Shared {
  Settings settings;
  StoragePool pool;
  // A clear is running: exists and get find nothing, put keeps nothing. Relaxed: a page that is submitted
  // after clear() has returned sees it through the inbox's mutex.
  std::atomic<bool> clearing{false};
};

struct WorkerHealth {
  std::size_t servers = 0;  // that serve pages
  std::size_t up = 0;
  std::string problem;  // "" = none
};

class Worker final : public NodeOwner {
 public:
  // system_error when the thread or its descriptors can't be made.
  static Result<std::unique_ptr<Worker>> start(Shared& shared);
  // Ends what has not begun with closed and waits for what has.
  ~Worker() override;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Any thread.
  void submit(std::vector<PageOperationPtr> operations);
  void wake();   // look at cancelled pages
  void clear();  // begins; shared.clearing is true and becomes false at its end
  [[nodiscard]] WorkerHealth health() const;

 private:
  struct Member {
    std::unique_ptr<Node> node;
    bool seed = false;    // of the configuration
    bool serves = false;  // in the last map, or a redirect named it since
  };

  Worker(Shared& shared, UniqueFd epoll, UniqueFd event);
  void run();
  void recover(const char* what) noexcept;
  void turn();
  void take_inbox(std::uint64_t now);
  void wait_for_events(std::uint64_t until);
  void prune();

  void place(PageOperationPtr operation);
  void page_answered(Node& node, Connection& connection, PageOperationPtr operation, const Reply& reply);
  // The page's key is elsewhere. Takes the page when it goes on there.
  bool follow_redirect(Node& node, PageOperationPtr& operation, const Reply& reply);
  Node* node_at(const Endpoint& endpoint);
  void ask_for_map(std::uint64_t now);
  void apply_map(Node& node, const Reply& reply);
  // Shown until a page's `step`, or any when there is none, goes well again.
  void note_problem(const Node& node, std::optional<Step> step, const std::string& text);
  void publish();
  void end_clear();

  void answered(Node& node, Connection& connection, Pending pending, Reply reply) override;
  void lost(Node& node, Connection& connection, std::deque<Pending> unanswered, Status outcome) override;
  void distrusted(Node& node, const std::string& why) override;
  void changed(Node& node) override;

  Shared& shared_;
  UniqueFd epoll_;
  UniqueFd event_;  // raised by whoever puts something into the inbox

  std::mutex inbox_mutex_;
  std::vector<PageOperationPtr> inbox_;
  bool stop_wanted_ = false;
  bool clear_wanted_ = false;
  bool look_wanted_ = false;

  mutable std::mutex health_mutex_;
  WorkerHealth health_;

  std::vector<Member> members_;
  std::vector<Node*> slots_;  // by cluster slot, nullptr = served by nobody
  OperationQueue unrouted_;   // until there is a map
  bool map_known_ = false;
  bool map_wanted_ = false;
  bool map_asked_ = false;
  std::uint64_t next_map_ns_ = 0;
  std::size_t map_turn_ = 0;         // whom to ask next
  std::uint64_t next_sweep_ns_ = 0;  // earliest deadline of what waits; 0 = none
  bool sweep_wanted_ = false;
  bool stopping_ = false;
  ClearRun clear_;
  std::string problem_;  // what the server said when it last refused a page
  std::optional<Step> problem_step_;
  std::uint64_t problem_ns_ = 0;
  bool health_changed_ = true;
  LogBudget log_budget_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace hicache::daemon::redis
