// Staging: how transfers are cut into chunks, and what passes between the daemon and a rank's packing thread.
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "daemon/transfer/staged_plan.hpp"
#include "daemon/transfer/staging_ring.hpp"
#include "hicache/client.hpp"
#include "libhicache/src/staging/staging_requests.hpp"
#include "tests/support/catch.hpp"

namespace hicache::daemon {
namespace {

NamespaceSpec spec_of(Attention attention, std::uint32_t layers, std::uint32_t head_dim,
                      std::uint32_t page_tokens) {
  NamespaceSpec s;
  s.attention = attention;
  s.page_tokens = page_tokens;
  s.layers = layers;
  s.heads_per_shard = 1;
  s.head_dim = head_dim;
  s.element_bytes = 2;
  return s;
}

// A staging block with both of its sides in this process.
struct Block {
  explicit Block(std::uint32_t blocks = 16) {
    fd = std::move(*create_sealed("staging-test", kStagingBlockBytes));
    mapping = std::move(*Mapping::map(fd.get(), kStagingBlockBytes, Mapping::Access::read_write, true));
    ring.emplace(std::move(*StagingRing::map(fd.get(), kMinStagingSlotBytes, blocks)));
  }
  StagingRequests rank() {
    return StagingRequests(shared(), {kLayers, kLayerBytes, kPages, kMinStagingSlotBytes});
  }
  StagingBlock& shared() { return *static_cast<StagingBlock*>(mapping.data()); }

  static constexpr std::uint32_t kLayers = 4;
  static constexpr std::uint64_t kLayerBytes = 1024;
  static constexpr std::uint32_t kPages = 100;
  UniqueFd fd;
  Mapping mapping;
  std::optional<StagingRing> ring;
};

StagingRequest request_of(const std::vector<PagePair>& pages) {
  return {1, 3, pages};
}

}  // namespace

TEST_CASE("staged chunks hold every layer of every page once, in layer order, and fit a slot") {
  constexpr std::uint64_t kSlot = 64 * kKiB;
  for (const Attention attention : {Attention::mha, Attention::mla}) {
    for (const std::uint32_t head_dim : {4u, 64u, 576u, 8192u}) {
      const NamespaceSpec spec = spec_of(attention, 13, head_dim, 1);
      REQUIRE(can_stage(spec, kSlot));
      for (const std::uint32_t group : {1u, 5u, 13u}) {
        for (const std::size_t pages : {std::size_t{1}, std::size_t{7}, std::size_t{3000}}) {
          CAPTURE(head_dim, group, pages);
          std::size_t next_page = 0;
          std::uint32_t layer = 0;
          std::uint64_t moved = 0;
          while (layer < spec.layers) {
            const std::uint32_t end = std::min(layer / group * group + group, spec.layers);
            const StagedChunk c = next_staged_chunk(spec, layer, end, next_page, pages, kSlot);
            REQUIRE(c.first_layer == layer);
            REQUIRE(c.end_layer > layer);
            REQUIRE(c.end_layer <= end);
            REQUIRE(c.first_page == next_page);
            REQUIRE(c.end_page > next_page);
            REQUIRE(c.end_page <= pages);
            const std::uint64_t bytes =
                (c.end_page - c.first_page) * staged_row_bytes(spec, c.end_layer - c.first_layer);
            REQUIRE(bytes <= kSlot);
            REQUIRE(c.end_page - c.first_page <= kStagingChunkPages);
            moved += bytes;
            next_page = c.end_page;
            if (next_page == pages) {
              next_page = 0;
              layer = c.end_layer;
            }
          }
          CHECK(moved == pages * spec.shard_bytes());
        }
      }
    }
  }
  CHECK_FALSE(can_stage(spec_of(Attention::mha, 1, 16384 + 4, 1), kSlot));
}

TEST_CASE("chunks hold whole pages where a page fits a slot, which makes each one contiguous copy") {
  const std::uint64_t slot = AttachOptions().staging_bytes / kStagingSlots;
  for (const std::uint32_t tokens : {1u, 16u, 64u}) {
    for (const NamespaceSpec& spec :
         {spec_of(Attention::mha, 32, 1024, tokens), spec_of(Attention::mha, 80, 128, tokens),
          spec_of(Attention::mla, 61, 576, tokens)}) {
      CAPTURE(tokens, spec.layers);
      const std::uint64_t row = spec.shard_bytes();
      std::vector<PagePair> pages(kGiB / row);
      for (std::size_t i = 0; i < pages.size(); ++i)
        pages[i] = {DevicePage{static_cast<std::uint32_t>(pages.size() - i)}, PoolOffset{i * row}};
      CopyPlan plan;
      for (std::size_t page = 0; page < pages.size();) {
        const StagedChunk c = next_staged_chunk(spec, 0, spec.layers, page, pages.size(), slot);
        REQUIRE(c.end_layer == spec.layers);
        const std::size_t count = c.end_page - c.first_page;
        // Large enough that its start does not count (docs/performance.md), the last one aside.
        if (c.end_page < pages.size() && count < kStagingChunkPages) CHECK(count * row > slot - row);
        plan_staged_copies(spec, c, std::span(pages).subspan(page, count), 0, 0, plan);
        REQUIRE(plan.runs.size() == 1);
        CHECK(plan.runs[0].rows == 1);
        page = c.end_page;
      }
    }
  }
}

TEST_CASE("a page that no slot holds is cut into the fewest chunks of equal size") {
  const NamespaceSpec spec = spec_of(Attention::mha, 80, 128, 64);  // 2.5 MiB
  for (const auto& [slot, layers] :
       {std::pair{2 * kMiB, 40u}, {kMiB, 27u}, {64 * kKiB, 2u}, {32 * kKiB, 1u}}) {
    CAPTURE(slot);
    std::uint32_t layer = 0;
    while (layer < spec.layers) {
      const StagedChunk c = next_staged_chunk(spec, layer, spec.layers, 0, 5, slot);
      CHECK(c.end_page == 1);
      CHECK(c.end_layer - layer <= layers);
      CHECK(c.end_layer - layer + 1 >= layers);
      layer = c.end_layer;
    }
  }
}

TEST_CASE("staged copies put every byte of the pages where the rank's kernel looks for it") {
  for (const Attention attention : {Attention::mha, Attention::mla}) {
    const NamespaceSpec spec = spec_of(attention, 6, 4, 1);
    const std::uint64_t shard = spec.shard_bytes();
    // Neighbours, a gap, and a page across a border of the pool.
    const std::uint64_t border = 20 * shard + shard / 2;
    const std::vector<PagePair> pages = {{DevicePage{9}, PoolOffset{0}},
                                         {DevicePage{2}, PoolOffset{shard}},
                                         {DevicePage{5}, PoolOffset{2 * shard}},
                                         {DevicePage{4}, PoolOffset{7 * shard}},
                                         {DevicePage{1}, PoolOffset{20 * shard}}};
    std::vector<std::uint8_t> pool(32 * shard);
    for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
    for (const auto& layers : {std::pair{0u, 6u}, std::pair{0u, 2u}, std::pair{2u, 5u}, std::pair{5u, 6u}}) {
      const StagedChunk chunk{layers.first, layers.second, 0, pages.size()};
      const std::uint32_t count = layers.second - layers.first;
      const std::uint64_t row = staged_row_bytes(spec, count);
      constexpr std::uint64_t kSlotOffset = 4096;
      CopyPlan plan;
      plan_staged_copies(spec, chunk, pages, kSlotOffset, border, plan);
      CHECK(plan.bytes == row * pages.size());
      std::vector<std::uint8_t> slot(kSlotOffset + row * pages.size(), 0);
      for (const CopyRun& run : plan.runs) {
        CHECK(run.host_offset / border ==
              (run.host_offset + (run.rows - 1) * run.host_pitch + run.width - 1) / border);
        for (std::uint64_t r = 0; r < run.rows; ++r)
          std::memcpy(&slot.at(run.device_offset + r * run.device_pitch),
                      &pool.at(run.host_offset + r * run.host_pitch), run.width);
      }
      std::size_t wrong = 0;
      for (std::size_t page = 0; page < pages.size(); ++page) {
        for (std::uint32_t kind = 0; kind < spec.kinds(); ++kind) {
          for (std::uint32_t layer = 0; layer < count; ++layer) {
            const auto of = attention == Attention::mla ? TensorKind::latent : static_cast<TensorKind>(kind);
            const std::uint64_t host =
                pages[page].host.value + shard_piece_offset(spec, layers.first + layer, of);
            const std::uint64_t packed =
                kSlotOffset + page * row + (kind * count + layer) * spec.piece_bytes();
            wrong += std::memcmp(&slot[packed], &pool[host], spec.piece_bytes()) != 0 ? 1 : 0;
          }
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("whole pages that follow each other in the pool are one copy a chunk") {
  const NamespaceSpec spec = spec_of(Attention::mha, 32, 128, 1);
  std::vector<PagePair> pages;
  for (std::uint32_t i = 0; i < 20; ++i)
    pages.push_back({DevicePage{37 * i % 20}, PoolOffset{i * spec.shard_bytes()}});
  CopyPlan plan;
  plan_staged_copies(spec, {0, 32, 0, 20}, pages, 0, 0, plan);
  REQUIRE(plan.runs.size() == 1);
  CHECK(plan.runs[0].rows == 1);
  plan_staged_copies(spec, {4, 8, 0, 20}, pages, 0, 0, plan);
  CHECK(plan.runs.size() == 2);  // K and V of four layers
}

TEST_CASE("a rank takes requests in the order in which they were posted, and its answers reach their slots") {
  Block block(7);
  StagingRequests rank = block.rank();
  StagingWork work;
  CHECK_FALSE((rank.take(false, work) || rank.take(true, work) || rank.posted()));
  const std::vector<PagePair> pages = {{DevicePage{99}, PoolOffset{0}}, {DevicePage{3}, PoolOffset{4096}}};
  const auto load = block.ring->take(Direction::load);
  const auto write = block.ring->take(Direction::write);
  REQUIRE((load && write && *load != *write));
  const auto later = block.ring->take(Direction::load);
  block.ring->post(*later, request_of(pages));  // posted first, in a later slot
  block.ring->post(*load, request_of(pages));
  block.ring->post(*write, request_of(pages));
  CHECK(rank.posted());
  REQUIRE(rank.take(true, work));
  CHECK(work.slot == *later);
  REQUIRE(rank.take(true, work));
  CHECK(work.slot == *load);
  CHECK(work.first_layer == 1);
  CHECK(work.end_layer == 3);
  CHECK(work.blocks == 7);
  REQUIRE(work.pages == 2);
  CHECK(work.page[0] == 99);
  CHECK(work.page[1] == 3);
  CHECK_FALSE(rank.take(true, work));  // the write is not a load
  CHECK(block.ring->answer(*load) == StagingRing::Answer::waiting);
  CHECK_FALSE(rank.ended(*load, work.number));
  rank.done_word(work.slot).store(static_cast<std::uint32_t>(work.number), std::memory_order_release);
  CHECK(rank.ended(*load, work.number));
  CHECK(rank.ended(*load, work.number - 1));  // also when the slot has gone on meanwhile
  CHECK(block.ring->answer(*load) == StagingRing::Answer::done);
  CHECK(block.ring->answer(*write) == StagingRing::Answer::waiting);
  REQUIRE(rank.take(false, work));
  CHECK(work.slot == *write);
  rank.refuse(work);
  CHECK(block.ring->answer(*write) == StagingRing::Answer::refused);
  CHECK_FALSE(rank.take(false, work));
}

TEST_CASE("a rank that sleeps is woken for a request, and before one that is on its way") {
  Block block;
  StagingRequests rank = block.rank();
  CHECK_FALSE(rank.park(1'000'000));  // nobody wakes it
  std::atomic<int> woken{0};
  std::thread sleeper([&] { woken = rank.park(60'000'000'000) ? 1 : -1; });
  while (woken == 0) block.ring->rouse();
  sleeper.join();
  CHECK(woken == 1);
  const std::uint32_t slot = *block.ring->take(Direction::write);
  const std::vector<PagePair> pages{{DevicePage{3}, PoolOffset{0}}};
  block.ring->post(slot, request_of(pages));
  CHECK(rank.park(60'000'000'000));  // posted before it slept
}

TEST_CASE("slots are bounded for each direction and come back") {
  Block block;
  std::set<std::uint32_t> slots;
  for (std::uint32_t i = 0; i < kStagingSlotsPerDirection; ++i)
    slots.insert(*block.ring->take(Direction::write));
  CHECK(slots.size() == kStagingSlotsPerDirection);
  CHECK_FALSE(block.ring->take(Direction::write));
  CHECK(block.ring->take(Direction::load));  // not held up by writes
  block.ring->give_back(*slots.begin());
  CHECK(block.ring->take(Direction::write) == *slots.begin());
}

TEST_CASE("a request that was withdrawn is never run, and one that a rank has taken can't be withdrawn") {
  Block block;
  StagingRequests rank = block.rank();
  StagingWork work;
  const std::vector<PagePair> pages = {{DevicePage{1}, PoolOffset{0}}};
  const std::uint32_t slot = *block.ring->take(Direction::write);
  block.ring->post(slot, request_of(pages));
  CHECK(block.ring->withdraw(slot));
  CHECK_FALSE(rank.take(false, work));
  block.ring->post(slot, request_of(pages));
  REQUIRE(rank.take(false, work));
  CHECK_FALSE(block.ring->withdraw(slot));
}

TEST_CASE("a rank refuses requests that name pages, layers, sizes or blocks that are not there") {
  Block block;
  StagingRequests rank = block.rank();
  StagingWork work;
  const std::vector<PagePair> good = {{DevicePage{1}, PoolOffset{0}}};
  const std::vector<PagePair> outside = {{DevicePage{1}, PoolOffset{0}},
                                         {DevicePage{Block::kPages}, PoolOffset{0}}};
  const std::vector<PagePair> many(kMinStagingSlotBytes / Block::kLayerBytes / 2 + 1, good[0]);
  const std::uint32_t slot = *block.ring->take(Direction::write);
  const auto refused = [&](const StagingRequest& request) {
    block.ring->post(slot, request);
    return !rank.take(false, work) && block.ring->answer(slot) == StagingRing::Answer::refused;
  };
  CHECK(refused(request_of(outside)));
  CHECK(refused(request_of(many)));  // two layers of so many pages are more than a slot
  CHECK(refused({0, Block::kLayers + 1, good}));
  CHECK(refused({2, 2, good}));
  CHECK(refused({0, 1, {}}));
  // What a damaged daemon could leave there.
  block.ring->post(slot, request_of(good));
  block.shared().slots[slot].pages.store(0xffffffffu);
  CHECK_FALSE(rank.take(false, work));
  block.ring->post(slot, request_of(good));
  block.shared().slots[slot].blocks.store(0);
  CHECK_FALSE(rank.take(false, work));
  block.ring->post(slot, request_of(good));
  CHECK(rank.take(false, work));
}

TEST_CASE("a daemon that gives up and a rank that takes never both have a request, and no kick is lost") {
  Block block;
  StagingRequests rank = block.rank();
  constexpr std::uint64_t kRounds = 20'000;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> ran{0};
  std::thread thread([&] {
    StagingWork work;
    while (!stop.load()) {
      if (!rank.take(false, work) && !rank.take(true, work)) {
        rank.park(1'000'000'000);  // much longer than the test may take for a round
        continue;
      }
      ran.fetch_add(1);
      rank.done_word(work.slot).store(static_cast<std::uint32_t>(work.number), std::memory_order_release);
    }
  });
  const std::vector<PagePair> pages = {{DevicePage{1}, PoolOffset{0}}};
  std::uint64_t answered = 0;
  for (std::uint64_t i = 0; i < kRounds; ++i) {
    const std::uint32_t slot = *block.ring->take(i % 2 == 0 ? Direction::write : Direction::load);
    block.ring->post(slot, request_of(pages));
    if (i % 3 == 0 && block.ring->withdraw(slot)) {
      block.ring->give_back(slot);
      continue;
    }
    while (block.ring->answer(slot) == StagingRing::Answer::waiting) std::this_thread::yield();
    ++answered;
    block.ring->give_back(slot);
  }
  stop.store(true);
  rank.wake();
  thread.join();
  CHECK(ran.load() == answered);
}

TEST_CASE("a staging block or slot size that can't be is refused with what was found") {
  auto small = create_sealed("staging-test", 4096);
  REQUIRE(small);
  const auto refused = StagingRing::map(small->get(), kMinStagingSlotBytes, 16);
  REQUIRE(refused.status() == Status::invalid_argument);
  CHECK(refused.error().message.find("4096") != std::string::npos);
  const Block block;
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{4096}, kMinStagingSlotBytes + 1,
                                    2 * kMaxStagingSlotBytes, ~std::uint64_t{0}}) {
    CHECK(StagingRing::map(block.fd.get(), bytes, 16).status() == Status::invalid_argument);
  }
}

}  // namespace hicache::daemon
