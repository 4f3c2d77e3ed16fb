#include "daemon/config_keys.hpp"

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "daemon/storage/backend_factory.hpp"
#include "shm/kernel_layout.hpp"
#include "shm/messages.hpp"
#include "shm/protocol.hpp"
#include "shm/region.hpp"
#include "shm/staging_layout.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kTiB = 1024 * kGiB;
constexpr std::array<std::pair<const char*, std::uint64_t>, 4> kUnits = {
    {{"TiB", kTiB}, {"GiB", kGiB}, {"MiB", kMiB}, {"KiB", kKiB}}};
constexpr std::size_t kMaxSocketPath = 107;  // sockaddr_un, with its terminator

bool power_of_two(std::uint64_t v) {
  return v != 0 && (v & (v - 1)) == 0;
}

std::string range_text(std::uint64_t low, std::uint64_t high, bool power) {
  return std::string(power ? "a power of two" : "an integer") + " from " + std::to_string(low) + " to " +
         std::to_string(high);
}

// `member` picks the field: a generic lambda, so that one serves reading and writing.
template <class Member>
ConfigKey integer(std::string path, bool reload, std::uint32_t low, std::uint32_t high, bool power,
                  Member member) {
  return {std::move(path), reload, range_text(low, high, power),
          [member](const Config& c) { return Json(member(c)); },
          [=](Config& c, const Json& v) {
            if (!v.is_number_unsigned()) return false;
            const auto n = v.get<std::uint64_t>();
            if (n < low || n > high || (power && !power_of_two(n))) return false;
            member(c) = static_cast<std::uint32_t>(n);
            return true;
          }};
}

template <class Member>
ConfigKey bytes(std::string path, std::uint64_t low, std::uint64_t high, bool power, Member member,
                bool reload = false) {
  return {std::move(path), reload,
          std::string("a number of bytes or text such as \"64MiB\"") + (power ? ", a power of two" : "") +
              ", from " + format_bytes(low) + " to " + format_bytes(high),
          [member](const Config& c) { return Json(format_bytes(member(c))); },
          [=](Config& c, const Json& v) {
            std::optional<std::uint64_t> n;
            if (v.is_number_unsigned()) n = v.get<std::uint64_t>();
            if (v.is_string()) n = parse_bytes(v.get<std::string>());
            if (!n || *n < low || *n > high || (power && !power_of_two(*n))) return false;
            member(c) = *n;
            return true;
          }};
}

template <class Member>
ConfigKey boolean(std::string path, bool reload, Member member) {
  return {std::move(path), reload, "true or false", [member](const Config& c) { return Json(member(c)); },
          [member](Config& c, const Json& v) {
            if (!v.is_boolean()) return false;
            member(c) = v.get<bool>();
            return true;
          }};
}

template <class Member>
ConfigKey fraction(std::string path, bool reload, Member member) {
  return {std::move(path), reload, "a number from 0 to 1",
          [member](const Config& c) { return Json(member(c)); },
          [member](Config& c, const Json& v) {
            if (!v.is_number()) return false;
            const auto n = v.get<double>();
            if (!(n >= 0.0 && n <= 1.0)) return false;
            member(c) = n;
            return true;
          }};
}

template <class Member, class Accept>
ConfigKey text(std::string path, bool reload, std::string expected, Member member, Accept accept) {
  return {std::move(path), reload, std::move(expected), [member](const Config& c) { return Json(member(c)); },
          [=](Config& c, const Json& v) {
            if (!v.is_string()) return false;
            const auto& s = v.get_ref<const std::string&>();
            if (s.find('\0') != std::string::npos || !accept(s)) return false;
            member(c) = s;
            return true;
          }};
}

template <class Member>
ConfigKey user_ids(std::string path, Member member) {
  return {std::move(path), true, "a list of user ids, each from 0 to 4294967294",
          [member](const Config& c) { return Json(member(c)); },
          [member](Config& c, const Json& v) {
            if (!v.is_array()) return false;
            std::vector<std::uint32_t> uids;
            for (const Json& uid : v) {
              if (!uid.is_number_unsigned() || uid.get<std::uint64_t>() > 4'294'967'294u) return false;
              uids.push_back(uid.get<std::uint32_t>());
            }
            member(c) = std::move(uids);
            return true;
          }};
}

ConfigKey map_engines() {
  return {"pool.map_engines", true, "a list of engine ids of 1 to 63 bytes",
          [](const Config& c) { return Json(c.pool.map_engines); },
          [](Config& c, const Json& v) {
            if (!v.is_array()) return false;
            std::vector<std::string> engines;
            for (const Json& engine : v) {
              if (!engine.is_string()) return false;
              engines.push_back(engine.get<std::string>());
              if (engines.back().empty() || engines.back().size() > kMaxEngineBytes) return false;
            }
            c.pool.map_engines = std::move(engines);
            return true;
          }};
}

ConfigKey eviction_policy() {
  return {"eviction.policy", false, "\"lru\" or \"lfu\"",
          [](const Config& c) { return Json(c.eviction.policy == EvictionPolicyName::lru ? "lru" : "lfu"); },
          [](Config& c, const Json& v) {
            if (v != "lru" && v != "lfu") return false;
            c.eviction.policy = v == "lru" ? EvictionPolicyName::lru : EvictionPolicyName::lfu;
            return true;
          }};
}

// A key whose value is one of a few names.
template <class Enum, class Member>
ConfigKey one_of(std::string path, std::vector<std::pair<const char*, Enum>> names, Member member,
                 bool reload = false) {
  std::string expected;
  for (std::size_t i = 0; i < names.size(); ++i) {
    expected += i == 0 ? "" : i + 1 == names.size() ? " or " : ", ";
    expected += std::string("\"") + names[i].first + "\"";
  }
  return {std::move(path), reload, std::move(expected),
          [=](const Config& c) {
            for (const auto& [name, value] : names) {
              if (member(c) == value) return Json(name);
            }
            return Json();
          },
          [=](Config& c, const Json& v) {
            for (const auto& [name, value] : names) {
              if (v != name) continue;
              member(c) = value;
              return true;
            }
            return false;
          }};
}

// An object of settings that the backend reads when it is made. What is shown of it holds no password: the
// configuration lies in the control region, and whoever may attach may ask for it.
ConfigKey backend_settings(std::string_view name) {
  return {"storage." + std::string(name), false, "an object",
          [name = std::string(name)](const Config& c) {
            const auto found = c.storage.settings.find(name);
            Json shown = found == c.storage.settings.end() ? Json::object() : found->second;
            if (const auto password = shown.find("password"); password != shown.end()) {
              const bool blank = password->is_string() && password->get_ref<const std::string&>().empty();
              if (!blank) *password = "(not shown)";
            }
            return shown;
          },
          [name = std::string(name)](Config& c, const Json& v) {
            if (!v.is_object()) return false;
            c.storage.settings[name] = v;
            return true;
          }};
}

bool known_level(const std::string& s) {
  return s == "trace" || s == "debug" || s == "info" || s == "warn" || s == "error";
}

constexpr bool kReload = true;
constexpr bool kFixed = false;
constexpr bool kPower = true;
constexpr bool kAny = false;
constexpr std::uint32_t kMaxPages = 64u << 20;

#define HICACHE_MEMBER(field) ([](auto& c) -> auto& { return c.field; })

void add_waiting(std::vector<ConfigKey>& keys, const std::string& section, auto member) {
  keys.push_back(integer(
      section + ".spin_us", kReload, 0, 1'000'000,
      kAny, [member](auto& c) -> auto& { return member(c).spin_us; }));
  keys.push_back(integer(
      section + ".yield_us", kReload, 0, 1'000'000,
      kAny, [member](auto& c) -> auto& { return member(c).yield_us; }));
  keys.push_back(integer(
      section + ".park_ms", kReload, 1, 10'000,
      kAny, [member](auto& c) -> auto& { return member(c).park_ms; }));
}

void add_storage(std::vector<ConfigKey>& k) {
  k.push_back(text("storage.backend", kFixed, "the name of a storage backend, or \"\" for none",
                   HICACHE_MEMBER(storage.backend), [](const std::string&) { return true; }));
  for (const std::string_view name : storage_backend_names()) k.push_back(backend_settings(name));
  k.push_back(integer("storage.prefetch_threshold_tokens", kReload, 0, 1u << 30, kAny,
                      HICACHE_MEMBER(storage.prefetch_threshold_tokens)));
  k.push_back(one_of<PrefetchPolicy>("storage.prefetch_policy",
                                     {{"best_effort", PrefetchPolicy::best_effort},
                                      {"wait_complete", PrefetchPolicy::wait_complete},
                                      {"timeout", PrefetchPolicy::timeout}},
                                     HICACHE_MEMBER(storage.prefetch_policy), kReload));
  k.push_back(integer("storage.prefetch_timeout_base_ms", kReload, 0, 86'400'000, kAny,
                      HICACHE_MEMBER(storage.prefetch_timeout_base_ms)));
  k.push_back(integer("storage.prefetch_timeout_per_ki_token_ms", kReload, 0, 86'400'000, kAny,
                      HICACHE_MEMBER(storage.prefetch_timeout_per_ki_token_ms)));
  k.push_back(integer("storage.prefetch_timeout_max_ms", kReload, 0, 86'400'000, kAny,
                      HICACHE_MEMBER(storage.prefetch_timeout_max_ms)));
  k.push_back(fraction("storage.prefetch_capacity", kReload, HICACHE_MEMBER(storage.prefetch_capacity)));
  k.push_back(one_of<BackupPolicy>("storage.backup_policy",
                                   {{"none", BackupPolicy::none},
                                    {"write_through", BackupPolicy::write_through},
                                    {"write_through_selective", BackupPolicy::write_through_selective},
                                    {"write_back", BackupPolicy::write_back}},
                                   HICACHE_MEMBER(storage.backup_policy), kReload));
  k.push_back(
      integer("storage.backup_uses", kReload, 1, 1u << 20, kAny, HICACHE_MEMBER(storage.backup_uses)));
  k.push_back(integer("storage.backup_queue_pages", kReload, 0, kMaxPages, kAny,
                      HICACHE_MEMBER(storage.backup_queue_pages)));
  k.push_back(one_of<DirtyEviction>(
      "storage.dirty_eviction", {{"drop", DirtyEviction::drop}, {"write_back", DirtyEviction::write_back}},
      HICACHE_MEMBER(storage.dirty_eviction), kReload));
  k.push_back(integer("storage.read_batches", kReload, 1, 1024, kAny, HICACHE_MEMBER(storage.read_batches)));
  k.push_back(
      integer("storage.write_batches", kReload, 1, 1024, kAny, HICACHE_MEMBER(storage.write_batches)));
  k.push_back(integer("storage.batch_deadline_ms", kReload, 1, 86'400'000, kAny,
                      HICACHE_MEMBER(storage.batch_deadline_ms)));
  k.push_back(integer("storage.breaker_failures", kReload, 0, 1u << 20, kAny,
                      HICACHE_MEMBER(storage.breaker_failures)));
  k.push_back(integer("storage.breaker_suspend_ms", kReload, 1, 86'400'000, kAny,
                      HICACHE_MEMBER(storage.breaker_suspend_ms)));
}

std::vector<ConfigKey> make_keys() {
  std::vector<ConfigKey> k;
  k.push_back(text("name", kFixed, "1 to 48 of A-Z a-z 0-9 . _ -, not starting with a dot",
                   HICACHE_MEMBER(name), [](const std::string& s) { return valid_region_name(s); }));
  k.push_back(text(
      "socket.path", kFixed, "an absolute path of at most 107 bytes, or \"\" for the default path",
      HICACHE_MEMBER(socket.path),
      [](const std::string& s) { return s.empty() || (s.front() == '/' && s.size() <= kMaxSocketPath); }));
  k.push_back(user_ids("socket.allowed_uids", HICACHE_MEMBER(socket.allowed_uids)));
  k.push_back(user_ids("socket.read_only_uids", HICACHE_MEMBER(socket.read_only_uids)));
  k.push_back(
      integer("socket.max_connections", kReload, 1, 65536, kAny, HICACHE_MEMBER(socket.max_connections)));
  k.push_back(integer("socket.max_connections_per_process", kReload, 1, 65536, kAny,
                      HICACHE_MEMBER(socket.max_connections_per_process)));
  k.push_back(bytes("pool.bytes", 64 * kKiB, 64 * kTiB, kAny, HICACHE_MEMBER(pool.bytes)));
  k.push_back(bytes("pool.memory_reserve", 0, 64 * kTiB, kAny, HICACHE_MEMBER(pool.memory_reserve)));
  k.push_back(bytes("pool.segment_bytes", 64 * kKiB, kGiB, kPower, HICACHE_MEMBER(pool.segment_bytes)));
  k.push_back(integer("pool.max_pages", kFixed, 0, kMaxPages, kAny, HICACHE_MEMBER(pool.max_pages)));
  k.push_back(one_of<HugePages>(
      "pool.huge_pages",
      {{"off", HugePages::off}, {"prefer", HugePages::prefer}, {"require", HugePages::require}},
      HICACHE_MEMBER(pool.huge_pages)));
  k.push_back(one_of<NumaPlacement>("pool.numa",
                                    {{"off", NumaPlacement::off}, {"spread", NumaPlacement::spread}},
                                    HICACHE_MEMBER(pool.numa)));
  k.push_back(map_engines());
  k.push_back(user_ids("pool.map_uids", HICACHE_MEMBER(pool.map_uids)));
  k.push_back(boolean("region.keep_on_exit", kFixed, HICACHE_MEMBER(region.keep_on_exit)));
  k.push_back(
      integer("region.flight_records", kFixed, 16, 1u << 20, kPower, HICACHE_MEMBER(region.flight_records)));
  k.push_back(eviction_policy());
  k.push_back(fraction("eviction.high_watermark", kReload, HICACHE_MEMBER(eviction.high_watermark)));
  k.push_back(fraction("eviction.low_watermark", kReload, HICACHE_MEMBER(eviction.low_watermark)));
  k.push_back(one_of<ChecksumPolicy>("integrity.checksums",
                                     {{"off", ChecksumPolicy::off},
                                      {"storage", ChecksumPolicy::storage},
                                      {"sampled", ChecksumPolicy::sampled},
                                      {"always", ChecksumPolicy::always}},
                                     HICACHE_MEMBER(integrity.checksums)));
  k.push_back(one_of<VerifyPolicy>(
      "integrity.verify",
      {{"off", VerifyPolicy::off}, {"lazy", VerifyPolicy::lazy}, {"full", VerifyPolicy::full}},
      HICACHE_MEMBER(integrity.verify)));
  add_waiting(k, "waiting", HICACHE_MEMBER(waiting));
  add_waiting(k, "client_waiting", HICACHE_MEMBER(client_waiting));
  k.push_back(integer("transfer.threads", kFixed, 1, 64, kAny, HICACHE_MEMBER(transfer.threads)));
  k.push_back(one_of<TransferMethod>("transfer.method",
                                     {{"auto", TransferMethod::automatic},
                                      {"page_major", TransferMethod::page_major},
                                      {"layer_major", TransferMethod::layer_major},
                                      {"staged", TransferMethod::staged},
                                      {"contiguous", TransferMethod::contiguous},
                                      {"batched", TransferMethod::batched}},
                                     HICACHE_MEMBER(transfer.method)));
  k.push_back(integer("transfer.streams", kFixed, 1, 8, kAny, HICACHE_MEMBER(transfer.streams)));
  k.push_back(
      integer("transfer.block_quota", kFixed, 1, kMaxBlockQuota, kAny, HICACHE_MEMBER(transfer.block_quota)));
  k.push_back(integer("transfer.staging_blocks", kFixed, 1, kMaxStagingBlocks, kAny,
                      HICACHE_MEMBER(transfer.staging_blocks)));
  k.push_back(one_of<CudaMode>(
      "cuda.mode",
      {{"off", CudaMode::off}, {"on_demand", CudaMode::on_demand}, {"at_start", CudaMode::at_start}},
      HICACHE_MEMBER(cuda.mode)));
  k.push_back(one_of<MlaLoad>(
      "mla.load",
      {{"auto", MlaLoad::automatic}, {"direct", MlaLoad::direct}, {"exchange", MlaLoad::exchange}},
      HICACHE_MEMBER(mla.load)));
  k.push_back(integer("mla.wait_us", kFixed, 0, 1'000'000, kAny, HICACHE_MEMBER(mla.wait_us)));
  add_storage(k);
  k.push_back(integer("limits.clients", kFixed, 1, 1024, kAny, HICACHE_MEMBER(limits.clients)));
  k.push_back(integer("limits.namespaces", kFixed, 1, 4096, kAny, HICACHE_MEMBER(limits.namespaces)));
  k.push_back(integer("limits.leases", kFixed, 1, 1u << 20, kAny, HICACHE_MEMBER(limits.leases)));
  k.push_back(integer("limits.leases_per_group", kReload, 1, 1u << 20, kAny,
                      HICACHE_MEMBER(limits.leases_per_group)));
  k.push_back(integer("limits.operations_per_client", kReload, 1, kMaxRingEntries, kAny,
                      HICACHE_MEMBER(limits.operations_per_client)));
  k.push_back(bytes("limits.arena_in_flight_bytes", 0, 2 * kGiB, kAny,
                    HICACHE_MEMBER(limits.arena_in_flight_bytes), kReload));
  k.push_back(fraction("limits.guaranteed_share", kReload, HICACHE_MEMBER(limits.guaranteed_share)));
  k.push_back(integer("limits.submission_entries", kFixed, 2, kMaxRingEntries / 2, kPower,
                      HICACHE_MEMBER(limits.submission_entries)));
  k.push_back(integer("limits.completion_entries", kFixed, 4, kMaxRingEntries, kPower,
                      HICACHE_MEMBER(limits.completion_entries)));
  k.push_back(bytes("limits.arena_bytes", 4 * kKiB, 2 * kGiB, kAny, HICACHE_MEMBER(limits.arena_bytes)));
  k.push_back(integer("limits.operation_deadline_ms", kReload, 1, 86'400'000, kAny,
                      HICACHE_MEMBER(limits.operation_deadline_ms)));
  k.push_back(integer("limits.max_deadline_ms", kReload, 1, 86'400'000, kAny,
                      HICACHE_MEMBER(limits.max_deadline_ms)));
  k.push_back(integer("limits.hello_deadline_ms", kReload, 1, 3'600'000, kAny,
                      HICACHE_MEMBER(limits.hello_deadline_ms)));
  k.push_back(text("log.level", kReload, "\"trace\", \"debug\", \"info\", \"warn\" or \"error\"",
                   HICACHE_MEMBER(log.level), known_level));
  k.push_back(text("log.file", kFixed, "an absolute path, or \"\" for standard error",
                   HICACHE_MEMBER(log.file),
                   [](const std::string& s) { return s.empty() || s.front() == '/'; }));
  return k;
}

#undef HICACHE_MEMBER

}  // namespace

std::string ConfigKey::section() const {
  const auto dot = path.find('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

std::string ConfigKey::leaf() const {
  return path.substr(path.find('.') + 1);
}

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

std::string format_bytes(std::uint64_t value) {
  for (const auto& [unit, size] : kUnits) {
    if (value != 0 && value % size == 0) return std::to_string(value / size) + unit;
  }
  return std::to_string(value);
}

std::optional<std::uint64_t> parse_bytes(const std::string& source) {
  std::uint64_t n = 0;
  std::size_t at = 0;
  for (; at < source.size() && source[at] >= '0' && source[at] <= '9'; ++at) {
    const auto digit = static_cast<std::uint64_t>(source[at] - '0');
    if (n > (std::numeric_limits<std::uint64_t>::max() - digit) / 10) return std::nullopt;
    n = n * 10 + digit;
  }
  if (at == 0) return std::nullopt;
  if (at < source.size() && source[at] == ' ') ++at;
  const std::string unit = source.substr(at);
  if (unit.empty() || unit == "B") return n;
  for (const auto& [name, size] : kUnits) {
    if (unit != name) continue;
    if (n > std::numeric_limits<std::uint64_t>::max() / size) return std::nullopt;
    return n * size;
  }
  return std::nullopt;
}

}  // namespace hicache::daemon
