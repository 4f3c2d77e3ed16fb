// Attaching: hello, welcome, and the check of everything that came with it, before a byte of it is used.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "hicache/cuda.hpp"
#include "kernel/cuda_page_mover.hpp"
#include "kernel/host_page_mover.hpp"
#include "reattachment.hpp"
#include "session_impl.hpp"
#include "shm/crash_points.hpp"
#include "shm/unix_socket.hpp"

namespace hicache {
namespace {

// What is left of one time-out that spans several steps.
class Deadline {
 public:
  explicit Deadline(std::uint32_t timeout_ms)
      : at_ns_(monotonic_ns() + std::uint64_t{timeout_ms} * 1'000'000) {}
  [[nodiscard]] int left_ms() const {
    const std::uint64_t now = monotonic_ns();
    return now >= at_ns_ ? 0
                         : static_cast<int>(std::min<std::uint64_t>((at_ns_ - now) / 1'000'000, 1u << 30));
  }

 private:
  std::uint64_t at_ns_;
};

Error corrupt(const std::string& text) {
  return Error{Status::corrupt, "the daemon's welcome is unusable: " + text, 0};
}

Outcome check_options(const AttachOptions& options) {
  if (options.role != Role::rank && options.role != Role::scheduler) {
    return Error{Status::invalid_argument,
                 "role " + std::string(to_string(options.role)) + " can't attach: expected rank or scheduler",
                 0};
  }
  if (options.socket_path.empty() && !valid_region_name(options.name)) {
    return Error{Status::invalid_argument,
                 "name '" + options.name + "': expected 1 to 48 of [A-Za-z0-9._-], not starting with a dot",
                 0};
  }
  if (options.engine.empty() || options.engine.size() > kMaxEngineBytes) {
    return Error{Status::invalid_argument,
                 "engine has " + std::to_string(options.engine.size()) + " bytes: expected 1 to " +
                     std::to_string(kMaxEngineBytes),
                 0};
  }
  if (auto valid = options.spec.validate(); !valid) return valid.error();
  if (options.role == Role::rank && options.tp_rank >= options.spec.tp_size) {
    return Error{Status::invalid_argument,
                 "tp_rank " + std::to_string(options.tp_rank) + " is not below tp_size " +
                     std::to_string(options.spec.tp_size),
                 0};
  }
  return success();
}

// Sends one message and waits for its answer.
Result<Message> ask(int fd, const SocketMessage& question, std::span<const int> fds,
                    const Deadline& deadline) {
  if (auto sent = send_message(fd, encode_message(question), fds, deadline.left_ms()); !sent)
    return sent.error();
  HICACHE_CRASH_POINT(hello_sent);
  return receive_message(fd, deadline.left_ms());
}

Result<ConstTables> map_control(const Welcome& welcome, int fd, Mapping& mapping) {
  const auto size = object_size(fd);
  if (!size) return size.error();
  alignas(RegionHeader) std::array<std::uint8_t, kHeaderBytes> header{};
  if (::pread(fd, header.data(), header.size(), 0) != static_cast<ssize_t>(header.size())) {
    return corrupt("the control region is shorter than its header");
  }
  const RegionCheck check = check_header(header, *size);
  if (check.verdict != RegionVerdict::usable) {
    std::string text;
    for (const std::string& finding : check.findings) text += (text.empty() ? "" : "; ") + finding;
    if (check.verdict == RegionVerdict::other_version) return Error{Status::version_mismatch, text, 0};
    return corrupt(text);
  }
  if (check.plan.total_bytes != welcome.region_bytes) {
    return corrupt("control region of " + std::to_string(check.plan.total_bytes) + " bytes, " +
                   std::to_string(welcome.region_bytes) + " announced");
  }
  auto mapped = Mapping::map(fd, welcome.region_bytes, Mapping::Access::read_only);
  if (!mapped) return mapped.error();
  mapping = std::move(*mapped);
  const ConstTables tables = make_tables(static_cast<const void*>(mapping.data()), check.plan);
  if (tables.header->instance_epoch.load(std::memory_order_relaxed) != welcome.instance_epoch) {
    return corrupt("the control region belongs to another life of the daemon");
  }
  if (welcome.client_slot >= tables.clients.size() || welcome.namespace_id >= tables.namespaces.size()) {
    return corrupt("client slot " + std::to_string(welcome.client_slot) + " or namespace " +
                   std::to_string(welcome.namespace_id) + " is outside the tables");
  }
  return tables;
}

Result<Mapping> map_channel(const Welcome& welcome, int fd) {
  if (!welcome.channel.valid()) return corrupt("the channel's geometry is not one that this version makes");
  const auto size = sealed_size(fd);
  if (!size) return corrupt("channel: " + size.error().message);
  if (*size != welcome.channel.total_bytes) {
    return corrupt("channel of " + std::to_string(*size) + " bytes, " +
                   std::to_string(welcome.channel.total_bytes) + " announced");
  }
  auto mapped = Mapping::map(fd, *size, Mapping::Access::read_write, /*dont_fork=*/true);
  if (!mapped) return mapped.error();
  const auto* header = static_cast<const ChannelHeader*>(mapped->data());
  if (header->magic.load(std::memory_order_acquire) != kChannelMagic ||
      header->instance_epoch.load(std::memory_order_relaxed) != welcome.instance_epoch ||
      header->client_slot.load(std::memory_order_relaxed) != welcome.client_slot ||
      header->client_generation.load(std::memory_order_relaxed) != welcome.client_generation) {
    return corrupt("the channel was made for somebody else");
  }
  return mapped;
}

// The pool and the kernel block, in the descriptors behind those that every session gets.
Result<KernelAttachment> map_pool(const ConstTables& tables, std::span<UniqueFd> fds) {
  const std::uint64_t pool_bytes = tables.header->pool_bytes.load(std::memory_order_relaxed);
  const auto pool_size = object_size(fds[0].get());
  if (!pool_size) return pool_size.error();
  if (*pool_size != pool_bytes) {
    return corrupt("pool of " + std::to_string(*pool_size) + " bytes, " + std::to_string(pool_bytes) +
                   " announced");
  }
  const auto block_size = sealed_size(fds[1].get());
  if (!block_size) return corrupt("kernel block: " + block_size.error().message);
  if (*block_size != kKernelBlockBytes) {
    return corrupt("kernel block of " + std::to_string(*block_size) + " bytes, expected " +
                   std::to_string(kKernelBlockBytes));
  }
  auto pool = Mapping::map(fds[0].get(), pool_bytes, Mapping::Access::read_write, /*dont_fork=*/true);
  if (!pool) return pool.error();
  auto block = Mapping::map(fds[1].get(), kKernelBlockBytes, Mapping::Access::read_write, /*dont_fork=*/true);
  if (!block) return block.error();
  return KernelAttachment{std::move(*pool), std::move(*block), std::move(fds[2])};
}

Result<Attachment> check_welcome(const Welcome& welcome, Message& message) {
  if (welcome.protocol < kProtocolMin || welcome.protocol > kProtocolMax) {
    return Error{Status::version_mismatch,
                 "the daemon chose protocol " + std::to_string(welcome.protocol) + "; this library speaks " +
                     std::to_string(kProtocolMin) + " to " + std::to_string(kProtocolMax),
                 0};
  }
  const bool maps_pool = (welcome.features & kFeatureKernel) != 0;
  const std::size_t expected = maps_pool ? 6 : 3;
  if (message.fds.size() != expected) {
    return corrupt(std::to_string(message.fds.size()) + " descriptors, expected " + std::to_string(expected));
  }
  Attachment a;
  a.welcome = welcome;
  auto tables = map_control(welcome, message.fds[0].get(), a.control);
  if (!tables) return tables.error();
  a.tables = *tables;
  auto channel = map_channel(welcome, message.fds[1].get());
  if (!channel) return channel.error();
  a.channel = std::move(*channel);
  a.kick = std::move(message.fds[2]);
  // A kick must never block, whatever the descriptor is.
  const int flags = ::fcntl(a.kick.get(), F_GETFL);
  if (flags < 0 || (flags & O_NONBLOCK) == 0) return corrupt("the wake-up descriptor would block");
  if (maps_pool) {
    auto kernel = map_pool(a.tables, std::span(message.fds).subspan(3));
    if (!kernel) return kernel.error();
    a.kernel = std::move(*kernel);
    HICACHE_CRASH_POINT(pool_mapped);
  }
  return a;
}

}  // namespace

Result<std::unique_ptr<Session>> Session::attach(const AttachOptions& options) {
  if (auto checked = check_options(options); !checked) return checked.error();
  const Deadline deadline(options.timeout_ms);
  auto socket =
      connect_unix(options.socket_path.empty() ? default_socket_path(options.name) : options.socket_path);
  if (!socket) return socket.error();
  Hello hello;
  hello.features |= kFeatureReadOnly;
  const bool by_kernel = options.role == Role::rank && options.io_backend == IoBackend::kernel;
  if (by_kernel) {
    hello.features |= kFeatureKernel;
  } else if (options.staging_bytes > 0) {
    hello.features |= kFeatureStaging;
  }
  hello.role = options.role;
  hello.pid = static_cast<std::uint32_t>(::getpid());
  hello.engine = options.engine;
  hello.tp_rank = options.tp_rank;
  hello.spec = options.spec;
  HICACHE_CRASH_POINT(connect_done);
  auto message = ask(socket->get(), hello, {}, deadline);
  if (!message) return message.error();
  const auto answer = decode_message(message->bytes);
  if (!answer) return corrupt(answer.error().message);
  if (const auto* refusal = std::get_if<Reply>(&*answer);
      refusal != nullptr && refusal->status != Status::ok) {
    return Error{refusal->status, refusal->text, 0};
  }
  const auto* welcome = std::get_if<Welcome>(&*answer);
  if (welcome == nullptr) return corrupt("it is another message");
  HICACHE_CRASH_POINT(welcome_read);
  auto attachment = check_welcome(*welcome, *message);
  if (!attachment) return attachment.error();
  if (by_kernel != attachment->kernel.has_value()) {
    return Error{Status::version_mismatch,
                 by_kernel
                     ? "the daemon does not know io_backend kernel: use direct, or a daemon of this version"
                     : "the daemon sent its pool, which was not asked for",
                 0};
  }
  HICACHE_CRASH_POINT(welcome_mapped);
  attachment->socket = std::move(*socket);
  std::unique_ptr<Session> session(new Session(std::make_unique<Impl>(options, std::move(*attachment))));
  HICACHE_CRASH_POINT(session_made);
  if (options.reattach) session->reattachment_ = std::make_unique<Reattachment>(options, *session->impl_);
  return session;
}

Result<std::unique_ptr<KernelWorker>> Session::Impl::make_kernel_worker(const DeviceGeometry& geometry,
                                                                        std::span<const int> fds,
                                                                        std::span<const CudaRange> ranges) {
  const KernelAttachment& kept = *attached.kernel;
  const PoolGuard guard(*attached.tables.header, attached.welcome.instance_epoch);
  auto mover = geometry.device_kind() == DeviceKind::cuda
                   ? make_cuda_page_mover(spec, geometry, ranges, kept.pool, *fences, guard)
                   : HostPageMover::create(spec, geometry, fds, kept.pool, *fences, guard);
  if (!mover) return mover.error();
  const KernelLimits limits{kept.pool.size(), spec.shard_bytes(), geometry.pages, geometry.states};
  const KernelRequests requests(*static_cast<KernelBlock*>(kept.block.data()), kept.news.get(), limits);
  return std::make_unique<KernelWorker>(std::move(*mover), requests, *header, waiting);
}

Outcome Session::register_buffers(const DeviceGeometry& geometry, std::span<const int> fds,
                                  std::uint32_t timeout_ms) {
  return register_memory(geometry, fds, {}, timeout_ms);
}

Outcome Session::register_memory(const DeviceGeometry& geometry, std::span<const int> fds,
                                 std::span<const CudaRange> ranges, std::uint32_t timeout_ms) {
  Impl& m = *impl_;
  if (m.fork.forked()) return Error{Status::forked, "the session belongs to the parent process", 0};
  if (m.role != Role::rank) {
    return Error{Status::not_permitted, "a " + std::string(to_string(m.role)) + " has no device buffers", 0};
  }
  if (auto valid = geometry.validate(m.spec); !valid) return valid.error();
  if (fds.size() != geometry.descriptors()) {
    return Error{Status::invalid_argument,
                 std::to_string(fds.size()) + " descriptors for allocations that need " +
                     std::to_string(geometry.descriptors()),
                 0};
  }
  for (std::size_t i = 0; geometry.device_kind() == DeviceKind::host && i < fds.size(); ++i) {
    const auto size = sealed_size(fds[i]);
    if (!size)
      return Error{size.status(), "allocation " + std::to_string(i) + ": " + size.error().message, 0};
    if (*size < geometry.allocations[i].bytes) {
      return Error{Status::invalid_argument,
                   "allocation " + std::to_string(i) + " says " +
                       std::to_string(geometry.allocations[i].bytes) + " bytes, its memfd has " +
                       std::to_string(*size),
                   0};
    }
  }
  const std::lock_guard registering(m.registration_mutex);
  if (m.registration == Impl::Registration::done) {
    return Error{Status::exists, "the device buffers of this session are registered already", 0};
  }
  if (m.registration == Impl::Registration::unanswered) {
    return Error{Status::busy, "an earlier registration was never answered: attach again", 0};
  }
  if (const Status ended = state(); ended != Status::ok) return Error{ended, "the session has ended", 0};
  const Deadline deadline(timeout_ms);
  const int fd = m.attached.socket.get();
  RegisterBuffers message_out{geometry, std::nullopt};
  std::vector<int> fds_out(fds.begin(), fds.end());
  std::unique_ptr<KernelWorker> kernel;
  if (m.attached.kernel) {
    auto made = m.make_kernel_worker(geometry, fds, ranges);
    if (!made) return made.error();
    kernel = std::move(*made);
    fds_out.clear();  // the daemon touches nothing of them
  }
  std::unique_ptr<Staging> staging = m.make_staging(geometry, ranges);
  if (staging != nullptr) {
    message_out.staging = staging->offer();
    fds_out.push_back(staging->block_fd());
    staging->offered();
  }
  if (auto sent = send_message(fd, encode_message(message_out), fds_out, deadline.left_ms()); !sent) {
    return sent.error();
  }
  HICACHE_CRASH_POINT(buffers_sent);
  m.registration = Impl::Registration::unanswered;
  if (geometry.device_kind() == DeviceKind::cuda && kernel == nullptr)
    m.exported_memory.store(true, std::memory_order_relaxed);
  const auto message = receive_message(fd, deadline.left_ms());
  if (!message) return message.error();
  const auto answer = decode_message(message->bytes);
  const auto* reply = answer ? std::get_if<Reply>(&*answer) : nullptr;
  if (reply == nullptr)
    return Error{Status::corrupt, "the daemon answered a registration with another message", 0};
  if (reply->status != Status::ok) {
    m.registration = Impl::Registration::none;
    if (staging != nullptr) staging->let_go();
    return Error{reply->status, reply->text, 0};
  }
  m.registration = Impl::Registration::done;
  HICACHE_CRASH_POINT(buffers_registered);
  m.device_states.store(geometry.states, std::memory_order_release);  // pairs with check_states
  m.device_pages.store(geometry.pages, std::memory_order_release);    // pairs with check_pages
  if (kernel != nullptr) {
    kernel->start();
    HICACHE_CRASH_POINT(kernel_started);
    const std::lock_guard lock(m.mutex);
    m.kernel = std::move(kernel);
    if (m.ended()) m.kernel->end();
  }
  if (staging != nullptr) {
    staging->start();
    const std::lock_guard lock(m.mutex);
    m.staging = std::move(staging);
    if (m.ended()) m.staging->end();
  }
  if (reattachment_) reattachment_->remember(geometry, fds, ranges);
  return success();
}

}  // namespace hicache
