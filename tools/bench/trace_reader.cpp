#include "tools/bench/trace_reader.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <istream>
#include <limits>
#include <nlohmann/json.hpp>

namespace hicache::bench {
namespace {

Error line_error(const std::string& source, std::uint64_t line, const std::string& why) {
  return Error{Status::invalid_argument, fmt::format("{} line {}: {}", source, line, why), 0};
}

}  // namespace

Result<BlockRequests> read_trace(std::istream& in, const std::string& source, std::uint64_t limit) {
  BlockRequests requests;
  std::string text;
  for (std::uint64_t line = 1; std::getline(in, text); ++line) {
    if (limit != 0 && requests.size() == limit) break;
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto json = nlohmann::json::parse(text, nullptr, false);
    if (!json.is_object()) return line_error(source, line, "expected a JSON object");
    const auto ids = json.find("hash_ids");
    if (ids == json.end() || !ids->is_array()) {
      return line_error(source, line, "expected \"hash_ids\" to be an array of block ids");
    }
    std::vector<std::uint32_t> blocks;
    blocks.reserve(ids->size());
    for (const auto& id : *ids) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() > std::numeric_limits<std::uint32_t>::max()) {
        return line_error(source, line,
                          fmt::format("block id {} is not an integer from 0 to 4294967295", id.dump()));
      }
      blocks.push_back(id.get<std::uint32_t>());
    }
    if (!blocks.empty()) requests.push_back(std::move(blocks));
  }
  if (in.bad()) return Error{Status::system_error, fmt::format("{}: reading failed", source), EIO};
  return requests;
}

Result<BlockRequests> read_trace_file(const std::string& path, std::uint64_t limit) {
  std::ifstream in(path);
  if (!in) {
    const int error = errno;
    return Error{Status::not_found, fmt::format("trace {}: {}", path, std::strerror(error)), error};
  }
  return read_trace(in, path, limit);
}

}  // namespace hicache::bench
