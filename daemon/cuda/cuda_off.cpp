// A daemon without CUDA: built without it, switched off, or on a machine where the driver or a GPU is
// missing.
#include <utility>

#include "daemon/cuda/cuda_path.hpp"
#include "daemon/cuda/live_cuda_path.hpp"

namespace hicache::daemon {
namespace {

class CudaOff final : public CudaPath {
 public:
  explicit CudaOff(std::string reason) : reason_(std::move(reason)) {}

  Result<std::unique_ptr<DeviceImport>> import(const NamespaceSpec&, const DeviceGeometry&,
                                               const std::optional<StagingOffer>&, std::span<const UniqueFd>,
                                               FenceBlock*) override {
    return Error{Status::not_permitted, "this daemon serves no GPU memory: CUDA off: " + reason_, 0};
  }
  void cancel(TransferId) override {}
  void cancel_client(ClientSlot, Generation) override {}
  [[nodiscard]] CudaStatus status() const override {
    CudaStatus status;
    status.reason = reason_;
    return status;
  }

 private:
  const std::string reason_;
};

}  // namespace

std::unique_ptr<CudaPath> make_cuda_path(const CudaOptions& options) {
  if (options.mode == CudaMode::off) return std::make_unique<CudaOff>("cuda.mode is \"off\"");
#ifdef HICACHE_CUDA
  auto live = make_live_cuda_path(options);
  if (live) return std::move(*live);
  return std::make_unique<CudaOff>(live.error().message);
#else
  return std::make_unique<CudaOff>(HICACHE_CUDA_OFF_REASON);
#endif
}

}  // namespace hicache::daemon
