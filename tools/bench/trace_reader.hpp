// Reads a request trace: one JSON object a line with `hash_ids`, one id per block of the prompt. Equal ids
// mean an equal prefix up to and including that block.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "shm/status.hpp"

namespace hicache::bench {

// Block ids of each request's prompt, in the order of the trace.
using BlockRequests = std::vector<std::vector<std::uint32_t>>;

// At most `limit` requests; 0 = all. Requests without a block are kept out: they have no full page. Errors
// name the source and the line.
Result<BlockRequests> read_trace(std::istream& in, const std::string& source, std::uint64_t limit);
Result<BlockRequests> read_trace_file(const std::string& path, std::uint64_t limit);

}  // namespace hicache::bench
