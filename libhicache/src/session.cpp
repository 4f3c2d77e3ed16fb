// A session's life after attach: lookups, state, and its end.
#include "session_impl.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

#include "hicache/cuda.hpp"
#include "reattachment.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"
#include "shm/unix_socket.hpp"

namespace hicache {
namespace {

template <class T>
T* at(const Mapping& mapping, std::uint64_t offset) {
  return reinterpret_cast<T*>(static_cast<std::uint8_t*>(mapping.data()) + offset);
}

// Waits until the daemon has let go of the session's GPU memory: it keeps the connection open as long. Memory
// that is freed while another process has it open may come back, as part of a new allocation, under the old
// mapping. False when it has not within `longest_ns`.
bool await_end(int socket, std::uint64_t longest_ns) {
  const std::uint64_t end = monotonic_ns() + longest_ns;
  ::shutdown(socket, SHUT_WR);
  for (std::uint64_t now = monotonic_ns(); now < end; now = monotonic_ns()) {
    pollfd waiting{socket, POLLIN, 0};
    if (::poll(&waiting, 1, static_cast<int>((end - now) / 1'000'000 + 1)) <= 0) continue;
    std::uint8_t byte = 0;
    const ssize_t n = ::recv(socket, &byte, 1, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return true;
  }
  return false;
}

constexpr std::uint64_t kLongestEndNs = 2'000'000'000;

}  // namespace

Session::Impl::Impl(const AttachOptions& options, Attachment attachment)
    : role(options.role),
      tp_rank(options.tp_rank),
      spec(options.spec),
      has_states(options.spec.has_states()),
      attached(std::move(attachment)),
      watch(attached.socket.get(), attached.welcome.daemon_start_ticks),
      header(at<ChannelHeader>(attached.channel, 0)),
      cq_entries(at<const RingEntry>(attached.channel, attached.welcome.channel.cq_offset)),
      cq_mask(attached.welcome.channel.cq_entries - 1),
      fences(at<FenceBlock>(attached.channel, attached.welcome.channel.fence_offset)),
      arena_base(at<std::uint8_t>(attached.channel, attached.welcome.channel.arena_offset)),
      waiting{attached.welcome.wait_spin_us, attached.welcome.wait_yield_us, attached.welcome.wait_park_ms},
      index(attached.tables, attached.tables.header->hash_seed.load(std::memory_order_relaxed)),
      staging_bytes((attached.welcome.features & kFeatureStaging) != 0 ? options.staging_bytes : 0),
      namespace_now(attached.welcome.namespace_id),
      sq(at<RingEntry>(attached.channel, attached.welcome.channel.sq_offset),
         attached.welcome.channel.sq_entries, &header->sq_head, &header->sq_tail),
      cq(cq_entries, attached.welcome.channel.cq_entries, &header->cq_head),
      operations(attached.welcome.channel.cq_entries),
      arena(attached.welcome.channel.arena_bytes) {
  // The engine's signal handlers must not run in this thread.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  guardian = std::thread([this] { guard(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Session::Impl::guard() {
  hold_tripwire(&header->client_tripwire, &header->daemon_tripwire, guard_stop, [this](std::uint32_t word) {
    // Armed is no news. Fired, or let go: the daemon is dying, or has ended this session.
    if (word != 0 && !tripwire_fired(word)) return true;
    const std::lock_guard lock(mutex);
    look_at_daemon();
    return true;
  });
}

void Session::Impl::continue_from(Impl& lost) {
  operations.continue_after(lost.operations);
  for (std::uint32_t i = 0; i < kWriteFences; ++i) {
    fences->write[i].value.store(lost.fences->write[i].value.load(std::memory_order_acquire),
                                 std::memory_order_release);
  }
  for (std::uint32_t slot = 0; slot < kProducerSlots; ++slot) {
    LayerFences& to = fences->load[slot];
    const LayerFences& from = lost.fences->load[slot];
    to.failed.store(from.failed.load(std::memory_order_acquire), std::memory_order_release);
    for (std::uint32_t layer = 0; layer < kMaxLayers; ++layer) {
      to.layer[layer].store(from.layer[layer].load(std::memory_order_acquire), std::memory_order_release);
    }
    layer_loads[slot] = lost.layer_loads[slot];
  }
}

Session::Impl::~Impl() {
  // The range is not there in a child, or belongs to somebody else by now.
  if (fork.forked()) {
    attached.channel.forget();
    if (attached.kernel) {
      attached.kernel->pool.forget();
      attached.kernel->block.forget();
    }
    static_cast<void>(kernel.release());
    static_cast<void>(stream_fences.release());
    static_cast<void>(staging.release());
    // The thread is the parent's: here is nothing to join, and destroying a joinable thread ends the process.
    // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): a child without memory may end here
    static_cast<void>(new std::thread(std::move(guardian)));
    return;
  }
  guard_stop.stop(&header->daemon_tripwire);
  guardian.join();
  settle_staging(kLongestEndNs);
}

std::unique_ptr<Staging> Session::Impl::make_staging(const DeviceGeometry& geometry,
                                                     std::span<const CudaRange> ranges) const {
  if (staging_bytes == 0 || ranges.empty()) return nullptr;
  auto made = Staging::create(spec, geometry, ranges, staging_bytes, *header, waiting);
  return made ? std::move(*made) : nullptr;
}

void Session::Impl::settle_staging(std::uint64_t longest_ns) {
  if (staging == nullptr) return;
  staging->end();
  const std::uint64_t end = monotonic_ns() + longest_ns;
  // A daemon that lives closes the connection behind the memory. One that dies closes everything in any
  // order, and its copies may still land until its process is gone.
  bool gone = closing == Closing::let_go || watch.process_gone();
  if (!gone && closing == Closing::open && !daemon_died())
    gone = await_end(attached.socket.get(), longest_ns) && !daemon_died();
  while (!gone && monotonic_ns() < end) {
    ::usleep(1000);
    gone = watch.process_gone();
  }
  if (gone) staging->let_go();
  staging.reset();
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session::~Session() {
  reattachment_.reset();
  if (!impl_.valid()) return;
  close();
  // Their threads use the session: they end first.
  impl_.end_stream_fences();
}

void Session::Current::end_stream_fences() {
  for (const auto& life : lives_) {
    if (!life->fork.forked()) life->stream_fences.reset();
  }
}

void Session::follow_daemon() const {
  if (reattachment_ != nullptr && impl_->ended()) reattachment_->switch_over(*this);
}

void Session::close() {
  if (reattachment_) reattachment_->stop();
  Impl& m = *impl_;
  if (m.fork.forked()) return;
  const std::lock_guard lock(m.mutex);
  if (m.ended()) return;
  const auto bytes = encode_message(Goodbye{});
  // Without it the daemon counts the session as lost, which does no other harm.
  static_cast<void>(send_message(m.attached.socket.get(), bytes, {}, 0));
  HICACHE_CRASH_POINT(goodbye_sent);
  m.end(Status::closed, "the session was closed");
  const bool let_go = m.exported_memory.load(std::memory_order_relaxed) &&
                      await_end(m.attached.socket.get(), kLongestEndNs) && !m.daemon_died();
  m.closing = let_go ? Impl::Closing::let_go : Impl::Closing::shut;
  ::shutdown(m.attached.socket.get(), SHUT_RDWR);
}

NamespaceId Session::namespace_id() const {
  const Impl& m = *impl_;
  std::uint32_t id = m.namespace_now.load(std::memory_order_relaxed);
  const auto& namespaces = m.attached.tables.namespaces;
  // A bump leaves a pointer to the namespace that replaced this one. Bounded: damage could have made a
  // circle.
  for (std::size_t steps = 0; steps < namespaces.size(); ++steps) {
    const NamespaceEntry& entry = namespaces[id];
    if (entry.state.load(std::memory_order_acquire) != static_cast<std::uint32_t>(NamespaceState::retired))
      break;
    const std::uint32_t successor = entry.successor.load(std::memory_order_relaxed);
    if (successor >= namespaces.size()) break;
    id = successor;
    m.namespace_now.store(id, std::memory_order_relaxed);
  }
  return NamespaceId{id};
}

ProbeResult Session::probe(std::span<const PrefixHash> hashes) const {
  follow_daemon();
  const Impl& m = *impl_;
  if (m.fork.forked() || m.ended()) return {};
  const A64& epoch = m.attached.tables.header->instance_epoch;
  if (epoch.load(std::memory_order_acquire) != m.attached.welcome.instance_epoch) return {};
  const ProbeResult result = m.index.probe(hashes, namespace_id(), m.has_states);
  std::atomic_thread_fence(std::memory_order_acquire);  // the index was read before the epoch is read again
  if (epoch.load(std::memory_order_relaxed) != m.attached.welcome.instance_epoch) return {};
  return result;
}

Status Session::state() const {
  follow_daemon();
  Impl& m = *impl_;
  if (m.fork.forked()) return Status::forked;
  if (!m.ended() && (m.header->session_ended.load(std::memory_order_relaxed) != 0 ||
                     coarse_ns() - m.last_look_ns.load(std::memory_order_relaxed) >= Impl::kLookEveryNs)) {
    const std::lock_guard lock(m.mutex);
    m.look_at_daemon();
  }
  return m.end_reason.load(std::memory_order_acquire);
}

std::uint32_t Session::tp_rank() const {
  return impl_->tp_rank;
}
std::uint32_t Session::tp_size() const {
  return impl_->spec.tp_size;
}
std::uint64_t Session::instance_epoch() const {
  return impl_->attached.welcome.instance_epoch;
}
std::uint32_t Session::client_slot() const {
  return impl_->attached.welcome.client_slot;
}

SessionCounters Session::counters() const {
  if (impl_->fork.forked()) return {};
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace hicache
