// One object in memory that forked children share with their parent.
#pragma once

#include <new>
#include <type_traits>

#include "shm/shared_memory.hpp"
#include "shm/status.hpp"

namespace hicache::bench {

template <class T>
class SharedObject {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  static Result<SharedObject> create() {
    auto fd = create_sealed("hicache-bench", sizeof(T));
    if (!fd) return fd.error();
    auto mapping = Mapping::map(fd->get(), sizeof(T), Mapping::Access::read_write);
    if (!mapping) return mapping.error();
    return SharedObject(std::move(*mapping));
  }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }

 private:
  explicit SharedObject(Mapping mapping) : mapping_(std::move(mapping)), object_(new (mapping_.data()) T{}) {}
  Mapping mapping_;
  T* object_ = nullptr;
};

}  // namespace hicache::bench
