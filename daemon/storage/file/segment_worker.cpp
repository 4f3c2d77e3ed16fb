#include "daemon/storage/file/segment_worker.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <exception>
#include <future>
#include <utility>

#include "daemon/integrity/payload_checksum.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {
namespace {

// Neighbours are written together up to this size, so that small pages don't cost a transfer each.
constexpr std::uint64_t kGroupBytes = kMiB;
constexpr std::size_t kGroupPages = 32;
constexpr std::uint64_t kSplitBytes = 512 * kKiB;  // from here, pages are written alone
constexpr std::uint64_t kBusyTurnNs = 10'000'000;  // while pages wait: their deadlines are looked at so often
constexpr std::uint64_t kIdleTurnNs = 1'000'000'000;  // wake() ends it

RecordShape shape_of(const StorageNamespace& ns) {
  return {ns.spec.shards(), ns.spec.shard_bytes()};
}
RecordKey key_of(const QueuedPage& page) {
  return {page.hash(), page.ns().digest};
}

}  // namespace

// One read of a page, or one write of some that lie behind each other. A large page's header and payload are
// written by a request each: the payload alone can come from registered memory.
struct SegmentWorker::Transfer {
  IoRequest request;
  IoRequest header;  // used when `split`
  bool split = false;
  std::uint32_t open = 0;  // requests in flight
  std::vector<QueuedPage> pages;
  ReadPlace from;
  std::vector<WritePlace> to;
  std::vector<std::uint64_t> checksums;
  std::unique_ptr<AlignedBuffer> headers;  // of a write
  std::uint64_t end = 0;                   // of a write, in the segment
};

SegmentWorker::SegmentWorker(SegmentStore& store, PageQueue& queue, const StoragePool& pool,
                             const FileSettings& settings)
    : store_(store), queue_(queue), pool_(pool), settings_(settings) {}

SegmentWorker::~SegmentWorker() {
  stop();
}

void SegmentWorker::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_relaxed);
  wake();
  thread_.join();
}

Outcome SegmentWorker::start() {
  std::promise<Outcome> made;
  auto outcome = made.get_future();
  thread_ = std::thread([this, &made] {
    // A ring belongs to the thread that makes it.
    auto engine =
        make_io_engine(settings_.engine, settings_.queue_depth, pool_, settings_.registered_buffers);
    if (!engine) return made.set_value(engine.error());
    engine_ = std::move(*engine);
    made.set_value(success());
    run();
  });
  Outcome done = outcome.get();
  if (!done) thread_.join();
  return done;
}

void SegmentWorker::wake() {
  if (engine_ != nullptr) engine_->wake();
}

std::string SegmentWorker::engine() const {
  return engine_->description();
}

void SegmentWorker::run() {
  while (!stop_.load(std::memory_order_relaxed) || reads_ + writes_ > 0 || queue_.waiting()) {
    try {
      turn();
    } catch (const std::exception& e) {
      spdlog::error("storage: {}", e.what());
    }
  }
}

void SegmentWorker::turn() {
  queue_.sweep(monotonic_ns());
  answer_exists();
  start_reads();
  while (start_writes()) {
  }
  // A piece of the pool at a time, between transfers: a large pool takes seconds.
  const bool more = engine_->register_more();
  std::vector<IoRequest*> done;
  engine_->wait(done, more ? 0 : queue_.waiting() ? kBusyTurnNs : kIdleTurnNs);
  for (IoRequest* request : done) end(*static_cast<Transfer*>(request->owner));
}

void SegmentWorker::answer_exists() {
  while (const auto page = queue_.take(StorageOperation::exists, monotonic_ns())) {
    const bool there = store_.contains(key_of(*page), shape_of(page->ns()));
    queue_.finish(*page, there ? Status::ok : Status::not_found);
  }
}

void SegmentWorker::start_reads() {
  while (reads_ + writes_ < settings_.queue_depth) {
    auto page = queue_.take(StorageOperation::get, monotonic_ns());
    if (!page) return;
    start_read(std::move(*page));
  }
}

void SegmentWorker::start_read(QueuedPage page) {
  const auto place = store_.begin_read(key_of(page), shape_of(page.ns()));
  if (!place) return queue_.finish(page, Status::not_found);
  Transfer& transfer = free_transfer();
  transfer.request.write = false;
  transfer.request.fd = place->segment->file->fd();
  transfer.request.offset = place->payload_offset;
  append_parts(transfer.request.parts, page);
  transfer.from = *place;
  transfer.pages.push_back(std::move(page));
  transfer.open = 1;
  ++reads_;
  engine_->start(transfer.request);
}

// Starts at most one group of neighbours, and the first page of the next where that can't join. False when
// there is nothing more to start for now.
bool SegmentWorker::start_writes() {
  // Reads always find room: writes never take all of the depth.
  const std::uint32_t most = std::max(1u, settings_.queue_depth / 2);
  if (writes_ >= most || (reads_ > 0 && reads_ + writes_ >= settings_.queue_depth)) return false;
  Transfer* transfer = nullptr;
  bool more = true;
  std::uint64_t bytes = 0;
  while (bytes < kGroupBytes &&
         (transfer == nullptr || (transfer->pages.size() < kGroupPages && !transfer->split))) {
    auto page = queue_.take(StorageOperation::put, monotonic_ns());
    if (!page) {
      more = false;
      break;
    }
    const RecordShape shape = shape_of(page->ns());
    if (store_.contains(key_of(*page), shape)) {
      queue_.finish(*page, Status::ok);
      continue;
    }
    WritePlace place;
    const auto room =
        store_.place(shape, transfer == nullptr ? nullptr : transfer->to.front().segment, place);
    if (room == SegmentStore::Room::wait) {
      queue_.put_back(std::move(*page));
      more = false;
      break;
    }
    if (room != SegmentStore::Room::placed) {
      queue_.finish(*page, room == SegmentStore::Room::none ? Status::no_space : Status::dropped);
      continue;
    }
    const bool joins = transfer != nullptr && place.segment == transfer->to.front().segment &&
                       place.offset == transfer->end && shape.payload_stride() < kSplitBytes;
    if (!joins && transfer != nullptr) {
      start(*transfer);
      bytes = kGroupBytes;  // and with this page the turn is over
    }
    if (!joins) transfer = &free_transfer();
    add_to_write(*transfer, std::move(*page), place);
    bytes += shape.record_bytes();
  }
  if (transfer != nullptr) start(*transfer);
  return more;
}

void SegmentWorker::add_to_write(Transfer& transfer, QueuedPage page, const WritePlace& place) {
  const RecordShape shape = shape_of(page.ns());
  const std::size_t index = transfer.pages.size();
  transfer.split = index == 0 && shape.payload_stride() >= kSplitBytes;
  if (transfer.headers == nullptr)
    transfer.headers = std::make_unique<AlignedBuffer>(kGroupPages * kDiskBlock);
  if (index == 0) {
    transfer.request.write = true;
    transfer.request.fd = place.segment->file->fd();
    transfer.request.offset = place.offset + (transfer.split ? kDiskBlock : 0);
    transfer.header.write = true;
    transfer.header.fd = transfer.request.fd;
    transfer.header.offset = place.offset;
  }
  const std::uint64_t sum = checksum(page);
  const auto header = transfer.headers->bytes().subspan(index * kDiskBlock, kDiskBlock);
  make_record_header(header, place.epoch, {key_of(page), shape, place.offset, place.generation, sum});
  (transfer.split ? transfer.header : transfer.request).parts.push_back({header.data(), header.size()});
  append_parts(transfer.request.parts, page);
  transfer.to.push_back(place);
  transfer.checksums.push_back(sum);
  transfer.end = place.offset + shape.record_bytes();
  transfer.pages.push_back(std::move(page));
}

void SegmentWorker::start(Transfer& transfer) {
  ++writes_;
  transfer.open = transfer.split ? 2 : 1;
  if (transfer.split) engine_->start(transfer.header);
  engine_->start(transfer.request);
  HICACHE_CRASH_POINT(segment_write_started);
  engine_->flush();  // the disk works while the next checksum is made
}

void SegmentWorker::end(Transfer& transfer) {
  if (--transfer.open > 0) return;
  if (transfer.split && transfer.request.error == 0) transfer.request.error = transfer.header.error;
  if (transfer.request.write) {
    --writes_;
    end_write(transfer);
  } else {
    --reads_;
    end_read(transfer);
  }
  transfer.pages.clear();
  transfer.to.clear();
  transfer.checksums.clear();
  for (IoRequest* request : {&transfer.request, &transfer.header}) {
    request->parts.clear();
    request->error = 0;
  }
  transfer.split = false;
  free_.push_back(&transfer);
}

void SegmentWorker::end_read(Transfer& transfer) {
  const QueuedPage& page = transfer.pages.front();
  const int error = transfer.request.error;
  if (error != 0 && error != ENODATA) {
    store_.end_read(transfer.from, SegmentStore::ReadEnd::failed, error);
    return queue_.finish(page, Status::system_error);
  }
  HICACHE_CRASH_POINT(segment_read_landed);
  // A file that ends too early is as bad as one with other bytes.
  const bool good = error == 0 && checksum(page) == transfer.from.payload_checksum;
  store_.end_read(transfer.from, good ? SegmentStore::ReadEnd::good : SegmentStore::ReadEnd::corrupt);
  queue_.finish(page, good ? Status::ok : Status::corrupt);
}

void SegmentWorker::end_write(Transfer& transfer) {
  HICACHE_CRASH_POINT(segment_records_written);
  const int error = transfer.request.error;
  for (std::size_t i = 0; i < transfer.pages.size(); ++i) {
    const QueuedPage& page = transfer.pages[i];
    if (error != 0) {
      store_.abandon(transfer.to[i], i == 0 ? error : 0);  // one transfer, one error
      queue_.finish(page, error == ENOSPC || error == EDQUOT ? Status::no_space : Status::system_error);
      continue;
    }
    const bool kept = store_.commit(transfer.to[i], key_of(page), shape_of(page.ns()), transfer.checksums[i]);
    HICACHE_CRASH_POINT(segment_record_kept);
    queue_.finish(page, kept ? Status::ok : Status::dropped);
  }
}

SegmentWorker::Transfer& SegmentWorker::free_transfer() {
  if (free_.empty()) {
    free_.reserve(transfers_.size() + 1);
    transfers_.push_back(std::make_unique<Transfer>());
    transfers_.back()->request.owner = transfers_.back()->header.owner = transfers_.back().get();
    free_.push_back(transfers_.back().get());
  }
  Transfer& transfer = *free_.back();
  free_.pop_back();
  return transfer;
}

void SegmentWorker::append_parts(std::vector<iovec>& parts, const QueuedPage& page) const {
  const std::uint64_t bytes = shape_of(page.ns()).shard_stride();
  const std::size_t first = parts.size();
  for (const PoolExtent& extent : page.buffers()) {
    assert(extent.bytes >= bytes && extent.offset.value + bytes <= pool_.bytes);
    std::byte* at = pool_.base + extent.offset.value;
    // Shards of a page usually lie behind each other: then they are one part.
    if (parts.size() > first && static_cast<std::byte*>(parts.back().iov_base) + parts.back().iov_len == at) {
      parts.back().iov_len += bytes;
    } else {
      parts.push_back({at, bytes});
    }
  }
}

std::uint64_t SegmentWorker::checksum(const QueuedPage& page) const {
  const std::uint64_t bytes = page.ns().spec.shard_bytes();
  std::vector<std::span<const std::byte>> pieces;
  for (const PoolExtent& extent : page.buffers()) {
    const std::byte* at = pool_.base + extent.offset.value;
    if (!pieces.empty() && pieces.back().data() + pieces.back().size() == at) {
      pieces.back() = {pieces.back().data(), pieces.back().size() + bytes};
    } else {
      pieces.push_back({at, bytes});
    }
  }
  return payload_checksum(pieces);
}

}  // namespace hicache::daemon
