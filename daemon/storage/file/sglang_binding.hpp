// Which namespaces may use a directory of SGLang's files. The names there hold model, rank and hash, but
// neither dtype, page size, layout nor revision: two namespaces that differ in those would read each other's
// bytes. So a directory is bound to one model, dtype and page size by the configuration, and for all other
// ingredients to the first namespace that comes, in a file of the directory.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "daemon/storage/backend.hpp"
#include "daemon/storage/file/file_settings.hpp"
#include "daemon/storage/file/sglang_files.hpp"

namespace hicache::daemon {

// Thread-safe.
class SglangBinding {
 public:
  SglangBinding(const FileSettings::Sglang& settings, SglangFiles& files)
      : settings_(settings), files_(files) {}

  // Whether pages of that namespace belong into the directory. The first that fits is bound to it. LoRA id
  // and cache salt may differ: they are in the hashes.
  bool admits(const StorageNamespace& ns);
  // The last namespace that was turned away and why, "" = none.
  [[nodiscard]] std::string trouble() const;
  // Lets go of the bound namespace, with its pages.
  void forget();

 private:
  [[nodiscard]] std::string refusal(const NamespaceSpec& spec);

  const FileSettings::Sglang& settings_;
  SglangFiles& files_;
  mutable std::mutex mutex_;
  struct Answer {
    PrefixHash digest;
    bool admitted = false;
  };
  std::vector<Answer> known_;  // a handful
  std::string trouble_;
};

}  // namespace hicache::daemon
