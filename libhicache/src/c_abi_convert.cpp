#include "c_abi_convert.hpp"

#include <algorithm>

namespace hicache::c_abi {
namespace {

std::string text(const char* from) {
  return from == nullptr ? std::string() : std::string(from);
}

std::optional<std::string> optional_text(const char* from) {
  if (from == nullptr) return std::nullopt;
  return std::string(from);
}

}  // namespace

Result<NamespaceSpec> to_spec(const hicache_namespace* from) {
  const auto read = read_struct(from, kNamespaceBytes, "hicache_namespace");
  if (!read) return read.error();
  const hicache_namespace& c = *read;
  if (c.attention != HICACHE_ATTENTION_MHA && c.attention != HICACHE_ATTENTION_MLA) {
    return Error{Status::invalid_argument,
                 "attention is " + std::to_string(c.attention) + "; expected 1 (MHA) or 2 (MLA)", 0};
  }
  NamespaceSpec spec;
  spec.model = text(c.model);
  spec.revision = text(c.revision);
  spec.dtype = text(c.dtype);
  spec.quantization = text(c.quantization);
  spec.kv_scales = text(c.kv_scales);
  spec.rope = text(c.rope);
  spec.overrides = text(c.overrides);
  spec.draft_model = text(c.draft_model);
  if (c.layout != nullptr) spec.layout = c.layout;
  spec.lora_id = optional_text(c.lora_id);
  spec.cache_salt = optional_text(c.cache_salt);
  spec.attention = static_cast<Attention>(c.attention);
  spec.weights_epoch = c.weights_epoch;
  spec.page_tokens = c.page_tokens;
  spec.first_layer = c.first_layer;
  spec.layers = c.layers;
  spec.heads_per_shard = c.heads_per_shard;
  spec.head_dim = c.head_dim;
  spec.element_bytes = c.element_bytes;
  spec.tp_size = c.tp_size;
  if (c.format_version != 0) spec.format_version = c.format_version;
  if (c.side_pool_count > NamespaceSpec::kMaxSidePools || c.reserved != 0 ||
      (c.side_pool_count > 0 && c.side_pools == nullptr)) {
    return Error{Status::invalid_argument,
                 "side_pool_count is " + std::to_string(c.side_pool_count) + " and reserved " +
                     std::to_string(c.reserved) + "; expected at most " +
                     std::to_string(NamespaceSpec::kMaxSidePools) + " pools at side_pools, and 0",
                 0};
  }
  for (std::uint32_t i = 0; i < c.side_pool_count; ++i) {
    const hicache_side_pool& pool = c.side_pools[i];
    spec.side_pools.push_back(
        {text(pool.name), static_cast<HitRule>(pool.rule), pool.layers, pool.piece_bytes});
  }
  return spec;
}

Result<AttachOptions> to_options(const hicache_attach_options* from) {
  const auto read = read_struct(from, kAttachOptionsBytes, "hicache_attach_options");
  if (!read) return read.error();
  auto spec = to_spec(read->spec);
  if (!spec) return spec.error();
  AttachOptions options;
  options.name = text(read->name);
  options.socket_path = text(read->socket_path);
  if (read->role != HICACHE_ROLE_RANK && read->role != HICACHE_ROLE_SCHEDULER) {
    return Error{Status::invalid_argument,
                 "role is " + std::to_string(read->role) + "; expected 1 (rank) or 2 (scheduler)", 0};
  }
  options.role = static_cast<Role>(read->role);
  options.engine = text(read->engine);
  options.tp_rank = read->tp_rank;
  if (read->timeout_ms != 0) options.timeout_ms = read->timeout_ms;
  options.spec = std::move(*spec);
  options.reattach = read->reattach != 0;
  if (read->io_backend > HICACHE_IO_KERNEL) {
    return Error{Status::invalid_argument,
                 "io_backend is " + std::to_string(read->io_backend) + "; expected 0 (direct) or 1 (kernel)",
                 0};
  }
  options.io_backend = read->io_backend == HICACHE_IO_KERNEL ? IoBackend::kernel : IoBackend::direct;
  return options;
}

Result<DeviceGeometry> to_geometry(std::span<const hicache_allocation> allocations,
                                   std::span<const hicache_tensor> tensors, std::uint32_t pages) {
  DeviceGeometry geometry;
  geometry.pages = pages;
  for (const hicache_allocation& a : allocations) {
    if (a.reserved != 0) return Error{Status::invalid_argument, "hicache_allocation.reserved is not 0", 0};
    geometry.allocations.push_back({DeviceKind::host, a.bytes});
  }
  for (const hicache_tensor& t : tensors) {
    if (t.kind > HICACHE_TENSOR_SIDE) {
      return Error{Status::invalid_argument,
                   "tensor of layer " + std::to_string(t.layer) + ": kind " + std::to_string(t.kind) +
                       "; expected 0 (K), 1 (V), 2 (latent) or 3 (side pool)",
                   0};
    }
    geometry.tensors.push_back({t.allocation, t.layer, static_cast<TensorKind>(t.kind), t.offset,
                                t.page_stride, t.page_bytes, t.pool});
  }
  return geometry;
}

Outcome check_size(const void* from, std::uint32_t first_version_bytes, const char* name) {
  if (from == nullptr) return Error{Status::invalid_argument, std::string(name) + " is NULL", 0};
  std::uint32_t size = 0;
  std::memcpy(&size, from, sizeof size);
  if (size >= first_version_bytes) return success();
  return Error{Status::invalid_argument,
               std::string(name) + ".struct_size is " + std::to_string(size) + "; expected at least " +
                   std::to_string(first_version_bytes),
               0};
}

void store_result(const OperationResult& from, hicache_result* out) {
  hicache_result c{};
  c.opcode = static_cast<std::uint32_t>(from.opcode);
  c.ticket = from.ticket.value;
  c.lease = from.lease.value;
  c.status = static_cast<hicache_status>(from.status);
  c.hits = from.hits;
  c.written = from.written;
  c.present = from.present;
  c.filling = from.filling;
  c.dropped = from.dropped;
  c.bytes = from.bytes;
  c.operation_sequence = from.operation_sequence;
  c.pages_busy = from.pages_busy ? 1 : 0;
  c.pages_returned = from.pages_returned ? 1 : 0;
  c.page_status = out->page_status;
  c.page_status_capacity = out->page_status_capacity;
  c.page_status_count = static_cast<std::uint32_t>(from.page_status.size());
  if (c.page_status != nullptr) {
    const std::size_t stored = std::min<std::size_t>(from.page_status.size(), c.page_status_capacity);
    for (std::size_t i = 0; i < stored; ++i)
      c.page_status[i] = static_cast<hicache_status>(from.page_status[i]);
  }
  write_struct(c, out);
}

Result<std::optional<PrefetchPolicy>> to_prefetch_policy(std::uint32_t policy) {
  if (policy == HICACHE_PREFETCH_DEFAULT) return std::optional<PrefetchPolicy>();
  if (policy <= HICACHE_PREFETCH_TIMEOUT) return std::optional(static_cast<PrefetchPolicy>(policy));
  return Error{Status::invalid_argument,
               "policy is " + std::to_string(policy) +
                   "; expected 0 (best_effort), 1 (wait_complete), 2 (timeout) or HICACHE_PREFETCH_DEFAULT",
               0};
}

}  // namespace hicache::c_abi
