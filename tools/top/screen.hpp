// One screen of text: the daemon's state, rates since the last reading, and its clients.
#pragma once

#include <string>

#include "tools/top/rates.hpp"

namespace hicache::top {

// At most `rows` lines; clients that do not fit are counted in the last one. Ends with a newline.
std::string screen(const Reading& reading, const Rates& rates, std::size_t rows);

}  // namespace hicache::top
