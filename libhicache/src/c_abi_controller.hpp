// What the files of the controller's C interface share.
#pragma once

#include <deque>
#include <memory>

#include "c_abi_error.hpp"
#include "hicache/controller/controller.hpp"
#include "hicache/controller/prefix_tree.hpp"
#include "hicache/hicache_controller.h"

struct hicache_controller {
  std::unique_ptr<hicache::TokenSlots> device;
  std::unique_ptr<hicache::HiCacheController> controller;
  std::unique_ptr<hicache::PrefixTree> tree;
  std::deque<hicache_ack> acks;         // that there was no room for
  std::deque<hicache_ack> backup_acks;  // likewise
};

namespace hicache::c_abi {

// Every call on a controller begins with this.
template <class F>
hicache_status on(hicache_controller* controller, F&& body) noexcept {
  return guarded([&]() -> hicache_status {
    return controller == nullptr ? null_argument("controller") : body(*controller);
  });
}

}  // namespace hicache::c_abi
