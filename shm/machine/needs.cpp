#include "shm/machine/needs.hpp"

#include <fmt/format.h>

#include <charconv>
#include <functional>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

namespace hicache::machine {
namespace {

struct Field {
  const char* key;
  std::function<std::string(const Needs&)> get;
  std::function<bool(Needs&, const std::string&)> set;
};

template <class Number>
bool set_number(Number& to, const std::string& text) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return false;
  to = value;
  return true;
}

template <class Number>
Field number(const char* key, Number Needs::*member) {
  return {key, [member](const Needs& n) { return std::to_string(n.*member); },
          [member](Needs& n, const std::string& text) { return set_number(n.*member, text); }};
}

Field text(const char* key, std::string Needs::*member) {
  return {key, [member](const Needs& n) { return n.*member; },
          [member](Needs& n, const std::string& value) {
            n.*member = value;
            return !value.empty();
          }};
}

template <class Value>
Field choice(const char* key, Value Needs::*member, std::vector<std::pair<Value, std::string>> words) {
  const auto get = [member, words](const Needs& n) {
    for (const auto& [value, word] : words) {
      if (value == n.*member) return word;
    }
    return std::string();
  };
  const auto set = [member, words](Needs& n, const std::string& given) {
    for (const auto& [value, word] : words) {
      if (word != given) continue;
      n.*member = value;
      return true;
    }
    return false;
  };
  return {key, get, set};
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all = {
      text("name", &Needs::name),
      text("socket_path", &Needs::socket_path),
      choice<bool>("own_directory", &Needs::own_directory, {{false, "no"}, {true, "yes"}}),
      number("pool_bytes", &Needs::pool_bytes),
      number("control_bytes", &Needs::control_bytes),
      number("memory_reserve", &Needs::memory_reserve),
      number("clients", &Needs::clients),
      choice<HugePageNeed>("huge_pages", &Needs::huge_pages,
                           {{HugePageNeed::none, "none"},
                            {HugePageNeed::preferred, "preferred"},
                            {HugePageNeed::required, "required"}}),
      choice<GpuNeed>(
          "gpus", &Needs::gpus,
          {{GpuNeed::none, "none"}, {GpuNeed::on_demand, "on_demand"}, {GpuNeed::at_start, "at_start"}}),
      choice<IoUringNeed>("io_uring", &Needs::io_uring,
                          {{IoUringNeed::none, "none"},
                           {IoUringNeed::preferred, "preferred"},
                           {IoUringNeed::required, "required"}}),
  };
  return all;
}

}  // namespace

std::string needs_to_text(const Needs& needs) {
  std::string lines;
  for (const Field& f : fields()) lines += fmt::format("{} {}\n", f.key, f.get(needs));
  return lines;
}

Result<Needs> parse_needs(const std::string& text) {
  Needs needs;
  std::vector<bool> seen(fields().size());
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    const auto space = line.find(' ');
    bool known = false;
    for (std::size_t i = 0; i < fields().size() && space != std::string::npos; ++i) {
      const Field& f = fields()[i];
      if (seen[i] || line.compare(0, space, f.key) != 0) continue;
      known = seen[i] = f.set(needs, line.substr(space + 1));
    }
    if (!known) {
      return Error{Status::invalid_argument,
                   fmt::format("found the line '{}', expected one of a daemon's needs, each once", line), 0};
    }
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (!seen[i]) return Error{Status::invalid_argument, fmt::format("{} is missing", fields()[i].key), 0};
  }
  return needs;
}

}  // namespace hicache::machine
