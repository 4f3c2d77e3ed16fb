#include "cuda_page_mover.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "../cuda_driver.hpp"
#include "hicache/cuda.hpp"
#include "move_plan.hpp"
#include "page_kernel_arguments.hpp"
#include "pool_registration.hpp"
#include "shm/layer_fences.hpp"

// Made by nvcc from page_kernels.cu: machine code for sm_90 and PTX for everything newer than sm_80.
asm(R"(
  .section .rodata
  .balign 64
  .global hicache_page_kernels
  .hidden hicache_page_kernels
hicache_page_kernels:
  .incbin ")" HICACHE_PAGE_KERNELS_FILE R"("
  .byte 0
  .previous
)");
extern "C" const unsigned char hicache_page_kernels[];

namespace hicache {
namespace {

// A request, once its kernels have been launched.
struct Running {
  KernelWork work;
  KernelEnd end;
  std::vector<std::uint32_t> marks;  // layers that are done when the mark's word is written
  std::size_t next_mark = 0;
  std::uint32_t announced = 0;  // layers
};

// One direction: a stream, on which one request runs at a time.
struct Lane {
  CUstream stream = nullptr;
  CUfunction kernel = nullptr;
  std::deque<KernelWork> waiting;
  std::optional<Running> running;
  // Memory that the GPU reads and writes, see Block.
  A32* words = nullptr;
  CUdeviceptr words_address = 0;
  MovePage* pages = nullptr;
  CUdeviceptr device_pages = 0;
  std::uint32_t value = 0;  // of the words of the running request; grows
};

// What a lane shares with its stream: a word for each mark and one for the end, and the list of pages.
constexpr std::uint64_t kWordsBytes = align_up((kMaxLayers + 1) * sizeof(A32), 4096);
constexpr std::uint64_t kPagesBytes = kMaxPagesPerOperation * sizeof(MovePage);
constexpr std::uint64_t kLaneBytes = kWordsBytes + kPagesBytes;

class CudaPageMover final : public PageMover {
 public:
  CudaPageMover(const CudaDriver& driver, CUcontext context, const NamespaceSpec& spec, FenceBlock& fences,
                const PoolGuard& guard)
      : driver_(driver), context_(context), layers_(spec.layers), fences_(fences), guard_(guard) {}
  ~CudaPageMover() override;

  Outcome prepare(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                  std::span<const CudaRange> ranges, const Mapping& pool);

  [[nodiscard]] bool has_room(bool loads) const override {
    const Lane& lane = lanes_[loads ? 1 : 0];
    return lane.waiting.size() + (lane.running ? 1 : 0) < kKernelSlotsPerDirection;
  }
  void begin(const KernelWork& work) override { lanes_[work.loads ? 1 : 0].waiting.push_back(work); }
  std::optional<KernelEnd> next_end() override;
  void finish() override;
  [[nodiscard]] bool busy() const override {
    return !ended_.empty() || std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
      return lane.running || !lane.waiting.empty();
    });
  }

 private:
  Outcome make_tensors(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                       std::span<const CudaRange> ranges);
  Outcome make_lanes();
  Outcome load_kernels();
  void advance(Lane& lane);
  [[nodiscard]] PoolRegistration::State pool_state(const KernelWork& work) const;
  void start(Lane& lane);
  CUresult launch(Lane& lane, Running& running);
  void collect(Lane& lane);
  void refuse(const KernelWork& work, Status status) {
    ended_.push_back(KernelEnd{work.slot, work.number, status, 0});
  }

  const CudaDriver& driver_;
  const CUcontext context_;
  const std::uint32_t layers_;
  FenceBlock& fences_;
  const PoolGuard guard_;
  std::vector<PlannedTensor> plan_;
  std::vector<MoveTensor> tensors_;  // in the plan's order
  std::vector<std::uint64_t> piece_bytes_;
  std::uint32_t vector_ = 16;  // bytes of a word that all tensors suit
  CUmodule module_ = nullptr;
  CUdeviceptr memory_ = 0;  // tensors, then each lane's pages
  Mapping block_;
  bool block_registered_ = false;
  std::unique_ptr<PoolRegistration> pool_;
  std::array<Lane, 2> lanes_{};  // writes, loads
  std::deque<KernelEnd> ended_;
};

Outcome CudaPageMover::make_tensors(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                    std::span<const CudaRange> ranges) {
  auto plan = plan_tensors(spec, geometry);
  if (!plan) return plan.error();
  plan_ = std::move(*plan);
  std::uint64_t bits = 0;
  for (const PlannedTensor& planned : plan_) {
    const DeviceTensor& tensor = geometry.tensors[planned.tensor];
    const auto start = reinterpret_cast<std::uintptr_t>(ranges[tensor.allocation].pointer);
    tensors_.push_back(
        MoveTensor{start + tensor.offset, tensor.page_stride, shard_piece_offset(spec, tensor)});
    piece_bytes_.push_back(tensor.page_bytes);
    bits |= tensors_.back().address | tensor.page_stride | tensors_.back().shard_offset | planned.row_bytes;
  }
  if (bits % 8 != 0) {
    return Error{Status::invalid_argument, "ranges are not aligned to 8 bytes, as io_backend kernel needs",
                 0};
  }
  vector_ = bits % 16 == 0 ? 16 : 8;
  return success();
}

Outcome CudaPageMover::load_kernels() {
  CUresult r = driver_.cuModuleLoadData(&module_, hicache_page_kernels);
  const std::array<const char*, 2> names = vector_ == 16
                                               ? std::array{"hicache_gather_16", "hicache_scatter_16"}
                                               : std::array{"hicache_gather_8", "hicache_scatter_8"};
  for (std::size_t i = 0; i < names.size() && r == CUDA_SUCCESS; ++i)
    r = driver_.cuModuleGetFunction(&lanes_[i].kernel, module_, names[i]);
  if (r != CUDA_SUCCESS) return cuda_error(driver_, r, "loading the kernels that move pages");
  return success();
}

Outcome CudaPageMover::make_lanes() {
  auto fd = create_sealed("hicache-lanes", kLaneBytes * lanes_.size());
  if (!fd) return fd.error();
  auto mapping = Mapping::map(fd->get(), kLaneBytes * lanes_.size(), Mapping::Access::read_write, true);
  if (!mapping) return mapping.error();
  block_ = std::move(*mapping);
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  CUresult r = driver_.cuMemHostRegister(block_.data(), block_.size(), kFlags);
  block_registered_ = r == CUDA_SUCCESS;
  CUdeviceptr address = 0;
  if (r == CUDA_SUCCESS) r = driver_.cuMemHostGetDevicePointer(&address, block_.data(), 0);
  const std::uint64_t tensor_bytes = align_up(tensors_.size() * sizeof(MoveTensor), 4096);
  if (r == CUDA_SUCCESS) r = driver_.cuMemAlloc(&memory_, tensor_bytes + kPagesBytes * lanes_.size());
  int least = 0;
  int greatest = 0;
  if (r == CUDA_SUCCESS) r = driver_.cuCtxGetStreamPriorityRange(&least, &greatest);
  for (std::size_t i = 0; i < lanes_.size() && r == CUDA_SUCCESS; ++i) {
    Lane& lane = lanes_[i];
    auto* base = static_cast<std::uint8_t*>(block_.data()) + i * kLaneBytes;
    lane.words = reinterpret_cast<A32*>(base);
    lane.words_address = address + i * kLaneBytes;
    lane.pages = reinterpret_cast<MovePage*>(base + kWordsBytes);
    lane.device_pages = memory_ + tensor_bytes + i * kPagesBytes;
    // Before the model's kernels that wait: a transfer needs few multiprocessors, and needs them soon.
    r = driver_.cuStreamCreateWithPriority(&lane.stream, CU_STREAM_NON_BLOCKING, greatest);
  }
  // Through a stream: a plain copy may return while its end is still on the way.
  if (r == CUDA_SUCCESS)
    r = driver_.cuMemcpyHtoDAsync(memory_, tensors_.data(), tensors_.size() * sizeof(MoveTensor),
                                  lanes_[0].stream);
  if (r == CUDA_SUCCESS) r = driver_.cuStreamSynchronize(lanes_[0].stream);
  if (r != CUDA_SUCCESS) return cuda_error(driver_, r, "memory and streams of io_backend kernel");
  return success();
}

Outcome CudaPageMover::prepare(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                               std::span<const CudaRange> ranges, const Mapping& pool) {
  if (auto made = make_tensors(spec, geometry, ranges); !made) return made;
  if (auto loaded = load_kernels(); !loaded) return loaded;
  if (auto made = make_lanes(); !made) return made;
  auto registered = PoolRegistration::begin(driver_, context_, pool);
  if (!registered) return registered.error();
  pool_ = std::move(*registered);
  return success();
}

CudaPageMover::~CudaPageMover() {
  const CudaContextScope scope(driver_, context_);
  // At process exit the driver may be gone already, and all of this with it: errors don't matter here.
  for (const Lane& lane : lanes_) {
    if (lane.stream == nullptr) continue;
    static_cast<void>(driver_.cuStreamSynchronize(lane.stream));
    static_cast<void>(driver_.cuStreamDestroy(lane.stream));
  }
  pool_.reset();
  if (module_ != nullptr) static_cast<void>(driver_.cuModuleUnload(module_));
  if (block_registered_) static_cast<void>(driver_.cuMemHostUnregister(block_.data()));
  if (memory_ != 0) static_cast<void>(driver_.cuMemFree(memory_));
}

PoolRegistration::State CudaPageMover::pool_state(const KernelWork& work) const {
  for (const KernelCopy& page : work.pages) {
    const auto state = pool_->state(page.host);
    if (state != PoolRegistration::State::ready) return state;
  }
  return PoolRegistration::State::ready;
}

// A failure leaves work on the stream: the caller waits for it.
CUresult CudaPageMover::launch(Lane& lane, Running& running) {
  const KernelWork& work = running.work;
  for (std::size_t i = 0; i < work.pages.size(); ++i) {
    const KernelCopy& page = work.pages[i];
    lane.pages[i] = MovePage{pool_->address(page.host), page.device.value, page.state.value};
  }
  CUresult r = driver_.cuMemcpyHtoDAsync(lane.device_pages, lane.pages, work.pages.size() * sizeof(MovePage),
                                         lane.stream);
  const bool by_layer = work.fence != kNone32;
  const auto launches = plan_launches(plan_, static_cast<std::uint32_t>(work.pages.size()), layers_,
                                      work.block_quota, by_layer);
  ++lane.value;
  std::uint32_t done = 0;
  for (const PlannedLaunch& one : launches) {
    MoveArguments arguments;
    arguments.tensors = memory_ + one.first * sizeof(MoveTensor);
    arguments.pages = lane.device_pages;
    arguments.page_count = static_cast<std::uint32_t>(work.pages.size());
    arguments.rows = plan_[one.first].rows;
    arguments.row_bytes = static_cast<std::uint32_t>(plan_[one.first].row_bytes);
    arguments.items = one.items;
    arguments.items_per_warp = one.items_per_warp;
    arguments.states = plan_[one.first].states ? 1 : 0;
    std::array<void*, 1> parameters{&arguments};
    if (r == CUDA_SUCCESS) {
      r = driver_.cuLaunchKernel(lane.kernel, one.blocks, 1, 1, kMoveThreads, 1, 1, 0, lane.stream,
                                 parameters.data(), nullptr);
    }
    if (!by_layer || one.layers_done == done) continue;
    done = one.layers_done;
    running.marks.push_back(done);
    // The default keeps the memory barrier: the kernel's bytes come before the word.
    if (r == CUDA_SUCCESS) {
      r = driver_.cuStreamWriteValue32(lane.stream, lane.words_address + (done - 1) * sizeof(A32), lane.value,
                                       CU_STREAM_WRITE_VALUE_DEFAULT);
    }
  }
  if (r == CUDA_SUCCESS) {
    r = driver_.cuStreamWriteValue32(lane.stream, lane.words_address + kMaxLayers * sizeof(A32), lane.value,
                                     CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  return r;
}

void CudaPageMover::start(Lane& lane) {
  const auto state = pool_state(lane.waiting.front());
  if (state == PoolRegistration::State::waiting) return;
  Running running;
  running.work = std::move(lane.waiting.front());
  lane.waiting.pop_front();
  if (state == PoolRegistration::State::failed) return refuse(running.work, Status::system_error);
  // A page that is no longer leased must not be written.
  if (!guard_.ours()) return refuse(running.work, Status::daemon_lost);
  running.end = KernelEnd{running.work.slot, running.work.number, Status::ok, 0};
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    const auto moved = std::count_if(
        running.work.pages.begin(), running.work.pages.end(),
        [&](const KernelCopy& page) { return !plan_[i].states || static_cast<bool>(page.state); });
    running.end.bytes += static_cast<std::uint64_t>(moved) * piece_bytes_[i];
  }
  if (launch(lane, running) != CUDA_SUCCESS) {
    // What was launched may run: not before it is over.
    static_cast<void>(driver_.cuStreamSynchronize(lane.stream));
    return refuse(running.work, Status::system_error);
  }
  lane.running = std::move(running);
}

void CudaPageMover::collect(Lane& lane) {
  Running& running = *lane.running;
  const auto reached = [&](std::uint32_t word) {
    return timeline_reached(lane.words[word].load(std::memory_order_acquire), lane.value);
  };
  for (; running.next_mark < running.marks.size() && reached(running.marks[running.next_mark] - 1);
       ++running.next_mark) {
    if (!guard_.ours()) running.end.status = Status::daemon_lost;
    if (running.end.status != Status::ok) continue;
    for (; running.announced < running.marks[running.next_mark]; ++running.announced)
      raise_layer(fences_.load[running.work.fence], running.announced, running.work.fence_value);
  }
  if (!reached(kMaxLayers)) return;
  if (running.work.loads && !guard_.ours()) running.end.status = Status::daemon_lost;
  if (running.end.status != Status::ok && running.work.fence != kNone32)
    fail_layers(fences_.load[running.work.fence], layers_, running.work.fence_value);
  ended_.push_back(running.end);
  lane.running.reset();
}

void CudaPageMover::advance(Lane& lane) {
  if (!lane.running && !lane.waiting.empty()) start(lane);
  if (lane.running) collect(lane);
}

std::optional<KernelEnd> CudaPageMover::next_end() {
  if (ended_.empty()) {
    const CudaContextScope scope(driver_, context_);
    for (Lane& lane : lanes_) advance(lane);
  }
  if (ended_.empty()) return std::nullopt;
  const KernelEnd end = ended_.front();
  ended_.pop_front();
  return end;
}

void CudaPageMover::finish() {
  const CudaContextScope scope(driver_, context_);
  for (Lane& lane : lanes_) {
    for (const KernelWork& work : lane.waiting) refuse(work, Status::closed);
    lane.waiting.clear();
    if (!lane.running) continue;
    if (driver_.cuStreamSynchronize(lane.stream) == CUDA_SUCCESS) {
      collect(lane);
    } else {
      // The context is broken: no kernel of it runs any more, and no word will be written.
      refuse(lane.running->work, Status::system_error);
      lane.running.reset();
    }
  }
}

}  // namespace

Result<std::unique_ptr<PageMover>> make_cuda_page_mover(const NamespaceSpec& spec,
                                                        const DeviceGeometry& geometry,
                                                        std::span<const CudaRange> ranges,
                                                        const Mapping& pool, FenceBlock& fences,
                                                        const PoolGuard& guard) {
  const auto loaded = cuda_driver();
  if (!loaded) return loaded.error();
  const CudaDriver& driver = **loaded;
  const auto first = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(ranges.front().pointer));
  CUcontext context = nullptr;
  if (driver.cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, first) != CUDA_SUCCESS)
    context = nullptr;
  if (context == nullptr && driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS) context = nullptr;
  if (context == nullptr) {
    return Error{Status::invalid_argument, "the buffers' context is unknown, and none is current", 0};
  }
  const CudaContextScope scope(driver, context);
  auto mover = std::make_unique<CudaPageMover>(driver, context, spec, fences, guard);
  if (auto prepared = mover->prepare(spec, geometry, ranges, pool); !prepared) return prepared.error();
  return std::unique_ptr<PageMover>(std::move(mover));
}

}  // namespace hicache
