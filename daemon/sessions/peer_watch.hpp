// Holds the daemon's tripwire in one client's channel and watches the client's: a thread per attached client,
// asleep until one of them changes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "shm/channel_layout.hpp"
#include "shm/shared_memory.hpp"
#include "shm/tripwire.hpp"

namespace hicache::daemon {

class PeerWatch {
 public:
  // `died` is called from the thread, at most once, when the client's process has died.
  PeerWatch(std::shared_ptr<Mapping> channel, std::function<void()> died)
      : channel_(std::move(channel)), header_(static_cast<ChannelHeader*>(channel_->data())) {
    thread_ = std::thread([this, died = std::move(died)] {
      bool told = false;
      std::uint32_t changes = 0;
      // Whatever else a client writes there is its own loss: only its death is watched for. The thread stays
      // even then, for it holds the daemon's side.
      hold_tripwire(&header_->daemon_tripwire, &header_->client_tripwire, stop_, [&](std::uint32_t word) {
        if (tripwire_fired(word) && !std::exchange(told, true)) died();
        // An honest client changes its word twice. One that plays with it must not keep this thread busy.
        if (++changes > kFreeChanges) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return true;
      });
    });
  }
  ~PeerWatch() {
    stop_.stop(&header_->client_tripwire);
    thread_.join();
  }
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

 private:
  static constexpr std::uint32_t kFreeChanges = 8;

  std::shared_ptr<Mapping> channel_;
  ChannelHeader* header_;
  TripwireStop stop_;
  std::thread thread_;
};

}  // namespace hicache::daemon
