// What all functions of the C interface share: its handles' insides, and the last error of each thread.
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "hicache/client.hpp"
#include "hicache/hicache.h"

struct hicache_session {
  std::unique_ptr<hicache::Session> session;
  std::uint32_t state_slots = 0;  // of the geometry that is yet to be registered
};

namespace hicache::c_abi {

inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

inline hicache_status fail(Status status, const std::string& text) {
  last_error() = std::string(to_string(status)) + ": " + text;
  return static_cast<hicache_status>(status);
}
inline hicache_status fail(const Error& error) {
  return fail(error.status, error.message);
}
inline hicache_status null_argument(const char* name) {
  return fail(Status::invalid_argument, std::string(name) + " is NULL");
}
// The status of a call that has no value.
inline hicache_status status_of(const Outcome& outcome) {
  return outcome ? HICACHE_OK : fail(outcome.error());
}

// Nothing may leave through the C interface but a status.
template <class F>
hicache_status guarded(F&& body) noexcept {
  try {
    try {
      return body();
    } catch (const std::bad_alloc&) {
      return fail(Status::no_space, "out of memory");
    } catch (const std::exception& e) {
      return fail(Status::internal, e.what());
    }
  } catch (...) {
    return HICACHE_INTERNAL;  // not even the text could be kept
  }
}

// The caller's array may have any alignment.
inline std::vector<PrefixHash> to_hashes(const hicache_hash* hashes, std::size_t count) {
  std::vector<PrefixHash> out(count);
  if (count > 0) std::memcpy(static_cast<void*>(out.data()), hashes, count * sizeof(hicache_hash));
  return out;
}

}  // namespace hicache::c_abi
