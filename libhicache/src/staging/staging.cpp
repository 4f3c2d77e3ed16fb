#include "staging.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../cuda_driver.hpp"
#include "hicache/cuda.hpp"
#include "kernel_arguments.hpp"
#include "shm/shared_memory.hpp"
#include "shm/tripwire.hpp"
#include "staging_requests.hpp"

// Made by nvcc from staging_kernels.cu: machine code for sm_90 and PTX for everything newer than sm_80.
asm(R"(
  .section .rodata
  .balign 64
  .global hicache_staging_kernels
  .hidden hicache_staging_kernels
hicache_staging_kernels:
  .incbin ")" HICACHE_STAGING_KERNELS_FILE R"("
  .byte 0
  .previous
)");
extern "C" const unsigned char hicache_staging_kernels[];

namespace hicache {
namespace {

static_assert(kPackPages >= kStagingChunkPages && kPackSlots >= kStagingSlotsPerDirection);
constexpr std::uint64_t kDeviceUnit = 2 * kMiB;  // docs/gpu.md says what other sizes cost
constexpr std::uint64_t kParkNs = 100'000'000;

// Device addresses of a page's pieces, and the widest vector that suits all of them.
struct Pieces {
  std::vector<PackTensor> tensors;
  std::uint32_t vector = 16;  // bytes; 0 = they are not aligned to words
};

Pieces pieces_of(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                 std::span<const CudaRange> ranges) {
  Pieces out;
  out.tensors.resize(geometry.tensors.size());
  std::uint64_t bits = spec.piece_bytes();
  for (const DeviceTensor& tensor : geometry.tensors) {
    const std::size_t place = (tensor.kind == TensorKind::v ? spec.layers : 0) + std::size_t{tensor.layer};
    const auto start = reinterpret_cast<std::uintptr_t>(ranges[tensor.allocation].pointer);
    out.tensors[place] = {start + tensor.offset, tensor.page_stride};
    bits |= out.tensors[place].address | tensor.page_stride;
  }
  if (bits % 16 != 0) out.vector = bits % 8 == 0 ? 8 : 0;
  return out;
}

Error unsuitable(const std::string& text) {
  return Error{Status::invalid_argument, "no staging: " + text, 0};
}

}  // namespace

struct Staging::Impl {
  // Packs or unpacks, on two streams in turn. What is posted while both are busy goes into one launch: where
  // the model's kernels leave multiprocessors only between each other, everything that waits must be able to
  // run then.
  struct Side {
    bool loads = false;
    CUfunction kernel = nullptr;
    struct Lane {
      CUstream stream = nullptr;
      std::uint32_t slot = 0;  // of its last request
      std::uint64_t number = 0;
    };
    std::array<Lane, 2> lanes;
    std::optional<StagingWork> held;  // taken, and too large for the launch before
  };

  Impl(const CudaDriver& d, CUcontext c, const ChannelHeader& h, const WaitPolicy& w)
      : driver(d), context(c), channel(h), waiting(w) {}
  ~Impl();

  Outcome prepare(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                  std::span<const CudaRange> ranges, std::uint64_t bytes);
  Outcome load_kernels();
  Outcome make_streams();
  Outcome make_block();
  Outcome send_tensors();
  void run();
  // Launches what is posted, if a lane is free. False when nothing was.
  bool serve(Side& side);
  void launch(Side& side, Side::Lane& lane, std::span<const StagingWork> batch);
  // The daemon lives and the session goes on.
  [[nodiscard]] bool open() const {
    return !ending.load(std::memory_order_acquire) &&
           channel.session_ended.load(std::memory_order_relaxed) == 0 &&
           !tripwire_fired(channel.daemon_tripwire.load(std::memory_order_relaxed));
  }

  const CudaDriver& driver;
  const CUcontext context;
  const ChannelHeader& channel;
  const WaitPolicy waiting;
  NamespaceSpec shape;
  Pieces pieces;
  StagingOffer offer;

  CUmodule module = nullptr;
  std::array<Side, 2> sides{};  // packing, unpacking
  CUdeviceptr memory = 0;       // the slots, then the tensors' addresses
  std::uint64_t slots_bytes = 0;
  UniqueFd block_fd;
  Mapping block;
  bool registered = false;
  CUdeviceptr block_address = 0;
  std::optional<StagingRequests> requests;
  std::vector<StagingWork> works;  // of the launch at hand

  std::atomic<bool> ending{false};  // release in end(), acquire in open(): what ended the session comes first
  std::atomic<bool> quiet{
      true};  // release when the thread has ended, acquire in idle(): its kernels are over
  bool free_memory = false;
  std::thread thread;
};

Outcome Staging::Impl::load_kernels() {
  CUresult r = driver.cuModuleLoadData(&module, hicache_staging_kernels);
  const std::array<const char*, 2> names = pieces.vector == 16
                                               ? std::array{"hicache_pack_16", "hicache_unpack_16"}
                                               : std::array{"hicache_pack_8", "hicache_unpack_8"};
  for (std::size_t i = 0; i < names.size() && r == CUDA_SUCCESS; ++i) {
    sides[i].loads = i == 1;
    r = driver.cuModuleGetFunction(&sides[i].kernel, module, names[i]);
  }
  if (r != CUDA_SUCCESS) return cuda_error(driver, r, "loading the kernels that pack pages");
  return success();
}

Outcome Staging::Impl::make_streams() {
  int least = 0;
  int greatest = 0;
  CUresult r = driver.cuCtxGetStreamPriorityRange(&least, &greatest);
  // Before the model's kernels that wait: a transfer needs few multiprocessors, and needs them soon.
  for (Side& side : sides) {
    for (Side::Lane& lane : side.lanes) {
      if (r == CUDA_SUCCESS)
        r = driver.cuStreamCreateWithPriority(&lane.stream, CU_STREAM_NON_BLOCKING, greatest);
    }
  }
  if (r != CUDA_SUCCESS) return cuda_error(driver, r, "streams that pack pages");
  return success();
}

Outcome Staging::Impl::make_block() {
  auto fd = create_sealed("hicache-staging", kStagingBlockBytes);
  if (!fd) return fd.error();
  auto mapping = Mapping::map(fd->get(), kStagingBlockBytes, Mapping::Access::read_write, true);
  if (!mapping) return mapping.error();
  block_fd = std::move(*fd);
  block = std::move(*mapping);
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  CUresult r = driver.cuMemHostRegister(block.data(), block.size(), kFlags);
  registered = r == CUDA_SUCCESS;
  if (registered) r = driver.cuMemHostGetDevicePointer(&block_address, block.data(), 0);
  if (r != CUDA_SUCCESS) return cuda_error(driver, r, "registering the staging block");
  return success();
}

// Through a stream: a plain copy may return while its end is still on the way, and the kernels would not wait
// for it.
Outcome Staging::Impl::send_tensors() {
  CUresult r = driver.cuMemcpyHtoDAsync(memory + slots_bytes, pieces.tensors.data(),
                                        pieces.tensors.size() * sizeof(PackTensor), sides[0].lanes[0].stream);
  if (r == CUDA_SUCCESS) r = driver.cuStreamSynchronize(sides[0].lanes[0].stream);
  if (r != CUDA_SUCCESS) return cuda_error(driver, r, "sending the tensors' addresses");
  return success();
}

Outcome Staging::Impl::prepare(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                               std::span<const CudaRange> ranges, std::uint64_t bytes) {
  shape = spec;
  pieces = pieces_of(spec, geometry, ranges);
  if (pieces.vector == 0) return unsuitable("tensors are not aligned to 8 bytes");
  const std::uint64_t slot = bytes / kStagingSlots / 4096 * 4096;
  const std::uint64_t layer_bytes = spec.kinds() * spec.piece_bytes();
  if (slot < kMinStagingSlotBytes || slot > kMaxStagingSlotBytes || slot < layer_bytes) {
    return unsuitable("slots of " + std::to_string(slot) + " bytes, a page's layer has " +
                      std::to_string(layer_bytes));
  }
  slots_bytes = slot * kStagingSlots;
  const std::uint64_t table = pieces.tensors.size() * sizeof(PackTensor);
  const std::uint64_t whole = align_up(slots_bytes + table, kDeviceUnit);
  if (const CUresult r = driver.cuMemAlloc(&memory, whole); r != CUDA_SUCCESS)
    return cuda_error(driver, r, std::to_string(whole) + " bytes of staging memory");
  CUipcMemHandle handle{};
  if (const CUresult r = driver.cuIpcGetMemHandle(&handle, memory); r != CUDA_SUCCESS)
    return cuda_error(driver, r, "CUDA IPC handle of the staging memory");
  std::memcpy(offer.ipc_handle.data(), handle.reserved, offer.ipc_handle.size());
  offer.base_bytes = whole;
  offer.slot_bytes = slot;
  for (const auto& step :
       {&Impl::load_kernels, &Impl::make_streams, &Impl::make_block, &Impl::send_tensors}) {
    if (Outcome done = (this->*step)(); !done) return done;
  }
  requests.emplace(*static_cast<StagingBlock*>(block.data()),
                   StagingLimits{spec.layers, layer_bytes, geometry.pages, slot});
  return success();
}

void Staging::Impl::launch(Side& side, Side::Lane& lane, std::span<const StagingWork> batch) {
  PackArguments arguments;
  arguments.memory = memory;
  arguments.slot_bytes = offer.slot_bytes;
  arguments.tensors = memory + slots_bytes;
  arguments.layers = shape.layers;
  arguments.kinds = shape.kinds();
  arguments.piece_vectors = static_cast<std::uint32_t>(shape.piece_bytes() / pieces.vector);
  std::uint32_t pages = 0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const StagingWork& work = batch[i];
    arguments.part[i] = {work.slot, work.first_layer, work.end_layer - work.first_layer, pages, work.pages};
    std::copy_n(work.page.begin(), work.pages, arguments.page + pages);
    pages += work.pages;
  }
  std::array<void*, 1> parameters{&arguments};
  CUresult r = driver.cuLaunchKernel(side.kernel, batch.front().blocks, static_cast<unsigned>(batch.size()),
                                     1, kPackThreads, 1, 1, 0, lane.stream, parameters.data(), nullptr);
  if (r != CUDA_SUCCESS) {
    for (const StagingWork& work : batch) requests->refuse(work);
    return;
  }
  for (const StagingWork& work : batch) {
    const auto offset = reinterpret_cast<const std::uint8_t*>(&requests->done_word(work.slot)) -
                        static_cast<const std::uint8_t*>(block.data());
    // The default keeps the memory barrier: the kernel's bytes come before the word.
    r = driver.cuStreamWriteValue32(lane.stream, block_address + static_cast<CUdeviceptr>(offset),
                                    static_cast<std::uint32_t>(work.number), CU_STREAM_WRITE_VALUE_DEFAULT);
    if (r == CUDA_SUCCESS) {
      lane.slot = work.slot;
      lane.number = work.number;
      continue;
    }
    static_cast<void>(driver.cuStreamSynchronize(lane.stream));  // the kernel may run: not before it is over
    requests->refuse(work);
  }
}

bool Staging::Impl::serve(Side& side) {
  const auto lane = std::find_if(side.lanes.begin(), side.lanes.end(), [&](const Side::Lane& l) {
    return l.number == 0 || requests->ended(l.slot, l.number);
  });
  if (lane == side.lanes.end()) return false;
  lane->number = 0;
  works.clear();
  std::uint32_t pages = 0;
  if (side.held) {
    pages = side.held->pages;
    works.push_back(*side.held);
    side.held.reset();
  }
  StagingWork work;
  while (works.size() < kPackSlots && requests->take(side.loads, work)) {
    pages += work.pages;
    if (pages > kPackPages) {
      side.held = work;
      break;
    }
    works.push_back(work);
  }
  if (works.empty()) return false;
  launch(side, *lane, works);
  return true;
}

void Staging::Impl::run() {
  const CudaContextScope scope(driver, context);
  WaitLadder ladder(waiting);
  // Between this look and a launch the daemon may die: pages stay busy until this thread has ended.
  while (open()) {
    bool worked = false;
    for (Side& side : sides) worked |= serve(side);
    if (worked) {
      ladder.reset();
    } else if (sides[0].held || sides[1].held || requests->posted()) {
      ::sched_yield();  // a lane will be free soon
    } else if (!ladder.step()) {
      if (requests->park(kParkNs)) ladder.reset();
    }
  }
  for (Side& side : sides) {
    if (side.held) requests->refuse(*side.held);
    for (const Side::Lane& lane : side.lanes) static_cast<void>(driver.cuStreamSynchronize(lane.stream));
  }
  quiet.store(true, std::memory_order_release);
}

Staging::Impl::~Impl() {
  const CudaContextScope scope(driver, context);
  // At process exit the driver may be gone already, and all of this with it: errors don't matter here.
  for (const Side& side : sides) {
    for (const Side::Lane& lane : side.lanes) {
      if (lane.stream != nullptr) static_cast<void>(driver.cuStreamDestroy(lane.stream));
    }
  }
  if (module != nullptr) static_cast<void>(driver.cuModuleUnload(module));
  if (registered) static_cast<void>(driver.cuMemHostUnregister(block.data()));
  if (memory != 0 && free_memory) static_cast<void>(driver.cuMemFree(memory));
}

Staging::Staging(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Staging>> Staging::create(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                                 std::span<const CudaRange> ranges, std::uint64_t bytes,
                                                 const ChannelHeader& channel, const WaitPolicy& waiting) {
  const auto loaded = cuda_driver();
  if (!loaded) return loaded.error();
  const CudaDriver& driver = **loaded;
  const auto first = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(ranges.front().pointer));
  CUcontext context = nullptr;
  if (driver.cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, first) != CUDA_SUCCESS)
    context = nullptr;
  if (context == nullptr && driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS) context = nullptr;
  if (context == nullptr) return unsuitable("the buffers' context is unknown, and none is current");
  auto impl = std::make_unique<Impl>(driver, context, channel, waiting);
  impl->free_memory = true;  // nobody knows of it yet
  const CudaContextScope scope(driver, context);
  if (Outcome prepared = impl->prepare(spec, geometry, ranges, bytes); !prepared) return prepared.error();
  return std::unique_ptr<Staging>(new Staging(std::move(impl)));
}

Staging::~Staging() {
  end();
  if (impl_->thread.joinable()) impl_->thread.join();
}

const StagingOffer& Staging::offer() const {
  return impl_->offer;
}
int Staging::block_fd() const {
  return impl_->block_fd.get();
}

void Staging::offered() {
  impl_->free_memory = false;
}

void Staging::start() {
  impl_->quiet.store(false, std::memory_order_relaxed);
  // The engine's signal handlers must not run in this thread.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  impl_->thread = std::thread([raw = impl_.get()] { raw->run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Staging::end() {
  impl_->ending.store(true, std::memory_order_release);
  impl_->requests->wake();
}

bool Staging::idle() const {
  return impl_->quiet.load(std::memory_order_acquire);
}

void Staging::let_go() {
  impl_->free_memory = true;
}

}  // namespace hicache
