// Huge pages for the pool: pinning walks 512 times fewer pages, and so do the GPUs' address translations.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/config.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// How the kernel gives huge pages to shared memory, as it says itself ("always within_size [advise] never
// ..."), or "unknown".
std::string shmem_huge_policy();

// Fills an empty shared memory object with huge pages as far as the machine gives them. The rest is left to
// be reserved in small ones. With `require`: no_space or not_permitted where the object is not all huge (but
// for an end of less than 2 MiB), with what the machine allows.
Outcome fill_with_huge_pages(int fd, std::uint64_t bytes, HugePages wanted);

}  // namespace hicache::daemon
