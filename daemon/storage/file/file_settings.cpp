#include "daemon/storage/file/file_settings.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <utility>

#include "daemon/config_keys.hpp"

namespace hicache::daemon {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kTiB = 1024 * kGiB;
constexpr std::uint64_t kMinSegment = 256 * kKiB;
constexpr std::uint64_t kMaxSegment = 64 * kGiB;
constexpr std::uint64_t kFewestSegments = 3;  // one open, one spare, one that holds pages

struct Key {
  std::string name;
  std::string expected;
  std::function<bool(FileSettings&, const Json&)> set;
};

std::optional<std::uint64_t> natural(const Json& v) {
  if (!v.is_number_integer() || (!v.is_number_unsigned() && v.get<std::int64_t>() < 0)) return std::nullopt;
  return v.get<std::uint64_t>();
}

template <class Member>
Key bytes(std::string name, std::uint64_t low, std::uint64_t high, Member member) {
  return {
      std::move(name),
      "a number of bytes or text such as \"64GiB\", from " + format_bytes(low) + " to " + format_bytes(high),
      [=](FileSettings& s, const Json& v) {
        std::optional<std::uint64_t> n = natural(v);
        if (v.is_string()) n = parse_bytes(v.get<std::string>());
        if (!n || *n < low || *n > high) return false;
        member(s) = *n;
        return true;
      }};
}

template <class Member>
Key integer(std::string name, std::uint32_t low, std::uint32_t high, Member member) {
  return {std::move(name), "an integer from " + std::to_string(low) + " to " + std::to_string(high),
          [=](FileSettings& s, const Json& v) {
            const auto n = natural(v);
            if (!n || *n < low || *n > high) return false;
            member(s) = static_cast<std::uint32_t>(*n);
            return true;
          }};
}

template <class Member>
Key text(std::string name, Member member) {
  return {std::move(name), "a text of 1 to 512 bytes", [=](FileSettings& s, const Json& v) {
            if (!v.is_string()) return false;
            const auto& t = v.get_ref<const std::string&>();
            if (t.empty() || t.size() > 512 || t.find('\0') != std::string::npos) return false;
            member(s) = t;
            return true;
          }};
}

template <class Enum, class Member>
Key one_of(std::string name, std::vector<std::pair<std::string_view, Enum>> names, Member member) {
  std::string expected;
  for (const auto& [word, value] : names) {
    expected += (expected.empty() ? "\"" : ", \"") + std::string(word) + "\"";
  }
  return {std::move(name), "one of " + expected, [=](FileSettings& s, const Json& v) {
            for (const auto& [word, value] : names) {
              if (!v.is_string() || v.get_ref<const std::string&>() != word) continue;
              member(s) = value;
              return true;
            }
            return false;
          }};
}

bool set_directories(FileSettings& s, const Json& v) {
  if (!v.is_array() || v.empty() || v.size() > 64) return false;
  s.directories.clear();
  for (const Json& path : v) {
    if (!path.is_string()) return false;
    const auto& p = path.get_ref<const std::string&>();
    if (p.size() < 2 || p.front() != '/' || p.size() > 3500 || p.find('\0') != std::string::npos)
      return false;
    s.directories.push_back(p);
  }
  return true;
}

#define HICACHE_MEMBER(field) ([](FileSettings & s) -> auto& { return s.field; })

const std::vector<Key>& keys() {
  static const std::vector<Key> table = {
      one_of<FileFormat>("format", {{"segment", FileFormat::segment}, {"sglang", FileFormat::sglang}},
                         HICACHE_MEMBER(format)),
      {"directories", "a list of 1 to 64 absolute paths", set_directories},
      bytes("capacity", 0, 1024 * kTiB, HICACHE_MEMBER(capacity_bytes)),
      bytes("min_free", 0, 1024 * kTiB, HICACHE_MEMBER(min_free_bytes)),
      integer("max_errors", 1, 1'000'000, HICACHE_MEMBER(max_errors)),
      integer("retry_ms", 1, 86'400'000, HICACHE_MEMBER(retry_ms)),
      bytes("segment_bytes", kMinSegment, kMaxSegment, HICACHE_MEMBER(segment_bytes)),
      one_of<IoEngineChoice>("engine",
                             {{"auto", IoEngineChoice::automatic},
                              {"io_uring", IoEngineChoice::io_uring},
                              {"threads", IoEngineChoice::threads}},
                             HICACHE_MEMBER(engine)),
      integer("workers", 1, 64, HICACHE_MEMBER(workers)),
      integer("queue_depth", 1, 1024, HICACHE_MEMBER(queue_depth)),
      {"registered_buffers", "true or false",
       [](FileSettings& s, const Json& v) {
         if (!v.is_boolean()) return false;
         s.registered_buffers = v.get<bool>();
         return true;
       }},
      text("sglang.model", HICACHE_MEMBER(sglang.model)),
      text("sglang.dtype", HICACHE_MEMBER(sglang.dtype)),
      integer("sglang.page_tokens", 1, 65536, HICACHE_MEMBER(sglang.page_tokens)),
      one_of<PageLayout>("sglang.layout",
                         {{"page_first", PageLayout::page_first},
                          {"page_first_direct", PageLayout::page_first_direct},
                          {"layer_first", PageLayout::layer_first}},
                         HICACHE_MEMBER(sglang.layout)),
      integer("sglang.pp_size", 1, 1024, HICACHE_MEMBER(sglang.pp_size)),
      integer("sglang.pp_rank", 0, 1023, HICACHE_MEMBER(sglang.pp_rank)),
      integer("sglang.threads", 1, 256, HICACHE_MEMBER(sglang.threads)),
  };
  return table;
}

#undef HICACHE_MEMBER

Error bad(const std::string& key, const std::string& found, const std::string& expected) {
  return Error{Status::invalid_argument, "storage.file." + key + " is " + found + ", expected " + expected,
               0};
}

Outcome set_value(FileSettings& settings, const std::string& name, const Json& value) {
  const auto key = std::find_if(keys().begin(), keys().end(), [&](const Key& k) { return k.name == name; });
  if (key == keys().end()) {
    return Error{Status::invalid_argument, "storage.file." + name + " is no key of the backend file", 0};
  }
  if (!key->set(settings, value)) {
    return bad(name, value.dump(-1, ' ', true, Json::error_handler_t::replace), key->expected);
  }
  return success();
}

Outcome check_sglang(const FileSettings& s) {
  if (s.directories.size() != 1) {
    return bad("directories", "a list of " + std::to_string(s.directories.size()),
               "one directory with format \"sglang\"");
  }
  for (const auto& [name, missing] :
       {std::pair{"model", s.sglang.model.empty()}, std::pair{"dtype", s.sglang.dtype.empty()},
        std::pair{"page_tokens", s.sglang.page_tokens == 0}}) {
    if (!missing) continue;
    return Error{Status::invalid_argument,
                 "storage.file.sglang." + std::string(name) +
                     " is missing: the names of SGLang's files don't say it, so the directory is bound to it",
                 0};
  }
  if (s.sglang.pp_rank >= s.sglang.pp_size) {
    return bad("sglang.pp_rank", std::to_string(s.sglang.pp_rank),
               "less than sglang.pp_size, " + std::to_string(s.sglang.pp_size));
  }
  return success();
}

Outcome check_segment(const FileSettings& s) {
  if (s.segment_bytes % kPoolAlignment != 0) {
    return bad("segment_bytes", std::to_string(s.segment_bytes), "a multiple of 4KiB");
  }
  if (s.capacity_bytes != 0 && s.capacity_bytes / kFewestSegments < s.segment_bytes) {
    return bad("capacity", format_bytes(s.capacity_bytes),
               "0 or room for " + std::to_string(kFewestSegments) + " segments of segment_bytes, " +
                   format_bytes(s.segment_bytes));
  }
  return success();
}

}  // namespace

Result<FileSettings> parse_file_settings(const Json& json) {
  FileSettings settings;
  if (!json.is_object()) return Error{Status::invalid_argument, "storage.file is no JSON object", 0};
  for (const auto& [name, value] : json.items()) {
    if (name == "sglang" && value.is_object()) {
      for (const auto& [leaf, inner] : value.items()) {
        if (Outcome done = set_value(settings, "sglang." + leaf, inner); !done) return done.error();
      }
      continue;
    }
    if (Outcome done = set_value(settings, name, value); !done) return done.error();
  }
  if (settings.directories.empty()) {
    return Error{Status::invalid_argument,
                 "storage.file.directories is missing, expected a list of 1 to 64 absolute paths", 0};
  }
  const Outcome checked =
      settings.format == FileFormat::sglang ? check_sglang(settings) : check_segment(settings);
  if (!checked) return checked.error();
  return settings;
}

}  // namespace hicache::daemon
