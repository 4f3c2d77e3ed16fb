#include "daemon/needs.hpp"

#include "daemon/region_owner.hpp"
#include "daemon/storage/file/file_settings.hpp"
#include "shm/region.hpp"
#include "shm/socket_path.hpp"

namespace hicache::daemon {
namespace {

machine::HugePageNeed huge_page_need(HugePages wanted) {
  switch (wanted) {
    case HugePages::off:
      return machine::HugePageNeed::none;
    case HugePages::prefer:
      return machine::HugePageNeed::preferred;
    case HugePages::require:
      return machine::HugePageNeed::required;
  }
  return machine::HugePageNeed::none;
}

machine::GpuNeed gpu_need(CudaMode mode) {
  switch (mode) {
    case CudaMode::off:
      return machine::GpuNeed::none;
    case CudaMode::on_demand:
      return machine::GpuNeed::on_demand;
    case CudaMode::at_start:
      return machine::GpuNeed::at_start;
  }
  return machine::GpuNeed::none;
}

// Only hicache's own files are read and written through a ring. Settings that are wrong are the attachment's
// matter, which says so.
machine::IoUringNeed io_uring_need(const Config::Storage& storage) {
  const auto settings = storage.settings.find("file");
  if (storage.backend != "file" || settings == storage.settings.end()) return machine::IoUringNeed::none;
  const auto file = parse_file_settings(settings->second);
  if (!file || file->format != FileFormat::segment || file->engine == IoEngineChoice::threads)
    return machine::IoUringNeed::none;
  return file->engine == IoEngineChoice::io_uring ? machine::IoUringNeed::required
                                                  : machine::IoUringNeed::preferred;
}

}  // namespace

machine::Needs needs_of(const Config& config) {
  machine::Needs needs;
  needs.name = config.name;
  needs.own_directory = config.socket.path.empty();
  needs.socket_path = needs.own_directory ? default_socket_path(config.name) : config.socket.path;
  needs.pool_bytes = usable_pool_bytes(config);
  needs.control_bytes = plan_region(shape_for(config)).total_bytes;
  needs.memory_reserve = config.pool.memory_reserve;
  needs.clients = config.limits.clients;
  needs.huge_pages = huge_page_need(config.pool.huge_pages);
  needs.gpus = gpu_need(config.cuda.mode);
  needs.io_uring = io_uring_need(config.storage);
  return needs;
}

}  // namespace hicache::daemon
