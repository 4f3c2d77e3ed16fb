// What the storage tier answers, and hicache-ctl storage.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cassert>
#include <nlohmann/json.hpp>
#include <utility>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "shm/crash_points.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {

Counter why_not_backed_up(Status status) {
  switch (status) {
    case Status::no_space:
      return Counter::backup_no_space;
    case Status::timed_out:
      return Counter::backup_timed_out;
    case Status::closed:
      return Counter::backup_no_storage;
    default:
      return Counter::backup_failed;
  }
}

}  // namespace

std::shared_ptr<const StorageNamespace> Coordinator::Impl::storage_namespace(NamespaceId id) {
  const Namespace& ns = namespaces.get(id);
  auto& kept = storage_namespaces[id.value];
  if (kept == nullptr || kept->digest != ns.digest) {
    kept = std::make_shared<const StorageNamespace>(StorageNamespace{ns.digest, ns.spec});
  }
  return kept;
}

std::uint64_t Coordinator::Impl::send_to_storage(StorageOperation operation, NamespaceId ns,
                                                 std::uint32_t owner, std::vector<PrefixHash> hashes,
                                                 StorageWork work) {
  StorageRequest request;
  request.id = StorageBatchId{++next_number};
  request.operation = operation;
  request.owner = owner;
  request.ns = storage_namespace(ns);
  const NamespaceSpec& spec = request.ns->spec;
  for (const PageId page : work.pages) {
    for (std::uint32_t shard = 0; shard < spec.shards(); ++shard) {
      request.buffers.push_back(
          {PoolOffset{pages.offset(page).value + shard * spec.shard_stride()}, spec.shard_stride()});
    }
  }
  work.operation = operation;
  work.told.resize(hashes.size());
  request.hashes = std::move(hashes);
  // The page table must know whose bytes storage works on, whatever becomes of who asked for it.
  namespaces.hold(ns);
  work.ns = ns;
  const std::uint64_t id = request.id.value;
  storage_work.emplace(id, std::move(work));
  HICACHE_CRASH_POINT(storage_noted);
  storage->submit(std::move(request));
  return id;
}

void Coordinator::Impl::take_storage_events() {
  storage_events.clear();
  storage->take_events(storage_events);
  const auto scope = commit();
  for (const StorageEvent& event : storage_events) {
    const auto found = storage_work.find(event.request.value);
    assert(found != storage_work.end());
    StorageWork& work = found->second;
    switch (event.kind) {
      case StorageEvent::Kind::page:
        take_page_event(work, event.page, event.status);
        break;
      case StorageEvent::Kind::late:
        stats.add(Counter::storage_late);
        take_late_event(work);
        break;
      case StorageEvent::Kind::ended: {
        const StorageWork ended = std::move(work);
        storage_work.erase(found);
        count_batch(ended.operation, event.us);
        take_ended_event(ended);
        break;
      }
    }
  }
}

void Coordinator::Impl::count_batch(StorageOperation operation, std::uint64_t us) {
  if (us == 0 || operation == StorageOperation::exists) return;
  const bool read = operation == StorageOperation::get;
  stats.add(read ? Counter::storage_reads : Counter::storage_writes);
  stats.add(read ? Counter::storage_read_us : Counter::storage_write_us, us);
}

void Coordinator::Impl::take_page_event(StorageWork& work, std::uint32_t index, Status status) {
  if (work.operation == StorageOperation::exists) {
    work.told[index] = status == Status::ok;
    return;
  }
  work.told[index] = true;
  const PageId page = work.pages[index];
  const NamespaceSpec& spec = namespaces.get(work.ns).spec;
  if (work.operation == StorageOperation::put) {
    const Generation generation = pages.word(page).generation;
    if (status == Status::ok) {
      pages.clear_dirty(page);
      HICACHE_CRASH_POINT(backup_kept);
      stats.add(Counter::backed_up);
      stats.add(Counter::bytes_backed_up, spec.shard_bytes() * spec.shards());
    }
    pages.set_storing(page, false);
    tell_asking(page, generation, status == Status::ok);
    BackupOperation* operation = nullptr;
    if (const auto found = backups.running.find(work.number); found != backups.running.end())
      operation = &found->second;
    if (status == Status::ok) {
      if (operation != nullptr) ++operation->kept;
    } else if (operation != nullptr) {  // else counted when it was late
      operation->failed = true;
      stats.add(why_not_backed_up(status));
    }
    // Its checksum was compared before storage should get it.
    if (status == Status::corrupt && pages.state(page) == PageState::ready) {
      stats.add(Counter::checksum_mismatches);
      quarantine(page);
    }
    return;
  }
  if (pages.state(page) == PageState::aborting) return pages.finish_abort(page);
  assert(pages.state(page) == PageState::filling && fillers[page.value].storage);
  fillers[page.value].reading = false;
  if (status == Status::ok) {
    stats.add(Counter::bytes_prefetched, spec.shard_bytes() * spec.shards());
    pages.complete_shards(page, spec.shards());
    HICACHE_CRASH_POINT(prefetch_landed);
    if (pages.publishable(page, spec.shards())) publish_from(page);
    return;
  }
  if (status != Status::closed) stats.add(Counter::prefetch_failed);
  if (status == Status::corrupt) {
    stats.add(Counter::storage_corrupt);
    spdlog::error("page {} (key {}, pool offset {}) came damaged from storage: dropped, a miss", page.value,
                  to_hex(load_key(tables.pages[page.value])), pages.offset(page).value);
  }
  give_up(page);
}

// The deadline has passed. Who waits goes on; slots stay taken until storage has let go of them.
void Coordinator::Impl::take_late_event(StorageWork& work) {
  const std::uint64_t number = std::exchange(work.number, 0);
  switch (work.operation) {
    case StorageOperation::exists: {
      Prefetch* p = find_prefetch(number);
      if (p == nullptr || p->query_request == 0) return;
      const auto missing = std::find(work.told.begin(), work.told.end(), false);
      return take_query_answer(*p, static_cast<std::size_t>(missing - work.told.begin()));
    }
    case StorageOperation::get:
      for (std::size_t i = 0; i < work.pages.size(); ++i) {
        if (work.told[i] || pages.state(work.pages[i]) != PageState::filling) continue;
        stats.add(Counter::prefetch_failed);
        give_up(work.pages[i]);
      }
      return;
    case StorageOperation::put:
      for (std::size_t i = 0; i < work.pages.size(); ++i) {
        if (work.told[i]) continue;
        stats.add(Counter::backup_timed_out);
        tell_asking(work.pages[i], pages.word(work.pages[i]).generation, false);
      }
      if (backups.running.contains(number)) end_backup(number, Counter::backup_failed);
      return;
  }
}

void Coordinator::Impl::take_ended_event(const StorageWork& work) {
  if (work.operation == StorageOperation::exists) {
    Prefetch* p = find_prefetch(work.number);
    if (p != nullptr && p->query_request != 0) {
      const auto missing = std::find(work.told.begin(), work.told.end(), false);
      take_query_answer(*p, static_cast<std::size_t>(missing - work.told.begin()));
    }
  } else if (work.operation == StorageOperation::put) {
    if (const auto found = backups.running.find(work.number); found != backups.running.end()) {
      BackupOperation& operation = found->second;
      if (operation.failed || operation.next == operation.pages.size()) {
        end_backup(work.number, Counter::backup_failed);
      } else {
        send_next_batch(operation);
      }
    }
    if (namespaces.retired(work.ns)) evict_namespace(work.ns);
  }
  namespaces.drop(work.ns);
}

void Coordinator::Impl::storage_changed() {
  const auto scope = commit();
  pages.mark_all_dirty();
}

void Coordinator::Impl::control_storage(ControlRequest& request) {
  using nlohmann::json;
  const auto& args = request.arguments;
  const auto fail = [answer = request.answer](Status status, const std::string& text) {
    const json body{{"error", text}, {"status", to_string(status)}};
    answer(status, body.dump(-1, ' ', true, json::error_handler_t::replace));
  };
  if (storage == nullptr) return fail(Status::not_found, "this daemon has no storage tier");
  const std::string what = args.size() > 1 ? args[1] : "";
  // Runs on the storage tier's thread.
  const auto tell = [this, fail, answer = request.answer](const Outcome& done) {
    if (!done) return fail(done.status(), done.error().message);
    inbox.post(StorageChanged{});
    answer(Status::ok, json{{"storage", to_string(storage->state())}}.dump());
  };
  if (what == "status" && args.size() == 2) {
    return request.answer(Status::ok, storage_status().dump(-1, ' ', true, json::error_handler_t::replace));
  }
  if (what == "sync" && args.size() == 2) {
    backup_waiters.push_back(request.answer);
    return;
  }
  if (what == "attach" && args.size() <= 4) {
    const std::string name = args.size() > 2 ? args[2] : config.storage.backend;
    if (name.empty()) {
      return fail(Status::invalid_argument, "storage attach: storage.backend names none: give its name");
    }
    const auto configured = config.storage.settings.find(name);
    nlohmann::ordered_json settings = nlohmann::ordered_json::object();
    if (configured != config.storage.settings.end()) settings = configured->second;
    if (args.size() == 4) {
      settings = nlohmann::ordered_json::parse(args[3], nullptr, false);
      if (!settings.is_object()) {
        return fail(Status::invalid_argument,
                    "storage attach " + name + " '" + args[3] + "': expected its settings as a JSON object");
      }
    }
    return storage->attach_later(name, std::move(settings), tell);
  }
  if (what == "detach" && args.size() == 2) return storage->detach_later(tell);
  if (what == "clear" && args.size() == 2) return storage->clear_later(tell);
  fail(Status::invalid_argument,
       "storage '" + what + "': expected status, sync, attach [NAME [SETTINGS]], detach or clear");
}

nlohmann::json Coordinator::Impl::storage_status() const {
  if (storage == nullptr) return {{"state", to_string(StorageState::detached)}};
  nlohmann::json status = storage->status();
  status["prefetches_in_flight"] = prefetches_in_flight.size();
  status["backup_queue_pages"] = backups.waiting_pages;
  status["backups_running"] = backups.running.size();
  return status;
}

}  // namespace hicache::daemon
