// hicache.h over client.hpp: converts arguments, keeps exceptions inside, remembers the last error of each
// thread.
#include <utility>

#include "c_abi_convert.hpp"
#include "c_abi_error.hpp"
#include "hicache/cuda.hpp"
#include "shm/prefix_hash.hpp"

// The handles of the C interface.
struct hicache_buffer {
  hicache::HostDeviceBuffer buffer;
};

namespace {

using hicache::DevicePage;
using hicache::LeaseId;
using hicache::Outcome;
using hicache::PrefixHash;
using hicache::Result;
using hicache::Status;
using hicache::Ticket;
namespace c_abi = hicache::c_abi;
using c_abi::fail;
using c_abi::guarded;
using c_abi::last_error;
using c_abi::null_argument;
using c_abi::to_hashes;

static_assert(HICACHE_INTERNAL + 1 == hicache::kStatusCount);
static_assert(HICACHE_PEER_LOST == static_cast<int>(Status::peer_lost) &&
              HICACHE_SHUTTING_DOWN == static_cast<int>(Status::shutting_down));
static_assert(HICACHE_OP_RELEASE == static_cast<int>(hicache::Opcode::release));
static_assert(HICACHE_OP_AGREE == static_cast<int>(hicache::Opcode::agree));
static_assert(HICACHE_OP_END_PREFETCH == static_cast<int>(hicache::Opcode::end_prefetch));
static_assert(HICACHE_OP_BACKUP == static_cast<int>(hicache::Opcode::backup) &&
              HICACHE_OP_BACKUP + 1 == hicache::kOpcodeCount);
static_assert(HICACHE_PREFETCH_TIMEOUT == static_cast<int>(hicache::PrefetchPolicy::timeout));
static_assert(HICACHE_NO_FENCE == hicache::Submission::kNoFence);
static_assert(sizeof(hicache_hash) == sizeof(PrefixHash) && sizeof(DevicePage) == sizeof(std::uint32_t));

std::vector<DevicePage> to_pages(const std::uint32_t* pages, std::size_t count) {
  std::vector<DevicePage> out;
  out.reserve(count);
  for (std::size_t i = 0; i < count; ++i) out.emplace_back(pages[i]);
  return out;
}

void store_hash(const PrefixHash& from, hicache_hash* out) {
  std::memcpy(out->bytes, from.words.data(), sizeof out->bytes);
}

hicache_status store_ticket(const Result<Ticket>& posted, hicache_ticket* ticket) {
  *ticket = posted ? posted->value : 0;
  return posted ? HICACHE_OK : fail(posted.error());
}

hicache_status store_text(const std::string& text, char* out, std::size_t capacity, std::size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (out == nullptr || capacity <= text.size()) {
    return fail(Status::too_large, "the text has " + std::to_string(text.size() + 1) +
                                       " bytes with its zero; there is room for " +
                                       std::to_string(out == nullptr ? 0 : capacity));
  }
  std::memcpy(out, text.c_str(), text.size() + 1);
  return HICACHE_OK;
}

// The checks that every post makes of its pointers.
hicache_status check_post(const hicache_session* session, const hicache_ticket* ticket, const void* list,
                          std::size_t count, const char* list_name) {
  if (session == nullptr) return null_argument("session");
  if (ticket == nullptr) return null_argument("ticket");
  if (list == nullptr && count > 0) return null_argument(list_name);
  if (count > hicache::kMaxPagesPerOperation) {
    return fail(Status::too_large, std::to_string(count) + " pages in one operation; at most " +
                                       std::to_string(hicache::kMaxPagesPerOperation));
  }
  return HICACHE_OK;
}

}  // namespace

extern "C" {

const char* hicache_status_name(hicache_status status) {
  return status < 0 || status >= hicache::kStatusCount ? "unknown_status"
                                                       : to_string(static_cast<Status>(status)).data();
}

const char* hicache_version(void) {
  return HICACHE_VERSION;
}
uint32_t hicache_abi_version(void) {
  return HICACHE_ABI_VERSION;
}
const char* hicache_last_error(void) {
  return last_error().c_str();
}

hicache_status hicache_namespace_digest(const hicache_namespace* spec, hicache_hash* digest) {
  return guarded([&]() -> hicache_status {
    if (digest == nullptr) return null_argument("digest");
    const auto converted = c_abi::to_spec(spec);
    if (!converted) return fail(converted.error());
    if (const auto valid = converted->validate(); !valid) return fail(valid.error());
    store_hash(converted->digest(), digest);
    return HICACHE_OK;
  });
}

hicache_status hicache_namespace_seed(const hicache_namespace* spec, hicache_hash* seed) {
  return guarded([&]() -> hicache_status {
    if (seed == nullptr) return null_argument("seed");
    const auto converted = c_abi::to_spec(spec);
    if (!converted) return fail(converted.error());
    const auto value = converted->seed();
    if (!value) return fail(Status::not_found, "the namespace has neither lora_id nor cache_salt");
    store_hash(*value, seed);
    return HICACHE_OK;
  });
}

hicache_status hicache_hash_chain(const uint32_t* tokens, size_t token_count, uint32_t page_tokens,
                                  const hicache_hash* seed, hicache_hash* hashes) {
  return guarded([&]() -> hicache_status {
    if (page_tokens == 0) return fail(Status::invalid_argument, "page_tokens is 0; at least 1 expected");
    if (token_count / page_tokens == 0) return HICACHE_OK;
    if (tokens == nullptr) return null_argument("tokens");
    if (hashes == nullptr) return null_argument("hashes");
    std::optional<PrefixHash> prior;
    if (seed != nullptr) prior = to_hashes(seed, 1).front();
    const auto chain = hicache::hash_chain({tokens, token_count}, page_tokens, prior);
    for (std::size_t i = 0; i < chain.size(); ++i) store_hash(chain[i], hashes + i);
    return HICACHE_OK;
  });
}

hicache_status hicache_attach(const hicache_attach_options* options, hicache_session** session) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    *session = nullptr;
    const auto converted = c_abi::to_options(options);
    if (!converted) return fail(converted.error());
    auto attached = hicache::Session::attach(*converted);
    if (!attached) return fail(attached.error());
    *session = new hicache_session{std::move(*attached)};
    return HICACHE_OK;
  });
}

hicache_status hicache_close(hicache_session* session) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    session->session->close();
    return HICACHE_OK;
  });
}

void hicache_session_destroy(hicache_session* session) {
  guarded([&]() -> hicache_status {
    delete session;
    return HICACHE_OK;
  });
}

hicache_status hicache_state(const hicache_session* session) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    const Status state = session->session->state();
    return state == Status::ok ? HICACHE_OK : fail(state, "the session has ended");
  });
}

hicache_status hicache_session_get_info(const hicache_session* session, hicache_session_info* info) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (const auto checked = c_abi::check_size(info, c_abi::kSessionInfoBytes, "hicache_session_info");
        !checked) {
      return fail(checked.error());
    }
    const hicache::Session& s = *session->session;
    const hicache::SessionCounters counters = s.counters();
    hicache_session_info filled{};
    filled.namespace_id = s.namespace_id().value;
    filled.tp_rank = s.tp_rank();
    filled.tp_size = s.tp_size();
    filled.client_slot = s.client_slot();
    filled.instance_epoch = s.instance_epoch();
    filled.parks = counters.parks;
    filled.late_wakes = counters.late_wakes;
    filled.ignored_completions = counters.ignored_completions;
    filled.expired = counters.expired;
    c_abi::write_struct(filled, info);
    return HICACHE_OK;
  });
}

hicache_status hicache_buffer_create(uint64_t bytes, hicache_buffer** buffer) {
  return guarded([&]() -> hicache_status {
    if (buffer == nullptr) return null_argument("buffer");
    *buffer = nullptr;
    auto made = hicache::HostDeviceBuffer::create(bytes);
    if (!made) return fail(made.error());
    *buffer = new hicache_buffer{std::move(*made)};
    return HICACHE_OK;
  });
}

void* hicache_buffer_data(const hicache_buffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->buffer.data();
}
uint64_t hicache_buffer_size(const hicache_buffer* buffer) {
  return buffer == nullptr ? 0 : buffer->buffer.size();
}
int hicache_buffer_fd(const hicache_buffer* buffer) {
  return buffer == nullptr ? -1 : buffer->buffer.fd();
}
void hicache_buffer_destroy(hicache_buffer* buffer) {
  delete buffer;
}

hicache_status hicache_set_state_slots(hicache_session* session, uint32_t slots) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    session->state_slots = slots;
    return HICACHE_OK;
  });
}

hicache_status hicache_register_buffers(hicache_session* session, const hicache_allocation* allocations,
                                        size_t allocation_count, const hicache_tensor* tensors,
                                        size_t tensor_count, uint32_t pages, uint32_t timeout_ms) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (allocations == nullptr) return null_argument("allocations");
    if (tensors == nullptr) return null_argument("tensors");
    if (allocation_count > hicache::kMaxAllocations || tensor_count > hicache::kMaxTensors) {
      return fail(Status::too_large, std::to_string(allocation_count) + " allocations and " +
                                         std::to_string(tensor_count) + " tensors; at most " +
                                         std::to_string(hicache::kMaxAllocations) + " and " +
                                         std::to_string(hicache::kMaxTensors));
    }
    auto geometry = c_abi::to_geometry({allocations, allocation_count}, {tensors, tensor_count}, pages);
    if (!geometry) return fail(geometry.error());
    geometry->states = session->state_slots;
    std::vector<int> fds;
    for (std::size_t i = 0; i < allocation_count; ++i) fds.push_back(allocations[i].fd);
    const auto registered = session->session->register_buffers(*geometry, fds, timeout_ms);
    return registered ? HICACHE_OK : fail(registered.error());
  });
}

hicache_status hicache_register_cuda_buffers(hicache_session* session, const hicache_cuda_range* ranges,
                                             size_t range_count, const hicache_tensor* tensors,
                                             size_t tensor_count, uint32_t pages, uint32_t timeout_ms) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (ranges == nullptr) return null_argument("ranges");
    if (tensors == nullptr) return null_argument("tensors");
    if (range_count > hicache::kMaxAllocations || tensor_count > hicache::kMaxTensors) {
      return fail(Status::too_large, std::to_string(range_count) + " ranges and " +
                                         std::to_string(tensor_count) + " tensors; at most " +
                                         std::to_string(hicache::kMaxAllocations) + " and " +
                                         std::to_string(hicache::kMaxTensors));
    }
    const auto geometry = c_abi::to_geometry({}, {tensors, tensor_count}, pages);
    if (!geometry) return fail(geometry.error());
    std::vector<hicache::CudaRange> memory;
    for (std::size_t i = 0; i < range_count; ++i) memory.push_back({ranges[i].pointer, ranges[i].bytes});
    const auto registered = hicache::register_cuda_buffers(*session->session, memory, geometry->tensors,
                                                           pages, timeout_ms, session->state_slots);
    return registered ? HICACHE_OK : fail(registered.error());
  });
}

hicache_status hicache_probe(const hicache_session* session, const hicache_hash* hashes, size_t count,
                             uint32_t* leading, uint32_t* busy) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (hashes == nullptr && count > 0) return null_argument("hashes");
    if (leading == nullptr) return null_argument("leading");
    if (count > UINT32_MAX)
      return fail(Status::too_large, std::to_string(count) + " hashes; at most 2^32 - 1");
    const auto result = session->session->probe(to_hashes(hashes, count));
    *leading = result.leading;
    if (busy != nullptr) *busy = result.busy ? 1 : 0;
    return HICACHE_OK;
  });
}

hicache_status hicache_nop(hicache_session* session, uint32_t deadline_ms, hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, nullptr, 0, ""); bad != HICACHE_OK) return bad;
    return store_ticket(session->session->nop(deadline_ms), ticket);
  });
}

hicache_status hicache_reserve(hicache_session* session, uint64_t sequence, const hicache_hash* hashes,
                               size_t count, uint32_t deadline_ms, hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, hashes, count, "hashes"); bad != HICACHE_OK) return bad;
    return store_ticket(session->session->reserve(sequence, to_hashes(hashes, count), deadline_ms), ticket);
  });
}

hicache_status hicache_write(hicache_session* session, hicache_lease lease, uint32_t first,
                             const uint32_t* device_pages, size_t count, uint32_t fence, uint32_t fence_value,
                             uint32_t deadline_ms, hicache_ticket* ticket) {
  return hicache_write_with_states(session, lease, first, device_pages, nullptr, count, fence, fence_value,
                                   deadline_ms, ticket);
}

hicache_status hicache_write_with_states(hicache_session* session, hicache_lease lease, uint32_t first,
                                         const uint32_t* device_pages, const uint32_t* states, size_t count,
                                         uint32_t fence, uint32_t fence_value, uint32_t deadline_ms,
                                         hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, device_pages, count, "device_pages"); bad != HICACHE_OK)
      return bad;
    std::optional<hicache::WriteFence> wait_for;
    if (fence != HICACHE_NO_FENCE) wait_for = hicache::WriteFence{fence, fence_value};
    const auto pages = to_pages(device_pages, count);
    const auto slots = to_pages(states, states == nullptr ? 0 : count);
    return store_ticket(session->session->write(LeaseId{lease}, first, pages, wait_for, deadline_ms, slots),
                        ticket);
  });
}

hicache_status hicache_load(hicache_session* session, hicache_lease lease, uint32_t first,
                            const uint32_t* device_pages, size_t count, uint32_t fence, uint32_t fence_value,
                            uint32_t deadline_ms, hicache_ticket* ticket) {
  return hicache_load_with_states(session, lease, first, device_pages, nullptr, count, fence, fence_value,
                                  deadline_ms, ticket);
}

hicache_status hicache_load_with_states(hicache_session* session, hicache_lease lease, uint32_t first,
                                        const uint32_t* device_pages, const uint32_t* states, size_t count,
                                        uint32_t fence, uint32_t fence_value, uint32_t deadline_ms,
                                        hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, device_pages, count, "device_pages"); bad != HICACHE_OK)
      return bad;
    std::optional<hicache::LayerFence> announce;
    if (fence != HICACHE_NO_FENCE) announce = hicache::LayerFence{fence, fence_value};
    const auto pages = to_pages(device_pages, count);
    const auto slots = to_pages(states, states == nullptr ? 0 : count);
    return store_ticket(session->session->load(LeaseId{lease}, first, pages, announce, deadline_ms, slots),
                        ticket);
  });
}

hicache_status hicache_release(hicache_session* session, hicache_lease lease, uint32_t deadline_ms,
                               hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, nullptr, 0, ""); bad != HICACHE_OK) return bad;
    return store_ticket(session->session->release(LeaseId{lease}, deadline_ms), ticket);
  });
}

hicache_status hicache_prefetch(hicache_session* session, hicache_lease lease, uint32_t first, uint32_t count,
                                uint32_t policy, uint32_t deadline_ms, hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, nullptr, 0, ""); bad != HICACHE_OK) return bad;
    const auto named = c_abi::to_prefetch_policy(policy);
    if (!named) return fail(named.error());
    return store_ticket(session->session->prefetch(LeaseId{lease}, first, count, *named, deadline_ms),
                        ticket);
  });
}

hicache_status hicache_check_prefetch(hicache_session* session, hicache_lease lease, uint32_t number,
                                      uint32_t deadline_ms, hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, nullptr, 0, ""); bad != HICACHE_OK) return bad;
    return store_ticket(session->session->check_prefetch(LeaseId{lease}, number, deadline_ms), ticket);
  });
}

hicache_status hicache_end_prefetch(hicache_session* session, hicache_lease lease, uint32_t number,
                                    uint32_t deadline_ms, hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, nullptr, 0, ""); bad != HICACHE_OK) return bad;
    return store_ticket(session->session->end_prefetch(LeaseId{lease}, number, deadline_ms), ticket);
  });
}

hicache_status hicache_backup(hicache_session* session, hicache_lease lease, uint32_t first, uint32_t count,
                              uint32_t deadline_ms, hicache_ticket* ticket) {
  return guarded([&]() -> hicache_status {
    if (const auto bad = check_post(session, ticket, nullptr, 0, ""); bad != HICACHE_OK) return bad;
    return store_ticket(session->session->backup(LeaseId{lease}, first, count, deadline_ms), ticket);
  });
}

hicache_status hicache_poll(hicache_session* session, hicache_result* result) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (const auto checked = c_abi::check_size(result, c_abi::kResultBytes, "hicache_result"); !checked)
      return fail(checked.error());
    const auto event = session->session->poll();
    if (!event) return HICACHE_AGAIN;  // the ordinary case of a poll: no text for it
    c_abi::store_result(*event, result);
    return HICACHE_OK;
  });
}

hicache_status hicache_wait(hicache_session* session, hicache_ticket ticket, uint32_t timeout_ms,
                            hicache_result* result) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (const auto checked = c_abi::check_size(result, c_abi::kResultBytes, "hicache_result"); !checked)
      return fail(checked.error());
    const auto event = session->session->wait(Ticket{ticket}, timeout_ms);
    if (!event) return fail(event.error());
    c_abi::store_result(*event, result);
    return HICACHE_OK;
  });
}

hicache_status hicache_wait_any(hicache_session* session, uint32_t timeout_ms, hicache_result* result) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (const auto checked = c_abi::check_size(result, c_abi::kResultBytes, "hicache_result"); !checked)
      return fail(checked.error());
    const auto event = session->session->wait_any(timeout_ms);
    if (!event) return fail(event.error());
    c_abi::store_result(*event, result);
    return HICACHE_OK;
  });
}

hicache_status hicache_raise_write_fence(hicache_session* session, uint32_t index, uint32_t value) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    if (index >= hicache::kWriteFences) {
      return fail(Status::invalid_argument, "write fence " + std::to_string(index) + " is not below " +
                                                std::to_string(hicache::kWriteFences));
    }
    session->session->raise_write_fence(index, value);
    return HICACHE_OK;
  });
}

int hicache_layer_ready(const hicache_session* session, uint32_t slot, uint32_t value, uint32_t layer) {
  return session != nullptr && session->session->layer_ready({slot, value}, layer) ? 1 : 0;
}

hicache_status hicache_wait_layer(hicache_session* session, uint32_t slot, uint32_t value, uint32_t layer,
                                  uint32_t timeout_ms) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    const auto waited = session->session->wait_layer({slot, value}, layer, timeout_ms);
    return waited ? HICACHE_OK : fail(waited.error());
  });
}

hicache_status hicache_stream_wait_layer(hicache_session* session, void* stream, uint32_t slot,
                                         uint32_t value, uint32_t layer) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    const auto waiting = session->session->stream_wait_layer(stream, {slot, value}, layer);
    return waiting ? HICACHE_OK : fail(waiting.error());
  });
}

hicache_status hicache_stream_raise_write_fence(hicache_session* session, void* stream, uint32_t index,
                                                uint32_t value) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    const auto raised = session->session->stream_raise_write_fence(stream, index, value);
    return raised ? HICACHE_OK : fail(raised.error());
  });
}

hicache_status hicache_load_result(hicache_session* session, uint32_t slot, uint32_t value,
                                   uint32_t timeout_ms) {
  return guarded([&]() -> hicache_status {
    if (session == nullptr) return null_argument("session");
    const auto ended = session->session->load_result({slot, value}, timeout_ms);
    return ended ? HICACHE_OK : fail(ended.error());
  });
}

hicache_status hicache_control(const char* socket_path, const char* const* arguments, size_t argument_count,
                               uint32_t timeout_ms, char* answer, size_t capacity, size_t* needed) {
  return guarded([&]() -> hicache_status {
    if (socket_path == nullptr) return null_argument("socket_path");
    if (arguments == nullptr) return null_argument("arguments");
    std::vector<std::string> words;
    for (std::size_t i = 0; i < argument_count; ++i) {
      if (arguments[i] == nullptr) return null_argument("an argument");
      words.emplace_back(arguments[i]);
    }
    const auto text = hicache::control(socket_path, words, timeout_ms);
    return text ? store_text(*text, answer, capacity, needed) : fail(text.error());
  });
}

hicache_status hicache_default_socket_path(const char* name, char* path, size_t capacity, size_t* needed) {
  return guarded([&]() -> hicache_status {
    if (name == nullptr) return null_argument("name");
    return store_text(hicache::default_socket_path(name), path, capacity, needed);
  });
}

}  // extern "C"
