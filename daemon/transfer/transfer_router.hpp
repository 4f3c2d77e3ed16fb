// Sends each transfer to whoever can reach its rank's memory.
#pragma once

#include <utility>

#include "daemon/cuda/cuda_path.hpp"
#include "daemon/transfer/transfers.hpp"

namespace hicache::daemon {

class TransferRouter final : public Transfers {
 public:
  // Both outlive the router.
  TransferRouter(Transfers& host, CudaPath& cuda) : host_(host), cuda_(cuda) {}

  void submit(Transfer transfer) override {
    const bool device = transfer.memory != nullptr && transfer.memory->device != nullptr;
    (device ? *transfer.memory->device->transfers : host_).submit(std::move(transfer));
  }
  void cancel(TransferId id) override {
    host_.cancel(id);
    cuda_.cancel(id);
  }
  void cancel_client(ClientSlot client, Generation generation) override {
    host_.cancel_client(client, generation);
    cuda_.cancel_client(client, generation);
  }

 private:
  Transfers& host_;
  CudaPath& cuda_;
};

}  // namespace hicache::daemon
