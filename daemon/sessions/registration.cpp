#include "daemon/sessions/registration.hpp"
#include "shm/crash_points.hpp"

#include <spdlog/spdlog.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace hicache::daemon {
namespace {

Error allocation_error(std::size_t index, Status status, const std::string& text, int code = 0) {
  return Error{status, "allocation " + std::to_string(index) + ": " + text, code};
}

Result<std::vector<Mapping>> map_host_memory(const RegistrationJob& job) {
  std::vector<Mapping> mapped;
  const auto& allocations = job.geometry.allocations;
  for (std::size_t i = 0; i < allocations.size(); ++i) {
    const auto size = sealed_size(job.fds[i].get());
    if (!size) return allocation_error(i, size.status(), size.error().message, size.error().system_errno);
    if (*size < allocations[i].bytes) {
      return allocation_error(i, Status::invalid_argument,
                              "the memfd has " + std::to_string(*size) + " bytes, the geometry says " +
                                  std::to_string(allocations[i].bytes));
    }
    auto mapping = Mapping::map(job.fds[i].get(), allocations[i].bytes, Mapping::Access::read_write, true);
    if (!mapping)
      return allocation_error(i, mapping.status(), mapping.error().message, mapping.error().system_errno);
    mapped.push_back(std::move(*mapping));
  }
  return mapped;
}

}  // namespace

Result<std::unique_ptr<RankMemory>> map_rank_memory(RegistrationJob& job, CudaPath& cuda) {
  if (auto valid = job.geometry.validate(job.spec); !valid) return valid.error();
  const bool by_rank = job.kernel != nullptr;
  if (by_rank && job.staging) {
    return Error{Status::invalid_argument, "staging memory in io_backend kernel, which needs none", 0};
  }
  const std::size_t expected = by_rank ? 0 : job.geometry.descriptors() + (job.staging ? 1 : 0);
  if (job.fds.size() != expected) {
    return Error{Status::invalid_argument,
                 std::to_string(job.fds.size()) + " descriptors came with " +
                     std::to_string(job.geometry.allocations.size()) + " allocations" +
                     (job.staging ? " and a staging block" : "") + ", expected " + std::to_string(expected),
                 0};
  }
  if (job.staging && job.geometry.device_kind() != DeviceKind::cuda) {
    return Error{Status::invalid_argument, "staging memory beside host memory; expected GPU memory", 0};
  }
  auto memory = std::make_unique<RankMemory>();
  memory->channel = job.channel;
  memory->fences = reinterpret_cast<FenceBlock*>(static_cast<std::uint8_t*>(job.channel->data()) +
                                                 job.channel_geometry.fence_offset);
  if (by_rank) {
    memory->kernel = job.kernel;
  } else if (job.geometry.device_kind() == DeviceKind::cuda) {
    auto device = cuda.import(job.spec, job.geometry, job.staging, job.fds, memory->fences);
    if (!device) return device.error();
    memory->device = std::move(*device);
    memory->session = std::move(job.socket);
  } else {
    auto mapped = map_host_memory(job);
    if (!mapped) return mapped.error();
    memory->allocations = std::move(*mapped);
  }
  memory->client = job.client;
  memory->client_generation = job.client_generation;
  memory->spec = job.spec;
  memory->geometry = std::move(job.geometry);
  memory->shard = job.spec.attention == Attention::mha ? job.tp_rank : 0;
  return memory;
}

// Shared with the deleters of the memory it made: the last user of a rank's memory is often the coordinator,
// and unmapping many GiB takes long, so the memory comes back here to be unmapped.
struct Registration::Impl {
  std::function<void(CoordinatorRequest)> post;
  CudaPath* cuda = nullptr;
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<RegistrationJob> jobs;                     // guarded by mutex
  std::vector<std::unique_ptr<const RankMemory>> dead;  // guarded by mutex
  bool stopping = false;                                // guarded by mutex
  std::thread thread;

  static void run(const std::shared_ptr<Impl>& self);
  static void execute(const std::shared_ptr<Impl>& self, RegistrationJob job);
  static void bury(const std::weak_ptr<Impl>& weak, const RankMemory* memory);
};

void Registration::Impl::bury(const std::weak_ptr<Impl>& weak, const RankMemory* memory) {
  std::unique_ptr<const RankMemory> owned(memory);
  const auto self = weak.lock();
  if (self == nullptr) return;
  const std::lock_guard lock(self->mutex);
  if (self->stopping) return;
  self->dead.push_back(std::move(owned));
  self->wake.notify_one();
}

void Registration::Impl::execute(const std::shared_ptr<Impl>& self, RegistrationJob job) {
  auto mapped = map_rank_memory(job, *self->cuda);
  if (!mapped) {
    spdlog::warn("client {}: device buffers refused: {}", job.client.value, mapped.error().message);
    job.answer(mapped.status(), mapped.error().message);
    return;
  }
  const std::weak_ptr<Impl> weak = self;
  std::shared_ptr<const RankMemory> memory(mapped->release(), [weak](const RankMemory* m) { bury(weak, m); });
  HICACHE_CRASH_POINT(register_mapped);
  self->post(BuffersRequest{std::move(memory), std::move(job.answer)});
}

void Registration::Impl::run(const std::shared_ptr<Impl>& self) {
  for (;;) {
    std::vector<std::unique_ptr<const RankMemory>> dead;
    std::optional<RegistrationJob> job;
    {
      std::unique_lock lock(self->mutex);
      self->wake.wait(lock, [&] { return self->stopping || !self->jobs.empty() || !self->dead.empty(); });
      if (self->stopping) return;
      dead.swap(self->dead);
      if (!self->jobs.empty()) {
        job = std::move(self->jobs.front());
        self->jobs.pop_front();
      }
    }
    dead.clear();
    if (job) execute(self, std::move(*job));
  }
}

Registration::Registration(std::function<void(CoordinatorRequest)> post, CudaPath& cuda)
    : impl_(std::make_shared<Impl>()) {
  impl_->post = std::move(post);
  impl_->cuda = &cuda;
  impl_->thread = std::thread([self = impl_] { Impl::run(self); });
}

Registration::~Registration() {
  std::deque<RegistrationJob> waiting;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    waiting.swap(impl_->jobs);
    impl_->wake.notify_one();
  }
  impl_->thread.join();
  for (RegistrationJob& job : waiting) job.answer(Status::shutting_down, "the daemon is stopping");
}

void Registration::submit(RegistrationJob job) {
  {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->stopping) {
      impl_->jobs.push_back(std::move(job));
      impl_->wake.notify_one();
      return;
    }
  }
  job.answer(Status::shutting_down, "the daemon is stopping");
}

}  // namespace hicache::daemon
