#include "daemon/sessions/session_server.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/sessions/connection.hpp"
#include "daemon/sessions/greeting.hpp"
#include "daemon/sessions/listening_socket.hpp"
#include "daemon/sessions/log_budget.hpp"
#include "daemon/sessions/session_queue.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"
#include "shm/process.hpp"
#include "shm/unix_socket.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr int kMessagesPerTurn = 4;  // of one connection, so that a talkative one waits its turn
constexpr int kAcceptsPerTurn = 64;
constexpr std::size_t kMaxRefusals = 64;  // connections kept only to tell them why they are refused
constexpr std::uint64_t kRefusalNs = 1000 * kMs;
constexpr std::uint64_t kAcceptPauseNs = 100 * kMs;  // after the process ran out of descriptors
constexpr int kMaxTurnMs = 1000;
constexpr std::uint64_t kNameLookNs = 1000 * kMs;  // at the socket's name

// What an epoll event is about: connection ids start at 1, these two never collide with id * 2 + kind.
constexpr std::uint64_t kListener = 0;
constexpr std::uint64_t kQueue = 1;
enum class Watched : std::uint64_t { socket = 0, process = 1 };
std::uint64_t tag(std::uint64_t connection, Watched what) {
  return connection * 2 + static_cast<std::uint64_t>(what);
}

// Texts may quote what a client sent: one line in the log stays one line.
std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

// What a user may ask who may attach but not change the daemon.
bool changes_nothing(const std::vector<std::string>& arguments) {
  if (arguments.empty()) return true;
  const std::string& command = arguments.front();
  if (command == "storage") return arguments.size() == 2 && arguments[1] == "status";
  return command == "status" || command == "ranks" || command == "namespaces" || command == "config";
}

}  // namespace

class SessionServer::Impl {
 public:
  Impl(const SessionServerOptions& options, Post post, Registration& registration)
      : config_(options.config),
        socket_path_(options.socket_path),
        control_fd_(options.control_fd),
        pool_fd_(options.pool_fd),
        facts_{options.config.name, ProcessIdentity::self(), options.region_bytes, options.instance_epoch},
        post_(std::move(post)),
        registration_(registration) {}
  ~Impl();

  Outcome listen();
  void start() {
    thread_ = std::thread([this] { run(); });
  }
  SessionQueue& queue() { return *queue_; }

 private:
  // The loop.
  void run();
  int turn_ms() const;
  bool watch(int fd, std::uint32_t events, std::uint64_t data) const;
  void expire(std::uint64_t now);
  void look_at_name(std::uint64_t now);
  void set_deadline(Connection& c, std::uint64_t deadline_ns);
  bool take_events();
  // Connections.
  void accept_some();
  void admit(UniqueFd socket);
  void on_socket(std::uint64_t id);
  void on_message(Connection& c, Message message);
  void on_hello(Connection& c, const Hello& hello);
  Outcome grant_pool(Connection& c, const Hello& hello) const;
  void begin_attach(Connection& c, const Hello& hello);
  void on_register(Connection& c, RegisterBuffers buffers, std::vector<UniqueFd> fds);
  void on_control(Connection& c, Control control);
  void on_attach_answer(const AttachAnswered& event);
  void on_answer(RequestAnswered event);
  bool send(Connection& c, const SocketMessage& message, std::span<const int> fds = {});
  void refuse(Connection& c, Status status, const std::string& text);
  void close(Connection& c, const char* why, bool orderly = false);
  Connection* find(std::uint64_t id) {
    const auto it = connections_.find(id);
    return it == connections_.end() ? nullptr : it->second.get();
  }
  [[nodiscard]] bool allowed(std::uint32_t uid) const;
  [[nodiscard]] bool reads_only(std::uint32_t uid) const;
  [[nodiscard]] bool open_to_others() const {
    return !config_.socket.allowed_uids.empty() || !config_.socket.read_only_uids.empty();
  }
  // Without those that are only told why they are refused.
  [[nodiscard]] std::size_t connections_of(std::uint32_t pid) const;

  Config config_;
  const std::string socket_path_;
  const int control_fd_;
  const int pool_fd_;
  const DaemonFacts facts_;
  Post post_;
  Registration& registration_;
  std::shared_ptr<SessionQueue> queue_ = std::make_shared<SessionQueue>();
  ListeningSocket listener_;
  UniqueFd epoll_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> deadlines_;  // (time, connection)
  std::uint64_t next_id_ = 1;
  std::size_t refusals_ = 0;
  std::uint64_t accept_paused_until_ = 0;
  std::uint64_t next_name_look_ = 0;
  LogBudget refusal_log_;
  bool draining_ = false;
  std::thread thread_;
};

SessionServer::Impl::~Impl() {
  if (thread_.joinable()) {
    queue_->push(Stopped{});
    thread_.join();
  }
}

Outcome SessionServer::Impl::listen() {
  if (auto opened = listener_.open(socket_path_, open_to_others()); !opened) return opened;
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid() || queue_->fd() < 0 || !watch(listener_.fd(), EPOLLIN, kListener) ||
      !watch(queue_->fd(), EPOLLIN, kQueue)) {
    return Error{Status::system_error, std::string("epoll for the socket: ") + std::strerror(errno), errno};
  }
  return success();
}

bool SessionServer::Impl::watch(int fd, std::uint32_t events, std::uint64_t data) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void SessionServer::Impl::run() {
  epoll_event events[64];
  for (;;) {
    const int n = ::epoll_wait(epoll_.get(), events, static_cast<int>(std::size(events)), turn_ms());
    for (int i = 0; i < n; ++i) {
      const std::uint64_t data = events[i].data.u64;
      if (data == kListener) {
        accept_some();
      } else if (data == kQueue) {
        if (!take_events()) return;
      } else if (data % 2 == static_cast<std::uint64_t>(Watched::socket)) {
        on_socket(data / 2);
      } else if (Connection* c = find(data / 2); c != nullptr) {
        close(*c, "its process has ended");
      }
    }
    const std::uint64_t now = monotonic_ns();
    expire(now);
    look_at_name(now);
  }
}

// Whoever removes the socket from its directory, by mistake or to tidy up, would keep every new client out.
void SessionServer::Impl::look_at_name(std::uint64_t now) {
  if (draining_ || now < next_name_look_) return;
  next_name_look_ = now + kNameLookNs;
  if (listener_.named()) return;
  accept_some();  // those that came before
  const int old = listener_.fd();
  const bool accepting = accept_paused_until_ == 0;
  if (accepting) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, old, nullptr);
  const auto again = listener_.reopen(open_to_others());
  if (accepting && accept_paused_until_ == 0) watch(listener_.fd(), EPOLLIN, kListener);
  if (again) {
    spdlog::warn("the socket {} was removed; clients find it there again", socket_path_);
  } else if (refusal_log_.take()) {
    spdlog::error("the socket {} was removed, and no client can attach: {}", socket_path_,
                  again.error().message);
  }
}

int SessionServer::Impl::turn_ms() const {
  std::uint64_t next = accept_paused_until_ != 0 ? accept_paused_until_ : ~0ull;
  if (!deadlines_.empty()) next = std::min(next, deadlines_.begin()->first);
  const std::uint64_t now = monotonic_ns();
  if (next <= now) return 0;
  return static_cast<int>(std::min<std::uint64_t>((next - now) / kMs + 1, kMaxTurnMs));
}

void SessionServer::Impl::expire(std::uint64_t now) {
  if (accept_paused_until_ != 0 && now >= accept_paused_until_) {
    accept_paused_until_ = 0;
    watch(listener_.fd(), EPOLLIN, kListener);
  }
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Connection* c = find(deadlines_.begin()->second);
    if (c == nullptr) {
      deadlines_.erase(deadlines_.begin());
    } else {
      close(*c, c->state == ConnectionState::tool ? "it asked nothing for too long"
                                                  : "it did not say Hello in time");
    }
  }
}

void SessionServer::Impl::set_deadline(Connection& c, std::uint64_t deadline_ns) {
  if (c.deadline_ns != 0) deadlines_.erase({c.deadline_ns, c.id});
  c.deadline_ns = deadline_ns;
  if (deadline_ns != 0) deadlines_.insert({deadline_ns, c.id});
}

// False when the server has to end.
bool SessionServer::Impl::take_events() {
  for (SessionEvent& event : queue_->take()) {
    if (std::holds_alternative<Stopped>(event)) return false;
    if (auto* attach = std::get_if<AttachAnswered>(&event)) on_attach_answer(*attach);
    if (auto* answer = std::get_if<RequestAnswered>(&event)) on_answer(std::move(*answer));
    if (const auto* died = std::get_if<PeerDied>(&event)) {
      if (Connection* c = find(died->connection); c != nullptr) close(*c, "its tripwire fired");
    }
    if (std::holds_alternative<Draining>(event)) draining_ = true;
    if (auto* next = std::get_if<Reconfigured>(&event)) {
      config_ = std::move(next->config);
      const mode_t mode = open_to_others() ? 0666 : 0600;
      if (::chmod(socket_path_.c_str(), mode) != 0) {
        spdlog::warn("cannot change the mode of {}: {}", socket_path_, std::strerror(errno));
      }
    }
  }
  return true;
}

bool SessionServer::Impl::allowed(std::uint32_t uid) const {
  const auto& uids = config_.socket.allowed_uids;
  return uid == 0 || uid == ::geteuid() || std::find(uids.begin(), uids.end(), uid) != uids.end() ||
         reads_only(uid);
}

bool SessionServer::Impl::reads_only(std::uint32_t uid) const {
  const auto& uids = config_.socket.read_only_uids;
  return uid != 0 && uid != ::geteuid() && std::find(uids.begin(), uids.end(), uid) != uids.end();
}

std::size_t SessionServer::Impl::connections_of(std::uint32_t pid) const {
  return static_cast<std::size_t>(
      std::count_if(connections_.begin(), connections_.end(),
                    [pid](const auto& c) { return c.second->peer.pid == pid && !c.second->refusal; }));
}

void SessionServer::Impl::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      admit(std::move(socket));
      continue;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      spdlog::warn("cannot accept a connection: {}; trying again soon", std::strerror(errno));
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.fd(), nullptr);
      accept_paused_until_ = monotonic_ns() + kAcceptPauseNs;
    }
    if (errno != EINTR && errno != ECONNABORTED) return;
  }
}

void SessionServer::Impl::admit(UniqueFd socket) {
  const auto peer = peer_credentials(socket.get());
  if (!peer) return;
  auto c = std::make_unique<Connection>();
  c->id = next_id_++;
  c->peer = *peer;
  if (!allowed(peer->uid)) {
    c->refusal =
        Reply{Status::not_permitted,
              fmt::format("user {} may not attach to daemon '{}': expected root, user {}, or one listed in "
                          "socket.allowed_uids or socket.read_only_uids",
                          peer->uid, config_.name, ::geteuid())};
  } else if (connections_.size() - refusals_ >= config_.socket.max_connections) {
    c->refusal = Reply{Status::again, fmt::format("daemon '{}' has {} connections, as many as "
                                                  "socket.max_connections allows",
                                                  config_.name, config_.socket.max_connections)};
  } else if (peer->pid != 0 && connections_of(peer->pid) >= config_.socket.max_connections_per_process) {
    c->refusal = Reply{Status::again,
                       fmt::format("process {} has {} connections to daemon '{}', as many as "
                                   "socket.max_connections_per_process allows",
                                   peer->pid, config_.socket.max_connections_per_process, config_.name)};
  }
  if (c->refusal) {
    post_(ConnectionRefused{});
    if (refusal_log_.take()) spdlog::warn("connection of pid {} refused: {}", peer->pid, c->refusal->text);
    if (refusals_ >= kMaxRefusals) return;
    c->state = ConnectionState::refusing;
  } else if (peer->pid != 0) {
    c->pidfd = open_pidfd(peer->pid);
    c->start_ticks = process_start_ticks(peer->pid).value_or(0);
  }
  if (!watch(socket.get(), EPOLLIN | EPOLLRDHUP, tag(c->id, Watched::socket))) return;
  if (c->pidfd.valid() && !watch(c->pidfd.get(), EPOLLIN, tag(c->id, Watched::process))) return;
  c->socket = std::move(socket);
  if (c->refusal) ++refusals_;
  const std::uint64_t patience = c->refusal ? kRefusalNs : config_.limits.hello_deadline_ms * kMs;
  Connection& kept = *c;
  connections_.emplace(kept.id, std::move(c));
  set_deadline(kept, monotonic_ns() + patience);
}

void SessionServer::Impl::on_socket(std::uint64_t id) {
  for (int i = 0; i < kMessagesPerTurn; ++i) {
    Connection* c = find(id);
    if (c == nullptr) return;
    auto message = receive_message(c->socket.get(), 0);
    if (message) {
      on_message(*c, std::move(*message));
    } else if (message.status() == Status::timed_out) {
      return;
    } else {
      const bool hang_up = message.status() == Status::daemon_lost;
      close(*c, hang_up ? "it hung up" : message.error().message.c_str());
      return;
    }
  }
}

void SessionServer::Impl::on_message(Connection& c, Message message) {
  if (c.state == ConnectionState::refusing) {
    const Reply reply = *c.refusal;
    refuse(c, reply.status, reply.text);
    return;
  }
  auto decoded = decode_message(message.bytes);
  if (!decoded) {
    refuse(c, decoded.status(), fmt::format("{} (daemon '{}')", decoded.error().message, config_.name));
    return;
  }
  if (std::holds_alternative<Goodbye>(*decoded)) {
    close(c, "it said Goodbye", true);
    return;
  }
  auto* buffers = std::get_if<RegisterBuffers>(&*decoded);
  if (!message.fds.empty() && buffers == nullptr) {
    refuse(c, Status::invalid_argument,
           fmt::format("{} descriptors came with a message that takes none", message.fds.size()));
  } else if (c.busy) {
    refuse(c, Status::invalid_argument, "a message came before the last one was answered");
  } else if (const auto* hello = std::get_if<Hello>(&*decoded);
             hello && c.state == ConnectionState::greeting) {
    on_hello(c, *hello);
  } else if (buffers != nullptr && c.state == ConnectionState::attached) {
    on_register(c, std::move(*buffers), std::move(message.fds));
  } else if (auto* control = std::get_if<Control>(&*decoded);
             control && (c.state == ConnectionState::tool || c.state == ConnectionState::greeting)) {
    c.state = ConnectionState::tool;  // a single question needs no Hello
    on_control(c, std::move(*control));
  } else {
    refuse(c, Status::invalid_argument,
           c.state == ConnectionState::greeting ? "expected Hello as the first message"
                                                : "this message is not expected from a client in its state");
  }
}

void SessionServer::Impl::on_hello(Connection& c, const Hello& hello) {
  if (auto acceptable = check_hello(hello, facts_, c.peer.pid); !acceptable) {
    refuse(c, acceptable.status(), acceptable.error().message);
    return;
  }
  c.protocol = std::min(hello.protocol_max, kProtocolMax);
  c.wanted_features = hello.features;
  c.role = hello.role;
  c.tp_rank = hello.tp_rank;
  if (hello.role == Role::tool) {
    c.state = ConnectionState::tool;
    set_deadline(c, monotonic_ns() + config_.limits.hello_deadline_ms * kMs);
    send(c, Reply{Status::ok, fmt::format("protocol {}", c.protocol)});
  } else if (draining_) {
    refuse(c, Status::shutting_down, fmt::format("daemon '{}' is stopping", config_.name));
  } else if (auto granted = grant_pool(c, hello); !granted) {
    refuse(c, granted.status(), granted.error().message);
  } else if (auto made = make_channel(c, config_.limits); !made) {
    refuse(c, made.status(), "the daemon cannot make a channel: " + made.error().message);
  } else {
    begin_attach(c, hello);
  }
}

// Makes what a rank in io_backend kernel shares with the daemon, if it asked for that and may.
Outcome SessionServer::Impl::grant_pool(Connection& c, const Hello& hello) const {
  if (hello.role != Role::rank || (hello.features & kFeatureKernel) == 0) return success();
  // Whoever maps the pool can change its bytes. Said first: no other key would help this user.
  if (reads_only(c.peer.uid)) {
    return Error{
        Status::not_permitted,
        fmt::format("user {} is read-only, by socket.read_only_uids of daemon '{}', and may not map the "
                    "pool, as io_backend kernel does",
                    c.peer.uid, config_.name),
        0};
  }
  if (auto may = may_map_pool(hello, c.peer.uid, config_); !may) return may;
  auto link = KernelLink::create(ProcessIdentity{c.peer.pid, c.start_ticks});
  if (!link) return link.error();
  c.kernel = std::move(*link);
  return success();
}

void SessionServer::Impl::begin_attach(Connection& c, const Hello& hello) {
  HICACHE_CRASH_POINT(attach_channel_made);
  c.state = ConnectionState::attaching;
  c.busy = true;
  set_deadline(c, 0);
  AttachRequest request;
  request.hello = hello;
  request.uid = c.peer.uid;
  request.pid = c.peer.pid;
  c.read_only = reads_only(c.peer.uid);
  request.read_only = c.read_only;
  request.start_ticks = c.start_ticks;
  request.channel = c.channel;
  request.geometry = c.geometry;
  request.kick = c.kick;
  request.maps_pool = c.kernel != nullptr;
  request.answer = [queue = queue_, id = c.id](AttachAnswer answer) {
    queue->push(AttachAnswered{id, std::move(answer)});
  };
  post_(std::move(request));
}

void SessionServer::Impl::on_attach_answer(const AttachAnswered& event) {
  Connection* c = find(event.connection);
  const AttachAnswer& answer = event.answer;
  if (c == nullptr) {  // it went while the coordinator decided
    if (answer.status == Status::ok) post_(GoneRequest{answer.client, answer.client_generation, false});
    return;
  }
  c->busy = false;
  if (answer.status != Status::ok) {
    refuse(*c, answer.status, answer.text);
    return;
  }
  c->state = ConnectionState::attached;
  c->client = answer;
  c->tripwire =
      std::make_unique<PeerWatch>(c->channel, [queue = queue_, id = c->id] { queue->push(PeerDied{id}); });
  std::vector<int> fds = {control_fd_, c->channel_fd.get(), c->kick->get()};
  if (c->kernel != nullptr) {
    fds.insert(fds.end(), {pool_fd_, c->kernel->block_fd.get(), c->kernel->news.get()});
    spdlog::info("client {} (pid {}) maps the pool", answer.client.value, c->peer.pid);
  }
  if (!send(*c, make_welcome(*c, facts_, config_), fds)) return;
  c->channel_fd.reset();
  HICACHE_CRASH_POINT(attach_welcome_sent);
  spdlog::info("client {} attached: pid {}, uid {}, {} {}{}", answer.client.value, c->peer.pid, c->peer.uid,
               to_string(c->role), c->tp_rank, c->read_only ? ", only for reading" : "");
}

void SessionServer::Impl::on_register(Connection& c, RegisterBuffers buffers, std::vector<UniqueFd> fds) {
  if (c.role != Role::rank || c.buffers_sent) {
    refuse(c, Status::not_permitted,
           c.buffers_sent ? "device buffers were registered before: once a session"
                          : "a scheduler has no device buffers to register");
    return;
  }
  c.buffers_sent = true;
  c.busy = true;
  RegistrationJob job;
  job.client = c.client.client;
  job.client_generation = c.client.client_generation;
  job.spec = c.client.spec;
  job.tp_rank = c.tp_rank;
  job.channel = c.channel;
  job.channel_geometry = c.geometry;
  job.geometry = std::move(buffers.geometry);
  job.staging = buffers.staging;
  job.kernel = c.kernel;
  job.fds = std::move(fds);
  job.socket = UniqueFd(::fcntl(c.socket.get(), F_DUPFD_CLOEXEC, 0));
  job.answer = [queue = queue_, id = c.id](Status status, std::string text) {
    queue->push(RequestAnswered{id, Reply{status, std::move(text)}});
  };
  registration_.submit(std::move(job));
}

void SessionServer::Impl::on_control(Connection& c, Control control) {
  if (c.peer.uid != 0 && c.peer.uid != ::geteuid() && !changes_nothing(control.arguments)) {
    const bool reader = reads_only(c.peer.uid);
    if (reader) post_(ReadOnlyRefused{});
    refuse(c, Status::not_permitted,
           fmt::format("user {}{} may not {}: only root and user {} may", c.peer.uid,
                       reader ? " (read-only, by socket.read_only_uids)" : "", control.arguments.front(),
                       ::geteuid()));
    return;
  }
  c.busy = true;
  set_deadline(c, 0);
  ControlRequest request;
  request.arguments = std::move(control.arguments);
  request.answer = [queue = queue_, id = c.id](Status status, std::string text) {
    queue->push(RequestAnswered{id, Reply{status, std::move(text)}});
  };
  post_(std::move(request));
}

void SessionServer::Impl::on_answer(RequestAnswered event) {
  Connection* c = find(event.connection);
  if (c == nullptr) return;
  c->busy = false;
  if (event.reply.text.size() > kMaxReplyBytes) {
    event.reply = Reply{Status::too_large, fmt::format("the answer has {} bytes, expected at most {}",
                                                       event.reply.text.size(), kMaxReplyBytes)};
  }
  if (c->state == ConnectionState::attached && event.reply.status != Status::ok) c->buffers_sent = false;
  if (c->state == ConnectionState::tool) {
    set_deadline(*c, monotonic_ns() + config_.limits.hello_deadline_ms * kMs);
  }
  send(*c, event.reply);
}

// False when the connection had to be closed.
bool SessionServer::Impl::send(Connection& c, const SocketMessage& message, std::span<const int> fds) {
  const auto sent = send_message(c.socket.get(), encode_message(message), fds, 0);
  if (sent) return true;
  close(c, sent.status() == Status::timed_out ? "it does not read its socket" : sent.error().message.c_str());
  return false;
}

void SessionServer::Impl::refuse(Connection& c, Status status, const std::string& text) {
  const std::uint64_t id = c.id;
  if (c.state != ConnectionState::refusing && refusal_log_.take())
    spdlog::warn("pid {} (uid {}) refused: {}", c.peer.pid, c.peer.uid, printable(text));
  if (!send(c, Reply{status, text})) return;
  // Messages that stay unread would turn our close into a reset, and the peer could not read the reply.
  for (int i = 0; i < kMessagesPerTurn; ++i) {
    if (!receive_message(c.socket.get(), 0)) break;
  }
  if (Connection* still = find(id); still != nullptr) close(*still, "it was refused");
}

void SessionServer::Impl::close(Connection& c, const char* why, bool orderly) {
  if (c.state == ConnectionState::attached) {
    spdlog::info("client {} (pid {}) is gone: {}", c.client.client.value, c.peer.pid, why);
    post_(GoneRequest{c.client.client, c.client.client_generation, orderly});
  } else {
    spdlog::debug("connection of pid {} closed: {}", c.peer.pid, why);
  }
  set_deadline(c, 0);
  if (c.state == ConnectionState::refusing) --refusals_;
  // The import of its GPU memory may hold the socket open: closing it here would leave it watched.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c.socket.get(), nullptr);
  connections_.erase(c.id);
}

SessionServer::SessionServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SessionServer::~SessionServer() = default;

Result<std::unique_ptr<SessionServer>> SessionServer::start(const SessionServerOptions& options, Post post,
                                                            Registration& registration) {
  auto impl = std::make_unique<Impl>(options, std::move(post), registration);
  if (auto listening = impl->listen(); !listening) return listening.error();
  impl->start();
  return std::unique_ptr<SessionServer>(new SessionServer(std::move(impl)));
}

void SessionServer::reload(const Config& config) {
  impl_->queue().push(Reconfigured{config});
}
void SessionServer::drain() {
  impl_->queue().push(Draining{});
}

}  // namespace hicache::daemon
