#include <fmt/format.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "shm/clock.hpp"
#include "shm/prefix_hash.hpp"
#include "shm/prefix_index.hpp"
#include "shm/region.hpp"
#include "shm/shared_memory.hpp"
#include "tools/bench/child_process.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/micro_bench.hpp"
#include "tools/bench/report.hpp"
#include "tools/bench/shared_object.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kPages = 1'000'000;
constexpr std::uint32_t kPrefixPages = 128;
constexpr std::uint32_t kPrefixes = kPages / kPrefixPages;
constexpr std::uint64_t kIndexSeed = 0x5851f42d4c957f2dull;
constexpr NamespaceId kNamespace{3};

// A control region as a daemon would lay it out, with every page ready, in shared memory and read through a
// read-only mapping as clients do.
class FullIndex {
 public:
  static Result<FullIndex> create() {
    RegionShape shape;
    shape.segments = 1;
    shape.pages = kPages;
    shape.pin_chunks = 1;
    shape.index_buckets = std::bit_ceil(kPages * 2u);  // as the daemon sizes it
    FullIndex index;
    index.plan_ = plan_region(shape);
    auto fd = create_sealed("hicache-bench-index", index.plan_.total_bytes);
    if (!fd) return fd.error();
    auto writable = Mapping::map(fd->get(), index.plan_.total_bytes, Mapping::Access::read_write);
    if (!writable) return writable.error();
    auto readable = Mapping::map(fd->get(), index.plan_.total_bytes, Mapping::Access::read_only);
    if (!readable) return readable.error();
    index.fill(make_tables(writable->data(), index.plan_));
    index.mapping_ = std::move(*readable);
    return index;
  }

  [[nodiscard]] ConstTables tables() const {
    return make_tables(static_cast<const void*>(mapping_.data()), plan_);
  }
  [[nodiscard]] std::span<const PrefixHash> prefix(std::size_t n) const {
    return std::span(keys_).subspan(n * kPrefixPages, kPrefixPages);
  }

 private:
  void fill(const Tables& tables) {
    IndexWriter writer(tables, kIndexSeed);
    for (IndexBucket& bucket : tables.index) bucket.head.store(kNone32, std::memory_order_relaxed);
    std::mt19937_64 random(1);  // digests look like random numbers
    keys_.resize(std::size_t{kPrefixes} * kPrefixPages);
    // The pages of a prefix lie all over the table, as after a long life.
    std::vector<std::uint32_t> ids(kPages);
    for (std::uint32_t i = 0; i < kPages; ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), random);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      PrefixHash key;
      for (std::uint64_t& word : key.words) word = random();
      if (i < keys_.size()) keys_[i] = key;
      PageEntry& page = tables.pages[ids[i]];
      for (std::size_t w = 0; w < 4; ++w) page.key[w].store(key.words[w], std::memory_order_relaxed);
      page.namespace_id.store(kNamespace.value, std::memory_order_relaxed);
      page.word.store(PageWord{PageState::ready, 0, 0, Generation{1}}.encode(), std::memory_order_relaxed);
      writer.insert(PageId{ids[i]}, writer.bucket_of(key, kNamespace));
    }
  }

  RegionPlan plan_;
  Mapping mapping_;
  std::vector<PrefixHash> keys_;
};

struct ProbeFigures {
  LatencyHistogram probe;  // of one prefix
  LatencyHistogram bare;   // of the memory accesses that a lookup can't do without
  std::uint64_t misses;    // pages that a probe did not find
  std::uint64_t sum;       // keeps the bare accesses alive
};

// The floor: one random bucket and one random page entry for each page, prefetched like a lookup's.
std::uint64_t bare_accesses(const ConstTables& tables, std::span<const std::uint32_t> places) {
  constexpr std::size_t kBatch = 32;
  std::uint64_t sum = 0;
  const std::size_t mask = tables.index.size() - 1;
  for (std::size_t base = 0; base < places.size(); base += kBatch) {
    const auto batch = places.subspan(base, std::min(kBatch, places.size() - base));
    for (const std::uint32_t place : batch) __builtin_prefetch(&tables.index[(place * 2u) & mask]);
    for (const std::uint32_t place : batch) __builtin_prefetch(&tables.pages[place]);
    for (const std::uint32_t place : batch) {
      sum += tables.index[(place * 2u) & mask].head.load(std::memory_order_relaxed);
      sum += tables.pages[place].word.load(std::memory_order_relaxed);
    }
  }
  return sum;
}

void measure(const FullIndex& index, double seconds, ProbeFigures& figures) {
  const ConstTables tables = index.tables();
  const IndexReader reader(tables, kIndexSeed);
  std::mt19937_64 random(2);
  std::array<PrefixHash, kPrefixPages> keys;
  std::array<std::uint32_t, kPrefixPages> places;
  const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e9);
  while (monotonic_ns() < end) {
    // The engine has just made its hashes: they are in its caches.
    const auto prefix = index.prefix(random() % kPrefixes);
    std::copy(prefix.begin(), prefix.end(), keys.begin());
    for (std::uint32_t& place : places) place = static_cast<std::uint32_t>(random() % kPages);
    const std::uint64_t start = monotonic_ns();
    const ProbeResult found = reader.probe(keys, kNamespace);
    const std::uint64_t middle = monotonic_ns();
    figures.sum += bare_accesses(tables, places);
    const std::uint64_t stop = monotonic_ns();
    figures.probe.record(middle - start);
    figures.bare.record(stop - middle);
    figures.misses += kPrefixPages - found.leading;
  }
}

// From here on the kernel kills the process at its first system call other than exit.
bool forbid_system_calls() {
  std::array<sock_filter, 4> program{{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 0, 1),
                                      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
                                      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)}};
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

double hash_ns_per_page(std::uint32_t page_tokens) {
  constexpr std::uint32_t kRounds = 2000;
  std::vector<std::uint32_t> tokens(std::size_t{page_tokens} * kPrefixPages);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint32_t>(i * 2654435761u);
  std::uint64_t used = 0;
  const std::uint64_t start = monotonic_ns();
  std::uint32_t rounds = 0;
  for (; rounds < kRounds && monotonic_ns() - start < 500'000'000; ++rounds) {
    tokens[0] = rounds;
    used += hash_chain(tokens, page_tokens).back().words[0] & 1;
  }
  const auto elapsed = static_cast<double>(monotonic_ns() - start);
  // `used` is never that large: it only keeps the hashes alive.
  return used > kRounds ? 0 : elapsed / rounds / kPrefixPages;
}

}  // namespace

Result<Json> run_probe(const MicroOptions& options) {
  auto index = FullIndex::create();
  if (!index) return index.error();
  auto figures = SharedObject<ProbeFigures>::create();
  if (!figures) return figures.error();
  auto reader = ChildProcess::fork_worker("bench-probe", [&]() -> int {
    measure(*index, 0.1, **figures);  // maps the pages in
    (*figures)->probe = LatencyHistogram{};
    (*figures)->bare = LatencyHistogram{};
    if (!forbid_system_calls()) return 2;
    measure(*index, options.seconds, **figures);
    ::syscall(SYS_exit, 0);
    return 3;
  });
  if (!reader) return reader.error();
  const auto status = reader->wait(static_cast<std::uint32_t>(options.seconds * 1000) + 60'000);
  if (!status) return status.error();
  if (*status != 0) {
    return Error{
        Status::internal,
        fmt::format("the probing process ended with status {}: expected 0 (159 = it made a system call)",
                    *status),
        0};
  }
  if ((*figures)->misses != 0) {
    return Error{Status::corrupt, fmt::format("{} pages of a full index were not found", (*figures)->misses),
                 0};
  }
  // Medians: on a busy machine a mean is that of the other processes' time slices.
  const double probe = (*figures)->probe.quantile(0.5) / kPrefixPages;
  const double bare = (*figures)->bare.quantile(0.5) / kPrefixPages;
  const double hash64 = hash_ns_per_page(64);
  const double hash512 = hash_ns_per_page(512);
  fmt::print(
      "probe of random {}-page prefixes, {} pages indexed: {:.1f} ns a page (at most 100), no system call\n"
      "  bare prefetched memory accesses: {:.1f} ns a page, ratio {:.2f}\n"
      "  hashing: {:.0f} ns a page of 64 tokens, {:.0f} ns a page of 512 tokens\n",
      kPrefixPages, kPages, probe, bare, probe / bare, hash64, hash512);
  return Json{{"machine", Machine::here().json()},
              {"indexed_pages", kPages},
              {"prefix_pages", kPrefixPages},
              {"probes", (*figures)->probe.count()},
              {"ns_per_page", probe},
              {"mean_ns_per_page", (*figures)->probe.mean() / kPrefixPages},
              {"prefix_us", latency_json((*figures)->probe)},
              {"bare_ns_per_page", bare},
              {"ratio", probe / bare},
              {"system_calls", 0},
              {"hash_ns_per_page_64_tokens", hash64},
              {"hash_ns_per_page_512_tokens", hash512}};
}

}  // namespace hicache::bench
