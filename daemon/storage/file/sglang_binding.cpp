#include "daemon/storage/file/sglang_binding.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {

constexpr const char* kNote = "hicache.binding";

// Everything that has to agree among those who share the files.
std::string identity_of(const NamespaceSpec& spec) {
  NamespaceSpec shared = spec;
  shared.lora_id.reset();
  shared.cache_salt.reset();
  return to_hex(shared.digest()) + "\n";
}

}  // namespace

std::string SglangBinding::refusal(const NamespaceSpec& spec) {
  if (spec.model != settings_.model)
    return "its model is '" + spec.model + "', not '" + settings_.model + "'";
  if (spec.dtype != settings_.dtype)
    return "its dtype is '" + spec.dtype + "', not '" + settings_.dtype + "'";
  if (spec.page_tokens != settings_.page_tokens) {
    return "its pages have " + std::to_string(spec.page_tokens) + " tokens, not " +
           std::to_string(settings_.page_tokens);
  }
  const std::string bound = files_.note(kNote);
  if (bound == identity_of(spec)) return "";
  if (!bound.empty()) return "the directory is bound to another namespace of that model";
  const Outcome kept = files_.set_note(kNote, identity_of(spec));
  return kept ? "" : kept.error().message;
}

bool SglangBinding::admits(const StorageNamespace& ns) {
  const std::lock_guard lock(mutex_);
  const auto at =
      std::find_if(known_.begin(), known_.end(), [&](const Answer& a) { return a.digest == ns.digest; });
  if (at != known_.end()) return at->admitted;
  const std::string why = refusal(ns.spec);
  known_.push_back({ns.digest, why.empty()});
  if (!why.empty()) {
    trouble_ = "namespace " + to_hex(ns.digest).substr(0, 12) + " can't use " + files_.path() + ": " + why;
    spdlog::warn("storage: {}", trouble_);
  }
  return why.empty();
}

std::string SglangBinding::trouble() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

void SglangBinding::forget() {
  const std::lock_guard lock(mutex_);
  files_.remove(kNote);
  known_.clear();
  trouble_.clear();
}

}  // namespace hicache::daemon
