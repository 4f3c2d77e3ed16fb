// The storage tier: everything between the coordinator and a storage backend. It queues requests, sends reads
// before writes and owners in turn, watches deadlines by its own clock, stops asking a backend that does not
// answer, and exchanges backends while requests go on.
//
// A request has at most kStorageBatchPages pages and becomes one batch. The tier tells of it, in events:
//   page   how a page ended; its buffers are free. Each page exactly once.
//   late   the deadline has passed: pages without an outcome count as timed out. Their buffers are not free,
//          storage may still read or write them. At most once.
//   ended  every page has had its outcome. Exactly once, last.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/config.hpp"
#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/storage/backend.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

struct StorageRequest {
  StorageBatchId id;  // the caller's, unique, below 2^63
  StorageOperation operation = StorageOperation::exists;
  std::uint32_t owner = 0;  // who waits for it: owners are served in turn
  std::shared_ptr<const StorageNamespace> ns;
  std::vector<PrefixHash> hashes;
  std::vector<PoolExtent> buffers;
};

struct StorageEvent {
  enum class Kind { page, late, ended };
  StorageBatchId request;
  Kind kind = Kind::page;
  std::uint32_t page = 0;      // page
  Status status = Status::ok;  // page: as in StorageSink
  std::uint64_t us = 0;        // ended: since the backend got it; 0 when it never did
};

enum class StorageState { detached, attached, suspended };

constexpr std::string_view to_string(StorageState state) {
  switch (state) {
    case StorageState::detached:
      return "detached";
    case StorageState::attached:
      return "attached";
    case StorageState::suspended:
      return "suspended";
  }
  return "unknown_state";
}

// Thread safety: every method from any thread. None waits for storage but attach, stop and the destructor.
class StorageTier {
 public:
  using Settings = nlohmann::ordered_json;
  using Answer = std::function<void(Outcome)>;

  // `notify` is called, on any thread, when take_events has something to give after it had nothing. It must
  // not block. Pool and checksums outlive the tier; checksums may be null.
  StorageTier(const Config::Storage& config, const StoragePool& pool, const ShardChecksums* checksums,
              std::function<void()> notify);
  // Ends every request (closed) and the backend.
  ~StorageTier();
  StorageTier(const StorageTier&) = delete;
  StorageTier& operator=(const StorageTier&) = delete;

  // Cheap. Requests end at once, with closed, unless the state is attached.
  [[nodiscard]] StorageState state() const;
  void submit(StorageRequest request);
  // Ends what has not begun. An unknown id is ignored.
  void cancel(StorageBatchId id);
  // Appends the events since the last call, in order of each request.
  void take_events(std::vector<StorageEvent>& out);

  // Makes a backend and attaches it. exists when one is attached already.
  Outcome attach(const std::string& name, const Settings& settings);
  // The same, and more, on the tier's own thread, in the order of the calls; the answer comes from there.
  void attach_later(std::string name, Settings settings, Answer answer);
  // Takes the backend out: what waits ends with closed, what runs ends as it can. not_found without one.
  void detach_later(Answer answer);
  // Forgets every page in storage. not_found without a backend.
  void clear_later(Answer answer);

  // Limits and deadlines from now on.
  void reload(const Config::Storage& config);
  // Ends the threads, every request (closed) and the backend. No answer is given afterwards.
  void stop();
  // For people: backend, health, queues, breaker, and for each operation pages, bytes, latency and bandwidth.
  [[nodiscard]] nlohmann::json status() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hicache::daemon
