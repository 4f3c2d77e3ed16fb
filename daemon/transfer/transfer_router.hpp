// Sends each transfer to whoever can reach its rank's memory.
#pragma once

#include <utility>

#include "daemon/cuda/cuda_path.hpp"
#include "daemon/transfer/transfers.hpp"

namespace hicache::daemon {

class TransferRouter final : public Transfers {
 public:
  // All outlive the router.
  TransferRouter(Transfers& host, CudaPath& cuda, Transfers& kernel)
      : host_(host), cuda_(cuda), kernel_(kernel) {}

  void submit(Transfer transfer) override {
    if (transfer.memory != nullptr && transfer.memory->kernel != nullptr)
      return kernel_.submit(std::move(transfer));
    const bool device = transfer.memory != nullptr && transfer.memory->device != nullptr;
    (device ? *transfer.memory->device->transfers : host_).submit(std::move(transfer));
  }
  void cancel(TransferId id) override {
    host_.cancel(id);
    cuda_.cancel(id);
    kernel_.cancel(id);
  }
  void cancel_client(ClientSlot client, Generation generation) override {
    host_.cancel_client(client, generation);
    cuda_.cancel_client(client, generation);
    kernel_.cancel_client(client, generation);
  }

 private:
  Transfers& host_;
  CudaPath& cuda_;
  Transfers& kernel_;
};

}  // namespace hicache::daemon
