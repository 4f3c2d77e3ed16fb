// The daemon's copies on the caller's own thread: the real jobs and the real host backend, without the
// transfer threads, so that a walk through the coordinator sees everything in one order.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/transfer/transfer_job.hpp"

namespace hicache::test {

// Not thread-safe: the coordinator's thread.
class InlineTransfers final : public daemon::Transfers {
 public:
  InlineTransfers(const daemon::TransferOptions& options, std::unique_ptr<daemon::DeviceBackend> backend,
                  daemon::TransferSink sink)
      : options_(options), backend_(std::move(backend)), sink_(std::move(sink)) {}

  // Transfers that come from now on wait until they are let go, as behind a write fence.
  void hold() { held_ = true; }
  void let_go() {
    held_ = false;
    for (auto& job : std::exchange(waiting_, {})) run(*job);
  }

  void submit(daemon::Transfer transfer) override {
    auto job = std::make_unique<daemon::TransferJob>(std::move(transfer));
    job->admit();
    if (held_) {
      waiting_.push_back(std::move(job));
    } else {
      run(*job);
    }
  }
  void cancel(daemon::TransferId id) override {
    end([id](const daemon::Transfer& t) { return t.id == id; }, Status::timed_out);
  }
  void cancel_client(ClientSlot client, Generation generation) override {
    end(
        [=](const daemon::Transfer& t) {
          return t.memory->client == client && t.memory->client_generation == generation;
        },
        Status::peer_lost);
  }

 private:
  void run(daemon::TransferJob& job) {
    while (!job.advance(*backend_, options_, 1 << 20)) {
    }
    sink_(job.finish(options_));
  }
  void end(const std::function<bool(const daemon::Transfer&)>& chosen, Status status) {
    std::vector<daemon::TransferJobPtr> ended;
    for (auto& job : waiting_) {
      if (chosen(job->transfer)) ended.push_back(std::move(job));
    }
    std::erase_if(waiting_, [](const auto& job) { return job == nullptr; });
    for (auto& job : ended) {
      job->verdict = status;
      sink_(job->finish(options_));
    }
  }

  daemon::TransferOptions options_;
  std::unique_ptr<daemon::DeviceBackend> backend_;
  daemon::TransferSink sink_;
  std::vector<daemon::TransferJobPtr> waiting_;
  bool held_ = false;
};

}  // namespace hicache::test
