#include "stream_fences.hpp"

#include <chrono>

#include "cuda_driver.hpp"

namespace hicache {
namespace {

// How often the session is looked at while a stream waits: bounds how long a dead daemon keeps it waiting.
constexpr auto kLookEvery = std::chrono::milliseconds(2);

}  // namespace

StreamFences::StreamFences(Session& session, FenceBlock* words) : session_(session), words_(words) {}

Result<std::unique_ptr<StreamFences>> StreamFences::create(Session& session, FenceBlock* words,
                                                           void* stream) {
  const auto loaded = cuda_driver();
  if (!loaded) return loaded.error();
  const CudaDriver& driver = **loaded;
  CUcontext context = nullptr;
  CUresult result = driver.cuCtxGetCurrent(&context);
  if (result == CUDA_SUCCESS && context == nullptr) {
    result = driver.cuStreamGetCtx(static_cast<CUstream>(stream), &context);
  }
  if (result != CUDA_SUCCESS)
    return cuda_error(driver, result, "context of the stream", Status::invalid_argument);
  std::unique_ptr<StreamFences> fences(new StreamFences(session, words));
  const CudaContextScope scope(driver, context);
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  // Whole pages: the block begins at one, and what follows it in the channel begins at the next.
  result = driver.cuMemHostRegister(words, align_up(sizeof(FenceBlock), 4096), kFlags);
  if (result != CUDA_SUCCESS) return cuda_error(driver, result, "registering the fence words");
  fences->registered_ = true;
  fences->context_ = context;
  CUdeviceptr address = 0;
  result = driver.cuMemHostGetDevicePointer(&address, words, 0);
  if (result != CUDA_SUCCESS) return cuda_error(driver, result, "device address of the fence words");
  fences->device_words_ = address;
  fences->guard_ = std::thread([raw = fences.get()] { raw->run(); });
  return fences;
}

StreamFences::~StreamFences() {
  if (guard_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    guard_.join();
  }
  if (!registered_) return;
  const CudaDriver& driver = **cuda_driver();
  const CudaContextScope scope(driver, static_cast<CUcontext>(context_));
  // At process exit the driver may be gone already, and the registration with it.
  static_cast<void>(driver.cuMemHostUnregister(words_));
}

std::uint64_t StreamFences::device_address(const A32& word) const {
  const auto offset =
      reinterpret_cast<const std::uint8_t*>(&word) - reinterpret_cast<const std::uint8_t*>(words_);
  return device_words_ + static_cast<std::uint64_t>(offset);
}

Outcome StreamFences::wait(void* stream, const A32& word, std::uint32_t value) const {
  const CudaDriver& driver = **cuda_driver();
  // GEQ compares cyclically, as timeline_reached does.
  const CUresult result = driver.cuStreamWaitValue32(static_cast<CUstream>(stream), device_address(word),
                                                     value, CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS) return cuda_error(driver, result, "putting a layer wait into the stream");
  return success();
}

Outcome StreamFences::write(void* stream, const A32& word, std::uint32_t value) const {
  const CudaDriver& driver = **cuda_driver();
  // The default keeps the memory barrier: the pages' bytes come before the word.
  const CUresult result = driver.cuStreamWriteValue32(static_cast<CUstream>(stream), device_address(word),
                                                      value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (result != CUDA_SUCCESS) return cuda_error(driver, result, "putting a write fence into the stream");
  return success();
}

void StreamFences::watch() {
  {
    const std::lock_guard lock(mutex_);
    if (watching_) return;
    watching_ = true;
  }
  changed_.notify_one();
}

void StreamFences::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return watching_ || stopping_; });
    if (stopping_) return;
    // Before the look: a wait that is added during it is looked at in the next round.
    watching_ = false;
    lock.unlock();
    const bool open = session_.look_after_loads();
    lock.lock();
    if (!open) continue;
    watching_ = true;
    changed_.wait_for(lock, kLookEvery, [&] { return stopping_; });
  }
}

}  // namespace hicache
